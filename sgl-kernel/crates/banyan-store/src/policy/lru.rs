// SPDX-License-Identifier: Apache-2.0
//! Least recently used.

use banyan_shm::frame::Key;

use super::list::List;
use super::{Policy, Verdict};
use crate::geometry::Place;

#[derive(Default)]
pub struct Lru {
    list: List,
}

impl Policy for Lru {
    fn insert(&mut self, place: Place, _key: &Key) {
        self.list.push_youngest(place);
    }

    fn touch(&mut self, place: Place) {
        self.list.make_youngest(place);
    }

    fn remove(&mut self, place: Place) {
        self.list.remove(place);
    }

    fn evict(&mut self, judge: &mut dyn FnMut(Place) -> Verdict) -> Option<Place> {
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
