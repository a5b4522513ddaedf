// SPDX-License-Identifier: Apache-2.0
//! What one copy moves: leased pages of peers into frames of the own pool, layer by layer.
//!
//! Invariants
//! * Every target frame is below the home capacity and named once; every source frame is leased while the plan exists.
//! * A source page wanted several times is fetched once; its other targets are copied from the first, after all fetches of the layer.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Result, invalid};
use crate::frame::FrameId;
use crate::gather::{Piece, copy_piece, settle};
use crate::geometry::Extent;
use crate::memory::SharedMemory;
use crate::neighbour::Neighbour;
use crate::peers::{Home, Lease};

/// Pages under a lease and the frames they shall land in.
pub struct Load {
    pub lease: Arc<Lease>,
    pub frames: Vec<FrameId>,
}

/// Bytes moved by a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Read from peers.
    pub fetched_bytes: u64,
    /// All.
    pub copied_bytes: u64,
}

/// Pages adjacent in the source and in the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Stretch {
    source: FrameId,
    target: FrameId,
    num_pages: u32,
}

struct Fetch {
    neighbour: Arc<Neighbour>,
    stretches: Vec<Stretch>,
}

pub struct Plan {
    home: Arc<Home>,
    pool: Arc<SharedMemory>,
    fetches: Vec<Fetch>,
    /// From first targets to further ones, in the own pool.
    repeats: Vec<Stretch>,
    /// Keeps every source in place.
    _leases: Vec<Arc<Lease>>,
}

impl Plan {
    pub fn new(home: Arc<Home>, loads: Vec<Load>) -> Result<Self> {
        let pool = home.pool.memory()?.clone();
        check_targets(&loads, home.capacity)?;
        let mut first_target = HashMap::new();
        let mut neighbours: Vec<Arc<Neighbour>> = Vec::new();
        let mut fetched: Vec<Vec<Stretch>> = Vec::new();
        let mut repeats = Vec::new();
        for load in &loads {
            let mut targets = load.frames.iter().copied();
            for run in load.lease.runs() {
                let place = position_of(&run.neighbour, &mut neighbours);
                fetched.resize_with(neighbours.len(), Vec::new);
                for (page, target) in run.pages.iter().zip(&mut targets) {
                    match first_target.insert((place, page.frame), target) {
                        None => fetched[place].push(Stretch::of_page(page.frame, target)),
                        Some(first) => {
                            first_target.insert((place, page.frame), first);
                            repeats.push(Stretch::of_page(first, target));
                        }
                    }
                }
            }
        }
        let fetches = neighbours.into_iter().zip(fetched);
        Ok(Self {
            home,
            pool,
            fetches: fetches
                .map(|(neighbour, pages)| Fetch {
                    neighbour,
                    stretches: coalesce(pages),
                })
                .collect(),
            repeats: coalesce(repeats),
            _leases: loads.into_iter().map(|load| load.lease).collect(),
        })
    }

    pub fn num_layers(&self) -> usize {
        self.home.geometry.num_layers()
    }

    /// Moves one layer; stops early, with the layer incomplete, once `stop` is set.
    pub fn copy_layer(&self, layer: usize, stop: &AtomicBool) -> Moved {
        let mut moved = Moved::default();
        let pool = self.pool.mapping();
        for (number, target) in self.home.geometry.layers[layer].iter().enumerate() {
            for fetch in &self.fetches {
                let Some((start, len)) = fetch.neighbour.pool() else {
                    continue;
                };
                let source = (start, len, fetch.neighbour.extent(layer, number));
                let bytes = self.copy_extent(source, *target, &fetch.stretches, stop);
                moved.fetched_bytes += bytes;
                moved.copied_bytes += bytes;
            }
            let own = (pool.start().cast_const(), pool.len(), *target);
            moved.copied_bytes += self.copy_extent(own, *target, &self.repeats, stop);
        }
        settle();
        moved
    }

    fn copy_extent(
        &self,
        (start, len, source): (*const u8, usize, Extent),
        target: Extent,
        stretches: &[Stretch],
        stop: &AtomicBool,
    ) -> u64 {
        let pool = self.pool.mapping();
        let piece = |stretch: &Stretch| {
            let num_bytes = stretch.num_pages as usize * target.page_bytes as usize;
            let from = source.offset(stretch.source);
            let to = target.offset(stretch.target);
            assert!(from + num_bytes <= len && to + num_bytes <= pool.len());
            Piece {
                // `wrapping_add`: in bounds as just checked.
                source: start.wrapping_add(from),
                target: pool.start().wrapping_add(to),
                num_bytes,
            }
        };
        let mut copied = 0;
        let mut pieces = stretches.iter().map(piece).peekable();
        while let Some(piece) = pieces.next() {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            // SAFETY: in bounds (checked above) and the page sizes agree (checked when the peer was opened). Nobody writes the source: a
            // fetched page is leased, a repeated one was written by this thread. The targets are the caller's to give away, each
            // named once, and lie in another mapping or in another frame than the source.
            unsafe { copy_piece(piece, pieces.peek().copied()) };
            copied += piece.num_bytes as u64;
        }
        copied
    }
}

impl Stretch {
    fn of_page(source: FrameId, target: FrameId) -> Self {
        Self {
            source,
            target,
            num_pages: 1,
        }
    }
}

fn check_targets(loads: &[Load], capacity: u64) -> Result<()> {
    let mut targets = HashSet::new();
    for load in loads {
        if load.frames.len() != load.lease.num_pages() {
            return invalid!(
                "{} frames for a lease of {} pages",
                load.frames.len(),
                load.lease.num_pages()
            );
        }
        for frame in &load.frames {
            if u64::from(*frame) >= capacity {
                return invalid!("frame {frame} is outside the own pool of {capacity} pages");
            }
            if !targets.insert(*frame) {
                return invalid!("frame {frame} is named twice as a target");
            }
        }
    }
    Ok(())
}

fn position_of(neighbour: &Arc<Neighbour>, known: &mut Vec<Arc<Neighbour>>) -> usize {
    let place = known.iter().position(|other| Arc::ptr_eq(other, neighbour));
    place.unwrap_or_else(|| {
        known.push(neighbour.clone());
        known.len() - 1
    })
}

/// Joins what is adjacent on both sides. The order of the pages within a layer does not matter, so sources ascend.
fn coalesce(mut pages: Vec<Stretch>) -> Vec<Stretch> {
    pages.sort_unstable();
    let mut stretches: Vec<Stretch> = Vec::with_capacity(pages.len());
    for page in pages {
        match stretches.last_mut() {
            Some(last)
                if last.source + last.num_pages == page.source
                    && last.target + last.num_pages == page.target =>
            {
                last.num_pages += 1;
            }
            _ => stretches.push(page),
        }
    }
    stretches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coalesce_when_both_sides_are_adjacent_then_one_stretch() {
        let pages = [(7, 3), (5, 1), (6, 2), (9, 4), (10, 6)];
        let pages = pages.map(|(source, target)| Stretch::of_page(source, target));
        let stretch = |source, target, num_pages| Stretch {
            source,
            target,
            num_pages,
        };
        assert_eq!(
            coalesce(pages.to_vec()),
            [stretch(5, 1, 3), stretch(9, 4, 1), stretch(10, 6, 1)]
        );
    }
}
