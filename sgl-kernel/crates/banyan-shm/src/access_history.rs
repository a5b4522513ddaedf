// SPDX-License-Identifier: Apache-2.0
//! When pages were last asked for, and how often: a memory that reaches beyond what a pool holds.
//!
//! Invariants
//! * It is bounded: 8 bytes a row, `ROWS_PER_FRAME` rows for each frame, as many as `MOST_ROWS`. A page has two rows to be in. Where both are taken,
//!   the page goes that was asked for less often for its age: a hot page does not go for one that passes through.
//! * What is remembered is advice. Two pages of one fingerprint in one bucket are taken for one, once in some two million.

use crate::frame::Key;

/// What returns after as many pages as fill the frames some ten times is still known.
pub const ROWS_PER_FRAME: usize = 16;

/// 32 kB and 32 MB.
pub const LEAST_ROWS: usize = 1 << 12;
pub const MOST_ROWS: usize = 1 << 22;

const ACCESSES_BITS: u32 = 3;

/// Counted as far.
pub const MOST_ACCESSES: u64 = 1 << ACCESSES_BITS;

/// Of a row, the bits that say when its page was last asked for and how often, less one. The others are the page's
/// fingerprint.
const STAMP: u64 = (1 << 42) - 1;
const FINGERPRINT: u64 = !STAMP;
const COUNT: u64 = MOST_ACCESSES - 1;

/// The bit of a page's number that says nothing of the page.
pub const MARK: u64 = 1;

/// What a page is called here, in 63 bits.
pub fn number_of(key: &Key) -> u64 {
    // A key is a sha256: any of its bits are a good hash.
    key[0] & !MARK
}

/// A page's last access. Times count pages that were asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageAccess {
    pub asked_at: u64,
    /// From 1 to `MOST_ACCESSES`.
    pub num_accesses: u64,
}

/// Of a page that is not known: before all others.
pub const NEVER: PageAccess = PageAccess {
    asked_at: 0,
    num_accesses: 1,
};

impl PageAccess {
    fn of_row(row: u64) -> Self {
        Self {
            asked_at: (row & STAMP) >> ACCESSES_BITS,
            num_accesses: (row & COUNT) + 1,
        }
    }

    fn stamp(self) -> u64 {
        (self.asked_at << ACCESSES_BITS | (self.num_accesses - 1)) & STAMP
    }

    fn again(self, asked_at: u64) -> Self {
        Self {
            asked_at,
            num_accesses: MOST_ACCESSES.min(self.num_accesses + 1),
        }
    }
}

pub struct AccessHistory {
    rows: Vec<u64>,
    num_frames: u64,
}

impl AccessHistory {
    /// `num_frames`: of the pools whose prompts are noted here.
    pub fn new(num_frames: usize) -> Self {
        let num_rows = (ROWS_PER_FRAME.saturating_mul(num_frames)).clamp(LEAST_ROWS, MOST_ROWS);
        Self {
            rows: vec![0; num_rows.next_power_of_two()],
            num_frames: num_frames as u64,
        }
    }

    pub fn num_rows(&self) -> usize {
        self.rows.len()
    }

    /// `NEVER`, when it is not known.
    pub fn last(&self, number: u64) -> PageAccess {
        self.place(number)
            .map_or(NEVER, |place| PageAccess::of_row(self.rows[place]))
    }

    /// How many leading pages end with one that is known. Whoever asked for a page has asked for those before it.
    pub fn num_known(&self, numbers: &[u64]) -> usize {
        self.num_known_since(NEVER.asked_at + 1, numbers)
    }

    /// As `num_known`, where one is known that was asked for at `since` or later.
    pub fn num_known_since(&self, since: u64, numbers: &[u64]) -> usize {
        let known = numbers
            .iter()
            .rposition(|number| self.last(*number).asked_at >= since);
        known.map_or(0, |last| last + 1)
    }

    /// Notes pages that were asked for now, and not before.
    pub fn first(&mut self, numbers: &[u64], now: u64) {
        let access = PageAccess {
            asked_at: now,
            num_accesses: 1,
        };
        for number in numbers {
            self.put(*number, access, now);
        }
    }

    /// Notes leading pages that were asked for before and are now. A page was asked for at least as often as those
    /// behind it, also where its row is lost.
    pub fn again(&mut self, numbers: &[u64], now: u64) {
        let mut most = NEVER;
        for number in numbers.iter().rev() {
            let last = self.last(*number);
            if last.num_accesses > most.num_accesses {
                most = last;
            }
            self.put(*number, most.again(now), now);
        }
    }

    fn bucket(&self, number: u64) -> usize {
        (number & !MARK) as usize & (self.rows.len() - 1)
    }

    fn place(&self, number: u64) -> Option<usize> {
        let bucket = self.bucket(number);
        let is_own = |place: &usize| (self.rows[*place] ^ number) & FINGERPRINT == 0;
        [bucket, bucket + 1].into_iter().find(is_own)
    }

