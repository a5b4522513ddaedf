// SPDX-License-Identifier: Apache-2.0
//! One read: which transfers it needs, in which order, and what has been verified.
//!
//! Invariants
//! * A layer counts as landed for a page only after its checksum agreed, or after the page has failed.
//! * A read in several steps takes the checksums from the header that it reads together with the first layers, and only if that names
//!   the page, namespace and generation that the lookup saw. What lands before the header is verified when the header is there.
//! * A read in one step needs no header: the manifest's checksum stands for the whole record, its page, namespace and generation.
//! * Nothing is written to the memory after `ended`. A late read lets its waiters go before that: its pages have failed, its frames
//!   are not yet the caller's.

mod ticket;

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use banyan_shm::memory::SharedMemory;

pub use ticket::{ReadTicket, Reason};

use crate::catalog::Hit;
use crate::device::{FileId, Span};
use crate::format::{Identity, Namespace, RecordHeader, record_checksum};
use crate::geometry::Geometry;

struct Page {
    hit: Hit,
    offset: u64,
    /// File and byte offset of the record, once the first transfer has looked them up.
    location: Option<(FileId, u64)>,
    checksums: Option<Vec<u64>>,
    /// Steps that landed before the header.
    early: Vec<usize>,
    failed: Option<Reason>,
}

/// One transfer of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    pub page: usize,
    pub step: usize,
    pub hit: Hit,
    pub with_header: bool,
}

pub struct ReadJob {
    pub ticket: Arc<ReadTicket>,
    pub namespace: Namespace,
    pub memory: Arc<SharedMemory>,
    geometry: Arc<Geometry>,
    pages: Vec<Page>,
    steps: Vec<Range<usize>>,
    remaining: Vec<usize>,
    num_landed_steps: usize,
    next: (usize, usize),
    num_in_flight: usize,
    started: Instant,
}

impl ReadJob {
    pub fn new(
        geometry: Arc<Geometry>,
        namespace: Namespace,
        memory: Arc<SharedMemory>,
        pages: impl Iterator<Item = (Hit, u64)>,
        layers_per_step: usize,
    ) -> Self {
        let num_layers = geometry.num_layers();
        let page = |(hit, offset)| Page {
            hit,
            offset,
            location: None,
            checksums: None,
            early: Vec::new(),
            failed: None,
        };
        let pages: Vec<Page> = pages.map(page).collect();
        let steps: Vec<Range<usize>> = (0..num_layers)
            .step_by(layers_per_step)
            .map(|start| start..(start + layers_per_step).min(num_layers))
            .collect();
        Self {
            ticket: Arc::new(ReadTicket::new(pages.len(), num_layers)),
            namespace,
            memory,
            geometry,
            remaining: vec![pages.len(); steps.len()],
            pages,
            steps,
            num_landed_steps: 0,
            next: (0, 0),
            num_in_flight: 0,
            started: Instant::now(),
        }
    }

    pub fn hits(&self) -> Vec<Hit> {
        self.pages.iter().map(|page| page.hit).collect()
    }

    pub fn location(&self, page: usize) -> Option<(FileId, u64)> {
        self.pages[page].location
    }

    /// Valid while the read lasts: files are not let go of before.
    pub fn set_location(&mut self, page: usize, location: (FileId, u64)) {
        self.pages[page].location = Some(location);
    }

    fn is_in_one_step(&self) -> bool {
        self.steps.len() == 1
    }

    pub fn layers_of(&self, step: usize) -> Range<usize> {
        self.steps[step].clone()
    }

    /// Where a step of a page belongs in memory.
    pub fn target(&self, page: usize, step: usize) -> Span {
        self.bytes_of(page, &self.steps[step])
    }

    fn bytes_of(&self, page: usize, layers: &Range<usize>) -> Span {
        let place = self.geometry.in_frame(layers);
        let start = self.pages[page].offset + place.start;
        Span::within(
            &self.memory,
            start as usize,
            (place.end - place.start) as usize,
        )
    }

