// SPDX-License-Identifier: Apache-2.0
//! A device that reads no faster than it is told: a slower drive for experiments, or a share of one that others use too.
//!
//! Invariants
//! * Reads complete in the order in which the device below finished them, each no sooner than its bytes take at the rate after the one
//!   before. Time in which nothing is read is not saved up.
//! * An operation that waits here is in flight for the caller: its memory is not touched any more, but it counts. The caller hears at
//!   once that the device below has answered.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Action, Completion, Device, FileId, Op, Span, Token, Wake};

pub struct ThrottledDevice {
    below: Box<dyn Device>,
    bytes_per_s: f64,
    /// Bytes of the reads that the device below has.
    reading: HashMap<Token, usize>,
    held: VecDeque<(Instant, Completion)>,
    last_due: Option<Instant>,
    on_answer: Box<dyn Fn(Token)>,
}

impl ThrottledDevice {
    pub fn new(
        below: Box<dyn Device>,
        bytes_per_s: u64,
        on_answer: impl Fn(Token) + 'static,
    ) -> Self {
        Self {
            below,
            bytes_per_s: bytes_per_s as f64,
            reading: HashMap::new(),
            held: VecDeque::new(),
            last_due: None,
            on_answer: Box::new(on_answer),
        }
    }

    fn hold(&mut self, completion: Completion, len: usize) {
        let now = Instant::now();
        let start = self.last_due.map_or(now, |last| last.max(now));
        let due = start + Duration::from_secs_f64(len as f64 / self.bytes_per_s);
        self.last_due = Some(due);
        (self.on_answer)(completion.token);
        self.held.push_back((due, completion));
    }

    fn release(&mut self, completed: &mut Vec<Completion>) {
        let now = Instant::now();
        while self.held.front().is_some_and(|(due, _)| *due <= now) {
            completed.extend(self.held.pop_front().map(|(_, completion)| completion));
        }
    }

    fn until_due(&self) -> Option<Duration> {
        let (due, _) = self.held.front()?;
        Some(due.saturating_duration_since(Instant::now()))
    }
}

impl Device for ThrottledDevice {
    fn name(&self) -> &'static str {
        self.below.name()
    }

    fn add_file(&mut self, file: Arc<File>) -> io::Result<FileId> {
        self.below.add_file(file)
    }

    fn remove_file(&mut self, file: FileId) {
        self.below.remove_file(file);
    }

    fn add_memory(&mut self, memory: Span) {
        self.below.add_memory(memory);
    }

    fn capacity(&self) -> usize {
        self.below.capacity()
    }

    unsafe fn push(&mut self, op: Op) {
        if let Action::Read(spans) = op.action {
            self.reading.insert(op.token, spans.len());
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { self.below.push(op) };
    }

    fn submit(&mut self) -> io::Result<()> {
        self.below.submit()
    }

    fn reap(&mut self, patience: Duration, completed: &mut Vec<Completion>) -> io::Result<()> {
        let before = completed.len();
        self.release(completed);
        let patience = match self.until_due() {
            _ if completed.len() > before => Duration::ZERO,
            Some(wait) => patience.min(wait),
            None => patience,
        };
        let mut finished = Vec::new();
        self.below.reap(patience, &mut finished)?;
        for completion in finished {
            match self.reading.remove(&completion.token) {
                Some(len) => self.hold(completion, len),
                None => completed.push(completion),
            }
        }
        self.release(completed);
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.below.waker()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Spans, ThreadsDevice};
    use super::*;
    use crate::buffer::AlignedBytes;

    #[test]
    fn reads_when_throttled_then_no_faster_and_all_there() {
        let path = std::env::temp_dir().join(format!("banyan-throttled-{}", std::process::id()));
        std::fs::write(&path, vec![7u8; 64 << 10]).unwrap();
        let below = Box::new(ThreadsDevice::open(2).unwrap());
        let mut device = ThrottledDevice::new(below, 1 << 20, |_| ());
        let file = device
            .add_file(Arc::new(File::open(&path).unwrap()))
            .unwrap();
        let mut memory = AlignedBytes::new(64 << 10);
        let began = Instant::now();
        for (token, part) in memory.bytes_mut().chunks_mut(16 << 10).enumerate() {
            let op = Op {
                token: token as u64,
                file,
                offset: (token * (16 << 10)) as u64,
                action: Action::Read(Spans::one(Span::of(part))),
            };
            // SAFETY: the memory outlives the loop below, which reaps every operation.
            unsafe { device.push(op) };
        }
        let mut completed = Vec::new();
        while completed.len() < 4 {
            device
                .reap(Duration::from_millis(50), &mut completed)
                .unwrap();
        }
        assert!(completed.iter().all(|completion| completion.result.is_ok()));
        // 64 KiB at 1 MiB/s.
        assert!(began.elapsed() >= Duration::from_millis(60));
        assert!(memory.bytes().iter().all(|byte| *byte == 7));
        std::fs::remove_file(&path).unwrap();
    }
}
