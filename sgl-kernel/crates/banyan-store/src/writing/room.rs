// SPDX-License-Identifier: Apache-2.0
//! Places for what comes: a new segment while the limits allow it, then eviction.

use std::sync::Arc;
use std::sync::mpsc::{TryRecvError, channel};
use std::thread;
use std::time::Instant;

use super::{GROWTH_BELIEF, LOCK_BELIEF, MAX_EVICTED_AHEAD, Surroundings, Writer, release_claims};
use crate::error::StoreError;
use crate::files::{NoSegment, create_segment};
use crate::format::FileHeader;
use crate::growth::{self, Limits, Refusal, Space, may_grow};
use crate::marks::Mark;
use crate::opening::{Whose, reclaim_one};
use crate::shared::Shared;
use crate::state::Outcome;

/// What came of an attempt to get a free place.
pub(super) enum Room {
    /// Look again: there is a place, or one page less that wants one.
    Changed,
    /// Places are free after the next commit.
    Evicted,
    /// What is under way has to end first, or nothing can be done.
    Wait,
}

impl Writer {
    pub(super) fn make_room(&mut self, around: &mut Surroundings<'_>) -> Room {
        if let Growing::Underway = self.grow(around) {
            return Room::Wait;
        }
        let mut state = around.shared.lock();
        let Some(own) = &state.own else {
            return Room::Wait;
        };
        let is_waiting = own.places.num_retired() > 0 || self.is_committing();
        let wanted = (own.places.num_places() / 8).clamp(1, MAX_EVICTED_AHEAD);
        if is_waiting {
            return Room::Wait;
        }
        if state.evict(wanted) > 0 {
            return Room::Evicted;
        }
        if self.has_writes() || !self.batch.is_empty() {
            return Room::Wait;
        }
        // Every record is needed by what is queued behind it, or nothing is allowed at all: the chain is longer than the store.
        let Some(page) = state.backlog.queue.pop_front() else {
            return Room::Wait;
        };
        state.settle(page.key, &page.parent, Outcome::Failed);
        let mut lost = state.fail_descendants(page.key);
        drop(state);
        lost.push(page);
        release_claims(around.shared, &lost);
        Room::Changed
    }

    /// Adds a segment if all limits allow it. The drive and other processes may take their time for that: a thread of its own waits.
    fn grow(&mut self, around: &Surroundings<'_>) -> Growing {
        if self.growing.is_some() {
            return Growing::Underway;
        }
        if self
            .no_growth_until
            .is_some_and(|until| Instant::now() < until)
        {
            return self.without_growth();
        }
        let growth = Growth {
            shared: around.shared.clone(),
            mark: self.hold.mark.clone(),
            header: self.header.clone(),
            limits: self.limits,
            next: self.segments.iter().max().map_or(0, |last| last + 1),
            num_segments: self.segments.len() as u64,
        };
        let (sender, result) = channel();
        let work = move || {
            let shared = growth.shared.clone();
            // Nobody receives when the I/O thread has failed.
            drop(sender.send(growth.try_grow()));
            shared.wake();
        };
        self.growing = Some(result);
        let builder = thread::Builder::new().name("banyan-store-growth".into());
        // A thread that cannot be started drops the sender, which reads as a failure.
        drop(builder.spawn(work));
        Growing::Underway
    }

    /// Whoever grows at the same time is done soon, and is waited for; whoever is stopped with the lock is not.
    fn without_growth(&self) -> Growing {
        match self.locked_out_since {
            Some(since) if since.elapsed() < GROWTH_BELIEF => Growing::Underway,
            _ => Growing::Refused,
        }
    }

    /// What has become of the segment that was being made.
    pub(super) fn take_growth(&mut self, around: &Surroundings<'_>) {
        let Some(result) = &self.growing else { return };
        let grown = match result.try_recv() {
            Err(TryRecvError::Empty) => return,
            Err(TryRecvError::Disconnected) => Err(NoGrowth::Failed(no_thread())),
            Ok(grown) => grown,
        };
        self.growing = None;
        let is_locked_out = matches!(grown, Err(NoGrowth::LockedOut));
        let now = Instant::now();
        self.locked_out_since = is_locked_out.then(|| self.locked_out_since.unwrap_or(now));
        let mut state = around.shared.lock();
        let counters = &mut state.counters;
        self.no_growth_until = Some(now + GROWTH_BELIEF);
        match grown {
            Ok(segment) => {
                let places = self.segmenting().places_of(segment);
                self.segments.push(segment);
                self.no_growth_until = None;
                if let Some(own) = &mut state.own {
                    own.places.add(places);
                }
            }
            Err(NoGrowth::LockedOut) => {
                counters.lock_pauses += 1;
                if matches!(self.without_growth(), Growing::Underway) {
                    self.no_growth_until = Some(now + LOCK_BELIEF);
                }
            }
            Err(NoGrowth::Refused(Refusal::Share | Refusal::Quota)) => counters.quota_refusals += 1,
            Err(NoGrowth::Refused(Refusal::Floor)) => {
                counters.floor_refusals += 1;
                let is_first = counters.floor_refusals == 1;
                drop(state);
                if is_first {
                    let floor = self.limits.floor_bytes as f64 / f64::from(1 << 30);
                    banyan_shm::say!(
                        "banyan: the store does not grow: {floor} GiB of its file system stay free. Free space, or name another folder"
                    );
                }
            }
            Err(NoGrowth::NoSpace) => counters.no_space_pauses += 1,
            Err(NoGrowth::Failed(error)) => {
                counters.growth_failures += 1;
                drop(state);
                if self.said_of_growth.is_new(&error.to_string(), now) {
                    banyan_shm::say!("banyan: the store cannot grow: {error}");
                }
            }
        }
    }
}

