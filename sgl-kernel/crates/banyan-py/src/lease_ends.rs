// SPDX-License-Identifier: Apache-2.0

use banyan_shm::word_watch::WordWatch;
use pyo3::prelude::*;

use crate::convert::to_py;
use crate::memory::SharedBytes;
use crate::peers::PyLease;

#[pyclass(frozen, name = "LeaseEnds", module = "banyan._native")]
pub struct PyLeaseEnds {
    watch: WordWatch,
}

#[pymethods]
impl PyLeaseEnds {
    #[new]
    #[pyo3(signature = (word, first = 0))]
    fn new(word: &SharedBytes, first: u32) -> PyResult<Self> {
        Ok(Self {
            watch: WordWatch::start(word.memory.clone(), first).map_err(to_py)?,
        })
    }

    fn expect(&self, leases: Vec<PyRef<'_, PyLease>>) -> u32 {
        let held: Vec<_> = leases.iter().map(|lease| lease.held.same()).collect();
        self.watch.expect(Box::new(move || {
            held.iter().for_each(|lease| lease.release())
        }))
    }
}
