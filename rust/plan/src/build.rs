//! From a request and an algorithm to a plan.

use super::family;
use super::topology::Topology;
use super::{Algorithm, Counts, DEFAULT_CHUNK, Plan, Shape, direct, hierarchical};
use crate::types::Collective;

/// Whether `algorithm` can serve `shape` with messages alone, wherever the ranks are. False for every algorithm when the
/// shape itself is malformed.
pub fn applicable(algorithm: Algorithm, shape: &Shape) -> bool {
    is_well_formed(shape) && (family(algorithm).serves)(shape)
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
            hierarchical::build(shape, chunk.max(1), topology, build_chunked)
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
    (family(algorithm).build)(shape, chunk.max(1))
}
