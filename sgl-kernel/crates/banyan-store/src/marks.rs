// SPDX-License-Identifier: Apache-2.0
//! Who writes a shelf. Other machines may have mounted its folder, also one that lies on a drive of this machine, which exports it: a
//! lock may reach no further than one of them.
//!
//! Invariants
//! * A shelf's writer is who has made its mark of the greatest number. No number is made twice: of all who want a shelf at one moment
//!   one gets it, whether their locks meet or not.
//! * A shelf whose lock can be had is free for those whose locks meet its writer's; for others when all its marks have been silent for
//!   `SILENCE`. A writer that ends leaves a mark that is.
//! * Times are compared with times of the same file server: a mark's with that of the store's lock, which is touched for it.
//! * A writer that could give no sign for `PATIENCE` begins no write, and one whose mark is gone writes no more. What its thread was
//!   about to do all the same is of a lesser number than what its heir does.

use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use crate::directory::{fresh_id, gone_or_away};
use crate::error::{Doing, Result, invalid, is_no_space};
use crate::files::file_system;
use crate::locks::Lock;
use crate::owned::{self, Way};

const NAME: &str = "writer-";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
pub const SIGN_EVERY: Duration = Duration::from_secs(20);
/// Less than `SILENCE` by what a write may take that has begun.
const PATIENCE: Duration = Duration::from_secs(120);
/// Many signs, and what network file systems may show of an older time.
pub const SILENCE: Duration = Duration::from_secs(300);
/// The end of the line of who has the folder on a file system of its own machine.
const LOCAL: &str = " local\n";
/// More manifests than a writer makes before it hears that it is none.
const SKIPPED_EPOCHS: u64 = 1 << 20;

/// File systems of one machine, as statfs(2) knows them: ext, xfs, btrfs, f2fs, zfs, bcachefs, jfs, overlay, tmpfs, ramfs. Any other one
/// may be mounted elsewhere, too.
const OF_ONE_MACHINE: [i64; 10] = [
    0xEF53,
    0x5846_5342,
    0x9123_683E,
    0xF2F5_2010,
    0x2FC1_2FC1,
    0xCA45_1A4E,
    0x3153_464A,
    0x794C_7630,
    0x0102_1994,
    0x8584_58F6,
];

/// How far a lock is sure to reach: one mount on one running kernel. Only one machine has a folder on a file system of its own, and
/// there it reaches all who have it so.
#[derive(Clone, Debug)]
pub struct Reach {
    /// What a mark says.
    line: String,
    /// The device number of the mount.
    mount: u64,
}

impl Reach {
    pub fn of(directory: &Path) -> Result<Self> {
        let kind = file_system(directory).doing("look at the file system of", directory)?;
        // Without one nobody's locks are taken to meet ours.
        let boot = fs::read_to_string(BOOT_ID).unwrap_or_else(|_| format!("{:x}", fresh_id()));
        // Of one server's folder each mount of a machine has a number of its own.
        let mount = fs::metadata(directory).doing("look at", directory)?.dev();
        let reach = Self::named(boot.trim(), mount);
        Ok(if OF_ONE_MACHINE.contains(&kind) {
            reach.local()
        } else {
            reach
        })
    }

    pub fn named(boot: &str, mount: u64) -> Self {
        Self {
            line: format!("{boot} {mount:x}\n"),
            mount,
        }
    }

    /// On a file system of its own machine.
    pub fn local(&self) -> Self {
        Self {
            line: self.line.replace('\n', LOCAL),
            ..*self
        }
    }

    pub fn is_local(&self) -> bool {
        self.line.ends_with(LOCAL)
    }

