// SPDX-License-Identifier: Apache-2.0

use std::ffi::c_int;
use std::sync::Arc;

use banyan_shm::geometry::Extent;
use banyan_shm::peer_mapping::PeerMapping;
use banyan_shm::pool::Pool;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::convert::to_py;
use crate::memory::{Named, SharedBytes};

#[pyclass(frozen, module = "banyan._native")]
pub struct DevicePool {
    pool: Pool,
}

#[pymethods]
impl DevicePool {
    #[new]
    fn new(description: &[u8], num_bytes: u64) -> PyResult<Self> {
        Ok(Self {
            pool: Pool::described(description, num_bytes).map_err(to_py)?,
        })
    }
}

/// What a rank may announce as its pool.
#[derive(FromPyObject)]
pub enum AnyPool<'py> {
    Shared(PyRef<'py, SharedBytes>),
    Device(PyRef<'py, DevicePool>),
}

impl AnyPool<'_> {
    pub fn announced(&self) -> Pool {
        match self {
            Self::Shared(bytes) => Pool::Mapped(bytes.memory.clone()),
            Self::Device(device) => device.pool.clone(),
        }
    }
}

/// A peer's mapped pool, for a device that reads it by address.
#[pyclass(frozen, module = "banyan._native")]
pub struct PeerMemory {
    #[pyo3(get)]
    address: usize,
    #[pyo3(get)]
    num_bytes: usize,
    #[pyo3(get)]
    extents: Vec<(u64, u64)>,
    #[pyo3(get)]
    identity: (u64, u64),
    #[pyo3(get)]
    path: String,
    /// Keeps it mapped.
    _peer_mapping: Arc<PeerMapping>,
}

impl PeerMemory {
    /// `None` when the pool cannot be mapped.
    pub fn of(peer_mapping: Arc<PeerMapping>) -> Option<Self> {
        let (start, num_bytes) = peer_mapping.pool()?;
        let extents = peer_mapping.extents();
        let place = |extent: &Extent| (extent.base_bytes, extent.stride_bytes);
        Some(Self {
            address: start.expose_provenance(),
            num_bytes,
            identity: peer_mapping.pool_identity()?,
            path: peer_mapping.pool_path()?.to_owned(),
            extents: extents.iter().map(place).collect(),
            _peer_mapping: peer_mapping,
        })
    }

    fn start(&self) -> *const u8 {
        std::ptr::with_exposed_provenance(self.address)
    }
}

#[pymethods]
impl PeerMemory {
    fn checksums(
        &self,
        py: Python<'_>,
        namespace: &[u8],
        keys: &Bound<'_, PyList>,
        offsets: &Bound<'_, PyAny>,
        page_bytes: usize,
        layer: usize,
    ) -> PyResult<Vec<u64>> {
        let named = Named::new(namespace, keys, offsets, page_bytes, self.num_bytes)?;
        // SAFETY: mapped as long as `self` lives; the caller has a lease on the frames, so nobody writes to them.
        Ok(unsafe { named.checksums(py, self.start(), layer) })
    }

    /// # Safety
    /// Called by the interpreter with a view to fill.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let memory = slf.get();
        let Ok(len) = ffi::Py_ssize_t::try_from(memory.num_bytes) else {
            return Err(PyBufferError::new_err("larger than a buffer can be"));
        };
        let start = memory.start().cast_mut().cast();
        // SAFETY: `view` is the interpreter's to fill; it is read-only, mapped as long as the object lives, and takes a reference to it.
        let rc = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len, 1, flags) };
        if rc == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(slf.py()))
        }
    }
}
