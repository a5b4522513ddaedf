// SPDX-License-Identifier: Apache-2.0
//! How lately pages were asked for, and how often: their chance to be wanted again.
//!
//! A tree knows the age of a page as long as it holds it. What comes back, and what does not, shows after the page has
//! gone as often as before. So the last access of a page is remembered beyond its stay (`access_history`), and what
//! that access says is learnt from what comes back (`hazard_model`). A rank sees its own prompts, and reads of those of
//! its peers (`access_log`): what comes back to the node comes back here too, sooner or later. What a prompt in the
//! rank's own queue asks for is wanted for certain.
//!
//! Pages go by the numbers that `access_history::number_of` gives them.
//!
//! Invariants
//! * What is remembered is bounded, but for what waits: that is as much as the queue.
//! * A prompt teaches `LESSONS` times at most, however long it is.
//! * `num_waiting` counts, for each page, the prompts of `queued` that ask for it, whoever else does.
//!
//! States of a page: unknown -> once -> twice -> ... -> as often as accesses are counted; unknown once more when its
//! row goes to another page. States of a prompt: asked -> served.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use crate::access_history::{AccessHistory, NEVER, PageAccess};
use crate::hazard_model::{HazardModel, Seen};
use crate::seeded_rng::SeededRng;

const LESSONS: usize = 8;
const MOST_DRAWN_FROM: usize = 1 << 10;

/// Pages are drawn from the last new pages, as many as fill the pools so often.
const DRAWN_FROM_POOLS: usize = 16;

/// To draw a page that is still known, and not of the prompt that came.
const TRIES: usize = 4;

/// Ages are in pages: so many were asked for since.
pub struct Demand {
    num_frames: u64,
    accesses: AccessHistory,
    num_asked: u64,
    /// What was asked for before this was asked of other weights.
    changed_at: u64,
    hazard_model: HazardModel,
    seeded_rng: SeededRng,
    /// New pages, one in `pages_per_lot`, the latest ones.
    drawn_from: VecDeque<u64>,
    pages_per_lot: usize,
    next_lot: usize,
    queued: HashMap<String, Vec<u64>>,
    num_waiting: HashMap<u64, u32>,
}

impl Demand {
    /// `num_frames`: of the pools whose prompts are known here.
    pub fn new(num_frames: usize) -> Self {
        let accesses = AccessHistory::new(num_frames);
        let reach = DRAWN_FROM_POOLS
            .saturating_mul(num_frames)
            .min(accesses.num_rows());
        Self {
            num_frames: num_frames as u64,
            accesses,
            num_asked: 0,
            changed_at: NEVER.asked_at + 1,
            hazard_model: HazardModel::default(),
            seeded_rng: SeededRng::default(),
            drawn_from: VecDeque::with_capacity(MOST_DRAWN_FROM),
            pages_per_lot: reach.div_ceil(MOST_DRAWN_FROM),
            next_lot: 0,
            queued: HashMap::new(),
            num_waiting: HashMap::new(),
        }
    }

    /// What has been learnt.
    pub fn hazard_model(&self) -> &HazardModel {
        &self.hazard_model
    }

    /// A prompt of these pages has come, from its first on, and waits here until the one of its name is `served`. How many of its first
    /// pages were asked for before, since `weights_changed`.
    pub fn asked(&mut self, numbers: Vec<u64>, prompt: &str) -> usize {
        let num_again = self.accesses.num_known_since(self.changed_at, &numbers);
        self.peer_access(&numbers);
        self.served(prompt);
        for number in &numbers {
            *self.num_waiting.entry(*number).or_insert(0) += 1;
        }
        self.queued.insert(prompt.to_owned(), numbers);
        num_again
    }

    /// What was asked for before was asked of other weights.
    pub fn weights_changed(&mut self) {
        self.changed_at = self.num_asked + 1;
    }

    /// A prompt of these pages has come to a peer, or to this rank.
    pub fn peer_access(&mut self, numbers: &[u64]) {
        let num_again = self.accesses.num_known(numbers);
        let num_lessons = LESSONS.min(num_again);
        let lesson = |turn: usize| numbers[(2 * turn + 1) * num_again / (2 * num_lessons)];
        let came: Vec<PageAccess> = (0..num_lessons)
            .map(|turn| self.accesses.last(lesson(turn)))
            .collect();
        let asked_before = self.num_asked;
        self.num_asked += numbers.len() as u64;
        self.accesses.again(&numbers[..num_again], self.num_asked);
        self.note_new(&numbers[num_again..]);
        for wanted in came {
            let other = self.drawn_by_lot();
            if let (Some(other), true) = (other, wanted.asked_at > 0) {
                let [wanted, other] = [wanted, other].map(|access| self.seen(access, asked_before));
                self.hazard_model.came(wanted, other);
            }
        }
    }

    /// The prompt waits no longer, if it did: the tree holds its pages for it, or it has gone.
    pub fn served(&mut self, prompt: &str) {
        for number in self.queued.remove(prompt).unwrap_or_default() {
            if let Entry::Occupied(mut waiting) = self.num_waiting.entry(number) {
                *waiting.get_mut() -= 1;
                if *waiting.get() == 0 {
                    waiting.remove();
                }
            }
        }
    }

