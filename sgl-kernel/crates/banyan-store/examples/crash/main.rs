// SPDX-License-Identifier: Apache-2.0
//! Processes that are killed, and devices that lie, at random points: what must hold afterwards, does it?
//!
//!     crash DIR SEEDS          runs seeds 1 to SEEDS, ends with "N passed, M failed"
//!     crash DIR --seed N       runs one, and says what it does
//!
//! A seed is two lives of one or two writers on one directory, each ended by `kill -9` or a power cut, or run into errors. The parent
//! then opens the directory with an honest device and checks: no page has a wrong byte; every page whose durability was announced is
//! there (unless its place was needed, it was cleared, or the device had damaged it: see `claims`); nothing of what was cleared is back;
//! `fsck` has no finding; the store can be written again.
//! The plan of a seed is fixed: workers, space, faults and their odds, the operation or the microsecond of the end. How far a worker has
//! come by then is the machine's affair, so a failing seed may have to be run some times.

mod claims;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use banyan_lab::Faults;
use banyan_shm::frame::Key;
use banyan_shm::memory::SharedMemory;
use banyan_store::check::{self, Treatment};
use banyan_store::directory::Stripe;
use banyan_store::growth::Limits;
use banyan_store::reading::Reason;
use banyan_store::state::{Outcome, Verdict};
use banyan_store::store::{EngineChoice, Options, Store};
use claims::{Claims, Reads, Said, num_bad_lines};

const LAYER_BYTES: [u64; 3] = [4096, 512, 8192];
const STRIDE: u64 = 16384;
const NUM_FRAMES: u64 = 32;
const NUM_CHAINS: u64 = 24;
const CHAIN_PAGES: u64 = 12;
const NUM_STEPS: u64 = 120;
const NAMESPACE: [u64; 4] = [7; 4];
const OTHER_NAMESPACE: [u64; 4] = [8; 4];
/// For so long a worker that has done its steps waits for the other one to open the store.
const LAST_TO_OPEN: Duration = Duration::from_secs(5);

struct Dice(u64);

impl Dice {
    fn roll(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % bound
    }
}

/// How one life of one seed ends, and in what world.
#[derive(Clone, Debug)]
struct Plan {
    faults: Option<Faults>,
    kill_after: Option<Duration>,
    num_workers: u64,
    has_ample_space: bool,
    num_paths: usize,
}

impl Plan {
    fn of(seed: u64, life: u64) -> Self {
        let mut world = Dice(seed);
        let (num_workers, has_ample_space) = (1 + world.roll(4) / 3, world.roll(2) == 0);
        let num_paths = 1 + world.roll(2) as usize;
        let mut dice = Dice(seed * 1000 + life);
        let mut faults = Faults {
            seed: seed * 31 + life,
            ..Faults::default()
        };
        let mut kill_after = None;
        match dice.roll(8) {
            0 | 1 => kill_after = Some(Duration::from_micros(500 + dice.roll(60_000))),
            2 | 3 => faults.cut = 2 + dice.roll(300),
            4 => faults.eio = 10 + dice.roll(60),
            5 => faults.enospc = 10 + dice.roll(60),
            6 => {
                faults.flip = 10 + dice.roll(60);
                faults.cut = 50 + dice.roll(300);
            }
            _ => {
                faults.eio = 40;
                faults.short = 3;
                faults.cut = 50 + dice.roll(300);
            }
        }
        faults.short = faults.short.max(dice.roll(5));
        Self {
            faults: kill_after.is_none().then_some(faults),
            kill_after,
            num_workers,
            has_ample_space,
            num_paths,
        }
    }

    /// Bits that flipped when they were written may still be met in the next life.
    fn flips(&self) -> bool {
        self.faults.as_ref().is_some_and(|faults| faults.flip > 0)
    }

    /// What flipped in an earlier life was found and withdrawn by the parent after it.
    fn reads(&self) -> Reads {
        match &self.faults {
            Some(faults) if faults.eio > 0 || faults.flip > 0 => Reads::MayFail,
            _ => Reads::Reliable,
        }
    }
}

fn options(directory: &Path, plan: &Plan, engine: EngineChoice) -> Options {
    let paths = (0..plan.num_paths).map(|path| directory.join(format!("path-{path}")));
    let quota_bytes = if plan.has_ample_space {
        64 << 20
    } else {
        2 << 20
    };
    Options {
        paths: paths.collect(),
        namespace: NAMESPACE,
        layer_bytes: LAYER_BYTES.to_vec(),
        limits: Limits {
            quota_bytes,
            share_bytes: quota_bytes / plan.num_workers,
            floor_bytes: 0,
        },
        segment_bytes: Some(512 << 10),
        backlog_bytes: 1 << 20,
        engine,
        read_bytes_per_s: None,
        stall_after: Duration::from_secs(10),
    }
}

