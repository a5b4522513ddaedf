// SPDX-License-Identifier: Apache-2.0
//! Is the process behind an entry still there?
//!
//! A process is its pid and its start time, packed into one word, so that an entry changes hands in one atomic step and a recycled pid is
//! somebody else. Death is final: it is cached for ever. Being alive is believed for `BELIEF`. Who cannot be asked about, because this
//! process has no descriptor left for one, is alive: what a dead reader holds is taken from it, and a living one would read on.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::time::{Duration, Instant};

use crate::error::{Result, ShmError, invalid};
use crate::memory::Access;

/// For how long a process that was seen alive is taken to be so.
const BELIEF: Duration = Duration::from_millis(100);

/// The kernel's PID_MAX_LIMIT is 2^22.
const PID_BITS: u32 = 22;

/// Start time in clock ticks since boot (42 bits), then pid (22 bits). Zero is nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity(pub u64);

impl Identity {
    pub const NOBODY: Identity = Identity(0);

    /// This process.
    pub fn own() -> Result<Self> {
        let pid = std::process::id();
        match start_time(pid) {
            Ok(Some(ticks)) => Ok(Self(ticks << PID_BITS | u64::from(pid))),
            _ => invalid!("/proc/{pid}/stat cannot be read: Banyan needs /proc"),
        }
    }

    pub fn pid(self) -> u32 {
        (self.0 & ((1 << PID_BITS) - 1)) as u32
    }

    pub fn is_nobody(self) -> bool {
        self == Self::NOBODY
    }

    /// Asks the kernel. A zombie is dead: it holds memory, but will never release a pin.
    pub fn is_alive(self) -> bool {
        let has_started = || match start_time(self.pid()) {
            Ok(ticks) => ticks == Some(self.0 >> PID_BITS),
            Err(_) => true,
        };
        !self.is_nobody() && has_started()
    }

    /// As `is_alive` was answered on this thread, to whoever of it asked.
    pub fn seems_alive(self) -> bool {
        CENSUS.with_borrow_mut(|census| census.is_alive(self))
    }

    pub fn fd_path(self, fd: u64) -> String {
        format!("/proc/{}/fd/{fd}", self.pid())
    }

    pub fn open_fd(self, fd: u64, access: Access) -> Result<fs::File> {
        let path = self.fd_path(fd);
        access
            .open(&path)
            .map_err(|cause| ShmError::os(format!("cannot open {path}"), cause))
    }
}

/// Field 22 of /proc/<pid>/stat, unless there is no such process or it is a zombie. An error: nobody can tell.
fn start_time(pid: u32) -> io::Result<Option<u64>> {
    match fs::read(format!("/proc/{pid}/stat")) {
        Ok(stat) => Ok(started_at(&String::from_utf8_lossy(&stat))),
        // It has ended before its file was opened, or before it was read.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => Ok(None),
        Err(error) => Err(error),
    }
}

fn started_at(stat: &str) -> Option<u64> {
    // The command name may hold spaces and parentheses; fields are counted from its last one: the state is field 3.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X" | "x") {
        return None;
    }
    fields.nth(22 - 4)?.parse().ok()
}

thread_local! {
    static CENSUS: RefCell<Census> = RefCell::default();
}

/// Remembers answers: one look into /proc takes longer than a lookup of pages.
#[derive(Default)]
struct Census {
    dead: HashSet<Identity>,
    alive: HashMap<Identity, Instant>,
}

impl Census {
    fn is_alive(&mut self, who: Identity) -> bool {
        if who.is_nobody() || self.dead.contains(&who) {
            return false;
        }
        let now = Instant::now();
        if let Some(seen) = self.alive.get(&who)
            && now.duration_since(*seen) < BELIEF
        {
            return true;
        }
        let alive = who.is_alive();
        if alive {
            self.alive.insert(who, now);
        } else {
            self.alive.remove(&who);
            self.dead.insert(who);
        }
        alive
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn identity_of_this_process_is_alive() {
        let own = Identity::own().unwrap();
        assert_eq!(own.pid(), std::process::id());
        assert!(own.is_alive());
    }

    #[test]
    fn identity_with_another_start_time_is_dead() {
        let own = Identity::own().unwrap();
        assert!(!Identity(own.0 + (1 << PID_BITS)).is_alive());
    }

    #[test]
    fn process_when_it_was_seen_alive_then_it_is_believed_so_for_a_while_and_no_longer() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let ticks = start_time(child.id()).unwrap().unwrap();
        let who = Identity(ticks << PID_BITS | u64::from(child.id()));
        let seen = Instant::now();
        assert!(who.seems_alive());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!who.is_alive());
        assert!(who.seems_alive() || seen.elapsed() >= BELIEF);
        std::thread::sleep(BELIEF);
        assert!(!who.seems_alive());
    }

    #[test]
    fn zombie_when_not_reaped_counts_as_dead() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let ticks = start_time(child.id()).unwrap().unwrap();
        let who = Identity(ticks << PID_BITS | u64::from(child.id()));
        assert!(who.is_alive());
        child.kill().unwrap();
        let deadline = Instant::now() + Duration::from_secs(5);
        while who.is_alive() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!who.is_alive(), "killed but not waited for");
        child.wait().unwrap();
    }
}
