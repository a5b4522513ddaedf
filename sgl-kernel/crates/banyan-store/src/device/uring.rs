// SPDX-License-Identifier: Apache-2.0
//! io_uring, with registered files, and registered memory where the kernel lets us.
//!
//! Invariants
//! * The ring is used by the thread that made it. An operation occupies one entry of `running` from `push` until it is reaped; the
//!   entry's index is its user data.
//! * One read of the wake event is always in flight; its user data is `WAKE`.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};

use super::transfer::{Progress, advance};
use super::{Action, Completion, Device, FileId, MAX_SPANS, Op, Span, Wake};

const ENTRIES: u32 = 256;
/// Of those, what is left to operations.
const CAPACITY: usize = ENTRIES as usize - 2;
const MAX_FILES: u64 = 8192;
const MAX_BUFFERS: u32 = 256;
/// The kernel registers no larger piece of memory.
const MAX_BUFFER_BYTES: usize = 1 << 30;
const WAKE: u64 = u64::MAX;
/// Before the kernel is asked again that could not take anything.
const LATER: Duration = Duration::from_millis(1);

pub struct UringDevice {
    ring: IoUring,
    files: Vec<Option<Arc<File>>>,
    max_files: usize,
    buffers: Vec<Option<Span>>,
    running: Vec<Option<Running>>,
    idle: Vec<usize>,
    waiting: VecDeque<usize>,
    wake: Arc<WakeEvent>,
    wake_word: Box<u64>,
}

struct Running {
    op: Op,
    vectors: Box<[libc::iovec; MAX_SPANS]>,
    num_vectors: u32,
}

struct WakeEvent(OwnedFd);

impl Wake for WakeEvent {
    fn wake(&self) {
        let one = 1u64;
        // SAFETY: eight bytes of ours into our own eventfd. It fails only when the count would overflow, and then the reader is awake.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }
}

impl UringDevice {
    /// Fails where the kernel has no io_uring, or forbids it.
    pub fn open() -> io::Result<Self> {
        let mut quiet = IoUring::builder();
        // Without the flag a reap that does not wait sees nothing end: it does not know that there is something to enter the kernel for.
        quiet
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag();
        let ring = quiet.build(ENTRIES).or_else(|_| IoUring::new(ENTRIES))?;
        // The kernel registers no more than the process may open.
        let max_files = MAX_FILES.min(most_open()?);
        ring.submitter().register_files_sparse(max_files as u32)?;
        // Without room to register memory, operations name it each time.
        let registers = ring.submitter().register_buffers_sparse(MAX_BUFFERS);
        // SAFETY: plain system call; the result is checked.
        let event = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if event < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that was just made and that nobody else owns.
        let event = unsafe { OwnedFd::from_raw_fd(event) };
        let mut device = Self {
            ring,
            files: Vec::new(),
            max_files: max_files as usize,
            buffers: vec![None; registers.map_or(0, |()| MAX_BUFFERS as usize)],
            running: Vec::new(),
            idle: Vec::new(),
            waiting: VecDeque::new(),
            wake: Arc::new(WakeEvent(event)),
            wake_word: Box::new(0),
        };
        device.listen();
        device.ring.submit()?;
        Ok(device)
    }

    fn listen(&mut self) {
        let entry = opcode::Read::new(
            types::Fd(self.wake.0.as_raw_fd()),
            (&raw mut *self.wake_word).cast(),
            8,
        )
        .build()
        .user_data(WAKE);
        // SAFETY: the word lives on the heap as long as the ring; the queue has an entry to spare (`queue`).
        let pushed = unsafe { self.ring.submission().push(&entry) };
        debug_assert!(pushed.is_ok());
    }

    fn entry(&self, index: usize, running: &Running) -> squeue::Entry {
        let op = &running.op;
        let file = types::Fixed(op.file.0);
        let vectors = running.vectors.as_ptr();
        let entry = match op.action {
            Action::Sync => opcode::Fsync::new(file)
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
            Action::Read(spans) | Action::Write(spans) => {
                let is_read = matches!(op.action, Action::Read(_));
                let count = running.num_vectors;
                let only = spans.iter().next().filter(|_| count == 1);
                let known = only.and_then(|span| Some((span, self.buffer_of(span)?)));
                match (is_read, known) {
                    (true, Some((Span { start, len }, buffer))) => {
                        opcode::ReadFixed::new(file, start, len as u32, buffer)
                            .offset(op.offset)
                            .build()
                    }
                    (false, Some((Span { start, len }, buffer))) => {
                        opcode::WriteFixed::new(file, start, len as u32, buffer)
                            .offset(op.offset)
                            .build()
                    }
                    (true, None) => opcode::Readv::new(file, vectors, count)
                        .offset(op.offset)
                        .build(),
                    (false, None) => opcode::Writev::new(file, vectors, count)
                        .offset(op.offset)
                        .build(),
                }
            }
        };
        entry.user_data(index as u64)
    }

