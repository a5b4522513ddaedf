// SPDX-License-Identifier: Apache-2.0
//! The thread that learns of other writers. It reads their manifests, so that nobody does who must not wait for a drive.
//!
//! Invariants
//! * What a shelf's manifest said is forgotten when it cannot be read any more: nothing is found that could not be looked up again.
//! * A shelf that has a new manifest may have another owner, and segments of the same names that are other files.
//! * A read with pages that are not what another writer's manifest said ends after a look at the manifests that began later: its owner
//!   may have reused the place, which is no damage.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::catalog::{Hit, ShelfIndex};
use crate::directory::ShelfId;
use crate::error::{Result, StoreError, is_of_process};
use crate::format::{Entry, Kind};
use crate::manifest::{Follower, Log, Tenants};
use crate::said::Said;
use crate::shared::Shared;
use crate::state::State;

/// What processes on another machine, or in a container with a /dev/shm of its own, publish is not announced here: it is looked for while
/// somebody looks pages up, so often.
pub const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// How far this process has read another writer's manifest.
enum Followed {
    Following(Box<Follower>),
    /// Of another geometry, hence of another namespace, or copied from another shelf: nothing in it concerns us. Who has no shelf, and
    /// so never had another namespace, goes by the header alone.
    Foreign,
}

pub struct News {
    shared: Arc<Shared>,
    followers: HashMap<ShelfId, Followed>,
    /// How often the namespace had changed when the followers began: what they passed on before is forgotten.
    num_invalidations: u64,
    said: Said,
}

impl News {
    pub fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            followers: HashMap::new(),
            num_invalidations: 0,
            said: Said::default(),
        }
    }

    pub fn run(mut self) {
        let shared = self.shared.clone();
        let is_behind = || shared.is_behind();
        while let Some(wanted) = shared.refresh_requests.next(LOOK_AGAIN, is_behind) {
            let began = Instant::now();
            let looked = self.refresh();
            self.shared
                .refresh_requests
                .end(wanted, looked.as_ref().err().map(ToString::to_string));
            if let Err(error) = looked {
                self.say(&error);
            }
            for job in self
                .shared
                .refresh_requests
                .take_doubted(|since| since <= began)
            {
                self.shared.end_read(job);
            }
        }
        for job in self.shared.refresh_requests.take_doubted(|_| true) {
            self.shared.end_read(job);
        }
    }

    fn say(&mut self, error: &StoreError) {
        if self.said.is_new(&error.to_string(), Instant::now()) {
            banyan_shm::say!(
                "banyan: what another writer of the store has cannot be read, and is not used: {error}"
            );
        }
    }

    /// Takes in what other writers have published. A shelf that cannot be read does not keep the others from being followed.
    pub fn refresh(&mut self) -> Result<()> {
        let shared = self.shared.clone();
        let announced = shared.announced();
        let num_invalidations = shared.lock().counters.invalidations;
        if num_invalidations != self.num_invalidations {
            self.followers.clear();
            self.num_invalidations = num_invalidations;
        }
        let shelves = match shared.stripe.shelves() {
            Err(error) if error.system_cause().is_some_and(is_of_process) => return Err(error),
            // What the mount does not give is found no more, until it does.
            Err(error) => {
                self.forget_all_but(&[]);
                return Err(error);
            }
            Ok(shelves) => shelves,
        };
        self.forget_all_but(&shelves);
        let mut problem = Ok(());
        for shelf in shelves {
            if Some(shelf) == shared.own_shelf {
                continue;
            }
            if let Err(error) = self.follow(shelf) {
                self.followers.remove(&shelf);
                shared.forget(&[shelf]);
                problem = Err(error);
            }
        }
        shared.have_seen(announced);
        problem
    }

    fn forget_all_but(&mut self, shelves: &[ShelfId]) {
        let vanished = self
            .followers
            .extract_if(|shelf, _| !shelves.contains(shelf));
        let vanished: Vec<ShelfId> = vanished.map(|(shelf, _)| shelf).collect();
        self.shared.forget(&vanished);
    }

    fn follow(&mut self, shelf: ShelfId) -> Result<()> {
        if let Some(Followed::Following(follower)) = self.followers.get_mut(&shelf)
            && !follower.is_replaced()
        {
            if !follower.has_more() {
                return Ok(());
            }
            let mut entries = Vec::new();
            follower.read(Log::Whole, |entry| entries.push(entry))?;
            apply(&self.shared, shelf, &entries);
            return Ok(());
        }
        if matches!(self.followers.get(&shelf), Some(Followed::Foreign)) {
            return Ok(());
        }
        let directory = self.shared.stripe.shelf(shelf, 0);
        let Some(mut follower) = Follower::open(&directory)? else {
            if self.followers.remove(&shelf).is_some() {
                self.shared.forget(&[shelf]);
            }
            return Ok(());
        };
        let header = &follower.header;
        if (header.shelf, &header.geometry) != (shelf, &*self.shared.geometry)
            || (self.shared.own_shelf.is_none() && header.namespace != self.shared.lock().namespace)
        {
            if self.followers.insert(shelf, Followed::Foreign).is_some() {
                self.shared.forget(&[shelf]);
            }
            return Ok(());
        }
        let tenants = read_whole(&mut follower, || Follower::open(&directory))?;
        if self.followers.contains_key(&shelf) {
            self.shared.leave_files(&[shelf]);
        }
        replace(&self.shared, shelf, &follower, tenants);
        self.followers
            .insert(shelf, Followed::Following(Box::new(follower)));
        Ok(())
    }
}

