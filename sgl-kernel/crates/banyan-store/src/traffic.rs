// SPDX-License-Identifier: Apache-2.0
//! Words that the processes of a node share about one store: who reads, who is writing which page, that something was published.
//!
//! Invariants
//! * A row belongs to whoever holds the file lock on its byte; the kernel lets go of it with the process. What a row says counts only
//!   while it is locked, so a killed reader stops nobody.
//! * The words are hints about time and double work. None of them decides whether bytes are right.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use banyan_shm::memory::{Access, Mapping};
use std::sync::atomic::{AtomicU64, Ordering};

use banyan_shm::frame::Key;
use twox_hash::XxHash3_64;

use crate::directory::private_file;
use crate::error::{Doing, Result, StoreError, invalid};
use crate::format::Namespace;

const MAGIC: u64 = u64::from_le_bytes(*b"BNYNTRF1");
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
    file: File,
    mapping: Mapping,
    row: usize,
}

impl Traffic {
    pub fn open(directory: &Path) -> Result<Self> {
        let path = directory.join("traffic");
        let file = private_file(&path).doing("open", &path)?;
        if file.metadata().doing("size", &path)?.len() < FILE_BYTES as u64 {
            file.set_len(FILE_BYTES as u64).doing("extend", &path)?;
        }
        let mapping = Mapping::of(&file, FILE_BYTES, Access::ReadWrite)
            .map_err(|error| StoreError::Invalid(format!("{}: {error}", path.display())))?;
        let Some(row) = (0..NUM_ROWS).find(|row| lock_row(&file, *row).is_ok()) else {
            return invalid!(
                "{NUM_ROWS} processes use the store at {} already, no more can",
                directory.display()
            );
        };
        let traffic = Self { file, mapping, row };
        traffic.words(0, 1)[0].store(MAGIC, Ordering::Relaxed);
        traffic.set_reading(0);
        traffic.forget_claims();
        Ok(traffic)
    }

    fn words(&self, at: usize, count: usize) -> &[AtomicU64] {
        self.mapping.words(at, count)
    }

    fn reading(&self, row: usize) -> &AtomicU64 {
        &self.words(ROWS_AT + row * ROW_WORDS * 8, 1)[0]
    }

    /// How many reads this process has in flight.
    pub fn set_reading(&self, count: usize) {
        self.reading(self.row).store(count as u64, Ordering::SeqCst);
    }

    /// Reads that other living processes have in flight.
    pub fn reads_elsewhere(&self) -> usize {
        let others = (0..NUM_ROWS).filter(|row| *row != self.row);
        let reads = others.map(|row| match self.reading(row).load(Ordering::SeqCst) {
            0 => 0,
            count if self.is_live(row) => count as usize,
            _ => 0,
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
        let mut lock = row_lock(row);
        // SAFETY: a system call on our own descriptor that fills `lock`.
        let rc = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) };
        rc == 0 && lock.l_type != libc::F_UNLCK as libc::c_short
    }
}

fn row_lock(row: usize) -> libc::flock {
    // SAFETY: all zero is a valid flock.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = row as libc::off_t;
    lock.l_len = 1;
    lock
}

/// Held until the descriptor is closed, also against other descriptors of this process.
fn lock_row(file: &File, row: usize) -> io::Result<()> {
    let lock = row_lock(row);
    // SAFETY: a system call on our own descriptor.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    #[test]
    fn reads_when_their_process_is_gone_then_they_stop_nobody() {
        let scratch = Scratch::new();
        let ours = Traffic::open(&scratch.path("")).unwrap();
        let other = Traffic::open(&scratch.path("")).unwrap();
        other.set_reading(3);
        assert_eq!((ours.reads_elsewhere(), other.reads_elsewhere()), (3, 0));
        drop(other);
        assert_eq!(ours.reads_elsewhere(), 0);
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
