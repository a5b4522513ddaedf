// SPDX-License-Identifier: Apache-2.0
//! Who writes a shelf, on a file system that other machines may have mounted: a lock may reach no further than one of them.
//!
//! Invariants
//! * A shelf's writer is who has made its mark of the greatest number. No number is made twice: of all who want a shelf at one moment
//!   one gets it, whether their locks meet or not.
//! * A shelf whose lock can be had is free for those whose locks meet its writer's; for others when all its marks have been silent for
//!   `SILENCE`. A writer that ends leaves a mark that is.
//! * Times are compared with times of the same file server: a mark's with that of the store's lock, which is touched for it.
//! * A writer that could give no sign for `PATIENCE` begins no write, and one whose mark is gone writes no more.

use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::directory::fresh_id;
use crate::error::{Doing, Result, invalid};
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

/// How far a lock is sure to reach: one mount on one running kernel.
#[derive(Clone, Debug)]
pub struct Reach(String);

impl Reach {
    /// `None` where no other machine can have the directory: there a lock reaches everybody.
    pub fn of(directory: &Path) -> Result<Option<Self>> {
        let kind = file_system(directory).doing("look at the file system of", directory)?;
        if OF_ONE_MACHINE.contains(&kind) {
            return Ok(None);
        }
        // Without one nobody's locks are taken to meet ours.
        let boot = fs::read_to_string(BOOT_ID).unwrap_or_else(|_| format!("{:x}", fresh_id()));
        // Of one server's folder each mount of a machine has a number of its own.
        let mount = fs::metadata(directory).doing("look at", directory)?.dev();
        Ok(Some(Self::named(boot.trim(), mount)))
    }

    pub fn named(boot: &str, mount: u64) -> Self {
        Self(format!("{boot} {mount:x}\n"))
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
        let mut writer = String::new();
        let is_read = file.take(1 << 10).read_to_string(&mut writer).is_ok();
        Ok(since.is_ok_and(|since| since >= SILENCE) || (is_read && writer == self.0))
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
        let began = Instant::now();
        let mut file = match owned::open_with(&path, Way::Create, libc::O_EXCL) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            made => made.doing("make", &path)?,
        };
        let mark = Mark::new(path, began);
        file.write_all(self.0.as_bytes())
            .doing("write", &mark.path)?;
        // What was listed before may have been old.
        for (other, path) in owned::numbered(shelf, NAME)? {
            if other > number {
                return Ok(None);
            } else if other < number {
                owned::remove_if_there(&path)?;
            }
        }
        Ok(Some(mark))
    }
}

/// When a writer last gave a sign of life, and what has kept it from giving one since.
#[derive(Debug)]
struct Signs {
    /// `None`: somebody else has the shelf.
    last: Option<Instant>,
    problem: String,
}

/// A writer's mark on its shelf. When it is dropped the shelf is anybody's at once.
#[derive(Debug)]
pub struct Mark {
    path: PathBuf,
    signs: Mutex<Signs>,
}

impl Mark {
    fn new(path: PathBuf, made: Instant) -> Self {
        let signs = Mutex::new(Signs {
            last: Some(made),
            problem: "it does not answer".into(),
        });
        Self { path, signs }
    }

    fn signs(&self) -> MutexGuard<'_, Signs> {
        self.signs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a sign of life. Waits for the file system.
    pub fn sign(&self) {
        let began = Instant::now();
        let touched = owned::open(&self.path, Way::Read).and_then(|file| touch(&file));
        let mut signs = self.signs();
        let is_gone = match &touched {
            Ok(found) => found.nlink() == 0,
            Err(error) => {
                signs.problem = error.to_string();
                matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESTALE))
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
            Some(last) if last.elapsed() > PATIENCE => invalid!(
                "its file system has taken no sign of life for {PATIENCE:?} ({})",
                signs.problem
            ),
            Some(_) => Ok(()),
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // A sign of long ago. If it cannot be given, others wait for `SILENCE`.
        let left = owned::open(&self.path, Way::Read);
        drop(left.and_then(|file| file.set_modified(SystemTime::UNIX_EPOCH)));
    }
}

/// Of a shelf that is this process's to write: its lock, and its mark where other machines may have the folder.
#[derive(Debug)]
pub struct Hold {
    pub lock: Lock,
    pub mark: Option<Arc<Mark>>,
}

impl Hold {
    pub fn check(&self) -> Result<()> {
        check(self.mark.as_deref())
    }
}

/// Of a shelf that may have no mark.
pub fn check(mark: Option<&Mark>) -> Result<()> {
    mark.map_or(Ok(()), Mark::check)
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
    use crate::testing::{Scratch, age};

    fn ours() -> Reach {
        Reach::named("ours", 1)
    }

    fn is_taken(reach: &Reach, shelf: &Path) -> bool {
        reach.take(shelf, SystemTime::now()).unwrap().is_none()
    }

    #[test]
    fn reach_when_no_other_machine_can_have_the_folder_then_none_is_needed() {
        assert!(Reach::of(Path::new("/dev/shm")).unwrap().is_none());
        // No drive, and nothing that is known.
        let [one, other] = [(); 2].map(|()| Reach::of(Path::new("/proc")).unwrap().unwrap().0);
        assert_eq!(one, other);
        assert!(Reach::of(Path::new("/nowhere")).is_err());
    }

    #[test]
    fn shelf_when_another_machine_gives_signs_then_its_own_and_when_it_is_silent_then_ours_for_good()
     {
        let scratch = Scratch::new();
        let shelf = scratch.path("");
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
    fn writer_when_it_could_give_no_sign_for_long_then_it_writes_nothing_until_it_can() {
        let scratch = Scratch::new();
        let mark = ours().mark(&scratch.path(""), 1).unwrap().unwrap();
        let before = Instant::now().checked_sub(PATIENCE + SIGN_EVERY);
        let Some(before) = before else { return };
        mark.signs().last = Some(before);
        let refused = mark.check().unwrap_err().to_string();
        assert!(refused.contains("no sign of life"), "{refused}");
        mark.sign();
        mark.check().unwrap();
    }
}
