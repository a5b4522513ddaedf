// SPDX-License-Identifier: Apache-2.0
//! A pool of threads with preadv and pwritev: for kernels and containers without io_uring.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::transfer::{Progress, advance};
use super::{Action, Completion, Device, FileId, Op, Span, Wake};
use crate::slots::occupy;

pub struct ThreadsDevice {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    files: Vec<Option<Arc<File>>>,
    pushed: Vec<Job>,
}

struct Job {
    op: Op,
    file: Arc<File>,
}

#[derive(Default)]
struct Queues {
    jobs: VecDeque<Job>,
    completed: Vec<Completion>,
    is_woken: bool,
    is_closing: bool,
}

#[derive(Default)]
struct Shared {
    queues: Mutex<Queues>,
    work: Condvar,
    done: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        loop {
            let job = {
                let mut queues = self.lock();
                loop {
                    if let Some(job) = queues.jobs.pop_front() {
                        break job;
                    }
                    if queues.is_closing {
                        return;
                    }
                    queues = self
                        .work
                        .wait(queues)
                        .unwrap_or_else(PoisonError::into_inner);
                }
            };
            let token = job.op.token;
            let result = transfer(job.op, job.file.as_raw_fd());
            self.lock().completed.push(Completion { token, result });
            self.done.notify_one();
        }
    }
}

/// The whole operation, blocking.
fn transfer(mut op: Op, fd: RawFd) -> io::Result<()> {
    loop {
        if let Progress::Ended(result) = { advance_once(&mut op, fd) } {
            return result;
        }
    }
}

fn advance_once(op: &mut Op, fd: RawFd) -> Progress {
    let offset = op.offset as libc::off_t;
    let answer = match op.action {
        // SAFETY: a system call on an open descriptor.
        Action::Sync => unsafe { libc::fdatasync(fd) as isize },
        Action::Read(spans) => {
            let (vectors, count) = spans.vectors();
            // SAFETY: the spans are valid: the contract of `Op`.
            unsafe { libc::preadv(fd, vectors.as_ptr(), count as i32, offset) }
        }
        Action::Write(spans) => {
            let (vectors, count) = spans.vectors();
            // SAFETY: as above.
            unsafe { libc::pwritev(fd, vectors.as_ptr(), count as i32, offset) }
        }
    };
    let answer = match answer {
        -1 => -io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO),
        moved => moved as i32,
    };
    advance(op, answer)
}

struct WakeFlag(Arc<Shared>);

impl Wake for WakeFlag {
    fn wake(&self) {
        self.0.lock().is_woken = true;
        self.0.done.notify_one();
    }
}

impl ThreadsDevice {
    pub fn open(num_threads: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let mut device = Self {
            shared,
            threads: Vec::new(),
            files: Vec::new(),
            pushed: Vec::new(),
        };
        for _ in 0..num_threads {
            let shared = device.shared.clone();
            let builder = thread::Builder::new().name("banyan-store-rw".into());
            device.threads.push(builder.spawn(move || shared.work())?);
        }
        Ok(device)
    }
}

impl Drop for ThreadsDevice {
    fn drop(&mut self) {
        self.shared.lock().is_closing = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                banyan_shm::say!("banyan: an I/O thread had failed");
            }
        }
    }
}

impl Device for ThreadsDevice {
    fn name(&self) -> &'static str {
        "threads with preadv/pwritev"
    }

    fn add_file(&mut self, file: Arc<File>) -> io::Result<FileId> {
        Ok(FileId(occupy(&mut self.files, file) as u32))
    }

    fn remove_file(&mut self, file: FileId) {
        self.files[file.0 as usize] = None;
    }

    fn add_memory(&mut self, _memory: Span) {}

    fn capacity(&self) -> usize {
        256
    }

    unsafe fn push(&mut self, op: Op) {
        let Some(file) = self.files[op.file.0 as usize].clone() else {
            unreachable!("an operation names a file that was added")
        };
        self.pushed.push(Job { op, file });
    }

    fn submit(&mut self) -> io::Result<()> {
        if !self.pushed.is_empty() {
            self.shared.lock().jobs.extend(self.pushed.drain(..));
            self.shared.work.notify_all();
        }
        Ok(())
    }

    fn reap(&mut self, patience: Duration, completed: &mut Vec<Completion>) -> io::Result<()> {
        self.submit()?;
        let idle = |queues: &mut Queues| queues.completed.is_empty() && !queues.is_woken;
        let waited = self
            .shared
            .done
            .wait_timeout_while(self.shared.lock(), patience, idle);
        let (mut queues, _) = waited.unwrap_or_else(PoisonError::into_inner);
        queues.is_woken = false;
        completed.append(&mut queues.completed);
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::new(WakeFlag(self.shared.clone()))
    }
}
