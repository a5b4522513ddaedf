// SPDX-License-Identifier: Apache-2.0
//! The reader's side: pin frames, then check that they still are what was looked up.
//!
//! Invariants
//! * `held[frame]` counts this rank's leases on the frame. The pin bit is set exactly while it is above zero, so that one rank may lease a frame
//!   twice; whoever changes the counts of a frame table holds its lock.
//! * A lease is all or nothing.

use crate::frame::{Frame, FrameId, is_published};
use crate::sync::{Ordering, fence};

/// A published page as a lookup found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sighting {
    pub frame: FrameId,
    pub generation: u64,
}

/// Pins all of `wanted` for the rank of `bit`. `false`: something changed since the lookup, and nothing is pinned.
pub fn take(frames: &[Frame], wanted: &[Sighting], bit: u64, held: &mut [u32]) -> bool {
    for sighting in wanted {
        let count = &mut held[sighting.frame as usize];
        if *count == 0 {
            frames[sighting.frame as usize].pin(bit);
        }
        *count += 1;
    }
    // Between every pin above and every generation below; its partner is in `Ledger::withdraw`.
    fence(Ordering::SeqCst);
    let valid = wanted.iter().all(|sighting| {
        let generation = frames[sighting.frame as usize].generation();
        is_published(generation) && generation == sighting.generation
    });
    if valid {
        for sighting in wanted {
            frames[sighting.frame as usize].touch();
        }
    } else {
        give_back(frames, wanted, bit, held);
    }
    valid
}

/// Undoes one `take` of the same frames.
pub fn give_back(frames: &[Frame], leased: &[Sighting], bit: u64, held: &mut [u32]) {
    for sighting in leased {
        let count = &mut held[sighting.frame as usize];
        *count -= 1;
        if *count == 0 {
            frames[sighting.frame as usize].unpin(bit);
        }
    }
}
