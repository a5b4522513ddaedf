// SPDX-License-Identifier: Apache-2.0
//! Python bindings of the native core: argument checks and conversions, nothing else. The contracts stand in
//! `_native.pyi`.
#![deny(unsafe_op_in_unsafe_fn)]
#![cfg_attr(not(test), warn(clippy::print_stderr, clippy::print_stdout))]

mod convert;
mod copy;
mod demand;
mod device_pool;
mod feed;
mod flag_ring;
mod frame_table;
mod lease_ends;
mod memory;
mod page_keys;
mod peers;
mod prompt;
mod rank_table;
mod reuse;
mod store;
#[cfg(feature = "ceiling")]
mod store_ceiling;
mod store_check;
mod unlocked;
mod write_gate;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    banyan_shm::panics::announce(|line| banyan_shm::say!("{line}"));
    module.add_class::<memory::SharedBytes>()?;
    module.add_class::<device_pool::DevicePool>()?;
    module.add_class::<device_pool::PeerMemory>()?;
    module.add_class::<flag_ring::PyFlagRing>()?;
    module.add_class::<flag_ring::PyRingBatch>()?;
    module.add_class::<lease_ends::PyLeaseEnds>()?;
    module.add_class::<rank_table::PyRankTable>()?;
    module.add_class::<demand::PyDemand>()?;
    module.add_class::<reuse::PyReuse>()?;
    module.add_class::<frame_table::PyFrameTable>()?;
    module.add_class::<page_keys::PyPageKeys>()?;
    module.add_class::<prompt::PyPromptTokens>()?;
    module.add_class::<prompt::PyPrefixFingerprint>()?;
    module.add_class::<prompt::PyPrefixFingerprintRow>()?;
    module.add_class::<peers::PyPeers>()?;
    module.add_class::<peers::PyMatch>()?;
    module.add_class::<peers::PyLease>()?;
    module.add_class::<copy::PyCopy>()?;
    module.add_class::<store::PyStore>()?;
    module.add_class::<store::PyFound>()?;
    module.add_class::<write_gate::PyWriteGate>()?;
    module.add_class::<store::PyRead>()?;
    module.add_class::<feed::PyFeed>()?;
    module.add_function(wrap_pyfunction!(memory::available_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(memory::copy_form, module)?)?;
    module.add_function(wrap_pyfunction!(demand::page_number, module)?)?;
    module.add_function(wrap_pyfunction!(demand::page_numbers, module)?)?;
    module.add_function(wrap_pyfunction!(store_check::store_preview, module)?)?;
    module.add_function(wrap_pyfunction!(store_check::store_check, module)?)?;
    module.add_function(wrap_pyfunction!(store_check::store_repair, module)?)?;
    module.add_function(wrap_pyfunction!(store_check::store_survey, module)?)?;
    module.add_function(wrap_pyfunction!(store_check::store_remove, module)?)?;
    module.add_function(wrap_pyfunction!(store_check::store_remove_idle, module)?)?;
    #[cfg(feature = "ceiling")]
    module.add_function(wrap_pyfunction!(store_ceiling::store_ceiling, module)?)?;
    Ok(())
}
