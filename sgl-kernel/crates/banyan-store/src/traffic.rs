// SPDX-License-Identifier: Apache-2.0
//! Words that the processes of a machine share about one store: who reads, who is writing which page, that something was published.
//!
//! Invariants
//! * They lie on tmpfs, under a name that the store's first directory gives: no look at them waits for a drive, and no drive that is
//!   full takes their place away. Processes that do not see the same /dev/shm do not see each other's words.
//! * Whoever leaves last takes the file away. What killed processes have left, whoever opens any store.
//! * A row belongs to whoever holds the file lock on its byte; the kernel lets go of it with the process. What a row says counts only
//!   while it is locked and was said a moment ago, so neither a killed reader nor a stopped one stops anybody.
//! * The words are hints about time and double work. None of them decides whether bytes are right.

use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use banyan_shm::frame::Key;
use banyan_shm::kept::user;
use banyan_shm::memory::SharedMemory;
use twox_hash::XxHash3_64;

use crate::error::{Doing, Result, StoreError, invalid};
use crate::format::Namespace;
use crate::locks::{Lock, Mode, lock_within, try_lock};
use crate::owned::Way;

const FOLDER: &str = "/dev/shm";
const PREFIX: &str = "banyan-traffic-";
const MAGIC: u64 = u64::from_le_bytes(*b"BNYNTRF2");
/// Who comes and who leaves has the file's lock for microseconds.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
/// Most processes that may use a store on one node at once.
const NUM_ROWS: usize = 64;
const NUM_CLAIMS: usize = 1 << 16;
const ROW_WORDS: usize = 8;
const COMMITS_AT: usize = 64;
const CLEARS_AT: usize = 128;
const ROWS_AT: usize = 4096;
const CLAIMS_AT: usize = ROWS_AT + NUM_ROWS * ROW_WORDS * 8;
const FILE_BYTES: usize = CLAIMS_AT + NUM_CLAIMS * 8;
const OWNER_MASK: u64 = 0xff;

#[derive(Debug, PartialEq, Eq)]
pub enum Claim {
    /// Nobody else writes this page.
    Ours,
    Elsewhere,
}

pub struct Traffic {
    path: PathBuf,
    memory: SharedMemory,
    row: usize,
}

impl Traffic {
    /// As `open`; nothing, and a line, where another user has the name.
    pub fn open_unless_taken(directory: &Path) -> Result<Option<Self>> {
        match Self::open(directory) {
            Err(error) if is_anothers(&path_of(directory)?) => {
                banyan_shm::say!(
                    "banyan: {error}: remove it. Until the next start the store waits for no other process's reads, and learns late of \
                     what others store"
                );
                Ok(None)
            }
            opened => opened.map(Some),
        }
    }

    /// Of the store whose first directory this is.
    pub fn open(directory: &Path) -> Result<Self> {
        let path = path_of(directory)?;
        remove_left();
        let _coming = lock_named(&path)?;
        let memory = SharedMemory::share(&path, FILE_BYTES).map_err(|error| {
            StoreError::Invalid(format!("{error}: a store needs a tmpfs at {FOLDER}"))
        })?;
        let Some(row) =
            (0..NUM_ROWS).find(|row| set_lock(memory.fd(), *row, libc::F_WRLCK).is_ok())
        else {
            return invalid!(
                "{NUM_ROWS} processes use the store at {} already, no more can",
                directory.display()
            );
        };
        let traffic = Self { path, memory, row };
        traffic.words(0, 1)[0].store(MAGIC, Ordering::Relaxed);
        traffic.stop();
        Ok(traffic)
    }

    /// This process reads and writes nothing now, whatever its row has said.
    pub fn stop(&self) {
        self.set_reading(0);
        self.forget_claims();
    }

    fn words(&self, at: usize, count: usize) -> &[AtomicU64] {
        self.memory.mapping().words(at, count)
    }

    /// How many reads, and when that was said.
    fn reading(&self, row: usize) -> (&AtomicU64, &AtomicU64) {
        let words = self.words(ROWS_AT + row * ROW_WORDS * 8, 2);
        (&words[0], &words[1])
    }

