// SPDX-License-Identifier: Apache-2.0
//! A writer takes back all that it has stored, also what others' pages stand behind.

mod rig;

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use banyan_lab::{Faults, HANG};
use banyan_shm::frame::Key;
use banyan_store::check::{self, Treatment};
use banyan_store::directory::Stripe;
use banyan_store::pacing::Permit;
use banyan_store::reading::Reason;
use banyan_store::state::{Outcome, Verdict};
use banyan_store::store::Options;
use rig::{Rig, Scratch, key, options};

/// One chain, page 0 and 2 from the first writer, page 1 and 3 from the second.
fn interleaved(scratch: &Scratch) -> [Rig; 2] {
    let options = options(scratch.path());
    let rigs = [Rig::open(&options), Rig::open(&options)];
    for page in 0..4u64 {
        let rig = &rigs[page as usize % 2];
        rig.store.refresh().unwrap();
        rig.keep(page.checked_sub(1), &[page]);
    }
    rigs.iter().for_each(|rig| rig.store.refresh().unwrap());
    rigs
}

fn num_orphans(scratch: &Scratch) -> u64 {
    let stripe = Stripe::open(&[scratch.path().join("store")]).unwrap();
    let report = check::check(&stripe, Treatment::Check).unwrap();
    assert_eq!(report.findings, []);
    report.num_orphans
}

#[test]
fn pages_when_others_stand_behind_them_then_cleared_and_nobody_comes_past_the_gap() {
    let scratch = Scratch::new();
    let [ours, theirs] = interleaved(&scratch);
    assert_eq!(ours.store.evict(9).unwrap(), 0, "eviction keeps them");
    assert_eq!(ours.store.clear().unwrap(), 2);
    assert_eq!(ours.num_found(&[0, 1, 2, 3]), 0);
    assert_eq!((ours.num_found(&[2]), ours.num_found(&[1])), (0, 1));
    theirs.store.refresh().unwrap();
    assert_eq!(theirs.num_found(&[0, 1, 2, 3]), 0);
    assert_eq!(num_orphans(&scratch), 2);
    assert_eq!(ours.store.clear().unwrap(), 0, "nothing is left");
}

#[test]
fn pages_when_cleared_then_no_opening_finds_them_and_their_places_are_written_again() {
    let scratch = Scratch::new();
    let mut options = options(scratch.path());
    options.limits.quota_bytes = 1 << 20;
    let chain: Vec<u64> = (0..20).collect();
    {
        let rig = Rig::open(&options);
        rig.keep(None, &chain);
        let (num_places, num_free) = (rig.stat("own_places"), rig.stat("free_places"));
        assert_eq!(rig.store.clear().unwrap(), 20);
        assert_eq!(rig.stat("free_places"), num_free + 20);
        assert_eq!(rig.num_found(&chain), 0);
        assert_eq!(rig.stat("own_places"), num_places);
    }
    let rig = Rig::open(&options);
    assert_eq!((rig.stat("adopted_pages"), rig.num_found(&chain)), (0, 0));
    rig.keep(None, &chain);
    assert_eq!(rig.fetch(&chain, 1), []);
    assert_eq!(num_orphans(&scratch), 0);
}

#[test]
fn chain_when_its_cleared_pages_are_stored_anew_then_others_pages_behind_them_are_found_again() {
    let scratch = Scratch::new();
    let [ours, theirs] = interleaved(&scratch);
    ours.store.clear().unwrap();
    // What stands behind the gap need not be written again.
    assert_eq!(
        ours.put(None, &[0, 1, 2, 3]),
        [
            Verdict::Queued,
            Verdict::Present,
            Verdict::Queued,
            Verdict::Present
        ]
    );
    assert_eq!(ours.store.sync().unwrap(), 0);
    theirs.store.refresh().unwrap();
    assert_eq!(theirs.fetch(&[0, 1, 2, 3], 1), []);
}

#[test]
fn writers_when_each_clears_at_its_own_time_then_nothing_of_either_is_left() {
    for first in [0, 1] {
        let scratch = Scratch::new();
        let rigs = interleaved(&scratch);
        let options = options(scratch.path());
        let num_first = rigs[first].store.clear().unwrap();
        // In between one of them goes on.
        rigs[first].keep(None, &[10]);
        let num_second = rigs[1 - first].store.clear().unwrap();
        assert_eq!((num_first, num_second), (2, 2));
        for rig in &rigs {
            // At the first look, whatever this process has not yet heard of.
            assert!((0..4).all(|page| rig.num_found(&[page]) == 0), "{first}");
        }
        drop(rigs);
        let again = [Rig::open(&options), Rig::open(&options)];
        for rig in &again {
            assert!((0..4).all(|page| rig.num_found(&[page]) == 0), "{first}");
            assert_eq!(rig.num_found(&[10]), 1);
        }
        assert_eq!(num_orphans(&scratch), 0);
    }
}

