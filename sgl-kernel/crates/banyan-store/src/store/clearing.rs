// SPDX-License-Identifier: Apache-2.0
//! A writer takes back everything that it has stored.

use std::io;
use std::time::Instant;

use super::Store;
use crate::error::{Result, StoreError};

impl Store {
    /// Withdraws every record of this writer's shelf, whatever stands behind it and whoever reads it; how many. Back-logged pages fail.
    ///
    /// When it returns, nobody on this node finds them, and no restart brings them back. What others have stored behind them stays,
    /// and is found again when somebody stores the pages in between. An error when the drive has not taken it within `stall_after`:
    /// then this writer finds them no more, others and a restart may until it has.
    pub fn clear(&self) -> Result<usize> {
        self.check_open()?;
        let deadline = Instant::now() + self.stall_after;
        let mut state = self.shared.lock();
        let lost = state.fail_queue();
        state.begin_drain();
        self.shared.wake();
        // What is going down cannot be stopped: it is stored, and then goes with the rest.
        let mut state = self.drained_until(state, deadline);
        let num_cleared = state.clear();
        self.shared.wake();
        let mut state = self.drained_until(state, deadline);
        state.end_drain();
        let is_durable = state.is_drained();
        // Until they have looked, others find their own pages only: they are told where there is something to look at.
        let is_to_be_told = is_durable && std::mem::take(&mut state.has_untold_clear);
        drop(state);
        for page in lost {
            self.shared.release_claim(&page.namespace, &page.key);
        }
        if !is_durable {
            let doing = "cannot clear the store: its manifest has not been written";
            return Err(StoreError::os(doing, io::ErrorKind::TimedOut.into()));
        }
        if is_to_be_told {
            self.shared.announce_clear();
        }
        // So that also what others have cleared before is gone.
        self.take_news();
        Ok(num_cleared)
    }
}
