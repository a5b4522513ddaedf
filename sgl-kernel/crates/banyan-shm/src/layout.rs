// SPDX-License-Identifier: Apache-2.0
//! The bytes of a frame table: header words, geometry table, frames, bucket heads, the ring of what prompts asked for.
//!
//! Everything is 64-bit words in the byte order of the machine: a frame table never leaves it. A peer checks every
//! number against the size of the file before it uses one, so that a foreign or damaged file is an error and not an
//! access out of bounds.

use crate::access_log::{self, AccessLog};
use crate::error::{Result, invalid};
use crate::frame::Frame;
use crate::geometry::Geometry;
use crate::index::{Index, num_buckets_for};
use crate::memory::Mapping;
use crate::pool::PoolKind;
use crate::rank_table::Namespace;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

const MAGIC: u64 = u64::from_le_bytes(*b"BNYNSHLF");
const FORMAT: u64 = 4;
const HEADER_WORDS: usize = 32;

/// Header words, by position. The first group is written once, before the frame table is announced; the second by the
/// owner at any time.
#[derive(Clone, Copy)]
#[repr(usize)]
pub enum Word {
    Magic = 0,
    Format = 1,
    Identity = 2,
    Epoch = 3,
    NumFrames = 4,
    NumBuckets = 5,
    NumLayers = 6,
    GeometryWords = 7,
    PoolFd = 8,
    PoolBytes = 9,
    Namespace = 10,
    /// Grows with every change of the published set.
    Version = 16,
    NumPublished = 17,
    /// Written once. See `PoolKind`.
    PoolKind = 21,
    /// See `AccessLog`.
    ToldBegun = 22,
    ToldEnded = 23,
    /// Written once. See `Index`.
    Multiplier = 24,
}

/// Where the parts lie, fixed by the number of frames and of geometry words, and where a key's bucket is. Each process
/// keeps its own: the words that say so can be written by all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameTableLayout {
    pub num_frames: usize,
    pub num_buckets: usize,
    pub geometry_words: usize,
    /// See `Index`.
    pub multiplier: u64,
}

impl FrameTableLayout {
    pub fn new(num_frames: usize, geometry_words: usize, multiplier: u64) -> Self {
        Self {
            num_frames,
            num_buckets: num_buckets_for(num_frames),
            geometry_words,
            multiplier,
        }
    }

    fn frames_offset(&self) -> usize {
        ((HEADER_WORDS + self.geometry_words) * 8).next_multiple_of(align_of::<Frame>())
    }

    fn heads_offset(&self) -> usize {
        self.frames_offset() + self.num_frames * size_of::<Frame>()
    }

    fn access_log_offset(&self) -> usize {
        (self.heads_offset() + self.num_buckets * 4).next_multiple_of(8)
    }

    pub fn num_bytes(&self) -> usize {
        self.access_log_offset() + access_log::NUM_WORDS * 8
    }

    pub fn word<'a>(&self, mapping: &'a Mapping, word: Word) -> &'a AtomicU64 {
        &mapping.words(word as usize * 8, 1)[0]
    }

    pub fn index<'a>(&self, mapping: &'a Mapping) -> Index<'a> {
        let heads: &[AtomicU32] = mapping.words(self.heads_offset(), self.num_buckets);
        let frames = mapping.words(self.frames_offset(), self.num_frames);
        Index::new(heads, frames, self.multiplier)
    }

    pub fn access_log<'a>(&self, mapping: &'a Mapping) -> AccessLog<'a> {
        AccessLog::new(
            self.word(mapping, Word::ToldBegun),
            self.word(mapping, Word::ToldEnded),
            mapping.words(self.access_log_offset(), access_log::NUM_WORDS),
        )
    }
}

/// What an owner writes once.
pub struct Birth<'a> {
    pub identity: u64,
    pub epoch: u64,
    pub namespace: Namespace,
    pub geometry: &'a Geometry,
    pub pool_kind: PoolKind,
    pub pool_fd: u64,
    pub pool_bytes: u64,
}

