//! Every rank exchanges messages with every other.
//!
//! The fewest rounds there can be. Every rank talks to every other, so the number of messages grows with the
//! square of the world size and, in one shot, so does the volume: for small messages, or few ranks.
//!
//! # The order of exchanges
//!
//! Moving collectives go around a circle: in step k a rank sends to rank + k and receives from rank - k, so
//! that in no step two ranks send to the same one.
//!
//! Reducing collectives fold in rank order, `((x0 op x1) op x2) op ...`, whatever the size and the world,
//! which makes their result the reference for reproducible sums. A rank therefore meets its peers in
//! ascending order, and in each meeting both send and both receive:
//!
//! ```text
//! rank 0:  0-1  0-2  0-3               a pair (a, b) with a < b meets after all pairs before it in
//! rank 1:  0-1       1-2  1-3          lexicographic order that share a rank with it. That order is total,
//! rank 2:       0-2  1-2       2-3     so no circle of ranks can wait for each other.
//! rank 3:            0-3  1-3  2-3
//! ```

mod price;

pub(super) use self::price::{DIRECT, TWO_SHOT};
use super::builder::{Blocks, Steps, pieces};
use super::{Buffer, Counts, Plan, Shape, Span, Wire};
use crate::types::{Collective, Rank};

/// Any collective in a world of one.
pub(super) fn alone(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    match shape.collective {
        Collective::AllReduce
        | Collective::Reduce
        | Collective::ReduceScatter
        | Collective::Scan => {
            let len = Blocks::of_shape(shape).total();
            let output = Span::new(Buffer::Output, 0, len);
            let mut own = output;
            if !shape.in_place {
                own.buffer = Buffer::Input;
            }
            if shape.widen {
                let sum = steps.scratch(len);
                steps.copy(own, sum);
                own = sum;
            }
            steps.finish(own, output);
        }
        Collective::AllGather if shape.in_place => {}
        Collective::AllGather | Collective::Gather | Collective::Scatter | Collective::AllToAll => {
            let len = match shape.counts {
                Counts::PerPair { send, .. } => send[0],
                _ => Blocks::of_shape(shape).total(),
            };
            let input = Span::new(Buffer::Input, 0, len);
            steps.copy(input, Span::new(Buffer::Output, 0, len));
        }
        Collective::Broadcast
        | Collective::Barrier
        | Collective::Exscan
        | Collective::Send
        | Collective::Recv => {}
    }
    steps.done()
}

/// One rank's part in a direct reduction.
struct Folding {
    /// This rank's contribution to its own result.
    own: Span,
    /// Where the result goes.
    result: Span,
    /// Whether the sum can grow where the result goes.
    grows_in_result: bool,
    /// The longest result of any rank: how far the pieces of all ranks go.
    longest: usize,
    /// Pieces of this many elements, so that a sum stays in the cache while all contributions are folded into
    /// it.
    chunk: usize,
}

impl Folding {
    fn pieces(&self) -> usize {
        pieces(self.longest, self.chunk)
    }

    /// Where the sums of two neighbouring pieces grow, if not in the result.
    fn sums(&self, steps: &mut Steps) -> Option<[Span; 2]> {
        let length = self.chunk.min(self.result.len);
        (!self.grows_in_result).then(|| [(); 2].map(|()| steps.scratch(length)))
    }
}

/// Folds what every rank sends this one, in rank order, and sends every other rank what `outgoing` says.
fn fold_in_rank_order(
    steps: &mut Steps,
    shape: &Shape,
    folding: &Folding,
    outgoing: impl Fn(Rank) -> Option<Span>,
) {
    let sums = folding.sums(steps);
    for index in 0..folding.pieces() {
        fold_piece(steps, shape, folding, (&sums, index), &outgoing);
    }
}

