// SPDX-License-Identifier: Apache-2.0
//! A drive that does not answer takes nobody with it: who waits for a read is let go, and nobody is sent after.
//!
//! Invariants
//! * The clock is a thread of its own, and touches no file: whatever the others wait for, it goes on.
//! * A read is late when one of its transfers has been under way for longer than the limit, or the I/O thread has not come round for so
//!   long. While one is late, so is every other that has waited for so long: the transfers that hang may have taken all the depth.
//! * A late read fails and releases its waiters; it ends, and its frames are the caller's again, only when the device has answered.
//! * While any read is late, or writes wait for an I/O thread that does not come round, lookups find nothing and nothing is taken.
//! * A read that has only to hear of other writers before it ends does not wait for that longer than the limit.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::reading::ReadTicket;
use crate::shared::Shared;

/// Looks within one limit.
const LOOKS: u32 = 8;
const MOST_OFTEN: Duration = Duration::from_millis(5);
const LEAST_OFTEN: Duration = Duration::from_secs(1);

type Since = (Instant, Arc<ReadTicket>);

/// What the clock looks at. The I/O thread and callers of reads write it down.
pub struct Watched {
    /// When the I/O thread last came round.
    turned: Instant,
    /// Transfers that the device has, in the I/O thread's slots.
    transfers: Vec<Option<Since>>,
    /// Reads since they were asked for, until they have ended.
    reads: Vec<Since>,
    is_closing: bool,
}

/// Where the clock and the threads that it watches meet.
#[derive(Default)]
pub struct Watch {
    watched: Mutex<Watched>,
    closing: Condvar,
}

impl Watch {
    pub fn lock(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for so long, or until the clock is to stop: then true.
    pub fn wait_for_closing(&self, pause: Duration) -> bool {
        let is_open = |watched: &mut Watched| !watched.is_closing;
        let waited = self.closing.wait_timeout_while(self.lock(), pause, is_open);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_closing
    }

    pub fn close(&self) {
        self.lock().is_closing = true;
        self.closing.notify_all();
    }
}

impl Default for Watched {
    fn default() -> Self {
        Self {
            turned: Instant::now(),
            transfers: Vec::new(),
            reads: Vec::new(),
            is_closing: false,
        }
    }
}

impl Watched {
    pub fn turn(&mut self) {
        self.turned = Instant::now();
    }

    pub fn asked(&mut self, ticket: Arc<ReadTicket>) {
        self.reads.push((Instant::now(), ticket));
    }

    pub fn starts(&mut self, slot: usize, ticket: Arc<ReadTicket>) {
        if self.transfers.len() <= slot {
            self.transfers.resize_with(slot + 1, || None);
        }
        self.transfers[slot] = Some((Instant::now(), ticket));
    }

    pub fn landed(&mut self, slot: usize) {
        self.transfers[slot] = None;
    }

    /// The reads that are late now.
    fn late(&mut self, now: Instant, limit: Duration) -> Vec<Arc<ReadTicket>> {
        self.reads
            .retain(|(_, ticket)| !ticket.progress.has_ended());
        let is_late = |since: &Instant| now.saturating_duration_since(*since) >= limit;
        let transfers = self.transfers.iter().flatten();
        let mut late: Vec<Arc<ReadTicket>> = transfers
            .filter(|(since, _)| is_late(since))
            .map(|(_, ticket)| ticket.clone())
            .collect();
        let hangs = !late.is_empty();
        let served = |since: Instant| if hangs { since } else { self.turned.max(since) };
        let waiting = self.reads.iter();
        let unserved = waiting.filter(|(since, _)| is_late(&served(*since)));
        late.extend(unserved.map(|(_, ticket)| ticket.clone()));
        late
    }
}

pub struct Clock {
    shared: Arc<Shared>,
    limit: Duration,
    stalled_since: Option<Instant>,
    /// Since when there has been something to write.
    writing_since: Option<Instant>,
}

impl Clock {
    pub fn new(shared: Arc<Shared>, limit: Duration) -> Self {
        Self {
            shared,
            limit,
            stalled_since: None,
            writing_since: None,
        }
    }

    pub fn run(mut self) {
        let pause = (self.limit / LOOKS).clamp(MOST_OFTEN, LEAST_OFTEN);
        while !self.shared.watch.wait_for_closing(pause) {
            self.look(Instant::now());
        }
    }

    fn look(&mut self, now: Instant) {
        // First: what has only to hear of other writers is no sign of the drive's.
        for job in self
            .shared
            .refresh_requests
            .take_doubted(|since| now.saturating_duration_since(since) >= self.limit)
        {
            self.shared.end_read(job);
        }
        let (late, turned) = {
            let mut watched = self.shared.watch.lock();
            (watched.late(now, self.limit), watched.turned)
        };
        let is_drained = self.shared.lock().is_drained();
        self.writing_since = (!is_drained).then(|| self.writing_since.unwrap_or(now));
        let is_stuck = self
            .writing_since
            .is_some_and(|since| now.saturating_duration_since(since.max(turned)) >= self.limit);
        let is_stalled = is_stuck || !late.is_empty();
        if is_stalled != self.stalled_since.is_some() {
            self.turn(late.len(), now);
        }
        // Only now: whoever is let go looks elsewhere at once, and is to find nothing here.
        for ticket in late {
            ticket.be_late();
        }
    }

