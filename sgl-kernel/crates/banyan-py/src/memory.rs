// SPDX-License-Identifier: Apache-2.0

use std::ffi::c_int;
use std::path::PathBuf;
use std::sync::Arc;

use banyan_shm::available;
use banyan_shm::frame::Key;
use banyan_shm::kept::Content;
use banyan_shm::memory::SharedMemory;
use banyan_store::format::{Identity, Namespace};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::convert::{frames_of, keys_of, namespace_of, to_py};

#[pyfunction]
pub fn copy_form() -> &'static str {
    banyan_shm::gather::form()
}

#[pyfunction]
pub fn available_bytes() -> Option<u64> {
    available::available_bytes()
}

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

    #[staticmethod]
    fn reserve(num_bytes: usize, label: &str) -> PyResult<Self> {
        let memory = SharedMemory::reserve(num_bytes, label).map_err(to_py)?;
        Ok(Self {
            memory: Arc::new(memory),
        })
    }

    fn extended(&self, py: Python<'_>, num_bytes: usize, label: &str) -> PyResult<Self> {
        let memory = py.detach(|| self.memory.extended(num_bytes, label));
        Ok(Self {
            memory: Arc::new(memory.map_err(to_py)?),
        })
    }

    fn back(&self, py: Python<'_>, offset: usize, num_bytes: usize) -> PyResult<()> {
        py.detach(|| self.memory.back(offset, num_bytes))
            .map_err(to_py)
    }

    #[staticmethod]
    fn keep(py: Python<'_>, path: PathBuf, num_bytes: usize) -> PyResult<(Self, bool)> {
        let kept = py.detach(|| SharedMemory::keep(&path, num_bytes));
        let (memory, content) = kept.map_err(to_py)?;
        let memory = Arc::new(memory);
        Ok((Self { memory }, content == Content::Left))
    }

    fn forget(&self, py: Python<'_>, offset: usize, num_bytes: usize) -> PyResult<()> {
        py.detach(|| self.memory.forget(offset, num_bytes))
            .map_err(to_py)
    }

    /// The checksums of pages, bound to their names.
    #[pyo3(signature = (namespace, keys, offsets, page_bytes, layer = 0))]
    fn checksums(
        &self,
        py: Python<'_>,
        namespace: &[u8],
        keys: &Bound<'_, PyList>,
        offsets: &Bound<'_, PyAny>,
        page_bytes: usize,
        layer: usize,
    ) -> PyResult<Vec<u64>> {
        let named = Named::new(namespace, keys, offsets, page_bytes, self.memory.len())?;
        let start = self.memory.mapping().start().cast_const();
        // SAFETY: mapped for its length as long as `self` lives; the caller holds the frames, so nobody writes to them.
        Ok(unsafe { named.checksums(py, start, layer) })
    }

    #[getter]
    fn num_bytes(&self) -> usize {
        self.memory.len()
    }

    #[getter]
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.memory.fd())
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

/// Pages, or parts of them, in some memory, with their names.
pub struct Named {
    namespace: Namespace,
    keys: Vec<Key>,
    offsets: Vec<i64>,
    num_bytes: usize,
}

impl Named {
    /// Refuses what does not lie in memory of `len` bytes.
    pub fn new(
        namespace: &[u8],
        keys: &Bound<'_, PyList>,
        offsets: &Bound<'_, PyAny>,
        num_bytes: usize,
        len: usize,
    ) -> PyResult<Self> {
        let namespace = namespace_of(namespace)?;
        let (keys, offsets) = (keys_of(keys)?, frames_of(offsets)?);
        let inside = |offset: &i64| {
            usize::try_from(*offset)
                .ok()
                .and_then(|start| start.checked_add(num_bytes))
                .is_some_and(|end| end <= len)
        };
        if keys.len() != offsets.len() || !offsets.iter().all(inside) {
            let (pages, places) = (keys.len(), offsets.len());
            return Err(PyValueError::new_err(format!(
                "{pages} keys and {places} offsets of pages of {num_bytes} bytes in {len}"
            )));
        }
        Ok(Self {
            namespace,
            keys,
            offsets,
            num_bytes,
        })
    }

    /// # Safety
    /// `start` is mapped for the length that was checked, and nobody writes to these pages meanwhile.
    pub unsafe fn checksums(&self, py: Python<'_>, start: *const u8, layer: usize) -> Vec<u64> {
        let address = start.expose_provenance();
        let checksum = |(key, offset): (&Key, &i64)| {
            let identity = Identity {
                key: *key,
                namespace: self.namespace,
                generation: 0,
            };
            let first = std::ptr::with_exposed_provenance::<u8>(address + *offset as usize);
            // SAFETY: inside the mapping, by `new` and the caller's promise.
            let bytes = unsafe { std::slice::from_raw_parts(first, self.num_bytes) };
            identity.checksum(layer, bytes)
        };
        py.detach(|| self.keys.iter().zip(&self.offsets).map(checksum).collect())
    }
}
