// SPDX-License-Identifier: Apache-2.0
//! What the threads of one store meet in, and how it learns of other writers.
//!
//! Each of its locks is held for microseconds, never over I/O and never with another.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use banyan_shm::frame::Key;
use banyan_shm::memory::SharedMemory;

use crate::catalog::ShelfIndex;
use crate::clock::Watch;
use crate::device::Wake;
use crate::directory::{ShelfId, Stripe};
use crate::format::Namespace;
use crate::geometry::{Geometry, Place};
use crate::reading::{ReadJob, Reason};
use crate::refresh_requests::RefreshRequests;
use crate::state::State;
use crate::traffic::{Claim, Traffic};

/// Records that are looked at while others wait for the lock: a tenth of a millisecond.
pub const SLICE: usize = 4096;
/// Between two slices: a lock that is taken again at once is had by nobody else.
pub const PAUSE: Duration = Duration::from_micros(100);

/// What callers hand to the I/O thread.
#[derive(Default)]
pub struct Inbox {
    pub reads: Vec<ReadJob>,
    /// Pages will move in and out of these.
    pub memories: Vec<Arc<SharedMemory>>,
    /// Their files are to be let go of: they are gone, or may be others by now.
    pub left: Vec<ShelfId>,
    pub is_closing: bool,
}

/// Counts of what others have announced.
#[derive(Clone, Copy)]
pub struct Announced {
    commits: u64,
    clears: u64,
}

pub struct Shared {
    pub stripe: Stripe,
    pub geometry: Arc<Geometry>,
    pub traffic: Option<Arc<Traffic>>,
    /// Drained, or something stored: whoever waits looks again.
    pub changed: Condvar,
    state: Mutex<State>,
    inbox: Mutex<Inbox>,
    pub refresh_requests: RefreshRequests,
    pub watch: Watch,
    pub own_shelf: Option<ShelfId>,
    seen_commits: AtomicU64,
    seen_clears: AtomicU64,
    waker: OnceLock<Arc<dyn Wake>>,
}