    /// How many reads this process has in flight. It is believed for a while: say it again.
    pub fn set_reading(&self, count: usize) {
        let (reads, said_ms) = self.reading(self.row);
        said_ms.store(machine_ms(), Ordering::SeqCst);
        reads.store(count as u64, Ordering::SeqCst);
    }

    /// Reads that other living processes have in flight, as they have said within the time of `belief`.
    pub fn reads_elsewhere(&self, belief: Duration) -> usize {
        let oldest_ms = machine_ms().saturating_sub(belief.as_millis() as u64);
        let others = (0..NUM_ROWS).filter(|row| *row != self.row);
        let reads = others.map(|row| {
            let (reads, said_ms) = self.reading(row);
            match reads.load(Ordering::SeqCst) {
                0 => 0,
                _ if said_ms.load(Ordering::SeqCst) < oldest_ms || !self.is_live(row) => 0,
                count => count as usize,
            }
        });
        reads.sum()
    }

    /// How often anybody has published or withdrawn something.
    pub fn num_commits(&self) -> u64 {
        self.words(COMMITS_AT, 1)[0].load(Ordering::SeqCst)
    }

    pub fn count_commit(&self) {
        self.words(COMMITS_AT, 1)[0].fetch_add(1, Ordering::SeqCst);
    }

    /// How often anybody has withdrawn all that it had published.
    pub fn num_clears(&self) -> u64 {
        self.words(CLEARS_AT, 1)[0].load(Ordering::SeqCst)
    }

    pub fn count_clear(&self) {
        self.words(CLEARS_AT, 1)[0].fetch_add(1, Ordering::SeqCst);
    }

    /// Announces that this process is about to write a page. Two pages of one word: the later goes unannounced.
    pub fn claim(&self, namespace: &Namespace, key: &Key) -> Claim {
        let (word, tag) = self.claim_of(namespace, key);
        let ours = tag | (self.row as u64 + 1);
        let mut seen = word.load(Ordering::SeqCst);
        loop {
            let owner = (seen & OWNER_MASK) as usize;
            if seen == ours {
                return Claim::Ours;
            }
            if owner > 0 && owner - 1 != self.row && self.is_live(owner - 1) {
                let same = seen & !OWNER_MASK == tag;
                return if same { Claim::Elsewhere } else { Claim::Ours };
            }
            if owner > 0 && owner - 1 == self.row {
                return Claim::Ours;
            }
            match word.compare_exchange(seen, ours, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Claim::Ours,
                Err(now) => seen = now,
            }
        }
    }

    pub fn release(&self, namespace: &Namespace, key: &Key) {
        let (word, tag) = self.claim_of(namespace, key);
        let ours = tag | (self.row as u64 + 1);
        // Not ours: it was never announced.
        let _ = word.compare_exchange(ours, 0, Ordering::SeqCst, Ordering::SeqCst);
    }

    fn claim_of(&self, namespace: &Namespace, key: &Key) -> (&AtomicU64, u64) {
        let mut name = [0; 64];
        for (place, word) in name.chunks_exact_mut(8).zip(namespace.iter().chain(key)) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let hash = XxHash3_64::oneshot(&name);
        let index = (hash >> 48) as usize % NUM_CLAIMS;
        (
            &self.words(CLAIMS_AT, NUM_CLAIMS)[index],
            hash & !OWNER_MASK,
        )
    }

    /// The row's last owner may have died with claims.
    fn forget_claims(&self) {
        for word in self.words(CLAIMS_AT, NUM_CLAIMS) {
            let seen = word.load(Ordering::Relaxed);
            if seen & OWNER_MASK == self.row as u64 + 1 {
                let _ = word.compare_exchange(seen, 0, Ordering::SeqCst, Ordering::SeqCst);
            }
        }
    }

