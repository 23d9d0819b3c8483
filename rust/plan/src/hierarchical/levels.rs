//! Where a rank is: its host, its place there, and its counterparts on the other hosts.

use crate::topology::Topology;
use crate::types::Rank;
use crate::{Algorithm, Plan, Shape};

/// Makes the plans that are parts of one here.
pub(super) type Inner = fn(Algorithm, &Shape, usize) -> Option<Plan>;

/// Up to this number of hosts, a rank exchanges messages with all of its counterparts at once: one or two rounds with the
/// volume of a ring.
pub(crate) const MOST_HOSTS_AT_ONCE: usize = 8;

/// Whether ranks exchange messages of `message` elements with the counterparts on all of `hosts` hosts at once; `longest` is
/// [`Topology::longest_at_once`]. Else each host sends to one other at a time, and hears from one.
pub(crate) const fn at_once(hosts: usize, message: usize, longest: usize) -> bool {
    hosts <= 2 || (hosts <= MOST_HOSTS_AT_ONCE && message <= longest)
}

/// The hosts, as one rank sees them.
pub(super) struct Levels {
    /// The ranks of each host. The host of the root comes first, and on it the root; of the other hosts that which comes
    /// next in the order of the hosts' first ranks.
    pub(super) hosts: Vec<Vec<Rank>>,
    /// This rank's host.
    pub(super) host: usize,
    /// This rank's place on it.
    pub(super) place: usize,
    /// Elements of the longest messages that go to all hosts at once. Between memory nodes all do.
    pub(super) longest_at_once: usize,
    /// The ranks of this host where they meet by memory node.
    pub(super) nodes: Option<Topology>,
}

impl Levels {
    pub(super) fn of(shape: &Shape, topology: &Topology) -> Self {
        let mut hosts = topology.groups();
        let find = |hosts: &[Vec<Rank>], rank: Rank| {
            let of_host = |ranks: &Vec<Rank>| ranks.iter().position(|other| *other == rank);
            let found = hosts
                .iter()
                .enumerate()
                .find_map(|(host, ranks)| Some((host, of_host(ranks)?)));
            found.unwrap_or_default()
        };
        let (first, place) = find(&hosts, shape.root);
        hosts.rotate_left(first);
        hosts[0].rotate_left(place);
        let (host, place) = find(&hosts, shape.rank);
        let longest_at_once = match topology.spans_hosts() {
            true => topology.longest_at_once,
            false => usize::MAX,
        };
        Self {
            hosts,
            host,
            place,
            longest_at_once,
            nodes: None,
        }
    }

    /// With the memory nodes of this host as a further level, if it has several with several ranks on one.
    #[must_use]
    pub(super) fn by_node(self, topology: &Topology) -> Self {
        let inside = topology.subset(self.inside());
        Self {
            nodes: inside.has_levels().then_some(inside),
            ..self
        }
    }

    /// The ranks of this host.
    pub(super) fn inside(&self) -> &[Rank] {
        &self.hosts[self.host]
    }

    /// How many ranks of each host carry a shard: as many as the smallest host has. On a larger host the others contribute
    /// to all shards and receive all of them, and carry none.
    pub(super) fn shards(&self) -> usize {
        self.hosts.iter().map(Vec::len).min().unwrap_or(1)
    }

    /// Elements of the shard of each rank inside, of a piece of `count`.
    pub(super) fn shards_of(&self, count: usize) -> Vec<usize> {
        let shards = self.shards();
        let share = |place: usize| count / shards + usize::from(place < count % shards);
        let places = 0..self.inside().len();
        places
            .map(|place| if place < shards { share(place) } else { 0 })
            .collect()
    }

    /// The ranks that carry this rank's shard, one on each host; none if it carries none.
    pub(super) fn across(&self) -> Vec<Rank> {
        match self.place < self.shards() {
            true => self.hosts.iter().map(|ranks| ranks[self.place]).collect(),
            false => Vec::new(),
        }
    }

    /// How many ranks the largest host has.
    pub(super) fn longest(&self) -> usize {
        self.hosts.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// The host `distance` after this rank's, around the circle.
    pub(super) fn host_after(&self, distance: usize) -> usize {
        (self.host + distance) % self.hosts.len()
    }

    /// The host `distance` before this rank's, around the circle.
    pub(super) fn host_before(&self, distance: usize) -> usize {
        (self.host + self.hosts.len() - distance) % self.hosts.len()
    }

    /// The place on this host `distance` after this rank's.
    pub(super) fn place_after(&self, distance: usize) -> usize {
        (self.place + distance) % self.inside().len()
    }

    /// The place on this host `distance` before this rank's.
    pub(super) fn place_before(&self, distance: usize) -> usize {
        (self.place + self.inside().len() - distance) % self.inside().len()
    }
}
