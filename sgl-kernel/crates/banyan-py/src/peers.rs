// SPDX-License-Identifier: Apache-2.0

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use banyan_shm::copy_thread::CopyThread;
use banyan_shm::geometry::Geometry;
use banyan_shm::peers::{Lease, Match, Peers, Run};
use banyan_shm::plan::{Load, Plan, Source};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::convert::{
    ends_of, frames_to_py, keys_of, namespace_of, targets_of, to_py, words_to_py,
};
use crate::copy::PyCopy;
use crate::device_pool::{AnyPool, PeerMemory};
use crate::page_keys::PyPageKeys;
use crate::prompt::PyPromptTokens;
use crate::rank_table::PyRankTable;
use crate::store::PyRead;
use crate::unlocked::Unlocked;

#[pyclass(frozen, name = "Peers", module = "banyan._native")]
pub struct PyPeers {
    peers: Arc<Peers>,
    copy_thread: Unlocked<Mutex<Option<Arc<CopyThread>>>>,
}

#[pymethods]
impl PyPeers {
    #[new]
    #[pyo3(signature = (rank_table, slot, reader_bit, namespace, geometry, pool, frame_bytes = None))]
    #[allow(clippy::too_many_arguments)] // one for each that Python names
    fn new(
        rank_table: &PyRankTable,
        slot: Option<usize>,
        reader_bit: u32,
        namespace: &[u8],
        geometry: Vec<Vec<(u64, u64)>>,
        pool: Option<AnyPool<'_>>,
        frame_bytes: Option<u64>,
    ) -> PyResult<Self> {
        let rank_table = rank_table.rank_table.clone();
        let namespace = namespace_of(namespace)?;
        let peers = match pool {
            Some(pool) => {
                let geometry = Geometry::new(&geometry, frame_bytes);
                let pool = pool.announced();
                Peers::of_rank(rank_table, slot, reader_bit, namespace, geometry, pool)
            }
            None => Peers::of_onlooker(rank_table, slot, namespace),
        };
        Ok(Self {
            peers: Arc::new(peers.map_err(to_py)?),
            copy_thread: Unlocked::new(Mutex::new(None)),
        })
    }

    #[pyo3(signature = (keys, slots = None))]
    fn lookup(&self, keys: &Bound<'_, PyList>, slots: Option<Vec<usize>>) -> PyResult<PyMatch> {
        Ok(PyMatch {
            found: self.peers.lookup(&keys_of(keys)?, slots.as_deref()),
            peers: Arc::downgrade(&self.peers),
        })
    }

    fn holders(&self, keys: &Bound<'_, PyList>, slots: Vec<usize>) -> PyResult<Vec<Option<usize>>> {
        Ok(self.peers.holders(&keys_of(keys)?, &slots))
    }

    fn prefix_lens(&self, keys: &Bound<'_, PyList>) -> PyResult<Vec<usize>> {
        Ok(self.peers.prefix_lens(&keys_of(keys)?))
    }

    #[pyo3(signature = (page_keys, prompt, max_hashed_pages))]
    fn prefix_lens_of(
        &self,
        page_keys: &PyPageKeys,
        prompt: &PyPromptTokens,
        max_hashed_pages: usize,
    ) -> Vec<usize> {
        let mut page_keys = page_keys.lock();
        self.peers
            .prefix_lens_of(&mut page_keys, &prompt.prompt, max_hashed_pages)
    }