    fn put(&mut self, number: u64, access: PageAccess, now: u64) {
        let place = self
            .place(number)
            .unwrap_or_else(|| self.least_worth(self.bucket(number), now));
        self.rows[place] = number & FINGERPRINT | access.stamp();
    }

    /// Which row of a bucket is given away.
    fn least_worth(&self, bucket: usize, now: u64) -> usize {
        let [one, other] = [bucket, bucket + 1].map(|place| PageAccess::of_row(self.rows[place]));
        // AccessHistory over age, in pools; a page that was just asked for has an age too. Multiplied out.
        let age =
            |access: PageAccess| u128::from(self.num_frames + now.saturating_sub(access.asked_at));
        let is_one =
            u128::from(one.num_accesses) * age(other) <= u128::from(other.num_accesses) * age(one);
        if is_one { bucket } else { bucket + 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUM_FRAMES: usize = 256;

    /// Pages that share a bucket, each with a fingerprint of its own.
    fn sharing(count: u64) -> Vec<u64> {
        (1..=count).map(|page| page << 42 | 6).collect()
    }

    fn accesses() -> AccessHistory {
        AccessHistory::new(NUM_FRAMES)
    }

    #[test]
    fn a_page_that_was_never_asked_for_is_older_than_all_others() {
        let mut accesses = accesses();
        accesses.first(&[2 << 42], 5);
        assert_eq!(accesses.last(3 << 42), NEVER);
        assert_eq!(accesses.last(2 << 42).asked_at, 5);
    }

    #[test]
    fn the_mark_says_nothing_of_the_page() {
        let mut accesses = accesses();
        accesses.first(&[9 << 42 | MARK], 5);
        assert_eq!(accesses.last(9 << 42).asked_at, 5);
    }

    #[test]
    fn two_pages_of_one_bucket_are_both_known() {
        let mut accesses = accesses();
        let pages = sharing(2);
        accesses.first(&pages[..1], 1);
        accesses.first(&pages[1..], 2);
        assert_eq!(
            [1, 2],
            [pages[0], pages[1]].map(|page| accesses.last(page).asked_at)
        );
    }

    #[test]
    fn a_third_page_takes_the_row_of_the_one_that_was_asked_for_less_often() {
        let mut accesses = accesses();
        let pages = sharing(3);
        accesses.first(&pages[..1], 1);
        accesses.again(&pages[..1], 2);
        accesses.first(&pages[1..2], 3);
        accesses.first(&pages[2..], 4);
        assert_eq!(accesses.last(pages[0]).num_accesses, 2);
        assert_eq!(accesses.last(pages[1]), NEVER);
        assert_eq!(accesses.last(pages[2]).asked_at, 4);
    }

    #[test]
    fn a_page_that_was_asked_for_often_goes_when_that_is_long_ago() {
        let mut accesses = accesses();
        let pages = sharing(3);
        let later = 3 * NUM_FRAMES as u64;
        accesses.first(&pages[..1], 1);
        accesses.again(&pages[..1], 2);
        accesses.first(&pages[1..2], later);
        accesses.first(&pages[2..], later + 1);
        assert_eq!(accesses.last(pages[0]), NEVER);
        assert_eq!(accesses.last(pages[1]).asked_at, later);
    }

    #[test]
    fn a_page_whose_row_is_lost_counts_as_often_as_those_behind_it() {
        let mut accesses = accesses();
        let pages: Vec<u64> = (1..=4).map(|page| page << 42 | page << 1).collect();
        accesses.first(&pages[1..], 4);
        assert_eq!(accesses.num_known(&pages), 4);
        for turn in 2..=3 {
            accesses.again(&pages[1..], turn * 4);
        }
        accesses.again(&pages, 16);
        let last = pages.iter().map(|page| accesses.last(*page).num_accesses);
        assert!(last.eq([4, 4, 4, 4]));
    }

    #[test]
    fn accesses_are_counted_as_far_as_they_fit() {
        let mut accesses = accesses();
        accesses.first(&[2 << 42], 1);
        for turn in 2..3 * MOST_ACCESSES {
            accesses.again(&[2 << 42], turn);
            assert_eq!(accesses.last(2 << 42).num_accesses, turn.min(MOST_ACCESSES));
        }
    }

    #[test]
    fn memory_is_bounded_for_pools_of_any_size() {
        for num_frames in [1, NUM_FRAMES, 10_000_000, usize::MAX] {
            let num_rows = AccessHistory::new(num_frames).num_rows();
            assert!((LEAST_ROWS..=MOST_ROWS).contains(&num_rows));
            assert!(num_rows >= MOST_ROWS.min(ROWS_PER_FRAME.saturating_mul(num_frames)));
        }
    }
}
