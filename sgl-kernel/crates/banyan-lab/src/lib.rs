// SPDX-License-Identifier: Apache-2.0
//! What the store is tested and measured with, and what is not shipped.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod ceiling;
mod faulty;

pub use faulty::{Faults, FaultyDevice, HANG};
