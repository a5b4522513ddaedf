// SPDX-License-Identifier: Apache-2.0
//! Places for what comes: a new segment while the limits allow it, then eviction.

use std::time::Instant;

use super::{GROWTH_BELIEF, MAX_EVICTED_AHEAD, Surroundings, Writer, release_claims};
use crate::files::{NoSegment, create_segment};
use crate::growth::{self, Refusal, Space, may_grow};
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
        if self.grow(around) {
            return Room::Changed;
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
