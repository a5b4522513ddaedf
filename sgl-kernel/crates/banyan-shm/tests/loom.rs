// SPDX-License-Identifier: Apache-2.0
//! Every interleaving of the shipped protocol, with a page whose concurrent use loom detects by itself.
//!
//!     RUSTFLAGS="--cfg loom" cargo test --release -p banyan-shm --test loom
#![cfg(loom)]

use banyan_shm::access_history::MARK;
use banyan_shm::access_log::AccessLog;
use banyan_shm::frame::{Frame, FrameId, Key};
use banyan_shm::index::Index;
use banyan_shm::lease::{self, Sighting};
use banyan_shm::ledger::Ledger;
use banyan_shm::sync::{AtomicU32, AtomicU64, Ordering, fence};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

/// All in one bucket, so that indexes are chains.
const KEYS: [Key; 3] = [[8, 1, 1, 1], [16, 2, 2, 2], [24, 3, 3, 3]];

/// What ranks share: the words of a frame table and the pages, each holding the number of the key it was written for.
struct Shared {
    heads: Vec<AtomicU32>,
    frames: Vec<Frame>,
    pages: Vec<UnsafeCell<u64>>,
}

impl Shared {
    fn new(num_frames: usize) -> Arc<Self> {
        Arc::new(Self {
            heads: (0..1).map(|_| AtomicU32::new(0)).collect(),
            frames: (0..num_frames).map(|_| Frame::default()).collect(),
            pages: (0..num_frames).map(|_| UnsafeCell::new(0)).collect(),
        })
    }

    fn index(&self) -> Index<'_> {
        Index::new(&self.heads, &self.frames, 1)
    }

    /// loom panics when anybody reads meanwhile.
    fn write(&self, frame: FrameId, content: u64) {
        // SAFETY: the point of these tests: loom checks that this is exclusive.
        self.pages[frame as usize].with_mut(|page| unsafe { *page = content });
    }

    /// loom panics when anybody writes meanwhile, or wrote without this being ordered after it.
    fn read(&self, frame: FrameId) -> u64 {
        // SAFETY: as above.
        self.pages[frame as usize].with(|page| unsafe { *page })
    }

    fn write_and_publish(&self, ledger: &mut Ledger, frame: FrameId, key: usize) {
        self.write(frame, KEYS[key][1]);
        assert_eq!(
            ledger.publish(self.index(), &[i64::from(frame)], &[KEYS[key]]),
            Ok(1)
        );
    }
}

/// Looks a key up, leases its frame and copies the page; true when it was there.
fn fetch(shared: &Shared, bit: u64, key: usize) -> bool {
    let Some((frame, generation)) = shared.index().find(&KEYS[key]) else {
        return false;
    };
    let wanted = [Sighting { frame, generation }];
    let mut held = vec![0; shared.frames.len()];
    if !lease::take(&shared.frames, &wanted, bit, &mut held) {
        return false;
    }
    assert_eq!(shared.read(frame), KEYS[key][1], "a page of another key");
    lease::give_back(&shared.frames, &wanted, bit, &mut held);
    true
}

/// Withdraws frame 0 and, if nobody reads it, writes and publishes it as another key.
fn recycle(shared: &Shared, ledger: &mut Ledger, key: usize) {
    let mut free = ledger.retire(shared.index(), &[0]).unwrap();
    if free.is_empty() {
        free = ledger.drain(shared.index(), |_| 0);
    }
    if free == [0] {
        shared.write_and_publish(ledger, 0, key);
    }
}

fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

#[test]
fn owner_and_reader_when_they_race_then_no_page_is_torn() {
    loom::model(|| {
        let shared = Shared::new(1);
        let mut ledger = Ledger::new(1);
        shared.write_and_publish(&mut ledger, 0, 0);
        let reader = {
            let shared = shared.clone();
            thread::spawn(move || fetch(&shared, 1, 0))
        };
        recycle(&shared, &mut ledger, 1);
        reader.join().unwrap();
        ledger.retire(shared.index(), &[0]).unwrap();
        ledger.drain(shared.index(), |_| 0);
        assert_eq!(ledger.num_quarantined(), 0, "a pin was left behind");
    });
}

