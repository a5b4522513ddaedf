// SPDX-License-Identifier: Apache-2.0
//! What prompts of a rank asked for, for its peers: the latest page numbers, in a ring of words.
//!
//! Invariants
//! * One writer, the owner. `begun` counts the words whose writing has begun, `ended` those that stand; word n lies at n modulo the ring's length.
//! * A reader believes a word only if, after it was read, no word that takes its place had been begun: it never sees half a prompt mixed with
//!   another. Who comes too late has missed something; nothing waits.
//! * The first page of a prompt carries `MARK`, no other one.

use crate::access_history::MARK;
use crate::sync::{AtomicU64, Ordering, fence};

/// Words of a frame table's ring: 64 kB.
pub const NUM_WORDS: usize = 1 << 13;

pub struct AccessLog<'a> {
    begun: &'a AtomicU64,
    ended: &'a AtomicU64,
    words: &'a [AtomicU64],
}

impl<'a> AccessLog<'a> {
    pub fn new(begun: &'a AtomicU64, ended: &'a AtomicU64, words: &'a [AtomicU64]) -> Self {
        Self {
            begun,
            ended,
            words,
        }
    }

    /// The owner: a prompt of these pages has come. Of a long one the beginning is logged, half of the ring.
    pub fn append(&self, numbers: &[u64]) {
        let numbers = &numbers[..numbers.len().min(self.words.len() / 2)];
        let start = self.ended.load(Ordering::Relaxed);
        let end = start + numbers.len() as u64;
        self.begun.store(end, Ordering::Relaxed);
        // Keeps the words behind the announcement of them.
        fence(Ordering::Release);
        for (place, number) in (start..end).zip(numbers) {
            let mark = if place == start { MARK } else { 0 };
            self.word(place)
                .store(number & !MARK | mark, Ordering::Relaxed);
        }
        self.ended.store(end, Ordering::Release);
    }

    /// A reader: what was logged from word `from` on, prompt by prompt, and where to go on. Of a prompt that was
    /// overwritten in part, the rest.
    pub fn read_from(&self, from: u64) -> (Vec<Vec<u64>>, u64) {
        let end = self.ended.load(Ordering::Acquire);
        let start = from.max(end.saturating_sub(self.words.len() as u64));
        let read: Vec<u64> = (start..end)
            .map(|place| self.word(place).load(Ordering::Relaxed))
            .collect();
        // Keeps the words before the look at what was begun meanwhile.
        fence(Ordering::Acquire);
        let begun = self.begun.load(Ordering::Relaxed);
        let num_lost = begun
            .saturating_sub(self.words.len() as u64)
            .saturating_sub(start);
        let whole = &read[read.len().min(num_lost as usize)..];
        let prompts = whole.chunk_by(|_, next| next & MARK == 0);
        (prompts.map(<[u64]>::to_vec).collect(), end)
    }

    fn word(&self, place: u64) -> &AtomicU64 {
        &self.words[place as usize % self.words.len()]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    struct Ring {
        counts: [AtomicU64; 2],
        words: Vec<AtomicU64>,
    }

    impl Ring {
        fn new(num_words: usize) -> Self {
            Self {
                counts: [AtomicU64::new(0), AtomicU64::new(0)],
                words: (0..num_words).map(|_| AtomicU64::new(0)).collect(),
            }
        }

        fn access_log(&self) -> AccessLog<'_> {
            AccessLog::new(&self.counts[0], &self.counts[1], &self.words)
        }
    }

    fn prompt(first: u64, num_pages: u64) -> Vec<u64> {
        (0..num_pages).map(|page| (first + page) << 1).collect()
    }

    fn marked(mut prompt: Vec<u64>) -> Vec<u64> {
        prompt[0] |= MARK;
        prompt
    }

    #[test]
    fn prompts_are_read_one_by_one_and_once() {
        let ring = Ring::new(16);
        ring.access_log().append(&prompt(10, 3));
        ring.access_log().append(&prompt(20, 1));
        let (logged, from) = ring.access_log().read_from(0);
        assert_eq!(logged, [marked(prompt(10, 3)), marked(prompt(20, 1))]);
        assert_eq!(ring.access_log().read_from(from), (Vec::new(), from));
    }

    #[test]
    fn who_comes_late_hears_the_latest() {
        let ring = Ring::new(8);
        for turn in 0..10 {
            ring.access_log().append(&prompt(10 * turn, 3));
        }
        let (logged, end) = ring.access_log().read_from(0);
        // Of the third last one the end.
        let rest = prompt(70, 3).split_off(1);
        assert_eq!(logged, [rest, marked(prompt(80, 3)), marked(prompt(90, 3))]);
        assert_eq!(end, 30);
    }

    #[test]
    fn of_a_long_prompt_the_beginning_is_logged() {
        let ring = Ring::new(8);
        ring.access_log().append(&prompt(10, 100));
        assert_eq!(ring.access_log().read_from(0).0, [marked(prompt(10, 4))]);
    }
}
