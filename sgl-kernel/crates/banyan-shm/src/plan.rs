// SPDX-License-Identifier: Apache-2.0
//! What one copy moves into frames of the own pool, layer by layer: leased pages of peers, and pages that are still arriving from a store
//! in frames of this process.
//!
//! Invariants
//! * Every target frame is below the home capacity and named once. Every source frame is leased until all its layers are fetched, or its
//!   process has promised the frame to the plan and touches it no more once the frame's layer has arrived.
//! * A layer is copied only after it is complete in its source, or its reading has failed: then the bytes may be any, and whoever waits for
//!   the copy asks the reading before he uses them.
//! * While a layer is awaited that has not arrived, what is leased is fetched ahead and its leases end: owners wait for no drive.
//! * A source page wanted several times is fetched once; its other targets are copied from the first, after all fetches of the layer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Result, invalid};
use crate::frame::FrameId;
use crate::gather::{Piece, copy_piece, settle};
use crate::geometry::{Extent, Geometry};
use crate::memory::SharedMemory;
use crate::peer_mapping::PeerMapping;
use crate::peers::{Home, Lease};
use crate::progress::LayerProgress;

/// Pages that something is still bringing into this process's memory, each as a Full Block: the layers one after another without gaps.
pub struct Arrival {
    pub memory: Arc<SharedMemory>,
    /// Where the block of each page begins.
    pub offsets: Vec<u64>,
    /// A layer that came with failed pages passes too: whoever moves the layers says so at its end.
    pub progress: Arc<LayerProgress>,
}

pub enum Source {
    Leased(Lease),
    Arriving(Arrival),
}

/// Pages and the frames they shall land in.
pub struct Load {
    pub source: Source,
    pub frames: Vec<FrameId>,
}

impl Load {
    fn num_pages(&self) -> usize {
        match &self.source {
            Source::Leased(lease) => lease.num_pages(),
            Source::Arriving(arrival) => arrival.offsets.len(),
        }
    }
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
    peer_mapping: Arc<PeerMapping>,
    stretches: Vec<Stretch>,
}

struct Reception {
    arrival: Arrival,
    targets: Vec<FrameId>,
}

pub struct Plan {
    home: Arc<Home>,
    pool: Arc<SharedMemory>,
    fetches: Vec<Fetch>,
    receptions: Vec<Reception>,
    /// From first targets to further ones, in the own pool.
    repeats: Vec<Stretch>,
    /// Layers that all fetches are through with.
    num_fetched: usize,
    /// Keeps the sources of the fetches in place.
    leases: Vec<Lease>,
}

impl Plan {
    pub fn new(home: Arc<Home>, loads: Vec<Load>) -> Result<Self> {
        let pool = home.pool.memory()?.clone();
        check_targets(&loads, home.capacity)?;
        let mut peer_mappings: Vec<Arc<PeerMapping>> = Vec::new();
        let mut fetched: Vec<Vec<Stretch>> = Vec::new();
        let mut receptions = Vec::new();
        let mut leases = Vec::new();
        for load in loads {
            let lease = match load.source {
                Source::Leased(lease) => lease,
                Source::Arriving(arrival) => {
                    receptions.push(Reception::new(arrival, load.frames, &home.geometry)?);
                    continue;
                }
            };
            let mut targets = load.frames.iter().copied();
            for run in lease.runs() {
                let place = position_of(&run.peer_mapping, &mut peer_mappings);
                fetched.resize_with(peer_mappings.len(), Vec::new);
                let pages = run.pages.iter().zip(&mut targets);
                fetched[place]
                    .extend(pages.map(|(page, target)| Stretch::of_page(page.frame, target)));
            }
            leases.push(lease);
        }
        let mut repeats = Vec::new();
        for pages in &mut fetched {
            pages.sort_unstable();
            repeats.extend(take_repeats(pages));
        }
        if peer_mappings
            .iter()
            .any(|peer_mapping| peer_mapping.pool().is_none())
        {
            return invalid!("pages of a described pool are copied by whoever can open it");
        }
        let fetches = peer_mappings.into_iter().zip(fetched);
        Ok(Self {
            home,
            pool,
            fetches: fetches
                .map(|(peer_mapping, pages)| Fetch {
                    peer_mapping,
                    stretches: coalesce(pages),
                })
                .collect(),
            receptions,
            repeats: coalesce(repeats),
            num_fetched: 0,
            leases,
        })
    }

    pub fn num_layers(&self) -> usize {
        self.home.geometry.num_layers()
    }

    /// Moves one layer, after those before it; `None` when part of it will never arrive. Stops early, with the layer incomplete, once
    /// `stop` is set.
    pub fn copy_layer(&mut self, layer: usize, stop: &AtomicBool) -> Option<Moved> {
        let mut moved = Moved::default();
        // What is there already waits for nothing that is on its way, nor do its owners.
        while self.num_fetched <= layer
            || self.num_fetched < self.num_layers() && !self.has_arrived(layer)
        {
            self.fetch_layer(self.num_fetched, stop, &mut moved);
            self.num_fetched += 1;
        }
        if self.num_fetched == self.num_layers() {
            self.leases.clear();
        }
        for reception in &self.receptions {
            if !reception.arrival.progress.wait_layer_unless(layer, stop) {
                return None;
            }
            moved.copied_bytes += self.receive(reception, layer);
        }
        settle();
        Some(moved)
    }

    fn has_arrived(&self, layer: usize) -> bool {
        let mut receptions = self.receptions.iter();
        receptions.all(|reception| reception.arrival.progress.num_done() > layer)
    }

