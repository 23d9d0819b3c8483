//! Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems",
//! 1997: ceil(log2(n)) rounds for any world size, by talking to the ranks at distance 1, 2, 4, ... around the
//! circle.
//!
//! - barrier: each round doubles the number of ranks one has heard from (the dissemination barrier of
//!   Hensgen, Finkel and Manber, 1988).
//! - all_gather: each round doubles the number of blocks one has.
//! - scan, exscan: the same, of the ranks before one alone, whose blocks are folded in rank order at the end.
//! - all_to_all: a block that must travel i places around the circle travels 2^j places in round j for each
//!   bit j of i. Each block is sent up to log2(n) times: for blocks whose length costs less than a message.

use super::builder::{Blocks, Steps};
use super::cost::{Bill, Taken, Work};
use super::direct::own_block;
use super::family::Family;
use super::{Buffer, Counts, Plan, Shape, Span, Wire};
use crate::types::Collective;

/// Bruck's algorithms.
pub(super) const FAMILY: Family = Family {
    serves: |shape| match shape.collective {
        Collective::AllGather | Collective::Barrier | Collective::Scan | Collective::Exscan => true,
        Collective::AllToAll => matches!(shape.counts, Counts::Even(_)),
        _ => false,
    },
    build: |shape, _| match shape.collective {
        Collective::AllGather => Some(all_gather(shape)),
        Collective::AllToAll => Some(all_to_all(shape)),
        Collective::Barrier => Some(barrier(shape)),
        Collective::Scan | Collective::Exscan => Some(prefix(shape)),
        _ => None,
    },
    price,
};

/// `work.bytes` are one block.
fn price(collective: Collective, work: &Work, bill: &mut Bill) {
    match collective {
        Collective::AllGather => {
            bill.pass(work.bytes);
            for round in 0..work.bruck_rounds() {
                let distance = 1 << round;
                let blocks = distance.min(work.world - distance);
                bill.shift(distance, work.bytes * blocks as f64, Taken::Copied);
                // A run that passes the end of the world goes in two messages.
                bill.each += bill.costs.message;
            }
        }
        Collective::Scan | Collective::Exscan => {
            let bytes = work.bytes * work.widening;
            bill.pass(bytes);
            for round in 0..work.bruck_rounds() {
                let distance = 1 << round;
                let blocks = distance.min(work.world - distance);
                bill.shift(distance, bytes * blocks as f64, Taken::Copied);
            }
            // The last rank folds all blocks, the others fewer.
            let half = 0.5 * work.world as f64 * bytes * bill.costs.fold;
            bill.each += half;
            bill.root += half;
        }
        Collective::AllToAll => {
            let half = work.bytes * work.world as f64 * 0.5;
            bill.pass(work.bytes);
            bill.pass(4.0 * half);
            for round in 0..work.bruck_rounds() {
                bill.shift(1 << round, half, Taken::Copied);
                bill.pass(2.0 * half);
            }
        }
        _ => {
            for round in 0..work.bruck_rounds() {
                bill.shift(1 << round, 0.0, Taken::Copied);
            }
        }
    }
}

/// 1, 2, 4, ... below `world`.
pub(super) fn distances(world: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1), |distance| Some(distance * 2))
        .take_while(move |&distance| distance < world)
}

/// After the round at distance d, rank r has heard from the 2d ranks that end with itself. A signal waits for
/// the signals that were to come before it, see [`super::Step::must_follow`].
fn barrier(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    for distance in distances(shape.world) {
        steps.signal(shape.after(distance));
        steps.await_signal(shape.before(distance));
    }
    steps.done()
}

/// Before the round at distance d, rank r has the d blocks that begin with its own. It sends them to r - d
/// and receives those of r + d; the last round takes only the missing ones:
///
/// ```text
/// world 5, rank 3:  has 3  | from 4: 4  | from 0: 0 1  | from 2 (= 3 + 4): 2
/// ```
///
/// Blocks lie in their places in `Output` from the start, so nothing is rotated at the end; a run that passes
/// the end of the world is sent as two messages instead.
fn all_gather(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    let world = shape.world;
    let blocks = Blocks::of_shape(shape);
    let output = Span::new(Buffer::Output, 0, blocks.total());
    own_block(&mut steps, shape, &blocks);
    for distance in distances(world) {
        let len = distance.min(world - distance);
        let (to, from) = (shape.before(distance), shape.after(distance));
        let run = |first: usize| {
            let end = first + len;
            let tail = output.part(blocks.run(first..end.min(world)));
            let head = output.part(blocks.run(0..end.saturating_sub(world)));
            [tail, head]
        };
        for (given, taken) in run(shape.rank).into_iter().zip(run(from)) {
            steps.send(to, given);
            steps.recv(from, taken, Wire::Element);
        }
    }
    steps.done()
}

