// SPDX-License-Identifier: Apache-2.0
//! Anonymous shared memory: no names, freed by the kernel with the last process that holds it. `kept` makes the kind with a name.
//!
//! Invariants
//! * A `Mapping` lies in its file, from the start on, and the file is sealed against shrinking, or is one that nobody shrinks (`kept`):
//!   no access inside `len` faults. A file may grow (`extended`).
//! * What other processes may change at any time is only reached through atomics (`SharedWord`) or, for page bytes, under a lease.

use std::ffi::{CString, c_int};
use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

use crate::available::available_bytes;
use crate::error::{Result, ShmError, invalid};
use crate::frame::Frame;
use crate::kept;
use crate::sync::{AtomicU32, AtomicU64};

/// Types that may be laid over memory which other processes change.
///
/// # Safety
/// Valid for any bit pattern, no padding that is read, and every field an atomic.
pub unsafe trait SharedWord {}

// SAFETY: an atomic integer.
unsafe impl SharedWord for AtomicU32 {}
// SAFETY: an atomic integer.
unsafe impl SharedWord for AtomicU64 {}
// SAFETY: consists of atomic integers, repr(C).
unsafe impl SharedWord for Frame {}

/// What a mapping may do with its bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    ReadOnly,
    ReadWrite,
}

impl Access {
    pub fn open(self, path: &str) -> io::Result<fs::File> {
        let mut options = fs::OpenOptions::new();
        options.read(true).write(self == Self::ReadWrite);
        options.open(path)
    }
}

/// What is populated in one call: meanwhile no other thread maps or unmaps anything.
const SLICE_BYTES: usize = 4 << 20;

/// Backed between two looks at what is free.
const LOOK_AGAIN_BYTES: usize = 64 << 20;

