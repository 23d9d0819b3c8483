//! Inside each host, across hosts, inside each host: an all_reduce composed of three plans.
//!
//! The link between two hosts carries what their ranks send together, so an algorithm that treats all ranks alike sends
//! the same bytes through it once for every rank of the host. Here each byte crosses once, and all ranks of a host carry
//! their part at the same time:
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
//! sends 2(n-1)/n of them over each host's link even if its ranks are neighbours. There is no leader: a host with several
//! cores uses all of them. The idea is in Horovod's hierarchical allreduce and in NCCL's trees of rails; the shards that
//! all ranks carry at once are those of BytePS.
//!
//! # Composition
//!
//! [`embed`] takes a plan of a smaller world and writes its steps into a larger one: its ranks become [`Place::members`],
//! its buffers become spans of the larger plan's. Any all_reduce can be the outer plan and any reduce_scatter and
//! all_gather the inner ones; [`check`](super::check) proves the result as it proves any other plan.
//!
//! The elements go in *pieces*. A piece is in one of the three phases while its neighbours are in the others, so the link
//! between the hosts is busy while the memory works. A plan is sequential, and two messages of one direction of a link
//! never overtake each other, so the phases of three pieces are written in the order in which they should run.
//!
//! # Hosts that differ
//!
//! There are as many shards as the smallest host has ranks. On a larger host the other ranks contribute to all shards and
//! receive all of them, and carry none.
//!
//! Each element is summed up in the same order for all ranks, so they get the same bits.

use super::builder::{Blocks, Steps, pieces};
use super::topology::Topology;
use super::{Algorithm, Buffer, Counts, Plan, Shape, Span, Step, Wire, build_chunked};
use crate::types::{Collective, Rank};

/// Whether there is a plan for `shape` with the ranks as in `topology`.
pub fn serves(shape: &Shape, topology: &Topology) -> bool {
    shape.collective == Collective::AllReduce
        && matches!(shape.counts, Counts::Even(_))
        && shape.world == topology.host_of.len()
        && topology.spans_hosts()
        && topology.shares_hosts()
}

/// The ranks of the three phases, as one of them sees them.
struct Levels {
    /// The ranks of this rank's host, in ascending order, and its place among them.
    inside: Vec<Rank>,
    place: usize,
    /// The ranks that carry this rank's shard, one on each host; none if it carries none.
    across: Vec<Rank>,
    /// This rank's host, by the order of the hosts' first ranks.
    host: usize,
    /// Ranks of each host that carry shards.
    shards: usize,
}

impl Levels {
    fn of(rank: Rank, topology: &Topology) -> Self {
        let hosts = topology.hosts();
        let shards = hosts.iter().map(Vec::len).min().unwrap_or(1);
        let host = hosts.iter().position(|ranks| ranks.contains(&rank));
        let host = host.unwrap_or(0);
        let inside = hosts[host].clone();
        let place = inside.iter().position(|other| *other == rank).unwrap_or(0);
        let across = match place < shards {
            true => hosts.iter().map(|ranks| ranks[place]).collect(),
            false => Vec::new(),
        };
        Self {
            inside,
            place,
            across,
            host,
            shards,
        }
    }

    /// Elements of each inside rank's shard of a piece of `count`.
    fn shards_of(&self, count: usize) -> Vec<usize> {
        let shards = self.shards;
        let share = |place: usize| count / shards + usize::from(place < count % shards);
        let places = 0..self.inside.len();
        places
            .map(|place| if place < shards { share(place) } else { 0 })
            .collect()
    }
}

/// Where an embedded plan takes place.
struct Place<'a> {
    /// The larger world's rank for each of the plan's.
    members: &'a [Rank],
    input: Span,
    output: Span,
    /// At least as long as the plan needs.
    scratch: Span,
    /// Sums are handed on to a later phase, and finished there.
    is_partial: bool,
}

/// The parts are plans of messages.
const NO_WINDOWS: &str = "a part of a hierarchy uses no windows";