    /// The next transfer in step order; pages that have failed are passed over.
    pub fn plan_next(&mut self) -> Option<Planned> {
        if self.ticket.is_cancelled.load(Ordering::Relaxed) || self.ticket.is_late() {
            self.give_up();
        }
        while self.next.0 < self.steps.len() {
            let (step, page) = self.next;
            self.next = if page + 1 < self.pages.len() {
                (step, page + 1)
            } else {
                (step + 1, 0)
            };
            let Some(candidate) = self.pages.get(page) else {
                continue;
            };
            if candidate.failed.is_some() {
                self.land(step);
                continue;
            }
            self.num_in_flight += 1;
            return Some(Planned {
                page,
                step,
                hit: candidate.hit,
                with_header: step == 0 && !self.is_in_one_step(),
            });
        }
        None
    }

    fn give_up(&mut self) {
        self.next = (self.steps.len(), 0);
        self.remaining.fill(0);
    }

    /// Everything that is left fails: the namespace has changed.
    pub fn fail_all(&mut self, reason: Reason) {
        for page in 0..self.pages.len() {
            self.fail(page, reason);
        }
    }

    /// The device does not answer: what has not landed fails, nothing more is asked for, and nobody waits any longer.
    pub fn be_late(&mut self) {
        if self.ticket.is_late() {
            return;
        }
        self.fail_all(Reason::Late);
        self.give_up();
        self.ticket.is_late.store(true, Ordering::Release);
        self.ticket.progress.advance_to(self.geometry.num_layers());
    }

    pub fn fail(&mut self, page: usize, reason: Reason) {
        if self.pages[page].failed.is_none() {
            self.pages[page].failed = Some(reason);
            let mut failed = self
                .ticket
                .failed
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            failed.push((page, reason));
        }
    }

    /// A transfer could not be submitted or came back with an error.
    pub fn on_error(&mut self, planned: Planned, reason: Reason) {
        self.num_in_flight -= 1;
        self.fail(planned.page, reason);
        self.settle(planned.page, planned.step);
    }

    /// The bytes of a step are in memory, and with the first step its header block.
    pub fn on_landed(&mut self, planned: Planned, header: Option<&[u8]>) {
        self.num_in_flight -= 1;
        let Planned { page, step, .. } = planned;
        self.ticket
            .bytes
            .fetch_add(self.target(page, step).len as u64, Ordering::Relaxed);
        if let Some(block) = header {
            self.take_header(page, block);
        }
        let Page {
            failed, checksums, ..
        } = &self.pages[page];
        if failed.is_none() && checksums.is_none() && !self.is_in_one_step() {
            self.pages[page].early.push(step);
            return;
        }
        self.settle(page, step);
    }

    /// A step that has landed or failed, and those of its page that waited for the header.
    fn settle(&mut self, page: usize, step: usize) {
        let early = std::mem::take(&mut self.pages[page].early);
        for step in std::iter::once(step).chain(early) {
            if self.pages[page].failed.is_none() {
                self.verify(page, step);
            }
            self.land(step);
        }
    }

    fn take_header(&mut self, page: usize, block: &[u8]) {
        let expected = self.identity(page);
        let num_layers = self.geometry.num_layers();
        match RecordHeader::decode(block) {
            None => self.fail(page, Reason::Checksum),
            Some(header) if header.identity == expected && header.checksums.len() == num_layers => {
                self.pages[page].checksums = Some(header.checksums);
            }
            Some(_) => self.fail(page, Reason::Gone),
        }
    }

    fn identity(&self, page: usize) -> Identity {
        let hit = &self.pages[page].hit;
        Identity {
            key: hit.key,
            namespace: self.namespace,
            generation: hit.generation,
        }
    }

    fn verify(&mut self, page: usize, step: usize) {
        let layers = self.steps[step].clone();
        let found = self.checksums_of(page, layers.clone());
        let Page { hit, checksums, .. } = &self.pages[page];
        let agrees = match checksums {
            Some(expected) => found == expected[layers],
            None => record_checksum(&found) == hit.checksum,
        };
        if !agrees {
            self.fail(page, Reason::Checksum);
        }
    }

    fn checksums_of(&self, page: usize, layers: Range<usize>) -> Vec<u64> {
        let identity = self.identity(page);
        let checksum = |layer: usize| {
            let span = self.bytes_of(page, &(layer..layer + 1));
            // SAFETY: inside the mapping, and the frame is this read's until it has ended.
            identity.checksum(layer, unsafe { span.bytes() })
        };
        layers.map(checksum).collect()
    }

