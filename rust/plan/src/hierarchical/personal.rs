//! all_to_all, gather and scatter: every block has one reader, and the blocks that one host has for a rank of another go to it
//! together. As many bytes cross as without, in fewer messages: worth its copies where a message costs more than a block does.
//!
//! For each rank of another host one rank of this host is the *carrier*. Each rank gives the carriers beside it what they carry
//! of its own, and a carrier sends on what it has from all.
//!
//! ```text
//! all_to_all, 2 hosts of 2 ranks      beside, for the other host     across, of both ranks
//!   host 0: ranks 0, 1                0 -> 1: 0's for 3              0 -> 2: 0's and 1's for 2
//!   host 1: ranks 2, 3                1 -> 0: 1's for 2              1 -> 3: 0's and 1's for 3
//! ```
//!
//! In gather and scatter the first rank of each host carries all that goes to the root or comes from it.

use super::levels::Levels;
use crate::builder::{Steps, wire_from};
use crate::types::Rank;
use crate::{Buffer, Plan, Shape, Span, Wire};

impl Levels {
    /// The ranks of the host `there` to which the rank at `place` of this host carries blocks.
    fn carried_to(&self, there: usize, place: usize) -> impl Iterator<Item = Rank> {
        let beside = self.inside().len();
        self.hosts[there]
            .iter()
            .copied()
            .skip(place)
            .step_by(beside)
    }

    /// All ranks of other hosts to which the rank at `place` of this host carries blocks: those of the next host first.
    fn carried_by(&self, place: usize) -> Vec<Rank> {
        (1..self.hosts.len())
            .flat_map(|distance| self.carried_to(self.host_after(distance), place))
            .collect()
    }
}

/// The block of each rank in a buffer.
#[derive(Clone, Copy)]
struct Rows {
    whole: Span,
    block: usize,
}

impl Rows {
    fn new(whole: Span, block: usize) -> Self {
        Self { whole, block }
    }

    /// `number` blocks from the one at `first` on.
    fn run(self, first: usize, number: usize) -> Span {
        self.whole
            .part(first * self.block..(first + number) * self.block)
    }

    fn of(self, place: usize) -> Span {
        self.run(place, 1)
    }

    /// The blocks of `ranks`, if they lie one after the other.
    fn together(self, ranks: &[Rank]) -> Option<Span> {
        let follow = |pair: &[Rank]| pair[1] == pair[0] + 1;
        let first = *ranks.first()?;
        ranks
            .windows(2)
            .all(follow)
            .then(|| self.run(first, ranks.len()))
    }
}

/// `number` blocks of scratch memory.
fn scratch(steps: &mut Steps, number: usize, block: usize) -> Rows {
    Rows::new(steps.scratch(number * block), block)
}

/// Scratch memory for messages whose blocks lie apart: two places, used by turns.
struct Places {
    most: usize,
    block: usize,
    places: [Option<Rows>; 2],
    turn: usize,
}

impl Places {
    /// For at most `most` blocks in a message.
    fn new(most: usize, block: usize) -> Self {
        Self {
            most,
            block,
            places: [None; 2],
            turn: 0,
        }
    }

    fn next(&mut self, steps: &mut Steps, number: usize) -> Rows {
        self.turn += 1;
        let place = &mut self.places[self.turn % 2];
        let rows = place.get_or_insert_with(|| scratch(steps, self.most, self.block));
        Rows::new(rows.run(0, number), self.block)
    }

    /// The blocks of `ranks`, one after the other: where they lie so, or copied together.
    fn packed(&mut self, steps: &mut Steps, rows: Rows, ranks: &[Rank]) -> Span {
        if let Some(span) = rows.together(ranks) {
            return span;
        }
        let copies = self.next(steps, ranks.len());
        for (place, rank) in ranks.iter().enumerate() {
            steps.copy(rows.of(*rank), copies.of(place));
        }
        copies.whole
    }

    /// Receives the blocks of `ranks` in one message, each into its place.
    fn unpacked(
        &mut self,
        steps: &mut Steps,
        from: Rank,
        rows: Rows,
        (ranks, wire): (&[Rank], Wire),
    ) {
        if let Some(span) = rows.together(ranks) {
            return steps.recv(from, span, wire);
        }
        let copies = self.next(steps, ranks.len());
        steps.recv(from, copies.whole, wire);
        for (place, rank) in ranks.iter().enumerate() {
            steps.copy(copies.of(place), rows.of(*rank));
        }
    }
}

