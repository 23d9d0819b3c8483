//! all_gather and reduce_scatter: blocks that all ranks want from one, or one from all.
//!
//! Each block has a *carrier* on each other host. In all_gather a rank sends its block to the carriers, and a carrier
//! sends what it carries to the ranks beside it. In reduce_scatter everything goes the other way: a carrier sums up what
//! the ranks beside it contribute to the block, and sends the sum to the rank whose block it is.
//!
//! ```text
//! all_gather, 2 hosts of 2 ranks           to the carriers          beside, with the own block
//!   host 0: ranks 0, 1                     0 -> 2   1 -> 3          0 -> 1: a c     1 -> 0: b d
//!   host 1: ranks 2, 3                     2 -> 0   3 -> 1          2 -> 3: c a     3 -> 2: d b
//! ```
//!
//! Between many hosts, and from three on where blocks are long, the blocks go around from carrier to carrier instead, so that a
//! rank has two neighbours to talk to and not one on each host ([`at_once`]).
//!
//! The ranks of a host carry as many blocks as each other, or one more. Into a host comes each block of the others once:
//! no algorithm needs less.

use super::embed::Alternating;
use super::levels::{Levels, at_once};
use crate::builder::{Blocks, Steps, pieces};
use crate::direct::own_block;
use crate::types::Rank;
use crate::{Buffer, Plan, Shape, Span, Wire};

impl Levels {
    /// The rank of `host` that carries the block of the rank at `place` of another host.
    pub(super) fn carrier(&self, host: usize, place: usize) -> Rank {
        self.hosts[host][place % self.hosts[host].len()]
    }

    /// Whose blocks the rank at `place` of this host handles beside the others: its own, then those that it carries.
    fn handled(&self, place: usize) -> Vec<Rank> {
        let mut blocks = vec![self.inside()[place]];
        for distance in 1..self.hosts.len() {
            let theirs = &self.hosts[self.host_before(distance)];
            blocks.extend(theirs.iter().skip(place).step_by(self.inside().len()));
        }
        blocks
    }

    /// The messages between hosts that bring each block, of `block` elements, to its carriers, round by round.
    fn spread(&self, block: usize) -> Vec<Round> {
        match at_once(self.hosts.len(), block, self.longest_at_once) {
            true => self.spread_at_once(),
            false => self.spread_around(),
        }
    }

    /// Each rank sends its block to all carriers: to those of the next host first.
    fn spread_at_once(&self) -> Vec<Round> {
        let mut rounds = Vec::new();
        let beside = self.inside().len();
        for distance in 1..self.hosts.len() {
            let there = self.host_after(distance);
            let own_round = self.place / self.hosts[there].len();
            let theirs = &self.hosts[self.host_before(distance)];
            for round in 0..theirs.len().div_ceil(beside).max(own_round + 1) {
                let carrier = self.carrier(there, self.place);
                let carried = theirs.get(self.place + round * beside).copied();
                rounds.push(Round {
                    given: (round == own_round).then_some((carrier, self.inside()[self.place])),
                    taken: carried.map(|rank| (rank, rank)),
                });
            }
        }
        rounds
    }

    /// Blocks go around the hosts, from each carrier to that of the next host. A rank talks to few others.
    fn spread_around(&self) -> Vec<Round> {
        let hosts = self.hosts.len();
        let (next, previous) = (self.host_after(1), self.host_before(1));
        let mut rounds = Vec::new();
        for distance in 1..hosts {
            let (given, taken) = (self.host_before(distance - 1), self.host_before(distance));
            for place in 0..self.longest() {
                let round = Round {
                    given: self
                        .block_here(given, place)
                        .map(|block| (self.carrier(next, place), block)),
                    taken: self
                        .block_here(taken, place)
                        .map(|block| (self.holder(previous, taken, place), block)),
                };
                rounds.push(round);
            }
        }
        rounds
    }

    /// The rank at `place` of `host`, if this rank carries its block or is it.
    fn block_here(&self, host: usize, place: usize) -> Option<Rank> {
        let block = *self.hosts[host].get(place)?;
        (self.holder(self.host, host, place) == self.inside()[self.place]).then_some(block)
    }

    /// Which rank of the host `there` has the block of the rank at `place` of `host`.
    fn holder(&self, there: usize, host: usize, place: usize) -> Rank {
        match there == host {
            true => self.hosts[host][place],
            false => self.carrier(there, place),
        }
    }

    /// The rounds in which the ranks of this host meet: for each the peers at one distance, and the blocks that they and
    /// this rank handle, by turns.
    fn meetings(&self) -> impl Iterator<Item = Meeting> {
        (1..self.inside().len()).map(|distance| {
            let (next, previous) = (self.place_after(distance), self.place_before(distance));
            Meeting {
                next: self.inside()[next],
                of_next: self.handled(next),
                previous: self.inside()[previous],
                of_previous: self.handled(previous),
            }
        })
    }
}

/// A message to and one from a rank of another host; either may be missing. Of each, the rank at the other end, and the
/// rank whose block it carries.
#[derive(Clone, Copy)]
struct Round {
    given: Option<(Rank, Rank)>,
    taken: Option<(Rank, Rank)>,
}

impl Round {
    /// The same messages backwards.
    fn reversed(self) -> Self {
        Self {
            given: self.taken,
            taken: self.given,
        }
    }
}

/// Two ranks of the same host that a rank exchanges messages with at the same time.
struct Meeting {
    next: Rank,
    of_next: Vec<Rank>,
    previous: Rank,
    of_previous: Vec<Rank>,
}

