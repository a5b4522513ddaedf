// SPDX-License-Identifier: Apache-2.0
//! Who is here: one shared table per server, made by the process that launches the ranks.
//!
//! Invariants
//! * A slot is written only by the rank that claimed it; a claim is one compare-and-swap of the slot's identity, from nobody, a dead process or one
//!   that left.
//! * `epoch` of a slot is odd while its other words change and grows with every change: a reader that sees it even and equal before and after has
//!   read one consistent entry.
//! * The size of a page is said once, by the first rank that has resolved it; a rank that says another is refused.
//! * `reading` and `read_rate` of a slot are gauges apart from its entry: the rank in it writes them at any time, and they are zero from a claim on.
//! * A reader's bit belongs to the process in `readers[bit]`, claimed the same way. Only such a process sets that bit in any frame table.
//!
//! Slot states: empty --claim, announce--> attached --leave--> left --claim, announce--> attached ... A killed rank
//! stays attached and is told apart by its identity.

use std::fs;

use crate::error::{Result, ShmError, invalid};
use crate::liveness::Identity;
use crate::memory::{Access, Mapping, SharedMemory, map_foreign};
use crate::sync::{AtomicU64, Ordering, fence};

/// A pin is one bit of a word.
pub const MAX_SLOTS: usize = 64;

const MAGIC: u64 = u64::from_le_bytes(*b"BNYNROST");
const FORMAT: u64 = 2;

const MAGIC_WORD: usize = 0;
const FORMAT_WORD: usize = 1;
const NUM_SLOTS_WORD: usize = 2;
const PAGE_TOKENS_WORD: usize = 3;
const FAILURES_WORD: usize = 4;
const SILENT_WORD: usize = 5;
const READERS_WORD: usize = 8;
const SLOTS_WORD: usize = READERS_WORD + MAX_SLOTS;

/// Words of one slot: two cache lines.
const SLOT_WORDS: usize = 16;
const EPOCH: usize = 0;
const IDENTITY: usize = 1;
const STATE: usize = 2;
const FRAME_TABLE_FD: usize = 3;
const NUM_FRAMES: usize = 4;
const NAMESPACE: usize = 5;
const READING: usize = 9;
const READ_RATE: usize = 10;

const EMPTY: u64 = 0;
const ATTACHED: u64 = 1;
const LEFT: u64 = 2;

/// Digest of all that must agree before two ranks exchange pages.
pub type Namespace = [u64; 4];

/// What an attached rank says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    pub epoch: u64,
    pub identity: Identity,
    pub frame_table_fd: u64,
    pub num_frames: u64,
    pub namespace: Namespace,
}

pub struct RankTable {
    memory: Memory,
    num_slots: usize,
}

/// The launcher made the table, a rank opened it; both keep a descriptor, so that others can open it through either.
enum Memory {
    Made(SharedMemory),
    Opened { file: fs::File, mapping: Mapping },
}

impl RankTable {
    pub fn create(num_slots: usize) -> Result<Self> {
        if num_slots == 0 || num_slots > MAX_SLOTS {
            return invalid!("a rank table has 1 to {MAX_SLOTS} slots, not {num_slots}");
        }
        let memory = SharedMemory::create(table_words(num_slots) * 8, "rank_table")?;
        let rank_table = Self {
            memory: Memory::Made(memory),
            num_slots,
        };
        rank_table
            .word(FORMAT_WORD)
            .store(FORMAT, Ordering::Relaxed);
        let slots = num_slots as u64;
        rank_table
            .word(NUM_SLOTS_WORD)
            .store(slots, Ordering::Relaxed);
        rank_table.word(MAGIC_WORD).store(MAGIC, Ordering::Release);
        Ok(rank_table)
    }

    /// Opens the table that another process of this user made, by its `path()`.
    pub fn open(path: &str) -> Result<Self> {
        let file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|cause| ShmError::os(format!("cannot open the rank table {path}"), cause))?;
        let mapping = map_foreign(&file, Access::ReadWrite, path)?;
        let num_slots = check_table(&mapping, path)?;
        Ok(Self {
            memory: Memory::Opened { file, mapping },
            num_slots,
        })
    }

    /// Where other processes of this user open it, while this one lives.
    pub fn path(&self) -> String {
        use std::os::fd::AsRawFd;
        let fd = match &self.memory {
            Memory::Made(memory) => memory.fd(),
            Memory::Opened { file, .. } => file.as_raw_fd(),
        };
        format!("/proc/{}/fd/{fd}", std::process::id())
    }

    pub fn num_slots(&self) -> usize {
        self.num_slots
    }

    pub fn check_slot(&self, slot: usize) -> Result<usize> {
        if slot >= self.num_slots {
            return invalid!(
                "slot {slot} is outside the rank table of {} slots",
                self.num_slots
            );
        }
        Ok(slot)
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        let mapping = match &self.memory {
            Memory::Made(memory) => memory.mapping(),
            Memory::Opened { mapping, .. } => mapping,
        };
        &mapping.words::<AtomicU64>(index * 8, 1)[0]
    }

    fn slot_word(&self, slot: usize, field: usize) -> &AtomicU64 {
        self.word(SLOTS_WORD + slot * SLOT_WORDS + field)
    }
}

