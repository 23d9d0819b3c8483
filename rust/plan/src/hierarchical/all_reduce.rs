//! all_reduce, composed of three plans.
//!
//! ```text
//!                      host 0                    host 1              r ranks on each of h hosts
//!                rank 0      rank 1        rank 2      rank 3
//! elements        a b         a b           a b         a b
//! reduce_scatter  A0           B0           A1           B1          inside: rank i of a host sums up shard i
//! all_reduce      A0+A1 ...... | .......... A0+A1        |           across: rank i with rank i of the other hosts
//!                              B0+B1 .................. B0+B1
//! all_gather      A B         A B           A B         A B          inside
//! ```
//!
//! Each host sends and receives 2(h-1)/h of the elements, however many ranks it has, where a ring around all n ranks
//! sends 2(n-1)/n of them over each host's link even if its ranks are neighbours. Each element is summed up in the same
//! order for all ranks, so they get the same bits.

use super::embed::{Alternating, Embedding, embed};
use super::levels::{Inner, Levels, MOST_HOSTS_AT_ONCE, at_once};
use crate::builder::{Blocks, Steps, pieces};
use crate::types::Collective;
use crate::{Algorithm, Buffer, Counts, Plan, Shape, Span};

/// Reduce_scatter inside, all_reduce across, all_gather inside, piece by piece.
pub(super) fn all_reduce(
    shape: &Shape,
    chunk: usize,
    levels: &Levels,
    inner: Inner,
) -> Option<Plan> {
    let mut composition = Composition::new(shape, chunk, levels, inner);
    let last = composition.pieces - 1;
    for turn in 0..composition.pieces + 2 {
        if turn <= last {
            composition.reduce_inside(turn)?;
        }
        if (1..=last + 1).contains(&turn) {
            composition.reduce_across(turn - 1)?;
        }
        if turn >= 2 {
            composition.gather_inside(turn - 2)?;
        }
    }
    Some(composition.steps.done())
}

/// How shards are summed up between `hosts` hosts, each with all others at once or with one at a time. No algorithm here
/// sends more than a ring; of few hosts a ring keeps the links busiest, and between many it takes too many rounds.
pub(super) const fn algorithm_across(hosts: usize, is_at_once: bool) -> Algorithm {
    if is_at_once {
        Algorithm::TwoShot
    } else if hosts > MOST_HOSTS_AT_ONCE && hosts.is_power_of_two() {
        Algorithm::Halving
    } else {
        Algorithm::Ring
    }
}

/// A composed plan being written.
struct Composition<'a> {
    shape: &'a Shape<'a>,
    levels: &'a Levels,
    chunk: usize,
    inner: Inner,
    /// Elements of a piece.
    piece: usize,
    pieces: usize,
    is_at_once: bool,
    steps: Steps,
    for_inside: Alternating,
    /// Sums that wait for the phase across.
    sums: Alternating,
    for_across: Alternating,
}

impl<'a> Composition<'a> {
    fn new(shape: &'a Shape<'a>, chunk: usize, levels: &'a Levels, inner: Inner) -> Self {
        let hosts = levels.hosts.len();
        let piece = chunk.saturating_mul(levels.shards()).saturating_mul(hosts);
        let message = shape.count().div_ceil(levels.shards() * hosts);
        Self {
            shape,
            levels,
            chunk,
            inner,
            piece,
            pieces: pieces(shape.count(), piece),
            is_at_once: at_once(hosts, message.min(chunk), levels.longest_at_once),
            steps: Steps::of(shape),
            for_inside: Alternating::default(),
            sums: Alternating::default(),
            for_across: Alternating::default(),
        }
    }

    fn output(&self, piece: usize) -> Span {
        self.shape.output().piece(piece, self.piece)
    }

    /// This rank's shard of a piece, in the output.
    fn own_shard(&self, piece: usize) -> Span {
        let output = self.output(piece);
        let shards = Blocks::of(self.levels.shards_of(output.len));
        output.part(shards.range(self.levels.place))
    }

    /// Where the sum of this host's contributions to the own shard is. Sums that are wider than elements wait in scratch
    /// memory: they are rounded once, at the end.
    fn sum(&mut self, piece: usize) -> Span {
        let shard = self.own_shard(piece);
        match self.shape.widen {
            true => self.sums.span(&mut self.steps, piece, shard.len),
            false => shard,
        }
    }

    /// A shape of the ranks inside, with `counts` of them.
    fn inside<'b>(&self, collective: Collective, counts: &'b [usize]) -> Shape<'b> {
        Shape {
            collective,
            rank: self.levels.place,
            world: self.levels.inside().len(),
            counts: Counts::PerRank(counts),
            root: 0,
            in_place: collective == Collective::AllGather,
            widen: false,
        }
    }

    fn reduce_inside(&mut self, piece: usize) -> Option<()> {
        let input = self.shape.contribution().piece(piece, self.piece);
        let counts = self.levels.shards_of(input.len);
        let shape = Shape {
            // In place the first contribution would overwrite the own one, before it has its turn.
            widen: self.shape.widen || self.shape.in_place,
            ..self.inside(Collective::ReduceScatter, &counts)
        };
        let plan = self.levels.plan_inside(&shape, self.chunk, self.inner)?;
        let output = self.sum(piece);
        let scratch = self.for_inside.span(&mut self.steps, piece, plan.scratch);
        let at = Embedding {
            members: self.levels.inside(),
            input,
            output,
            scratch,
            is_partial: true,
        };
        embed(&mut self.steps, &plan, &at);
        Some(())
    }

    fn reduce_across(&mut self, piece: usize) -> Option<()> {
        let members = self.levels.across();
        if members.is_empty() {
            return Some(());
        }
        let shard = self.own_shard(piece);
        let shape = Shape {
            collective: Collective::AllReduce,
            rank: self.levels.host,
            world: members.len(),
            counts: Counts::Even(shard.len),
            root: 0,
            in_place: !self.shape.widen,
            widen: self.shape.widen,
        };
        let plan = (self.inner)(
            algorithm_across(shape.world, self.is_at_once),
            &shape,
            self.chunk,
        )?;
        let input = self.sum(piece);
        let scratch = self.for_across.span(&mut self.steps, piece, plan.scratch);
        let at = Embedding {
            members: &members,
            input,
            output: shard,
            scratch,
            is_partial: false,
        };
        embed(&mut self.steps, &plan, &at);
        Some(())
    }

    fn gather_inside(&mut self, piece: usize) -> Option<()> {
        let output = self.output(piece);
        let counts = self.levels.shards_of(output.len);
        let shape = self.inside(Collective::AllGather, &counts);
        let plan = self.levels.plan_inside(&shape, self.chunk, self.inner)?;
        let at = Embedding {
            members: self.levels.inside(),
            input: output,
            output,
            scratch: Span::new(Buffer::Scratch, 0, 0),
            is_partial: false,
        };
        embed(&mut self.steps, &plan, &at);
        Some(())
    }
}
