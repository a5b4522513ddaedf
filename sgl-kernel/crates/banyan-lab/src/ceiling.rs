// SPDX-License-Identifier: Apache-2.0
//! What a file system gives to plain io_uring: the measure that `banyan bench store` holds the store against.
//!
//! No index, no checksums, no copies: requests of one size to one preallocated file, O_DIRECT where it exists. Every request has
//! memory of its own, as pages have: a few buffers used again and again stay in the processor's cache, where no store finds its pages.
//! And the memory is of the kind that pages lie in: a drive moves memory that lies scattered in frames of 4 KiB more slowly than huge
//! pages, and whether a process gets those is another matter for shared memory than for its own.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use banyan_shm::memory::SharedMemory;

use banyan_store::buffer::AlignedBytes;
use banyan_store::device::{Action, Completion, Device, FileId, Op, Span, Spans, UringDevice};
use banyan_store::error::{Doing, Result, StoreError};
use banyan_store::files::{Use, open_direct};
use banyan_store::owned::{self, Way};

/// Written bytes between two syncs, as in the store.
const SYNC_BYTES: u64 = 64 << 20;
const SYNC: u64 = u64::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// At offsets in a fixed shuffled order.
    Read,
    /// One after another, and `fdatasync` as often as the store does it.
    DurableWrite,
}

/// Where the requests' bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// As the pages of ranks.
    Shared,
    /// As the buffers of one process.
    Private,
}

enum Allocated {
    Shared(SharedMemory),
    Private(AlignedBytes),
}

impl Allocated {
    fn new(kind: Memory, len: usize) -> Result<Self> {
        Ok(match kind {
            Memory::Shared => Self::Shared(
                SharedMemory::create(len, "ceiling")
                    .map_err(|cause| StoreError::Invalid(cause.to_string()))?,
            ),
            Memory::Private => Self::Private(AlignedBytes::new(len)),
        })
    }

    fn span(&self, at: usize, len: usize) -> Span {
        match self {
            Self::Shared(memory) => Span::within(memory, at, len),
            Self::Private(bytes) => bytes.span(at, len),
        }
    }
}

/// Moves `num_requests` of `request_bytes` to or from a file of just that size, `depth` at a time; the time taken.
pub fn measure(
    path: &Path,
    kind: Kind,
    request_bytes: u64,
    num_requests: u64,
    depth: usize,
    memory: Memory,
) -> Result<Duration> {
    let device = UringDevice::open().map_err(|cause| StoreError::os("no io_uring here", cause))?;
    let (file, _) = open_direct(path, Use::Writing).doing("open", path)?;
    let len = file.metadata().doing("size", path)?.len();
    if num_requests == 0 || depth == 0 || len < request_bytes * num_requests {
        let wanted = request_bytes * num_requests;
        return Err(StoreError::Invalid(format!(
            "{} has {len} bytes, not {wanted}",
            path.display()
        )));
    }
    let memory = Allocated::new(memory, (request_bytes * num_requests) as usize)?;
    Run::new(
        device,
        file,
        kind,
        request_bytes,
        num_requests,
        depth,
        memory,
    )?
    .finish()
}

struct Run {
    device: UringDevice,
    file: FileId,
    kind: Kind,
    request_bytes: u64,
    num_requests: u64,
    depth: u64,
    memory: Allocated,
    next: u64,
    num_done: u64,
    unsynced_bytes: u64,
    is_syncing: bool,
}

impl Run {
    fn new(
        mut device: UringDevice,
        file: File,
        kind: Kind,
        request_bytes: u64,
        num_requests: u64,
        depth: usize,
        memory: Allocated,
    ) -> Result<Self> {
        let all = memory.span(0, (request_bytes * num_requests) as usize);
        // SAFETY: memory that was just made and that nobody else touches.
        unsafe { all.bytes_mut() }.fill(0x5a);
        device.add_memory(all);
        let file = device
            .add_file(Arc::new(file))
            .map_err(|cause| StoreError::os("cannot register a file", cause))?;
        Ok(Self {
            device,
            file,
            kind,
            request_bytes,
            num_requests,
            depth: depth as u64,
            memory,
            next: 0,
            num_done: 0,
            unsynced_bytes: 0,
            is_syncing: false,
        })
    }

    fn finish(mut self) -> Result<Duration> {
        let started = Instant::now();
        let mut completed = Vec::new();
        while self.num_done < self.num_requests || self.unsynced_bytes > 0 || self.is_syncing {
            self.push();
            self.device
                .reap(Duration::from_secs(1), &mut completed)
                .map_err(|cause| StoreError::os("io_uring failed", cause))?;
            for Completion { token, result } in completed.drain(..) {
                result.map_err(|cause| StoreError::os("a plain request failed", cause))?;
                if token == SYNC {
                    self.is_syncing = false;
                } else {
                    self.num_done += 1;
                    self.unsynced_bytes += match self.kind {
                        Kind::Read => 0,
                        Kind::DurableWrite => self.request_bytes,
                    };
                }
            }
        }
        Ok(started.elapsed())
    }

    fn push(&mut self) {
        let is_last = self.num_done == self.num_requests && self.unsynced_bytes > 0;
        if !self.is_syncing && (is_last || self.unsynced_bytes >= SYNC_BYTES) {
            self.is_syncing = true;
            self.unsynced_bytes = 0;
            let sync = Op {
                token: SYNC,
                file: self.file,
                offset: 0,
                action: Action::Sync,
            };
            // SAFETY: no memory.
            unsafe { self.device.push(sync) };
        }
        while self.next < self.num_requests && self.next - self.num_done < self.depth {
            let at = self.next * self.request_bytes;
            let spans = Spans::one(self.memory.span(at as usize, self.request_bytes as usize));
            let (position, action) = match self.kind {
                Kind::Read => (shuffled(self.next, self.num_requests), Action::Read(spans)),
                Kind::DurableWrite => (self.next, Action::Write(spans)),
            };
            let op = Op {
                token: self.next,
                file: self.file,
                offset: position * self.request_bytes,
                action,
            };
            self.next += 1;
            // SAFETY: no two requests share memory, and it lives as long as the run.
            unsafe { self.device.push(op) };
        }
    }
}

/// Visits every position once, far from the last one.
fn shuffled(step: u64, count: u64) -> u64 {
    let mut stride = (count * 5 / 8) | 1;
    while gcd(stride, count) != 1 {
        stride += 2;
    }
    (u128::from(step) * u128::from(stride) % u128::from(count)) as u64
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Makes a file for `measure`, every block of it written once.
pub fn prepare(path: &Path, num_bytes: u64) -> Result<()> {
    let file = owned::open(path, Way::Create).doing("create", path)?;
    file.set_len(0).doing("empty", path)?;
    let chunk: Vec<u8> = (0..1u32 << 20)
        .map(|byte| (byte.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    for at in (0..num_bytes).step_by(chunk.len()) {
        let len = chunk.len().min((num_bytes - at) as usize);
        file.write_all_at(&chunk[..len], at).doing("write", path)?;
    }
    file.sync_all().doing("sync", path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn offsets_when_shuffled_then_each_once() {
        for count in [1, 2, 7, 64, 1000] {
            let seen: HashSet<u64> = (0..count).map(|step| shuffled(step, count)).collect();
            assert_eq!(seen.len() as u64, count);
        }
    }
}
