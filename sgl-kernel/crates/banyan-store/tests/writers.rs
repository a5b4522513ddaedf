// SPDX-License-Identifier: Apache-2.0
//! Several writers and readers on one path.

mod rig;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use banyan_store::pacing::Permit;
use banyan_store::reading::Reason;
use banyan_store::state::Verdict;
use banyan_store::store::Options;
use banyan_store::traffic::Traffic;
use rig::{Rig, Scratch, key, options};

fn two(scratch: &Scratch) -> [Rig; 2] {
    let options = options(scratch.path());
    [Rig::open(&options), Rig::open(&options)]
}

#[test]
fn page_when_another_writer_has_stored_it_then_read_from_there_and_not_stored_again() {
    let scratch = Scratch::new();
    let [ours, theirs] = two(&scratch);
    theirs.keep(None, &[0, 1, 2]);
    ours.store.refresh().unwrap();
    assert_eq!(ours.fetch(&[0, 1, 2], 1), []);
    assert_eq!(ours.put(None, &[0, 1, 2]), [Verdict::Present; 3]);
    assert_eq!(ours.stat("put_present"), 3);
    ours.keep(Some(2), &[3]);
    theirs.store.refresh().unwrap();
    assert_eq!(theirs.fetch(&[0, 1, 2, 3], 1), []);
    assert_eq!(
        (ours.stat("written_pages"), theirs.stat("written_pages")),
        (1, 3)
    );
}

#[test]
fn page_when_another_writer_is_just_writing_it_then_elsewhere() {
    let scratch = Scratch::new();
    let [ours, theirs] = two(&scratch);
    theirs.store.set_permit(Permit::Paused);
    assert_eq!(theirs.put(None, &[0, 1]), [Verdict::Queued; 2]);
    assert_eq!(ours.put(None, &[0, 1]), [Verdict::Elsewhere; 2]);
    theirs.store.sync().unwrap();
    ours.store.refresh().unwrap();
    assert_eq!(ours.fetch(&[0, 1], 1), []);
    assert_eq!(ours.stat("written_pages"), 0);
}

#[test]
fn parent_when_a_child_lives_on_another_shelf_then_not_evicted() {
    let scratch = Scratch::new();
    let [ours, theirs] = two(&scratch);
    ours.keep(None, &[0]);
    theirs.store.refresh().unwrap();
    theirs.keep(Some(0), &[1]);
    ours.store.refresh().unwrap();
    assert_eq!(ours.store.evict(5).unwrap(), 0);
    assert_eq!(theirs.store.evict(5).unwrap(), 1);
    theirs.store.sync().unwrap();
    ours.store.refresh().unwrap();
    assert_eq!(ours.store.evict(5).unwrap(), 1);
}

#[test]
fn page_when_its_place_was_reused_by_its_owner_then_gone_and_never_the_new_bytes() {
    let scratch = Scratch::new();
    let mut options = options(scratch.path());
    options.limits.quota_bytes = 600 << 10;
    options.limits.share_bytes = 270 << 10;
    let owner = Rig::open(&options);
    let reader = Rig::open(&options);
    owner.keep(None, &[0]);
    reader.store.refresh().unwrap();
    let stale = reader.store.lookup(&[key(0)]);
    assert_eq!(stale.hits.len(), 1);
    for number in 1..40 {
        owner.keep(None, &[number]);
    }
    assert_eq!(owner.num_found(&[0]), 0);
    let ticket = reader
        .store
        .read(&stale, 1, &reader.memory, &[0], 1)
        .unwrap();
    assert_eq!(ticket.finish(), [(0, Reason::Gone)]);
    assert_eq!(reader.stat("checksum_failures"), 0);
}

#[test]
fn reader_when_the_owner_replaces_its_manifest_then_follows() {
    let scratch = Scratch::new();
    let [owner, reader] = two(&scratch);
    owner.keep(None, &[0, 1]);
    reader.store.refresh().unwrap();
    // A new namespace and back: each writes a new manifest.
    owner.store.invalidate([2; 4]).unwrap();
    owner.keep(None, &[5]);
    owner.store.invalidate([1; 4]).unwrap();
    owner.keep(Some(1), &[2]);
    reader.store.refresh().unwrap();
    assert_eq!(reader.fetch(&[0, 1, 2], 1), []);
    assert_eq!(reader.num_found(&[5]), 0);
}

