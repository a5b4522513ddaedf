// SPDX-License-Identifier: Apache-2.0
//! How far layers have come: one thread moves it on, any number wait for it, without polling.
//!
//! Invariants
//! * `num_done` never goes back. Once ended, nothing moves it on, and nobody waits any more.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How soon a stop is seen.
const STOP_PAUSE: Duration = Duration::from_millis(10);

/// Shared by who moves layers and who needs them; a later stage of a pipeline waits here for the stage before it.
#[derive(Debug)]
pub struct LayerProgress {
    num_layers: usize,
    num_done: AtomicUsize,
    has_ended: Mutex<bool>,
    change: Condvar,
    waited_ns: AtomicU64,
}

impl LayerProgress {
    pub fn new(num_layers: usize) -> Self {
        Self {
            num_layers,
            num_done: AtomicUsize::new(0),
            has_ended: Mutex::new(false),
            change: Condvar::new(),
            waited_ns: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.has_ended
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub fn num_layers(&self) -> usize {
        self.num_layers
    }

    /// Leading layers that are through. Acquire: what was written for them is visible.
    pub fn num_done(&self) -> usize {
        self.num_done.load(Ordering::Acquire)
    }

    pub fn has_ended(&self) -> bool {
        *self.lock()
    }

    /// The mover: the first `num_done` layers are through.
    pub fn advance_to(&self, num_done: usize) {
        // Under the lock, so that no waiter checks before and sleeps after.
        let _held = self.lock();
        self.num_done.fetch_max(num_done, Ordering::Release);
        self.change.notify_all();
    }

    /// The mover: nothing comes after this. Whether it went well, the mover's own result says.
    pub fn end(&self) {
        *self.lock() = true;
        self.change.notify_all();
    }

    /// Blocks until `layer` is through or the end has come; the time waited.
    pub fn wait_layer(&self, layer: usize) -> Duration {
        if self.num_done() > layer {
            return Duration::ZERO;
        }
        self.wait(|ended| !ended && self.num_done() <= layer)
    }

    /// As `wait_layer`, and no longer than until `stop` is set: whether the layer is through, and nobody said stop.
    ///
    /// Whoever sets `stop` knows of no waiter, so that it is looked at now and then.
    pub fn wait_layer_unless(&self, layer: usize, stop: &AtomicBool) -> bool {
        let goes_on = || self.num_done() <= layer && !stop.load(Ordering::Relaxed);
        let mut ended = self.lock();
        while goes_on() && !*ended {
            let waited = self.change.wait_timeout(ended, STOP_PAUSE);
            ended = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(ended);
        self.num_done() > layer && !stop.load(Ordering::Relaxed)
    }

    /// Blocks until the end; the time waited.
    pub fn wait_end(&self) -> Duration {
        self.wait(|ended| !ended)
    }

    fn wait(&self, not_yet: impl Fn(bool) -> bool) -> Duration {
        let started = Instant::now();
        let waited = self.change.wait_while(self.lock(), |ended| not_yet(*ended));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        let elapsed = started.elapsed();
        self.waited_ns
            .fetch_add(elapsed.as_nanos() as u64, Ordering::Relaxed);
        elapsed
    }

    /// Time spent in all waits so far, over all waiters.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited_ns.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;

    #[test]
    fn waiter_when_its_layer_is_through_then_goes_on() {
        let progress = Arc::new(LayerProgress::new(3));
        let waiter = thread::spawn({
            let progress = progress.clone();
            move || {
                progress.wait_layer(1);
                progress.num_done()
            }
        });
        progress.advance_to(1);
        progress.advance_to(2);
        assert_eq!(waiter.join().unwrap(), 2);
        assert_eq!(progress.wait_layer(0), Duration::ZERO);
    }

    #[test]
    fn waiter_when_told_to_stop_then_released_though_no_layer_comes() {
        let progress = Arc::new(LayerProgress::new(1));
        let stop = Arc::new(AtomicBool::new(false));
        let waiter = thread::spawn({
            let (progress, stop) = (progress.clone(), stop.clone());
            move || progress.wait_layer_unless(0, &stop)
        });
        stop.store(true, Ordering::Relaxed);
        assert!(!waiter.join().unwrap());
        stop.store(false, Ordering::Relaxed);
        progress.advance_to(1);
        assert!(progress.wait_layer_unless(0, &stop));
    }

    #[test]
    fn waiter_when_the_end_comes_early_then_released() {
        let progress = Arc::new(LayerProgress::new(3));
        let waiter = thread::spawn({
            let progress = progress.clone();
            move || progress.wait_layer(2)
        });
        progress.end();
        waiter.join().unwrap();
        assert_eq!((progress.num_done(), progress.has_ended()), (0, true));
        progress.wait_end();
    }
}
