//! The bill that the formulas add up, and where the ranks are.

use super::costs::Costs;
use crate::links::LENT_FROM;
use crate::topology::{self, Topology};
use crate::types::Rank;

/// Payloads up to this length are copied in the time that the message takes in any case. Slots hold some kilobytes, but with
/// 4 KiB here an all_reduce of 4 KiB and a reduce of 32 KiB between 8 ranks on two cores are chosen that take 1.2 and 1.4 times
/// as long as the best (`benchmarks/algorithms.py`).
const FREE_COPY: f64 = 560.0;

/// Payloads from this length on are read out of the sender's memory. Those that lie in the heap are from a shorter one on, but
/// an algorithm is chosen for memory of any kind.
const LENT: f64 = LENT_FROM as f64;

/// The extra time of reading memory that no peer has mapped, beyond that of the heap, in copies of the same bytes.
pub(crate) struct Private {
    /// The buffers of all ranks together are larger than the last cache: each reader fetches them from memory.
    pub(crate) is_cold: bool,
}

impl Private {
    /// The kernel looks up each page. Bytes to fold are first copied, block by block, to where the sum can read them.
    fn surcharge(&self, taken: Taken) -> f64 {
        let read = match taken {
            Taken::Copied => 0.15,
            Taken::Folded => 1.9,
        };
        match self.is_cold {
            true => read + 1.0,
            false => read,
        }
    }
}

/// Peers that a rank is counted to exchange messages with at once, as fitted to what was measured. The window of the executor
/// has room for 32, which changes some choices among 16 and more ranks with a core each: none of those has been measured.
const PEERS_IN_HAND: usize = 8;

/// How the ranks of a world lie on its hosts, in numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout<'a> {
    pub(crate) world: usize,
    /// The collective's root.
    pub(crate) root: usize,
    /// The host of each rank.
    pub(crate) places: &'a [usize],
    /// Ranks on the host that has most.
    pub(crate) beside: usize,
    /// How often the ring changes host.
    pub(crate) runs: usize,
    /// Ranks in a row on one host, on average.
    pub(crate) run: usize,
    /// Links of a ring that leave the host which they leave most.
    pub(crate) leaving: usize,
    pub(crate) cores: usize,
    pub(crate) hosts: usize,
    /// Ranks on the host that has fewest.
    pub(crate) fewest: usize,
    /// As [`Topology::longest_at_once`].
    pub(crate) longest_at_once: usize,
    /// The memory nodes of a host, where one has several.
    nodes: Option<Nodes<'a>>,
    /// The hosts are memory nodes of one: what goes across goes through memory.
    is_one_host: bool,
}

/// The memory nodes of a host, in numbers: as [`Topology::nodes`].
#[derive(Clone, Copy, Debug)]
struct Nodes<'a> {
    /// The node of each rank.
    of: &'a [usize],
    ranks: topology::Nodes,
    /// The share of the other ranks that are on other nodes, for a rank of the node that has most.
    apart: f64,
    /// Links of a ring that leave the node which they leave most, for others of its host.
    leaving: usize,
    /// How often the ring changes node on a host.
    runs: usize,
}

impl<'a> Layout<'a> {
    pub(crate) fn of(topology: &'a Topology, world: usize) -> Self {
        let (ranks, leaves) = count(&topology.host_of, |_, _| true);
        let (hosts, runs) = (ranks.len(), leaves.iter().sum::<usize>());
        Self {
            world,
            root: 0,
            places: &topology.host_of,
            beside: ranks.iter().copied().max().unwrap_or(1).max(1),
            runs,
            run: (world / runs.max(1)).max(1),
            leaving: leaves.iter().copied().max().unwrap_or(0),
            cores: topology.cores_per_host.max(1),
            hosts,
            fewest: ranks.iter().copied().min().unwrap_or(1).max(1),
            longest_at_once: topology.longest_at_once,
            nodes: Nodes::of(topology),
            is_one_host: false,
        }
    }

    pub(crate) fn rooted_at(self, root: usize) -> Self {
        Self { root, ..self }
    }

    /// With the memory nodes of the only host for hosts, if it has several.
    pub(crate) fn by_node(self) -> Self {
        match self.nodes {
            Some(nodes) if self.hosts == 1 => Self {
                places: nodes.of,
                beside: nodes.ranks.most,
                fewest: nodes.ranks.fewest,
                leaving: nodes.leaving,
                runs: nodes.runs,
                hosts: nodes.ranks.number,
                cores: (self.cores / nodes.ranks.number).max(1),
                nodes: None,
                longest_at_once: usize::MAX,
                is_one_host: true,
                ..self
            },
            _ => self,
        }
    }

    /// The memory nodes of a host, where they are not its [levels](Self::by_node).
    pub(crate) fn nodes(&self) -> Option<topology::Nodes> {
        self.nodes.map(|nodes| nodes.ranks)
    }

