//! Where ranks of one host meet: the windows of a group, and the words by which a rank tells the others where it is.
//!
//! [`plan::windows`](crate::plan::windows) says what a window is and which semaphores there are. Here a semaphore is two
//! counts: how often it was set, in a word of the window of the rank that sets it, and how often it was taken, which
//! the rank that takes it remembers. One that is set for all others at once, as most are, costs one store, and who waits
//! for it adds what was set for all to what was set for it alone.
//!
//! # Sleeping
//!
//! Before it sleeps a rank raises a flag in its window, issues a sequentially consistent fence and looks at the counts
//! once more. Who has set a semaphore issues such a fence and looks at the flag. One of the fences comes first, so
//! either the sleeper sees the count or the other one sees the flag, takes it down and rings the doorbell of the link
//! between them.

use std::sync::atomic::{Ordering, fence};

use crate::heap::{Held, Layout, PeerWindow, Window};
use crate::plan::windows::{HALVES, Peers, What};
use crate::transport::endpoint::Lane;
use crate::types::Rank;

use crate::engine::links::LinkTable;

/// Bytes of a chunk. What all ranks have of a chunk, in their windows and in their own memory, is to stay in the caches of
/// the cores that they share; and a chunk is to take longer than the meetings in it. (32 to 256 KiB were measured.)
pub(super) const CHUNK: usize = 128 << 10;

/// Bytes of a half: an all_reduce has contributions and results in it.
pub(super) const HALF: usize = 2 * CHUNK;

/// Words that are written together: a cache line.
const LINE: usize = 8;

/// What there are semaphores for, in each half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Contributions,
    Results,
    Empty,
}

const SEMAPHORES: usize = 3 * HALVES;

/// The place of a semaphore among the [`SEMAPHORES`].
const fn semaphore_of(kind: Kind, half: usize) -> usize {
    kind as usize * HALVES + half
}

impl From<What> for Kind {
    fn from(what: What) -> Self {
        match what {
            What::Contributions => Self::Contributions,
            What::Results => Self::Results,
        }
    }
}

/// In the first line: what is set for all others.
const FOR_ALL: usize = 0;
/// In the second one: 1 while the owner sleeps. Raised by the owner, taken down by whoever wakes it.
const ASLEEP: usize = LINE;

/// The first word of what is set for `peer` alone.
const fn for_one(peer: Rank) -> usize {
    (2 + peer) * LINE
}

/// Where the data of the first rank begins in a page: behind its beginning, where long buffers begin.
const SKEW_OF_FIRST: usize = 256;

/// How much later that of the next one does, and after how many ranks it begins anew.
const SKEW: usize = 512;
const SKEWS: usize = 8;

/// How the window of one rank is divided.
fn layout(rank: Rank, world: usize) -> Layout {
    Layout {
        words: for_one(world),
        skew: SKEW_OF_FIRST + rank % SKEWS * SKEW,
        data: HALVES * HALF,
    }
}

/// A new window for a rank, if it can be had.
pub(super) fn create(rank: Rank, world: usize) -> Option<Window> {
    Window::create(layout(rank, world))
}

/// The windows of a group, as one of its ranks sees them.
#[derive(Debug)]
pub(super) struct Windows {
    rank: Rank,
    others: Peers,
    own: Window,
    /// By rank; the own place is empty.
    peers: Vec<Option<PeerWindow>>,
    /// What this rank has set for all, and for each peer.
    set_for_all: [u64; SEMAPHORES],
    set_for_one: Vec<[u64; SEMAPHORES]>,
    /// Peers for whom something has been set, and who have not been woken since.
    untold: Peers,
    /// What this rank has taken of what each peer set.
    taken: Vec<[u64; SEMAPHORES]>,
    /// The half with which the next operation begins.
    first: usize,
    /// The operation that uses them.
    user: Option<u64>,
}

impl Windows {
    /// The rank's own one, and those of the peers by rank. `None` when one of them is not as it should be.
    pub(super) fn new(rank: Rank, own: Window, peers: Vec<Option<Held>>) -> Option<Self> {
        let world = peers.len();
        let peers: Vec<_> = (0..world)
            .zip(peers)
            .map(|(peer, held)| PeerWindow::new(held?, layout(peer, world)))
            .collect();
        let complete = (0..world).all(|peer| peer == rank || peers[peer].is_some());
        own.settle();
        complete.then(|| Self {
            rank,
            others: Peers::others(rank, world),
            own,
            peers,
            set_for_all: [0; SEMAPHORES],
            set_for_one: vec![[0; SEMAPHORES]; world],
            taken: vec![[0; SEMAPHORES]; world],
            untold: Peers::none(),
            first: 0,
            user: None,
        })
    }

    /// Gives them to operation `sequence`, if no other one uses them.
    pub(super) fn acquire(&mut self, sequence: u64) -> bool {
        *self.user.get_or_insert(sequence) == sequence
    }

    /// The operation that uses them needs them no more. The next one begins so many halves on.
    pub(super) fn release(&mut self, halves: usize) {
        self.first = (self.first + halves) % HALVES;
        self.user = None;
    }

    /// Which half that is, counted from the one that the operation began with.
    fn half(&self, half: usize) -> usize {
        (self.first + half) % HALVES
    }

    fn peer(&self, peer: Rank) -> &PeerWindow {
        self.peers[peer].as_ref().expect("a peer, not this rank")
    }

