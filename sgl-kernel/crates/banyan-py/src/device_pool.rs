// SPDX-License-Identifier: Apache-2.0

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
