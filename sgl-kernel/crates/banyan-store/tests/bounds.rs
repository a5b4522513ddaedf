// SPDX-License-Identifier: Apache-2.0
//! What must not grow, in a process of its own: memory is measured.

mod rig;

use rig::{Rig, Scratch, options};

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

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

fn num_files(path: &std::path::Path) -> usize {
    let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| {
            if entry.path().is_dir() {
                num_files(&entry.path())
            } else {
                1
            }
        })
        .sum()
}

#[test]
fn churn_when_it_goes_on_then_memory_files_and_disk_stay_where_they_are() {
    let scratch = Scratch::new();
    let mut options = options(scratch.path());
    options.limits.quota_bytes = 2 << 20;
    let rig = Rig::open(&options);
    let churn = |from: u64| {
        for conversation in from..from + 150 {
            let chain: Vec<u64> = (conversation * 100..conversation * 100 + 8).collect();
            rig.keep(None, &chain);
            assert_eq!(rig.fetch(&chain, 1), []);
            // Another conversation is taken up again.
            let old: Vec<u64> = ((conversation / 2) * 100..(conversation / 2) * 100 + 8).collect();
            let num_found = rig.num_found(&old);
            assert_eq!(rig.fetch(&old[..num_found], 3), []);
        }
        (resident_bytes(), num_files(scratch.path()))
    };
    let before = churn(0);
    let after = churn(150);
    assert!(used_bytes(scratch.path()) <= 2 << 20);
    assert_eq!(before.1, after.1, "files");
    let grown = after.0.saturating_sub(before.0);
    assert!(grown < 4 << 20, "memory grew by {grown} bytes");
    assert!(
        rig.stat("manifest_rewrites") > 3,
        "the log was long enough to be replaced"
    );
}
