// SPDX-License-Identifier: Apache-2.0
//! One store, through its own interface.

mod rig;

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use banyan_lab::Faults;
use banyan_shm::memory::SharedMemory;
use banyan_store::pacing::Permit;
use banyan_store::reading::Reason;
use banyan_store::state::{Outcome, Verdict};
use banyan_store::store::{EngineChoice, Options, Store};
use rig::{NUM_FRAMES, Rig, Scratch, key, options};

fn engines() -> Vec<EngineChoice> {
    let faulty = Faults::parse("seed=5,short=3").unwrap();
    vec![EngineChoice::Auto, EngineChoice::Threads, faulty.engine()]
}

#[test]
fn store_when_little_would_stay_free_then_nothing_is_stored_and_it_is_counted() {
    let scratch = Scratch::new();
    let mut options = options(scratch.path());
    options.limits.floor_bytes = 1 << 60;
    let rig = Rig::open(&options);
    rig.put(None, &[1]);
    rig.store.sync().unwrap();
    assert_eq!(rig.stat("write_failures"), 1);
    assert!(rig.stat("floor_refusals") > 0);
    assert_eq!((rig.stat("written_pages"), rig.num_found(&[1])), (0, 0));
}

#[test]
fn pages_when_stored_then_read_back_by_layers_and_whole_with_every_engine() {
    for engine in engines() {
        let scratch = Scratch::new();
        let rig = Rig::open(&Options {
            engine,
            ..options(scratch.path())
        });
        let chain: Vec<u64> = (0..20).collect();
        rig.keep(None, &chain);
        for layers_per_step in [1, 2, 3, 9] {
            assert_eq!(
                rig.fetch(&chain, layers_per_step),
                [],
                "{}",
                rig.store.engine()
            );
        }
    }
}

#[test]
fn pages_when_many_wait_then_neighbours_go_down_together_in_either_direction() {
    // While the device writes the first pages, the others come.
    let engine = Faults::parse("slow=5").unwrap().engine();
    let scratch = Scratch::new();
    let rig = Rig::open(&Options {
        engine,
        ..options(scratch.path())
    });
    let chain: Vec<u64> = (0..60).collect();
    rig.keep(None, &chain);
    let num_operations = rig.stat("write_operations");
    assert!(num_operations < 60, "{num_operations} for 60 pages");
    assert_eq!(rig.fetch(&chain, 1), []);
    // The end of the chain goes first, so its places come back in descending order.
    assert_eq!(rig.store.evict(60).unwrap(), 60);
    assert_eq!(rig.store.sync().unwrap(), 0);
    rig.keep(None, &chain);
    let num_operations = rig.stat("write_operations") - num_operations;
    assert!(num_operations < 60, "{num_operations} for 60 pages again");
    assert_eq!(rig.fetch(&chain, 1), []);
}

