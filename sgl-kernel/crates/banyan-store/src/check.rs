// SPDX-License-Identifier: Apache-2.0
//! What is in a store (`survey`, from manifests alone), and whether it is right (`check`, every byte of it).
//!
//! Both are safe while the store is in use: a record that fails is looked up again, and counts only if it is still published.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::buffer::AlignedBytes;
use crate::directory::{ShelfId, Stripe};
use crate::error::{Doing, Result, invalid, passes};
use crate::files::{Use, open_direct};
use crate::format::{
    Entry, FileHeader, FileKind, Namespace, RecordHeader, leaves_room, record_checksum,
};
use crate::geometry::{BLOCK_BYTES, Geometry, Place};
use crate::growth;
use crate::manifest::{self, Follower, Log, Tenants};
use crate::marks::SILENCE;
use crate::opening::pass_over;

#[derive(Clone, Debug)]
pub struct ShelfReport {
    pub shelf: ShelfId,
    /// Whether a live writer holds it.
    pub is_in_use: bool,
    pub epoch: u64,
    pub namespace: Namespace,
    pub num_layers: usize,
    pub record_bytes: u64,
    pub num_segments: usize,
    pub num_places: u64,
    pub num_records: u64,
    pub used_bytes: u64,
    pub records_by_namespace: BTreeMap<Namespace, u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub shelf: ShelfId,
    pub place: Option<Place>,
    pub problem: String,
    pub is_repaired: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Report {
    pub num_shelves: usize,
    pub num_records: u64,
    pub verified_bytes: u64,
    pub num_orphans: u64,
    pub findings: Vec<Finding>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// Only say what is wrong.
    Check,
    /// Withdraw what is wrong on shelves without a live writer.
    Repair,
}

/// What lies in a store. A shelf that cannot be read is passed over, and counted.
#[derive(Debug, Default)]
pub struct Survey {
    pub shelves: Vec<ShelfReport>,
    pub num_unreadable: u64,
}

pub fn survey(stripe: &Stripe) -> Result<Survey> {
    let mut found = Survey::default();
    for shelf in stripe.shelves()? {
        match survey_shelf(stripe, shelf) {
            Ok(report) => found.shelves.extend(report),
            Err(error) => {
                pass_over(shelf, &error);
                found.num_unreadable += 1;
            }
        }
    }
    Ok(found)
}

fn survey_shelf(stripe: &Stripe, shelf: ShelfId) -> Result<Option<ShelfReport>> {
    let Some(Loaded {
        header, entries, ..
    }) = load(stripe, shelf)?
    else {
        return Ok(None);
    };
    let mut records_by_namespace = BTreeMap::new();
    for entry in &entries {
        *records_by_namespace
            .entry(entry.record.identity.namespace)
            .or_insert(0) += 1;
    }
    let segments = stripe.segments(shelf)?;
    Ok(Some(ShelfReport {
        shelf,
        is_in_use: stripe.is_in_use(shelf)?,
        epoch: header.number,
        namespace: header.namespace,
        num_layers: header.geometry.num_layers(),
        record_bytes: header.geometry.record_bytes(),
        num_segments: segments.len(),
        num_places: segments.len() as u64 * u64::from(header.places_per_segment),
        num_records: entries.len() as u64,
        used_bytes: growth::shelf_cost(stripe, shelf)?,
        records_by_namespace,
    }))
}

struct Loaded {
    header: FileHeader,
    entries: Vec<Entry>,
    num_damaged: u64,
}

fn load(stripe: &Stripe, shelf: ShelfId) -> Result<Option<Loaded>> {
    let Some(mut follower) = Follower::open(&stripe.shelf(shelf, 0))? else {
        return Ok(None);
    };
    if follower.header.shelf != shelf {
        let (path, whose) = (follower.path().display(), follower.header.shelf);
        return invalid!("{path} is that of shelf {whose:016x}: `banyan store evict` removes it");
    }
    let mut tenants = Tenants::default();
    follower.read(Log::AsIs, |entry| tenants.apply(entry))?;
    let num_damaged = follower.num_damaged();
    Ok(Some(Loaded {
        header: follower.header,
        entries: tenants.into_entries(),
        num_damaged,
    }))
}

pub fn check(stripe: &Stripe, treatment: Treatment) -> Result<Report> {
    let mut report = Report::default();
    let mut parents = Vec::new();
    let mut keys = HashSet::new();
    for shelf in stripe.shelves()? {
        report.num_shelves += 1;
        let loaded = load(stripe, shelf).and_then(|loaded| {
            let has_any = loaded.is_some() || manifest::has_any(&stripe.shelf(shelf, 0))?;
            Ok((loaded, has_any))
        });
        let (header, entries, num_damaged) = match loaded {
            Ok((Some(loaded), _)) => (loaded.header, loaded.entries, loaded.num_damaged),
            Ok((None, has_any)) => {
                if has_any {
                    add(&mut report, shelf, "no manifest that verifies".into());
                }
                continue;
            }
            Err(error) => {
                add(&mut report, shelf, error.to_string());
                continue;
            }
        };
        let bad = check_shelf(stripe, &header, &entries, &mut report)?;
        for entry in entries
            .iter()
            .filter(|entry| !bad.contains_key(&entry.place))
        {
            keys.insert((entry.record.identity.namespace, entry.record.identity.key));
            parents.push((entry.record.identity.namespace, entry.record.parent));
        }
        settle(stripe, shelf, bad, num_damaged, treatment, &mut report)?;
    }
    let is_orphan = |parent: &&(Namespace, [u64; 4])| parent.1 != [0; 4] && !keys.contains(*parent);
    report.num_orphans = parents.iter().filter(is_orphan).count() as u64;
    Ok(report)
}

fn add(report: &mut Report, shelf: ShelfId, problem: String) {
    report.findings.push(Finding {
        shelf,
        place: None,
        problem,
        is_repaired: false,
    });
}

/// Places whose record does not verify, with the generation and the reason.
type Bad = HashMap<Place, (u64, String)>;

fn check_shelf(
    stripe: &Stripe,
    header: &FileHeader,
    entries: &[Entry],
    report: &mut Report,
) -> Result<Bad> {
    let segmenting = header.segmenting();
    let mut buffer = AlignedBytes::new(segmenting.record_bytes as usize);
    let mut bad = Bad::new();
    let mut by_place: Vec<&Entry> = entries.iter().collect();
    by_place.sort_unstable_by_key(|entry| entry.place);
    let segment_of = |entry: &Entry| segmenting.locate(entry.place).0;
    // One file at a time: a shelf may have more of them than a process may.
    for entries in by_place.chunk_by(|one, next| segment_of(one) == segment_of(next)) {
        let segment = segment_of(entries[0]);
        let path = stripe.segment(header.shelf, segment);
        let file = lasting(open_segment(&path, header, segment)).doing("open", &path)?;
        let file = file.map_err(|problem| format!("{}: {problem}", path.display()));
        for entry in entries {
            let offset = segmenting.locate(entry.place).1;
            let read = match &file {
                Ok(file) => lasting(file.read_exact_at(buffer.bytes_mut(), offset)),
                Err(problem) => Ok(Err(problem.clone())),
            };
            let read = read.doing("read", &path)?;
            let verdict = read.and_then(|()| verify(&header.geometry, entry, buffer.bytes()));
            report.num_records += 1;
            match verdict {
                Ok(()) => report.verified_bytes += segmenting.record_bytes,
                Err(problem) => {
                    bad.insert(entry.place, (entry.record.identity.generation, problem));
                }
            }
        }
    }
    Ok(bad)
}

/// An error of the moment is none of the record's: nothing is withdrawn for it.
fn lasting<T>(done: io::Result<T>) -> io::Result<std::result::Result<T, String>> {
    match done {
        Err(error) if passes(&error) || error.kind() == io::ErrorKind::PermissionDenied => {
            Err(error)
        }
        Err(error) => Ok(Err(format!("cannot be read: {error}"))),
        Ok(done) => Ok(Ok(done)),
    }
}

fn open_segment(path: &Path, header: &FileHeader, segment: u32) -> io::Result<File> {
    let (file, _) = open_direct(path, Use::Reading)?;
    let mut block = AlignedBytes::new(BLOCK_BYTES);
    file.read_exact_at(block.bytes_mut(), 0)?;
    match FileHeader::decode(FileKind::Segment, block.bytes()) {
        Some(found) if found.shelf == header.shelf && found.number == u64::from(segment) => {
            Ok(file)
        }
        _ => Err(io::Error::other("the segment's header does not verify")),
    }
}

fn verify(geometry: &Geometry, entry: &Entry, record: &[u8]) -> std::result::Result<(), String> {
    let Some(header) = RecordHeader::decode(record) else {
        return Err("the header does not verify".into());
    };
    if header.identity != entry.record.identity || header.parent != entry.record.parent {
        return Err("the header names another page".into());
    }
    if record_checksum(&header.checksums) != entry.record.checksum {
        return Err("the header's checksums are not those of the manifest".into());
    }
    if header.checksums.len() != geometry.num_layers() {
        return Err("the header names another number of layers".into());
    }
    for (layer, checksum) in header.checksums.iter().enumerate() {
        let start = geometry.in_record(&(layer..layer + 1)).start as usize;
        let bytes = &record[start..start + geometry.layer_bytes()[layer] as usize];
        if entry.record.identity.checksum(layer, bytes) != *checksum {
            return Err(format!("layer {layer} does not verify"));
        }
    }
    Ok(())
}

/// Reports what is still published, and withdraws it if asked and allowed.
fn settle(
    stripe: &Stripe,
    shelf: ShelfId,
    bad: Bad,
    num_damaged: u64,
    treatment: Treatment,
    report: &mut Report,
) -> Result<()> {
    if bad.is_empty() && num_damaged == 0 {
        return Ok(());
    }
    let _store_lock = match treatment {
        Treatment::Repair => Some(stripe.lock()?),
        Treatment::Check => None,
    };
    let hold = match treatment {
        Treatment::Repair => stripe.try_hold_shelf(shelf)?,
        Treatment::Check => None,
    };
    let Some(Loaded {
        mut header,
        entries,
        num_damaged,
    }) = load(stripe, shelf)?
    else {
        return Ok(());
    };
    let hold = hold.filter(|_| leaves_room(header.number));
    let is_repaired = hold.is_some();
    if num_damaged > 0 {
        report.findings.push(Finding {
            shelf,
            place: None,
            problem: format!("{num_damaged} entries of the manifest do not verify"),
            is_repaired,
        });
    }
    let is_bad = |entry: &Entry| {
        let found = bad.get(&entry.place);
        found.filter(|(generation, _)| *generation == entry.record.identity.generation)
    };
    for entry in &entries {
        if let Some((_, problem)) = is_bad(entry) {
            report.findings.push(Finding {
                shelf,
                place: Some(entry.place),
                problem: problem.clone(),
                is_repaired,
            });
        }
    }
    if let Some(hold) = hold {
        header.number = hold.next_epoch(header.number);
        header.sequence = 0;
        let good = entries.into_iter().filter(|entry| is_bad(entry).is_none());
        manifest::replace(&stripe.shelf(shelf, 0), &header, good)?;
    }
    Ok(())
}

/// What became of shelves without a writer. One that cannot be removed is passed over, and counted.
#[derive(Debug, Default)]
pub struct Removal {
    pub removed: Vec<ShelfId>,
    pub num_unremoved: u64,
}

/// Removes shelves whose writer is gone.
pub fn remove_idle(stripe: &Stripe) -> Result<Removal> {
    let _store_lock = stripe.lock()?;
    let mut found = Removal::default();
    for shelf in stripe.shelves()? {
        match remove_if_idle(stripe, shelf) {
            Ok(true) => found.removed.push(shelf),
            Ok(false) => {}
            Err(error) => {
                pass_over(shelf, &error);
                found.num_unremoved += 1;
            }
        }
    }
    Ok(found)
}

/// Removes this one. An error where it is not there, or has a writer.
pub fn remove(stripe: &Stripe, shelf: ShelfId) -> Result<()> {
    let _store_lock = stripe.lock()?;
    if stripe.shelves()?.contains(&shelf) && remove_if_idle(stripe, shelf)? {
        return Ok(());
    }
    invalid!(
        "shelf {shelf:016x} is not there, or in use: stop its server first; one that died on another machine counts for {SILENCE:?}"
    )
}

/// Whether it had no writer, and is gone.
fn remove_if_idle(stripe: &Stripe, shelf: ShelfId) -> Result<bool> {
    let Some(hold) = stripe.try_hold_shelf(shelf)? else {
        return Ok(false);
    };
    stripe.remove_shelf(shelf, hold)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Identity, Kind, NO_PARENT, Record};

