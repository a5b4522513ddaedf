// SPDX-License-Identifier: Apache-2.0
//! How long a store takes to open after a crash: `recovery DIR [RECORDS]`.
//!
//! The manifest is that of a shelf in use: as many records again have come and gone. Segments are there in name and length; their
//! content is not read. Prints one line of JSON.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use banyan_shm::frame::Key;
use banyan_store::directory::Stripe;
use banyan_store::error::Result;
use banyan_store::format::{Entry, FileHeader, FileKind, Identity, Kind, NO_PARENT, Record};
use banyan_store::geometry::Geometry;
use banyan_store::growth::Limits;
use banyan_store::manifest;
use banyan_store::owned::{self, Way};
use banyan_store::store::{EngineChoice, Options, Store};

const LAYER_BYTES: [u64; 30] = [12288; 30];
const PLACES_PER_SEGMENT: u32 = 1 << 14;
const NAMESPACE: [u64; 4] = [7; 4];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let directory = Path::new(arguments.get(1).expect("usage: recovery DIR [RECORDS]"));
    let count = arguments
        .get(2)
        .map_or(1_000_000, |text| text.parse().expect("a number of records"));
    let path = directory.join("recovery");
    drop(std::fs::remove_dir_all(&path));
    make(&path, count)?;
    let options = Options {
        paths: vec![path.clone()],
        namespace: NAMESPACE,
        layer_bytes: LAYER_BYTES.to_vec(),
        limits: Limits {
            quota_bytes: u64::MAX / 4,
            share_bytes: u64::MAX / 4,
            floor_bytes: 0,
        },
        segment_bytes: None,
        backlog_bytes: 1 << 20,
        engine: EngineChoice::Auto,
        read_bytes_per_s: None,
        stall_after: Duration::from_secs(10),
    };
    let mut seconds = Vec::new();
    for _ in 0..5 {
        let started = Instant::now();
        let store = Store::open(&options)?;
        seconds.push(started.elapsed().as_secs_f64());
        let found = store.lookup(&(0..100).map(key).collect::<Vec<_>>());
        assert_eq!(found.hits.len() as u64, count.min(100));
        store.close();
    }
    seconds.sort_by(f64::total_cmp);
    println!(
        "{{\"num_records\": {count}, \"open_s\": {:.3}, \"least_s\": {:.3}, \"most_s\": {:.3}}}",
        seconds[2], seconds[0], seconds[4]
    );
    drop(std::fs::remove_dir_all(&path));
    Ok(())
}

fn key(number: u64) -> Key {
    [1, 2, 3, 4].map(|word: u32| {
        (number + 1)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(word * 13)
    })
}

/// A shelf as its writer left it: chains of 64 pages, and a log twice as long as it need be.
fn make(path: &Path, count: u64) -> Result<()> {
    let stripe = Stripe::open_or_create(&[path.to_path_buf()])?;
    let (shelf, _lock) = stripe.create_shelf()?;
    let header = FileHeader {
        shelf,
        number: 1,
        sequence: 0,
        namespace: NAMESPACE,
        places_per_segment: PLACES_PER_SEGMENT,
        geometry: Geometry::new(&LAYER_BYTES)?,
    };
    let entry = |sequence: u64, kind: Kind, number: u64, generation: u64| Entry {
        sequence,
        kind,
        place: (number % count) as u32,
        record: Record {
            identity: Identity {
                key: key(number),
                namespace: NAMESPACE,
                generation,
            },
            parent: if number.is_multiple_of(64) {
                NO_PARENT
            } else {
                key(number - 1)
            },
            checksum: 0,
        },
    };
    // Each record had a predecessor in its place, half of which are retired in the log.
    let before =
        (0..count / 2).map(|number| entry(number + 1, Kind::Publish, number + count, number + 1));
    let retired = (0..count / 2).map(|number| {
        entry(
            number + 1 + count / 2,
            Kind::Retire,
            number + count,
            number + 1,
        )
    });
    let now = (0..count).map(|number| {
        entry(
            number + 1 + count,
            Kind::Publish,
            number,
            number + 1 + count,
        )
    });
    manifest::replace(
        &stripe.shelf(shelf, 0),
        &header,
        before.chain(retired).chain(now),
    )?;
    for segment in 0..count.div_ceil(u64::from(PLACES_PER_SEGMENT)) as u32 {
        let file =
            owned::open(&stripe.segment(shelf, segment), Way::Create).expect("a segment file");
        let own = FileHeader {
            number: segment.into(),
            ..header.clone()
        };
        file.set_len(header.segmenting().file_bytes())
            .expect("a sparse file");
        file.write_all_at(&own.encode(FileKind::Segment), 0)
            .expect("a segment header");
    }
    Ok(())
}