/// A file mapped as shared memory; unmapped on drop.
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory that belongs to no thread; all access goes through atomics or leases.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub fn of(fd: &impl AsRawFd, len: usize, access: Access) -> Result<Self> {
        let protection = match access {
            Access::ReadOnly => libc::PROT_READ,
            Access::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        };
        // SAFETY: a fresh shared mapping at an address of the kernel's choice; the result is checked.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                protection,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(ShmError::last_os(format!("cannot map {len} bytes")));
        }
        // SAFETY: advice on our own mapping; whether the kernel follows it does not matter.
        unsafe { libc::madvise(start, len, libc::MADV_HUGEPAGE) };
        match NonNull::new(start.cast()) {
            Some(start) => Ok(Self { start, len }),
            None => invalid!("the kernel mapped {len} bytes at address zero"),
        }
    }

    /// Takes the page faults of the first writes now, and with them the memory: in huge pages where the machine gives them to shared
    /// memory that asks. One by one the faults cost more than the writes: 9 us for 4 KiB on a virtual machine.
    pub(crate) fn populate(&self, offset: usize, len: usize) -> io::Result<()> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len));
        let end = offset + len;
        for offset in (offset..end).step_by(SLICE_BYTES) {
            let start = self.start().wrapping_add(offset);
            let len = SLICE_BYTES.min(end - offset);
            // SAFETY: advice on a part of our own mapping.
            until_done(|| unsafe { libc::madvise(start.cast(), len, libc::MADV_POPULATE_WRITE) })?;
        }
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// First byte. Reads need a lease or ownership, writes also `Access::ReadWrite`.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// `count` words at `offset`. Panics when they do not lie inside: layouts are checked before.
    pub fn words<T: SharedWord>(&self, offset: usize, count: usize) -> &[T] {
        let end = size_of::<T>()
            .checked_mul(count)
            .and_then(|bytes| bytes.checked_add(offset))
            .expect("layout overflows");
        assert!(end <= self.len && offset.is_multiple_of(align_of::<T>()));
        // SAFETY: in bounds and aligned (mappings start on a page), valid for any bits, shared only as atomics (`SharedWord`),
        // and alive as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start().add(offset).cast::<T>(), count) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our mapping, and no borrow of it outlives `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Shared memory that this process made: writable, and found by others through its descriptor.
pub struct SharedMemory {
    fd: OwnedFd,
    mapping: Mapping,
}

impl SharedMemory {
    /// All bytes zero and backed by memory: what is missing shows here, not as SIGBUS at a store.
    pub fn create(num_bytes: usize, label: &str) -> Result<Self> {
        let memory = Self::reserve(num_bytes, label)?;
        back_new(&memory.fd, &memory.mapping, 0..num_bytes, label)?;
        Ok(memory)
    }

    /// As `create`, but nothing is backed yet: `back` what is to be used before it is.
    pub fn reserve(num_bytes: usize, label: &str) -> Result<Self> {
        let fd = anonymous_file(label)?;
        resize(&fd, num_bytes, label)?;
        seal(&fd, label)?;
        let mapping = Mapping::of(&fd, num_bytes, Access::ReadWrite)?;
        Ok(Self { fd, mapping })
    }

    /// Gives these bytes memory. A later store to them does not fail.
    pub fn back(&self, offset: usize, len: usize) -> Result<()> {
        if offset.checked_add(len).is_none_or(|end| end > self.len()) {
            return invalid!("bytes {offset} to {offset}+{len} are not all inside");
        }
        back_new(
            &self.fd,
            &self.mapping,
            offset..offset + len,
            "reserved memory",
        )
    }

    /// The same memory with `num_bytes` more behind it, zero and backed. What was mapped before stays, and is the front of this.
    pub fn extended(&self, num_bytes: usize, label: &str) -> Result<Self> {
        let len = self.len();
        let Some(whole) = len.checked_add(num_bytes).filter(|_| num_bytes > 0) else {
            return invalid!("{label}: {len} bytes cannot be extended by {num_bytes}");
        };
        check_room(num_bytes, available_bytes(), label)?;
        let cannot = |cause| ShmError::os(cannot_reserve(num_bytes, label), cause);
        let fd = self.fd.try_clone().map_err(cannot)?;
        lengthen(&fd, whole, label)?;
        let mapping = Mapping::of(&fd, whole, Access::ReadWrite)?;
        back_new(&fd, &mapping, len..whole, label)?;
        Ok(Self { fd, mapping })
    }

    /// An empty file made `num_bytes` long.
    pub(crate) fn sized(fd: OwnedFd, num_bytes: usize, label: &str) -> Result<Self> {
        resize(&fd, num_bytes, label)?;
        let mapping = Mapping::of(&fd, num_bytes, Access::ReadWrite)?;
        back_new(&fd, &mapping, 0..num_bytes, label)?;
        Ok(Self { fd, mapping })
    }

    /// A file of this size, some or all of which has memory already.
    pub(crate) fn backed_by(fd: OwnedFd, num_bytes: usize, label: &str) -> Result<Self> {
        let mapping = Mapping::of(&fd, num_bytes, Access::ReadWrite)?;
        back(&fd, &mapping, 0..num_bytes, label)?;
        Ok(Self { fd, mapping })
    }

    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    pub fn is_empty(&self) -> bool {
        false
    }
}

/// It never holds a program: where `vm.memfd_noexec=2` the kernel gives no other. As in linux/memfd.h.
const MFD_NOEXEC_SEAL: libc::c_uint = 8;

fn anonymous_file(label: &str) -> Result<OwnedFd> {
    let Ok(name) = CString::new(format!("banyan-{label}")) else {
        return invalid!("label {label:?} holds a zero byte");
    };
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: `name` is a terminated string; the result is checked.
    let create = |flags| unsafe { libc::memfd_create(name.as_ptr(), flags) };
    let mut fd = create(flags | MFD_NOEXEC_SEAL);
    if fd < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) {
        // A kernel before 6.3 does not know that it could be run.
        fd = create(flags);
    }
    if fd < 0 {
        return Err(ShmError::last_os(format!("{label}: memfd_create")));
    }
    // SAFETY: a descriptor that was just made and that nobody else owns.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: a system call on our own descriptor.
    if unsafe { libc::fchmod(fd.as_raw_fd(), 0o600) } < 0 {
        return Err(ShmError::last_os(format!("{label}: fchmod 0600")));
    }
    Ok(fd)
}

