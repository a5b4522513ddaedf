// SPDX-License-Identifier: Apache-2.0
//! What the thread that learns of other writers (`news`) is to do, and who waits for it.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Result, StoreError};
use crate::reading::ReadJob;

#[derive(Default)]
struct Wanted {
    num_wanted: u64,
    num_done: u64,
    /// Of the last look.
    problem: Option<String>,
    /// When the last look ended.
    looked: Option<Instant>,
    /// Reads whose transfers are over: a look at others' manifests has to say whether their pages are damaged or gone.
    doubted: Vec<(Instant, ReadJob)>,
    is_closing: bool,
}

#[derive(Default)]
pub struct RefreshRequests {
    wanted: Mutex<Wanted>,
    came: Condvar,
    done: Condvar,
    /// Since others were last looked at.
    has_lookups: AtomicBool,
}

impl RefreshRequests {
    fn lock(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody looks pages up: others are looked at again, at once where they have not been for a while.
    pub fn note_lookup(&self) {
        if !self.has_lookups.swap(true, Ordering::Relaxed) {
            // Who is to hear of it looks with the lock.
            let _wanted = self.lock();
            self.came.notify_one();
        }
    }

    /// Has others' manifests looked at soon. Waits for nothing.
    pub fn ask(&self) {
        let mut wanted = self.lock();
        if wanted.num_wanted == wanted.num_done {
            wanted.num_wanted += 1;
            self.came.notify_one();
        }
    }

    /// Has others' manifests looked at, and waits for that, no longer than `patience`.
    pub fn ask_and_wait(&self, patience: Duration) -> Result<()> {
        let mut wanted = self.lock();
        // One that has begun may have missed something.
        wanted.num_wanted += 1;
        let number = wanted.num_wanted;
        self.came.notify_one();
        let waited = self
            .done
            .wait_timeout_while(wanted, patience, |wanted| wanted.num_done < number);
        let (wanted, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match &wanted.problem {
            _ if wanted.num_done < number => {
                let doing =
                    format!("cannot read what other writers of the store have within {patience:?}");
                Err(StoreError::os(doing, io::ErrorKind::TimedOut.into()))
            }
            Some(problem) => Err(StoreError::Invalid(problem.clone())),
            None => Ok(()),
        }
    }

    pub fn doubt(&self, job: ReadJob) {
        self.lock().doubted.push((Instant::now(), job));
        self.came.notify_one();
    }

    /// The reads that have waited since a time that is due.
    pub fn take_doubted(&self, is_due: impl Fn(Instant) -> bool) -> Vec<ReadJob> {
        let mut wanted = self.lock();
        let due = wanted.doubted.extract_if(.., |(since, _)| is_due(*since));
        due.map(|(_, job)| job).collect()
    }

    /// Until there is a refresh request, or the last look is `look_again` ago and somebody looks pages up, or others have announced
    /// something: what they have removed takes space until this process has let go of it. Its number; `None` when the store closes.
    pub fn next(&self, look_again: Duration, is_behind: impl Fn() -> bool) -> Option<u64> {
        let mut wanted = self.lock();
        loop {
            if wanted.is_closing {
                return None;
            }
            if wanted.num_wanted != wanted.num_done || !wanted.doubted.is_empty() {
                return Some(wanted.num_wanted);
            }
            let since = wanted.looked.map_or(look_again, |looked| looked.elapsed());
            let left = look_again.saturating_sub(since);
            if left.is_zero() && (self.has_lookups.swap(false, Ordering::Relaxed) || is_behind()) {
                return Some(wanted.num_wanted);
            }
            let pause = if left.is_zero() { look_again } else { left };
            let waited = self.came.wait_timeout(wanted, pause);
            wanted = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub fn end(&self, number: u64, problem: Option<String>) {
        let mut wanted = self.lock();
        wanted.num_done = number;
        wanted.looked = Some(Instant::now());
        wanted.problem = problem;
        self.done.notify_all();
    }

    pub fn close(&self) {
        self.lock().is_closing = true;
        self.came.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;

    const NEVER: Duration = Duration::from_secs(3600);

    #[test]
    fn look_when_somebody_asks_after_a_while_then_at_once_and_nobody_looks_where_nobody_asks() {
        let requests = Arc::new(RefreshRequests::default());
        let asked = requests.clone();
        let news = thread::spawn(move || asked.next(NEVER, || false));
        requests.note_lookup();
        assert_eq!(news.join().unwrap(), Some(0));
        requests.end(0, None);
        // It has just been looked.
        requests.note_lookup();
        let asked = requests.clone();
        let news = thread::spawn(move || asked.next(NEVER, || true));
        requests.close();
        assert_eq!(news.join().unwrap(), None);
    }
}
