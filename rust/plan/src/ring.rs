//! Around a ring, where every rank receives from its left neighbour (rank - 1) and sends to its right one.
//!
//! The elements are cut into one block per rank. To reduce, every block travels once around, and each rank
//! adds its own contribution as the block comes by; all blocks travel at once, one behind the other:
//!
//! ```text
//!             rank 0        rank 1        rank 2       blocks a b c; "c -> 1" sends c, "+b" adds to b
//! round 0     c -> 1, +b    a -> 2, +c    b -> 0, +a
//! round 1     b -> 1, +a    c -> 2, +b    a -> 0, +c   rank r ends with block r complete
//! ```
//!
//! To gather, each complete block travels once around likewise. Every link direction carries (n-1)/n of the
//! elements per phase, which no algorithm can beat (Patarasuk and Yuan, "Bandwidth optimal all-reduce
//! algorithms for clusters of workstations", 2009), and every rank talks to two neighbours only; but there
//! are n-1 rounds.
//!
//! Blocks go in pieces, so that a piece is sent on while the next one arrives, and one's own contribution is
//! still in the cache when the piece it is added to comes.
//!
//! A block is completed by one rank, in one order, so all ranks get the same bits.

use super::builder::{Blocks, Steps, pieces, wire_from};
use super::cost::{Bill, Taken, Work};
use super::direct::own_block;
use super::family::Family;
use super::{Buffer, Plan, Shape, Span, Wire};
use crate::types::{Collective, Rank};

/// The ring.
pub(super) const FAMILY: Family = Family {
    serves: |shape| {
        matches!(
            shape.collective,
            Collective::AllReduce
                | Collective::Reduce
                | Collective::Broadcast
                | Collective::AllGather
                | Collective::ReduceScatter
                | Collective::Scan
                | Collective::Exscan
        )
    },
    build,
    price,
};

fn build(shape: &Shape, chunk: usize) -> Option<Plan> {
    Some(match shape.collective {
        Collective::AllReduce => all_reduce(shape, chunk),
        Collective::Reduce => reduce(shape, chunk),
        Collective::Broadcast => broadcast(shape, chunk),
        Collective::AllGather => all_gather(shape, chunk),
        Collective::ReduceScatter => reduce_scatter(shape, chunk),
        Collective::Scan | Collective::Exscan => prefix(shape, chunk),
        _ => return None,
    })
}

/// `work.bytes` are one block, where the collective deals in blocks.
fn price(collective: Collective, work: &Work, bill: &mut Bill) {
    let (bytes, widening) = (work.bytes, work.widening);
    let (slice, pieces_of_slice) = (work.slice(), work.pieces_of_slice());
    let pieces = Work::pieces(work.elements);
    match collective {
        Collective::AllReduce => {
            bill.pass(bytes * widening);
            bill.around(slice * widening, pieces_of_slice, Taken::Folded, 1.0);
            bill.around(slice, pieces_of_slice, Taken::Copied, 1.0);
        }
        Collective::Reduce => {
            bill.pass(bytes * widening);
            bill.around(slice * widening, pieces_of_slice, Taken::Folded, 1.0);
            bill.rounds(1);
            bill.root_takes(slice * widening, 1.0, Taken::Copied, 1.0);
        }
        Collective::Broadcast => along_a_chain(work, bill, (bytes, 0.0)),
        Collective::Scan | Collective::Exscan => {
            // Each rank folds its own into what comes, and keeps a result of it.
            let work_of_one = bill.costs.fold + bill.costs.copy;
            along_a_chain(work, bill, (bytes * widening, work_of_one));
        }
        Collective::AllGather => {
            bill.pass(bytes);
            bill.around(bytes, pieces, Taken::Copied, 1.0);
        }
        _ => {
            let block = bytes * widening;
            bill.pass(block * work.world as f64);
            bill.around(block, pieces, Taken::Folded, 1.0);
        }
    }
}

/// `bytes` go from neighbour to neighbour in pieces; a rank works on each byte for `work_of_one` before it sends it on, and
/// then has two pieces in hand.
fn along_a_chain(work: &Work, bill: &mut Bill, (bytes, work_of_one): (f64, f64)) {
    let pieces = work.pieces_of(work.elements);
    let piece = bytes / pieces;
    bill.hops(work.world - 1);
    bill.send_right(pieces, piece, Taken::Copied, 1.0);
    bill.each += bytes * work_of_one;
    let mut hop = bill.sending(piece) + bill.taking(piece, Taken::Copied, 1.0);
    if work_of_one > 0.0 {
        hop = (hop + piece * work_of_one) * pieces.min(2.0);
    }
    bill.alone += (work.world - 2) as f64 * hop;
    let leaving = bill.at.runs.saturating_sub(1);
    bill.wire += leaving as f64 * piece;
}