/// The same for piece `index`.
fn fold_piece(
    steps: &mut Steps,
    shape: &Shape,
    folding: &Folding,
    (sums, index): (&Option<[Span; 2]>, usize),
    outgoing: impl Fn(Rank) -> Option<Span>,
) {
    let chunk = folding.chunk;
    let own = folding.own.piece(index, chunk);
    let result = folding.result.piece(index, chunk);
    let sum = match sums {
        None => result,
        Some(sums) => sums[index % 2].part(0..result.len),
    };
    for peer in 0..shape.world {
        if peer == shape.rank {
            if peer == 0 {
                // Left out when the sum starts where this rank's contribution lies.
                steps.copy(own, sum);
            } else {
                steps.reduce(own, sum);
            }
            continue;
        }
        if let Some(span) = outgoing(peer) {
            steps.send(peer, span.piece(index, chunk));
        }
        if peer == 0 {
            steps.recv(peer, sum, Wire::Element);
        } else {
            steps.fold(peer, sum, Wire::Element);
        }
    }
    steps.finish(sum, result);
}

/// Every rank sends all it has to all others and folds all it gets.
///
/// In place the output cannot be the sum, because it is still being sent when the first peer's elements
/// arrive; rank 0 of two ranks can wait for its one send instead.
fn all_reduce(shape: &Shape, chunk: usize) -> Plan {
    let mut steps = Steps::of(shape);
    let (own, result) = (shape.contribution(), shape.output());
    let overwrites_own = shape.in_place && (shape.rank, shape.world) != (0, 2);
    let folding = Folding {
        own,
        result,
        grows_in_result: !shape.widen && !overwrites_own,
        longest: result.len,
        chunk,
    };
    fold_in_rank_order(&mut steps, shape, &folding, |_| Some(own));
    steps.done()
}

/// Every rank sends all it has to those after it, and folds what those before it send; the sum of a scan ends with its own.
///
/// In place the output cannot be the sum, because it is still to be sent.
fn prefix(shape: &Shape, chunk: usize) -> Plan {
    let mut steps = Steps::of(shape);
    let folding = Folding {
        own: shape.contribution(),
        result: shape.output(),
        grows_in_result: !shape.widen && (!shape.in_place || shape.rank == 0),
        longest: shape.count(),
        chunk,
    };
    let sums = folding.sums(&mut steps);
    for index in 0..folding.pieces() {
        let own = folding.own.piece(index, chunk);
        let result = folding.result.piece(index, chunk);
        let sum = match &sums {
            None => result,
            Some(sums) => sums[index % 2].part(0..result.len),
        };
        for peer in 0..shape.rank {
            match peer {
                0 => steps.recv(peer, sum, Wire::Element),
                _ => steps.fold(peer, sum, Wire::Element),
            }
        }
        for peer in shape.rank + 1..shape.world {
            steps.send(peer, own);
        }
        match shape.collective {
            Collective::Scan if shape.rank == 0 => steps.copy(own, sum),
            Collective::Scan => steps.reduce(own, sum),
            _ => {}
        }
        if shape.contributors() > 0 {
            steps.finish(sum, result);
        }
    }
    steps.done()
}

/// First shot: rank r folds slice r of all ranks. Second shot: every rank sends its slice to all.
///
/// Both go on at the same time, piece by piece: a piece is sent on when the next one has been folded, while it is still
/// in the cache, and no rank waits for a sum that others have only just begun.
fn all_reduce_two_shot(shape: &Shape, chunk: usize) -> Plan {
    let mut steps = Steps::of(shape);
    let slices = Blocks::split(shape.count(), shape.world);
    let output = shape.output();
    let result = output.part(slices.range(shape.rank));
    let folding = folding_of_slice(shape, &slices, result, chunk);
    let sums = folding.sums(&mut steps);
    let share = |steps: &mut Steps, index: usize| {
        for distance in 1..shape.world {
            let (to, from) = (shape.after(distance), shape.before(distance));
            let theirs = output.part(slices.range(from));
            steps.send(to, result.piece(index, chunk));
            steps.recv(from, theirs.piece(index, chunk), Wire::Element);
        }
    };
    for index in 0..folding.pieces() {
        let sums = (&sums, index);
        fold_piece(&mut steps, shape, &folding, sums, |peer| {
            Some(shape.contribution().part(slices.range(peer)))
        });
        if index > 0 {
            share(&mut steps, index - 1);
        }
    }
    share(&mut steps, folding.pieces() - 1);
    steps.done()
}

/// Folds this rank's slice of every rank's contribution into `result`.
fn fold_slice(steps: &mut Steps, shape: &Shape, slices: &Blocks, result: Span, chunk: usize) {
    let folding = folding_of_slice(shape, slices, result, chunk);
    fold_in_rank_order(steps, shape, &folding, |peer| {
        Some(shape.contribution().part(slices.range(peer)))
    });
}

