// SPDX-License-Identifier: Apache-2.0

use banyan_store::pacing::{self, Load, Permit};
use pyo3::prelude::*;

/// The store's rule for the start of a write, for those that simulate one.
#[pyclass(name = "WriteGate", module = "banyan._native")]
pub struct PyWriteGate {
    permit: Permit,
}

#[pymethods]
impl PyWriteGate {
    #[new]
    fn new() -> Self {
        Self {
            permit: Permit::Open,
        }
    }

    fn pause_writes(&mut self) {
        self.permit = Permit::Paused;
    }

    fn open_writes(&mut self) {
        self.permit = Permit::Open;
    }

    #[pyo3(signature = (*, num_reads, num_writes))]
    fn may_write(&self, num_reads: usize, num_writes: usize) -> bool {
        let load = Load {
            reads_here: num_reads,
            writes_here: num_writes,
            ..Load::default()
        };
        pacing::may_write(self.permit, load)
    }
}
