//! The memory nodes of several hosts: whether the ranks of a host meet by node.
//!
//! Where every rank of a host exchanges shards with every other, those of a node with m ranks send the same m times through
//! the link to the next node. As a hierarchy of its nodes a host sums up first on each node, and then each shard crosses once.
//! Each rank sends as many messages as before, and adds up as much:
//!
//! ```text
//! reduce_scatter on a host of two nodes of m ranks      flat             by node
//! messages of each rank                                 2m - 1           2(m - 1) beside, and 1 between the nodes
//! shards that leave a node                              m * m            m, as partial sums
//! rounds                                                1                2
//! sums that begin with a copy                           1                2
//! ```
//!
//! The savings grow with the square of m, and the costs do not.

use super::blocks;
use super::levels::{Inner, Levels};
use crate::topology::{Nodes, Topology};
use crate::types::Collective;
use crate::{Algorithm, Counts, Plan, Shape};

/// Elements that cross between two nodes while one is copied: 40 and 11 GB/s, as in
/// [`Costs::TYPICAL`](crate::cost::Costs::TYPICAL).
const CROSSINGS_OF_A_COPY: f64 = 4.0;

/// Elements of 4 bytes that must not cross for a further round to pay: those of 1.6 us, some rounds between ranks that
/// have a core each.
const CROSSINGS_OF_A_ROUND: f64 = (16 << 10) as f64;

/// How much longer partial sums are than elements of 2 bytes, the commonest that have wider sums.
const WIDER: f64 = 2.0;

impl Levels {
    /// The reduce_scatter or all_gather of `shape` among the ranks of this host: flat, or by memory node.
    pub(super) fn plan_inside(&self, shape: &Shape, chunk: usize, inner: Inner) -> Option<Plan> {
        let Some(nodes) = &self.nodes else {
            return inner(Algorithm::Direct, shape, chunk);
        };
        let levels = Self::of(shape, nodes);
        match shape.collective {
            Collective::ReduceScatter => Some(blocks::reduce_scatter(shape, chunk, &levels)),
            Collective::AllGather => Some(blocks::all_gather(shape, chunk, &levels)),
            _ => None,
        }
    }
}

/// The costs of a host for the level of its nodes; elements in shards of one rank.
pub(super) struct Level {
    /// Further rounds: one for each phase inside.
    pub(super) rounds: f64,
    /// Elements that leave the busiest node.
    pub(super) crossing: f64,
    /// Further elements that a rank copies.
    pub(super) copied: f64,
}

impl Level {
    /// That of `collective` on a host of such `nodes`, where partial sums are `wide` times as long as elements.
    pub(super) fn of(collective: Collective, wide: f64, nodes: Nodes) -> Self {
        let (sums, shares) = match collective {
            Collective::AllReduce => (1.0, 1.0),
            Collective::Reduce => (1.0, 0.0),
            Collective::Broadcast => (0.0, 1.0),
            _ => (0.0, 0.0),
        };
        let foreign = nodes.ranks - nodes.fewest;
        let crossing = foreign.max(nodes.most * (nodes.number - 1)) as f64;
        // The ranks of the smallest node carry most. A carried sum begins with a copy, and is sent longer than an element.
        let carried = foreign as f64 / nodes.fewest as f64;
        Self {
            rounds: sums + shares,
            crossing: crossing * (sums * wide + shares),
            copied: carried * sums * (2.0 * wide - 1.0),
        }
    }
}

/// Whether the ranks of each host meet by memory node in the plan for `shape`: the same on all ranks.
pub(super) fn is_by_node(shape: &Shape, topology: &Topology) -> bool {
    match (shape.counts, topology.nodes()) {
        (Counts::Even(count), Some(nodes)) if topology.spans_hosts() => {
            let cores = topology.cores_per_host;
            pays(shape.collective, count, shape.widen, nodes, cores)
        }
        _ => false,
    }
}

/// Whether a level of such `nodes` pays for `elements` elements, since fewer cross between them. Where ranks
/// share cores each round takes turns of all of them, and nodes are no level.
pub(super) fn pays(
    collective: Collective,
    elements: usize,
    widens: bool,
    nodes: Nodes,
    cores: usize,
) -> bool {
    let level = Level::of(collective, if widens { WIDER } else { 1.0 }, nodes);
    let flat = level.rounds * nodes.leaving() as f64;
    let saved = flat - level.crossing - CROSSINGS_OF_A_COPY * level.copied;
    let shard = elements as f64 / nodes.ranks as f64;
    nodes.ranks <= cores && saved > 0.0 && saved * shard >= level.rounds * CROSSINGS_OF_A_ROUND
}
