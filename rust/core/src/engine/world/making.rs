//! Makes the groups of a world and the links between them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::fabric::{Conditions, Fabric};
use super::random::Random;
use super::scenario::{Asked, Scenario, Seat};
use crate::config::Config;
use crate::engine::clock::Clock;
use crate::engine::drive::threads::RuntimeThreads;
use crate::engine::members::{Member, Members};
use crate::engine::state::{Group, Mail, Membership, Surroundings};
use crate::error::Result;
use crate::locks::Mutex;
use crate::plan::cost::Costs;
use crate::plan::topology::Topology;
use crate::transport::endpoint::Lane;
use crate::transport::keys::GroupKey;
use crate::transport::{Link, local};

/// The groups of all ranks of a team, not connected.
pub(super) fn groups(scenario: &Scenario, clock: &Clock) -> Result<Vec<Arc<Group>>> {
    let mut config = Config::default();
    for (name, value) in &scenario.settings {
        config.set(name, value)?;
    }
    let member = |rank| Member {
        label: format!("host {}", scenario.hosts[rank]),
        global: scenario.processes[rank],
        is_new: false,
        address: None,
    };
    let members: Members = (0..scenario.world).map(member).collect();
    let topology = Topology::from_hosts(&scenario.hosts, 2);
    let staff = Arc::new(RuntimeThreads::not_started()?);
    let key = GroupKey::unconnected()?;
    // The choice of an algorithm must not depend on how fast this machine is.
    let mut costs = Costs::TYPICAL;
    if let Some(asked) = scenario.asked {
        costs.remote_latency = asked.latency.as_secs_f64();
        costs.remote_byte = asked.byte;
    }
    let costs = costs.rounded(2).costs();
    let group = |rank| {
        let membership = Membership {
            members: members.clone(),
            key: key.clone(),
            endpoint: Mutex::new(None),
            topology: topology.clone(),
            costs,
            local_groups: None,
        };
        let surroundings = Surroundings {
            clock: clock.clone(),
            staff: Arc::clone(&staff),
            stay: None,
        };
        Group::assemble_in(surroundings, rank, membership, config.clone())
    };
    (0..scenario.world).map(group).collect()
}

/// The links between every two ranks of a team, and when each side gets its end. `first`: the seat of its rank 0.
pub(super) fn connect(
    (groups, first): (&[Arc<Group>], Seat),
    scenario: &Scenario,
    fabric: &Arc<Fabric>,
    (random, start): (&mut Random, Instant),
) -> Result<Vec<(Instant, Seat, Mail)>> {
    let mut opening = Vec::new();
    let ring = groups[0].config.ring_bytes.bytes();
    for upper in 0..scenario.world {
        for lower in 0..upper {
            for lane in [Lane::Collective, Lane::PointToPoint] {
                let is_near = scenario.hosts[upper] == scenario.hosts[lower];
                let [a, b]: [Box<dyn Link>; 2] = if is_near {
                    let (a, b) = local::pair(ring)?;
                    [Box::new(a), Box::new(b)]
                } else {
                    let ends = [lower, upper].map(|rank| {
                        let conditions = match scenario.asked {
                            Some(asked) => asked_for(asked, scenario.hosts[rank]),
                            None => conditions(random),
                        };
                        (first + rank, conditions)
                    });
                    let [a, b] = fabric.link(ends);
                    [Box::new(a), Box::new(b)]
                };
                let mut takes = || match scenario.asked.is_none() && random.once_in(4) {
                    true => Duration::from_nanos(random.length(50_000_000) as u64),
                    false => Duration::ZERO,
                };
                let made = start + takes();
                for (rank, peer, link) in [(lower, upper, a), (upper, lower, b)] {
                    let mail = Mail::Established { lane, peer, link };
                    opening.push((made + takes(), first + rank, mail));
                }
            }
        }
    }
    Ok(opening)
}

/// The properties of one direction of a link.
fn conditions(random: &mut Random) -> Conditions {
    Conditions {
        latency: Duration::from_nanos(1_000 + random.length(2_000_000) as u64),
        femtoseconds: 1_000_000 * random.length(50) as u64,
        buffer: 1024 + random.length(200_000),
        at_once: random.pick(&[1 << 20, 1 << 20, 4096, 100, 33]),
        host: None,
    }
}

/// The properties of a link from this host in a world that is asked for.
fn asked_for(asked: Asked, host: usize) -> Conditions {
    let under_way = asked.latency.as_secs_f64() / asked.byte;
    Conditions {
        latency: asked.latency,
        femtoseconds: (asked.byte * 1e15) as u64,
        // As systems have it: twice the bytes that are under way at the full rate.
        buffer: (4 << 20).max(2 * under_way as usize),
        at_once: usize::MAX,
        host: Some(host),
    }
}
