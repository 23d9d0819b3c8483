//! Many seeds, and one by name.
//!
//! ```text
//! cargo test -p unisono --lib engine::world                                    10,000 seeds, always the same
//! make world SECONDS=3600                                                      others, for an hour
//! WORLD_SEED=7 cargo test -p unisono --lib engine::world -- --nocapture        one, and its story
//! ```

use std::collections::BTreeMap;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::run;
use crate::locks::Mutex;
use crate::plan::Algorithm;

/// Seeds of an ordinary run.
const SEEDS: u64 = 10_000;

/// Marks that an ordinary run reaches beside every algorithm of messages, so that faults there can be found.
const REACHED: [&str; 17] = [
    "success",
    "Timeout",
    "PeerLost",
    "Mismatch",
    "Aborted",
    "Untrusted",
    "all ranks went in place",
    "all ranks went through windows",
    "all ranks went by messages",
    "a death",
    "a death that loses bytes",
    "a dark host",
    "a pause",
    "a mistake",
    "a step left out",
    "an early farewell",
    "a lie",
];

/// How often each mark was reached, and the seeds that did not hold.
#[derive(Default)]
struct Outcome {
    reached: BTreeMap<String, u64>,
    broken: Vec<(u64, String)>,
    seeds: u64,
}

/// Runs seeds from `first` on, on all cores, until `is_over` says so of one.
fn explore(first: u64, is_over: impl Fn(u64) -> bool + Sync) -> Outcome {
    let (next, outcome) = (AtomicU64::new(first), Mutex::new(Outcome::default()));
    let worker = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if is_over(seed) {
                return;
            }
            let found = catch_unwind(|| run(seed, false));
            let mut outcome = outcome.lock();
            outcome.seeds += 1;
            let faults = match found {
                Ok(found) => {
                    for mark in found.reached {
                        *outcome.reached.entry(mark).or_default() += 1;
                    }
                    found.faults
                }
                Err(_) => vec!["a panic".to_owned()],
            };
            if !faults.is_empty() {
                outcome.broken.push((seed, faults.join("; ")));
            }
        }
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        (0..cores).for_each(|_| drop(scope.spawn(worker)));
    });
    outcome.into_inner()
}

impl Outcome {
    /// Fails where a seed did not hold, with the line that replays it.
    fn assert_holds(&mut self) {
        self.broken.sort();
        for (seed, faults) in self.broken.iter().take(5) {
            println!(
                "at commit {} replay WORLD_SEED={seed}: {faults:.1000}",
                commit()
            );
        }
        let broken = self.broken.len();
        assert_eq!(broken, 0, "of {} seeds", self.seeds);
    }
}

/// The commit that a seed belongs to.
fn commit() -> String {
    let mut git = std::process::Command::new("git");
    let output = git.args(["rev-parse", "--short", "HEAD"]).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    text.unwrap_or_else(|_| "unknown".to_owned())
}

fn number_from(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn ten_thousand_worlds_hold() {
    if let Some(seed) = number_from("WORLD_SEED") {
        let found = run(seed, true);
        println!("{}{:#?}", found.story, found.reached);
        assert!(found.faults.is_empty(), "{:#?}", found.faults);
        return;
    }
    let seeds = number_from("WORLD_SEEDS").unwrap_or(SEEDS);
    let mut outcome = explore(0, |seed| seed >= seeds);
    println!("{:#?}", outcome.reached);
    outcome.assert_holds();
    let of_messages = |it: &Algorithm| !it.needs_shared_memory();
    let algorithms = Algorithm::ALL.iter().filter(|it| of_messages(it));
    for mark in algorithms.map(|it| it.name()).chain(REACHED) {
        assert!(outcome.reached.contains_key(mark), "no seed reached {mark}");
    }
}

/// `make world`: seeds that have not been tried before, for as long as is asked for.
#[test]
#[ignore = "as long as is asked for: make world SECONDS=3600"]
fn worlds_hold_for_long() {
    let seconds = number_from("WORLD_SECONDS").unwrap_or(60);
    let until = Instant::now() + Duration::from_secs(seconds);
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let first = now.map_or(0, |now| now.as_secs()) << 24;
    let mut outcome = explore(first, |_| Instant::now() >= until);
    println!(
        "{} seeds from {first} on: {:#?}",
        outcome.seeds, outcome.reached
    );
    outcome.assert_holds();
}

#[test]
fn a_seed_makes_the_same_world_again() {
    for seed in 0..200 {
        let [first, second] = [true, true].map(|is_told| run(seed, is_told));
        assert_eq!(first.story, second.story, "seed {seed}");
        assert_eq!(first.digest, second.digest, "seed {seed}");
    }
}