fn folding_of_slice(shape: &Shape, slices: &Blocks, result: Span, chunk: usize) -> Folding {
    let contribution = shape.contribution();
    let own = contribution.part(slices.range(shape.rank));
    // Folding starts with rank 0's elements, which must not overwrite one's own before their turn.
    let overwrites_own = result == own && shape.rank != 0;
    let must_widen = shape.widen && result.buffer != Buffer::Scratch;
    Folding {
        own,
        result,
        grows_in_result: !must_widen && !overwrites_own,
        longest: slices.longest(),
        chunk,
    }
}

/// Sends one message to each other rank and receives one from each: the spans for `to` and `from` are
/// `outgoing(to)` and `incoming(from)`. `own`, if any, is copied. Two ranks do that while their messages are under way,
/// more of them before: there always is another message.
fn exchange(
    steps: &mut Steps,
    shape: &Shape,
    outgoing: impl Fn(Rank) -> Span,
    incoming: impl Fn(Rank) -> Span,
    own: Option<(Span, Span)>,
) {
    let copies_first = shape.world > 2;
    if let Some((src, dst)) = own.filter(|_| copies_first) {
        steps.copy(src, dst);
    }
    for distance in 1..shape.world {
        let (to, from) = (shape.after(distance), shape.before(distance));
        steps.send(to, outgoing(to));
        steps.recv(from, incoming(from), Wire::Element);
    }
    if let Some((src, dst)) = own.filter(|_| !copies_first) {
        steps.copy(src, dst);
    }
}

/// Every rank sends its whole contribution to the root, which folds them in rank order.
fn reduce(shape: &Shape, chunk: usize) -> Plan {
    let mut steps = Steps::of(shape);
    let (own, result) = (shape.contribution(), shape.output());
    if shape.rank != shape.root {
        for index in 0..pieces(own.len, chunk) {
            steps.send(shape.root, own.piece(index, chunk));
        }
        return steps.done();
    }
    let overwrites_own = shape.in_place && shape.rank != 0;
    let folding = Folding {
        own,
        result,
        grows_in_result: !shape.widen && !overwrites_own,
        longest: result.len,
        chunk,
    };
    fold_in_rank_order(&mut steps, shape, &folding, |_| None);
    steps.done()
}

/// First shot: rank r folds slice r of all ranks. Second shot: every rank sends its slice to the root.
fn reduce_two_shot(shape: &Shape, chunk: usize) -> Plan {
    let mut steps = Steps::of(shape);
    let slices = Blocks::split(shape.count(), shape.world);
    let own_slice = slices.range(shape.rank);
    if shape.rank != shape.root {
        let result = steps.scratch(own_slice.len());
        fold_slice(&mut steps, shape, &slices, result, chunk);
        steps.send(shape.root, result);
        return steps.done();
    }
    let result = shape.output().part(own_slice);
    fold_slice(&mut steps, shape, &slices, result, chunk);
    for distance in 1..shape.world {
        let from = shape.after(distance);
        let slice = shape.output().part(slices.range(from));
        steps.recv(from, slice, Wire::Partial);
    }
    steps.done()
}

/// The root sends to all other ranks.
fn broadcast(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    if shape.rank == shape.root {
        for distance in 1..shape.world {
            steps.send(shape.after(distance), shape.output());
        }
    } else {
        steps.recv(shape.root, shape.output(), Wire::Element);
    }
    steps.done()
}

/// First shot: the root sends slice r to rank r. Second shot: every rank sends its slice to all but the
/// root, which has it.
fn broadcast_two_shot(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    let slices = Blocks::split(shape.count(), shape.world);
    let slice = |rank: Rank| shape.output().part(slices.range(rank));
    if shape.rank == shape.root {
        for distance in 1..shape.world {
            steps.send(shape.after(distance), slice(shape.after(distance)));
        }
    } else {
        steps.recv(shape.root, slice(shape.rank), Wire::Element);
    }
    for distance in 1..shape.world {
        let (to, from) = (shape.after(distance), shape.before(distance));
        if to != shape.root {
            steps.send(to, slice(shape.rank));
        }
        if shape.rank != shape.root {
            steps.recv(from, slice(from), Wire::Element);
        }
    }
    steps.done()
}

