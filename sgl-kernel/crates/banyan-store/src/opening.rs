// SPDX-License-Identifier: Apache-2.0
//! Opening a store: which shelf becomes ours, and what it holds. Reads manifests, never records.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::catalog::Hit;
use crate::directory::{ShelfId, Stripe, empty};
use crate::error::{Doing, Result, StoreError, found_no_space, invalid, is_no_space, passes};
use crate::format::{Entry, FileHeader, FileKind, Namespace, leaves_room};
use crate::geometry::{BLOCK_BYTES, Geometry};
use crate::growth::{self, Limits};
use crate::manifest::{self, Follower, Log, Tenants};
use crate::marks::Hold;
use crate::owned::{self, Way, remove_if_there};
use crate::places::{Places, Standing};
use crate::said::Said;
use crate::state::{Own, State};
use crate::writing::Opened;

/// Numbers to skip at adoption: records of the last owner that never got their entry may have used some.
const SKIPPED_NUMBERS: u64 = 1 << 20;

/// Who starts takes segments of others no longer: it holds the store's lock, and its siblings wait `LOCK_PATIENCE`.
const RECLAIM_FOR: Duration = Duration::from_secs(3);

/// What the opening needs to know.
pub struct Wanted<'a> {
    pub namespace: Namespace,
    pub geometry: &'a Geometry,
    pub limits: Limits,
    pub places_per_segment: u32,
}

/// Takes over a shelf of this namespace and geometry that has no owner, or makes one; fills `state` with what it holds.
pub fn open_own(stripe: &Stripe, wanted: &Wanted<'_>, state: &mut State) -> Result<Opened> {
    let _store_lock = stripe.lock()?;
    let (recovered, hold) = match adopt(stripe, wanted)? {
        Some(found) => found,
        None => {
            let (shelf, hold) = stripe.create_shelf()?;
            (fresh(stripe, wanted, shelf)?, hold)
        }
    };
    restore(state, &recovered)?;
    Ok(Opened {
        hold,
        header: recovered.header,
        segments: recovered.segments,
        log: recovered.log,
        log_bytes: recovered.log_bytes,
        sequence: recovered.sequence,
    })
}

fn adopt(stripe: &Stripe, wanted: &Wanted<'_>) -> Result<Option<(Recovered, Hold)>> {
    for shelf in stripe.shelves()? {
        match take_over(stripe, wanted, shelf) {
            Ok(None) => {}
            Ok(taken) => return Ok(taken),
            // The shelf would be the first to go.
            Err(error) if error.system_cause().is_some_and(says_nothing) => return Err(error),
            // One that cannot be read is nobody's reason not to start.
            Err(error) => pass_over(shelf, &error),
        }
    }
    Ok(None)
}

/// Whether an error says nothing about the shelf at which it was met.
pub fn says_nothing(error: &io::Error) -> bool {
    let is_denied = error.kind() == ErrorKind::PermissionDenied;
    is_no_space(error) || (passes(error) && !is_denied)
}

pub fn pass_over(shelf: ShelfId, error: &StoreError) {
    static SAID: Mutex<BTreeMap<ShelfId, Said>> = Mutex::new(BTreeMap::new());
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    let said = said.entry(shelf).or_default();
    if said.is_new(&error.to_string(), Instant::now()) {
        banyan_shm::say!("banyan: shelf {shelf:016x} of the store is passed over: {error}");
    }
}

/// A shelf with what it holds, if it is one that is wanted and has no owner.
fn take_over(
    stripe: &Stripe,
    wanted: &Wanted<'_>,
    shelf: ShelfId,
) -> Result<Option<(Recovered, Hold)>> {
    let directory = stripe.shelf(shelf, 0);
    let is_wanted = |found: &Follower| {
        // One that was copied from another shelf is about the segments of that.
        found.header.shelf == shelf
            && found.header.namespace == wanted.namespace
            && found.header.geometry == *wanted.geometry
            && found.header.segmenting().has(0)
            // It could never grow again: one of smaller segments can.
            && (found.header.places_per_segment <= wanted.places_per_segment
                || growth::segment_cost(&found.header.segmenting()) <= wanted.limits.share_bytes)
    };
    let Some(found) = Follower::open(&directory)? else {
        remove_remains(stripe, shelf)?;
        return Ok(None);
    };
    if !is_wanted(&found) {
        return Ok(None);
    }
    let Some(hold) = stripe.try_hold_shelf(shelf)? else {
        return Ok(None);
    };
    remove_leftovers(stripe, shelf)?;
    // Its owner may have been there until just now.
    let Some(follower) = Follower::open(&directory)?.filter(is_wanted) else {
        return Ok(None);
    };
    manifest::remove_before(&directory, follower.header.number)?;
    let recovered = recover(stripe, wanted, &hold, follower)?;
    Ok(Some((recovered, hold)))
}

