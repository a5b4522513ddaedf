// SPDX-License-Identifier: Apache-2.0

use std::sync::Arc;

use banyan_shm::copy_thread::{CopyThread, Parcel};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::unlocked::Unlocked;

#[pyclass(frozen, name = "Copy", module = "banyan._native")]
pub struct PyCopy {
    parcel: Arc<Parcel>,
    /// The thread stays while a copy wants it, even when `Peers` is gone.
    _copy_thread: Unlocked<Arc<CopyThread>>,
}

impl PyCopy {
    pub fn new(parcel: Arc<Parcel>, copy_thread: Arc<CopyThread>) -> Self {
        Self {
            parcel,
            _copy_thread: Unlocked::new(copy_thread),
        }
    }
}

#[pymethods]
impl PyCopy {
    fn wait_layer(&self, py: Python<'_>, layer: usize) -> PyResult<f64> {
        if layer >= self.parcel.num_layers() {
            return Err(PyValueError::new_err(format!(
                "layer {layer} of a copy of {} layers",
                self.parcel.num_layers()
            )));
        }
        if self.parcel.layers_done() > layer {
            return Ok(0.0);
        }
        Ok(py.detach(|| self.parcel.wait_layer(layer)).as_secs_f64())
    }

    fn finish(&self, py: Python<'_>) -> bool {
        py.detach(|| self.parcel.wait_end())
    }

    #[getter]
    fn bytes_fetched(&self) -> u64 {
        self.parcel.moved().fetched_bytes
    }

    #[getter]
    fn bytes_copied(&self) -> u64 {
        self.parcel.moved().copied_bytes
    }

    #[getter]
    fn copy_s(&self) -> f64 {
        self.parcel.copy_time().as_secs_f64()
    }

    fn ages_s(&self) -> Vec<f64> {
        let ages = self.parcel.ages();
        ages.iter().map(|age| age.as_secs_f64()).collect()
    }

    #[getter]
    fn wait_s(&self) -> f64 {
        self.parcel.wait_time().as_secs_f64()
    }

    #[getter]
    fn has_ended(&self) -> bool {
        self.parcel.has_ended()
    }
}

impl Drop for PyCopy {
    fn drop(&mut self) {
        // Whoever forgets a copy may reuse its frames at once: nothing may be written to them afterwards. What the copy waits for may
        // need the interpreter to come to an end.
        Python::attach(|py| py.detach(|| self.parcel.cancel()));
    }
}
