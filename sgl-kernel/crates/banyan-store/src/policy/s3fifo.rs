// SPDX-License-Identifier: Apache-2.0
//! S3-FIFO (Yang et al., SOSP 2023): a small queue on probation, a main queue, and a memory of keys that left probation unused.
//!
//! A conversation that is never taken up again passes through the small queue only, and does not push out what is used again and again.

use std::collections::VecDeque;

use banyan_shm::frame::Key;
use hashbrown::HashSet;

use super::list::List;
use super::{Policy, Verdict};
use crate::catalog::KeyHash;
use crate::geometry::Place;

/// The small queue's part of all records.
const SMALL_PART: usize = 10;
const MAX_FREQUENCY: u8 = 3;
/// Hits on probation that earn a place in the main queue.
const PROMOTED_AT: u8 = 2;

#[derive(Default)]
pub struct S3Fifo {
    small: List,
    main: List,
    frequency: Vec<u8>,
    keys: Vec<u64>,
    ghosts: HashSet<u64, KeyHash>,
    ghost_order: VecDeque<u64>,
}

impl S3Fifo {
    fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    fn remember(&mut self, key: u64) {
        if self.ghosts.insert(key) {
            self.ghost_order.push_back(key);
        }
        // As many as the main queue holds.
        while self.ghost_order.len() > self.main.len().max(self.len() / 2).max(1) {
            if let Some(oldest) = self.ghost_order.pop_front() {
                self.ghosts.remove(&oldest);
            }
        }
    }

    fn evict_small(&mut self, judge: &mut dyn FnMut(Place) -> Verdict) -> Option<Place> {
        for _ in 0..self.small.len() {
            let place = self.small.oldest()?;
            if self.frequency[place as usize] >= PROMOTED_AT {
                self.small.remove(place);
                self.frequency[place as usize] = 0;
                self.main.push_youngest(place);
            } else if judge(place) == Verdict::Stays {
                self.small.make_youngest(place);
            } else {
                self.small.remove(place);
                self.remember(self.keys[place as usize]);
                return Some(place);
            }
        }
        None
    }

    fn evict_main(&mut self, judge: &mut dyn FnMut(Place) -> Verdict) -> Option<Place> {
        // Every lap takes one from each frequency: after so many, only what stays is left.
        for _ in 0..self.main.len() * (MAX_FREQUENCY as usize + 1) {
            let place = self.main.oldest()?;
            let frequency = &mut self.frequency[place as usize];
            if *frequency > 0 {
                *frequency -= 1;
                self.main.make_youngest(place);
            } else if judge(place) == Verdict::Stays {
                self.main.make_youngest(place);
            } else {
                self.main.remove(place);
                return Some(place);
            }
        }
        None
    }
}

impl Policy for S3Fifo {
    fn insert(&mut self, place: Place, key: &Key) {
        let index = place as usize;
        if self.frequency.len() <= index {
            self.frequency.resize(index + 1, 0);
            self.keys.resize(index + 1, 0);
        }
        self.frequency[index] = 0;
        self.keys[index] = key[0];
        if self.ghosts.remove(&key[0]) {
            self.main.push_youngest(place);
        } else {
            self.small.push_youngest(place);
        }
    }

    fn touch(&mut self, place: Place) {
        if let Some(frequency) = self.frequency.get_mut(place as usize) {
            *frequency = (*frequency + 1).min(MAX_FREQUENCY);
        }
    }

    fn remove(&mut self, place: Place) {
        if !self.small.remove(place) {
            self.main.remove(place);
        }
    }

    fn evict(&mut self, judge: &mut dyn FnMut(Place) -> Verdict) -> Option<Place> {
        if self.small.len() * SMALL_PART >= self.len() {
            self.evict_small(judge).or_else(|| self.evict_main(judge))
        } else {
            self.evict_main(judge).or_else(|| self.evict_small(judge))
        }
    }
}
