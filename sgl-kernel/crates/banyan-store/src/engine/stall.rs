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
        if late.is_empty() != self.stalled_since.is_none() {
            self.turn(late.len(), now);
        }
        // Only now: whoever is let go looks elsewhere at once, and is to find nothing here.
        for job in late {
            if let Some(job) = &mut self.jobs[job] {
                job.be_late();
            }
        }
    }

    /// From answering to not, or back.
    fn turn(&mut self, num_late: usize, now: Instant) {
        self.shared.lock().set_stalled(num_late > 0);
        self.stalled_since = match self.stalled_since {
            None => {
                let limit_s = self.stall_after.as_secs_f64();
                eprintln!(
                    "banyan: {num_late} reads of the store have had no answer for {limit_s:.1} s: it is left alone until they have"
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