/// Writes `plan` into `steps`.
///
/// What it reads of its input travels as the larger plan's buffer has it: partial sums, where that is `Scratch`. Plans
/// that widen receive what was input in `Scratch` alone, and others have an input of the type of the output.
fn embed(steps: &mut Steps, plan: &Plan, place: &Place) {
    debug_assert!(plan.scratch <= place.scratch.len);
    let at = |span: Span| {
        let whole = match span.buffer {
            Buffer::Input => place.input,
            Buffer::Output => place.output,
            Buffer::Scratch => place.scratch,
            Buffer::Window { .. } => unreachable!("{NO_WINDOWS}"),
        };
        Span::new(whole.buffer, whole.offset + span.offset, span.len)
    };
    let takes_partial = place.input.buffer == Buffer::Scratch;
    let wire = |wire: Wire, dst: &Span| match takes_partial && dst.buffer == Buffer::Scratch {
        true => Wire::Partial,
        false => wire,
    };
    for step in &plan.steps {
        match *step {
            Step::Send { to, src } => steps.send(place.members[to], at(src)),
            Step::Recv {
                from,
                dst,
                wire: carried,
            } => steps.recv(place.members[from], at(dst), wire(carried, &dst)),
            Step::Fold {
                from,
                dst,
                wire: carried,
            } => steps.fold(place.members[from], at(dst), wire(carried, &dst)),
            Step::Copy { src, dst } => steps.copy(at(src), at(dst)),
            Step::Reduce { src, dst } => steps.reduce(at(src), at(dst)),
            Step::Finish { src, dst } if place.is_partial => steps.copy(at(src), at(dst)),
            Step::Finish { src, dst } => steps.finish(at(src), at(dst)),
            Step::ReduceAll { .. } | Step::Signal { .. } | Step::Wait { .. } => {
                unreachable!("{NO_WINDOWS}")
            }
        }
    }
}

/// Up to so many hosts a rank exchanges shards with all of its counterparts at once: two rounds with the volume of a ring.
const MOST_HOSTS_AT_ONCE: usize = 8;

/// Reduce_scatter inside, all_reduce across, all_gather inside, piece by piece, in pieces of at most `chunk` elements for
/// each rank across.
pub(super) fn all_reduce(shape: &Shape, chunk: usize, topology: &Topology) -> Option<Plan> {
    let mut composition = Composition::new(shape, chunk, topology);
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

/// A composed plan being written.
struct Composition<'a> {
    shape: &'a Shape<'a>,
    levels: Levels,
    chunk: usize,
    /// Elements of a piece.
    piece: usize,
    pieces: usize,
    steps: Steps,
    /// Of each phase that needs any, and of the sums between them: memory for the pieces with even numbers and for those
    /// with odd ones. No piece is longer than the first.
    scratch: [[Option<Span>; 2]; 3],
}

/// What scratch memory is for.
#[derive(Clone, Copy)]
enum Use {
    Inside,
    /// Sums that wait for the phase across.
    Sums,
    Across,
}

impl<'a> Composition<'a> {
    fn new(shape: &'a Shape<'a>, chunk: usize, topology: &Topology) -> Self {
        let levels = Levels::of(shape.rank, topology);
        let piece = chunk
            .saturating_mul(levels.shards)
            .saturating_mul(topology.hosts().len());
        Self {
            shape,
            levels,
            chunk,
            piece,
            pieces: pieces(shape.count(), piece),
            steps: Steps::of(shape),
            scratch: [[None; 2]; 3],
        }
    }

