// SPDX-License-Identifier: Apache-2.0
//! A copy of leased pages and of pages that a drive is bringing.
#![cfg(not(loom))]

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use banyan_shm::copy_thread::CopyThread;
use banyan_shm::frame::{FrameId, Key};
use banyan_shm::frame_table::FrameTable;
use banyan_shm::geometry::Geometry;
use banyan_shm::memory::SharedMemory;
use banyan_shm::peers::{Lease, Peers};
use banyan_shm::plan::{Arrival, Load, Moved, Plan, Source};
use banyan_shm::pool::Pool;
use banyan_shm::progress::LayerProgress;
use banyan_shm::rank_table::{Namespace, RankTable};

const NUM_LAYERS: usize = 3;
const NUM_FRAMES: usize = 4;
const PAGE_BYTES: usize = 64;
const NAMESPACE: Namespace = [5; 4];
const KEY: Key = [1, 2, 3, 4];

fn geometry() -> Geometry {
    let base_bytes = |layer| (layer * NUM_FRAMES * PAGE_BYTES) as u64;
    let layers: Vec<_> = (0..NUM_LAYERS)
        .map(|layer| vec![(base_bytes(layer), PAGE_BYTES as u64)])
        .collect();
    Geometry::new(&layers, None)
}

fn memory_of(byte: u8) -> Arc<SharedMemory> {
    let memory = SharedMemory::create(NUM_LAYERS * NUM_FRAMES * PAGE_BYTES, "pool").unwrap();
    // SAFETY: memory that nobody else knows yet.
    unsafe { memory.mapping().start().write_bytes(byte, memory.len()) };
    Arc::new(memory)
}

/// The bytes of a page, where they are all the same.
fn page(pool: &SharedMemory, frame: usize) -> Option<u8> {
    // SAFETY: its only writer has come to an end.
    let bytes = unsafe { std::slice::from_raw_parts(pool.mapping().start(), pool.len()) };
    let in_layer = |layer: usize| &bytes[(layer * NUM_FRAMES + frame) * PAGE_BYTES..][..PAGE_BYTES];
    let byte = in_layer(0)[0];
    (0..NUM_LAYERS)
        .all(|layer| in_layer(layer).iter().all(|other| *other == byte))
        .then_some(byte)
}

fn leased(peers: &Peers) -> Lease {
    let found = peers.lookup(&[KEY], None);
    peers.lease(&found, 1, Some((KEY, KEY))).unwrap().unwrap()
}

/// The frame once no reader has it any more.
fn retired(owner: &mut FrameTable, frame: i64) -> Vec<FrameId> {
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut free = owner.retire(&[frame]).unwrap();
    while free.is_empty() {
        assert!(Instant::now() < deadline, "its reader does not let go");
        thread::sleep(Duration::from_millis(1));
        free = owner.drain();
    }
    free
}

#[test]
fn copy_when_its_drive_stalls_then_owners_have_their_pages_back_and_no_layer_is_told_early() {
    let rank_table = Arc::new(RankTable::create(2).unwrap());
    let (theirs, ours) = (Pool::Mapped(memory_of(7)), memory_of(0));
    let mut owner = FrameTable::open(
        rank_table.clone(),
        0,
        NAMESPACE,
        theirs,
        NUM_FRAMES,
        &geometry(),
    )
    .unwrap();
    owner.publish(&[2], &[KEY]).unwrap();
    let pool = Pool::Mapped(ours.clone());
    let peers = Peers::of_rank(rank_table, Some(1), 1, NAMESPACE, geometry(), pool).unwrap();
    let progress = Arc::new(LayerProgress::new(NUM_LAYERS));
    let arrival = Arrival {
        memory: memory_of(9),
        offsets: vec![0],
        progress: progress.clone(),
    };
    let load = |source, frame| Load {
        source,
        frames: vec![frame],
    };
    let loads = vec![
        load(Source::Leased(leased(&peers)), 0),
        load(Source::Arriving(arrival), 1),
    ];
    let plan = Plan::new(peers.home().unwrap().clone(), loads).unwrap();
    let copy_thread = CopyThread::start().unwrap();
    let parcel = copy_thread.send(Box::new(plan));

    assert_eq!(retired(&mut owner, 2), [2]);
    assert_eq!(parcel.layers_done(), 0);
    progress.advance_to(NUM_LAYERS);
    assert!(parcel.wait_end());
    assert_eq!([0, 1].map(|frame| page(&ours, frame)), [Some(7), Some(9)]);
    let page_bytes = (NUM_LAYERS * PAGE_BYTES) as u64;
    let moved = Moved {
        fetched_bytes: page_bytes,
        copied_bytes: 2 * page_bytes,
    };
    assert_eq!(parcel.moved(), moved);
}
