// SPDX-License-Identifier: Apache-2.0
//! The directories of a store: which paths belong together, who holds which lock, what takes how much space.
//!
//! Invariants
//! * Every path has a `STORE` file with the same store id, its own position and the same number of paths.
//! * Shelves come, grow and go only under the store's lock. A shelf's lock is held by its writer from creation or adoption to its end;
//!   the kernel lets go of it when the process dies.
//! * Other machines may have the folder, and locks may not meet: who has a shelf is also said by `marks`, whatever is done to it.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::error::{Doing, Result, invalid};
use crate::files::free_bytes;
use crate::format::FORMAT;
use crate::locks::{Lock, Mode, lock_within, try_lock};
use crate::marks::{Hold, Mark, Reach, touch};
use crate::opening::says_nothing;
use crate::owned::{
    self, Way, claim_directory, make_directory, real_directory, sync_directory, would_claim,
};

const SUPERBLOCK: &str = "STORE";
const FIRST_LINE: &str = "banyan-store";
const UNNAMED: &str = "new-STORE";
/// A server's note of its weights, made before it opens the store: what it says is part of the namespace.
const WEIGHTS_DIGESTS: &str = "weights-digests";
/// The store's lock is held for moments. Whoever has it longer is stopped, or waits for a drive.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// Name of one shelf, unique within its store.
pub type ShelfId = u64;

/// The paths of one store.
#[derive(Clone, Debug)]
pub struct Stripe {
    paths: Vec<PathBuf>,
    /// Of this process's locks.
    reach: Reach,
}

impl Stripe {
    /// Takes paths that belong together, or makes them: empty or absent directories become a store.
    pub fn open_or_create(paths: &[PathBuf]) -> Result<Self> {
        let claimed: Result<Vec<PathBuf>> =
            paths.iter().map(|path| claim_directory(path)).collect();
        let stripe = Self::of(claimed?)?;
        let _lock = stripe.lock()?;
        if fs::symlink_metadata(stripe.first().join(SUPERBLOCK)).is_err() {
            stripe.format()?;
        }
        stripe.verify()?;
        Ok(stripe)
    }

    /// What `open_or_create` would refuse these paths for, as far as it can be told; makes and changes nothing.
    pub fn preview(paths: &[PathBuf]) -> Result<()> {
        let found: Result<Vec<Option<PathBuf>>> =
            paths.iter().map(|path| would_claim(path)).collect();
        let Some(real) = found?.into_iter().collect::<Option<Vec<_>>>() else {
            // One of them is yet to be made.
            return Ok(());
        };
        let stripe = Self::of(real)?;
        match fs::symlink_metadata(stripe.first().join(SUPERBLOCK)) {
            Ok(_) => stripe.verify(),
            Err(_) => stripe.refuse_strays(),
        }
    }

    /// Takes paths that are a store already; changes nothing.
    pub fn open(paths: &[PathBuf]) -> Result<Self> {
        let real: Result<Vec<PathBuf>> = paths.iter().map(|path| real_directory(path)).collect();
        let stripe = Self::of(real?)?;
        stripe.verify()?;
        Ok(stripe)
    }

    fn of(paths: Vec<PathBuf>) -> Result<Self> {
        if paths.is_empty() {
            return invalid!("a store needs at least one path");
        }
        if (1..paths.len()).any(|index| paths[..index].contains(&paths[index])) {
            return invalid!("a path of a store is named twice: {paths:?}");
        }
        let reach = Reach::of(&paths[0])?;
        Ok(Self { paths, reach })
    }

    /// As another machine that may have the folder would see it.
    #[cfg(test)]
    pub fn seen_by(&self, reach: Reach) -> Self {
        let paths = self.paths.clone();
        Self { paths, reach }
    }

    /// Whether it lies on no file system of this machine: others may have it as we do.
    pub fn is_shared(&self) -> bool {
        !self.reach.is_local()
    }

