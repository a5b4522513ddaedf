// SPDX-License-Identifier: Apache-2.0
//! The I/O thread: reads first, then writes, then sleep.
//!
//! Invariants
//! * The device is used by this thread only. Every operation in flight is in `transfers` or known to the writer.
//! * Freed depth is filled again before what came back is verified, so that the device works while checksums are computed.

mod reads;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use banyan_shm::memory::SharedMemory;

use crate::buffer::{AlignedBytes, BufferPool};
use crate::device::{Completion, Device, FileId, Span, Token};
use crate::directory::ShelfId;
use crate::error::is_of_mount;
use crate::files::Files;
use crate::geometry::{BLOCK_BYTES, Geometry};
use crate::pacing::Load;
use crate::reading::{Planned, ReadJob};
use crate::shared::Shared;
use crate::slots::occupy;
use crate::writing::{Surroundings, Writer, WriterToken};

/// Bytes to verify before the device is looked at again: it is to be given more work before it runs out.
const SLICE_BYTES: usize = 256 << 10;
/// While a write waits for readers of another process, their end is looked for this often.
const YIELD: Duration = Duration::from_millis(1);
const BUSY: Duration = Duration::from_millis(100);
const IDLE: Duration = Duration::from_secs(60);

struct Transfer {
    job: usize,
    planned: Planned,
    len: usize,
    header: Option<AlignedBytes>,
    bounce: Option<AlignedBytes>,
}

pub struct Engine {
    shared: Arc<Shared>,
    device: Box<dyn Device>,
    files: Files,
    /// Shelves whose files are let go of when no read is of them, and no write.
    left: Vec<ShelfId>,
    /// None where another namespace is only read.
    writer: Option<Writer>,
    geometry: Arc<Geometry>,
    jobs: Vec<Option<ReadJob>>,
    transfers: Vec<Option<Transfer>>,
    num_in_flight: usize,
    headers: BufferPool,
    bounces: BufferPool,
    /// Kept mapped: the device goes on to use its addresses.
    known_memory: Vec<Arc<SharedMemory>>,
    stall_after: Duration,
    /// How long it may sleep while there is work: often enough for the clock, and others, to see that it comes round.
    nap: Duration,
}

/// Reads are even, operations of the writer odd.
fn read_token(index: usize) -> Token {
    (index as u64) << 1
}

fn writer_token(token: WriterToken) -> Token {
    let (kind, number) = match token {
        WriterToken::Record(index) => (0, index as u64),
        WriterToken::SegmentSync(file) => (1, u64::from(file.0)),
        WriterToken::Append => (2, 0),
        WriterToken::LogSync => (3, 0),
    };
    number << 3 | kind << 1 | 1
}

enum Whose {
    Read(usize),
    Writer(WriterToken),
}

fn whose(token: Token) -> Whose {
    if token & 1 == 0 {
        return Whose::Read((token >> 1) as usize);
    }
    let number = token >> 3;
    Whose::Writer(match token >> 1 & 3 {
        0 => WriterToken::Record(number as usize),
        1 => WriterToken::SegmentSync(FileId(number as u32)),
        2 => WriterToken::Append,
        _ => WriterToken::LogSync,
    })
}

/// The device has answered a read: nobody waits for the drive any more, though a throttle keeps the answer.
pub fn on_answer(shared: &Shared, token: Token) {
    if let Whose::Read(slot) = whose(token) {
        shared.watch.lock().landed(slot);
    }
}

impl Engine {
    pub fn new(
        shared: Arc<Shared>,
        device: Box<dyn Device>,
        writer: Option<Writer>,
        stall_after: Duration,
    ) -> Self {
        let geometry = shared.geometry.clone();
        Self {
            headers: BufferPool::new(BLOCK_BYTES),
            bounces: BufferPool::new(geometry.max_piece_bytes() as usize),
            shared,
            device,
            files: Files::default(),
            left: Vec::new(),
            writer,
            geometry,
            jobs: Vec::new(),
            transfers: Vec::new(),
            num_in_flight: 0,
            known_memory: Vec::new(),
            stall_after,
            nap: BUSY.min(stall_after / 4),
        }
    }

    pub fn run(&mut self) {
        let mut completed = Vec::new();
        let mut landed = VecDeque::new();
        loop {
            self.shared.watch.lock().turn();
            let is_closing = self.take_inbox();
            self.tell_reads();
            self.start_reads();
            self.with_writer(|writer, around| writer.step(around));
            if is_closing && self.is_quiet() {
                return;
            }
            self.submit();
            let patience = if !landed.is_empty() || self.ready_next_write() {
                // One record at a time: reads and free write slots do not wait for the checksums of several.
                Duration::ZERO
            } else {
                self.patience(is_closing)
            };
            if let Err(error) = self.device.reap(patience, &mut completed) {
                // Nothing is known about what is in flight any more: going on could hand out memory that is still written to.
                banyan_shm::say!("banyan: the store's device stopped: {error}");
                std::process::abort();
            }
            for done in &completed {
                self.leaves_device(done);
            }
            landed.extend(completed.drain(..));
            self.start_reads();
            self.submit();
            self.handle(&mut landed);
            self.end_reads();
        }
    }

    /// A slice of what has landed: large transfers one by one, many small ones at a time.
    fn handle(&mut self, landed: &mut VecDeque<Completion>) {
        let mut num_bytes = 0;
        while num_bytes < SLICE_BYTES
            && let Some(done) = landed.pop_front()
        {
            num_bytes += self.on_completion(done);
        }
    }

