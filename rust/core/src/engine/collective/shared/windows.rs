//! Where ranks of one host meet: the windows of a group, and the words by which a rank tells the others where it is.
//!
//! [`plan::windows`](crate::plan::windows) says what a window is and which semaphores there are; what they are made of is
//! in [`semaphores`](super::semaphores).

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use crate::heap::{Held, Layout, PeerWindow, Window};
use crate::plan::shared::CHUNK;
use crate::plan::signals::{HALVES, Peers, Semaphore};
use crate::reduce::Streaming;
use crate::transport::endpoint::Lane;
use crate::types::{Collective, Rank};

use crate::engine::links::LinkTable;

use super::Host;
use super::semaphores::{self, COLLECTIVES, STORES, Semaphores, Words, semaphore_of};
use super::stores::{self, Stores};

/// Where the data of the first rank begins in a page: behind its beginning, where long buffers begin.
const SKEW_OF_FIRST: usize = 256;

/// How much later that of the next one does, and after how many ranks it begins anew.
const SKEW: usize = 512;
const SKEWS: usize = 8;

/// Bytes of a half: an all_reduce has contributions and results in it.
fn half(host: &Host) -> usize {
    2 * host.chunk(Collective::AllReduce).max(CHUNK)
}

/// How the window of one rank is divided.
fn layout(rank: Rank, host: &Host) -> Layout {
    Layout {
        words: semaphores::words(host.world),
        skew: SKEW_OF_FIRST + rank % SKEWS * SKEW,
        data: HALVES * half(host),
    }
}

/// A new window for a rank, if it can be had.
pub(super) fn create(rank: Rank, host: &Host) -> Option<Window> {
    Window::create(layout(rank, host))
}

/// The place of a collective among those whose ways of writing are kept apart.
fn kind(collective: Collective) -> Option<usize> {
    let number = collective as usize;
    (number < COLLECTIVES).then_some(number)
}

/// The windows of a group, as one of its ranks sees them.
#[derive(Debug)]
pub(super) struct Windows {
    panes: Panes,
    semaphores: Semaphores,
    /// The half with which the next operation begins.
    first: usize,
    /// The operation that uses them.
    user: Option<u64>,
    /// Bytes of a half.
    half: usize,
    rank: Rank,
    /// How this rank writes to its window: the record by which rank 0 decides, and the way of the operation that uses them.
    stores: [Stores; COLLECTIVES],
    streaming: Streaming,
}

/// Whose memory is which.
#[derive(Debug)]
struct Panes {
    own: Window,
    /// By rank; the own place is empty.
    peers: Vec<Option<PeerWindow>>,
}

impl Words for Panes {
    type Word = AtomicU64;

    #[inline]
    fn own(&self, index: usize) -> &AtomicU64 {
        self.own.word(index)
    }

    #[inline]
    fn of(&self, peer: Rank, index: usize) -> u64 {
        let window = self.peers[peer].as_ref();
        window.expect("a peer, not this rank").word(index)
    }

    #[inline]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

impl Windows {
    /// The rank's own one, and those of the peers by rank. `None` when one of them is not as it should be.
    pub(super) fn new(
        rank: Rank,
        own: Window,
        peers: Vec<Option<Held>>,
        host: &Host,
    ) -> Option<Self> {
        let world = peers.len();
        let peers: Vec<_> = (0..world)
            .zip(peers)
            .map(|(peer, held)| PeerWindow::new(held?, layout(peer, host)))
            .collect();
        let complete = (0..world).all(|peer| peer == rank || peers[peer].is_some());
        own.settle();
        complete.then(|| Self {
            panes: Panes { own, peers },
            semaphores: Semaphores::new(rank, world),
            first: 0,
            user: None,
            half: half(host),
            rank,
            stores: Default::default(),
            streaming: Streaming::No,
        })
    }

    /// The operation that uses them is `collective` on `bytes` bytes.
    pub(super) fn begin(&mut self, collective: Collective, bytes: usize) {
        let Some(kind) = kind(collective).filter(|_| Streaming::EXISTS) else {
            return self.streaming = Streaming::No;
        };
        let mask = match self.rank {
            0 => {
                let mask = self.stores[kind].mask();
                self.panes.own(STORES + kind).store(mask, Ordering::Relaxed);
                mask
            }
            _ => self.panes.of(0, STORES + kind),
        };
        self.streaming = stores::way(mask, bytes);
    }