    /// From answering to not, or back.
    fn turn(&mut self, num_late: usize, now: Instant) {
        let limit_s = self.limit.as_secs_f64();
        self.shared.lock().set_stalled(self.stalled_since.is_none());
        self.stalled_since = match self.stalled_since {
            None => {
                banyan_shm::say!(
                    "banyan: the store's drive has not answered for {limit_s:.1} s ({num_late} transfers of reads wait): it is left alone \
                     until it does"
                );
                Some(now)
            }
            Some(since) => {
                let silent_s = now.saturating_duration_since(since).as_secs_f64() + limit_s;
                banyan_shm::say!("banyan: the store answers again after {silent_s:.1} s");
                None
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Hit;
    use crate::directory::Stripe;
    use crate::geometry::{Geometry, Segmenting};
    use crate::reading::{ReadJob, Reason};
    use crate::state::State;
    use crate::testing::Scratch;
    use banyan_shm::memory::SharedMemory;

    const LIMIT: Duration = Duration::from_secs(10);

    fn ticket() -> Arc<ReadTicket> {
        Arc::new(ReadTicket::new(1, 1))
    }

    #[test]
    fn reads_when_their_turn_has_not_come_then_late_only_if_the_thread_does_not_come_round() {
        let mut watched = Watched::default();
        watched.asked(ticket());
        let start = watched.reads[0].0;
        assert!(watched.late(start + LIMIT / 2, LIMIT).is_empty());
        assert_eq!(watched.late(start + LIMIT, LIMIT).len(), 1);
        watched.turned = start + LIMIT;
        assert!(watched.late(start + LIMIT + LIMIT / 2, LIMIT).is_empty());
    }

    #[test]
    fn read_when_it_was_asked_for_after_a_long_sleep_then_its_own_time_counts() {
        let mut watched = Watched::default();
        watched.asked(ticket());
        let asked = watched.reads[0].0;
        // The thread slept for a minute, as it may without work.
        watched.turned = asked.checked_sub(LIMIT * 6).unwrap_or(asked);
        assert!(watched.late(asked + LIMIT / 2, LIMIT).is_empty());
    }

    #[test]
    fn transfer_when_it_takes_too_long_then_its_read_is_late_though_the_thread_comes_round() {
        let mut watched = Watched::default();
        watched.starts(3, ticket());
        let started = watched.transfers[3].as_ref().unwrap().0;
        watched.turned = started + LIMIT;
        assert_eq!(watched.late(started + LIMIT, LIMIT).len(), 1);
        watched.landed(3);
        assert!(watched.late(started + LIMIT, LIMIT).is_empty());
    }

    #[test]
    fn reads_when_transfers_that_hang_may_have_the_depth_then_late_in_their_own_time_though_the_thread_comes_round()
     {
        let mut watched = Watched::default();
        watched.starts(0, ticket());
        let started = watched.transfers[0].as_ref().unwrap().0;
        watched.asked(ticket());
        watched.reads[0].0 = started + LIMIT / 2;
        watched.turned = started + LIMIT * 2;
        assert_eq!(watched.late(started + LIMIT, LIMIT).len(), 1);
        assert_eq!(watched.late(started + LIMIT * 3 / 2, LIMIT).len(), 2);
    }

    #[test]
    fn read_when_others_manifests_cannot_be_read_in_time_then_it_ends_all_the_same() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let geometry = Arc::new(Geometry::new(&[4096]).unwrap());
        let mut state = State::new([1; 4]);
        let segmenting = Segmenting {
            places_per_segment: 8,
            record_bytes: geometry.record_bytes(),
        };
        let shelf = state.catalog.add_shelf(7, segmenting);
        let shared = Arc::new(Shared::new(stripe, geometry.clone(), None, state, None));
        let hit = Hit {
            key: [1; 4],
            shelf,
            place: 0,
            generation: 1,
            checksum: 0,
        };
        let memory = Arc::new(SharedMemory::create(4096, "doubt").unwrap());
        let mut job = ReadJob::new(geometry, [1; 4], memory, [(hit, 0)].into_iter(), 1);
        job.fail(0, Reason::Checksum);
        assert!(job.doubts_others(None));
        let read = job.ticket.clone();
        shared.watch.lock().asked(read.clone());
        // Nobody follows other writers here.
        shared.refresh_requests.doubt(job);
        let mut clock = Clock::new(shared, LIMIT);
        let now = Instant::now();
        clock.look(now + LIMIT / 2);
        assert!(!read.progress.has_ended());
        clock.look(now + LIMIT);
        assert_eq!(read.finish(), [(0, Reason::Gone)]);
        assert!(clock.stalled_since.is_none(), "the drive has answered");
    }

    #[test]
    fn reads_when_ended_then_forgotten() {
        let mut watched = Watched::default();
        let read = ticket();
        watched.asked(read.clone());
        read.progress.end();
        let now = watched.reads[0].0 + LIMIT;
        assert!(watched.late(now, LIMIT).is_empty() && watched.reads.is_empty());
    }
}
