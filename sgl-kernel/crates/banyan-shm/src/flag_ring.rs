// SPDX-License-Identifier: Apache-2.0
//! I/O that a GPU asks for: two words of mapped host memory for each batch, and a thread that answers.
//!
//! When the compute stream reaches a layer it writes the doorbell; the thread runs what was prepared for that layer and writes the answer,
//! which the stream that needs the layer waits for. No processor thread of the engine stands between two layers. What is under way before
//! the GPU comes to it (a read that began when its request arrived) has no doorbell to wait for: it is only answered.
//!
//! Invariants
//! * A slot's words only move forward, round the circle of 32 bits: layer `l` of a batch is `first + l`, and the next batch of the slot
//!   begins where it ended. Nothing is ever reset, so no late write can be taken for a new one.
//! * The answer for a layer covers all layers before it. What was written for them is visible before it (Release).
//! * Every batch is answered to its last layer, whatever becomes of its work (error, panic, cancel, shutdown): a stream never waits for
//!   ever. `has_failed` is true before such an answer shows.
//!
//! States of a batch: queued -> running --last layer--> landed; queued or running --error, panic, cancel, shutdown--> failed.

use std::collections::VecDeque;
use std::hint;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{Result, ShmError, invalid};
use crate::memory::SharedMemory;
use crate::progress::LayerProgress;
use crate::sync::{AtomicU32, Ordering};

/// The two words of a slot lie on cache lines of their own.
pub const DOORBELL_OFFSET: usize = 0;
pub const ANSWER_OFFSET: usize = 64;
pub const SLOT_BYTES: usize = 128;

/// For how long a doorbell is watched without sleeping: layers of a prefill are tens of microseconds apart at least.
const SPIN: Duration = Duration::from_micros(50);
const NAP: Duration = Duration::from_micros(20);

/// Who says when a layer may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// The device, by the doorbell.
    ByTheDevice,
    /// Nobody has to: all of it is under way.
    FromTheStart,
}

/// What a batch does for each layer, on the ring's thread.
pub trait LayerWork: Send {
    fn asked(&self) -> Asked {
        Asked::ByTheDevice
    }
    fn num_layers(&self) -> usize;
    /// Brings one layer into memory completely; the reason when it cannot.
    fn run_layer(&mut self, layer: usize) -> std::result::Result<(), String>;
}

/// Follows reads that are under way: a layer is there when all of them say so.
pub struct Following {
    num_layers: usize,
    reads: Vec<Arc<LayerProgress>>,
}

impl Following {
    /// All `reads` are of one geometry; an error when their layers differ in number, or for none.
    pub fn new(reads: Vec<Arc<LayerProgress>>) -> Result<Self> {
        let Some(num_layers) = reads.first().map(|read| read.num_layers()) else {
            return invalid!("no read to follow");
        };
        if let Some(other) = reads.iter().find(|read| read.num_layers() != num_layers) {
            return invalid!("reads of {num_layers} and of {} layers", other.num_layers());
        }
        Ok(Self { num_layers, reads })
    }
}

impl LayerWork for Following {
    fn asked(&self) -> Asked {
        Asked::FromTheStart
    }

    fn num_layers(&self) -> usize {
        self.num_layers
    }

    fn run_layer(&mut self, layer: usize) -> std::result::Result<(), String> {
        for read in &self.reads {
            read.wait_layer(layer);
            if read.num_done() <= layer {
                return Err(format!("a read ended before layer {layer}"));
            }
        }
        Ok(())
    }
}

/// A batch in its slot, shared by the thread and whoever enqueues the waits.
pub struct Batch {
    pub slot: usize,
    /// The value that stands for layer 0.
    pub first: u32,
    pub num_layers: usize,
    is_cancelled: AtomicBool,
    has_failed: AtomicBool,
    has_ended: AtomicBool,
}

impl Batch {
    pub fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Answers what is left as failed, soon. A layer under way is finished first.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
    }

    fn value(&self, num_layers: usize) -> u32 {
        self.first.wrapping_add(num_layers as u32)
    }
}

struct Slot {
    is_taken: bool,
    next: u32,
}

struct State {
    slots: Vec<Slot>,
    queued: VecDeque<(Arc<Batch>, Box<dyn LayerWork>)>,
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

    fn word(&self, slot: usize, offset: usize) -> &AtomicU32 {
        &self.memory.mapping().words(slot * SLOT_BYTES + offset, 1)[0]
    }