    /// Of paths that are to become a store: other things lie there. While the first is none, others that are one belong
    /// to a format that was interrupted.
    fn refuse_strays(&self) -> Result<()> {
        for (index, path) in self.paths.iter().enumerate() {
            let is_unfinished = || {
                Superblock::read(path)
                    .is_ok_and(|found| (found.path, found.paths) == (index, self.paths.len()))
            };
            let stray = fs::read_dir(path)
                .doing("list", path)?
                .filter_map(|entry| Some(entry.ok()?.file_name()))
                .find(|name| match name.to_str() {
                    Some("lock" | "lost+found" | WEIGHTS_DIGESTS) => false,
                    Some(name) if name.starts_with(UNNAMED) => false,
                    Some(SUPERBLOCK) => !is_unfinished(),
                    _ => true,
                });
            if let Some(stray) = stray {
                return invalid!(
                    "{} is no store of Banyan and not empty (it holds {stray:?}): choose an empty directory",
                    path.display()
                );
            }
        }
        Ok(())
    }

    /// The last path becomes a store first, and its id is that of the others: also where another node, which this one's lock does not
    /// reach, makes the same store at the same moment.
    fn format(&self) -> Result<()> {
        self.refuse_strays()?;
        let own = fresh_id();
        let last = &self.paths[self.paths.len() - 1];
        loop {
            let store = Superblock::read(last).map_or(own, |found| found.store);
            for (index, path) in self.paths.iter().enumerate().rev() {
                self.name_path(index, path, store, own)?;
            }
            if Superblock::read(last)?.store == store {
                return Ok(());
            }
        }
    }

    fn name_path(&self, index: usize, path: &Path, store: u64, maker: u64) -> Result<()> {
        let count = self.paths.len();
        let text = format!(
            "{FIRST_LINE}\nformat={FORMAT}\nstore={store:016x}\npath={index}\npaths={count}\n"
        );
        let unnamed = path.join(format!("{UNNAMED}-{maker:016x}"));
        let mut file = owned::open(&unnamed, Way::Create).doing("create", &unnamed)?;
        file.write_all(text.as_bytes()).doing("write", &unnamed)?;
        file.sync_all().doing("sync", &unnamed)?;
        fs::rename(&unnamed, path.join(SUPERBLOCK)).doing("rename", &unnamed)?;
        sync_directory(path)
    }

    fn verify(&self) -> Result<()> {
        let mut store = None;
        for (index, path) in self.paths.iter().enumerate() {
            let found = Superblock::read(path)?;
            let count = self.paths.len();
            if (found.path, found.paths) != (index, count) {
                return invalid!(
                    "{} is path {} of {} of its store, but was given as {} of {count}: \
                     name all paths of the store in their order",
                    path.display(),
                    found.path + 1,
                    found.paths,
                    index + 1
                );
            }
            if *store.get_or_insert(found.store) != found.store {
                return invalid!(
                    "{} belongs to another store than {}: name paths of one store",
                    path.display(),
                    self.paths[0].display()
                );
            }
        }
        Ok(())
    }

    /// Tells this store from any other; the same for all its users, wherever they have mounted it.
    pub fn identity(&self) -> Result<u64> {
        Ok(Superblock::read(self.first())?.store)
    }

    pub fn num_paths(&self) -> usize {
        self.paths.len()
    }

    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    pub fn first(&self) -> &Path {
        &self.paths[0]
    }

    /// Serialises everything that changes what a store consists of. Waits for it, `LOCK_PATIENCE` for each who has it.
    pub fn lock(&self) -> Result<Lock> {
        let path = self.first().join("lock");
        lock_within(&path, Way::Create, Mode::Alone, LOCK_PATIENCE)
    }

    /// The store's lock, unless somebody has it. It is there since the opening: where it is not, the mount is away, and something in its
    /// mount point would be taken for a store that is meant to be there.
    pub fn try_lock(&self) -> Result<Option<Lock>> {
        try_lock(&self.first().join("lock"), Way::Write, Mode::Alone)
    }

