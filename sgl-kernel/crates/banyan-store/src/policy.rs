// SPDX-License-Identifier: Apache-2.0
//! Which record goes next: the least recently used. What must not go, the caller says place by place.
//!
//! The store is a trie, and a page without its parent cannot be found: children go before parents. A page with children that comes up
//! for eviction moves behind them, to the young end, so that a chain is consumed from its end and every page is looked at once a lap.

mod list;

use crate::geometry::Place;
use list::List;

/// What the caller says about a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Goes,
    /// It has children, or somebody is using it.
    Stays,
}

#[derive(Default)]
pub struct Lru {
    list: List,
}

impl Lru {
    pub fn insert(&mut self, place: Place) {
        self.list.push_youngest(place);
    }

    /// The page was found by a lookup.
    pub fn touch(&mut self, place: Place) {
        self.list.make_youngest(place);
    }

    /// The record is gone for another reason than eviction.
    pub fn remove(&mut self, place: Place) {
        self.list.remove(place);
    }

    /// Removes and returns the next record to go; `None` when every one stays.
    pub fn evict(&mut self, judge: &mut dyn FnMut(Place) -> Verdict) -> Option<Place> {
        for _ in 0..self.list.len() {
            let place = self.list.oldest()?;
            match judge(place) {
                Verdict::Goes => {
                    self.list.remove(place);
                    return Some(place);
                }
                Verdict::Stays => self.list.make_youngest(place),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(count: Place) -> Lru {
        let mut policy = Lru::default();
        for place in 0..count {
            policy.insert(place);
        }
        policy
    }

    fn gone(policy: &mut Lru) -> Vec<Place> {
        std::iter::from_fn(|| policy.evict(&mut |_| Verdict::Goes)).collect()
    }

    #[test]
    fn chain_when_evicted_then_from_its_end() {
        let mut policy = filled(6);
        let mut left = 6;
        let mut order = Vec::new();
        // Place p is the parent of p + 1.
        while let Some(place) = policy.evict(&mut |place| {
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
    fn victims_when_all_stay_then_none_and_nothing_is_lost() {
        let mut policy = filled(5);
        assert_eq!(policy.evict(&mut |_| Verdict::Stays), None);
        let mut gone = gone(&mut policy);
        gone.sort_unstable();
        assert_eq!(gone, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn removed_places_when_evicting_then_never_named() {
        let mut policy = filled(4);
        policy.remove(1);
        policy.touch(1);
        policy.remove(1);
        assert_eq!(gone(&mut policy), [0, 2, 3]);
    }

    #[test]
    fn pages_when_touched_then_the_others_go_first() {
        let mut policy = filled(4);
        policy.touch(0);
        policy.touch(1);
        assert_eq!(gone(&mut policy), [2, 3, 0, 1]);
    }
}
