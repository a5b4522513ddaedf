// SPDX-License-Identifier: Apache-2.0
//! What can be found: page key to record, over the shelves of all writers, within one namespace.
//!
//! Invariants
//! * A key has at most one node. A record whose key another shelf published first has none: it is a duplicate.
//! * `num_children` of a node is the number of nodes that name it as parent; children whose parent is absent are counted in `orphans`.
//! * `by_place` of a shelf names exactly the nodes that live there.

mod moves;

use banyan_shm::frame::Key;
use hashbrown::{HashMap, HashTable};

use crate::directory::ShelfId;
use crate::format::{NO_PARENT, Record};
use crate::geometry::{Place, Segmenting};

pub use moves::Moved;

/// Position of a shelf in the catalog. None is given twice: as many come as a server ever sees.
pub type ShelfIndex = u32;

/// Where a page was when it was looked up. The generation tells whether it still is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    pub key: Key,
    pub shelf: ShelfIndex,
    pub place: Place,
    pub generation: u64,
    /// Of the whole record.
    pub checksum: u64,
}

impl Hit {
    pub fn of(record: &Record, shelf: ShelfIndex, place: Place) -> Self {
        Self {
            key: record.identity.key,
            shelf,
            place,
            generation: record.identity.generation,
            checksum: record.checksum,
        }
    }
}

struct Node {
    hit: Hit,
    parent: Key,
    num_children: u32,
}

struct Shelf {
    id: ShelfId,
    segmenting: Segmenting,
    by_place: HashMap<Place, u32, KeyHash>,
    /// Behind the greatest place that ever held something.
    end: Place,
}

#[derive(Default)]
pub struct Catalog {
    nodes: Vec<Node>,
    vacant: Vec<u32>,
    by_key: HashTable<u32>,
    orphans: HashMap<Key, u32, KeyHash>,
    shelves: Vec<Shelf>,
    moves: moves::Moves,
    version: u64,
}

/// Page keys are sha256 digests: any eight of their bytes are a hash already.
#[derive(Clone, Copy, Default)]
pub struct KeyHash;

pub struct FirstWord(u64);

impl std::hash::BuildHasher for KeyHash {
    type Hasher = FirstWord;

    fn build_hasher(&self) -> FirstWord {
        FirstWord(0)
    }
}

