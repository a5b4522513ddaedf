// SPDX-License-Identifier: Apache-2.0
//! A process that has no file left to open: in one of its own, for the bound is all its threads'.

mod rig;

use std::fs::File;
use std::sync::{Mutex, PoisonError};

use banyan_store::check::{self, Treatment};
use banyan_store::directory::Stripe;
use banyan_store::reading::Reason;
use banyan_store::store::Options;
use rig::{Rig, Scratch, options};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn limit_files(most: Option<u64>) {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: system calls with a struct of ours.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        limit.rlim_cur = most.unwrap_or(limit.rlim_max);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
}

/// Does it while this process may open so many files more.
fn with_spare_files<T>(num_spare: usize, act: impl FnOnce() -> T) -> T {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse::<u64>());
    let greatest: u64 = numbers.map(Result::unwrap).max().unwrap();
    limit_files(Some(greatest + 1 + num_spare as u64));
    let mut others: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    others.truncate(others.len() - num_spare);
    let done = act();
    limit_files(None);
    done
}

/// Pages that each have a segment of their own.
fn many_segments(scratch: &Scratch) -> Options {
    Options {
        segment_bytes: Some(4096 + 20480 + 544),
        ..options(scratch.path())
    }
}

#[test]
fn pages_when_no_file_can_be_opened_to_read_them_then_they_fail_now_and_are_still_there() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let options = options(scratch.path());
    Rig::open(&options).keep(None, &[0, 1]);
    let rig = Rig::open(&options);
    for layers_per_step in [1, 3] {
        let failed = with_spare_files(0, || rig.fetch(&[0, 1], layers_per_step));
        assert_eq!(failed, [(0, Reason::Refused), (1, Reason::Refused)]);
    }
    assert_eq!(rig.stat("read_errors"), 4);
    assert_eq!(rig.fetch(&[0, 1], 1), []);
    assert_eq!(rig.stat("dropped_pages"), 0);
}

#[test]
fn store_when_its_process_may_open_few_files_then_by_io_uring_as_otherwise() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let options = options(scratch.path());
    if !Rig::open(&options).store.engine().starts_with("io_uring") {
        return eprintln!("not tried: no io_uring here");
    }
    limit_files(Some(1024));
    let rig = Rig::open(&options);
    limit_files(None);
    assert!(
        rig.store.engine().starts_with("io_uring,"),
        "{}",
        rig.store.engine()
    );
    rig.keep(None, &[0]);
    assert_eq!(rig.fetch(&[0], 1), []);
}

#[test]
fn shelf_when_it_has_more_segments_than_a_process_may_have_files_then_none_is_found_bad() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let options = many_segments(&scratch);
    let chain: Vec<u64> = (0..40).collect();
    {
        let rig = Rig::open(&options);
        rig.keep(None, &chain);
        assert_eq!(rig.stat("num_segments"), 40);
    }
    let stripe = Stripe::open(&options.paths).unwrap();
    let report = with_spare_files(12, || check::check(&stripe, Treatment::Repair)).unwrap();
    assert_eq!((report.num_records, report.findings), (40, vec![]));
    assert_eq!(Rig::open(&options).fetch(&chain, 1), []);
}