    /// `len` elements of scratch memory for a piece.
    fn scratch(&mut self, purpose: Use, piece: usize, len: usize) -> Span {
        let steps = &mut self.steps;
        let span = self.scratch[purpose as usize][piece % 2];
        let span = span.unwrap_or_else(|| steps.scratch(len));
        self.scratch[purpose as usize][piece % 2] = Some(span);
        span
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
            true => self.scratch(Use::Sums, piece, shard.len).part(0..shard.len),
            false => shard,
        }
    }

    /// A shape of the ranks inside, with `counts` of them.
    fn inside<'b>(&self, collective: Collective, counts: &'b [usize]) -> Shape<'b> {
        Shape {
            collective,
            rank: self.levels.place,
            world: self.levels.inside.len(),
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
        let plan = build_chunked(Algorithm::Direct, &shape, self.chunk)?;
        let place = Place {
            members: &self.levels.inside.clone(),
            input,
            output: self.sum(piece),
            scratch: self.scratch(Use::Inside, piece, plan.scratch),
            is_partial: true,
        };
        embed(&mut self.steps, &plan, &place);
        Some(())
    }

    fn reduce_across(&mut self, piece: usize) -> Option<()> {
        if self.levels.across.is_empty() {
            return Some(());
        }
        let shard = self.own_shard(piece);
        let shape = Shape {
            collective: Collective::AllReduce,
            rank: self.levels.host,
            world: self.levels.across.len(),
            counts: Counts::Even(shard.len),
            root: 0,
            in_place: !self.shape.widen,
            widen: self.shape.widen,
        };
        let algorithm = match shape.world <= MOST_HOSTS_AT_ONCE {
            true => Algorithm::TwoShot,
            false => Algorithm::Ring,
        };
        let plan = build_chunked(algorithm, &shape, self.chunk)?;
        let place = Place {
            members: &self.levels.across.clone(),
            input: self.sum(piece),
            output: shard,
            scratch: self.scratch(Use::Across, piece, plan.scratch),
            is_partial: false,
        };
        embed(&mut self.steps, &plan, &place);
        Some(())
    }

    fn gather_inside(&mut self, piece: usize) -> Option<()> {
        let output = self.output(piece);
        let counts = self.levels.shards_of(output.len);
        let shape = self.inside(Collective::AllGather, &counts);
        let plan = build_chunked(Algorithm::Direct, &shape, self.chunk)?;
        let place = Place {
            members: &self.levels.inside.clone(),
            input: output,
            output,
            scratch: Span::new(Buffer::Scratch, 0, 0),
            is_partial: false,
        };
        embed(&mut self.steps, &plan, &place);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::check::{Report, verify};
    use crate::plan::{DEFAULT_CHUNK, MIN_WINDOW};

    fn proved(host_of: Vec<usize>, count: usize, chunk: usize, flags: (bool, bool)) -> Report {
        let topology = Topology {
            host_of,
            cores_per_host: 2,
        };
        let world = topology.host_of.len();
        let (in_place, widen) = flags;
        let shapes: Vec<Shape> = (0..world)
            .map(|rank| Shape {
                collective: Collective::AllReduce,
                rank,
                world,
                counts: Counts::Even(count),
                root: 0,
                in_place,
                widen,
            })
            .collect();
        assert!(serves(&shapes[0], &topology));
        let plans: Vec<Plan> = shapes
            .iter()
            .map(|shape| all_reduce(shape, chunk, &topology).expect("a plan"))
            .collect();
        for window in [MIN_WINDOW, 3, 64] {
            if let Err(problem) = verify(&plans, &shapes, window) {
                panic!("{topology:?}, {count} elements, chunks of {chunk}: {problem}");
            }
        }
        verify(&plans, &shapes, 64).expect("proved just now")
    }

    #[test]
    fn the_examples_are_right() {
        for host_of in [
            vec![0, 0, 1, 1],
            vec![0, 1, 0, 1],
            vec![0, 0, 0, 0, 1, 1, 1, 1],
            vec![0, 0, 0, 1],
            vec![0, 1, 1, 2, 2, 2],
            vec![0; 9].into_iter().chain(1..11).collect(),
        ] {
            for count in [1, 2, 7, 64, 129] {
                for flags in [(false, false), (true, false), (false, true), (true, true)] {
                    proved(host_of.clone(), count, 4, flags);
                }
            }
        }
    }

    /// What a host sends to the others is 2(h-1)/h of the elements, whatever its ranks and their numbers.
    #[test]
    fn each_element_crosses_once_each_way() {
        const COUNT: usize = 960;
        for (hosts, ranks) in [(2, 2), (2, 4), (4, 2), (3, 5)] {
            for in_blocks in [true, false] {
                let world = hosts * ranks;
                let host = |rank| {
                    if in_blocks {
                        rank / ranks
                    } else {
                        rank % hosts
                    }
                };
                let topology = Topology {
                    host_of: (0..world).map(host).collect(),
                    cores_per_host: 2,
                };
                let mut sent = vec![0; hosts];
                for rank in 0..world {
                    let shape = Shape {
                        collective: Collective::AllReduce,
                        rank,
                        world,
                        counts: Counts::Even(COUNT),
                        root: 0,
                        in_place: true,
                        widen: false,
                    };
                    let plan = all_reduce(&shape, DEFAULT_CHUNK, &topology).expect("a plan");
                    for step in &plan.steps {
                        if let Step::Send { to, src } = step
                            && host(*to) != host(rank)
                        {
                            sent[host(rank)] += src.len;
                        }
                    }
                }
                assert_eq!(sent, vec![2 * (hosts - 1) * COUNT / hosts; hosts]);
            }
        }
    }

    /// Memory does not grow with the number of pieces.
    #[test]
    fn pieces_share_their_scratch_memory() {
        let topology = Topology::even(2, 2, 2);
        let scratch = |count| {
            let shape = Shape {
                collective: Collective::AllReduce,
                rank: 1,
                world: 4,
                counts: Counts::Even(count),
                root: 0,
                in_place: true,
                widen: true,
            };
            let plan = all_reduce(&shape, 100, &topology).expect("a plan");
            plan.scratch
        };
        assert_eq!(scratch(4_000), scratch(400_000));
    }

    proptest! {
        #[test]
        fn any_hosts_will_do(
            host_of in prop::collection::vec(0..4_usize, 2..12),
            count in 1..200_usize,
            chunk in 1..40_usize,
            in_place: bool,
            widen: bool,
        ) {
            let labels = Topology::from_hosts(&host_of, 2);
            prop_assume!(labels.spans_hosts() && labels.shares_hosts());
            proved(labels.host_of, count, chunk, (in_place, widen));
        }
    }
}
