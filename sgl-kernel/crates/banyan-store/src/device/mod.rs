// SPDX-License-Identifier: Apache-2.0
//! What moves bytes between memory and files: io_uring, a pool of threads, or what the opener of a store brings.
//!
//! A device belongs to one thread. `push` and `submit` never block on the medium; `reap` blocks as long as it is told. Every pushed
//! operation completes exactly once, with its whole length or an error: short transfers are continued inside.

mod threads;
mod throttled;
mod transfer;
mod uring;

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Duration;

pub use threads::ThreadsDevice;
pub use throttled::ThrottledDevice;
pub use transfer::{MAX_SPANS, Progress, Span, Spans, advance};
pub use uring::UringDevice;

/// Index of a file that was added to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u32);

/// What the submitter recognises a completion by.
pub type Token = u64;

#[derive(Clone, Copy, Debug)]
pub enum Action {
    Read(Spans),
    Write(Spans),
    /// `fdatasync`: covers the writes that had completed when it was submitted.
    Sync,
}

/// One operation.
///
/// The memory of its spans stays valid, and is touched by nobody else where it is written, until the operation has been reaped.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    pub token: Token,
    pub file: FileId,
    pub offset: u64,
    pub action: Action,
}

#[derive(Debug)]
pub struct Completion {
    pub token: Token,
    pub result: io::Result<()>,
}

/// Ends another thread's `reap` early. Any thread; a wake that comes before the `reap` is not lost.
pub trait Wake: Send + Sync {
    fn wake(&self);
}

pub trait Device {
    /// What does the I/O, for the log.
    fn name(&self) -> &'static str;

    fn add_file(&mut self, file: Arc<File>) -> io::Result<FileId>;

    /// The caller has no operation on it in flight.
    fn remove_file(&mut self, file: FileId);

    /// Tells of memory that many operations will use. It stays mapped as long as the device.
    fn add_memory(&mut self, memory: Span);

    /// At most so many operations may be in flight.
    fn capacity(&self) -> usize;

    /// # Safety
    /// The spans of `op` are valid as `Op` says.
    unsafe fn push(&mut self, op: Op);

    fn submit(&mut self) -> io::Result<()>;

    /// Submits, then appends what has completed. Waits for at least one completion, a wake, or `patience`.
    fn reap(&mut self, patience: Duration, completed: &mut Vec<Completion>) -> io::Result<()>;

    fn waker(&self) -> Arc<dyn Wake>;
}