    /// What bears the name of a shelf and is not a directory of ours is none.
    pub fn shelves(&self) -> Result<Vec<ShelfId>> {
        let mut shelves = Vec::new();
        for entry in fs::read_dir(self.first()).doing("list", self.first())? {
            let name = entry.doing("list", self.first())?.file_name();
            let id = name
                .to_str()
                .and_then(|name| name.strip_prefix("shelf-"))
                .and_then(|id| ShelfId::from_str_radix(id, 16).ok());
            let Some(id) = id else { continue };
            let path = self.first().join(&name);
            // As this release writes it: two names are not one shelf.
            if path != self.shelf(id, 0) {
                continue;
            }
            let is_shelf = match owned::is_own_directory(&path) {
                // Who opens it meets the error as well, and passes over this one alone.
                Err(error) if !says_nothing(&error) => true,
                looked => looked.doing("look at", &path)?,
            };
            if is_shelf {
                shelves.push(id);
            }
        }
        shelves.sort_unstable();
        Ok(shelves)
    }

    /// The directory of a shelf on one path; the first holds its lock and manifest.
    pub fn shelf(&self, shelf: ShelfId, path: usize) -> PathBuf {
        self.paths[path].join(format!("shelf-{shelf:016x}"))
    }

    pub fn segment(&self, shelf: ShelfId, segment: u32) -> PathBuf {
        let path = segment as usize % self.paths.len();
        self.shelf(shelf, path)
            .join(format!("segment-{segment:06}"))
    }

    /// A new shelf that is held. Call under the store's lock.
    pub fn create_shelf(&self) -> Result<(ShelfId, Hold)> {
        let shelf = fresh_id();
        for path in 0..self.paths.len() {
            make_directory(&self.shelf(shelf, path))?;
            sync_directory(&self.paths[path])?;
        }
        match self.try_hold(shelf, |reach, directory| reach.mark(directory, 1))? {
            Some(hold) => Ok((shelf, hold)),
            None => invalid!("the new shelf {shelf:016x} is locked by somebody else"),
        }
    }

    /// A shelf whose writer is gone. Call under the store's lock.
    pub fn try_hold_shelf(&self, shelf: ShelfId) -> Result<Option<Hold>> {
        self.try_hold(shelf, |reach, directory| {
            reach.take(directory, self.server_time()?)
        })
    }

    fn try_hold(
        &self,
        shelf: ShelfId,
        mark: impl FnOnce(&Reach, &Path) -> Result<Option<Mark>>,
    ) -> Result<Option<Hold>> {
        let directory = self.shelf(shelf, 0);
        let Some(lock) = try_lock(&directory.join("lock"), Way::Create, Mode::Alone)? else {
            return Ok(None);
        };
        let mark = mark(&self.reach, &directory)?.map(Arc::new);
        Ok(mark.map(|mark| Hold { lock, mark }))
    }

    /// What time it is where the store lies: no other clock is asked how long a mark has been silent.
    fn server_time(&self) -> Result<SystemTime> {
        if self.reach.is_local() {
            return Ok(SystemTime::now());
        }
        let path = self.first().join("lock");
        let file = owned::open(&path, Way::Read).doing("open", &path)?;
        touch(&file)
            .and_then(|found| found.modified())
            .doing("touch", &path)
    }

    /// Whether a living writer holds a shelf. Makes nothing; under the store's lock, so that no writer that starts misses the shelf.
    pub fn is_in_use(&self, shelf: ShelfId) -> Result<bool> {
        let [store, own] =
            [self.first().to_path_buf(), self.shelf(shelf, 0)].map(|path| path.join("lock"));
        if !store.exists() || !own.exists() {
            return Ok(false);
        }
        let _store_lock = lock_within(&store, Way::Read, Mode::Shared, LOCK_PATIENCE)?;
        if try_lock(&own, Way::Read, Mode::Shared)?.is_none() {
            return Ok(true);
        }
        let is_free = self
            .reach
            .is_free(&self.shelf(shelf, 0), self.server_time()?)?;
        Ok(!is_free)
    }

