// SPDX-License-Identifier: Apache-2.0
//! Whether a writer may take more space, and the space that a store takes now.

use std::fs;

use crate::directory::{ShelfId, Stripe};
use crate::error::Result;
use crate::format::ENTRY_BYTES;
use crate::geometry::{BLOCK_BYTES, Segmenting};
use crate::manifest::Follower;
use crate::opening::{pass_over, says_nothing};
use crate::writing::MORE_ENTRIES;

/// Manifest bytes for each place: two entries, one to grow by, and one in the next manifest.
const MANIFEST_BYTES_PER_PLACE: u64 = 4 * ENTRY_BYTES as u64;

/// A manifest's head, the entries that it may have beyond that, and the same in the next manifest.
const MANIFEST_BYTES: u64 = 2 * (BLOCK_BYTES as u64 + MORE_ENTRIES * ENTRY_BYTES as u64);

/// A segment is this part of the quota, within bounds: few files for a large store, small steps for a small one.
const SEGMENTS_PER_QUOTA: u64 = 64;
/// And no more than this part of the writer's share, which may be less than that of the quota.
const SEGMENTS_PER_SHARE: u64 = 4;
const LARGE_SEGMENT_BYTES: u64 = 1 << 30;
/// Whoever reads them keeps them open, and io_uring is told of 8192 files.
const MOST_SEGMENTS: u64 = 4096;

/// What the user allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// All users of the store together.
    pub quota_bytes: u64,
    /// This writer.
    pub share_bytes: u64,
    /// To be left free on each file system.
    pub floor_bytes: u64,
}

/// What is taken now, and what one more segment would take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    pub used_bytes: u64,
    pub own_bytes: u64,
    pub free_bytes: u64,
    pub segment_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    Share,
    Quota,
    Floor,
}

pub fn may_grow(limits: &Limits, space: &Space) -> std::result::Result<(), Refusal> {
    let with_it = |bytes: u64| bytes.saturating_add(space.segment_bytes);
    if with_it(space.own_bytes) > limits.share_bytes {
        Err(Refusal::Share)
    } else if with_it(space.used_bytes) > limits.quota_bytes {
        Err(Refusal::Quota)
    } else if space.free_bytes < with_it(limits.floor_bytes) {
        Err(Refusal::Floor)
    } else {
        Ok(())
    }
}

pub fn places_per_segment(limits: &Limits, segment_bytes: Option<u64>, record_bytes: u64) -> u32 {
    let quota_bytes = limits.quota_bytes;
    let wanted = segment_bytes
        .unwrap_or_else(|| {
            let largest = LARGE_SEGMENT_BYTES.max(quota_bytes / MOST_SEGMENTS);
            (quota_bytes / SEGMENTS_PER_QUOTA)
                .min(largest)
                .min(limits.share_bytes / SEGMENTS_PER_SHARE)
        })
        .saturating_sub(BLOCK_BYTES as u64);
    let places = wanted / (record_bytes + MANIFEST_BYTES_PER_PLACE);
    u32::try_from(places).unwrap_or(u32::MAX / 2).max(1)
}

/// What a segment counts against the quota: its file, and its places' lines in the manifest.
pub fn segment_cost(segmenting: &Segmenting) -> u64 {
    let lines = u64::from(segmenting.places_per_segment) * MANIFEST_BYTES_PER_PLACE;
    segmenting.file_bytes() + lines
}

/// What a shelf of so many segments counts.
pub fn cost_of(segmenting: &Segmenting, num_segments: usize) -> u64 {
    let segments = segment_cost(segmenting).saturating_mul(num_segments as u64);
    MANIFEST_BYTES.saturating_add(segments)
}

/// What a whole shelf counts.
pub fn shelf_cost(stripe: &Stripe, shelf: ShelfId) -> Result<u64> {
    let found = Follower::open(&stripe.shelf(shelf, 0)).ok().flatten();
    cost_by(stripe, shelf, found.as_ref())
}

/// By what its manifest says. A shelf that cannot be read or listed is no reason not to grow.
pub fn cost_by(stripe: &Stripe, shelf: ShelfId, found: Option<&Follower>) -> Result<u64> {
    let segments = match stripe.segments(shelf) {
        Err(error) if error.system_cause().is_some_and(says_nothing) => return Err(error),
        Err(error) => {
            pass_over(shelf, &error);
            Vec::new()
        }
        Ok(segments) => segments,
    };
    if let Some(found) = found {
        return Ok(cost_of(&found.header.segmenting(), segments.len()));
    }
    // Without a manifest only the files themselves are there.
    let bytes = segments.iter().map(|segment| {
        let data = fs::symlink_metadata(stripe.segment(shelf, *segment));
        data.map_or(0, |data| data.len())
    });
    Ok(bytes.fold(MANIFEST_BYTES, u64::saturating_add))
}

pub fn store_cost(stripe: &Stripe) -> Result<u64> {
    let shelves = stripe.shelves()?;
    let mut costs = shelves.into_iter().map(|shelf| shelf_cost(stripe, shelf));
    costs.try_fold(0, |sum: u64, cost| Ok(sum.saturating_add(cost?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        quota_bytes: 1000,
        share_bytes: 600,
        floor_bytes: 50,
    };
    const ROOM: Space = Space {
        used_bytes: 900,
        own_bytes: 500,
        free_bytes: 150,
        segment_bytes: 100,
    };

    #[test]
    fn growth_when_any_limit_would_be_passed_then_refused_by_its_name() {
        assert_eq!(may_grow(&LIMITS, &ROOM), Ok(()));
        let cases = [
            (
                Space {
                    own_bytes: 501,
                    ..ROOM
                },
                Refusal::Share,
            ),
            (
                Space {
                    used_bytes: 901,
                    ..ROOM
                },
                Refusal::Quota,
            ),
            (
                // Another shelf's header may say anything.
                Space {
                    used_bytes: u64::MAX,
                    ..ROOM
                },
                Refusal::Quota,
            ),
            (
                Space {
                    free_bytes: 149,
                    ..ROOM
                },
                Refusal::Floor,
            ),
        ];
        for (space, refusal) in cases {
            assert_eq!(may_grow(&LIMITS, &space), Err(refusal));
        }
    }

    #[test]
    fn segments_when_sized_then_whole_records_and_at_least_one() {
        let places = |quota_bytes: u64, segment_bytes, record_bytes| {
            let limits = Limits {
                quota_bytes,
                share_bytes: quota_bytes / 8,
                floor_bytes: 0,
            };
            places_per_segment(&limits, segment_bytes, record_bytes)
        };
        assert_eq!(places(1 << 40, None, 1 << 20), 1023);
        assert_eq!(places(1 << 20, None, 1 << 20), 1);
        // A large store has no more segments, but larger ones.
        assert_eq!(places(64 << 40, None, 1 << 20), 16375);
        let three = 4096 + 3 * (8192 + MANIFEST_BYTES_PER_PLACE);
        assert_eq!(places(1 << 40, Some(three), 8192), 3);
        assert_eq!(places(1 << 40, Some(three - 1), 8192), 2);
    }
}