    #[test]
    fn record_when_the_mount_is_away_as_it_is_read_then_not_taken_for_damaged() {
        for (errno, is_damage) in [
            (libc::ENOTCONN, false),
            (libc::ESTALE, false),
            (libc::EACCES, false),
            (libc::EIO, true),
        ] {
            let done = lasting::<()>(Err(io::Error::from_raw_os_error(errno)));
            assert_eq!(done.is_ok(), is_damage, "{errno}");
        }
        let linked = io::Error::new(io::ErrorKind::PermissionDenied, "it has a second name");
        assert!(lasting::<()>(Err(linked)).is_err());
    }

    #[test]
    fn record_when_its_header_names_another_number_of_layers_then_it_does_not_verify() {
        let geometry = Geometry::new(&[4096; 2]).unwrap();
        let identity = Identity {
            key: [1; 4],
            namespace: [2; 4],
            generation: 3,
        };
        let layer = [7; 4096];
        for num_layers in 1..=4 {
            let checksums: Vec<u64> = (0..num_layers)
                .map(|number| identity.checksum(number, &layer))
                .collect();
            let record = Record {
                identity,
                parent: NO_PARENT,
                checksum: record_checksum(&checksums),
            };
            let header = RecordHeader {
                identity,
                parent: NO_PARENT,
                checksums,
            };
            let mut bytes = vec![7; geometry.record_bytes() as usize];
            header.encode(&mut bytes[..BLOCK_BYTES]);
            let entry = Entry {
                sequence: 1,
                kind: Kind::Publish,
                place: 0,
                record,
            };
            let verified = verify(&geometry, &entry, &bytes);
            assert_eq!(verified.is_ok(), num_layers == 2, "{verified:?}");
        }
    }
}