fn cannot_reserve(num_bytes: usize, label: &str) -> String {
    format!("{label}: cannot reserve {num_bytes} bytes of shared memory")
}

fn resize(fd: &OwnedFd, num_bytes: usize, label: &str) -> Result<()> {
    if num_bytes == 0 || i64::try_from(num_bytes).is_err() {
        return invalid!("{label}: shared memory of {num_bytes} bytes cannot be made");
    }
    check_room(num_bytes, available_bytes(), label)?;
    lengthen(fd, num_bytes, label)
}

/// An anonymous file has no quota: beyond what is free the kernel would rather kill somebody than refuse.
fn check_room(num_bytes: usize, available: Option<u64>, label: &str) -> Result<()> {
    if let Some(available) = available.filter(|available| *available < num_bytes as u64) {
        let cause = io::Error::from_raw_os_error(libc::ENOMEM);
        let doing = cannot_reserve(num_bytes, label);
        return Err(ShmError::os(
            format!("{doing} ({available} bytes are available)"),
            cause,
        ));
    }
    Ok(())
}

fn lengthen(fd: &OwnedFd, num_bytes: usize, label: &str) -> Result<()> {
    // SAFETY: a system call on our own descriptor.
    if unsafe { libc::ftruncate(fd.as_raw_fd(), num_bytes as libc::off_t) } < 0 {
        return Err(ShmError::last_os(cannot_reserve(num_bytes, label)));
    }
    Ok(())
}

/// Bytes that have no memory yet. Several processes may begin at once, each with enough for itself alone.
fn back_new(fd: &OwnedFd, mapping: &Mapping, part: Range<usize>, label: &str) -> Result<()> {
    back_while_there_is_room(fd, mapping, part, label, available_bytes)
}

fn back_while_there_is_room(
    fd: &OwnedFd,
    mapping: &Mapping,
    part: Range<usize>,
    label: &str,
    available: impl Fn() -> Option<u64>,
) -> Result<()> {
    for at in part.clone().step_by(LOOK_AGAIN_BYTES) {
        check_room(part.end - at, available(), label)?;
        back(fd, mapping, at..part.end.min(at + LOOK_AGAIN_BYTES), label)?;
    }
    Ok(())
}

/// Through the mapping rather than `fallocate`, which knows nothing of the mapping's wish for huge pages.
fn back(fd: &OwnedFd, mapping: &Mapping, part: Range<usize>, label: &str) -> Result<()> {
    let mut backed = mapping.populate(part.start, part.len());
    if matches!(&backed, Err(cause) if cause.raw_os_error() == Some(libc::EINVAL)) {
        // A kernel before 5.14 does not know how.
        let (at, len) = (part.start as libc::off_t, part.len() as libc::off_t);
        // SAFETY: a system call on our own descriptor.
        backed = until_done(|| unsafe { libc::fallocate(fd.as_raw_fd(), 0, at, len) });
    }
    backed.map_err(|cause| {
        // So it says that the file system has no room.
        let is_full = cause.raw_os_error() == Some(libc::EFAULT);
        let cause = if is_full {
            io::Error::from_raw_os_error(libc::ENOSPC)
        } else {
            cause
        };
        ShmError::os(cannot_reserve(part.len(), label), cause)
    })
}

/// Makes a system call again for as long as it was only interrupted.
pub(crate) fn until_done(call: impl Fn() -> c_int) -> io::Result<()> {
    loop {
        if call() == 0 {
            return Ok(());
        }
        let cause = io::Error::last_os_error();
        if !matches!(cause.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) {
            return Err(cause);
        }
    }
}

fn seal(fd: &OwnedFd, label: &str) -> Result<()> {
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
    // SAFETY: a system call on our own descriptor.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(ShmError::last_os(format!("{label}: cannot seal its size")));
    }
    Ok(())
}

/// A peer's memory. Refuses a file that somebody may shrink: reading it could fault.
pub fn map_foreign(file: &fs::File, access: Access, what: &str) -> Result<Mapping> {
    if !is_sealed(file) {
        return invalid!("{what} is not sealed shared memory of Banyan");
    }
    map_whole(file, access, what)
}

