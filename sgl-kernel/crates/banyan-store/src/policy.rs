// SPDX-License-Identifier: Apache-2.0
//! Which record goes next: the least recently used. What must not go, the caller says place by place.
//!
//! The store is a trie, and a page without its parent cannot be found: children go before parents. A page with children that comes up
//! for eviction moves behind them, to the young end. Those of a chain that nobody has looked up stand in the order in which they were
//! written, parents first: they come to the young end in the other order, so that a chain is walked once and then consumed from its end.

mod list;

use crate::geometry::Place;
use crate::shares::Owner;
use list::{Ends, Links};

/// What the caller says about a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Goes,
    /// It has children, or somebody is using it.
    Stays,
}

/// Each owner has a queue, and each record a turn that is the later the younger it is: so there is one order over all queues, and none
/// has to be walked past to get to another's. The caller knows whose each record is.
#[derive(Default)]
pub struct Lru {
    links: Links,
    /// By owner.
    queues: Vec<Ends>,
    /// By place.
    turns: Vec<u64>,
    last_turn: u64,
}

impl Lru {
    pub fn insert(&mut self, place: Place, owner: Owner) {
        let end = place as usize + 1;
        if self.turns.len() < end {
            self.turns.resize(end, 0);
        }
        if self.queues.len() <= owner.index() {
            self.queues.resize(owner.index() + 1, Ends::default());
        }
        self.last_turn += 1;
        self.turns[place as usize] = self.last_turn;
        self.links
            .push_youngest(&mut self.queues[owner.index()], place);
    }

    /// The page was found by a lookup.
    pub fn touch(&mut self, place: Place, owner: Owner) {
        if self.remove(place, owner) {
            self.insert(place, owner);
        }
    }

    /// The record is gone for another reason than eviction. Whether it was there.
    pub fn remove(&mut self, place: Place, owner: Owner) -> bool {
        match self.queues.get_mut(owner.index()) {
            Some(ends) => self.links.remove(ends, place),
            None => false,
        }
    }

    /// Removes and returns the next record to go of owners that `may_go`; `None` when every one stays.
    pub fn evict(
        &mut self,
        may_go: &dyn Fn(Owner) -> bool,
        judge: &mut dyn FnMut(Place) -> Verdict,
    ) -> Option<Place> {
        let asked: Vec<Owner> = (0..self.queues.len())
            .map(Owner::of)
            .filter(|owner| self.queues[owner.index()].len() > 0 && may_go(*owner))
            .collect();
        let mut staying = Vec::new();
        let mut gone = None;
        while let Some((place, owner)) = self.oldest(&asked)
            && gone.is_none()
        {
            self.remove(place, owner);
            match judge(place) {
                Verdict::Goes => gone = Some(place),
                Verdict::Stays => staying.push((place, owner)),
            }
        }
        if gone.is_some() {
            staying.reverse();
        }
        for (place, owner) in staying {
            self.insert(place, owner);
        }
        gone
    }

    fn oldest(&self, owners: &[Owner]) -> Option<(Place, Owner)> {
        let heads = owners
            .iter()
            .filter_map(|owner| Some((self.queues[owner.index()].oldest()?, *owner)));
        heads.min_by_key(|(place, _)| self.turns[*place as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(count: Place) -> Lru {
        let mut policy = Lru::default();
        for place in 0..count {
            policy.insert(place, Owner::NOBODY);
        }
        policy
    }

    fn gone(policy: &mut Lru) -> Vec<Place> {
        std::iter::from_fn(|| policy.evict(&|_| true, &mut |_| Verdict::Goes)).collect()
    }

    #[test]
    fn chain_when_evicted_then_from_its_end() {
        let mut policy = filled(6);
        let mut left = 6;
        let mut order = Vec::new();
        // Place p is the parent of p + 1.
        while let Some(place) = policy.evict(&|_| true, &mut |place| {
            if place + 1 < left {
                Verdict::Stays
            } else {
                Verdict::Goes
            }
        }) {
            left = place;
            order.push(place);
        }
        assert_eq!(order, [5, 4, 3, 2, 1, 0]);
    }

    #[test]
    fn chain_when_nobody_has_looked_it_up_then_walked_once_and_not_for_each_of_its_pages() {
        let num_pages = 1000;
        let mut policy = filled(num_pages);
        let (mut left, mut num_judged) = (num_pages, 0);
        while let Some(place) = policy.evict(&|_| true, &mut |place| {
            num_judged += 1;
            if place + 1 < left {
                Verdict::Stays
            } else {
                Verdict::Goes
            }
        }) {
            left = place;
        }
        assert_eq!((left, num_judged), (0, 2 * num_pages - 1));
    }

    #[test]
    fn victims_when_all_stay_then_none_and_they_stay_in_their_order() {
        let mut policy = filled(5);
        assert_eq!(policy.evict(&|_| true, &mut |_| Verdict::Stays), None);
        assert_eq!(gone(&mut policy), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn removed_places_when_evicting_then_never_named() {
        let mut policy = filled(4);
        policy.remove(1, Owner::NOBODY);
        policy.touch(1, Owner::NOBODY);
        policy.remove(1, Owner::NOBODY);
        assert_eq!(gone(&mut policy), [0, 2, 3]);
    }

    #[test]
    fn pages_when_touched_then_the_others_go_first() {
        let mut policy = filled(4);
        policy.touch(0, Owner::NOBODY);
        policy.touch(1, Owner::NOBODY);
        assert_eq!(gone(&mut policy), [2, 3, 0, 1]);
    }

    #[test]
    fn pages_when_only_some_owners_may_lose_them_then_these_go_by_age_and_the_others_stay_where_they_are()
     {
        let mut policy = Lru::default();
        for place in 0..9 {
            policy.insert(place, Owner::of(place as usize % 3));
        }
        policy.touch(1, Owner::of(1));
        let may_go = |owner: Owner| owner != Owner::NOBODY;
        let mut evict = || policy.evict(&may_go, &mut |_| Verdict::Goes);
        assert_eq!([evict(), evict()], [Some(2), Some(4)]);
        policy.insert(2, Owner::NOBODY);
        assert_eq!(gone(&mut policy), [0, 3, 5, 6, 7, 8, 1, 2]);
    }
}