impl Birth<'_> {
    pub fn write(&self, layout: &FrameTableLayout, mapping: &Mapping) {
        let set = |word: Word, value: u64| {
            layout.word(mapping, word).store(value, Ordering::Relaxed);
        };
        set(Word::Format, FORMAT);
        set(Word::Identity, self.identity);
        set(Word::Epoch, self.epoch);
        set(Word::NumFrames, layout.num_frames as u64);
        set(Word::NumBuckets, layout.num_buckets as u64);
        set(Word::NumLayers, self.geometry.num_layers() as u64);
        set(Word::GeometryWords, layout.geometry_words as u64);
        set(Word::PoolKind, self.pool_kind as u64);
        set(Word::PoolFd, self.pool_fd);
        set(Word::PoolBytes, self.pool_bytes);
        set(Word::Multiplier, layout.multiplier);
        let namespace: &[AtomicU64] = mapping.words(Word::Namespace as usize * 8, 4);
        let table: &[AtomicU64] = mapping.words(HEADER_WORDS * 8, layout.geometry_words);
        let table_words = self.geometry.to_words();
        for (word, value) in namespace.iter().zip(&self.namespace) {
            word.store(*value, Ordering::Relaxed);
        }
        for (word, value) in table.iter().zip(&table_words) {
            word.store(*value, Ordering::Relaxed);
        }
        layout
            .word(mapping, Word::Magic)
            .store(MAGIC, Ordering::Release);
    }
}

/// What a peer reads once.
pub struct Reading {
    pub layout: FrameTableLayout,
    pub identity: u64,
    pub epoch: u64,
    pub namespace: Namespace,
    pub geometry: Geometry,
    pub pool_kind: PoolKind,
    pub pool_fd: u64,
    pub pool_bytes: u64,
}

impl Reading {
    pub fn of(mapping: &Mapping) -> Result<Self> {
        if mapping.len() < HEADER_WORDS * 8 {
            return invalid!("a frame table of {} bytes is too short", mapping.len());
        }
        let header: &[AtomicU64] = mapping.words(0, HEADER_WORDS);
        let get = |word: Word| header[word as usize].load(Ordering::Acquire);
        if get(Word::Magic) != MAGIC {
            return invalid!("not a frame table: its magic is {:#018x}", get(Word::Magic));
        }
        if get(Word::Format) != FORMAT {
            return invalid!(
                "frame table format {}, this build reads format {FORMAT}",
                get(Word::Format)
            );
        }
        let layout = check_layout(
            mapping.len(),
            [
                get(Word::NumFrames),
                get(Word::NumBuckets),
                get(Word::GeometryWords),
            ],
            get(Word::Multiplier),
        )?;
        let table: &[AtomicU64] = mapping.words(HEADER_WORDS * 8, layout.geometry_words);
        let table: Vec<u64> = table
            .iter()
            .map(|word| word.load(Ordering::Relaxed))
            .collect();
        let Some(geometry) = Geometry::from_words(&table, get(Word::NumLayers) as usize) else {
            return invalid!(
                "a frame table whose geometry table has {} words",
                table.len()
            );
        };
        let Some(pool_kind) = PoolKind::of_word(get(Word::PoolKind)) else {
            return invalid!("a frame table with a pool of kind {}", get(Word::PoolKind));
        };
        let namespace = Word::Namespace as usize;
        Ok(Self {
            layout,
            identity: get(Word::Identity),
            epoch: get(Word::Epoch),
            namespace: [0, 1, 2, 3].map(|word| header[namespace + word].load(Ordering::Relaxed)),
            geometry,
            pool_kind,
            pool_fd: get(Word::PoolFd),
            pool_bytes: get(Word::PoolBytes),
        })
    }
}

fn check_layout(len: usize, numbers: [u64; 3], multiplier: u64) -> Result<FrameTableLayout> {
    // None of the three can exceed the bytes of the file; below that no sum overflows.
    let [num_frames, num_buckets, geometry_words] = numbers.map(|number| number as usize);
    if numbers.iter().all(|number| *number <= len as u64) && num_frames > 0 {
        let layout = FrameTableLayout::new(num_frames, geometry_words, multiplier);
        if layout.num_buckets == num_buckets && layout.num_bytes() == len {
            return Ok(layout);
        }
    }
    invalid!(
        "a frame table of {len} bytes says {num_frames} frames, {num_buckets} buckets, {geometry_words} geometry words"
    )
}