    fn next(&self) -> Option<(Arc<Batch>, Box<dyn LayerWork>)> {
        let mut state = self.lock();
        loop {
            if let Some(batch) = state.queued.pop_front() {
                return Some(batch);
            }
            if self.is_closing.load(Ordering::Acquire) {
                return None;
            }
            state = self
                .arrival
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn run(&self, batch: &Batch, work: Box<dyn LayerWork>) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.run_layers(batch, work)));
        let reason = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(reason)) => Some(reason),
            Err(_) => Some("its work panicked".into()),
        };
        if let Some(reason) = reason {
            if !batch.is_cancelled.load(Ordering::Acquire) {
                eprintln!("banyan: a batch of reads failed: {reason}");
            }
            batch.has_failed.store(true, Ordering::Release);
        }
        self.word(batch.slot, ANSWER_OFFSET)
            .store(batch.value(batch.num_layers), Ordering::Release);
        batch.has_ended.store(true, Ordering::Release);
    }

    fn run_layers(
        &self,
        batch: &Batch,
        mut work: Box<dyn LayerWork>,
    ) -> std::result::Result<(), String> {
        let asked = work.asked();
        for layer in 0..batch.num_layers {
            match asked {
                Asked::ByTheDevice => self.wait_for_doorbell(batch, layer)?,
                Asked::FromTheStart => self.check_wanted(batch, layer)?,
            }
            work.run_layer(layer)?;
            self.word(batch.slot, ANSWER_OFFSET)
                .store(batch.value(layer + 1), Ordering::Release);
        }
        Ok(())
    }

    fn wait_for_doorbell(&self, batch: &Batch, layer: usize) -> std::result::Result<(), String> {
        let doorbell = self.word(batch.slot, DOORBELL_OFFSET);
        let wanted = batch.value(layer + 1);
        let began = Instant::now();
        while !has_come(doorbell.load(Ordering::Acquire), wanted) {
            self.check_wanted(batch, layer)?;
            if began.elapsed() < SPIN {
                hint::spin_loop();
            } else {
                thread::sleep(NAP);
            }
        }
        Ok(())
    }

    /// The reason when nobody wants the layer any more.
    fn check_wanted(&self, batch: &Batch, layer: usize) -> std::result::Result<(), String> {
        if batch.is_cancelled.load(Ordering::Acquire) {
            return Err(format!("cancelled before layer {layer}"));
        }
        if self.is_closing.load(Ordering::Acquire) {
            return Err(format!("shut down before layer {layer}"));
        }
        Ok(())
    }
}

/// As the GPU compares: forward round the circle.
fn has_come(word: u32, wanted: u32) -> bool {
    word.wrapping_sub(wanted).cast_signed() >= 0
}

