// SPDX-License-Identifier: Apache-2.0
//! What a cache of any size would have found that evicts the page that was asked for longest ago: by the reuse distances
//! of a sample of pages, in 300 kB.
//!
//! A page is in the sample if its hash is below a bound, so of a sampled page every access is seen. Its reuse distance
//! is how many sampled pages were asked for since, over the share that is sampled (SHARDS; Waldspurger and others,
//! 2015). The bound falls when the sample is full.
//!
//! Invariants
//! * A prompt is looked up as a whole before it is noted; then its first page is the latest. So no cache has a page and
//!   not those before it.
//! * At most `MOST_SAMPLED` pages are remembered, and none further back than `most_pages`.
//! * `places` are in the order of the last access; a page has one, and of a place that was left the key is 0.

use std::collections::VecDeque;

use crate::seeded_rng::mixed;

const MOST_SAMPLED: usize = 1 << 13;
const NUM_PLACES: usize = 2 * MOST_SAMPLED;
const NUM_SLOTS: usize = 2 * NUM_PLACES;
/// The sample is full when half as many pages were seen as are remembered, or later.
const FULL_AT_PART: u64 = 2;
/// Of the bound, when the sample is full: in quarters.
const KEPT_QUARTERS: u64 = 3;
const ALL: u64 = 1 << 32;

const BUCKETS_PER_OCTAVE: f64 = 8.0;
const NUM_BUCKETS: usize = 40 * 8;
const NUM_HOURS: usize = 24;

/// `seed`: as `DistinctPages` has it. `most_pages`: what returns later counts as never asked for.
pub struct ReuseDistances {
    seed: u64,
    most_pages: u64,
    bound: u64,
    places: Vec<u64>,
    /// Pages by places, as sums of a binary tree (Fenwick).
    sums: Vec<u16>,
    /// Places by keys, from 1; 0 is free.
    slots: Vec<u16>,
    num_sampled: usize,
    hours: VecDeque<Hour>,
}

struct Hour {
    number: u64,
    num_asked: u64,
    /// Estimates, in pages: those that were asked for, and those that came back, by their distances.
    sampled: f64,
    again: Vec<f32>,
}

impl ReuseDistances {
    #[allow(clippy::cast_possible_truncation)] // at most ALL
    pub fn new(seed: u64, most_pages: u64) -> Self {
        let full_at = (most_pages / FULL_AT_PART).max(MOST_SAMPLED as u64);
        Self {
            seed,
            most_pages,
            // What is many is sampled thinly from the start: to note a page takes 0.1 us.
            bound: (u128::from(ALL) * MOST_SAMPLED as u128 / u128::from(full_at)) as u64,
            places: Vec::with_capacity(NUM_PLACES),
            sums: vec![0; NUM_PLACES + 1],
            slots: vec![0; NUM_SLOTS],
            num_sampled: 0,
            hours: VecDeque::new(),
        }
    }

    /// A prompt of these pages has come, from its first on. `hour`: now; it does not fall.
    #[allow(clippy::cast_precision_loss)] // counts
    pub fn asked(&mut self, numbers: &[u64], hour: u64) {
        let keys = self.sampled(numbers);
        let weight = ALL as f64 / self.bound as f64;
        let buckets: Vec<Option<usize>> = keys
            .iter()
            .map(|key| {
                Some(bucket_of(
                    weight * self.num_since(self.place_of(*key)?) as f64,
                ))
            })
            .collect();
        let now = self.hour(hour);
        now.num_asked += numbers.len() as u64;
        now.sampled += weight * keys.len() as f64;
        for bucket in buckets.into_iter().flatten() {
            #[allow(clippy::cast_possible_truncation)] // an estimate
            let more = weight as f32;
            now.again[bucket] += more;
        }
        for key in keys.iter().rev() {
            self.note(*key);
        }
    }

    /// The cache has these pages of one chain now. Where no prompt has named some, such as an answer's, they may be found
    /// from now on, and those before them stay as long.
    pub fn came(&mut self, numbers: &[u64]) {
        let keys = self.sampled(numbers);
        if keys.iter().any(|key| self.place_of(*key).is_none()) {
            for key in keys.iter().rev() {
                self.note(*key);
            }
        }
    }