/// The ranks' side.
impl RankTable {
    /// Says how many tokens a page of this server has, as this rank has resolved it.
    pub fn agree_on_page_tokens(&self, page_tokens: u64) -> Result<()> {
        let word = self.word(PAGE_TOKENS_WORD);
        match word.compare_exchange(0, page_tokens, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(said) if said == page_tokens => Ok(()),
            Err(said) => {
                invalid!("a page has {page_tokens} tokens here and {said} tokens at another rank")
            }
        }
    }

    /// Takes a slot for this process; the slot is not attached before `announce`. Returns the epoch that the
    /// announcement will have.
    pub fn claim_slot(&self, slot: usize) -> Result<u64> {
        self.check_slot(slot)?;
        let identity = self.slot_word(slot, IDENTITY);
        claim(identity, &format!("slot {slot}"))?;
        // A rank that died while it wrote left an odd epoch behind.
        let writing = (self.slot_word(slot, EPOCH).load(Ordering::Acquire) + 1) | 1;
        self.begin_change(slot, writing);
        self.store_slot(slot, READING, 0);
        self.store_slot(slot, READ_RATE, 0);
        Ok(writing + 1)
    }

    /// Makes a claimed slot attached.
    pub fn announce(&self, slot: usize, member: &Member) {
        self.store_slot(slot, FRAME_TABLE_FD, member.frame_table_fd);
        self.store_slot(slot, NUM_FRAMES, member.num_frames);
        for (word, value) in member.namespace.iter().enumerate() {
            self.store_slot(slot, NAMESPACE + word, *value);
        }
        self.store_slot(slot, STATE, ATTACHED);
        self.slot_word(slot, EPOCH)
            .store(member.epoch, Ordering::Release);
    }

    /// Says how many pages the rank in a slot that this process claimed is waiting for from the store.
    pub fn set_reading(&self, slot: usize, num_pages: u64) -> Result<()> {
        self.store_slot(self.check_slot(slot)?, READING, num_pages);
        Ok(())
    }

    /// Says how many pages a second come from the store to the rank in a slot that this process claimed.
    pub fn set_read_rate(&self, slot: usize, pages_per_s: u64) -> Result<()> {
        self.store_slot(self.check_slot(slot)?, READ_RATE, pages_per_s);
        Ok(())
    }

    /// Frees a slot that this process claimed.
    pub fn leave(&self, slot: usize) {
        let epoch = self.slot_word(slot, EPOCH).load(Ordering::Relaxed);
        let writing = (epoch + 1) | 1;
        self.begin_change(slot, writing);
        self.store_slot(slot, STATE, LEFT);
        self.store_slot(slot, READING, 0);
        self.store_slot(slot, READ_RATE, 0);
        self.slot_word(slot, EPOCH)
            .store(writing + 1, Ordering::Release);
        self.slot_word(slot, IDENTITY).store(0, Ordering::Release);
    }

    fn begin_change(&self, slot: usize, writing: u64) {
        self.slot_word(slot, EPOCH)
            .store(writing, Ordering::Relaxed);
        // Keeps the stores that follow behind the odd epoch.
        fence(Ordering::Release);
    }

    fn store_slot(&self, slot: usize, field: usize, value: u64) {
        self.slot_word(slot, field).store(value, Ordering::Relaxed);
    }

    /// Takes a pin bit for this process; from whom. A dead process may have left it set in any frame table, where it counts from now on: it is to be
    /// cleared there before the first lease.
    pub fn claim_reader(&self, bit: u32) -> Result<Identity> {
        if bit as usize >= MAX_SLOTS {
            return invalid!("reader bit {bit} is outside 0 to {}", MAX_SLOTS - 1);
        }
        claim(self.reader_word(bit), &format!("reader bit {bit}"))
    }

    /// Gives a bit back: to nobody where the process has cleared it everywhere, else to the dead one that has left it set.
    pub fn release_reader(&self, bit: u32, heir: Identity) {
        self.reader_word(bit).store(heir.0, Ordering::Release);
    }

    fn reader_word(&self, bit: u32) -> &AtomicU64 {
        self.word(READERS_WORD + bit as usize)
    }
}

/// Everybody's side.
impl RankTable {
    /// Something failed in one of the server's processes, and was not passed on.
    pub fn count_failure(&self) {
        self.word(FAILURES_WORD).fetch_add(1, Ordering::Relaxed);
    }

