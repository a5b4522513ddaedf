// SPDX-License-Identifier: Apache-2.0

use banyan_shm::prompt::{Prompt, Trail};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::page_keys::{prior_of, tokens_of};

#[pyclass(frozen, name = "PromptTokens", module = "banyan._native")]
pub struct PyPromptTokens {
    pub prompt: Prompt,
    page_tokens: usize,
}

#[pymethods]
impl PyPromptTokens {
    #[new]
    #[pyo3(signature = (prior, tokens, page_tokens))]
    fn new(prior: Option<&[u8]>, tokens: &Bound<'_, PyAny>, page_tokens: usize) -> PyResult<Self> {
        if page_tokens == 0 {
            return Err(PyValueError::new_err("a page has at least one token"));
        }
        let prompt = Prompt {
            prior: prior_of(prior)?,
            tokens: tokens_of(tokens)?,
        };
        Ok(Self {
            prompt,
            page_tokens,
        })
    }

    fn __len__(&self) -> usize {
        self.prompt.tokens.len()
    }

    fn trail(&self) -> PyTrail {
        PyTrail {
            trail: self.prompt.trail(self.page_tokens),
            page_tokens: self.page_tokens,
        }
    }
}

#[pyclass(frozen, name = "Trail", module = "banyan._native")]
pub struct PyTrail {
    trail: Trail,
    page_tokens: usize,
}

#[pymethods]
impl PyTrail {
    fn __len__(&self) -> usize {
        self.trail.num_pages() * self.page_tokens
    }

    fn most_in_common(&self, others: Vec<PyRef<'_, Self>>) -> usize {
        let trails = others.iter().map(|other| &other.trail);
        self.trail.most_in_common(trails) * self.page_tokens
    }
}
