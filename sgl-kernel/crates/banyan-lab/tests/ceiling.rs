// SPDX-License-Identifier: Apache-2.0
//! The measure of plain io_uring makes every request that it counts.

use std::time::Duration;

use banyan_lab::ceiling::{Kind, Memory, measure, prepare};
use banyan_store::device::UringDevice;

#[test]
fn ceiling_when_measured_then_every_request_was_made() {
    let path = std::env::temp_dir().join(format!("banyan-ceiling-{}", std::process::id()));
    prepare(&path, 64 * 4096).unwrap();
    for kind in [Kind::Read, Kind::DurableWrite] {
        if UringDevice::open().is_ok() {
            for memory in [Memory::Shared, Memory::Private] {
                let taken = measure(&path, kind, 4096, 64, 8, memory).unwrap();
                assert!(taken > Duration::ZERO);
                if kind == Kind::DurableWrite {
                    // `prepare` wrote others, and wherever a request is left out they are still there.
                    assert!(std::fs::read(&path).unwrap() == vec![0x5a; 64 * 4096]);
                    prepare(&path, 64 * 4096).unwrap();
                }
            }
        }
        assert!(measure(&path, kind, 4096, 65, 8, Memory::Private).is_err());
    }
    std::fs::remove_file(path).unwrap();
}
