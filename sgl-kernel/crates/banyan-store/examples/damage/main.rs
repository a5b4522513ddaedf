// SPDX-License-Identifier: Apache-2.0
//! Files of a store that are not what its writers left: flipped, cut, swapped and planted, at random. Does anybody notice it too late?
//!
//!     damage DIR SEEDS         runs seeds 1 to SEEDS, each in a process of its own; ends with "N passed, M failed"
//!     damage DIR --seed N      runs one, and says what it does
//!
//! A seed makes a store of one or two writers and some chains, then damages its directory a few times, between two openings or while
//! writers have it open. Whatever was done: nothing crashes, no thread of the store fails, nothing takes longer than `LIMIT` or more
//! memory than `MOST_BYTES`, no page comes back with other bytes than its own, nothing outside the store is touched, and what is stored
//! afterwards is read back.

mod harm;

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use banyan_shm::frame::Key;
use banyan_shm::memory::SharedMemory;
use banyan_store::check::{self, Treatment};
use banyan_store::directory::Stripe;
use banyan_store::growth::Limits;
use banyan_store::state::{Outcome, Verdict};
use banyan_store::store::{EngineChoice, Options, Store};
use harm::{Dice, Harm};

const LAYER_BYTES: [u64; 3] = [4096, 512, 8192];
const STRIDE: u64 = 16384;
const NUM_FRAMES: u64 = 16;
const CHAIN_PAGES: u64 = 8;
const NUM_CHAINS: u64 = 3;
/// Of one seed.
const LIMIT: Duration = Duration::from_secs(60);
/// Of its address space: a number in a file is no reason to take more.
const MOST_BYTES: u64 = 4 << 30;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        [directory, "--seed", seed] => run_one(Path::new(directory), seed),
        [directory, seeds] => run_all(Path::new(directory), seeds.parse().unwrap_or(0)),
        _ => {
            eprintln!("damage DIR SEEDS | damage DIR --seed N");
            ExitCode::from(2)
        }
    }
}

fn run_all(directory: &Path, num_seeds: u64) -> ExitCode {
    let failed: Vec<u64> = (1..=num_seeds)
        .filter(|seed| !passes(directory, *seed))
        .collect();
    println!(
        "{} passed, {} failed",
        num_seeds - failed.len() as u64,
        failed.len()
    );
    ExitCode::from(u8::from(!failed.is_empty() || num_seeds == 0))
}

fn passes(directory: &Path, seed: u64) -> bool {
    let own = std::env::current_exe().expect("its own name");
    let mut child = Command::new(own)
        .arg(directory)
        .args(["--seed", &seed.to_string()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("itself");
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child") {
            break Some(status);
        }
        if started.elapsed() > LIMIT {
            drop(child.kill());
            break None;
        }
        thread::sleep(Duration::from_millis(2));
    };
    let output = child.wait_with_output().expect("its output");
    if status.is_some_and(|status| status.success()) {
        return true;
    }
    let [said, errors] =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let end = status.map_or("took too long".into(), |status| status.to_string());
    println!("seed {seed}: {end}\n{said}{errors}");
    false
}

fn run_one(directory: &Path, seed: &str) -> ExitCode {
    let Ok(seed) = seed.parse() else {
        eprintln!("{seed} is no number");
        return ExitCode::from(2);
    };
    let limit = libc::rlimit {
        rlim_cur: MOST_BYTES,
        rlim_max: MOST_BYTES,
    };
    // SAFETY: a system call with a struct of ours.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
    let place = directory.join(format!("seed-{seed}"));
    // What a run that failed has left.
    drop(fs::remove_dir_all(&place));
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&place);
    made.expect("a directory");
    Trial::new(&place, seed).run();
    drop(fs::remove_dir_all(&place));
    ExitCode::SUCCESS
}

struct Trial {
    place: PathBuf,
    dice: Dice,
    memory: Arc<SharedMemory>,
    num_paths: u64,
}

fn key(page: u64) -> Key {
    [1, 2, 3, 4].map(|word: u32| {
        (page + 1)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(word * 13)
    })
}

fn byte(page: u64, at: usize) -> u8 {
    (page.wrapping_mul(31) as usize + at * 7 + at / 4096) as u8
}

impl Trial {
    fn new(place: &Path, seed: u64) -> Self {
        let mut dice = Dice(seed);
        let num_paths = 1 + dice.roll(2);
        Self {
            place: place.into(),
            dice,
            memory: Arc::new(
                SharedMemory::create((NUM_FRAMES * STRIDE) as usize, "damage").expect("memory"),
            ),
            num_paths,
        }
    }

    fn paths(&self) -> Vec<PathBuf> {
        (0..self.num_paths)
            .map(|path| self.place.join(format!("path-{path}")))
            .collect()
    }

    fn options(&mut self) -> Options {
        let engines = [EngineChoice::Auto, EngineChoice::Threads];
        Options {
            paths: self.paths(),
            namespace: [7; 4],
            layer_bytes: LAYER_BYTES.to_vec(),
            limits: Limits {
                quota_bytes: 4 << 20,
                share_bytes: 2 << 20,
                floor_bytes: 0,
            },
            segment_bytes: Some(256 << 10),
            backlog_bytes: 1 << 20,
            engine: engines[self.dice.roll(2) as usize].clone(),
            read_bytes_per_s: None,
            stall_after: Duration::from_secs(10),
        }
    }