/// Owns the thread; dropping it answers every batch as failed, and joins.
pub struct FlagRing {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl FlagRing {
    /// `memory` holds the words: zeroed, `num_slots` times `SLOT_BYTES`. `first` is where every slot starts to count (tests go round).
    pub fn start(memory: Arc<SharedMemory>, num_slots: usize, first: u32) -> Result<Self> {
        if num_slots == 0 || memory.len() < num_slots * SLOT_BYTES {
            return invalid!(
                "{num_slots} slots of {SLOT_BYTES} bytes in {} bytes",
                memory.len()
            );
        }
        let slots = (0..num_slots).map(|_| Slot {
            is_taken: false,
            next: first,
        });
        let state = State {
            slots: slots.collect(),
            queued: VecDeque::new(),
        };
        let shared = Arc::new(Shared {
            memory,
            state: Mutex::new(state),
            arrival: Condvar::new(),
            is_closing: AtomicBool::new(false),
        });
        for slot in 0..num_slots {
            shared
                .word(slot, DOORBELL_OFFSET)
                .store(first, Ordering::Release);
            shared
                .word(slot, ANSWER_OFFSET)
                .store(first, Ordering::Release);
        }
        let for_thread = shared.clone();
        let thread = thread::Builder::new()
            .name("banyan-ring".into())
            .spawn(move || {
                while let Some((batch, work)) = for_thread.next() {
                    for_thread.run(&batch, work);
                }
            })
            .map_err(|cause| ShmError::os("cannot start the ring's thread", cause))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Takes a slot and queues `work`; `None` when every slot is taken.
    pub fn send(&self, work: Box<dyn LayerWork>) -> Option<Arc<Batch>> {
        let mut state = self.shared.lock();
        let slot = state.slots.iter().position(|slot| !slot.is_taken)?;
        let num_layers = work.num_layers();
        let first = state.slots[slot].next;
        state.slots[slot] = Slot {
            is_taken: true,
            next: first.wrapping_add(num_layers as u32),
        };
        let batch = Arc::new(Batch {
            slot,
            first,
            num_layers,
            is_cancelled: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
        });
        state.queued.push_back((batch.clone(), work));
        self.shared.arrival.notify_one();
        Some(batch)
    }

    /// The batch has ended and the device is past its waits and writes: its slot may be taken again. `false` while it has not ended.
    pub fn give_back(&self, batch: &Batch) -> bool {
        let mut state = self.shared.lock();
        let slot = &mut state.slots[batch.slot];
        let is_current = slot.next == batch.value(batch.num_layers);
        if !batch.has_ended() || !is_current {
            return false;
        }
        // A cancelled batch leaves its doorbell behind; the next one counts from here.
        self.shared
            .word(batch.slot, DOORBELL_OFFSET)
            .store(slot.next, Ordering::Release);
        slot.is_taken = false;
        true
    }
}

impl Drop for FlagRing {
    fn drop(&mut self) {
        {
            let _state = self.shared.lock();
            self.shared.is_closing.store(true, Ordering::Release);
        }
        self.shared.arrival.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            eprintln!("banyan: the ring's thread had failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    struct Told {
        num_layers: usize,
        ran: mpsc::Sender<usize>,
        fails_at: Option<usize>,
    }

    impl LayerWork for Told {
        fn num_layers(&self) -> usize {
            self.num_layers
        }

        fn run_layer(&mut self, layer: usize) -> std::result::Result<(), String> {
            self.ran.send(layer).unwrap();
            assert_ne!(self.fails_at, Some(layer + 100), "told to panic");
            match self.fails_at {
                Some(at) if at == layer => Err("told to".into()),
                _ => Ok(()),
            }
        }
    }

    fn ring(first: u32) -> (FlagRing, Arc<SharedMemory>) {
        let memory = Arc::new(SharedMemory::create(2 * SLOT_BYTES, "ring").unwrap());
        (FlagRing::start(memory.clone(), 2, first).unwrap(), memory)
    }

    fn told(num_layers: usize, fails_at: Option<usize>) -> (Box<Told>, mpsc::Receiver<usize>) {
        let (ran, seen) = mpsc::channel();
        let work = Told {
            num_layers,
            ran,
            fails_at,
        };
        (Box::new(work), seen)
    }

    fn word(memory: &SharedMemory, slot: usize, offset: usize) -> &AtomicU32 {
        &memory.mapping().words(slot * SLOT_BYTES + offset, 1)[0]
    }

    /// What a stream does at its wait.
    fn wait(memory: &SharedMemory, slot: usize, value: u32) {
        let deadline = Instant::now() + Duration::from_secs(5);
        while !has_come(
            word(memory, slot, ANSWER_OFFSET).load(Ordering::Acquire),
            value,
        ) {
            assert!(Instant::now() < deadline, "a stream waits for ever");
            thread::yield_now();
        }
    }

    fn until_ended(batch: &Batch) {
        while !batch.has_ended() {
            thread::yield_now();
        }
    }

    #[test]
    fn layer_when_not_asked_for_then_it_is_not_run() {
        let (ring, memory) = ring(0);
        let (work, ran) = told(3, None);
        let batch = ring.send(work).unwrap();
        assert!(ran.recv_timeout(Duration::from_millis(20)).is_err());
        for layer in 0..3 {
            word(&memory, batch.slot, DOORBELL_OFFSET)
                .store(batch.value(layer + 1), Ordering::Release);
            wait(&memory, batch.slot, batch.value(layer + 1));
            assert_eq!(ran.try_recv(), Ok(layer));
            assert!(ran.try_recv().is_err());
        }
        until_ended(&batch);
        assert!(!batch.has_failed() && ring.give_back(&batch));
    }

    #[test]
    fn values_when_they_go_round_then_batches_still_follow_each_other() {
        let (ring, memory) = ring(u32::MAX - 2);
        for _ in 0..4 {
            let (work, _ran) = told(3, None);
            let batch = ring.send(work).unwrap();
            word(&memory, batch.slot, DOORBELL_OFFSET).store(batch.value(3), Ordering::Release);
            wait(&memory, batch.slot, batch.value(3));
            until_ended(&batch);
            assert!(!batch.has_failed() && ring.give_back(&batch));
        }
    }

    #[test]
    fn batch_when_a_layer_fails_or_panics_then_every_wait_is_answered_and_the_thread_goes_on() {
        for fails_at in [1, 101] {
            let (ring, memory) = ring(0);
            let (work, ran) = told(4, Some(fails_at));
            let batch = ring.send(work).unwrap();
            word(&memory, batch.slot, DOORBELL_OFFSET).store(batch.value(2), Ordering::Release);
            wait(&memory, batch.slot, batch.value(4));
            assert!(batch.has_failed());
            assert_eq!(ran.iter().collect::<Vec<_>>(), [0, 1]);
            until_ended(&batch);
            assert!(ring.give_back(&batch));
            let (work, _ran) = told(1, None);
            let next = ring.send(work).unwrap();
            assert!(!next.has_ended(), "an old doorbell does not ring for it");
            word(&memory, next.slot, DOORBELL_OFFSET).store(next.value(1), Ordering::Release);
            until_ended(&next);
            assert!(!next.has_failed());
        }
    }

    #[test]
    fn batch_when_cancelled_or_the_ring_is_dropped_then_its_waits_are_answered() {
        let (ring, memory) = ring(0);
        let (first, _first_ran) = told(2, None);
        let (second, _second_ran) = told(2, None);
        let batches = [ring.send(first).unwrap(), ring.send(second).unwrap()];
        batches[0].cancel();
        wait(&memory, batches[0].slot, batches[0].value(2));
        assert!(batches[0].has_failed() && !batches[1].has_ended());
        drop(ring);
        for batch in &batches {
            wait(&memory, batch.slot, batch.value(2));
            assert!(batch.has_failed() && batch.has_ended());
        }
    }

    #[test]
    fn slots_when_all_are_taken_then_none_until_one_is_given_back() {
        let (ring, memory) = ring(0);
        let batches: Vec<_> = (0..2)
            .map(|_| ring.send(told(1, None).0).unwrap())
            .collect();
        assert!(ring.send(told(1, None).0).is_none());
        assert!(!ring.give_back(&batches[0]), "it has not ended");
        batches[0].cancel();
        until_ended(&batches[0]);
        assert!(ring.give_back(&batches[0]) && !ring.give_back(&batches[1]));
        assert_eq!(ring.send(told(1, None).0).unwrap().slot, batches[0].slot);
        drop(memory);
    }

    fn following(reads: &[Arc<LayerProgress>]) -> Box<Following> {
        Box::new(Following::new(reads.to_vec()).unwrap())
    }

    #[test]
    fn following_when_the_read_ends_early_then_the_rest_fails() {
        let (ring, memory) = ring(0);
        let reads = [Arc::new(LayerProgress::new(2))];
        let batch = ring.send(following(&reads)).unwrap();
        reads[0].advance_to(1);
        wait(&memory, batch.slot, batch.value(1));
        assert!(!batch.has_failed());
        reads[0].end();
        wait(&memory, batch.slot, batch.value(2));
        assert!(batch.has_failed());
    }

    #[test]
    fn following_when_one_of_several_reads_lags_then_its_layer_is_not_answered() {
        let (ring, memory) = ring(0);
        let reads = [
            Arc::new(LayerProgress::new(2)),
            Arc::new(LayerProgress::new(2)),
        ];
        let batch = ring.send(following(&reads)).unwrap();
        reads[0].advance_to(2);
        reads[1].advance_to(1);
        wait(&memory, batch.slot, batch.value(1));
        thread::sleep(Duration::from_millis(20));
        let answer = word(&memory, batch.slot, ANSWER_OFFSET).load(Ordering::Acquire);
        assert_eq!(answer, batch.value(1));
        reads[1].advance_to(2);
        until_ended(&batch);
        assert!(!batch.has_failed() && ring.give_back(&batch));
    }

    #[test]
    fn following_when_layers_differ_or_nothing_is_followed_then_refused() {
        let of = |num_layers| Arc::new(LayerProgress::new(num_layers));
        assert!(Following::new(vec![of(2), of(3)]).is_err());
        assert!(Following::new(vec![]).is_err());
    }
}
