//! How long the pieces of a plan are.

use super::cost::Costs;
use super::topology::Topology;
use super::{Algorithm, DEFAULT_CHUNK, Shape};
use crate::types::Collective;

/// No piece is longer, in bytes: the connections between two hosts hold little more, and two pieces are under way.
const LONGEST_PIECE: f64 = (8 << 20) as f64;

/// No piece is made shorter than this number of elements.
const SHORTEST_PIECE: usize = DEFAULT_CHUNK / 16;

/// Messages between hosts whose time a further piece takes: those of a rank that passes it on, and of the ranks beside it.
const MESSAGES_OF_A_PIECE: f64 = 4.0;

/// The longest piece of a plan of `algorithm` for `shape`, in elements of `element_size` bytes: what
/// [`build_on`](super::build_on) takes. The same on all ranks.
///
/// Where a rank waits for what another host makes of one piece before it sends more than the next, the latency to that host
/// must be short beside the time that a piece takes. Where pieces go from one host to the next, and on from there, a link is
/// idle until the first has come so far, and the shorter the pieces, the sooner. Everywhere else pieces are [`DEFAULT_CHUNK`]
/// long, or so long that each thread has a share.
pub fn piece_length(
    algorithm: Algorithm,
    shape: &Shape,
    element_size: usize,
    topology: &Topology,
    costs: &Costs,
) -> usize {
    let shared = match topology.threads {
        0 | 1 => DEFAULT_CHUNK,
        threads => DEFAULT_CHUNK * 2 * threads,
    };
    if !topology.has_several_hosts() {
        return shared;
    }
    match (algorithm, shape.collective) {
        // Halves and shares of one piece are written between those of its neighbours.
        (Algorithm::TwoShot | Algorithm::Halving, Collective::AllReduce) => {
            against_latency(2.0, element_size, costs).max(shared)
        }
        // In a hierarchy they follow each other.
        (Algorithm::Hierarchical, Collective::AllReduce) => {
            against_latency(8.0, element_size, costs).max(shared)
        }
        _ => match Passage::of(algorithm, shape, topology) {
            Some(passage) if passage.hops > 0 => passage.piece(shape, element_size, costs),
            _ => shared,
        },
    }
}

/// The length of pieces that take `latencies` times as long as the way to another host, if that is much.
fn against_latency(latencies: f64, element_size: usize, costs: &Costs) -> usize {
    // A long way may be four times as fast as it is taken to be.
    let byte = (costs.remote_byte / 4.0).max(Costs::TYPICAL.remote_byte);
    let bytes = latencies * costs.remote_latency / byte;
    let longest = if bytes < LONGEST_PIECE {
        bytes
    } else {
        LONGEST_PIECE
    };
    let elements = longest as usize / element_size.max(1);
    // A slightly longer piece is not worth a longer wait for the first one.
    match elements >= 2 * DEFAULT_CHUNK {
        true => elements,
        false => DEFAULT_CHUNK,
    }
}

/// How the pieces of a plan go from host to host.
struct Passage {
    /// Links on which a piece is, one after the other, after the first.
    hops: usize,
    /// Pieces of the plan that a link carries at the same time.
    abreast: usize,
}

impl Passage {
    fn of(algorithm: Algorithm, shape: &Shape, topology: &Topology) -> Option<Self> {
        let rooted = matches!(shape.collective, Collective::Broadcast | Collective::Reduce);
        match algorithm {
            Algorithm::Hierarchical if rooted => {
                let hosts = topology.hosts();
                Some(Self {
                    hops: hosts.len().saturating_sub(2),
                    abreast: hosts.iter().map(Vec::len).min().unwrap_or(1),
                })
            }
            Algorithm::Ring
                if shape.collective == Collective::Broadcast || shape.collective.is_prefix() =>
            {
                let places = &topology.host_of;
                let leaves = (0..places.len())
                    .filter(|rank| places[*rank] != places[(rank + 1) % places.len()]);
                Some(Self {
                    // Around the circle but for the last link, where that is one between hosts.
                    hops: leaves.count().saturating_sub(2),
                    abreast: 1,
                })
            }
            Algorithm::Tree if rooted => Some(Self {
                hops: (shape.world.max(2) - 1).ilog2() as usize,
                abreast: 2,
            }),
            _ => None,
        }
    }

    /// Half as long a piece saves half of the time that the links wait for the first, and doubles the number of messages.
    fn piece(&self, shape: &Shape, element_size: usize, costs: &Costs) -> usize {
        let mut piece = DEFAULT_CHUNK;
        while piece > SHORTEST_PIECE {
            let together = (piece * self.abreast).min(shape.count());
            let pieces = shape.count().div_ceil(together.max(1)) as f64;
            let halves = (together * element_size) as f64 / 2.0;
            let saved = self.hops as f64 * halves * costs.remote_byte;
            if saved <= pieces * MESSAGES_OF_A_PIECE * costs.remote_message {
                break;
            }
            piece /= 2;
        }
        piece
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Counts;

    fn pieces(algorithm: Algorithm, topology: &Topology, count: usize, rate: f64) -> usize {
        let shape = Shape {
            collective: Collective::Broadcast,
            rank: 0,
            world: topology.host_of.len(),
            counts: Counts::Even(count),
            root: 0,
            in_place: true,
            widen: false,
        };
        let costs = Costs {
            remote_byte: 1.0 / rate,
            ..Costs::TYPICAL
        };
        piece_length(algorithm, &shape, 4, topology, &costs)
    }

    #[test]
    fn chains_of_hosts_take_shorter_pieces_on_slower_links() {
        let four = Topology::even(4, 2, 2);
        let of = |count, rate| pieces(Algorithm::Hierarchical, &four, count, rate);
        let (slow, fast) = (of(1 << 18, 125e6), of(1 << 18, 1.2e9));
        assert!(slow < fast && fast < DEFAULT_CHUNK, "{slow} {fast}");
        assert!(of(1 << 22, 125e6) > slow, "a longer whole has more pieces");
        assert_eq!(of(1 << 18, 25e9), DEFAULT_CHUNK);
        assert_eq!(of(1, 125e6), DEFAULT_CHUNK);
    }

    #[test]
    fn pieces_are_long_where_the_first_has_one_link_to_pass() {
        for (algorithm, topology) in [
            (Algorithm::Hierarchical, Topology::even(2, 4, 2)),
            (Algorithm::Ring, Topology::even(2, 4, 2)),
            (Algorithm::Tree, Topology::one_host(8, 2)),
        ] {
            let piece = pieces(algorithm, &topology, 1 << 18, 125e6);
            assert_eq!(piece, DEFAULT_CHUNK, "{algorithm}");
        }
    }

    #[test]
    fn several_threads_have_a_share_of_pieces_that_no_link_waits_for() {
        let of = |hosts, threads| {
            let topology = Topology::even(hosts, 1, 16).with_threads(threads);
            pieces(Algorithm::Ring, &topology, 1 << 21, 3e9)
        };
        assert_eq!(of(2, 4), 8 * DEFAULT_CHUNK);
        assert_eq!(of(1, 4), 8 * DEFAULT_CHUNK);
        assert_eq!(of(16, 4), of(16, 1));
        assert!(of(16, 4) <= DEFAULT_CHUNK);
    }
}
