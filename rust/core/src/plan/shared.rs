//! Algorithms that need memory which all ranks of the group share: [`Algorithm::Windows`] and [`Algorithm::InPlace`].
//!
//! Their plans hold for ranks of one host alone. And what they need is known to each rank for itself only (does its
//! buffer lie in the heap? does it reach the windows of the others?), so the ranks *agree*, in one round of flags, before
//! such a plan runs. Here is what all ranks know alike: which requests these algorithms serve, and how they cut them up.

use super::topology::Topology;
use super::windows::MOST_RANKS;
use super::{Algorithm, Counts, Shape};
use crate::types::Collective;

/// Bytes of a chunk, the piece of a buffer that goes through a half of a window at once. What all ranks have of a chunk,
/// in their windows and in their own memory, is to stay in the caches of the cores that they share, and a chunk is to
/// take longer than the meetings in it. (32 to 256 KiB were measured.)
pub const CHUNK: usize = 128 << 10;

/// Bytes that a slice of an all_reduce in place is a multiple of: see `Algorithm::InPlace`.
const LINE: usize = 64;

/// About how many steps a plan may have: they are made for the whole operation at once.
const MOST_STEPS: usize = 1 << 19;

/// Bytes of a chunk of `collective`; the same on all ranks. Everything that an all_reduce touches is to stay in the
/// caches, so its chunks are shorter where more than two ranks share a core.
pub fn chunk(collective: Collective, world: usize, cores: usize) -> usize {
    match collective == Collective::AllReduce && world > 2 * cores {
        true => CHUNK / 2,
        false => CHUNK,
    }
}

/// Bytes of the longer buffer of a rank: blocks of all ranks lie in it where the collective deals in blocks.
pub fn longer_buffer(shape: &Shape, element_size: usize) -> Option<usize> {
    let Counts::Even(count) = shape.counts else {
        return None;
    };
    let blocks = match shape.collective {
        Collective::AllGather | Collective::ReduceScatter => shape.world,
        _ => 1,
    };
    Some(count.saturating_mul(element_size).saturating_mul(blocks))
}

/// Whether `algorithm`, one of the two, has a plan for `shape` where the ranks are as in `topology`. The same on all
/// ranks, and no statement about whether it pays.
pub fn serves(
    algorithm: Algorithm,
    shape: &Shape,
    element_size: usize,
    topology: &Topology,
) -> bool {
    let Some(bytes) = longer_buffer(shape, element_size) else {
        return false;
    };
    if bytes == 0 || !(2..=MOST_RANKS).contains(&shape.world) || topology.spans_hosts() {
        return false;
    }
    match algorithm {
        // No slice is empty.
        Algorithm::InPlace => {
            shape.collective == Collective::AllReduce && bytes > LINE * shape.world * shape.world
        }
        Algorithm::Windows => {
            let chunk = chunk(shape.collective, shape.world, topology.cores_per_host);
            let steps = (bytes / chunk).saturating_mul(shape.world + 8);
            steps <= MOST_STEPS
                && matches!(
                    shape.collective,
                    Collective::AllReduce
                        | Collective::Reduce
                        | Collective::Broadcast
                        | Collective::AllGather
                        | Collective::ReduceScatter
                )
        }
        _ => false,
    }
}