    /// Whether a semaphore of a peer is set.
    #[inline]
    fn is_set(&self, peer: Rank, semaphore: usize) -> bool {
        let window = self.peer(peer);
        // Acquire: what the peer wrote, or read, before it set it, is done.
        let count = |first| window.word(first + semaphore).load(Ordering::Acquire);
        // That of what is set for one alone is a line that seldom changes.
        let set = count(FOR_ALL).wrapping_add(count(for_one(self.rank)));
        // All halves are empty at first.
        let at_first = u64::from(semaphore >= semaphore_of(Kind::Empty, 0));
        set.wrapping_add(at_first) != self.taken[peer][semaphore]
    }

    /// The peers, from `since` on, that still use this rank's half.
    pub(super) fn readers(&self, half: usize, since: Rank) -> impl Iterator<Item = Rank> {
        self.missing(
            semaphore_of(Kind::Empty, self.half(half)),
            self.others,
            since,
        )
    }

    /// The half is written for `readers`. There must be no [`Windows::readers`] of it.
    pub(super) fn claim(&mut self, half: usize, readers: Peers) {
        self.take(semaphore_of(Kind::Empty, self.half(half)), readers);
    }

    /// Those of the peers, from `since` on, that have not published it.
    pub(super) fn late(
        &self,
        half: usize,
        what: What,
        from: Peers,
        since: Rank,
    ) -> impl Iterator<Item = Rank> {
        self.missing(semaphore_of(what.into(), self.half(half)), from, since)
    }

    /// Those of `peers`, from `since` on, that have not set a semaphore.
    fn missing(&self, semaphore: usize, peers: Peers, since: Rank) -> impl Iterator<Item = Rank> {
        let rest = peers.iter().filter(move |peer| *peer >= since);
        rest.filter(move |peer| !self.is_set(*peer, semaphore))
    }

    /// All of these have published it: nobody is [late](Windows::late).
    pub(super) fn receive(&mut self, half: usize, what: What, from: Peers) {
        self.take(semaphore_of(what.into(), self.half(half)), from);
    }

    fn take(&mut self, semaphore: usize, from: Peers) {
        for peer in from.iter() {
            let taken = &mut self.taken[peer][semaphore];
            *taken = taken.wrapping_add(1);
        }
    }

    /// Sets that it is there. [`Windows::wake`] comes soon after.
    pub(super) fn publish(&mut self, half: usize, what: What, to: Peers) {
        let semaphore = semaphore_of(what.into(), self.half(half));
        self.set(semaphore, to);
    }

    /// Sets that this rank has no use for the half of these peers any more. [`Windows::wake`] comes soon after.
    pub(super) fn let_go(&mut self, half: usize, to: Peers) {
        let semaphore = semaphore_of(Kind::Empty, self.half(half));
        self.set(semaphore, to);
    }

    fn set(&mut self, semaphore: usize, to: Peers) {
        // Release: whoever sees the new count sees what was done before.
        let write = |word: usize, count: &mut u64| {
            *count = count.wrapping_add(1);
            self.own.word(word).store(*count, Ordering::Release);
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

    /// Wakes those for whom something has been set and who sleep.
    pub(super) fn wake(&mut self, links: &mut LinkTable) {
        let untold = std::mem::take(&mut self.untold);
        if untold.is_empty() {
            return;
        }
        fence(Ordering::SeqCst);
        for peer in untold.iter() {
            let asleep = self.peer(peer).word(ASLEEP);
            if asleep.load(Ordering::Relaxed) != 0
                && asleep.swap(0, Ordering::AcqRel) != 0
                && let Some(open) = links.open(Lane::Collective, peer)
            {
                open.link.wake();
            }
        }
    }

    /// Announces that this rank is about to sleep. What it waits for is to be looked at once more after that.
    pub(super) fn arm(&self) {
        self.own.word(ASLEEP).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Withdraws the announcement.
    pub(super) fn disarm(&self) {
        self.own.word(ASLEEP).store(0, Ordering::Relaxed);
    }

    /// Bytes of a half of `rank`, from `at` on.
    #[inline]
    pub(super) fn read(&self, rank: Rank, half: usize, at: usize, bytes: usize) -> &[u8] {
        let at = self.place(half, at, bytes);
        match &self.peers[rank] {
            Some(peer) => peer.read(at, bytes),
            None => self.own.read(at, bytes),
        }
    }

    /// Bytes of the own half, from `at` on, to write.
    #[inline]
    pub(super) fn write(&mut self, half: usize, at: usize, bytes: usize) -> &mut [u8] {
        let at = self.place(half, at, bytes);
        self.own.write(at, bytes)
    }

    /// Bytes of the own half to write, and as many of the peers' halves to read, from these places on.
    pub(super) fn write_beside<'a>(
        &'a mut self,
        half: usize,
        (place, at): (usize, usize),
        bytes: usize,
    ) -> (&'a mut [u8], impl Fn(Rank) -> Option<&'a [u8]>) {
        let (place, at) = (self.place(half, place, bytes), self.place(half, at, bytes));
        let peers = &self.peers;
        let theirs = move |peer: Rank| peers[peer].as_ref().map(|peer| peer.read(at, bytes));
        (self.own.write(place, bytes), theirs)
    }

    fn place(&self, half: usize, at: usize, bytes: usize) -> usize {
        assert!(at <= HALF && bytes <= HALF - at);
        self.half(half) * HALF + at
    }
}