    fn is_live(&self, row: usize) -> bool {
        is_held(self.memory.fd(), row..row + 1)
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        // Should it fail, the row is let go of with the descriptor, and the next to come removes the file.
        drop(set_lock(self.memory.fd(), self.row, libc::F_UNLCK));
        remove_unless_used(&self.path);
    }
}

fn remove_left() {
    let Ok(entries) = fs::read_dir(FOLDER) else {
        return;
    };
    for entry in entries.flatten() {
        if entry
            .file_name()
            .as_encoded_bytes()
            .starts_with(PREFIX.as_bytes())
        {
            remove_unless_used(&entry.path());
        }
    }
}

/// Who comes has the file's lock until it has a row. If it is another user's, or somebody is coming or leaving, it stays.
fn remove_unless_used(path: &Path) {
    if let Ok(Some(lock)) = try_lock(path, Way::Write, Mode::Alone)
        && lock.is_of(path)
        && !is_held(lock.fd(), 0..NUM_ROWS)
    {
        drop(fs::remove_file(path));
    }
}

fn is_anothers(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.uid() != user())
}

/// By device and number: a copy of a store is another one, and the same one mounted twice is not.
fn path_of(directory: &Path) -> Result<PathBuf> {
    let found = fs::metadata(directory).doing("look at", directory)?;
    let name = [found.dev().to_le_bytes(), found.ino().to_le_bytes()].concat();
    let (user, number) = (user(), XxHash3_64::oneshot(&name));
    Ok(Path::new(FOLDER).join(format!("{PREFIX}2-{user}-{number:016x}")))
}

/// Of a clock that all processes of the machine share.
fn machine_ms() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a system call that fills `now`; this clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// The lock of the file that has this name, and not of one that has just lost it.
fn lock_named(path: &Path) -> Result<Lock> {
    loop {
        let lock = lock_within(path, Way::Create, Mode::Alone, LOCK_PATIENCE)?;
        if lock.is_of(path) {
            return Ok(lock);
        }
    }
}

fn lock_of(rows: Range<usize>, kind: libc::c_int) -> libc::flock {
    // SAFETY: all zero is a valid flock.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = rows.start as libc::off_t;
    lock.l_len = rows.len() as libc::off_t;
    lock
}

/// Whether any of these rows is locked, other than through this descriptor, or that cannot be told.
fn is_held(file: RawFd, rows: Range<usize>) -> bool {
    let mut lock = lock_of(rows, libc::F_WRLCK);
    // SAFETY: a system call on our own descriptor that fills `lock`.
    let rc = unsafe { libc::fcntl(file, libc::F_OFD_GETLK, &mut lock) };
    rc != 0 || lock.l_type != libc::F_UNLCK as libc::c_short
}

