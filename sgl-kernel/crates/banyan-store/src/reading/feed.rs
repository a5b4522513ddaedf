// SPDX-License-Identifier: Apache-2.0
//! A read that somebody else carries out: pages that come from elsewhere, followed like those of the store.
//!
//! Invariants
//! * Who feeds writes to the memory until it calls `end`, and not afterwards.
//! * A feed that is dropped ends: what has not come by then has failed, and nobody waits for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use super::ticket::{ReadTicket, Reason};

pub struct Feed {
    pub ticket: Arc<ReadTicket>,
    num_layers: usize,
    num_landed: AtomicUsize,
    started: Instant,
}

impl Feed {
    pub fn new(num_pages: usize, num_layers: usize) -> Self {
        Self {
            ticket: Arc::new(ReadTicket::new(num_pages, num_layers)),
            num_layers,
            num_landed: AtomicUsize::new(0),
            started: Instant::now(),
        }
    }

    /// Whether its caller has not given it up.
    pub fn is_wanted(&self) -> bool {
        !self.ticket.is_cancelled.load(Ordering::Relaxed) && !self.ticket.is_late()
    }

    /// Who brings the pages has not answered in time: all of them have failed, and nobody waits any longer.
    pub fn be_late(&self) {
        self.ticket.be_late();
    }

    /// One more layer is in memory, `num_bytes` of it; `failed` names the pages that are not what they should be.
    pub fn land(&self, num_bytes: u64, failed: &[usize]) {
        self.ticket.bytes.fetch_add(num_bytes, Ordering::Relaxed);
        self.ticket.fail(failed.iter().copied(), Reason::Checksum);
        let num_landed = self.num_landed.fetch_add(1, Ordering::Relaxed) + 1;
        self.ticket.progress.advance_to(num_landed);
    }

    /// Nothing is written to the memory any more. Where layers are missing, all pages have failed.
    pub fn end(&self) {
        if self.ticket.progress.has_ended() {
            return;
        }
        if self.num_landed.load(Ordering::Relaxed) < self.num_layers {
            self.ticket.fail_all(Reason::Gone);
        }
        let elapsed = self.started.elapsed().as_nanos() as u64;
        self.ticket.elapsed_ns.store(elapsed, Ordering::Relaxed);
        self.ticket.progress.end();
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn feed_when_every_layer_has_landed_then_only_the_pages_that_were_wrong_have_failed() {
        let feed = Feed::new(3, 2);
        feed.land(10, &[]);
        assert_eq!(feed.ticket.progress.num_done(), 1);
        feed.land(10, &[2, 2]);
        feed.end();
        assert_eq!(feed.ticket.finish(), [(2, Reason::Checksum)]);
        assert_eq!(feed.ticket.bytes_read(), 20);
    }

    #[test]
    fn feed_when_dropped_half_way_then_all_pages_have_failed_and_nobody_waits() {
        let feed = Feed::new(2, 2);
        let ticket = feed.ticket.clone();
        feed.land(10, &[1]);
        drop(feed);
        let failed = [(0, Reason::Gone), (1, Reason::Checksum)];
        assert_eq!(ticket.finish(), failed);
    }

    #[test]
    fn feed_when_a_million_pages_fail_then_each_is_named_once_and_looked_for_once() {
        let num_pages = 1 << 20;
        let feed = Feed::new(num_pages, 3);
        let wrong: Vec<usize> = (0..num_pages).step_by(2).collect();
        feed.land(10, &wrong);
        feed.land(10, &wrong);
        feed.end();
        let failed = feed.ticket.finish();
        let named = |why| failed.iter().filter(|(_, reason)| *reason == why).count();
        assert_eq!(failed.len(), num_pages);
        assert_eq!(named(Reason::Checksum), num_pages / 2);
        assert_eq!(named(Reason::Gone), num_pages / 2);
    }

    #[test]
    fn failed_pages_when_the_last_layer_is_through_then_the_end_is_not_waited_for() {
        let feed = Feed::new(3, 2);
        feed.land(10, &[1]);
        feed.land(10, &[0]);
        assert_eq!(feed.ticket.failed_pages(), [0, 1]);
        assert!(!feed.ticket.progress.has_ended());
    }

    #[test]
    fn feed_when_late_then_waiters_go_on_and_the_end_comes_with_the_answer() {
        let feed = Feed::new(2, 2);
        feed.land(10, &[1]);
        feed.be_late();
        assert_eq!(feed.ticket.progress.num_done(), 2);
        assert!(feed.ticket.is_late() && !feed.is_wanted() && !feed.ticket.progress.has_ended());
        feed.end();
        let failed = [(0, Reason::Late), (1, Reason::Checksum)];
        assert_eq!(feed.ticket.finish(), failed);
    }

    #[test]
    fn feed_when_its_reader_gives_up_then_it_is_told() {
        let feed = Arc::new(Feed::new(1, 1));
        let ticket = feed.ticket.clone();
        let reader = std::thread::spawn(move || ticket.cancel());
        while feed.is_wanted() {
            std::thread::yield_now();
        }
        feed.end();
        reader.join().unwrap();
    }
}