    /// Removes a shelf for good. The manifest goes first, so that an interrupted removal leaves nothing that can be found, and the first
    /// path's directory last, by which the next opening finds what is left.
    pub fn remove_shelf(&self, shelf: ShelfId, hold: Hold) -> Result<()> {
        let first = self.shelf(shelf, 0);
        empty(&first, is_manifest)?;
        for path in (1..self.paths.len()).rev() {
            remove_directory(&self.shelf(shelf, path))?;
            sync_directory(&self.paths[path])?;
        }
        // Network file systems keep another name for what is open: the lock.
        drop(hold);
        remove_directory(&first)
    }

    /// The segment numbers of a shelf that exist, sorted.
    pub fn segments(&self, shelf: ShelfId) -> Result<Vec<u32>> {
        let mut segments = Vec::new();
        for path in 0..self.paths.len() {
            let directory = self.shelf(shelf, path);
            let entries = match fs::read_dir(&directory) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                // None would say that what was stored there is lost.
                other => other.doing("list", &directory)?,
            };
            for entry in entries {
                let name = entry.doing("list", &directory)?.file_name();
                let number = name.to_str().and_then(|name| name.strip_prefix("segment-"));
                let number = number.and_then(|number| number.parse::<u32>().ok());
                segments.extend(
                    number.filter(|number| self.segment(shelf, *number) == directory.join(&name)),
                );
            }
        }
        segments.sort_unstable();
        Ok(segments)
    }

    /// Free bytes for this user on the file system of one path.
    pub fn free_bytes(&self, path: usize) -> Result<u64> {
        let path = &self.paths[path];
        free_bytes(path).doing("look at the file system of", path)
    }
}

struct Superblock {
    store: u64,
    path: usize,
    paths: usize,
}

impl Superblock {
    fn read(path: &Path) -> Result<Self> {
        let file = path.join(SUPERBLOCK);
        if fs::symlink_metadata(&file).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return invalid!(
                "{} is no store of Banyan (it has no {SUPERBLOCK} file): choose an empty directory",
                path.display()
            );
        }
        let text = owned::read_text(&file)?;
        let field = |name: &str| {
            let mut lines = text.lines().filter_map(|line| line.split_once('='));
            lines.find(|(key, _)| *key == name).map(|(_, value)| value)
        };
        let number = |name| field(name).and_then(|value| value.parse::<usize>().ok());
        let format = number("format");
        if text.lines().next() == Some(FIRST_LINE)
            && let Some(format) = format
            && format != FORMAT as usize
        {
            let way_out = if format > FORMAT as usize {
                "use the newer Banyan, or another directory"
            } else {
                "delete its contents, which can be computed again, or use another directory"
            };
            return invalid!(
                "{} was written in format {format}; this release reads format {FORMAT}: {way_out}",
                path.display()
            );
        }
        let store = field("store").and_then(|value| u64::from_str_radix(value, 16).ok());
        match (
            text.lines().next(),
            format,
            store,
            number("path"),
            number("paths"),
        ) {
            (Some(FIRST_LINE), Some(_), Some(store), Some(path), Some(paths)) => {
                Ok(Self { store, path, paths })
            }
            _ => invalid!(
                "{} is damaged or foreign: move it away, or choose an empty directory",
                file.display()
            ),
        }
    }
}

/// Why a shelf's file could not be opened. One that is not found is gone only while its path is one of the store's: else the mount is away,
/// and says nothing about the file.
pub fn gone_or_away(error: io::Error, file: &Path) -> io::Error {
    let path = file.ancestors().nth(2);
    let is_mounted = path.is_some_and(|path| path.join(SUPERBLOCK).exists());
    // Looked for again: the mount may just have come back.
    let is_gone = is_mounted && matches!(file.try_exists(), Ok(false));
    if error.kind() == io::ErrorKind::NotFound && !is_gone {
        io::Error::from_raw_os_error(libc::ENODEV)
    } else {
        error
    }
}

