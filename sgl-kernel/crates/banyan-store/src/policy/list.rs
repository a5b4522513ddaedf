// SPDX-License-Identifier: Apache-2.0
//! A queue of places with removal from the middle: links in two arrays, no allocation per place.

use crate::geometry::Place;

const END: u32 = u32::MAX;
const OUT: u32 = u32::MAX - 1;

/// Old end first.
#[derive(Debug)]
pub struct List {
    older: Vec<u32>,
    younger: Vec<u32>,
    oldest: u32,
    youngest: u32,
    len: usize,
}

impl Default for List {
    fn default() -> Self {
        Self {
            older: Vec::new(),
            younger: Vec::new(),
            oldest: END,
            youngest: END,
            len: 0,
        }
    }
}

impl List {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn contains(&self, place: Place) -> bool {
        self.older
            .get(place as usize)
            .is_some_and(|link| *link != OUT)
    }

    pub fn push_youngest(&mut self, place: Place) {
        let index = place as usize;
        if self.older.len() <= index {
            self.older.resize(index + 1, OUT);
            self.younger.resize(index + 1, OUT);
        }
        debug_assert!(!self.contains(place));
        self.older[index] = self.youngest;
        self.younger[index] = END;
        match self.youngest {
            END => self.oldest = place,
            youngest => self.younger[youngest as usize] = place,
        }
        self.youngest = place;
        self.len += 1;
    }

    pub fn oldest(&self) -> Option<Place> {
        (self.oldest != END).then_some(self.oldest)
    }

    /// Whether it was in.
    pub fn remove(&mut self, place: Place) -> bool {
        if !self.contains(place) {
            return false;
        }
        let index = place as usize;
        let (older, younger) = (self.older[index], self.younger[index]);
        match older {
            END => self.oldest = younger,
            older => self.younger[older as usize] = younger,
        }
        match younger {
            END => self.youngest = older,
            younger => self.older[younger as usize] = older,
        }
        self.older[index] = OUT;
        self.younger[index] = OUT;
        self.len -= 1;
        true
    }

    pub fn make_youngest(&mut self, place: Place) {
        if self.remove(place) {
            self.push_youngest(place);
        }
    }
}
