// SPDX-License-Identifier: Apache-2.0
//! A rank's view of all the others: who holds a prefix, and leases on what they hold.
//!
//! Invariants
//! * `peer_slots[slot]` was opened for the epoch it names, or could not be; a new epoch opens it again. A frame table that cannot be shared (other
//!   namespace, other shape, gone) is passed over, which is said once and never an error; where this process was short of descriptors or memory, it is tried again.
//! * A dead rank's frame table is neither found nor leased; a lease that is held stays good, its memory is mapped.
//! * Every lease on a frame was taken through exactly one `PeerMapping`, which counts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Result, ShmError, invalid};
use crate::frame::Key;
use crate::geometry::Geometry;
use crate::lease::Sighting;
use crate::page_keys::{CHUNK_PAGES, PageKeys};
use crate::peer_mapping::{PeerMapping, ReaderBit};
use crate::pool::Pool;
use crate::prompt::Prompt;
use crate::rank_table::{Namespace, RankTable};
use crate::seeded_rng::mixed;

/// Until what this process was too short of something for is tried again.
const PAUSE: Duration = Duration::from_secs(1);

/// Where copies land: this rank's own pool.
pub struct Home {
    pub pool: Pool,
    pub geometry: Geometry,
    /// Pages that fit.
    pub capacity: u64,
    reader: Arc<ReaderBit>,
}

pub struct Peers {
    rank_table: Arc<RankTable>,
    /// `None`: not a rank (the controller).
    own_slot: Option<usize>,
    namespace: Namespace,
    home: Option<Arc<Home>>,
    peer_slots: Mutex<Vec<PeerSlot>>,
}

#[derive(Default)]
struct PeerSlot {
    epoch: u64,
    peer_mapping: Option<Arc<PeerMapping>>,
    again_at: Option<Instant>,
}

/// A stretch of pages found at one peer.
#[derive(Clone)]
pub struct Run {
    pub peer_mapping: Arc<PeerMapping>,
    pub pages: Vec<Sighting>,
}

/// Pages found from the front, as of the lookup: nothing is held.
#[derive(Clone, Default)]
pub struct Match {
    pub runs: Vec<Run>,
}

impl Match {
    pub fn num_pages(&self) -> usize {
        self.runs.iter().map(|run| run.pages.len()).sum()
    }
}

/// Pages that their owners will not reuse until this is dropped.
#[derive(Default)]
pub struct Lease {
    runs: Vec<Run>,
    /// That under which they are leased: it outlives them.
    claim: Option<Arc<ReaderBit>>,
}

impl Lease {
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    pub fn num_pages(&self) -> usize {
        self.runs.iter().map(|run| run.pages.len()).sum()
    }

    /// Whether first and last page are still published under these keys; nothing has none.
    fn spans(&self, ends: Option<(Key, Key)>) -> bool {
        let Some((first, last)) = ends else {
            return self.runs.is_empty();
        };
        let is = |run: Option<&Run>, page: Option<&Sighting>, key: &Key| match (run, page) {
            (Some(run), Some(page)) => run.peer_mapping.is(page, key),
            _ => false,
        };
        let (front, back) = (self.runs.first(), self.runs.last());
        is(front, front.and_then(|run| run.pages.first()), &first)
            && is(back, back.and_then(|run| run.pages.last()), &last)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        for run in &self.runs {
            run.peer_mapping.give_back(&run.pages);
        }
        drop(self.claim.take());
    }
}

impl Peers {
    /// A rank: looks, leases under `reader_bit`, and copies into `pool`.
    pub fn of_rank(
        rank_table: Arc<RankTable>,
        own_slot: Option<usize>,
        reader_bit: u32,
        namespace: Namespace,
        geometry: Geometry,
        pool: Pool,
    ) -> Result<Self> {
        let capacity = geometry.capacity(pool.num_bytes())?;
        let reader = Arc::new(ReaderBit::claim(rank_table.clone(), reader_bit)?);
        let home = Home {
            pool,
            geometry,
            capacity,
            reader,
        };
        Self::new(rank_table, own_slot, namespace, Some(Arc::new(home)))
    }

