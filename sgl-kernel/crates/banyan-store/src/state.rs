// SPDX-License-Identifier: Apache-2.0
//! What callers and the I/O thread share, behind one mutex that is held for microseconds and never over I/O.
//!
//! Invariants
//! * A key is queued at most once. While it is (`backlog.pending`), its frame belongs to the store; exactly one outcome follows.
//! * Only records of `namespace` are in the catalog.
//!
//! A page: queued -> writing -> written -> stored; from each of the first three also -> failed.

mod eviction;

use std::collections::VecDeque;
use std::sync::Arc;

use banyan_shm::frame::Key;
use banyan_shm::memory::SharedMemory;
use hashbrown::{HashMap, HashSet};

use crate::catalog::{Catalog, Hit, KeyHash, ShelfIndex};
use crate::format::{NO_PARENT, Namespace, Record};
use crate::geometry::Place;
use crate::pacing::Permit;
use crate::places::{Places, Standing};
use crate::shares::{Owner, Share};

/// What `put` says about one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Queued,
    Present,
    Elsewhere,
    Full,
    Orphan,
}

/// How far a lookup reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    AllShelves,
    /// What is known of others' shelves may be gone.
    OwnShelf,
}

/// How a queued page ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Stored,
    Failed,
}

/// A page on its way down.
#[derive(Clone)]
pub struct Queued {
    pub key: Key,
    pub parent: Key,
    pub namespace: Namespace,
    pub owner: Owner,
    pub memory: Arc<SharedMemory>,
    pub offset: u64,
}

#[derive(Default)]
pub struct Backlog {
    pub queue: VecDeque<Queued>,
    /// Queued, writing, or written and not yet stored.
    pub pending: HashSet<Key, KeyHash>,
    /// How many pending pages wait for each parent: it must not be evicted before they are stored.
    pub awaited: HashMap<Key, u32, KeyHash>,
    /// Pending ones that a clear has overtaken: whatever comes of them, they are not stored.
    pub cleared: HashSet<Key, KeyHash>,
}

impl Backlog {
    pub fn push(&mut self, page: Queued) {
        self.pending.insert(page.key);
        *self.awaited.entry(page.parent).or_insert(0) += 1;
        self.queue.push_back(page);
    }