    fn fetch_layer(&self, layer: usize, stop: &AtomicBool, moved: &mut Moved) {
        let pool = self.pool.mapping();
        for (number, target) in self.home.geometry.layers[layer].iter().enumerate() {
            for fetch in &self.fetches {
                let Some((start, len)) = fetch.peer_mapping.pool() else {
                    continue;
                };
                let source = (start, len, fetch.peer_mapping.extent(layer, number));
                let bytes = self.copy_extent(source, *target, &fetch.stretches, stop);
                moved.fetched_bytes += bytes;
                moved.copied_bytes += bytes;
            }
            let own = (pool.start().cast_const(), pool.len(), *target);
            moved.copied_bytes += self.copy_extent(own, *target, &self.repeats, stop);
        }
    }

    fn receive(&self, Reception { arrival, targets }: &Reception, layer: usize) -> u64 {
        let (memory, pool) = (arrival.memory.mapping(), self.pool.mapping());
        let mut in_block = self.home.geometry.offset_in_block(layer);
        let mut copied = 0;
        for target in &self.home.geometry.layers[layer] {
            let num_bytes = target.page_bytes as usize;
            let piece = |(offset, frame): (&u64, &FrameId)| {
                let (from, to) = ((offset + in_block) as usize, target.offset(*frame));
                assert!(from + num_bytes <= memory.len() && to + num_bytes <= pool.len());
                Piece {
                    // `wrapping_add`: in bounds as just checked.
                    source: memory.start().cast_const().wrapping_add(from),
                    target: pool.start().wrapping_add(to),
                    num_bytes,
                }
            };
            let mut pieces = arrival.offsets.iter().zip(targets).map(piece).peekable();
            while let Some(piece) = pieces.next() {
                // SAFETY: in bounds (checked above). The layer has arrived, so nobody writes the source any more; or its reading is late,
                // and may still be written: all its pages count as failed before that is told, and what is copied here is thrown away.
                // The targets are the caller's to give away, each named once, in another mapping than the source.
                unsafe { copy_piece(piece, pieces.peek().copied()) };
                copied += piece.num_bytes as u64;
            }
            in_block += target.page_bytes;
        }
        copied
    }

    fn copy_extent(
        &self,
        (start, len, source): (*const u8, usize, Extent),
        target: Extent,
        stretches: &[Stretch],
        stop: &AtomicBool,
    ) -> u64 {
        let pool = self.pool.mapping();
        let is_packed = source.is_packed() && target.is_packed();
        let piece = |stretch: Stretch| {
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
        let parts = stretches
            .iter()
            .flat_map(|stretch| stretch.parts(is_packed));
        let mut pieces = parts.map(piece).peekable();
        while let Some(piece) = pieces.next() {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            // SAFETY: in bounds (checked above) and the page sizes agree (checked when the peer was opened or the plan made). Nobody writes the
            // source: a fetched page is leased, a repeated one was written by this thread, an arriving one has arrived. The targets are the caller's to give away, each
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

    /// What can be copied in one piece: all of it where both sides are packed, else page by page.
    fn parts(self, is_packed: bool) -> impl Iterator<Item = Stretch> {
        let (num_parts, num_pages) = if is_packed {
            (1, self.num_pages)
        } else {
            (self.num_pages, 1)
        };
        (0..num_parts).map(move |part| Stretch {
            source: self.source + part,
            target: self.target + part,
            num_pages,
        })
    }
}

impl Reception {
    fn new(arrival: Arrival, targets: Vec<FrameId>, home: &Geometry) -> Result<Self> {
        let (block_bytes, len) = (home.page_bytes(), arrival.memory.len() as u64);
        let fits = |offset: &u64| {
            offset
                .checked_add(block_bytes)
                .is_some_and(|end| end <= len)
        };
        if let Some(offset) = arrival.offsets.iter().find(|offset| !fits(offset)) {
            return invalid!(
                "a page of {block_bytes} bytes at {offset} is outside the memory of {len}"
            );
        }
        Ok(Self { arrival, targets })
    }
}

fn check_targets(loads: &[Load], capacity: u64) -> Result<()> {
    let mut targets = Vec::new();
    for load in loads {
        if load.frames.len() != load.num_pages() {
            return invalid!(
                "{} frames for a lease of {} pages",
                load.frames.len(),
                load.num_pages()
            );
        }
        targets.extend_from_slice(&load.frames);
    }
    // Hashing them takes several times as long, and the scheduler waits.
    targets.sort_unstable();
    if let Some(frame) = targets.last()
        && u64::from(*frame) >= capacity
    {
        return invalid!("frame {frame} is outside the own pool of {capacity} pages");
    }
    if let Some(twice) = targets.windows(2).find(|pair| pair[0] == pair[1]) {
        return invalid!("frame {} is named twice as a target", twice[0]);
    }
    Ok(())
}

fn position_of(peer_mapping: &Arc<PeerMapping>, known: &mut Vec<Arc<PeerMapping>>) -> usize {
    let place = known
        .iter()
        .position(|other| Arc::ptr_eq(other, peer_mapping));
    place.unwrap_or_else(|| {
        known.push(peer_mapping.clone());
        known.len() - 1
    })
}

/// Leaves each source of ascending pages once; the others, from its first target.
fn take_repeats(pages: &mut Vec<Stretch>) -> Vec<Stretch> {
    let mut repeats = Vec::new();
    pages.dedup_by(|page, first| {
        let is_again = page.source == first.source;
        if is_again {
            repeats.push(Stretch::of_page(first.target, page.target));
        }
        is_again
    });
    repeats
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
