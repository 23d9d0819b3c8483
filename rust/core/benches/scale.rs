//! The times that large groups need: how long plans should take on machines that one does not have, and how long it takes to
//! form groups of hundreds of ranks in this process. `benchmarks/scale.py` asks and shows.
//!
//! ```text
//! cargo bench -p unisono --bench scale -- join 512        ranks that meet in the built-in store, and their first operations
//! cargo bench -p unisono --bench scale -- groups 64 8     as many groups of 8 ranks among 64
//! cargo bench -p unisono --bench scale -- store 2048      ranks that meet, and no more: the store's part
//! cargo bench -p unisono --bench scale -- predict         questions from standard input, a line each
//! ```
//!
//! A question has the hosts, the ranks on each, the cores of a host, the collective, the algorithm (`auto`: the one that is
//! chosen), bytes of the whole, and in seconds: a message's time at either end, the latency and a byte's time between hosts.
//! Each answer is one line of JSON.

#[path = "../../../tests/rust/ranks/many.rs"]
mod many;

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use many::{as_ranks, count_ranks, descriptors, free_url};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use unisono::config::Config;
use unisono::error::Result;
use unisono::plan::cost::{Costs, predict};
use unisono::plan::select::select;
use unisono::plan::topology::Topology;
use unisono::plan::{Algorithm, Counts, DEFAULT_CHUNK, Shape, Step, applicable_on, build_on};
use unisono::rendezvous::introduction::Introduction;
use unisono::rendezvous::store::Store;
use unisono::rendezvous::{open_url, roster};
use unisono::types::Collective;
use unisono::{Communicator, Request};

const USAGE: &str = "join RANKS | groups RANKS SIZE | store RANKS | predict";

fn main() -> ExitCode {
    // A rank that fails would leave the others waiting.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::exit(1);
    }));
    // All ranks are in this process. Where the limit cannot be raised, an error follows when descriptors run out.
    let limit = getrlimit(Resource::Nofile);
    let current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current, ..limit });
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let words: Vec<&str> = words
        .into_iter()
        .filter(|word| *word != "--bench")
        .collect();
    let number = |word: &str| word.parse::<usize>().ok();
    let done = match words[..] {
        ["join", world] => number(world).map(join),
        ["groups", world, size] => number(world).zip(number(size)).map(groups),
        ["store", world] => number(world).map(store),
        ["predict"] => std::io::stdin().lines().try_for_each(|line| {
            let line = line.ok()?;
            println!("{}", answer(&line)?);
            Some(())
        }),
        // `cargo bench` of everything.
        [] => Some(()),
        _ => None,
    };
    match done {
        Some(()) => ExitCode::SUCCESS,
        None => {
            eprintln!("usage: {USAGE}");
            ExitCode::FAILURE
        }
    }
}

fn config() -> Config {
    many::config("300")
}

fn sum(comm: &Communicator) {
    assert_eq!(count_ranks(comm), comm.world_size() as i64);
}

/// Kilobytes of memory that this process has.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn join(world: usize) {
    let url = free_url();
    let together = Barrier::new(world);
    let begun = Instant::now();
    let (before, had) = (resident(), descriptors());
    as_ranks(world, |rank| {
        let meeting = open_url(&url, rank, world, &config()).expect("a store");
        let comm = Communicator::join(meeting.store(), rank, world, config()).expect("a group");
        let rest = meeting.joined();
        together.wait();
        let tell = |what: &str, since: Instant| {
            if rank == 0 {
                let seconds = since.elapsed().as_secs_f64();
                let (memory, open) = (resident() - before, descriptors() - had);
                println!(
                    r#"{{"what": "{what}", "ranks": {world}, "seconds": {seconds}, "kilobytes": {memory}, "descriptors": {open}}}"#
                );
            }
            together.wait();
        };
        tell("joined", begun);
        let since = Instant::now();
        // SAFETY: a barrier has no memory.
        unsafe { comm.run(Request::barrier()) }.expect("a barrier");
        together.wait();
        tell("first barrier", since);
        for what in ["first sum", "second sum"] {
            let since = Instant::now();
            sum(&comm);
            together.wait();
            tell(what, since);
        }
        drop((comm, rest));
    });
}

fn groups((world, size): (usize, usize)) {
    let url = free_url();
    let together = Barrier::new(world);
    as_ranks(world, |rank| {
        let meeting = open_url(&url, rank, world, &config()).expect("a store");
        let comm = Communicator::join(meeting.store(), rank, world, config()).expect("a group");
        let rest = meeting.joined();
        together.wait();
        let since = Instant::now();
        let groups: Vec<_> = (0..world)
            .filter_map(|group| {
                // Each rank in as many of them as each of them has ranks.
                let members = (0..size).map(|at| (group + at * (1 + group % 7)) % world);
                let part = comm.subgroup(&members.collect::<Vec<_>>(), &group.to_le_bytes());
                part.expect("a part")
            })
            .collect();
        together.wait();
        let made = since.elapsed().as_secs_f64();
        groups.iter().for_each(sum);
        together.wait();
        if rank == 0 {
            let used = since.elapsed().as_secs_f64();
            println!(
                r#"{{"what": "groups", "ranks": {world}, "size": {size}, "made": {made}, "used": {used}}}"#
            );
        }
        together.wait();
        drop((groups, comm, rest));
    });
}