/// What is left of a shelf whose writer died before it had a manifest, or whose removal was interrupted.
fn remove_remains(stripe: &Stripe, shelf: ShelfId) -> Result<()> {
    if !manifest::has_any(&stripe.shelf(shelf, 0))?
        && let Some(hold) = stripe.try_hold_shelf(shelf)?
    {
        stripe.remove_shelf(shelf, hold)?;
    }
    Ok(())
}

struct Recovered {
    header: FileHeader,
    segments: Vec<u32>,
    entries: Vec<Entry>,
    log: fs::File,
    log_bytes: u64,
    sequence: u64,
    num_damaged: u64,
}

fn fresh(stripe: &Stripe, wanted: &Wanted<'_>, shelf: ShelfId) -> Result<Recovered> {
    let header = FileHeader {
        shelf,
        number: 1,
        sequence: 0,
        namespace: wanted.namespace,
        places_per_segment: wanted.places_per_segment,
        geometry: wanted.geometry.clone(),
    };
    let nothing = std::iter::empty();
    let (log, log_bytes) = manifest::replace(&stripe.shelf(shelf, 0), &header, nothing)?;
    Ok(Recovered {
        header,
        segments: Vec::new(),
        entries: Vec::new(),
        log,
        log_bytes,
        sequence: 0,
        num_damaged: 0,
    })
}

fn recover(
    stripe: &Stripe,
    wanted: &Wanted<'_>,
    hold: &Hold,
    mut follower: Follower,
) -> Result<Recovered> {
    let shelf = follower.header.shelf;
    let mut tenants = Tenants::default();
    let mut greatest = follower.header.sequence;
    let mut num_entries = 0u64;
    follower.read(Log::AsIs, |entry| {
        greatest = greatest
            .max(entry.sequence)
            .max(entry.record.identity.generation);
        num_entries += 1;
        tenants.apply(entry);
    })?;
    let mut header = follower.header.clone();
    if !leaves_room(greatest.max(header.number)) {
        return invalid!("its numbers come to an end: `banyan store evict` removes it");
    }
    let segmenting = header.segmenting();
    let named = stripe.segments(shelf)?;
    let mut segments = Vec::with_capacity(named.len());
    for segment in &named {
        if is_segment(stripe, &header, *segment)? {
            segments.push(*segment);
        }
    }
    let num_bad = named.len() - segments.len();
    let num_lost = shrink(stripe, wanted, &header, &mut segments)?;
    let mut entries = tenants.into_entries();
    let num_known = entries.len();
    // They are sorted.
    let is_there = |segment: u32| segments.binary_search(&segment).is_ok();
    entries.retain(|entry| is_there(segmenting.locate(entry.place).0));
    let remove_rest = || {
        let mut rest = named.iter().filter(|segment| !is_there(**segment));
        rest.try_for_each(|segment| remove_if_there(&stripe.segment(shelf, *segment)))
    };

    hold.mark.confirm()?;
    let sequence = greatest + SKIPPED_NUMBERS;
    let num_places = segments.len() as u64 * u64::from(segmenting.places_per_segment);
    let is_wordy = num_entries > 2 * num_places;
    let (log, log_bytes) = if entries.len() != num_known
        || num_lost + num_bad > 0
        || is_wordy
        || follower.num_damaged() > 0
        // The last owner may go on to append: to a file that is gone.
        || hold.mark.follows_silence
    {
        header.number = hold.next_epoch(header.number);
        header.sequence = 0;
        let directory = stripe.shelf(shelf, 0);
        let replace = || manifest::replace(&directory, &header, entries.iter().copied());
        match replace() {
            // What it lacks is theirs.
            Err(error) if num_lost > 0 && found_no_space(&error) => {
                remove_rest()?;
                replace()?
            }
            // Nobody else appends to the one that is there, and what is wrong in it is passed over.
            Err(error) if !hold.mark.follows_silence && found_no_space(&error) => {
                banyan_shm::say!(
                    "banyan: shelf {shelf:016x} of the store goes on with its manifest as it is: {error}"
                );
                header = follower.header.clone();
                continue_log(&follower)?
            }
            replaced => replaced?,
        }
    } else {
        continue_log(&follower)?
    };
    remove_rest()?;
    Ok(Recovered {
        header,
        segments,
        entries,
        log,
        log_bytes,
        sequence,
        num_damaged: follower.num_damaged(),
    })
}

/// Whether a file that bears the name of a segment is one of this shelf: its places are taken up, and cost memory.
fn is_segment(stripe: &Stripe, shelf: &FileHeader, segment: u32) -> Result<bool> {
    let path = stripe.segment(shelf.shelf, segment);
    let file = owned::open(&path, Way::Read).doing("open", &path)?;
    let mut block = vec![0; BLOCK_BYTES];
    match file.read_exact_at(&mut block, 0) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(false),
        read => read.doing("read", &path)?,
    }
    let found = FileHeader::decode(FileKind::Segment, &block);
    Ok(found.is_some_and(|found| {
        (found.shelf, found.number) == (shelf.shelf, u64::from(segment))
            && (found.places_per_segment, &found.geometry)
                == (shelf.places_per_segment, &shelf.geometry)
            && shelf.segmenting().has(segment)
    }))
}

