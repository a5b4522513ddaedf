// SPDX-License-Identifier: Apache-2.0
//! Segment files: made, opened and handed to the device.
//!
//! Invariants
//! * One descriptor for each segment in this process, shared by reads and writes; a second one where a drive could only be read.
//! * A segment is allocated to its full length before it gets its name, so that running out of space shows here.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use crate::device::{Device, FileId};
use crate::directory::{ShelfId, Stripe, gone_or_away};
use crate::error::{Doing, Result, found_no_space};
use crate::format::{FileHeader, FileKind};
use crate::owned::{self, Way, sync_directory};

/// tmpfs and ramfs, as statfs(2) knows them.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Use {
    Reading,
    Writing,
}

#[derive(Default)]
pub struct Files {
    open: HashMap<(ShelfId, u32, Use), FileId>,
}

impl Files {
    /// The segment's file, opened on first use.
    pub fn get(
        &mut self,
        stripe: &Stripe,
        device: &mut dyn Device,
        (shelf, segment): (ShelfId, u32),
        purpose: Use,
    ) -> io::Result<FileId> {
        // Who may write may read.
        let open = [Use::Writing, purpose].map(|way| self.open.get(&(shelf, segment, way)));
        if let Some(file) = open.into_iter().flatten().next() {
            return Ok(*file);
        }
        let path = stripe.segment(shelf, segment);
        let opened = open_direct(&path, purpose);
        let (file, _) = opened.map_err(|error| gone_or_away(error, &path))?;
        let file = device.add_file(Arc::new(file))?;
        self.open.insert((shelf, segment, purpose), file);
        Ok(file)
    }

    pub fn forget(&mut self, device: &mut dyn Device, shelf: ShelfId) {
        self.open.retain(|(owner, ..), file| {
            if *owner == shelf {
                device.remove_file(*file);
            }
            *owner != shelf
        });
    }
}

/// With O_DIRECT where the file system has it; otherwise through the page cache.
pub fn open_direct(path: &Path, purpose: Use) -> io::Result<(File, bool)> {
    let way = match purpose {
        Use::Reading => Way::Read,
        Use::Writing => Way::Write,
    };
    let open = |flags: i32| owned::open_with(path, way, flags);
    match open(libc::O_DIRECT) {
        Ok(file) => Ok((file, true)),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok((open(0)?, false)),
        Err(error) => Err(error),
    }
}

/// Whether files in this directory can be read past the page cache.
pub fn takes_direct(directory: &Path) -> bool {
    let probe = directory.join("probe");
    let made = owned::open(&probe, Way::Create).is_ok();
    let direct = made && open_direct(&probe, Use::Reading).is_ok_and(|(_, direct)| direct);
    if made {
        // Left behind, it is one empty file.
        drop(fs::remove_file(&probe));
    }
    direct
}

/// Whether the directory is on a file system that keeps its files in DRAM: they outlive the server, not the machine.
pub fn is_in_memory(directory: &Path) -> bool {
    file_system(directory).is_ok_and(|kind| IN_MEMORY.contains(&kind))
}

/// What the directory lies on, as statfs(2) knows it.
pub fn file_system(directory: &Path) -> io::Result<i64> {
    Ok(statfs(directory)?.f_type as i64)
}

/// Free bytes for this user where the directory lies.
pub fn free_bytes(directory: &Path) -> io::Result<u64> {
    let found = statfs(directory)?;
    Ok(found.f_bavail as u64 * found.f_frsize as u64)
}

fn statfs(directory: &Path) -> io::Result<libc::statfs> {
    let name = CString::new(directory.as_os_str().as_bytes())?;
    // SAFETY: plain integers, for which zeros are a value.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: a string that ends with a zero, and room for the answer.
    match unsafe { libc::statfs(name.as_ptr(), &raw mut found) } {
        0 => Ok(found),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A segment that did not get its space.
#[derive(Debug)]
pub enum NoSegment {
    NoSpace,
    Failed(crate::error::StoreError),
}

/// Makes a segment file of `num_bytes`. Call under the store's lock.
pub fn create_segment(
    stripe: &Stripe,
    header: &FileHeader,
    segment: u32,
    num_bytes: u64,
) -> std::result::Result<(), NoSegment> {
    let path = stripe.segment(header.shelf, segment);
    let unnamed = path.with_file_name("new-segment");
    let made = allocate(&unnamed, header, segment, num_bytes).and_then(|()| {
        fs::rename(&unnamed, &path).doing("rename", &unnamed)?;
        sync_directory(path.parent().unwrap_or(stripe.first()))
    });
    made.map_err(|error| {
        // The space has to come back; if even that fails, the next try truncates it.
        drop(fs::remove_file(&unnamed));
        if found_no_space(&error) {
            NoSegment::NoSpace
        } else {
            NoSegment::Failed(error)
        }
    })
}

fn allocate(path: &Path, header: &FileHeader, segment: u32, num_bytes: u64) -> Result<()> {
    let file = owned::open(path, Way::Create).doing("create", path)?;
    file.set_len(0).doing("empty", path)?;
    reserve(&file, num_bytes).doing("allocate", path)?;
    let own = FileHeader {
        number: segment.into(),
        sequence: 0,
        ..header.clone()
    };
    file.write_all_at(&own.encode(FileKind::Segment), 0)
        .doing("write", path)?;
    file.sync_all().doing("sync", path)
}

fn reserve(file: &File, num_bytes: u64) -> io::Result<()> {
    loop {
        // SAFETY: a system call on our own descriptor.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, num_bytes as libc::off_t) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            // Space is then found missing at a write, which is handled as well.
            Some(libc::EOPNOTSUPP) => return file.set_len(num_bytes),
            _ => return Err(error),
        }
    }
}