impl std::hash::Hasher for FirstWord {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

fn hash(key: &Key) -> u64 {
    key[0].wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

impl Catalog {
    /// Changes whenever a lookup may answer differently.
    pub fn version(&self) -> u64 {
        self.version
    }

    pub fn num_records(&self) -> usize {
        self.by_key.len()
    }

    pub fn add_shelf(&mut self, id: ShelfId, segmenting: Segmenting) -> ShelfIndex {
        if let Some(index) = self.shelf_index(id) {
            self.shelves[index as usize].segmenting = segmenting;
            return index;
        }
        self.shelves.push(Shelf {
            id,
            segmenting,
            by_place: HashMap::default(),
            end: 0,
        });
        (self.shelves.len() - 1) as ShelfIndex
    }

    pub fn shelf_index(&self, id: ShelfId) -> Option<ShelfIndex> {
        let index = self.shelves.iter().position(|shelf| shelf.id == id)?;
        Some(index as ShelfIndex)
    }

    pub fn shelf_id(&self, index: ShelfIndex) -> ShelfId {
        self.shelves[index as usize].id
    }

    pub fn segmenting(&self, index: ShelfIndex) -> Segmenting {
        self.shelves[index as usize].segmenting
    }

    /// Room for so many more records, so that recovery does not grow step by step.
    pub fn reserve(&mut self, count: usize) {
        self.nodes.reserve(count);
        let nodes = &self.nodes;
        self.by_key
            .reserve(count, |node| hash(&nodes[*node as usize].hit.key));
    }

    fn node_of(&self, key: &Key) -> Option<u32> {
        self.by_key
            .find(hash(key), |node| self.nodes[*node as usize].hit.key == *key)
            .copied()
    }

    pub fn find(&self, key: &Key) -> Option<Hit> {
        Some(self.nodes[self.node_of(key)? as usize].hit)
    }

    pub fn contains(&self, key: &Key) -> bool {
        self.node_of(key).is_some()
    }

    /// The leading keys that are there.
    pub fn run(&self, keys: &[Key]) -> Vec<Hit> {
        keys.iter().map_while(|key| self.find(key)).collect()
    }

    /// Whether the hit is still what lives there.
    pub fn holds(&self, hit: &Hit) -> bool {
        self.node_at(hit.shelf, hit.place)
            .is_some_and(|node| self.nodes[node as usize].hit == *hit)
    }

    pub fn has_children(&self, key: &Key) -> bool {
        self.node_of(key)
            .is_some_and(|node| self.nodes[node as usize].num_children > 0)
    }

    /// Takes a record in; false for a duplicate, which stays outside.
    pub fn publish(&mut self, hit: Hit, parent: Key) -> bool {
        if let Some(node) = self.node_at(hit.shelf, hit.place) {
            self.remove(node);
        }
        if self.contains(&hit.key) {
            return false;
        }
        let num_children = self.orphans.remove(&hit.key).unwrap_or(0);
        let node = Node {
            hit,
            parent,
            num_children,
        };
        let index = match self.vacant.pop() {
            Some(index) => {
                self.nodes[index as usize] = node;
                index
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
        };
        let nodes = &self.nodes;
        self.by_key.insert_unique(hash(&hit.key), index, |node| {
            hash(&nodes[*node as usize].hit.key)
        });
        let shelf = &mut self.shelves[hit.shelf as usize];
        shelf.by_place.insert(hit.place, index);
        shelf.end = shelf.end.max(hit.place.saturating_add(1));
        self.moves.note(hit.shelf, hit.key);
        if parent != NO_PARENT {
            match self.node_of(&parent) {
                Some(parent) => self.nodes[parent as usize].num_children += 1,
                None => *self.orphans.entry(parent).or_insert(0) += 1,
            }
        }
        self.version += 1;
        true
    }

    /// Takes out what lives at a place under a generation, if anything.
    pub fn retire(&mut self, shelf: ShelfIndex, place: Place, generation: u64) {
        if let Some(node) = self.node_at(shelf, place)
            && self.nodes[node as usize].hit.generation == generation
        {
            self.remove(node);
        }
    }

    /// Every record of a shelf: its place and generation.
    pub fn living(&self, shelf: ShelfIndex) -> Vec<(Place, u64)> {
        let places = self.shelves[shelf as usize].by_place.iter();
        places
            .map(|(place, node)| (*place, self.nodes[*node as usize].hit.generation))
            .collect()
    }

    /// Takes out every record of a shelf for which `goes` is true.
    pub fn retire_where(&mut self, shelf: ShelfIndex, goes: impl Fn(&Hit) -> bool) {
        let living = self.shelves[shelf as usize].by_place.values().copied();
        let going: Vec<u32> = living
            .filter(|node| goes(&self.nodes[*node as usize].hit))
            .collect();
        for node in going {
            self.remove(node);
        }
    }

    /// Nothing can be found any more. Shelves keep their positions.
    pub fn clear(&mut self) {
        self.note_all();
        self.nodes.clear();
        self.vacant.clear();
        self.by_key.clear();
        self.orphans.clear();
        for shelf in &mut self.shelves {
            shelf.by_place.clear();
            shelf.end = 0;
        }
        self.version += 1;
    }

    fn node_at(&self, shelf: ShelfIndex, place: Place) -> Option<u32> {
        let by_place = &self.shelves[shelf as usize].by_place;
        by_place.get(&place).copied()
    }

    fn remove(&mut self, index: u32) {
        let Node {
            hit,
            parent,
            num_children,
        } = self.nodes[index as usize];
        if let Ok(entry) = self
            .by_key
            .find_entry(hash(&hit.key), |node| *node == index)
        {
            entry.remove();
        }
        self.shelves[hit.shelf as usize].by_place.remove(&hit.place);
        self.moves.note(hit.shelf, hit.key);
        self.vacant.push(index);
        if num_children > 0 {
            self.orphans.insert(hit.key, num_children);
        }
        if parent != NO_PARENT {
            match self.node_of(&parent) {
                Some(parent) => self.nodes[parent as usize].num_children -= 1,
                None => self.forget_orphan(&parent),
            }
        }
        self.version += 1;
    }

    fn forget_orphan(&mut self, parent: &Key) {
        if let Some(count) = self.orphans.get_mut(parent) {
            *count -= 1;
            if *count == 0 {
                self.orphans.remove(parent);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn key(number: u64) -> Key {
        [number, 0, 0, 1]
    }

    pub fn hit(number: u64, shelf: ShelfIndex, place: Place) -> Hit {
        Hit {
            key: key(number),
            shelf,
            place,
            generation: number,
            checksum: number,
        }
    }

    pub fn catalog() -> Catalog {
        let mut catalog = Catalog::default();
        let segmenting = Segmenting {
            places_per_segment: 4,
            record_bytes: 8192,
        };
        assert_eq!(catalog.add_shelf(70, segmenting), 0);
        assert_eq!(catalog.add_shelf(71, segmenting), 1);
        assert_eq!(catalog.add_shelf(70, segmenting), 0);
        catalog
    }

    #[test]
    fn shelves_when_ever_more_have_come_and_gone_then_each_has_a_position_of_its_own() {
        let mut catalog = catalog();
        let segmenting = catalog.segmenting(0);
        let gone = (1_000..67_000).map(|id| Shelf {
            id,
            segmenting,
            by_place: HashMap::default(),
            end: 0,
        });
        catalog.shelves.extend(gone);
        let index = catalog.add_shelf(72, segmenting);
        assert_eq!(catalog.shelf_id(index), 72);
    }

    #[test]
    fn run_when_a_page_is_missing_then_ends_there() {
        let mut catalog = catalog();
        catalog.publish(hit(1, 0, 0), NO_PARENT);
        catalog.publish(hit(2, 1, 0), key(1));
        catalog.publish(hit(4, 1, 1), key(3));
        let found = catalog.run(&[key(1), key(2), key(3), key(4)]);
        assert_eq!(found, [hit(1, 0, 0), hit(2, 1, 0)]);
        assert_eq!(catalog.orphans, HashMap::from_iter([(key(3), 1)]));
    }

    #[test]
    fn parent_when_it_comes_after_its_child_then_counts_it() {
        let mut catalog = catalog();
        catalog.publish(hit(2, 0, 0), key(1));
        catalog.publish(hit(1, 1, 0), NO_PARENT);
        assert!(catalog.has_children(&key(1)));
        catalog.retire(1, 0, 1);
        assert_eq!(catalog.orphans.get(&key(1)), Some(&1));
        catalog.publish(hit(1, 1, 0), NO_PARENT);
        catalog.retire(0, 0, 2);
        assert!(!catalog.has_children(&key(1)));
        assert!(catalog.orphans.is_empty());
    }

    #[test]
    fn key_when_two_shelves_publish_it_then_the_first_stays() {
        let mut catalog = catalog();
        assert!(catalog.publish(hit(1, 0, 0), NO_PARENT));
        assert!(!catalog.publish(hit(1, 1, 3), NO_PARENT));
        catalog.retire(1, 3, 1);
        assert_eq!(catalog.find(&key(1)), Some(hit(1, 0, 0)));
    }

    #[test]
    fn place_when_reused_then_the_old_hit_does_not_hold() {
        let mut catalog = catalog();
        catalog.publish(hit(1, 0, 0), NO_PARENT);
        let old = catalog.find(&key(1)).unwrap();
        let version = catalog.version();
        catalog.publish(hit(2, 0, 0), NO_PARENT);
        assert!(!catalog.holds(&old) && !catalog.contains(&key(1)));
        assert_ne!(catalog.version(), version);
        catalog.retire(0, 0, 1);
        assert!(catalog.contains(&key(2)), "a retire of the earlier tenant");
    }

    #[test]
    fn clear_when_filled_then_nothing_is_left() {
        let mut catalog = catalog();
        catalog.publish(hit(1, 0, 0), NO_PARENT);
        catalog.publish(hit(2, 1, 0), key(1));
        catalog.retire_where(1, |hit| hit.generation == 2);
        assert_eq!(catalog.num_records(), 1);
        catalog.clear();
        assert_eq!(catalog.run(&[key(1)]), []);
        assert!(catalog.publish(hit(1, 0, 0), NO_PARENT));
    }
}
