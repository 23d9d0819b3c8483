//! Groups of hundreds of ranks, all in this process: what they need grows with the peers that each of them talks to.
//! How long it takes is measured by `benchmarks/scale.py`.

#[path = "ranks/many.rs"]
mod many;
#[path = "../../rust/core/src/skips.rs"]
mod skips;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use many::{as_ranks, count_ranks, descriptors, free_url};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use skips::skipped;
use unisono::config::Config;
use unisono::error::Result;
use unisono::plan::cost::Costs;
use unisono::rendezvous::introduction::Introduction;
use unisono::rendezvous::memory::MemoryStore;
use unisono::rendezvous::store::Store;
use unisono::rendezvous::{open_url, roster};
use unisono::{Communicator, Request};

/// Held by the test that runs: each counts the descriptors of the process.
static ALONE: Mutex<()> = Mutex::new(());

/// Longer than any of them takes, however busy the machine.
const LIMIT: &str = "120";

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn config() -> Config {
    many::config(LIMIT)
}

/// Where all ranks wait for each other, and fail when one of them has failed.
struct Together {
    world: usize,
    /// How many have come, in all rounds.
    came: Mutex<usize>,
    more: Condvar,
}

impl Together {
    fn new(world: usize) -> Self {
        Self {
            world,
            came: Mutex::new(0),
            more: Condvar::new(),
        }
    }

    fn wait(&self) {
        let mut came = self.came.lock().expect("no rank has failed");
        let all = (*came / self.world + 1) * self.world;
        *came += 1;
        self.more.notify_all();
        let limit = Duration::from_secs(LIMIT.parse().expect("a number"));
        let (came, timed_out) = self
            .more
            .wait_timeout_while(came, limit, |came| *came < all)
            .expect("no rank has failed");
        let count = *came;
        drop(came);
        assert!(!timed_out.timed_out(), "{count} of {all} have come");
    }
}

/// Lets this process have `wanted` descriptors; says so and returns false where it may not.
fn may_have_descriptors(wanted: u64) -> bool {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= wanted) {
        return true;
    }
    let raised = Rlimit {
        current: Some(wanted),
        ..limit
    };
    let is_raised = setrlimit(Resource::Nofile, raised).is_ok();
    if !is_raised {
        skipped(format_args!(
            "it needs {wanted} descriptors, and this process may have {limit:?}"
        ));
    }
    is_raised
}

/// A store that counts what it is asked.
struct Counting<'a> {
    store: &'a dyn Store,
    asked: AtomicUsize,
}

impl<'a> Counting<'a> {
    fn new(store: &'a dyn Store) -> Self {
        let asked = AtomicUsize::new(0);
        Self { store, asked }
    }

    fn ask(&self) -> &'a dyn Store {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.store
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Store for Counting<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.ask().set(key, value)
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.ask().wait(key, timeout)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.ask().get(key)
    }
}

/// Each rank has links with those that the plans of its operations name, and with no others.
#[test]
fn five_hundred_ranks_in_one_process() {
    const WORLD: usize = 512;
    let _alone = alone();
    if !may_have_descriptors(16_000) {
        return;
    }
    let (url, before, counted) = (free_url(), descriptors(), AtomicUsize::new(0));
    let together = Together::new(WORLD);
    as_ranks(WORLD, |rank| {
        let meeting = open_url(&url, rank, WORLD, &config()).expect("a store");
        let comm = Communicator::join(meeting.store(), rank, WORLD, config()).expect("a group");
        let rest = meeting.joined();
        // SAFETY: a barrier has no memory.
        unsafe { comm.run(Request::barrier()) }.expect("a barrier");
        assert_eq!(count_ranks(&comm), WORLD as i64);
        together.wait();
        if rank == 0 {
            counted.store(descriptors() - before, Ordering::Relaxed);
        }
        together.wait();
        drop((comm, rest));
    });
    // Nine rounds: nine peers to send to, and as many to receive from. A link has two ends, each of them with a descriptor
    // or two; a rank has a handful of its own.
    let most = WORLD * (2 * 9 * 2 + 8);
    let counted = counted.into_inner();
    assert!((1..most).contains(&counted), "{counted} descriptors");
}

/// Groups of a group cost the store nothing.
#[test]
fn sixty_four_groups_among_sixty_four_ranks() {
    const WORLD: usize = 64;
    const SIZE: usize = 8;
    let _alone = alone();
    if !may_have_descriptors(8_000) {
        return;
    }
    let memory = MemoryStore::default();
    let store = Counting::new(&memory);
    let together = Together::new(WORLD);
    as_ranks(WORLD, |rank| {
        let comm = Communicator::join(&store, rank, WORLD, config()).expect("a group");
        together.wait();
        let asked = store.asked();
        // Each rank in eight of them.
        let members =
            |group: usize| (0..SIZE).map(move |at| (group + at * (1 + group % 7)) % WORLD);
        let groups: Vec<_> = (0..WORLD)
            .filter_map(|group| {
                let ranks: Vec<_> = members(group).collect();
                let part = comm.subgroup(&ranks, &group.to_le_bytes());
                part.expect("a part")
            })
            .collect();
        for group in &groups {
            assert_eq!(count_ranks(group), SIZE as i64);
        }
        let color = i64::try_from(rank / SIZE).expect("small");
        let part = comm.split(Some(color), 0).expect("a split");
        assert_eq!(count_ranks(&part.expect("a color")), SIZE as i64);
        together.wait();
        assert_eq!(store.asked(), asked);
    });
}

/// A rank asks the store for a few values, however many ranks there are.
#[test]
fn two_thousand_ranks_join() {
    const WORLD: usize = 2048;
    let _alone = alone();
    // Both ends of each connection, and the server leaves half of them to others.
    if !may_have_descriptors(10_000) {
        return;
    }
    let url = free_url();
    as_ranks(WORLD, |rank| {
        let meeting = open_url(&url, rank, WORLD, &config()).expect("a store");
        let store = Counting::new(meeting.store());
        let address = vec![7; 128];
        let me = Introduction::new(rank, WORLD, address, &config()).expect("an introduction");
        let limit = config().join_timeout.duration();
        let roster =
            roster::join(&store, &me, limit, &|_| Costs::TYPICAL.rounded(1)).expect("a roster");
        assert_eq!(roster.members.len(), WORLD);
        let asked = store.asked();
        // Rank 0 reads them all; another looks now and then whether it waits in vain.
        let most = if rank == 0 { 3 * WORLD } else { 300 };
        assert!(asked < most, "rank {rank} asked {asked} times");
        drop(meeting.joined());
    });
}
