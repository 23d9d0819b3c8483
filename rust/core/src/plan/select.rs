//! Which algorithm serves which request.
//!
//! All ranks must choose alike, so the choice depends only on what is equal on all of them: the collective,
//! the world, where the ranks are, and sizes, where every rank knows them all. (In gather, scatter and
//! all_to_all with a count per rank or pair, a rank may know only its own; there the algorithm is fixed.)
//!
//! The thresholds are bytes, found by simulation ([`super::simulate`]; a test compares), and coarse on purpose:
//! near a threshold both sides are about as good. What they trade:
//!
//! - few rounds while a message costs more than its bytes: direct, trees, recursive doubling, Bruck;
//! - few bytes when it does not: two-shot, halving, ring;
//! - few messages per rank in large worlds, and neighbours rather than everyone between hosts;
//! - for halves ([`Shape::widen`]), few hops of partial sums, which are twice as long as elements: two-shot
//!   has none.

use super::{Algorithm, Counts, Shape, applicable};
use crate::types::{Collective, Rank};

/// Where the ranks are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The host of each rank, as a small number.
    pub host_of: Vec<usize>,
    /// Cores that the ranks of one host share.
    pub cores_per_host: usize,
}

impl Topology {
    /// All ranks on one host.
    pub fn one_host(world: usize, cores: usize) -> Self {
        Self {
            host_of: vec![0; world],
            cores_per_host: cores,
        }
    }

    /// `hosts` hosts with `ranks` consecutive ranks each.
    pub fn even(hosts: usize, ranks: usize, cores: usize) -> Self {
        Self {
            host_of: (0..hosts * ranks).map(|rank| rank / ranks).collect(),
            cores_per_host: cores,
        }
    }

    /// Ranks are on one host when their labels are equal.
    pub fn from_hosts<T: PartialEq>(labels: &[T], cores: usize) -> Self {
        let first = |label: &T| labels.iter().position(|other| other == label);
        Self {
            host_of: labels.iter().filter_map(first).collect(),
            cores_per_host: cores,
        }
    }

    /// The part of it that holds `ranks`, in that order.
    #[must_use]
    pub fn subset(&self, ranks: &[Rank]) -> Self {
        Self {
            host_of: ranks.iter().map(|rank| self.host_of[*rank]).collect(),
            cores_per_host: self.cores_per_host,
        }
    }

    /// How many ranks share `rank`'s host, itself among them.
    pub fn ranks_beside(&self, rank: Rank) -> usize {
        let host = self.host_of[rank];
        self.host_of.iter().filter(|other| **other == host).count()
    }

    /// Whether any two ranks are on different hosts.
    pub fn spans_hosts(&self) -> bool {
        self.host_of.windows(2).any(|pair| pair[0] != pair[1])
    }

    /// Whether any two ranks are on the same host.
    pub fn shares_hosts(&self) -> bool {
        let mut hosts = self.host_of.clone();
        hosts.sort_unstable();
        hosts.windows(2).any(|pair| pair[0] == pair[1])
    }
}

const KIB: usize = 1024;

/// Up to this world size on one host, everyone talks to everyone when bytes matter more than messages.
const SMALL_WORLD: usize = 16;

/// What the choice is made from.
struct Situation {
    world: usize,
    across: bool,
    /// Ranks share a host, so between hosts they share its network interface.
    crowded: bool,
    widen: bool,
    /// Bytes of the whole vector that is reduced, broadcast or gathered; of one block for the others.
    bytes: usize,
}

/// The algorithm for `shape`, whose elements are `element_size` bytes long. Always applicable, and equal on
/// all ranks.
pub fn select(shape: &Shape, element_size: usize, topology: &Topology) -> Algorithm {
    let elements = match (shape.collective, shape.counts) {
        (Collective::AllGather | Collective::ReduceScatter, Counts::Even(count)) => {
            count.saturating_mul(shape.world)
        }
        (Collective::AllGather | Collective::ReduceScatter, Counts::PerRank(counts)) => {
            counts.iter().sum()
        }
        (_, Counts::Even(count)) => count,
        _ => return Algorithm::Direct,
    };
    let situation = Situation {
        world: shape.world,
        across: topology.spans_hosts(),
        crowded: topology.shares_hosts(),
        widen: shape.widen,
        bytes: elements.saturating_mul(element_size),
    };
    let chosen = match shape.collective {
        Collective::AllReduce => all_reduce(&situation),
        Collective::Reduce => reduce(&situation),
        Collective::Broadcast => broadcast(&situation),
        Collective::AllGather => all_gather(&situation),
        Collective::ReduceScatter => reduce_scatter(&situation),
        Collective::Gather | Collective::Scatter => rooted(&situation),
        Collective::AllToAll => all_to_all(&situation),
        Collective::Barrier => Algorithm::Bruck,
        Collective::Send | Collective::Recv => Algorithm::Direct,
    };
    if applicable(chosen, shape) {
        chosen
    } else {
        Algorithm::Direct
    }
}

