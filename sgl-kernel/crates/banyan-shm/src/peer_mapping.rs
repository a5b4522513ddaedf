// SPDX-License-Identifier: Apache-2.0
//! Another rank's frame table and pool, mapped into this process, and this rank's leases on it.
//!
//! Invariants
//! * `held[frame]` is the number of this rank's leases on the frame; the rank's bit in the frame is set exactly while it is above zero.
//! * `read_up_to` says how far this view has read what prompts of that rank asked for; it begins with what the ring still has.
//! * What a lease needs (both mappings, the claim on the reader bit) lives as long as the lease, whatever becomes of the owner or of `Peers`.
//! * Whoever keeps only the memory mapped has no claim: once `Peers` and its leases are gone, no lease is taken here any more.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::error::{Result, invalid};
use crate::frame::Key;
use crate::geometry::{Extent, Geometry};
use crate::index::Index;
use crate::layout::{FrameTableLayout, Reading, Word};
use crate::lease::{self, Sighting};
use crate::liveness::Identity;
use crate::memory::{Access, Mapping, map_foreign};
use crate::pool::{FileIdentity, PeerPool};
use crate::rank_table::{Member, RankTable};
use crate::sync::Ordering;

/// This process's claim on a pin bit; given back when the last lease and the last `Peers` are gone.
pub struct ReaderBit {
    rank_table: Arc<RankTable>,
    bit: u32,
}

impl ReaderBit {
    pub fn claim(rank_table: Arc<RankTable>, bit: u32) -> Result<Self> {
        let before = rank_table.claim_reader(bit)?;
        if !before.is_nobody()
            && let Err(error) = forget_predecessor(&rank_table, bit)
        {
            // For the next one that claims.
            rank_table.release_reader(bit, before);
            return Err(error);
        }
        Ok(Self { rank_table, bit })
    }

    fn mask(&self) -> u64 {
        1 << self.bit
    }
}

impl Drop for ReaderBit {
    fn drop(&mut self) {
        self.rank_table.release_reader(self.bit, Identity::NOBODY);
    }
}

/// Clears what a dead predecessor has pinned, in any namespace: no lease is held under this bit yet. A frame table that cannot be opened has gone, or
/// its owner has; where nothing could be opened at the moment, an error.
fn forget_predecessor(rank_table: &RankTable, bit: u32) -> Result<()> {
    for slot in 0..rank_table.num_slots() {
        let Some(member) = rank_table.member(slot) else {
            continue;
        };
        match PeerMapping::open(slot, &member) {
            Ok((peer_mapping, _)) => peer_mapping.unpin_all(1 << bit),
            Err(error) if error.may_pass() => return Err(error),
            Err(_) => {}
        }
    }
    Ok(())
}

/// What only a rank that copies needs.
struct Reach {
    reader: Weak<ReaderBit>,
    mask: u64,
    pool: PeerPool,
    pool_path: String,
    held: Mutex<Vec<u32>>,
}

pub struct PeerMapping {
    pub slot: usize,
    pub identity: Identity,
    pub epoch: u64,
    layout: FrameTableLayout,
    geometry: Geometry,
    frame_table: Mapping,
    read_up_to: Mutex<u64>,
    reach: Option<Reach>,
}

impl PeerMapping {
    /// Maps the frame table of `member` to look pages up in.
    pub fn look(slot: usize, member: &Member) -> Result<Self> {
        Ok(Self::open(slot, member)?.0)
    }

    /// Maps frame table and pool of `member`, to lease and copy for `reader` into a pool of `geometry`. `access`: how
    /// the pool is mapped.
    pub fn reach(
        slot: usize,
        member: &Member,
        reader: &Arc<ReaderBit>,
        geometry: &Geometry,
        access: Access,
    ) -> Result<Self> {
        let (mut peer_mapping, reading) = Self::open(slot, member)?;
        if !geometry.exchanges_with(&reading.geometry) {
            return invalid!("same namespace, but its pages have another shape");
        }
        let capacity = reading.geometry.capacity(reading.pool_bytes)?;
        let pool = Self::open_pool(member, &reading, access)?
            .filter(|_| reading.layout.num_frames as u64 <= capacity);
        let Some(pool) = pool else {
            return invalid!(
                "its pool of {} bytes does not hold its frames",
                reading.pool_bytes
            );
        };
        // A dead predecessor may have left our bit behind; until the first lease of this process nobody may hold it.
        peer_mapping.unpin_all(reader.mask());
        let held = Mutex::new(vec![0; reading.layout.num_frames]);
        peer_mapping.reach = Some(Reach {
            reader: Arc::downgrade(reader),
            mask: reader.mask(),
            pool,
            pool_path: member.identity.fd_path(reading.pool_fd),
            held,
        });
        Ok(peer_mapping)
    }