/// What another writer's manifest says. Of what is just being written, some may be seen before what is in front of it: that counts as
/// damaged only if it is so when it is looked at `again`.
fn read_whole(
    follower: &mut Follower,
    again: impl FnOnce() -> Result<Option<Follower>>,
) -> Result<Tenants> {
    let mut tenants = Tenants::default();
    follower.read(Log::AsIs, |entry| tenants.apply(entry))?;
    if follower.num_damaged() > 0
        && let Some(same) = again()?.filter(|again| again.header == follower.header)
    {
        *follower = same;
        tenants = Tenants::default();
        follower.read(Log::AsIs, |entry| tenants.apply(entry))?;
    }
    Ok(tenants)
}

fn apply(shared: &Shared, shelf: ShelfId, entries: &[Entry]) {
    let Some(index) = shared.lock().catalog.shelf_index(shelf) else {
        return;
    };
    shared.in_slices(entries, |state, entry| match entry.kind {
        Kind::Publish => publish(state, index, entry),
        Kind::Retire => {
            let generation = entry.record.identity.generation;
            state.catalog.retire(index, entry.place, generation);
        }
    });
}

/// What a whole manifest says takes the place of what was known of its shelf, bit by bit: on the way a page is missed, or found where it
/// is no more, as it may be at any time.
fn replace(shared: &Shared, shelf: ShelfId, follower: &Follower, tenants: Tenants) {
    let (index, mut living) = {
        let mut state = shared.lock();
        let segmenting = follower.header.segmenting();
        let index = state.catalog.add_shelf(shelf, segmenting);
        state.counters.damaged_entries += follower.num_damaged();
        (index, state.catalog.living(index))
    };
    let stays = |place, generation| {
        let tenant = tenants.get(place);
        tenant.is_some_and(|tenant| tenant.record.identity.generation == generation)
    };
    living.retain(|(place, generation)| !stays(*place, *generation));
    shared.retire(index, &living);
    let entries = tenants.into_entries();
    shared.in_slices(&entries, |state, entry| publish(state, index, entry));
}

