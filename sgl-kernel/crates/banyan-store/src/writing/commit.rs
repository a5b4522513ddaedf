// SPDX-License-Identifier: Apache-2.0
//! Written records become durable, then findable: sync, append, sync, publish.

use std::collections::BTreeSet;
use std::io;

use super::{
    COMMIT_PATIENCE, Commit, ENTRIES_PER_PLACE, MAX_LOG_STEP_BYTES, MORE_ENTRIES, Retired,
    Surroundings, Writer, WriterToken, Written, release_claims,
};
use crate::catalog::Hit;
use crate::device::{Action, FileId, Op, Span, Spans};
use crate::format::{ENTRY_BYTES, Entry, Kind};
use crate::geometry::{BLOCK_BYTES, Place};
use crate::pacing::{self, Load};
use crate::places::Standing;
use crate::shared::Shared;
use crate::state::{Outcome, State};

impl Writer {
    fn wants_commit(&self, state: &State, load: Load) -> bool {
        let num_retired = state.own.as_ref().map_or(0, |own| own.places.num_retired());
        if self.batch.is_empty() && num_retired == 0 {
            return false;
        }
        let written = self.batch.len() as u64 * self.header.geometry.record_bytes();
        let is_starved = state
            .own
            .as_ref()
            .is_some_and(|own| own.places.num_free() == 0);
        let can_write = pacing::may_write(state.permit, load);
        let waits = !can_write || is_starved || self.stopped_until.is_some();
        let is_idle = self.num_running == 0 && (state.backlog.queue.is_empty() || waits);
        let is_old = self
            .batch_since
            .is_some_and(|since| since.elapsed() > COMMIT_PATIENCE);
        (is_idle || written >= self.commit_bytes)
            && (pacing::may_commit(state.permit, load) || is_old)
    }

    pub(super) fn start_commit(&mut self, around: &mut Surroundings<'_>) {
        if !matches!(self.commit, Commit::Idle) {
            return;
        }
        let load = Load {
            writes_here: self.num_running,
            ..around.load
        };
        let mut state = around.shared.lock();
        // A new manifest says it all.
        if state.wants_manifest || !self.wants_commit(&state, load) {
            return;
        }
        let retired = state.take_retired();
        drop(state);
        self.batch_since = None;
        let written = std::mem::take(&mut self.batch);
        let files: BTreeSet<FileId> = written.iter().map(|record| record.file).collect();
        for file in &files {
            let op = Op {
                token: (around.token)(WriterToken::SegmentSync(*file)),
                file: *file,
                offset: 0,
                action: Action::Sync,
            };
            // SAFETY: no memory.
            unsafe { around.device.push(op) };
        }
        self.commit = Commit::SyncingSegments {
            written,
            retired,
            left: files.len(),
        };
        if files.is_empty() {
            self.append(around);
        }
    }

    pub(super) fn on_segment_sync(
        &mut self,
        around: &mut Surroundings<'_>,
        file: FileId,
        result: io::Result<()>,
    ) {
        let Commit::SyncingSegments { left, .. } = &mut self.commit else {
            unreachable!("a segment sync belongs to a commit")
        };
        *left -= 1;
        if result.is_err() {
            self.distrusted.insert(file, self.sequence);
        }
        if *left == 0 {
            self.append(around);
        }
    }

    /// Whether a sync of its file failed after the record was begun: it may be lost though the next sync succeeds.
    fn is_distrusted(&self, written: &Written) -> bool {
        let last = self.distrusted.get(&written.file);
        last.is_some_and(|last| written.record.identity.generation <= *last)
    }

    pub(super) fn append(&mut self, around: &mut Surroundings<'_>) {
        let Commit::SyncingSegments {
            written, retired, ..
        } = std::mem::replace(&mut self.commit, Commit::Idle)
        else {
            unreachable!("records are synced before they are appended")
        };
        let (lost, written): (Vec<Written>, Vec<Written>) = written
            .into_iter()
            .partition(|record| self.is_distrusted(record));
        self.give_up_written(around.shared, lost);
        if written.is_empty() && retired.is_empty() {
            return;
        }
        if self.hold.mark.check().is_err() {
            self.distrust_log(around, written, retired);
            return;
        }
        let len = (written.len() + retired.len()) * ENTRY_BYTES;
        let mut bytes = vec![0; self.with_step(len as u64) as usize];
        let gone = retired
            .iter()
            .map(|(place, record)| (Kind::Retire, *place, *record));
        let come = written
            .iter()
            .map(|written| (Kind::Publish, written.place, written.record));
        for (target, (kind, place, record)) in bytes[..len]
            .chunks_exact_mut(ENTRY_BYTES)
            .zip(gone.chain(come))
        {
            self.sequence += 1;
            let entry = Entry {
                sequence: self.sequence,
                kind,
                place,
                record,
            };
            entry.encode(self.header.number, target);
        }
        let op = Op {
            token: (around.token)(WriterToken::Append),
            file: self.log,
            offset: self.log_bytes,
            action: Action::Write(Spans::one(Span::of(&mut bytes))),
        };
        self.commit = Commit::Appending {
            written,
            retired,
            _bytes: bytes,
        };
        // SAFETY: the bytes are kept in `commit`, where their heap does not move, until the operation has been reaped.
        unsafe { around.device.push(op) };
    }

    fn num_places(&self) -> u64 {
        self.segments.len() as u64 * u64::from(self.header.places_per_segment)
    }

