// SPDX-License-Identifier: Apache-2.0
//! One helper thread that moves parcels, each layer by layer, one after the other.
//!
//! Invariants
//! * A parcel's layers land in order; layer `l` may be read once its progress is above `l`.
//! * A parcel reaches an end state whatever happens to its cargo: no waiter is left behind.
//! * Once a parcel has ended, the thread neither touches its memory nor holds its cargo (and so no lease).
//!
//! States of a parcel: queued --taken--> moving --last layer--> landed; moving --panic, stop or a layer that
//! cannot come--> failed; queued --cancel or shutdown--> failed.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{Result, ShmError};
use crate::plan::{Moved, Plan};
use crate::progress::LayerProgress;

/// What a parcel carries.
pub trait Cargo: Send {
    fn num_layers(&self) -> usize;
    /// Moves one layer completely, unless `stop` is set meanwhile; `None` when that cannot be done any more.
    fn copy_layer(&mut self, layer: usize, stop: &AtomicBool) -> Option<Moved>;
}

impl Cargo for Plan {
    fn num_layers(&self) -> usize {
        Plan::num_layers(self)
    }

    fn copy_layer(&mut self, layer: usize, stop: &AtomicBool) -> Option<Moved> {
        Plan::copy_layer(self, layer, stop)
    }
}

enum State {
    Queued(Box<dyn Cargo>),
    Moving,
    Landed,
    Failed,
}

/// A copy under way, shared by the thread that moves it and those who wait.
pub struct Parcel {
    progress: LayerProgress,
    state: Mutex<State>,
    stop: AtomicBool,
    fetched_bytes: AtomicU64,
    copied_bytes: AtomicU64,
    copy_ns: AtomicU64,
    began: OnceLock<Instant>,
    /// Of each layer, from `began` on, once it is in place; 0 before.
    landed_ns: Box<[AtomicU64]>,
}

