// SPDX-License-Identifier: Apache-2.0
//! What several tests need.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use crate::format::{Identity, NO_PARENT, Record};
use crate::shared::{SLICE, Shared};

/// A directory of this test's own, removed at the end.
pub struct Scratch(PathBuf);

/// A first page of namespace 1.
pub fn record(number: u64) -> Record {
    Record {
        identity: Identity {
            key: [number, 0, 0, 1],
            namespace: [1; 4],
            generation: number,
        },
        parent: NO_PARENT,
        checksum: number,
    }
}

/// Records whose work is done in many slices.
pub const MANY: usize = 16 * SLICE;

/// Whether somebody else can have the lock while the work changes how many records there are.
pub fn is_seen_half_done(shared: &Shared, work: impl FnOnce() + Send) -> bool {
    let num_records = || shared.lock().catalog.num_records();
    let before = num_records();
    thread::scope(|scope| {
        let working = scope.spawn(work);
        let mut seen = BTreeSet::from([before]);
        while !working.is_finished() {
            seen.insert(num_records());
        }
        seen.insert(num_records());
        seen.len() > 2
    })
}

impl Scratch {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("banyan-store-{}-{number}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path).unwrap();
        Self(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

/// As if the file had been written so long ago, or a second more: times of files are coarse.
pub fn age(path: &Path, by: Duration) {
    let then = SystemTime::now() - by - Duration::from_secs(1);
    fs::File::open(path).unwrap().set_modified(then).unwrap();
}

/// From now on the kernel refuses this thread a system call with `errno`.
pub fn refuse(call: libc::c_long, errno: i32) {
    let line = |code: u32, jumps: (u8, u8), k: u32| libc::sock_filter {
        code: code as u16,
        jt: jumps.0,
        jf: jumps.1,
        k,
    };
    let mut filter = [
        // The number of the system call is the first word.
        line(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, (0, 0), 0),
        line(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            (0, 1),
            call as u32,
        ),
        line(
            libc::BPF_RET | libc::BPF_K,
            (0, 0),
            libc::SECCOMP_RET_ERRNO | errno as u32,
        ),
        line(libc::BPF_RET | libc::BPF_K, (0, 0), libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: plain system calls; the kernel copies the program, which lives until they return.
    let answers = unsafe {
        [
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
            libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
            ),
        ]
    };
    assert_eq!(answers, [0, 0], "{}", io::Error::last_os_error());
}