fn key(page: u64) -> Key {
    [1, 2, 3, 4].map(|word: u32| {
        (page + 1)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(word * 13)
    })
}

fn page_of(key: &Key) -> Option<u64> {
    (0..NUM_CHAINS * CHAIN_PAGES).find(|page| self::key(*page) == *key)
}

struct Arena {
    memory: Arc<SharedMemory>,
}

impl Arena {
    fn new() -> Self {
        let memory = SharedMemory::create((NUM_FRAMES * STRIDE) as usize, "crash");
        Self {
            memory: Arc::new(memory.expect("half a MiB of memory")),
        }
    }

    fn frame(&mut self, frame: u64) -> &mut [u8] {
        let len = LAYER_BYTES.iter().sum::<u64>() as usize;
        let start = self
            .memory
            .mapping()
            .start()
            .wrapping_add((frame * STRIDE) as usize);
        // SAFETY: inside the memory; this process uses a frame either itself or through the store.
        unsafe { std::slice::from_raw_parts_mut(start, len) }
    }

    fn fill(&mut self, frame: u64, page: u64) {
        for (position, word) in self.frame(frame).chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&content(page, position).to_le_bytes());
        }
    }

    fn holds(&mut self, frame: u64, page: u64) -> bool {
        let words = self.frame(frame).chunks_exact(8).enumerate();
        words
            .into_iter()
            .all(|(position, word)| *word == content(page, position).to_le_bytes())
    }
}