    /// It has taken the time `taken`.
    pub(super) fn note(&mut self, collective: Collective, bytes: usize, taken: Duration) {
        if self.rank == 0
            && let Some(kind) = kind(collective)
        {
            self.stores[kind].note(bytes, taken);
        }
    }

    /// How this rank writes to its window.
    pub(super) fn streaming(&self) -> Streaming {
        self.streaming
    }

    /// Gives them to operation `sequence`, if no other one uses them.
    pub(super) fn acquire(&mut self, sequence: u64) -> bool {
        *self.user.get_or_insert(sequence) == sequence
    }

    /// The operation that uses them needs them no more. The next one begins `halves` halves later.
    pub(super) fn release(&mut self, halves: usize) {
        self.first = (self.first + halves) % HALVES;
        self.user = None;
    }

    /// Which half that is, counted from the one that the operation began with.
    fn which(&self, half: usize) -> usize {
        (self.first + half) % HALVES
    }

    /// Those of the peers, from `since` on, that have not signalled this.
    pub(super) fn missing(
        &self,
        half: usize,
        what: Semaphore,
        from: Peers,
        since: Rank,
    ) -> impl Iterator<Item = Rank> {
        let semaphore = semaphore_of(what, self.which(half));
        self.semaphores.missing(&self.panes, semaphore, from, since)
    }

    /// Takes what all of these have signalled: none of them is [missing](Windows::missing).
    pub(super) fn take(&mut self, half: usize, what: Semaphore, from: Peers) {
        let semaphore = semaphore_of(what, self.which(half));
        self.semaphores.take(semaphore, from);
    }

    /// Signals to these peers. [`Windows::wake`] comes soon after.
    pub(super) fn signal(&mut self, half: usize, what: Semaphore, to: Peers) {
        let semaphore = semaphore_of(what, self.which(half));
        self.semaphores.set(&self.panes, semaphore, to);
    }

    /// Wakes the sleeping ranks for which something has been set.
    pub(super) fn wake(&mut self, links: &mut LinkTable) {
        self.semaphores.wake(&self.panes, |peer| {
            if let Some(open) = links.open(Lane::Collective, peer) {
                open.link.as_neighbour(|peer| peer.wake());
            }
        });
    }

    /// Announces that this rank is about to sleep. The caller must look once more, after this, at what the rank waits for.
    pub(super) fn arm(&self) {
        semaphores::arm(&self.panes);
    }

    /// Withdraws the announcement.
    pub(super) fn disarm(&self) {
        semaphores::disarm(&self.panes);
    }

    /// Bytes of a half of `rank`, from `at` on.
    #[inline]
    pub(super) fn read(&self, rank: Rank, half: usize, at: usize, bytes: usize) -> &[u8] {
        let at = self.place(half, at, bytes);
        match &self.panes.peers[rank] {
            Some(peer) => peer.read(at, bytes),
            None => self.panes.own.read(at, bytes),
        }
    }

    /// Bytes of the own half, from `at` on, to write.
    #[inline]
    pub(super) fn write(&mut self, half: usize, at: usize, bytes: usize) -> &mut [u8] {
        let at = self.place(half, at, bytes);
        self.panes.own.write(at, bytes)
    }

    /// Bytes of the own half to write, and as many of the peers' halves to read, from these places on.
    pub(super) fn write_beside<'a>(
        &'a mut self,
        half: usize,
        (place, at): (usize, usize),
        bytes: usize,
    ) -> (&'a mut [u8], impl Fn(Rank) -> Option<&'a [u8]>) {
        let (place, at) = (self.place(half, place, bytes), self.place(half, at, bytes));
        let peers = &self.panes.peers;
        let theirs = move |peer: Rank| peers[peer].as_ref().map(|peer| peer.read(at, bytes));
        (self.panes.own.write(place, bytes), theirs)
    }

    fn place(&self, half: usize, at: usize, bytes: usize) -> usize {
        assert!(at <= self.half && bytes <= self.half - at);
        self.which(half) * self.half + at
    }
}