    /// Of the pages that were asked for in the last day, the share that a cache of `num_pages` would have found.
    #[allow(clippy::cast_precision_loss)] // counts
    pub fn found_within(&self, num_pages: f64) -> f64 {
        let asked: f64 = self.hours.iter().map(|hour| hour.num_asked as f64).sum();
        if asked == 0.0 || num_pages < 1.0 {
            return 0.0;
        }
        let sampled: f64 = self.hours.iter().map(|hour| hour.sampled).sum();
        let position = position_of(num_pages - 0.5).min(NUM_BUCKETS as f64);
        let found: f64 = (0..NUM_BUCKETS)
            .map(|bucket| (position - bucket as f64).clamp(0.0, 1.0) * self.again(bucket))
            .sum();
        // What the sample has too few of, or too many, are pages that everybody asks for: they are found.
        ((found + asked - sampled) / asked).clamp(0.0, 1.0)
    }

    fn again(&self, bucket: usize) -> f64 {
        let counts = self.hours.iter().map(|hour| f64::from(hour.again[bucket]));
        counts.sum()
    }

    fn sampled(&self, numbers: &[u64]) -> Vec<u64> {
        let hashes = numbers.iter().map(|number| mixed(number ^ self.seed));
        hashes
            .filter(|hash| hash >> 32 < self.bound && *hash != 0)
            .collect()
    }

    fn hour(&mut self, number: u64) -> &mut Hour {
        if self.hours.back().is_none_or(|last| last.number < number) {
            self.hours.push_back(Hour {
                number,
                num_asked: 0,
                sampled: 0.0,
                again: vec![0.0; NUM_BUCKETS],
            });
            while self.hours[0].number + NUM_HOURS as u64 <= number {
                self.hours.pop_front();
            }
        }
        let last = self.hours.len() - 1;
        &mut self.hours[last]
    }

    // ---- places ----------------------------------------------------------------------------------------------------

    fn note(&mut self, key: u64) {
        if self.places.len() == NUM_PLACES || self.num_sampled == MOST_SAMPLED {
            self.rearrange();
        }
        if key >> 32 >= self.bound {
            return;
        }
        let slot = self.slot_of(key);
        match self.slots[slot] {
            0 => self.num_sampled += 1,
            place => {
                self.add(usize::from(place), u16::MAX);
                self.places[usize::from(place) - 1] = 0;
            }
        }
        self.places.push(key);
        self.add(self.places.len(), 1);
        self.slots[slot] = self.last_place();
    }

    #[allow(clippy::cast_possible_truncation)] // at most NUM_PLACES
    fn last_place(&self) -> u16 {
        self.places.len() as u16
    }

    /// Close up, drop what is further back than anybody asks, and make room in the sample.
    #[allow(clippy::cast_possible_truncation)] // less than all
    fn rearrange(&mut self) {
        let mut keys: Vec<u64> = self
            .places
            .iter()
            .copied()
            .filter(|key| *key != 0)
            .collect();
        let most = u128::from(self.most_pages) * u128::from(self.bound) / u128::from(ALL);
        let num_past = keys.len().saturating_sub(most as usize + 1);
        keys.drain(..num_past);
        while keys.len() == MOST_SAMPLED {
            self.bound = self.bound * KEPT_QUARTERS / 4;
            keys.retain(|key| key >> 32 < self.bound);
        }
        self.places.clear();
        self.sums.fill(0);
        self.slots.fill(0);
        self.num_sampled = keys.len();
        for key in keys {
            self.places.push(key);
            self.add(self.places.len(), 1);
            let slot = self.slot_of(key);
            self.slots[slot] = self.last_place();
        }
    }

    fn place_of(&self, key: u64) -> Option<usize> {
        match self.slots[self.slot_of(key)] {
            0 => None,
            place => Some(usize::from(place)),
        }
    }

    /// Where a key's place stands, or would. Keys leave with all others only, so none that was passed is free later.
    #[allow(clippy::cast_possible_truncation)] // any bits
    fn slot_of(&self, key: u64) -> usize {
        let mut slot = key as usize % NUM_SLOTS;
        loop {
            match self.slots[slot] {
                0 => return slot,
                place if self.places[usize::from(place) - 1] == key => return slot,
                _ => slot = (slot + 1) % NUM_SLOTS,
            }
        }
    }

