// SPDX-License-Identifier: Apache-2.0
//! A store in a directory of its own, and pages whose content says which they are.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use banyan_shm::frame::Key;
use banyan_shm::memory::SharedMemory;
use banyan_store::growth::Limits;
use banyan_store::reading::Reason;
use banyan_store::state::Verdict;
use banyan_store::store::{EngineChoice, Options, Store};

pub const NUM_FRAMES: u64 = 64;

pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let root = std::env::current_exe().unwrap();
        let root = root.parent().unwrap().parent().unwrap();
        let path = root.join(format!("scratch-{}-{number}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

pub fn options(path: &Path) -> Options {
    Options {
        paths: vec![path.join("store")],
        namespace: [1; 4],
        layer_bytes: vec![4096, 8192, 4096],
        limits: Limits {
            quota_bytes: 8 << 20,
            share_bytes: 8 << 20,
            floor_bytes: 0,
        },
        segment_bytes: Some(256 << 10),
        backlog_bytes: 64 << 20,
        engine: EngineChoice::Auto,
        read_bytes_per_s: None,
        stall_after: Duration::from_secs(10),
    }
}

pub fn key(number: u64) -> Key {
    // As spread as a digest.
    [1, 2, 3, 4].map(|word: u64| {
        (number + 1)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(word as u32 * 13)
    })
}

/// An arena and the store behind it.
pub struct Rig {
    pub store: Store,
    pub memory: Arc<SharedMemory>,
    pub frame_bytes: u64,
    stride: u64,
}

impl Rig {
    pub fn open(options: &Options) -> Self {
        let frame_bytes = options.layer_bytes.iter().sum::<u64>();
        let stride = frame_bytes.next_multiple_of(4096);
        let memory = SharedMemory::create((NUM_FRAMES * stride) as usize, "rig").unwrap();
        Self {
            store: Store::open(options).unwrap(),
            memory: Arc::new(memory),
            frame_bytes,
            stride,
        }
    }

    pub fn offset(&self, frame: u64) -> u64 {
        frame * self.stride
    }

    #[expect(
        clippy::mut_from_ref,
        reason = "shared memory, which the test uses from one thread"
    )]
    pub fn frame(&self, frame: u64) -> &mut [u8] {
        let start = self.memory.mapping().start();
        // SAFETY: inside the arena; the test uses one frame at a time.
        unsafe {
            std::slice::from_raw_parts_mut(
                start.add(self.offset(frame) as usize),
                self.frame_bytes as usize,
            )
        }
    }

    pub fn fill(&self, frame: u64, number: u64) {
        for (word, place) in self.frame(frame).chunks_exact_mut(4).enumerate() {
            place.copy_from_slice(&(number as u32 * 7919 + word as u32).to_le_bytes());
        }
    }

    pub fn is_filled(&self, frame: u64, number: u64) -> bool {
        self.frame(frame)
            .chunks_exact(4)
            .enumerate()
            .all(|(word, place)| *place == (number as u32 * 7919 + word as u32).to_le_bytes())
    }

    /// Queues the chain `numbers`, each page the child of the one before.
    pub fn put(&self, parent: Option<u64>, numbers: &[u64]) -> Vec<Verdict> {
        let frames: Vec<u64> = (0..numbers.len() as u64).collect();
        for (frame, number) in frames.iter().zip(numbers) {
            self.fill(*frame, *number);
        }
        let keys: Vec<Key> = numbers.iter().map(|number| key(*number)).collect();
        let offsets: Vec<u64> = frames.iter().map(|frame| self.offset(*frame)).collect();
        self.store
            .put(&keys, parent.map(key), &self.memory, &offsets)
            .unwrap()
    }

    /// Stores a chain and waits for it.
    pub fn keep(&self, parent: Option<u64>, numbers: &[u64]) {
        let verdicts = self.put(parent, numbers);
        assert!(
            verdicts.iter().all(|verdict| *verdict == Verdict::Queued),
            "{verdicts:?}"
        );
        assert_eq!(self.store.sync().unwrap(), 0);
        self.store.completed();
    }

    pub fn num_found(&self, numbers: &[u64]) -> usize {
        let keys: Vec<Key> = numbers.iter().map(|number| key(*number)).collect();
        self.store.lookup(&keys).hits.len()
    }

    /// Reads a chain and checks every good page's content; the failures.
    pub fn fetch(&self, numbers: &[u64], layers_per_step: usize) -> Vec<(usize, Reason)> {
        let keys: Vec<Key> = numbers.iter().map(|number| key(*number)).collect();
        let found = self.store.lookup(&keys);
        assert_eq!(found.hits.len(), numbers.len(), "some are not found");
        let offsets: Vec<u64> = (0..numbers.len() as u64)
            .map(|frame| self.offset(frame))
            .collect();
        for frame in 0..numbers.len() as u64 {
            self.frame(frame).fill(0xEE);
        }
        let ticket = self
            .store
            .read(
                &found,
                numbers.len(),
                &self.memory,
                &offsets,
                layers_per_step,
            )
            .unwrap();
        let failed = ticket.finish();
        for (frame, number) in numbers.iter().enumerate() {
            if !failed.iter().any(|(page, _)| *page == frame) {
                assert!(
                    self.is_filled(frame as u64, *number),
                    "page {number} came back wrong"
                );
            }
        }
        failed
    }

    pub fn stat(&self, name: &str) -> u64 {
        let stats = self.store.stats();
        stats.iter().find(|(other, _)| *other == name).unwrap().1
    }
}
