//! The costs by which a group that forms chooses its algorithms.

use std::time::Duration;

use crate::engine::calibrate;
use crate::plan::cost::{Costs, Rounded};
use crate::processors::{Placement, cores, place};
use crate::rendezvous::roster::Member as Introduced;
use crate::transport::endpoint::{Address, Endpoint};

/// Hosts are near each other whose round trip is no longer: it takes ten or more of them to bring a connection up to speed.
const NEAR_ROUND_TRIP: Duration = Duration::from_millis(1);

/// The cores that the ranks of this host share: where they are bound to memory nodes, those of all nodes.
fn shared_cores() -> usize {
    let Placement {
        node,
        cores: of_all,
        ..
    } = place();
    match node {
        Some(_) => of_all.max(cores()),
        None => cores(),
    }
}

/// The costs of this machine, by which groups of this host choose their algorithms. The first call of a process measures them,
/// for a millisecond.
pub fn costs_here() -> Rounded {
    calibrate::costs().rounded(shared_cores())
}

/// The costs on this rank, the first, and between it and other hosts. They hold for all members, so that all make the same
/// choices.
pub(super) fn price(endpoint: &Endpoint, members: &[Introduced]) -> Rounded {
    if members.len() < 2 {
        return Costs::TYPICAL.rounded(1);
    }
    let shared = shared_cores();
    let addresses: Vec<_> = members
        .iter()
        .filter_map(|member| Address::from_bytes(&member.address).ok())
        .collect();
    let mut costs = calibrate::costs();
    if let Some((round_trip, target)) = endpoint.farthest(addresses.iter()) {
        // Of what a message takes to a host that is near, most is the system's work, which the kernels' packets do not need.
        let one_way = round_trip.as_secs_f64() / 2.0;
        costs.remote_latency = one_way.max(Costs::TYPICAL.remote_latency);
        tracing::debug!(?round_trip, "measured the way to the farthest host");
        // A connection takes many round trips to come up to speed.
        if round_trip <= NEAR_ROUND_TRIP
            && let Some(rate) = endpoint.rate(target)
        {
            tracing::debug!(rate, "bytes a second to another host");
            return costs.rounded(shared).with_rate(rate);
        }
    }
    costs.rounded(shared)
}
