//! broadcast and reduce: along a chain of hosts that begins at the root's, one chain for each shard.
//!
//! ```text
//! broadcast, the root is rank 0    host 0          host 1          host 2
//!   scatter inside                 0 -> 1: b
//!   along the chains               0 ------- a --> 2 ------- a --> 4
//!                                  1 ------- b --> 3 ------- b --> 5
//!   all_gather inside              0 -> 1: a       2 <-> 3         4 <-> 5
//! ```
//!
//! Each host receives the elements once and sends them on once, so with many pieces the time is that of one link; the
//! first piece needs as many hops as there are hosts. reduce is the same backwards: the sums of a host go to the one
//! before it, which adds its own.

use super::embed::{Alternating, Embedding, embed};
use super::levels::{Inner, Levels};
use crate::builder::{Blocks, Steps, pieces};
use crate::types::{Collective, Rank};
use crate::{Buffer, Counts, Plan, Shape, Span, Step, Wire};

/// This rank's neighbours on its chain, if it carries a shard.
struct Chain {
    /// Nearer to the root.
    before: Option<Rank>,
    /// Farther from it.
    after: Option<Rank>,
}

impl Levels {
    fn chain(&self) -> Option<Chain> {
        let across = self.across();
        (!across.is_empty()).then(|| Chain {
            before: self.host.checked_sub(1).map(|host| across[host]),
            after: across.get(self.host + 1).copied(),
        })
    }
}

/// The pieces of a request, and the shards of each.
struct Parts<'a> {
    levels: &'a Levels,
    /// Elements of a piece.
    piece: usize,
    pieces: usize,
}

impl<'a> Parts<'a> {
    fn new(shape: &Shape, chunk: usize, levels: &'a Levels) -> Self {
        let piece = chunk.saturating_mul(levels.shards());
        Self {
            levels,
            piece,
            pieces: pieces(shape.count(), piece),
        }
    }

    /// The shard that the rank at `place` carries, of a piece of `whole`.
    fn shard(&self, whole: Span, piece: usize, place: usize) -> Span {
        let piece = whole.piece(piece, self.piece);
        piece.part(Blocks::of(self.levels.shards_of(piece.len)).range(place))
    }
}

/// Scatter on the root's host, a chain across for each shard, all_gather inside.
pub(super) fn broadcast(
    shape: &Shape,
    chunk: usize,
    levels: &Levels,
    inner: Inner,
) -> Option<Plan> {
    let mut steps = Steps::of(shape);
    let parts = Parts::new(shape, chunk, levels);
    let shard = |piece, place| parts.shard(shape.output(), piece, place);
    let is_root = shape.rank == shape.root;
    for turn in 0..=parts.pieces {
        if turn < parts.pieces {
            if levels.host == 0 {
                for place in 1..levels.shards() {
                    if is_root {
                        steps.send(levels.inside()[place], shard(turn, place));
                    } else if place == levels.place {
                        steps.recv(shape.root, shard(turn, place), Wire::Element);
                    }
                }
            }
            if let Some(chain) = levels.chain() {
                let own = shard(turn, levels.place);
                if let Some(from) = chain.before {
                    steps.recv(from, own, Wire::Element);
                }
                if let Some(to) = chain.after {
                    steps.send(to, own);
                }
            }
        }
        match turn.checked_sub(1) {
            Some(piece) if levels.nodes.is_some() => {
                share_by_node(&mut steps, shape, &parts, (piece, chunk), inner)?;
            }
            Some(piece) => share(&mut steps, shape, &parts, piece),
            None => {}
        }
    }
    Some(steps.done())
}

/// Every rank of a host gives the others its shard of a piece; the root has all.
fn share(steps: &mut Steps, shape: &Shape, parts: &Parts, piece: usize) {
    let levels = parts.levels;
    let shard = |place| parts.shard(shape.output(), piece, place);
    for distance in 1..levels.inside().len() {
        let (next, previous) = (levels.place_after(distance), levels.place_before(distance));
        let (to, from) = (levels.inside()[next], levels.inside()[previous]);
        if to != shape.root {
            steps.send(to, shard(levels.place));
        }
        if shape.rank != shape.root {
            steps.recv(from, shard(previous), Wire::Element);
        }
    }
}