    /// Somebody who only looks.
    pub fn of_onlooker(
        rank_table: Arc<RankTable>,
        own_slot: Option<usize>,
        namespace: Namespace,
    ) -> Result<Self> {
        Self::new(rank_table, own_slot, namespace, None)
    }

    fn new(
        rank_table: Arc<RankTable>,
        own_slot: Option<usize>,
        namespace: Namespace,
        home: Option<Arc<Home>>,
    ) -> Result<Self> {
        if let Some(slot) = own_slot {
            rank_table.check_slot(slot)?;
        }
        let mut peer_slots = Vec::new();
        peer_slots.resize_with(rank_table.num_slots(), PeerSlot::default);
        let peers = Self {
            rank_table,
            own_slot,
            namespace,
            home,
            peer_slots: Mutex::new(peer_slots),
        };
        // Now rather than at the first lookup: it also clears what a dead predecessor has pinned.
        drop(peers.refresh());
        Ok(peers)
    }

    pub fn home(&self) -> Option<&Arc<Home>> {
        self.home.as_ref()
    }

    /// From the front: the live frame table with the longest run, then on from where it ends. Of equally long ones the
    /// first of `slots` is taken; without `slots` every other slot is asked, nearest above the own one first.
    pub fn lookup(&self, keys: &[Key], slots: Option<&[usize]>) -> Match {
        let mut candidates = match slots {
            Some(slots) => self.candidates_of(slots),
            None => self.candidates(),
        };
        let mut found = Match::default();
        let mut position = 0;
        while position < keys.len() {
            for candidate in &mut candidates {
                candidate.extend_to(position, keys);
            }
            // The first of the longest: `max_by_key` would take the last.
            let Some(best) = candidates
                .iter()
                .rev()
                .max_by_key(|candidate| candidate.end())
            else {
                break;
            };
            if best.end() == position {
                break;
            }
            let pages = best.pages[position - best.start..].to_vec();
            position = best.end();
            found.runs.push(Run {
                peer_mapping: best.peer_mapping.clone(),
                pages,
            });
        }
        found
    }

    /// For each page by itself the first of `slots` that holds it: what looks at leaves want to know.
    pub fn holders(&self, keys: &[Key], slots: &[usize]) -> Vec<Option<usize>> {
        let peer_slots = self.refresh();
        let holds = |slot: usize, key: &Key| {
            let peer_mapping = peer_slots.get(slot)?.peer_mapping.as_ref()?;
            peer_mapping.index().find(key)?;
            // Last: mostly nobody has it, and the clock need not be asked.
            peer_mapping.identity.seems_alive().then_some(slot)
        };
        let holder = |key: &Key| slots.iter().find_map(|slot| holds(*slot, key));
        keys.iter().map(holder).collect()
    }

    /// Per slot, the own one too: how many leading pages it holds.
    pub fn prefix_lens(&self, keys: &[Key]) -> Vec<usize> {
        let mut lens = vec![0; self.rank_table.num_slots()];
        for peer_mapping in self.live() {
            lens[peer_mapping.slot] = peer_mapping.run_len(keys);
        }
        lens
    }

    /// `prefix_lens` of a prompt, which is hashed only as far as some rank holds it, and no further than
    /// `max_hashed_pages` beyond what is remembered: then the lengths are those up to there.
    pub fn prefix_lens_of(
        &self,
        page_keys: &mut PageKeys,
        prompt: &Prompt,
        max_hashed_pages: usize,
    ) -> Vec<usize> {
        let mut left = max_hashed_pages / CHUNK_PAGES;
        let mut lens = vec![0; self.rank_table.num_slots()];
        let mut holding = self.live();
        let mut prior = prompt.prior;
        for chunk in page_keys.chunks(prompt.tokens.words()) {
            let Some(keys) = page_keys.chunk_within(prior.as_ref(), chunk, &mut left) else {
                break;
            };
            holding.retain(|peer_mapping| {
                let num_pages = peer_mapping.chain_len(keys);
                lens[peer_mapping.slot] += num_pages;
                num_pages == keys.len()
            });
            if holding.is_empty() {
                break;
            }
            prior = keys.last().copied().or(prior);
        }
        lens
    }