    /// Ranks on the root's host.
    pub(crate) fn beside_root(&self) -> usize {
        let host = self.places.get(self.root);
        let ranks = self.places.iter();
        ranks.filter(|other| Some(*other) == host).count().max(1)
    }

    /// Whether the ranks of each host follow each other in number.
    pub(crate) fn is_in_blocks(&self) -> bool {
        self.runs <= self.hosts
    }

    pub(crate) fn across(&self) -> bool {
        self.leaving > 0
    }

    /// Whether ranks share cores.
    pub(crate) fn is_crowded(&self) -> bool {
        self.beside > self.cores
    }

    /// Ranks of a host whose `partner` is on another, on the host that has most of them.
    pub(crate) fn apart(&self, partner: impl Fn(Rank) -> Rank) -> usize {
        if !self.across() {
            return 0;
        }
        let mut apart = vec![0_usize; self.hosts];
        for (rank, host) in self.places.iter().enumerate() {
            apart[*host] += usize::from(self.places[partner(rank)] != *host);
        }
        apart.into_iter().max().unwrap_or(0)
    }
}

impl<'a> Nodes<'a> {
    fn of(topology: &'a Topology) -> Option<Self> {
        let ranks = topology.nodes()?;
        let hosts = &topology.host_of;
        let (_, leaves) = count(&topology.node_of, |a, b| hosts[a] == hosts[b]);
        Some(Self {
            of: &topology.node_of,
            ranks,
            apart: (ranks.ranks - ranks.most) as f64 / (ranks.ranks - 1) as f64,
            leaving: leaves.iter().copied().max().unwrap_or(0),
            runs: leaves.iter().sum(),
        })
    }
}

/// How many ranks have each number, and how many links of the ring leave them, of those between ranks that count.
fn count(numbers: &[usize], counts: impl Fn(usize, usize) -> bool) -> (Vec<usize>, Vec<usize>) {
    let all = numbers.iter().max().map_or(1, |last| last + 1);
    let (mut ranks, mut leaves) = (vec![0_usize; all], vec![0_usize; all]);
    for (rank, number) in numbers.iter().enumerate() {
        ranks[*number] += 1;
        let next = (rank + 1) % numbers.len();
        leaves[*number] += usize::from(numbers[next] != *number && counts(rank, next));
    }
    (ranks, leaves)
}

/// The work of taking in a message, beside the message itself.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Taken {
    Copied,
    Folded,
}

/// The sum of all that an algorithm does.
pub(crate) struct Bill<'a> {
    pub(crate) costs: &'a Costs,
    pub(crate) at: Layout<'a>,
    /// The callers' buffers lie where no peer reaches them.
    pub(crate) private: Option<Private>,
    /// The seconds of rounds.
    pub(crate) rounds: f64,
    /// Seconds of work of every rank.
    pub(crate) each: f64,
    /// More seconds of work of the root.
    pub(crate) root: f64,
    /// Seconds during which one rank alone is able to work.
    pub(crate) alone: f64,
    /// Bytes through the busiest interface.
    pub(crate) wire: f64,
    /// Streams of several hosts compete for the link of one.
    pub(crate) streams_compete: bool,
    /// Bytes that leave the busiest memory node of a host.
    between_nodes: f64,
}

/// By how much longer bytes take where the streams of several hosts compete for the link of one: some come late, and other
/// links are idle meanwhile. (Four hosts at 1 Gbit/s, 16 MiB: an all_gather takes 1.4 times as long directly as by the ring, a
/// reduce_scatter 1.2 times directly and 1.6 times by halving: `network.py --hosts 1,1,1,1 --collectives
/// all_gather,reduce_scatter --sizes 16M --algorithms ring,direct,halving`.)
const COMPETING: f64 = 0.2;

impl<'a> Bill<'a> {
    pub(crate) fn is_crowded(&self) -> bool {
        self.at.is_crowded()
    }

    pub(crate) fn new(costs: &'a Costs, at: Layout<'a>) -> Self {
        Self {
            costs,
            at,
            private: None,
            rounds: 0.0,
            each: 0.0,
            root: 0.0,
            alone: 0.0,
            wire: 0.0,
            streams_compete: false,
            between_nodes: 0.0,
        }
    }

    pub(crate) fn seconds(&self) -> f64 {
        let shared = (self.each * self.at.beside as f64 + self.root) / self.at.cores as f64;
        let busiest = self.each + self.root;
        let work = if shared > busiest { shared } else { busiest };
        let wire = match self.at.is_one_host {
            true => self.costs.node_byte,
            false => self.costs.remote_byte,
        };
        let sent = self.wire * wire + self.between_nodes * self.costs.node_byte;
        // Links that wait for the processors have time for all streams.
        let late = match self.streams_compete && sent > work {
            true => COMPETING * (sent - work),
            false => 0.0,
        };
        self.rounds + work + self.alone + sent + late
    }

