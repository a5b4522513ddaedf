// SPDX-License-Identifier: Apache-2.0
//! Memory with a name, in huge pages.
#![cfg(not(loom))]

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;

use banyan_shm::memory::SharedMemory;

const HUGE_BYTES: usize = 2 << 20;

/// Mounts a tmpfs here, for this thread only. Whether the system lets it.
fn mount_tmpfs(path: &Path, options: &CStr) -> bool {
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    let mount = |path: &CStr, flags, options: &CStr| {
        let (kind, options) = (c"tmpfs".as_ptr(), options.as_ptr().cast());
        // SAFETY: a system call with terminated strings.
        unsafe { libc::mount(kind, path.as_ptr(), kind, flags, options) == 0 }
    };
    // SAFETY: it concerns this thread alone.
    let is_apart = unsafe { libc::unshare(libc::CLONE_NEWNS) } == 0;
    is_apart && mount(c"/", libc::MS_REC | libc::MS_PRIVATE, c"") && mount(&name, 0, options)
}

/// One of huge pages. Whether there are any.
fn mount_huge(path: &Path) -> bool {
    mount_tmpfs(path, c"huge=always,size=16m") && {
        let mut probe = File::create(path.join("probe")).unwrap();
        probe.set_len(HUGE_BYTES as u64).unwrap();
        probe.write_all(b"1").unwrap();
        probe.metadata().unwrap().blocks() * 512 == HUGE_BYTES as u64
    }
}

fn renew_while_a_part_is_held(folder: &Path) {
    if !mount_huge(folder) {
        return eprintln!("left out: no huge pages of a tmpfs here");
    }
    let (memory, _) = SharedMemory::keep(&folder.join("part"), 2 * HUGE_BYTES).unwrap();
    let (_from, into) = io::pipe().unwrap();
    let held = libc::iovec {
        iov_base: memory.mapping().start().wrapping_add(8192).cast(),
        iov_len: 4096,
    };
    // SAFETY: in bounds of our mapping.
    let num_held = unsafe { libc::vmsplice(into.as_raw_fd(), &held, 1, 0) };
    assert_eq!(num_held, 4096);
    assert!(memory.forget(4096, 8192).is_err());
    memory.forget(HUGE_BYTES + 4096, 8192).unwrap();
}

fn keep_more_than_there_is_room_for(folder: &Path) {
    if !mount_tmpfs(folder, c"size=1m") {
        return eprintln!("left out: nobody may mount here");
    }
    let Err(refused) = SharedMemory::keep(&folder.join("part"), 4 << 20) else {
        panic!("4 MiB in a file system of one");
    };
    assert!(refused.to_string().contains("No space"), "{refused}");
    assert_eq!(fs::read_dir(folder).unwrap().count(), 0);
}

/// In a folder of its own, on a thread that may have mounts of its own.
fn with_folder(name: &str, test: fn(&Path)) {
    let folder = std::env::temp_dir().join(format!("banyan-test-{}-{name}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let outcome = thread::scope(|scope| scope.spawn(|| test(&folder)).join());
    fs::remove_dir(&folder).unwrap();
    outcome.unwrap();
}

#[test]
fn memory_when_a_transfer_holds_a_part_of_a_huge_page_then_it_is_not_taken_for_renewed() {
    with_folder("held", renew_while_a_part_is_held);
}

#[test]
fn memory_when_its_file_system_has_no_room_then_that_is_said_and_nothing_stays() {
    with_folder("full", keep_more_than_there_is_room_for);
}
