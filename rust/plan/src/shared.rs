//! Algorithms that need memory which all ranks of the group share: [`Algorithm::Windows`] and [`Algorithm::InPlace`].
//!
//! Their plans hold for ranks of one host alone. And what they need is known to each rank for itself only (does its
//! buffer lie in the heap? does it reach the windows of the others?), so the ranks *agree*, in one round of flags, before
//! such a plan runs. Here is what all ranks know alike: which requests these algorithms serve, and how they cut them up.

use super::cost::{Bill, Taken, Work};
use super::topology::Topology;
use super::windows::MOST_RANKS;
use super::{Algorithm, Counts, Shape};
use crate::types::Collective;

/// Bytes of a chunk, the piece of a buffer that goes through a half of a window at once. The data of a chunk on all ranks, in
/// their windows and in their own memory, is to stay in the caches of the cores that they share, and a chunk is to take longer
/// than the meetings in it. (32 to 256 KiB were measured.)
pub const CHUNK: usize = 128 << 10;

/// Bytes of a cache line, at whose multiples ranks cut memory that several of them write to.
pub const LINE: usize = 64;

/// Seconds that an agreement takes beside its messages: an operation that needs one is neither repeated from an earlier
/// run nor walked without looking ahead.
const AGREEMENT: f64 = 3e-6;

/// About how many steps a plan may have: they are made for the whole operation at once.
const MOST_STEPS: usize = 1 << 19;

/// Bytes of a chunk of `collective`, between ranks that share `cores`; the same on all ranks. Everything that an
/// all_reduce touches is to stay in the caches nearest to a core, so its chunks are shorter where more than two ranks share
/// a core, and longer where each has one: fewer meetings. (Longer than that they leave these caches: between two ranks
/// chunks of 1 MiB take a twentieth more time.)
pub fn chunk(collective: Collective, world: usize, cores: usize) -> usize {
    if collective != Collective::AllReduce {
        CHUNK
    } else if world > 2 * cores {
        CHUNK / 2
    } else if world > cores {
        CHUNK
    } else {
        2 * CHUNK
    }
}

/// Bytes of the longer buffer of a rank: blocks of all ranks lie in it where the collective deals in blocks.
pub(crate) fn longer_buffer(shape: &Shape, element_size: usize) -> Option<usize> {
    let Counts::Even(count) = shape.counts else {
        return None;
    };
    let blocks = shape.collective.blocks(shape.world);
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
                && (shape.collective.reduces()
                    || matches!(
                        shape.collective,
                        Collective::Broadcast | Collective::AllGather
                    ))
        }
        _ => false,
    }
}

/// Every rank tells every other what it can do.
pub(super) fn price_of_agreement(work: &Work, bill: &mut Bill) {
    bill.rounds += AGREEMENT;
    bill.rounds(1);
    bill.exchanges((work.world - 1) as f64, false, 0.0, Taken::Copied, 1.0);
}