#[test]
fn reader_when_it_has_not_heard_of_a_clear_then_finds_its_own_pages_only_until_it_has() {
    let scratch = Scratch::new();
    let options = options(scratch.path());
    let [ours, cleared, third] = [(); 3].map(|()| Rig::open(&options));
    ours.keep(None, &[0]);
    cleared.keep(None, &[10, 11]);
    third.keep(None, &[20]);
    ours.store.refresh().unwrap();
    let stale = ours.store.lookup(&[key(10)]);
    assert_eq!((stale.hits.len(), ours.num_found(&[20])), (1, 1));
    let before = ours.store.version();
    cleared.store.clear().unwrap();
    let version = ours.store.version();
    assert_ne!(version, before, "what was looked up before is out of date");
    assert_eq!(ours.num_found(&[10]), 0, "the first look already");
    assert_eq!(ours.num_found(&[0]), 1);
    ours.store.refresh().unwrap();
    assert_ne!(ours.store.version(), version, "who looked is to look again");
    assert_eq!((ours.num_found(&[20]), ours.num_found(&[10])), (1, 0));
}

#[test]
fn reader_when_another_writer_that_has_stored_nothing_clears_then_goes_on_finding_all() {
    let scratch = Scratch::new();
    let options = options(scratch.path());
    let [theirs, ours, empty] = [(); 3].map(|()| Rig::open(&options));
    theirs.keep(None, &[0, 1]);
    ours.store.refresh().unwrap();
    assert_eq!(empty.store.clear().unwrap(), 0);
    assert_eq!(ours.num_found(&[0, 1]), 2);
}

#[test]
fn orphans_when_space_is_short_then_make_room_and_when_their_writer_leaves_it_is_adopted_with_them()
{
    let scratch = Scratch::new();
    let mut options = options(scratch.path());
    options.limits.quota_bytes = 1 << 20;
    options.limits.share_bytes = 512 << 10;
    let [ours, theirs] = [Rig::open(&options), Rig::open(&options)];
    ours.keep(None, &[0]);
    theirs.store.refresh().unwrap();
    theirs.keep(Some(0), &[1, 2, 3]);
    ours.store.clear().unwrap();
    drop(ours);
    drop(theirs);
    // As after a kill: the orphans are there, found by nobody who begins at the root.
    let theirs = Rig::open(&options);
    let other = Rig::open(&options);
    assert_eq!(
        theirs.stat("adopted_pages") + other.stat("adopted_pages"),
        3
    );
    let rig = if theirs.stat("adopted_pages") > 0 {
        theirs
    } else {
        other
    };
    assert_eq!(rig.num_found(&[0, 1, 2, 3]), 0);
    for page in 100..160 {
        rig.keep(None, &[page]);
    }
    assert_eq!(num_orphans(&scratch), 0);
    assert!((1..4).all(|page| rig.num_found(&[page]) == 0));
}

#[test]
fn backlog_when_cleared_then_it_fails_every_frame_comes_back_and_nothing_is_stored() {
    let scratch = Scratch::new();
    {
        let rig = Rig::open(&options(scratch.path()));
        rig.keep(None, &[0]);
        rig.store.set_permit(Permit::Paused);
        assert_eq!(rig.put(Some(0), &[1, 2, 3]), [Verdict::Queued; 3]);
        assert_eq!(rig.store.clear().unwrap(), 1);
        let completed = rig.store.completed();
        assert_eq!(completed.len(), 3);
        assert!(
            completed
                .iter()
                .all(|(_, outcome)| *outcome == Outcome::Failed)
        );
        // The permit is what it was.
        assert_eq!(rig.put(None, &[5]), [Verdict::Queued]);
        std::thread::sleep(Duration::from_millis(50));
        assert!(rig.store.completed().is_empty());
        rig.store.set_permit(Permit::Open);
        assert_eq!(rig.store.sync().unwrap(), 0);
    }
    let rig = Rig::open(&options(scratch.path()));
    assert_eq!(rig.stat("adopted_pages"), 1);
    assert_eq!(rig.num_found(&[5]), 1);
}

#[test]
fn writes_when_under_way_then_cleared_with_the_rest() {
    for round in 0..20 {
        let scratch = Scratch::new();
        let chain: Vec<u64> = (0..60).collect();
        {
            let rig = Rig::open(&options(scratch.path()));
            rig.put(None, &chain);
            std::thread::sleep(Duration::from_micros(300 * round));
            rig.store.clear().unwrap();
            assert_eq!(rig.store.completed().len(), 60, "every frame comes back");
            assert!(chain.iter().all(|page| rig.num_found(&[*page]) == 0));
        }
        assert_eq!(Rig::open(&options(scratch.path())).stat("adopted_pages"), 0);
    }
}

