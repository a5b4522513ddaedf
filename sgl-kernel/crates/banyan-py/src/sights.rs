// SPDX-License-Identifier: Apache-2.0

use banyan_shm::sights::{Sights, number_of};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::convert::{key_of, keys_of, words_of, words_to_py};

#[pyclass(name = "Sights", module = "banyan._native")]
pub struct PySights {
    sights: Sights,
}

#[pymethods]
impl PySights {
    #[new]
    fn new(num_frames: usize) -> Self {
        Self {
            sights: Sights::new(num_frames),
        }
    }

    #[getter]
    fn num_rows(&self) -> usize {
        self.sights.num_rows()
    }

    fn last(&self, number: i64) -> (u64, u64) {
        let sight = self.sights.last(number.cast_unsigned());
        (sight.asked_at, sight.num_sights)
    }

    fn num_known(&self, numbers: &Bound<'_, PyAny>) -> PyResult<usize> {
        Ok(self.sights.num_known(&words_of(numbers)?))
    }

    fn first(&mut self, numbers: &Bound<'_, PyAny>, now: u64) -> PyResult<()> {
        self.sights.first(&words_of(numbers)?, now);
        Ok(())
    }

    fn again(&mut self, numbers: &Bound<'_, PyAny>, now: u64) -> PyResult<()> {
        self.sights.again(&words_of(numbers)?, now);
        Ok(())
    }
}

#[pyfunction]
pub fn page_number(key: &Bound<'_, PyAny>) -> PyResult<i64> {
    Ok(number_of(&key_of(key, 0)?).cast_signed())
}

#[pyfunction]
pub fn page_numbers<'py>(keys: &Bound<'py, PyList>) -> PyResult<Bound<'py, PyBytes>> {
    words_to_py(keys.py(), keys_of(keys)?.iter().map(number_of))
}