/// Held until it is unlocked or the descriptor is closed, also against other descriptors of this process.
fn set_lock(file: RawFd, row: usize, kind: libc::c_int) -> io::Result<()> {
    let lock = lock_of(row..row + 1, kind);
    // SAFETY: a system call on our own descriptor.
    match unsafe { libc::fcntl(file, libc::F_OFD_SETLK, &lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    #[test]
    fn words_when_a_store_has_users_then_on_tmpfs_backed_by_memory_and_gone_with_the_last() {
        let scratch = Scratch::new();
        let ours = Traffic::open(&scratch.path("")).unwrap();
        let other = Traffic::open(&scratch.path("")).unwrap();
        let path = ours.path.clone();
        assert!(path.starts_with(FOLDER) && path == other.path);
        // A page without memory behind it would be a SIGBUS when the file system is full.
        let taken = fs::metadata(&path).unwrap().blocks() * 512;
        assert!(taken >= FILE_BYTES as u64, "{taken}");
        assert_eq!(fs::read_dir(scratch.path("")).unwrap().count(), 0);
        drop(ours);
        assert!(path.exists());
        drop(other);
        assert!(!path.exists());
    }

    #[test]
    fn words_when_somebody_else_made_the_file_then_refused_with_its_name() {
        let scratch = Scratch::new();
        let path = path_of(&scratch.path("")).unwrap();
        let making = try_lock(&path, Way::Create, Mode::Alone).unwrap();
        let for_all = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        fs::set_permissions(&path, for_all).unwrap();
        drop(making);
        let refused = Traffic::open(&scratch.path("")).err().unwrap().to_string();
        fs::remove_file(&path).unwrap();
        assert!(
            refused.contains("banyan-traffic") && refused.contains("others may write"),
            "{refused}"
        );
    }

    #[test]
    fn words_when_another_user_has_their_name_then_the_store_goes_on_without_them() {
        let scratch = Scratch::new();
        let path = path_of(&scratch.path("")).unwrap();
        fs::write(&path, b"").unwrap();
        let is_given = std::os::unix::fs::chown(&path, Some(65534), None).is_ok();
        let opened = Traffic::open_unless_taken(&scratch.path("")).unwrap();
        assert_eq!(opened.is_none(), is_given, "not tried but as root");
        assert!(path.exists(), "it is not ours to remove");
        drop(opened);
        drop(fs::remove_file(&path));
    }

    #[test]
    fn words_when_killed_processes_have_left_them_then_gone_when_any_store_is_opened() {
        let [ours, left, used] = [(); 3].map(|()| Scratch::new());
        let _user = Traffic::open(&used.path("")).unwrap();
        let [left, used] = [left, used].map(|scratch| path_of(&scratch.path("")).unwrap());
        fs::write(&left, b"").unwrap();
        Traffic::open(&ours.path("")).unwrap();
        assert!(!left.exists() && used.exists());
    }

    #[test]
    fn words_when_as_many_as_may_use_a_store_then_the_next_is_refused_until_one_has_left() {
        let scratch = Scratch::new();
        let open = || Traffic::open(&scratch.path(""));
        let mut users: Vec<_> = (0..64).map(|_| open().unwrap()).collect();
        let refused = open().err().unwrap().to_string();
        assert!(refused.contains("64 processes"), "{refused}");
        users.pop();
        open().unwrap();
    }

    #[test]
    fn reads_when_their_process_is_gone_then_they_stop_nobody() {
        let scratch = Scratch::new();
        let ours = Traffic::open(&scratch.path("")).unwrap();
        let other = Traffic::open(&scratch.path("")).unwrap();
        other.set_reading(3);
        let belief = Duration::from_secs(60);
        assert_eq!(ours.reads_elsewhere(belief), 3);
        assert_eq!(other.reads_elsewhere(belief), 0);
        drop(other);
        assert_eq!(ours.reads_elsewhere(belief), 0);
    }

    #[test]
    fn claim_when_another_lives_then_elsewhere_and_when_it_died_then_ours() {
        let scratch = Scratch::new();
        let ours = Traffic::open(&scratch.path("")).unwrap();
        let other = Traffic::open(&scratch.path("")).unwrap();
        let (namespace, key) = ([1; 4], [2; 4]);
        assert_eq!(other.claim(&namespace, &key), Claim::Ours);
        assert_eq!(other.claim(&namespace, &key), Claim::Ours);
        assert_eq!(ours.claim(&namespace, &key), Claim::Elsewhere);
        assert_eq!(ours.claim(&[9; 4], &key), Claim::Ours);
        other.release(&namespace, &key);
        assert_eq!(ours.claim(&namespace, &key), Claim::Ours);
        assert_eq!(other.claim(&namespace, &key), Claim::Elsewhere);
        drop(ours);
        assert_eq!(other.claim(&namespace, &key), Claim::Ours);
    }

    #[test]
    fn row_when_taken_over_then_claims_of_the_dead_are_gone() {
        let scratch = Scratch::new();
        let first = Traffic::open(&scratch.path("")).unwrap();
        first.claim(&[1; 4], &[2; 4]);
        drop(first);
        let _heir = Traffic::open(&scratch.path("")).unwrap();
        let other = Traffic::open(&scratch.path("")).unwrap();
        assert_eq!(other.claim(&[1; 4], &[2; 4]), Claim::Ours);
    }
}
