//! The state of a group, for somebody who asks while it runs or hangs (`unisono status`).

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::engine::group::step::visit_waits;
use crate::engine::message::matching::UnderWay;
use crate::engine::state::{Core, Group};
use crate::engine::work::WorkState;
use crate::locks::MutexGuard;
use crate::transport::keys::Hex;
use crate::types::Rank;

/// How long a thread that moves data may keep the group's lock before its state is left out of the answer.
const PATIENCE: Duration = Duration::from_millis(50);
const LOOK: Duration = Duration::from_millis(1);

impl Group {
    /// The group as this rank sees it: its members, the operations under way with the ranks that each waits for, the last
    /// operation, and the error of a group that has failed. Ranks are numbers in the group.
    ///
    /// Nothing is sent and nothing moves. While another thread moves data for long, the operations are left out (`busy`).
    pub(crate) fn status(&self) -> Value {
        let members = self.membership.members.iter();
        let ranks: Vec<_> = members
            .map(|member| json!({"global": member.global, "process": member.label}))
            .collect();
        let mut status = json!({
            "id": Hex(&self.identity()).to_string(),
            "rank": self.rank,
            "ranks": ranks,
            "failure": self.error().map(|error| error.to_string()),
        });
        let core = match self.core_within(PATIENCE) {
            Some(core) => core,
            None => {
                status["busy"] = true.into();
                return status;
            }
        };
        let mut operations = self.collectives(&core);
        let messages = core.matching.under_way();
        operations.extend(messages.map(|UnderWay { work, peer, bytes }| {
            let mut operation = self.operation(work);
            // A receive from any rank waits for whichever comes.
            operation["waits_for"] = peer.into_iter().collect();
            operation["bytes"] = bytes.into();
            operation
        }));
        if !operations.is_empty() {
            status["waits"] = self.describe_waits(&core).into();
        }
        status["operations"] = operations.into();
        status["collectives"] = core.sequence.into();
        status["last"] = core.recorder.last_line(self.clock.now()).into();
        status
    }

    /// The collectives under way, each with the ranks that it waits for now.
    fn collectives(&self, core: &Core) -> Vec<Value> {
        let mut waits: Vec<(u64, BTreeSet<Rank>)> = Vec::new();
        visit_waits(core, |operation, waiting| {
            let sequence = operation.work.sequence;
            match waits.last_mut().filter(|(of, _)| *of == sequence) {
                Some((_, peers)) => drop(peers.insert(waiting.peer)),
                None => waits.push((sequence, BTreeSet::from([waiting.peer]))),
            }
        });
        let operations = core.operations.iter();
        let describe = operations.map(|operation| {
            let mut found = waits.iter();
            let peers = found.find(|(of, _)| *of == operation.work.sequence);
            let mut described = self.operation(&operation.work);
            described["number"] = operation.work.sequence.into();
            described["waits_for"] = peers.map_or_else(|| json!([]), |(_, peers)| json!(peers));
            described
        });
        describe.collect()
    }

    fn operation(&self, work: &WorkState) -> Value {
        let age = self.clock.now().saturating_duration_since(work.started);
        json!({"name": work.name(), "seconds": age.as_secs_f64()})
    }

    fn core_within(&self, patience: Duration) -> Option<MutexGuard<'_, Core>> {
        for _ in 0..patience.as_micros() / LOOK.as_micros() {
            if let Some(core) = self.core.try_lock() {
                return Some(core);
            }
            thread::sleep(LOOK);
        }
        self.core.try_lock()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::buffer::Memory;
    use crate::communicator::Communicator;
    use crate::config::Config;
    use crate::engine::Request;
    use crate::engine::work::PointToPoint;
    use crate::types::{DataType, ReduceOp};

    #[test]
    fn a_rank_says_for_whom_it_waits() {
        let ranks = Communicator::local(3, &Config::default()).unwrap();
        let group = ranks[1].group();
        let status = group.status();
        assert_eq!(status["rank"], 1);
        assert_eq!(status["ranks"].as_array().map(Vec::len), Some(3));
        assert_eq!(status["operations"], json!([]));
        assert!(status["waits"].is_null() && status["failure"].is_null());

        let mut data = [1.0_f32; 3];
        // SAFETY: the operations have ended, with the group, before it goes.
        let mut memory = || unsafe { Memory::of_mut(&mut data) };
        let request = Request::all_reduce(DataType::Float32, ReduceOp::Sum, None, memory());
        group.submit(request, None, false).unwrap();
        let place = (Some(2), 7);
        let nothing = Memory::empty();
        group
            .receive(DataType::UInt8, nothing, place, PointToPoint::default())
            .unwrap();
        let status = group.status();
        let operations = status["operations"].as_array().unwrap();
        assert_eq!(operations[0]["name"], "all_reduce #1");
        // One after the other.
        assert_eq!(operations[0]["waits_for"], json!([0]));
        assert_eq!(operations[1]["name"], "recv #1");
        assert_eq!(operations[1]["waits_for"], json!([2]));
        assert!(status["waits"].as_str().unwrap().contains("rank 2"));

        group.abort("enough");
        let failure = group.status()["failure"].clone();
        assert!(failure.as_str().unwrap().contains("enough"), "{failure}");
    }

    #[test]
    fn a_group_that_is_being_driven_says_so() {
        let ranks = Communicator::local(1, &Config::default()).unwrap();
        let group = ranks[0].group();
        let _driven = group.core.lock();
        assert_eq!(group.status()["busy"], true);
    }
}
