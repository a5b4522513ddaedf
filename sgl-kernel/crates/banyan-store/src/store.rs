// SPDX-License-Identifier: Apache-2.0
//! The store as its callers see it. Any thread; what waits for a device says so.

mod clearing;
mod starting;
mod telling;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use banyan_shm::frame::Key;
use banyan_shm::memory::SharedMemory;

use crate::catalog::Hit;
use crate::directory::Stripe;
use crate::error::{Result, StoreError, invalid};
use crate::files::{is_in_memory, takes_direct};
use crate::format::{NO_PARENT, Namespace};
use crate::geometry::{BLOCK_BYTES, Geometry};
use crate::growth::places_per_segment;
use crate::marks::SILENCE;
use crate::opening::{Wanted, open_own};
use crate::pacing::Permit;
use crate::reading::{ReadJob, ReadTicket, Reason};
use crate::shared::Shared;
use crate::shares::{Owner, Share};
use crate::state::{Outcome, Queued, Reach, State, Verdict};
use crate::traffic::{Claim, Traffic};

/// A first look at what others have reads all of it, a gigabyte of manifests maybe: it may take so many times what a drive may.
const FIRST_LOOK: u32 = 6;

use starting::Threads;
pub use starting::{EngineChoice, Options, OtherDevice};

/// Where leading pages were, and in which namespace.
#[derive(Clone, Debug)]
pub struct Found {
    pub hits: Vec<Hit>,
    namespace: Namespace,
}

impl Found {
    /// What was found behind the first `num_pages`.
    pub fn after(&self, num_pages: usize) -> Self {
        Self {
            hits: self.hits.get(num_pages..).unwrap_or_default().to_vec(),
            namespace: self.namespace,
        }
    }
}

pub struct Store {
    shared: Arc<Shared>,
    threads: Mutex<Option<Threads>>,
    is_closed: AtomicBool,
    max_queued: usize,
    stall_after: Duration,
    engine: String,
    options: Options,
}

impl Store {
    pub fn open(options: &Options) -> Result<Self> {
        let geometry = Arc::new(Geometry::new(&options.layer_bytes)?);
        let stripe = Stripe::open_or_create(&options.paths)?;
        let traffic = Traffic::open_unless_taken(stripe.first())?.map(Arc::new);
        let record_bytes = geometry.record_bytes();
        let segment_places =
            places_per_segment(&options.limits, options.segment_bytes, record_bytes);
        let mut state = State::new(options.namespace);
        let wanted = Wanted {
            namespace: options.namespace,
            geometry: &geometry,
            limits: options.limits,
            places_per_segment: segment_places,
        };
        let opened = open_own(&stripe, &wanted, &mut state)?;
        let shelf = opened.header.shelf;
        let is_direct = takes_direct(&stripe.shelf(shelf, 0));
        let shared = Shared::new(stripe, geometry, traffic, state, Some(shelf));
        let shared = Arc::new(shared);
        let (threads, engine) = starting::start(&shared, Some(opened), options)?;
        let way = if is_direct {
            "O_DIRECT"
        } else {
            "through the page cache: this file system has no O_DIRECT"
        };
        let kept = if options.paths.iter().any(|path| is_in_memory(path)) {
            ", in DRAM: this file system is gone when the machine restarts"
        } else {
            ""
        };
        let others = if shared.stripe.is_shared() {
            format!(
                ", where other machines may have the folder: their shelves are free when nothing was heard of them for {SILENCE:?}"
            )
        } else {
            String::new()
        };
        Ok(Self {
            shared,
            threads: Mutex::new(Some(threads)),
            is_closed: AtomicBool::new(false),
            max_queued: (options.backlog_bytes / record_bytes).max(1) as usize,
            stall_after: options.stall_after,
            engine: format!("{engine}, {way}{kept}{others}"),
            options: options.clone(),
        })
    }

