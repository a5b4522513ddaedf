// SPDX-License-Identifier: Apache-2.0

use std::sync::Arc;

use banyan_shm::flag_ring::{Batch, FlagRing, SLOT_BYTES};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::convert::to_py;
use crate::memory::SharedBytes;
use crate::store::PyRead;
use crate::unlocked::Unlocked;

#[pyclass(frozen, name = "FlagRing", module = "banyan._native")]
pub struct PyFlagRing {
    ring: Unlocked<FlagRing>,
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
            ring: Unlocked::new(ring.map_err(to_py)?),
        })
    }

    fn follow(&self, reads: Vec<PyRef<'_, PyRead>>) -> PyResult<Option<PyRingBatch>> {
        let progress = reads.iter().map(|read| read.ticket().progress.clone());
        let batch = self.ring.follow(progress.collect()).map_err(to_py)?;
        Ok(batch.map(|batch| PyRingBatch { batch }))
    }

    fn give_back(&self, batch: &PyRingBatch) -> bool {
        self.ring.give_back(&batch.batch)
    }
}

#[pyclass(frozen, name = "RingBatch", module = "banyan._native")]
pub struct PyRingBatch {
    batch: Arc<Batch>,
}

#[pymethods]
impl PyRingBatch {
    #[getter]
    fn answer_offset(&self) -> usize {
        self.batch.slot * SLOT_BYTES
    }

    fn value(&self, layer: usize) -> PyResult<u32> {
        if layer >= self.batch.num_layers {
            return Err(PyValueError::new_err(format!(
                "layer {layer} of a batch of {} layers",
                self.batch.num_layers
            )));
        }
        Ok(self.batch.value(layer + 1))
    }

    #[getter]
    fn has_ended(&self) -> bool {
        self.batch.has_ended()
    }

    #[getter]
    fn has_failed(&self) -> bool {
        self.batch.has_failed()
    }
}
