// SPDX-License-Identifier: Apache-2.0
//! The places of this writer's own shelf: which are free, which hold what.
//!
//! Invariants
//! * A place is in exactly one state. Only `free` ones are handed out for writing.
//! * A place that held a published record becomes free only through `cooled`, after its retire entry is durable.
//! * A place that a reader of this process holds is not evicted.
//! * A place that is being written, live or stale is counted for one owner.
//!
//! States: absent -> free -> writing -> live or stale -> retired -> free; writing -> free when nothing was published.

use std::collections::{BTreeSet, VecDeque};

use hashbrown::HashMap;

use crate::catalog::KeyHash;
use crate::format::Record;
use crate::geometry::Place;
use crate::policy::{Lru, Verdict};
use crate::shares::{Owner, Used};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    Free,
    Writing,
    Live,
    /// Of another namespace, or a duplicate: nobody can find it, the first to be evicted.
    Stale,
    Retired,
}

/// Whether a published record can be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    Live,
    Stale,
}

#[derive(Default)]
pub struct Places {
    states: Vec<State>,
    records: Vec<Option<Record>>,
    owners: Vec<Owner>,
    used: Used,
    free: VecDeque<Place>,
    stale: BTreeSet<Place>,
    retired: Vec<(Place, Record)>,
    policy: Lru,
    held: HashMap<Place, u32, KeyHash>,
    num_published: usize,
    num_places: usize,
}

impl Places {
    pub fn num_places(&self) -> usize {
        self.num_places
    }

    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    pub fn num_published(&self) -> usize {
        self.num_published
    }

    pub fn num_retired(&self) -> usize {
        self.retired.len()
    }

    fn state(&self, place: Place) -> State {
        let state = self.states.get(place as usize);
        state.copied().unwrap_or(State::Absent)
    }

    /// Of the places, how many each owner uses.
    pub fn used(&self) -> &Used {
        &self.used
    }

    /// Whose the last page at a place was, or is.
    pub fn owner(&self, place: Place) -> Owner {
        self.owners[place as usize]
    }

    fn reach(&mut self, end: usize) {
        if self.states.len() < end {
            self.states.resize(end, State::Absent);
            self.records.resize(end, None);
            self.owners.resize(end, Owner::NOBODY);
        }
    }

    /// A segment has come: its places that hold nothing are free.
    pub fn add(&mut self, places: std::ops::Range<Place>) {
        self.reach(places.end as usize);
        for place in places {
            if self.state(place) == State::Absent {
                self.states[place as usize] = State::Free;
                self.free.push_back(place);
                self.num_places += 1;
            }
        }
    }

    /// Recovery: what the manifest says about a place that `add` has not seen.
    pub fn restore(&mut self, place: Place, record: Record, standing: Standing) {
        self.reach(place as usize + 1);
        debug_assert_eq!(self.state(place), State::Absent);
        self.num_places += 1;
        self.own(place, Owner::NOBODY);
        self.settle(place, record, standing);
    }

    /// A place to write a page of this owner.
    pub fn take_free(&mut self, owner: Owner) -> Option<Place> {
        let place = self.free.pop_front()?;
        self.states[place as usize] = State::Writing;
        self.own(place, owner);
        Some(place)
    }

    fn own(&mut self, place: Place, owner: Owner) {
        self.owners[place as usize] = owner;
        self.used.add(owner);
    }

    /// Nobody's page is an owner's from now on; another one stays whose it is.
    pub fn adopt(&mut self, place: Place, owner: Owner) {
        if self.state(place) == State::Live && self.owners[place as usize] == Owner::NOBODY {
            self.policy.remove(place, Owner::NOBODY);
            self.used.take(Owner::NOBODY);
            self.own(place, owner);
            self.policy.insert(place, owner);
        }
    }

    /// The record at a place that was being written is durable and has its entry.
    pub fn publish(&mut self, place: Place, record: Record, standing: Standing) {
        debug_assert_eq!(self.state(place), State::Writing);
        self.settle(place, record, standing);
    }

    fn settle(&mut self, place: Place, record: Record, standing: Standing) {
        self.records[place as usize] = Some(record);
        self.num_published += 1;
        match standing {
            Standing::Live => {
                self.states[place as usize] = State::Live;
                self.policy.insert(place, self.owners[place as usize]);
            }
            Standing::Stale => {
                self.states[place as usize] = State::Stale;
                self.stale.insert(place);
            }
        }
    }

    /// Nothing was published at a place that was being written.
    pub fn give_up(&mut self, place: Place) {
        debug_assert_eq!(self.state(place), State::Writing);
        self.used.take(self.owners[place as usize]);
        self.states[place as usize] = State::Free;
        self.free.push_back(place);
    }

    pub fn touch(&mut self, place: Place) {
        if self.state(place) == State::Live {
            self.policy.touch(place, self.owners[place as usize]);
        }
    }

    pub fn hold(&mut self, place: Place) {
        *self.held.entry(place).or_insert(0) += 1;
    }

