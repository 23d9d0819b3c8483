//! Where the ranks of a group are: which of them share a host, which share a memory node of it, and how many cores they
//! share there.
//!
//! A host with several sockets has several memory nodes (NUMA), and all that its cores read of another node's memory goes
//! through one link between them. A rank is on a node if it is bound to its cores. Nodes count on a host only if all of its
//! ranks are bound to one: those that are not may run anywhere.

use std::hash::Hash;

use rustc_hash::FxHashMap;

use crate::types::Rank;

/// Where the ranks are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The host of each rank: numbers from 0 on, without gaps.
    pub host_of: Vec<usize>,
    /// The memory node of each rank: numbers from 0 on, without gaps, over all hosts. Where nodes do not count, the host's.
    pub node_of: Vec<usize>,
    /// Cores that the ranks of one host share.
    pub cores_per_host: usize,
    /// Elements of a message up to which a rank exchanges messages with ranks of all other hosts at once, where a hierarchy has
    /// the choice: the same on all ranks. See [`Topology::with_links`].
    pub longest_at_once: usize,
    /// Threads of each rank that have a share of a long piece: the same on all ranks.
    pub threads: usize,
}

/// How the ranks of a host with several memory nodes lie on them, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Nodes {
    /// Ranks of the host.
    pub(super) ranks: usize,
    /// How many nodes they are on.
    pub(super) number: usize,
    /// Ranks on the node that has most.
    pub(super) most: usize,
    /// Ranks on the node that has fewest.
    pub(super) fewest: usize,
}

impl Nodes {
    /// With one node more, of `ranks` ranks.
    const fn and(self, ranks: usize) -> Self {
        let is_least = self.number == 0 || ranks < self.fewest;
        Self {
            ranks: self.ranks + ranks,
            number: self.number + 1,
            most: if ranks > self.most { ranks } else { self.most },
            fewest: if is_least { ranks } else { self.fewest },
        }
    }

    /// Messages that leave the node with most ranks, where each rank of the host sends one to every other.
    pub(super) const fn leaving(self) -> usize {
        self.most * (self.ranks - self.most)
    }
}

/// Where nothing is known of the links: 32 KiB of the commonest element.
const LONGEST_AT_ONCE: usize = 8 << 10;

/// By how much less time bytes take on the links where each host sends to one other at a time.
const GAIN: f64 = 0.2;

impl Topology {
    /// All ranks on one host.
    pub fn one_host(world: usize, cores: usize) -> Self {
        Self::of_hosts(vec![0; world], cores)
    }

    /// `hosts` hosts with `ranks` consecutive ranks each.
    pub fn even(hosts: usize, ranks: usize, cores: usize) -> Self {
        Self::of_hosts((0..hosts * ranks).map(|rank| rank / ranks).collect(), cores)
    }

    /// The ranks of these hosts, which are numbered from 0 on without gaps.
    pub fn of_hosts(host_of: Vec<usize>, cores: usize) -> Self {
        Self {
            node_of: host_of.clone(),
            host_of,
            cores_per_host: cores,
            longest_at_once: LONGEST_AT_ONCE,
            threads: 1,
        }
    }

    /// Ranks are on one host when their labels are equal. Hosts are numbered in the order of their first ranks.
    pub fn from_hosts<T: Eq + Hash>(labels: &[T], cores: usize) -> Self {
        Self::of_hosts(numbered(labels), cores)
    }

    /// Ranks are on one host when the first parts of their labels are equal, and on one node of it when the second are, too.
    /// `None`: the rank is bound to no node.
    pub fn from_places<T: Eq + Hash>(labels: &[(T, Option<u16>)], cores: usize) -> Self {
        let hosts: Vec<&T> = labels.iter().map(|(host, _)| host).collect();
        let host_of = numbered(&hosts);
        let mut free = vec![false; host_of.iter().max().map_or(0, |last| last + 1)];
        for ((_, node), host) in labels.iter().zip(&host_of) {
            free[*host] |= node.is_none();
        }
        let nodes = labels.iter().zip(&host_of);
        let nodes: Vec<_> = nodes
            .map(|((_, node), host)| (*host, node.filter(|_| !free[*host])))
            .collect();
        Self {
            node_of: numbered(&nodes),
            host_of,
            cores_per_host: cores,
            longest_at_once: LONGEST_AT_ONCE,
            threads: 1,
        }
    }

    /// The same with hosts `latency` seconds apart, and links that take `byte` seconds for a byte.
    ///
    /// When several hosts send to one at the same time, their streams compete for its link: some get less and come late, and
    /// other links are idle meanwhile. Where each host sends to one other at a time, that is gained, and there are more rounds,
    /// each with its latency.
    #[must_use]
    pub fn with_links(self, latency: f64, byte: f64) -> Self {
        let elements = latency / (GAIN * byte) / 4.0;
        Self {
            longest_at_once: (elements as usize).max(LONGEST_AT_ONCE),
            ..self
        }
    }

    /// The same with `threads` threads of each rank for long pieces.
    #[must_use]
    pub fn with_threads(self, threads: usize) -> Self {
        Self { threads, ..self }
    }

    /// Whether the ranks are on more than one host.
    #[inline]
    pub fn has_several_hosts(&self) -> bool {
        self.host_of.iter().any(|host| *host != 0)
    }