    /// How often that has happened.
    pub fn num_failures(&self) -> u64 {
        self.word(FAILURES_WORD).load(Ordering::Relaxed)
    }

    /// How many ranks have work and say nothing, as the server's dispatcher sees it.
    pub fn set_num_silent(&self, num_ranks: u64) {
        self.word(SILENT_WORD).store(num_ranks, Ordering::Relaxed);
    }

    /// What the dispatcher has said; 0 where none looks.
    pub fn num_silent(&self) -> u64 {
        self.word(SILENT_WORD).load(Ordering::Relaxed)
    }

    /// What the ranks have said; 0 before the first of them.
    pub fn page_tokens(&self) -> u64 {
        self.word(PAGE_TOKENS_WORD).load(Ordering::Acquire)
    }

    /// The epoch of a slot: whatever changes in the entry changes it.
    pub fn epoch(&self, slot: usize) -> u64 {
        self.slot_word(slot, EPOCH).load(Ordering::Acquire)
    }

    /// How many pages the rank in `slot` is waiting for from the store, as it last said.
    pub fn reading(&self, slot: usize) -> Result<u64> {
        let word = self.slot_word(self.check_slot(slot)?, READING);
        Ok(word.load(Ordering::Relaxed))
    }

    /// How many pages a second have come from the store to the rank in `slot`, as it last said; 0 where it has not.
    pub fn read_rate(&self, slot: usize) -> Result<u64> {
        let word = self.slot_word(self.check_slot(slot)?, READ_RATE);
        Ok(word.load(Ordering::Relaxed))
    }

    /// The rank attached in `slot`, dead or alive; `None` when there is none or it is changing right now.
    pub fn member(&self, slot: usize) -> Option<Member> {
        let epoch = self.epoch(slot);
        let load = |field| self.slot_word(slot, field).load(Ordering::Relaxed);
        let state = load(STATE);
        debug_assert!(state == EMPTY || state == ATTACHED || state == LEFT);
        let member = Member {
            epoch,
            identity: Identity(load(IDENTITY)),
            frame_table_fd: load(FRAME_TABLE_FD),
            num_frames: load(NUM_FRAMES),
            namespace: [0, 1, 2, 3].map(|word| load(NAMESPACE + word)),
        };
        fence(Ordering::Acquire);
        let steady = epoch.is_multiple_of(2) && load(EPOCH) == epoch;
        (steady && state == ATTACHED).then_some(member)
    }

    /// Which of the readers in `pins` are dead. A bit without an owner belongs to nobody who could still copy.
    pub fn dead_among(&self, pins: u64) -> u64 {
        (0..MAX_SLOTS as u32)
            .map(|bit| (bit, 1u64 << bit))
            .filter(|(_, mask)| pins & mask != 0)
            .filter(|(bit, _)| {
                let reader = Identity(self.reader_word(*bit).load(Ordering::SeqCst));
                !reader.seems_alive()
            })
            .fold(0, |dead, (_, mask)| dead | mask)
    }
}

/// Writes this process into an identity word, unless a live process is in it; who was.
fn claim(word: &AtomicU64, what: &str) -> Result<Identity> {
    let own = Identity::own()?;
    let before = Identity(word.load(Ordering::Acquire));
    if before.is_alive() {
        return invalid!("{what} is in use by process {}", before.pid());
    }
    match word.compare_exchange(before.0, own.0, Ordering::SeqCst, Ordering::SeqCst) {
        Ok(_) => Ok(before),
        Err(now) => invalid!("{what} was just taken by process {}", Identity(now).pid()),
    }
}

fn table_words(num_slots: usize) -> usize {
    SLOTS_WORD + num_slots * SLOT_WORDS
}

fn check_table(mapping: &Mapping, path: &str) -> Result<usize> {
    if mapping.len() < SLOTS_WORD * 8 {
        return invalid!("{path} is no rank table: it has {} bytes", mapping.len());
    }
    let words = mapping.words::<AtomicU64>(0, SLOTS_WORD);
    let load = |index: usize| words[index].load(Ordering::Acquire);
    if load(MAGIC_WORD) != MAGIC {
        return invalid!(
            "{path} is no rank table: its magic is {:#018x}",
            load(MAGIC_WORD)
        );
    }
    if load(FORMAT_WORD) != FORMAT {
        return invalid!(
            "{path} has rank table format {}, this build reads format {FORMAT}",
            load(FORMAT_WORD)
        );
    }
    let num_slots = load(NUM_SLOTS_WORD) as usize;
    if num_slots == 0 || num_slots > MAX_SLOTS || mapping.len() != table_words(num_slots) * 8 {
        return invalid!("{path} says {num_slots} slots in {} bytes", mapping.len());
    }
    Ok(num_slots)
}