/// Every block to its carriers, and from the carriers to all.
pub(super) fn all_gather(shape: &Shape, chunk: usize, levels: &Levels) -> Plan {
    let mut steps = Steps::of(shape);
    let blocks = Blocks::of_shape(shape);
    let output = Span::new(Buffer::Output, 0, blocks.total());
    let own = own_block(&mut steps, shape, &blocks);
    let pieces = pieces(blocks.longest(), chunk);
    let piece = |rank: Rank, index: usize| output.part(blocks.range(rank)).piece(index, chunk);
    // The own block is sent from where it was given.
    let given = |rank: Rank, index: usize| match rank == shape.rank {
        true => own.piece(index, chunk),
        false => piece(rank, index),
    };
    let handled = levels.handled(levels.place);
    // A carried block is shared one turn after it has come.
    let shared = |entry: usize, turn: usize| match entry {
        0 => (turn < pieces).then_some(turn),
        _ => turn.checked_sub(1),
    };
    for turn in 0..=pieces {
        if turn < pieces {
            for round in levels.spread(blocks.longest()) {
                if let Some((to, block)) = round.given {
                    steps.send(to, given(block, turn));
                }
                if let Some((from, block)) = round.taken {
                    steps.recv(from, piece(block, turn), Wire::Element);
                }
            }
        }
        for meeting in levels.meetings() {
            for entry in 0..handled.len().max(meeting.of_previous.len()) {
                let Some(index) = shared(entry, turn) else {
                    continue;
                };
                if let Some(rank) = handled.get(entry) {
                    steps.send(meeting.next, given(*rank, index));
                }
                if let Some(rank) = meeting.of_previous.get(entry) {
                    steps.recv(meeting.previous, piece(*rank, index), Wire::Element);
                }
            }
        }
    }
    steps.done()
}

/// From all to the carriers of a block, and from the carriers to the rank whose block it is.
pub(super) fn reduce_scatter(shape: &Shape, chunk: usize, levels: &Levels) -> Plan {
    let mut scattering = Scattering::new(shape, chunk, levels);
    for turn in 0..=scattering.pieces {
        if turn < scattering.pieces {
            scattering.sum_up_inside(turn);
        }
        if turn > 0 {
            scattering.sum_up_across(turn - 1);
        }
    }
    scattering.steps.done()
}

/// A reduce_scatter being written.
struct Scattering<'a> {
    levels: &'a Levels,
    chunk: usize,
    pieces: usize,
    steps: Steps,
    blocks: Blocks,
    /// The ranks whose blocks this one sums up: itself, and those that it carries.
    handled: Vec<Rank>,
    /// The sums of each.
    sums: Vec<Alternating>,
    /// Whether the own sum grows where the result goes.
    grows_in_result: bool,
}

impl<'a> Scattering<'a> {
    fn new(shape: &Shape, chunk: usize, levels: &'a Levels) -> Self {
        let blocks = Blocks::of_shape(shape);
        let handled = levels.handled(levels.place);
        Self {
            levels,
            chunk,
            pieces: pieces(blocks.longest(), chunk),
            steps: Steps::of(shape),
            blocks,
            sums: handled.iter().map(|_| Alternating::default()).collect(),
            handled,
            grows_in_result: !shape.widen,
        }
    }

    /// This rank's contribution to a piece of `rank`'s block.
    fn contribution(&self, rank: Rank, piece: usize) -> Span {
        let input = Span::new(Buffer::Input, 0, self.blocks.total());
        let block = input.part(self.blocks.range(rank));
        block.piece(piece, self.chunk)
    }

    fn result(&self, piece: usize) -> Span {
        let own = self.blocks.range(self.handled[0]);
        Span::new(Buffer::Output, 0, own.len()).piece(piece, self.chunk)
    }

    /// Where the sum of a piece of the block number `entry` of those handled grows.
    fn sum(&mut self, entry: usize, piece: usize) -> Span {
        if entry == 0 && self.grows_in_result {
            return self.result(piece);
        }
        let len = self.contribution(self.handled[entry], piece).len;
        self.sums[entry].span(&mut self.steps, piece, len)
    }

    /// The same for `rank`'s block, which is one of them.
    fn sum_of(&mut self, rank: Rank, piece: usize) -> Span {
        let entry = self.handled.iter().position(|handled| *handled == rank);
        self.sum(entry.unwrap_or_default(), piece)
    }

    fn sum_up_inside(&mut self, piece: usize) {
        for entry in 0..self.handled.len() {
            let own = self.contribution(self.handled[entry], piece);
            let sum = self.sum(entry, piece);
            self.steps.copy(own, sum);
        }
        for meeting in self.levels.meetings() {
            for entry in 0..self.handled.len().max(meeting.of_next.len()) {
                if let Some(rank) = meeting.of_next.get(entry) {
                    let given = self.contribution(*rank, piece);
                    self.steps.send(meeting.next, given);
                }
                if entry < self.handled.len() {
                    let sum = self.sum(entry, piece);
                    self.steps.fold(meeting.previous, sum, Wire::Element);
                }
            }
        }
    }

    fn sum_up_across(&mut self, piece: usize) {
        let longest = self.blocks.longest();
        let rounds: Vec<Round> = self.levels.spread(longest).into_iter().rev().collect();
        for round in rounds.into_iter().map(Round::reversed) {
            if let Some((to, block)) = round.given {
                let sum = self.sum_of(block, piece);
                self.steps.send(to, sum);
            }
            if let Some((from, block)) = round.taken {
                let sum = self.sum_of(block, piece);
                self.steps.fold(from, sum, Wire::Partial);
            }
        }
        let result = self.sum(0, piece);
        let finished = self.result(piece);
        self.steps.finish(result, finished);
    }
}
