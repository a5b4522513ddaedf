// SPDX-License-Identifier: Apache-2.0

use std::sync::Arc;

use banyan_shm::memory::SharedMemory;
use banyan_store::reading;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::memory::SharedBytes;
use crate::store::{PyRead, offsets_of};

#[pyclass(frozen, name = "Feed", module = "banyan._native")]
pub struct PyFeed {
    feed: reading::Feed,
    memory: Arc<SharedMemory>,
    offsets: Vec<u64>,
}

#[pymethods]
impl PyFeed {
    #[new]
    fn new(
        memory: &SharedBytes,
        offsets: &Bound<'_, PyAny>,
        page_bytes: u64,
        num_layers: usize,
    ) -> PyResult<Self> {
        let offsets = offsets_of(offsets)?;
        let len = memory.memory.len() as u64;
        let inside = |offset: &u64| offset.checked_add(page_bytes).is_some_and(|end| end <= len);
        if num_layers == 0 || !offsets.iter().all(inside) {
            return Err(PyValueError::new_err(format!(
                "{num_layers} layers, pages of {page_bytes} bytes in {len}"
            )));
        }
        Ok(Self {
            feed: reading::Feed::new(offsets.len(), num_layers),
            memory: memory.memory.clone(),
            offsets,
        })
    }

    fn read(&self) -> PyRead {
        PyRead::fed(
            self.feed.ticket.clone(),
            self.memory.clone(),
            self.offsets.clone(),
        )
    }

    #[getter]
    fn is_wanted(&self) -> bool {
        self.feed.is_wanted()
    }

    #[allow(clippy::needless_pass_by_value)] // as Python gives it
    fn land(&self, py: Python<'_>, num_bytes: u64, failed: Vec<usize>) {
        py.detach(|| self.feed.land(num_bytes, &failed));
    }

    fn be_late(&self) {
        self.feed.be_late();
    }

    fn end(&self, py: Python<'_>) {
        py.detach(|| self.feed.end());
    }
}