/// Where a rank accumulates the block it works on.
enum Accumulator {
    /// In the block's own place in `Output`.
    Output,
    /// In two block-long buffers in turn: one is being sent while the other is folded into. The last block
    /// may go elsewhere, as it is not sent on as a partial result.
    Alternating {
        buffers: [Span; 2],
        last: Option<Span>,
    },
}

impl Accumulator {
    fn alternating(steps: &mut Steps, blocks: &Blocks, last: Option<Span>) -> Self {
        let buffers = [(); 2].map(|()| steps.scratch(blocks.longest()));
        Self::Alternating { buffers, last }
    }

    /// The place for `block` in `round`.
    fn place(&self, blocks: &Blocks, block: Rank, round: usize, final_round: bool) -> Span {
        let range = blocks.range(block);
        match self {
            Self::Output => Span::new(Buffer::Output, range.start, range.len()),
            Self::Alternating {
                last: Some(last), ..
            } if final_round => *last,
            Self::Alternating { buffers, .. } => buffers[round % 2].part(0..range.len()),
        }
    }
}

/// The reducing half. `contribution` holds all blocks. This rank's block ends, finished, in `result`, or
/// where it was summed up when there is no output for it; returns where it is.
fn reduce_blocks(
    steps: &mut Steps,
    shape: &Shape,
    blocks: &Blocks,
    contribution: Span,
    accumulator: &Accumulator,
    result: Option<Span>,
    chunk: usize,
) -> Span {
    let (left, right) = (shape.before(1), shape.after(1));
    let rounds = shape.world - 1;
    let mut given = contribution.part(blocks.range(left));
    let mut wire = wire_from(given.buffer);
    for round in 0..rounds {
        let taken = (shape.rank + 2 * shape.world - 2 - round) % shape.world;
        let sum = accumulator.place(blocks, taken, round, round + 1 == rounds);
        let own = contribution.part(blocks.range(taken));
        for index in 0..pieces(given.len.max(sum.len), chunk) {
            let sum = sum.piece(index, chunk);
            steps.copy(own.piece(index, chunk), sum);
            steps.send(right, given.piece(index, chunk));
            steps.fold(left, sum, wire);
            if round + 1 == rounds {
                let result = result.map_or(sum, |result| result.piece(index, chunk));
                steps.finish(sum, result);
            }
        }
        given = sum;
        wire = match accumulator {
            Accumulator::Output => Wire::Element,
            Accumulator::Alternating { .. } => Wire::Partial,
        };
    }
    result.unwrap_or(given)
}

/// The gathering half: `own` is this rank's block, complete; all blocks end in `Output`.
fn share_blocks(steps: &mut Steps, shape: &Shape, blocks: &Blocks, own: Span, chunk: usize) {
    let output = Span::new(Buffer::Output, 0, blocks.total());
    let mut given = own;
    for round in 0..shape.world - 1 {
        let taken = output.part(blocks.range(shape.before(round + 1)));
        for index in 0..pieces(given.len.max(taken.len), chunk) {
            steps.send(shape.after(1), given.piece(index, chunk));
            steps.recv(shape.before(1), taken.piece(index, chunk), Wire::Element);
        }
        given = taken;
    }
}

/// Reduce the blocks, then share them.
pub(super) fn all_reduce(shape: &Shape, chunk: usize) -> Plan {
    let mut steps = Steps::of(shape);
    let blocks = Blocks::split(shape.count(), shape.world);
    let own = shape.contribution();
    let accumulator = if shape.widen {
        Accumulator::alternating(&mut steps, &blocks, None)
    } else {
        Accumulator::Output
    };
    let result = Some(shape.output().part(blocks.range(shape.rank)));
    let result = reduce_blocks(&mut steps, shape, &blocks, own, &accumulator, result, chunk);
    share_blocks(&mut steps, shape, &blocks, result, chunk);
    steps.done()
}

