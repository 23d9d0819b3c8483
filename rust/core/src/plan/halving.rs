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

use std::ops::Range;

use super::builder::{Blocks, Steps, wire_from};
use super::doubling::Core;
use super::{Buffer, Plan, Shape, Span, Wire};

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
/// Nearest partners first: they exchange the most.
pub(super) fn all_reduce(shape: &Shape) -> Plan {
    let mut steps = Steps::default();
    let core = Core::of(shape.world);
    let (own, output) = (shape.contribution(), shape.output());
    let Some(member) = core.member(shape.rank) else {
        let host = shape.rank + 1;
        steps.send(host, own);
        steps.recv(host, output, Wire::Element);
        return steps.done();
    };
    let sum = if shape.widen {
        steps.scratch(output.len)
    } else {
        output
    };
    let mut range = 0..output.len;
    let exchanges: Vec<Exchange> = core
        .distances()
        .map(|distance| {
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
        })
        .collect();
    halve(&mut steps, shape, &core, member, (own, sum), &exchanges);
    steps.finish(sum.part(range.clone()), output.part(range));
    for Exchange {
        distance,
        kept,
        given,
    } in exchanges.into_iter().rev()
    {
        let partner = core.rank(member ^ distance);
        steps.send(partner, output.part(kept));
        steps.recv(partner, output.part(given), Wire::Element);
    }
    if core.has_guest(member) {
        steps.send(shape.rank - 1, output);
    }
    steps.done()
}

/// Halve along the boundaries of the ranks' blocks, farthest partners first, so that what a member is left
/// with is its own block and its guest's.
pub(super) fn reduce_scatter(shape: &Shape) -> Plan {
    let mut steps = Steps::default();
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
