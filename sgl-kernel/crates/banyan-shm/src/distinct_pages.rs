// SPDX-License-Identifier: Apache-2.0
//! How many distinct pages were seen since any time in the last days, in 640 kB.
//!
//! A page draws one coupon by its hash: a row, all alike, and a level, each half as likely as the one before (Flajolet
//! and Martin, 1985). Of each coupon is kept when it was drawn last. So the coupons of any time up to now are known, and
//! how many pages there were is the number that makes those most likely: off by 0.5 % of it (one standard deviation).
//!
//! Invariants
//! * Whoever sees pages in another order, or twice, has the same table.
//! * Times do not fall. What is older than `KEPT_MINUTES` may be forgotten.

use crate::seeded_rng::mixed;

const ROW_BITS: u32 = 14;
const NUM_ROWS: usize = 1 << ROW_BITS;
/// Enough for some 10^10 pages.
const NUM_LEVELS: usize = 20;
const NUM_HALVINGS: usize = 64;

pub const KEPT_MINUTES: u64 = 2 * 24 * 60;

/// `seed`: unknown to whoever chooses what is seen, for who knew it could bias the count.
pub struct DistinctPages {
    seed: u64,
    /// What a stamp of 0 would say; 0 itself says never.
    base_minute: u64,
    stamps: Vec<u16>,
}

impl DistinctPages {
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            base_minute: 0,
            stamps: vec![0; NUM_ROWS * NUM_LEVELS],
        }
    }

    /// `minute`: now, from 1 on.
    pub fn saw(&mut self, numbers: &[u64], minute: u64) {
        let stamp = self.stamp(minute);
        for number in numbers {
            let hash = mixed(number ^ self.seed);
            let row = (hash >> (64 - ROW_BITS)) as usize;
            let level = (hash.trailing_zeros() as usize).min(NUM_LEVELS - 1);
            self.stamps[level * NUM_ROWS + row] = stamp;
        }
    }

    /// Pages that were seen in this minute and since.
    pub fn since(&self, minute: u64) -> f64 {
        let least = minute.saturating_sub(self.base_minute).max(1);
        let Ok(least) = u16::try_from(least) else {
            return 0.0;
        };
        let mut drawn = [0usize; NUM_LEVELS];
        for (count, level) in drawn.iter_mut().zip(self.stamps.chunks_exact(NUM_ROWS)) {
            *count = level.iter().filter(|stamp| **stamp >= least).count();
        }
        most_likely(&drawn)
    }

    fn stamp(&mut self, minute: u64) -> u16 {
        let stamp = minute.saturating_sub(self.base_minute).max(1);
        if let Ok(stamp) = u16::try_from(stamp) {
            return stamp;
        }
        let past = minute - KEPT_MINUTES - self.base_minute;
        for stamp in &mut self.stamps {
            *stamp = u16::try_from(u64::from(*stamp).saturating_sub(past)).unwrap_or(0);
        }
        self.base_minute += past;
        self.stamp(minute)
    }
}

/// The number of pages under which so many coupons of each level are drawn most often. Its slope falls as the number
/// grows, so it is found by halving.
#[allow(clippy::cast_precision_loss)] // some thousand rows
fn most_likely(drawn: &[usize; NUM_LEVELS]) -> f64 {
    if drawn.iter().all(|count| *count == 0) {
        return 0.0;
    }
    let rows = NUM_ROWS as f64;
    let slope = |num_pages: f64| -> f64 {
        let mut chance = 0.5;
        let mut sum = 0.0;
        for (level, count) in drawn.iter().enumerate() {
            let missed = -(-num_pages * chance / rows).exp_m1();
            sum += chance * (*count as f64 / missed - rows);
            if level + 2 < NUM_LEVELS {
                chance /= 2.0;
            }
        }
        sum
    };
    let (mut low, mut high) = (1e-3f64, 1e15f64);
    for _ in 0..NUM_HALVINGS {
        let middle = (low * high).sqrt();
        if slope(middle) > 0.0 {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(first: u64, count: u64) -> Vec<u64> {
        (first..first + count)
            .map(|page| mixed(page) & !1)
            .collect()
    }

    #[test]
    #[allow(clippy::cast_precision_loss)]
    fn few_and_many_pages_are_counted_within_two_percent() {
        for count in [1, 10, 1_000, 30_000, 400_000, 3_000_000] {
            let mut distinct = DistinctPages::new(7);
            for _ in 0..2 {
                distinct.saw(&pages(0, count), 5);
            }
            let error = distinct.since(5) / count as f64 - 1.0;
            assert!(error.abs() < 0.02, "{count} pages: off by {error}");
        }
    }

    #[test]
    fn what_was_seen_before_is_not_counted_unless_seen_again() {
        let mut distinct = DistinctPages::new(1);
        distinct.saw(&pages(0, 10_000), 1);
        distinct.saw(&pages(9_000, 2_000), 30);
        assert!((distinct.since(1) / 11_000.0 - 1.0).abs() < 0.02);
        assert!((distinct.since(2) / 2_000.0 - 1.0).abs() < 0.02);
        assert!(distinct.since(31).abs() < f64::EPSILON);
    }

    #[test]
    fn after_months_the_last_days_are_still_known() {
        let mut distinct = DistinctPages::new(1);
        let last = u64::from(u16::MAX) * 3;
        distinct.saw(&pages(0, 5_000), 1);
        distinct.saw(&pages(5_000, 1_000), last - 1_000);
        distinct.saw(&pages(6_000, 1_000), last);
        assert!((distinct.since(last - 1_440) / 2_000.0 - 1.0).abs() < 0.02);
        assert!((distinct.since(last) / 1_000.0 - 1.0).abs() < 0.02);
    }

    #[test]
    fn no_pages_are_none() {
        assert!(DistinctPages::new(1).since(0).abs() < f64::EPSILON);
    }
}