    /// Leases the first `num_pages` of `found`, from the page `ends.0` to the page `ends.1`: all, or `None` because
    /// something changed since, an owner died, or these are other pages than those that were looked up. A key names all
    /// pages before its own, and pages are looked up in the order of their chain or against it, so that the two ends
    /// are enough: whatever a caller remembers of earlier lookups, it gets the pages it names or none.
    pub fn lease(
        &self,
        found: &Match,
        num_pages: usize,
        ends: Option<(Key, Key)>,
    ) -> Result<Option<Lease>> {
        if self.home.is_none() {
            return invalid!("only a rank with a pool can lease pages");
        }
        if num_pages > found.num_pages() {
            return invalid!(
                "{num_pages} pages wanted of a match of {}",
                found.num_pages()
            );
        }
        let live = self.live();
        // Runs are added as they are taken, so that dropping the lease half way gives back exactly these.
        let mut lease = Lease::default();
        let mut missing = num_pages;
        for run in &found.runs {
            let wanted = &run.pages[..run.pages.len().min(missing)];
            if wanted.is_empty() {
                break;
            }
            let alive = live.iter().any(|live| Arc::ptr_eq(live, &run.peer_mapping));
            let Some(claim) = alive.then(|| run.peer_mapping.take(wanted)).flatten() else {
                return Ok(None);
            };
            missing -= wanted.len();
            lease.claim = Some(claim);
            lease.runs.push(Run {
                peer_mapping: run.peer_mapping.clone(),
                pages: wanted.to_vec(),
            });
        }
        // Under the pin: its owner does not write another page there.
        Ok(Some(lease).filter(|lease| lease.spans(ends)))
    }

    /// Tells the owners that these pages are wanted: evict others first.
    pub fn touch(&self, found: &Match) {
        for run in &found.runs {
            run.peer_mapping.touch(&run.pages);
        }
    }

    /// The pages that prompts of the ranks in `slots` asked for since the last call, prompt by prompt, as far as they
    /// are remembered (`AccessLog`).
    pub fn read_access_logs(&self, slots: &[usize]) -> Vec<Vec<u64>> {
        let live = self.live().into_iter();
        live.filter(|peer_mapping| slots.contains(&peer_mapping.slot))
            .flat_map(|peer_mapping| peer_mapping.read_access_log())
            .collect()
    }

    /// Differs from the last answer when what anybody published may have, or who is there.
    pub fn version(&self) -> u64 {
        self.live().iter().fold(0, |digest: u64, peer_mapping| {
            let slot = peer_mapping.slot as u64;
            [
                slot,
                peer_mapping.identity.0,
                peer_mapping.epoch,
                peer_mapping.version(),
            ]
            .iter()
            .fold(digest, |digest, word| mixed(digest ^ word))
        }) >> 1
    }

    /// The live ranks besides this one: slot and epoch. An epoch names one rank's stay in a slot.
    pub fn present(&self) -> Vec<(usize, u64)> {
        let live = self.live();
        let others = live.iter().filter(|peer| Some(peer.slot) != self.own_slot);
        others.map(|peer| (peer.slot, peer.epoch)).collect()
    }

    /// How the pool of that rank is opened; `None` when it left, or when its pool can be mapped.
    pub fn description(&self, slot: usize, epoch: u64) -> Option<Vec<u8>> {
        let peer_mapping = self.peer_mapping(slot, epoch)?;
        Some(peer_mapping.description()?.to_vec())
    }

    /// The rank that is in `slot` since `epoch`. Whoever holds it keeps what is mapped of it mapped.
    pub fn peer_mapping(&self, slot: usize, epoch: u64) -> Option<Arc<PeerMapping>> {
        let peer_slots = self.refresh();
        let peer_mapping = peer_slots.get(slot)?.peer_mapping.as_ref()?;
        (peer_mapping.epoch == epoch).then(|| peer_mapping.clone())
    }