/// Reduce the blocks.
fn reduce_scatter(shape: &Shape, chunk: usize) -> Plan {
    let mut steps = Steps::of(shape);
    let blocks = Blocks::of_shape(shape);
    let own = Span::new(Buffer::Input, 0, blocks.total());
    let output = Span::new(Buffer::Output, 0, blocks.range(shape.rank).len());
    let last = (!shape.widen).then_some(output);
    let accumulator = Accumulator::alternating(&mut steps, &blocks, last);
    let result = Some(output);
    reduce_blocks(&mut steps, shape, &blocks, own, &accumulator, result, chunk);
    steps.done()
}

/// Reduce the blocks, then every rank sends its block to the root.
fn reduce(shape: &Shape, chunk: usize) -> Plan {
    let mut steps = Steps::of(shape);
    let blocks = Blocks::split(shape.count(), shape.world);
    let own = shape.contribution();
    let accumulator = Accumulator::alternating(&mut steps, &blocks, None);
    let place = |rank: Rank| shape.output().part(blocks.range(rank));
    let is_root = shape.rank == shape.root;
    let result = is_root.then(|| place(shape.rank));
    let result = reduce_blocks(&mut steps, shape, &blocks, own, &accumulator, result, chunk);
    if !is_root {
        steps.send(shape.root, result);
        return steps.done();
    }
    for distance in 1..shape.world {
        let from = shape.after(distance);
        steps.recv(from, place(from), Wire::Partial);
    }
    steps.done()
}

/// Share the blocks.
fn all_gather(shape: &Shape, chunk: usize) -> Plan {
    debug_assert_eq!(shape.collective, Collective::AllGather);
    let mut steps = Steps::of(shape);
    let blocks = Blocks::of_shape(shape);
    let own = own_block(&mut steps, shape, &blocks);
    share_blocks(&mut steps, shape, &blocks, own, chunk);
    steps.done()
}

/// A chain from the root around to its left neighbour, which passes pieces of `chunk` elements on.
///
/// Each link carries the elements once and the root sends them once, half of what scattering and then sharing
/// blocks would cost it; the first piece needs n-1 hops, so the buffer should be many pieces long.
fn broadcast(shape: &Shape, chunk: usize) -> Plan {
    let mut steps = Steps::of(shape);
    let (left, right) = (shape.before(1), shape.after(1));
    let output = shape.output();
    let pieces = pieces(output.len, chunk);
    let is_first = shape.rank == shape.root;
    let is_last = right == shape.root;

    // Receive piece i+1 while piece i is sent on.
    if !is_first {
        steps.recv(left, output.piece(0, chunk), Wire::Element);
    }
    for index in 0..pieces {
        if !is_last {
            steps.send(right, output.piece(index, chunk));
        }
        if !is_first && index + 1 < pieces {
            steps.recv(left, output.piece(index + 1, chunk), Wire::Element);
        }
    }
    steps.done()
}

/// A chain from rank 0 to the last, in which each rank receives the sum of those before it and sends it on with its own at the
/// right, in pieces of `chunk` elements. Its result is the one sum or the other.
///
/// Each link carries the elements once. Sums grow in scratch memory, since those that are sent on are not finished.
fn prefix(shape: &Shape, chunk: usize) -> Plan {
    let mut steps = Steps::of(shape);
    let (own, output) = (shape.contribution(), shape.output());
    let is_inclusive = shape.collective == Collective::Scan;
    let (is_first, is_last) = (shape.rank == 0, shape.rank + 1 == shape.world);
    let has_sum = !is_first || (is_inclusive && shape.widen);
    let has_next = !is_inclusive && !is_first && !is_last;
    let mut two = |are_used: bool| {
        let length = if are_used { chunk.min(own.len) } else { 0 };
        [(); 2].map(|()| steps.scratch(length))
    };
    let (sums, nexts) = (two(has_sum), two(has_next));
    for index in 0..pieces(own.len, chunk) {
        let (own, output) = (own.piece(index, chunk), output.piece(index, chunk));
        let (mut sum, mut next) = (own, own);
        if has_sum {
            sum = sums[index % 2].part(0..own.len);
        }
        if is_first {
            // Left out where it is the sum.
            steps.copy(own, sum);
        } else {
            let wire = match shape.rank {
                1 => Wire::Element,
                _ => Wire::Partial,
            };
            steps.recv(shape.before(1), sum, wire);
            if has_next {
                next = nexts[index % 2].part(0..own.len);
                steps.copy(sum, next);
            } else {
                next = sum;
            }
            if is_inclusive || has_next {
                steps.reduce(own, next);
            }
        }
        if !is_last {
            steps.send(shape.after(1), next);
        }
        if shape.contributors() > 0 {
            steps.finish(sum, output);
        }
    }
    steps.done()
}
