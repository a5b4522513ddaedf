// SPDX-License-Identifier: Apache-2.0
//! One contract for every device.

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::path::PathBuf;

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use banyan_lab::{Faults, FaultyDevice};
use banyan_store::device::{
    Action, Completion, Device, Op, Span, Spans, ThreadsDevice, UringDevice,
};

const PATIENCE: Duration = Duration::from_secs(5);

fn scratch_file(name: &str) -> (PathBuf, Arc<File>) {
    let path = std::env::temp_dir().join(format!("banyan-device-{}-{name}", std::process::id()));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .unwrap();
    (path, Arc::new(file))
}

fn finish(device: &mut dyn Device, count: usize) -> Vec<Completion> {
    let mut completed = Vec::new();
    while completed.len() < count {
        let before = completed.len();
        device.reap(PATIENCE, &mut completed).unwrap();
        assert!(completed.len() > before, "nothing completed in time");
    }
    completed
}

fn devices() -> Vec<(&'static str, Box<dyn Device>)> {
    let mut devices: Vec<(&'static str, Box<dyn Device>)> = vec![
        ("threads", Box::new(ThreadsDevice::open(2).unwrap())),
        (
            "faulty",
            Box::new(FaultyDevice::new(Faults::parse("seed=3,short=2").unwrap())),
        ),
    ];
    match UringDevice::open() {
        Ok(device) => devices.push(("uring", Box::new(device))),
        Err(error) => eprintln!("no io_uring here: {error}"),
    }
    devices
}

#[test]
fn device_when_written_synced_and_read_then_the_same_bytes() {
    for (name, mut device) in devices() {
        let (path, file) = scratch_file(name);
        file.set_len(64 * 1024).unwrap();
        let file = device.add_file(file).unwrap();
        let mut memory: Vec<u8> = (0..64 * 1024).map(|byte| (byte * 7 % 251) as u8).collect();
        device.add_memory(Span::of(&mut memory));
        for piece in 0..16 {
            let (head, rest) = memory[piece * 4096..][..4096].split_at_mut(100);
            let spans = Spans::of([Span::of(head), Span::of(rest)]);
            let op = Op {
                token: piece as u64,
                file,
                offset: piece as u64 * 4096,
                action: Action::Write(spans),
            };
            // SAFETY: `memory` outlives the operation, which is reaped below.
            unsafe { device.push(op) };
        }
        let tokens: HashSet<u64> = finish(&mut *device, 16)
            .iter()
            .map(|done| {
                assert!(done.result.is_ok());
                done.token
            })
            .collect();
        assert_eq!(tokens.len(), 16, "{name}");
        let sync = Op {
            token: 99,
            file,
            offset: 0,
            action: Action::Sync,
        };
        // SAFETY: no memory.
        unsafe { device.push(sync) };
        assert!(finish(&mut *device, 1)[0].result.is_ok());
        assert_eq!(std::fs::read(&path).unwrap(), memory, "{name}");
        let mut back = vec![0; 64 * 1024];
        device.add_memory(Span::of(&mut back));
        let read = Op {
            token: 1,
            file,
            offset: 0,
            action: Action::Read(Spans::one(Span::of(&mut back))),
        };
        // SAFETY: `back` outlives the operation.
        unsafe { device.push(read) };
        assert!(finish(&mut *device, 1)[0].result.is_ok());
        assert_eq!(back, memory, "{name}");
        device.remove_file(file);
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn device_when_woken_before_it_waits_then_the_wake_is_not_lost() {
    for (name, mut device) in devices() {
        device.waker().wake();
        let started = std::time::Instant::now();
        device.reap(PATIENCE, &mut Vec::new()).unwrap();
        assert!(started.elapsed() < PATIENCE / 2, "{name}");
        device
            .reap(Duration::from_millis(1), &mut Vec::new())
            .unwrap();
    }
}

#[test]
fn faults_when_misspelt_then_refused() {
    assert!(Faults::parse("seed=1,eoi=3").is_err());
    assert!(Faults::parse("cut").is_err());
    assert_eq!(Faults::parse("cut=4").unwrap().cut, 4);
}

#[test]
fn unsynced_writes_when_the_device_is_dropped_then_they_are_lost() {
    let (path, file) = scratch_file("volatile");
    file.set_len(4096).unwrap();
    let mut device = FaultyDevice::new(Faults::default());
    let file = device.add_file(file).unwrap();
    let mut bytes = vec![9; 4096];
    let write = Op {
        token: 0,
        file,
        offset: 0,
        action: Action::Write(Spans::one(Span::of(&mut bytes))),
    };
    // SAFETY: `bytes` outlives the operation.
    unsafe { device.push(write) };
    finish(&mut device, 1);
    drop(device);
    assert_eq!(std::fs::read(&path).unwrap(), vec![0; 4096]);
    std::fs::remove_file(path).unwrap();
}
