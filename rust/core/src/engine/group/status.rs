//! The state of a group while it runs or hangs, for `unisono status`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Weak;

use serde_json::{Value, json};

use crate::engine::group::step::visit_waits;
use crate::engine::state::{Core, Group};
use crate::engine::waits::OfWindow;
use crate::engine::work::WorkState;
use crate::transport::keys::Hex;
use crate::types::{Collective, Rank};

impl Group {
    /// The group as this rank sees it: its members, the operations under way with the ranks that each waits for, the last
    /// operation, and the error of a group that has failed. Ranks are numbers in the group.
    ///
    /// Nothing is sent and nothing moves. It waits for the group's lock, which a thread that drives the group keeps for a step
    /// at most.
    pub(crate) fn status(&self) -> Value {
        let members = self.membership.members.iter();
        let ranks: Vec<_> = members
            .map(|member| json!({"global": member.global, "process": member.label}))
            .collect();
        let failure = self.error();
        let mut status = json!({
            "id": Hex(&self.identity()).to_string(),
            "rank": self.rank,
            "ranks": ranks,
            "failure": failure.as_ref().map(ToString::to_string),
            "failure_code": failure.as_ref().map(|error| error.code.name()),
            "failure_rank": failure.as_ref().and_then(|error| error.peer),
        });
        // Before the lock: a window asks other groups.
        let window = self.window.get().and_then(Weak::upgrade);
        let of_window = window.map(|window| window.under_way());
        let core = self.core.lock();
        let mut operations = self.collectives(&core);
        let messages = core.matching.under_way();
        // The window itself tells of its waits for signals.
        let messages = messages.filter(|message| !(message.is_probe && of_window.is_some()));
        operations.extend(messages.map(|message| {
            let mut operation = self.operation(message.work);
            // A receive from any rank waits for whichever comes.
            operation["waits_for"] = message.peer.into_iter().collect();
            operation["bytes"] = message.bytes.into();
            operation
        }));
        if !operations.is_empty() {
            status["waits"] = self.describe_waits(&core).into();
        }
        operations.extend(of_window.into_iter().flatten().map(|it| self.told(it)));
        status["operations"] = operations.into();
        status["collectives"] = core.sequence.into();
        status["messages"] = core.messages.into();
        status["waited"] = self.waited(&core, |rank| rank);
        status["called"] = core.traffic.record();
        status["links"] = core.links.record(|rank| rank).into();
        status["recent"] = core.recorder.recent(self.clock.now()).into();
        status["last"] = core.recorder.lines(self.clock.now()).pop().into();
        status
    }

    /// For whom the operations of this rank have waited, and how long; `number` numbers them.
    fn waited(&self, core: &Core, number: impl Fn(Rank) -> Rank) -> Value {
        core.waits.record(|rank| {
            let member = &self.membership.members[rank];
            json!({"rank": number(rank), "global": member.global, "process": member.label})
        })
    }

    /// The operations that have been called here, for whom they have waited, the links that they go over, and the choices on
    /// which these stand.
    pub(crate) fn stats(&self) -> Value {
        let core = self.core.lock();
        let known_as = |rank| self.membership.members.known_as(rank);
        json!({
            "rank": known_as(self.rank),
            "collectives": core.sequence,
            "messages": core.messages,
            "called": core.traffic.record(),
            "waited": self.waited(&core, known_as),
            "links": core.links.record(known_as),
            "network": self.membership.endpoint().map(|seat| seat.network()),
        })
    }

    /// Notes in the trace, if there is one, by how many nanoseconds rank 0's clock stands before this host's.
    pub(crate) fn note_clock(&self, offset: i64, error: u64) {
        if let Some(timeline) = &self.core.lock().timeline {
            timeline.note_clock(offset, error);
        }
    }

    /// Tells, at the end, of the rank that this one has waited for, if that was for long.
    pub(crate) fn tell_waits(&self) {
        let core = self.core.lock();
        let all = core.sequence + core.messages;
        if let Some(told) = core.waits.sentence(all, |rank| self.name_of(rank)) {
            let rank = self.membership.members.known_as(self.rank);
            tracing::info!(rank, "{told}");
        }
    }

    /// The collectives under way, each with the ranks that it waits for now.
    fn collectives(&self, core: &Core) -> Vec<Value> {
        let mut waits: BTreeMap<u64, BTreeSet<Rank>> = BTreeMap::new();
        visit_waits(core, |operation, waiting| {
            let peers = waits.entry(operation.work.sequence).or_default();
            peers.insert(waiting.peer);
        });
        let operations = core.operations.iter();
        let describe = operations.map(|operation| {
            let number = operation.work.sequence;
            let mut described = self.operation(&operation.work);
            described["number"] = number.into();
            described["waits_for"] = json!(waits.remove(&number).unwrap_or_default());
            described
        });
        describe.collect()
    }

    fn operation(&self, work: &WorkState) -> Value {
        let age = self.clock.now().saturating_duration_since(work.started);
        let is_fence = self.window.get().is_some() && work.collective == Collective::Barrier;
        let name = match is_fence {
            true => format!("fence #{}", work.sequence),
            false => work.name(),
        };
        json!({"name": name, "seconds": age.as_secs_f64()})
    }

    fn told(&self, of_window: OfWindow) -> Value {
        let OfWindow { name, peer, since } = of_window;
        let age = self.clock.now().saturating_duration_since(since);
        json!({"name": name, "seconds": age.as_secs_f64(), "waits_for": [peer]})
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
}