fn is_manifest(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b"manifest-")
}

/// Removes the files of a directory that go, if it is there.
pub fn empty(directory: &Path, goes: impl Fn(&OsStr) -> bool) -> Result<()> {
    let opened = match owned::open_directory(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.doing("open", directory)?,
    };
    let names = owned::names(&opened).doing("list", directory)?;
    for name in names.iter().filter(|name| goes(name)) {
        owned::remove(&opened, name).doing("remove", &directory.join(name))?;
    }
    Ok(())
}

fn remove_directory(directory: &Path) -> Result<()> {
    empty(directory, |_| true)?;
    match fs::remove_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.doing("remove", directory),
    }
}

/// Different in every process and call, on every machine.
pub fn fresh_id() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |now| now.as_nanos() as u64);
    let drawn = fs::read("/proc/sys/kernel/random/uuid").unwrap_or_default();
    let name = [
        &now.to_le_bytes()[..],
        &u64::from(std::process::id()).to_le_bytes(),
        &drawn,
    ]
    .concat();
    twox_hash::XxHash3_64::oneshot(&name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Scratch, refuse};

    #[test]
    fn store_when_made_then_opened_again_and_private() {
        use std::os::unix::fs::PermissionsExt;
        let scratch = Scratch::new();
        let paths = [scratch.path("a"), scratch.path("b")];
        Stripe::open_or_create(&paths).unwrap();
        Stripe::open_or_create(&paths).unwrap();
        let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(paths[0].clone()), 0o700);
        assert_eq!(mode(paths[1].join(SUPERBLOCK)), 0o600);
    }

    #[test]
    fn format_when_it_was_interrupted_then_finished() {
        let scratch = Scratch::new();
        let paths = [scratch.path("a"), scratch.path("b")];
        Stripe::open_or_create(&paths).unwrap();
        fs::remove_file(paths[0].join(SUPERBLOCK)).unwrap();
        Stripe::open_or_create(&paths).unwrap();
        Stripe::open(&paths).unwrap();
    }

    #[test]
    fn store_when_nodes_whose_locks_do_not_meet_make_it_at_one_moment_then_it_is_one() {
        for _ in 0..10 {
            let scratch = Scratch::new();
            let paths = ["a", "b", "c"].map(|name| claim_directory(&scratch.path(name)).unwrap());
            let stripe = Stripe::of(paths.into()).unwrap();
            std::thread::scope(|nodes| {
                for _ in 0..4 {
                    nodes.spawn(|| stripe.format().unwrap());
                }
            });
            stripe.verify().unwrap();
        }
    }

    #[test]
    fn paths_when_swapped_missing_or_mixed_then_refused_with_the_way_out() {
        let scratch = Scratch::new();
        let [a, b, c] = ["a", "b", "c"].map(|name| scratch.path(name));
        Stripe::open_or_create(&[a.clone(), b.clone()]).unwrap();
        Stripe::open_or_create(std::slice::from_ref(&c)).unwrap();
        for wrong in [
            vec![b.clone(), a.clone()],
            vec![a.clone()],
            vec![a, c.clone()],
        ] {
            let reason = Stripe::open_or_create(&wrong).unwrap_err().to_string();
            assert!(reason.contains("path"), "{reason}");
        }
        assert!(Stripe::open_or_create(&[c.clone(), c]).is_err());
    }

    #[test]
    fn directory_when_foreign_of_another_format_or_damaged_then_refused_by_name() {
        let scratch = Scratch::new();
        let foreign = scratch.path("foreign");
        fs::create_dir(&foreign).unwrap();
        fs::write(foreign.join("holiday.jpg"), b"sea").unwrap();
        let reason = Stripe::open_or_create(std::slice::from_ref(&foreign))
            .unwrap_err()
            .to_string();
        assert!(
            reason.contains("holiday.jpg") && reason.contains("empty directory"),
            "{reason}"
        );
        assert!(Stripe::open(&[foreign]).is_err());

        let other = scratch.path("other");
        Stripe::open_or_create(std::slice::from_ref(&other)).unwrap();
        let text = fs::read_to_string(other.join(SUPERBLOCK)).unwrap();
        for (format, way_out) in [(FORMAT + 7, "newer Banyan"), (FORMAT - 1, "delete")] {
            let written = text.replace(&format!("format={FORMAT}"), &format!("format={format}"));
            fs::write(other.join(SUPERBLOCK), written).unwrap();
            let reason = Stripe::open_or_create(std::slice::from_ref(&other))
                .unwrap_err()
                .to_string();
            assert!(
                reason.contains(&format!("format {format};")) && reason.contains(way_out),
                "{reason}"
            );
        }
        fs::write(other.join(SUPERBLOCK), b"\xff\x00").unwrap();
        let reason = Stripe::open_or_create(&[other]).unwrap_err().to_string();
        assert!(reason.contains("damaged or foreign"), "{reason}");
    }

    #[test]
    fn shelf_when_its_lock_is_held_then_not_taken_again() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("a")]).unwrap();
        let (shelf, lock) = stripe.create_shelf().unwrap();
        assert!(stripe.try_hold_shelf(shelf).unwrap().is_none());
        drop(lock);
        let lock = stripe.try_hold_shelf(shelf).unwrap().unwrap();
        assert_eq!(stripe.shelves().unwrap(), [shelf]);
        let marks = owned::numbered(&stripe.shelf(shelf, 0), "writer-").unwrap();
        assert_eq!(marks.len(), 1);
        stripe.remove_shelf(shelf, lock).unwrap();
        assert!(stripe.shelves().unwrap().is_empty());
    }

    #[test]
    fn shelf_when_it_cannot_be_looked_at_then_the_others_are_listed_with_it() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("a")]).unwrap();
        let (shelf, _lock) = stripe.create_shelf().unwrap();
        for (errno, is_listed) in [
            (libc::EIO, true),
            (libc::EACCES, true),
            (libc::ENOMEM, false),
            (libc::ESTALE, false),
        ] {
            let stripe = &stripe;
            // The filter ends with its thread.
            let found = std::thread::scope(|scope| {
                let refused = || {
                    refuse(libc::SYS_statx, errno);
                    stripe.shelves()
                };
                scope.spawn(refused).join().unwrap()
            });
            assert_eq!(found.is_ok_and(|found| found == [shelf]), is_listed);
        }
    }

    #[test]
    fn use_when_a_shelf_or_its_store_has_no_lock_then_nobody_has_it_and_none_is_made() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("a")]).unwrap();
        let (shelf, lock) = stripe.create_shelf().unwrap();
        assert!(stripe.is_in_use(shelf).unwrap());
        drop(lock);
        for path in [stripe.shelf(shelf, 0), stripe.first().to_path_buf()] {
            fs::remove_file(path.join("lock")).unwrap();
            assert!(!stripe.is_in_use(shelf).unwrap());
            assert!(!path.join("lock").exists());
        }
    }

    #[test]
    fn use_when_somebody_else_looks_then_he_is_no_writer_and_a_writer_that_adopts_meets_nobody() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("a")]).unwrap();
        let (shelf, lock) = stripe.create_shelf().unwrap();
        drop(lock);
        let own = stripe.shelf(shelf, 0).join("lock");
        let looking = try_lock(&own, Way::Read, Mode::Shared).unwrap();
        assert!(looking.is_some() && !stripe.is_in_use(shelf).unwrap());
        drop(looking);

        let adopting = stripe.lock().unwrap();
        let looker = stripe.clone();
        let looks = std::thread::spawn(move || looker.is_in_use(shelf).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        assert!(!looks.is_finished());
        let adopted = stripe.try_hold_shelf(shelf).unwrap();
        drop(adopting);
        assert!(adopted.is_some() && looks.join().unwrap());
    }
}
