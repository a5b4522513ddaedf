// SPDX-License-Identifier: Apache-2.0
//! What the threads of one store meet in, and how it learns of other writers.
//!
//! Locks, in the order in which they may be taken: `followers`, then `state`; `inbox` alone.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use banyan_shm::frame::Key;
use banyan_shm::memory::SharedMemory;
use std::collections::HashMap;

use crate::catalog::{Hit, ShelfIndex};
use crate::device::Wake;
use crate::directory::{ShelfId, Stripe};
use crate::error::Result;
use crate::format::{Entry, Kind, Namespace};
use crate::geometry::Geometry;
use crate::manifest::{Follower, Log, Tenants};
use crate::reading::ReadJob;
use crate::state::State;
use crate::traffic::{Claim, Traffic};

/// What callers hand to the I/O thread.
#[derive(Default)]
pub struct Inbox {
    pub reads: Vec<ReadJob>,
    /// Pages will move in and out of these.
    pub memories: Vec<Arc<SharedMemory>>,
    pub wants_refresh: bool,
    pub vanished: Vec<ShelfId>,
    pub is_closing: bool,
}

/// How far this process has read another writer's manifest.
enum Followed {
    Following(Box<Follower>),
    /// Of another geometry, hence of another namespace: nothing in it concerns us.
    Foreign,
}

pub struct Shared {
    pub stripe: Stripe,
    pub geometry: Arc<Geometry>,
    pub traffic: Option<Traffic>,
    /// Drained, or something stored: whoever waits looks again.
    pub changed: Condvar,
    state: Mutex<State>,
    inbox: Mutex<Inbox>,
    followers: Mutex<HashMap<ShelfId, Followed>>,
    own_shelf: Option<ShelfId>,
    seen_commits: AtomicU64,
    seen_clears: AtomicU64,
    waker: OnceLock<Arc<dyn Wake>>,
}

