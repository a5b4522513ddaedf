// SPDX-License-Identifier: Apache-2.0
//! Neighbours that are ready go down in one operation: small records would leave a device idle that takes two at a time.

use std::collections::VecDeque;

use super::{Ready, Surroundings, Writer};
use crate::device::{MAX_SPANS, Span};
use crate::geometry::BLOCK_BYTES;
use crate::pacing;

/// Records of one operation: each is a header and a body.
const MAX_JOINED: u64 = (MAX_SPANS / 2) as u64;
/// What one operation moves, if it is more than one record: a reader may have to wait for two of them.
const MAX_JOINED_BYTES: u64 = 8 << 20;

impl Ready {
    /// In the segment.
    fn end(&self) -> u64 {
        self.offset + (BLOCK_BYTES + self.body.len) as u64
    }

    fn is_behind(&self, other: &Ready) -> bool {
        self.writing.file == other.writing.file && self.offset == other.end()
    }

    pub(super) fn spans(&self) -> [Span; 2] {
        [self.writing.header.span(0, BLOCK_BYTES), self.body]
    }
}

impl Writer {
    fn max_joined(&self) -> u64 {
        (MAX_JOINED_BYTES / self.header.geometry.record_bytes()).clamp(1, MAX_JOINED)
    }

    /// Enough for all operations that may run at a time.
    pub(super) fn max_ready(&self) -> usize {
        pacing::MAX_WRITE_DEPTH * self.max_joined() as usize
    }

    /// The record that has been ready longest, and those after it that lie before or behind it, in the order
    /// of the file. Pages come from the front of a prefix, places from evictions that begin at its end: so both directions happen.
    pub(super) fn take_joined(&mut self, around: &Surroundings<'_>) -> VecDeque<Ready> {
        let mut joined: VecDeque<Ready> = VecDeque::new();
        if !self.may_write(around, self.num_running) {
            return joined;
        }
        for _ in 0..self.max_joined() {
            let Some(next) = self.ready.pop_front() else {
                break;
            };
            match (joined.front(), joined.back()) {
                (Some(first), _) if first.is_behind(&next) => joined.push_front(next),
                (_, Some(last)) if !next.is_behind(last) => {
                    self.ready.push_front(next);
                    break;
                }
                _ => joined.push_back(next),
            }
        }
        joined
    }
}
