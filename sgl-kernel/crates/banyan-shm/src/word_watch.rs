// SPDX-License-Identifier: Apache-2.0
//! A word of mapped host memory that a stream of a GPU writes behind its work, and a thread that acts on it.
//!
//! So that what ends with a copy ends when the copy does, whatever the threads that run Python are doing.
//!
//! Invariants
//! * Values follow each other round the circle of 32 bits, and a stream writes them in that order: a word that has come to a value has
//!   come past all before it.
//! * An ending runs once, on the watch's thread: when its value was seen. One whose value never comes is dropped with the watch, unrun.
//! * The thread looks at the word only while something is expected.
//!
//! States of an ending: expected -> run, or dropped.

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::error::{Result, ShmError, invalid};
use crate::memory::SharedMemory;
use crate::sync::{AtomicU32, Ordering};

const PERIOD: Duration = Duration::from_micros(200);

pub type Ending = Box<dyn FnOnce() + Send>;

struct State {
    last: u32,
    expected: VecDeque<(u32, Ending)>,
}

struct Shared {
    memory: Arc<SharedMemory>,
    state: Mutex<State>,
    arrival: Condvar,
    is_closing: AtomicBool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    /// Waits until something is expected; `false` when the watch is being dropped.
    fn await_any(&self) -> bool {
        let mut state = self.lock();
        while state.expected.is_empty() && !self.is_closing() {
            state = self
                .arrival
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        !self.is_closing()
    }

    /// What has come to pass, oldest first.
    fn take_past(&self) -> Vec<Ending> {
        let words: &[AtomicU32] = self.memory.mapping().words(0, 1);
        let now = words[0].load(Ordering::Acquire);
        let is_past = |value: u32| now.wrapping_sub(value).cast_signed() >= 0;
        let mut state = self.lock();
        let num_past = state.expected.partition_point(|(value, _)| is_past(*value));
        let past = state.expected.drain(..num_past);
        past.map(|(_, ending)| ending).collect()
    }

    fn run(&self) {
        while self.await_any() {
            let past = self.take_past();
            if past.is_empty() {
                thread::sleep(PERIOD);
            }
            past.into_iter().for_each(|ending| ending());
        }
    }
}

/// Owns the thread; dropping it joins.
pub struct WordWatch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl WordWatch {
    /// The word is the first of `memory`, zeroed. `first` is where it starts to count (tests go round).
    pub fn start(memory: Arc<SharedMemory>, first: u32) -> Result<Self> {
        if memory.len() < size_of::<u32>() {
            return invalid!("no word in {} bytes", memory.len());
        }
        let words: &[AtomicU32] = memory.mapping().words(0, 1);
        words[0].store(first, Ordering::Release);
        let shared = Arc::new(Shared {
            memory,
            state: Mutex::new(State {
                last: first,
                expected: VecDeque::new(),
            }),
            arrival: Condvar::new(),
            is_closing: AtomicBool::new(false),
        });
        let for_thread = shared.clone();
        let thread = thread::Builder::new()
            .name("banyan-ends".into())
            .spawn(move || for_thread.run())
            .map_err(|cause| ShmError::os("cannot start the watch's thread", cause))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Runs `ending` once the word has come to the value returned, which a stream is to write behind what it enqueued before.
    pub fn expect(&self, ending: Ending) -> u32 {
        let mut state = self.shared.lock();
        state.last = state.last.wrapping_add(1);
        let value = state.last;
        state.expected.push_back((value, ending));
        self.shared.arrival.notify_one();
        value
    }
}

impl Drop for WordWatch {
    fn drop(&mut self) {
        {
            let _state = self.shared.lock();
            self.shared.is_closing.store(true, Ordering::Release);
        }
        self.shared.arrival.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            crate::say!("banyan: the watch's thread had failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

    struct Rig {
        watch: WordWatch,
        memory: Arc<SharedMemory>,
        ended: Receiver<&'static str>,
        values: Vec<u32>,
    }

    /// Expects each of `names`, in this order.
    fn rig(first: u32, names: &[&'static str]) -> Rig {
        let memory = Arc::new(SharedMemory::create(64, "word").unwrap());
        let watch = WordWatch::start(memory.clone(), first).unwrap();
        let (sender, ended) = channel();
        let expect = |name: &&'static str| {
            let (sender, name) = (sender.clone(), *name);
            watch.expect(Box::new(move || sender.send(name).unwrap()))
        };
        let values = names.iter().map(expect).collect();
        Rig {
            watch,
            memory,
            ended,
            values,
        }
    }

    impl Rig {
        fn write(&self, value: u32) {
            let words: &[AtomicU32] = self.memory.mapping().words(0, 1);
            words[0].store(value, Ordering::Release);
        }

        fn next(&self) -> std::result::Result<&'static str, RecvTimeoutError> {
            self.ended.recv_timeout(Duration::from_secs(5))
        }

        fn has_another(&self) -> bool {
            self.ended.recv_timeout(Duration::from_millis(20)).is_ok()
        }
    }

    #[test]
    fn ending_when_its_value_has_not_come_then_it_does_not_run() {
        let rig = rig(0, &["first", "second"]);
        assert!(!rig.has_another());
        rig.write(rig.values[0]);
        assert_eq!(rig.next(), Ok("first"));
        assert!(!rig.has_another());
    }

    #[test]
    fn endings_when_a_later_value_came_then_all_before_it_run_in_order() {
        let rig = rig(0, &["first", "second"]);
        rig.write(rig.values[1]);
        assert_eq!((rig.next(), rig.next()), (Ok("first"), Ok("second")));
    }

    #[test]
    fn values_when_they_go_round_then_endings_still_wait_for_theirs() {
        let rig = rig(u32::MAX - 1, &["first", "second"]);
        assert_eq!(rig.values, [u32::MAX, 0]);
        assert!(!rig.has_another());
        rig.write(u32::MAX);
        assert_eq!(rig.next(), Ok("first"));
        assert!(!rig.has_another());
        rig.write(0);
        assert_eq!(rig.next(), Ok("second"));
    }

    #[test]
    fn watch_when_it_is_dropped_then_what_never_came_does_not_run() {
        let rig = rig(0, &["first"]);
        drop(rig.watch);
        rig.memory.mapping().words::<AtomicU32>(0, 1)[0].store(1, Ordering::Release);
        assert_eq!(
            rig.ended.recv_timeout(Duration::from_millis(20)).ok(),
            None::<&str>
        );
    }
}
