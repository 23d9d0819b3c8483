//! What operations would take and what a group takes: answers without a byte moved.

use std::time::Duration;

use crate::error::Result;
use crate::plan::cost::predict;
use crate::plan::simulate::{CostModel, simulate};
use crate::plan::{self, Algorithm, Counts, Plan, Shape};
use crate::types::{Collective, DataType, Rank};

use crate::engine::collective::request::Request;
use crate::engine::state::{Group, Membership};

impl Group {
    /// How long `request` would take on all ranks, by simulation of its plans at this machine's costs: right in how it grows
    /// with sizes and ranks, not to the microsecond.
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
        let choice = self.membership.choose(&shape, dtype, self.config.algorithm);
        if choice.windows {
            let topology = &self.membership.topology;
            let costs = &self.membership.costs;
            let seconds = predict(Algorithm::Windows, &shape, dtype.size(), topology, costs);
            return Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX));
        }
        let plans: Option<Vec<Plan>> = (0..self.world)
            .map(|rank| {
                let in_place = shape.in_place
                    && (shape.collective != Collective::Reduce || rank == shape.root);
                let shape = Shape {
                    rank,
                    in_place,
                    ..shape
                };
                let Membership {
                    topology, costs, ..
                } = &self.membership;
                let algorithm = choice.messages;
                let piece = plan::piece_length(algorithm, &shape, dtype.size(), topology, costs);
                plan::build_on(algorithm, &shape, piece, topology)
            })
            .collect();
        let seconds = plans.map_or(0.0, |plans| {
            simulate(&plans, &self.costs(dtype, request.partial()))
        });
        Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }

    /// How long a message of `bytes` would take from or to `peer`.
    pub(crate) fn estimate_message(&self, peer: Option<Rank>, bytes: usize) -> Duration {
        let costs = self.costs(DataType::UInt8, DataType::UInt8);
        let hosts = &costs.topology.host_of;
        let near = peer.is_none_or(|peer| hosts.get(peer) == hosts.get(self.rank));
        let link = if near { costs.inside } else { costs.across };
        let seconds = link.latency + 2.0 * link.per_message + link.per_byte * bytes as f64;
        Duration::from_secs_f64(seconds)
    }

    fn costs(&self, dtype: DataType, partial: DataType) -> CostModel {
        let topology = self.membership.topology.clone();
        CostModel::new(
            topology,
            &self.membership.costs,
            dtype.size(),
            partial.size(),
        )
    }

    /// What the group holds on this rank, by name: links by kind, bytes of memory in them and kept for reuse,
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
