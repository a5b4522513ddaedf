// SPDX-License-Identifier: Apache-2.0
//! What the caller of a read holds: how far it is, which pages failed, and the way to give it up.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use banyan_shm::progress::LayerProgress;

/// Why a page did not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    Gone,
    Checksum,
    Io,
    /// The system could not read it at the moment. It says nothing about the page.
    Refused,
    /// The device had not answered in time. It says nothing about the page.
    Late,
}

/// The caller's end of a read.
pub struct ReadTicket {
    pub progress: Arc<LayerProgress>,
    pub num_pages: usize,
    /// By page.
    pub(super) failed: Mutex<Vec<Option<Reason>>>,
    pub(super) is_cancelled: AtomicBool,
    pub(super) is_late: AtomicBool,
    pub(super) bytes: AtomicU64,
    pub(super) elapsed_ns: AtomicU64,
}

impl ReadTicket {
    pub fn new(num_pages: usize, num_layers: usize) -> Self {
        Self {
            progress: Arc::new(LayerProgress::new(num_layers)),
            num_pages,
            failed: Mutex::new(vec![None; num_pages]),
            is_cancelled: AtomicBool::new(false),
            is_late: AtomicBool::new(false),
            bytes: AtomicU64::new(0),
            elapsed_ns: AtomicU64::new(0),
        }
    }

    /// Pages that failed so far, complete once the progress has ended.
    pub fn failed(&self) -> Vec<(usize, Reason)> {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        let pages = failed.iter().enumerate();
        pages
            .filter_map(|(page, reason)| Some((page, (*reason)?)))
            .collect()
    }

    /// Those that have not failed fail.
    pub(super) fn fail(&self, pages: impl IntoIterator<Item = usize>, reason: Reason) {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        for page in pages {
            if let Some(place) = failed.get_mut(page) {
                place.get_or_insert(reason);
            }
        }
    }

    pub(super) fn fail_all(&self, reason: Reason) {
        self.fail(0..self.num_pages, reason);
    }

    /// Who brings the pages does not answer in time: those that have not failed fail, and nobody waits for a layer any longer. The end
    /// comes with the answer.
    pub fn be_late(&self) {
        self.fail_all(Reason::Late);
        self.is_late.store(true, Ordering::Release);
        self.progress.advance_to(self.progress.num_layers());
    }

    /// Pages that failed, as soon as the last layer is through. What comes between that and the end, a look at what other writers have
    /// announced, tells the reasons.
    pub fn failed_pages(&self) -> Vec<usize> {
        let last = self.progress.num_layers().saturating_sub(1);
        self.progress.wait_layer(last);
        self.failed().into_iter().map(|(page, _)| page).collect()
    }

    pub fn finish(&self) -> Vec<(usize, Reason)> {
        self.progress.wait_end();
        self.failed()
    }

    /// Gives up what has not been submitted, and waits until nothing is written to memory any more.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        self.progress.wait_end();
    }

    /// Whether its waiters were let go because the device does not answer.
    pub fn is_late(&self) -> bool {
        self.is_late.load(Ordering::Acquire)
    }

    pub fn bytes_read(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn read_time(&self) -> Duration {
        Duration::from_nanos(self.elapsed_ns.load(Ordering::Relaxed))
    }
}
