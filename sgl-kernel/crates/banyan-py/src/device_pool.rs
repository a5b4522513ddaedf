// SPDX-License-Identifier: Apache-2.0

use std::sync::Arc;

use banyan_shm::geometry::Extent;
use banyan_shm::neighbour::Neighbour;
use banyan_shm::pool::Pool;
use pyo3::prelude::*;

use crate::convert::to_py;
use crate::memory::SharedBytes;

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

    #[getter]
    fn num_bytes(&self) -> u64 {
        self.pool.num_bytes()
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
    /// Keeps it mapped.
    _neighbour: Arc<Neighbour>,
}

impl PeerMemory {
    /// `None` when the pool cannot be mapped.
    pub fn of(neighbour: Arc<Neighbour>) -> Option<Self> {
        let (start, num_bytes) = neighbour.pool()?;
        let extents = neighbour.extents();
        let place = |extent: &Extent| (extent.base_bytes, extent.stride_bytes);
        Some(Self {
            address: start.addr(),
            num_bytes,
            extents: extents.iter().map(place).collect(),
            _neighbour: neighbour,
        })
    }
}