/// Cuts off what does not verify, so that new entries follow the last good one.
fn continue_log(follower: &Follower) -> Result<(fs::File, u64)> {
    let path = follower.path();
    let file = owned::open(path, Way::Write).doing("open", path)?;
    let len = file.metadata().doing("size", path)?.len();
    if len != follower.offset() {
        file.set_len(follower.offset()).doing("truncate", path)?;
        file.sync_all().doing("sync", path)?;
    }
    Ok((file, follower.offset()))
}

/// Takes segments off the end until the writer is within its share, and the store within its quota: that is for idle
/// shelves of others before, as long as it may take. How many went.
fn shrink(
    stripe: &Stripe,
    wanted: &Wanted<'_>,
    header: &FileHeader,
    segments: &mut Vec<u32>,
) -> Result<usize> {
    let (segmenting, before) = (header.segmenting(), segments.len());
    let most = wanted.limits.share_bytes / growth::segment_cost(&segmenting);
    segments.truncate(most as usize);
    let mut others = cost_of_others(stripe, wanted, header.shelf)?;
    let until = Instant::now() + RECLAIM_FOR;
    let mut others_make_room = true;
    while !segments.is_empty()
        && growth::cost_of(&segmenting, segments.len()).saturating_add(others)
            > wanted.limits.quota_bytes
    {
        others_make_room = others_make_room
            && Instant::now() < until
            && reclaim_one(stripe, header.shelf, wanted.namespace, Whose::Others).unwrap_or(false);
        if others_make_room {
            others = cost_of_others(stripe, wanted, header.shelf)?;
        } else {
            segments.pop();
        }
    }
    Ok(before - segments.len())
}

/// What all shelves but one count. Those of its namespace are cut to a share when their writers start.
fn cost_of_others(stripe: &Stripe, wanted: &Wanted<'_>, own: ShelfId) -> Result<u64> {
    let mut sum = 0_u64;
    for shelf in stripe.shelves()?.into_iter().filter(|shelf| *shelf != own) {
        let found = Follower::open(&stripe.shelf(shelf, 0)).ok().flatten();
        let cost = growth::cost_by(stripe, shelf, found.as_ref())?;
        sum = sum.saturating_add(
            if found.is_some_and(|found| is_of(&found, shelf, wanted.namespace)) {
                cost.min(wanted.limits.share_bytes)
            } else {
                cost
            },
        );
    }
    Ok(sum)
}

fn restore(state: &mut State, recovered: &Recovered) -> Result<()> {
    let segmenting = recovered.header.segmenting();
    let index = state.catalog.add_shelf(recovered.header.shelf, segmenting);
    let mut places = Places::default();
    state.catalog.reserve(recovered.entries.len());
    for entry in &recovered.entries {
        let record = entry.record;
        let hit = Hit::of(&record, index, entry.place);
        let is_live = record.identity.namespace == state.namespace
            && state.catalog.publish(hit, record.parent);
        let standing = if is_live {
            Standing::Live
        } else {
            Standing::Stale
        };
        places.restore(entry.place, record, standing);
    }
    for segment in &recovered.segments {
        places.add(segmenting.places_of(*segment));
    }
    state.counters.adopted_pages = recovered.entries.len() as u64;
    state.counters.damaged_entries = recovered.num_damaged;
    state.own = Some(Own { index, places });
    Ok(())
}

/// Files that were being made when their writer died.
fn remove_leftovers(stripe: &Stripe, shelf: ShelfId) -> Result<()> {
    for path in 0..stripe.num_paths() {
        let is_unnamed = |name: &OsStr| name.as_encoded_bytes().starts_with(b"new-");
        empty(&stripe.shelf(shelf, path), is_unnamed)?;
    }
    Ok(())
}

/// Whose an idle shelf is, as they make room one after the other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Whose {
    Others,
    /// It cannot be read.
    Unknown,
    Ours,
}

fn is_of(found: &Follower, shelf: ShelfId, namespace: Namespace) -> bool {
    (found.header.shelf, found.header.namespace) == (shelf, namespace)
}

fn whose(stripe: &Stripe, shelf: ShelfId, namespace: Namespace) -> Result<Whose> {
    match Follower::open(&stripe.shelf(shelf, 0)) {
        Ok(Some(found)) if is_of(&found, shelf, namespace) => Ok(Whose::Ours),
        Ok(_) => Ok(Whose::Others),
        // It says nothing about the shelf.
        Err(error) if error.system_cause().is_some_and(passes) => Err(error),
        Err(_) => Ok(Whose::Unknown),
    }
}

