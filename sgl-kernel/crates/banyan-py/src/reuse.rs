// SPDX-License-Identifier: Apache-2.0

use banyan_shm::reuse::Reuse;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::convert::words_from;

#[pyclass(name = "Reuse", module = "banyan._native")]
pub struct PyReuse {
    reuse: Reuse,
}

#[pymethods]
impl PyReuse {
    #[new]
    fn new(page_tokens: u64, most_pages: u64, seed: u64) -> PyResult<Self> {
        if page_tokens == 0 {
            return Err(PyValueError::new_err("a page has at least one token"));
        }
        Ok(Self {
            reuse: Reuse::new(page_tokens, most_pages, seed),
        })
    }

    fn asked(&mut self, numbers: &[u8], now_s: u64) -> PyResult<()> {
        self.reuse.asked(&words_from(numbers)?, now_s);
        Ok(())
    }

    fn came(&mut self, numbers: &[u8]) -> PyResult<()> {
        self.reuse.came(&words_from(numbers)?);
        Ok(())
    }

    fn answered(
        &mut self,
        num_tokens: u64,
        num_pages: u64,
        computed: &[u8],
        now_s: u64,
    ) -> PyResult<()> {
        let computed = words_from(computed)?;
        self.reuse.answered(num_tokens, num_pages, &computed, now_s);
        Ok(())
    }

    fn ceiling(&self, num_minutes: u64, now_s: u64) -> f64 {
        self.reuse.ceiling(num_minutes, now_s)
    }

    fn num_tokens(&self, num_minutes: u64, now_s: u64) -> u64 {
        self.reuse.num_tokens(num_minutes, now_s)
    }

    fn found_within(&self, num_pages: f64) -> f64 {
        self.reuse.found_within(num_pages)
    }
}
