// SPDX-License-Identifier: Apache-2.0
//! What the store opens is its user's own, so that nobody else says what lies in it or what it removes.
//!
//! Invariants
//! * A directory or file is used only if it belongs to the user of this process or to root, and only they may write it.
//! * The last part of a name is never followed if it is a link. A file is a regular one with no second name: opening it waits for
//!   nobody, and writing it changes nothing elsewhere.

use std::ffi::CString;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use banyan_shm::kept::user;

use crate::error::{Doing, Result, StoreError, invalid};

const WRITABLE_BY_OTHERS: u32 = 0o022;
const OPEN_TO_OTHERS: u32 = 0o077;
/// Where drives are mounted by hand.
const MOUNT_PARENTS: [&str; 3] = ["/", "/mnt", "/media"];

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Read,
    /// It is there.
    Write,
    /// It is made, with mode 0600, if it is not there.
    Create,
}

/// A regular file of ours.
pub fn open(path: &Path, way: Way) -> io::Result<File> {
    open_with(path, way, 0)
}

/// With further flags of open(2).
pub fn open_with(path: &Path, way: Way, flags: i32) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(way != Way::Read)
        .create(way == Way::Create)
        .truncate(false)
        .mode(0o600)
        // Without waiting: the other end of a FIFO may never come.
        .custom_flags(flags | libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
        .map_err(name_link)?;
    let found = file.metadata()?;
    let objection = if !found.is_file() {
        Some("it is no regular file".into())
    } else if found.nlink() > 1 {
        Some("it has a second name (a hard link)".into())
    } else {
        objection(&found)
    };
    refuse(objection)?;
    wait_again(&file)?;
    Ok(file)
}

/// A directory of ours, for `sync`, `names` and `remove`.
pub fn open_directory(path: &Path) -> io::Result<File> {
    let directory = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_DIRECTORY)
        .open(path)
        .map_err(name_link)?;
    refuse(objection(&directory.metadata()?))?;
    Ok(directory)
}

fn name_link(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::ELOOP) => io::Error::other("it is a link, and links are not followed here"),
        _ => error,
    }
}

fn refuse(objection: Option<String>) -> io::Result<()> {
    let refused = |reason| Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    objection.map_or(Ok(()), refused)
}

/// Why this is not ours.
fn objection(found: &Metadata) -> Option<String> {
    let user = user();
    if found.uid() != user && found.uid() != 0 {
        let owner = found.uid();
        Some(format!(
            "it belongs to user {owner}, and this process runs as user {user}"
        ))
    } else if found.mode() & WRITABLE_BY_OTHERS != 0 {
        let mode = found.mode() & 0o7777;
        Some(format!("others may write it (mode {mode:04o})"))
    } else {
        None
    }
}

/// From here on operations on the file may wait for the drive: io_uring would refuse to.
fn wait_again(file: &File) -> io::Result<()> {
    // SAFETY: a system call on our own descriptor.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    // SAFETY: as above.
    let set = flags >= 0
        && unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK) } == 0;
    if set {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The names in a directory that was opened.
pub fn names(directory: &File) -> io::Result<Vec<std::ffi::OsString>> {
    let path = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
    fs::read_dir(path)?
        .map(|entry| Ok(entry?.file_name()))
        .collect()
}

/// The files `PREFIX<number>` of a directory, the greatest number first.
pub fn numbered(directory: &Path, prefix: &str) -> Result<Vec<(u64, PathBuf)>> {
    let opened = match open_directory(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.doing("open", directory)?,
    };
    let number = |name: &std::ffi::OsStr| name.to_str()?.strip_prefix(prefix)?.parse().ok();
    let names = names(&opened).doing("list", directory)?;
    let numbered = names
        .into_iter()
        .filter_map(|name| Some((number(&name)?, directory.join(name))));
    let mut found: Vec<(u64, PathBuf)> = numbered.collect();
    found.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
    Ok(found)
}

pub fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.doing("remove", path),
    }
}

