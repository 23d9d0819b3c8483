//! Recursive doubling: log2(n) exchanges with partners at distance 1, 2, 4, ...
//!
//! After the exchange at distance d, each aligned group of 2d ranks knows the same. Everything a rank knows
//! is sent every time, so this is for messages whose latency matters more than their length (Thakur,
//! Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005).
//!
//! ```text
//! 0---1   2---3   4---5   6---7      distance 1
//! 0-------2       4-------6          distance 2   (1-3, 5-7 likewise)
//! 0---------------4                  distance 4   (1-5, 2-6, 3-7 likewise)
//! ```
//!
//! # The same bits
//!
//! Both partners of an exchange compute `low op high`, with the sum of the lower rank's group on the left:
//! the lower one folds what arrives into its sum, the upper one receives it into fresh memory and reduces its
//! own sum into that. So all ranks evaluate one expression, in rank order.
//!
//! # Any world size
//!
//! [`Core`] picks a power of two of ranks as members; each of the others is the guest of a member, hands it
//! its contribution before the exchanges and gets the result after them.

use super::builder::{Blocks, Steps};
use super::cost::{Bill, Taken, Work};
use super::direct::own_block;
use super::family::Family;
use super::{Buffer, Plan, Shape, Span, Wire};
use crate::types::{Collective, Rank};

/// Recursive doubling.
pub(super) const FAMILY: Family = Family {
    serves: |shape| match shape.collective {
        Collective::AllReduce => true,
        Collective::AllGather => shape.world.is_power_of_two(),
        _ => false,
    },
    build: |shape, _| match shape.collective {
        Collective::AllReduce => Some(all_reduce(shape)),
        Collective::AllGather => Some(all_gather(shape)),
        _ => None,
    },
    price,
};

fn price(collective: Collective, work: &Work, bill: &mut Bill) {
    let (bytes, widening) = (work.bytes, work.widening);
    if collective == Collective::AllGather {
        // `bytes` are one block.
        bill.pass(bytes);
        for round in 0..work.bruck_rounds() {
            let distance = 1 << round;
            let blocks = distance.min(work.world - distance);
            let partner = |rank| rank ^ distance;
            bill.swap(partner, bytes * blocks as f64, Taken::Copied, 1.0);
        }
        return;
    }
    let core = Core::of(work.world);
    bill.pass(bytes * widening);
    for distance in core.distances() {
        let partner = |rank| core.partner(rank, distance);
        bill.swap(partner, bytes * widening, Taken::Folded, 1.0);
        // Half of the ranks go over their sum once more, to keep the order.
        bill.pass(bytes * widening * 0.5);
    }
    if core.guests > 0 {
        bill.swap(|rank| core.companion(rank), bytes, Taken::Folded, widening);
        bill.swap(|rank| core.companion(rank), bytes, Taken::Copied, 1.0);
    }
}

/// A power of two of ranks, the members, numbered in rank order; the other ranks are guests of a member.
///
/// ```text
/// rank     0  1  2  3  4  5     world 6: 4 members, 2 guests
/// member   g  0  g  1  2  3     (even ranks below 2 * guests are guests of the next rank)
/// ```
pub(super) struct Core {
    /// The number of members.
    pub(super) members: usize,
    /// The number of guests; members below this number have one.
    pub(super) guests: usize,
}

impl Core {
    /// The largest core in `world`.
    pub(super) fn of(world: usize) -> Self {
        let members = 1 << world.ilog2();
        Self {
            members,
            guests: world - members,
        }
    }

    /// The number of `rank` among the members; `None` for a guest, whose host is rank + 1.
    pub(super) fn member(&self, rank: Rank) -> Option<usize> {
        if rank >= 2 * self.guests {
            Some(rank - self.guests)
        } else {
            (rank % 2 == 1).then_some(rank / 2)
        }
    }

    /// The rank of a member.
    pub(super) fn rank(&self, member: usize) -> Rank {
        if member < self.guests {
            2 * member + 1
        } else {
            member + self.guests
        }
    }

    /// The rank of the member that `rank` exchanges with at `distance`; a guest has none but itself.
    pub(super) fn partner(&self, rank: Rank, distance: usize) -> Rank {
        self.member(rank)
            .map_or(rank, |member| self.rank(member ^ distance))
    }

    /// The guest of a member and the member of a guest; others have none but themselves.
    pub(super) const fn companion(&self, rank: Rank) -> Rank {
        if rank < 2 * self.guests {
            rank ^ 1
        } else {
            rank
        }
    }

    /// The first rank that `member` answers for: its guest or itself. With `member` one past the last, the
    /// world.
    pub(super) fn first_rank(&self, member: usize) -> Rank {
        member + member.min(self.guests)
    }

    /// Whether the member has a guest (the rank before it).
    pub(super) fn has_guest(&self, member: usize) -> bool {
        member < self.guests
    }

    /// 1, 2, 4, ... below the number of members.
    pub(super) fn distances(&self) -> impl DoubleEndedIterator<Item = usize> + use<> {
        (0..self.members.ilog2()).map(|bit| 1 << bit)
    }
}

/// Every rank has the whole result after log2(n) exchanges of all that it has.
fn all_reduce(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    let core = Core::of(shape.world);
    let (own, output) = (shape.contribution(), shape.output());
    let Some(member) = core.member(shape.rank) else {
        let host = shape.rank + 1;
        steps.send(host, own);
        steps.recv(host, output, Wire::Element);
        return steps.done();
    };

    // The sum so far is in `sum`; `fresh` is the other place for it.
    let mut fresh = steps.scratch(output.len);
    let mut other = steps.scratch(output.len);
    let mut sum = own;
    if core.has_guest(member) {
        steps.recv(shape.rank - 1, fresh, Wire::Element);
        steps.reduce(own, fresh);
        sum = fresh;
        std::mem::swap(&mut fresh, &mut other);
    }
    for distance in core.distances() {
        let partner = member ^ distance;
        let partner_rank = core.rank(partner);
        // Before its first exchange a member without a guest has nothing but its contribution.
        let wire = if distance == 1 && !core.has_guest(partner) {
            Wire::Element
        } else {
            Wire::Partial
        };
        if member < partner {
            let mut next = sum;
            if sum == own {
                steps.copy(own, fresh);
                next = fresh;
                std::mem::swap(&mut fresh, &mut other);
            }
            steps.send(partner_rank, sum);
            steps.fold(partner_rank, next, wire);
            sum = next;
        } else {
            steps.send(partner_rank, sum);
            steps.recv(partner_rank, fresh, wire);
            steps.reduce(sum, fresh);
            sum = fresh;
            std::mem::swap(&mut fresh, &mut other);
        }
    }
    steps.finish(sum, output);
    if core.has_guest(member) {
        steps.send(shape.rank - 1, output);
    }
    steps.done()
}

/// In the exchange at distance d, partners swap the d blocks of their groups. For powers of two only.
fn all_gather(shape: &Shape) -> Plan {
    let mut steps = Steps::of(shape);
    let blocks = Blocks::of_shape(shape);
    let output = Span::new(Buffer::Output, 0, blocks.total());
    let own = own_block(&mut steps, shape, &blocks);
    for distance in Core::of(shape.world).distances() {
        let partner = shape.rank ^ distance;
        let group = |rank: Rank| {
            let first = rank & !(distance - 1);
            output.part(blocks.run(first..first + distance))
        };
        let known = if distance == 1 {
            own
        } else {
            group(shape.rank)
        };
        steps.send(partner, known);
        steps.recv(partner, group(partner), Wire::Element);
    }
    steps.done()
}
