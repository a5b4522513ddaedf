// SPDX-License-Identifier: Apache-2.0

use std::collections::VecDeque;
use std::sync::OnceLock;

use banyan_shm::prompt::{PrefixFingerprint, Prompt};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

use crate::page_keys::{prior_of, tokens_of};

#[pyclass(frozen, name = "PromptTokens", module = "banyan._native")]
pub struct PyPromptTokens {
    pub prompt: Prompt,
    page_tokens: usize,
    tokens_ahead: usize,
    /// Made once: some microseconds for a thousand pages.
    prefix_fingerprint: OnceLock<PrefixFingerprint>,
}

#[pymethods]
impl PyPromptTokens {
    #[new]
    #[pyo3(signature = (prior, tokens, page_tokens, tokens_ahead = 0))]
    fn new(
        prior: Option<&[u8]>,
        tokens: &Bound<'_, PyAny>,
        page_tokens: usize,
        tokens_ahead: usize,
    ) -> PyResult<Self> {
        if page_tokens == 0 || tokens_ahead > 1 {
            return Err(PyValueError::new_err(
                "a page has at least one token, and its key looks one ahead at most",
            ));
        }
        let prompt = Prompt {
            prior: prior_of(prior)?,
            tokens: tokens_of(tokens)?,
        };
        Ok(Self {
            prompt,
            page_tokens,
            tokens_ahead,
            prefix_fingerprint: OnceLock::new(),
        })
    }

    fn __len__(&self) -> usize {
        self.prompt
            .tokens
            .words()
            .len()
            .saturating_sub(self.tokens_ahead)
    }

    fn prefix_fingerprint(&self) -> PyPrefixFingerprint {
        let make = || {
            self.prompt
                .prefix_fingerprint(self.page_tokens, self.tokens_ahead)
        };
        PyPrefixFingerprint {
            prefix_fingerprint: self.prefix_fingerprint.get_or_init(make).clone(),
            page_tokens: self.page_tokens,
            tokens_ahead: self.tokens_ahead,
        }
    }
}

#[pyclass(frozen, name = "PrefixFingerprint", module = "banyan._native")]
pub struct PyPrefixFingerprint {
    prefix_fingerprint: PrefixFingerprint,
    page_tokens: usize,
    tokens_ahead: usize,
}

#[pymethods]
impl PyPrefixFingerprint {
    fn __len__(&self) -> usize {
        self.prefix_fingerprint.num_pages() * self.page_tokens
    }

    fn row(&self) -> PyPrefixFingerprintRow {
        PyPrefixFingerprintRow {
            prefix_fingerprints: VecDeque::new(),
            page_tokens: self.page_tokens,
            tokens_ahead: self.tokens_ahead,
        }
    }

    fn most_in_common(&self, row: &PyPrefixFingerprintRow) -> usize {
        self.prefix_fingerprint
            .most_in_common(&row.prefix_fingerprints)
            * self.page_tokens
    }

    /// The place in `row`, the latest being 0, of the oldest that begins with the same `num_tokens`, in whole pages.
    fn oldest_in_common(&self, row: &PyPrefixFingerprintRow, num_tokens: usize) -> Option<usize> {
        let num_pages = num_tokens / self.page_tokens;
        row.prefix_fingerprints
            .iter()
            .rposition(|other| self.prefix_fingerprint.begins_as(other, num_pages))
    }
}

/// Kept here and not in Python, where a dispatcher would hand hundreds of prefix fingerprints over one by one for each
/// request.
#[pyclass(name = "PrefixFingerprintRow", module = "banyan._native")]
pub struct PyPrefixFingerprintRow {
    prefix_fingerprints: VecDeque<PrefixFingerprint>,
    page_tokens: usize,
    tokens_ahead: usize,
}

#[pymethods]
impl PyPrefixFingerprintRow {
    fn __len__(&self) -> usize {
        self.prefix_fingerprints.len()
    }

    fn appendleft(&mut self, prefix_fingerprint: &PyPrefixFingerprint) -> PyResult<()> {
        if (
            prefix_fingerprint.page_tokens,
            prefix_fingerprint.tokens_ahead,
        ) != (self.page_tokens, self.tokens_ahead)
        {
            return Err(PyValueError::new_err("a row has one page size"));
        }
        self.prefix_fingerprints
            .push_front(prefix_fingerprint.prefix_fingerprint.clone());
        Ok(())
    }

    fn pop(&mut self) -> PyResult<usize> {
        let oldest = self.prefix_fingerprints.pop_back();
        let oldest = oldest.ok_or_else(|| PyIndexError::new_err("pop from an empty row"))?;
        Ok(oldest.num_pages() * self.page_tokens)
    }
}