/// Removes a file from a directory that was opened: whatever its path names meanwhile.
pub fn remove(directory: &File, name: &std::ffi::OsStr) -> io::Result<()> {
    let name = CString::new(name.as_bytes())?;
    // SAFETY: our own descriptor and a terminated name.
    match unsafe { libc::unlinkat(directory.as_raw_fd(), name.as_ptr(), 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The real path of a directory that may become a store or is one; it is made where it is absent.
pub fn claim_directory(path: &Path) -> Result<PathBuf> {
    refuse_missing_mount(path, &fs::read_to_string("/etc/fstab").unwrap_or_default())?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .doing("make the directory", path)?;
    real_directory(path)
}

/// As `claim_directory`, and makes nothing: None for a directory that is yet to be made.
pub fn would_claim(path: &Path) -> Result<Option<PathBuf>> {
    refuse_missing_mount(path, &fs::read_to_string("/etc/fstab").unwrap_or_default())?;
    let absolute = std::path::absolute(path).doing("find", path)?;
    let nearest = absolute
        .ancestors()
        .find(|ancestor| fs::symlink_metadata(ancestor).is_ok())
        .unwrap_or(Path::new("/"));
    let name = CString::new(nearest.as_os_str().as_bytes())
        .map_err(|_| StoreError::Invalid(format!("{} is no path", path.display())))?;
    // SAFETY: a terminated name.
    let is_writable = unsafe { libc::access(name.as_ptr(), libc::W_OK | libc::X_OK) } == 0;
    if !nearest.is_dir() || !is_writable {
        let (shown, nearest) = (path.display(), nearest.display());
        return invalid!(
            "{shown} cannot be a store (--banyan-store): {nearest} is no directory that this process may write: name one"
        );
    }
    if nearest == absolute {
        return real_directory(path).map(Some);
    }
    Ok(None)
}

/// The real path of a directory of ours.
pub fn real_directory(path: &Path) -> Result<PathBuf> {
    let real = fs::canonicalize(path).doing("find", path)?;
    let found = fs::metadata(&real).doing("look at", path)?;
    if !found.is_dir() {
        return invalid!("{} is no directory", path.display());
    }
    match objection(&found) {
        None => Ok(real),
        Some(reason) => {
            let shown = path.display();
            invalid!(
                "{shown} cannot be a store (--banyan-store): {reason}: chown and chmod go-w it, run as its user, or name a \
                 directory below it, which is made private"
            )
        }
    }
}

/// A mount point whose mount is missing: to be filled, it would be the root file system. Whoever means a directory of the root file
/// system has made it private, or has put something into it.
fn refuse_missing_mount(path: &Path, fstab: &str) -> Result<()> {
    let absolute = std::path::absolute(path).doing("find", path)?;
    let Some(nearest) = absolute.ancestors().find(|ancestor| ancestor.exists()) else {
        return Ok(());
    };
    if is_mount_point(nearest, fstab) && is_empty_root(nearest).doing("look at", nearest)? {
        let (shown, nearest) = (path.display(), nearest.display());
        return invalid!(
            "{shown} cannot be a store (--banyan-store): {nearest} is an empty directory of the root file system, as a mount point \
             is whose drive is not mounted: mount it, or if the store is to be there: mkdir -p {shown} && chmod 700 {shown}"
        );
    }
    Ok(())
}

/// Whether drives are mounted here: `fstab` says so, or it is a place where people mount by hand.
fn is_mount_point(directory: &Path, fstab: &str) -> bool {
    let is_by_hand = directory
        .parent()
        .is_some_and(|parent| MOUNT_PARENTS.iter().any(|known| parent == Path::new(known)));
    let mut lines = fstab
        .lines()
        .filter(|line| !line.trim_start().starts_with('#'));
    is_by_hand
        || lines.any(|line| {
            line.split_whitespace()
                .nth(1)
                .is_some_and(|point| directory == Path::new(&unescaped(point)))
        })
}

/// `fstab` writes spaces, tabs, newlines and backslashes as numbers.
fn unescaped(point: &str) -> String {
    [("040", " "), ("011", "\t"), ("012", "\n"), ("134", "\\")]
        .iter()
        .fold(point.to_owned(), |text, (number, meant)| {
            text.replace(&format!("\\{number}"), meant)
        })
}

/// An empty directory of the root file system that others may look into, as mount points are.
fn is_empty_root(directory: &Path) -> io::Result<bool> {
    let found = fs::metadata(directory)?;
    Ok(found.is_dir()
        && found.dev() == fs::metadata("/")?.dev()
        && found.mode() & OPEN_TO_OTHERS != 0
        && fs::read_dir(directory)?.next().is_none())
}

/// False for what is no directory, a link, or somebody else's.
pub fn is_own_directory(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
        Ok(found) => Ok(found.is_dir() && objection(&found).is_none()),
    }
}

/// Makes durable which files a directory has.
pub fn sync_directory(path: &Path) -> Result<()> {
    let directory = open_directory(path).doing("open", path)?;
    directory.sync_all().doing("sync", path)
}

/// A directory of the store: made, or ours.
pub fn make_directory(path: &Path) -> Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => made.doing("make the directory", path)?,
    }
    open_directory(path).doing("open", path).map(drop)
}

