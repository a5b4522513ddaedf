// SPDX-License-Identifier: Apache-2.0
//! Queues of places with removal from the middle: links in two arrays for all queues, no allocation per place.

use crate::geometry::Place;

const END: u32 = u32::MAX;
const OUT: u32 = u32::MAX - 1;

/// Of one queue, old end first. Its links are those of all.
#[derive(Clone, Debug)]
pub struct Ends {
    oldest: u32,
    youngest: u32,
    len: usize,
}

impl Default for Ends {
    fn default() -> Self {
        Self {
            oldest: END,
            youngest: END,
            len: 0,
        }
    }
}

impl Ends {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn oldest(&self) -> Option<Place> {
        (self.oldest != END).then_some(self.oldest)
    }
}

/// A place is in one queue at most; the caller knows in which.
#[derive(Debug, Default)]
pub struct Links {
    older: Vec<u32>,
    younger: Vec<u32>,
}

impl Links {
    pub fn contains(&self, place: Place) -> bool {
        self.older
            .get(place as usize)
            .is_some_and(|link| *link != OUT)
    }

    pub fn push_youngest(&mut self, ends: &mut Ends, place: Place) {
        let index = place as usize;
        if self.older.len() <= index {
            self.older.resize(index + 1, OUT);
            self.younger.resize(index + 1, OUT);
        }
        debug_assert!(!self.contains(place));
        self.older[index] = ends.youngest;
        self.younger[index] = END;
        match ends.youngest {
            END => ends.oldest = place,
            youngest => self.younger[youngest as usize] = place,
        }
        ends.youngest = place;
        ends.len += 1;
    }

    /// Whether it was in.
    pub fn remove(&mut self, ends: &mut Ends, place: Place) -> bool {
        if !self.contains(place) {
            return false;
        }
        let index = place as usize;
        let (older, younger) = (self.older[index], self.younger[index]);
        match older {
            END => ends.oldest = younger,
            older => self.younger[older as usize] = younger,
        }
        match younger {
            END => ends.youngest = older,
            younger => self.older[younger as usize] = older,
        }
        self.older[index] = OUT;
        self.younger[index] = OUT;
        ends.len -= 1;
        true
    }
}
