// SPDX-License-Identifier: Apache-2.0
//! What this writer's own shelf holds, for those who tell others of it. Each record is on one shelf, so that of several writers each
//! page is told by one.

use banyan_shm::frame::Key;

use super::Store;
use crate::catalog::Moved;
use crate::error::Result;
use crate::geometry::Place;

impl Store {
    /// Tells this store from any other. Reads a small file.
    pub fn identity(&self) -> Result<u64> {
        self.shared.stripe.identity()
    }

    /// What has come to the own shelf and gone from it since the last call, of `most` keys. The first call begins.
    pub fn moved(&self, most: usize) -> Moved {
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        match &state.own {
            Some(own) => state.catalog.moved(own.index, most),
            None => Moved::default(),
        }
    }

    /// What lies in `count` places of the own shelf from `first` on. None behind the last place.
    pub fn own_keys(&self, first: Place, count: usize) -> Option<Vec<Key>> {
        let state = self.shared.lock();
        let own = state.own.as_ref()?;
        state.catalog.keys_at(own.index, first, count)
    }
}
