// SPDX-License-Identifier: Apache-2.0
//! A device that fails on purpose, repeatably from a seed: for tests and the crash harness.
//!
//! Writes stay in memory, as in a drive's volatile cache, until a sync of their file; reads see them. A power cut writes a random part of
//! them, cut at sectors and in any order, and ends the process. A failed sync loses some of them for good. Bits flip in what is stored;
//! reads come back short; errors come back as EIO and ENOSPC; completions come back shuffled.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use banyan_store::buffer::AlignedBytes;
use banyan_store::device::{
    Action, Completion, Device, FileId, Op, Progress, Span, Spans, Wake, advance,
};
use banyan_store::store::{EngineChoice, OtherDevice};

/// How long a read that hangs is without an answer.
pub const HANG: Duration = Duration::from_secs(1);
const SECTOR_BYTES: usize = 512;
/// As a shell reports a process that was killed.
const CUT_STATUS: i32 = 137;

/// Each number is "one in so many operations"; zero is never.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    pub seed: u64,
    pub eio: u64,
    pub enospc: u64,
    /// Reads that are answered in parts.
    pub short: u64,
    pub flip: u64,
    /// Reads that are answered only after `HANG`.
    pub hang: u64,
    /// The power is cut at this operation.
    pub cut: u64,
    /// At this operation the thread that uses the device stands still, for `HANG`.
    pub block: u64,
    /// Each write is answered only after so many milliseconds. No chance, a time.
    pub slow: u64,
    /// At this operation it fails.
    pub panic: u64,
    /// This operation, if it is a write, finds no space.
    pub full: u64,
    /// At this operation the file system is mounted anew: files that are open by then answer nothing but ENOTCONN.
    pub remount: u64,
    /// From this operation on the file system is only read.
    pub readonly: u64,
}

impl Faults {
    /// `"seed=7,eio=100,enospc=0,short=10,flip=0,cut=250"`; what is not named is zero.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut faults = Self::default();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let value: u64 = value
                .parse()
                .map_err(|_| format!("fault {part:?} is no name=number"))?;
            match name {
                "seed" => faults.seed = value,
                "eio" => faults.eio = value,
                "enospc" => faults.enospc = value,
                "short" => faults.short = value,
                "hang" => faults.hang = value,
                "flip" => faults.flip = value,
                "cut" => faults.cut = value,
                "block" => faults.block = value,
                "slow" => faults.slow = value,
                "panic" => faults.panic = value,
                "full" => faults.full = value,
                "remount" => faults.remount = value,
                "readonly" => faults.readonly = value,
                _ => return Err(format!("there is no fault {name:?}")),
            }
        }
        Ok(faults)
    }

    /// What a store is opened with to run on such a device.
    pub fn engine(self) -> EngineChoice {
        EngineChoice::Other(Arc::new(self))
    }
}

impl OtherDevice for Faults {
    fn open(&self) -> Box<dyn Device> {
        Box::new(FaultyDevice::new(self.clone()))
    }
}

/// SplitMix64: enough randomness for faults, and the same on every machine.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn one_in(&mut self, chance: u64) -> bool {
        chance > 0 && self.roll().is_multiple_of(chance)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.roll() % bound.max(1) as u64) as usize
    }
}

struct Unsynced {
    offset: u64,
    bytes: Vec<u8>,
}

pub struct FaultyDevice {
    faults: Faults,
    dice: Dice,
    num_ops: u64,
    files: Vec<Option<Arc<File>>>,
    /// Of the files, so many are of a mount that is gone.
    num_dead: usize,
    unsynced: HashMap<FileId, Vec<Unsynced>>,
    pushed: Vec<Op>,
    hanging: Vec<(Instant, Op)>,
    wake: Arc<WakeFlag>,
}

#[derive(Default)]
struct WakeFlag {
    is_woken: AtomicBool,
    lock: Mutex<()>,
    signal: Condvar,
}

impl Wake for WakeFlag {
    fn wake(&self) {
        let _held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_woken.store(true, Ordering::Relaxed);
        self.signal.notify_one();
    }
}

impl FaultyDevice {
    pub fn new(faults: Faults) -> Self {
        Self {
            dice: Dice(faults.seed),
            faults,
            num_ops: 0,
            files: Vec::new(),
            num_dead: 0,
            unsynced: HashMap::new(),
            pushed: Vec::new(),
            hanging: Vec::new(),
            wake: Arc::default(),
        }
    }