    /// Whether a shelf whose lock can be had has no writer. `now` is the time of its file server.
    pub fn is_free(&self, shelf: &Path, now: SystemTime) -> Result<bool> {
        let mut marks = owned::numbered(shelf, NAME)?;
        if marks.is_empty() {
            // Of a release that made no marks, or one that is just being made.
            marks.push((0, shelf.join("lock")));
        }
        for (_, mark) in marks {
            if !self.is_silent(&mark, now)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn is_silent(&self, mark: &Path, now: SystemTime) -> Result<bool> {
        // Opened, so that a network file system asks its server.
        let file = match owned::open(mark, Way::Read) {
            // Somebody takes the shelf at this moment.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            opened => opened.doing("open", mark)?,
        };
        let signed = file.metadata().and_then(|found| found.modified());
        let since = now.duration_since(signed.doing("look at", mark)?);
        Ok(since.is_ok_and(|since| since >= SILENCE) || self.meets(file))
    }

    /// Whether the locks of whoever has made a mark meet ours. Who had the folder on our own drive has them still, or is gone with what
    /// ran on this machine. Anywhere else a mount that was made anew knows nothing of the locks that were taken on the one before.
    fn meets(&self, mark: File) -> bool {
        let is_same_mount = mark.metadata().is_ok_and(|found| found.dev() == self.mount);
        let mut writer = String::new();
        let is_read = mark.take(1 << 10).read_to_string(&mut writer).is_ok();
        let is_ours = if self.is_local() {
            writer.ends_with(LOCAL)
        } else {
            is_same_mount && writer == self.line
        };
        is_read && is_ours
    }

    /// Takes a shelf whose lock is had, if it is free.
    pub fn take(&self, shelf: &Path, now: SystemTime) -> Result<Option<Mark>> {
        if !self.is_free(shelf, now)? {
            return Ok(None);
        }
        let marks = owned::numbered(shelf, NAME)?;
        match marks.first().map_or(0, |mark| mark.0).checked_add(1) {
            Some(next) => self.mark(shelf, next),
            None => invalid!(
                "{} has a mark that is the last number there is: remove it",
                shelf.display()
            ),
        }
    }

    /// `None`: somebody else has this number, or a greater one.
    pub fn mark(&self, shelf: &Path, number: u64) -> Result<Option<Mark>> {
        let path = shelf.join(format!("{NAME}{number}"));
        let began = uptime();
        let mut file = match owned::open_with(&path, Way::Create, libc::O_EXCL) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            made => made.doing("make", &path)?,
        };
        let mut mark = Mark::new(path, began);
        let written = file.write_all(self.line.as_bytes());
        match written.and_then(|()| file.sync_all()) {
            // Without its line nobody's locks are taken to meet its: a full drive is no reason not to start.
            Err(error) if is_no_space(&error) => {}
            written => written.doing("write", &mark.path)?,
        }
        mark.follows_silence = !self.is_local();
        // What was listed before may have been old.
        for (other, path) in owned::numbered(shelf, NAME)? {
            if other > number {
                return Ok(None);
            } else if other < number {
                mark.follows_silence |=
                    !owned::open(&path, Way::Read).is_ok_and(|file| self.meets(file));
                owned::remove_if_there(&path)?;
            }
        }
        Ok(Some(mark))
    }
}

/// When a writer last gave a sign of life, and what has kept it from giving one since.
#[derive(Debug)]
struct Signs {
    /// By `uptime`. `None`: somebody else has the shelf.
    last: Option<Duration>,
    problem: String,
}

/// A writer's mark on its shelf. When it is dropped the shelf is anybody's at once.
#[derive(Debug)]
pub struct Mark {
    path: PathBuf,
    signs: Mutex<Signs>,
    /// The last writer may only have been silent, and go on with what it was about to do.
    pub follows_silence: bool,
}

impl Mark {
    fn new(path: PathBuf, made: Duration) -> Self {
        let signs = Mutex::new(Signs {
            last: Some(made),
            problem: "it does not answer".into(),
        });
        Self {
            path,
            signs,
            follows_silence: false,
        }
    }

    fn signs(&self) -> MutexGuard<'_, Signs> {
        self.signs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a sign of life. Waits for the file system.
    pub fn sign(&self) {
        let began = uptime();
        let opened = owned::open(&self.path, Way::Read);
        let touched = opened
            .map_err(|error| gone_or_away(error, &self.path))
            .and_then(|file| touch(&file));
        let mut signs = self.signs();
        let is_gone = match &touched {
            Ok(found) => found.nlink() == 0,
            Err(error) => {
                signs.problem = error.to_string();
                error.kind() == io::ErrorKind::NotFound
            }
        };
        if is_gone {
            signs.last = None;
        } else if touched.is_ok() {
            signs.last = signs.last.map(|_| began);
        }
    }

    /// Refuses where the shelf may be somebody else's by now.
    pub fn check(&self) -> Result<()> {
        let signs = self.signs();
        match signs.last {
            None => invalid!(
                "another machine has taken the shelf, of which nothing had been heard for {SILENCE:?}: start the server again"
            ),
            Some(last) if uptime().saturating_sub(last) > PATIENCE => invalid!(
                "its file system has taken no sign of life for {PATIENCE:?} ({})",
                signs.problem
            ),
            Some(_) => Ok(()),
        }
    }

