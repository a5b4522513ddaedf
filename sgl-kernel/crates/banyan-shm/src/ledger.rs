// SPDX-License-Identifier: Apache-2.0
//! The owner's side: what it has published and what waits for readers.
//!
//! Invariants
//! * A frame is idle, published or quarantined; the generation in shared memory says published, `quarantined` here the last.
//! * A quarantined frame is unpublished and is handed out again only after its pins were seen zero.
//! * A key is published on at most one frame of a frame table: the first one.
//!
//! Transitions: idle --publish--> published --retire, pins zero--> idle (returned); published --retire or reset,
//! pinned--> quarantined --drain, pins zero--> idle (returned); published --reset, pins zero--> idle (not returned: the
//! caller asked for all). Arguments are checked before the first change, so a refused call changes nothing.

use crate::frame::{FrameId, Key};
use crate::index::Index;
use crate::sync::{Ordering, fence};

/// Why a call was refused. Nothing was changed.
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    OutOfRange { frame: i64, num_frames: usize },
    Repeated { frame: FrameId },
    Quarantined { frame: FrameId },
    PublishedAsOther { frame: FrameId },
    Lengths { num_frames: usize, num_keys: usize },
}

/// The owner's process-local record of one frame table. Methods take the frame table's `Index`; it is always the same
/// one.
pub struct Ledger {
    quarantine: Vec<FrameId>,
    quarantined: Vec<bool>,
    num_published: usize,
    /// Per frame the last call that named it and the position there: repeats show without clearing between calls.
    seen: Vec<(u64, usize)>,
    call: u64,
}

impl Ledger {
    pub fn new(num_frames: usize) -> Self {
        Self {
            quarantine: Vec::new(),
            quarantined: vec![false; num_frames],
            num_published: 0,
            seen: vec![(0, 0); num_frames],
            call: 0,
        }
    }

    pub fn num_published(&self) -> usize {
        self.num_published
    }

    pub fn num_quarantined(&self) -> usize {
        self.quarantine.len()
    }

    /// Publishes `frames[i]` as `keys[i]`; returns how many became newly published. Content must be complete before.
    ///
    /// A frame that is published under the same key, a key that another frame already has, or one without room in the
    /// index is passed over.
    pub fn publish(
        &mut self,
        index: Index<'_>,
        frames: &[i64],
        keys: &[Key],
    ) -> Result<usize, Refusal> {
        self.check_publishable(index, frames, keys)?;
        let before = self.num_published;
        for (frame, key) in frames.iter().zip(keys) {
            let id = *frame as FrameId;
            let frame = index.frame(id);
            if frame.owned_key().is_some() || !index.has_room_for(key) {
                continue;
            }
            frame.write_key(key);
            index.link(id, key);
            frame.publish();
            self.num_published += 1;
        }
        Ok(self.num_published - before)
    }

    /// Unpublishes `frames` and returns those that can be reused now; the others come out of `drain` later.
    ///
    /// A frame that is not published is returned as it is, one in quarantine stays there.
    pub fn retire(&mut self, index: Index<'_>, frames: &[i64]) -> Result<Vec<FrameId>, Refusal> {
        let ids = self.check_distinct(frames)?;
        self.withdraw(index, &ids);
        Ok(ids
            .into_iter()
            .filter(|id| !self.quarantined[*id as usize] && !self.hold_if_pinned(index, *id))
            .collect())
    }

    /// Returns the quarantined frames that no live reader pins any more.
    ///
    /// `dead_among` gets the pins of a frame and says which of these readers are dead; their bits are cleared. It is
    /// asked once while pins repeat: mostly one lease has many frames.
    pub fn drain(
        &mut self,
        index: Index<'_>,
        mut dead_among: impl FnMut(u64) -> u64,
    ) -> Vec<FrameId> {
        let mut free = Vec::new();
        let mut asked = 0;
        let mut dead_of_asked = 0;
        let quarantined = &mut self.quarantined;
        self.quarantine.retain(|id| {
            let frame = index.frame(*id);
            let pins = frame.pins();
            if pins != 0 && pins != asked {
                (asked, dead_of_asked) = (pins, dead_among(pins));
            }
            let dead = dead_of_asked & pins;
            if dead != 0 {
                frame.forget_readers(dead);
            }
            if pins & !dead != 0 {
                return true;
            }
            quarantined[*id as usize] = false;
            free.push(*id);
            false
        });
        free
    }