/// How the store's growing stands.
enum Growing {
    Underway,
    Refused,
}

/// What the thread needs that adds a segment.
struct Growth {
    shared: Arc<Shared>,
    mark: Arc<Mark>,
    header: FileHeader,
    limits: Limits,
    /// The number of the next segment.
    next: u32,
    num_segments: u64,
}

impl Growth {
    fn try_grow(&self) -> std::result::Result<u32, NoGrowth> {
        let stripe = &self.shared.stripe;
        let segmenting = self.header.segmenting();
        let Some(_lock) = stripe.try_lock()? else {
            return Err(NoGrowth::LockedOut);
        };
        self.mark.confirm()?;
        let namespace = self.shared.lock().namespace;
        let mut refusal = Refusal::Quota;
        // A path that is full is passed over: numbers may be missing.
        for segment in self.next..self.next + stripe.num_paths() as u32 {
            if !segmenting.has(segment) {
                break;
            }
            loop {
                let space = Space {
                    used_bytes: growth::store_cost(stripe)?,
                    own_bytes: self.num_segments * growth::segment_cost(&segmenting),
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
                        if reclaim_one(stripe, self.header.shelf, namespace, Whose::Ours)? => {}
                    Err(reason) => {
                        refusal = reason;
                        break;
                    }
                }
            }
        }
        Err(NoGrowth::Refused(refusal))
    }
}

pub(super) enum NoGrowth {
    Refused(Refusal),
    NoSpace,
    /// Another process has the store's lock.
    LockedOut,
    Failed(StoreError),
}

impl From<StoreError> for NoGrowth {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

fn no_thread() -> StoreError {
    StoreError::Invalid("its thread failed, or could not be started".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::Stripe;
    use crate::geometry::Geometry;
    use crate::marks::Hold;
    use crate::state::State;
    use crate::testing::Scratch;

    fn growth_of(stripe: &Stripe) -> (Growth, Hold) {
        let (shelf, hold) = stripe.create_shelf().unwrap();
        let geometry = Geometry::new(&[4096]).unwrap();
        let growth = Growth {
            shared: Arc::new(Shared::new(
                stripe.clone(),
                Arc::new(geometry.clone()),
                None,
                State::new([1; 4]),
                Some(shelf),
            )),
            mark: hold.mark.clone(),
            header: FileHeader {
                shelf,
                number: 1,
                sequence: 0,
                namespace: [1; 4],
                places_per_segment: 4,
                geometry,
            },
            limits: Limits {
                quota_bytes: 1 << 30,
                share_bytes: 1 << 30,
                floor_bytes: 0,
            },
            next: 0,
            num_segments: 0,
        };
        (growth, hold)
    }

    #[test]
    fn growth_when_another_machine_has_taken_the_shelf_then_none() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let (growth, _hold) = growth_of(&stripe);
        let shelf = growth.header.shelf;
        assert!(matches!(growth.try_grow(), Ok(0)));
        std::fs::remove_file(stripe.shelf(shelf, 0).join("writer-1")).unwrap();
        let next = Growth { next: 1, ..growth };
        assert!(matches!(next.try_grow(), Err(NoGrowth::Failed(_))));
        assert_eq!(stripe.segments(shelf).unwrap(), [0]);
    }

    #[test]
    fn growth_when_the_mount_is_away_then_its_mount_point_stays_empty() {
        let scratch = Scratch::new();
        let [store, mounted] = ["store", "mounted"].map(|name| scratch.path(name));
        let stripe = Stripe::open_or_create(std::slice::from_ref(&store)).unwrap();
        let (growth, _hold) = growth_of(&stripe);
        std::fs::rename(&store, &mounted).unwrap();
        std::fs::create_dir(&store).unwrap();
        assert!(matches!(growth.try_grow(), Err(NoGrowth::Failed(_))));
        // Something in it would be taken for a store that is meant to be there.
        assert_eq!(std::fs::read_dir(&store).unwrap().count(), 0);
        std::fs::remove_dir(&store).unwrap();
        std::fs::rename(&mounted, &store).unwrap();
        assert!(matches!(growth.try_grow(), Ok(0)));
    }
}