    /// As `check`, by what the file system says now. Waits for it: for what cannot be taken back.
    pub fn confirm(&self) -> Result<()> {
        self.sign();
        self.check()
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // A sign of long ago. If it cannot be given, others wait for `SILENCE`.
        let left = owned::open(&self.path, Way::Read);
        drop(left.and_then(|file| file.set_modified(SystemTime::UNIX_EPOCH)));
    }
}

/// Of a shelf that is this process's to write: its lock and its mark.
#[derive(Debug)]
pub struct Hold {
    pub lock: Lock,
    pub mark: Arc<Mark>,
}

impl Hold {
    /// The number of the manifest that takes the place of the last writer's: one that is still about to make one does not come so far.
    pub fn next_epoch(&self, epoch: u64) -> u64 {
        epoch
            + if self.mark.follows_silence {
                SKIPPED_EPOCHS
            } else {
                1
            }
    }
}

/// For how long the machine has been up. It goes on while the machine is suspended, as others' clocks do.
fn uptime() -> Duration {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a system call that fills a struct of ours; this clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Gives a file the time of its file server.
pub fn touch(file: &File) -> io::Result<Metadata> {
    // SAFETY: a system call on our own descriptor; without times it means now.
    match unsafe { libc::futimens(file.as_raw_fd(), std::ptr::null()) } {
        0 => file.metadata(),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::Stripe;
    use crate::owned::make_directory;
    use crate::testing::{Scratch, age, refuse};
    use std::thread;

    fn ours() -> Reach {
        let mount = fs::metadata(std::env::temp_dir()).unwrap().dev();
        Reach::named("ours", mount)
    }

    /// Of a store.
    fn make_shelf(scratch: &Scratch) -> PathBuf {
        Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let shelf = scratch.path("store/shelf");
        make_directory(&shelf).unwrap();
        shelf
    }

    fn is_taken(reach: &Reach, shelf: &Path) -> bool {
        reach.take(shelf, SystemTime::now()).unwrap().is_none()
    }

    #[test]
    fn reach_when_the_folder_is_on_a_file_system_of_one_machine_then_local() {
        assert!(Reach::of(Path::new("/dev/shm")).unwrap().is_local());
        // No drive, and nothing that is known.
        let [one, other] = [(); 2].map(|()| Reach::of(Path::new("/proc")).unwrap());
        assert!(one.line == other.line && !one.is_local());
        assert!(Reach::of(Path::new("/nowhere")).is_err());
    }

    #[test]
    fn shelf_when_another_machine_gives_signs_then_its_own_and_when_it_is_silent_then_ours_for_good()
     {
        let scratch = Scratch::new();
        let shelf = make_shelf(&scratch);
        let theirs = Reach::named("theirs", 1).mark(&shelf, 1).unwrap().unwrap();
        for other in [ours(), Reach::named("theirs", 2)] {
            assert!(is_taken(&other, &shelf));
        }
        age(&theirs.path, SILENCE);
        theirs.sign();
        assert!(is_taken(&ours(), &shelf));
        age(&theirs.path, SILENCE);
        let taken = ours().take(&shelf, SystemTime::now()).unwrap().unwrap();
        theirs.sign();
        let refused = theirs.check().unwrap_err().to_string();
        assert!(refused.contains("start the server again"), "{refused}");
        drop(theirs);
        taken.sign();
        taken.check().unwrap();
        assert!(is_taken(&Reach::named("third", 1), &shelf));
    }

    #[test]
    fn shelf_when_its_writers_locks_meet_ours_or_it_has_left_then_free_at_once() {
        let scratch = Scratch::new();
        let shelf = scratch.path("");
        let killed = ours().mark(&shelf, 1).unwrap().unwrap();
        let again = ours().take(&shelf, SystemTime::now()).unwrap().unwrap();
        drop(killed);
        assert!(is_taken(&Reach::named("theirs", 1), &shelf));
        drop(again);
        assert!(!is_taken(&Reach::named("theirs", 1), &shelf));
    }

    #[test]
    fn shelf_when_its_folder_is_local_to_one_and_mounted_by_the_other_then_neither_takes_the_others()
     {
        let (local, afar) = (ours().local(), Reach::named("afar", 1));
        for (living, other) in [(&local, &afar), (&afar, &local)] {
            let scratch = Scratch::new();
            let shelf = make_shelf(&scratch);
            let theirs = living.mark(&shelf, 1).unwrap().unwrap();
            assert!(is_taken(other, &shelf));
            age(&theirs.path, SILENCE);
            let taken = other.take(&shelf, SystemTime::now()).unwrap().unwrap();
            assert!(taken.follows_silence && theirs.confirm().is_err());
        }
    }

    #[test]
    fn shelf_when_its_writer_was_local_and_the_machine_has_started_again_then_free_at_once() {
        let scratch = Scratch::new();
        let shelf = scratch.path("");
        let crashed = Reach::named("before", 1).local();
        std::mem::forget(crashed.mark(&shelf, 1).unwrap().unwrap());
        assert!(is_taken(&Reach::named("before", 1), &shelf));
        let now = Reach::named("now", 2).local();
        let again = now.take(&shelf, SystemTime::now()).unwrap().unwrap();
        assert!(!again.follows_silence);
    }

    #[test]
    fn shelf_when_the_folder_was_mounted_anew_and_its_writer_lives_then_its_sibling_leaves_it() {
        let scratch = Scratch::new();
        let shelf = scratch.path("");
        // What both have been since before.
        let before = Reach::named("ours", ours().mount + 1);
        let living = before.mark(&shelf, 1).unwrap().unwrap();
        assert!(is_taken(&before, &shelf));
        age(&living.path, SILENCE);
        assert!(!is_taken(&before, &shelf));
    }

    #[test]
    fn mark_when_the_drive_is_full_then_made_all_the_same_and_left_alone_by_all() {
        let scratch = Scratch::new();
        let shelf = scratch.path("");
        let full = shelf.clone();
        // The thread ends with its filter.
        let marked = std::thread::spawn(move || {
            refuse(libc::SYS_write, libc::ENOSPC);
            ours().local().mark(&full, 1)
        });
        let mark = marked.join().unwrap().unwrap().unwrap();
        mark.confirm().unwrap();
        assert!(is_taken(&ours().local(), &shelf));
        drop(mark);
        assert!(!is_taken(&ours().local(), &shelf));
    }

    #[test]
    fn shelf_when_it_has_no_mark_then_free_unless_it_was_just_made() {
        let scratch = Scratch::new();
        let shelf = scratch.path("");
        File::create(shelf.join("lock")).unwrap();
        assert!(is_taken(&ours(), &shelf));
        age(&shelf.join("lock"), SILENCE);
        assert!(!is_taken(&ours(), &shelf));
    }

    #[test]
    fn marks_when_several_want_the_shelf_at_one_moment_then_one_has_it() {
        let scratch = Scratch::new();
        let shelf = scratch.path("");
        let mark = |number| ours().mark(&shelf, number).unwrap();
        let first = mark(3).unwrap();
        assert!(mark(3).is_none());
        // By a list that was old.
        assert!(mark(2).is_none());
        first.sign();
        first.check().unwrap();
        File::create(shelf.join(format!("{NAME}{}", u64::MAX))).unwrap();
        age(&shelf.join(format!("{NAME}{}", u64::MAX)), SILENCE);
        assert!(ours().take(&shelf, SystemTime::now()).is_err());
    }

    #[test]
    fn writer_when_its_file_server_has_lost_a_handle_once_then_its_shelf_is_not_taken_to_be_another_machines()
     {
        let scratch = Scratch::new();
        let mark = &ours().mark(&make_shelf(&scratch), 1).unwrap().unwrap();
        // The thread ends with its filter.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                refuse(libc::SYS_utimensat, libc::ESTALE);
                mark.confirm().unwrap();
                let before = uptime().checked_sub(PATIENCE + SIGN_EVERY);
                let Some(before) = before else { return };
                mark.signs().last = Some(before);
                let refused = mark.confirm().unwrap_err().to_string();
                assert!(refused.contains("Stale file handle"), "{refused}");
            });
        });
        mark.confirm().unwrap();
        fs::remove_file(&mark.path).unwrap();
        assert!(mark.confirm().is_err());
    }

    #[test]
    fn writer_when_it_could_give_no_sign_for_long_then_it_writes_nothing_until_it_can() {
        let scratch = Scratch::new();
        let mark = ours().mark(&scratch.path(""), 1).unwrap().unwrap();
        let before = uptime().checked_sub(PATIENCE + SIGN_EVERY);
        let Some(before) = before else { return };
        mark.signs().last = Some(before);
        let refused = mark.check().unwrap_err().to_string();
        assert!(refused.contains("no sign of life"), "{refused}");
        mark.sign();
        mark.check().unwrap();
    }

    #[test]
    fn writer_when_its_mount_is_away_for_a_while_then_it_writes_again_when_it_is_back() {
        let scratch = Scratch::new();
        let mark = ours().mark(&make_shelf(&scratch), 1).unwrap().unwrap();
        let [store, mounted] = ["store", "mounted"].map(|name| scratch.path(name));
        fs::rename(&store, &mounted).unwrap();
        for has_mount_point in [false, true] {
            if has_mount_point {
                fs::create_dir(&store).unwrap();
            }
            mark.confirm().unwrap();
        }
        fs::remove_dir(&store).unwrap();
        fs::rename(&mounted, &store).unwrap();
        thread::scope(|scope| {
            // The thread ends with its filter.
            scope.spawn(|| {
                refuse(libc::SYS_openat, libc::ESTALE);
                mark.confirm().unwrap();
            });
        });
        mark.confirm().unwrap();
        fs::remove_file(&mark.path).unwrap();
        assert!(mark.confirm().is_err());
    }
}
