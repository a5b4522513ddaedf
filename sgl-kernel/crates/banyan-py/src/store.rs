// SPDX-License-Identifier: Apache-2.0

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use banyan_shm::frame::Key;
use banyan_shm::memory::SharedMemory;
use banyan_shm::plan::Arrival;
use banyan_store::growth::Limits;
use banyan_store::pacing::Permit;
use banyan_store::reading::{ReadTicket, Reason};
use banyan_store::shares::Owner;
use banyan_store::state::{Outcome, Verdict};
use banyan_store::store::{EngineChoice, Found, Options, Store};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::convert::{frames_of, hex_of, keys_of, namespace_of, to_py};
use crate::memory::SharedBytes;
use crate::unlocked::Unlocked;

/// The first 64 bits of a page key, signed: how KV events name pages.
fn name_of(key: &Key) -> i64 {
    i64::from_be_bytes(key[0].to_le_bytes())
}

pub fn offsets_of(offsets: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let offset = |offset: i64| {
        u64::try_from(offset)
            .map_err(|_| PyValueError::new_err(format!("offset {offset} is negative")))
    };
    frames_of(offsets)?.into_iter().map(offset).collect()
}

#[pyclass(frozen, name = "Found", module = "banyan._native")]
pub struct PyFound {
    found: Found,
}

#[pymethods]
impl PyFound {
    #[getter]
    fn num_pages(&self) -> usize {
        self.found.hits.len()
    }

    fn after(&self, num_pages: usize) -> Self {
        Self {
            found: self.found.after(num_pages),
        }
    }
}

#[pyclass(frozen, name = "Read", module = "banyan._native")]
pub struct PyRead {
    ticket: Arc<ReadTicket>,
    memory: Arc<SharedMemory>,
    offsets: Vec<u64>,
    /// The store's thread stays while a read wants it, even when the `Store` object is gone.
    _store: Option<Unlocked<Arc<Store>>>,
}

impl PyRead {
    /// A read that somebody else than a store carries out.
    pub fn fed(ticket: Arc<ReadTicket>, memory: Arc<SharedMemory>, offsets: Vec<u64>) -> Self {
        Self {
            ticket,
            memory,
            offsets,
            _store: None,
        }
    }

    /// What a later stage waits for.
    pub fn ticket(&self) -> &Arc<ReadTicket> {
        &self.ticket
    }

    /// Some of its pages, for a copy that follows layer by layer.
    pub fn arrival(&self, positions: &[usize]) -> PyResult<Arrival> {
        Ok(Arrival {
            memory: self.memory.clone(),
            offsets: self.offsets_of(positions)?,
            progress: self.ticket.progress.clone(),
        })
    }

    fn offsets_of(&self, positions: &[usize]) -> PyResult<Vec<u64>> {
        let offset = |position: &usize| {
            self.offsets.get(*position).copied().ok_or_else(|| {
                let num_pages = self.offsets.len();
                PyValueError::new_err(format!("page {position} of a read of {num_pages} pages"))
            })
        };
        positions.iter().map(offset).collect()
    }
}

#[pymethods]
impl PyRead {
    #[getter]
    fn has_ended(&self) -> bool {
        self.ticket.progress.has_ended()
    }

    #[getter]
    fn is_late(&self) -> bool {
        self.ticket.is_late()
    }

    #[pyo3(name = "offsets")]
    fn offsets_in_bytes<'py>(
        &self,
        py: Python<'py>,
        positions: Vec<usize>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let offsets = self.offsets_of(&positions)?;
        let bytes: Vec<u8> = offsets.into_iter().flat_map(u64::to_le_bytes).collect();
        Ok(PyBytes::new(py, &bytes))
    }

    fn failed_pages(&self, py: Python<'_>) -> Vec<usize> {
        py.detach(|| self.ticket.failed_pages())
    }

    fn finish(&self, py: Python<'_>) -> Vec<(usize, &'static str)> {
        let failed = py.detach(|| self.ticket.finish());
        let named = |(page, reason)| (page, reason_name(reason));
        failed.into_iter().map(named).collect()
    }

    #[getter]
    fn bytes_read(&self) -> u64 {
        self.ticket.bytes_read()
    }

    #[getter]
    fn read_s(&self) -> f64 {
        self.ticket.read_time().as_secs_f64()
    }
}

