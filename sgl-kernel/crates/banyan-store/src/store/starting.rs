// SPDX-License-Identifier: Apache-2.0
//! How a store is opened, and the start of its I/O thread on the device that was asked for.

use std::fmt::Debug;
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::clock::Clock;
use crate::device::{Device, ThreadsDevice, ThrottledDevice, UringDevice};
use crate::engine::{Engine, on_answer};
use crate::error::{Result, StoreError, invalid};
use crate::format::Namespace;
use crate::growth::Limits;
use crate::marks::{Mark, SIGN_EVERY};
use crate::news::News;
use crate::shared::{Ended, Shared};
use crate::writing::{Opened, Writer};

/// Threads of the fallback: more than a drive needs, few enough to be idle.
const NUM_IO_THREADS: usize = 4;
/// How often a thread's end is looked for.
const END_PAUSE: Duration = Duration::from_millis(1);
/// For a thread that waits for nothing, and only has to hear of its end.
const MOMENT: Duration = Duration::from_millis(50);

/// A device that the opener brings: one that fails on purpose, for tests.
pub trait OtherDevice: Debug + Send + Sync {
    fn open(&self) -> Box<dyn Device>;
}

#[derive(Clone, Debug)]
pub enum EngineChoice {
    /// io_uring, and threads where it is missing.
    Auto,
    Threads,
    Other(Arc<dyn OtherDevice>),
}

/// How a store is opened.
#[derive(Clone, Debug)]
pub struct Options {
    pub paths: Vec<PathBuf>,
    pub namespace: Namespace,
    pub layer_bytes: Vec<u64>,
    pub limits: Limits,
    pub segment_bytes: Option<u64>,
    pub backlog_bytes: u64,
    pub engine: EngineChoice,
    /// Read no faster than this.
    pub read_bytes_per_s: Option<u64>,
    /// A read that the device has not answered for so long lets its waiters go.
    pub stall_after: Duration,
}

/// The threads of a store that is open.
pub(super) struct Threads {
    io: JoinHandle<()>,
    news: JoinHandle<()>,
    clock: JoinHandle<()>,
    /// Of a writer.
    signs: Option<JoinHandle<()>>,
}

impl Threads {
    /// Waits for their ends, the clock's last: until then somebody may have to be let go. A thread that waits for a drive is left behind.
    pub(super) fn end(self, shared: &Shared, patience: Duration) {
        let deadline = Instant::now() + patience;
        join_by(self.io, "I/O thread", deadline);
        shared.refresh_requests.close();
        join_by(self.news, "thread that follows other writers", deadline);
        shared.watch.close();
        join_by(self.clock, "clock", deadline);
        if let Some(signs) = self.signs {
            join_by(signs, "thread that gives signs of life", deadline);
        }
    }
}

fn join_by(thread: JoinHandle<()>, name: &str, deadline: Instant) {
    let deadline = deadline.max(Instant::now() + MOMENT);
    while !thread.is_finished() && Instant::now() < deadline {
        thread::sleep(END_PAUSE);
    }
    if !thread.is_finished() {
        banyan_shm::say!("banyan: the store's {name} waits for its drive: it is left behind");
    } else if thread.join().is_err() {
        banyan_shm::say!("banyan: the store's {name} had failed");
    }
}

/// Starts the threads; the name of the device.
pub(super) fn start(
    shared: &Arc<Shared>,
    opened: Option<Opened>,
    options: &Options,
) -> Result<(Threads, String)> {
    let mark = opened.as_ref().map(|opened| opened.hold.mark.clone());
    let (io, name) = start_io(shared, opened, options)?;
    let mut news = News::new(shared.clone());
    // Who only reads waits no longer for what others have than for a drive.
    if mark.is_some()
        && let Err(error) = news.refresh()
    {
        banyan_shm::say!("banyan: what another writer of the store has cannot be read: {error}");
    }
    let clock = Clock::new(shared.clone(), options.stall_after);
    let others = spawn(shared, "banyan-store-news", move || news.run()).and_then(|news| {
        let clock = spawn(shared, "banyan-store-clock", move || clock.run())?;
        let signs = mark.map(|mark| start_signs(shared, mark)).transpose()?;
        Ok((news, clock, signs))
    });
    match others {
        Ok((news, clock, signs)) => Ok((
            Threads {
                io,
                news,
                clock,
                signs,
            },
            name,
        )),
        Err(error) => {
            shared.inbox().is_closing = true;
            shared.wake();
            shared.refresh_requests.close();
            Err(error)
        }
    }
}

