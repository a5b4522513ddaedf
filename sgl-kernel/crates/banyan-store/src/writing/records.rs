// SPDX-License-Identifier: Apache-2.0
//! Queued pages become records, neighbours in one write: at most two writes at a time, as far as the permit goes.

use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use super::room::Room;
use super::{
    Commit, REST, Ready, Surroundings, Writer, WriterToken, Writing, Written, release_claims,
};
use crate::buffer::AlignedBytes;
use crate::device::{Action, Op, Span, Spans};
use crate::error::is_no_space;
use crate::files::Use;
use crate::format::{Identity, Record, RecordHeader, record_checksum};
use crate::geometry::{BLOCK_BYTES, Place};
use crate::pacing::{self, Load, Permit};
use crate::shared::Shared;
use crate::slots::occupy;
use crate::state::{Outcome, Queued, State};

impl Writer {
    pub(super) fn start_writes(&mut self, around: &mut Surroundings<'_>) {
        if !self.is_writing() {
            if self.is_resting() {
                self.give_up_batch(around);
                self.give_up_waiting(around);
            } else if around.shared.lock().permit == Permit::Draining {
                self.give_up_waiting(around);
            }
            return;
        }
        loop {
            let joined = self.take_joined(around);
            if joined.is_empty() {
                return;
            }
            self.start(around, joined);
        }
    }

    fn is_writing(&self) -> bool {
        !self.is_resting() && self.stopped_until.is_none() && self.hold.mark.check().is_ok()
    }

    fn is_resting(&self) -> bool {
        matches!(self.commit, Commit::Resting(_))
    }

    pub(super) fn may_write(&self, around: &Surroundings<'_>, writes_here: usize) -> bool {
        let load = Load {
            writes_here,
            ..around.load
        };
        let permit = around.shared.lock().permit;
        pacing::may_write(permit, load)
    }

    /// Gives the next page its place and computes its checksums, unless enough are ready. Call it while the device works: then it
    /// costs no time. Whether anything has changed: then there may be more to do and to tell.
    pub fn make_ready(&mut self, around: &mut Surroundings<'_>) -> bool {
        if !self.is_writing() || self.ready.len() >= self.max_ready() || !self.may_write(around, 0)
        {
            return false;
        }
        let shared = around.shared.clone();
        let mut state = shared.lock();
        let Some(front) = state.backlog.queue.front() else {
            return false;
        };
        let owner = front.owner;
        if state.catalog.contains(&front.key) {
            pass_over(&shared, &mut state);
            return true;
        }
        let place = state
            .own
            .as_mut()
            .and_then(|own| own.places.take_free(owner));
        let Some(place) = place else {
            drop(state);
            return !matches!(self.make_room(around), Room::Wait);
        };
        let Some(page) = state.backlog.queue.pop_front() else {
            return false;
        };
        drop(state);
        let ready = self.prepare(around, page, place);
        self.ready.extend(ready);
        true
    }

    /// Fails what has not been started.
    pub fn give_up_waiting(&mut self, around: &Surroundings<'_>) {
        let mut lost = Vec::new();
        let mut state = around.shared.lock();
        for ready in self.ready.drain(..) {
            let Writing { page, place, .. } = ready.writing;
            if let Some(own) = &mut state.own {
                own.places.give_up(place);
            }
            state.settle(page.key, &page.parent, Outcome::Failed);
            lost.push(page);
        }
        lost.extend(state.fail_queue());
        drop(state);
        release_claims(around.shared, &lost);
    }

    fn prepare(
        &mut self,
        around: &mut Surroundings<'_>,
        page: Queued,
        place: Place,
    ) -> Option<Ready> {
        self.sequence += 1;
        let generation = self.sequence;
        let (segment, offset) = self.segmenting().locate(place);
        let whose = (self.header.shelf, segment);
        let stripe = &around.shared.stripe;
        let file = match around.files.get(stripe, around.device, whose, Use::Writing) {
            Ok(file) => file,
            Err(error) => {
                self.fail_write(around, page, place, &error);
                return None;
            }
        };
        let identity = Identity {
            key: page.key,
            namespace: page.namespace,
            generation,
        };
        let (header, record) = self.seal(&page, identity);
        let (body, bounce) = self.body_of(&page);
        Some(Ready {
            writing: Writing {
                page,
                record,
                place,
                file,
                header,
                bounce,
            },
            offset,
            body,
        })
    }

    fn start(&mut self, around: &mut Surroundings<'_>, joined: VecDeque<Ready>) {
        around.shared.lock().counters.write_operations += 1;
        let (file, offset) = (joined[0].writing.file, joined[0].offset);
        let action = Action::Write(Spans::of(joined.iter().flat_map(Ready::spans)));
        let records = joined.into_iter().map(|ready| ready.writing).collect();
        let index = occupy(&mut self.running, records);
        let op = Op {
            token: (around.token)(WriterToken::Record(index)),
            file,
            offset,
            action,
        };
        self.num_running += 1;
        // SAFETY: headers and bounces are kept in `running`, where their heap does not move; the frames are the store's, and
        // `page.memory` keeps them mapped, until the operation has been reaped.
        unsafe { around.device.push(op) };
    }