#[test]
fn owner_and_reader_when_the_new_key_is_wanted_then_its_page_is_complete() {
    loom::model(|| {
        let shared = Shared::new(1);
        let mut ledger = Ledger::new(1);
        shared.write_and_publish(&mut ledger, 0, 0);
        let reader = {
            let shared = shared.clone();
            thread::spawn(move || fetch(&shared, 1, 1))
        };
        recycle(&shared, &mut ledger, 1);
        reader.join().unwrap();
    });
}

#[test]
fn two_readers_when_the_owner_recycles_then_no_page_is_torn() {
    explore(2, || {
        let shared = Shared::new(1);
        let mut ledger = Ledger::new(1);
        shared.write_and_publish(&mut ledger, 0, 0);
        let readers = [1u64, 2].map(|bit| {
            let shared = shared.clone();
            thread::spawn(move || fetch(&shared, bit, 0))
        });
        recycle(&shared, &mut ledger, 1);
        for reader in readers {
            reader.join().unwrap();
        }
        ledger.retire(shared.index(), &[0]).unwrap();
        ledger.drain(shared.index(), |_| 0);
        assert_eq!(ledger.num_quarantined(), 0, "a pin was left behind");
    });
}

#[test]
fn dead_reader_when_its_bit_is_cleared_then_a_live_one_still_protects_the_page() {
    const DEAD: u64 = 4;
    explore(3, || {
        let shared = Shared::new(1);
        let mut ledger = Ledger::new(1);
        shared.write_and_publish(&mut ledger, 0, 0);
        // Killed while it held a lease: its bit stays for ever.
        let (_, generation) = shared.index().find(&KEYS[0]).unwrap();
        let sighting = [Sighting {
            frame: 0,
            generation,
        }];
        assert!(lease::take(&shared.frames, &sighting, DEAD, &mut [0]));
        let reader = {
            let shared = shared.clone();
            thread::spawn(move || fetch(&shared, 1, 0))
        };
        assert_eq!(
            ledger.retire(shared.index(), &[0]),
            Ok(vec![]),
            "the dead one's bit counts at first"
        );
        if ledger.drain(shared.index(), |pins| pins & DEAD) == [0] {
            shared.write_and_publish(&mut ledger, 0, 1);
        }
        reader.join().unwrap();
        let mut free = ledger.retire(shared.index(), &[0]).unwrap();
        free.extend(ledger.drain(shared.index(), |pins| pins & DEAD));
        assert_eq!(free, [0]);
    });
}

#[test]
fn dead_reader_when_its_successor_pins_and_fails_then_no_lease_is_lost() {
    // The successor has the dead one's bit: the owner may take it from under the successor's refused attempt, never
    // from under a lease.
    explore(3, || {
        let shared = Shared::new(1);
        let mut ledger = Ledger::new(1);
        shared.write_and_publish(&mut ledger, 0, 0);
        let (_, generation) = shared.index().find(&KEYS[0]).unwrap();
        let sighting = [Sighting {
            frame: 0,
            generation,
        }];
        assert!(lease::take(&shared.frames, &sighting, 1, &mut [0]));
        assert_eq!(ledger.retire(shared.index(), &[0]), Ok(vec![]));
        let successor = {
            let shared = shared.clone();
            thread::spawn(move || {
                let mut held = [0];
                assert!(!lease::take(&shared.frames, &sighting, 1, &mut held));
                fetch(&shared, 1, 1)
            })
        };
        if ledger.drain(shared.index(), |pins| pins & 1) == [0] {
            shared.write_and_publish(&mut ledger, 0, 1);
            recycle(&shared, &mut ledger, 2);
        }
        successor.join().unwrap();
    });
}

#[test]
fn lookup_when_the_owner_unlinks_and_relinks_then_never_a_false_hit() {
    explore(2, || {
        let shared = Shared::new(3);
        let mut ledger = Ledger::new(3);
        for frame in 0..3 {
            shared.write_and_publish(&mut ledger, frame, frame as usize);
        }
        let reader = {
            let shared = shared.clone();
            thread::spawn(move || {
                // Keys 0 and 2 move or vanish; a hit is only good with the right page, which `fetch` checks.
                fetch(&shared, 1, 0);
                fetch(&shared, 1, 2);
            })
        };
        let index = shared.index();
        let mut free = ledger.retire(index, &[2, 0]).unwrap();
        free.extend(ledger.drain(index, |_| 0));
        if free.contains(&2) {
            shared.write_and_publish(&mut ledger, 2, 0);
        }
        reader.join().unwrap();
        assert!(
            shared.index().find(&KEYS[1]).is_some(),
            "the chain was broken"
        );
    });
}

