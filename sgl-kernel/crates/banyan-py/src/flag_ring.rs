// SPDX-License-Identifier: Apache-2.0

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use banyan_shm::flag_ring::{
    ANSWER_OFFSET, Batch, DOORBELL_OFFSET, FlagRing, Following, LayerWork, SLOT_BYTES,
};
use banyan_shm::ring_reads::{LayerReads, Piece};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::convert::to_py;
use crate::memory::SharedBytes;
use crate::store::PyRead;

/// File, offset in it, size, offset in the target.
type PyPiece = (usize, u64, usize, usize);

#[pyclass(frozen, name = "FlagRing", module = "banyan._native")]
pub struct PyFlagRing {
    ring: FlagRing,
}

#[pymethods]
impl PyFlagRing {
    #[classattr]
    const SLOT_BYTES: usize = SLOT_BYTES;

    #[new]
    #[pyo3(signature = (memory, num_slots, first = 0))]
    fn new(memory: &SharedBytes, num_slots: usize, first: u32) -> PyResult<Self> {
        let ring = FlagRing::start(memory.memory.clone(), num_slots, first);
        Ok(Self {
            ring: ring.map_err(to_py)?,
        })
    }

    fn read(
        &self,
        fds: Vec<i32>,
        layers: Vec<Vec<PyPiece>>,
        target: &SharedBytes,
    ) -> PyResult<Option<PyRingBatch>> {
        let files = fds.into_iter().map(duplicate).collect::<PyResult<_>>()?;
        let piece = |(file, file_offset, num_bytes, target_offset)| Piece {
            file,
            file_offset,
            num_bytes,
            target_offset,
        };
        let layers = layers.into_iter();
        let layers = layers.map(|pieces| pieces.into_iter().map(piece).collect());
        let reads = LayerReads::prepare(files, layers.collect(), target.memory.clone());
        self.send(Box::new(reads.map_err(to_py)?))
    }

    fn follow(&self, reads: Vec<PyRef<'_, PyRead>>) -> PyResult<Option<PyRingBatch>> {
        let progress = reads.iter().map(|read| read.ticket().progress.clone());
        self.send(Box::new(Following::new(progress.collect()).map_err(to_py)?))
    }

    fn give_back(&self, batch: &PyRingBatch) -> bool {
        self.ring.give_back(&batch.batch)
    }
}

impl PyFlagRing {
    fn send(&self, work: Box<dyn LayerWork>) -> PyResult<Option<PyRingBatch>> {
        if work.num_layers() == 0 {
            return Err(PyValueError::new_err("a batch of no layers"));
        }
        Ok(self.ring.send(work).map(|batch| PyRingBatch { batch }))
    }
}

/// The batch reads on when the caller has closed its descriptor.
fn duplicate(fd: i32) -> PyResult<File> {
    if fd < 0 {
        return Err(PyValueError::new_err(format!("{fd} is no descriptor")));
    }
    // SAFETY: only used to duplicate it here; a number that is not open is an error of the call.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let owned = borrowed.try_clone_to_owned();
    owned.map(File::from).map_err(|cause| {
        let errno = cause.raw_os_error().unwrap_or_default();
        PyOSError::new_err((errno, format!("descriptor {fd}: {cause}")))
    })
}

#[pyclass(frozen, name = "RingBatch", module = "banyan._native")]
pub struct PyRingBatch {
    batch: Arc<Batch>,
}

#[pymethods]
impl PyRingBatch {
    #[getter]
    fn doorbell_offset(&self) -> usize {
        self.batch.slot * SLOT_BYTES + DOORBELL_OFFSET
    }

    #[getter]
    fn answer_offset(&self) -> usize {
        self.batch.slot * SLOT_BYTES + ANSWER_OFFSET
    }

    #[getter]
    fn num_layers(&self) -> usize {
        self.batch.num_layers
    }

    fn value(&self, layer: usize) -> PyResult<u32> {
        if layer >= self.batch.num_layers {
            return Err(PyValueError::new_err(format!(
                "layer {layer} of a batch of {} layers",
                self.batch.num_layers
            )));
        }
        Ok(self.batch.first.wrapping_add(layer as u32 + 1))
    }

    #[getter]
    fn has_ended(&self) -> bool {
        self.batch.has_ended()
    }

    #[getter]
    fn has_failed(&self) -> bool {
        self.batch.has_failed()
    }

    fn cancel(&self) {
        self.batch.cancel();
    }
}
