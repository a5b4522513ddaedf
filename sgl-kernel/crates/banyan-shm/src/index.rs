// SPDX-License-Identifier: Apache-2.0
//! Key to frame: a chained hash table inside the frame table.
//!
//! Invariants
//! * Only the owner links and unlinks. A frame is in exactly the chain of its key while it is published, else in none.
//! * A reader may walk while the owner relinks and may so be led into another chain or round in a ring. It bounds its steps and believes only
//!   `Frame::published_as`: a false miss is harmless, a false hit impossible.
//! * Every reader can write these words, too. So the owner bounds its steps as they do: by a damaged chain it loses pages, not its way.
//! * No chain is longer than `MAX_STEPS`: a page that would make it so is not taken. So every walk ends, the owner's too, and what is published is
//!   found. Keys are a client's to choose, so the bucket of one depends on a number that no client knows.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use crate::frame::{Frame, FrameId, Key};
use crate::sync::{AtomicU32, Ordering};

/// Pages in one chain. The table has two buckets a frame, so that a chain gets near by no accident.
const MAX_STEPS: usize = 128;

/// The table of one frame table, over words that live in shared memory (or in a `Vec` under test).
#[derive(Clone, Copy)]
pub struct Index<'a> {
    heads: &'a [AtomicU32],
    frames: &'a [Frame],
    multiplier: u64,
}

/// A link is the frame's number plus one, so that fresh zeroed memory is an empty table.
#[derive(Clone, Copy, PartialEq)]
struct Link(u32);

impl Link {
    const END: Link = Link(0);

    fn to(frame: FrameId) -> Self {
        Link(frame + 1)
    }

    fn frame(self) -> Option<FrameId> {
        self.0.checked_sub(1)
    }
}

/// Buckets for a frame table of `num_frames`: a power of two, at most half full.
pub fn num_buckets_for(num_frames: usize) -> usize {
    (2 * num_frames).next_power_of_two()
}

/// A number that decides which bucket a key is in, for a new frame table.
pub fn draw_multiplier() -> u64 {
    // The system's randomness, by way of what keeps the standard library's own tables from being aimed at.
    RandomState::new().build_hasher().finish() | 1
}

impl<'a> Index<'a> {
    /// `heads.len()` is a power of two. `multiplier` is the frame table's; any number is safe, an odd one spreads.
    pub fn new(heads: &'a [AtomicU32], frames: &'a [Frame], multiplier: u64) -> Self {
        debug_assert!(heads.len().is_power_of_two());
        Self {
            heads,
            frames,
            multiplier,
        }
    }

    pub fn frames(&self) -> &'a [Frame] {
        self.frames
    }

    pub fn frame(&self, frame: FrameId) -> &'a Frame {
        &self.frames[frame as usize]
    }

    /// Where `key` is published and under which generation. For readers: may miss while the owner relinks.
    pub fn find(&self, key: &Key) -> Option<(FrameId, u64)> {
        let mut link = load(self.head(key));
        for _ in 0..MAX_STEPS {
            let (id, frame) = self.at(link)?;
            if let Some(generation) = frame.published_as(key) {
                return Some((id, generation));
            }
            link = load(&frame.next);
        }
        None
    }

    /// Asks the processor for the bucket of `key`, ahead of `find`.
    #[cfg(not(loom))]
    pub fn prefetch_bucket(&self, key: &Key) {
        prefetch(self.head(key));
    }

    /// Asks the processor for the first frame in the bucket of `key`, ahead of `find`.
    #[cfg(not(loom))]
    pub fn prefetch_frame(&self, key: &Key) {
        if let Some((_, frame)) = self.at(load(self.head(key))) {
            prefetch(frame);
        }
    }

    /// Whether the owner may link a frame for `key`: no frame has it yet, and its chain has room. Nothing moves while
    /// it asks.
    pub(crate) fn has_room_for(&self, key: &Key) -> bool {
        let mut link = load(self.head(key));
        for _ in 0..MAX_STEPS {
            let Some((_, frame)) = self.at(link) else {
                return true;
            };
            if frame.owned_key().as_ref() == Some(key) {
                return false;
            }
            link = load(&frame.next);
        }
        false
    }

    pub(crate) fn link(&self, id: FrameId, key: &Key) {
        let head = self.head(key);
        store(&self.frame(id).next, load(head));
        store(head, Link::to(id));
    }

    /// Takes a linked frame out. Its own `next` stays, for readers that stand on it. Where the chain is damaged before
    /// it, it stays in: nobody believes a frame that is not published.
    pub(crate) fn unlink(&self, id: FrameId, key: &Key) {
        let mut place = self.head(key);
        for _ in 0..MAX_STEPS {
            let Some((found, frame)) = self.at(load(place)) else {
                return;
            };
            if found == id {
                return store(place, load(&frame.next));
            }
            place = &frame.next;
        }
    }

    /// Empties the table; the caller unpublishes the frames.
    pub(crate) fn clear(&self) {
        for head in self.heads {
            store(head, Link::END);
        }
    }

    /// `None` at the end of a chain, or where it leads out of the table.
    fn at(&self, link: Link) -> Option<(FrameId, &'a Frame)> {
        let id = link.frame()?;
        Some((id, self.frames.get(id as usize)?))
    }

    fn head(&self, key: &Key) -> &'a AtomicU32 {
        // A key is a sha256, so any of its bits are a good hash; whoever can try tokens can choose some of them. The
        // highest bits of a product depend on all of both factors.
        let mixed = (key[0] ^ key[1] ^ key[2] ^ key[3]).wrapping_mul(self.multiplier);
        &self.heads[((u128::from(mixed) * self.heads.len() as u128) >> 64) as usize]
    }
}