/// The same by memory node, in parts of at most `chunk` elements.
fn share_by_node(
    steps: &mut Steps,
    shape: &Shape,
    parts: &Parts,
    (piece, chunk): (usize, usize),
    inner: Inner,
) -> Option<()> {
    let levels = parts.levels;
    let whole = shape.output().piece(piece, parts.piece);
    let counts = levels.shards_of(whole.len);
    let all_gather = Shape {
        in_place: true,
        widen: false,
        ..inside(shape, levels, Collective::AllGather, &counts)
    };
    let mut plan = levels.plan_inside(&all_gather, chunk, inner)?;
    // The root has all.
    plan.steps.retain(|step| match step {
        Step::Send { to, .. } => levels.inside()[*to] != shape.root,
        Step::Recv { .. } => shape.rank != shape.root,
        _ => true,
    });
    let at = Embedding {
        members: levels.inside(),
        input: whole,
        output: whole,
        scratch: Span::new(Buffer::Scratch, 0, 0),
        is_partial: false,
    };
    embed(steps, &plan, &at);
    Some(())
}

/// Reduce_scatter inside, a chain across for each shard, gather on the root's host.
pub(super) fn reduce(shape: &Shape, chunk: usize, levels: &Levels, inner: Inner) -> Option<Plan> {
    let mut steps = Steps::of(shape);
    let parts = Parts::new(shape, chunk, levels);
    let (mut for_inside, mut sums) = (Alternating::default(), Alternating::default());
    let contribution = shape.contribution();
    for turn in 0..=parts.pieces {
        if turn < parts.pieces {
            let input = contribution.piece(turn, parts.piece);
            let counts = levels.shards_of(input.len);
            let reduce_scatter = inside(shape, levels, Collective::ReduceScatter, &counts);
            let plan = levels.plan_inside(&reduce_scatter, chunk, inner)?;
            let at = Embedding {
                members: levels.inside(),
                input,
                output: sums.span(&mut steps, turn, counts[levels.place]),
                scratch: for_inside.span(&mut steps, turn, plan.scratch),
                is_partial: true,
            };
            embed(&mut steps, &plan, &at);
        }
        if let (Some(piece), Some(chain)) = (turn.checked_sub(1), levels.chain()) {
            let own = parts.shard(contribution, piece, levels.place);
            let sum = sums.span(&mut steps, piece, own.len);
            if let Some(from) = chain.after {
                steps.fold(from, sum, Wire::Partial);
            }
            match chain.before {
                Some(to) => steps.send(to, sum),
                None => gather(&mut steps, shape, &parts, (piece, sum)),
            }
        }
    }
    Some(steps.done())
}

/// The `collective` among the ranks of a host.
fn inside<'a>(
    shape: &Shape,
    levels: &Levels,
    collective: Collective,
    counts: &'a [usize],
) -> Shape<'a> {
    Shape {
        collective,
        rank: levels.place,
        world: levels.inside().len(),
        counts: Counts::PerRank(counts),
        root: 0,
        in_place: false,
        widen: shape.widen,
    }
}

/// The ranks of the root's host that carry shards complete the sums of a piece and give them to the root.
fn gather(steps: &mut Steps, shape: &Shape, parts: &Parts, (piece, sum): (usize, Span)) {
    if shape.rank != shape.root {
        steps.finish(sum, sum);
        steps.send(shape.root, sum);
        return;
    }
    let output = shape.output();
    steps.finish(sum, parts.shard(output, piece, 0));
    for place in 1..parts.levels.shards() {
        let from = parts.levels.inside()[place];
        steps.recv(from, parts.shard(output, piece, place), Wire::Partial);
    }
}
