// SPDX-License-Identifier: Apache-2.0
//! A drive that does not answer takes nobody with it: who waits for a read is let go, and nobody is sent after.
//!
//! A transfer that is under way for longer than the limit makes its read late. A late read fails and releases its waiters; it ends,
//! and its frames are the caller's again, only when the device has answered. While any transfer is late, lookups find nothing and
//! nothing is taken for writing.

use std::time::Instant;

use super::Engine;

impl Engine {
    pub(super) fn watch_for_stalls(&mut self) {
        let now = Instant::now();
        let is_late = |started: Instant| now.duration_since(started) >= self.stall_after;
        let late: Vec<usize> = self
            .transfers
            .iter()
            .flatten()
            .filter(|transfer| is_late(transfer.started))
            .map(|transfer| transfer.job)
            .collect();
        for job in &late {
            if let Some(job) = &mut self.jobs[*job] {
                job.be_late();
            }
        }
        if late.is_empty() == self.stalled_since.is_none() {
            return;
        }
        self.shared.lock().set_stalled(!late.is_empty());
        self.stalled_since = match self.stalled_since {
            None => {
                let (count, limit_s) = (late.len(), self.stall_after.as_secs_f64());
                eprintln!(
                    "banyan: {count} reads of the store have had no answer for {limit_s:.1} s: it is left alone until they have"
                );
                Some(now)
            }
            Some(since) => {
                let silent_s = (now.duration_since(since) + self.stall_after).as_secs_f64();
                eprintln!("banyan: the store answers again after {silent_s:.1} s");
                None
            }
        };
    }
}