    pub fn release(&mut self, place: Place) {
        if let Some(count) = self.held.get_mut(&place) {
            *count -= 1;
            if *count == 0 {
                self.held.remove(&place);
            }
        }
    }

    /// Withdraws one record, under the generation it was seen with. Also while it is held: readers verify what they read.
    pub fn retire(&mut self, place: Place, generation: u64) -> Option<Record> {
        let record = self.record(place)?;
        if record.identity.generation != generation {
            return None;
        }
        match self.state(place) {
            State::Live => {
                self.policy.remove(place, self.owners[place as usize]);
            }
            State::Stale => {
                self.stale.remove(&place);
            }
            _ => return None,
        }
        self.unsettle(place, record);
        Some(record)
    }

    /// Withdraws every published record, also those that are held; how many.
    pub fn retire_all(&mut self) -> usize {
        let published: Vec<(Place, Record)> = self
            .published()
            .map(|(place, record)| (place, *record))
            .collect();
        for (place, record) in &published {
            if self.state(*place) == State::Live {
                self.policy.remove(*place, self.owners[*place as usize]);
            }
            self.unsettle(*place, *record);
        }
        self.stale.clear();
        published.len()
    }

    fn unsettle(&mut self, place: Place, record: Record) {
        self.used.take(self.owners[place as usize]);
        self.records[place as usize] = None;
        self.states[place as usize] = State::Retired;
        self.retired.push((place, record));
        self.num_published -= 1;
    }

    /// The next to go: what nobody can find first, then, of owners that `may_go`, the least recently used. `stays` says which keys are
    /// still needed.
    pub fn evict(
        &mut self,
        may_go: &dyn Fn(Owner) -> bool,
        stays: &dyn Fn(&Record) -> bool,
    ) -> Option<(Place, Record)> {
        let held = &self.held;
        let stale = self.stale.iter().find(|place| !held.contains_key(*place));
        let records = &self.records;
        let mut judge = |place: Place| match &records[place as usize] {
            Some(record) if !held.contains_key(&place) && !stays(record) => Verdict::Goes,
            _ => Verdict::Stays,
        };
        let place = match stale.copied() {
            Some(place) => self.stale.take(&place),
            None => self.policy.evict(may_go, &mut judge),
        }?;
        let record = self.records[place as usize]?;
        self.unsettle(place, record);
        Some((place, record))
    }

    /// What is published at a place.
    pub fn record(&self, place: Place) -> Option<Record> {
        self.records.get(place as usize).copied().flatten()
    }

    /// Whether the record at a place can be found may have changed.
    pub fn stand(&mut self, place: Place, standing: Standing) {
        let owner = self.owners[place as usize];
        match (self.state(place), standing) {
            (State::Live, Standing::Stale) => {
                self.policy.remove(place, owner);
                self.states[place as usize] = State::Stale;
                self.stale.insert(place);
            }
            (State::Stale, Standing::Live) => {
                self.stale.remove(&place);
                self.states[place as usize] = State::Live;
                self.policy.insert(place, owner);
            }
            _ => {}
        }
    }

    /// What waits for its retire entry; the caller writes them and then calls `cooled`.
    pub fn take_retired(&mut self) -> Vec<(Place, Record)> {
        std::mem::take(&mut self.retired)
    }

    /// The entries could not be written.
    pub fn put_back_retired(&mut self, retired: Vec<(Place, Record)>) {
        self.retired.extend(retired);
    }

    /// The retire entries of these places are durable.
    pub fn cooled(&mut self, places: impl Iterator<Item = Place>) {
        for place in places {
            debug_assert_eq!(self.state(place), State::Retired);
            self.states[place as usize] = State::Free;
            self.free.push_back(place);
        }
    }

    /// Every published place with its record.
    pub fn published(&self) -> impl Iterator<Item = (Place, &Record)> {
        self.published_from(0, self.records.len())
    }

    /// Those among `num_places` places from `first` on.
    pub fn published_from(
        &self,
        first: Place,
        num_places: usize,
    ) -> impl Iterator<Item = (Place, &Record)> {
        let records = self.records.iter().enumerate();
        let records = records.skip(first as usize).take(num_places);
        records.filter_map(|(place, record)| Some((place as Place, record.as_ref()?)))
    }