/// Makes room for `own` in a shelf whose writer is gone, no later than those of `last`. Those of another namespace go segment by segment,
/// the one with the most next: shards whose pages make one keep the same ones. Then whole ones go, of our own namespace last. False when
/// there is none. Call under the store's lock.
pub fn reclaim_one(
    stripe: &Stripe,
    own: ShelfId,
    namespace: Namespace,
    last: Whose,
) -> Result<bool> {
    let mut candidates = Vec::new();
    for shelf in stripe.shelves()?.into_iter().filter(|shelf| *shelf != own) {
        // One that cannot be listed is nobody's reason to stop: another one may do.
        if let Ok(whose) = whose(stripe, shelf, namespace)
            && whose <= last
            && let Ok(segments) = stripe.segments(shelf)
        {
            candidates.push((whose, Reverse(segments.len()), shelf));
        }
    }
    candidates.sort_unstable();
    let mut problem = Ok(false);
    for (whose, _, shelf) in candidates {
        match reclaim(stripe, shelf, whose) {
            Ok(false) => {}
            Ok(true) => return Ok(true),
            // Another one may do.
            Err(error) => problem = Err(error),
        }
    }
    problem
}

fn reclaim(stripe: &Stripe, shelf: ShelfId, whose: Whose) -> Result<bool> {
    let Some(hold) = stripe.try_hold_shelf(shelf)? else {
        return Ok(false);
    };
    match whose {
        Whose::Others => take_segment(stripe, shelf, hold)?,
        Whose::Unknown | Whose::Ours => stripe.remove_shelf(shelf, hold)?,
    }
    Ok(true)
}

