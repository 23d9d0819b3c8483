//! Collectives in which no byte crosses between two hosts twice: inside each host, across hosts, inside each host.
//!
//! The link between two hosts carries what their ranks send together, so an algorithm that treats all ranks alike sends
//! the same bytes through it once for every rank of the host. Here each byte crosses once, and all ranks of a host carry
//! their part at the same time. There is no leader: a host with several cores uses all of them. Ranks may have any
//! numbers and hosts any sizes.
//!
//! | collective | inside | across, each rank with its counterparts | inside | bytes that a host sends or receives |
//! |---|---|---|---|---|
//! | [all_reduce](all_reduce) | reduce_scatter | all_reduce of shards | all_gather | 2(h-1)/h |
//! | [reduce, broadcast](rooted) | reduce_scatter, scatter | a chain of hosts for each shard | gather, all_gather | 1 |
//! | [all_gather, reduce_scatter](blocks) | reduce | each block to its carrier on each host | share | (h-1)/h of all blocks |
//! | [all_to_all, gather, scatter](personal) | to the carriers | a message per rank or host | from the carrier | as without |
//! | [barrier](barrier) | dissemination | dissemination | | |
//!
//! (h hosts; in shares of the longer buffer.)
//!
//! On one host with several memory nodes (sockets), to which all ranks are bound, the nodes take the place of hosts: the link
//! between two of them is shared in the same way. On several hosts the nodes of a host are a third level, in all_reduce, reduce
//! and broadcast, of long messages and where that pays ([`nodes`]): each inside phase of the table is then a hierarchy itself.
//! The other collectives have the hosts alone for levels.
//!
//! The idea is in Horovod's hierarchical allreduce and in NCCL's trees of rails; the shards that all ranks carry at once
//! are those of BytePS. Levels inside a host are those of XHC (Katevenis, Ploumidis and Marazakis, 2022).
//!
//! # Pieces
//!
//! The elements go in *pieces*. A piece is in one phase while its neighbours are in the others, so the link between the
//! hosts is busy while the memory works. A plan is sequential, and two messages of one direction of a link never overtake
//! each other, so the phases of neighbouring pieces are written in the order in which they should run.
//!
//! # Rounds
//!
//! Where ranks exchange messages in other patterns than those of an embedded plan, the messages are numbered in *rounds*
//! that all ranks go through in the same order. In one round a rank sends at most one message and receives at most one,
//! so that links which hold nothing are enough: all ranks that are in the earliest unfinished round have both of their
//! messages of it in hand.

use self::levels::{Inner, Levels};
use super::family::Family;
use super::topology::Topology;
use super::{Counts, Plan, Shape};
use crate::types::Collective;

mod all_reduce;
mod barrier;
mod blocks;
mod embed;
mod levels;
mod nodes;
mod personal;
mod price;
mod rooted;
#[cfg(test)]
mod tests;

/// The algorithm that depends on hosts.
pub(super) const FAMILY: Family = Family::built_elsewhere(price::price);

/// Whether there is a plan for `shape` with the ranks as in `topology`.
pub fn serves(shape: &Shape, topology: &Topology) -> bool {
    let has_counts = match shape.collective {
        Collective::AllReduce
        | Collective::Reduce
        | Collective::Broadcast
        | Collective::AllToAll
        | Collective::Gather
        | Collective::Scatter
        | Collective::Barrier => {
            matches!(shape.counts, Counts::Even(_))
        }
        Collective::AllGather | Collective::ReduceScatter => {
            matches!(shape.counts, Counts::Even(_) | Counts::PerRank(_))
        }
        _ => false,
    };
    has_counts && shape.world == topology.host_of.len() && topology.has_levels()
}

/// The plan for `shape`, which is [served](serves), in pieces of at most `chunk` elements for each rank across. `inner` makes
/// the plans that are parts of it.
pub(super) fn build(
    shape: &Shape,
    chunk: usize,
    topology: &Topology,
    inner: Inner,
) -> Option<Plan> {
    let levels = Levels::of(shape, topology);
    let levels = match nodes::is_by_node(shape, topology) {
        true => levels.by_node(topology),
        false => levels,
    };
    compose(shape, chunk, &levels, inner)
}

/// The same by these `levels`.
fn compose(shape: &Shape, chunk: usize, levels: &Levels, inner: Inner) -> Option<Plan> {
    match shape.collective {
        Collective::AllReduce => all_reduce::all_reduce(shape, chunk, levels, inner),
        Collective::Reduce => rooted::reduce(shape, chunk, levels, inner),
        Collective::Broadcast => rooted::broadcast(shape, chunk, levels, inner),
        Collective::AllGather => Some(blocks::all_gather(shape, chunk, levels)),
        Collective::ReduceScatter => Some(blocks::reduce_scatter(shape, chunk, levels)),
        Collective::AllToAll => Some(personal::all_to_all(shape, levels)),
        Collective::Gather => Some(personal::gather(shape, levels)),
        Collective::Scatter => Some(personal::scatter(shape, levels)),
        Collective::Barrier => Some(barrier::barrier(shape, levels)),
        _ => None,
    }
}