impl Drop for PyRead {
    fn drop(&mut self) {
        // Whoever forgets a read may reuse its frames at once: nothing may be written to them afterwards. Who feeds it may need the
        // interpreter to come to an end.
        Python::attach(|py| py.detach(|| self.ticket.cancel()));
    }
}

fn reason_name(reason: Reason) -> &'static str {
    match reason {
        Reason::Gone => "gone",
        Reason::Checksum => "checksum",
        Reason::Io => "io",
        Reason::Refused => "refused",
        Reason::Late => "late",
    }
}

fn verdict_name(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Queued => "queued",
        Verdict::Present => "present",
        Verdict::Elsewhere => "elsewhere",
        Verdict::Full => "full",
        Verdict::Orphan => "orphan",
    }
}

fn engine_of(engine: &str) -> PyResult<EngineChoice> {
    match engine {
        "auto" => Ok(EngineChoice::Auto),
        "threads" => Ok(EngineChoice::Threads),
        _ => Err(PyValueError::new_err(format!(
            "there is no engine {engine:?}: choose auto or threads"
        ))),
    }
}

#[pyclass(frozen, name = "Store", module = "banyan._native")]
pub struct PyStore {
    store: Unlocked<Arc<Store>>,
}

#[pymethods]
impl PyStore {
    #[staticmethod]
    #[pyo3(signature = (paths, namespace, layer_bytes, *, quota_bytes, share_bytes=None, floor_bytes=1 << 30, segment_bytes=None,
                        backlog_bytes=256 << 20, engine="auto", read_bytes_per_s=None, stall_s=10.0))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments of one Python call"
    )]
    fn open(
        py: Python<'_>,
        paths: Vec<PathBuf>,
        namespace: &[u8],
        layer_bytes: Vec<u64>,
        quota_bytes: u64,
        share_bytes: Option<u64>,
        floor_bytes: u64,
        segment_bytes: Option<u64>,
        backlog_bytes: u64,
        engine: &str,
        read_bytes_per_s: Option<u64>,
        stall_s: f64,
    ) -> PyResult<Self> {
        let stall_after = Duration::try_from_secs_f64(stall_s)
            .map_err(|cause| PyValueError::new_err(format!("stall_s={stall_s}: {cause}")))?;
        let options = Options {
            paths,
            namespace: namespace_of(namespace)?,
            layer_bytes,
            limits: Limits {
                quota_bytes,
                share_bytes: share_bytes.unwrap_or(quota_bytes),
                floor_bytes,
            },
            segment_bytes,
            backlog_bytes,
            engine: engine_of(engine)?,
            read_bytes_per_s,
            stall_after,
        };
        let store = py.detach(|| Store::open(&options)).map_err(to_py)?;
        Ok(Self {
            store: Unlocked::new(Arc::new(store)),
        })
    }

    fn beside(
        &self,
        py: Python<'_>,
        namespace: &[u8],
        layer_bytes: Vec<u64>,
        num_stores: u64,
    ) -> PyResult<Self> {
        let namespace = namespace_of(namespace)?;
        let beside = || self.store.beside(namespace, layer_bytes, num_stores);
        Ok(Self {
            store: Unlocked::new(Arc::new(py.detach(beside).map_err(to_py)?)),
        })
    }

    #[getter]
    fn engine(&self) -> &str {
        self.store.engine()
    }

    #[getter]
    fn version(&self) -> u64 {
        self.store.version()
    }

    fn lookup(&self, keys: &Bound<'_, PyList>) -> PyResult<PyFound> {
        let found = self.store.lookup(&keys_of(keys)?);
        Ok(PyFound { found })
    }

    fn register(&self, memory: &SharedBytes) -> PyResult<()> {
        self.store.register(&memory.memory).map_err(to_py)
    }

    #[pyo3(signature = (found, num_pages, memory, offsets, *, layers_per_step=1))]
    fn read(
        &self,
        found: &PyFound,
        num_pages: usize,
        memory: &SharedBytes,
        offsets: &Bound<'_, PyAny>,
        layers_per_step: usize,
    ) -> PyResult<PyRead> {
        let offsets = offsets_of(offsets)?;
        let found = &found.found;
        let read = self
            .store
            .read(found, num_pages, &memory.memory, &offsets, layers_per_step);
        Ok(PyRead {
            ticket: read.map_err(to_py)?,
            memory: memory.memory.clone(),
            offsets: offsets[..num_pages].to_vec(),
            _store: Some(Unlocked::new(Arc::clone(&self.store))),
        })
    }

    fn put(
        &self,
        keys: &Bound<'_, PyList>,
        parent: Option<Bound<'_, PyAny>>,
        memory: &SharedBytes,
        offsets: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<&'static str>> {
        self.put_for(0, keys, parent, memory, offsets)
    }

    fn put_for(
        &self,
        owner: usize,
        keys: &Bound<'_, PyList>,
        parent: Option<Bound<'_, PyAny>>,
        memory: &SharedBytes,
        offsets: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<&'static str>> {
        let parent = match parent {
            Some(parent) => keys_of(&PyList::new(keys.py(), [parent])?)?.pop(),
            None => None,
        };
        let (keys, offsets) = (keys_of(keys)?, offsets_of(offsets)?);
        let owner = Owner::of(owner);
        let verdicts = self
            .store
            .put_for(owner, &keys, parent, &memory.memory, &offsets);
        Ok(verdicts
            .map_err(to_py)?
            .into_iter()
            .map(verdict_name)
            .collect())
    }

    fn share_out(&self, share: f64) {
        self.store.share_out(share);
    }

    fn adopt(&self, owner: usize, keys: &Bound<'_, PyList>) -> PyResult<()> {
        self.store.adopt(Owner::of(owner), &keys_of(keys)?);
        Ok(())
    }

    fn completed(&self) -> Vec<(String, &'static str)> {
        let name = |outcome| match outcome {
            Outcome::Stored => "stored",
            Outcome::Failed => "failed",
        };
        let completed = self.store.completed().into_iter();
        completed
            .map(|(key, outcome)| (hex_of(&key), name(outcome)))
            .collect()
    }

    #[getter]
    fn identity(&self) -> PyResult<String> {
        let identity = self.store.identity().map_err(to_py)?;
        Ok(format!("{identity:016x}"))
    }

    fn moved(&self, most: usize) -> (Vec<i64>, Vec<i64>) {
        let moved = self.store.moved(most);
        let names = |keys: &[Key]| keys.iter().map(name_of).collect();
        (names(&moved.stored), names(&moved.gone))
    }

    fn own_pages(&self, first: u32, count: usize) -> Option<Vec<i64>> {
        let keys = self.store.own_keys(first, count)?;
        Some(keys.iter().map(name_of).collect())
    }

    #[pyo3(signature = (within_s = None))]
    fn sync(&self, py: Python<'_>, within_s: Option<f64>) -> PyResult<u64> {
        let patience = within_s.map(Duration::try_from_secs_f64).transpose();
        let patience = patience
            .map_err(|cause| PyValueError::new_err(format!("within_s={within_s:?}: {cause}")))?;
        let sync = || match patience {
            Some(patience) => self.store.sync_within(patience),
            None => self.store.sync(),
        };
        py.detach(sync).map_err(to_py)
    }

    fn pause_writes(&self) {
        self.store.set_permit(Permit::Paused);
    }

    fn open_writes(&self) {
        self.store.set_permit(Permit::Open);
    }

    fn invalidate(&self, py: Python<'_>, namespace: &[u8]) -> PyResult<()> {
        let namespace = namespace_of(namespace)?;
        py.detach(|| self.store.invalidate(namespace))
            .map_err(to_py)
    }

    fn evict(&self, num_pages: usize) -> PyResult<usize> {
        self.store.evict(num_pages).map_err(to_py)
    }

    fn keep(&self, keys: &Bound<'_, PyList>) -> PyResult<()> {
        self.store.keep(&keys_of(keys)?);
        Ok(())
    }

    fn let_go(&self, keys: &Bound<'_, PyList>) -> PyResult<()> {
        self.store.let_go(&keys_of(keys)?);
        Ok(())
    }

    fn clear(&self, py: Python<'_>) -> PyResult<usize> {
        py.detach(|| self.store.clear()).map_err(to_py)
    }

    fn stats(&self) -> std::collections::BTreeMap<&'static str, u64> {
        self.store.stats().into_iter().collect()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.store.close());
    }
}
