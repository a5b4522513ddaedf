// SPDX-License-Identifier: Apache-2.0
//! The way down: queued pages become records, records become durable, and only then get their manifest entry.
//!
//! Invariants
//! * A publish entry is appended only after a sync of its segment that was submitted after the record's write had completed, and
//!   never when a sync of that segment has failed since the record was begun.
//! * A retired place is handed out again only after its entry, or a manifest without it, is durable.
//! * One commit at a time. After a failed append or sync of the log nothing is appended until a new manifest has taken its place.
//! * Nothing is begun while the shelf may be another machine's by now (`marks`): what waits is given up, and a new manifest is the way back.
//!
//! Commit: idle -> syncing segments -> appending -> syncing log -> idle; idle or a failure -> rewriting -> idle.

mod commit;
mod joined;
mod records;
mod rewrite;
mod room;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use crate::buffer::{AlignedBytes, BufferPool};
use crate::device::{Device, FileId, Span, Token};
use crate::directory::ShelfId;
use crate::error::Result;
use crate::files::Files;
use crate::format::{FileHeader, Record};
use crate::geometry::{BLOCK_BYTES, Place, Segmenting};
use crate::growth::Limits;
use crate::marks::Hold;
use crate::pacing::Load;
use crate::said::Said;
use crate::shared::Shared;
use crate::state::Queued;
use room::NoGrowth;

/// Written bytes after which a commit starts while writes go on, if that is not more than a quarter of the back-log: frames are let go by
/// commits.
const MAX_COMMIT_BYTES: u64 = 64 << 20;
/// A commit that waits for readers waits no longer.
const COMMIT_PATIENCE: Duration = Duration::from_secs(2);
/// After running out of space or a failed log: nothing is tried for so long.
const REST: Duration = Duration::from_secs(10);
/// After a refused growth the answer is believed for so long.
const GROWTH_BELIEF: Duration = Duration::from_secs(2);
/// Another process has the store's lock: it is tried again after so long.
const LOCK_BELIEF: Duration = Duration::from_millis(20);
/// Places to have free ahead of the writer.
const MAX_EVICTED_AHEAD: usize = 64;
/// A log is replaced when it has this many entries for each place, and some: a small shelf would replace it all the time.
const ENTRIES_PER_PLACE: u64 = 2;
pub const MORE_ENTRIES: u64 = 512;
/// A log grows by so much at a time, in zeros that entries then replace: a sync of written blocks needs no journal commit.
const MAX_LOG_STEP_BYTES: u64 = 1 << 20;

/// What kind of operation a token of the writer stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriterToken {
    Record(usize),
    SegmentSync(FileId),
    Append,
    LogSync,
}

struct Writing {
    page: Queued,
    record: Record,
    place: Place,
    file: FileId,
    header: AlignedBytes,
    bounce: Option<AlignedBytes>,
}

/// A page that may go down at once: its place is taken, its checksums are in its header.
struct Ready {
    writing: Writing,
    /// In the segment.
    offset: u64,
    body: Span,
}

/// A record that is down but not yet durable.
struct Written {
    record: Record,
    place: Place,
    file: FileId,
}

type Retired = Vec<(Place, Record)>;

enum Commit {
    Idle,
    SyncingSegments {
        written: Vec<Written>,
        retired: Retired,
        left: usize,
    },
    Appending {
        written: Vec<Written>,
        retired: Retired,
        /// What the device is reading.
        _bytes: Vec<u8>,
    },
    SyncingLog {
        written: Vec<Written>,
        retired: Retired,
        num_bytes: u64,
    },
    Rewriting {
        result: Receiver<Result<(std::fs::File, u64)>>,
        epoch: u64,
        retired: Retired,
    },
    /// The log cannot be trusted; a new manifest is tried at this time.
    Resting(Instant),
}

/// What the writer needs of the I/O thread for one call.
pub struct Surroundings<'a> {
    pub shared: &'a Arc<Shared>,
    pub device: &'a mut dyn Device,
    pub files: &'a mut Files,
    pub load: Load,
    /// Makes the token of an operation.
    pub token: fn(WriterToken) -> Token,
}

/// The shelf as recovery found or made it.
pub struct Opened {
    pub hold: Hold,
    pub header: FileHeader,
    pub segments: Vec<u32>,
    pub log: std::fs::File,
    pub log_bytes: u64,
    /// The greatest number that was ever used for an entry or a generation.
    pub sequence: u64,
}

pub struct Writer {
    header: FileHeader,
    segments: Vec<u32>,
    limits: Limits,
    commit_bytes: u64,
    log: FileId,
    log_bytes: u64,
    /// Blocks up to here have been written, with entries or zeros.
    log_allocated: u64,
    sequence: u64,
    headers: BufferPool,
    bounces: BufferPool,
    ready: VecDeque<Ready>,
    /// The records of each operation.
    running: Vec<Option<Vec<Writing>>>,
    num_running: usize,
    batch: Vec<Written>,
    batch_since: Option<Instant>,
    /// Segments whose sync has failed, with the last generation of that time.
    distrusted: HashMap<FileId, u64>,
    commit: Commit,
    /// Places of records whose entries may or may not have reached the log.
    limbo: Vec<Place>,
    /// For how long records have been going down or being made durable, up to the last step, and since when they are again.
    busy: Duration,
    busy_since: Option<Instant>,
    /// A segment that is being made.
    growing: Option<Receiver<std::result::Result<u32, NoGrowth>>>,
    no_growth_until: Option<Instant>,
    /// Since when another process has had the store's lock, whenever it was tried.
    locked_out_since: Option<Instant>,
    stopped_until: Option<Instant>,
    said_of_growth: Said,
    said_of_manifest: Said,
    said_of_writes: Said,
    hold: Hold,
}

