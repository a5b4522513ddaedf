// SPDX-License-Identifier: Apache-2.0
//! Locks between processes. The kernel lets go of one with the process that has it; who has it may as well be stopped, so nobody waits
//! for one without an end.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Doing, Result, StoreError};
use crate::owned::{self, Way};

/// How often a lock that somebody has is tried.
const AGAIN: Duration = Duration::from_millis(10);
/// Holders that cannot be named may be so many, one after the other.
const MOST_UNNAMED: u32 = 6;

/// A lock, held until it is dropped or the process dies.
#[derive(Debug)]
pub struct Lock(File);

impl Lock {
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Whether the file that was locked has this name still.
    pub fn is_of(&self, path: &Path) -> bool {
        let named = fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()));
        let own = self.0.metadata().map(|file| (file.dev(), file.ino()));
        named.is_ok_and(|named| own.is_ok_and(|own| named == own))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Alone,
    /// With others who only look.
    Shared,
}

pub fn try_lock(path: &Path, way: Way, mode: Mode) -> Result<Option<Lock>> {
    let file = owned::open(path, way).doing("open", path)?;
    let locked = match mode {
        Mode::Alone => file.try_lock(),
        Mode::Shared => file.try_lock_shared(),
    };
    match locked {
        Ok(()) => Ok(Some(Lock(file))),
        Err(TryLockError::WouldBlock) => Ok(None),
        // As if somebody had it for a moment.
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
        Err(TryLockError::Error(error)) => Err(error).doing("lock", path),
    }
}

/// Waits for as long as `patience` while one process has it, then says which. Where they come one after the other, each is waited for; of
/// those that cannot be named (another container's, another machine's) as long as for several.
pub fn lock_within(path: &Path, way: Way, mode: Mode, patience: Duration) -> Result<Lock> {
    lock_unless(path, (way, mode), patience, holder_of)
}

fn lock_unless(
    path: &Path,
    (way, mode): (Way, Mode),
    patience: Duration,
    holder_of: impl Fn(&Path) -> Option<String>,
) -> Result<Lock> {
    let (mut holder, mut deadline) = (None, Instant::now() + patience);
    let mut num_unnamed = 0;
    loop {
        if let Some(lock) = try_lock(path, way, mode)? {
            return Ok(lock);
        }
        let before = holder.get_or_insert_with(|| holder_of(path));
        if Instant::now() >= deadline {
            let now = holder_of(path);
            num_unnamed = if now.is_none() { num_unnamed + 1 } else { 0 };
            if now != *before || (1..MOST_UNNAMED).contains(&num_unnamed) {
                (*before, deadline) = (now, Instant::now() + patience);
                continue;
            }
            let (shown, patience) = (path.display(), patience * num_unnamed.max(1));
            let now = now.unwrap_or_else(|| "another process".into());
            let doing = format!(
                "{shown} has been locked by {now} for {patience:?}: end it (it is stopped, or its drive does not answer), and try again"
            );
            return Err(StoreError::os(doing, io::ErrorKind::TimedOut.into()));
        }
        thread::sleep(AGAIN);
    }
}

/// As /proc/locks says it: `1: FLOCK  ADVISORY  WRITE 1234 fe:01:5678 0 EOF`, the device in hexadecimal. Who is in another container is not
/// in it, or as 0; who is on another machine neither.
fn holder_of(path: &Path) -> Option<String> {
    let file = fs::metadata(path).ok()?;
    let (major, minor) = (libc::major(file.dev()), libc::minor(file.dev()));
    let wanted = format!("{major:02x}:{minor:02x}:{}", file.ino());
    named(&fs::read_to_string("/proc/locks").ok()?, &wanted)
}

fn named(locks: &str, wanted: &str) -> Option<String> {
    let mut lines = locks
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let line = lines.find(|words| words.len() > 5 && words[1] != "->" && words[5] == wanted)?;
    (line[4] != "0").then(|| format!("process {}", line[4]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;
    use std::process::Command;

    #[test]
    fn lock_when_its_holder_does_not_let_go_then_an_error_in_time_that_names_it() {
        let scratch = Scratch::new();
        let path = scratch.path("lock");
        let held = try_lock(&path, Way::Create, Mode::Alone).unwrap();
        assert!(held.is_some());
        let started = Instant::now();
        let patience = Duration::from_millis(50);
        let refused = lock_within(&path, Way::Create, Mode::Alone, patience).unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(5));
        let words = refused.to_string();
        let us = format!("process {}", std::process::id());
        assert!(words.contains(&us) && words.contains("end it"), "{words}");
        drop(held);
        lock_within(&path, Way::Create, Mode::Alone, patience).unwrap();
    }

    #[test]
    fn lock_when_its_holders_come_one_after_the_other_then_each_is_waited_for() {
        let scratch = Scratch::new();
        let path = scratch.path("lock");
        let patience = Duration::from_millis(2500);
        // They share it for a while, so that it is never free in between.
        let hold = |from: &str, seconds: &str| {
            let script = format!("sleep {from}; exec flock --shared $0 sleep {seconds}");
            let mut command = Command::new("sh");
            command.arg("-c").arg(script).arg(&path).spawn().unwrap()
        };
        let (first, started) = (hold("0", "1.5"), Instant::now());
        while try_lock(&path, Way::Create, Mode::Alone).unwrap().is_some() {
            thread::sleep(AGAIN);
        }
        let second = hold("0.3", "3");
        lock_within(&path, Way::Create, Mode::Alone, patience).unwrap();
        assert!(started.elapsed() > patience);
        for mut holder in [first, second] {
            assert!(holder.wait().unwrap().success());
        }
    }

    #[test]
    fn lock_when_its_holders_cannot_be_named_then_several_are_waited_for_and_none_for_ever() {
        let scratch = Scratch::new();
        let path = scratch.path("lock");
        let wait = |patience| {
            let (started, how) = (Instant::now(), (Way::Create, Mode::Alone));
            let locked = lock_unless(&path, how, patience, |_| None);
            (locked, started.elapsed())
        };
        let patience = Duration::from_millis(250);
        let held = try_lock(&path, Way::Create, Mode::Alone).unwrap();
        let (refused, waited) = wait(patience);
        let words = refused.unwrap_err().to_string();
        assert!(words.contains("another process for 1.5s"), "{words}");
        assert!(waited >= 6 * patience);
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(3 * patience);
                drop(held);
            });
            wait(patience).0.unwrap();
        });
        let locks =
            "1: FLOCK  ADVISORY  WRITE 0 fe:01:7 0 EOF\n2: FLOCK  ADVISORY  WRITE 5 fe:01:8 0 EOF";
        assert_eq!(named(locks, "fe:01:7"), None);
        assert_eq!(named(locks, "fe:01:8").unwrap(), "process 5");
    }

    #[test]
    fn lock_when_others_only_look_then_shared_and_nobody_has_it_alone() {
        let scratch = Scratch::new();
        let path = scratch.path("lock");
        drop(try_lock(&path, Way::Create, Mode::Alone).unwrap());
        let looking = try_lock(&path, Way::Read, Mode::Shared).unwrap();
        assert!(try_lock(&path, Way::Read, Mode::Shared).unwrap().is_some());
        assert!(try_lock(&path, Way::Create, Mode::Alone).unwrap().is_none());
        drop(looking);
    }
}
