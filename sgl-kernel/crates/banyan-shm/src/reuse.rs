// SPDX-License-Identifier: Apache-2.0
//! How much of what is asked for could be found: if nothing were lost, and in caches of other sizes.
//!
//! What was computed must have been, once: the distinct pages that were computed in a window are the least that any
//! cache has to compute that knew nothing when it began. So the ceiling is never below what was found. Answers, and
//! pages that were there from before, are in it: nobody has computed them as part of a prompt.
//!
//! Less than 1 MB. One thread.

use std::collections::VecDeque;

use crate::distinct_pages::DistinctPages;
use crate::reuse_distances::ReuseDistances;

const KEPT_MINUTES: u64 = 24 * 60;
const MINUTE_S: u64 = 60;
const HOUR_S: u64 = 3_600;

/// Prompts of one minute that were answered.
struct Minute {
    number: u64,
    num_tokens: u64,
    num_pages: u64,
}

pub struct Reuse {
    page_tokens: u64,
    computed: DistinctPages,
    distances: ReuseDistances,
    minutes: VecDeque<Minute>,
}

impl Reuse {
    /// `most_pages`, `seed`: as `ReuseDistances` has them.
    pub fn new(page_tokens: u64, most_pages: u64, seed: u64) -> Self {
        Self {
            page_tokens,
            computed: DistinctPages::new(seed),
            distances: ReuseDistances::new(seed, most_pages),
            minutes: VecDeque::new(),
        }
    }

    /// A prompt of these pages has come. `now_s` does not fall; the same holds wherever it stands.
    pub fn asked(&mut self, numbers: &[u64], now_s: u64) {
        self.distances.asked(numbers, now_s / HOUR_S);
    }

    /// As `ReuseDistances::came`.
    pub fn came(&mut self, numbers: &[u64]) {
        self.distances.came(numbers);
    }

    /// A prompt of `num_tokens` and as many pages as a cache may supply is answered. `computed`: those of its pages that
    /// were not found.
    pub fn answered(&mut self, num_tokens: u64, num_pages: u64, computed: &[u64], now_s: u64) {
        let number = minute_of(now_s);
        self.computed.saw(computed, number);
        if self.minutes.back().is_none_or(|last| last.number < number) {
            self.minutes.push_back(Minute {
                number,
                num_tokens: 0,
                num_pages: 0,
            });
            while self.minutes[0].number + KEPT_MINUTES <= number {
                self.minutes.pop_front();
            }
        }
        if let Some(last) = self.minutes.back_mut() {
            last.num_tokens += num_tokens;
            last.num_pages += num_pages;
        }
    }

    /// Of the prompts' tokens of the last minutes, a day at most, the share that could have been found; 0.0 of none.
    #[allow(clippy::cast_precision_loss)] // counts
    pub fn ceiling(&self, num_minutes: u64, now_s: u64) -> f64 {
        let first = first_minute(num_minutes, now_s);
        let (num_tokens, num_pages) = self.answered_since(first);
        if num_tokens == 0 {
            return 0.0;
        }
        let could = num_pages as f64 - self.computed.since(first);
        (could.max(0.0) * self.page_tokens as f64 / num_tokens as f64).min(1.0)
    }

    /// The prompts' tokens of the last minutes, a day at most.
    pub fn num_tokens(&self, num_minutes: u64, now_s: u64) -> u64 {
        self.answered_since(first_minute(num_minutes, now_s)).0
    }

    /// Of the prompts' tokens of the last day, the share that a cache of so many pages would have found that evicts what
    /// was asked for longest ago; `ReuseDistances` says how.
    #[allow(clippy::cast_precision_loss)] // counts
    pub fn found_within(&self, num_pages: f64) -> f64 {
        let (num_tokens, asked_pages) = self.answered_since(0);
        let in_pages = asked_pages as f64 * self.page_tokens as f64 / (num_tokens as f64).max(1.0);
        self.distances.found_within(num_pages) * in_pages
    }

    fn answered_since(&self, first: u64) -> (u64, u64) {
        let minutes = self.minutes.iter().filter(|one| one.number >= first);
        minutes.fold((0, 0), |(tokens, pages), one| {
            (tokens + one.num_tokens, pages + one.num_pages)
        })
    }
}

fn first_minute(num_minutes: u64, now_s: u64) -> u64 {
    (minute_of(now_s) + 1).saturating_sub(num_minutes)
}

/// From 1 on.
fn minute_of(now_s: u64) -> u64 {
    now_s / MINUTE_S + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(told: f64, exact: f64) -> bool {
        (told - exact).abs() < 0.02
    }

    #[test]
    fn what_was_computed_twice_could_have_been_found_once() {
        let mut reuse = Reuse::new(16, 1_000, 5);
        let pages: Vec<u64> = (1..=100).map(|page| page << 1).collect();
        reuse.answered(1_610, 100, &pages, 10);
        reuse.answered(1_610, 100, &pages[50..], 70);
        assert!(close(reuse.ceiling(60, 70), 1_600.0 / 3_220.0));
        // The first prompt is not in it any more.
        assert!(close(reuse.ceiling(1, 70), 800.0 / 1_610.0));
        assert_eq!(
            [60, 1].map(|minutes| reuse.num_tokens(minutes, 70)),
            [3_220, 1_610]
        );
    }

    #[test]
    fn what_nobody_computed_does_not_lower_the_ceiling() {
        let mut reuse = Reuse::new(16, 1_000, 5);
        reuse.answered(1_600, 100, &[], 10);
        assert!((reuse.ceiling(15, 10) - 1.0).abs() < 1e-9);
        assert!(reuse.ceiling(15, 10_000).abs() < 1e-9);
    }

    #[test]
    fn minutes_older_than_a_day_are_forgotten() {
        let mut reuse = Reuse::new(16, 1_000, 5);
        for minute in 0..3_000 {
            reuse.answered(16, 1, &[minute << 1], minute * MINUTE_S);
        }
        assert_eq!(reuse.minutes.len(), KEPT_MINUTES as usize);
    }
}
