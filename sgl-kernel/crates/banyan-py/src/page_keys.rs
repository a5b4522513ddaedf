// SPDX-License-Identifier: Apache-2.0

use std::sync::{Mutex, MutexGuard, PoisonError};

use banyan_shm::frame::Key;
use banyan_shm::page_keys::{CHUNK_PAGES, PageKeys, key_of};
use banyan_shm::words::Tokens;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::convert::{key_to_py, kind, to_py};

#[pyclass(frozen, name = "PageKeys", module = "banyan._native")]
pub struct PyPageKeys {
    page_keys: Mutex<PageKeys>,
}

#[pymethods]
impl PyPageKeys {
    #[classattr]
    const CHUNK_PAGES: usize = CHUNK_PAGES;

    #[new]
    #[pyo3(signature = (page_tokens, num_chunks, tokens_ahead = 0))]
    fn new(page_tokens: usize, num_chunks: usize, tokens_ahead: usize) -> PyResult<Self> {
        let page_keys = PageKeys::new(page_tokens, num_chunks, tokens_ahead).map_err(to_py)?;
        Ok(Self {
            page_keys: Mutex::new(page_keys),
        })
    }

    #[pyo3(signature = (prior, tokens))]
    fn of<'py>(
        &self,
        prior: Option<&[u8]>,
        tokens: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Bound<'py, PyString>>> {
        let py = tokens.py();
        let (mut prior, tokens) = (prior_of(prior)?, tokens_of(tokens)?);
        let mut page_keys = self.lock();
        let words = tokens.words();
        let mut texts = Vec::with_capacity(words.len() / page_keys.page_tokens());
        for chunk in page_keys.chunks(words) {
            let keys = page_keys.chunk(prior.as_ref(), chunk);
            for key in keys {
                texts.push(key_to_py(py, key)?);
            }
            prior = keys.last().copied().or(prior);
        }
        Ok(texts)
    }
}

impl PyPageKeys {
    pub fn lock(&self) -> MutexGuard<'_, PageKeys> {
        // An entry is put in whole or not at all.
        self.page_keys
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

pub fn prior_of(digest: Option<&[u8]>) -> PyResult<Option<Key>> {
    let Some(digest) = digest else {
        return Ok(None);
    };
    let digest: &[u8; 32] = digest.try_into().map_err(|_| {
        PyValueError::new_err(format!("a prior key has 32 bytes, not {}", digest.len()))
    })?;
    Ok(Some(key_of(digest)))
}

/// Tokens from a C-contiguous buffer of int64, none of them negative, or uint32.
pub fn tokens_of(tokens: &Bound<'_, PyAny>) -> PyResult<Tokens> {
    let refuse = || {
        PyValueError::new_err(format!(
            "tokens must be a C-contiguous buffer of int64 or uint32, not {}",
            kind(tokens)
        ))
    };
    if tokens.len().is_ok_and(|num_tokens| num_tokens == 0) {
        // An empty array has no address, which is refused as a buffer.
        return Ok(Tokens::default());
    }
    // The engine's are of int64, and its dispatcher counts microseconds: no other kind is tried before.
    let Ok(buffer) = PyBuffer::<i64>::get(tokens) else {
        let words = PyBuffer::<u32>::get(tokens).map_err(|_| refuse())?;
        if words.dimensions() > 1 || !words.is_c_contiguous() {
            return Err(refuse());
        }
        return Ok(Tokens::new(words.to_vec(tokens.py())?, None));
    };
    if buffer.dimensions() > 1 {
        return Err(refuse());
    }
    let tokens = buffer.as_slice_ptr().ok_or_else(refuse)?;
    // SAFETY: the buffer is held, so its memory stays; no Python code runs before the loop ends, so nobody writes.
    let tokens = unsafe { tokens.as_ref() };
    // Without branches, so that the compiler makes vector code of it.
    let mut bits = 0;
    let mut low = Vec::with_capacity(tokens.len());
    low.extend(tokens.iter().map(|token| {
        bits |= *token;
        *token as u32
    }));
    if bits < 0 {
        return Err(PyValueError::new_err("a token is negative"));
    }
    let is_wide = bits >> 32 != 0;
    let high = is_wide.then(|| tokens.iter().map(|token| (token >> 32) as u32).collect());
    Ok(Tokens::new(low, high))
}
