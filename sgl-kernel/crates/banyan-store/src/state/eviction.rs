// SPDX-License-Identifier: Apache-2.0
//! Which of this writer's records make room, and for whose pages.

use super::State;
use crate::format::Record;
use crate::shares::{Owner, Share, Used};
use banyan_shm::frame::Key;

/// What an eviction does not touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sparing {
    /// Pages that others stand behind, or that are awaited.
    Needed,
    /// These, and what is kept.
    Kept,
}

impl State {
    /// Evicts up to `count` own records by age, those that are kept last. Where there are shares, for the first pages that are queued:
    /// what each may take the place of.
    pub fn evict(&mut self, count: usize) -> usize {
        let Some(own) = &self.own else { return 0 };
        let mut used = own.places.used().clone();
        let num_evicted = match self.share {
            Some(share) if !self.backlog.queue.is_empty() => {
                let comers = self.backlog.queue.iter().take(count);
                let comers: Vec<Owner> = comers.map(|page| page.owner).collect();
                let evicts = |comer: &&Owner| self.evict_for(**comer, share, &mut used);
                comers.iter().take_while(evicts).count()
            }
            _ => self.evict_any(count),
        };
        self.counters.evicted_pages += num_evicted as u64;
        num_evicted
    }

    fn evict_any(&mut self, count: usize) -> usize {
        let mut num_evicted = 0;
        for sparing in self.rounds() {
            while num_evicted < count && self.evict_of(&|_| true, *sparing).is_some() {
                num_evicted += 1;
            }
        }
        num_evicted
    }