/// Before the round at distance d, rank r has the d blocks that end with its own, or all of the ranks before it. It sends them
/// to r + d and receives those of r - d, where there are such ranks:
///
/// ```text
/// world 5, rank 4:  has 4  | from 3: 3  | from 2: 1 2  | from 0: 0
/// ```
///
/// Blocks are folded only when all are there, so that the order is that of the ranks. Each has all of them at once, so this is
/// for messages whose latency matters more than their length.
fn prefix(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    let (rank, count) = (shape.rank, shape.count());
    let held = steps.scratch((rank + 1) * count);
    let blocks = |first: usize, end: usize| held.part(first * count..end * count);
    steps.copy(shape.contribution(), blocks(rank, rank + 1));
    for distance in distances(shape.world) {
        let run = |last: usize| blocks((last + 1).saturating_sub(distance), last + 1);
        if rank + distance < shape.world {
            steps.send(rank + distance, run(rank));
        }
        if rank >= distance {
            steps.recv(rank - distance, run(rank - distance), Wire::Partial);
        }
    }
    let sum = blocks(0, 1);
    for other in 1..shape.contributors() {
        steps.reduce(blocks(other, other + 1), sum);
    }
    if shape.contributors() > 0 {
        steps.finish(sum, shape.output());
    }
    steps.done()
}

/// `travelling(i)` is the block that is i places from where it must go: at first this rank's block for rank +
/// i, at last the one from rank - i. The round at distance d packs the blocks with the bit d in i, which lie
/// in runs of d, sends them d places on and puts those that arrive in their stead.
fn all_to_all(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    let (world, block) = (shape.world, shape.count());
    let blocks =
        |span: Span, first: usize, len: usize| span.part(first * block..(first + len) * block);
    let input = Span::new(Buffer::Input, 0, world * block);
    let output = Span::new(Buffer::Output, 0, world * block);
    let memory = steps.scratch((world - 1) * block);
    let travelling = |first: usize, len: usize| blocks(memory, first - 1, len);
    // At most this many of the numbers below `world` have any one bit.
    let most = distances(world)
        .map(|distance| runs(world, distance).map(|(_, len)| len).sum())
        .max()
        .unwrap_or(0);
    let sent = steps.scratch(most * block);
    let received = steps.scratch(most * block);

    // From the next rank's block on, then around.
    let tail = world - 1 - shape.rank;
    steps.copy(blocks(input, shape.rank + 1, tail), travelling(1, tail));
    steps.copy(
        blocks(input, 0, shape.rank),
        travelling(1 + tail, shape.rank),
    );
    for distance in distances(world) {
        let mut packed = 0;
        for (first, len) in runs(world, distance) {
            steps.copy(travelling(first, len), blocks(sent, packed, len));
            packed += len;
        }
        let arriving = blocks(received, 0, packed);
        steps.send(shape.after(distance), blocks(sent, 0, packed));
        steps.recv(shape.before(distance), arriving, Wire::Partial);
        let mut unpacked = 0;
        for (first, len) in runs(world, distance) {
            steps.copy(blocks(received, unpacked, len), travelling(first, len));
            unpacked += len;
        }
    }
    steps.copy(blocks(input, shape.rank, 1), blocks(output, shape.rank, 1));
    for i in 1..world {
        steps.copy(travelling(i, 1), blocks(output, shape.before(i), 1));
    }
    steps.done()
}

/// The runs (first, length) of numbers below `world` with the bit `distance`.
fn runs(world: usize, distance: usize) -> impl Iterator<Item = (usize, usize)> {
    (distance..world)
        .step_by(2 * distance)
        .map(move |first| (first, distance.min(world - first)))
}