/// A whole file of ours as text; what is no text is empty.
pub fn read_text(path: &Path) -> std::result::Result<String, StoreError> {
    use std::io::Read;
    const MOST_BYTES: u64 = 1 << 16;
    let mut bytes = Vec::new();
    let file = open(path, Way::Read).doing("open", path)?;
    file.take(MOST_BYTES)
        .read_to_end(&mut bytes)
        .doing("read", path)?;
    Ok(String::from_utf8(bytes).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn path_when_a_drive_belongs_there_and_is_not_mounted_then_refused_and_nothing_is_made() {
        let scratch = Scratch::new();
        let mount = scratch.path("nvme0");
        fs::create_dir(&mount).unwrap();
        fs::set_permissions(&mount, fs::Permissions::from_mode(0o755)).unwrap();
        let fstab = format!(
            "# drives\n\nUUID=1 / ext4 defaults 0 1\nUUID=2 {} xfs noauto 0 2\n",
            mount.display()
        );
        let is_on_root = fs::metadata(&mount).unwrap().dev() == fs::metadata("/").unwrap().dev();
        for path in [mount.clone(), mount.join("kv"), mount.join("deep/kv")] {
            refuse_missing_mount(&path, "").unwrap();
            let outcome = refuse_missing_mount(&path, &fstab);
            // What is not the root file system's is a mount.
            assert_eq!(outcome.is_err(), is_on_root);
            if let Err(error) = outcome {
                let (words, shown) = (error.to_string(), path.display().to_string());
                assert!(
                    words.contains(&shown)
                        && words.contains("not mounted")
                        && words.contains("mkdir -p"),
                    "{words}"
                );
            }
            assert_eq!(fs::read_dir(&mount).unwrap().count(), 0);
        }
        fs::set_permissions(&mount, fs::Permissions::from_mode(0o700)).unwrap();
        refuse_missing_mount(&mount, &fstab).unwrap();
    }

    #[test]
    fn directory_when_people_mount_there_by_hand_or_fstab_names_it_then_a_mount_point() {
        let fstab = "#UUID=1 /old ext4\nUUID=2\t/data/kv  xfs defaults\nshort\n";
        for (directory, expected) in [
            ("/scratch", true),
            ("/mnt/nvme0", true),
            ("/media/disk", true),
            ("/data/kv", true),
            ("/data/other", false),
            ("/mnt/nvme0/kv", false),
            ("/", false),
        ] {
            assert_eq!(
                is_mount_point(Path::new(directory), fstab),
                expected,
                "{directory}"
            );
        }
    }
}