    fn buffer_of(&self, span: Span) -> Option<u16> {
        let inside = |memory: &Span| {
            span.start >= memory.start
                && span.start.wrapping_add(span.len) <= memory.start.wrapping_add(memory.len)
        };
        let position = self
            .buffers
            .iter()
            .position(|memory| memory.as_ref().is_some_and(inside));
        position.map(|index| index as u16)
    }

    /// Moves waiting operations into the submission queue, as many as it takes. An entry stays free to listen again: else nobody could
    /// wake this thread.
    fn queue(&mut self) {
        while self.ring.submission().len() < CAPACITY
            && let Some(&index) = self.waiting.front()
        {
            let Some(running) = &self.running[index] else {
                unreachable!("a waiting operation is running")
            };
            let entry = self.entry(index, running);
            // SAFETY: vectors and memory stay until the completion is reaped: the contract of `push`.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                break;
            }
            self.waiting.pop_front();
        }
    }

    fn collect(&mut self, completed: &mut Vec<Completion>) {
        let answers: Vec<(u64, i32)> = self
            .ring
            .completion()
            .map(|entry| (entry.user_data(), entry.result()))
            .collect();
        for (index, answer) in answers {
            if index == WAKE {
                self.listen();
                continue;
            }
            let index = index as usize;
            let Some(running) = &mut self.running[index] else {
                unreachable!("a completion belongs to a running operation")
            };
            match advance(&mut running.op, answer) {
                Progress::Again => {
                    (*running.vectors, running.num_vectors) = vectors_of(&running.op);
                    self.waiting.push_back(index);
                }
                Progress::Ended(result) => {
                    let token = running.op.token;
                    self.running[index] = None;
                    self.idle.push(index);
                    completed.push(Completion { token, result });
                }
            }
        }
    }
}