    /// What to write for `len` bytes of entries: more, where the log has to grow.
    fn with_step(&mut self, len: u64) -> u64 {
        let end = self.log_bytes + len;
        if end <= self.log_allocated {
            return len;
        }
        let step =
            (self.num_places() * ENTRY_BYTES as u64).clamp(BLOCK_BYTES as u64, MAX_LOG_STEP_BYTES);
        self.log_allocated = (end + step).next_multiple_of(BLOCK_BYTES as u64);
        self.log_allocated - self.log_bytes
    }

    pub(super) fn on_appended(&mut self, around: &mut Surroundings<'_>, result: io::Result<()>) {
        let Commit::Appending {
            written, retired, ..
        } = std::mem::replace(&mut self.commit, Commit::Idle)
        else {
            unreachable!("an append belongs to a commit")
        };
        if result.is_err() {
            self.distrust_log(around, written, retired);
            return;
        }
        let op = Op {
            token: (around.token)(WriterToken::LogSync),
            file: self.log,
            offset: 0,
            action: Action::Sync,
        };
        self.commit = Commit::SyncingLog {
            num_bytes: (written.len() + retired.len()) as u64 * ENTRY_BYTES as u64,
            written,
            retired,
        };
        // SAFETY: no memory.
        unsafe { around.device.push(op) };
    }

    pub(super) fn on_log_sync(&mut self, around: &mut Surroundings<'_>, result: io::Result<()>) {
        let Commit::SyncingLog {
            written,
            retired,
            num_bytes,
        } = std::mem::replace(&mut self.commit, Commit::Idle)
        else {
            unreachable!("a log sync belongs to a commit")
        };
        if result.is_err() {
            self.distrust_log(around, written, retired);
            return;
        }
        self.log_bytes += num_bytes;
        self.publish(around.shared, written, retired);
        let num_entries = self.log_bytes / ENTRY_BYTES as u64;
        if num_entries > ENTRIES_PER_PLACE * self.num_places() + MORE_ENTRIES {
            self.rewrite(around);
        }
    }

    fn publish(&mut self, shared: &Shared, written: Vec<Written>, retired: Retired) {
        let record_bytes = self.header.geometry.record_bytes();
        let claims: Vec<_> = written
            .iter()
            .map(|written| written.record.identity)
            .collect();
        {
            let mut guard = shared.lock();
            let state = &mut *guard;
            state.counters.commits += 1;
            state.counters.written_pages += written.len() as u64;
            state.counters.written_bytes += written.len() as u64 * record_bytes;
            for record in written {
                publish_one(state, &record);
            }
            if let Some(own) = &mut state.own {
                own.places.cooled(retired.iter().map(|(place, _)| *place));
            }
        }
        shared.announce();
        for identity in claims {
            shared.release_claim(&identity.namespace, &identity.key);
        }
        shared.changed.notify_all();
    }

    /// Fails what is down, while no commit can take it up. The log names none of it: the places are free at once.
    pub(super) fn give_up_batch(&mut self, around: &Surroundings<'_>) {
        self.batch_since = None;
        let lost = std::mem::take(&mut self.batch);
        self.give_up_written(around.shared, lost);
    }

    fn give_up_written(&self, shared: &Shared, lost: Vec<Written>) {
        let places: Vec<Place> = lost.iter().map(|record| record.place).collect();
        self.fail_written(shared, lost);
        if let Some(own) = &mut shared.lock().own {
            places
                .into_iter()
                .for_each(|place| own.places.give_up(place));
        }
    }

    fn fail_written(&self, shared: &Shared, lost: Vec<Written>) {
        let mut unclaimed = Vec::new();
        {
            let mut state = shared.lock();
            for Written { record, .. } in &lost {
                state.settle(record.identity.key, &record.parent, Outcome::Failed);
                unclaimed.extend(state.fail_descendants(record.identity.key));
            }
        }
        release_claims(shared, &unclaimed);
        for Written { record, .. } in lost {
            shared.release_claim(&record.identity.namespace, &record.identity.key);
        }
    }

    /// Entries may or may not be in the log: nobody learns of their records, and their places wait for a new manifest.
    fn distrust_log(
        &mut self,
        around: &mut Surroundings<'_>,
        written: Vec<Written>,
        retired: Retired,
    ) {
        self.limbo.extend(written.iter().map(|record| record.place));
        self.fail_written(around.shared, written);
        {
            let mut state = around.shared.lock();
            state.counters.log_failures += 1;
            if let Some(own) = &mut state.own {
                own.places.put_back_retired(retired);
            }
        }
        self.rewrite(around);
    }
}

fn publish_one(state: &mut State, written: &Written) {
    let Some(own) = &mut state.own else { return };
    let Written { record, place, .. } = *written;
    let hit = Hit::of(&record, own.index, place);
    let is_cleared = state.backlog.cleared.contains(&hit.key);
    let is_current = record.identity.namespace == state.namespace && !is_cleared;
    let standing = if is_current && state.catalog.publish(hit, record.parent) {
        Standing::Live
    } else {
        Standing::Stale
    };
    own.places.publish(place, record, standing);
    if is_cleared {
        own.places.retire(place, hit.generation);
    }
    let outcome = if is_current {
        Outcome::Stored
    } else {
        Outcome::Failed
    };
    state.settle(record.identity.key, &record.parent, outcome);
}
