// SPDX-License-Identifier: Apache-2.0
//! One read: which transfers it needs, in which order, and what has been verified.
//!
//! Invariants
//! * A layer counts as landed for a page only after its checksum agreed, or after the page has failed.
//! * A layer-wise read takes the checksums from the header that it reads together with the first layers, and only if that names the
//!   page, namespace and generation that the lookup saw. What arrives before the header is verified when the header is there.
//! * A read of whole pages needs no header: the manifest's checksum stands for the whole record, its page, namespace and generation. It
//!   is verified when all of the page has arrived.
//! * Nothing is written to the memory after `ended`. A late read (`clock`) lets its waiters go before that: its pages have failed, its
//!   frames are not yet the caller's.

mod feed;
mod ticket;

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use banyan_shm::memory::SharedMemory;

pub use feed::Feed;
pub use ticket::{ReadTicket, Reason};

use crate::catalog::{Hit, ShelfIndex};
use crate::device::{FileId, Span};
use crate::format::{Identity, Namespace, RecordHeader, record_checksum};
use crate::geometry::Geometry;

struct Page {
    hit: Hit,
    offset: u64,
    /// File and byte offset of the record, once the first transfer has looked them up.
    location: Option<(FileId, u64)>,
    /// What the header says, in a layer-wise read.
    checksums: Option<Vec<u64>>,
    /// Steps that cannot be verified yet, with the checksums of their layers as they arrived.
    arrived: Vec<(usize, Vec<u64>)>,
    failed: Option<Reason>,
}

