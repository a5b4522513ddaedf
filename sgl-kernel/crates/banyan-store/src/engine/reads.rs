// SPDX-License-Identifier: Apache-2.0
//! Reads on the I/O thread: from a job's next transfer to the news for its waiters.

use std::io;

use super::{Engine, Transfer, read_token};
use crate::buffer::AlignedBytes;
use crate::device::{Action, FileId, Op, Spans};
use crate::error::passes;
use crate::files::Use;
use crate::geometry::{BLOCK_BYTES, Geometry};
use crate::reading::{Planned, ReadJob, Reason};
use crate::slots::occupy;

/// Transfers of reads in flight: more adds latency, not bandwidth.
const READ_DEPTH: usize = 64;

impl Engine {
    pub(super) fn start_reads(&mut self) {
        for index in 0..self.jobs.len() {
            while self.has_depth() {
                let Some(job) = &mut self.jobs[index] else {
                    break;
                };
                let Some(planned) = job.plan_next() else {
                    break;
                };
                self.start_transfer(index, planned);
            }
        }
    }

    fn has_depth(&self) -> bool {
        self.num_in_flight < READ_DEPTH.min(self.device.capacity() / 2)
    }

    /// File and byte offset of a record; looked up for the first of its layers.
    fn locate(&mut self, index: usize, planned: Planned) -> io::Result<(FileId, u64)> {
        let known = self.jobs[index]
            .as_ref()
            .and_then(|job| job.location(planned.page));
        if let Some(location) = known {
            return Ok(location);
        }
        let (shelf, segmenting) = {
            let state = self.shared.lock();
            let shelf = planned.hit.shelf;
            (
                state.catalog.shelf_id(shelf),
                state.catalog.segmenting(shelf),
            )
        };
        let (segment, offset) = segmenting.locate(planned.hit.place);
        let purpose = if self.shared.own_shelf == Some(shelf) {
            Use::Writing
        } else {
            Use::Reading
        };
        let (stripe, device) = (&self.shared.stripe, &mut *self.device);
        let mut open = |purpose| self.files.get(stripe, device, (shelf, segment), purpose);
        let file = match open(purpose) {
            // It takes nothing any more, and may be read as before.
            Err(error) if error.raw_os_error() == Some(libc::EROFS) => open(Use::Reading),
            opened => opened,
        };
        Ok((file?, offset))
    }

    fn start_transfer(&mut self, index: usize, planned: Planned) {
        let located = self.locate(index, planned);
        let Some(job) = &mut self.jobs[index] else {
            return;
        };
        let (file, record_offset) = match located {
            Ok(location) => location,
            Err(error) => {
                let is_gone = error.kind() == io::ErrorKind::NotFound;
                self.shared.lock().counters.read_errors += u64::from(!is_gone);
                job.on_error(planned, reason_of(&error));
                return;
            }
        };
        job.set_location(planned.page, (file, record_offset));
        let layers = job.layers_of(planned.step);
        let in_record = self.geometry.in_record(&layers);
        let mut body = job.target(planned.page, planned.step);
        let mut bounce = None;
        if !self.geometry.is_dense() {
            let buffer = self.bounces.take();
            body = buffer.span(0, (in_record.end - in_record.start) as usize);
            bounce = Some(buffer);
        }
        let header = planned.with_header.then(|| self.headers.take());
        let (offset, spans) = match &header {
            Some(block) => (record_offset, Spans::of([block.span(0, BLOCK_BYTES), body])),
            None => (record_offset + in_record.start, Spans::one(body)),
        };
        let transfer = Transfer {
            job: index,
            planned,
            len: spans.len(),
            header,
            bounce,
        };
        self.num_in_flight += 1;
        let ticket = job.ticket.clone();
        let slot = occupy(&mut self.transfers, transfer);
        self.shared.watch.lock().starts(slot, ticket);
        let op = Op {
            token: read_token(slot),
            file,
            offset,
            action: Action::Read(spans),
        };
        // SAFETY: buffers are kept in `transfers`; the frame belongs to the read, whose job keeps its memory, until it is over, and it
        // is not over while this operation is in flight.
        unsafe { self.device.push(op) };
    }

    pub(super) fn on_read(&mut self, slot: usize, result: io::Result<()>) -> usize {
        let Some(transfer) = self.transfers[slot].take() else {
            unreachable!("a completion belongs to a transfer")
        };
        let Some(job) = &mut self.jobs[transfer.job] else {
            unreachable!("a job outlives its transfers")
        };
        let planned = transfer.planned;
        match result {
            Err(error) => {
                self.shared.lock().counters.read_errors += 1;
                job.on_error(planned, reason_of(&error));
            }
            Ok(()) => {
                if let Some(bounce) = &transfer.bounce {
                    unpack(&self.geometry, job, planned, bounce);
                }
                let header = transfer.header.as_ref().map(AlignedBytes::bytes);
                job.on_landed(planned, header);
            }
        }
        transfer
            .header
            .into_iter()
            .for_each(|buffer| self.headers.give_back(buffer));
        transfer
            .bounce
            .into_iter()
            .for_each(|buffer| self.bounces.give_back(buffer));
        transfer.len
    }

    pub(super) fn end_reads(&mut self) {
        for index in 0..self.jobs.len() {
            if let Some(job) = self.jobs[index].take_if(|job| job.is_over()) {
                self.end_read(job);
            }
        }
    }

    fn end_read(&self, job: ReadJob) {
        let own = self.shared.lock().own.as_ref().map(|own| own.index);
        if job.doubts_others(own) {
            // Others' manifests say whether it is damage; reading them is another thread's.
            self.shared.refresh_requests.doubt(job);
        } else {
            self.shared.end_read(job);
        }
    }
}

fn reason_of(error: &io::Error) -> Reason {
    match error.kind() {
        io::ErrorKind::NotFound => Reason::Gone,
        // Also what is found to be somebody else's, or to have a second name: the page may be as it was.
        io::ErrorKind::PermissionDenied => Reason::Refused,
        _ if passes(error) => Reason::Refused,
        _ => Reason::Io,
    }
}

/// From block-aligned layers to packed ones.
fn unpack(geometry: &Geometry, job: &ReadJob, planned: Planned, bounce: &AlignedBytes) {
    let layers = job.layers_of(planned.step);
    let start = geometry.in_record(&layers).start;
    // SAFETY: the frame is the read's own, inside its memory, and no operation on this step is in flight any more.
    let target = unsafe { job.target(planned.page, planned.step).bytes_mut() };
    let mut at = 0;
    for layer in layers {
        let from = (geometry.in_record(&(layer..layer + 1)).start - start) as usize;
        let len = geometry.layer_bytes()[layer] as usize;
        target[at..at + len].copy_from_slice(&bounce.bytes()[from..from + len]);
        at += len;
    }
}