    /// Every rank reads or writes `bytes` bytes of the other ranks' memory, as many of each.
    pub(crate) fn reaches(&mut self, bytes: f64) {
        if let Some(nodes) = self.at.nodes {
            self.between_nodes += bytes * nodes.apart * nodes.ranks.most as f64;
        }
    }

    /// The ranks of a host meet by memory node, and `bytes` bytes leave the busiest: later calls add no more there.
    pub(crate) fn goes_by_node(&mut self, bytes: f64) {
        self.at.nodes = None;
        self.between_nodes += bytes;
    }

    /// The root does, alone.
    pub(crate) fn root_reaches(&mut self, bytes: f64) {
        if let Some(nodes) = self.at.nodes {
            self.between_nodes += bytes * nodes.apart;
        }
    }

    /// How long a dependent round lasts beside its work.
    pub(crate) fn round(&self, across: bool) -> f64 {
        let near = if self.at.is_crowded() {
            self.costs.turn * self.at.beside as f64 / self.at.cores as f64
        } else {
            self.costs.latency
        };
        match (across, self.at.is_one_host) {
            (true, true) => near + self.costs.latency,
            (true, false) => near + self.costs.remote_latency,
            (false, _) => near,
        }
    }

    /// `number` rounds in which some rank waits for another host, if there is one.
    pub(crate) fn rounds(&mut self, number: usize) {
        self.rounds += number as f64 * self.round(self.at.across());
    }

    /// Between one of `pieces` pieces and the next, ranks wait for the results of other hosts, while they have work for `busy`
    /// seconds.
    pub(crate) fn waits_between(&mut self, pieces: f64, busy: f64) {
        if self.at.across() {
            let idle = self.round(true) - busy;
            if idle > 0.0 {
                self.rounds += (pieces - 1.0) * idle;
            }
        }
    }

    /// The time to send `bytes` inside the host: a payload that is not lent is copied, into a slot or into the ring.
    pub(crate) fn sending(&self, bytes: f64) -> f64 {
        let is_copied = bytes > FREE_COPY && bytes < LENT;
        let copied = if is_copied { bytes } else { 0.0 };
        self.costs.message + copied * self.costs.copy
    }

    /// The time to receive `bytes` inside the host; where they are folded, `widening` times as many are added up.
    pub(crate) fn taking(&self, bytes: f64, taken: Taken, widening: f64) -> f64 {
        let mut seconds = self.costs.message;
        if bytes >= LENT {
            seconds += self.costs.loan;
            if let Some(private) = &self.private {
                seconds += bytes * private.surcharge(taken) * self.costs.copy;
            }
        }
        if taken == Taken::Folded {
            seconds += bytes * widening * self.costs.fold;
        }
        if taken == Taken::Copied || bytes >= LENT {
            seconds += bytes * self.costs.copy;
        }
        seconds
    }

    /// The time to receive `bytes` from another host.
    pub(crate) fn taking_from_afar(&self, bytes: f64) -> f64 {
        match self.at.is_one_host {
            true => self.taking(bytes, Taken::Copied, 1.0),
            false => self.costs.remote_message,
        }
    }

    /// Every rank sends `number` messages of `bytes` and takes as many in; `across` hosts or inside.
    pub(crate) fn exchanges(
        &mut self,
        number: f64,
        across: bool,
        bytes: f64,
        taken: Taken,
        widening: f64,
    ) {
        self.each += number * self.exchanging(across, bytes, taken, widening);
        if !across {
            self.reaches(number * bytes);
        }
    }

    /// The time to send a message of `bytes` and to take one in.
    fn exchanging(&self, across: bool, bytes: f64, taken: Taken, widening: f64) -> f64 {
        if !across || self.at.is_one_host {
            return self.sending(bytes) + self.taking(bytes, taken, widening);
        }
        let worked = if taken == Taken::Folded {
            bytes * widening * self.costs.fold
        } else {
            0.0
        };
        2.0 * self.costs.remote_message + worked
    }

    /// Every rank sends `bytes` to every other, in `pieces`.
    ///
    /// Sums grow in rank order, so a rank's last operand comes from a rank that has waited for as many itself.
    /// Concurrent sends hide that in small worlds; so do later pieces, and other ranks on the core where there are any.
    pub(crate) fn all_pairs(&mut self, bytes: f64, pieces: f64, taken: Taken, widening: f64) {
        let (near, far) = (self.at.beside - 1, self.at.world - self.at.beside);
        let (piece, before) = (bytes / pieces, self.each);
        self.exchanges(near as f64 * pieces, false, piece, taken, widening);
        self.exchanges(far as f64 * pieces, true, piece, taken, widening);
        self.wire += (self.at.beside * far) as f64 * bytes;
        if taken == Taken::Folded && !self.at.is_crowded() {
            let hidden = self.at.world.saturating_sub(PEERS_IN_HAND);
            let waiting = (self.each - before) / pieces;
            self.alone += waiting * hidden as f64 / (self.at.world - 1) as f64;
        }
    }