/// Every rank sends its block to all.
fn all_gather(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    let blocks = Blocks::of_shape(shape);
    let output = Span::new(Buffer::Output, 0, blocks.total());
    let place = |rank| output.part(blocks.range(rank));
    let input = Span::new(Buffer::Input, 0, place(shape.rank).len);
    let (block, own) = match shape.in_place {
        true => (place(shape.rank), None),
        false => (input, Some((input, place(shape.rank)))),
    };
    exchange(&mut steps, shape, |_| block, place, own);
    steps.done()
}

/// Puts this rank's contribution to an all_gather into its place in `Output`, and says from where to send it.
pub(super) fn own_block(steps: &mut Steps, shape: &Shape, blocks: &Blocks) -> Span {
    let place = Span::new(Buffer::Output, 0, blocks.total()).part(blocks.range(shape.rank));
    if shape.in_place {
        return place;
    }
    let input = Span::new(Buffer::Input, 0, place.len);
    steps.copy(input, place);
    input
}

/// Rank r folds block r of all ranks, in rank order.
fn reduce_scatter(shape: &Shape, chunk: usize) -> Plan {
    let mut steps = Steps::of(shape);
    let blocks = Blocks::of_shape(shape);
    let input = Span::new(Buffer::Input, 0, blocks.total());
    let own = input.part(blocks.range(shape.rank));
    let folding = Folding {
        own,
        result: Span::new(Buffer::Output, 0, own.len),
        grows_in_result: !shape.widen,
        longest: blocks.longest(),
        chunk,
    };
    fold_in_rank_order(&mut steps, shape, &folding, |peer| {
        Some(input.part(blocks.range(peer)))
    });
    steps.done()
}

/// The root receives every rank's block. The others use only their own count.
fn gather(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    let blocks = Blocks::of_shape(shape);
    let own = blocks.range(shape.rank);
    let input = Span::new(Buffer::Input, 0, own.len());
    if shape.rank != shape.root {
        steps.send(shape.root, input);
        return steps.done();
    }
    let output = Span::new(Buffer::Output, 0, blocks.total());
    steps.copy(input, output.part(own));
    for distance in 1..shape.world {
        let from = shape.after(distance);
        steps.recv(from, output.part(blocks.range(from)), Wire::Element);
    }
    steps.done()
}

/// The root sends every rank its block. The others use only their own count.
fn scatter(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    let blocks = Blocks::of_shape(shape);
    let own = blocks.range(shape.rank);
    let output = Span::new(Buffer::Output, 0, own.len());
    if shape.rank != shape.root {
        steps.recv(shape.root, output, Wire::Element);
        return steps.done();
    }
    let input = Span::new(Buffer::Input, 0, blocks.total());
    for distance in 1..shape.world {
        let to = shape.after(distance);
        steps.send(to, input.part(blocks.range(to)));
    }
    steps.copy(input.part(own), output);
    steps.done()
}

/// Pairwise exchange: in step k, send to rank + k and receive from rank - k.
fn all_to_all(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    let (sent, received) = match shape.counts {
        Counts::PerPair { send, recv } => (
            Blocks::of(send.iter().copied()),
            Blocks::of(recv.iter().copied()),
        ),
        _ => (Blocks::of_shape(shape), Blocks::of_shape(shape)),
    };
    let input = Span::new(Buffer::Input, 0, sent.total());
    let output = Span::new(Buffer::Output, 0, received.total());
    let outgoing = |to| input.part(sent.range(to));
    let incoming = |from| output.part(received.range(from));
    let own = (outgoing(shape.rank), incoming(shape.rank));
    exchange(&mut steps, shape, outgoing, incoming, Some(own));
    steps.done()
}

/// Every rank sends a message to rank 0, which answers when it has one from each. Two messages deep at any world
/// size.
fn barrier(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    if shape.rank == 0 {
        (1..shape.world).for_each(|peer| steps.await_signal(peer));
        (1..shape.world).for_each(|peer| steps.signal(peer));
    } else {
        steps.signal(0);
        steps.await_signal(0);
    }
    steps.done()
}
