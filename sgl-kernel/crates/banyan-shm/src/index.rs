// SPDX-License-Identifier: Apache-2.0
//! Key to frame: a chained hash table inside the shelf.
//!
//! Invariants
//! * Only the owner links and unlinks. A frame is in exactly the chain of its key while it is published, else in none.
//! * A reader may walk while the owner relinks and may so be led into another chain or round in a ring. It bounds its steps and
//!   believes only `Frame::published_as`: a false miss is harmless, a false hit impossible.

use crate::frame::{Frame, FrameId, Key};
use crate::sync::{AtomicU32, Ordering};

/// Steps after which a reader gives up. The table has two buckets a frame, so that an undisturbed chain never gets near.
const MAX_STEPS: usize = 128;

/// The table of one shelf, over words that live in shared memory (or in a `Vec` under test).
#[derive(Clone, Copy)]
pub struct Index<'a> {
    heads: &'a [AtomicU32],
    frames: &'a [Frame],
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

/// Buckets for a shelf of `num_frames`: a power of two, at most half full.
pub fn num_buckets_for(num_frames: usize) -> usize {
    (2 * num_frames).next_power_of_two()
}

impl<'a> Index<'a> {
    /// `heads.len()` is a power of two.
    pub fn new(heads: &'a [AtomicU32], frames: &'a [Frame]) -> Self {
        debug_assert!(heads.len().is_power_of_two());
        Self { heads, frames }
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
            let id = link.frame()?;
            let frame = self.frames.get(id as usize)?;
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
        let first = load(self.head(key)).frame();
        if let Some(frame) = first.and_then(|id| self.frames.get(id as usize)) {
            prefetch(frame);
        }
    }

    /// The owner's exact answer: nothing moves while it asks.
    pub(crate) fn find_owned(&self, key: &Key) -> Option<FrameId> {
        let mut link = load(self.head(key));
        while let Some(id) = link.frame() {
            if self.frame(id).owned_key().as_ref() == Some(key) {
                return Some(id);
            }
            link = load(&self.frame(id).next);
        }
        None
    }

    pub(crate) fn link(&self, id: FrameId, key: &Key) {
        let head = self.head(key);
        store(&self.frame(id).next, load(head));
        store(head, Link::to(id));
    }

    /// Takes a linked frame out. Its own `next` stays, for readers that stand on it.
    pub(crate) fn unlink(&self, id: FrameId, key: &Key) {
        let mut place = self.head(key);
        loop {
            let link = load(place);
            let Some(found) = link.frame() else {
                unreachable!("frame {id} is published but not in the chain of its key")
            };
            if found == id {
                return store(place, load(&self.frame(id).next));
            }
            place = &self.frame(found).next;
        }
    }

    /// Empties the table; the caller unpublishes the frames.
    pub(crate) fn clear(&self) {
        for head in self.heads {
            store(head, Link::END);
        }
    }

    fn head(&self, key: &Key) -> &'a AtomicU32 {
        // A key is a sha256: any of its bits are a good hash.
        &self.heads[key[0] as usize & (self.heads.len() - 1)]
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
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