    fn land(&mut self, step: usize) {
        // A cancelled read has no steps left to wait for.
        self.remaining[step] = self.remaining[step].saturating_sub(1);
        while self
            .remaining
            .get(self.num_landed_steps)
            .is_some_and(|remaining| *remaining == 0)
        {
            self.num_landed_steps += 1;
            let layers = self.steps[self.num_landed_steps - 1].end;
            if !self.ticket.is_cancelled.load(Ordering::Relaxed) {
                self.ticket.progress.advance_to(layers);
            }
        }
    }

    /// Whether no transfer is left or under way.
    pub fn is_over(&self) -> bool {
        self.num_in_flight == 0 && self.next.0 >= self.steps.len()
    }

    /// After the record's state was looked at: what looked damaged may have been overwritten by its owner.
    pub fn reclassify(&mut self, is_still_there: impl Fn(&Hit) -> bool) -> Vec<Hit> {
        let mut damaged = Vec::new();
        let mut failed = self
            .ticket
            .failed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for (page, reason) in failed.iter_mut() {
            let hit = &self.pages[*page].hit;
            if !is_still_there(hit) {
                *reason = Reason::Gone;
            } else if !matches!(*reason, Reason::Gone | Reason::Late) {
                damaged.push(*hit);
            }
        }
        damaged
    }