    fn run(mut self) {
        let outside = self.place.join("outside");
        fs::write(&outside, b"precious").expect("a file");
        let first = self.options();
        let mut writers = vec![Store::open(&first).expect("a new store")];
        if self.dice.roll(2) == 0 {
            writers.push(Store::open(&first).expect("a second writer"));
        }
        for chain in 0..NUM_CHAINS {
            let writer = &writers[chain as usize % writers.len()];
            self.put(writer, chain).expect("pages in a good store");
        }
        let is_open = self.dice.roll(3) == 0;
        if is_open {
            self.harm(&outside);
            for writer in &writers {
                self.look(writer);
            }
            drop(writers);
        } else {
            drop(writers);
            self.harm(&outside);
        }
        for _ in 0..2 {
            self.examine();
            let options = self.options();
            match Store::open(&options) {
                Err(error) => println!("refused: {error}"),
                Ok(store) => {
                    self.look(&store);
                    self.go_on(&store);
                }
            }
        }
        assert_eq!(
            fs::read(&outside).expect("a file"),
            b"precious",
            "a file outside the store"
        );
    }

    fn harm(&mut self, outside: &Path) {
        for _ in 0..1 + self.dice.roll(6) {
            let paths = self.paths();
            let harm = Harm::draw(&mut self.dice, &paths, outside);
            println!("{harm:?}");
            // It may hit what another has removed.
            drop(harm.does());
        }
    }

    /// What the commands of the command line do.
    fn examine(&mut self) {
        let stripe = match Stripe::open(&self.paths()) {
            Ok(stripe) => stripe,
            Err(error) => return println!("refused: {error}"),
        };
        println!(
            "survey: {:?}",
            check::survey(&stripe).map(|found| found.shelves.len())
        );
        let treatment = match self.dice.roll(3) {
            0 => Treatment::Repair,
            _ => Treatment::Check,
        };
        let checked = check::check(&stripe, treatment);
        println!(
            "{treatment:?}: {:?}",
            checked.map(|report| report.findings.len())
        );
    }

    fn put(&self, store: &Store, chain: u64) -> Result<usize, String> {
        let pages: Vec<u64> = (0..CHAIN_PAGES).map(|page| chain * 100 + page).collect();
        let keys: Vec<Key> = pages.iter().map(|page| key(*page)).collect();
        let offsets: Vec<u64> = (0..CHAIN_PAGES).map(|frame| frame * STRIDE).collect();
        for (frame, page) in pages.iter().enumerate() {
            let bytes = self.frame(frame as u64);
            bytes
                .iter_mut()
                .enumerate()
                .for_each(|(at, place)| *place = byte(*page, at));
        }
        let taken = store.put(&keys, None, &self.memory, &offsets);
        let taken = taken.map_err(|error| error.to_string())?;
        if taken.iter().any(|verdict| *verdict != Verdict::Queued) {
            return Err(format!("{taken:?}"));
        }
        store.sync().map_err(|error| error.to_string())?;
        let done = store.completed();
        Ok(done
            .iter()
            .filter(|(_, outcome)| *outcome == Outcome::Failed)
            .count())
    }

    #[expect(
        clippy::mut_from_ref,
        reason = "shared memory, which one thread uses at a time"
    )]
    fn frame(&self, frame: u64) -> &mut [u8] {
        let len = LAYER_BYTES.iter().sum::<u64>() as usize;
        let start = self
            .memory
            .mapping()
            .start()
            .wrapping_add((frame * STRIDE) as usize);
        // SAFETY: inside the memory, and no read or write of the store is under way.
        unsafe { std::slice::from_raw_parts_mut(start, len) }
    }

    /// Every page that is found comes back as it was, or has failed.
    fn look(&self, store: &Store) {
        for chain in 0..NUM_CHAINS {
            for layers_per_step in [1, LAYER_BYTES.len()] {
                println!(
                    "chain {chain}: {:?} pages",
                    self.fetch(store, chain, layers_per_step)
                );
            }
        }
        assert_eq!(
            stat(store, "lost_threads"),
            0,
            "a thread of the store has failed"
        );
        assert_eq!(stat(store, "stalls"), 0, "it stood still");
    }

    fn fetch(&self, store: &Store, chain: u64, layers_per_step: usize) -> usize {
        let keys: Vec<Key> = (0..CHAIN_PAGES)
            .map(|page| key(chain * 100 + page))
            .collect();
        let found = store.lookup(&keys);
        let num_pages = found.hits.len();
        let offsets: Vec<u64> = (0..num_pages as u64).map(|frame| frame * STRIDE).collect();
        let read = store.read(&found, num_pages, &self.memory, &offsets, layers_per_step);
        let failed = read.expect("a read").finish();
        for frame in 0..num_pages {
            if failed.iter().all(|(page, _)| *page != frame) {
                let page = chain * 100 + frame as u64;
                let bytes = self.frame(frame as u64).iter().enumerate();
                let wrong = bytes
                    .filter(|(at, found)| **found != byte(page, *at))
                    .count();
                assert_eq!(wrong, 0, "bytes of page {page} that are not its own");
            }
        }
        num_pages - failed.len()
    }

    /// What is stored after the damage is there.
    fn go_on(&self, store: &Store) {
        match self.put(store, NUM_CHAINS + 1) {
            Ok(0) => assert!(
                self.fetch(store, NUM_CHAINS + 1, 1) == CHAIN_PAGES as usize,
                "stored, and not there"
            ),
            other => println!("not stored: {other:?}"),
        }
        println!("cleared: {:?}", store.clear());
        assert_eq!(
            stat(store, "lost_threads"),
            0,
            "a thread of the store has failed"
        );
    }
}

fn stat(store: &Store, name: &str) -> u64 {
    let stats = store.stats();
    stats
        .iter()
        .find(|(known, _)| *known == name)
        .expect("a counter")
        .1
}
