//! Asking whether the processes of peers run, for the report of a wait that times out.
//!
//! A rank that has waited for a while sends a question to the peers it waits for, over links to other hosts (on the
//! same host the system knows which processes run). Any step of the peer's group that reads the link answers. If the
//! peer is in no operation of the group, its progress thread answers: it watches the descriptors on which questions
//! come, and nothing else comes there often. So a process is woken for this only by a rank that waits for it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::transport::endpoint::Lane;
use crate::types::Rank;

use crate::engine::group::deadlock::TOLD_AFTER;
use crate::engine::group::step::visit_waits;
use crate::engine::links::{LinkTable, OpenLink};
use crate::engine::message::matching::Dependence;
use crate::engine::state::{Core, Group};

/// The longest pause between two rounds of questions.
const LONGEST_PAUSE: Duration = Duration::from_secs(3);

impl Group {
    /// Asks the peers of operations that have been under way for a while.
    pub(crate) fn ask_for_life(&self, core: &mut Core, now: Instant) {
        if core.next_question.is_some_and(|due| now < due) {
            return;
        }
        let collectives = core.operations.iter().map(|operation| &operation.work);
        let messages = core.matching.under_way().map(|message| message.work);
        let works = collectives.chain(messages);
        let Some(first) = works.map(|work| work.started).min() else {
            return;
        };
        let waited = now.saturating_duration_since(first);
        if waited < TOLD_AFTER {
            // Operations that begin later are to be asked about later.
            core.next_question = Some(first + TOLD_AFTER);
            return;
        }
        for (lane, peer) in self.awaited(core) {
            if let Some(open) = core.links.open(lane, peer)
                && open.ended.is_none()
            {
                open.link.ask();
            }
        }
        core.next_question = Some(now + waited.min(LONGEST_PAUSE));
    }

    /// Has the progress thread answer the questions that come over this link.
    pub(crate) fn answer_questions_of(&self, lane: Lane, peer: Rank, links: &LinkTable) {
        let questions = links
            .peek(lane, peer)
            .and_then(|open| open.link.questions());
        if let (Some(questions), Some(this)) = (questions, self.this.upgrade()) {
            let progress = &self.staff.progress;
            progress.attend(questions, (self.number, peer, lane), Arc::downgrade(&this));
        }
    }

    /// The awaited peers that do not seem to run, in words, to follow the list of waits.
    pub(crate) fn stalls(&self, core: &Core) -> String {
        let mut told = BTreeSet::new();
        let mut text = String::new();
        for (lane, peer) in self.awaited(core) {
            let stall = match core.links.peek(lane, peer) {
                Some(OpenLink {
                    link, ended: None, ..
                }) => link.stall(),
                _ => None,
            };
            if let Some(stall) = stall
                && told.insert(peer)
            {
                let number = self.membership.members.number(peer);
                text.push_str(&format!("; {number}: {stall}"));
            }
        }
        text
    }

    /// The peers that what is under way waits for, and on which links.
    fn awaited(&self, core: &Core) -> BTreeSet<(Lane, Rank)> {
        let mut awaited = BTreeSet::new();
        visit_waits(core, |_, waiting| {
            awaited.insert((Lane::Collective, waiting.peer));
        });
        let needed = |peer: &Rank| core.matching.dependence(*peer) != Dependence::No;
        let messages = (0..self.world).filter(needed);
        awaited.extend(messages.map(|peer| (Lane::PointToPoint, peer)));
        awaited
    }
}