fn spawn(
    shared: &Arc<Shared>,
    name: &'static str,
    work: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    let shared = shared.clone();
    let builder = thread::Builder::new().name(name.into());
    let guarded = move || {
        shared.stand_by(name, work);
    };
    builder
        .spawn(guarded)
        .map_err(|cause| StoreError::os(format!("cannot start the store's thread {name}"), cause))
}

/// On a thread of its own: whatever the others wait for, signs are given.
fn start_signs(shared: &Arc<Shared>, mark: Arc<Mark>) -> Result<JoinHandle<()>> {
    let store = shared.clone();
    spawn(shared, "banyan-store-signs", move || {
        loop {
            if mark.confirm().is_err() {
                // The writer says so, and gives up what waits.
                store.wake();
            }
            if store.watch.wait_for_closing(SIGN_EVERY) {
                return;
            }
        }
    })
}

fn start_io(
    shared: &Arc<Shared>,
    opened: Option<Opened>,
    options: &Options,
) -> Result<(JoinHandle<()>, String)> {
    let (sender, receiver) = channel();
    let (shared, choice, limits) = (shared.clone(), options.engine.clone(), options.limits);
    let (read_bytes_per_s, backlog_bytes) = (options.read_bytes_per_s, options.backlog_bytes);
    let stall_after = options.stall_after;
    let work = move || {
        let made =
            make_device(&shared, &choice, read_bytes_per_s).and_then(|(mut device, name)| {
                let writer =
                    opened.map(|own| Writer::new(own, limits, backlog_bytes, &mut *device));
                let writer = writer.transpose().map_err(|cause| {
                    StoreError::os("cannot hand the manifest to the device", cause)
                })?;
                Ok((device, name, writer))
            });
        match made {
            Ok((device, name, writer)) => {
                shared.set_waker(device.waker());
                // The opener waits for this.
                drop(sender.send(Ok(name)));
                let mut engine =
                    ManuallyDrop::new(Engine::new(shared.clone(), device, writer, stall_after));
                if shared.stand_by("I/O thread", || engine.run()) == Ended::InTime {
                    drop(ManuallyDrop::into_inner(engine));
                }
                // Else the device may still write to what the engine holds: it stays, and so does the shelf's lock.
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
    shared: &Arc<Shared>,
    choice: &EngineChoice,
    read_bytes_per_s: Option<u64>,
) -> Result<(Box<dyn Device>, String)> {
    let (device, name) = make_engine(choice)?;
    Ok(match read_bytes_per_s {
        None | Some(0) => (device, name),
        Some(rate) => {
            let shared = shared.clone();
            let on_answer = move |token| on_answer(&shared, token);
            (
                Box::new(ThrottledDevice::new(device, rate, on_answer)),
                format!("{name}, reads at most {} MB/s", rate / 1_000_000),
            )
        }
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
        EngineChoice::Other(other) => {
            let device = other.open();
            let name = device.name().into();
            Ok((device, name))
        }
        EngineChoice::Threads => Ok((threads()?, "threads".into())),
        EngineChoice::Auto => match UringDevice::open() {
            Ok(device) => Ok((Box::new(device), "io_uring".into())),
            Err(cause) => Ok((threads()?, format!("threads (no io_uring: {cause})"))),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::Stripe;
    use crate::geometry::Geometry;
    use crate::state::State;
    use crate::testing::Scratch;

    #[test]
    fn threads_when_none_of_them_ends_then_left_behind_by_one_deadline() {
        let scratch = Scratch::new();
        let stripe = Stripe::open_or_create(&[scratch.path("store")]).unwrap();
        let geometry = Arc::new(Geometry::new(&[4096]).unwrap());
        let shared = Shared::new(stripe, geometry, None, State::new([1; 4]), None);
        let stuck = || thread::spawn(|| thread::sleep(Duration::from_secs(30)));
        let threads = Threads {
            io: stuck(),
            news: stuck(),
            clock: stuck(),
            signs: Some(stuck()),
        };
        let (patience, began) = (Duration::from_millis(400), Instant::now());
        threads.end(&shared, patience);
        assert!(began.elapsed() < 2 * patience);
    }
}
