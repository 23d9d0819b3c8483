//! Recursive halving to reduce, recursive doubling to share (Rabenseifner, "Optimization of collective
//! reduction operations", 2004).
//!
//! In each exchange two partners cut the range they are both responsible for in two: each keeps one half,
//! gives its partial sums of the other half away and folds what it gets. After log2(n) exchanges every rank
//! holds 1/n of the elements, complete; the same exchanges backwards collect the whole again:
//!
//! ```text
//! rank 0  [abcd] -> [ab..] -> [a...]  |  [a...] -> [ab..] -> [abcd]
//! rank 1  [abcd] -> [ab..] -> [.b..]  |  [.b..] -> [ab..] -> [abcd]
//! rank 2  [abcd] -> [..cd] -> [..c.]  |  [..c.] -> [..cd] -> [abcd]
//! rank 3  [abcd] -> [..cd] -> [...d]  |  [...d] -> [..cd] -> [abcd]
//! ```
//!
//! The volume is the ring's in 2 log2(n) rounds instead of 2(n-1). For other world sizes than powers of two,
//! see [`Core`]; a guest costs its host the whole message once more each way.
//!
//! Each element is completed by one rank, in one order, so all ranks get the same bits.

use super::cost::{Bill, Taken, Work};
use super::family::Family;
use std::ops::Range;

use super::builder::{Blocks, Steps, pieces, wire_from};
use super::doubling::Core;
use super::{Buffer, Plan, Shape, Span, Wire};
use crate::types::Collective;

/// Recursive halving.
pub(super) const FAMILY: Family = Family {
    serves: |shape| {
        matches!(
            shape.collective,
            Collective::AllReduce | Collective::ReduceScatter
        )
    },
    build: |shape, chunk| match shape.collective {
        Collective::AllReduce => Some(all_reduce(shape, chunk)),
        Collective::ReduceScatter => Some(reduce_scatter(shape)),
        _ => None,
    },
    price,
};

fn price(collective: Collective, work: &Work, bill: &mut Bill) {
    let core = Core::of(work.world);
    if collective == Collective::ReduceScatter {
        // `work.bytes` are one block.
        let block = work.bytes * work.widening;
        price_of_halving(work, bill, work.bytes * work.world as f64, true);
        bill.pass(block);
        if core.guests > 0 {
            bill.swap(|rank| core.companion(rank), block, Taken::Copied, 1.0);
        }
        return;
    }
    price_of_halving(work, bill, work.bytes, false);
    let mut part = work.bytes;
    for distance in core.distances() {
        part *= 0.5;
        let partner = |rank| core.partner(rank, distance);
        bill.swap(partner, part, Taken::Copied, 1.0);
    }
    if core.guests > 0 {
        bill.swap(|rank| core.companion(rank), work.bytes, Taken::Copied, 1.0);
    }
    let stretches = work.elements.div_ceil(work.piece * work.world).max(1) as f64;
    // Half of the next one is sent meanwhile.
    let sent = 0.5 * work.bytes / stretches;
    bill.waits_between(stretches, sent * bill.costs.remote_byte);
}

/// Every member is left with its part of `bytes`; the largest exchanges with the nearest or the `farthest`.
fn price_of_halving(work: &Work, bill: &mut Bill, bytes: f64, farthest: bool) {
    let core = Core::of(work.world);
    if core.guests > 0 {
        let companion = |rank| core.companion(rank);
        bill.swap(companion, bytes, Taken::Folded, work.widening);
    }
    let mut part = bytes * work.widening;
    for distance in core.distances() {
        part *= 0.5;
        let distance = match farthest {
            true => core.members / 2 / distance,
            false => distance,
        };
        let partner = |rank| core.partner(rank, distance);
        bill.swap(partner, part, Taken::Folded, 1.0);
        bill.pass(part);
    }
}

/// One exchange of the halving phase: at `distance`, the element ranges `kept` and `given`.
struct Exchange {
    distance: usize,
    kept: Range<usize>,
    given: Range<usize>,
}

/// The reducing phase of one member: its exchanges, from `own` (all this rank contributes) into `sum`.
fn halve(
    steps: &mut Steps,
    shape: &Shape,
    core: &Core,
    member: usize,
    (own, sum): (Span, Span),
    exchanges: &[Exchange],
) {
    let mut known = own;
    if core.has_guest(member) {
        steps.copy(own, sum);
        steps.fold(shape.rank - 1, sum, Wire::Element);
        known = sum;
    }
    for (
        round,
        Exchange {
            distance,
            kept,
            given,
        },
    ) in exchanges.iter().enumerate()
    {
        let partner = member ^ distance;
        // Before its first exchange a member without a guest sends from its contribution.
        let wire = if round == 0 && !core.has_guest(partner) {
            Wire::Element
        } else {
            wire_from(sum.buffer)
        };
        steps.copy(known.part(kept.clone()), sum.part(kept.clone()));
        steps.send(core.rank(partner), known.part(given.clone()));
        steps.fold(core.rank(partner), sum.part(kept.clone()), wire);
        known = sum;
    }
}

