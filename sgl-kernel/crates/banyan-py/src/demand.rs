// SPDX-License-Identifier: Apache-2.0

use banyan_shm::access_history::number_of;
use banyan_shm::demand::Demand;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::convert::{key_of, keys_of, words_from, words_to_py};

#[pyclass(name = "Demand", module = "banyan._native")]
pub struct PyDemand {
    demand: Demand,
}

#[pymethods]
impl PyDemand {
    #[new]
    fn new(num_frames: usize) -> PyResult<Self> {
        if num_frames == 0 {
            return Err(PyValueError::new_err("a pool has at least one frame"));
        }
        Ok(Self {
            demand: Demand::new(num_frames),
        })
    }

    #[getter]
    fn powers(&self) -> (f64, f64) {
        let model = self.demand.hazard_model();
        (model.age_power, model.frequency_power)
    }

    fn asked(&mut self, numbers: &[u8], prompt: &str) -> PyResult<usize> {
        Ok(self.demand.asked(words_from(numbers)?, prompt))
    }

    fn weights_changed(&mut self) {
        self.demand.weights_changed();
    }

    fn peer_access(&mut self, numbers: &[u8]) -> PyResult<()> {
        self.demand.peer_access(&words_from(numbers)?);
        Ok(())
    }

    fn served(&mut self, prompt: &str) {
        self.demand.served(prompt);
    }

    fn came(&mut self, numbers: &[u8]) -> PyResult<()> {
        self.demand.came(&words_from(numbers)?);
        Ok(())
    }

    fn reuse_probabilities(&self, numbers: &[u8]) -> PyResult<Vec<f64>> {
        let numbers = words_from(numbers)?;
        Ok(numbers
            .into_iter()
            .map(|number| self.demand.chance(number))
            .collect())
    }

    fn age_and_accesses(&self, number: i64) -> (u64, u64) {
        self.demand.age_and_accesses(number.cast_unsigned())
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