    /// What another namespace, whose pages may have another shape, has in the same folder, to be read: it has no shelf and no row of
    /// the traffic, and takes nothing. `num_stores` of them share the limit of reads.
    pub fn beside(
        &self,
        namespace: Namespace,
        layer_bytes: Vec<u64>,
        num_stores: u64,
    ) -> Result<Self> {
        let mut options = self.options.clone();
        options.read_bytes_per_s = options
            .read_bytes_per_s
            .map(|rate| 1.max(rate / num_stores));
        let (stripe, traffic) = (self.shared.stripe.clone(), self.shared.traffic.clone());
        let geometry = Arc::new(Geometry::new(&layer_bytes)?);
        let shared = Shared::new(stripe, geometry, traffic, State::new(namespace), None);
        let shared = Arc::new(shared);
        let (threads, engine) = starting::start(&shared, None, &options)?;
        let beside = Self {
            shared,
            threads: Mutex::new(Some(threads)),
            is_closed: AtomicBool::new(false),
            max_queued: 0,
            stall_after: self.stall_after,
            engine,
            options,
        };
        let requests = &beside.shared.refresh_requests;
        match requests.ask_and_wait(FIRST_LOOK * self.stall_after) {
            // What cannot be read has been said, and does not keep the rest from being found.
            Ok(()) | Err(StoreError::Invalid(_)) => Ok(beside),
            Err(late) => Err(late),
        }
    }

    /// What does the I/O, in one line.
    pub fn engine(&self) -> &str {
        &self.engine
    }

    pub fn version(&self) -> u64 {
        let own = {
            let state = self.shared.lock();
            state
                .catalog
                .version()
                .wrapping_add(state.num_stall_changes)
        };
        own.wrapping_add(self.shared.num_news())
    }

    /// Announces memory that pages will move in and out of. The kernel pins it now and not at the first read, which would wait for it
    /// (50 ms for 2 GiB).
    pub fn register(&self, memory: &Arc<SharedMemory>) -> Result<()> {
        self.check_open()?;
        self.shared.inbox().memories.push(memory.clone());
        self.shared.wake();
        Ok(())
    }

    // ---- up ----------------------------------------------------------------------------------------------------

    pub fn lookup(&self, keys: &[Key]) -> Found {
        // Without a question only what has been announced is of interest.
        if !keys.is_empty() {
            self.shared.refresh_requests.note_lookup();
        }
        if self.shared.is_behind() {
            self.shared.refresh_requests.ask();
        }
        let reach = if self.shared.has_unseen_clear() {
            Reach::OwnShelf
        } else {
            Reach::AllShelves
        };
        let mut state = self.shared.lock();
        Found {
            hits: state.lookup(keys, reach),
            namespace: state.namespace,
        }
    }

    /// Brings pages into frames. The caller leaves the frames alone until the ticket's end.
    pub fn read(
        &self,
        found: &Found,
        num_pages: usize,
        memory: &Arc<SharedMemory>,
        offsets: &[u64],
        layers_per_step: usize,
    ) -> Result<Arc<ReadTicket>> {
        self.check_open()?;
        if num_pages > found.hits.len() || num_pages != offsets.len() {
            let (found, frames) = (found.hits.len(), offsets.len());
            return invalid!("{num_pages} pages to read, {found} found, {frames} frames");
        }
        if layers_per_step == 0 {
            return invalid!("a step reads at least one layer");
        }
        self.check_frames(memory, offsets)?;
        let hits = &found.hits[..num_pages];
        let mut job = ReadJob::new(
            self.shared.geometry.clone(),
            found.namespace,
            memory.clone(),
            hits.iter().copied().zip(offsets.iter().copied()),
            layers_per_step,
        );
        {
            let mut state = self.shared.lock();
            if state.namespace != found.namespace {
                // They are gone when it has ended, unless the namespace is the old one again by then.
                job.fail_all(Reason::Refused);
            }
            state.hold(hits);
        }
        let ticket = job.ticket.clone();
        let mut inbox = self.shared.inbox();
        if inbox.is_closing {
            return invalid!("the store is closed");
        }
        inbox.reads.push(job);
        drop(inbox);
        self.shared.watch.lock().asked(ticket.clone());
        self.shared.wake();
        Ok(ticket)
    }

    // ---- down --------------------------------------------------------------------------------------------------

    /// Queues a chain of pages. Frames of queued pages are the store's until `completed` names their keys.
    pub fn put(
        &self,
        keys: &[Key],
        parent: Option<Key>,
        memory: &Arc<SharedMemory>,
        offsets: &[u64],
    ) -> Result<Vec<Verdict>> {
        self.put_for(Owner::NOBODY, keys, parent, memory, offsets)
    }

