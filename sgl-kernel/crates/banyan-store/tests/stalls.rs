// SPDX-License-Identifier: Apache-2.0
//! Drives, other processes and threads that do not answer: nobody waits for them without an end.

mod rig;

use std::time::{Duration, Instant};

use banyan_lab::{Faults, HANG};
use banyan_shm::frame::Key;
use banyan_store::directory::Stripe;
use banyan_store::state::Verdict;
use banyan_store::store::Options;
use banyan_store::traffic::Traffic;
use rig::{Rig, Scratch, key, options};

fn faulty(scratch: &Scratch, faults: &str, stall_after: Duration) -> Options {
    Options {
        engine: Faults::parse(faults).unwrap().engine(),
        stall_after,
        ..options(scratch.path())
    }
}

/// Operations that storing a page in a new store takes.
const NUM_OPS_TO_KEEP: u64 = 4;

#[test]
fn read_when_the_device_hangs_then_waiters_go_on_and_the_store_is_left_alone_until_it_answers() {
    let scratch = Scratch::new();
    let engine = Faults::parse("seed=1,hang=1").unwrap().engine();
    let rig = Rig::open(&Options {
        engine,
        stall_after: HANG / 8,
        ..options(scratch.path())
    });
    rig.keep(None, &[1, 2]);
    let other = Traffic::open(&scratch.path().join("store")).unwrap();
    let version = rig.store.version();
    let found = rig.store.lookup(&[key(1), key(2)]);
    let offsets = [rig.offset(4), rig.offset(5)];
    let started = Instant::now();
    let read = rig.store.read(&found, 2, &rig.memory, &offsets, 1).unwrap();
    read.progress.wait_layer(2);
    assert!(started.elapsed() < HANG, "the waiter waited for the device");
    assert!(read.is_late() && !read.progress.has_ended());
    while other.reads_elsewhere(HANG * 10) > 0 {
        std::thread::sleep(HANG / 100);
    }
    assert!(started.elapsed() < HANG, "it kept others from writing");
    assert_eq!(rig.num_found(&[1, 2]), 0);
    assert_eq!(rig.put(None, &[3]), [Verdict::Full]);
    assert_ne!(rig.store.version(), version);
    assert_eq!(read.finish().len(), 2);
    assert!(
        started.elapsed() >= HANG,
        "the frames were given back early"
    );
    // Some transfers may still be under way for a moment; nothing was damaged.
    while rig.num_found(&[1, 2]) < 2 {
        assert!(started.elapsed() < HANG * 20);
        std::thread::sleep(HANG / 20);
    }
    assert_eq!(rig.stat("stalls"), 1);
}

#[test]
fn read_when_another_has_all_of_a_device_that_hangs_then_its_waiters_go_on_as_well() {
    let scratch = Scratch::new();
    let rig = Rig::open(&faulty(&scratch, "seed=1,hang=1", HANG / 2));
    let chain: Vec<u64> = (0..40).collect();
    rig.keep(None, &chain);
    let keys: Vec<Key> = chain.iter().map(|number| key(*number)).collect();
    let found = rig.store.lookup(&keys);
    let offsets: Vec<u64> = chain.iter().map(|frame| rig.offset(*frame)).collect();
    let started = Instant::now();
    let first = rig.store.read(&found, 40, &rig.memory, &offsets, 1);
    let offsets = [rig.offset(50)];
    let second = rig.store.read(&found, 1, &rig.memory, &offsets, 1);
    let reads = [first.unwrap(), second.unwrap()];
    for read in &reads {
        read.progress.wait_layer(2);
        assert!(started.elapsed() < HANG, "it waited for the device");
        assert!(read.is_late());
    }
    for read in reads {
        assert_eq!(read.finish().len(), read.num_pages);
    }
}

#[test]
fn reads_when_they_are_throttled_for_longer_than_the_limit_then_the_drive_is_not_taken_for_hung() {
    let scratch = Scratch::new();
    let rig = Rig::open(&Options {
        read_bytes_per_s: Some(400_000),
        stall_after: Duration::from_millis(300),
        ..options(scratch.path())
    });
    let chain: Vec<u64> = (0..40).collect();
    rig.keep(None, &chain);
    for layers_per_step in [1, 3] {
        assert_eq!(rig.fetch(&chain, layers_per_step), []);
    }
    assert_eq!(rig.stat("stalls"), 0);
}

#[test]
fn read_when_the_io_thread_stands_still_then_its_waiters_go_on_and_the_store_comes_back() {
    let scratch = Scratch::new();
    let faults = format!("seed=1,block={}", NUM_OPS_TO_KEEP + 1);
    let rig = Rig::open(&faulty(&scratch, &faults, HANG / 8));
    rig.keep(None, &[1]);
    let found = rig.store.lookup(&[key(1)]);
    let started = Instant::now();
    // The first stands in front of the device, the second in the inbox.
    let reads = [4, 5].map(|frame| {
        let offsets = [rig.offset(frame)];
        let read = rig.store.read(&found, 1, &rig.memory, &offsets, 1);
        std::thread::sleep(HANG / 50);
        read.unwrap()
    });
    for read in &reads {
        read.progress.wait_layer(2);
        assert!(started.elapsed() < HANG, "it waited for the I/O thread");
        assert!(read.is_late());
    }
    assert_eq!((rig.num_found(&[1]), rig.stat("stalls")), (0, 1));
    assert_eq!(rig.put(None, &[3]), [Verdict::Full]);
    for read in &reads {
        assert_eq!(read.finish().len(), 1);
    }
    while rig.num_found(&[1]) < 1 {
        assert!(started.elapsed() < HANG * 20);
        std::thread::sleep(HANG / 20);
    }
    rig.keep(Some(1), &[3]);
}