    /// The part of it that holds `ranks`, in that order.
    #[must_use]
    pub fn subset(&self, ranks: &[Rank]) -> Self {
        let of =
            |numbers: &[usize]| -> Vec<usize> { ranks.iter().map(|rank| numbers[*rank]).collect() };
        Self {
            host_of: numbered(&of(&self.host_of)),
            node_of: numbered(&of(&self.node_of)),
            cores_per_host: self.cores_per_host,
            longest_at_once: self.longest_at_once,
            threads: self.threads,
        }
    }

    /// The ranks of each host in ascending order; hosts by their first ranks.
    pub fn hosts(&self) -> Vec<Vec<Rank>> {
        grouped(&self.host_of)
    }

    /// The groups of ranks that are apart: several hosts or, on one, several memory nodes. The ranks of each of them, as
    /// [`Topology::hosts`]; one list where all ranks are together.
    pub fn groups(&self) -> Vec<Vec<Rank>> {
        match self.spans_hosts() {
            true => self.hosts(),
            false => grouped(&self.node_of),
        }
    }

    /// The memory nodes of a host: where several hosts have nodes, of the one on which most is between them. `None` where no
    /// host has several.
    pub(super) fn nodes(&self) -> Option<Nodes> {
        if self.node_of == self.host_of {
            return None;
        }
        let numbers = |of: &[usize]| of.iter().max().map_or(0, |last| last + 1);
        let mut on_node = vec![0; numbers(&self.node_of)];
        for node in &self.node_of {
            on_node[*node] += 1;
        }
        let mut hosts = vec![Nodes::default(); numbers(&self.host_of)];
        for (host, node) in self.host_of.iter().zip(&self.node_of) {
            // Each node is counted once.
            let ranks = std::mem::take(&mut on_node[*node]);
            if ranks > 0 {
                hosts[*host] = hosts[*host].and(ranks);
            }
        }
        let several = hosts.into_iter().filter(|nodes| nodes.number > 1);
        several.max_by_key(|nodes| nodes.leaving())
    }

    /// How many ranks share `rank`'s host, itself among them.
    pub fn ranks_beside(&self, rank: Rank) -> usize {
        let host = self.host_of[rank];
        self.host_of.iter().filter(|other| **other == host).count()
    }

    /// Whether any two ranks are on different hosts.
    #[inline]
    pub fn spans_hosts(&self) -> bool {
        self.host_of.windows(2).any(|pair| pair[0] != pair[1])
    }

    /// Whether there are two levels: ranks that are together, on a host or on a memory node of the only one, and such that are
    /// apart.
    pub(crate) fn has_levels(&self) -> bool {
        let groups = self.groups();
        groups.len() > 1 && groups.iter().any(|ranks| ranks.len() > 1)
    }
}

/// The number of each label: from 0 on, in the order in which the labels are met first.
fn numbered<T: Eq + Hash>(labels: &[T]) -> Vec<usize> {
    let mut known: FxHashMap<&T, usize> = FxHashMap::default();
    let number = |label| {
        let next = known.len();
        *known.entry(label).or_insert(next)
    };
    labels.iter().map(number).collect()
}

/// The ranks of each number in ascending order; numbers by their first ranks.
fn grouped(numbers: &[usize]) -> Vec<Vec<Rank>> {
    let mut places = FxHashMap::default();
    let mut groups: Vec<Vec<Rank>> = Vec::new();
    for (rank, number) in numbers.iter().enumerate() {
        let place = *places.entry(*number).or_insert(groups.len());
        if place == groups.len() {
            groups.push(Vec::new());
        }
        groups[place].push(rank);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_numbered_without_gaps() {
        let topology = Topology::from_hosts(&["b", "b", "a", "c", "a"], 2);
        assert_eq!(topology.host_of, [0, 0, 1, 2, 1]);
        assert_eq!(topology.subset(&[4, 3, 2]).host_of, [0, 1, 0]);
        assert_eq!(topology.node_of, topology.host_of);
    }

    #[test]
    fn nodes_count_where_all_ranks_are_bound() {
        let places = [
            ("a", Some(1)),
            ("a", Some(0)),
            ("b", Some(0)),
            ("a", Some(1)),
            ("b", None),
        ];
        let topology = Topology::from_places(&places, 2);
        assert_eq!(topology.host_of, [0, 0, 1, 0, 1]);
        assert_eq!(topology.node_of, [0, 1, 2, 0, 2]);
        assert_eq!(topology.groups(), topology.hosts(), "hosts come first");
        let one = topology.subset(&[3, 1, 0]);
        assert_eq!(
            (&one.host_of[..], &one.node_of[..]),
            (&[0; 3][..], &[0, 1, 0][..])
        );
        assert_eq!(one.groups(), [vec![0, 2], vec![1]]);
        let nodes = Nodes {
            ranks: 3,
            number: 2,
            most: 2,
            fewest: 1,
        };
        assert_eq!((topology.nodes(), one.nodes()), (Some(nodes), Some(nodes)));
        assert_eq!(topology.subset(&[0, 3, 4]).nodes(), None);
        assert!(one.has_levels() && !topology.subset(&[1, 0]).has_levels());
        assert!(!Topology::one_host(4, 2).has_levels());
    }
}