/// As `map_foreign`, for memory that may be of the kind that has a name.
pub fn map_foreign_pool(file: &fs::File, access: Access, what: &str) -> Result<Mapping> {
    if !is_sealed(file) && !kept::is_ours(file) {
        return invalid!("{what} is neither sealed nor private shared memory of Banyan");
    }
    map_whole(file, access, what)
}

fn is_sealed(file: &fs::File) -> bool {
    // SAFETY: a system call on our own descriptor.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    seals >= 0 && seals & libc::F_SEAL_SHRINK != 0
}

fn map_whole(file: &fs::File, access: Access, what: &str) -> Result<Mapping> {
    let len = file
        .metadata()
        .map_err(|cause| ShmError::os(format!("cannot size {what}"), cause))?
        .len();
    if len == 0 {
        return invalid!("{what} is empty");
    }
    Mapping::of(file, len as usize, access)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_when_others_take_it_meanwhile_then_refused_before_it_is_gone() {
        let memory = SharedMemory::reserve(4 * LOOK_AGAIN_BYTES, "raced").unwrap();
        let left = std::cell::Cell::new(4 * LOOK_AGAIN_BYTES as u64);
        let available = || Some(left.replace(left.get() - 2 * LOOK_AGAIN_BYTES as u64));
        let whole = 0..memory.len();
        let refused =
            back_while_there_is_room(&memory.fd, &memory.mapping, whole, "raced", available)
                .unwrap_err();
        assert!(refused.to_string().contains("are available"), "{refused}");
    }

    #[test]
    fn words_when_outside_the_mapping_then_refused() {
        let memory = SharedMemory::create(128, "words").unwrap();
        assert_eq!(memory.mapping().words::<AtomicU64>(64, 8).len(), 8);
        let outside = || memory.mapping().words::<AtomicU64>(72, 8).len();
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(outside)).is_err());
    }

    #[test]
    fn memory_when_it_is_extended_then_both_mappings_show_the_same_front() {
        let front = SharedMemory::create(1 << 12, "front").unwrap();
        let word = |memory: &SharedMemory, offset| {
            let words: &[AtomicU64] = memory.mapping().words(offset, 1);
            words[0].load(std::sync::atomic::Ordering::Relaxed)
        };
        let set = |memory: &SharedMemory, offset, value| {
            let words: &[AtomicU64] = memory.mapping().words(offset, 1);
            words[0].store(value, std::sync::atomic::Ordering::Relaxed);
        };
        set(&front, 8, 7);
        let whole = front.extended(3 << 12, "whole").unwrap();
        assert_eq!((front.len(), whole.len()), (1 << 12, 4 << 12));
        assert_eq!((word(&whole, 8), word(&whole, 2 << 12)), (7, 0));
        set(&front, 16, 9);
        set(&whole, 3 << 12, 5);
        assert_eq!((word(&whole, 16), word(&whole, 3 << 12)), (9, 5));
        assert!(front.extended(0, "nothing").is_err());
        assert!(front.extended(usize::MAX, "too much").is_err());
        // A peer maps it as it is now, and nobody can shrink it.
        let file = fs::File::open(format!("/proc/self/fd/{}", front.fd())).unwrap();
        assert_eq!(
            map_foreign(&file, Access::ReadOnly, "it").unwrap().len(),
            4 << 12
        );
        // SAFETY: a system call on our own descriptor, which is refused.
        assert!(unsafe { libc::ftruncate(whole.fd(), 1 << 12) } < 0);
    }

    #[test]
    fn reserved_memory_when_backed_in_parts_then_only_these_are_taken() {
        let memory = SharedMemory::reserve(64 << 18, "reserved").unwrap();
        // SAFETY: a system call on our own descriptor into a zeroed structure.
        let taken = || unsafe {
            let mut status: libc::stat = std::mem::zeroed();
            assert_eq!(libc::fstat(memory.fd(), &mut status), 0);
            status.st_blocks * 512
        };
        assert_eq!(taken(), 0);
        // One slice and a part of another.
        memory.back(8 << 18, 24 << 18).unwrap();
        assert!((24 << 18..64 << 18).contains(&taken()));
        assert!(memory.back(60 << 18, 5 << 18).is_err());
    }
}