/// One transfer of a read: a step of a page.
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
    /// Layers that one transfer moves.
    steps: Vec<Range<usize>>,
    /// Nobody waits for single layers.
    is_whole: bool,
    /// Pages that have not landed, by step.
    remaining: Vec<usize>,
    num_landed_steps: usize,
    num_planned: usize,
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
            arrived: Vec::new(),
            failed: None,
        };
        let pages: Vec<Page> = pages.map(page).collect();
        let steps = geometry.cut(layers_per_step);
        Self {
            ticket: Arc::new(ReadTicket::new(pages.len(), num_layers)),
            namespace,
            memory,
            geometry,
            remaining: vec![pages.len(); steps.len()],
            pages,
            steps,
            is_whole: layers_per_step >= num_layers,
            num_landed_steps: 0,
            num_planned: 0,
            num_in_flight: 0,
            started: Instant::now(),
        }
    }

    pub fn hits(&self) -> Vec<Hit> {
        self.pages.iter().map(|page| page.hit).collect()
    }

    pub fn is_of(&self, shelf: Option<ShelfIndex>) -> bool {
        let mut pages = self.pages.iter();
        pages.any(|page| Some(page.hit.shelf) == shelf)
    }

    pub fn location(&self, page: usize) -> Option<(FileId, u64)> {
        self.pages[page].location
    }

    /// Valid while the read lasts: files are not let go of before.
    pub fn set_location(&mut self, page: usize, location: (FileId, u64)) {
        self.pages[page].location = Some(location);
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
    ///
    /// Whole pages too: asked for one after the other, the pieces of a page would be merged into one large request again.
    pub fn plan_next(&mut self) -> Option<Planned> {
        if self.ticket.is_cancelled.load(Ordering::Relaxed) || self.ticket.is_late() {
            self.give_up();
        }
        while self.num_planned < self.num_transfers() {
            let page = self.num_planned % self.pages.len();
            let step = self.num_planned / self.pages.len();
            self.num_planned += 1;
            let candidate = &self.pages[page];
            if candidate.failed.is_some() {
                self.land(step);
                continue;
            }
            self.num_in_flight += 1;
            return Some(Planned {
                page,
                step,
                hit: candidate.hit,
                with_header: step == 0 && !self.is_whole,
            });
        }
        None
    }

    fn num_transfers(&self) -> usize {
        self.pages.len() * self.steps.len()
    }

    fn give_up(&mut self) {
        self.num_planned = self.num_transfers();
        self.remaining.fill(0);
    }

    /// Everything that is left fails: the namespace has changed.
    pub fn fail_all(&mut self, reason: Reason) {
        for page in &mut self.pages {
            page.failed.get_or_insert(reason);
        }
        self.ticket.fail_all(reason);
    }

    pub fn fail(&mut self, page: usize, reason: Reason) {
        if self.pages[page].failed.is_none() {
            self.pages[page].failed = Some(reason);
            self.ticket.fail([page], reason);
        }
    }

    /// A transfer could not be submitted or came back with an error.
    pub fn on_error(&mut self, planned: Planned, reason: Reason) {
        self.num_in_flight -= 1;
        self.fail(planned.page, reason);
        self.settle(planned.page);
        self.land(planned.step);
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
        // Before they can be verified: now they may still be in the processor's caches.
        let found = self.checksums_of(page, self.layers_of(step));
        self.pages[page].arrived.push((step, found));
        if self.can_settle(page) {
            self.settle(page);
        }
    }

    fn can_settle(&self, page: usize) -> bool {
        let Page {
            failed,
            checksums,
            arrived,
            ..
        } = &self.pages[page];
        let can_verify = if self.is_whole {
            arrived.len() == self.steps.len()
        } else {
            checksums.is_some()
        };
        can_verify || failed.is_some()
    }

    /// What has arrived of a page is right, or the page has failed: it lands.
    fn settle(&mut self, page: usize) {
        let mut arrived = std::mem::take(&mut self.pages[page].arrived);
        arrived.sort_unstable_by_key(|(step, _)| *step);
        if self.pages[page].failed.is_none() && !self.agrees(page, &arrived) {
            self.fail(page, Reason::Checksum);
        }
        for (step, _) in arrived {
            self.land(step);
        }
    }

    /// Whether these steps, in order, have the checksums that they should; without a header they are all of the page.
    fn agrees(&self, page: usize, arrived: &[(usize, Vec<u64>)]) -> bool {
        let Page { hit, checksums, .. } = &self.pages[page];
        match checksums {
            Some(expected) => arrived
                .iter()
                .all(|(step, found)| *found == expected[self.layers_of(*step)]),
            None => {
                let found: Vec<u64> = arrived
                    .iter()
                    .flat_map(|(_, found)| found)
                    .copied()
                    .collect();
                record_checksum(&found) == hit.checksum
            }
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
        self.num_in_flight == 0 && self.num_planned == self.num_transfers()
    }

    /// Whether pages of others than `own` are not what they should be: their writers may have reused their places.
    pub fn doubts_others(&self, own: Option<ShelfIndex>) -> bool {
        let is_others = |page: &Page| Some(page.hit.shelf) != own;
        let failed = self.pages.iter().filter(|page| page.failed.is_some());
        !self.ticket.is_late() && failed.into_iter().any(is_others)
    }

    /// After the record's state was looked at: what is not what it should be may have been overwritten by its owner. If it has not,
    /// and is still said to be there, it is damaged; also where another page lies in its place, or no file.
    pub fn reclassify(&mut self, is_still_there: impl Fn(&Hit) -> bool) -> Vec<Hit> {
        let mut damaged = Vec::new();
        let mut failed = self
            .ticket
            .failed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for (page, failed) in self.pages.iter().zip(failed.iter_mut()) {
            let Some(reason) = failed else { continue };
            if !is_still_there(&page.hit) {
                *reason = Reason::Gone;
            } else if !matches!(*reason, Reason::Refused | Reason::Late) {
                damaged.push(page.hit);
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
    use crate::geometry::REQUEST_BYTES;

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
        with_layers(4096, hits, layers_per_step)
    }

    /// Pages of two layers.
    fn with_layers(
        layer_bytes: u64,
        hits: impl Iterator<Item = Hit>,
        layers_per_step: usize,
    ) -> ReadJob {
        let geometry = Arc::new(Geometry::new(&[layer_bytes; 2]).unwrap());
        let memory = SharedMemory::create(16 * layer_bytes as usize, "reading").unwrap();
        let memory = Arc::new(memory);
        let pages = hits.zip((0..).step_by(2 * layer_bytes as usize));
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

    /// Two whole pages, each of two transfers, that have all been planned.
    fn whole_pages_in_two() -> (ReadJob, Vec<Planned>) {
        let with_checksums = |hits: Vec<Hit>| with_layers(REQUEST_BYTES, hits.into_iter(), 2);
        let blank = with_checksums(vec![hit(0), hit(1)]);
        let hits = (0..2).map(|page| {
            let header = RecordHeader::decode(&arrive(&blank, page as usize)).unwrap();
            Hit {
                checksum: record_checksum(&header.checksums),
                ..hit(page)
            }
        });
        let mut job = with_checksums(hits.collect());
        for page in 0..2 {
            arrive(&job, page);
        }
        let plans = plan_all(&mut job);
        (job, plans)
    }

    #[test]
    fn whole_pages_when_cut_then_no_neighbours_in_a_row_and_landed_when_all_of_them_is_right() {
        let (mut job, plans) = whole_pages_in_two();
        let order: Vec<(usize, usize)> = plans.iter().map(|plan| (plan.page, plan.step)).collect();
        assert_eq!(order, [(0, 0), (1, 0), (0, 1), (1, 1)]);
        assert!(plans.iter().all(|plan| !plan.with_header));
        // In no order of their own; page 1 is first.
        for (plan, num_done) in [(plans[3], 0), (plans[0], 0), (plans[1], 0), (plans[2], 2)] {
            job.on_landed(plan, None);
            assert_eq!(job.ticket.progress.num_done(), num_done);
        }
        assert!(job.is_over() && job.ticket.failed().is_empty());
    }

    #[test]
    fn whole_page_when_one_of_its_transfers_fails_or_is_wrong_then_all_of_it_and_no_other() {
        let (mut job, plans) = whole_pages_in_two();
        // SAFETY: the test owns the memory.
        unsafe { job.target(1, 0).bytes_mut()[7] ^= 1 };
        job.on_landed(plans[0], None);
        job.on_error(plans[2], Reason::Io);
        job.on_landed(plans[1], None);
        assert_eq!(job.ticket.progress.num_done(), 0);
        job.on_landed(plans[3], None);
        assert_eq!(job.ticket.progress.num_done(), 2);
        let failed = [(0, Reason::Io), (1, Reason::Checksum)];
        assert_eq!(job.ticket.failed(), failed);
    }

    #[test]
    fn whole_page_when_it_fails_then_the_rest_of_it_is_not_read() {
        let hits = [hit(0)].into_iter();
        let mut job = with_layers(REQUEST_BYTES, hits, 2);
        let first = job.plan_next().unwrap();
        job.on_error(first, Reason::Io);
        assert_eq!(job.plan_next(), None);
        assert!(job.is_over());
        assert_eq!(job.ticket.progress.num_done(), 2);
    }

    #[test]
    fn pages_when_very_many_fail_one_by_one_then_each_is_named_once_and_nothing_is_looked_through()
    {
        let num_pages = 1 << 18;
        let mut job = job(num_pages);
        for page in (0..num_pages as usize).rev() {
            job.fail(page, Reason::Io);
        }
        job.ticket.be_late();
        let failed = job.ticket.failed();
        assert!(
            failed
                .into_iter()
                .eq((0..num_pages as usize).map(|page| (page, Reason::Io)))
        );
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
        job.ticket.be_late();
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