#[test]
fn shelf_when_its_manifest_does_not_verify_any_more_then_a_reader_forgets_what_it_said() {
    let scratch = Scratch::new();
    let [owner, reader] = two(&scratch);
    owner.keep(None, &[0]);
    reader.store.refresh().unwrap();
    assert_eq!(reader.num_found(&[0]), 1);
    drop(owner);
    let shelves = fs::read_dir(scratch.path().join("store")).unwrap();
    let mut shelves = shelves.map(|entry| entry.unwrap().path());
    let is_owners = |path: &PathBuf| path.join("segment-000000").exists();
    let shelf = shelves.find(is_owners).unwrap();
    fs::remove_file(shelf.join("manifest-1")).unwrap();
    fs::write(shelf.join("manifest-1"), [0; 5000]).unwrap();
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    fs::set_permissions(shelf.join("manifest-1"), private).unwrap();
    reader.store.refresh().unwrap();
    assert_eq!(reader.num_found(&[0]), 0);
}

#[test]
fn shelf_when_its_writer_is_gone_then_adopted_by_one_and_readable_for_all() {
    let scratch = Scratch::new();
    let [first, second] = two(&scratch);
    first.keep(None, &[0]);
    second.keep(None, &[10]);
    drop((first, second));
    let [third, fourth] = two(&scratch);
    assert_eq!(
        third.stat("adopted_pages") + fourth.stat("adopted_pages"),
        2
    );
    assert_eq!(third.fetch(&[0], 1), []);
    assert_eq!(third.fetch(&[10], 1), []);
    assert_eq!(fourth.fetch(&[0], 1), []);
    let shelves = fs::read_dir(scratch.path().join("store")).unwrap();
    let is_shelf = |entry: &fs::DirEntry| entry.file_name().to_str().unwrap().starts_with("shelf-");
    assert_eq!(
        shelves
            .filter(|entry| is_shelf(entry.as_ref().unwrap()))
            .count(),
        2
    );
}

#[test]
fn segment_when_its_shelf_shrank_and_grew_again_then_a_reader_finds_the_new_file() {
    let scratch = Scratch::new();
    let large = options(scratch.path());
    let mut small = large.clone();
    small.limits.share_bytes = 270 << 10;
    let owner = Rig::open(&large);
    let reader = Rig::open(&large);
    let [old, new]: [Vec<u64>; 2] = [(0..30).collect(), (100..130).collect()];
    owner.keep(None, &old);
    reader.store.refresh().unwrap();
    assert_eq!(reader.fetch(&old, 1), []);
    drop(owner);
    drop(Rig::open(&small));
    Rig::open(&large).keep(None, &new);
    reader.store.refresh().unwrap();
    for layers_per_step in [1, 3] {
        assert_eq!(reader.fetch(&new, layers_per_step), []);
    }
}

#[test]
fn shelf_when_another_machine_has_taken_it_then_its_manifest_stays_the_one() {
    let scratch = Scratch::new();
    let rig = Rig::open(&Options {
        stall_after: Duration::from_millis(500),
        ..options(scratch.path())
    });
    rig.keep(None, &[0]);
    let shelves = fs::read_dir(scratch.path().join("store")).unwrap();
    let mut shelves = shelves.map(|entry| entry.unwrap().path());
    let shelf = shelves.find(|path| path.is_dir()).unwrap();
    let names = || -> Vec<String> {
        let files = fs::read_dir(&shelf).unwrap();
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("manifest-")).collect()
    };
    fs::rename(shelf.join("writer-1"), shelf.join("writer-2")).unwrap();
    fs::rename(shelf.join("manifest-1"), shelf.join("manifest-9")).unwrap();
    rig.store.clear().unwrap_err();
    assert_eq!(names(), ["manifest-9"]);
}

#[test]
fn shelf_when_nobody_owns_it_and_space_is_short_then_removed() {
    let scratch = Scratch::new();
    let mut options = options(scratch.path());
    options.limits.quota_bytes = 700 << 10;
    let old = Options {
        namespace: [9; 4],
        ..options.clone()
    };
    Rig::open(&old).keep(None, &(0..20).collect::<Vec<_>>());
    let rig = Rig::open(&options);
    for number in 100..130 {
        rig.keep(None, &[number]);
    }
    assert!(rig.stat("own_places") > 20, "{:?}", rig.store.stats());
    drop(rig);
    assert_eq!(Rig::open(&old).num_found(&[0]), 0);
}