    /// Tells the waiters. Call once, when it is over.
    pub fn end(&self) {
        let elapsed = self.started.elapsed().as_nanos() as u64;
        self.ticket.elapsed_ns.store(elapsed, Ordering::Relaxed);
        self.ticket.progress.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMESPACE: Namespace = [3; 4];

    fn hit(page: u64) -> Hit {
        Hit {
            key: [page, 1, 1, 1],
            shelf: 0,
            place: page as u32,
            generation: page + 10,
            checksum: 0,
        }
    }

    fn job(num_pages: u64) -> ReadJob {
        job_of((0..num_pages).map(hit), 1)
    }

    fn job_of(hits: impl Iterator<Item = Hit>, layers_per_step: usize) -> ReadJob {
        let geometry = Arc::new(Geometry::new(&[4096, 4096]).unwrap());
        let memory = Arc::new(SharedMemory::create(1 << 16, "reading").unwrap());
        let pages = hits.zip((0..).step_by(8192));
        ReadJob::new(geometry, NAMESPACE, memory, pages, layers_per_step)
    }

    /// Fills a page's memory and returns its header block.
    fn arrive(job: &ReadJob, page: usize) -> Vec<u8> {
        let identity = job.identity(page);
        let checksum = |layer: usize| {
            // SAFETY: the test owns the memory.
            let bytes = unsafe { job.bytes_of(page, &(layer..layer + 1)).bytes_mut() };
            bytes.fill(page as u8 + 1);
            identity.checksum(layer, bytes)
        };
        let header = RecordHeader {
            identity,
            parent: [0; 4],
            checksums: vec![checksum(0), checksum(1)],
        };
        let mut block = vec![0; 4096];
        header.encode(&mut block);
        block
    }

    fn plan_all(job: &mut ReadJob) -> Vec<Planned> {
        std::iter::from_fn(|| job.plan_next()).collect()
    }

    #[test]
    fn steps_when_planned_then_layer_by_layer_over_all_pages() {
        let planned = plan_all(&mut job(2));
        let order: Vec<(usize, usize)> =
            planned.iter().map(|plan| (plan.step, plan.page)).collect();
        assert_eq!(order, [(0, 0), (0, 1), (1, 0), (1, 1)]);
        assert!(planned[0].with_header && !planned[2].with_header);
    }

    #[test]
    fn layer_when_it_lands_before_its_header_then_counts_only_after() {
        let mut job = job(1);
        let plans = plan_all(&mut job);
        let block = arrive(&job, 0);
        job.on_landed(plans[1], None);
        assert_eq!(job.ticket.progress.num_done(), 0);
        job.on_landed(plans[0], Some(&block));
        assert_eq!(job.ticket.progress.num_done(), 2);
        assert!(job.is_over() && job.ticket.failed().is_empty());
    }

    #[test]
    fn header_when_it_cannot_be_read_then_layers_that_came_before_it_hold_nobody_up() {
        let mut job = job(1);
        let plans = plan_all(&mut job);
        arrive(&job, 0);
        job.on_landed(plans[1], None);
        job.on_error(plans[0], Reason::Io);
        assert_eq!(job.ticket.progress.num_done(), 2);
        assert_eq!(job.ticket.failed(), [(0, Reason::Io)]);
    }

    #[test]
    fn page_when_its_bytes_are_wrong_then_failed_and_the_others_land() {
        let mut job = job(2);
        let plans = plan_all(&mut job);
        let blocks = [arrive(&job, 0), arrive(&job, 1)];
        // SAFETY: the test owns the memory.
        unsafe { job.target(1, 1).bytes_mut()[7] ^= 1 };
        for plan in plans {
            let header = plan.with_header.then(|| &blocks[plan.page][..]);
            job.on_landed(plan, header);
        }
        assert_eq!(job.ticket.progress.num_done(), 2);
        assert_eq!(job.ticket.failed(), [(1, Reason::Checksum)]);
        assert_eq!(job.reclassify(|_| true), [hit(1)]);
        assert!(job.reclassify(|_| false).is_empty());
        assert_eq!(job.ticket.failed(), [(1, Reason::Gone)]);
    }

    #[test]
    fn page_when_read_in_one_step_then_the_manifest_s_checksum_stands_for_its_header() {
        let blocks = arrive(&job_of([hit(0)].into_iter(), 2), 0);
        let header = RecordHeader::decode(&blocks).unwrap();
        let right = Hit {
            checksum: record_checksum(&header.checksums),
            ..hit(0)
        };
        let later_tenant = Hit {
            generation: right.generation + 1,
            ..right
        };
        for (hit, failed) in [(right, vec![]), (later_tenant, vec![(0, Reason::Checksum)])] {
            let mut job = job_of([hit].into_iter(), 2);
            let planned = job.plan_next().unwrap();
            assert!(!planned.with_header);
            // SAFETY: the test owns the memory.
            unsafe { job.target(0, 0).bytes_mut().fill(1) };
            job.on_landed(planned, None);
            assert_eq!(job.ticket.failed(), failed);
            assert_eq!(job.ticket.progress.num_done(), 2);
        }
    }

    #[test]
    fn page_when_its_place_has_another_tenant_then_gone_and_not_read_on() {
        let mut job = job(1);
        let first = job.plan_next().unwrap();
        let mut block = arrive(&job, 0);
        let mut header = RecordHeader::decode(&block).unwrap();
        header.identity.generation += 1;
        header.encode(&mut block);
        job.on_landed(first, Some(&block));
        assert_eq!(job.plan_next(), None);
        assert!(job.is_over());
        assert_eq!(job.ticket.failed(), [(0, Reason::Gone)]);
        assert_eq!(job.ticket.progress.num_done(), 2);
    }

    #[test]
    fn read_when_late_then_waiters_go_on_and_the_end_comes_with_the_answer() {
        let mut job = job(2);
        let first = job.plan_next().unwrap();
        job.be_late();
        assert_eq!(job.ticket.progress.num_done(), 2);
        assert_eq!(job.plan_next(), None);
        assert!(!job.is_over() && job.ticket.is_late());
        let block = arrive(&job, 0);
        job.on_landed(first, Some(&block));
        assert!(job.is_over());
        let failed = [(0, Reason::Late), (1, Reason::Late)];
        assert_eq!(job.ticket.failed(), failed);
        // They are not damaged.
        assert!(job.reclassify(|_| true).is_empty());
    }

    #[test]
    fn read_when_cancelled_then_over_once_what_is_in_flight_has_landed() {
        let mut job = job(2);
        let first = job.plan_next().unwrap();
        job.ticket.is_cancelled.store(true, Ordering::Relaxed);
        assert_eq!(job.plan_next(), None);
        assert!(!job.is_over());
        job.on_error(first, Reason::Io);
        assert!(job.is_over());
        assert_eq!(job.ticket.progress.num_done(), 0);
    }
}
