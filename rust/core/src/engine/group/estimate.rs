//! The time that operations would take, and the resources of a group: answers without a byte moved.

use std::time::Duration;

use crate::error::Result;
use crate::plan::cost::predict;
use crate::plan::{Algorithm, Counts, Shape};
use crate::types::{Collective, Rank};

use crate::engine::collective::request::Request;
use crate::engine::state::{Group, Membership};

impl Group {
    /// How long `request` would take on all ranks: the price by which its algorithm is chosen, right in how it grows with sizes
    /// and ranks, not to the microsecond.
    pub(crate) fn estimate(&self, request: &Request) -> Result<Duration> {
        request.check(self.rank, self.world)?;
        let shape = request.shape(self.rank, self.world);
        let dtype = request.dtype;
        // Of these each rank knows its own counts alone; the others are taken to be like it.
        let alike = match shape.counts {
            Counts::PerPair { send, .. } => Some(send.iter().sum::<usize>() / self.world),
            Counts::PerRank(counts)
                if matches!(shape.collective, Collective::Gather | Collective::Scatter) =>
            {
                Some(counts[self.rank])
            }
            _ => None,
        };
        let shape = Shape {
            counts: alike.map_or(shape.counts, Counts::Even),
            ..shape
        };
        let Membership {
            topology, costs, ..
        } = &self.membership;
        let choice = self.membership.choose(&shape, dtype, self.config.algorithm);
        let algorithm = match choice.windows {
            true => Algorithm::Windows,
            false => choice.messages,
        };
        let seconds = predict(algorithm, &shape, dtype.size(), topology, costs);
        Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }

    /// How long a message of `bytes` would take from or to `peer`.
    pub(crate) fn estimate_message(&self, peer: Option<Rank>, bytes: usize) -> Duration {
        let Membership {
            topology, costs, ..
        } = &self.membership;
        let hosts = &topology.host_of;
        let near = peer.is_none_or(|peer| hosts.get(peer) == hosts.get(self.rank));
        let (latency, message, byte) = match near {
            true => (costs.latency, costs.message, costs.copy),
            false => (
                costs.remote_latency,
                costs.remote_message,
                costs.remote_byte,
            ),
        };
        Duration::from_secs_f64(latency + 2.0 * message + byte * bytes as f64)
    }

    /// The resources that the group holds on this rank, by name: links, bytes of memory in them and kept for reuse,
    /// operations and plans.
    pub(crate) fn memory(&self) -> Vec<(&'static str, u64)> {
        let Some(mut core) = self.lock_here() else {
            return Vec::new();
        };
        let (mut links, mut link_bytes) = (0, 0);
        for (_, _, open) in core.links.iter_open() {
            links += 1;
            link_bytes += open.link.memory();
        }
        let (plans, scratch) = core.plans.sizes();
        [
            ("links", links),
            ("link_bytes", link_bytes),
            ("scratch_bytes", scratch),
            ("operations", core.operations.len()),
            ("plans", plans),
        ]
        .map(|(name, amount)| (name, amount as u64))
        .to_vec()
    }
}
