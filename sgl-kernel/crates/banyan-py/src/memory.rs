// SPDX-License-Identifier: Apache-2.0

use std::ffi::c_int;
use std::sync::Arc;

use banyan_shm::memory::SharedMemory;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::convert::to_py;

#[pyclass(frozen, module = "banyan._native")]
pub struct SharedBytes {
    pub memory: Arc<SharedMemory>,
}

#[pymethods]
impl SharedBytes {
    #[staticmethod]
    fn create(py: Python<'_>, num_bytes: usize, label: &str) -> PyResult<Self> {
        // Reserving many gigabytes takes seconds.
        let memory = py.detach(|| SharedMemory::create(num_bytes, label));
        Ok(Self {
            memory: Arc::new(memory.map_err(to_py)?),
        })
    }

    #[getter]
    fn num_bytes(&self) -> usize {
        self.memory.len()
    }

    fn __len__(&self) -> usize {
        self.memory.len()
    }

    /// # Safety
    /// Called by the interpreter with a view to fill.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let Ok(len) = ffi::Py_ssize_t::try_from(slf.get().memory.len()) else {
            return Err(PyBufferError::new_err("larger than a buffer can be"));
        };
        let start = slf.get().memory.mapping().start();
        // SAFETY: `view` is the interpreter's to fill; `start` is mapped read-write for `len` bytes as long as the object lives, and the
        // view takes a reference to the object.
        let rc = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start.cast(), len, 0, flags) };
        if rc == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(slf.py()))
        }
    }
}