/// Files that this process may have open at a time.
fn most_open() -> io::Result<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a system call that fills a struct of ours.
    match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } {
        0 => Ok(limit.rlim_cur),
        _ => Err(io::Error::last_os_error()),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entered {
    Now,
    /// The kernel could not take what was queued, or not all: it stays queued, and the next call tries again.
    Later,
}

/// What passes by itself is no error: a signal, a time that is over, and a kernel that has no memory (EAGAIN) or no room for completions
/// (EBUSY) at the moment. The clock sees to it when it does not pass. Nothing is known after any other error.
fn later(answer: io::Result<usize>) -> io::Result<Entered> {
    match answer {
        Ok(_) => Ok(Entered::Now),
        Err(error) => match error.raw_os_error() {
            Some(libc::ETIME | libc::EINTR) => Ok(Entered::Now),
            Some(libc::EAGAIN | libc::EBUSY) => Ok(Entered::Later),
            _ => Err(error),
        },
    }
}

fn vectors_of(op: &Op) -> ([libc::iovec; MAX_SPANS], u32) {
    match op.action {
        Action::Read(spans) | Action::Write(spans) => spans.vectors(),
        Action::Sync => super::Spans::of([]).vectors(),
    }
}

impl Device for UringDevice {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn add_file(&mut self, file: Arc<File>) -> io::Result<FileId> {
        let index = match self.files.iter().position(Option::is_none) {
            Some(index) => index,
            None if self.files.len() < self.max_files => {
                self.files.push(None);
                self.files.len() - 1
            }
            None => return Err(io::Error::from_raw_os_error(libc::EMFILE)),
        };
        let fds = [file.as_raw_fd()];
        self.ring
            .submitter()
            .register_files_update(index as u32, &fds)?;
        self.files[index] = Some(file);
        Ok(FileId(index as u32))
    }

    fn remove_file(&mut self, file: FileId) {
        // A failure leaves the descriptor registered; the next user of the index replaces it.
        drop(self.ring.submitter().register_files_update(file.0, &[-1]));
        self.files[file.0 as usize] = None;
    }

    fn add_memory(&mut self, memory: Span) {
        for start in (0..memory.len).step_by(MAX_BUFFER_BYTES) {
            let Some(index) = self.buffers.iter().position(Option::is_none) else {
                return;
            };
            let piece = Span {
                start: memory.start.wrapping_add(start),
                len: (memory.len - start).min(MAX_BUFFER_BYTES),
            };
            let vector = libc::iovec {
                iov_base: piece.start.cast(),
                iov_len: piece.len,
            };
            // SAFETY: the memory stays mapped as long as the device: the contract of `add_memory`.
            let registered = unsafe {
                self.ring
                    .submitter()
                    .register_buffers_update(index as u32, &[vector], None)
            };
            // What cannot be pinned (RLIMIT_MEMLOCK) is named by each operation instead.
            if registered.is_ok() {
                self.buffers[index] = Some(piece);
            }
        }
    }

    fn capacity(&self) -> usize {
        CAPACITY
    }

    unsafe fn push(&mut self, op: Op) {
        let (vectors, num_vectors) = vectors_of(&op);
        let running = Running {
            op,
            vectors: Box::new(vectors),
            num_vectors,
        };
        let index = match self.idle.pop() {
            Some(index) => index,
            None => {
                self.running.push(None);
                self.running.len() - 1
            }
        };
        self.running[index] = Some(running);
        self.waiting.push_back(index);
    }

    fn submit(&mut self) -> io::Result<()> {
        self.queue();
        later(self.ring.submit()).map(drop)
    }

    fn reap(&mut self, patience: Duration, completed: &mut Vec<Completion>) -> io::Result<()> {
        self.queue();
        if self.ring.completion().is_empty() && !patience.is_zero() {
            let timeout = types::Timespec::from(patience);
            let args = types::SubmitArgs::new().timespec(&timeout);
            let entered = later(self.ring.submitter().submit_with_args(1, &args))?;
            if entered == Entered::Later && self.ring.completion().is_empty() {
                thread::sleep(LATER);
            }
        } else {
            // With deferred task work, completions appear only when the kernel is entered for them.
            let args = types::SubmitArgs::new();
            later(self.ring.submitter().submit_with_args(0, &args))?;
        }
        self.collect(completed);
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.wake.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Scratch, refuse};
    use std::time::Instant;

    #[test]
    fn kernel_when_it_cannot_take_operations_for_a_moment_then_later_and_no_error() {
        let answer = |errno| later(Err(io::Error::from_raw_os_error(errno)));
        for errno in [libc::EAGAIN, libc::EBUSY] {
            assert_eq!(answer(errno).unwrap(), Entered::Later);
        }
        for errno in [libc::EINTR, libc::ETIME] {
            assert_eq!(answer(errno).unwrap(), Entered::Now);
        }
        for errno in [libc::EFAULT, libc::EBADF, libc::EINVAL, libc::EEXIST] {
            assert_eq!(answer(errno).unwrap_err().raw_os_error(), Some(errno));
        }
        assert_eq!(later(Ok(0)).unwrap(), Entered::Now);
    }

    fn with_syncs(count: u64) -> Option<UringDevice> {
        let Ok(mut device) = UringDevice::open() else {
            eprintln!("not tried: no io_uring here");
            return None;
        };
        let scratch = Scratch::new();
        let file = File::create(scratch.path("file")).unwrap();
        let file = device.add_file(Arc::new(file)).unwrap();
        for token in 0..count {
            let op = Op {
                token,
                file,
                offset: 0,
                action: Action::Sync,
            };
            // SAFETY: no memory.
            unsafe { device.push(op) };
        }
        Some(device)
    }

    fn reap_all(device: &mut UringDevice, count: usize, patience: Duration) {
        let (mut completed, started) = (Vec::new(), Instant::now());
        while completed.len() < count {
            device.reap(patience, &mut completed).unwrap();
            assert!(started.elapsed() < Duration::from_secs(20));
        }
    }

    #[test]
    fn operations_when_they_would_fill_the_queue_then_one_can_still_listen_and_all_end() {
        let count = ENTRIES as usize + 50;
        let Some(mut device) = with_syncs(count as u64) else {
            return;
        };
        device.queue();
        device.listen();
        reap_all(&mut device, count, Duration::from_millis(100));
    }

    #[test]
    fn reap_when_it_does_not_wait_then_sees_what_has_ended() {
        let Some(mut device) = with_syncs(1) else {
            return;
        };
        device.submit().unwrap();
        reap_all(&mut device, 1, Duration::ZERO);
    }

    #[test]
    fn device_when_the_kernel_takes_nothing_for_a_moment_then_it_goes_on_and_of_any_other_error_tells()
     {
        for (errno, is_over) in [
            (libc::EAGAIN, false),
            (libc::EBUSY, false),
            (libc::EINTR, false),
            (libc::EBADF, true),
        ] {
            // The thread, and its ring, end with the filter.
            thread::spawn(move || {
                let Ok(mut device) = UringDevice::open() else {
                    return eprintln!("not tried: no io_uring here");
                };
                refuse(libc::SYS_io_uring_enter, errno);
                let mut completed = Vec::new();
                for patience in [Duration::ZERO, Duration::from_millis(1)] {
                    let answers = [device.submit(), device.reap(patience, &mut completed)];
                    for answer in answers {
                        let told = answer.err().and_then(|error| error.raw_os_error());
                        assert_eq!(told, is_over.then_some(errno));
                    }
                }
            })
            .join()
            .unwrap();
        }
    }
}