/// Sends blocks for this host's ranks to them, and blocks for other hosts to their carriers; then exchanges between hosts.
pub(super) fn all_to_all(shape: &Shape, levels: &Levels) -> Plan {
    let mut steps = Steps::of(shape);
    let (world, block) = (shape.world, shape.count());
    let input = Rows::new(Span::new(Buffer::Input, 0, world * block), block);
    let output = Rows::new(Span::new(Buffer::Output, 0, world * block), block);
    let beside = levels.inside().len();
    let carried = levels.carried_by(levels.place);
    // For each rank that this one carries blocks to, those of all ranks of this host.
    let areas: Vec<Rows> = carried
        .iter()
        .map(|_| scratch(&mut steps, beside, block))
        .collect();

    steps.copy(input.of(shape.rank), output.of(shape.rank));
    for (area, rank) in areas.iter().zip(&carried) {
        steps.copy(input.of(*rank), area.of(levels.place));
    }
    // The first carries most.
    let most = levels.carried_by(0).len();
    let (mut packs, mut arrivals) = (Places::new(most, block), Places::new(most, block));
    for distance in 1..beside {
        let (next, previous) = (levels.place_after(distance), levels.place_before(distance));
        let (to, from) = (levels.inside()[next], levels.inside()[previous]);
        steps.send(to, input.of(to));
        steps.recv(from, output.of(from), Wire::Element);
        let given = levels.carried_by(next);
        if !given.is_empty() {
            let given = packs.packed(&mut steps, input, &given);
            steps.send(to, given);
        }
        // As the sender's own list is packed, or not.
        let wire = wire_from(match input.together(&carried) {
            Some(span) => span.buffer,
            None => Buffer::Scratch,
        });
        match areas[..] {
            [] => {}
            [area] => steps.recv(from, area.of(previous), wire),
            _ => {
                let copies = arrivals.next(&mut steps, areas.len());
                steps.recv(from, copies.whole, wire);
                for (number, area) in areas.iter().enumerate() {
                    steps.copy(copies.of(number), area.of(previous));
                }
            }
        }
    }
    across(&mut steps, levels, output, &areas);
    steps.done()
}

/// Each carrier sends what it has for a rank of another host, and each rank receives what the carriers of other hosts have for
/// it.
fn across(steps: &mut Steps, levels: &Levels, output: Rows, areas: &[Rows]) {
    let mut areas = areas.iter();
    let longest = levels.longest();
    let mut arrivals = Places::new(longest, output.block);
    for distance in 1..levels.hosts.len() {
        let there = levels.host_after(distance);
        let before = levels.host_before(distance);
        let theirs = &levels.hosts[before];
        let mut given = levels.carried_to(there, levels.place);
        // A carrier sends to the ranks of a host in their order.
        let turn = levels.place / theirs.len();
        for round in 0..longest {
            if let Some(to) = given.next()
                && let Some(area) = areas.next()
            {
                steps.send(to, area.whole);
            }
            if round == turn {
                let from = levels.carrier(before, levels.place);
                arrivals.unpacked(steps, from, output, (theirs, Wire::Partial));
            }
        }
    }
}

/// Each host's blocks to its first rank, and from there to the root.
pub(super) fn gather(shape: &Shape, levels: &Levels) -> Plan {
    let mut steps = Steps::of(shape);
    let block = shape.count();
    let own = Span::new(Buffer::Input, 0, block);
    let carrier = levels.inside()[0];
    if shape.rank == shape.root {
        let output = Span::new(Buffer::Output, 0, shape.world * block);
        let output = Rows::new(output, block);
        steps.copy(own, output.of(shape.rank));
        for &from in &levels.inside()[1..] {
            steps.recv(from, output.of(from), Wire::Element);
        }
        let mut arrivals = Places::new(levels.longest(), block);
        for ranks in &levels.hosts[1..] {
            let wire = wire_from(match ranks.len() {
                1 => Buffer::Input,
                _ => Buffer::Scratch,
            });
            arrivals.unpacked(&mut steps, ranks[0], output, (ranks, wire));
        }
    } else if shape.rank != carrier {
        steps.send(carrier, own);
    } else if levels.inside().len() == 1 {
        steps.send(shape.root, own);
    } else {
        let blocks = scratch(&mut steps, levels.inside().len(), block);
        steps.copy(own, blocks.of(0));
        for (place, &from) in levels.inside().iter().enumerate().skip(1) {
            steps.recv(from, blocks.of(place), Wire::Element);
        }
        steps.send(shape.root, blocks.whole);
    }
    steps.done()
}

/// gather backwards.
pub(super) fn scatter(shape: &Shape, levels: &Levels) -> Plan {
    let mut steps = Steps::of(shape);
    let block = shape.count();
    let own = Span::new(Buffer::Output, 0, block);
    let carrier = levels.inside()[0];
    if shape.rank == shape.root {
        let input = Span::new(Buffer::Input, 0, shape.world * block);
        let input = Rows::new(input, block);
        let mut packs = Places::new(levels.longest(), block);
        for ranks in &levels.hosts[1..] {
            let blocks = packs.packed(&mut steps, input, ranks);
            steps.send(ranks[0], blocks);
        }
        for &to in &levels.inside()[1..] {
            steps.send(to, input.of(to));
        }
        steps.copy(input.of(shape.rank), own);
        return steps.done();
    }
    let input = Rows::new(Span::new(Buffer::Input, 0, shape.world * block), block);
    // As the root's blocks for this host lie.
    let wire = match input.together(levels.inside()) {
        Some(_) => Wire::Element,
        None => Wire::Partial,
    };
    if levels.host == 0 || levels.inside().len() == 1 {
        steps.recv(shape.root, own, Wire::Element);
    } else if shape.rank != carrier {
        steps.recv(carrier, own, Wire::Partial);
    } else {
        let blocks = scratch(&mut steps, levels.inside().len(), block);
        steps.recv(shape.root, blocks.whole, wire);
        for (place, &to) in levels.inside().iter().enumerate().skip(1) {
            steps.send(to, blocks.of(place));
        }
        steps.copy(blocks.of(0), own);
    }
    steps.done()
}