    /// Every rank sends `bytes` to every rank after it, which folds them. The last rank takes in as many as where [all pairs
    /// exchange](Self::all_pairs), and the links of the first host and of the last carry as much; but no rank waits for what
    /// others have folded.
    pub(crate) fn pairs_upwards(&mut self, bytes: f64, pieces: f64, widening: f64) {
        let (each, alone) = (self.each, self.alone);
        self.all_pairs(bytes, pieces, Taken::Folded, widening);
        let half = (self.each - each) * 0.5;
        self.each -= half;
        self.root += half;
        self.alone = alone;
    }

    /// The root takes `bytes` from every other rank.
    pub(crate) fn root_takes(&mut self, bytes: f64, pieces: f64, taken: Taken, widening: f64) {
        let beside = self.at.beside_root();
        let (near, far) = (beside - 1, self.at.world - beside);
        let piece = bytes / pieces;
        self.each += pieces * self.sending(piece);
        self.root += near as f64 * pieces * self.taking(piece, taken, widening);
        let mut remote = self.costs.remote_message;
        if taken == Taken::Folded {
            remote += piece * widening * self.costs.fold;
        }
        self.root += far as f64 * pieces * remote;
        self.wire += far as f64 * bytes;
        self.root_reaches(near as f64 * bytes);
    }

    /// The root sends `bytes` to every other rank.
    pub(crate) fn root_sends(&mut self, bytes: f64) {
        let beside = self.at.beside_root();
        let (near, far) = (beside - 1, self.at.world - beside);
        self.root += near as f64 * self.sending(bytes) + far as f64 * self.costs.remote_message;
        self.each += self.taking(bytes, Taken::Copied, 1.0);
        self.wire += far as f64 * bytes;
        self.root_reaches(near as f64 * bytes);
    }

    /// `hops` from neighbour to neighbour, as far around the ring as that goes. Few of them leave a host.
    pub(crate) fn hops(&mut self, hops: usize) {
        self.rounds += hops as f64 * self.round(false);
        let leaving = hops.min(self.at.runs) as f64;
        self.rounds += leaving * self.costs.remote_latency;
    }

    /// Every rank sends its right neighbour `number` messages of `bytes`. The others wait for those whose neighbour is
    /// on another host.
    pub(crate) fn send_right(&mut self, number: f64, bytes: f64, taken: Taken, widening: f64) {
        let alone_on_host = self.at.across() && self.at.run == 1;
        self.each += number * self.exchanging(alone_on_host, bytes, taken, widening);
        if let Some(nodes) = self.at.nodes {
            self.between_nodes += number * bytes * nodes.leaving as f64;
        }
        if self.at.across() && !alone_on_host {
            self.alone += number * self.costs.remote_message;
        }
        self.wire += number * self.at.leaving as f64 * bytes;
    }

    /// Every rank gives its right neighbour a block of `bytes`, once around.
    pub(crate) fn around(&mut self, bytes: f64, pieces: f64, taken: Taken, widening: f64) {
        let rounds = self.at.world - 1;
        self.hops(rounds);
        self.send_right(rounds as f64 * pieces, bytes / pieces, taken, widening);
    }

    /// Every rank and its `partner` give each other `bytes`, one round.
    pub(crate) fn swap(
        &mut self,
        partner: impl Fn(Rank) -> Rank,
        bytes: f64,
        taken: Taken,
        widening: f64,
    ) {
        let apart = self.at.apart(partner);
        self.round_of(apart > 0, bytes, taken, widening);
        self.wire += bytes * apart as f64;
    }

    /// Every rank sends `bytes` to the one `distance` places on around the circle, one round.
    pub(crate) fn shift(&mut self, distance: usize, bytes: f64, taken: Taken) {
        let across = self.at.across();
        self.round_of(across, bytes, taken, 1.0);
        if across {
            let leaving = (self.at.leaving * distance).min(self.at.beside);
            self.wire += bytes * leaving as f64;
        }
    }

    fn round_of(&mut self, across: bool, bytes: f64, taken: Taken, widening: f64) {
        self.rounds += self.round(across);
        if bytes >= LENT && !across {
            // Lent memory must have come back before it may be written in the next round.
            self.rounds += self.round(false);
        }
        self.exchanges(1.0, across, bytes, taken, widening);
    }

    /// `bytes` are gone over in the rank's own memory.
    pub(crate) fn pass(&mut self, bytes: f64) {
        self.each += bytes * self.costs.copy;
    }
}