/// A store that counts the bytes of values.
struct Counting<'a> {
    store: &'a dyn Store,
    written: &'a AtomicUsize,
    read: &'a AtomicUsize,
}

impl Store for Counting<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.written.fetch_add(value.len(), Ordering::Relaxed);
        self.store.set(key, value)
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let value = self.store.wait(key, timeout)?;
        self.read.fetch_add(value.len(), Ordering::Relaxed);
        Ok(value)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let value = self.store.get(key)?;
        let length = value.as_ref().map_or(0, Vec::len);
        self.read.fetch_add(length, Ordering::Relaxed);
        Ok(value)
    }
}

fn store(world: usize) {
    let url = free_url();
    let (written, read) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let begun = Instant::now();
    as_ranks(world, |rank| {
        let meeting = open_url(&url, rank, world, &config()).expect("a store");
        let store = Counting {
            store: meeting.store(),
            written: &written,
            read: &read,
        };
        // As long as those of hosts with an address on the network and one on loopback.
        let address = vec![7; 110];
        let me = Introduction::new(rank, world, address, &config()).expect("an introduction");
        let limit = config().join_timeout.duration();
        roster::join(&store, &me, limit, &|_| Costs::TYPICAL.rounded(1)).expect("a roster");
        drop(meeting.joined());
    });
    let seconds = begun.elapsed().as_secs_f64();
    let (written, read) = (written.into_inner(), read.into_inner());
    println!(
        r#"{{"what": "store", "ranks": {world}, "seconds": {seconds}, "written": {written}, "read": {read}}}"#
    );
}

/// The answer to one question, or nothing for what is none.
fn answer(question: &str) -> Option<String> {
    let words: Vec<&str> = question.split_whitespace().collect();
    let [
        hosts,
        ranks,
        cores,
        collective,
        algorithm,
        bytes,
        message,
        latency,
        byte,
    ] = words[..]
    else {
        return None;
    };
    let number = |word: &str| word.parse::<usize>().ok();
    let seconds = |word: &str| word.parse::<f64>().ok();
    let topology = Topology::even(number(hosts)?, number(ranks)?, number(cores)?);
    let costs = Costs {
        remote_message: seconds(message)?,
        remote_latency: seconds(latency)?,
        remote_byte: seconds(byte)?,
        ..Costs::TYPICAL
    };
    let (world, bytes) = (topology.host_of.len(), number(bytes)?);
    if world == 0 {
        return None;
    }
    let named = |wanted: &str, name: &dyn std::fmt::Display| name.to_string() == wanted;
    let collective = Collective::ALL
        .into_iter()
        .find(|candidate| named(collective, candidate))?;
    // Bytes are of the longer buffer, which in such a collective has a block for each rank.
    let blocks = collective.blocks(world);
    let shape = |rank| Shape {
        collective,
        rank,
        world,
        counts: Counts::Even(bytes / 4 / blocks),
        root: 0,
        in_place: false,
        widen: false,
    };
    let algorithm = match algorithm {
        "auto" => select(&shape(0), 4, &topology, &costs),
        wanted => Algorithm::ALL
            .into_iter()
            .find(|candidate| named(wanted, candidate))?,
    };
    if !applicable_on(algorithm, &shape(0), &topology) {
        return Some(r#"{"seconds": null}"#.to_owned());
    }
    let seconds = predict(algorithm, &shape(0), 4, &topology, &costs);
    let (far, near) = most_peers(algorithm, shape, &topology);
    Some(format!(
        r#"{{"seconds": {seconds}, "algorithm": "{algorithm}", "far_peers": {far}, "near_peers": {near}}}"#
    ))
}

/// The peers on other hosts and on its own that a rank exchanges with: the most that any of some ranks has, the first, the last
/// and the middle among them.
fn most_peers<'a>(
    algorithm: Algorithm,
    shape: impl Fn(usize) -> Shape<'a>,
    topology: &Topology,
) -> (usize, usize) {
    let world = topology.host_of.len();
    let sample = [0, 1, world / 2, world.saturating_sub(1)].map(|rank| rank.min(world - 1));
    let peers = sample.into_iter().map(|rank| {
        let plan = build_on(algorithm, &shape(rank), DEFAULT_CHUNK, topology);
        let steps = plan.map(|plan| plan.steps).unwrap_or_default();
        let peers: BTreeSet<_> = steps
            .iter()
            .filter_map(|step| match *step {
                Step::Send { to, .. } => Some(to),
                Step::Recv { from, .. } | Step::Fold { from, .. } => Some(from),
                _ => None,
            })
            .collect();
        let host = topology.host_of[rank];
        let far = peers.iter().filter(|peer| topology.host_of[**peer] != host);
        let far = far.count();
        (far, peers.len() - far)
    });
    peers.max().unwrap_or_default()
}