#[test]
fn sync_when_the_drive_takes_nothing_then_an_error_in_time_and_every_frame_comes_back_in_the_end() {
    for has_patience in [false, true] {
        let scratch = Scratch::new();
        let stall_after = if has_patience { HANG * 10 } else { HANG / 8 };
        let rig = Rig::open(&faulty(&scratch, "seed=1,block=1", stall_after));
        let started = Instant::now();
        rig.put(None, &(0..40).collect::<Vec<_>>());
        let synced = if has_patience {
            rig.store.sync_within(HANG / 8)
        } else {
            rig.store.sync()
        };
        let words = synced.unwrap_err().to_string();
        assert!(started.elapsed() < HANG, "it waited for the drive");
        assert!(words.contains("still on their way"), "{words}");
        assert_eq!(rig.stat("sync_timeouts"), 1);
        let mut num_back = rig.store.completed().len();
        assert!(
            num_back > 0 && num_back < 40,
            "what has not started fails at once: {num_back}"
        );
        while num_back < 40 {
            assert!(started.elapsed() < HANG * 20);
            std::thread::sleep(HANG / 20);
            num_back += rig.store.completed().len();
        }
    }
}

#[test]
fn close_when_the_drive_does_not_answer_then_over_in_time() {
    let scratch = Scratch::new();
    let rig = Rig::open(&faulty(&scratch, "seed=1,block=1", HANG / 8));
    rig.put(None, &[0]);
    let started = Instant::now();
    rig.store.close();
    assert!(started.elapsed() < HANG, "it waited for the drive");
}

#[test]
fn io_thread_when_it_fails_then_said_counted_and_nobody_waits_for_it() {
    let scratch = Scratch::new();
    let faults = format!("seed=1,panic={}", NUM_OPS_TO_KEEP + 1);
    let rig = Rig::open(&faulty(&scratch, &faults, HANG / 8));
    rig.keep(None, &[1]);
    let found = rig.store.lookup(&[key(1)]);
    let offsets = [rig.offset(4)];
    let started = Instant::now();
    let read = rig.store.read(&found, 1, &rig.memory, &offsets, 1).unwrap();
    read.progress.wait_layer(2);
    assert!(read.is_late() && read.failed().len() == 1);
    while rig.stat("lost_threads") == 0 {
        // It writes down where it was.
        assert!(started.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(5));
    }
    let other = Traffic::open(&scratch.path().join("store")).unwrap();
    while other.reads_elsewhere(HANG * 10) > 0 {
        assert!(
            started.elapsed() < HANG * 20,
            "it keeps others from writing"
        );
        std::thread::sleep(HANG / 20);
    }
    assert_eq!(rig.stat("is_stopped"), 1);
    assert_eq!(rig.num_found(&[1]), 0);
    assert_eq!(rig.put(None, &[3]), [Verdict::Full]);
    let started = Instant::now();
    rig.store.close();
    assert!(started.elapsed() < HANG * 5);
}

#[test]
fn store_when_another_process_keeps_its_lock_then_reads_go_on_and_writes_do_without_growing() {
    let scratch = Scratch::new();
    let options = Options {
        stall_after: Duration::from_millis(500),
        ..options(scratch.path())
    };
    let rig = Rig::open(&options);
    let stored: Vec<u64> = (0..8).collect();
    rig.keep(None, &stored);
    let stripe = Stripe::open(&options.paths).unwrap();
    let lock = stripe.lock().unwrap();
    // More than its one segment has places for.
    rig.put(Some(7), &(8..40).collect::<Vec<_>>());
    let started = Instant::now();
    while rig.stat("lock_pauses") == 0 {
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "{:?}",
            rig.store.stats()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    let started = Instant::now();
    assert_eq!(rig.fetch(&stored, 1), []);
    assert!(
        started.elapsed() < options.stall_after,
        "the read waited for the lock"
    );
    assert_eq!((rig.stat("stalls"), rig.num_found(&stored)), (0, 8));
    let words = rig.store.sync().unwrap_err().to_string();
    assert!(started.elapsed() < Duration::from_secs(10), "{words}");
    drop(rig.store.completed());
    // Whoever has the lock for long does not keep it from making room as if it could not grow.
    rig.put(None, &[100]);
    while rig.num_found(&[100]) == 0 {
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "{:?}",
            rig.store.stats()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(lock);
    for page in 200.. {
        rig.keep(None, &[page]);
        if rig.stat("num_segments") > 1 {
            break;
        }
        assert!(
            started.elapsed() < Duration::from_secs(30),
            "it does not grow again"
        );
    }
}