    /// As `put`, of pages that are an owner's.
    pub fn put_for(
        &self,
        owner: Owner,
        keys: &[Key],
        parent: Option<Key>,
        memory: &Arc<SharedMemory>,
        offsets: &[u64],
    ) -> Result<Vec<Verdict>> {
        self.check_open()?;
        if keys.len() != offsets.len() {
            return invalid!("{} keys but {} frames", keys.len(), offsets.len());
        }
        self.check_frames(memory, offsets)?;
        let mut state = self.shared.lock();
        let mut parent = parent.unwrap_or(NO_PARENT);
        let mut is_behind_elsewhere = false;
        let mut verdicts = Vec::with_capacity(keys.len());
        for (&key, &offset) in keys.iter().zip(offsets) {
            let mut verdict = state.judge_put(&key, &parent, self.max_queued);
            if verdict == Verdict::Orphan && is_behind_elsewhere {
                verdict = Verdict::Queued;
            }
            let namespace = state.namespace;
            if verdict == Verdict::Queued && self.shared.claim(&namespace, &key) == Claim::Elsewhere
            {
                verdict = Verdict::Elsewhere;
            }
            if verdict == Verdict::Queued {
                state.backlog.push(Queued {
                    key,
                    parent,
                    namespace,
                    owner,
                    memory: memory.clone(),
                    offset,
                });
            }
            is_behind_elsewhere = verdict == Verdict::Elsewhere;
            state.count_put(verdict);
            verdicts.push(verdict);
            parent = key;
        }
        drop(state);
        self.shared.wake();
        Ok(verdicts)
    }

    pub fn completed(&self) -> Vec<(Key, Outcome)> {
        std::mem::take(&mut self.shared.lock().outcomes)
    }

    /// Waits until everything queued so far is durable or has failed; how many failed meanwhile.
    ///
    /// An error when the drive has got nothing done within `stall_after`. Then what has not started has failed; what has is the store's
    /// until `completed` names it.
    pub fn sync(&self) -> Result<u64> {
        self.sync_until(None)
    }

    /// As `sync`, and an error also when all of it takes longer than `patience`.
    pub fn sync_within(&self, patience: Duration) -> Result<u64> {
        self.sync_until(Some(Instant::now() + patience))
    }

    fn sync_until(&self, deadline: Option<Instant>) -> Result<u64> {
        self.check_open()?;
        let mut state = self.shared.lock();
        let before = state.counters.write_failures;
        state.begin_drain();
        self.shared.wake();
        loop {
            let (began, seen) = (Instant::now(), state.num_steps());
            let next = deadline
                .unwrap_or(began + self.stall_after)
                .min(began + self.stall_after);
            state = self.drained_until(state, next);
            let is_late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if !self.is_draining(&state) || is_late || state.num_steps() == seen {
                break;
            }
        }
        state.end_drain();
        if state.is_settled() {
            return Ok(state.counters.write_failures - before);
        }
        self.give_up_sync(state)
    }

    fn give_up_sync(&self, mut state: MutexGuard<'_, State>) -> Result<u64> {
        state.counters.sync_timeouts += 1;
        let lost = state.fail_queue();
        let num_left = state.backlog.pending.len();
        drop(state);
        for page in &lost {
            self.shared.release_claim(&page.namespace, &page.key);
        }
        let doing = format!(
            "the store's drive has not taken what was to be written in time: {} pages were given up, {num_left} are still on their way",
            lost.len()
        );
        Err(StoreError::os(doing, io::ErrorKind::TimedOut.into()))
    }

