//! How long the pieces of a plan are.

use super::cost::Costs;
use super::topology::Topology;
use super::{Algorithm, DEFAULT_CHUNK, Shape};
use crate::types::Collective;

/// No piece is longer, in bytes: the connections between two hosts hold little more, and two pieces are under way.
const LONGEST_PIECE: f64 = (8 << 20) as f64;

/// The longest piece of a plan of `algorithm` for `shape`, in elements of `element_size` bytes: what [`build_on`](super::build_on) takes. The
/// same on all ranks.
///
/// Where a rank waits for what another host makes of one piece before it sends more than the next, the latency to that host
/// must be short beside the time that a piece takes. Everywhere else pieces are [`DEFAULT_CHUNK`] long.
pub fn piece_length(
    algorithm: Algorithm,
    shape: &Shape,
    element_size: usize,
    topology: &Topology,
    costs: &Costs,
) -> usize {
    let waits = shape.collective == Collective::AllReduce && topology.has_several_hosts();
    // Halves and shares of one piece are written between those of its neighbours. In a hierarchy they follow each other.
    let latencies = match algorithm {
        Algorithm::TwoShot | Algorithm::Halving if waits => 2.0,
        Algorithm::Hierarchical if waits => 8.0,
        _ => return DEFAULT_CHUNK,
    };
    // A long way may be four times as fast as it is taken to be.
    let byte = (costs.remote_byte / 4.0).max(Costs::TYPICAL.remote_byte);
    let bytes = latencies * costs.remote_latency / byte;
    let longest = if bytes < LONGEST_PIECE {
        bytes
    } else {
        LONGEST_PIECE
    };
    let elements = longest as usize / element_size.max(1);
    // What is a little more is not worth a longer wait for the first piece.
    match elements >= 2 * DEFAULT_CHUNK {
        true => elements,
        false => DEFAULT_CHUNK,
    }
}