impl Parcel {
    fn new(cargo: Box<dyn Cargo>) -> Self {
        let num_layers = cargo.num_layers();
        Self {
            progress: LayerProgress::new(num_layers),
            state: Mutex::new(State::Queued(cargo)),
            stop: AtomicBool::new(false),
            fetched_bytes: AtomicU64::new(0),
            copied_bytes: AtomicU64::new(0),
            copy_ns: AtomicU64::new(0),
            began: OnceLock::new(),
            landed_ns: (0..num_layers).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    pub fn num_layers(&self) -> usize {
        self.progress.num_layers()
    }

    pub fn layers_done(&self) -> usize {
        self.progress.num_done()
    }

    pub fn moved(&self) -> Moved {
        Moved {
            fetched_bytes: self.fetched_bytes.load(Ordering::Relaxed),
            copied_bytes: self.copied_bytes.load(Ordering::Relaxed),
        }
    }

    /// Landed or failed: nothing is written any more.
    pub fn has_ended(&self) -> bool {
        self.progress.has_ended()
    }

    /// Time the helper thread spent on this parcel.
    pub fn copy_time(&self) -> Duration {
        Duration::from_nanos(self.copy_ns.load(Ordering::Relaxed))
    }

    /// How long ago the helper thread began with this parcel, and how long ago each layer that is in place landed.
    pub fn ages(&self) -> Vec<Duration> {
        let Some(began) = self.began.get() else {
            return Vec::new();
        };
        let begun = began.elapsed();
        let landed = self.landed_ns[..self.layers_done()].iter();
        let ages =
            landed.map(|ns| begun.saturating_sub(Duration::from_nanos(ns.load(Ordering::Relaxed))));
        std::iter::once(begun).chain(ages).collect()
    }

    /// Time others spent waiting for it.
    pub fn wait_time(&self) -> Duration {
        self.progress.waited()
    }

    /// Blocks until `layer` has landed or the parcel has failed; the time that took.
    pub fn wait_layer(&self, layer: usize) -> Duration {
        self.progress.wait_layer(layer)
    }

    /// Blocks until the parcel has ended; whether all of it landed.
    pub fn wait_end(&self) -> bool {
        self.progress.wait_end();
        matches!(*self.lock(), State::Landed)
    }

    /// Gives up what has not landed. Once it returns, the thread writes no more for this parcel.
    pub fn cancel(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.fail_queued();
        self.wait_end();
    }

    /// Ends a parcel that nobody has taken; any other stays what it is.
    fn fail_queued(&self) {
        if let Some(cargo) = self.take_queued(State::Failed) {
            drop(cargo);
            self.progress.end();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves a queued parcel on to `next`; any other stays what it is.
    fn take_queued(&self, next: State) -> Option<Box<dyn Cargo>> {
        let mut state = self.lock();
        if !matches!(*state, State::Queued(_)) {
            return None;
        }
        match std::mem::replace(&mut *state, next) {
            State::Queued(cargo) => Some(cargo),
            _ => None,
        }
    }

    fn end(&self, state: State) {
        *self.lock() = state;
        self.progress.end();
    }
}

/// The thread's side of a parcel.
impl Parcel {
    fn deliver(&self) {
        let Some(cargo) = self.take_queued(State::Moving) else {
            return;
        };
        let began = *self.began.get_or_init(Instant::now);
        // The cargo is dropped in there too, before the end is announced: whoever sees the end finds its leases given back.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.move_layers(cargo)));
        let spent = began.elapsed().as_nanos() as u64;
        self.copy_ns.store(spent, Ordering::Relaxed);
        self.end(match outcome {
            Ok(State::Landed) => State::Landed,
            Ok(_) => State::Failed,
            Err(panic) => {
                crate::say!("banyan: a copy failed: {}", reason(panic.as_ref()));
                State::Failed
            }
        });
    }

    fn move_layers(&self, mut cargo: Box<dyn Cargo>) -> State {
        for layer in 0..self.num_layers() {
            let Some(moved) = cargo.copy_layer(layer, &self.stop) else {
                return State::Failed;
            };
            self.fetched_bytes
                .fetch_add(moved.fetched_bytes, Ordering::Relaxed);
            self.copied_bytes
                .fetch_add(moved.copied_bytes, Ordering::Relaxed);
            if self.stop.load(Ordering::Relaxed) {
                return State::Failed;
            }
            if let Some(began) = self.began.get() {
                // Published by the progress.
                self.landed_ns[layer].store(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
            }
            self.progress.advance_to(layer + 1);
        }
        State::Landed
    }
}

fn reason(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without words")
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Arc<Parcel>>,
    moving: Option<Arc<Parcel>>,
    closing: bool,
}

#[derive(Default)]
struct Counter {
    queue: Mutex<Queue>,
    arrival: Condvar,
}

impl Counter {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next parcel, noted as moving in the same step so that closing cannot miss it; `None` when the copy thread closes.
    fn next(&self) -> Option<Arc<Parcel>> {
        let mut queue = self.lock();
        loop {
            queue.moving = None;
            if queue.closing {
                return None;
            }
            if let Some(parcel) = queue.waiting.pop_front() {
                queue.moving = Some(parcel.clone());
                return Some(parcel);
            }
            queue = self
                .arrival
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Owns the thread; dropping it fails what is queued, stops what moves, and joins.
pub struct CopyThread {
    counter: Arc<Counter>,
    thread: Option<JoinHandle<()>>,
}

impl CopyThread {
    pub fn start() -> Result<Self> {
        let counter = Arc::new(Counter::default());
        let queue = counter.clone();
        let thread = thread::Builder::new()
            .name("banyan-copy_thread".into())
            .spawn(move || {
                while let Some(parcel) = queue.next() {
                    parcel.deliver();
                }
            })
            .map_err(|cause| ShmError::os("cannot start the copy thread", cause))?;
        Ok(Self {
            counter,
            thread: Some(thread),
        })
    }

    pub fn send(&self, cargo: Box<dyn Cargo>) -> Arc<Parcel> {
        let parcel = Arc::new(Parcel::new(cargo));
        self.counter.lock().waiting.push_back(parcel.clone());
        self.counter.arrival.notify_one();
        parcel
    }
}

impl Drop for CopyThread {
    fn drop(&mut self) {
        let waiting = {
            let mut queue = self.counter.lock();
            queue.closing = true;
            if let Some(parcel) = &queue.moving {
                parcel.stop.store(true, Ordering::Relaxed);
            }
            std::mem::take(&mut queue.waiting)
        };
        self.counter.arrival.notify_all();
        for parcel in waiting {
            parcel.fail_queued();
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            crate::say!("banyan: the copy thread had failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// Each layer waits for its permission; a missing one ends in a panic.
    struct Guarded {
        num_layers: usize,
        permissions: mpsc::Receiver<()>,
        _held: mpsc::Sender<()>,
    }

    impl Cargo for Guarded {
        fn num_layers(&self) -> usize {
            self.num_layers
        }

        fn copy_layer(&mut self, _layer: usize, stop: &AtomicBool) -> Option<Moved> {
            while !stop.load(Ordering::Relaxed) {
                match self.permissions.recv_timeout(Duration::from_millis(5)) {
                    Ok(()) => break,
                    Err(mpsc::RecvTimeoutError::Timeout) => continue,
                    Err(mpsc::RecvTimeoutError::Disconnected) => panic!("no permission"),
                }
            }
            Some(Moved {
                fetched_bytes: 1,
                copied_bytes: 2,
            })
        }
    }

    /// A cargo, its permissions, and a channel that closes when the cargo is dropped.
    fn guarded(num_layers: usize) -> (Box<Guarded>, mpsc::Sender<()>, mpsc::Receiver<()>) {
        let (permit, permissions) = mpsc::channel();
        let (_held, dropped) = mpsc::channel();
        let cargo = Guarded {
            num_layers,
            permissions,
            _held,
        };
        (Box::new(cargo), permit, dropped)
    }

    #[test]
    fn layers_when_they_land_then_waiters_go_on_one_by_one() {
        let copy_thread = CopyThread::start().unwrap();
        let (cargo, permit, dropped) = guarded(2);
        let parcel = copy_thread.send(cargo);
        permit.send(()).unwrap();
        parcel.wait_layer(0);
        assert_eq!(parcel.layers_done(), 1);
        let ages = parcel.ages();
        assert!(ages.len() == 2 && ages[0] >= ages[1]);
        thread::sleep(Duration::from_millis(2));
        permit.send(()).unwrap();
        assert!(parcel.wait_end());
        // A layer's age grows by itself, and the second landed at least as much later as it was held back.
        let later = parcel.ages();
        assert!(later.len() == 3 && later[1] > ages[1]);
        assert!(later[1] - later[2] >= Duration::from_millis(2));
        assert!(
            dropped
                .try_recv()
                .is_err_and(|error| error == mpsc::TryRecvError::Disconnected)
        );
        assert_eq!(
            parcel.moved(),
            Moved {
                fetched_bytes: 2,
                copied_bytes: 4
            }
        );
    }

    #[test]
    fn panic_when_a_layer_fails_then_waiters_are_released_and_the_thread_goes_on() {
        let copy_thread = CopyThread::start().unwrap();
        let (cargo, permit, dropped) = guarded(3);
        let parcel = copy_thread.send(cargo);
        let waiter = {
            let parcel = parcel.clone();
            thread::spawn(move || parcel.wait_layer(2))
        };
        permit.send(()).unwrap();
        drop(permit);
        waiter.join().unwrap();
        assert!(!parcel.wait_end());
        assert_eq!(parcel.layers_done(), 1);
        assert!(
            dropped
                .try_recv()
                .is_err_and(|error| error == mpsc::TryRecvError::Disconnected)
        );

        let (cargo, permit, _dropped) = guarded(1);
        let next = copy_thread.send(cargo);
        permit.send(()).unwrap();
        assert!(next.wait_end());
    }

    #[test]
    fn cancel_when_queued_or_moving_then_ends_at_once() {
        let copy_thread = CopyThread::start().unwrap();
        let (first, _first_permit, _) = guarded(2);
        let (second, _second_permit, second_dropped) = guarded(2);
        let moving = copy_thread.send(first);
        let queued = copy_thread.send(second);
        queued.cancel();
        assert!(
            second_dropped
                .try_recv()
                .is_err_and(|error| error == mpsc::TryRecvError::Disconnected)
        );
        assert!(!queued.wait_end());
        moving.cancel();
        assert!(!moving.wait_end());
    }

    #[test]
    fn copy_thread_when_dropped_with_work_left_then_waiters_see_failure() {
        let copy_thread = CopyThread::start().unwrap();
        let (first, _first_permit, _) = guarded(1);
        let (second, _second_permit, _) = guarded(1);
        let parcels = [copy_thread.send(first), copy_thread.send(second)];
        let waiters = parcels.map(|parcel| thread::spawn(move || parcel.wait_end()));
        drop(copy_thread);
        for waiter in waiters {
            assert!(!waiter.join().unwrap());
        }
    }
}
