// SPDX-License-Identifier: Apache-2.0
//! A file system that is mounted anew under a store, or is only read any more: what it holds is as good as before.

mod rig;

use std::fs;

use banyan_lab::Faults;
use banyan_store::reading::Reason;
use banyan_store::store::Options;
use rig::{Rig, Scratch, options};

/// With pages 0 and 1 stored by somebody who has left, in a segment each.
fn with_faults(scratch: &Scratch, faults: &str) -> Options {
    let honest = Options {
        segment_bytes: Some(4096 + 20480 + 544),
        ..options(scratch.path())
    };
    Rig::open(&honest).keep(None, &[0, 1]);
    Options {
        engine: Faults::parse(faults).unwrap().engine(),
        ..honest
    }
}

#[test]
fn pages_when_their_mount_is_made_anew_then_refused_once_and_read_again() {
    let scratch = Scratch::new();
    let rig = Rig::open(&with_faults(&scratch, "remount=3"));
    assert_eq!(rig.fetch(&[0, 1], 3), []);
    let refused = [(0, Reason::Refused), (1, Reason::Refused)];
    assert_eq!(rig.fetch(&[0, 1], 3), refused);
    assert_eq!(rig.fetch(&[0, 1], 3), []);
    assert_eq!(rig.stat("dropped_pages"), 0);
}

#[test]
fn pages_of_another_writer_when_the_mount_is_made_anew_then_still_found_and_read() {
    let scratch = Scratch::new();
    let faulty = with_faults(&scratch, "remount=3");
    let _owner = Rig::open(&Options {
        engine: options(scratch.path()).engine,
        ..faulty.clone()
    });
    let reader = Rig::open(&faulty);
    assert_eq!(reader.fetch(&[0, 1], 3), []);
    assert_eq!(reader.fetch(&[0, 1], 3).len(), 2);
    assert_eq!(reader.fetch(&[0, 1], 3), []);
}

#[test]
fn writes_when_the_mount_is_made_anew_then_they_fail_and_those_after_them_do_not() {
    let scratch = Scratch::new();
    let rig = Rig::open(&with_faults(&scratch, "remount=1"));
    // The first finds out about the segment, the second about the manifest.
    for number in [2, 3] {
        rig.put(None, &[number]);
        assert_eq!(rig.store.sync().unwrap(), 1);
    }
    assert_eq!(rig.stat("write_errors"), 1, "the other was given up");
    rig.keep(None, &[4]);
    assert_eq!(rig.fetch(&[4], 3), []);
}

#[test]
fn pages_when_the_drive_is_only_read_any_more_then_they_come_and_nothing_is_stored() {
    let scratch = Scratch::new();
    let rig = Rig::open(&with_faults(&scratch, "readonly=1"));
    // The first file is open by then, the second is not.
    assert_eq!(rig.fetch(&[0], 3), []);
    assert_eq!(rig.fetch(&[0, 1], 3), []);
    rig.put(Some(1), &[2]);
    assert_eq!(rig.store.sync().unwrap(), 1);
    assert_eq!(rig.fetch(&[0, 1], 3), []);
    assert_eq!(rig.stat("dropped_pages"), 0);
}

#[test]
fn pages_when_their_mount_is_away_then_refused_and_read_again_when_it_is_back() {
    let scratch = Scratch::new();
    let rig = Rig::open(&with_faults(&scratch, ""));
    let [store, mounted] = ["store", "mounted"].map(|name| scratch.path().join(name));
    fs::rename(&store, &mounted).unwrap();
    // As the mount point is without a mount.
    fs::create_dir(&store).unwrap();
    let refused = [(0, Reason::Refused), (1, Reason::Refused)];
    assert_eq!(rig.fetch(&[0, 1], 3), refused);
    assert_eq!(rig.stat("read_errors"), 2);
    fs::remove_dir(&store).unwrap();
    fs::rename(&mounted, &store).unwrap();
    assert_eq!(rig.fetch(&[0, 1], 3), []);
    assert_eq!(rig.stat("dropped_pages"), 0);
}