    fn unpin_all(&self, mask: u64) {
        for frame in self.index().frames() {
            if frame.is_pinned_by(mask) {
                frame.unpin(mask);
            }
        }
    }

    fn open(slot: usize, member: &Member) -> Result<(Self, Reading)> {
        let file = member
            .identity
            .open_fd(member.frame_table_fd, Access::ReadWrite)?;
        let frame_table = map_foreign(&file, Access::ReadWrite, "a peer's frame table")?;
        let reading = Reading::of(&frame_table)?;
        // The descriptor may have been reused between the rank table's entry and our opening it.
        if reading.identity != member.identity.0
            || reading.epoch != member.epoch
            || reading.namespace != member.namespace
        {
            return invalid!("the frame table found is not the one announced");
        }
        let peer_mapping = Self {
            slot,
            identity: member.identity,
            epoch: member.epoch,
            layout: reading.layout,
            geometry: reading.geometry.clone(),
            frame_table,
            read_up_to: Mutex::new(0),
            reach: None,
        };
        Ok((peer_mapping, reading))
    }

    fn open_pool(member: &Member, reading: &Reading, access: Access) -> Result<Option<PeerPool>> {
        let file = member.identity.open_fd(reading.pool_fd, access)?;
        // The frame table was opened before: were its process gone meanwhile and the pid another's, the size would have
        // to match by chance.
        if !member.identity.is_alive() {
            return invalid!("process {} is gone", member.identity.pid());
        }
        PeerPool::open(&file, reading.pool_kind, reading.pool_bytes, access)
    }

    pub fn index(&self) -> Index<'_> {
        self.layout.index(&self.frame_table)
    }

    pub fn version(&self) -> u64 {
        self.word(Word::Version)
    }

    pub fn num_published(&self) -> u64 {
        self.word(Word::NumPublished)
    }

    fn word(&self, word: Word) -> u64 {
        self.layout
            .word(&self.frame_table, word)
            .load(Ordering::Acquire)
    }

    /// The pages that prompts of that rank asked for since the last call, prompt by prompt.
    pub fn read_access_log(&self) -> Vec<Vec<u64>> {
        let mut read_up_to = self
            .read_up_to
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (prompts, end) = self
            .layout
            .access_log(&self.frame_table)
            .read_from(*read_up_to);
        *read_up_to = end;
        prompts
    }

    /// Leading keys of `keys` that are published here, with where they are.
    pub fn run(&self, keys: &[Key]) -> Vec<Sighting> {
        let index = self.index();
        let mut run = Vec::new();
        self.for_each_leading(keys, index, |sighting| run.push(sighting));
        run
    }

    /// How many leading keys are published here.
    pub fn run_len(&self, keys: &[Key]) -> usize {
        let mut num_pages = 0;
        self.for_each_leading(keys, self.index(), |_| num_pages += 1);
        num_pages
    }

    /// `run_len` for keys of one chain, of which a rank that holds the last holds all: SGLang adds pages behind their
    /// prefix and evicts leaves first. Many ranks can be asked about long prompts so; where a page is missing in
    /// between, the answer is too long, and no more than advice.
    pub fn chain_len(&self, chain: &[Key]) -> usize {
        match chain.last() {
            Some(last) if self.index().find(last).is_some() => chain.len(),
            _ => self.run_len(chain),
        }
    }

    fn for_each_leading(&self, keys: &[Key], index: Index<'_>, mut found: impl FnMut(Sighting)) {
        // Two steps ahead of the probe: the bucket far ahead, the frame it names nearer.
        const BUCKET_AHEAD: usize = 16;
        const FRAME_AHEAD: usize = 8;
        for (position, key) in keys.iter().enumerate() {
            if let Some(later) = keys.get(position + BUCKET_AHEAD) {
                index.prefetch_bucket(later);
            }
            if let Some(later) = keys.get(position + FRAME_AHEAD) {
                index.prefetch_frame(later);
            }
            let Some((frame, generation)) = index.find(key) else {
                return;
            };
            found(Sighting { frame, generation });
        }
    }

    /// The claim under which they are leased now, to be kept until `give_back`. `None`: one of them changed since it was
    /// seen, or this rank only looks; nothing is pinned.
    pub fn take(&self, wanted: &[Sighting]) -> Option<Arc<ReaderBit>> {
        let reach = self.reach.as_ref()?;
        let reader = reach.reader.upgrade()?;
        let frames = self.index().frames();
        lease::take(frames, wanted, reach.mask, &mut lock(&reach.held)).then_some(reader)
    }

    /// Whether what was seen there is published under `key`.
    pub fn is(&self, seen: &Sighting, key: &Key) -> bool {
        self.index().frame(seen.frame).published_as(key) == Some(seen.generation)
    }

    /// Tells the owner that these pages are wanted, without taking them.
    pub fn touch(&self, seen: &[Sighting]) {
        let frames = self.index().frames();
        for sighting in seen {
            frames[sighting.frame as usize].touch();
        }
    }

    pub fn give_back(&self, leased: &[Sighting]) {
        if let Some(reach) = &self.reach {
            let frames = self.index().frames();
            lease::give_back(frames, leased, reach.mask, &mut lock(&reach.held));
        }
    }

    pub fn extent(&self, layer: usize, extent: usize) -> Extent {
        self.geometry.layers[layer][extent]
    }

    /// First byte of the pool and its size; reading a page needs a lease on its frame. `None` for a rank that only
    /// looks, and for a pool that cannot be mapped.
    pub fn pool(&self) -> Option<(*const u8, usize)> {
        match &self.reach.as_ref()?.pool {
            PeerPool::Mapped(pool, _) => Some((pool.start().cast_const(), pool.len())),
            PeerPool::Described(_) => None,
        }
    }

    /// Which memory a mapped pool is.
    pub fn pool_identity(&self) -> Option<FileIdentity> {
        match &self.reach.as_ref()?.pool {
            PeerPool::Mapped(_, identity) => Some(*identity),
            PeerPool::Described(_) => None,
        }
    }

    /// Where another process opens the pool while its owner lives.
    pub fn pool_path(&self) -> Option<&str> {
        Some(&self.reach.as_ref()?.pool_path)
    }

    /// All extents, layer by layer.
    pub fn extents(&self) -> Vec<Extent> {
        self.geometry.layers.iter().flatten().copied().collect()
    }

    /// How to open the pool, where it cannot be mapped.
    pub fn description(&self) -> Option<&[u8]> {
        match &self.reach.as_ref()?.pool {
            PeerPool::Mapped(..) => None,
            PeerPool::Described(description) => Some(description),
        }
    }
}