    /// The tree has these pages of one chain now. Those that no prompt has named, such as an answer's, begin their age.
    pub fn came(&mut self, numbers: &[u64]) {
        let num_known = self.accesses.num_known(numbers);
        self.note_new(&numbers[num_known..]);
    }

    /// Of the page to be wanted, as against other pages; infinite while a prompt waits here that asks for it.
    pub fn chance(&self, number: u64) -> f64 {
        if self.num_waiting.contains_key(&number) {
            return f64::INFINITY;
        }
        self.hazard_model
            .of(self.seen(self.accesses.last(number), self.num_asked))
    }

    /// Pages that were asked for since the page was, and how often it was, as far as that is counted.
    pub fn age_and_accesses(&self, number: u64) -> (u64, u64) {
        let last = self.accesses.last(number);
        (self.num_asked - last.asked_at, last.num_accesses)
    }

    #[allow(clippy::cast_precision_loss)] // an age of 2^53 pages counts as any that is long ago
    fn seen(&self, access: PageAccess, num_asked: u64) -> Seen {
        Seen {
            age_pools: num_asked.saturating_sub(access.asked_at) as f64 / self.num_frames as f64,
            num_accesses: access.num_accesses,
        }
    }

    /// The last access of a page that the last prompt did not name.
    fn drawn_by_lot(&mut self) -> Option<PageAccess> {
        for _ in 0..TRIES {
            let number = self
                .drawn_from
                .get(self.seeded_rng.below(self.drawn_from.len()))?;
            let access = self.accesses.last(*number);
            if 0 < access.asked_at && access.asked_at < self.num_asked {
                return Some(access);
            }
        }
        None
    }

    fn note_new(&mut self, numbers: &[u64]) {
        self.accesses.first(numbers, self.num_asked);
        let mut place = self.next_lot;
        while place < numbers.len() {
            if self.drawn_from.len() == MOST_DRAWN_FROM {
                self.drawn_from.pop_front();
            }
            self.drawn_from.push_back(numbers[place]);
            place += self.pages_per_lot;
        }
        self.next_lot = place - numbers.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access_history::{LEAST_ROWS, MOST_ROWS};

    fn prompt(number: u64, num_pages: u64) -> Vec<u64> {
        let page = |place: u64| (number << 20 | place << 4 | 2).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (0..num_pages).map(page).collect()
    }

    #[test]
    fn drawn_pages_reach_back_far_enough_whatever_the_size_of_the_pools() {
        for num_frames in [1, 400, 10_000_000, usize::MAX] {
            let demand = Demand::new(num_frames);
            let reach = DRAWN_FROM_POOLS.saturating_mul(num_frames);
            let num_rows = demand.accesses.num_rows();
            assert!((LEAST_ROWS..=MOST_ROWS).contains(&num_rows));
            assert!(MOST_DRAWN_FROM * demand.pages_per_lot >= reach.min(num_rows));
        }
    }

    #[test]
    fn what_was_asked_for_before_is_told_from_the_first_page_on() {
        let mut demand = Demand::new(640);
        assert_eq!(demand.asked(prompt(1, 8), "one"), 0);
        assert_eq!(demand.asked(prompt(1, 12), "two"), 8);
        demand.came(&prompt(2, 4));
        assert_eq!(demand.asked(prompt(2, 4), "three"), 4);
        demand.peer_access(&prompt(3, 4));
        assert_eq!(demand.asked(prompt(3, 4), "four"), 4);
    }

    #[test]
    fn what_was_asked_of_other_weights_was_not_asked_before() {
        let mut demand = Demand::new(640);
        demand.asked(prompt(1, 8), "one");
        demand.weights_changed();
        assert_eq!(demand.asked(prompt(1, 4), "two"), 0);
        assert_eq!(demand.asked(prompt(1, 8), "three"), 4);
        assert_eq!(demand.age_and_accesses(prompt(1, 8)[7]), (0, 2));
    }

    #[test]
    fn one_new_page_in_so_many_is_drawn_from_across_prompts() {
        let mut demand = Demand::new(640);
        for number in 0..300 {
            demand.peer_access(&prompt(number, 7));
        }
        assert_eq!(demand.pages_per_lot, 10);
        assert_eq!(demand.drawn_from.len(), 210);
    }

    #[test]
    fn no_more_than_the_latest_new_pages_are_drawn_from() {
        let mut demand = Demand::new(1);
        for number in 0..1_000 {
            demand.peer_access(&prompt(number, 5));
        }
        assert_eq!(demand.drawn_from.len(), MOST_DRAWN_FROM);
        assert_eq!(demand.drawn_from.back(), prompt(999, 5).last());
    }

    #[test]
    fn nothing_is_left_of_prompts_that_were_served() {
        let mut demand = Demand::new(400);
        demand.asked(prompt(0, 10), "one");
        demand.asked(prompt(0, 10), "two");
        demand.peer_access(&prompt(0, 10));
        demand.served("two");
        assert!(demand.chance(prompt(0, 10)[5]).is_infinite());
        demand.served("one");
        assert!(demand.num_waiting.is_empty() && demand.queued.is_empty());
    }
}
