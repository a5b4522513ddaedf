// SPDX-License-Identifier: Apache-2.0
//! One frame: the words that guard one page.
//!
//! Invariants
//! * Only the owner process writes `generation`, `key` and `next`; `pins` takes one bit from every reading rank; `touched` guards nothing.
//! * `generation` never goes back. Odd: published, and the page and `key` do not change. Even: not published.
//! * The owner changes the page or `key` only after it has seen, behind a fence that follows its bump to even, that `pins` is zero.
//! * A reader trusts the page only after it has seen, behind a fence that follows setting its bit, the odd generation it looked up.
//!
//! The two fences are sequentially consistent, so of one reader and the owner at least one sees the other: the reader
//! the new generation (a miss) or the owner the pin (quarantine).
//!
//! States: even --publish--> odd --unpublish--> even. There is no other transition.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Content address of a page: the 32 bytes of its sha256 as little-endian words.
pub type Key = [u64; 4];

/// Index of a frame in its frame table.
pub type FrameId = u32;

/// The guard words of one page. All zero is a valid frame that was never published, as fresh shared memory is.
#[repr(C, align(64))]
pub struct Frame {
    generation: AtomicU64,
    pins: AtomicU64,
    key: [AtomicU64; 4],
    /// Link to the next frame of the bucket; see `index::Link`.
    pub(crate) next: AtomicU32,
    /// Not zero: leased since the owner last asked. Guards nothing; the owner's eviction goes by it.
    touched: AtomicU32,
}

#[cfg(not(loom))]
const _: () = assert!(
    size_of::<Frame>() == 64,
    "a frame is one cache line, shared between processes"
);

impl Default for Frame {
    fn default() -> Self {
        Self {
            generation: AtomicU64::new(0),
            pins: AtomicU64::new(0),
            key: [0; 4].map(AtomicU64::new),
            next: AtomicU32::new(0),
            touched: AtomicU32::new(0),
        }
    }
}

pub fn is_published(generation: u64) -> bool {
    generation & 1 == 1
}

/// What any process may ask.
impl Frame {
    /// The generation under which this frame is published as `key`; `None` if it is not, or changed meanwhile.
    pub fn published_as(&self, key: &Key) -> Option<u64> {
        let before = self.generation.load(Ordering::Acquire);
        if !is_published(before) || self.read_key() != *key {
            return None;
        }
        // Keeps the key reads above the second generation read: a key rewritten meanwhile shows as another generation.
        fence(Ordering::Acquire);
        (self.generation.load(Ordering::Relaxed) == before).then_some(before)
    }

    /// The generation now. Acquire: content published under it is visible.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    fn read_key(&self) -> Key {
        [0, 1, 2, 3].map(|word: usize| self.key[word].load(Ordering::Relaxed))
    }
}

/// What a reader does. `bit` has exactly one bit set: that of the reading rank.
impl Frame {
    pub(crate) fn pin(&self, bit: u64) {
        self.pins.fetch_or(bit, Ordering::SeqCst);
    }

    /// Release: the owner that sees the bit gone may overwrite what this reader has read.
    pub fn unpin(&self, bit: u64) {
        self.pins.fetch_and(!bit, Ordering::Release);
    }

    pub fn touch(&self) {
        // Looked at first: a line that is only read stays in every core's cache.
        if self.touched.load(Ordering::Relaxed) == 0 {
            self.touched.store(1, Ordering::Relaxed);
        }
    }

    pub fn is_pinned_by(&self, bit: u64) -> bool {
        self.pins.load(Ordering::Relaxed) & bit != 0
    }
}

/// What the owner does.
impl Frame {
    pub(crate) fn owned_key(&self) -> Option<Key> {
        is_published(self.generation.load(Ordering::Relaxed)).then(|| self.read_key())
    }

    pub(crate) fn write_key(&self, key: &Key) {
        for (word, value) in self.key.iter().zip(key) {
            word.store(*value, Ordering::Relaxed);
        }
    }

    /// Release: whoever sees the odd generation sees the key and the page written before.
    pub(crate) fn publish(&self) {
        let generation = self.generation.load(Ordering::Relaxed);
        debug_assert!(!is_published(generation));
        self.generation.store(generation + 1, Ordering::Release);
    }

    /// The caller issues one `fence(SeqCst)` after the last of a batch and only then reads `pins`.
    pub(crate) fn unpublish(&self) {
        let generation = self.generation.load(Ordering::Relaxed);
        debug_assert!(is_published(generation));
        self.generation.store(generation + 1, Ordering::Release);
    }

    /// Acquire: pairs with `unpin`.
    pub(crate) fn pins(&self) -> u64 {
        self.pins.load(Ordering::Acquire)
    }

    /// Whether somebody leased the page since the last call.
    pub(crate) fn take_touch(&self) -> bool {
        self.touched.swap(0, Ordering::Relaxed) != 0
    }

    /// Takes bits of dead readers away. Only for an unpublished frame: a live successor of the dead reader can hold no
    /// lease on it.
    pub(crate) fn forget_readers(&self, bits: u64) {
        self.pins.fetch_and(!bits, Ordering::AcqRel);
    }
}
