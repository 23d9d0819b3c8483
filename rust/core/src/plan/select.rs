//! Which algorithm serves which request.
//!
//! All ranks must choose alike, so the choice depends only on what is equal on all of them: the collective,
//! the world, where the ranks are, what things cost there, and sizes, where every rank knows them all. (In
//! gather, scatter and all_to_all with a count per rank or pair, a rank may know only its own; there the
//! algorithm is fixed.)
//!
//! It is the one that [`predict`](super::cost::predict) finds cheapest at the group's [`Costs`], which are measured on
//! rank 0 and the same everywhere. Of algorithms that are equally good the first in [`Algorithm::ALL`] is taken.

use super::cost::{Costs, least};
use super::{Algorithm, Counts, Shape, is_well_formed, serves};
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

/// The algorithm for `shape`, whose elements are `element_size` bytes long. Always applicable, and equal on
/// all ranks.
pub fn select(shape: &Shape, element_size: usize, topology: &Topology, costs: &Costs) -> Algorithm {
    match (shape.collective, shape.counts) {
        (_, Counts::Even(_))
        | (Collective::AllGather | Collective::ReduceScatter, Counts::PerRank(_)) => {}
        // Each rank knows its own counts only.
        _ => return Algorithm::Direct,
    }
    if shape.collective == Collective::Barrier {
        // Through a root, the other way, ranks would wait for the root while it waits for who is missing, and name it.
        return Algorithm::Bruck;
    }
    if !is_well_formed(shape) {
        return Algorithm::Direct;
    }
    let candidates = Algorithm::ALL
        .into_iter()
        .filter(|algorithm| serves(*algorithm, shape));
    least(candidates, shape, element_size, topology, costs).unwrap_or(Algorithm::Direct)
}
