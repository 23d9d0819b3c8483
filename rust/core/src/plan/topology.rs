//! Where the ranks of a group are: which of them share a host, and how many cores they share there.

use crate::types::Rank;

/// Where the ranks are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The host of each rank: numbers from 0 on, without gaps.
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

    /// Ranks are on one host when their labels are equal. Hosts are numbered in the order of their first ranks.
    pub fn from_hosts<T: PartialEq>(labels: &[T], cores: usize) -> Self {
        let mut known: Vec<&T> = Vec::new();
        let mut number = |label| {
            let found = known.iter().position(|other| *other == label);
            found.unwrap_or_else(|| {
                known.push(label);
                known.len() - 1
            })
        };
        Self {
            host_of: labels.iter().map(&mut number).collect(),
            cores_per_host: cores,
        }
    }

    /// The part of it that holds `ranks`, in that order.
    #[must_use]
    pub fn subset(&self, ranks: &[Rank]) -> Self {
        let hosts: Vec<usize> = ranks.iter().map(|rank| self.host_of[*rank]).collect();
        Self::from_hosts(&hosts, self.cores_per_host)
    }

    /// The ranks of each host in ascending order; hosts by their first ranks.
    pub fn hosts(&self) -> Vec<Vec<Rank>> {
        let mut hosts: Vec<(usize, Vec<Rank>)> = Vec::new();
        for (rank, host) in self.host_of.iter().enumerate() {
            match hosts.iter_mut().find(|(known, _)| known == host) {
                Some((_, ranks)) => ranks.push(rank),
                None => hosts.push((*host, vec![rank])),
            }
        }
        hosts.into_iter().map(|(_, ranks)| ranks).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_numbered_without_gaps() {
        let topology = Topology::from_hosts(&["b", "b", "a", "c", "a"], 2);
        assert_eq!(topology.host_of, [0, 0, 1, 2, 1]);
        assert_eq!(topology.subset(&[4, 3, 2]).host_of, [0, 1, 0]);
    }
}
