// SPDX-License-Identifier: Apache-2.0
//! The page directory that the ranks of one node share, the lease that guards a page while a peer copies it, and the
//! copies.
//!
//! Read in this order: `frame` (the two words of the protocol), `index` (key to frame), `ledger` (the owner's side),
//! `lease` (the reader's side); then where the words live: `memory`, `rank_table`, `layout`, `frame_table`, `peers`;
//! `words`, `prompt` and `page_keys` (what a prompt's pages are called); `access_log` (what prompts asked for, from
//! rank to rank) and `demand` (what is learnt from it, by `access_history`, `hazard_model` and `seeded_rng`); `reuse`
//! (how much could be found, by `distinct_pages` and `reuse_distances`); then
//! `plan`, `gather` and `copy_thread` (moving bytes). The first four and `access_log` depend on nothing but atomics:
//! loom explores them as they ship.
#![deny(unsafe_op_in_unsafe_fn)]
#![cfg_attr(not(test), warn(clippy::print_stderr, clippy::print_stdout))]

pub mod access_history;
pub mod access_log;
pub mod demand;
pub mod distinct_pages;
pub mod frame;
pub mod hazard_model;
pub mod index;
pub mod lease;
pub mod ledger;
pub mod reuse;
pub mod reuse_distances;
pub mod seeded_rng;
pub mod sync;

#[cfg(not(loom))]
pub mod available;
#[cfg(not(loom))]
pub mod copy_thread;
#[cfg(not(loom))]
pub mod error;
#[cfg(not(loom))]
pub mod flag_ring;
#[cfg(not(loom))]
pub mod frame_table;
#[cfg(not(loom))]
pub mod gather;
#[cfg(not(loom))]
pub mod geometry;
#[cfg(not(loom))]
pub mod kept;
#[cfg(not(loom))]
pub mod layout;
#[cfg(not(loom))]
pub mod liveness;
#[cfg(not(loom))]
pub mod memory;
#[cfg(not(loom))]
pub mod page_keys;
pub mod panics;
#[cfg(not(loom))]
pub mod peer_mapping;
#[cfg(not(loom))]
pub mod peers;
#[cfg(not(loom))]
pub mod plan;
#[cfg(not(loom))]
pub mod pool;
#[cfg(not(loom))]
pub mod progress;
#[cfg(not(loom))]
pub mod prompt;
#[cfg(not(loom))]
pub mod rank_table;
#[cfg(not(loom))]
pub mod word_watch;
#[cfg(not(loom))]
pub mod words;