    /// What is spared first, and what if nothing else can go.
    fn rounds(&self) -> &'static [Sparing] {
        if self.kept.is_empty() {
            &[Sparing::Needed]
        } else {
            &[Sparing::Kept, Sparing::Needed]
        }
    }

    /// Evicts one record for a page of this owner; whether one could go. `used`: by each owner, with those that room was made for before.
    fn evict_for(&mut self, comer: Owner, share: Share, used: &mut Used) -> bool {
        let num_places = self.own.as_ref().map_or(0, |own| own.places.num_places());
        let is_above = |owner| share.is_above(owner, used, num_places);
        let has_room = share.has_room(comer, used, num_places);
        let may_go = |owner| has_room || owner == comer;
        let gone = self.rounds().iter().find_map(|sparing| {
            self.evict_of(&is_above, *sparing)
                .or_else(|| self.evict_of(&may_go, *sparing))
        });
        let Some(gone) = gone else { return false };
        used.take(gone);
        used.add(comer);
        true
    }

    /// Evicts one record of those who `may_go`; whose it was.
    fn evict_of(&mut self, may_go: &dyn Fn(Owner) -> bool, sparing: Sparing) -> Option<Owner> {
        let own = self.own.as_mut()?;
        let (catalog, awaited, kept) = (&self.catalog, &self.backlog.awaited, &self.kept);
        let stays = |record: &Record| {
            let key = &record.identity.key;
            catalog.has_children(key)
                || awaited.contains_key(key)
                || (sparing == Sparing::Kept && kept.contains(key))
        };
        let (place, record) = own.places.evict(may_go, &stays)?;
        self.catalog
            .retire(own.index, place, record.identity.generation);
        Some(own.places.owner(place))
    }

    /// Those of the leading keys that lie on the own shelf, and are nobody's, are an owner's from now on.
    pub fn adopt(&mut self, keys: &[Key], owner: Owner) {
        let Some(own) = &mut self.own else { return };
        if own.places.used().of(Owner::NOBODY) > 0 {
            // From the end to the front, as a lookup touches them.
            for hit in self.catalog.run(keys).into_iter().rev() {
                if hit.shelf == own.index {
                    own.places.adopt(hit.place, owner);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use banyan_shm::memory::SharedMemory;

    use super::*;
    use crate::catalog::Hit;
    use crate::format::{Identity, NO_PARENT};
    use crate::geometry::Segmenting;
    use crate::places::{Places, Standing};
    use crate::state::{Own, Queued};

    const NUM_PLACES: u32 = 12;
    const NAMESPACE: [u64; 4] = [1; 4];

    struct Shelf {
        state: State,
        memory: Arc<SharedMemory>,
        generation: u64,
    }

    /// An owner and a number.
    fn key(owner: usize, number: u64) -> Key {
        [number, owner as u64, 0, 1]
    }

    impl Shelf {
        fn new(share: Option<f64>) -> Self {
            let mut state = State::new(NAMESPACE);
            let segmenting = Segmenting {
                places_per_segment: NUM_PLACES,
                record_bytes: 8192,
            };
            let index = state.catalog.add_shelf(70, segmenting);
            let mut places = Places::default();
            places.add(0..NUM_PLACES);
            state.own = Some(Own { index, places });
            state.share = share.map(Share);
            Self {
                state,
                memory: Arc::new(SharedMemory::create(4096, "eviction").unwrap()),
                generation: 0,
            }
        }

        /// Pages that follow each other are queued, and written one by one as the writer does; how many were.
        fn write(&mut self, owner: usize, numbers: std::ops::Range<u64>) -> usize {
            let mut parent = NO_PARENT;
            for number in numbers {
                self.state.backlog.push(Queued {
                    key: key(owner, number),
                    parent,
                    namespace: NAMESPACE,
                    owner: Owner::of(owner),
                    memory: self.memory.clone(),
                    offset: 0,
                });
                parent = key(owner, number);
            }
            let mut num_written = 0;
            while let Some(front) = self.state.backlog.queue.front().cloned() {
                let place = self.places().take_free(front.owner);
                if let Some(place) = place {
                    self.state.backlog.queue.pop_front();
                    self.publish(&front, place);
                    num_written += 1;
                } else if self.state.evict(4) == 0 {
                    self.state.fail_queue();
                }
                let retired = self.places().take_retired();
                self.places()
                    .cooled(retired.into_iter().map(|(place, _)| place));
            }
            num_written
        }

        fn publish(&mut self, page: &Queued, place: u32) {
            self.generation += 1;
            let identity = Identity {
                key: page.key,
                namespace: NAMESPACE,
                generation: self.generation,
            };
            let record = Record {
                identity,
                parent: page.parent,
                checksum: 0,
            };
            let index = self.state.own.as_ref().unwrap().index;
            let hit = Hit::of(&record, index, place);
            assert!(self.state.catalog.publish(hit, page.parent));
            self.places().publish(place, record, Standing::Live);
            self.state.backlog.settle(&page.key, &page.parent);
        }

        fn places(&mut self) -> &mut Places {
            &mut self.state.own.as_mut().unwrap().places
        }

        /// By owner.
        fn used(&mut self) -> [usize; 4] {
            let used = self.places().used().clone();
            std::array::from_fn(|owner| used.of(Owner::of(owner)))
        }
    }

    #[test]
    fn scan_when_it_is_larger_than_the_shelf_then_an_owner_below_its_share_loses_nothing() {
        let mut shelf = Shelf::new(Some(0.5));
        shelf.write(1, 0..5);
        for first in 0..20 {
            assert_eq!(shelf.write(2, 3 * first..3 * first + 3), 3);
        }
        assert_eq!(shelf.used(), [0, 5, 7, 0]);
        assert!((0..5).all(|number| shelf.state.catalog.contains(&key(1, number))));
        let mut open = Shelf::new(None);
        open.write(1, 0..5);
        (0..20).for_each(|first| {
            open.write(2, 3 * first..3 * first + 3);
        });
        assert_eq!(open.used()[1], 0, "nobody has a share");
    }

    #[test]
    fn room_when_an_owner_below_its_share_wants_it_then_those_above_theirs_and_nobody_make_it() {
        let mut shelf = Shelf::new(Some(0.5));
        shelf.write(0, 0..2);
        shelf.write(1, 0..2);
        shelf.write(2, 0..8);
        assert_eq!(shelf.write(3, 0..4), 4);
        assert_eq!(shelf.used(), [0, 2, 6, 4]);
    }

    #[test]
    fn owners_when_they_write_in_any_order_then_below_its_share_nobody_loses_to_one_above() {
        let mut drawn = 7_u64;
        let mut draw = |below: u64| {
            drawn = drawn
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (drawn >> 33) % below
        };
        for most in [1, 3, 6] {
            let mut shelf = Shelf::new(Some(most as f64 / f64::from(NUM_PLACES)));
            for number in 0..500 {
                let (owner, before) = (draw(4) as usize, shelf.used());
                shelf.write(owner, 10 * number..10 * number + 1 + draw(3));
                let after = shelf.used();
                assert_eq!(after.iter().sum::<usize>(), shelf.places().num_published());
                for other in (1..4).filter(|other| *other != owner) {
                    if after[other] < before[other].min(most) {
                        assert!(owner > 0 && after[owner] <= most, "{before:?} {after:?}");
                        assert_eq!(after[0], 0, "nobody has a share");
                    }
                }
            }
        }
    }

    #[test]
    fn chain_when_it_is_longer_than_its_owners_share_then_its_end_is_not_written() {
        let mut shelf = Shelf::new(Some(0.5));
        shelf.write(1, 0..6);
        assert_eq!(shelf.write(2, 0..9), 6);
        assert_eq!(shelf.used(), [0, 6, 6, 0]);
    }

    #[test]
    fn pages_of_nobody_when_an_owner_asks_for_them_then_they_are_its_own() {
        let mut shelf = Shelf::new(Some(0.5));
        shelf.write(0, 0..4);
        let keys: Vec<Key> = (0..4).map(|number| key(0, number)).collect();
        shelf.state.adopt(&keys[..3], Owner::of(1));
        shelf.state.adopt(&keys, Owner::of(2));
        assert_eq!(shelf.used(), [0, 3, 1, 0]);
    }

    #[test]
    fn record_that_another_shelf_has_too_when_its_namespace_comes_back_then_the_first_to_go() {
        let mut shelf = Shelf::new(None);
        shelf.write(1, 0..2);
        let state = &mut shelf.state;
        let segmenting = state.catalog.segmenting(0);
        state.catalog.clear();
        let twin = Hit {
            key: key(1, 0),
            shelf: state.catalog.add_shelf(71, segmenting),
            place: 0,
            generation: 9,
            checksum: 0,
        };
        assert!(state.catalog.publish(twin, NO_PARENT));
        (0..NUM_PLACES).for_each(|place| state.rejoin(&place));
        assert_eq!(state.evict(1), 1);
        assert!(
            state.catalog.contains(&key(1, 1)),
            "its twin went, which nobody finds"
        );
    }

    #[test]
    fn what_is_kept_when_its_owner_makes_room_then_it_goes_last() {
        let mut shelf = Shelf::new(Some(0.5));
        shelf.write(2, 0..1);
        shelf.write(2, 1..2);
        shelf.state.keep(&[key(2, 0)]);
        shelf.write(2, 10..20);
        shelf.write(1, 0..6);
        assert_eq!(shelf.used(), [0, 6, 6, 0]);
        assert!(shelf.state.catalog.contains(&key(2, 0)));
    }
}
