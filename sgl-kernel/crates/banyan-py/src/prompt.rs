// SPDX-License-Identifier: Apache-2.0

use std::collections::VecDeque;
use std::sync::OnceLock;

use banyan_shm::prompt::{Prompt, Trail};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

use crate::page_keys::{prior_of, tokens_of};

#[pyclass(frozen, name = "PromptTokens", module = "banyan._native")]
pub struct PyPromptTokens {
    pub prompt: Prompt,
    page_tokens: usize,
    tokens_ahead: usize,
    /// Made once: some microseconds for a thousand pages.
    trail: OnceLock<Trail>,
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
            trail: OnceLock::new(),
        })
    }

    fn __len__(&self) -> usize {
        self.prompt
            .tokens
            .words()
            .len()
            .saturating_sub(self.tokens_ahead)
    }

    fn trail(&self) -> PyTrail {
        let make = || self.prompt.trail(self.page_tokens, self.tokens_ahead);
        PyTrail {
            trail: self.trail.get_or_init(make).clone(),
            page_tokens: self.page_tokens,
            tokens_ahead: self.tokens_ahead,
        }
    }
}

#[pyclass(frozen, name = "Trail", module = "banyan._native")]
pub struct PyTrail {
    trail: Trail,
    page_tokens: usize,
    tokens_ahead: usize,
}

#[pymethods]
impl PyTrail {
    fn __len__(&self) -> usize {
        self.trail.num_pages() * self.page_tokens
    }

    fn row(&self) -> PyTrailRow {
        PyTrailRow {
            trails: VecDeque::new(),
            page_tokens: self.page_tokens,
            tokens_ahead: self.tokens_ahead,
        }
    }

    fn most_in_common(&self, row: &PyTrailRow) -> usize {
        self.trail.most_in_common(&row.trails) * self.page_tokens
    }

    /// The place in `row`, the latest being 0, of the oldest that begins with the same `num_tokens`, in whole pages.
    fn oldest_in_common(&self, row: &PyTrailRow, num_tokens: usize) -> Option<usize> {
        let num_pages = num_tokens / self.page_tokens;
        row.trails
            .iter()
            .rposition(|other| self.trail.begins_as(other, num_pages))
    }
}

/// Kept here and not in Python, where a dispatcher would hand hundreds of trails over one by one for each request.
#[pyclass(name = "TrailRow", module = "banyan._native")]
pub struct PyTrailRow {
    trails: VecDeque<Trail>,
    page_tokens: usize,
    tokens_ahead: usize,
}

#[pymethods]
impl PyTrailRow {
    fn __len__(&self) -> usize {
        self.trails.len()
    }

    fn appendleft(&mut self, trail: &PyTrail) -> PyResult<()> {
        if (trail.page_tokens, trail.tokens_ahead) != (self.page_tokens, self.tokens_ahead) {
            return Err(PyValueError::new_err("a row has one page size"));
        }
        self.trails.push_front(trail.trail.clone());
        Ok(())
    }

    fn pop(&mut self) -> PyResult<usize> {
        let oldest = self.trails.pop_back();
        let oldest = oldest.ok_or_else(|| PyIndexError::new_err("pop from an empty row"))?;
        Ok(oldest.num_pages() * self.page_tokens)
    }
}
