// SPDX-License-Identifier: Apache-2.0
//! Words of mapped host memory that tell a GPU how far reads have come, one for each batch, and a thread that writes them.
//!
//! A read of the store begins when its request arrives. The stream that copies its pages up waits for the word before each layer: no
//! processor thread of the engine stands between two layers.
//!
//! Invariants
//! * A slot's word only moves forward, round the circle of 32 bits: layer `l` of a batch is `first + l`, and the next batch of the slot
//!   begins where it ended. Nothing is ever reset, so no late write can be taken for a new one.
//! * The answer for a layer covers all layers before it. What was written for them is visible before it (Release).
//! * Every batch is answered to its last layer, whatever becomes of its work (error, panic, shutdown): a stream never waits for ever.
//!   `has_failed` is true before such an answer shows.
//!
//! States of a batch: queued -> running --last layer--> landed; queued or running --error, panic, shutdown--> failed.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use crate::error::{Result, ShmError, invalid};
use crate::memory::SharedMemory;
use crate::progress::LayerProgress;
use crate::sync::{AtomicU32, Ordering};

/// A slot's word has a cache line of its own.
pub const SLOT_BYTES: usize = 64;

/// Brings one layer into memory completely, on the ring's thread; the reason when it cannot, or `stop` is set.
type LayerWork = dyn FnMut(usize, &AtomicBool) -> std::result::Result<(), String> + Send;

/// A batch in its slot, shared by the thread and whoever enqueues the waits.
pub struct Batch {
    pub slot: usize,
    /// The value that stands for layer 0.
    pub first: u32,
    pub num_layers: usize,
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

    /// What the word holds once so many layers have come.
    pub fn value(&self, num_layers: usize) -> u32 {
        self.first.wrapping_add(num_layers as u32)
    }
}

struct Slot {
    is_taken: bool,
    next: u32,
}

struct State {
    slots: Vec<Slot>,
    queued: VecDeque<(Arc<Batch>, Box<LayerWork>)>,
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

    fn word(&self, slot: usize) -> &AtomicU32 {
        &self.memory.mapping().words(slot * SLOT_BYTES, 1)[0]
    }

    fn next(&self) -> Option<(Arc<Batch>, Box<LayerWork>)> {
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

    fn run(&self, batch: &Batch, work: Box<LayerWork>) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.run_layers(batch, work)));
        let reason = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(reason)) => Some(reason),
            Err(_) => Some("its work panicked".into()),
        };
        if reason.is_some() {
            batch.has_failed.store(true, Ordering::Release);
        }
        self.word(batch.slot)
            .store(batch.value(batch.num_layers), Ordering::Release);
        batch.has_ended.store(true, Ordering::Release);
        // Behind what others wait for: whoever reads the log may be slow.
        if let Some(reason) = reason {
            crate::say!("banyan: a batch of reads failed: {reason}");
        }
    }

    fn run_layers(
        &self,
        batch: &Batch,
        mut work: Box<LayerWork>,
    ) -> std::result::Result<(), String> {
        for layer in 0..batch.num_layers {
            if self.is_closing.load(Ordering::Acquire) {
                return Err(format!("shut down before layer {layer}"));
            }
            work(layer, &self.is_closing)?;
            self.word(batch.slot)
                .store(batch.value(layer + 1), Ordering::Release);
        }
        Ok(())
    }
}