#[test]
fn read_when_its_pages_are_cleared_and_their_places_written_again_then_right_bytes_or_gone() {
    let later: Vec<u64> = (100..112).collect();
    for round in 0..40 {
        let scratch = Scratch::new();
        let rig = Rig::open(&options(scratch.path()));
        rig.keep(None, &(0..12).collect::<Vec<_>>());
        let keys: Vec<Key> = (0..12).map(key).collect();
        let found = rig.store.lookup(&keys);
        let offsets: Vec<u64> = (20..32).map(|frame| rig.offset(frame)).collect();
        let read = || {
            let store = &rig.store;
            store.read(&found, 12, &rig.memory, &offsets, 1 + round % 3)
        };
        let is_first = round % 2 == 0;
        let early = is_first.then(|| read().unwrap());
        assert_eq!(rig.store.clear().unwrap(), 12);
        rig.keep(None, &later);
        let failed = early.unwrap_or_else(|| read().unwrap()).finish();
        for page in 0..12 {
            match failed.iter().find(|(position, _)| *position == page) {
                Some((_, reason)) => assert_eq!(*reason, Reason::Gone),
                None => assert!(rig.is_filled(20 + page as u64, page as u64)),
            }
        }
        assert!(
            is_first || failed.len() == 12,
            "the places have new tenants"
        );
        assert_eq!(rig.stat("checksum_failures"), 0);
        assert_eq!(rig.fetch(&later, 1), []);
    }
}

/// No manifest can be written until what is returned removes what is in its way.
fn hinder_manifest(scratch: &Scratch) -> impl FnOnce() {
    let shelves = fs::read_dir(scratch.path().join("store")).unwrap();
    let mut paths = shelves.map(|entry| entry.unwrap().path());
    let shelf = paths.find(|path| path.is_dir()).unwrap();
    // Each try is of a greater number.
    let obstacles = (2..12).map(move |number| shelf.join(format!("new-manifest-{number}")));
    obstacles
        .clone()
        .for_each(|path| fs::create_dir(path).unwrap());
    move || obstacles.for_each(|path| fs::remove_dir(path).unwrap())
}