    /// The page's frame is its owner's again.
    pub fn settle(&mut self, key: &Key, parent: &Key) {
        self.pending.remove(key);
        self.cleared.remove(key);
        if let Some(count) = self.awaited.get_mut(parent) {
            *count -= 1;
            if *count == 0 {
                self.awaited.remove(parent);
            }
        }
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Since the store was opened.
        #[derive(Clone, Debug, Default)]
        pub struct Counters { $($(#[$doc])* pub $name: u64),* }

        impl Counters {
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }
        }
    };
}

counters! {
    lookups,
    found_pages,
    reads,
    read_pages,
    read_bytes,
    gone_pages,
    checksum_failures,
    read_errors,
    put_queued,
    put_present,
    put_elsewhere,
    put_full,
    put_orphan,
    write_operations,
    written_pages,
    written_bytes,
    /// Microseconds in which something was being written or made durable.
    writing_us,
    write_failures,
    /// Of these pages, those that the drive refused, but for want of space.
    write_errors,
    commits,
    manifest_rewrites,
    evicted_pages,
    cleared_pages,
    dropped_pages,
    quota_refusals,
    floor_refusals,
    /// Times that the store could not grow at once, because another process had its lock.
    lock_pauses,
    /// Times that it could not grow for another reason than its limits, a lock or want of space.
    growth_failures,
    no_space_pauses,
    log_failures,
    adopted_pages,
    damaged_entries,
    invalidations,
    stalls,
    /// Waits for writes that were given up, because the drive did not answer or for lack of time.
    sync_timeouts,
    /// Threads of the store that have ended before their time.
    lost_threads,
}

/// This writer's own shelf.
pub struct Own {
    pub index: ShelfIndex,
    pub places: Places,
}

pub struct State {
    pub namespace: Namespace,
    pub catalog: Catalog,
    pub own: Option<Own>,
    /// Pages that go only when nothing else can.
    kept: HashSet<Key, KeyHash>,
    /// Of the own shelf, for each owner of pages, where whose they are matters.
    pub share: Option<Share>,
    pub backlog: Backlog,
    pub outcomes: Vec<(Key, Outcome)>,
    pub permit: Permit,
    /// The permit to go back to when draining ends.
    pub resting_permit: Permit,
    pub num_drains: u32,
    /// Records were cleared, and nobody was told yet.
    pub has_untold_clear: bool,
    /// Writes that have started and are not yet durable, or retirements not yet in the manifest.
    pub num_unsettled: usize,
    /// The manifest is to be replaced as soon as no commit is under way.
    pub wants_manifest: bool,
    /// The device does not answer reads: nothing is found and nothing taken meanwhile.
    is_stalled: bool,
    /// A thread of the store has ended before its time: nothing is found and nothing taken any more.
    has_lost_thread: bool,
    /// Times that it has come to be left alone, or not any more.
    pub num_stall_changes: u64,
    /// The device had no space a moment ago: nothing is taken meanwhile.
    pub has_no_space: bool,
    /// The manifest cannot be written: nothing is taken until it can.
    pub has_no_manifest: bool,
    pub counters: Counters,
}

impl State {
    pub fn new(namespace: Namespace) -> Self {
        Self {
            namespace,
            catalog: Catalog::default(),
            own: None,
            kept: HashSet::default(),
            share: None,
            backlog: Backlog::default(),
            outcomes: Vec::new(),
            permit: Permit::Open,
            resting_permit: Permit::Open,
            num_drains: 0,
            has_untold_clear: false,
            num_unsettled: 0,
            wants_manifest: false,
            is_stalled: false,
            has_lost_thread: false,
            num_stall_changes: 0,
            has_no_space: false,
            has_no_manifest: false,
            counters: Counters::default(),
        }
    }

    /// The leading keys that are there. Touched from the end to the front: a parent is never older than its children.
    pub fn lookup(&mut self, keys: &[Key], reach: Reach) -> Vec<Hit> {
        if self.is_left_alone() {
            return Vec::new();
        }
        let mut run = self.catalog.run(keys);
        if reach == Reach::OwnShelf {
            let own = self.own.as_ref().map(|own| own.index);
            let is_own = |hit: &&Hit| Some(hit.shelf) == own;
            run.truncate(run.iter().take_while(is_own).count());
        }
        self.counters.lookups += 1;
        self.counters.found_pages += run.len() as u64;
        if let Some(own) = &mut self.own {
            for hit in run.iter().rev().filter(|hit| hit.shelf == own.index) {
                own.places.touch(hit.place);
            }
        }
        run
    }

    /// Whether a page may join the back-log, before anybody else is asked.
    pub fn judge_put(&self, key: &Key, parent: &Key, max_queued: usize) -> Verdict {
        if self.backlog.pending.contains(key) || self.catalog.contains(key) {
            return Verdict::Present;
        }
        let has_parent = *parent == NO_PARENT
            || self.backlog.pending.contains(parent)
            || self.catalog.contains(parent);
        if !has_parent {
            Verdict::Orphan
        } else if self.is_left_alone()
            || self.has_no_space
            || self.has_no_manifest
            || self.backlog.queue.len() >= max_queued
        {
            Verdict::Full
        } else {
            Verdict::Queued
        }
    }

    pub fn set_stalled(&mut self, is_stalled: bool) {
        self.is_stalled = is_stalled;
        self.num_stall_changes += 1;
        self.counters.stalls += u64::from(is_stalled);
    }

    /// Nobody is sent to the store now.
    pub fn is_left_alone(&self) -> bool {
        self.is_stalled || self.has_lost_thread
    }

    pub fn has_lost_thread(&self) -> bool {
        self.has_lost_thread
    }

    /// Nothing that waits will be done.
    pub fn lose_thread(&mut self) {
        self.has_lost_thread = true;
        self.num_stall_changes += 1;
        self.counters.lost_threads += 1;
        self.fail_queue();
    }

    pub fn count_put(&mut self, verdict: Verdict) {
        let counters = &mut self.counters;
        *match verdict {
            Verdict::Queued => &mut counters.put_queued,
            Verdict::Present => &mut counters.put_present,
            Verdict::Elsewhere => &mut counters.put_elsewhere,
            Verdict::Full => &mut counters.put_full,
            Verdict::Orphan => &mut counters.put_orphan,
        } += 1;
    }

    /// Ends a pending page.
    pub fn settle(&mut self, key: Key, parent: &Key, outcome: Outcome) {
        self.backlog.settle(&key, parent);
        self.counters.write_failures += u64::from(outcome == Outcome::Failed);
        self.outcomes.push((key, outcome));
    }

    /// Fails the queued pages whose chain leads through a failed one; without it nobody could find them. Returns them.
    pub fn fail_descendants(&mut self, failed: Key) -> Vec<Queued> {
        let mut gone: HashSet<Key, KeyHash> = HashSet::default();
        gone.insert(failed);
        let mut lost = Vec::new();
        for page in std::mem::take(&mut self.backlog.queue) {
            if gone.contains(&page.parent) {
                gone.insert(page.key);
                lost.push(page);
            } else {
                self.backlog.queue.push_back(page);
            }
        }
        for page in &lost {
            self.settle(page.key, &page.parent, Outcome::Failed);
        }
        lost
    }

    /// Fails everything that has not started. Returns it.
    pub fn fail_queue(&mut self) -> Vec<Queued> {
        let queue: Vec<Queued> = self.backlog.queue.drain(..).collect();
        for page in &queue {
            self.settle(page.key, &page.parent, Outcome::Failed);
        }
        queue
    }

    /// From now on evict these only when nothing else can go, whether they are there already or not.
    pub fn keep(&mut self, keys: &[Key]) {
        self.kept.extend(keys);
    }

    pub fn let_go(&mut self, keys: &[Key]) {
        for key in keys {
            self.kept.remove(key);
        }
    }

    /// Withdraws every own record, whatever stands behind it; how many. A new manifest takes them all at once.
    pub fn clear(&mut self) -> usize {
        let Some(own) = &mut self.own else { return 0 };
        self.backlog.cleared.clone_from(&self.backlog.pending);
        let num_cleared = own.places.retire_all();
        self.catalog.retire_where(own.index, |_| true);
        self.wants_manifest |= own.places.num_retired() > 0;
        self.has_untold_clear |= num_cleared > 0;
        self.counters.cleared_pages += num_cleared as u64;
        num_cleared
    }

    /// The namespace has changed: the own record at a place is found again if it is of the new one, and else not.
    pub fn rejoin(&mut self, place: &Place) {
        if let Some(own) = &mut self.own
            && let Some(record) = own.places.record(*place)
        {
            let hit = Hit::of(&record, own.index, *place);
            let is_of = record.identity.namespace == self.namespace;
            // Another shelf may have been first.
            let standing = if is_of && self.catalog.publish(hit, record.parent) {
                Standing::Live
            } else {
                Standing::Stale
            };
            own.places.stand(*place, standing);
        }
    }

    /// What waits for its retire entry. It counts as unsettled until the writer tells how far it is.
    pub fn take_retired(&mut self) -> Vec<(Place, Record)> {
        let Some(own) = &mut self.own else {
            return Vec::new();
        };
        let retired = own.places.take_retired();
        self.num_unsettled += retired.len();
        retired
    }

    /// Everything may go down now, whoever reads. `end_drain` follows.
    pub fn begin_drain(&mut self) {
        if self.num_drains == 0 {
            self.resting_permit = self.permit;
        }
        self.num_drains += 1;
        self.permit = Permit::Draining;
    }

    pub fn end_drain(&mut self) {
        self.num_drains -= 1;
        if self.num_drains == 0 {
            self.permit = self.resting_permit;
        }
    }

    /// Withdraws one record that was found bad; true when it was this writer's own.
    pub fn drop_record(&mut self, hit: &Hit) -> bool {
        self.catalog.retire(hit.shelf, hit.place, hit.generation);
        let Some(own) = &mut self.own else {
            return false;
        };
        let is_own =
            hit.shelf == own.index && own.places.retire(hit.place, hit.generation).is_some();
        self.counters.dropped_pages += u64::from(is_own);
        is_own
    }

    pub fn hold(&mut self, hits: &[Hit]) {
        self.with_own(hits, Places::hold);
    }

    pub fn release(&mut self, hits: &[Hit]) {
        self.with_own(hits, Places::release);
    }

    fn with_own(&mut self, hits: &[Hit], act: fn(&mut Places, Place)) {
        if let Some(own) = &mut self.own {
            for hit in hits.iter().filter(|hit| hit.shelf == own.index) {
                act(&mut own.places, hit.place);
            }
        }
    }

    /// Differs when the drive has got something done.
    pub fn num_steps(&self) -> u64 {
        let counters = &self.counters;
        counters.write_operations
            + counters.written_pages
            + counters.write_failures
            + counters.commits
            + counters.manifest_rewrites
    }

    /// Nothing is on its way down.
    pub fn is_drained(&self) -> bool {
        let retired = self.own.as_ref().map_or(0, |own| own.places.num_retired());
        retired == 0 && self.has_nothing_under_way()
    }

    fn has_nothing_under_way(&self) -> bool {
        self.backlog.pending.is_empty() && self.num_unsettled == 0
    }

    /// Waiting brings nothing more: all is done, or what is left rests with a manifest that cannot be written.
    pub fn is_settled(&self) -> bool {
        let rests = self.has_no_manifest && !self.wants_manifest && self.has_nothing_under_way();
        rests || self.is_drained()
    }
}