#[test]
fn pages_when_their_memory_is_mapped_where_another_was_then_they_come_there() {
    let scratch = Scratch::new();
    let rig = Rig::open(&options(scratch.path()));
    rig.keep(None, &[0]);
    let found = rig.store.lookup(&[key(0)]);
    for _ in 0..4 {
        let memory = Arc::new(SharedMemory::create(1 << 20, "another").unwrap());
        let read = rig.store.read(&found, 1, &memory, &[4096], 3).unwrap();
        assert_eq!(read.finish(), []);
        // Until the read has let go of it.
        for _ in 0..100 {
            if Arc::strong_count(&memory) == 1 {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn pages_when_layers_are_no_whole_blocks_then_the_same_bytes() {
    let scratch = Scratch::new();
    let layer_bytes = vec![100, 5000, 4096, 1];
    let rig = Rig::open(&Options {
        layer_bytes,
        ..options(scratch.path())
    });
    let chain: Vec<u64> = (0..9).collect();
    rig.keep(None, &chain);
    assert_eq!(rig.fetch(&chain, 1), []);
    assert_eq!(rig.fetch(&chain, 3), []);
}

#[test]
fn pages_when_one_takes_several_requests_then_the_same_bytes_or_failed_as_a_whole() {
    for layer_bytes in [vec![320 << 10; 4], vec![(320 << 10) + 5, 700 << 10, 9]] {
        for engine in engines() {
            let scratch = Scratch::new();
            let mut options = Options {
                layer_bytes: layer_bytes.clone(),
                segment_bytes: Some(4 << 20),
                engine,
                ..options(scratch.path())
            };
            options.limits.quota_bytes = 32 << 20;
            options.limits.share_bytes = 32 << 20;
            let rig = Rig::open(&options);
            rig.keep(None, &[0, 1, 2]);
            for layers_per_step in [1, 2, layer_bytes.len()] {
                assert_eq!(rig.fetch(&[0, 1, 2], layers_per_step), []);
            }
            let padded = |bytes: &u64| bytes.next_multiple_of(4096);
            let record_bytes = 4096 + layer_bytes.iter().map(padded).sum::<u64>();
            // The second record, in the first bytes of its last layer.
            let last_layer_bytes = layer_bytes.last().map(padded).unwrap();
            overwrite(scratch.path(), 4096 + 2 * record_bytes - last_layer_bytes);
            let failed = rig.fetch(&[0, 1, 2], layer_bytes.len());
            assert_eq!(failed, [(1, Reason::Checksum)]);
        }
    }
}

#[test]
fn store_when_opened_again_then_finds_what_was_stored_over_several_paths() {
    let scratch = Scratch::new();
    let paths: Vec<PathBuf> = ["a", "b", "c"].map(|name| scratch.path().join(name)).into();
    let options = Options {
        paths,
        ..options(scratch.path())
    };
    let chain: Vec<u64> = (0..40).collect();
    Rig::open(&options).keep(None, &chain);
    let rig = Rig::open(&options);
    assert_eq!(rig.stat("adopted_pages"), 40);
    assert_eq!(rig.fetch(&chain, 1), []);
    assert_eq!(rig.put(None, &chain), vec![Verdict::Present; 40]);
    rig.keep(Some(39), &[40, 41]);
    assert_eq!(rig.num_found(&(0..42).collect::<Vec<_>>()), 42);
}

#[test]
fn put_when_its_parent_is_absent_then_an_orphan() {
    let scratch = Scratch::new();
    let rig = Rig::open(&options(scratch.path()));
    assert_eq!(
        rig.put(Some(9), &[10, 11]),
        [Verdict::Orphan, Verdict::Orphan]
    );
    rig.keep(None, &[9]);
    rig.keep(Some(9), &[10, 11]);
}

#[test]
fn put_when_the_backlog_is_at_its_bound_then_full_and_nothing_stalls() {
    let scratch = Scratch::new();
    let backlog_bytes = 5 * 20480;
    let rig = Rig::open(&Options {
        backlog_bytes,
        ..options(scratch.path())
    });
    rig.store.set_permit(Permit::Paused);
    let verdicts = rig.put(None, &(0..8).collect::<Vec<_>>());
    assert_eq!(verdicts[..5], [Verdict::Queued; 5]);
    // What comes behind a refused page could not be found.
    assert_eq!(
        verdicts[5..],
        [Verdict::Full, Verdict::Orphan, Verdict::Orphan]
    );
    assert!(rig.store.completed().is_empty());
    assert_eq!(rig.store.sync().unwrap(), 0);
    assert_eq!(rig.store.completed().len(), 5);
}

#[test]
fn completed_when_pages_are_durable_then_names_each_once() {
    let scratch = Scratch::new();
    let rig = Rig::open(&options(scratch.path()));
    rig.put(None, &[1, 2, 3]);
    rig.store.sync().unwrap();
    let mut completed = rig.store.completed();
    completed.sort_by_key(|(key, _)| *key);
    let mut expected = [1, 2, 3].map(|number| (key(number), Outcome::Stored));
    expected.sort_by_key(|(key, _)| *key);
    assert_eq!(completed, expected);
    assert!(rig.store.completed().is_empty());
}

#[test]
fn quota_when_reached_then_chains_are_evicted_from_their_ends_and_the_disk_stays_below() {
    let scratch = Scratch::new();
    let mut options = options(scratch.path());
    options.limits.quota_bytes = 2 << 20;
    let rig = Rig::open(&options);
    for conversation in 0..40u64 {
        let chain: Vec<u64> = (conversation * 100..conversation * 100 + 10).collect();
        rig.keep(None, &chain);
        assert!(used_bytes(scratch.path()) <= 2 << 20);
    }
    assert!(rig.stat("evicted_pages") > 200);
    for conversation in 0..40u64 {
        let chain: Vec<u64> = (conversation * 100..conversation * 100 + 10).collect();
        let num_found = rig.num_found(&chain);
        assert_eq!(rig.fetch(&chain[..num_found], 1), []);
    }
    assert_eq!(
        rig.num_found(&[3900, 3901, 3902]),
        3,
        "the last one is still there"
    );
}

fn used_bytes(path: &std::path::Path) -> u64 {
    let mut total = 0;
    for entry in std::fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        let data = entry.metadata().unwrap();
        total += if data.is_dir() {
            used_bytes(&entry.path())
        } else {
            data.len()
        };
    }
    total
}

#[test]
fn chain_when_longer_than_the_store_then_its_front_is_kept_and_the_rest_fails() {
    let scratch = Scratch::new();
    let mut options = options(scratch.path());
    options.limits.quota_bytes = 512 << 10;
    let rig = Rig::open(&options);
    let chain: Vec<u64> = (0..60).collect();
    rig.put(None, &chain);
    let num_failed = rig.store.sync().unwrap();
    let num_stored = rig.num_found(&chain);
    assert!(num_failed > 0 && num_stored > 5);
    assert_eq!(num_stored as u64 + num_failed, 60);
    assert_eq!(rig.store.completed().len(), 60);
}

fn segment_files(path: &std::path::Path) -> Vec<PathBuf> {
    let store = std::fs::read_dir(path.join("store")).unwrap();
    let shelves = store.filter_map(|entry| std::fs::read_dir(entry.ok()?.path()).ok());
    let files = shelves.flatten().map(|entry| entry.unwrap().path());
    files
        .filter(|path| {
            path.file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .starts_with("segment-")
        })
        .collect()
}

/// Other bytes at this offset of the only segment.
fn overwrite(path: &std::path::Path, at: u64) {
    let [segment] = &segment_files(path)[..] else {
        panic!("one segment")
    };
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(segment)
        .unwrap();
    file.write_all_at(&[0x5a; 4], at).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn page_when_a_bit_on_disk_flips_then_named_as_bad_and_never_found_again() {
    let scratch = Scratch::new();
    let rig = Rig::open(&options(scratch.path()));
    rig.keep(None, &[0, 1, 2, 3]);
    // The third record, in its last layer.
    overwrite(scratch.path(), 4096 + 3 * (4096 + 16384) - 100);
    assert_eq!(rig.fetch(&[0, 1, 2, 3], 1), [(2, Reason::Checksum)]);
    assert_eq!(rig.num_found(&[0, 1, 2, 3]), 2);
    assert_eq!(rig.stat("checksum_failures"), 1);
    // It can be stored again, in another place or this.
    rig.keep(Some(1), &[2]);
    assert_eq!(rig.fetch(&[0, 1, 2, 3], 1), []);
}

#[test]
fn page_when_another_lies_in_its_place_then_withdrawn_and_stored_again() {
    for layers_per_step in [1, 3] {
        let scratch = Scratch::new();
        let rig = Rig::open(&options(scratch.path()));
        rig.keep(None, &[0, 1, 2]);
        let [segment] = &segment_files(scratch.path())[..] else {
            panic!("one segment")
        };
        // As a drive that writes to a wrong place: the first record, whole, on the second.
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(segment)
            .unwrap();
        let mut record = vec![0; 4096 + 16384];
        file.read_exact_at(&mut record, 4096).unwrap();
        file.write_all_at(&record, 4096 + 4096 + 16384).unwrap();
        file.sync_all().unwrap();
        assert_eq!(rig.fetch(&[0, 1, 2], layers_per_step).len(), 1);
        assert_eq!(rig.num_found(&[0, 1, 2]), 1);
        rig.keep(Some(0), &[1]);
        assert_eq!(rig.fetch(&[0, 1, 2], layers_per_step), []);
    }
}

#[test]
fn segment_when_somebody_has_removed_its_file_then_its_pages_are_withdrawn_as_they_are_read() {
    let scratch = Scratch::new();
    Rig::open(&options(scratch.path())).keep(None, &[0]);
    let rig = Rig::open(&options(scratch.path()));
    for segment in segment_files(scratch.path()) {
        std::fs::remove_file(segment).unwrap();
    }
    assert_eq!(rig.fetch(&[0], 1), [(0, Reason::Gone)]);
    assert_eq!(rig.num_found(&[0]), 0);
}

#[test]
fn page_when_its_read_fails_then_withdrawn_for_good_though_its_reader_says_nothing() {
    let scratch = Scratch::new();
    let honest = options(scratch.path());
    Rig::open(&honest).keep(None, &[0, 1]);
    {
        let engine = Faults::parse("eio=1").unwrap().engine();
        let rig = Rig::open(&Options {
            engine,
            ..honest.clone()
        });
        let found = rig.store.lookup(&[key(0)]);
        let offset = rig.offset(0);
        let _ticket = rig
            .store
            .read(&found, 1, &rig.memory, &[offset], 9)
            .unwrap();
        // Nobody has looked at the ticket when the next process comes.
    }
    let rig = Rig::open(&honest);
    assert_eq!((rig.num_found(&[0]), rig.num_found(&[1])), (0, 1));
    assert_eq!(rig.fetch(&[1], 1), []);
}

#[test]
fn namespace_when_it_changes_then_nothing_of_the_old_is_found_and_its_records_go_first() {
    let scratch = Scratch::new();
    let mut options = options(scratch.path());
    options.limits.quota_bytes = 1 << 20;
    let rig = Rig::open(&options);
    rig.keep(None, &[0, 1, 2]);
    let old = rig.store.lookup(&[key(0)]);
    rig.store.invalidate([2; 4]).unwrap();
    assert_eq!(rig.num_found(&[0, 1, 2]), 0);
    let ticket = rig.store.read(&old, 1, &rig.memory, &[0], 1).unwrap();
    assert_eq!(ticket.finish(), [(0, Reason::Gone)]);
    rig.keep(None, &[0, 1]);
    assert_eq!(rig.fetch(&[0, 1], 1), []);
    let num_places = rig.stat("own_places");
    rig.store.evict(3).unwrap();
    assert_eq!(rig.num_found(&[0, 1]), 2, "{num_places} places");
    drop(rig);
    // The shelf belongs to the new namespace now.
    let rig = Rig::open(&Options {
        namespace: [2; 4],
        ..options
    });
    assert_eq!(rig.stat("adopted_pages"), 2);
    assert_eq!(rig.fetch(&[0, 1], 1), []);
}

#[test]
fn writes_when_they_fail_then_reported_and_nothing_stored_is_lost() {
    let (mut num_stored, mut num_failed) = (0, 0);
    for seed in 1..12 {
        let scratch = Scratch::new();
        let engine = Faults::parse(&format!("seed={seed},eio=6"))
            .unwrap()
            .engine();
        let faulty = Options {
            engine,
            ..options(scratch.path())
        };
        let mut stored = Vec::new();
        {
            let rig = Rig::open(&faulty);
            for number in 0..8 {
                let verdicts = rig.put(None, &[number]);
                assert!(verdicts == [Verdict::Queued] || verdicts == [Verdict::Full]);
                rig.store.sync().unwrap();
                match rig.store.completed()[..] {
                    [(_, Outcome::Stored)] => stored.push(number),
                    [(_, Outcome::Failed)] => num_failed += 1,
                    ref other => assert!(other.is_empty() && verdicts == [Verdict::Full]),
                }
            }
        }
        let rig = Rig::open(&options(scratch.path()));
        for number in &stored {
            assert_eq!(rig.fetch(&[*number], 1), []);
        }
        num_stored += stored.len();
    }
    assert!(
        num_stored > 0 && num_failed > 0,
        "{num_stored} stored, {num_failed} failed"
    );
}

#[test]
fn page_when_a_sync_failed_while_it_was_written_then_not_stored_though_the_next_sync_succeeds() {
    let mut num_failed = 0;
    for seed in 1..120 {
        let scratch = Scratch::new();
        let engine = Faults::parse(&format!("seed={seed},eio=8"))
            .unwrap()
            .engine();
        let faulty = Options {
            engine,
            // Commits overlap with writes.
            backlog_bytes: 8 * 20480,
            ..options(scratch.path())
        };
        let mut stored = Vec::new();
        {
            let rig = Rig::open(&faulty);
            for number in 0..8 {
                rig.fill(number, number);
                let offset = rig.offset(number);
                let memory = &rig.memory;
                let verdicts = rig.store.put(&[key(number)], None, memory, &[offset]);
                assert_eq!(verdicts.unwrap().len(), 1);
            }
            rig.store.sync().unwrap();
            for (name, outcome) in rig.store.completed() {
                match outcome {
                    Outcome::Stored => stored.extend((0..8).find(|number| key(*number) == name)),
                    Outcome::Failed => num_failed += 1,
                }
            }
        }
        let rig = Rig::open(&options(scratch.path()));
        for number in &stored {
            assert_eq!(rig.fetch(&[*number], 1), [], "seed {seed}");
        }
    }
    assert!(num_failed > 0);
}

#[test]
fn space_when_the_device_has_none_then_a_pause_with_a_counter() {
    let scratch = Scratch::new();
    let engine = Faults::parse("seed=2,enospc=1").unwrap().engine();
    let rig = Rig::open(&Options {
        engine,
        ..options(scratch.path())
    });
    assert_eq!(rig.put(None, &[1]), [Verdict::Queued]);
    rig.store.sync().unwrap();
    assert_eq!(rig.stat("write_failures"), 1);
    assert_eq!(rig.stat("no_space_pauses"), 1);
    assert_eq!(rig.stat("write_errors"), 0);
    assert_eq!(rig.stat("is_stopped"), 0, "it goes on by itself");
    assert_eq!(rig.put(None, &[2]), [Verdict::Full]);
    assert_eq!(rig.num_found(&[1]), 0);
}

#[test]
fn pages_when_space_ran_out_behind_them_then_stored_before_the_pause_is_over() {
    let scratch = Scratch::new();
    let engine = Faults::parse("seed=1,full=3").unwrap().engine();
    let rig = Rig::open(&Options {
        engine,
        // One segment has places for all.
        segment_bytes: Some(2 << 20),
        ..options(scratch.path())
    });
    rig.store.set_permit(Permit::Paused);
    for page in 0..NUM_FRAMES {
        rig.fill(page, page);
        let offsets = [rig.offset(page)];
        let put = rig.store.put(&[key(page)], None, &rig.memory, &offsets);
        assert_eq!(put.unwrap(), [Verdict::Queued]);
    }
    rig.store.set_permit(Permit::Open);
    let started = Instant::now();
    while rig.stat("written_pages") == 0 {
        let is_early = started.elapsed() < Duration::from_secs(5);
        assert!(is_early, "{:?}", rig.store.stats());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(rig.stat("no_space_pauses"), 1);
    assert!(rig.stat("backlog_pages") > 0, "it pauses still");
}

#[test]
fn pages_when_the_store_cannot_grow_for_them_then_a_sync_tells_how_many_were_lost() {
    let scratch = Scratch::new();
    let rig = Rig::open(&options(scratch.path()));
    let entries = std::fs::read_dir(scratch.path().join("store")).unwrap();
    let mut paths = entries.map(|entry| entry.unwrap().path());
    let shelf = paths.find(|path| path.is_dir()).unwrap();
    std::fs::create_dir(shelf.join("new-segment")).unwrap();
    rig.store.set_permit(Permit::Paused);
    rig.put(None, &[1, 2]);
    assert_eq!(rig.store.sync().unwrap(), 2);
    assert_eq!(rig.stat("write_failures"), 2);
    assert!(rig.stat("growth_failures") > 0);
}

#[test]
fn pages_when_the_share_is_less_than_a_part_of_the_quota_then_stored_all_the_same() {
    let scratch = Scratch::new();
    let mut options = options(scratch.path());
    options.segment_bytes = None;
    // The second kind of pages of one process in eight.
    options.limits.share_bytes = options.limits.quota_bytes / 80;
    let rig = Rig::open(&options);
    rig.keep(None, &[0, 1, 2]);
    assert_eq!(rig.fetch(&[0, 1, 2], 1), []);
}

#[test]
fn calls_when_the_store_is_closed_then_refused() {
    let scratch = Scratch::new();
    let rig = Rig::open(&options(scratch.path()));
    rig.put(None, &[1]);
    rig.store.close();
    rig.store.close();
    assert_eq!(rig.store.completed().len(), 1, "every frame comes back");
    assert!(rig.store.sync().is_err());
    assert!(rig.store.put(&[key(1)], None, &rig.memory, &[0]).is_err());
    let found = rig.store.lookup(&[key(1)]);
    assert!(rig.store.read(&found, 0, &rig.memory, &[], 1).is_err());
}

#[test]
fn frames_when_they_cannot_be_right_then_refused() {
    let scratch = Scratch::new();
    let rig = Rig::open(&options(scratch.path()));
    let keys = [key(1), key(2)];
    for offsets in [vec![0, 100], vec![0, 4096], vec![0, 1 << 40], vec![0]] {
        assert!(
            rig.store.put(&keys, None, &rig.memory, &offsets).is_err(),
            "{offsets:?}"
        );
    }
    assert!(
        Store::open(&Options {
            layer_bytes: vec![],
            ..options(scratch.path())
        })
        .is_err()
    );
}