    fn leaves_device(&mut self, done: &Completion) {
        if let Whose::Read(_) = whose(done.token) {
            self.num_in_flight -= 1;
            on_answer(&self.shared, done.token);
        }
    }

    fn submit(&mut self) {
        if let Err(error) = self.device.submit() {
            banyan_shm::say!("banyan: the store's device takes no operations: {error}");
            std::process::abort();
        }
    }

    fn take_inbox(&mut self) -> bool {
        let mut inbox = self.shared.inbox();
        let reads = std::mem::take(&mut inbox.reads);
        let memories = std::mem::take(&mut inbox.memories);
        self.left.append(&mut inbox.left);
        let is_closing = inbox.is_closing;
        drop(inbox);
        for memory in &memories {
            self.know(memory);
        }
        self.leave_files();
        for job in reads {
            self.add_read(job);
        }
        if is_closing {
            self.with_writer(|writer, around| writer.give_up_waiting(around));
        }
        is_closing
    }

    fn leave_files(&mut self) {
        for shelf in std::mem::take(&mut self.left) {
            let index = self.shared.lock().catalog.shelf_index(shelf);
            let is_written = self.shared.own_shelf == Some(shelf) && !self.writer_rests();
            if is_written || self.jobs.iter().flatten().any(|job| job.is_of(index)) {
                self.left.push(shelf);
            } else {
                self.files.forget(&mut *self.device, shelf);
            }
        }
    }

    fn add_read(&mut self, job: ReadJob) {
        self.know(&job.memory);
        occupy(&mut self.jobs, job);
    }

    /// Memory is registered when it is announced or first read into, and stays so: an arena lives as long as its server.
    fn know(&mut self, memory: &Arc<SharedMemory>) {
        let is_it = |known: &Arc<SharedMemory>| Arc::ptr_eq(known, memory);
        if !self.known_memory.iter().any(is_it) {
            self.known_memory.push(memory.clone());
            self.device
                .add_memory(Span::within(memory, 0, memory.len()));
        }
    }

    fn num_reads(&self) -> usize {
        self.jobs.iter().flatten().count()
    }

    /// Nobody else waits for reads that the drive does not answer.
    fn tell_reads(&self) {
        // The row is the writer's.
        if self.writer.is_some()
            && let Some(traffic) = &self.shared.traffic
        {
            let jobs = self.jobs.iter().flatten();
            traffic.set_reading(jobs.filter(|job| !job.ticket.is_late()).count());
        }
    }

    // ---- writes ------------------------------------------------------------------------------------------------

    fn with_writer(&mut self, act: impl FnOnce(&mut Writer, &mut Surroundings<'_>)) {
        let load = self.load();
        let Some(writer) = &mut self.writer else {
            return;
        };
        let mut around = Surroundings {
            shared: &self.shared,
            device: &mut *self.device,
            files: &mut self.files,
            load,
            token: writer_token,
        };
        act(writer, &mut around);
    }

    fn ready_next_write(&mut self) -> bool {
        let mut has_more = false;
        self.with_writer(|writer, around| has_more = writer.make_ready(around));
        has_more
    }

    fn load(&self) -> Load {
        let has_work = !self.shared.lock().is_drained();
        Load {
            reads_here: self.num_reads(),
            reads_elsewhere: if has_work {
                self.shared.reads_elsewhere(self.stall_after)
            } else {
                0
            },
            writes_here: 0,
        }
    }

    /// How many bytes were read.
    fn on_completion(&mut self, done: Completion) -> usize {
        if done.result.as_ref().is_err_and(is_of_mount) {
            self.open_anew(done.token);
        }
        match whose(done.token) {
            Whose::Read(slot) => self.on_read(slot, done.result),
            Whose::Writer(token) => {
                self.with_writer(|writer, around| writer.on_completion(around, token, done.result));
                0
            }
        }
    }

    /// Files that were open when the mount went away do not come back with it: those of a failed operation's shelf are left.
    fn open_anew(&mut self, token: Token) {
        let shelf = match whose(token) {
            Whose::Writer(_) => self.shared.own_shelf,
            Whose::Read(slot) => self.transfers[slot].as_ref().map(|transfer| {
                let state = self.shared.lock();
                state.catalog.shelf_id(transfer.planned.hit.shelf)
            }),
        };
        if let Some(shelf) = shelf
            && !self.left.contains(&shelf)
        {
            self.left.push(shelf);
        }
    }

    // ---- sleep -------------------------------------------------------------------------------------------------

    fn is_quiet(&self) -> bool {
        self.num_reads() == 0 && self.writer_rests()
    }

    fn writer_rests(&self) -> bool {
        let rests =
            |writer: &Writer| !writer.has_writes() && !writer.is_busy() && !writer.has_batch();
        self.writer.as_ref().is_none_or(rests)
    }

    fn patience(&self, is_closing: bool) -> Duration {
        if self.jobs.iter().flatten().any(ReadJob::is_over) {
            return Duration::ZERO;
        }
        if self.num_in_flight > 0 || !self.is_quiet() || is_closing {
            return self.nap;
        }
        if self.shared.lock().is_drained() {
            IDLE
        } else if self.shared.reads_elsewhere(self.stall_after) > 0 {
            YIELD
        } else {
            self.nap
        }
    }
}
