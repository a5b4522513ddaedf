// SPDX-License-Identifier: Apache-2.0
//! Which record goes next. Policies order places; what must not go, the caller says place by place.
//!
//! The store is a trie, and a page without its parent cannot be found: children go before parents. A page with children that comes up
//! for eviction moves behind them, to the young end, so that a chain is consumed from its end and every page is looked at once a lap.

mod list;
mod lru;
mod s3fifo;

use banyan_shm::frame::Key;

use crate::error::{Result, invalid};
use crate::geometry::Place;
pub use lru::Lru;
pub use s3fifo::S3Fifo;

/// What the caller says about a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Goes,
    /// It has children, or somebody is using it.
    Stays,
}

pub trait Policy: Send {
    fn insert(&mut self, place: Place, key: &Key);

    /// The page was found by a lookup.
    fn touch(&mut self, place: Place);

    /// The record is gone for another reason than eviction.
    fn remove(&mut self, place: Place);

    /// Removes and returns the next record to go; `None` when every one stays.
    fn evict(&mut self, judge: &mut dyn FnMut(Place) -> Verdict) -> Option<Place>;
}

/// By name, as the user gives it.
pub fn by_name(name: &str) -> Result<Box<dyn Policy>> {
    match name {
        "lru" => Ok(Box::new(Lru::default())),
        "s3fifo" => Ok(Box::new(S3Fifo::default())),
        _ => invalid!("there is no eviction policy {name:?}: choose lru or s3fifo"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(place: Place) -> Key {
        [u64::from(place) + 1, 0, 0, 0]
    }

    fn filled(name: &str, count: Place) -> Box<dyn Policy> {
        let mut policy = by_name(name).unwrap();
        for place in 0..count {
            policy.insert(place, &key(place));
        }
        policy
    }

    #[test]
    fn chain_when_evicted_then_from_its_end() {
        for name in ["lru", "s3fifo"] {
            let mut policy = filled(name, 6);
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
            assert_eq!(order, [5, 4, 3, 2, 1, 0], "{name}");
        }
    }

    #[test]
    fn victims_when_all_stay_then_none_and_nothing_is_lost() {
        for name in ["lru", "s3fifo"] {
            let mut policy = filled(name, 5);
            assert_eq!(policy.evict(&mut |_| Verdict::Stays), None, "{name}");
            let mut gone: Vec<Place> =
                std::iter::from_fn(|| policy.evict(&mut |_| Verdict::Goes)).collect();
            gone.sort_unstable();
            assert_eq!(gone, [0, 1, 2, 3, 4], "{name}");
        }
    }

    #[test]
    fn removed_places_when_evicting_then_never_named() {
        for name in ["lru", "s3fifo"] {
            let mut policy = filled(name, 4);
            policy.remove(1);
            policy.touch(1);
            policy.remove(1);
            let gone: Vec<Place> =
                std::iter::from_fn(|| policy.evict(&mut |_| Verdict::Goes)).collect();
            assert_eq!(gone, [0, 2, 3], "{name}");
        }
    }

    #[test]
    fn lru_when_touched_then_the_others_go_first() {
        let mut policy = filled("lru", 4);
        policy.touch(0);
        policy.touch(1);
        let gone: Vec<Place> =
            std::iter::from_fn(|| policy.evict(&mut |_| Verdict::Goes)).collect();
        assert_eq!(gone, [2, 3, 0, 1]);
    }

    #[test]
    fn s3fifo_when_a_scan_passes_through_then_pages_hit_twice_stay() {
        let mut policy = filled("s3fifo", 8);
        for place in 0..4 {
            policy.touch(place);
            policy.touch(place);
        }
        for place in 8..40 {
            policy.insert(place, &key(place));
        }
        for _ in 0..32 {
            let gone = policy.evict(&mut |_| Verdict::Goes).unwrap();
            assert!(
                gone >= 4,
                "the page at {gone} was hit twice and went before the scan"
            );
        }
    }

    #[test]
    fn s3fifo_when_a_page_comes_back_soon_then_it_skips_probation() {
        let mut policy = filled("s3fifo", 4);
        assert_eq!(policy.evict(&mut |_| Verdict::Goes), Some(0));
        policy.insert(0, &key(0));
        let next = policy.evict(&mut |_| Verdict::Goes);
        assert_eq!(next, Some(1), "0 is in the main queue now");
        assert_eq!(policy.evict(&mut |_| Verdict::Goes), Some(2));
    }

    #[test]
    fn policy_when_unknown_then_refused_by_name() {
        assert!(
            by_name("mru")
                .err()
                .unwrap()
                .to_string()
                .contains("lru or s3fifo")
        );
    }
}
