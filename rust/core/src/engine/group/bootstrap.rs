//! How groups come to be: through a store, inside a process, and by splitting another group.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use serde_json::Value;

use crate::buffer::Memory;
use crate::config::Config;
use crate::descriptors;
use crate::error::{Code, Error, Result};
use crate::locks::Mutex;
use crate::plan::cost::Rounded;
use crate::plan::topology::Topology;
use crate::processors::{Placement, cores, place};
use crate::rendezvous::launcher;
use crate::rendezvous::roster::{self, Introduction, Member as Introduced, Roster};
use crate::rendezvous::secret::Secret;
use crate::rendezvous::store::Store;
use crate::transport::endpoint::{
    self, Address, Endpoint, EndpointOptions, Gate, Lane, Seat, Verdict,
};
use crate::transport::keys::GroupKey;
use crate::transport::{Link, Mend, Stripe, local};
use crate::types::{DataType, Rank};

use crate::engine::calibrate;
use crate::engine::collective::request::{Request, Sizes};
use crate::engine::group::local_groups::LocalGroups;
use crate::engine::group::pricing::price;
use crate::engine::members::{Member, Members};
use crate::engine::state::{Group, Mail, Membership, threads};

/// Whether this process has said that encryption without a secret is weak.
static SAID_UNPROVEN: AtomicBool = AtomicBool::new(false);

/// A process that comes to a store to form a group.
pub(crate) struct Comer<'a> {
    /// Its rank, and how many there are.
    pub(crate) place: (Rank, usize),
    /// The numbers of all ranks in the whole job, where that has more of them.
    pub(crate) numbers: Option<&'a [Rank]>,
    /// It was not in the group that takes in others by this one.
    pub(crate) is_new: bool,
}

impl Comer<'_> {
    /// Of a group that is the whole job, and has not been before.
    pub(crate) fn new(place: (Rank, usize)) -> Self {
        Self {
            place,
            numbers: None,
            is_new: true,
        }
    }
}

impl Group {
    /// Forms a group through a store, which may take as long as `patience`.
    pub(crate) fn join(
        store: &dyn Store,
        comer: &Comer<'_>,
        (config, patience): (Config, Duration),
    ) -> Result<Arc<Self>> {
        let &Comer {
            place: (rank, world),
            numbers,
            is_new,
        } = comer;
        if world == 0 || rank >= world {
            return Err(Error::invalid(format!(
                "rank {rank} is out of range for a group of {world} ranks"
            )));
        }
        let options = EndpointOptions {
            towards: store.address(),
            one_host: world == 1 || !store.is_for_strangers() && launcher::is_one_host(world),
            ..endpoint_options(&config)
        };
        let mut endpoint = Endpoint::global(&options)?;
        let address = endpoint.address();
        let secret = secret(store.secret(), &config)?;
        let mut me = introduction((rank, world), address, secret, &config)?;
        me.is_new = is_new;
        let price = |members: &[Introduced]| price(&endpoint, members);
        let roster = roster::join(store, &me, patience, &price);
        let roster = roster.map_err(|error| clarify(error, numbers))?;
        let members = introduced(&roster, numbers)?;
        let addresses = members.iter().filter_map(|member| member.address.as_ref());
        endpoint.met(addresses);
        if let Some(rate) = roster.costs.rate() {
            endpoint.learn_rate(rate);
        }
        Self::of_roster(endpoint, roster, members, (rank, config))
    }

    /// The group of a roster, whose ranks `members` are.
    pub(crate) fn of_roster(
        endpoint: Seat,
        roster: Roster,
        members: Members,
        (rank, config): (Rank, Config),
    ) -> Result<Arc<Self>> {
        descriptors::make_room(members.len());
        let places = roster.members.iter();
        let places: Vec<_> = places.map(|member| (&member.host, member.node)).collect();
        let costs = roster.costs.costs();
        let topology = Topology::from_places(&places, roster.costs.cores())
            .with_links(costs.remote_latency, costs.remote_byte);
        let threads = threads(&config, &topology, &costs);
        let membership = Membership {
            members,
            key: roster.key,
            endpoint: Mutex::new(Some(endpoint)),
            topology: topology.with_threads(threads),
            costs,
            local_groups: None,
        };
        Self::enter(rank, membership, config)
    }

