// SPDX-License-Identifier: Apache-2.0
//! The log of a shelf: followed by every process, appended by one.
//!
//! Invariants
//! * An entry that does not verify does not exist. Behind the last good one there is nothing.
//! * A manifest is replaced by one of a greater epoch that says the same. It is complete and synced before it gets its name, and the old
//!   one is removed after: a follower sees that its file has no name any more. Nobody removes one of a greater epoch than his own, or
//!   writes to what another is about to name.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use hashbrown::HashMap;

use crate::catalog::KeyHash;
use crate::error::{Doing, Result, is_of_process};
use crate::format::{ENTRY_BYTES, Entry, FileHeader, FileKind, Kind};
use crate::geometry::{BLOCK_BYTES, Place};
use crate::owned::{self, Way, sync_directory};

const CHUNK_BYTES: usize = 4 << 20;
const UNNAMED: &str = "new-manifest";
/// So many in a row are the end of a log, whatever its file's length: 2 MiB, twice what a writer may leave behind its last one.
const MOST_ZERO_ENTRIES: usize = (2 << 20) / ENTRY_BYTES;

/// Reads a manifest from the front, and later what was appended.
#[derive(Debug)]
pub struct Follower {
    pub header: FileHeader,
    path: PathBuf,
    file: File,
    /// Behind the last entry that verified.
    offset: u64,
    sequence: u64,
    num_damaged: u64,
    /// Where the last call found an entry that does not verify.
    stopped_at: Option<u64>,
    chunk: Vec<u8>,
}

impl Follower {
    /// The manifest of the highest epoch that verifies and has its own name; `None` if a shelf has none.
    pub fn open(directory: &Path) -> Result<Option<Self>> {
        for (number, path) in manifests(directory)? {
            let file = match owned::open(&path, Way::Read) {
                // Replaced between listing and opening.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other.doing("open", &path)?,
            };
            let mut block = vec![0; BLOCK_BYTES];
            match file.read_exact_at(&mut block, 0) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => continue,
                // It says nothing about the manifest: an older one is not what the shelf holds.
                read => read.doing("read", &path)?,
            }
            if let Some(header) = FileHeader::decode(FileKind::Manifest, &block)
                && header.number == number
            {
                return Ok(Some(Self {
                    sequence: header.sequence,
                    header,
                    path,
                    file,
                    offset: BLOCK_BYTES as u64,
                    num_damaged: 0,
                    stopped_at: None,
                    chunk: Vec::new(),
                }));
            }
        }
        Ok(None)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the log that verified so far.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Whether a newer manifest has taken this one's place. If not, it is opened again: only then a network file system asks its
    /// server what was appended.
    pub fn is_replaced(&mut self) -> bool {
        let named = match owned::open(&self.path, Way::Read) {
            // What the mount does not give is found no more, until it does.
            Err(error) => return !is_of_process(&error),
            Ok(named) => named,
        };
        let place = |file: &File| file.metadata().map(|data| (data.dev(), data.ino())).ok();
        let is_same = place(&named).is_some_and(|named| place(&self.file) == Some(named));
        self.file = named;
        !is_same
    }

    /// Whether there may be entries that `read` has not returned. A log ends in zeros, or with its file.
    pub fn has_more(&self) -> bool {
        let mut next = [0; ENTRY_BYTES];
        self.file.read_exact_at(&mut next, self.offset).is_ok() && next != [0; ENTRY_BYTES]
    }

    /// Entries before the last good one that do not verify: the medium has damaged them.
    pub fn num_damaged(&self) -> u64 {
        self.num_damaged
    }

    /// Calls `take` with every entry that has become valid since the last call.
    ///
    /// While somebody appends, an entry may be seen half written: `Whole` stops there, and passes over it only when it still
    /// does not verify at the next call and good ones follow. `AsIs` passes over at once.
    pub fn read(&mut self, log: Log, mut take: impl FnMut(Entry)) -> Result<()> {
        let passes_over = log == Log::AsIs || self.stopped_at == Some(self.offset);
        let (mut at, mut num_zero) = (self.offset, 0);
        self.stopped_at = None;
        self.chunk.resize(CHUNK_BYTES, 0);
        'log: loop {
            let len = read_up_to(&self.file, &mut self.chunk, at).doing("read", &self.path)?;
            for bytes in self.chunk[..len].chunks_exact(ENTRY_BYTES) {
                at += ENTRY_BYTES as u64;
                let is_zero = bytes == [0; ENTRY_BYTES];
                num_zero = if is_zero { num_zero + 1 } else { 0 };
                match Entry::decode(self.header.number, bytes) {
                    Some(entry) if entry.sequence > self.sequence => {
                        self.num_damaged += (at - self.offset) / ENTRY_BYTES as u64 - 1;
                        self.sequence = entry.sequence;
                        self.offset = at;
                        take(entry);
                    }
                    _ if passes_over && num_zero < MOST_ZERO_ENTRIES => {}
                    _ if is_zero => break 'log,
                    _ => {
                        self.stopped_at = Some(self.offset);
                        break 'log;
                    }
                }
            }
            if len < CHUNK_BYTES {
                break;
            }
        }
        self.chunk = Vec::new();
        Ok(())
    }
}

