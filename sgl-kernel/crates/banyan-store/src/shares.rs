// SPDX-License-Identifier: Apache-2.0
//! A share of a shelf for each owner of pages: whose pages make room for whose. Pure.
//!
//! Invariants
//! * A page that is to come takes the place of one of an owner above its share, if there is one that can go; else of any, if its own
//!   owner is below its share and stays there; else of one of its own.
//! * `NOBODY` has no share: what nobody owns is always above it.

/// Who a page is counted for, by number. The numbers are the caller's, in memory only: after a restart what lies there is nobody's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner(u16);

impl Owner {
    pub const NOBODY: Self = Self(0);

    /// By a small number; those that are too large are nobody.
    pub fn of(number: usize) -> Self {
        Self(u16::try_from(number).unwrap_or(0))
    }

    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// How many places each owner uses.
#[derive(Clone, Debug, Default)]
pub struct Used {
    by_owner: Vec<usize>,
}

impl Used {
    pub fn add(&mut self, owner: Owner) {
        if self.by_owner.len() <= owner.index() {
            self.by_owner.resize(owner.index() + 1, 0);
        }
        self.by_owner[owner.index()] += 1;
    }

    pub fn take(&mut self, owner: Owner) {
        self.by_owner[owner.index()] -= 1;
    }

    pub fn of(&self, owner: Owner) -> usize {
        self.by_owner.get(owner.index()).copied().unwrap_or(0)
    }
}

/// Of a shelf, for each owner, while others want room.
#[derive(Clone, Copy, Debug)]
pub struct Share(pub f64);

impl Share {
    fn most(self, owner: Owner, num_places: usize) -> usize {
        if owner == Owner::NOBODY {
            0
        } else {
            (self.0 * num_places as f64) as usize
        }
    }

    /// Whether an owner has more than its share.
    pub fn is_above(self, owner: Owner, used: &Used, num_places: usize) -> bool {
        used.of(owner) > self.most(owner, num_places)
    }

    /// Whether an owner will have no more than its share when it has one page more.
    pub fn has_room(self, owner: Owner, used: &Used, num_places: usize) -> bool {
        used.of(owner) < self.most(owner, num_places)
    }
}