fn content(page: u64, position: usize) -> u64 {
    (page * 1_000_003 + position as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

// ---- the worker ----------------------------------------------------------------------------------------------------

/// Lives until it is killed or has done its steps, and says on the way what `claims` has to know.
fn work(directory: &Path, seed: u64, life: u64, worker: u64) -> Result<(), String> {
    let plan = Plan::of(seed, life);
    let engine = match &plan.faults {
        Some(faults) => Faults {
            seed: faults.seed + worker,
            ..faults.clone()
        }
        .engine(),
        None if seed.is_multiple_of(2) => EngineChoice::Auto,
        None => EngineChoice::Threads,
    };
    let options = options(directory, &plan, engine);
    if plan.flips() {
        // Of a writer that is dead already and whose shelf may become ours. Before there is a store, there are none.
        say(&Said::BadLines(num_bad_lines(&options.paths).unwrap_or(0)));
    }
    let store = Store::open(&options).map_err(|error| error.to_string())?;
    let opened = |worker| directory.join(format!("opened-{life}-{worker}"));
    std::fs::write(opened(worker), []).map_err(|error| error.to_string())?;
    let mut dice = Dice(seed * 77 + life * 7 + worker);
    let mut arena = Arena::new();
    let mut num_queued = 0;
    for _ in 0..NUM_STEPS {
        match dice.roll(10) {
            0..5 if num_queued == 0 => num_queued = put(&store, &mut arena, &mut dice)?,
            5..8 if num_queued == 0 => fetch(&store, &mut arena, &mut dice)?,
            8 if !plan.has_ample_space => drop(store.evict(dice.roll(4) as usize)),
            9 => match dice.roll(6) {
                0 => {
                    for namespace in [OTHER_NAMESPACE, NAMESPACE] {
                        store
                            .invalidate(namespace)
                            .map_err(|error| error.to_string())?;
                    }
                }
                1 => clear(&store)?,
                _ => drop(store.refresh()),
            },
            _ => drop(store.refresh()),
        }
        if num_queued > 0 && dice.roll(2) == 0 {
            // Errors of the device are counted, not returned.
            store.sync().map_err(|error| error.to_string())?;
            num_queued = 0;
        }
        report(&store);
    }
    // Whoever came later would have our shelf, and could clear what it has not stored.
    let deadline = Instant::now() + LAST_TO_OPEN;
    while !(0..plan.num_workers).all(|worker| opened(worker).exists()) && Instant::now() < deadline
    {
        std::thread::sleep(Duration::from_millis(1));
    }
    store.close();
    report(&store);
    Ok(())
}

/// Also with pages on their way down.
fn clear(store: &Store) -> Result<(), String> {
    say(&Said::Clearing);
    store.clear().map_err(|error| error.to_string())?;
    report(store);
    say(&Said::Cleared);
    let stats = store.stats();
    match stats.iter().find(|(name, _)| *name == "own_records") {
        Some((_, 0)) => Ok(()),
        other => Err(format!("cleared, but {other:?}")),
    }
}

fn report(store: &Store) {
    for (key, outcome) in store.completed() {
        if let (Outcome::Stored, Some(page)) = (outcome, page_of(&key)) {
            say(&Said::Stored(page));
        }
    }
}

/// One line, written at once.
fn say(said: &Said) {
    // A parent that is gone cannot be told.
    drop(writeln!(std::io::stdout().lock(), "{}", said.line()));
}

fn chain(dice: &mut Dice) -> Vec<u64> {
    let (start, len) = (
        dice.roll(NUM_CHAINS) * CHAIN_PAGES,
        1 + dice.roll(CHAIN_PAGES),
    );
    (start..start + len).collect()
}

fn put(store: &Store, arena: &mut Arena, dice: &mut Dice) -> Result<usize, String> {
    let pages = chain(dice);
    for (frame, page) in pages.iter().enumerate() {
        arena.fill(frame as u64, *page);
    }
    let keys: Vec<Key> = pages.iter().map(|page| key(*page)).collect();
    let offsets: Vec<u64> = (0..pages.len() as u64)
        .map(|frame| frame * STRIDE)
        .collect();
    say(&Said::Putting(pages));
    let verdicts = store.put(&keys, None, &arena.memory, &offsets);
    let verdicts = verdicts.map_err(|error| error.to_string())?;
    Ok(verdicts
        .iter()
        .filter(|verdict| **verdict == Verdict::Queued)
        .count())
}

fn fetch(store: &Store, arena: &mut Arena, dice: &mut Dice) -> Result<(), String> {
    let pages = chain(dice);
    say(&Said::Reading(pages.clone()));
    let failed = read_chain(store, arena, &pages, 1 + dice.roll(3) as usize)?;
    say(&Said::Failed(
        failed.into_iter().map(|(page, _)| page).collect(),
    ));
    Ok(())
}

/// Reads what is found of a chain and compares every good page; the failed ones.
fn read_chain(
    store: &Store,
    arena: &mut Arena,
    pages: &[u64],
    layers_per_step: usize,
) -> Result<Vec<(u64, Reason)>, String> {
    let keys: Vec<Key> = pages.iter().map(|page| key(*page)).collect();
    let found = store.lookup(&keys);
    let num_pages = found.hits.len();
    let offsets: Vec<u64> = (0..num_pages as u64).map(|frame| frame * STRIDE).collect();
    let ticket = store
        .read(&found, num_pages, &arena.memory, &offsets, layers_per_step)
        .map_err(|error| error.to_string())?;
    let failed = ticket.finish();
    for (position, page) in pages[..num_pages].iter().enumerate() {
        let is_good = !failed.iter().any(|(bad, _)| *bad == position);
        if is_good && !arena.holds(position as u64, *page) {
            return Err(format!("WRONG BYTES in page {page}"));
        }
    }
    Ok(failed
        .into_iter()
        .map(|(position, reason)| (pages[position], reason))
        .collect())
}

// ---- the parent ----------------------------------------------------------------------------------------------------

fn run_seed(root: &Path, seed: u64, is_verbose: bool) -> Result<(), String> {
    let directory = root.join(format!("seed-{seed}"));
    drop(std::fs::remove_dir_all(&directory));
    let made = std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&directory);
    made.map_err(|error| error.to_string())?;
    let mut claims = Claims::default();
    let mut has_flipped = false;
    for life in 0..2 {
        let plan = Plan::of(seed, life);
        has_flipped |= plan.flips();
        if is_verbose {
            println!("seed {seed}, life {life}: {plan:?}");
        }
        let end = live(&directory, seed, life, &plan, &mut claims)
            .map_err(|reason| format!("life {life}: {reason}"))?;
        if is_verbose {
            println!(
                "  ended: {end}; {} pages announced as durable",
                claims.durable.len()
            );
        }
        judge(&directory, &plan, &mut claims, has_flipped)
            .map_err(|reason| format!("after life {life}: {reason}"))?;
    }
    std::fs::remove_dir_all(&directory).map_err(|error| error.to_string())
}

fn live(
    directory: &Path,
    seed: u64,
    life: u64,
    plan: &Plan,
    claims: &mut Claims,
) -> Result<String, String> {
    let mut children = Vec::new();
    for worker in 0..plan.num_workers {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let child = Command::new(program)
            .arg(directory)
            .args([
                "--worker",
                &seed.to_string(),
                &life.to_string(),
                &worker.to_string(),
            ])
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| error.to_string())?;
        children.push(child);
    }
    if let Some(patience) = plan.kill_after {
        std::thread::sleep(patience);
        for child in &mut children {
            // It may have ended by itself.
            drop(child.kill());
        }
    }
    let mut ends = Vec::new();
    for child in children {
        ends.push(bury(child, plan, claims)?);
    }
    Ok(ends.join(", "))
}