impl Shared {
    pub fn new(
        stripe: Stripe,
        geometry: Arc<Geometry>,
        traffic: Option<Traffic>,
        state: State,
        own_shelf: Option<ShelfId>,
    ) -> Self {
        Self {
            stripe,
            geometry,
            traffic,
            changed: Condvar::new(),
            state: Mutex::new(state),
            inbox: Mutex::default(),
            followers: Mutex::default(),
            own_shelf,
            seen_commits: AtomicU64::new(0),
            seen_clears: AtomicU64::new(0),
            waker: OnceLock::new(),
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set_waker(&self, waker: Arc<dyn Wake>) {
        // Set once, by the I/O thread as it starts.
        drop(self.waker.set(waker));
    }

    /// Makes the I/O thread look at the inbox and the back-log.
    pub fn wake(&self) {
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    pub fn reads_elsewhere(&self) -> usize {
        self.traffic.as_ref().map_or(0, Traffic::reads_elsewhere)
    }

    pub fn claim(&self, namespace: &Namespace, key: &Key) -> Claim {
        let traffic = self.traffic.as_ref();
        traffic.map_or(Claim::Ours, |traffic| traffic.claim(namespace, key))
    }

    pub fn release_claim(&self, namespace: &Namespace, key: &Key) {
        if let Some(traffic) = &self.traffic {
            traffic.release(namespace, key);
        }
    }

    /// Tells other processes that this one has published or withdrawn something.
    pub fn announce(&self) {
        if let Some(traffic) = &self.traffic {
            traffic.count_commit();
        }
    }

    /// Tells other processes that what they know of this one's shelf is gone: they name none of it until they have looked.
    pub fn announce_clear(&self) {
        if let Some(traffic) = &self.traffic {
            traffic.count_clear();
        }
    }

    fn num_commits(&self) -> u64 {
        self.traffic.as_ref().map_or(0, Traffic::num_commits)
    }

    fn num_clears(&self) -> u64 {
        self.traffic.as_ref().map_or(0, Traffic::num_clears)
    }

    /// Whether others have announced something since the last `refresh`.
    pub fn is_behind(&self) -> bool {
        self.num_commits() != self.seen_commits.load(Ordering::Relaxed) || self.has_unseen_clear()
    }

    /// Whether anybody has cleared its shelf since the last `refresh`.
    pub fn has_unseen_clear(&self) -> bool {
        self.num_clears() != self.seen_clears.load(Ordering::Acquire)
    }

    /// Differs whenever the answer of a lookup may differ because of others. It also changes when a `refresh` has seen a clear: more
    /// is found then.
    pub fn num_news(&self) -> u64 {
        self.num_commits()
            .wrapping_add(self.num_clears())
            .wrapping_add(self.seen_clears.load(Ordering::Relaxed))
    }

    /// Takes in what other writers have published. Reads manifests, so not for a thread that must not wait.
    pub fn refresh(&self) -> Result<()> {
        let mut followers = self
            .followers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (commits, clears) = (self.num_commits(), self.num_clears());
        let shelves = self.stripe.shelves()?;
        let mut vanished = Vec::new();
        followers.retain(|shelf, _| {
            let stays = shelves.contains(shelf);
            if !stays {
                vanished.push(*shelf);
            }
            stays
        });
        self.forget(vanished);
        for shelf in shelves {
            if Some(shelf) != self.own_shelf {
                self.follow(&mut followers, shelf)?;
            }
        }
        self.seen_commits.store(commits, Ordering::Relaxed);
        // Whoever sees this sees the catalog without what was cleared.
        self.seen_clears.store(clears, Ordering::Release);
        Ok(())
    }

    fn forget(&self, vanished: Vec<ShelfId>) {
        if vanished.is_empty() {
            return;
        }
        {
            let mut state = self.lock();
            for shelf in &vanished {
                if let Some(index) = state.catalog.shelf_index(*shelf) {
                    state.catalog.retire_where(index, |_| true);
                }
            }
        }
        self.inbox().vanished.extend(vanished);
        self.wake();
    }

    fn follow(&self, followers: &mut HashMap<ShelfId, Followed>, shelf: ShelfId) -> Result<()> {
        if let Some(Followed::Following(follower)) = followers.get_mut(&shelf)
            && !follower.is_replaced()
        {
            if !follower.has_more() {
                return Ok(());
            }
            let mut entries = Vec::new();
            follower.read(Log::Whole, |entry| entries.push(entry))?;
            return self.apply(shelf, entries);
        }
        if matches!(followers.get(&shelf), Some(Followed::Foreign)) {
            return Ok(());
        }
        let Some(mut follower) = Follower::open(&self.stripe.shelf(shelf, 0))? else {
            return Ok(());
        };
        if follower.header.geometry != *self.geometry {
            followers.insert(shelf, Followed::Foreign);
            return Ok(());
        }
        let mut tenants = Tenants::default();
        // A half-written line is at the end, where nothing good follows it yet.
        follower.read(Log::AsIs, |entry| tenants.apply(entry))?;
        self.replace(shelf, &follower, tenants);
        followers.insert(shelf, Followed::Following(Box::new(follower)));
        Ok(())
    }

    fn apply(&self, shelf: ShelfId, entries: Vec<Entry>) -> Result<()> {
        let mut state = self.lock();
        let Some(index) = state.catalog.shelf_index(shelf) else {
            return Ok(());
        };
        for entry in entries {
            match entry.kind {
                Kind::Publish => publish(&mut state, index, &entry),
                Kind::Retire => {
                    let generation = entry.record.identity.generation;
                    state.catalog.retire(index, entry.place, generation);
                }
            }
        }
        Ok(())
    }

    /// What a whole manifest says takes the place of what was known of its shelf.
    fn replace(&self, shelf: ShelfId, follower: &Follower, tenants: Tenants) {
        let mut state = self.lock();
        let segmenting = follower.header.segmenting();
        let index = state.catalog.add_shelf(shelf, segmenting);
        state.counters.damaged_entries += follower.num_damaged();
        let stays = |hit: &Hit| {
            let tenant = tenants.get(hit.place);
            tenant.is_some_and(|tenant| tenant.record.identity.generation == hit.generation)
        };
        state.catalog.retire_where(index, |hit| !stays(hit));
        let entries = tenants.into_entries();
        state.catalog.reserve(entries.len());
        for entry in entries {
            publish(&mut state, index, &entry);
        }
    }

    /// Forgets everything of the old namespace, and takes in what others have of the new one.
    pub fn change_namespace(&self, namespace: Namespace) -> Result<()> {
        let lost = {
            let mut followers = self
                .followers
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            followers.clear();
            let mut guard = self.lock();
            let state = &mut *guard;
            state.namespace = namespace;
            state.catalog.clear();
            state.counters.invalidations += 1;
            if let Some(own) = &mut state.own {
                // Its header is to name the namespace, so that the next owner finds its shelf.
                state.wants_manifest = true;
                own.places.make_all_stale();
                for (place, record) in own.places.rejoin(&namespace) {
                    let hit = Hit::of(&record, own.index, place);
                    state.catalog.publish(hit, record.parent);
                }
            }
            state.fail_queue()
        };
        for page in lost {
            self.release_claim(&page.namespace, &page.key);
        }
        self.wake();
        self.refresh()
    }
}

fn publish(state: &mut State, index: ShelfIndex, entry: &Entry) {
    let hit = Hit::of(&entry.record, index, entry.place);
    if entry.record.identity.namespace == state.namespace && !state.catalog.holds(&hit) {
        // A duplicate stays outside; whoever published the key first serves it.
        state.catalog.publish(hit, entry.record.parent);
    }
}
