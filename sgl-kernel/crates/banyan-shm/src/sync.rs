// SPDX-License-Identifier: Apache-2.0
//! The only source of atomics in this crate, so that loom checks the code that ships.

#[cfg(not(loom))]
pub use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