impl Writer {
    pub fn new(
        opened: Opened,
        limits: Limits,
        backlog_bytes: u64,
        device: &mut dyn Device,
    ) -> io::Result<Self> {
        let record_bytes = opened.header.geometry.record_bytes() as usize;
        Ok(Self {
            log: device.add_file(Arc::new(opened.log))?,
            header: opened.header,
            segments: opened.segments,
            limits,
            commit_bytes: MAX_COMMIT_BYTES.min(backlog_bytes / 4),
            log_bytes: opened.log_bytes,
            log_allocated: opened.log_bytes,
            sequence: opened.sequence,
            headers: BufferPool::new(BLOCK_BYTES),
            bounces: BufferPool::new(record_bytes),
            ready: VecDeque::new(),
            running: Vec::new(),
            num_running: 0,
            batch: Vec::new(),
            batch_since: None,
            distrusted: HashMap::new(),
            commit: Commit::Idle,
            limbo: Vec::new(),
            busy: Duration::ZERO,
            busy_since: None,
            growing: None,
            no_growth_until: None,
            locked_out_since: None,
            stopped_until: None,
            said_of_growth: Said::default(),
            said_of_manifest: Said::default(),
            said_of_writes: Said::default(),
            hold: opened.hold,
        })
    }

    fn segmenting(&self) -> Segmenting {
        self.header.segmenting()
    }

    pub fn shelf(&self) -> ShelfId {
        self.header.shelf
    }

    /// Whether records are down that no commit has taken up yet.
    pub fn has_batch(&self) -> bool {
        !self.batch.is_empty()
    }

    /// Whether a record is going down or just about to.
    pub fn has_writes(&self) -> bool {
        self.num_running > 0 || !self.ready.is_empty()
    }

    /// Whether a commit or a new manifest is under way.
    pub fn is_committing(&self) -> bool {
        !matches!(self.commit, Commit::Idle | Commit::Resting(_))
    }

    /// Whether anything of the shelf is being written or made on another thread.
    pub fn is_busy(&self) -> bool {
        self.is_committing() || self.growing.is_some()
    }

    /// Starts what may be started now.
    pub fn step(&mut self, around: &mut Surroundings<'_>) {
        self.wake_up(around);
        self.take_manifest(around);
        self.take_growth(around);
        self.renew(around);
        self.start_writes(around);
        self.start_commit(around);
        self.clock();
        self.tell(around);
    }

    /// Counts up to now, also while writes go on and on.
    fn clock(&mut self) {
        let now = Instant::now();
        if let Some(since) = self.busy_since {
            self.busy += now - since;
        }
        self.busy_since = (self.num_running > 0 || self.is_committing()).then_some(now);
    }

    fn wake_up(&mut self, around: &mut Surroundings<'_>) {
        let now = Instant::now();
        if self.stopped_until.is_some_and(|until| now >= until) {
            self.stopped_until = None;
            around.shared.lock().has_no_space = false;
        }
        if let Commit::Resting(until) = self.commit
            && (now >= until || around.shared.lock().wants_manifest)
        {
            self.rewrite(around);
        }
    }

    fn tell(&self, around: &Surroundings<'_>) {
        let in_commit = match &self.commit {
            Commit::Idle | Commit::Resting(_) => 0,
            Commit::SyncingSegments {
                written, retired, ..
            }
            | Commit::Appending {
                written, retired, ..
            }
            | Commit::SyncingLog {
                written, retired, ..
            } => written.len() + retired.len(),
            Commit::Rewriting { .. } => 1,
        };
        let mut state = around.shared.lock();
        let in_hand = self.ready.len() + self.running.iter().flatten().map(Vec::len).sum::<usize>();
        state.num_unsettled = in_hand + self.batch.len() + in_commit;
        state.counters.writing_us = self.busy.as_micros() as u64;
        if state.is_settled() {
            around.shared.changed.notify_all();
        }
    }

    pub fn on_completion(
        &mut self,
        around: &mut Surroundings<'_>,
        token: WriterToken,
        result: io::Result<()>,
    ) {
        match token {
            WriterToken::Record(index) => self.on_record(around, index, result),
            WriterToken::SegmentSync(file) => self.on_segment_sync(around, file, result),
            WriterToken::Append => self.on_appended(around, result),
            WriterToken::LogSync => self.on_log_sync(around, result),
        }
    }
}

fn release_claims(shared: &Shared, pages: &[Queued]) {
    for page in pages {
        shared.release_claim(&page.namespace, &page.key);
    }
}