    /// Makes the group and opens the door to its other members.
    fn enter(rank: Rank, membership: Membership, config: Config) -> Result<Arc<Self>> {
        let key = membership.key.clone();
        let endpoint = membership.endpoint();
        let group = Self::assemble(rank, membership, config)?;
        if let Some(endpoint) = endpoint {
            let door = Door {
                group: Arc::downgrade(&group),
            };
            endpoint.register(key, rank, group.world(), Arc::new(door))?;
        }
        Ok(group)
    }

    /// One group per rank, all in this process.
    pub(crate) fn local(world: usize, config: &Config) -> Result<Vec<Arc<Self>>> {
        Self::local_at(world, config, calibrate::costs().rounded(cores()))
    }

    /// One group per rank, all in this process, which choose their algorithms by `costs`.
    pub(crate) fn local_at(
        world: usize,
        config: &Config,
        costs: Rounded,
    ) -> Result<Vec<Arc<Self>>> {
        Self::local_on(&Topology::one_host(world, costs.cores()), config, costs)
    }

    /// The same for ranks that are where `topology` has them, as far as plans go.
    pub(crate) fn local_on(
        topology: &Topology,
        config: &Config,
        costs: Rounded,
    ) -> Result<Vec<Arc<Self>>> {
        let member = |rank| Member {
            label: format!("thread {rank} of pid {}", std::process::id()),
            global: rank,
            is_new: false,
            address: None,
        };
        let world = topology.host_of.len();
        let members = (0..world).map(member).collect();
        Self::local_of(&members, topology, config, costs)
    }

    fn local_of(
        members: &Members,
        topology: &Topology,
        config: &Config,
        costs: Rounded,
    ) -> Result<Vec<Arc<Self>>> {
        let world = members.len();
        let topology = topology.clone();
        let threads = threads(config, &topology, &costs.costs());
        let topology = topology.with_threads(threads);
        let key = GroupKey::unconnected()?;
        let local_groups = Arc::new(LocalGroups::new());
        let groups = (0..world)
            .map(|rank| {
                let membership = Membership {
                    members: members.clone(),
                    key: key.clone(),
                    endpoint: Mutex::new(None),
                    topology: topology.clone(),
                    costs: costs.costs(),
                    local_groups: Some(Arc::clone(&local_groups)),
                };
                Self::assemble(rank, membership, config.clone())
            })
            .collect::<Result<Vec<_>>>()?;
        for upper in 0..world {
            for lower in 0..upper {
                for lane in [Lane::Collective, Lane::PointToPoint] {
                    let (a, b) = local::pair(config.ring_bytes.bytes())?;
                    groups[lower].post(Mail::Established {
                        lane,
                        peer: upper,
                        link: Box::new(a),
                    });
                    groups[upper].post(Mail::Established {
                        lane,
                        peer: lower,
                        link: Box::new(b),
                    });
                }
            }
        }
        Ok(groups)
    }

    /// The part of this group that gives the same color.
    pub(crate) fn split(&self, color: Option<i64>, key: i64) -> Result<Option<Arc<Self>>> {
        let mine = [i64::from(color.is_some()), color.unwrap_or(0), key];
        let mut all = vec![0_i64; 3 * self.world];
        let request = Request::all_gather(DataType::Int64, None, Memory::empty(), Sizes::Even(3));
        let sequence = self.run_on(request, Some(mine.as_slice()), Some(all.as_mut_slice()))?;
        let Some(color) = color else { return Ok(None) };
        let mut chosen: Vec<(i64, Rank)> = all
            .chunks_exact(3)
            .enumerate()
            .filter(|(_, entry)| entry[0] == 1 && entry[1] == color)
            .map(|(rank, entry)| (entry[2], rank))
            .collect();
        chosen.sort_unstable();
        let ranks: Vec<Rank> = chosen.into_iter().map(|(_, rank)| rank).collect();
        let label = [
            b"split".as_slice(),
            &sequence.to_le_bytes(),
            &color.to_le_bytes(),
        ]
        .concat();
        self.subgroup(&ranks, &label)
    }