    /// Pages whose last access was later than that of a place.
    fn num_since(&self, place: usize) -> usize {
        let mut up_to = 0;
        let mut at = place;
        while at > 0 {
            up_to += usize::from(self.sums[at]);
            at &= at - 1;
        }
        self.num_sampled - up_to
    }

    /// One page more at a place, or with -1, which is `u16::MAX`, one less.
    fn add(&mut self, place: usize, number: u16) {
        let mut at = place;
        while at < self.sums.len() {
            self.sums[at] = self.sums[at].wrapping_add(number);
            at += at & at.wrapping_neg();
        }
    }
}

fn position_of(distance: f64) -> f64 {
    (distance + 1.0).log2() * BUCKETS_PER_OCTAVE
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // from 0 on
fn bucket_of(distance: f64) -> usize {
    (position_of(distance) as usize).min(NUM_BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeded_rng::SeededRng;

    /// What a cache of this size finds of prompts, each `(first page, pages)`.
    fn exact(prompts: &[Vec<u64>], num_pages: usize) -> f64 {
        let mut cache: Vec<u64> = Vec::new();
        let (mut found, mut asked) = (0, 0);
        for prompt in prompts {
            asked += prompt.len();
            found += prompt.iter().filter(|page| cache.contains(page)).count();
            for page in prompt.iter().rev() {
                cache.retain(|one| one != page);
                cache.push(*page);
            }
            let num_past = cache.len().saturating_sub(num_pages);
            cache.drain(..num_past);
        }
        f64::from(found as u32) / f64::from(asked as u32)
    }

    /// Conversations that go on in any order, some more often than others.
    fn conversations(num_prompts: usize) -> Vec<Vec<u64>> {
        let mut rng = SeededRng::default();
        let mut lens = vec![4u64; 40];
        let turn = |_| {
            let which = rng.below(lens.len()).min(rng.below(lens.len()));
            lens[which] += 1 + rng.below(3) as u64;
            (0..lens[which])
                .map(|page| (which as u64) << 32 | page << 1)
                .collect()
        };
        (0..num_prompts).map(turn).collect()
    }

    #[test]
    fn small_traces_are_as_a_cache_would_find_them() {
        let prompts = conversations(200);
        let mut reuse = ReuseDistances::new(3, 1 << 14);
        for prompt in &prompts {
            reuse.asked(prompt, 1);
        }
        for num_pages in [1, 50, 200, 400, 1_000, 100_000] {
            let (exact, told) = (
                exact(&prompts, num_pages),
                reuse.found_within(num_pages as f64),
            );
            assert!(
                (exact - told).abs() < 0.03,
                "{num_pages} pages: {told}, not {exact}"
            );
        }
    }

    #[test]
    fn a_cycle_is_found_by_what_holds_it_and_by_nothing_less() {
        let mut reuse = ReuseDistances::new(11, 2_000_000);
        let page = |number: u64| mixed(number) & !1;
        for _ in 0..4 {
            for number in 0..200_000 {
                reuse.asked(&[page(number)], 1);
            }
        }
        assert!(reuse.num_sampled <= MOST_SAMPLED);
        assert!(reuse.found_within(150_000.0) < 0.1);
        assert!((reuse.found_within(250_000.0) - 0.75).abs() < 0.03);
    }

    #[test]
    fn what_is_further_back_than_anybody_asks_makes_no_room_scarce() {
        let mut reuse = ReuseDistances::new(1, 1_000);
        for number in 0..1_000_000u64 {
            reuse.asked(&[mixed(number)], 1);
        }
        assert_eq!(reuse.bound, ALL);
    }

    #[test]
    fn an_answer_that_is_asked_for_first_is_found() {
        let mut reuse = ReuseDistances::new(1, 1 << 14);
        reuse.asked(&[2, 4], 1);
        reuse.came(&[2, 4, 6, 8]);
        reuse.asked(&[2, 4, 6, 8], 1);
        assert!((reuse.found_within(100.0) - 4.0 / 6.0).abs() < 1e-6);
    }

    #[test]
    fn after_a_day_an_hour_counts_no_more() {
        let mut reuse = ReuseDistances::new(1, 1 << 14);
        reuse.asked(&[2, 4], 1);
        reuse.asked(&[2, 4], 1);
        reuse.asked(&[6], 1 + NUM_HOURS as u64);
        assert!(reuse.found_within(100.0).abs() < 1e-6);
    }
}