    /// The highest place there is or was, and one.
    pub fn end(&self) -> Place {
        self.records.len() as Place
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::record;

    /// Places 0 to 3, of which the first two are live.
    fn places() -> Places {
        let mut places = Places::default();
        places.add(0..4);
        for number in 1..=2 {
            let place = places.take_free(Owner::NOBODY).unwrap();
            places.publish(place, record(number), Standing::Live);
        }
        places
    }

    fn rejoin(places: &mut Places, namespace: u64) -> usize {
        let all: Vec<_> = places
            .published()
            .map(|(place, found)| (place, *found))
            .collect();
        let is_of = |record: &Record| record.identity.namespace == [namespace; 4];
        for (place, record) in &all {
            let standing = if is_of(record) {
                Standing::Live
            } else {
                Standing::Stale
            };
            places.stand(*place, standing);
        }
        all.iter().filter(|(_, record)| is_of(record)).count()
    }

    const ANYBODY: &dyn Fn(Owner) -> bool = &|_| true;
    const NOTHING_STAYS: &dyn Fn(&Record) -> bool = &|_| false;

    #[test]
    fn place_when_evicted_then_free_only_after_it_has_cooled() {
        let mut places = places();
        let (place, gone) = places.evict(ANYBODY, NOTHING_STAYS).unwrap();
        assert_eq!((place, gone), (0, record(1)));
        assert_eq!((places.num_free(), places.num_published()), (2, 1));
        let retired = places.take_retired();
        assert_eq!(retired, [(0, record(1))]);
        assert_eq!(places.num_free(), 2);
        places.cooled(retired.into_iter().map(|(place, _)| place));
        assert_eq!(places.num_free(), 3);
    }

    #[test]
    fn published_when_read_in_slices_then_each_that_stays_is_met_once() {
        let mut places = places();
        let slice = |places: &Places, first| -> Vec<Place> {
            let found = places.published_from(first, 1);
            found.map(|(place, _)| place).collect()
        };
        assert_eq!((slice(&places, 0), places.end()), (vec![0], 4));
        places.evict(ANYBODY, NOTHING_STAYS).unwrap();
        assert_eq!(slice(&places, 1), [1]);
        assert_eq!(places.published().count(), 1);
        assert!(slice(&places, 3).is_empty() && slice(&places, 4).is_empty());
    }

    #[test]
    fn eviction_when_a_place_is_held_or_needed_then_another_goes() {
        let mut places = places();
        places.hold(0);
        assert!(
            places
                .evict(ANYBODY, &|record| record.identity.generation == 2)
                .is_none()
        );
        assert_eq!(places.evict(ANYBODY, NOTHING_STAYS).unwrap().0, 1);
        places.release(0);
        assert_eq!(places.evict(ANYBODY, NOTHING_STAYS).unwrap().0, 0);
    }

    #[test]
    fn stale_records_when_evicting_then_they_go_first() {
        let mut places = places();
        assert_eq!(rejoin(&mut places, 9), 0);
        assert_eq!(rejoin(&mut places, 1), 2);
        assert_eq!(rejoin(&mut places, 9), 0);
        let place = places.take_free(Owner::NOBODY).unwrap();
        places.publish(place, record(3), Standing::Live);
        assert_eq!(places.evict(ANYBODY, NOTHING_STAYS).unwrap().0, 0);
        assert_eq!(places.evict(ANYBODY, NOTHING_STAYS).unwrap().0, 1);
        assert_eq!(places.evict(ANYBODY, NOTHING_STAYS).unwrap().0, 2);
    }

    #[test]
    fn retire_when_of_another_generation_then_nothing_happens() {
        let mut places = places();
        assert!(places.retire(0, 9).is_none());
        assert!(places.retire(3, 1).is_none());
        assert_eq!(places.retire(0, 1), Some(record(1)));
        assert!(places.retire(0, 1).is_none());
    }

    #[test]
    fn records_when_all_are_retired_then_none_is_left_and_every_place_is_free_once_cooled() {
        let mut places = places();
        rejoin(&mut places, 9);
        let place = places.take_free(Owner::NOBODY).unwrap();
        places.publish(place, record(3), Standing::Live);
        let writing = places.take_free(Owner::NOBODY).unwrap();
        places.hold(0);
        assert_eq!(places.retire_all(), 3);
        assert!(places.evict(ANYBODY, NOTHING_STAYS).is_none());
        assert_eq!((places.num_published(), places.num_free()), (0, 0));
        let retired = places.take_retired();
        places.cooled(retired.into_iter().map(|(place, _)| place));
        assert_eq!(places.num_free(), 3);
        places.publish(writing, record(4), Standing::Live);
        assert_eq!(places.retire_all(), 1, "one that was being written");
    }

    #[test]
    fn places_when_they_are_used_then_each_is_counted_for_its_owner_until_it_is_retired() {
        let (one, other) = (Owner::of(1), Owner::of(2));
        let mut places = places();
        let used =
            |places: &Places| [Owner::NOBODY, one, other].map(|owner| places.used().of(owner));
        let place = places.take_free(one).unwrap();
        assert_eq!(used(&places), [2, 1, 0]);
        places.publish(place, record(3), Standing::Live);
        let lost = places.take_free(other).unwrap();
        places.give_up(lost);
        places.adopt(0, other);
        places.adopt(place, other);
        assert_eq!(used(&places), [1, 1, 1]);
        let may_go = |owner: Owner| owner == other;
        assert_eq!(places.evict(&may_go, NOTHING_STAYS).unwrap().0, 0);
        assert!(places.evict(&may_go, NOTHING_STAYS).is_none());
        assert_eq!(used(&places), [1, 1, 0]);
        rejoin(&mut places, 9);
        rejoin(&mut places, 1);
        places.retire(place, 3).unwrap();
        assert_eq!(used(&places), [1, 0, 0]);
        assert_eq!(places.retire_all(), 1);
        assert_eq!(used(&places), [0, 0, 0]);
    }
}