fn load(place: &AtomicU32) -> Link {
    Link(place.load(Ordering::Acquire))
}

fn store(place: &AtomicU32, link: Link) {
    place.store(link.0, Ordering::Release);
}

#[cfg(not(loom))]
fn prefetch<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint; it neither faults nor changes memory.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(core::ptr::from_ref(place).cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        core::arch::asm!("prfm pldl1keep, [{}]", in(reg) core::ptr::from_ref(place), options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = place;
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::ledger::Ledger;

    const NUM_FRAMES: usize = 512;

    struct Table {
        heads: Vec<AtomicU32>,
        frames: Vec<Frame>,
        multiplier: u64,
    }

    impl Table {
        fn new(multiplier: u64) -> Self {
            Self {
                heads: (0..num_buckets_for(NUM_FRAMES))
                    .map(|_| AtomicU32::new(0))
                    .collect(),
                frames: (0..NUM_FRAMES).map(|_| Frame::default()).collect(),
                multiplier,
            }
        }

        fn index(&self) -> Index<'_> {
            Index::new(&self.heads, &self.frames, self.multiplier)
        }
    }

    /// Keys that share the low bits of each word, as somebody makes them who tries tokens until they do.
    fn aimed() -> Vec<Key> {
        (1..=NUM_FRAMES as u64)
            .map(|number| [number << 32, 0, number << 48, 0])
            .collect()
    }

    #[test]
    fn chain_when_it_is_full_then_no_page_joins_it_and_all_in_it_are_found() {
        // Every key falls into the first bucket.
        let table = Table::new(0);
        let mut ledger = Ledger::new(NUM_FRAMES);
        let (frames, keys): (Vec<i64>, Vec<Key>) = (0..).zip(aimed()).unzip();
        assert_eq!(ledger.publish(table.index(), &frames, &keys), Ok(MAX_STEPS));
        let is_found = |key: &&Key| table.index().find(key).is_some();
        assert_eq!(keys.iter().filter(is_found).count(), MAX_STEPS);
        assert_eq!(
            ledger.retire(table.index(), &frames).unwrap().len(),
            NUM_FRAMES
        );
        assert_eq!(keys.iter().filter(is_found).count(), 0);
        assert_eq!(
            ledger.publish(table.index(), &frames[500..], &keys[500..]),
            Ok(NUM_FRAMES - 500),
            "room comes back"
        );
    }

    #[test]
    fn keys_when_they_are_aimed_at_one_bucket_then_each_frame_table_spreads_them() {
        let keys = aimed();
        for _ in 0..100 {
            let table = Table::new(draw_multiplier());
            let mut ledger = Ledger::new(NUM_FRAMES);
            let frames: Vec<i64> = (0..NUM_FRAMES as i64).collect();
            assert_eq!(
                ledger.publish(table.index(), &frames, &keys),
                Ok(NUM_FRAMES)
            );
        }
    }

    #[test]
    fn chain_when_a_reader_damaged_it_then_the_owner_goes_on() {
        let keys = aimed();
        // Out of the table, and round in a ring: the first of three pages is not to be reached.
        for damage in [NUM_FRAMES as u32 + 1, 3] {
            let table = Table::new(0);
            let mut ledger = Ledger::new(NUM_FRAMES);
            assert_eq!(ledger.publish(table.index(), &[0, 1, 2], &keys[..3]), Ok(3));
            table.frames[1].next.store(damage, Ordering::Relaxed);
            assert_eq!(ledger.retire(table.index(), &[0]), Ok(vec![0]));
            assert!(ledger.publish(table.index(), &[3], &keys[3..4]).is_ok());
            assert_eq!(ledger.retire(table.index(), &[1, 2]), Ok(vec![1, 2]));
            assert!(
                keys[..3]
                    .iter()
                    .all(|key| table.index().find(key).is_none())
            );
        }
    }

    #[test]
    fn multipliers_when_drawn_then_they_are_odd_and_differ() {
        let drawn: std::collections::HashSet<u64> = (0..100).map(|_| draw_multiplier()).collect();
        assert_eq!(drawn.len(), 100);
        assert!(drawn.iter().all(|multiplier| multiplier % 2 == 1));
    }
}
