// SPDX-License-Identifier: Apache-2.0
//! A rank's frame table: the frames of its pool, announced in the rank table.
//!
//! Invariants
//! * One thread uses it (`&mut self`), and no other process writes it, but for pins.
//! * The version word grows before a call that changed the published set returns.
//!
//! States: open --close or drop--> closed. Closed: left the rank table, nothing published, nor to be published or logged
//! any more; frames are retired and drained as before, for their owner goes on and readers may hold some yet. The memory
//! stays until the last peer unmaps it, so that a lease in flight can still be copied.

use std::sync::Arc;

use crate::error::{Result, invalid};
use crate::frame::{FrameId, Key};
use crate::geometry::Geometry;
use crate::index::draw_multiplier;
use crate::layout::{Birth, FrameTableLayout, Word};
use crate::ledger::Ledger;
use crate::liveness::Identity;
use crate::memory::SharedMemory;
use crate::pool::Pool;
use crate::rank_table::{Member, Namespace, RankTable};
use crate::sync::Ordering;

pub struct FrameTable {
    rank_table: Arc<RankTable>,
    slot: usize,
    memory: SharedMemory,
    layout: FrameTableLayout,
    ledger: Ledger,
    open: bool,
    /// Peers open it through our descriptor, so it lives as long as the frame table.
    _pool: Pool,
}

impl FrameTable {
    pub fn open(
        rank_table: Arc<RankTable>,
        slot: usize,
        namespace: Namespace,
        pool: Pool,
        num_frames: usize,
        geometry: &Geometry,
    ) -> Result<Self> {
        rank_table.check_slot(slot)?;
        check_fits(num_frames, geometry, pool.num_bytes())?;
        let geometry_words = geometry.to_words().len();
        let layout = FrameTableLayout::new(num_frames, geometry_words, draw_multiplier());
        let memory = SharedMemory::create(layout.num_bytes(), "frame_table")?;
        // Before the claim: whatever fails behind it leaves the slot to a process that lives and is not in it.
        let identity = Identity::own()?;
        let epoch = rank_table.claim_slot(slot)?;
        let birth = Birth {
            identity: identity.0,
            epoch,
            namespace,
            geometry,
            pool_kind: pool.kind(),
            pool_fd: pool.fd() as u64,
            pool_bytes: pool.num_bytes(),
        };
        birth.write(&layout, memory.mapping());
        let member = Member {
            epoch,
            identity,
            frame_table_fd: memory.fd() as u64,
            num_frames: num_frames as u64,
            namespace,
        };
        rank_table.announce(slot, &member);
        Ok(Self {
            rank_table,
            slot,
            memory,
            layout,
            ledger: Ledger::new(num_frames),
            open: true,
            _pool: pool,
        })
    }

    /// See `Ledger::publish`.
    pub fn publish(&mut self, frames: &[i64], keys: &[Key]) -> Result<usize> {
        self.check_open()?;
        let index = self.layout.index(self.memory.mapping());
        let num_new = self.ledger.publish(index, frames, keys)?;
        self.note_change(num_new);
        Ok(num_new)
    }

    /// See `Ledger::retire`.
    pub fn retire(&mut self, frames: &[i64]) -> Result<Vec<FrameId>> {
        let published = self.ledger.num_published();
        let index = self.layout.index(self.memory.mapping());
        let free = self.ledger.retire(index, frames)?;
        self.note_change(published - self.ledger.num_published());
        Ok(free)
    }

    /// See `Ledger::drain`. Dead readers are found out within 100 ms.
    pub fn drain(&mut self) -> Vec<FrameId> {
        let index = self.layout.index(self.memory.mapping());
        self.ledger
            .drain(index, |pins| self.rank_table.dead_among(pins))
    }

    /// See `Ledger::take_touched`.
    pub fn take_touched(&mut self, frames: &[i64]) -> Result<Vec<FrameId>> {
        self.check_open()?;
        let index = self.layout.index(self.memory.mapping());
        Ok(self.ledger.take_touched(index, frames)?)
    }

    /// Tells the peers that a prompt of these pages has come. See `AccessLog`. Of a closed one nobody hears.
    pub fn log_access(&self, numbers: &[u64]) {
        if self.open {
            self.layout
                .access_log(self.memory.mapping())
                .append(numbers);
        }
    }

    /// See `Ledger::reset`. Of a closed one nothing is published.
    pub fn reset(&mut self) {
        if self.open {
            self.unpublish_all();
        }
    }

    pub fn num_published(&self) -> usize {
        self.ledger.num_published()
    }

    pub fn num_quarantined(&self) -> usize {
        self.ledger.num_quarantined()
    }

    /// Leaves the rank table; nothing stays published. Idempotent.
    pub fn close(&mut self) {
        if self.open {
            self.unpublish_all();
            self.rank_table.leave(self.slot);
            self.open = false;
        }
    }

    fn unpublish_all(&mut self) {
        let published = self.ledger.num_published();
        self.ledger.reset(self.layout.index(self.memory.mapping()));
        self.note_change(published);
    }

    fn note_change(&self, num_changed: usize) {
        if num_changed > 0 {
            let published = self.ledger.num_published() as u64;
            let mapping = self.memory.mapping();
            self.layout
                .word(mapping, Word::NumPublished)
                .store(published, Ordering::Relaxed);
            self.layout
                .word(mapping, Word::Version)
                .fetch_add(1, Ordering::Release);
        }
    }

    fn check_open(&self) -> Result<()> {
        if self.open {
            return Ok(());
        }
        invalid!("the frame table of slot {} is closed", self.slot)
    }
}

impl Drop for FrameTable {
    fn drop(&mut self) {
        self.close();
    }
}

fn check_fits(num_frames: usize, geometry: &Geometry, pool_bytes: u64) -> Result<()> {
    let capacity = geometry.capacity(pool_bytes)?;
    if num_frames == 0 || num_frames as u64 > capacity {
        return invalid!(
            "{num_frames} frames, but the geometry has room for {capacity} pages in {pool_bytes} bytes"
        );
    }
    if num_frames >= FrameId::MAX as usize / 4 {
        return invalid!("{num_frames} frames are more than a frame table can number");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_when_a_peer_writes_another_multiplier_then_the_owner_still_finds_its_pages() {
        let rank_table = Arc::new(RankTable::create(1).unwrap());
        let geometry = Geometry::new(&[vec![(0, 64)]], None);
        let pool = Pool::Mapped(Arc::new(SharedMemory::create(4096, "pool").unwrap()));
        let mut table = FrameTable::open(rank_table, 0, [0; 4], pool, 64, &geometry).unwrap();
        let (frames, keys): (Vec<i64>, Vec<Key>) =
            (0..64).map(|id| (id, [id as u64, 1, 2, 3])).unzip();
        table.publish(&frames, &keys).unwrap();
        let mapping = table.memory.mapping();
        let multiplier = table.layout.word(mapping, Word::Multiplier);
        multiplier.store(draw_multiplier(), Ordering::Relaxed);
        let index = table.layout.index(mapping);
        assert!(keys.iter().all(|key| index.find(key).is_some()));
    }
}
