//! The semaphores of windows, in the words with which every window begins, and how a rank sleeps until one is set.
//!
//! A semaphore is two counts: how often it was set, in a word of the window of the rank that sets it, and how often it
//! was taken, which the rank that takes it remembers. One that is set for all others at once, as most are, costs one
//! store, and the rank that waits for it adds what was set for all to what was set for it alone.
//!
//! # Sleeping
//!
//! Before it sleeps a rank raises a flag in its window, issues a sequentially consistent fence and looks at the counts
//! once more. A rank that has set a semaphore issues such a fence and looks at the flag. One of the fences comes first, so
//! either the parker sees the count or the other one sees the flag and rings the doorbell of the link between them.
//!
//! A window is written by its owner alone. So the flag is a number, odd while the owner sleeps, and a rank that rings
//! remembers for which sleep it did: each rings once for each sleep at most.
//!
//! They are generic over their words: the tests model-check the same code with loom.

use std::sync::atomic::Ordering;

use crate::plan::signals::{HALVES, Peers, Semaphore};
use crate::sync::Word;
use crate::types::Rank;

#[cfg(all(test, loom))]
mod model;

/// Words that are written together: a cache line.
const LINE: usize = 8;

const SEMAPHORES: usize = 3 * HALVES;

/// The place of a semaphore among the [`SEMAPHORES`].
pub(super) const fn semaphore_of(what: Semaphore, half: usize) -> usize {
    what as usize * HALVES + half
}

/// In the first line: the counts set for all others.
const FOR_ALL: usize = 0;
/// In the second one: how often the owner began or ended a sleep, odd while it sleeps.
const SLEEPS: usize = LINE;
/// Behind it, in rank 0's window, a word for each of [`COLLECTIVES`] collectives: see [`stores`](super::stores).
pub(super) const STORES: usize = LINE + 1;
pub(super) const COLLECTIVES: usize = LINE - 1;

/// The first word of the counts set for `peer` alone.
const fn for_one(peer: Rank) -> usize {
    (2 + peer) * LINE
}

/// Words that a window has in a group of `world` ranks.
pub(super) const fn words(world: usize) -> usize {
    for_one(world)
}

/// The words of all windows of a group.
pub(super) trait Words {
    /// A word of this rank's own window.
    type Word: Word<Value = u64>;

    /// A word of this rank's own window.
    fn own(&self, index: usize) -> &Self::Word;

    /// The value of a word of a peer's window. Acquire: everything that the peer did before it wrote the value is done.
    fn of(&self, peer: Rank, index: usize) -> u64;

    /// A sequentially consistent fence.
    fn fence(&self);
}

/// The counts of one rank: how often it has set and taken each semaphore.
#[derive(Debug)]
pub(super) struct Semaphores {
    rank: Rank,
    others: Peers,
    /// The counts that this rank has set for all, and for each peer.
    set_for_all: [u64; SEMAPHORES],
    set_for_one: Vec<[u64; SEMAPHORES]>,
    /// Peers for which something has been set, and that have not been woken since.
    untold: Peers,
    /// The sleep of each peer for which this rank last rang.
    rung: Vec<u64>,
    /// By peer, the counts that this rank has taken of those that the peer set.
    taken: Vec<[u64; SEMAPHORES]>,
}

impl Semaphores {
    pub(super) fn new(rank: Rank, world: usize) -> Self {
        Self {
            rank,
            others: Peers::others(rank, world),
            set_for_all: [0; SEMAPHORES],
            set_for_one: vec![[0; SEMAPHORES]; world],
            untold: Peers::none(),
            rung: vec![0; world],
            taken: vec![[0; SEMAPHORES]; world],
        }
    }

    /// Whether a semaphore of a peer is set.
    #[inline]
    fn is_set(&self, words: &impl Words, peer: Rank, semaphore: usize) -> bool {
        let count = |first| words.of(peer, first + semaphore);
        // That of what is set for one alone is a line that seldom changes.
        let set = count(FOR_ALL).wrapping_add(count(for_one(self.rank)));
        // All halves are empty at first.
        let at_first = u64::from(semaphore >= semaphore_of(Semaphore::Empty, 0));
        set.wrapping_add(at_first) != self.taken[peer][semaphore]
    }

    /// Those of `peers`, from `since` on, that have not set a semaphore.
    pub(super) fn missing(
        &self,
        words: &impl Words,
        semaphore: usize,
        peers: Peers,
        since: Rank,
    ) -> impl Iterator<Item = Rank> {
        let rest = peers.iter().filter(move |peer| *peer >= since);
        rest.filter(move |peer| !self.is_set(words, *peer, semaphore))
    }

    /// Takes a semaphore that all these peers have set.
    pub(super) fn take(&mut self, semaphore: usize, from: Peers) {
        for peer in from.iter() {
            let taken = &mut self.taken[peer][semaphore];
            *taken = taken.wrapping_add(1);
        }
    }

    /// Sets a semaphore for these peers. [`Semaphores::wake`] comes soon after.
    pub(super) fn set(&mut self, words: &impl Words, semaphore: usize, to: Peers) {
        // Release: a rank that sees the new count sees what was done before.
        let write = |word: usize, count: &mut u64| {
            *count = count.wrapping_add(1);
            words.own(word).store(*count, Ordering::Release);
        };
        if to == self.others {
            write(FOR_ALL + semaphore, &mut self.set_for_all[semaphore]);
        } else {
            for peer in to.iter() {
                write(
                    for_one(peer) + semaphore,
                    &mut self.set_for_one[peer][semaphore],
                );
            }
        }
        self.untold = self.untold.union(to);
    }

    /// Rings for the sleeping ranks for which something has been set.
    pub(super) fn wake(&mut self, words: &impl Words, mut ring: impl FnMut(Rank)) {
        let untold = std::mem::take(&mut self.untold);
        if untold.is_empty() {
            return;
        }
        words.fence();
        for peer in untold.iter() {
            let sleep = words.of(peer, SLEEPS);
            if sleep % 2 == 1 && std::mem::replace(&mut self.rung[peer], sleep) != sleep {
                ring(peer);
            }
        }
    }
}

/// Announces that this rank is about to sleep. The caller must look once more, after this, at what the rank waits for.
pub(super) fn arm(words: &impl Words) {
    let sleeps = words.own(SLEEPS);
    let before = sleeps.load(Ordering::Relaxed);
    sleeps.store(before | 1, Ordering::Relaxed);
    words.fence();
}

/// Withdraws the announcement.
pub(super) fn disarm(words: &impl Words) {
    let sleeps = words.own(SLEEPS);
    let before = sleeps.load(Ordering::Relaxed);
    sleeps.store(before + before % 2, Ordering::Relaxed);
}