    fn run(&mut self, op: Op) -> io::Result<()> {
        self.num_ops += 1;
        if self.faults.cut > 0 && self.num_ops >= self.faults.cut {
            self.cut_power();
        }
        if self.num_ops == self.faults.block {
            std::thread::sleep(HANG);
        }
        assert_ne!(self.num_ops, self.faults.panic, "a fault on purpose");
        if self.num_ops == self.faults.remount {
            self.num_dead = self.files.len();
            self.unsynced.clear();
        }
        if (op.file.0 as usize) < self.num_dead {
            return Err(io::Error::from_raw_os_error(libc::ENOTCONN));
        }
        if self.is_read_only() && !matches!(op.action, Action::Read(_)) {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        if self.dice.one_in(self.faults.eio) {
            if matches!(op.action, Action::Sync) {
                self.lose_unsynced(op.file);
            }
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        match op.action {
            Action::Sync => self.sync(op.file),
            Action::Write(_)
                if self.num_ops == self.faults.full || self.dice.one_in(self.faults.enospc) =>
            {
                Err(io::Error::from_raw_os_error(libc::ENOSPC))
            }
            Action::Write(spans) => {
                self.write(op, spans);
                Ok(())
            }
            Action::Read(_) => self.read(op),
        }
    }

    fn is_read_only(&self) -> bool {
        self.faults.readonly > 0 && self.num_ops >= self.faults.readonly
    }

    fn write(&mut self, op: Op, spans: Spans) {
        let mut bytes = Vec::with_capacity(spans.len());
        for span in spans.iter() {
            // SAFETY: valid until the operation is reaped: the contract of `Op`.
            bytes.extend_from_slice(unsafe { span.bytes() });
        }
        if self.dice.one_in(self.faults.flip) {
            let bit = self.dice.below(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let offset = op.offset;
        self.unsynced
            .entry(op.file)
            .or_default()
            .push(Unsynced { offset, bytes });
    }

    /// Through short transfers, and then what the cache holds on top.
    fn read(&mut self, op: Op) -> io::Result<()> {
        let Action::Read(whole) = op.action else {
            unreachable!("only reads come here")
        };
        let mut rest = op;
        let is_short = self.dice.one_in(self.faults.short);
        loop {
            let Action::Read(spans) = rest.action else {
                unreachable!("a read stays one")
            };
            let len = if is_short && spans.len() > SECTOR_BYTES {
                SECTOR_BYTES * (1 + self.dice.below(spans.len() / SECTOR_BYTES - 1))
            } else {
                spans.len()
            };
            self.read_stored(rest, spans, len)?;
            if let Progress::Ended(result) = advance(&mut rest, len as i32) {
                result?;
                break;
            }
        }
        self.overlay(op, whole);
        Ok(())
    }

    /// The first `len` bytes from the file; what lies behind its end reads as zero, it may still be in the cache.
    fn read_stored(&self, op: Op, spans: Spans, len: usize) -> io::Result<()> {
        let file = self.file(op.file);
        let end = file.metadata()?.len();
        let mut bytes = AlignedBytes::new(len);
        let inside = end.saturating_sub(op.offset).min(len as u64) as usize;
        let inside = inside - inside % SECTOR_BYTES;
        if inside > 0 {
            file.read_exact_at(&mut bytes.bytes_mut()[..inside], op.offset)?;
        }
        scatter(spans, 0, &bytes.bytes()[..len]);
        Ok(())
    }

    fn overlay(&self, op: Op, spans: Spans) {
        let start = op.offset;
        let end = start + spans.len() as u64;
        for write in self.unsynced.get(&op.file).into_iter().flatten() {
            let from = write.offset.max(start);
            let to = (write.offset + write.bytes.len() as u64).min(end);
            if from < to {
                let bytes =
                    &write.bytes[(from - write.offset) as usize..(to - write.offset) as usize];
                scatter(spans, (from - start) as usize, bytes);
            }
        }
    }

    /// What a failed sync leaves behind: a later one succeeds and brings nothing of it back.
    fn lose_unsynced(&mut self, file: FileId) {
        let writes = self.unsynced.remove(&file).unwrap_or_default();
        let kept = writes.into_iter().filter(|_| self.dice.one_in(2)).collect();
        self.unsynced.insert(file, kept);
    }

    fn sync(&mut self, file: FileId) -> io::Result<()> {
        let writes = self.unsynced.remove(&file).unwrap_or_default();
        for write in &writes {
            store(self.file(file), write.offset, &write.bytes)?;
        }
        self.file(file).sync_data()
    }

    fn cut_power(&mut self) -> ! {
        let mut writes: Vec<(FileId, Unsynced)> = Vec::new();
        for (file, list) in self.unsynced.drain() {
            writes.extend(list.into_iter().map(|write| (file, write)));
        }
        writes.sort_by_key(|(file, write)| (*file, write.offset));
        while !writes.is_empty() {
            let chosen = self.dice.below(writes.len());
            let (file, write) = writes.swap_remove(chosen);
            let sectors = write.bytes.len().div_ceil(SECTOR_BYTES);
            let len = match self.dice.below(3) {
                0 => 0,
                1 => write.bytes.len(),
                _ => (self.dice.below(sectors + 1) * SECTOR_BYTES).min(write.bytes.len()),
            };
            // What cannot be written now is lost with the power, as the rest is.
            drop(store(self.file(file), write.offset, &write.bytes[..len]));
        }
        // SAFETY: ends the process without unwinding, as a power cut does.
        unsafe { libc::_exit(CUT_STATUS) }
    }

    fn file(&self, file: FileId) -> &File {
        match &self.files[file.0 as usize] {
            Some(file) => file,
            None => unreachable!("an operation names a file that was added"),
        }
    }
}

/// Through an aligned copy: the file may be open with O_DIRECT. A tail that is no whole sector goes to a buffered file only.
fn store(file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    let mut copy = AlignedBytes::new(bytes.len());
    copy.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    file.write_all_at(&copy.bytes()[..bytes.len()], offset)
}

fn scatter(spans: Spans, at: usize, bytes: &[u8]) {
    let (mut at, mut bytes) = (at, bytes);
    for span in spans.iter() {
        if at < span.len {
            let len = bytes.len().min(span.len - at);
            // SAFETY: the reader's own memory until the operation is reaped: the contract of `Op`.
            let target = unsafe { span.bytes_mut() };
            target[at..at + len].copy_from_slice(&bytes[..len]);
            bytes = &bytes[len..];
            at = 0;
        } else {
            at -= span.len;
        }
        if bytes.is_empty() {
            break;
        }
    }
}

impl Device for FaultyDevice {
    fn name(&self) -> &'static str {
        "faults on purpose"
    }

    fn add_file(&mut self, file: Arc<File>) -> io::Result<FileId> {
        // SAFETY: a system call on a descriptor that the caller has.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        if self.is_read_only() && flags & libc::O_ACCMODE != libc::O_RDONLY {
            // As opening it would have been answered.
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        self.files.push(Some(file));
        Ok(FileId(self.files.len() as u32 - 1))
    }

    fn remove_file(&mut self, file: FileId) {
        self.files[file.0 as usize] = None;
        self.unsynced.remove(&file);
    }

    fn add_memory(&mut self, _memory: Span) {}

    fn capacity(&self) -> usize {
        64
    }

    unsafe fn push(&mut self, op: Op) {
        let held = match op.action {
            Action::Read(_) if self.dice.one_in(self.faults.hang) => HANG,
            Action::Write(_) => Duration::from_millis(self.faults.slow),
            _ => Duration::ZERO,
        };
        if held.is_zero() {
            self.pushed.push(op);
        } else {
            self.hanging.push((Instant::now() + held, op));
        }
    }

    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn reap(&mut self, patience: Duration, completed: &mut Vec<Completion>) -> io::Result<()> {
        if self.pushed.is_empty() && !patience.is_zero() {
            let held = self
                .wake
                .lock
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let asleep = |_: &mut ()| !self.wake.is_woken.load(Ordering::Relaxed);
            let next = self.hanging.iter().map(|(until, _)| *until).min();
            let left = next.map(|until| until.saturating_duration_since(Instant::now()));
            let patience = left.map_or(patience, |left| left.min(patience));
            drop(self.wake.signal.wait_timeout_while(held, patience, asleep));
        }
        self.wake.is_woken.store(false, Ordering::Relaxed);
        let now = Instant::now();
        let answered = self.hanging.extract_if(.., |(until, _)| *until <= now);
        self.pushed.extend(answered.map(|(_, op)| op));
        // Some of what was pushed, in any order.
        let num_done = self.pushed.len().min(1 + self.dice.below(8));
        for _ in 0..num_done {
            let chosen = self.dice.below(self.pushed.len());
            let op = self.pushed.swap_remove(chosen);
            let result = self.run(op);
            completed.push(Completion {
                token: op.token,
                result,
            });
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.wake.clone()
    }
}
