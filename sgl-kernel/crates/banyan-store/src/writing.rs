// SPDX-License-Identifier: Apache-2.0
//! The way down: queued pages become records, records become durable, and only then get their manifest entry.
//!
//! Invariants
//! * A publish entry is appended only after a sync of its segment that was submitted after the record's write had completed.
//! * A retired place is handed out again only after its entry, or a manifest without it, is durable.
//! * One commit at a time. After a failed append or sync of the log nothing is appended until a new manifest has taken its place.
//!
//! Commit: idle -> syncing segments -> appending -> syncing log -> idle; idle or a failure -> rewriting -> idle.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use banyan_shm::frame::Key;

use crate::buffer::{AlignedBytes, BufferPool};
use crate::catalog::Hit;
use crate::device::{Action, Device, FileId, Op, Span, Spans, Token};
use crate::directory::{Lock, ShelfId};
use crate::error::Result;
use crate::files::{Files, NoSegment, Use, create_segment, is_no_space};
use crate::format::{ENTRY_BYTES, Entry, FileHeader, Identity, Kind, RecordHeader};
use crate::geometry::{BLOCK_BYTES, Place, Segmenting};
use crate::growth::{self, Limits, Refusal, Space, may_grow};
use crate::manifest;
use crate::pacing::{self, Load, Permit};
use crate::places::{Record, Standing};
use crate::shared::Shared;
use crate::state::{Outcome, Queued, State};

/// Written bytes after which a commit starts while writes go on.
const COMMIT_BYTES: u64 = 64 << 20;
/// A commit that waits for readers waits no longer.
const COMMIT_PATIENCE: Duration = Duration::from_secs(2);
/// After running out of space or a failed log: nothing is tried for so long.
const REST: Duration = Duration::from_secs(10);
/// After a refused growth the answer is believed for so long.
const GROWTH_BELIEF: Duration = Duration::from_secs(2);
/// Places to have free ahead of the writer.
const MAX_EVICTED_AHEAD: usize = 64;
/// A log is replaced when it has this many entries for each place, and some.
const ENTRIES_PER_PLACE: u64 = 2;
const MORE_ENTRIES: u64 = 64;
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
    place: Place,
    generation: u64,
    file: FileId,
    header: AlignedBytes,
    bounce: Option<AlignedBytes>,
}

/// A record that is down but not yet durable.
struct Written {
    key: Key,
    parent: Key,
    identity: Identity,
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
        failed: BTreeSet<FileId>,
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
    pub lock: Lock,
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
    log: FileId,
    log_bytes: u64,
    /// Blocks up to here have been written, with entries or zeros.
    log_allocated: u64,
    sequence: u64,
    headers: BufferPool,
    bounces: BufferPool,
    running: Vec<Option<Writing>>,
    num_running: usize,
    batch: Vec<Written>,
    batch_since: Option<Instant>,
    commit: Commit,
    /// Places of records whose entries may or may not have reached the log.
    limbo: Vec<Place>,
    no_growth_until: Option<Instant>,
    stopped_until: Option<Instant>,
    _lock: Lock,
}