/// How a log is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Log {
    /// Its writer may be appending.
    Whole,
    /// Nobody appends, or it does not matter what is missed.
    AsIs,
}

fn read_up_to(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut len = 0;
    while len < bytes.len() {
        match file.read_at(&mut bytes[len..], offset + len as u64) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}

/// Whether a shelf has a manifest, good or bad. One that has none holds nothing: its writer died before it began, or as it was removed.
pub fn has_any(directory: &Path) -> Result<bool> {
    Ok(!manifests(directory)?.is_empty())
}

/// Manifest files of a shelf, the highest epoch first.
fn manifests(directory: &Path) -> Result<Vec<(u64, PathBuf)>> {
    owned::numbered(directory, "manifest-")
}

/// What a log says: who lives where. It takes memory for its entries, whatever places these name.
#[derive(Clone, Debug, Default)]
pub struct Tenants {
    by_place: HashMap<Place, Entry, KeyHash>,
}

impl Tenants {
    pub fn apply(&mut self, entry: Entry) {
        match entry.kind {
            Kind::Publish => {
                self.by_place.insert(entry.place, entry);
            }
            Kind::Retire => {
                let generation = entry.record.identity.generation;
                if self
                    .get(entry.place)
                    .is_some_and(|tenant| tenant.record.identity.generation == generation)
                {
                    self.by_place.remove(&entry.place);
                }
            }
        }
    }

    pub fn get(&self, place: Place) -> Option<&Entry> {
        self.by_place.get(&place)
    }

    /// In the order of publication.
    pub fn into_entries(self) -> Vec<Entry> {
        let mut entries: Vec<Entry> = self.by_place.into_values().collect();
        entries.sort_unstable_by_key(|entry| entry.sequence);
        entries
    }
}

/// Writes a whole manifest, gives it its name, and removes those before it. The open file, and where it ends.
pub fn replace(
    directory: &Path,
    header: &FileHeader,
    entries: impl Iterator<Item = Entry>,
) -> Result<(File, u64)> {
    let unnamed = directory.join(format!("{UNNAMED}-{}", header.number));
    let file = owned::open(&unnamed, Way::Create).doing("create", &unnamed)?;
    let named = directory.join(format!("manifest-{}", header.number));
    let written = write(&file, &unnamed, header, entries).and_then(|len| {
        fs::rename(&unnamed, &named).doing("rename", &unnamed)?;
        Ok(len)
    });
    if written.is_err() {
        // What it takes may be what others lack.
        drop(fs::remove_file(&unnamed));
    }
    let len = written?;
    sync_directory(directory)?;
    remove_before(directory, header.number)?;
    Ok((file, len))
}

/// Who was to remove them may have died before. Call it as the shelf's writer: one that is it no more removes nothing of its heir's.
pub fn remove_before(directory: &Path, number: u64) -> Result<()> {
    for (other, path) in manifests(directory)? {
        if other < number {
            owned::remove_if_there(&path)?;
        }
    }
    Ok(())
}

fn write(
    file: &File,
    unnamed: &Path,
    header: &FileHeader,
    entries: impl Iterator<Item = Entry>,
) -> Result<u64> {
    file.set_len(0).doing("empty", unnamed)?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let mut len = BLOCK_BYTES as u64;
    out.write_all(&header.encode(FileKind::Manifest))
        .doing("write", unnamed)?;
    for entry in entries {
        let mut bytes = [0; ENTRY_BYTES];
        entry.encode(header.number, &mut bytes);
        out.write_all(&bytes).doing("write", unnamed)?;
        len += ENTRY_BYTES as u64;
    }
    out.flush().doing("write", unnamed)?;
    drop(out);
    file.sync_all().doing("sync", unnamed)?;
    Ok(len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Identity, NO_PARENT, Record};
    use crate::geometry::Geometry;
    use crate::testing::{Scratch, refuse};

    fn header(epoch: u64) -> FileHeader {
        FileHeader {
            shelf: 1,
            number: epoch,
            sequence: 10,
            namespace: [1; 4],
            places_per_segment: 4,
            geometry: Geometry::new(&[100]).unwrap(),
        }
    }

    fn entry(sequence: u64, kind: Kind, place: Place, generation: u64) -> Entry {
        let key = [generation, 0, 0, 1];
        let identity = Identity {
            key,
            namespace: [1; 4],
            generation,
        };
        Entry {
            sequence,
            kind,
            place,
            record: Record {
                identity,
                parent: NO_PARENT,
                checksum: generation,
            },
        }
    }

    fn read_all(follower: &mut Follower) -> Vec<u64> {
        let mut sequences = Vec::new();
        follower
            .read(Log::Whole, |entry| sequences.push(entry.sequence))
            .unwrap();
        sequences
    }

    #[test]
    fn follower_when_entries_are_appended_then_sees_each_once() {
        let scratch = Scratch::new();
        let directory = scratch.path("");
        let first = entry(11, Kind::Publish, 0, 11);
        let (file, len) = replace(&directory, &header(1), [first].into_iter()).unwrap();
        let mut follower = Follower::open(&directory).unwrap().unwrap();
        assert_eq!(read_all(&mut follower), [11]);
        let mut bytes = [0; ENTRY_BYTES];
        entry(12, Kind::Retire, 0, 11).encode(1, &mut bytes);
        file.write_all_at(&bytes[..100], len).unwrap();
        assert_eq!(read_all(&mut follower), [0; 0], "torn");
        file.write_all_at(&bytes, len).unwrap();
        assert_eq!(read_all(&mut follower), [12]);
        assert_eq!(read_all(&mut follower), [0; 0]);
    }

    #[test]
    fn entry_when_the_medium_damaged_it_then_those_behind_it_are_still_read() {
        let scratch = Scratch::new();
        let directory = scratch.path("");
        let entries = (11..15).map(|sequence| entry(sequence, Kind::Publish, 0, sequence));
        let (file, _) = replace(&directory, &header(1), entries).unwrap();
        file.write_all_at(&[0xAA], BLOCK_BYTES as u64 + ENTRY_BYTES as u64 + 50)
            .unwrap();
        let mut follower = Follower::open(&directory).unwrap().unwrap();
        assert_eq!(read_all(&mut follower), [11], "it may be half written");
        assert_eq!(read_all(&mut follower), [13, 14], "it is damaged");
        let mut other = Follower::open(&directory).unwrap().unwrap();
        let mut count = 0;
        other.read(Log::AsIs, |_| count += 1).unwrap();
        assert_eq!((count, other.num_damaged()), (3, 1));
        assert_eq!(other.offset(), follower.offset());
    }

    #[test]
    fn log_when_zeros_follow_then_read_behind_some_and_not_behind_terabytes() {
        let scratch = Scratch::new();
        let directory = scratch.path("");
        let first = entry(11, Kind::Publish, 0, 11);
        let (file, len) = replace(&directory, &header(1), [first].into_iter()).unwrap();
        let mut bytes = [0; ENTRY_BYTES];
        for (sequence, num_zero, expected) in [(12, 9_000, 12), (13, 25_000, 12)] {
            entry(sequence, Kind::Retire, 0, 11).encode(1, &mut bytes);
            let behind = len + num_zero * ENTRY_BYTES as u64;
            file.write_all_at(&bytes, behind).unwrap();
            let (mut follower, mut last) = (Follower::open(&directory).unwrap().unwrap(), 0);
            let read = follower.read(Log::AsIs, |entry| last = entry.sequence);
            read.unwrap();
            assert_eq!(last, expected);
        }
        file.set_len(4 << 40).unwrap();
        let mut follower = Follower::open(&directory).unwrap().unwrap();
        follower.read(Log::AsIs, |_| ()).unwrap();
        assert_eq!(follower.num_damaged(), 9_000);
    }

    #[test]
    fn follower_when_the_manifest_is_replaced_then_knows() {
        let scratch = Scratch::new();
        let directory = scratch.path("");
        replace(&directory, &header(1), std::iter::empty()).unwrap();
        let mut old = Follower::open(&directory).unwrap().unwrap();
        assert!(!old.is_replaced());
        replace(&directory, &header(2), std::iter::empty()).unwrap();
        assert!(old.is_replaced());
        assert_eq!(
            Follower::open(&directory).unwrap().unwrap().header.number,
            2
        );
        assert_eq!(manifests(&directory).unwrap().len(), 1);
    }

    #[test]
    fn manifest_when_a_writer_makes_one_that_is_it_no_more_then_that_of_its_heir_stays() {
        let scratch = Scratch::new();
        let directory = scratch.path("");
        for number in [1, 9, 2] {
            replace(&directory, &header(number), std::iter::empty()).unwrap();
        }
        let found = Follower::open(&directory).unwrap().unwrap();
        assert_eq!(found.header.number, 9);
    }

    #[test]
    fn manifest_when_it_has_the_name_of_another_epoch_then_it_is_none() {
        let scratch = Scratch::new();
        let directory = scratch.path("");
        replace(&directory, &header(1), std::iter::empty()).unwrap();
        fs::copy(directory.join("manifest-1"), directory.join("manifest-7")).unwrap();
        let found = Follower::open(&directory).unwrap().unwrap();
        assert_eq!(found.path(), directory.join("manifest-1"));
    }

    #[test]
    fn manifest_when_it_cannot_be_written_then_its_space_comes_back() {
        let scratch = Scratch::new();
        let directory = scratch.path("");
        fs::create_dir(directory.join("manifest-1")).unwrap();
        replace(&directory, &header(1), std::iter::empty()).unwrap_err();
        assert!(!directory.join(format!("{UNNAMED}-1")).exists());
    }

    #[test]
    fn manifest_when_a_writer_that_is_it_no_more_makes_one_at_that_moment_then_its_heirs_is_whole()
    {
        for _ in 0..20 {
            let scratch = Scratch::new();
            let directory = scratch.path("");
            replace(&directory, &header(1), std::iter::empty()).unwrap();
            std::thread::scope(|scope| {
                for number in [2, 9] {
                    let directory = &directory;
                    scope.spawn(move || {
                        let entries = (11..500).map(|next| entry(next, Kind::Publish, 0, next));
                        replace(directory, &header(number), entries).unwrap();
                    });
                }
            });
            let mut found = Follower::open(&directory).unwrap().unwrap();
            assert_eq!((found.header.number, read_all(&mut found).len()), (9, 489));
        }
    }

    #[test]
    fn open_when_the_newest_manifest_is_damaged_then_the_one_before() {
        let scratch = Scratch::new();
        let directory = scratch.path("");
        replace(&directory, &header(1), std::iter::empty()).unwrap();
        fs::write(directory.join("manifest-2"), [0; 5000]).unwrap();
        assert_eq!(
            Follower::open(&directory).unwrap().unwrap().header.number,
            1
        );
    }

    #[test]
    fn open_when_the_newest_manifest_cannot_be_read_then_an_error_and_when_it_is_short_the_one_before()
     {
        let scratch = Scratch::new();
        let directory = scratch.path("");
        replace(&directory, &header(1), std::iter::empty()).unwrap();
        fs::write(directory.join("manifest-2"), [0; 100]).unwrap();
        let found = Follower::open(&directory).unwrap().unwrap();
        assert_eq!(found.header.number, 1);
        // The thread ends with its filter.
        let refused = std::thread::spawn(move || {
            refuse(libc::SYS_pread64, libc::EIO);
            Follower::open(&directory).unwrap_err().to_string()
        });
        let words = refused.join().unwrap();
        assert!(
            words.contains("cannot read") && words.contains("manifest-2"),
            "{words}"
        );
    }

    #[test]
    fn tenants_when_a_retire_is_of_an_earlier_tenant_then_the_later_stays() {
        let mut tenants = Tenants::default();
        for step in [
            entry(1, Kind::Publish, 0, 1),
            entry(2, Kind::Retire, 0, 1),
            entry(3, Kind::Publish, 0, 3),
            entry(4, Kind::Retire, 0, 1),
            entry(5, Kind::Publish, Place::MAX, 5),
        ] {
            tenants.apply(step);
        }
        assert_eq!(tenants.get(0).unwrap().record.identity.generation, 3);
        assert_eq!(tenants.into_entries().len(), 2);
    }
}
