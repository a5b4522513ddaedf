// SPDX-License-Identifier: Apache-2.0

use banyan_shm::frame_table::FrameTable;
use banyan_shm::geometry::Geometry;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::convert::{frames_of, frames_to_py, keys_of, namespace_of, to_py, words_from};
use crate::device_pool::AnyPool;
use crate::rank_table::PyRankTable;

#[pyclass(name = "FrameTable", module = "banyan._native")]
pub struct PyFrameTable {
    frame_table: FrameTable,
}

#[pymethods]
impl PyFrameTable {
    #[new]
    #[pyo3(signature = (rank_table, slot, namespace, pool, num_frames, geometry, frame_bytes = None))]
    fn new(
        rank_table: &PyRankTable,
        slot: usize,
        namespace: &[u8],
        pool: AnyPool<'_>,
        num_frames: usize,
        geometry: Vec<Vec<(u64, u64)>>,
        frame_bytes: Option<u64>,
    ) -> PyResult<Self> {
        let frame_table = FrameTable::open(
            rank_table.rank_table.clone(),
            slot,
            namespace_of(namespace)?,
            pool.announced(),
            num_frames,
            &Geometry::new(&geometry, frame_bytes),
        );
        Ok(Self {
            frame_table: frame_table.map_err(to_py)?,
        })
    }

    fn publish(&mut self, frames: &Bound<'_, PyAny>, keys: &Bound<'_, PyList>) -> PyResult<usize> {
        let (frames, keys) = (frames_of(frames)?, keys_of(keys)?);
        self.frame_table.publish(&frames, &keys).map_err(to_py)
    }

    fn retire<'py>(&mut self, frames: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        let free = self
            .frame_table
            .retire(&frames_of(frames)?)
            .map_err(to_py)?;
        frames_to_py(frames.py(), &free)
    }

    fn drain<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        frames_to_py(py, &self.frame_table.drain())
    }

    fn take_touched<'py>(&mut self, frames: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        let touched = self.frame_table.take_touched(&frames_of(frames)?);
        frames_to_py(frames.py(), &touched.map_err(to_py)?)
    }

    fn log_access(&self, pages: &[u8]) -> PyResult<()> {
        self.frame_table.log_access(&words_from(pages)?);
        Ok(())
    }

    fn reset(&mut self) {
        self.frame_table.reset();
    }

    #[getter]
    fn num_published(&self) -> usize {
        self.frame_table.num_published()
    }

    #[getter]
    fn num_quarantined(&self) -> usize {
        self.frame_table.num_quarantined()
    }

    fn close(&mut self) {
        self.frame_table.close();
    }
}