impl Writer {
    pub fn new(opened: Opened, limits: Limits, device: &mut dyn Device) -> io::Result<Self> {
        let record_bytes = opened.header.geometry.record_bytes() as usize;
        Ok(Self {
            log: device.add_file(Arc::new(opened.log))?,
            header: opened.header,
            segments: opened.segments,
            limits,
            log_bytes: opened.log_bytes,
            log_allocated: opened.log_bytes,
            sequence: opened.sequence,
            headers: BufferPool::new(BLOCK_BYTES),
            bounces: BufferPool::new(record_bytes),
            running: Vec::new(),
            num_running: 0,
            batch: Vec::new(),
            batch_since: None,
            commit: Commit::Idle,
            limbo: Vec::new(),
            no_growth_until: None,
            stopped_until: None,
            _lock: opened.lock,
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

    pub fn num_running(&self) -> usize {
        self.num_running
    }

    pub fn num_segments(&self) -> usize {
        self.segments.len()
    }

    /// Whether a commit or a new manifest is under way.
    pub fn is_committing(&self) -> bool {
        !matches!(self.commit, Commit::Idle | Commit::Resting(_))
    }

    /// Starts what may be started now.
    pub fn step(&mut self, around: &mut Surroundings<'_>) {
        self.wake_up(around);
        self.take_manifest(around);
        self.start_writes(around);
        self.start_commit(around);
        self.tell(around);
    }

    fn wake_up(&mut self, around: &mut Surroundings<'_>) {
        let now = Instant::now();
        if self.stopped_until.is_some_and(|until| now >= until) {
            self.stopped_until = None;
            around.shared.lock().stopped = None;
        }
        if let Commit::Resting(until) = self.commit
            && now >= until
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
        state.num_unsettled = self.num_running + self.batch.len() + in_commit;
        if state.is_drained() {
            around.shared.changed.notify_all();
        }
    }

    // ---- records -----------------------------------------------------------------------------------------------

    fn start_writes(&mut self, around: &mut Surroundings<'_>) {
        if matches!(self.commit, Commit::Resting(_)) || self.stopped_until.is_some() {
            let mut state = around.shared.lock();
            if state.permit == Permit::Draining {
                let lost = state.fail_queue();
                drop(state);
                release_claims(around.shared, &lost);
            }
            return;
        }
        let record_bytes = self.header.geometry.record_bytes();
        while self.num_running < pacing::MAX_WRITE_DEPTH {
            let shared = around.shared.clone();
            let mut state = shared.lock();
            let load = Load {
                writes_here: self.num_running,
                ..around.load
            };
            let Some(front) = state.backlog.queue.front() else {
                return;
            };
            if !pacing::may_write(state.permit, load, record_bytes) {
                return;
            }
            if state.catalog.contains(&front.key) {
                pass_over(&shared, &mut state);
                continue;
            }
            let place = state.own.as_mut().and_then(|own| own.places.take_free());
            let Some(place) = place else {
                drop(state);
                if !self.make_room(around) {
                    return;
                }
                continue;
            };
            let Some(page) = state.backlog.queue.pop_front() else {
                return;
            };
            state.permit = pacing::spend(state.permit, record_bytes);
            drop(state);
            self.write(around, page, place);
        }
    }

    fn write(&mut self, around: &mut Surroundings<'_>, page: Queued, place: Place) {
        self.sequence += 1;
        let generation = self.sequence;
        let (segment, offset) = self.segmenting().locate(place);
        let whose = (self.header.shelf, segment);
        let stripe = &around.shared.stripe;
        let file = match around.files.get(stripe, around.device, whose, Use::Writing) {
            Ok(file) => file,
            Err(error) => {
                self.fail_write(around, page, place, &error);
                return;
            }
        };
        let mut writing = Writing {
            page,
            place,
            generation,
            file,
            header: self.headers.take(),
            bounce: None,
        };
        let body = self.prepare(&mut writing);
        let index = match self.running.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.running.push(None);
                self.running.len() - 1
            }
        };
        let op = Op {
            token: (around.token)(WriterToken::Record(index)),
            file,
            offset,
            action: Action::Write(Spans([writing.header.span(0, BLOCK_BYTES), body])),
        };
        self.running[index] = Some(writing);
        self.num_running += 1;
        // SAFETY: header and bounce are kept in `running`; the frame is the store's, and `page.memory` keeps it mapped, until the
        // operation has been reaped.
        unsafe { around.device.push(op) };
    }

    /// Header with the checksums, and the bytes behind it: the frame itself, or a copy with the layers on block boundaries.
    fn prepare(&mut self, writing: &mut Writing) -> Span {
        let geometry = &self.header.geometry;
        let page = &writing.page;
        let frame = Span {
            start: page
                .memory
                .mapping()
                .start()
                .wrapping_add(page.offset as usize),
            len: geometry.frame_bytes() as usize,
        };
        // SAFETY: `Store::put` checked that the frame lies inside its memory; its owner does not write it until it is told so.
        let bytes = unsafe { frame.bytes() };
        let identity = Identity {
            key: page.key,
            namespace: page.namespace,
            generation: writing.generation,
        };
        let layer_of = |layer: usize| {
            let place = geometry.in_frame(&(layer..layer + 1));
            &bytes[place.start as usize..place.end as usize]
        };
        let layers = 0..geometry.num_layers();
        let header = RecordHeader {
            identity,
            parent: page.parent,
            checksums: layers
                .clone()
                .map(|layer| identity.checksum(layer, layer_of(layer)))
                .collect(),
        };
        header.encode(writing.header.bytes_mut());
        if geometry.is_dense() {
            return frame;
        }
        let mut bounce = self.bounces.take();
        for layer in layers.clone() {
            let source = layer_of(layer);
            let at = geometry.in_record(&(layer..layer + 1)).start as usize - BLOCK_BYTES;
            bounce.bytes_mut()[at..at + source.len()].copy_from_slice(source);
        }
        let len = geometry.in_record(&layers);
        let body = bounce.span(0, (len.end - len.start) as usize);
        writing.bounce = Some(bounce);
        body
    }

    fn on_record(&mut self, around: &mut Surroundings<'_>, index: usize, result: io::Result<()>) {
        let Some(writing) = self.running[index].take() else {
            unreachable!("a completion belongs to a running write")
        };
        self.num_running -= 1;
        self.headers.give_back(writing.header);
        if let Some(bounce) = writing.bounce {
            self.bounces.give_back(bounce);
        }
        let Queued {
            key,
            parent,
            namespace,
            ..
        } = writing.page;
        if let Err(error) = result {
            self.fail_write(around, writing.page, writing.place, &error);
            return;
        }
        self.batch_since.get_or_insert_with(Instant::now);
        self.batch.push(Written {
            key,
            parent,
            identity: Identity {
                key,
                namespace,
                generation: writing.generation,
            },
            place: writing.place,
            file: writing.file,
        });
    }

    fn fail_write(
        &mut self,
        around: &Surroundings<'_>,
        page: Queued,
        place: Place,
        error: &io::Error,
    ) {
        let mut state = around.shared.lock();
        if let Some(own) = &mut state.own {
            own.places.give_up(place);
        }
        if is_no_space(error) {
            state.counters.no_space_pauses += 1;
            state.stopped = Some("no space is left on the device");
            self.stopped_until = Some(Instant::now() + REST);
        }
        state.settle(page.key, &page.parent, Outcome::Failed);
        let mut lost = state.fail_descendants(page.key);
        drop(state);
        lost.push(page);
        release_claims(around.shared, &lost);
    }

    // ---- room --------------------------------------------------------------------------------------------------

    /// True when a place may have become free; false when the writer has to wait, or nothing can be done.
    fn make_room(&mut self, around: &mut Surroundings<'_>) -> bool {
        if self.grow(around) {
            return true;
        }
        let mut state = around.shared.lock();
        let Some(own) = &state.own else { return false };
        let is_waiting = own.places.num_retired() > 0 || self.is_committing();
        let wanted = (own.places.num_places() / 8).clamp(1, MAX_EVICTED_AHEAD);
        if is_waiting || state.evict(wanted) > 0 {
            return false;
        }
        if self.num_running > 0 || !self.batch.is_empty() {
            return false;
        }
        // Every record is needed by what is queued behind it, or nothing is allowed at all: the chain is longer than the store.
        let Some(page) = state.backlog.queue.pop_front() else {
            return false;
        };
        state.settle(page.key, &page.parent, Outcome::Failed);
        let mut lost = state.fail_descendants(page.key);
        drop(state);
        lost.push(page);
        release_claims(around.shared, &lost);
        true
    }

    /// Adds a segment if all limits allow it.
    fn grow(&mut self, around: &mut Surroundings<'_>) -> bool {
        let now = Instant::now();
        if self.no_growth_until.is_some_and(|until| now < until) {
            return false;
        }
        let refused = match self.try_grow(around.shared) {
            Ok(segment) => {
                let places = self.segmenting().places_of(segment);
                self.segments.push(segment);
                if let Some(own) = &mut around.shared.lock().own {
                    own.places.add(places);
                }
                return true;
            }
            Err(refused) => refused,
        };
        self.no_growth_until = Some(now + GROWTH_BELIEF);
        let mut state = around.shared.lock();
        match refused {
            NoGrowth::Refused(Refusal::Share | Refusal::Quota) => {
                state.counters.quota_refusals += 1
            }
            NoGrowth::Refused(Refusal::Floor) => state.counters.floor_refusals += 1,
            NoGrowth::NoSpace => state.counters.no_space_pauses += 1,
            NoGrowth::Failed(error) => {
                state.counters.write_failures += 1;
                eprintln!("banyan: the store cannot grow: {error}");
            }
        }
        false
    }

    fn try_grow(&self, shared: &Shared) -> std::result::Result<u32, NoGrowth> {
        let stripe = &shared.stripe;
        let segmenting = self.segmenting();
        let _lock = stripe.lock()?;
        let next = self.segments.iter().max().map_or(0, |last| last + 1);
        let mut refusal = Refusal::Quota;
        // A path that is full is passed over: numbers may be missing.
        for segment in next..next + stripe.num_paths() as u32 {
            loop {
                let space = Space {
                    used_bytes: growth::store_cost(stripe)?,
                    own_bytes: self.segments.len() as u64 * growth::segment_cost(&segmenting),
                    free_bytes: stripe.free_bytes(segment as usize % stripe.num_paths())?,
                    segment_bytes: growth::segment_cost(&segmenting),
                };
                match may_grow(&self.limits, &space) {
                    Ok(()) => {
                        let bytes = segmenting.file_bytes();
                        return match create_segment(stripe, &self.header, segment, bytes) {
                            Ok(()) => Ok(segment),
                            Err(NoSegment::NoSpace) => Err(NoGrowth::NoSpace),
                            Err(NoSegment::Failed(error)) => Err(NoGrowth::Failed(error)),
                        };
                    }
                    Err(Refusal::Quota)
                        if crate::opening::reclaim_one(stripe, self.header.shelf)? => {}
                    Err(reason) => {
                        refusal = reason;
                        break;
                    }
                }
            }
        }
        Err(NoGrowth::Refused(refusal))
    }

    // ---- commit ------------------------------------------------------------------------------------------------

    fn wants_commit(&self, state: &State, load: Load) -> bool {
        let num_retired = state.own.as_ref().map_or(0, |own| own.places.num_retired());
        if self.batch.is_empty() && num_retired == 0 {
            return false;
        }
        let written = self.batch.len() as u64 * self.header.geometry.record_bytes();
        let is_starved = state
            .own
            .as_ref()
            .is_some_and(|own| own.places.num_free() == 0);
        let can_write = pacing::may_write(state.permit, load, self.header.geometry.record_bytes());
        let is_idle =
            self.num_running == 0 && (state.backlog.queue.is_empty() || !can_write || is_starved);
        let is_old = self
            .batch_since
            .is_some_and(|since| since.elapsed() > COMMIT_PATIENCE);
        (is_idle || written >= COMMIT_BYTES) && (pacing::may_commit(state.permit, load) || is_old)
    }

    fn start_commit(&mut self, around: &mut Surroundings<'_>) {
        if !matches!(self.commit, Commit::Idle) {
            return;
        }
        let load = Load {
            writes_here: self.num_running,
            ..around.load
        };
        let mut state = around.shared.lock();
        if !self.wants_commit(&state, load) {
            return;
        }
        let retired = state.own.as_mut().map(|own| own.places.take_retired());
        drop(state);
        self.batch_since = None;
        let written = std::mem::take(&mut self.batch);
        let files: BTreeSet<FileId> = written.iter().map(|record| record.file).collect();
        for file in &files {
            let op = Op {
                token: (around.token)(WriterToken::SegmentSync(*file)),
                file: *file,
                offset: 0,
                action: Action::Sync,
            };
            // SAFETY: no memory.
            unsafe { around.device.push(op) };
        }
        self.commit = Commit::SyncingSegments {
            written,
            retired: retired.unwrap_or_default(),
            left: files.len(),
            failed: BTreeSet::new(),
        };
        if files.is_empty() {
            self.append(around);
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

    fn on_segment_sync(
        &mut self,
        around: &mut Surroundings<'_>,
        file: FileId,
        result: io::Result<()>,
    ) {
        let Commit::SyncingSegments { left, failed, .. } = &mut self.commit else {
            unreachable!("a segment sync belongs to a commit")
        };
        *left -= 1;
        if result.is_err() {
            failed.insert(file);
        }
        if *left == 0 {
            self.append(around);
        }
    }

    fn append(&mut self, around: &mut Surroundings<'_>) {
        let Commit::SyncingSegments {
            written,
            retired,
            failed,
            ..
        } = std::mem::replace(&mut self.commit, Commit::Idle)
        else {
            unreachable!("records are synced before they are appended")
        };
        let (lost, written): (Vec<Written>, Vec<Written>) = written
            .into_iter()
            .partition(|record| failed.contains(&record.file));
        let places: Vec<Place> = lost.iter().map(|record| record.place).collect();
        self.fail_written(around.shared, lost);
        if let Some(own) = &mut around.shared.lock().own {
            places
                .into_iter()
                .for_each(|place| own.places.give_up(place));
        }
        if written.is_empty() && retired.is_empty() {
            return;
        }
        let len = (written.len() + retired.len()) * ENTRY_BYTES;
        let mut bytes = vec![0; self.with_step(len as u64) as usize];
        let gone = retired
            .iter()
            .map(|(place, record)| (Kind::Retire, *place, record.identity, record.parent));
        let come = written
            .iter()
            .map(|record| (Kind::Publish, record.place, record.identity, record.parent));
        for (target, (kind, place, identity, parent)) in bytes[..len]
            .chunks_exact_mut(ENTRY_BYTES)
            .zip(gone.chain(come))
        {
            self.sequence += 1;
            let entry = Entry {
                sequence: self.sequence,
                kind,
                place,
                identity,
                parent,
            };
            entry.encode(self.header.number, target);
        }
        let op = Op {
            token: (around.token)(WriterToken::Append),
            file: self.log,
            offset: self.log_bytes,
            action: Action::Write(Spans::one(Span::of(&mut bytes))),
        };
        self.commit = Commit::Appending {
            written,
            retired,
            _bytes: bytes,
        };
        // SAFETY: the bytes are kept in `commit`, where their heap does not move, until the operation has been reaped.
        unsafe { around.device.push(op) };
    }

    fn num_places(&self) -> u64 {
        self.segments.len() as u64 * u64::from(self.header.places_per_segment)
    }

    /// What to write for `len` bytes of entries: more, where the log has to grow.
    fn with_step(&mut self, len: u64) -> u64 {
        let end = self.log_bytes + len;
        if end <= self.log_allocated {
            return len;
        }
        let step =
            (self.num_places() * ENTRY_BYTES as u64).clamp(BLOCK_BYTES as u64, MAX_LOG_STEP_BYTES);
        self.log_allocated = (end + step).next_multiple_of(BLOCK_BYTES as u64);
        self.log_allocated - self.log_bytes
    }

    fn on_appended(&mut self, around: &mut Surroundings<'_>, result: io::Result<()>) {
        let Commit::Appending {
            written, retired, ..
        } = std::mem::replace(&mut self.commit, Commit::Idle)
        else {
            unreachable!("an append belongs to a commit")
        };
        if result.is_err() {
            self.distrust_log(around, written, retired);
            return;
        }
        let op = Op {
            token: (around.token)(WriterToken::LogSync),
            file: self.log,
            offset: 0,
            action: Action::Sync,
        };
        self.commit = Commit::SyncingLog {
            num_bytes: (written.len() + retired.len()) as u64 * ENTRY_BYTES as u64,
            written,
            retired,
        };
        // SAFETY: no memory.
        unsafe { around.device.push(op) };
    }

    fn on_log_sync(&mut self, around: &mut Surroundings<'_>, result: io::Result<()>) {
        let Commit::SyncingLog {
            written,
            retired,
            num_bytes,
        } = std::mem::replace(&mut self.commit, Commit::Idle)
        else {
            unreachable!("a log sync belongs to a commit")
        };
        if result.is_err() {
            self.distrust_log(around, written, retired);
            return;
        }
        self.log_bytes += num_bytes;
        self.publish(around.shared, written, retired);
        let num_entries = self.log_bytes / ENTRY_BYTES as u64;
        if num_entries > ENTRIES_PER_PLACE * self.num_places() + MORE_ENTRIES {
            self.rewrite(around);
        }
    }

    fn publish(&mut self, shared: &Shared, written: Vec<Written>, retired: Retired) {
        let record_bytes = self.header.geometry.record_bytes();
        let claims: Vec<_> = written.iter().map(|record| record.identity).collect();
        {
            let mut guard = shared.lock();
            let state = &mut *guard;
            state.counters.commits += 1;
            state.counters.written_pages += written.len() as u64;
            state.counters.written_bytes += written.len() as u64 * record_bytes;
            for record in written {
                publish_one(state, &record);
            }
            if let Some(own) = &mut state.own {
                own.places.cooled(retired.iter().map(|(place, _)| *place));
            }
        }
        shared.announce();
        for identity in claims {
            shared.release_claim(&identity.namespace, &identity.key);
        }
        shared.changed.notify_all();
    }

    fn fail_written(&self, shared: &Shared, lost: Vec<Written>) {
        let mut unclaimed = Vec::new();
        {
            let mut state = shared.lock();
            for record in &lost {
                state.settle(record.key, &record.parent, Outcome::Failed);
                unclaimed.extend(state.fail_descendants(record.key));
            }
        }
        release_claims(shared, &unclaimed);
        for record in lost {
            shared.release_claim(&record.identity.namespace, &record.key);
        }
    }

    /// Entries may or may not be in the log: nobody learns of their records, and their places wait for a new manifest.
    fn distrust_log(
        &mut self,
        around: &mut Surroundings<'_>,
        written: Vec<Written>,
        retired: Retired,
    ) {
        self.limbo.extend(written.iter().map(|record| record.place));
        self.fail_written(around.shared, written);
        {
            let mut state = around.shared.lock();
            state.counters.log_failures += 1;
            if let Some(own) = &mut state.own {
                own.places.put_back_retired(retired);
            }
        }
        self.rewrite(around);
    }

    // ---- a new manifest ----------------------------------------------------------------------------------------

    /// Writes what is published to a manifest of the next epoch, on a thread of its own: for a large shelf it takes a while.
    fn rewrite(&mut self, around: &Surroundings<'_>) {
        let mut records: Vec<(Place, Record)> = Vec::new();
        let mut retired = Vec::new();
        let namespace = {
            let mut state = around.shared.lock();
            if let Some(own) = &mut state.own {
                records.extend(
                    own.places
                        .published()
                        .map(|(place, record)| (place, *record)),
                );
                retired = own.places.take_retired();
            }
            state.counters.manifest_rewrites += 1;
            state.namespace
        };
        records.sort_unstable_by_key(|(_, record)| record.identity.generation);
        let header = FileHeader {
            number: self.header.number + 1,
            sequence: self.sequence,
            namespace,
            ..self.header.clone()
        };
        let first = self.sequence + 1;
        self.sequence += records.len() as u64;
        let directory = around.shared.stripe.shelf(header.shelf, 0);
        let epoch = header.number;
        let (sender, result) = channel();
        let shared = around.shared.clone();
        let work = move || {
            let entries = records
                .into_iter()
                .zip(first..)
                .map(|((place, record), sequence)| Entry {
                    sequence,
                    kind: Kind::Publish,
                    place,
                    identity: record.identity,
                    parent: record.parent,
                });
            // Nobody receives when the store was closed meanwhile.
            drop(sender.send(manifest::replace(&directory, &header, entries)));
            shared.wake();
        };
        self.commit = Commit::Rewriting {
            result,
            epoch,
            retired,
        };
        let builder = thread::Builder::new().name("banyan-store-manifest".into());
        // A thread that cannot be started drops the sender, which reads as a failure.
        drop(builder.spawn(work));
    }

    fn take_manifest(&mut self, around: &mut Surroundings<'_>) {
        let Commit::Rewriting { result, .. } = &self.commit else {
            return;
        };
        let answer = match result.try_recv() {
            Err(TryRecvError::Empty) => return,
            Err(TryRecvError::Disconnected) => None,
            Ok(answer) => Some(answer),
        };
        let Commit::Rewriting { epoch, retired, .. } =
            std::mem::replace(&mut self.commit, Commit::Idle)
        else {
            unreachable!("checked above")
        };
        let replaced = match answer {
            Some(Ok((file, len))) => around
                .device
                .add_file(Arc::new(file))
                .map(|file| (file, len))
                .map_err(|error| error.to_string()),
            Some(Err(error)) => Err(error.to_string()),
            None => Err("no thread could be started".to_string()),
        };
        // Whether or not it got its name: the next one has to be newer.
        self.header.number = epoch;
        match replaced {
            Ok((file, len)) => {
                around.device.remove_file(self.log);
                self.log = file;
                self.log_bytes = len;
                self.log_allocated = len;
                let limbo = std::mem::take(&mut self.limbo);
                if let Some(own) = &mut around.shared.lock().own {
                    own.places.cooled(retired.iter().map(|(place, _)| *place));
                    limbo
                        .into_iter()
                        .for_each(|place| own.places.give_up(place));
                }
                around.shared.announce();
            }
            Err(reason) => {
                eprintln!(
                    "banyan: the store's manifest cannot be written ({reason}): no writes for {REST:?}"
                );
                let mut state = around.shared.lock();
                if let Some(own) = &mut state.own {
                    own.places.put_back_retired(retired);
                }
                self.commit = Commit::Resting(Instant::now() + REST);
            }
        }
    }

    /// A new namespace: the manifest's header names it, so that the next owner finds its shelf.
    pub fn on_namespace(&mut self, around: &Surroundings<'_>) -> bool {
        if !matches!(self.commit, Commit::Idle) {
            return false;
        }
        self.rewrite(around);
        true
    }
}

enum NoGrowth {
    Refused(Refusal),
    NoSpace,
    Failed(crate::error::StoreError),
}

impl From<crate::error::StoreError> for NoGrowth {
    fn from(error: crate::error::StoreError) -> Self {
        Self::Failed(error)
    }
}

fn publish_one(state: &mut State, record: &Written) {
    let Some(own) = &mut state.own else { return };
    let hit = Hit {
        key: record.key,
        shelf: own.index,
        place: record.place,
        generation: record.identity.generation,
    };
    let is_current = record.identity.namespace == state.namespace;
    let standing = if is_current && state.catalog.publish(hit, record.parent) {
        Standing::Live
    } else {
        Standing::Stale
    };
    let kept = Record {
        identity: record.identity,
        parent: record.parent,
    };
    own.places.publish(record.place, kept, standing);
    let outcome = if is_current {
        Outcome::Stored
    } else {
        Outcome::Failed
    };
    state.settle(record.key, &record.parent, outcome);
}

/// The page at the front of the queue was stored by somebody else meanwhile.
fn pass_over(shared: &Shared, state: &mut State) {
    if let Some(page) = state.backlog.queue.pop_front() {
        state.counters.put_present += 1;
        state.settle(page.key, &page.parent, Outcome::Stored);
        shared.release_claim(&page.namespace, &page.key);
    }
}

fn release_claims(shared: &Shared, pages: &[Queued]) {
    for page in pages {
        shared.release_claim(&page.namespace, &page.key);
    }
}