fn lock(held: &Mutex<Vec<u32>>) -> MutexGuard<'_, Vec<u32>> {
    // Counting cannot panic half way but by a bug; a poisoned count is still the best one there is.
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::{AsRawFd, FromRawFd};

    /// Of more bytes than a process can map.
    fn unmappable() -> File {
        // SAFETY: a terminated string, then our own descriptor; the results are checked.
        let (file, sealed) = unsafe {
            let fd = libc::memfd_create(c"unmappable".as_ptr(), libc::MFD_ALLOW_SEALING);
            assert!(fd >= 0);
            let file = File::from_raw_fd(fd);
            file.set_len(1 << 60).unwrap();
            let sealed = libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK);
            (file, sealed)
        };
        assert_eq!(sealed, 0);
        file
    }

    #[test]
    fn claim_when_what_a_dead_reader_had_pinned_cannot_be_cleared_then_it_has_the_bit_still() {
        let rank_table = Arc::new(RankTable::create(1).unwrap());
        let (own, file) = (Identity::own().unwrap(), unmappable());
        let member = Member {
            epoch: rank_table.claim_slot(0).unwrap(),
            identity: own,
            frame_table_fd: file.as_raw_fd() as u64,
            num_frames: 1,
            namespace: [0; 4],
        };
        rank_table.announce(0, &member);
        // A pid of ours, started at another time.
        let dead = Identity(own.0 ^ 1 << 22);
        rank_table.release_reader(5, dead);
        let refused = ReaderBit::claim(rank_table.clone(), 5).err().unwrap();
        assert!(refused.may_pass(), "{refused}");
        rank_table.leave(0);
        assert_eq!(rank_table.claim_reader(5).unwrap(), dead);
        rank_table.release_reader(5, dead);
        drop(ReaderBit::claim(rank_table.clone(), 5).unwrap());
        assert!(rank_table.claim_reader(5).unwrap().is_nobody());
    }
}