fn publish(state: &mut State, index: ShelfIndex, entry: &Entry) {
    let hit = Hit::of(&entry.record, index, entry.place);
    if entry.record.identity.namespace == state.namespace && !state.catalog.holds(&hit) {
        // A duplicate stays outside; whoever published the key first serves it.
        state.catalog.publish(hit, entry.record.parent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::Stripe;
    use crate::format::{ENTRY_BYTES, FileHeader, Identity, NO_PARENT, Namespace, Record};
    use crate::geometry::{Geometry, Segmenting};
    use crate::manifest;
    use crate::testing::{MANY, Scratch, is_seen_half_done, record, refuse};
    use std::os::unix::fs::FileExt;
    use std::{fs, thread};

    #[test]
    fn entries_when_there_are_many_then_others_have_the_lock_in_between() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let geometry = Arc::new(Geometry::new(&[4096]).unwrap());
        let mut state = State::new([1; 4]);
        let segmenting = Segmenting {
            places_per_segment: MANY as u32,
            record_bytes: geometry.record_bytes(),
        };
        state.catalog.add_shelf(7, segmenting);
        let shared = Shared::new(stripe, geometry, None, state, None);
        let entries: Vec<Entry> = (0..MANY as u32)
            .map(|place| Entry {
                sequence: place.into(),
                kind: Kind::Publish,
                place,
                record: record(place.into()),
            })
            .collect();
        assert!(is_seen_half_done(&shared, || apply(&shared, 7, &entries)));
        assert_eq!(shared.lock().catalog.num_records(), MANY);
    }

    const IDENTITY: Identity = Identity {
        key: [5; 4],
        namespace: [1; 4],
        generation: 1,
    };

    /// Of one record, with `IDENTITY`.
    fn write_manifest(stripe: &Stripe, shelf: ShelfId, named: ShelfId, namespace: Namespace) {
        let header = FileHeader {
            shelf: named,
            number: 1,
            sequence: 0,
            namespace,
            places_per_segment: 4,
            geometry: Geometry::new(&[4096]).unwrap(),
        };
        let entry = Entry {
            sequence: 1,
            kind: Kind::Publish,
            place: 0,
            record: Record {
                identity: IDENTITY,
                parent: NO_PARENT,
                checksum: 0,
            },
        };
        manifest::replace(&stripe.shelf(shelf, 0), &header, [entry].into_iter()).unwrap();
    }

    fn news_of(stripe: &Stripe, own_shelf: Option<ShelfId>) -> (Arc<Shared>, News) {
        let geometry = Arc::new(Geometry::new(&[4096]).unwrap());
        let state = State::new(IDENTITY.namespace);
        let shared = Shared::new(stripe.clone(), geometry, None, state, own_shelf);
        let shared = Arc::new(shared);
        (shared.clone(), News::new(shared))
    }

    #[test]
    fn records_of_others_when_the_namespace_changes_and_back_between_two_looks_then_found_again() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let (shelf, _lock) = stripe.create_shelf().unwrap();
        write_manifest(&stripe, shelf, shelf, IDENTITY.namespace);
        let (shared, mut news) = news_of(&stripe, None);
        for _ in 0..2 {
            news.refresh().unwrap();
            assert!(shared.lock().catalog.contains(&IDENTITY.key));
            shared.change_namespace([2; 4]);
            shared.change_namespace(IDENTITY.namespace);
            assert!(!shared.lock().catalog.contains(&IDENTITY.key));
        }
    }

    #[test]
    fn manifest_when_it_is_being_written_at_the_first_look_then_nothing_of_it_is_missed() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let (shelf, _lock) = stripe.create_shelf().unwrap();
        write_manifest(&stripe, shelf, shelf, IDENTITY.namespace);
        let directory = stripe.shelf(shelf, 0);
        let manifest = directory.join("manifest-1");
        let mut bytes = [[0; ENTRY_BYTES]; 3];
        for (place, bytes) in (1..).zip(&mut bytes) {
            let entry = Entry {
                sequence: 1 + u64::from(place),
                kind: Kind::Publish,
                place,
                record: record(place.into()),
            };
            entry.encode(1, bytes);
        }
        let log = fs::OpenOptions::new().write(true).open(&manifest).unwrap();
        let end = log.metadata().unwrap().len();
        let write = |number: usize| {
            let at = end + (number * ENTRY_BYTES) as u64;
            log.write_all_at(&bytes[number], at).unwrap();
        };
        write(2);
        let mut follower = Follower::open(&directory).unwrap().unwrap();
        let again = || {
            (0..2).for_each(write);
            Follower::open(&directory)
        };
        let tenants = read_whole(&mut follower, again).unwrap();
        assert_eq!(follower.num_damaged(), 0);
        assert!((0..4).all(|place| tenants.get(place).is_some()));
    }

    #[test]
    fn manifest_when_it_was_copied_from_another_shelf_then_nothing_in_it_is_found() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let (shelf, _lock) = stripe.create_shelf().unwrap();
        let (shared, mut news) = news_of(&stripe, None);
        write_manifest(&stripe, shelf, shelf, IDENTITY.namespace);
        news.refresh().unwrap();
        assert!(shared.lock().catalog.contains(&IDENTITY.key));
        write_manifest(&stripe, shelf, shelf + 1, IDENTITY.namespace);
        news.refresh().unwrap();
        assert!(!shared.lock().catalog.contains(&IDENTITY.key));
    }

    #[test]
    fn manifest_when_it_is_of_another_namespace_then_only_who_has_a_shelf_reads_on() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let (shelf, _lock) = stripe.create_shelf().unwrap();
        write_manifest(&stripe, shelf, shelf, [9; 4]);
        for own_shelf in [None, Some(shelf + 1)] {
            let (shared, mut news) = news_of(&stripe, own_shelf);
            news.refresh().unwrap();
            let is_found = shared.lock().catalog.contains(&IDENTITY.key);
            assert_eq!(is_found, own_shelf.is_some());
        }
    }

    #[test]
    fn records_of_others_when_the_mount_is_away_then_not_found_until_it_is_back() {
        let scratch = Scratch::new();
        let [store, mounted] = ["store", "mounted"].map(|name| scratch.path(name));
        let stripe = Stripe::open_or_create(std::slice::from_ref(&store)).unwrap();
        let (shelf, _lock) = stripe.create_shelf().unwrap();
        write_manifest(&stripe, shelf, shelf, IDENTITY.namespace);
        let (shared, mut news) = news_of(&stripe, None);
        let is_found = || shared.lock().catalog.contains(&IDENTITY.key);
        news.refresh().unwrap();
        assert!(is_found());
        let mut news = thread::scope(|scope| {
            // The thread ends with its filter. No file to open says nothing about the mount.
            let without_files = || {
                refuse(libc::SYS_openat, libc::EMFILE);
                news.refresh().unwrap_err();
                news
            };
            scope.spawn(without_files).join().unwrap()
        });
        assert!(is_found());
        fs::rename(&store, &mounted).unwrap();
        news.refresh().unwrap_err();
        assert!(!is_found());
        fs::rename(&mounted, &store).unwrap();
        news.refresh().unwrap();
        assert!(is_found());
    }
}
