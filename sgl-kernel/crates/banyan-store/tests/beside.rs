// SPDX-License-Identifier: Apache-2.0
//! What others have stored in another namespace and shape, read beside an open store.

mod rig;

use std::fs;

use banyan_store::state::Verdict;
use banyan_store::store::Options;
use rig::{Rig, Scratch, key, options};

fn two(scratch: &Scratch) -> (Rig, Rig, Options) {
    let theirs = options(scratch.path());
    let ours = Options {
        namespace: [9; 4],
        layer_bytes: vec![12288],
        ..theirs.clone()
    };
    (Rig::open(&theirs), Rig::open(&ours), theirs)
}

fn num_entries(scratch: &Scratch) -> usize {
    let shelves = fs::read_dir(scratch.path().join("store")).unwrap();
    shelves
        .map(|entry| fs::read_dir(entry.unwrap().path()).map_or(1, |files| 1 + files.count()))
        .sum()
}

#[test]
fn page_when_another_namespace_has_stored_it_then_read_and_nothing_is_made_or_taken() {
    let scratch = Scratch::new();
    let (writer, rig, theirs) = two(&scratch);
    writer.keep(None, &[0, 1]);
    let before = num_entries(&scratch);
    let beside = rig
        .store
        .beside(theirs.namespace, theirs.layer_bytes, 1)
        .unwrap();
    let found = beside.lookup(&[key(0), key(1), key(2)]);
    assert_eq!(found.hits.len(), 2);
    let offsets = [writer.offset(5), writer.offset(7)];
    let ticket = beside.read(&found, 2, &writer.memory, &offsets, 3).unwrap();
    assert_eq!(ticket.finish(), []);
    assert!(writer.is_filled(5, 0) && writer.is_filled(7, 1));
    let verdicts = beside.put(&[key(9)], None, &writer.memory, &[0]).unwrap();
    assert_eq!(verdicts, [Verdict::Full]);
    assert_eq!(beside.sync().unwrap(), 0);
    beside.close();
    assert_eq!(num_entries(&scratch), before);
}

#[test]
fn page_when_its_writer_stores_and_clears_then_found_and_at_once_no_more() {
    let scratch = Scratch::new();
    let (writer, rig, theirs) = two(&scratch);
    let beside = rig
        .store
        .beside(theirs.namespace, theirs.layer_bytes, 1)
        .unwrap();
    assert_eq!(beside.lookup(&[key(0)]).hits.len(), 0);
    writer.keep(None, &[0]);
    beside.refresh().unwrap();
    assert_eq!(beside.lookup(&[key(0)]).hits.len(), 1);
    writer.store.clear().unwrap();
    assert_eq!(beside.lookup(&[key(0)]).hits.len(), 0);
}