    fn drained_until<'a>(
        &self,
        state: MutexGuard<'a, State>,
        deadline: Instant,
    ) -> MutexGuard<'a, State> {
        let patience = deadline.saturating_duration_since(Instant::now());
        let waited = self
            .shared
            .changed
            .wait_timeout_while(state, patience, |state| self.is_draining(state));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn is_draining(&self, state: &State) -> bool {
        !state.is_settled() && !state.has_lost_thread() && !self.is_closed.load(Ordering::Relaxed)
    }

    pub fn set_permit(&self, permit: Permit) {
        let mut state = self.shared.lock();
        state.resting_permit = permit;
        if state.num_drains == 0 {
            state.permit = permit;
        }
        // Twice for each prefill: the I/O thread is woken where it has something to write, and sees by itself that it may not.
        let may_begin = permit == Permit::Open && !state.backlog.queue.is_empty();
        drop(state);
        if may_begin {
            self.shared.wake();
        }
    }

    // ---- what is kept ------------------------------------------------------------------------------------------

    pub fn invalidate(&self, namespace: Namespace) -> Result<()> {
        self.check_open()?;
        self.shared.change_namespace(namespace);
        self.take_news();
        Ok(())
    }

    /// What others have is taken in, if their manifests can be read in time; if not, it is found later.
    fn take_news(&self) {
        if let Err(error) = self.shared.refresh_requests.ask_and_wait(self.stall_after) {
            banyan_shm::say!(
                "banyan: what other writers of the store have is not found yet: {error}"
            );
        }
    }

    pub fn evict(&self, num_pages: usize) -> Result<usize> {
        self.check_open()?;
        let num_evicted = self.shared.lock().evict(num_pages);
        self.shared.wake();
        Ok(num_evicted)
    }

    pub fn keep(&self, keys: &[Key]) {
        self.shared.lock().keep(keys);
    }

    /// From now on each owner has this share of the own shelf while others want room.
    pub fn share_out(&self, share: f64) {
        self.shared.lock().share = Some(Share(share));
    }

    /// Those of the leading keys that lie on the own shelf, and are nobody's, are an owner's from now on.
    pub fn adopt(&self, owner: Owner, keys: &[Key]) {
        self.shared.lock().adopt(keys, owner);
    }

    pub fn let_go(&self, keys: &[Key]) {
        self.shared.lock().let_go(keys);
    }

    pub fn refresh(&self) -> Result<()> {
        self.check_open()?;
        self.shared.refresh_requests.ask_and_wait(self.stall_after)
    }

    /// Counters since the opening, and gauges.
    pub fn stats(&self) -> Vec<(&'static str, u64)> {
        let state = self.shared.lock();
        let mut stats = state.counters.named();
        stats.push(("num_records", state.catalog.num_records() as u64));
        stats.push(("backlog_pages", state.backlog.pending.len() as u64));
        if let Some(own) = &state.own {
            stats.push(("own_records", own.places.num_published() as u64));
            stats.push(("own_places", own.places.num_places() as u64));
            stats.push(("free_places", own.places.num_free() as u64));
            let per_segment = state.catalog.segmenting(own.index).places_per_segment;
            let per_segment = u64::from(per_segment);
            let segments = own.places.num_places() as u64 / per_segment;
            stats.push(("num_segments", segments));
        }
        stats.push(("untold_moves", state.catalog.num_moves_lost()));
        let is_stopped = state.has_lost_thread() || state.has_no_manifest;
        stats.push(("is_stopped", u64::from(is_stopped)));
        stats
    }

    /// Finishes what is being written, fails the rest of the back-log, and leaves. What a drive does not answer is left behind after
    /// `stall_after`: its memory stays mapped, its frames are not given back.
    pub fn close(&self) {
        let threads = self
            .threads
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(threads) = threads else { return };
        self.shared.inbox().is_closing = true;
        self.shared.wake();
        threads.end(&self.shared, self.stall_after);
        self.is_closed.store(true, Ordering::Relaxed);
        let _state = self.shared.lock();
        self.shared.changed.notify_all();
    }

    fn check_open(&self) -> Result<()> {
        if self.shared.inbox().is_closing {
            return invalid!("the store is closed");
        }
        Ok(())
    }

    /// Frames are aligned, inside the memory, and do not overlap.
    fn check_frames(&self, memory: &SharedMemory, offsets: &[u64]) -> Result<()> {
        let frame_bytes = self.shared.geometry.frame_bytes();
        let end = (memory.len() as u64).checked_sub(frame_bytes);
        for (position, &offset) in offsets.iter().enumerate() {
            if !offset.is_multiple_of(BLOCK_BYTES as u64) || end.is_none_or(|end| offset > end) {
                return invalid!(
                    "frame {position} at byte {offset}: not a multiple of {BLOCK_BYTES}, or {frame_bytes} bytes from \
                     there are not inside the memory of {} bytes",
                    memory.len()
                );
            }
        }
        let mut sorted = offsets.to_vec();
        sorted.sort_unstable();
        for pair in sorted.windows(2) {
            if pair[1] - pair[0] < frame_bytes {
                return invalid!("frames at bytes {} and {} overlap", pair[0], pair[1]);
            }
        }
        Ok(())
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close();
    }
}
