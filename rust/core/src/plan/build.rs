//! From a request and an algorithm to a plan: which algorithm serves what, and the functions that write the steps.

use super::topology::Topology;
use super::{
    Algorithm, Counts, Plan, Shape, bruck, direct, doubling, halving, hierarchical, ring, tree,
};
use crate::types::Collective;

/// The longest piece, in elements, that is worked on as a whole where an algorithm forwards what it receives
/// (tree, ring) or folds several contributions into one sum (direct). Long enough to hide a message's
/// latency, short enough to be still in the cache when its turn comes again.
pub const DEFAULT_CHUNK: usize = 32 * 1024;

/// Whether `algorithm` can serve `shape` with messages alone, wherever the ranks are. False for every algorithm when the
/// shape itself is malformed.
pub fn applicable(algorithm: Algorithm, shape: &Shape) -> bool {
    is_well_formed(shape) && serves(algorithm, shape)
}

/// Whether there are such ranks, and as many counts as the collective has.
pub(crate) fn is_well_formed(shape: &Shape) -> bool {
    shape.rank < shape.world
        && shape.root < shape.world
        && match (shape.collective, shape.counts) {
            (_, Counts::Even(_)) => true,
            (
                Collective::AllGather
                | Collective::Gather
                | Collective::ReduceScatter
                | Collective::Scatter,
                Counts::PerRank(counts),
            ) => counts.len() == shape.world,
            (Collective::AllToAll, Counts::PerPair { send, recv }) => {
                send.len() == shape.world && recv.len() == shape.world
            }
            _ => false,
        }
}

/// Whether `algorithm` can serve `shape`, which is well-formed.
fn serves(algorithm: Algorithm, shape: &Shape) -> bool {
    use Algorithm::{Bruck, Direct, Halving, RecursiveDoubling, Ring, Tree, TwoShot};

    if algorithm.needs_shared_memory() || algorithm == Algorithm::Hierarchical {
        // These depend on where the ranks are: see `shared::serves`, `hierarchical::serves`.
        return false;
    }
    let even = matches!(shape.counts, Counts::Even(_));
    match shape.collective {
        Collective::AllReduce => algorithm != Bruck,
        Collective::Reduce | Collective::Broadcast => {
            matches!(algorithm, Direct | TwoShot | Ring | Tree)
        }
        Collective::AllGather => match algorithm {
            Direct | Ring | Bruck => true,
            RecursiveDoubling => shape.world.is_power_of_two(),
            _ => false,
        },
        Collective::ReduceScatter => matches!(algorithm, Direct | Ring | Halving),
        Collective::Gather | Collective::Scatter => {
            algorithm == Direct || (algorithm == Tree && even)
        }
        Collective::AllToAll => algorithm == Direct || (algorithm == Bruck && even),
        Collective::Barrier => matches!(algorithm, Direct | Bruck),
        Collective::Send | Collective::Recv => false,
    }
}

/// Whether `algorithm` can serve `shape` with messages alone, with the ranks as in `topology`.
pub fn applicable_on(algorithm: Algorithm, shape: &Shape, topology: &Topology) -> bool {
    match algorithm {
        Algorithm::Hierarchical => is_well_formed(shape) && hierarchical::serves(shape, topology),
        _ => applicable(algorithm, shape),
    }
}

/// [`build_chunked`], also for algorithms that depend on where the ranks are.
pub fn build_on(
    algorithm: Algorithm,
    shape: &Shape,
    chunk: usize,
    topology: &Topology,
) -> Option<Plan> {
    match algorithm {
        Algorithm::Hierarchical if applicable_on(algorithm, shape, topology) => {
            hierarchical::build(shape, chunk.max(1), topology)
        }
        _ => build_chunked(algorithm, shape, chunk),
    }
}

/// This rank's plan for `shape` by `algorithm`; `None` when the algorithm does not apply.
pub fn build(algorithm: Algorithm, shape: &Shape) -> Option<Plan> {
    build_chunked(algorithm, shape, DEFAULT_CHUNK)
}

/// [`build`], with pieces of at most `chunk` elements where the algorithm works in pieces. Must be equal on
/// all ranks.
pub fn build_chunked(algorithm: Algorithm, shape: &Shape, chunk: usize) -> Option<Plan> {
    if !applicable(algorithm, shape) {
        return None;
    }
    if shape.world == 1 {
        return Some(direct::alone(shape));
    }
    let chunk = chunk.max(1);
    Some(match (shape.collective, algorithm) {
        (Collective::AllReduce, Algorithm::Direct) => direct::all_reduce(shape, chunk),
        // Two numbers have one sum in either order: a ring of two is as direct and keeps no order.
        (Collective::AllReduce, Algorithm::TwoShot) if shape.world == 2 => {
            ring::all_reduce(shape, chunk)
        }
        (Collective::AllReduce, Algorithm::TwoShot) => direct::all_reduce_two_shot(shape, chunk),
        (Collective::AllReduce, Algorithm::Ring) => ring::all_reduce(shape, chunk),
        (Collective::AllReduce, Algorithm::Tree) => tree::all_reduce(shape, chunk),
        (Collective::AllReduce, Algorithm::RecursiveDoubling) => doubling::all_reduce(shape),
        (Collective::AllReduce, Algorithm::Halving) => halving::all_reduce(shape, chunk),
        (Collective::Reduce, Algorithm::Direct) => direct::reduce(shape, chunk),
        (Collective::Reduce, Algorithm::TwoShot) => direct::reduce_two_shot(shape, chunk),
        (Collective::Reduce, Algorithm::Ring) => ring::reduce(shape, chunk),
        (Collective::Reduce, Algorithm::Tree) => tree::reduce(shape, chunk),
        (Collective::Broadcast, Algorithm::Direct) => direct::broadcast(shape),
        (Collective::Broadcast, Algorithm::TwoShot) => direct::broadcast_two_shot(shape),
        (Collective::Broadcast, Algorithm::Ring) => ring::broadcast(shape, chunk),
        (Collective::Broadcast, Algorithm::Tree) => tree::broadcast(shape, chunk),
        (Collective::AllGather, Algorithm::Direct) => direct::all_gather(shape),
        (Collective::AllGather, Algorithm::Ring) => ring::all_gather(shape, chunk),
        (Collective::AllGather, Algorithm::Bruck) => bruck::all_gather(shape),
        (Collective::AllGather, Algorithm::RecursiveDoubling) => doubling::all_gather(shape),
        (Collective::ReduceScatter, Algorithm::Direct) => direct::reduce_scatter(shape, chunk),
        (Collective::ReduceScatter, Algorithm::Ring) => ring::reduce_scatter(shape, chunk),
        (Collective::ReduceScatter, Algorithm::Halving) => halving::reduce_scatter(shape),
        (Collective::Gather, Algorithm::Direct) => direct::gather(shape),
        (Collective::Gather, Algorithm::Tree) => tree::gather(shape),
        (Collective::Scatter, Algorithm::Direct) => direct::scatter(shape),
        (Collective::Scatter, Algorithm::Tree) => tree::scatter(shape),
        (Collective::AllToAll, Algorithm::Direct) => direct::all_to_all(shape),
        (Collective::AllToAll, Algorithm::Bruck) => bruck::all_to_all(shape),
        (Collective::Barrier, Algorithm::Direct) => direct::barrier(shape),
        (Collective::Barrier, Algorithm::Bruck) => bruck::barrier(shape),
        _ => return None,
    })
}