/// Halve, finish the range that is left, then double.
///
/// Nearest partners first: they exchange the most. Long buffers are reduced stretch by stretch. Each stretch leaves
/// every member with up to `chunk` elements: it is collected when the next one has been halved, while the elements to
/// send are still in the cache.
fn all_reduce(shape: &Shape, chunk: usize) -> Plan {
    let mut steps = Steps::of(shape);
    let core = Core::of(shape.world);
    let (own, output) = (shape.contribution(), shape.output());
    let stretch = chunk.saturating_mul(shape.world);
    let stretches = pieces(output.len, stretch);
    let sum = if shape.widen && core.member(shape.rank).is_some() {
        steps.scratch(output.len)
    } else {
        output
    };
    let on = |index: usize| Stretch {
        own: own.piece(index, stretch),
        sum: sum.piece(index, stretch),
        output: output.piece(index, stretch),
    };
    for index in 0..stretches {
        on(index).reduce(&mut steps, shape, &core);
        if index > 0 {
            on(index - 1).collect(&mut steps, shape, &core);
        }
    }
    on(stretches - 1).collect(&mut steps, shape, &core);
    steps.done()
}

/// A part of an all_reduce: what this rank contributes, where sums grow, and where the result goes.
struct Stretch {
    own: Span,
    sum: Span,
    output: Span,
}

impl Stretch {
    /// Halves the stretch, and finishes the range that is left.
    fn reduce(&self, steps: &mut Steps, shape: &Shape, core: &Core) {
        let Some(member) = core.member(shape.rank) else {
            steps.send(shape.rank + 1, self.own);
            return;
        };
        let exchanges = self.exchanges(core, member);
        halve(steps, shape, core, member, (self.own, self.sum), &exchanges);
        let left = match exchanges.last() {
            Some(last) => last.kept.clone(),
            None => 0..self.output.len,
        };
        steps.finish(self.sum.part(left.clone()), self.output.part(left));
    }

    /// Doubles the range until the stretch is whole again.
    fn collect(&self, steps: &mut Steps, shape: &Shape, core: &Core) {
        let Some(member) = core.member(shape.rank) else {
            steps.recv(shape.rank + 1, self.output, Wire::Element);
            return;
        };
        for Exchange {
            distance,
            kept,
            given,
        } in self.exchanges(core, member).into_iter().rev()
        {
            let partner = core.rank(member ^ distance);
            steps.send(partner, self.output.part(kept));
            steps.recv(partner, self.output.part(given), Wire::Element);
        }
        if core.has_guest(member) {
            steps.send(shape.rank - 1, self.output);
        }
    }

    fn exchanges(&self, core: &Core, member: usize) -> Vec<Exchange> {
        let mut range = 0..self.output.len;
        let halve = |distance: usize| {
            let middle = range.start + range.len() / 2;
            let (low, high) = (range.start..middle, middle..range.end);
            let (kept, given) = if member & distance == 0 {
                (low, high)
            } else {
                (high, low)
            };
            range = kept.clone();
            Exchange {
                distance,
                kept,
                given,
            }
        };
        core.distances().map(halve).collect()
    }
}

/// Halve along the boundaries of the ranks' blocks, farthest partners first, so that what a member is left
/// with is its own block and its guest's.
fn reduce_scatter(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    let core = Core::of(shape.world);
    let blocks = Blocks::of_shape(shape);
    let own = Span::new(Buffer::Input, 0, blocks.total());
    let output = Span::new(Buffer::Output, 0, blocks.range(shape.rank).len());
    let Some(member) = core.member(shape.rank) else {
        let host = shape.rank + 1;
        steps.send(host, own);
        steps.recv(host, output, Wire::Partial);
        return steps.done();
    };
    let sum = steps.scratch(own.len);
    let elements = |members: Range<usize>| {
        blocks.run(core.first_rank(members.start)..core.first_rank(members.end))
    };
    let exchanges: Vec<Exchange> = core
        .distances()
        .rev()
        .map(|distance| {
            // Aligned groups of `distance` members: this member's, and its partner's.
            let group = |of: usize| {
                let first = of & !(distance - 1);
                elements(first..first + distance)
            };
            let (kept, given) = (group(member), group(member ^ distance));
            Exchange {
                distance,
                kept,
                given,
            }
        })
        .collect();
    halve(&mut steps, shape, &core, member, (own, sum), &exchanges);
    steps.finish(sum.part(blocks.range(shape.rank)), output);
    if core.has_guest(member) {
        let guest = shape.rank - 1;
        let result = sum.part(blocks.range(guest));
        steps.finish(result, result);
        steps.send(guest, result);
    }
    steps.done()
}