    #[pyo3(signature = (r#match, keys))]
    fn lease(&self, r#match: &PyMatch, keys: &Bound<'_, PyList>) -> PyResult<Option<PyLease>> {
        if !self.is_same(&r#match.peers) {
            return Err(PyValueError::new_err("a match of another Peers object"));
        }
        let ends = ends_of(keys)?;
        let lease = self.peers.lease(&r#match.found, keys.len(), ends);
        Ok(lease.map_err(to_py)?.map(|lease| PyLease {
            num_pages: lease.num_pages(),
            runs: describe(lease.runs()),
            held: Held::of(lease),
            peers: Arc::downgrade(&self.peers),
        }))
    }

    #[pyo3(signature = (r#match))]
    fn touch(&self, r#match: &PyMatch) {
        self.peers.touch(&r#match.found);
    }

    fn read_access_logs<'py>(
        &self,
        py: Python<'py>,
        slots: Vec<usize>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let prompts = self.peers.read_access_logs(&slots);
        prompts
            .into_iter()
            .map(|words| words_to_py(py, words.into_iter()))
            .collect()
    }

    fn version(&self) -> u64 {
        self.peers.version()
    }

    fn present(&self) -> Vec<(usize, u64)> {
        self.peers.present()
    }

    fn description<'py>(
        &self,
        py: Python<'py>,
        slot: usize,
        epoch: u64,
    ) -> Option<Bound<'py, PyBytes>> {
        let description = self.peers.description(slot, epoch)?;
        Some(PyBytes::new(py, &description))
    }

    fn mapping(&self, slot: usize, epoch: u64) -> Option<PeerMemory> {
        PeerMemory::of(self.peers.peer_mapping(slot, epoch)?)
    }

    #[pyo3(signature = (loads, arrivals = Vec::new()))]
    fn start_copy(
        &self,
        loads: Vec<(PyRef<'_, PyLease>, Bound<'_, PyAny>)>,
        arrivals: Vec<(PyRef<'_, PyRead>, Vec<usize>, Bound<'_, PyAny>)>,
    ) -> PyResult<PyCopy> {
        let Some(home) = self.peers.home() else {
            return Err(PyValueError::new_err(
                "only a rank with a pool can copy pages",
            ));
        };
        let mut wanted = Vec::with_capacity(loads.len());
        for (lease, frames) in &loads {
            if !self.is_same(&lease.peers) {
                return Err(PyValueError::new_err("a lease of another Peers object"));
            }
            let Some(taken) = lease.held.take() else {
                return Err(PyValueError::new_err("a lease that was released before"));
            };
            wanted.push(Load {
                source: Source::Leased(taken),
                frames: targets_of(frames)?,
            });
        }
        for (read, positions, frames) in &arrivals {
            wanted.push(Load {
                source: Source::Arriving(read.arrival(positions)?),
                frames: targets_of(frames)?,
            });
        }
        let plan = Plan::new(home.clone(), wanted).map_err(to_py)?;
        let copy_thread = self.copy_thread()?;
        Ok(PyCopy::new(copy_thread.send(Box::new(plan)), copy_thread))
    }
}

impl PyPeers {
    fn is_same(&self, peers: &Weak<Peers>) -> bool {
        Weak::as_ptr(peers) == Arc::as_ptr(&self.peers)
    }

    fn copy_thread(&self) -> PyResult<Arc<CopyThread>> {
        let mut copy_thread = self
            .copy_thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(copy_thread) = &*copy_thread {
            return Ok(copy_thread.clone());
        }
        let started = Arc::new(CopyThread::start().map_err(to_py)?);
        Ok(copy_thread.insert(started).clone())
    }
}

#[pyclass(frozen, name = "Match", module = "banyan._native")]
pub struct PyMatch {
    found: Match,
    /// Not kept: the reader bit is free once `Peers` and what it has leased are gone.
    peers: Weak<Peers>,
}

#[pymethods]
impl PyMatch {
    #[getter]
    fn num_pages(&self) -> usize {
        self.found.num_pages()
    }

    #[getter]
    fn runs(&self) -> Vec<(usize, usize)> {
        describe(&self.found.runs)
    }
}

/// The caller's hold on a lease, until it is released or a copy takes it over: what the caller waits for may be another
/// rank that waits for these pages.
pub struct Held(Arc<Mutex<Option<Lease>>>);

impl Held {
    fn of(lease: Lease) -> Self {
        Self(Arc::new(Mutex::new(Some(lease))))
    }

    fn take(&self) -> Option<Lease> {
        self.lock().take()
    }

    /// The same hold, kept by another.
    pub fn same(&self) -> Self {
        Self(self.0.clone())
    }

    pub fn release(&self) {
        drop(self.take());
    }

    fn lock(&self) -> MutexGuard<'_, Option<Lease>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pyclass(frozen, name = "Lease", module = "banyan._native")]
pub struct PyLease {
    #[pyo3(get)]
    num_pages: usize,
    #[pyo3(get)]
    runs: Vec<(usize, usize)>,
    pub held: Held,
    peers: Weak<Peers>,
}

#[pymethods]
impl PyLease {
    fn sources<'py>(&self, py: Python<'py>) -> PyResult<Vec<(usize, u64, Bound<'py, PyBytes>)>> {
        let held = self.held.lock();
        let Some(lease) = &*held else {
            return Err(PyValueError::new_err("a lease that was released before"));
        };
        let source = |run: &Run| {
            let frames: Vec<_> = run.pages.iter().map(|page| page.frame).collect();
            let frames = frames_to_py(py, &frames)?;
            Ok((run.peer_mapping.slot, run.peer_mapping.epoch, frames))
        };
        lease.runs().iter().map(source).collect()
    }

    fn release(&self) {
        self.held.release();
    }
}

fn describe(runs: &[Run]) -> Vec<(usize, usize)> {
    let run = |run: &Run| (run.peer_mapping.slot, run.pages.len());
    runs.iter().map(run).collect()
}
