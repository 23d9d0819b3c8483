//! Many seeds, and one by name.
//!
//! ```text
//! cargo test -p unisono --lib engine::world                                    10,000 seeds, always the same
//! make world SECONDS=3600                                                      others, for an hour
//! WORLD_SEED=7 cargo test -p unisono --lib engine::world                       one, and its story
//! ```

use std::collections::BTreeMap;
use std::panic::catch_unwind;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::{Found, run};
use crate::plan::Algorithm;

/// Seeds of an ordinary run.
const SEEDS: u64 = 10_000;

/// One seed in this many makes its world twice.
const REPEATED: u64 = 50;

/// Marks that an ordinary run reaches beside every algorithm of messages, so that faults there can be found.
const REACHED: [&str; 20] = [
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
    "an outage",
    "a pause",
    "a mistake",
    "a step left out",
    "an early farewell",
    "a lie",
    "a group beside another",
    "ranks that are gone",
];

/// How often each mark was reached, and the seeds that did not hold.
#[derive(Debug, Default)]
struct Outcome {
    reached: BTreeMap<String, u64>,
    broken: Vec<(u64, String)>,
    seeds: u64,
}

/// The seeds of one process: every `step`th from `first` on, `count` of them, for as long.
struct Part {
    first: u64,
    step: u64,
    count: u64,
    time: Duration,
}

const PART: &str = "UNISONO_TEST_WORLDS";

impl Part {
    fn name(&self) -> String {
        let Self {
            first,
            step,
            count,
            time,
        } = self;
        format!("{first} {step} {count} {}", time.as_millis())
    }

    fn from_name(name: &str) -> Option<Self> {
        let mut numbers = name.split(' ').map(|number| number.parse().ok());
        let mut next = || numbers.next().flatten();
        Some(Self {
            first: next()?,
            step: next()?,
            count: next()?,
            time: Duration::from_millis(next()?),
        })
    }

    /// Tries them here.
    fn explore(&self) -> Outcome {
        let (begin, mut outcome) = (Instant::now(), Outcome::default());
        for seed in (0..self.count).map(|number| self.first + number * self.step) {
            if begin.elapsed() >= self.time {
                break;
            }
            let found = catch_unwind(|| match seed % REPEATED {
                0 => run_twice(seed),
                _ => run(seed, false),
            });
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
        outcome
    }
}

/// The world of `seed`, which must be the same one the second time.
fn run_twice(seed: u64) -> Found {
    let mut found = run(seed, true);
    if run(seed, true).story != found.story {
        found.faults.push("another world the second time".into());
    }
    found
}

/// A process that runs the last test below, which is alone in it: what others do with the heap of their process, and what they
/// fork, would show in a world, and a seed would not make the same one again.
fn alone() -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    let name = "engine::world::tests::a_part_of_the_worlds";
    command.args(["--exact", name, "--ignored", "--nocapture"]);
    command
}

/// Tries `count` seeds from `first` on, on all cores, for as long at most.
fn explore(first: u64, count: u64, time: Duration) -> Outcome {
    let step = thread::available_parallelism().map_or(1, usize::from) as u64;
    let start = |at: u64| {
        let part = Part {
            first: first + at,
            step,
            count: count.saturating_sub(at).div_ceil(step),
            time,
        };
        let mut command = alone();
        command.env(PART, part.name()).stdout(Stdio::piped());
        command.spawn().expect("a process")
    };
    let children: Vec<_> = (0..step).map(start).collect();
    let mut outcome = Outcome::default();
    for child in children {
        let output = child.wait_with_output().expect("its output");
        assert!(output.status.success(), "a part ended: {}", output.status);
        outcome.read(&String::from_utf8_lossy(&output.stdout));
    }
    outcome
}

impl Outcome {
    /// Writes a line for each thing, for [`Outcome::read`].
    fn write(&self) {
        println!("\n@seeds {}", self.seeds);
        for (mark, count) in &self.reached {
            println!("@reached {count} {mark}");
        }
        for (seed, faults) in &self.broken {
            println!("@broken {seed} {}", faults.replace('\n', " "));
        }
    }

    /// Adds what another process has written.
    fn read(&mut self, text: &str) {
        for line in text.lines() {
            let mut words = line.splitn(3, ' ');
            let what = words.next();
            let number: Option<u64> = words.next().and_then(|number| number.parse().ok());
            let rest = words.next().unwrap_or_default().to_owned();
            match (what, number) {
                (Some("@seeds"), Some(seeds)) => self.seeds += seeds,
                (Some("@reached"), Some(count)) => *self.reached.entry(rest).or_default() += count,
                (Some("@broken"), Some(seed)) => self.broken.push((seed, rest)),
                _ => {}
            }
        }
    }

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
    if number_from("WORLD_SEED").is_some() {
        let replayed = alone().status().expect("a process");
        assert!(replayed.success(), "it does not hold");
        return;
    }
    let seeds = number_from("WORLD_SEEDS").unwrap_or(SEEDS);
    let mut outcome = explore(0, seeds, Duration::from_secs(3600));
    println!("{:#?}", outcome.reached);
    outcome.assert_holds();
    assert_eq!(outcome.seeds, seeds);
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
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let first = now.map_or(0, |now| now.as_secs()) << 24;
    let mut outcome = explore(first, 1 << 24, Duration::from_secs(seconds));
    println!(
        "{} seeds from {first} on: {:#?}",
        outcome.seeds, outcome.reached
    );
    outcome.assert_holds();
}

#[test]
#[ignore = "run by the tests above, in a process of its own"]
fn a_part_of_the_worlds() {
    if let Some(seed) = number_from("WORLD_SEED") {
        let found = run_twice(seed);
        println!("{}{:#?}", found.story, found.reached);
        assert!(found.faults.is_empty(), "{:#?}", found.faults);
    }
    let part = std::env::var(PART).ok();
    if let Some(part) = part.and_then(|name| Part::from_name(&name)) {
        part.explore().write();
    }
}