fn bury(mut child: Child, plan: &Plan, claims: &mut Claims) -> Result<String, String> {
    let out = child.stdout.take().ok_or("the worker has no output")?;
    let lines: std::io::Result<Vec<String>> = BufReader::new(out).lines().collect();
    let lines = lines.map_err(|error| error.to_string())?;
    // The last line of a killed worker may be cut off.
    let said = lines.iter().filter_map(|line| Said::parse(line));
    claims.take(said, plan.reads());
    let status = child.wait().map_err(|error| error.to_string())?;
    match status.code() {
        Some(0) | Some(137) | None => Ok(status.to_string()),
        Some(_) => Err(format!("a worker failed: {status}")),
    }
}

fn judge(
    directory: &Path,
    plan: &Plan,
    claims: &mut Claims,
    has_flipped: bool,
) -> Result<(), String> {
    let honest = options(directory, plan, EngineChoice::Auto);
    if has_flipped {
        let num_bad = num_bad_lines(&honest.paths).map_err(|error| error.to_string())?;
        claims.num_bad_lines += num_bad;
    }
    let store = Store::open(&honest).map_err(|error| error.to_string())?;
    let mut arena = Arena::new();
    let mut found = BTreeSet::new();
    for chain in 0..NUM_CHAINS {
        let pages: Vec<u64> = (chain * CHAIN_PAGES..(chain + 1) * CHAIN_PAGES).collect();
        for page in &pages {
            let failed = read_chain(&store, &mut arena, &[*page], 1)?;
            if store.lookup(&[key(*page)]).hits.len() == 1 && failed.is_empty() {
                found.insert(*page);
            }
            for (page, reason) in failed {
                if !has_flipped {
                    return Err(format!(
                        "page {page} does not verify ({reason:?}), and no bit was flipped"
                    ));
                }
                claims.damaged.insert(page);
            }
        }
    }
    let stats = store.stats();
    let num_damaged = stats.iter().find(|(name, _)| *name == "damaged_entries");
    if num_damaged.is_some_and(|(_, count)| *count > 0) && !has_flipped {
        return Err("the manifest is damaged, and no bit was flipped".into());
    }
    let back = claims.back_again(&found);
    if plan.num_workers == 1 && !back.is_empty() {
        return Err(format!("cleared, but found again: {back:?}"));
    }
    let lost = claims.lost(&found);
    if plan.has_ample_space && lost.len() > claims.num_bad_lines {
        return Err(format!("announced as durable, but lost: {lost:?}"));
    }
    claims.settle(found);
    put_one(&store, &mut arena)?;
    store.close();
    fsck(&honest, has_flipped)
}

fn put_one(store: &Store, arena: &mut Arena) -> Result<(), String> {
    let page = NUM_CHAINS * CHAIN_PAGES + 1;
    arena.fill(0, page);
    let verdict = store.put(&[key(page)], None, &arena.memory, &[0]);
    let num_failed = store.sync().map_err(|error| error.to_string())?;
    match verdict.map_err(|error| error.to_string())?[..] {
        [Verdict::Queued] if num_failed == 0 => {}
        [Verdict::Present] => {}
        ref other => return Err(format!("the store cannot be written again: {other:?}")),
    }
    read_chain(store, arena, &[page], 1).map(drop)
}

fn fsck(options: &Options, has_flipped: bool) -> Result<(), String> {
    let stripe = Stripe::open(&options.paths).map_err(|error| error.to_string())?;
    if has_flipped {
        check::check(&stripe, Treatment::Repair).map_err(|error| error.to_string())?;
    }
    let report = check::check(&stripe, Treatment::Check).map_err(|error| error.to_string())?;
    match report.findings.first() {
        None => Ok(()),
        Some(finding) => Err(format!("fsck is not clean: {finding:?}")),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |text: &String| text.parse::<u64>().expect("a number");
    let arguments: Vec<&String> = arguments.iter().collect();
    match arguments[..] {
        [directory, flag, seed, life, worker] if flag == "--worker" => {
            match work(
                Path::new(directory),
                number(seed),
                number(life),
                number(worker),
            ) {
                Ok(()) => ExitCode::SUCCESS,
                Err(reason) => {
                    eprintln!("worker: {reason}");
                    ExitCode::from(3)
                }
            }
        }
        [directory, flag, seed] if flag == "--seed" => {
            summarise(directory, number(seed)..=number(seed), true)
        }
        [directory, seeds] => summarise(directory, 1..=number(seeds), false),
        _ => {
            eprintln!("usage: crash DIR SEEDS | crash DIR --seed N");
            ExitCode::from(2)
        }
    }
}

fn summarise(directory: &str, seeds: std::ops::RangeInclusive<u64>, is_verbose: bool) -> ExitCode {
    let root = PathBuf::from(directory);
    let (mut num_passed, mut failed) = (0, Vec::new());
    for seed in seeds {
        match run_seed(&root, seed, is_verbose) {
            Ok(()) => num_passed += 1,
            Err(reason) => {
                println!("seed {seed}: {reason}");
                failed.push(seed);
            }
        }
    }
    println!("{num_passed} passed, {} failed", failed.len());
    if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
