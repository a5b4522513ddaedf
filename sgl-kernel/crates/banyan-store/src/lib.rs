// SPDX-License-Identifier: Apache-2.0
//! The L3 store: pages on one or more file systems, striped, checked, and never trusted after a crash without proof.
//!
//! Read in this order: `format` and `geometry` (the bytes on disk, docs/format.md), `owned`, `locks`, `marks`, `manifest` and `directory`
//! (where they are, and whose), `catalog`, `places`, `policy` and `shares` (what is known of them), `reading` and `writing` (how they move), `engine` (the
//! one thread that moves them), `news` (the one that learns of other writers), `clock` (the one that lets waiters go), `store` (what
//! callers see).
#![deny(unsafe_op_in_unsafe_fn)]
#![cfg_attr(not(test), warn(clippy::print_stderr, clippy::print_stdout))]

pub mod buffer;
pub mod catalog;
pub mod check;
mod clock;
pub mod device;
pub mod directory;
pub mod engine;
pub mod error;
pub mod files;
pub mod format;
pub mod geometry;
pub mod growth;
pub mod locks;
pub mod manifest;
pub mod marks;
mod news;
pub mod opening;
pub mod owned;
pub mod pacing;
pub mod places;
pub mod policy;
pub mod reading;
mod refresh_requests;
mod said;
pub mod shared;
pub mod shares;
mod slots;
pub mod state;
pub mod store;
#[cfg(test)]
mod testing;
pub mod traffic;
pub mod writing;
