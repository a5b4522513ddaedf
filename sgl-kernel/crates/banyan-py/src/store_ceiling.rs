// SPDX-License-Identifier: Apache-2.0

use std::path::PathBuf;

use banyan_lab::ceiling::{self, Kind, Memory};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::convert::to_py;

/// Seconds.
#[pyfunction]
pub fn store_ceiling(
    py: Python<'_>,
    path: PathBuf,
    kind: &str,
    request_bytes: u64,
    num_requests: u64,
    depth: usize,
    memory: &str,
) -> PyResult<f64> {
    let kinds = [("read", Kind::Read), ("durable-write", Kind::DurableWrite)];
    let memories = [("shared", Memory::Shared), ("private", Memory::Private)];
    let kind = chosen("kind", kind, kinds)?;
    let memory = chosen("memory", memory, memories)?;
    let measured = py.detach(|| {
        let wanted = request_bytes * num_requests;
        let len = std::fs::metadata(&path).map_or(0, |data| data.len());
        if len < wanted {
            ceiling::prepare(&path, wanted)?;
        }
        ceiling::measure(&path, kind, request_bytes, num_requests, depth, memory)
    });
    Ok(measured.map_err(to_py)?.as_secs_f64())
}

fn chosen<T: Copy>(what: &str, name: &str, choices: [(&str, T); 2]) -> PyResult<T> {
    let found = choices.iter().find(|(known, _)| *known == name);
    found.map(|(_, choice)| *choice).ok_or_else(|| {
        let [(first, _), (second, _)] = choices;
        PyValueError::new_err(format!(
            "there is no {what} {name:?}: choose {first} or {second}"
        ))
    })
}
