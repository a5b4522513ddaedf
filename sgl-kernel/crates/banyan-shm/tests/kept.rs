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

/// Mounts a tmpfs of huge pages here, for this thread only. Whether the system lets it, and has such pages.
fn mount_huge(path: &Path) -> bool {
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    let mount = |path: &CStr, flags, options: &CStr| {
        let (kind, options) = (c"tmpfs".as_ptr(), options.as_ptr().cast());
        // SAFETY: a system call with terminated strings.
        unsafe { libc::mount(kind, path.as_ptr(), kind, flags, options) == 0 }
    };
    // SAFETY: it concerns this thread alone.
    let is_apart = unsafe { libc::unshare(libc::CLONE_NEWNS) } == 0;
    let is_mounted = is_apart
        && mount(c"/", libc::MS_REC | libc::MS_PRIVATE, c"")
        && mount(&name, 0, c"huge=always,size=16m");
    is_mounted && {
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

#[test]
fn memory_when_a_transfer_holds_a_part_of_a_huge_page_then_it_is_not_taken_for_renewed() {
    let folder = std::env::temp_dir().join(format!("banyan-test-{}-held", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let outcome = thread::scope(|scope| {
        let test = scope.spawn(|| renew_while_a_part_is_held(&folder));
        test.join()
    });
    fs::remove_dir(&folder).unwrap();
    outcome.unwrap();
}
