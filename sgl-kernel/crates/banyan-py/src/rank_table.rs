// SPDX-License-Identifier: Apache-2.0

use std::sync::Arc;

use banyan_shm::peer_mapping::PeerMapping;
use banyan_shm::rank_table::{Member, RankTable};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::convert::{hex_of, to_py};

#[pyclass(frozen, name = "RankTable", module = "banyan._native")]
pub struct PyRankTable {
    pub rank_table: Arc<RankTable>,
}

#[pymethods]
impl PyRankTable {
    #[staticmethod]
    fn create(num_slots: usize) -> PyResult<Self> {
        let rank_table = RankTable::create(num_slots).map_err(to_py)?;
        Ok(Self {
            rank_table: Arc::new(rank_table),
        })
    }

    #[staticmethod]
    fn open(path: &str) -> PyResult<Self> {
        let rank_table = RankTable::open(path).map_err(to_py)?;
        Ok(Self {
            rank_table: Arc::new(rank_table),
        })
    }

    #[getter]
    fn path(&self) -> String {
        self.rank_table.path()
    }

    #[getter]
    fn num_slots(&self) -> usize {
        self.rank_table.num_slots()
    }

    #[getter]
    fn page_tokens(&self) -> u64 {
        self.rank_table.page_tokens()
    }

    fn agree_on_page_tokens(&self, page_tokens: u64) -> PyResult<()> {
        self.rank_table
            .agree_on_page_tokens(page_tokens)
            .map_err(to_py)
    }

    fn count_failure(&self) {
        self.rank_table.count_failure();
    }

    #[getter]
    fn num_failures(&self) -> u64 {
        self.rank_table.num_failures()
    }

    fn set_num_silent(&self, num_ranks: u64) {
        self.rank_table.set_num_silent(num_ranks);
    }

    #[getter]
    fn num_silent(&self) -> u64 {
        self.rank_table.num_silent()
    }

    fn set_reading(&self, slot: usize, num_pages: u64) -> PyResult<()> {
        self.rank_table.set_reading(slot, num_pages).map_err(to_py)
    }

    fn reading(&self, slot: usize) -> PyResult<u64> {
        self.rank_table.reading(slot).map_err(to_py)
    }

    fn set_read_rate(&self, slot: usize, pages_per_s: u64) -> PyResult<()> {
        self.rank_table
            .set_read_rate(slot, pages_per_s)
            .map_err(to_py)
    }

    fn read_rate(&self, slot: usize) -> PyResult<u64> {
        self.rank_table.read_rate(slot).map_err(to_py)
    }

    fn epochs(&self) -> Vec<u64> {
        (0..self.rank_table.num_slots())
            .map(|slot| self.rank_table.epoch(slot))
            .collect()
    }

    fn members<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let mut members = Vec::new();
        for slot in 0..self.rank_table.num_slots() {
            if let Some(member) = self.rank_table.member(slot) {
                members.push(describe(py, slot, &member)?);
            }
        }
        Ok(members)
    }
}

fn describe<'py>(py: Python<'py>, slot: usize, member: &Member) -> PyResult<Bound<'py, PyDict>> {
    // A dead rank's pages are nobody's: its frame table is not even opened.
    let is_alive = member.identity.is_alive();
    let frame_table = match is_alive {
        true => PeerMapping::look(slot, member).ok(),
        false => None,
    };
    let entry = PyDict::new(py);
    entry.set_item("slot", slot)?;
    entry.set_item("pid", member.identity.pid())?;
    entry.set_item("alive", is_alive)?;
    entry.set_item("namespace", hex_of(&member.namespace))?;
    entry.set_item("num_frames", member.num_frames)?;
    entry.set_item(
        "num_published",
        frame_table.map_or(0, |frame_table| frame_table.num_published()),
    )?;
    Ok(entry)
}