/// Files of the store that are gone and still open in this process.
fn num_deleted(scratch: &Scratch) -> usize {
    let links = fs::read_dir("/proc/self/fd").unwrap();
    let names = links.filter_map(|link| fs::read_link(link.unwrap().path()).ok());
    names
        .filter(|name| name.starts_with(scratch.path()))
        .filter(|name| name.to_str().unwrap().ends_with(" (deleted)"))
        .count()
}

#[test]
fn shelf_when_removed_then_those_who_have_read_it_let_go_of_its_files_though_they_are_idle_or_read_on()
 {
    for is_idle in [true, false] {
        let scratch = Scratch::new();
        let mut options = options(scratch.path());
        // A segment for two of the three.
        options.limits.quota_bytes = 1 << 20;
        options.read_bytes_per_s = Some(100_000);
        let [leaver, reader, writer] = [(); 3].map(|()| Rig::open(&options));
        let own: Vec<u64> = (10..22).collect();
        leaver.keep(None, &[0]);
        reader.keep(None, &own);
        reader.store.refresh().unwrap();
        assert_eq!(reader.fetch(&[0], 1), []);
        drop(leaver);
        let found = reader
            .store
            .lookup(&own.iter().map(|page| key(*page)).collect::<Vec<_>>());
        let offsets: Vec<u64> = (0..12).map(|frame| reader.offset(frame)).collect();
        let read = || {
            let store = &reader.store;
            store.read(&found, 12, &reader.memory, &offsets, 1).unwrap()
        };
        let slow = (!is_idle).then(read);
        writer.keep(None, &[30]);
        assert!(num_deleted(&scratch) > 0, "the shelf is still there");
        if !is_idle {
            reader.store.refresh().unwrap();
            writer.store.refresh().unwrap();
        }
        let started = Instant::now();
        while num_deleted(&scratch) > 0 {
            assert!(started.elapsed().as_secs() < 20, "{is_idle}");
            std::thread::sleep(Duration::from_millis(5));
        }
        if let Some(slow) = slow {
            assert!(!slow.progress.has_ended());
            slow.cancel();
        }
    }
}

#[test]
fn shelf_when_it_cannot_be_removed_then_another_one_makes_room() {
    let scratch = Scratch::new();
    let mut options = options(scratch.path());
    options.limits.quota_bytes = 1 << 20;
    for number in [8, 9] {
        let old = Options {
            namespace: [number; 4],
            ..options.clone()
        };
        Rig::open(&old).keep(None, &(0..8).collect::<Vec<_>>());
    }
    let shelves = fs::read_dir(scratch.path().join("store")).unwrap();
    let shelves = shelves.map(|entry| entry.unwrap().path());
    let first = shelves.filter(|path| path.is_dir()).min().unwrap();
    fs::create_dir(first.join("somebody's")).unwrap();
    let rig = Rig::open(&options);
    rig.keep(None, &[0, 1]);
    assert_eq!(rig.num_found(&[0, 1]), 2);
}

#[test]
fn writers_when_another_process_reads_then_yield_until_it_has_ended() {
    let scratch = Scratch::new();
    let [writer, reader] = two(&scratch);
    writer.keep(None, &[0]);
    let traffic = Traffic::open(&scratch.path().join("store")).unwrap();
    traffic.set_reading(1);
    writer.put(None, &[1]);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(writer.stat("written_pages"), 1, "somebody reads");
    let started = Instant::now();
    traffic.set_reading(0);
    while writer.stat("written_pages") < 2 {
        assert!(started.elapsed().as_secs() < 10, "the writer never went on");
        std::thread::sleep(Duration::from_millis(1));
    }
    reader.store.refresh().unwrap();
    assert_eq!(reader.fetch(&[1], 1), []);
}

#[test]
fn writer_when_another_process_has_not_said_for_long_that_it_reads_then_goes_on() {
    let scratch = Scratch::new();
    let writer = Rig::open(&Options {
        stall_after: Duration::from_millis(200),
        ..options(scratch.path())
    });
    // As one that is stopped.
    let other = Traffic::open(&scratch.path().join("store")).unwrap();
    other.set_reading(1);
    writer.put(None, &[1]);
    let started = Instant::now();
    while writer.stat("written_pages") < 1 {
        assert!(started.elapsed().as_secs() < 10, "it waits for ever");
        std::thread::sleep(Duration::from_millis(1));
    }
}
