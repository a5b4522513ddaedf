// SPDX-License-Identifier: Apache-2.0
//! Shared memory with a name: a file on tmpfs, which outlives the processes that map it.
//!
//! Invariants
//! * The file lies on tmpfs, belongs to our user and is open to nobody else. Unlike anonymous memory it cannot be sealed: nothing of
//!   Banyan shrinks such a file, it is removed and made anew.
//! * One process writes it: it holds an exclusive lock from opening it until it ends, however it ends.
//! * What a transfer of a dead process may still write to is given up with `forget` before it is used again: the transfer keeps the
//!   frames of memory that it began with, and the file gets others. Where it does not, `forget` fails.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::error::{Result, ShmError, invalid};
use crate::memory::{SharedMemory, until_done};

/// A millisecond apart.
const TRIES_IN_PASSING: usize = 100;

/// What lay in the file when it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeroes.
    Fresh,
    /// What a process before us has left.
    Left,
}

impl SharedMemory {
    /// The memory that `path` names, made anew unless it has this size.
    pub fn keep(path: &Path, num_bytes: usize) -> Result<(Self, Content)> {
        let name = path.display();
        let len = num_bytes as u64;
        if let Some(file) = open_locked(path, Creation::Never)? {
            if is_ours(&file) && size(&file, path)? == len {
                let memory = Self::backed_by(file.into(), num_bytes, &name.to_string())?;
                return Ok((memory, Content::Left));
            }
            fs::remove_file(path)
                .map_err(|cause| ShmError::os(format!("cannot remove {name}"), cause))?;
        }
        let Some(file) = open_locked(path, Creation::Always)? else {
            return invalid!("{name} was made by another process just now");
        };
        if !is_ours(&file) {
            // An empty file of ours, made a moment ago.
            drop(fs::remove_file(path));
            return invalid!(
                "{name} does not lie on tmpfs: a disk would write it out all the time"
            );
        }
        let made = Self::sized(file.into(), num_bytes, &name.to_string());
        if made.is_err() {
            drop(fs::remove_file(path));
        }
        Ok((made?, Content::Fresh))
    }

    /// The memory that `path` names, for all processes of this user: whoever comes first makes it, zeroed. Who may come at the same time
    /// holds a lock meanwhile.
    pub fn share(path: &Path, num_bytes: usize) -> Result<Self> {
        let name = path.display();
        let file = match open(path, Creation::Never)? {
            Some(file) => Some(file),
            None => open(path, Creation::Always)?,
        };
        let Some(file) = file.filter(is_ours) else {
            return invalid!(
                "{name} is not private shared memory of this user on tmpfs: remove it"
            );
        };
        match size(&file, path)? {
            len if len < num_bytes as u64 => Self::sized(file.into(), num_bytes, &name.to_string()),
            _ => Self::backed_by(file.into(), num_bytes, &name.to_string()),
        }
    }

    /// Takes these bytes away and puts zeroes in their place. Only for memory that `keep` gave.
    pub fn forget(&self, offset: usize, len: usize) -> Result<()> {
        if offset.checked_add(len).is_none_or(|end| end > self.len()) {
            return invalid!("bytes {offset} to {offset}+{len} are not all inside");
        }
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (at, count) = (offset as libc::off_t, len as libc::off_t);
        let punch = || {
            // SAFETY: a system call on our own descriptor, in bounds.
            until_done(|| unsafe { libc::fallocate(self.fd(), mode, at, count) })
                .and_then(|()| self.check_gone(at, count))
        };
        unless_in_passing(punch)
            .and_then(|()| self.mapping().populate(offset, len))
            .map_err(|cause| ShmError::os(format!("cannot renew {len} bytes of memory"), cause))
    }