    /// The group of some of this group's ranks, in the order of `ranks`; `None` where this rank is not among them.
    /// Nothing is sent: its members know of each other what there is to know.
    pub(crate) fn subgroup(&self, ranks: &[Rank], label: &[u8]) -> Result<Option<Arc<Self>>> {
        self.check_alive()?;
        let mut known = HashSet::new();
        for rank in ranks {
            self.check_rank(*rank, "a subgroup with")?;
            if !known.insert(rank) {
                return Err(Error::invalid(format!(
                    "a subgroup cannot have rank {rank} twice"
                )));
            }
        }
        self.part(ranks, label)
    }

    /// The same of a group that may have failed, with ranks that exist.
    pub(crate) fn part(&self, ranks: &[Rank], label: &[u8]) -> Result<Option<Arc<Self>>> {
        let members = self.membership.members.part(ranks);
        self.part_of(members, ranks, label, self.config.clone())
    }

    /// As [`Group::part`]. Its operations are not in the trace.
    pub(crate) fn part_without_trace(
        &self,
        ranks: &[Rank],
        label: &[u8],
    ) -> Result<Option<Arc<Self>>> {
        let config = Config {
            trace: None,
            ..self.config.clone()
        };
        self.part_of(self.membership.members.part(ranks), ranks, label, config)
    }

    /// As [`Group::part`]. Errors name its ranks by the numbers that they have here.
    pub(crate) fn part_that_keeps_its_numbers(
        &self,
        ranks: &[Rank],
        label: &[u8],
    ) -> Result<Option<Arc<Self>>> {
        let members = self.membership.members.part_that_keeps_its_numbers(ranks);
        self.part_of(members, ranks, label, self.config.clone())
    }

    fn part_of(
        &self,
        members: Members,
        ranks: &[Rank],
        label: &[u8],
        config: Config,
    ) -> Result<Option<Arc<Self>>> {
        // In this order: an open group has it.
        let endpoint = self.membership.endpoint();
        self.check_open()?;
        let Some(rank) = ranks.iter().position(|rank| *rank == self.rank) else {
            return Ok(None);
        };
        if let Some(local_groups) = &self.membership.local_groups {
            let group = local_groups.take(ranks, label, rank, || {
                let costs = calibrate::costs().rounded(cores());
                let topology = Topology::one_host(ranks.len(), costs.cores());
                Self::local_of(&members, &topology, &config, costs)
            })?;
            group.set_timeout(self.timeout());
            return Ok(Some(group));
        }
        let membership = Membership {
            members,
            key: self.membership.key.subset(label, ranks),
            endpoint: Mutex::new(endpoint),
            topology: self.membership.topology.subset(ranks),
            costs: self.membership.costs,
            local_groups: None,
        };
        let group = Self::enter(rank, membership, config)?;
        group.set_timeout(self.timeout());
        Ok(Some(group))
    }
}

/// The ranks of a roster. `numbers`: theirs in the whole job, where that has more ranks.
pub(crate) fn introduced(roster: &Roster, numbers: Option<&[Rank]>) -> Result<Members> {
    let member = |member: &Introduced| {
        let address = Address::from_bytes(&member.address).map_err(|error| {
            Error::new(
                Code::Untrusted,
                format!("the address of rank {} in the store: {error}", member.rank),
            )
        })?;
        Ok(Member {
            label: format!("host {}, pid {}", member.hostname, member.pid),
            global: number_of(member.rank, numbers),
            is_new: member.is_new,
            address: Some(address),
        })
    };
    roster.members.iter().map(member).collect()
}

/// The endpoint that the settings ask for, to be reached from all hosts.
pub(crate) fn endpoint_options(config: &Config) -> EndpointOptions {
    EndpointOptions {
        host: config.host.clone(),
        interface: config.interface.clone(),
        hint: endpoint::hint(),
        towards: None,
        one_host: false,
        ring_bytes: config.ring_bytes.bytes(),
    }
}