#[test]
fn clear_when_the_manifest_cannot_be_written_then_an_error_in_time_and_done_when_it_can() {
    let scratch = Scratch::new();
    let patience = Duration::from_millis(300);
    let rig = Rig::open(&Options {
        stall_after: patience,
        ..options(scratch.path())
    });
    rig.keep(None, &[0, 1]);
    let give_way = hinder_manifest(&scratch);
    let reason = rig.store.clear().unwrap_err().to_string();
    assert!(reason.contains("cannot clear the store"), "{reason}");
    assert_eq!(rig.num_found(&[0]), 0, "not by the one who cleared");
    give_way();
    // It tries again after ten seconds of rest.
    let started = Instant::now();
    while rig.stat("is_stopped") == 1 {
        assert!(started.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(rig.store.sync().unwrap(), 0);
    drop(rig);
    assert_eq!(Rig::open(&options(scratch.path())).stat("adopted_pages"), 0);
}

#[test]
fn pages_when_the_manifest_cannot_be_written_then_none_is_held_or_taken_and_nobody_waits_until_it_can()
 {
    let scratch = Scratch::new();
    // The first of the pages below is going down for as long.
    let engine = Faults::parse("seed=1,block=5").unwrap().engine();
    let rig = Rig::open(&Options {
        engine,
        ..options(scratch.path())
    });
    rig.keep(None, &[0]);
    let give_way = hinder_manifest(&scratch);
    let mut num_back = 0;
    assert_eq!(rig.put(Some(0), &[1, 2, 3]), [Verdict::Queued; 3]);
    std::thread::sleep(HANG / 4);
    rig.store.invalidate([2; 4]).unwrap();
    let started = Instant::now();
    while num_back < 3 {
        assert!(started.elapsed() < HANG * 5, "{num_back} frames came back");
        std::thread::sleep(HANG / 20);
        num_back += rig.store.completed().len();
    }
    assert_eq!(rig.stat("is_stopped"), 1);
    assert_eq!(rig.put(None, &[4]), [Verdict::Full]);
    let started = Instant::now();
    rig.store.sync().unwrap();
    rig.store.clear().unwrap_err();
    rig.store.clear().unwrap_err();
    give_way();
    rig.store.clear().unwrap();
    assert!(started.elapsed() < HANG * 5, "it waited for the rest's end");
    assert_eq!(rig.stat("is_stopped"), 0);
    rig.keep(None, &[4, 5]);
    drop(rig);
    let rig = Rig::open(&Options {
        namespace: [2; 4],
        ..options(scratch.path())
    });
    assert_eq!(rig.stat("adopted_pages"), 2);
    assert_eq!(rig.fetch(&[4, 5], 1), []);
}

#[test]
fn clear_when_writes_fail_then_nothing_is_found_all_the_same() {
    for seed in 1..30 {
        let scratch = Scratch::new();
        {
            let engine = Faults::parse(&format!("seed={seed},eio=5"))
                .unwrap()
                .engine();
            let rig = Rig::open(&Options {
                engine,
                backlog_bytes: 8 * 20480,
                ..options(scratch.path())
            });
            for page in 0..8 {
                rig.put(None, &[page]);
            }
            rig.store.clear().unwrap();
            assert!((0..8).all(|page| rig.num_found(&[page]) == 0));
        }
        let rig = Rig::open(&options(scratch.path()));
        assert_eq!(rig.stat("adopted_pages"), 0, "seed {seed}");
    }
}

#[test]
fn pages_when_the_drive_takes_them_after_the_clear_has_given_up_then_not_stored_all_the_same() {
    let scratch = Scratch::new();
    // The first page takes four operations.
    let engine = Faults::parse("seed=1,block=5").unwrap().engine();
    let rig = Rig::open(&Options {
        engine,
        stall_after: HANG / 8,
        ..options(scratch.path())
    });
    rig.keep(None, &[0]);
    rig.put(Some(0), &[1]);
    let started = Instant::now();
    while rig.stat("write_operations") < 2 {
        assert!(started.elapsed() < HANG * 20);
    }
    rig.store.clear().unwrap_err();
    while rig.store.completed() != [(key(1), Outcome::Failed)] {
        assert!(started.elapsed() < HANG * 20, "it was stored");
        std::thread::sleep(HANG / 100);
    }
    assert_eq!(rig.store.sync().unwrap(), 0);
    assert_eq!(rig.stat("own_records"), 0);
    drop(rig);
    assert_eq!(Rig::open(&options(scratch.path())).stat("adopted_pages"), 0);
}

struct Dice(u64);

impl Dice {
    fn roll(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Two writers on one path against what they should hold: pages of four chains of six, each stored by whoever misses it.
#[test]
fn stores_when_two_writers_store_clear_and_come_again_then_found_is_what_neither_has_cleared() {
    const CHAIN: u64 = 6;
    for seed in 1..25 {
        let scratch = Scratch::new();
        let options = options(scratch.path());
        let mut dice = Dice(seed);
        let mut rigs = [Rig::open(&options), Rig::open(&options)];
        let mut held = [BTreeSet::new(), BTreeSet::new()];
        for _ in 0..40 {
            let who = dice.roll(2) as usize;
            match dice.roll(6) {
                0..3 => {
                    let start = dice.roll(4) * CHAIN;
                    let pages: Vec<u64> = (start..start + 1 + dice.roll(CHAIN)).collect();
                    rigs[who].store.refresh().unwrap();
                    for (page, verdict) in pages.iter().zip(rigs[who].put(None, &pages)) {
                        let is_held = held.iter().any(|pages| pages.contains(page));
                        assert_eq!(verdict == Verdict::Present, is_held, "seed {seed}");
                        if !is_held {
                            held[who].insert(*page);
                        }
                    }
                    assert_eq!(rigs[who].store.sync().unwrap(), 0);
                }
                3 | 4 => {
                    let num_cleared = rigs[who].store.clear().unwrap();
                    assert_eq!(num_cleared, held[who].len(), "seed {seed}");
                    held[who].clear();
                }
                // Which shelf a writer takes over is told by how much it holds.
                _ if held[0].len() != held[1].len() => {
                    let num_first = held[0].len() as u64;
                    drop(rigs);
                    rigs = [Rig::open(&options), Rig::open(&options)];
                    if rigs[0].stat("own_records") != num_first {
                        rigs.swap(0, 1);
                    }
                    for (rig, pages) in rigs.iter().zip(&held) {
                        assert_eq!(rig.stat("own_records"), pages.len() as u64, "seed {seed}");
                    }
                }
                _ => {}
            }
            for rig in &rigs {
                rig.store.refresh().unwrap();
                for start in (0..4).map(|chain| chain * CHAIN) {
                    let chain: Vec<u64> = (start..start + CHAIN).collect();
                    let is_held = |page: &&u64| held.iter().any(|pages| pages.contains(*page));
                    let num_held = chain.iter().take_while(is_held).count();
                    assert_eq!(rig.num_found(&chain), num_held, "seed {seed}");
                }
            }
        }
    }
}