    /// Of a page that is larger than the hole and that somebody holds, the kernel zeroes the part and keeps it.
    fn check_gone(&self, at: libc::off_t, count: libc::off_t) -> io::Result<()> {
        // SAFETY: a system call on our own descriptor.
        let next_data = unsafe { libc::lseek(self.fd(), at, libc::SEEK_DATA) };
        if (at..at + count).contains(&next_data) {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        Ok(())
    }
}

/// Tried again while a page is held: the kernel's own threads hold one in passing, as they look at it or move it. A
/// transfer holds it for longer.
fn unless_in_passing(punch: impl Fn() -> io::Result<()>) -> io::Result<()> {
    for _ in 0..TRIES_IN_PASSING {
        match punch() {
            Err(cause) if cause.raw_os_error() == Some(libc::EBUSY) => {
                thread::sleep(Duration::from_millis(1))
            }
            outcome => return outcome,
        }
    }
    punch()
}

#[derive(Clone, Copy)]
enum Creation {
    Always,
    Never,
}

/// As `open`; `path` names it still, and nobody else removes it while it is open.
fn open_locked(path: &Path, creation: Creation) -> Result<Option<File>> {
    while let Some(file) = open(path, creation)? {
        if lock(&file, path)? {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

/// `None` when it is there already, or is not there.
fn open(path: &Path, creation: Creation) -> Result<Option<File>> {
    let mut options = File::options();
    options
        .read(true)
        .write(true)
        .mode(0o600)
        // Without waiting: a FIFO in its place has no other end.
        .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let expected = match creation {
        Creation::Always => {
            options.create_new(true);
            io::ErrorKind::AlreadyExists
        }
        Creation::Never => io::ErrorKind::NotFound,
    };
    match options.open(path) {
        Ok(file) => Ok(Some(file)),
        Err(cause) if cause.kind() == expected => Ok(None),
        Err(cause) => Err(ShmError::os(
            format!("cannot open {}", path.display()),
            cause,
        )),
    }
}

/// Whether `path` names it still: who had it before may have put another in its place.
fn lock(file: &File, path: &Path) -> Result<bool> {
    let shown = path.display();
    file.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => {
            let cause = io::Error::from_raw_os_error(libc::EWOULDBLOCK);
            ShmError::os(format!("{shown} is in use by another server"), cause)
        }
        TryLockError::Error(cause) => ShmError::os(format!("cannot lock {shown}"), cause),
    })?;
    let identity = |file: fs::Metadata| (file.dev(), file.ino());
    let named = fs::symlink_metadata(path).map(identity).ok();
    Ok(named.is_some() && named == file.metadata().map(identity).ok())
}

fn size(file: &File, path: &Path) -> Result<u64> {
    let metadata = file.metadata();
    let metadata =
        metadata.map_err(|cause| ShmError::os(format!("cannot size {}", path.display()), cause))?;
    Ok(metadata.len())
}

/// Whom this process runs as.
pub fn user() -> u32 {
    // SAFETY: it has no arguments and cannot fail.
    unsafe { libc::geteuid() }
}

/// Whether this is a file as `keep` makes them: on tmpfs, ours, private.
pub(crate) fn is_ours(file: &File) -> bool {
    // SAFETY: all zero is a valid statfs.
    let mut system: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: a system call on our own descriptor that fills `system`.
    let rc = unsafe { libc::fstatfs(file.as_raw_fd(), &mut system) };
    rc == 0
        && system.f_type == libc::TMPFS_MAGIC
        && file.metadata().is_ok_and(|metadata| {
            metadata.is_file() && metadata.uid() == user() && metadata.mode() & 0o077 == 0
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::time::Duration;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = PathBuf::from(format!(
                "/dev/shm/banyan-test-{}-{name}",
                std::process::id()
            ));
            fs::create_dir(&path).unwrap();
            Self(path)
        }

        fn file(&self) -> PathBuf {
            self.0.join("part")
        }

        /// Keeps the file that was let go before. A child that another test starts at that moment has all descriptors until it runs its
        /// program, and so the lock.
        fn keep_again(&self, num_bytes: usize) -> (SharedMemory, Content) {
            let tries = std::iter::repeat_with(|| SharedMemory::keep(&self.file(), num_bytes));
            let late = Duration::from_millis(10);
            let mut kept = tries.take(100).filter_map(|kept| {
                let in_use = kept
                    .as_ref()
                    .is_err_and(|error| error.to_string().contains("in use"));
                if in_use {
                    std::thread::sleep(late);
                }
                (!in_use).then_some(kept)
            });
            kept.next().expect("nobody lets go").unwrap()
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    fn write(memory: &SharedMemory, at: usize, byte: u8) {
        // SAFETY: in bounds of memory that only this test maps.
        unsafe { memory.mapping().start().add(at).write(byte) };
    }

    fn read(memory: &SharedMemory, at: usize) -> u8 {
        // SAFETY: as above.
        unsafe { memory.mapping().start().add(at).read() }
    }

    #[test]
    fn memory_when_its_process_is_gone_then_the_next_one_finds_it() {
        let scratch = Scratch::new("found");
        let (memory, content) = SharedMemory::keep(&scratch.file(), 8192).unwrap();
        assert_eq!((content, read(&memory, 5000)), (Content::Fresh, 0));
        write(&memory, 5000, 7);
        drop(memory);
        let (memory, content) = scratch.keep_again(8192);
        assert_eq!((content, read(&memory, 5000)), (Content::Left, 7));
    }

    #[test]
    fn memory_when_it_has_another_size_then_it_is_made_anew() {
        let scratch = Scratch::new("size");
        write(&SharedMemory::keep(&scratch.file(), 8192).unwrap().0, 0, 7);
        let (memory, content) = scratch.keep_again(4096);
        assert_eq!((content, read(&memory, 0)), (Content::Fresh, 0));
    }

    #[test]
    fn memory_when_another_process_has_it_then_refused() {
        let scratch = Scratch::new("locked");
        let _held = SharedMemory::keep(&scratch.file(), 4096).unwrap();
        let refused = SharedMemory::keep(&scratch.file(), 4096).err().unwrap();
        assert!(refused.to_string().contains("in use"), "{refused}");
    }

    #[test]
    fn lock_when_another_process_has_replaced_the_file_meanwhile_then_it_counts_for_nothing() {
        let scratch = Scratch::new("replaced");
        let make = || open(&scratch.file(), Creation::Always).unwrap().unwrap();
        let late = make();
        assert!(lock(&late, &scratch.file()).unwrap());
        fs::remove_file(scratch.file()).unwrap();
        assert!(!lock(&late, &scratch.file()).unwrap());
        let _other = make();
        assert!(!lock(&late, &scratch.file()).unwrap());
    }

    #[test]
    fn memory_when_forgotten_then_zero_and_the_rest_stays() {
        let scratch = Scratch::new("forget");
        let (memory, _) = SharedMemory::keep(&scratch.file(), 3 * 4096).unwrap();
        for page in 0..3 {
            write(&memory, page * 4096, 7);
        }
        memory.forget(4096, 4096).unwrap();
        let seen: Vec<u8> = (0..3).map(|page| read(&memory, page * 4096)).collect();
        assert_eq!(seen, [7, 0, 7]);
        assert!(memory.forget(2 * 4096, 8192).is_err());
    }

    #[test]
    fn hole_when_a_page_is_held_in_passing_then_it_is_tried_again_and_nothing_else_is() {
        for (code, num_tried) in [(libc::EBUSY, 3), (libc::EIO, 1)] {
            let tried = std::cell::Cell::new(0);
            let outcome = unless_in_passing(|| {
                tried.set(tried.get() + 1);
                if tried.get() < 3 {
                    return Err(io::Error::from_raw_os_error(code));
                }
                Ok(())
            });
            assert_eq!(
                (outcome.is_ok(), tried.get()),
                (code == libc::EBUSY, num_tried)
            );
        }
    }

    #[test]
    fn memory_when_others_may_open_it_then_it_is_made_anew() {
        let scratch = Scratch::new("mode");
        write(&SharedMemory::keep(&scratch.file(), 4096).unwrap().0, 0, 7);
        let open_to_all = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        fs::set_permissions(scratch.file(), open_to_all).unwrap();
        let (memory, content) = scratch.keep_again(4096);
        assert_eq!((content, read(&memory, 0)), (Content::Fresh, 0));
    }

    #[test]
    fn memory_when_its_place_is_no_tmpfs_then_refused_and_nothing_stays() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("kept-on-a-disk");
        let refused = SharedMemory::keep(&path, 4096).err().unwrap();
        assert!(refused.to_string().contains("tmpfs"), "{refused}");
        assert!(!path.exists());
    }
}