/// The number of `rank` in the whole job, of a group whose ranks have these `numbers` there.
fn number_of(rank: Rank, numbers: Option<&[Rank]>) -> Rank {
    let number = numbers.and_then(|numbers| numbers.get(rank));
    number.copied().unwrap_or(rank)
}

/// The error of ranks that do not meet, with the numbers in the whole job of those it is about.
fn clarify(error: Error, numbers: Option<&[Rank]>) -> Error {
    let mut about: Vec<Rank> = error.missing_ranks().to_vec();
    about.extend(error.peer.filter(|_| about.is_empty()));
    let others = about.iter().map(|rank| (*rank, number_of(*rank, numbers)));
    let others = others.filter(|(rank, number)| rank != number);
    let words =
        others.map(|(rank, number)| format!("rank {rank} of this group is global rank {number}"));
    let words: Vec<_> = words.collect();
    match words.is_empty() {
        true => error,
        false => Error {
            message: format!("{}; {}", error.message, words.join(", ")),
            ..error
        },
    }
}

/// The secret that only the ranks of this job know: the one `given` by a store or a launcher, the one in the user's file, or
/// both mixed, if there is any.
pub(crate) fn secret(given: Option<Secret>, config: &Config) -> Result<Option<Secret>> {
    let file = config.secret_file.as_deref().map(Secret::read_file);
    Ok(match (file.transpose()?, given) {
        (Some(file), Some(given)) => Some(file.mix(&given)),
        (file, given) => file.or(given),
    })
}

/// Where links from other members come in.
struct Door {
    group: Weak<Group>,
}

impl Gate for Door {
    fn admit(&self, from: Rank, _: Lane) -> Verdict {
        let Some(group) = self.group.upgrade().filter(|group| !group.is_closed()) else {
            return Verdict::Left;
        };
        // The endpoint knows which links there are. The thread that waits for this one has the group's lock.
        match from < group.world() && from != group.rank() {
            true => Verdict::Accept,
            false => Verdict::Duplicate,
        }
    }

    fn established(&self, from: Rank, lane: Lane, mut link: Box<dyn Link>) {
        match self.group.upgrade() {
            Some(group) => group.post(Mail::Established {
                lane,
                peer: from,
                link,
            }),
            None => link.send_farewell(),
        }
    }

    fn status(&self) -> Option<Value> {
        self.group.upgrade().map(|group| group.status())
    }

    fn address_of(&self, peer: Rank) -> Option<Address> {
        let group = self.group.upgrade()?;
        group.membership.members[peer].address.clone()
    }

    fn mended(&self, from: Rank, lane: Lane, mend: Mend) {
        if let Some(group) = self.group.upgrade() {
            group.take_in_mend((lane, from), mend);
        }
    }

    fn striped(&self, from: Rank, lane: Lane, stripe: Stripe) {
        if let Some(group) = self.group.upgrade() {
            group.post(Mail::Striped {
                lane,
                peer: from,
                stripe: Some(stripe),
            });
        }
    }
}

