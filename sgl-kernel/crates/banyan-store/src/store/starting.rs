// SPDX-License-Identifier: Apache-2.0
//! How a store is opened, and the start of its I/O thread on the device that was asked for.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::device::{Device, ThreadsDevice, ThrottledDevice, UringDevice};
#[cfg(any(test, feature = "faults"))]
use crate::device::{Faults, FaultyDevice};
use crate::engine::Engine;
use crate::error::{Result, StoreError, invalid};
use crate::format::Namespace;
use crate::growth::Limits;
use crate::shared::Shared;
use crate::writing::{Opened, Writer};

/// Threads of the fallback: more than a drive needs, few enough to be idle.
const NUM_IO_THREADS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    ReadWrite,
    ReadOnly,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineChoice {
    /// io_uring, and threads where it is missing.
    Auto,
    Uring,
    Threads,
    /// Fails on purpose.
    #[cfg(any(test, feature = "faults"))]
    Faulty(Faults),
}

/// How a store is opened.
#[derive(Clone, Debug)]
pub struct Options {
    pub paths: Vec<PathBuf>,
    pub namespace: Namespace,
    pub layer_bytes: Vec<u64>,
    pub purpose: Purpose,
    pub limits: Limits,
    pub segment_bytes: Option<u64>,
    pub backlog_bytes: u64,
    pub engine: EngineChoice,
    /// Read no faster than this.
    pub read_bytes_per_s: Option<u64>,
    /// A read that the device has not answered for so long lets its waiters go.
    pub stall_after: Duration,
}

/// Starts the I/O thread; the name of its device.
pub(super) fn start(
    shared: &Arc<Shared>,
    opened: Option<Opened>,
    options: &Options,
) -> Result<(JoinHandle<()>, String)> {
    let (sender, receiver) = channel();
    let (shared, choice, limits) = (shared.clone(), options.engine.clone(), options.limits);
    let (read_bytes_per_s, backlog_bytes) = (options.read_bytes_per_s, options.backlog_bytes);
    let stall_after = options.stall_after;
    let work = move || {
        let made = make_device(&choice, read_bytes_per_s).and_then(|(mut device, name)| {
            let writer =
                opened.map(|opened| Writer::new(opened, limits, backlog_bytes, &mut *device));
            let writer = writer
                .transpose()
                .map_err(|cause| StoreError::os("cannot hand the manifest to the device", cause))?;
            Ok((device, name, writer))
        });
        match made {
            Ok((device, name, writer)) => {
                shared.set_waker(device.waker());
                // The opener waits for this.
                drop(sender.send(Ok(name)));
                Engine::new(shared, device, writer, stall_after).run();
            }
            Err(error) => drop(sender.send(Err(error))),
        }
    };
    let thread = thread::Builder::new()
        .name("banyan-store-io".into())
        .spawn(work)
        .map_err(|cause| StoreError::os("cannot start the store's I/O thread", cause))?;
    match receiver.recv() {
        Ok(name) => Ok((thread, name?)),
        Err(_) => invalid!("the store's I/O thread ended as it started"),
    }
}

fn make_device(
    choice: &EngineChoice,
    read_bytes_per_s: Option<u64>,
) -> Result<(Box<dyn Device>, String)> {
    let (device, name) = make_engine(choice)?;
    Ok(match read_bytes_per_s {
        None | Some(0) => (device, name),
        Some(rate) => (
            Box::new(ThrottledDevice::new(device, rate)),
            format!("{name}, reads at most {} MB/s", rate / 1_000_000),
        ),
    })
}

fn make_engine(choice: &EngineChoice) -> Result<(Box<dyn Device>, String)> {
    let threads = || -> Result<Box<dyn Device>> {
        let device = ThreadsDevice::open(NUM_IO_THREADS);
        Ok(Box::new(device.map_err(|cause| {
            StoreError::os("cannot start the store's I/O threads", cause)
        })?))
    };
    match choice {
        #[cfg(any(test, feature = "faults"))]
        EngineChoice::Faulty(faults) => Ok((
            Box::new(FaultyDevice::new(faults.clone())),
            "faults on purpose".into(),
        )),
        EngineChoice::Threads => Ok((threads()?, "threads".into())),
        EngineChoice::Uring => match UringDevice::open() {
            Ok(device) => Ok((Box::new(device), "io_uring".into())),
            Err(cause) => Err(StoreError::os(
                "io_uring is not available here (engine=\"threads\" works everywhere)",
                cause,
            )),
        },
        EngineChoice::Auto => match UringDevice::open() {
            Ok(device) => Ok((Box::new(device), "io_uring".into())),
            Err(cause) => Ok((threads()?, format!("threads (no io_uring: {cause})"))),
        },
    }
}