#[test]
fn reset_when_a_reader_leases_then_its_page_waits_in_quarantine() {
    loom::model(|| {
        let shared = Shared::new(1);
        let mut ledger = Ledger::new(1);
        shared.write_and_publish(&mut ledger, 0, 0);
        let reader = {
            let shared = shared.clone();
            thread::spawn(move || fetch(&shared, 1, 0))
        };
        ledger.reset(shared.index());
        if ledger.num_quarantined() == 0 || ledger.drain(shared.index(), |_| 0) == [0] {
            shared.write_and_publish(&mut ledger, 0, 1);
        }
        reader.join().unwrap();
    });
}

/// The lease order as it ships, but with the fence left to the caller: proves that the models above would see a
/// mistake.
mod broken {
    use super::*;

    pub struct Words {
        pub generation: AtomicU64,
        pub pins: AtomicU64,
        pub page: UnsafeCell<u64>,
    }

    pub fn race(between: fn()) {
        loom::model(move || {
            let words = Arc::new(Words {
                generation: AtomicU64::new(1),
                pins: AtomicU64::new(0),
                page: UnsafeCell::new(0),
            });
            let reader = {
                let words = words.clone();
                thread::spawn(move || {
                    // loom takes a SeqCst store for a release one; without a fence nothing orders it before the load.
                    words.pins.fetch_or(1, Ordering::SeqCst);
                    between();
                    if words.generation.load(Ordering::Acquire) == 1 {
                        // SAFETY: loom checks.
                        words.page.with(|page| unsafe { *page });
                    }
                    words.pins.fetch_and(!1, Ordering::Release);
                })
            };
            words.generation.store(2, Ordering::Release);
            between();
            if words.pins.load(Ordering::Acquire) == 0 {
                // SAFETY: loom checks.
                words.page.with_mut(|page| unsafe { *page = 1 });
            }
            reader.join().unwrap();
        });
    }

    #[test]
    fn order_when_both_fences_stand_then_sound() {
        race(|| fence(Ordering::SeqCst));
    }

    #[test]
    #[should_panic]
    fn order_when_the_fences_are_removed_then_loom_finds_the_torn_page() {
        race(|| ());
    }

    /// The generation first and the pin after: what the order of the two steps is for.
    #[test]
    #[should_panic]
    fn order_when_the_reader_checks_before_it_pins_then_loom_finds_the_torn_page() {
        loom::model(|| {
            let shared = Shared::new(1);
            let mut ledger = Ledger::new(1);
            shared.write_and_publish(&mut ledger, 0, 0);
            let reader = {
                let shared = shared.clone();
                thread::spawn(move || {
                    let Some((frame, _)) = shared.index().find(&KEYS[0]) else {
                        return;
                    };
                    shared.read(frame);
                })
            };
            recycle(&shared, &mut ledger, 1);
            reader.join().unwrap();
        });
    }
}

#[test]
fn told_when_the_ring_comes_round_while_a_peer_hears_then_it_hears_no_word_at_another_ones_place() {
    struct Ring {
        counts: [AtomicU64; 2],
        words: Vec<AtomicU64>,
    }
    impl Ring {
        fn access_log(&self) -> AccessLog<'_> {
            AccessLog::new(&self.counts[0], &self.counts[1], &self.words)
        }
    }
    // Half of two words: each prompt has one page, and the third one takes the place of the first.
    loom::model(|| {
        let zero = || AtomicU64::new(0);
        let ring = Arc::new(Ring {
            counts: [zero(), zero()],
            words: (0..2).map(|_| zero()).collect(),
        });
        let peer = {
            let ring = ring.clone();
            thread::spawn(move || {
                let (prompts, end) = ring.access_log().read_from(0);
                let first = end - prompts.len() as u64;
                for (place, prompt) in (first..end).zip(prompts) {
                    assert_eq!(prompt, [(place + 1) << 1 | MARK]);
                }
            })
        };
        for page in 1..=3 {
            ring.access_log().append(&[page << 1]);
        }
        peer.join().unwrap();
    });
}