    /// Those of `frames` that were leased since they were last asked about, or were never.
    pub fn take_touched(
        &mut self,
        index: Index<'_>,
        frames: &[i64],
    ) -> Result<Vec<FrameId>, Refusal> {
        let ids = self.check_distinct(frames)?;
        Ok(ids
            .into_iter()
            .filter(|id| index.frame(*id).take_touch())
            .collect())
    }

    /// Unpublishes everything. Pinned frames go to quarantine and come out of `drain`.
    pub fn reset(&mut self, index: Index<'_>) {
        let published: Vec<FrameId> = (0..index.frames().len() as FrameId)
            .filter(|id| index.frame(*id).owned_key().is_some())
            .collect();
        index.clear();
        for id in &published {
            index.frame(*id).unpublish();
        }
        self.num_published = 0;
        fence(Ordering::SeqCst);
        for id in published {
            self.hold_if_pinned(index, id);
        }
    }

    fn withdraw(&mut self, index: Index<'_>, ids: &[FrameId]) {
        for id in ids {
            let frame = index.frame(*id);
            if let Some(key) = frame.owned_key() {
                frame.unpublish();
                index.unlink(*id, &key);
                self.num_published -= 1;
            }
        }
        // Between every bump above and every look at pins later; its partner is in `lease::take`.
        fence(Ordering::SeqCst);
    }

    fn hold_if_pinned(&mut self, index: Index<'_>, id: FrameId) -> bool {
        let pinned = index.frame(id).pins() != 0;
        if pinned {
            self.quarantined[id as usize] = true;
            self.quarantine.push(id);
        }
        pinned
    }

    fn check_publishable(
        &mut self,
        index: Index<'_>,
        frames: &[i64],
        keys: &[Key],
    ) -> Result<(), Refusal> {
        if frames.len() != keys.len() {
            return Err(Refusal::Lengths {
                num_frames: frames.len(),
                num_keys: keys.len(),
            });
        }
        self.call += 1;
        for (position, (frame, key)) in frames.iter().zip(keys).enumerate() {
            let id = self.check_range(*frame)?;
            if self.quarantined[id as usize] {
                return Err(Refusal::Quarantined { frame: id });
            }
            let published = index.frame(id).owned_key();
            let earlier = self.mark(id, position).map(|earlier| keys[earlier]);
            if published.or(earlier).is_some_and(|other| other != *key) {
                return Err(Refusal::PublishedAsOther { frame: id });
            }
        }
        Ok(())
    }

    fn check_distinct(&mut self, frames: &[i64]) -> Result<Vec<FrameId>, Refusal> {
        self.call += 1;
        let mut ids = Vec::with_capacity(frames.len());
        for (position, frame) in frames.iter().enumerate() {
            let id = self.check_range(*frame)?;
            if self.mark(id, position).is_some() {
                return Err(Refusal::Repeated { frame: id });
            }
            ids.push(id);
        }
        Ok(ids)
    }

    /// Where the running call named this frame before.
    fn mark(&mut self, id: FrameId, position: usize) -> Option<usize> {
        let (call, earlier) = std::mem::replace(&mut self.seen[id as usize], (self.call, position));
        (call == self.call).then_some(earlier)
    }

    fn check_range(&self, frame: i64) -> Result<FrameId, Refusal> {
        let num_frames = self.quarantined.len();
        usize::try_from(frame)
            .ok()
            .filter(|id| *id < num_frames)
            .map(|id| id as FrameId)
            .ok_or(Refusal::OutOfRange { frame, num_frames })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::frame::Frame;
    use crate::sync::AtomicU32;

    #[test]
    fn drain_when_one_reader_has_many_frames_then_it_is_asked_about_once() {
        let heads = [AtomicU32::new(0)];
        let frames: Vec<Frame> = (0..10_000).map(|_| Frame::default()).collect();
        frames.iter().for_each(|frame| frame.pin(4));
        let ids: Vec<i64> = (0..10_000).collect();
        let index = Index::new(&heads, &frames, 1);
        let mut ledger = Ledger::new(frames.len());
        assert_eq!(ledger.retire(index, &ids), Ok(vec![]));
        for (dead, num_free) in [(0, 0), (4, frames.len())] {
            let mut num_asked = 0;
            let free = ledger.drain(index, |_| {
                num_asked += 1;
                dead
            });
            assert_eq!((free.len(), num_asked), (num_free, 1));
        }
    }
}
