// SPDX-License-Identifier: Apache-2.0
//! What has come to one shelf and gone from it, for somebody who tells others of it.
//!
//! Nothing is noted before somebody first asks: what lies there then is listed by place. Noted are keys, and not what became of
//! them: that is looked up when they are asked for, so that the latest answer is always the right one.

use std::collections::VecDeque;

use banyan_shm::frame::Key;

use super::{Catalog, ShelfIndex};
use crate::geometry::Place;

/// Keys that wait to be asked for: 32 MiB. A caller that asks at every step of its work never has so many.
const MOST_NOTED: usize = 1 << 20;

/// The keys of one shelf that have come or gone since somebody last asked, the first first.
#[derive(Default)]
pub struct Moves {
    watched: Option<ShelfIndex>,
    noted: VecDeque<Key>,
    num_lost: u64,
}

impl Moves {
    pub(super) fn note(&mut self, shelf: ShelfIndex, key: Key) {
        if self.watched != Some(shelf) {
            return;
        }
        if self.noted.len() == MOST_NOTED {
            self.num_lost += 1;
        } else {
            self.noted.push_back(key);
        }
    }
}

/// Keys of one shelf: those that are there now, and those that are not there any more.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Moved {
    pub stored: Vec<Key>,
    pub gone: Vec<Key>,
}

impl Catalog {
    /// What has come to a shelf and gone from it since the last call, of `most` keys. The first call begins.
    pub fn moved(&mut self, shelf: ShelfIndex, most: usize) -> Moved {
        self.moves.watched = Some(shelf);
        let mut moved = Moved::default();
        for _ in 0..most {
            let Some(key) = self.moves.noted.pop_front() else {
                break;
            };
            if self.find(&key).is_some_and(|hit| hit.shelf == shelf) {
                moved.stored.push(key);
            } else {
                moved.gone.push(key);
            }
        }
        moved
    }

    /// Everything goes.
    pub(super) fn note_all(&mut self) {
        let Some(shelf) = self.moves.watched else {
            return;
        };
        for node in self.shelves[shelf as usize].by_place.values() {
            self.moves.note(shelf, self.nodes[*node as usize].hit.key);
        }
    }

    /// How many keys were not noted, because too many waited.
    pub fn num_moves_lost(&self) -> u64 {
        self.moves.num_lost
    }

    /// What lies in `count` places of a shelf from `first` on. None behind the last place.
    pub fn keys_at(&self, shelf: ShelfIndex, first: Place, count: usize) -> Option<Vec<Key>> {
        let end = self.shelves[shelf as usize].end;
        if first >= end {
            return None;
        }
        let places = (first..end).take(count);
        let nodes = places.filter_map(|place| self.node_at(shelf, place));
        Some(
            nodes
                .map(|node| self.nodes[node as usize].hit.key)
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{catalog, hit, key};
    use super::*;
    use crate::format::NO_PARENT;

    fn moved(stored: &[u64], gone: &[u64]) -> Moved {
        let keys = |numbers: &[u64]| numbers.iter().map(|number| key(*number)).collect();
        Moved {
            stored: keys(stored),
            gone: keys(gone),
        }
    }

    #[test]
    fn moves_when_nobody_has_asked_then_nothing_is_noted_and_all_can_be_listed() {
        let mut catalog = catalog();
        catalog.publish(hit(1, 0, 0), NO_PARENT);
        catalog.publish(hit(2, 0, 2), key(1));
        catalog.publish(hit(3, 1, 0), NO_PARENT);
        assert_eq!(catalog.moved(0, 10), moved(&[], &[]));
        assert_eq!(catalog.keys_at(0, 0, 2), Some(vec![key(1)]));
        assert_eq!(catalog.keys_at(0, 2, 2), Some(vec![key(2)]));
        assert_eq!(catalog.keys_at(0, 4, 2), None);
    }

    #[test]
    fn moves_when_asked_for_then_each_key_as_it_is_now_and_of_that_shelf_alone() {
        let mut catalog = catalog();
        catalog.moved(0, 1);
        catalog.publish(hit(1, 0, 0), NO_PARENT);
        catalog.publish(hit(2, 0, 1), NO_PARENT);
        catalog.publish(hit(3, 1, 0), NO_PARENT);
        catalog.publish(hit(4, 0, 0), NO_PARENT);
        assert_eq!(catalog.moved(0, 2), moved(&[2], &[1]));
        // Key 1 has gone meanwhile: it is named once for each of its moves, and not as stored.
        assert_eq!(catalog.moved(0, 10), moved(&[4], &[1]));
        assert_eq!(catalog.moved(0, 10), moved(&[], &[]));
    }

    #[test]
    fn moves_when_all_is_cleared_then_all_of_that_shelf_has_gone() {
        let mut catalog = catalog();
        catalog.publish(hit(1, 0, 0), NO_PARENT);
        catalog.publish(hit(2, 1, 0), NO_PARENT);
        catalog.moved(0, 1);
        catalog.clear();
        catalog.publish(hit(3, 0, 0), NO_PARENT);
        assert_eq!(catalog.moved(0, 10), moved(&[3], &[1]));
        assert_eq!(catalog.num_moves_lost(), 0);
    }
}