impl Shared {
    pub fn new(
        stripe: Stripe,
        geometry: Arc<Geometry>,
        traffic: Option<Arc<Traffic>>,
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
            refresh_requests: RefreshRequests::default(),
            watch: Watch::default(),
            own_shelf,
            seen_commits: AtomicU64::new(0),
            seen_clears: AtomicU64::new(0),
            waker: OnceLock::new(),
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does a long work with the lock, and lets others have it in between.
    pub fn in_slices<T>(&self, work: &[T], mut each: impl FnMut(&mut State, &T)) {
        for slice in work.chunks(SLICE) {
            {
                let mut state = self.lock();
                for one in slice {
                    each(&mut state, one);
                }
            }
            thread::sleep(PAUSE);
        }
    }

    /// These records of a shelf are found no more: place and generation of each.
    pub fn retire(&self, shelf: ShelfIndex, records: &[(Place, u64)]) {
        self.in_slices(records, |state, (place, generation)| {
            state.catalog.retire(shelf, *place, *generation);
        });
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

    pub fn reads_elsewhere(&self, belief: Duration) -> usize {
        let traffic = self.traffic.as_deref();
        traffic.map_or(0, |traffic| traffic.reads_elsewhere(belief))
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
        self.traffic.as_deref().map_or(0, Traffic::num_commits)
    }

    fn num_clears(&self) -> u64 {
        self.traffic.as_deref().map_or(0, Traffic::num_clears)
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

    /// How far others have announced things.
    pub fn announced(&self) -> Announced {
        Announced {
            commits: self.num_commits(),
            clears: self.num_clears(),
        }
    }

    /// What had been announced by then is taken in.
    pub fn have_seen(&self, announced: Announced) {
        self.seen_commits
            .store(announced.commits, Ordering::Relaxed);
        // Whoever sees this sees the catalog without what was cleared.
        self.seen_clears.store(announced.clears, Ordering::Release);
    }

    /// Nothing of these shelves is found any more.
    pub fn forget(&self, shelves: &[ShelfId]) {
        if shelves.is_empty() {
            return;
        }
        for shelf in shelves {
            let found = self.lock().catalog.shelf_index(*shelf);
            if let Some(index) = found {
                let living = self.lock().catalog.living(index);
                self.retire(index, &living);
            }
        }
        self.leave_files(shelves);
    }

    /// Files of these shelves are opened again when they are needed.
    pub fn leave_files(&self, shelves: &[ShelfId]) {
        self.inbox().left.extend(shelves);
        self.wake();
    }

    /// Forgets everything of the old namespace. What others have of the new one is found when it has been looked for.
    pub fn change_namespace(&self, namespace: Namespace) {
        let (lost, end) = {
            let mut state = self.lock();
            state.namespace = namespace;
            state.catalog.clear();
            state.counters.invalidations += 1;
            // The header of its own shelf is to name the namespace, so that the next owner finds it.
            state.wants_manifest |= state.own.is_some();
            let end = state.own.as_ref().map_or(0, |own| own.places.end());
            (state.fail_queue(), end)
        };
        for page in lost {
            self.release_claim(&page.namespace, &page.key);
        }
        self.wake();
        let places: Vec<Place> = (0..end).collect();
        self.in_slices(&places, State::rejoin);
    }

    // ---- reads that are over -----------------------------------------------------------------------------------

    /// Ends a read whose transfers are over: its waiters are told, and its frames are the caller's again.
    pub fn end_read(&self, mut job: ReadJob) {
        let hits = job.hits();
        let mut state = self.lock();
        if state.namespace != job.namespace {
            job.fail_all(Reason::Gone);
        }
        let mut has_dropped_own = false;
        for hit in job.reclassify(|hit| state.catalog.holds(hit)) {
            has_dropped_own |= state.drop_record(&hit);
        }
        state.release(&hits);
        let counters = &mut state.counters;
        counters.reads += 1;
        counters.read_bytes += job.ticket.bytes_read();
        let failed = job.ticket.failed();
        counters.read_pages += (hits.len() - failed.len()) as u64;
        for (_, reason) in failed {
            counters.gone_pages += u64::from(reason == Reason::Gone);
            counters.checksum_failures += u64::from(reason == Reason::Checksum);
        }
        drop(state);
        job.end();
        if has_dropped_own {
            // It is to be written down, and this may be another thread than the one that writes.
            self.wake();
        }
    }

    // ---- the store's threads -----------------------------------------------------------------------------------

    /// Does the work of one of the store's threads. If it ends before its time, the store says so and is left alone from then on: nobody
    /// waits for what nobody does.
    pub fn stand_by(&self, thread: &str, work: impl FnOnce()) -> Ended {
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(()) => Ended::InTime,
            Err(_) => {
                self.lock().lose_thread();
                if let Some(traffic) = &self.traffic {
                    traffic.stop();
                }
                self.changed.notify_all();
                banyan_shm::say!(
                    "banyan: the store's {thread} has failed (its last words are above): nothing is looked up or stored there until the \
                     server is started again"
                );
                Ended::Early
            }
        }
    }
}

/// How a thread of the store has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    InTime,
    Early,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Hit;
    use crate::geometry::Segmenting;
    use crate::places::{Places, Standing};
    use crate::state::Own;
    use crate::testing::{MANY, Scratch, is_seen_half_done, record};

    #[test]
    fn namespace_when_it_is_that_of_many_records_again_then_others_have_the_lock_in_between() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let geometry = Arc::new(Geometry::new(&[4096]).unwrap());
        let mut state = State::new([1; 4]);
        let segmenting = Segmenting {
            places_per_segment: MANY as u32,
            record_bytes: geometry.record_bytes(),
        };
        let index = state.catalog.add_shelf(7, segmenting);
        let mut places = Places::default();
        for place in 0..MANY as u32 {
            let record = record(place.into());
            places.restore(place, record, Standing::Live);
            let hit = Hit::of(&record, index, place);
            assert!(state.catalog.publish(hit, record.parent));
        }
        state.own = Some(Own { index, places });
        let shared = Shared::new(stripe, geometry, None, state, Some(7));
        shared.change_namespace([2; 4]);
        assert_eq!(shared.lock().catalog.num_records(), 0);
        let back = || shared.change_namespace([1; 4]);
        assert!(is_seen_half_done(&shared, back));
        assert_eq!(shared.lock().catalog.num_records(), MANY);
    }
}