    /// Live peers, nearest slot above the own one first, so that ranks which all find the same choose different
    /// sources.
    fn candidates(&self) -> Vec<Candidate> {
        let mut live = self.live();
        live.retain(|peer_mapping| Some(peer_mapping.slot) != self.own_slot);
        let num_slots = self.rank_table.num_slots();
        let first = self.own_slot.map_or(0, |slot| slot + 1);
        live.sort_by_key(|peer_mapping| (peer_mapping.slot + num_slots - first) % num_slots);
        live.into_iter().map(Candidate::new).collect()
    }

    fn candidates_of(&self, slots: &[usize]) -> Vec<Candidate> {
        let live = self.live();
        let at = |slot: &usize| live.iter().find(|peer_mapping| peer_mapping.slot == *slot);
        slots
            .iter()
            .filter_map(at)
            .map(|peer_mapping| Candidate::new(peer_mapping.clone()))
            .collect()
    }

    fn live(&self) -> Vec<Arc<PeerMapping>> {
        self.refresh()
            .iter()
            .filter_map(|peer_slot| peer_slot.peer_mapping.as_ref())
            .filter(|peer_mapping| peer_mapping.identity.seems_alive())
            .cloned()
            .collect()
    }

    /// Opens what has come and drops what has left since.
    fn refresh(&self) -> MutexGuard<'_, Vec<PeerSlot>> {
        let mut peer_slots = self
            .peer_slots
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for (slot, peer_slot) in peer_slots.iter_mut().enumerate() {
            let epoch = self.rank_table.epoch(slot);
            let is_due = peer_slot.again_at.is_some_and(|at| Instant::now() >= at);
            if epoch != peer_slot.epoch || is_due {
                *peer_slot = self.opened(slot, epoch, epoch != peer_slot.epoch);
            }
        }
        peer_slots
    }

    fn opened(&self, slot: usize, epoch: u64, is_new: bool) -> PeerSlot {
        let opened = self.open(slot, epoch);
        let may_pass = opened.as_ref().is_err_and(ShmError::may_pass);
        if let Err(reason) = &opened
            && is_new
            && self.is_there(slot, epoch)
        {
            crate::say!("banyan: the pages of member slot {slot} are not shared here: {reason}");
        }
        PeerSlot {
            epoch,
            // Not to be shared, or gone: passed over until the slot changes hands.
            peer_mapping: opened.ok().flatten().map(Arc::new),
            again_at: may_pass.then(|| Instant::now() + PAUSE),
        }
    }

    /// Whether the rank of this epoch lives: who has just left is missed by nobody.
    fn is_there(&self, slot: usize, epoch: u64) -> bool {
        let member = self.rank_table.member(slot);
        member.is_some_and(|member| member.epoch == epoch && member.identity.is_alive())
    }

    /// Opens exactly this epoch: one frame table opened twice would have two counts of the same pins.
    fn open(&self, slot: usize, epoch: u64) -> Result<Option<PeerMapping>> {
        let Some(member) = self.rank_table.member(slot) else {
            return Ok(None);
        };
        if member.epoch != epoch || member.namespace != self.namespace {
            return Ok(None);
        }
        let opened = match &self.home {
            Some(home) if self.own_slot != Some(slot) => {
                let access = home.pool.access_to_peers();
                PeerMapping::reach(slot, &member, &home.reader, &home.geometry, access)
            }
            _ => PeerMapping::look(slot, &member),
        };
        opened.map(Some)
    }
}

/// A peer in a lookup and the run last found there: `pages` answers for the keys from `start`.
struct Candidate {
    peer_mapping: Arc<PeerMapping>,
    start: usize,
    pages: Vec<Sighting>,
}

impl Candidate {
    fn new(peer_mapping: Arc<PeerMapping>) -> Self {
        Self {
            peer_mapping,
            start: 0,
            pages: Vec::new(),
        }
    }

    fn end(&self) -> usize {
        self.start + self.pages.len()
    }

    /// Looks from `position` on, unless the known run reaches beyond it.
    fn extend_to(&mut self, position: usize, keys: &[Key]) {
        if self.end() <= position {
            self.start = position;
            self.pages = self.peer_mapping.run(&keys[position..]);
        }
    }
}