impl Situation {
    /// Whether all ranks are on one host and few.
    fn is_close(&self) -> bool {
        !self.across && self.world <= SMALL_WORLD
    }

    /// Whether every rank may talk to every other at length: on one host, or each from its own.
    fn may_mesh(&self) -> bool {
        !self.across || !self.crowded
    }

    /// Bytes per rank.
    fn slice(&self) -> usize {
        self.bytes / self.world
    }

    /// What a rank sends when it sends `bytes` to everybody.
    fn to_everybody(&self) -> usize {
        self.bytes.saturating_mul(self.world - 1)
    }
}

fn all_reduce(at: &Situation) -> Algorithm {
    let halving_up_to = if at.world.is_power_of_two() {
        64 * KIB
    } else {
        8 * KIB
    };
    if at.is_close() && at.world <= 8 {
        if at.to_everybody() <= 48 * KIB {
            Algorithm::Direct
        } else {
            Algorithm::TwoShot
        }
    } else if at.bytes <= if at.across { 8 * KIB } else { 2 * KIB } {
        Algorithm::RecursiveDoubling
    } else if (at.is_close() && at.slice() >= KIB)
        || (at.widen && at.may_mesh() && at.slice() >= 4 * KIB)
    {
        Algorithm::TwoShot
    } else if at.slice() < halving_up_to || (at.widen && at.world.is_power_of_two()) {
        Algorithm::Halving
    } else {
        Algorithm::Ring
    }
}

fn reduce(at: &Situation) -> Algorithm {
    if at.world <= SMALL_WORLD && at.to_everybody() <= if at.across { 8 * KIB } else { 48 * KIB } {
        Algorithm::Direct
    } else if at.is_close() {
        Algorithm::TwoShot
    } else if at.slice() < 16 * KIB {
        Algorithm::Tree
    } else if at.widen && at.may_mesh() {
        Algorithm::TwoShot
    } else {
        Algorithm::Ring
    }
}

fn broadcast(at: &Situation) -> Algorithm {
    if !at.across && (at.world <= 4 || at.to_everybody() <= 2 * KIB * KIB) {
        Algorithm::Direct
    } else if at.slice() < 256 * KIB {
        Algorithm::Tree
    } else {
        Algorithm::Ring
    }
}

fn all_gather(at: &Situation) -> Algorithm {
    let bruck_up_to = if at.across && at.crowded {
        KIB
    } else {
        8 * KIB
    };
    if at.is_close() || (!at.crowded && at.world <= 32 && (8 * KIB..64 * KIB).contains(&at.slice()))
    {
        Algorithm::Direct
    } else if at.slice() >= bruck_up_to {
        Algorithm::Ring
    } else if at.world.is_power_of_two() {
        Algorithm::RecursiveDoubling
    } else {
        Algorithm::Bruck
    }
}

fn reduce_scatter(at: &Situation) -> Algorithm {
    let halving_up_to = if at.across && at.crowded {
        KIB
    } else if at.is_close() {
        512
    } else {
        8 * KIB
    };
    if at.is_close() && at.world <= 8 {
        Algorithm::Direct
    } else if at.slice() < halving_up_to {
        Algorithm::Halving
    } else if at.is_close() || (at.widen && at.may_mesh()) {
        Algorithm::Direct
    } else {
        Algorithm::Ring
    }
}

/// Gather and scatter; `bytes` is one block.
fn rooted(at: &Situation) -> Algorithm {
    if at.world > 8 && at.bytes <= KIB {
        Algorithm::Tree
    } else {
        Algorithm::Direct
    }
}

/// `bytes` is one block.
fn all_to_all(at: &Situation) -> Algorithm {
    if at.world > 8 && at.bytes <= 128 {
        Algorithm::Bruck
    } else {
        Algorithm::Direct
    }
}