/// Takes the last segment of a shelf, and what lay there out of its manifest; with the only one all of the shelf.
fn take_segment(stripe: &Stripe, shelf: ShelfId, hold: Hold) -> Result<()> {
    let directory = stripe.shelf(shelf, 0);
    let mut segments = stripe.segments(shelf)?;
    let last = segments.pop();
    let is_good = |found: &Follower| {
        let header = &found.header;
        header.shelf == shelf && leaves_room(header.number) && !segments.is_empty()
    };
    let (Some(mut follower), Some(last)) = (Follower::open(&directory)?.filter(is_good), last)
    else {
        return stripe.remove_shelf(shelf, hold);
    };
    let mut tenants = Tenants::default();
    follower.read(Log::AsIs, |entry| tenants.apply(entry))?;
    let mut header = follower.header;
    let segmenting = header.segmenting();
    // They are sorted.
    let is_there = |entry: &Entry| {
        let segment = segmenting.locate(entry.place).0;
        segments.binary_search(&segment).is_ok()
    };
    header.number = hold.next_epoch(header.number);
    header.sequence = 0;
    let left = tenants.into_entries().into_iter().filter(is_there);
    match manifest::replace(&directory, &header, left) {
        // The drive is full: all of it goes.
        Err(error) if found_no_space(&error) => stripe.remove_shelf(shelf, hold),
        replaced => {
            replaced?;
            remove_if_there(&stripe.segment(shelf, last))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::check::{Treatment, check, remove, remove_idle};
    use crate::files::create_segment;
    use crate::format::{ENTRY_BYTES, Kind, MOST_NUMBER};
    use crate::marks::{Reach, SILENCE};
    use crate::testing::{Scratch, age, record, refuse};

    fn opened(stripe: &Stripe) -> (Opened, State) {
        opened_within(stripe, 1 << 30, 1 << 30)
    }

    fn opened_within(stripe: &Stripe, quota_bytes: u64, share_bytes: u64) -> (Opened, State) {
        let geometry = Geometry::new(&[4096]).unwrap();
        let wanted = Wanted {
            namespace: [1; 4],
            geometry: &geometry,
            limits: Limits {
                quota_bytes,
                share_bytes,
                floor_bytes: 0,
            },
            places_per_segment: 4,
        };
        let mut state = State::new([1; 4]);
        let opened = open_own(stripe, &wanted, &mut state).unwrap();
        (opened, state)
    }

    /// What the medium does not hold, a manifest may name all the same.
    fn entry(sequence: u64) -> Entry {
        Entry {
            sequence,
            kind: Kind::Publish,
            place: 0,
            record: record(1),
        }
    }

    fn publish(stripe: &Stripe, opened: &Opened, entry: &Entry) {
        let header = &opened.header;
        create_segment(stripe, header, 0, header.segmenting().file_bytes()).unwrap();
        let mut bytes = [0; ENTRY_BYTES];
        entry.encode(header.number, &mut bytes);
        opened.log.write_all_at(&bytes, opened.log_bytes).unwrap();
    }

    #[test]
    fn shelf_when_its_machine_lives_then_left_alone_by_all_and_when_it_is_silent_then_taken_over() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let [theirs, ours] = ["theirs", "ours"].map(|boot| stripe.seen_by(Reach::named(boot, 1)));
        let (living, _) = opened(&theirs);
        publish(&theirs, &living, &entry(1));
        let (just_made, made) = theirs.create_shelf().unwrap();
        let shelf = living.header.shelf;
        // Locks of another kernel's.
        let Hold { lock, mark } = living.hold;
        drop((lock, made.lock));
        let namespace = living.header.namespace;

        let (own, _) = opened(&ours);
        let own_shelf = own.header.shelf;
        assert!(own_shelf != shelf && ours.shelves().unwrap().len() == 3);
        assert!(ours.is_in_use(shelf).unwrap() && ours.is_in_use(just_made).unwrap());
        assert!(!reclaim_one(&ours, own_shelf, namespace, Whose::Ours).unwrap());
        assert!(remove_idle(&ours).unwrap().removed.is_empty());
        let refused = remove(&ours, shelf).unwrap_err().to_string();
        assert!(refused.contains("in use"), "{refused}");
        let found = check(&ours, Treatment::Repair).unwrap().findings;
        assert!(found.len() == 1 && !found[0].is_repaired);

        for marked in [shelf, just_made] {
            age(&ours.shelf(marked, 0).join("writer-1"), SILENCE);
        }
        assert!(!ours.is_in_use(shelf).unwrap());
        let (taken, state) = opened(&ours);
        assert!(taken.header.shelf == shelf && leaves_room(taken.header.number));
        assert_eq!(state.counters.adopted_pages, 1);
        // A manifest that its last writer was about to make is behind.
        let behind = FileHeader {
            number: 2,
            ..living.header.clone()
        };
        let directory = ours.shelf(shelf, 0);
        manifest::replace(&directory, &behind, std::iter::empty()).unwrap();
        let found = Follower::open(&directory).unwrap().unwrap();
        assert_eq!(found.header.number, taken.header.number);
        assert_eq!(taken.log.metadata().unwrap().nlink(), 1);
        // What its last writer appends now lies in a file that is gone.
        assert_eq!(living.log.metadata().unwrap().nlink(), 0);
        assert!(mark.confirm().is_err());
        remove_idle(&ours).unwrap();
        assert!(!ours.shelves().unwrap().contains(&just_made));
    }

    #[test]
    fn shelf_when_its_writer_has_the_folder_on_its_own_drive_then_a_machine_that_mounts_it_leaves_it_alone()
     {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let [home, later] =
            ["home", "later"].map(|boot| stripe.seen_by(Reach::named(boot, 1).local()));
        let afar = stripe.seen_by(Reach::named("afar", 1));
        let (living, _) = opened(&home);
        publish(&home, &living, &entry(1));
        let shelf = living.header.shelf;
        age(&home.shelf(shelf, 0).join("lock"), SILENCE);
        let Hold { lock, mark } = living.hold;
        drop(lock);
        assert!(afar.is_in_use(shelf).unwrap());
        assert!(remove_idle(&afar).unwrap().removed.is_empty());
        // Its machine was switched off, and on again.
        let (again, state) = opened(&later);
        assert_eq!((again.header.shelf, again.header.number), (shelf, 1));
        assert_eq!(state.counters.adopted_pages, 1);
        drop(mark);
    }

    #[test]
    fn manifest_when_the_one_before_was_left_then_gone_when_a_writer_goes_on() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let (left, _) = opened(&stripe);
        publish(&stripe, &left, &entry(1));
        let directory = stripe.shelf(left.header.shelf, 0);
        drop(left);
        let [before, now] = ["manifest-0", "manifest-1"].map(|name| directory.join(name));
        fs::copy(&now, &before).unwrap();
        let (again, state) = opened(&stripe);
        assert_eq!((again.header.number, state.counters.adopted_pages), (1, 1));
        assert!(now.exists() && !before.exists());
    }

    #[test]
    fn manifest_when_it_was_copied_from_another_shelf_then_nobody_writes_by_it_or_believes_it() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let [one, other] = [(); 2].map(|()| opened(&stripe).0);
        publish(&stripe, &one, &entry(1));
        let [from, to] =
            [&one, &other].map(|made| stripe.shelf(made.header.shelf, 0).join("manifest-1"));
        let copied = other.header.shelf;
        drop((one, other));
        fs::copy(from, to).unwrap();
        let [one, other] = [(); 2].map(|()| opened(&stripe));
        assert!(one.0.header.shelf != other.0.header.shelf);
        let num_adopted = [one, other].map(|(_, state)| state.counters.adopted_pages);
        assert_eq!(num_adopted.iter().sum::<u64>(), 1);
        let found = check(&stripe, Treatment::Repair).unwrap().findings;
        let found: Vec<_> = found.iter().filter(|one| one.shelf == copied).collect();
        assert!(found.len() == 1 && !found[0].is_repaired, "{found:?}");
    }

    #[test]
    fn segment_when_it_cannot_be_read_then_an_error_and_when_it_is_short_then_none() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let (opened, _) = opened(&stripe);
        publish(&stripe, &opened, &entry(1));
        let header = opened.header;
        fs::write(stripe.segment(header.shelf, 1), [0; 100]).unwrap();
        assert!(is_segment(&stripe, &header, 0).unwrap());
        assert!(!is_segment(&stripe, &header, 1).unwrap());
        // The thread ends with its filter.
        let refused = std::thread::spawn(move || {
            refuse(libc::SYS_pread64, libc::EIO);
            is_segment(&stripe, &header, 0).unwrap_err();
        });
        refused.join().unwrap();
    }

    #[test]
    fn shelf_when_it_has_to_shrink_and_the_drive_is_full_then_its_segments_make_room() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let (left, _) = opened(&stripe);
        publish(&stripe, &left, &entry(1));
        let Opened { header, hold, .. } = left;
        drop(hold);
        let wanted = Wanted {
            namespace: header.namespace,
            geometry: &header.geometry,
            limits: Limits {
                quota_bytes: 0,
                share_bytes: 0,
                floor_bytes: 0,
            },
            places_per_segment: 4,
        };
        // The filter ends with its thread.
        let refused = std::thread::scope(|scope| {
            let full = || {
                refuse(libc::SYS_fsync, libc::ENOSPC);
                take_over(&stripe, &wanted, header.shelf).map(|_| ())
            };
            scope.spawn(full).join().unwrap().unwrap_err()
        });
        assert!(found_no_space(&refused), "{refused}");
        assert!(stripe.segments(header.shelf).unwrap().is_empty());
    }

    #[test]
    fn manifest_when_an_entry_is_damaged_and_the_drive_is_full_then_its_writer_goes_on_with_it() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let (left, _) = opened(&stripe);
        publish(&stripe, &left, &entry(3));
        let Opened { header, log, .. } = left;
        drop(left.hold);
        let mut bytes = [0; 2 * ENTRY_BYTES];
        bytes[0] = 0xAA;
        let later = Entry {
            place: 1,
            record: record(4),
            ..entry(4)
        };
        later.encode(header.number, &mut bytes[ENTRY_BYTES..]);
        let end = left.log_bytes + ENTRY_BYTES as u64;
        log.write_all_at(&bytes, end).unwrap();
        // The filter ends with its thread.
        let (again, state) = std::thread::scope(|scope| {
            let full = || {
                refuse(libc::SYS_fsync, libc::ENOSPC);
                opened(&stripe)
            };
            scope.spawn(full).join().unwrap()
        });
        assert_eq!(again.header, header);
        assert_eq!(again.log_bytes, end + bytes.len() as u64);
        let counters = state.counters;
        assert_eq!((counters.adopted_pages, counters.damaged_entries), (2, 1));
    }

    /// Idle, with so many segments and a record in each; the least name first.
    fn idle<const N: usize>(
        stripe: &Stripe,
        namespace: Namespace,
        num_segments: u32,
    ) -> [ShelfId; N] {
        idle_of(stripe, namespace, num_segments, 4)
    }

    fn idle_of<const N: usize>(
        stripe: &Stripe,
        namespace: Namespace,
        num_segments: u32,
        places_per_segment: u32,
    ) -> [ShelfId; N] {
        let mut shelves = [(); N].map(|()| {
            let (shelf, _hold) = stripe.create_shelf().unwrap();
            let header = FileHeader {
                shelf,
                number: 1,
                sequence: 0,
                namespace,
                places_per_segment,
                geometry: Geometry::new(&[4096]).unwrap(),
            };
            let entries = (0..num_segments).map(|segment| {
                create_segment(stripe, &header, segment, 8192).unwrap();
                Entry {
                    place: places_per_segment * segment,
                    record: record(segment.into()),
                    ..entry(u64::from(segment) + 1)
                }
            });
            manifest::replace(&stripe.shelf(shelf, 0), &header, entries).unwrap();
            shelf
        });
        shelves.sort_unstable();
        shelves
    }

    #[test]
    fn shelves_of_others_when_room_is_needed_then_they_lose_segments_in_turn_and_what_is_left_is_good()
     {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let [ours] = idle(&stripe, [2; 4], 1);
        let shelves: [ShelfId; 2] = idle(&stripe, [1; 4], 3);
        let num_left = || {
            let segments = shelves.map(|shelf| stripe.segments(shelf).unwrap().len());
            segments.iter().sum::<usize>()
        };
        for left in [5, 4] {
            assert!(reclaim_one(&stripe, 0, [2; 4], Whose::Ours).unwrap());
            assert_eq!(num_left(), left);
        }
        for shelf in shelves {
            assert_eq!(stripe.segments(shelf).unwrap(), [0, 1]);
        }
        let found = check(&stripe, Treatment::Check).unwrap();
        assert_eq!((found.num_shelves, found.num_records), (3, 5));
        let (_living, state) = opened(&stripe);
        assert_eq!(state.counters.adopted_pages, 2);
        for _ in 0..2 {
            assert!(reclaim_one(&stripe, 0, [2; 4], Whose::Ours).unwrap());
        }
        // One has a writer now.
        assert_eq!(num_left(), 2);
        assert!(reclaim_one(&stripe, 0, [2; 4], Whose::Ours).unwrap());
        assert!(!stripe.shelves().unwrap().contains(&ours));
        assert!(!reclaim_one(&stripe, 0, [2; 4], Whose::Ours).unwrap());
    }

    #[test]
    fn shelf_when_a_lower_quota_is_exceeded_as_its_writer_starts_then_idle_ones_of_others_make_room()
     {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let [theirs] = idle(&stripe, [2; 4], 3);
        let [ours] = idle(&stripe, [1; 4], 3);
        let num_left = || [ours, theirs].map(|shelf| stripe.segments(shelf).unwrap().len());
        let lowered = || growth::store_cost(&stripe).unwrap() - 1;
        let (living, state) = opened_within(&stripe, lowered(), 1 << 30);
        assert_eq!((num_left(), state.counters.adopted_pages), ([3, 2], 3));
        drop(living);
        // Nobody else can make any.
        let _theirs = stripe.try_hold_shelf(theirs).unwrap().unwrap();
        let (_living, state) = opened_within(&stripe, lowered(), 1 << 30);
        assert_eq!((num_left(), state.counters.adopted_pages), ([2, 2], 2));
    }

    #[test]
    fn shelves_of_a_server_when_its_quota_is_halved_then_each_keeps_half() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let shelves: [ShelfId; 8] = idle(&stripe, [1; 4], 4);
        let found = Follower::open(&stripe.shelf(shelves[0], 0)).unwrap();
        let segmenting = found.unwrap().header.segmenting();
        let quota_bytes = 8 * growth::cost_of(&segmenting, 2);
        let share_bytes = 2 * growth::segment_cost(&segmenting);
        let living = shelves.map(|_| opened_within(&stripe, quota_bytes, share_bytes));
        let num_adopted = living.map(|(_, state)| state.counters.adopted_pages);
        assert_eq!(num_adopted, [2; 8]);
    }

    #[test]
    fn segment_when_it_cannot_be_taken_then_its_records_are_found_no_more_and_on_a_full_drive_all_goes()
     {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let [shelf] = idle(&stripe, [1; 4], 3);
        let path = stripe.segment(shelf, 2);
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        reclaim_one(&stripe, 0, [2; 4], Whose::Ours).unwrap_err();
        fs::remove_dir(&path).unwrap();
        assert_eq!(check(&stripe, Treatment::Check).unwrap().num_records, 2);
        // The filter ends with its thread.
        std::thread::scope(|scope| {
            let full = || {
                refuse(libc::SYS_fsync, libc::ENOSPC);
                reclaim_one(&stripe, 0, [2; 4], Whose::Ours).unwrap()
            };
            assert!(scope.spawn(full).join().unwrap());
        });
        assert!(stripe.shelves().unwrap().is_empty());
    }

    #[test]
    fn shelf_when_it_cannot_be_read_then_it_goes_after_those_of_others() {
        use std::os::unix::fs::PermissionsExt;
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let [unreadable, _] = idle(&stripe, [1; 4], 1);
        let manifest = stripe.shelf(unreadable, 0).join("manifest-1");
        fs::set_permissions(manifest, fs::Permissions::from_mode(0o666)).unwrap();
        assert!(reclaim_one(&stripe, 0, [2; 4], Whose::Ours).unwrap());
        assert_eq!(stripe.shelves().unwrap(), [unreadable]);
        assert!(reclaim_one(&stripe, 0, [2; 4], Whose::Ours).unwrap());
        assert!(stripe.shelves().unwrap().is_empty());
    }

    #[test]
    fn shelf_when_it_cannot_be_removed_then_the_others_are_all_the_same() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let [bad, good] = idle(&stripe, [1; 4], 1);
        fs::create_dir(stripe.shelf(bad, 0).join("in the way")).unwrap();
        let found = remove_idle(&stripe).unwrap();
        assert_eq!((found.removed, found.num_unremoved), (vec![good], 1));
        remove(&stripe, bad).unwrap_err();
    }

    #[test]
    fn shelf_when_it_cannot_be_read_at_the_moment_then_it_stays() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let [ours, _] = idle(&stripe, [1; 4], 1);
        for errno in [libc::ENOMEM, libc::ESTALE, libc::ENOTCONN] {
            let of_the_moment = stripe.clone();
            // The thread ends with its filter.
            let reclaimed = std::thread::spawn(move || {
                refuse(libc::SYS_pread64, errno);
                reclaim_one(&of_the_moment, ours, [1; 4], Whose::Ours).unwrap()
            });
            assert!(!reclaimed.join().unwrap());
            assert_eq!(stripe.shelves().unwrap().len(), 2);
        }
    }

    #[test]
    fn shelf_when_it_cannot_be_listed_then_others_grow_make_room_and_are_taken_over() {
        let scratch = Scratch::new();
        let paths = ["a", "b"].map(|name| scratch.path(name));
        let stripe = Stripe::open_or_create(&paths).unwrap();
        let [bad, good] = idle(&stripe, [2; 4], 2);
        let [ours] = idle(&stripe, [1; 4], 1);
        let in_the_way = stripe.shelf(bad, 1);
        fs::remove_dir_all(&in_the_way).unwrap();
        fs::write(&in_the_way, "no directory").unwrap();
        assert!(stripe.segments(bad).is_err());
        assert!(growth::store_cost(&stripe).unwrap() > 0);
        assert!(reclaim_one(&stripe, 0, [1; 4], Whose::Others).unwrap());
        assert_eq!(stripe.segments(good).unwrap(), [0]);
        let (own, _) = opened(&stripe);
        assert_eq!(own.header.shelf, ours);
        // No file to list it with says nothing about the shelf.
        std::thread::scope(|scope| {
            let without_files = || {
                refuse(libc::SYS_openat, libc::EMFILE);
                growth::shelf_cost(&stripe, good).unwrap_err();
            };
            scope.spawn(without_files).join().unwrap();
        });
    }

    #[test]
    fn shelf_when_its_numbers_come_to_an_end_then_nobody_writes_it_and_nothing_is_lost() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let (left, _) = opened(&stripe);
        publish(&stripe, &left, &entry(MOST_NUMBER));
        let shelf = left.header.shelf;
        let last = FileHeader {
            number: MOST_NUMBER,
            ..left.header.clone()
        };
        drop(left);
        let (own, state) = opened(&stripe);
        assert_eq!((own.sequence, state.counters.adopted_pages), (0, 0));

        let directory = stripe.shelf(shelf, 0);
        manifest::replace(&directory, &last, [entry(1)].into_iter()).unwrap();
        let found = check(&stripe, Treatment::Repair).unwrap().findings;
        assert!(found.len() == 1 && !found[0].is_repaired, "{found:?}");
        assert!(Follower::open(&directory).unwrap().is_some());
    }

    #[test]
    fn shelf_when_its_removal_was_interrupted_then_the_next_opening_ends_it_on_every_path() {
        for stopped_at in [0, 1] {
            let scratch = Scratch::new();
            let paths = ["a", "b"].map(|name| scratch.path(name));
            let stripe = Stripe::open_or_create(&paths).unwrap();
            let (left, _) = opened(&stripe);
            publish(&stripe, &left, &entry(1));
            let (shelf, file_bytes) = (left.header.shelf, left.header.segmenting().file_bytes());
            create_segment(&stripe, &left.header, 1, file_bytes).unwrap();
            drop(left);
            let obstacle = stripe.shelf(shelf, stopped_at).join("in the way");
            fs::create_dir(&obstacle).unwrap();
            remove(&stripe, shelf).unwrap_err();
            fs::remove_dir(&obstacle).unwrap();
            let (_, state) = opened(&stripe);
            assert_eq!(state.counters.adopted_pages, 0);
            assert!((0..2).all(|path| !stripe.shelf(shelf, path).exists()));
        }
    }

    #[test]
    fn shelf_when_a_killed_server_of_this_machine_had_it_then_taken_back_at_once() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let mount = fs::metadata(stripe.first()).unwrap().dev();
        let ours = stripe.seen_by(Reach::named("ours", mount));
        let (killed, _) = opened(&ours);
        let Hold { lock, mark } = killed.hold;
        drop(lock);
        let (again, _) = opened(&ours);
        assert_eq!(again.header.shelf, killed.header.shelf);
        drop(mark);
    }

    #[test]
    fn shelf_when_its_segments_are_larger_than_the_share_then_left_and_room_is_made_for_smaller_ones()
     {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let [large] = idle_of(&stripe, [1; 4], 1, 8);
        let segmenting = |shelf| {
            let found = Follower::open(&stripe.shelf(shelf, 0)).unwrap();
            found.unwrap().header.segmenting()
        };
        let cost = growth::segment_cost(&segmenting(large));
        let (own, state) = opened_within(&stripe, 1 << 30, cost - 1);
        let small = own.header.shelf;
        assert!(small != large && state.counters.adopted_pages == 0);
        assert_eq!(stripe.segments(large).unwrap(), [0]);
        let (beside, _) = opened_within(&stripe, 1 << 30, cost);
        assert_eq!(beside.header.shelf, large);
        drop((own, beside));
        // No smaller one can be made: another one for each start would be no help.
        let (own, _) = opened_within(&stripe, 1 << 30, 0);
        assert_eq!(own.header.shelf, small);
    }
}
