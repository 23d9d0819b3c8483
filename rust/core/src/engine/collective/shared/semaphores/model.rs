//! Two ranks that hand chunks over through a half of a window, under every interleaving and every weak ordering that loom
//! can produce. The doorbell is a condition variable: a lost wake-up leaves a thread asleep for good, which loom reports
//! as a deadlock; and it reports a half that is written while it is read.

use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::*;
use crate::sync::model::{AtomicU64, Bell, explore, fence};

const WORLD: usize = 2;
const OWNER: Rank = 0;
const READER: Rank = 1;

/// The memory that both ranks have mapped: by rank, the words that are used.
struct Host {
    words: [Vec<(usize, AtomicU64)>; WORLD],
    /// The owner's half.
    half: UnsafeCell<u64>,
    bells: [Bell; WORLD],
}

// SAFETY: that the half is shared rightly is what is tested; loom reports it if it is not.
unsafe impl Sync for Host {}

impl Host {
    fn new(used: &[usize]) -> Arc<Self> {
        let words = || {
            let indices = (0..WORLD).flat_map(|peer| {
                let counts = used
                    .iter()
                    .flat_map(move |at| [FOR_ALL + at, for_one(peer) + at]);
                counts.chain([SLEEPS])
            });
            let mut indices: Vec<usize> = indices.collect();
            indices.sort_unstable();
            indices.dedup();
            indices
                .into_iter()
                .map(|at| (at, AtomicU64::new(0)))
                .collect()
        };
        Arc::new(Self {
            words: [words(), words()],
            half: UnsafeCell::new(0),
            bells: [Bell::new(), Bell::new()],
        })
    }
}

/// One rank's view of it.
struct Side {
    rank: Rank,
    host: Arc<Host>,
}

impl Side {
    fn word(&self, rank: Rank, index: usize) -> &AtomicU64 {
        let found = self.host.words[rank].iter().find(|(at, _)| *at == index);
        &found.expect("a word that is used").1
    }
}

impl Words for Side {
    type Word = AtomicU64;

    fn own(&self, index: usize) -> &AtomicU64 {
        self.word(self.rank, index)
    }

    fn of(&self, peer: Rank, index: usize) -> u64 {
        self.word(peer, index).load(Ordering::Acquire)
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// A rank with its semaphores.
struct Actor {
    side: Side,
    semaphores: Semaphores,
}

impl Actor {
    fn new(rank: Rank, host: &Arc<Host>) -> Self {
        Self {
            side: Side {
                rank,
                host: Arc::clone(host),
            },
            semaphores: Semaphores::new(rank, WORLD),
        }
    }

    /// Waits as the engine does: looks, announces its sleep, looks once more, sleeps, looks again.
    fn await_and_take(&mut self, semaphore: usize) {
        let (side, semaphores) = (&self.side, &mut self.semaphores);
        let peers = semaphores.others;
        let is_missing = |semaphores: &Semaphores| {
            let mut missing = semaphores.missing(side, semaphore, peers, 0);
            missing.next().is_some()
        };
        while is_missing(semaphores) {
            arm(side);
            if is_missing(semaphores) {
                side.host.bells[side.rank].sleep();
            }
            disarm(side);
        }
        semaphores.take(semaphore, peers);
    }

    fn set(&mut self, semaphore: usize) {
        let (side, semaphores) = (&self.side, &mut self.semaphores);
        semaphores.set(side, semaphore, semaphores.others);
        semaphores.wake(side, |peer| side.host.bells[peer].ring());
    }
}

const EMPTY: usize = semaphore_of(Semaphore::Empty, 0);
const FULL: usize = semaphore_of(Semaphore::Contributions, 0);

fn check(preemptions: usize, chunks: u64) {
    explore(Some(preemptions), move || {
        let host = Host::new(&[EMPTY, FULL]);
        let mut reader = Actor::new(READER, &host);
        let reading = thread::spawn(move || {
            for chunk in 1..=chunks {
                reader.await_and_take(FULL);
                // SAFETY: loom refuses the access while the owner may be writing.
                let seen = reader.side.host.half.with(|half| unsafe { *half });
                assert_eq!(seen, chunk);
                reader.set(EMPTY);
            }
        });
        let mut owner = Actor::new(OWNER, &host);
        for chunk in 1..=chunks {
            owner.await_and_take(EMPTY);
            // SAFETY: loom refuses the access while the reader may be reading.
            host.half.with_mut(|half| unsafe { *half = chunk });
            owner.set(FULL);
        }
        reading.join().unwrap();
    });
}

#[test]
fn loom_a_chunk_is_handed_over() {
    check(4, 1);
}

#[test]
fn loom_a_half_is_used_again_when_it_has_been_released() {
    check(2, 2);
}