/// The introduction of this rank to the others.
pub(crate) fn introduction(
    (rank, world): (Rank, usize),
    address: &Address,
    secret: Option<Secret>,
    config: &Config,
) -> Result<Introduction> {
    let mut me = Introduction::new(rank, world, address.to_bytes(), config)?;
    me.secret = secret;
    if config.encrypt.0 && me.secret.is_none() && !SAID_UNPROVEN.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            "encryption without a secret: a process that can write to the store, or change what goes to it, can take part all the same; \
             set UNISONO_SECRET_FILE, or start the ranks with `unisono launch`, which makes a secret"
        );
    }
    let Placement {
        node,
        nodes,
        caches,
        ..
    } = place();
    me.node = node;
    tracing::debug!(
        rank,
        cores = cores(),
        caches,
        node,
        nodes,
        "where this process may run: its cores, the last caches that they have, and its memory node, if it is bound to one"
    );
    Ok(me)
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpStream};
    use std::thread;
    use std::time::Instant;

    use super::*;
    use crate::plan::cost::Costs;
    use crate::plan::{Algorithm, Counts, Shape};
    use crate::rendezvous::file_store::FileStore;
    use crate::skips::skipped;
    use crate::types::{Collective, ReduceOp};

    /// Two sockets of one host are two levels: by name, and every rank gets the sum.
    #[test]
    fn ranks_on_two_memory_nodes_reduce_by_hierarchy() {
        let topology = Topology {
            node_of: vec![0, 1, 0, 1, 1],
            ..Topology::one_host(5, 5)
        };
        let mut config = Config::default();
        config.set("algorithm", "hierarchical").unwrap();
        let costs = Costs::TYPICAL.rounded(5);
        let groups = Group::local_on(&topology, &config, costs).unwrap();
        thread::scope(|scope| {
            for group in &groups {
                scope.spawn(|| {
                    let mut sums = vec![1_i64 << group.rank(); 100_000];
                    let (op, nothing) = (ReduceOp::Sum, Memory::empty());
                    let request = Request {
                        sizes: Sizes::Even(sums.len()),
                        ..Request::all_reduce(DataType::Int64, op, None, nothing)
                    };
                    group
                        .run_on(request, None, Some(sums.as_mut_slice()))
                        .unwrap();
                    assert!(sums.iter().all(|sum| *sum == 31));
                });
            }
        });
        let shape = Shape {
            collective: Collective::AllReduce,
            rank: 0,
            world: 5,
            counts: Counts::Even(100_000),
            root: 0,
            in_place: true,
            widen: false,
        };
        let choice = groups[0]
            .membership
            .choose(&shape, DataType::Int64, config.algorithm);
        assert_eq!(choice.messages, Algorithm::Hierarchical);
    }

    /// Nothing tells these ranks beforehand that they are on one host.
    #[test]
    fn ranks_that_meet_in_a_file_listen_on_loopback_alone() {
        let path = std::env::temp_dir().join(format!("unisono-loopback-{}", std::process::id()));
        let store = FileStore::open(&path).unwrap();
        let mut config = Config::default();
        // Of no other test: it has an endpoint of its own.
        config.set("ring_bytes", "8K").unwrap();
        config.set("transport", "tcp").unwrap();
        let patience = config.join_timeout.duration();
        let groups = thread::scope(|scope| {
            let join = |rank| {
                let (store, config) = (&store, config.clone());
                scope.spawn(move || {
                    Group::join(store, &Comer::new((rank, 2)), (config, patience)).unwrap()
                })
            };
            let ranks = [0, 1].map(join);
            ranks.map(|rank| rank.join().unwrap())
        });
        std::fs::remove_file(path).unwrap();
        let addresses = groups[0].membership.members.iter();
        let addresses: Vec<SocketAddr> = addresses
            .flat_map(|member| member.address.as_ref().expect("it was published").tcp())
            .copied()
            .collect();
        let (inside, outside): (Vec<_>, Vec<_>) =
            addresses.into_iter().partition(|it| it.ip().is_loopback());
        if outside.is_empty() {
            skipped("this host has no interface but loopback");
        }
        for address in outside {
            let until = Instant::now() + Duration::from_secs(10);
            while TcpStream::connect(address).is_ok() {
                assert!(Instant::now() < until, "{address} is open");
                thread::sleep(Duration::from_millis(10));
            }
        }
        for address in inside {
            TcpStream::connect(address).unwrap();
        }
        thread::scope(|scope| {
            for group in &groups {
                scope.spawn(|| {
                    let mut sum = [1_i64];
                    let (op, nothing) = (ReduceOp::Sum, Memory::empty());
                    let request = Request {
                        sizes: Sizes::Even(1),
                        ..Request::all_reduce(DataType::Int64, op, None, nothing)
                    };
                    group
                        .run_on(request, None, Some(sum.as_mut_slice()))
                        .unwrap();
                    assert_eq!(sum, [2]);
                });
            }
        });
    }
}