    fn frame_of(&self, page: &Queued) -> Span {
        let num_bytes = self.header.geometry.frame_bytes() as usize;
        Span::within(&page.memory, page.offset as usize, num_bytes)
    }

    /// The header with the checksums, and what the manifest will say.
    fn seal(&mut self, page: &Queued, identity: Identity) -> (AlignedBytes, Record) {
        let frame = self.frame_of(page);
        // SAFETY: `Store::put` checked that the frame lies inside its memory; its owner does not write it until it is told so.
        let bytes = unsafe { frame.bytes() };
        let geometry = &self.header.geometry;
        let checksum = |layer: usize| {
            let place = geometry.in_frame(&(layer..layer + 1));
            identity.checksum(layer, &bytes[place.start as usize..place.end as usize])
        };
        let header = RecordHeader {
            identity,
            parent: page.parent,
            checksums: (0..geometry.num_layers()).map(checksum).collect(),
        };
        let mut block = self.headers.take();
        header.encode(block.bytes_mut());
        let record = Record {
            identity,
            parent: page.parent,
            checksum: record_checksum(&header.checksums),
        };
        (block, record)
    }

    /// The bytes behind the header: the frame itself, or a copy with the layers on block boundaries.
    fn body_of(&mut self, page: &Queued) -> (Span, Option<AlignedBytes>) {
        let frame = self.frame_of(page);
        let geometry = &self.header.geometry;
        if geometry.is_dense() {
            return (frame, None);
        }
        // SAFETY: as in `seal`.
        let bytes = unsafe { frame.bytes() };
        let mut bounce = self.bounces.take();
        for layer in 0..geometry.num_layers() {
            let place = geometry.in_frame(&(layer..layer + 1));
            let source = &bytes[place.start as usize..place.end as usize];
            let at = geometry.in_record(&(layer..layer + 1)).start as usize - BLOCK_BYTES;
            bounce.bytes_mut()[at..at + source.len()].copy_from_slice(source);
        }
        let len = geometry.in_record(&(0..geometry.num_layers()));
        (bounce.span(0, (len.end - len.start) as usize), Some(bounce))
    }

    pub(super) fn on_record(
        &mut self,
        around: &mut Surroundings<'_>,
        index: usize,
        result: io::Result<()>,
    ) {
        let Some(records) = self.running[index].take() else {
            unreachable!("a completion belongs to a running write")
        };
        self.num_running -= 1;
        let error = result.err();
        for writing in records {
            self.on_written(around, writing, error.as_ref());
        }
    }

    fn on_written(
        &mut self,
        around: &Surroundings<'_>,
        writing: Writing,
        error: Option<&io::Error>,
    ) {
        self.headers.give_back(writing.header);
        if let Some(bounce) = writing.bounce {
            self.bounces.give_back(bounce);
        }
        if let Some(error) = error {
            self.fail_write(around, writing.page, writing.place, error);
            return;
        }
        self.batch_since.get_or_insert_with(Instant::now);
        self.batch.push(Written {
            record: writing.record,
            place: writing.place,
            file: writing.file,
        });
    }

    pub(super) fn fail_write(
        &mut self,
        around: &Surroundings<'_>,
        page: Queued,
        place: Place,
        error: &io::Error,
    ) {
        let has_no_space = is_no_space(error);
        if !has_no_space {
            self.say_of_write(around, place, error);
        }
        let mut state = around.shared.lock();
        if let Some(own) = &mut state.own {
            own.places.give_up(place);
        }
        state.counters.write_errors += u64::from(!has_no_space);
        if has_no_space {
            state.counters.no_space_pauses += 1;
            state.has_no_space = true;
            self.stopped_until = Some(Instant::now() + REST);
        }
        state.settle(page.key, &page.parent, Outcome::Failed);
        let mut lost = state.fail_descendants(page.key);
        drop(state);
        lost.push(page);
        release_claims(around.shared, &lost);
    }

    /// Only one of the drives may be bad: then the manifest says nothing of it.
    fn say_of_write(&mut self, around: &Surroundings<'_>, place: Place, error: &io::Error) {
        if self
            .said_of_writes
            .is_new(&error.to_string(), Instant::now())
        {
            let (segment, _) = self.segmenting().locate(place);
            let path = around.shared.stripe.segment(self.shelf(), segment);
            banyan_shm::say!("banyan: {} cannot be written: {error}", path.display());
        }
    }
}

/// The page at the front of the queue was stored by somebody else meanwhile.
fn pass_over(shared: &Shared, state: &mut State) {
    if let Some(page) = state.backlog.queue.pop_front() {
        state.counters.put_present += 1;
        state.settle(page.key, &page.parent, Outcome::Stored);
        shared.release_claim(&page.namespace, &page.key);
    }
}
