// SPDX-License-Identifier: Apache-2.0

use std::path::PathBuf;

use banyan_store::check::{self, Removal, Report, ShelfReport, Survey, Treatment};
use banyan_store::directory::Stripe;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::convert::{hex_of, to_py};

#[pyfunction]
pub fn store_preview(paths: Vec<PathBuf>) -> PyResult<()> {
    Stripe::preview(&paths).map_err(to_py)
}

#[pyfunction]
pub fn store_check<'py>(py: Python<'py>, paths: Vec<PathBuf>) -> PyResult<Bound<'py, PyDict>> {
    examine(py, &paths, Treatment::Check)
}

#[pyfunction]
pub fn store_repair<'py>(py: Python<'py>, paths: Vec<PathBuf>) -> PyResult<Bound<'py, PyDict>> {
    examine(py, &paths, Treatment::Repair)
}

fn examine<'py>(
    py: Python<'py>,
    paths: &[PathBuf],
    treatment: Treatment,
) -> PyResult<Bound<'py, PyDict>> {
    let checked = py.detach(|| check::check(&Stripe::open(paths)?, treatment));
    report_to_py(py, &checked.map_err(to_py)?)
}

fn report_to_py<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let findings = report.findings.iter().map(|finding| {
        let row = PyDict::new(py);
        row.set_item("shelf", format!("{:016x}", finding.shelf))?;
        row.set_item("place", finding.place)?;
        row.set_item("problem", &finding.problem)?;
        row.set_item("is_repaired", finding.is_repaired)?;
        Ok(row)
    });
    let findings: Vec<_> = findings.collect::<PyResult<_>>()?;
    let result = PyDict::new(py);
    result.set_item("num_shelves", report.num_shelves)?;
    result.set_item("num_records", report.num_records)?;
    result.set_item("verified_bytes", report.verified_bytes)?;
    result.set_item("num_orphans", report.num_orphans)?;
    result.set_item("findings", findings)?;
    Ok(result)
}

#[pyfunction]
pub fn store_survey<'py>(py: Python<'py>, paths: Vec<PathBuf>) -> PyResult<Bound<'py, PyDict>> {
    let surveyed = py.detach(|| check::survey(&Stripe::open(&paths)?));
    let Survey {
        shelves,
        num_unreadable,
    } = surveyed.map_err(to_py)?;
    let rows = shelves.iter().map(|shelf| shelf_to_py(py, shelf));
    let result = PyDict::new(py);
    let sum = |count: fn(&ShelfReport) -> u64| shelves.iter().map(count).sum::<u64>();
    result.set_item("num_records", sum(|shelf| shelf.num_records))?;
    result.set_item("used_bytes", sum(|shelf| shelf.used_bytes))?;
    result.set_item("num_unreadable_shelves", num_unreadable)?;
    result.set_item("shelves", rows.collect::<PyResult<Vec<_>>>()?)?;
    Ok(result)
}

fn shelf_to_py<'py>(py: Python<'py>, shelf: &ShelfReport) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("shelf", format!("{:016x}", shelf.shelf))?;
    row.set_item("is_in_use", shelf.is_in_use)?;
    row.set_item("epoch", shelf.epoch)?;
    row.set_item("namespace", hex_of(&shelf.namespace))?;
    row.set_item("num_layers", shelf.num_layers)?;
    row.set_item("record_bytes", shelf.record_bytes)?;
    row.set_item("num_segments", shelf.num_segments)?;
    row.set_item("num_places", shelf.num_places)?;
    row.set_item("num_records", shelf.num_records)?;
    row.set_item("used_bytes", shelf.used_bytes)?;
    let namespaces = PyDict::new(py);
    for (namespace, count) in &shelf.records_by_namespace {
        namespaces.set_item(hex_of(namespace), count)?;
    }
    row.set_item("records_by_namespace", namespaces)?;
    Ok(row)
}

#[pyfunction]
pub fn store_remove_idle(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<(Vec<String>, u64)> {
    let found = py.detach(|| check::remove_idle(&Stripe::open(&paths)?));
    let Removal {
        removed,
        num_unremoved,
    } = found.map_err(to_py)?;
    let names = removed.iter().map(|shelf| format!("{shelf:016x}"));
    Ok((names.collect(), num_unremoved))
}

#[pyfunction]
pub fn store_remove(py: Python<'_>, paths: Vec<PathBuf>, shelf: &str) -> PyResult<()> {
    let number = u64::from_str_radix(shelf, 16).map_err(|_| {
        PyValueError::new_err(format!(
            "{shelf:?} is no shelf as `banyan store ls` names it"
        ))
    })?;
    py.detach(|| check::remove(&Stripe::open(&paths)?, number))
        .map_err(to_py)
}