/// Owns the thread; dropping it answers every batch as failed, and joins.
pub struct FlagRing {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl FlagRing {
    /// `memory` holds the words: zeroed, `num_slots` times `SLOT_BYTES`. `first` is where every slot starts to count (tests go round).
    pub fn start(memory: Arc<SharedMemory>, num_slots: usize, first: u32) -> Result<Self> {
        if num_slots == 0 || memory.len() / SLOT_BYTES < num_slots {
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
            shared.word(slot).store(first, Ordering::Release);
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

    /// Takes a slot that tells how far all `reads` have come; `None` when every slot is taken. An error for no reads, and for reads that
    /// differ in their number of layers.
    pub fn follow(&self, reads: Vec<Arc<LayerProgress>>) -> Result<Option<Arc<Batch>>> {
        let Some(num_layers) = reads.first().map(|read| read.num_layers()) else {
            return invalid!("no read to follow");
        };
        if num_layers == 0 {
            return invalid!("reads of no layers");
        }
        if let Some(other) = reads.iter().find(|read| read.num_layers() != num_layers) {
            return invalid!("reads of {num_layers} and of {} layers", other.num_layers());
        }
        // A layer is there when all of them say so.
        let work = move |layer: usize, stop: &AtomicBool| {
            let mut reads = reads.iter();
            if reads.all(|read| read.wait_layer_unless(layer, stop)) {
                return Ok(());
            }
            Err(format!(
                "a read ended, or was given up, before layer {layer}"
            ))
        };
        Ok(self.send(num_layers, Box::new(work)))
    }

    fn send(&self, num_layers: usize, work: Box<LayerWork>) -> Option<Arc<Batch>> {
        let mut state = self.shared.lock();
        let slot = state.slots.iter().position(|slot| !slot.is_taken)?;
        let first = state.slots[slot].next;
        state.slots[slot] = Slot {
            is_taken: true,
            next: first.wrapping_add(num_layers as u32),
        };
        let batch = Arc::new(Batch {
            slot,
            first,
            num_layers,
            has_failed: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
        });
        state.queued.push_back((batch.clone(), work));
        self.shared.arrival.notify_one();
        Some(batch)
    }

    /// The batch has ended and the device is past its waits: its slot may be taken again. `false` while it has not ended.
    pub fn give_back(&self, batch: &Batch) -> bool {
        let mut state = self.shared.lock();
        let slot = &mut state.slots[batch.slot];
        let is_current = slot.next == batch.value(batch.num_layers);
        if !batch.has_ended() || !is_current {
            return false;
        }
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
            crate::say!("banyan: the ring's thread had failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn ring(first: u32) -> (FlagRing, Arc<SharedMemory>) {
        let memory = Arc::new(SharedMemory::create(2 * SLOT_BYTES, "ring").unwrap());
        (FlagRing::start(memory.clone(), 2, first).unwrap(), memory)
    }

    fn read(num_layers: usize) -> Arc<LayerProgress> {
        Arc::new(LayerProgress::new(num_layers))
    }

    fn follow(ring: &FlagRing, reads: &[Arc<LayerProgress>]) -> Arc<Batch> {
        ring.follow(reads.to_vec()).unwrap().unwrap()
    }

    fn word(memory: &SharedMemory, batch: &Batch) -> u32 {
        let words: &[AtomicU32] = memory.mapping().words(batch.slot * SLOT_BYTES, 1);
        words[0].load(Ordering::Acquire)
    }

    /// What a stream does at its wait: it compares forward round the circle.
    fn wait(memory: &SharedMemory, batch: &Batch, num_layers: usize) {
        let (wanted, deadline) = (
            batch.value(num_layers),
            Instant::now() + Duration::from_secs(5),
        );
        while word(memory, batch).wrapping_sub(wanted).cast_signed() < 0 {
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
    fn layer_when_one_of_several_reads_lags_then_it_is_not_answered() {
        let (ring, memory) = ring(0);
        let reads = [read(2), read(2)];
        let batch = follow(&ring, &reads);
        reads[0].advance_to(2);
        reads[1].advance_to(1);
        wait(&memory, &batch, 1);
        thread::sleep(Duration::from_millis(20));
        assert_eq!(word(&memory, &batch), batch.value(1));
        reads[1].advance_to(2);
        until_ended(&batch);
        assert!(!batch.has_failed() && ring.give_back(&batch));
    }

    #[test]
    fn values_when_they_go_round_then_batches_still_follow_each_other() {
        let (ring, memory) = ring(u32::MAX - 2);
        for _ in 0..4 {
            let reads = [read(3)];
            let batch = follow(&ring, &reads);
            assert_eq!(
                word(&memory, &batch),
                batch.value(0),
                "nothing has come of this batch"
            );
            reads[0].advance_to(3);
            wait(&memory, &batch, 3);
            until_ended(&batch);
            assert!(!batch.has_failed() && ring.give_back(&batch));
        }
    }

    #[test]
    fn batch_when_a_read_ends_early_then_every_wait_is_answered_and_the_thread_goes_on() {
        let (ring, memory) = ring(0);
        let reads = [read(3)];
        let batch = follow(&ring, &reads);
        reads[0].advance_to(1);
        wait(&memory, &batch, 1);
        assert!(!batch.has_failed());
        reads[0].end();
        wait(&memory, &batch, 3);
        assert!(batch.has_failed());
        until_ended(&batch);
        assert!(ring.give_back(&batch));
        let reads = [read(1)];
        let next = follow(&ring, &reads);
        reads[0].advance_to(1);
        until_ended(&next);
        assert!(!next.has_failed());
    }

    #[test]
    fn batch_when_its_work_panics_then_every_wait_is_answered_and_the_thread_goes_on() {
        let (ring, memory) = ring(0);
        let batch = ring.send(2, Box::new(|layer, _| panic!("told to, at layer {layer}")));
        let batch = batch.unwrap();
        wait(&memory, &batch, 2);
        assert!(batch.has_failed());
        let reads = [read(1)];
        let next = follow(&ring, &reads);
        reads[0].advance_to(1);
        until_ended(&next);
        assert!(!next.has_failed());
    }

    #[test]
    fn ring_when_it_is_dropped_then_every_wait_is_answered() {
        let (ring, memory) = ring(0);
        let reads = [read(2), read(2)];
        let batches = [follow(&ring, &reads[..1]), follow(&ring, &reads[1..])];
        let lagging = reads[0].clone();
        let slow = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            lagging.advance_to(1);
        });
        drop(ring);
        for batch in &batches {
            wait(&memory, batch, 2);
            assert!(batch.has_failed() && batch.has_ended());
        }
        slow.join().unwrap();
    }

    #[test]
    fn slots_when_all_are_taken_then_none_until_one_is_given_back() {
        let (ring, _memory) = ring(0);
        let reads = [read(1), read(1)];
        let batches = [follow(&ring, &reads[..1]), follow(&ring, &reads[1..])];
        assert!(ring.follow(vec![read(1)]).unwrap().is_none());
        assert!(!ring.give_back(&batches[0]), "it has not ended");
        reads[0].end();
        until_ended(&batches[0]);
        assert!(ring.give_back(&batches[0]) && !ring.give_back(&batches[1]));
        let last = [read(1)];
        assert_eq!(follow(&ring, &last).slot, batches[0].slot);
        reads[1].end();
        last[0].end();
    }

    #[test]
    fn reads_when_their_layers_differ_or_there_are_none_then_refused() {
        let (ring, _memory) = ring(0);
        assert!(ring.follow(vec![read(2), read(3)]).is_err());
        assert!(ring.follow(vec![]).is_err());
        assert!(ring.follow(vec![read(0)]).is_err());
    }
}
