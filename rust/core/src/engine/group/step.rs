//! One step of a group: what can be moved now is moved, what has ended is noticed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::{Code, Error};
use crate::transport::endpoint::Lane;
use crate::transport::{Interest, Notice, PeerState};
use crate::types::Rank;

use crate::engine::links::{Direction, LinkTable, Slot, Waiting, as_told, loss};
use crate::engine::message::matching::{Dependence, UnderWay};
use crate::engine::state::{Core, Group, Operation};
use crate::engine::work::WorkState;

/// Operations of one group that are moved at once; later ones wait their turn.
const MOST_MOVED: usize = 64;

/// The pause between two looks at a peer that owes an answer.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Waits named in a report, beyond which only their number is given.
const WAITS_NAMED: usize = 4;

impl Group {
    /// Moves every byte that can be moved now. Returns whether anything moved, also when that was the group's end.
    pub(crate) fn step(&self, core: &mut Core) -> bool {
        self.guarded(core, |core| self.step_once(core))
            .unwrap_or(true)
    }

    fn step_once(&self, core: &mut Core) -> bool {
        let mut moved = self.has_mail() && self.read_mail(core);
        let mut index = 0;
        while index < core.operations.len().min(MOST_MOVED) {
            let (earlier, rest) = core.operations.split_at_mut(index);
            let operation = &mut rest[0];
            let running = |sequence: &u64| earlier.iter().any(|e| e.work.sequence == *sequence);
            operation.after.retain(running);
            if !operation.after.is_empty() {
                index += 1;
                continue;
            }
            let free = |direction: (Rank, Direction)| {
                earlier
                    .iter()
                    .all(|operation| operation.run.has_left(direction))
            };
            let decided = |operation: &Operation| operation.run.is_decided();
            let is_next = earlier.iter().all(decided);
            let run = &mut operation.run;
            let advanced = run
                .advance(&mut core.links, &free, (&mut core.shared, is_next))
                .and_then(|any| Ok(any | self.go_by_messages(&mut core.plans, run)?));
            match advanced {
                Ok(any) => moved |= any,
                Err(error) => {
                    let error = error.with_operation(operation.work.name());
                    let error = self.explained(core, error);
                    self.fail(core, error);
                    return true;
                }
            }
            if operation.run.is_done() {
                core.complete(index);
                moved = true;
            } else {
                index += 1;
            }
        }
        if core.matching.is_busy() {
            let Core {
                matching,
                links,
                finished,
                ..
            } = core;
            match matching.advance(links, finished) {
                Ok(any) => moved |= any,
                Err(error) => {
                    let error = self.explained(core, error);
                    self.fail(core, error);
                    return true;
                }
            }
        }
        if !core.finished.is_empty() {
            self.settle(core);
        }
        moved
    }

    /// Looks at what the hot path does not: deadlines, the peers' state, links that could not be opened.
    pub(crate) fn look_around(&self, core: &mut Core) {
        // A panic is the end of the group; its error reaches the callers.
        let _ = self.guarded(core, |core| self.look_around_once(core));
    }

    fn look_around_once(&self, core: &mut Core) {
        if !core.is_busy() {
            return;
        }
        let now = self.clock.now();
        let mut aborted: Option<(Rank, Notice)> = None;
        let mut someone_left = false;
        for (lane, peer, open) in core.links.iter_open() {
            aborted = open.look(now).map(|notice| (peer, notice)).or(aborted);
            someone_left |= open.ended.is_some();
            if let Some(numbers) = open.link.wants_stripes()
                && !self.open_stripes(lane, peer, numbers)
            {
                open.link.give_up_stripes();
            }
        }
        self.mend_links(core);
        if let Some((teller, notice)) = aborted {
            // The messages that the others sent before may be all that an operation still needs.
            self.step(core);
            if core.is_busy() {
                self.end_as(core, teller, &notice);
            }
            return;
        }
        let contradiction = self.contradiction_told(core);
        if let Some(error) = contradiction.or_else(|| self.stray_now_and_then(core, now)) {
            self.fail(core, error);
            return;
        }
        self.tell_positions(core, now);
        self.ask_for_life(core, now);
        // Bytes that arrived before the end still count: only when nothing moves any more is a wait in vain.
        if !someone_left || !self.step(core) {
            if let Some(error) = self.in_vain(core, now) {
                self.fail(core, error);
                return;
            }
            for peer in 0..self.world {
                if matches!(core.links.open(Lane::PointToPoint, peer), Some(open) if open.ended.is_some())
                {
                    core.matching.forget(peer);
                }
            }
        }
        if let Some(error) = self.overdue(core, now) {
            self.fail(core, error);
        }
    }

    /// `teller` says that the group was aborted, by itself or by another rank. It may say of others whatever it likes, so the
    /// error says by whom it was told.
    pub(crate) fn end_as(&self, core: &mut Core, teller: Rank, notice: &Notice) {
        let error = as_told(notice, self.world, (teller, &self.name_of(teller)));
        self.fail_with(core, error, notice);
    }

    /// The error of the first wait that cannot end, because its peer has gone or cannot be reached.
    fn in_vain(&self, core: &mut Core, now: Instant) -> Option<Error> {
        let mut waits = Vec::new();
        visit_waits(core, |operation, waiting| {
            waits.push((operation.work.name(), waiting))
        });
        for (name, waiting) in waits {
            if let Some(error) = self.gone(core, (Lane::Collective, waiting.peer), now) {
                return Some(error.with_operation(name));
            }
        }
        let mut present = 0;
        for peer in 0..self.world {
            let dependence = core.matching.dependence(peer);
            if dependence == Dependence::No {
                continue;
            }
            match self.gone(core, (Lane::PointToPoint, peer), now) {
                Some(error) if dependence == Dependence::Yes || !has_left(&core.links, peer) => {
                    return Some(error);
                }
                Some(_) => {}
                None => present += 1,
            }
        }
        if present == 0 && core.matching.waits_for_any() && self.world > 1 {
            return Some(Error::new(
                Code::PeerLost,
                "every other rank has left the group while a receive from any source waits",
            ));
        }
        None
    }

    /// Why `peer` will not answer, if it will not.
    fn gone(&self, core: &mut Core, (lane, peer): (Lane, Rank), now: Instant) -> Option<Error> {
        self.ensure_link(core, lane, peer);
        let lost = |state: &PeerState| loss(state, self.world, (peer, &self.name_of(peer)));
        let links = &mut core.links;
        match links.slot(lane, peer) {
            Slot::Open(open) => lost(open.ended.as_ref()?),
            Slot::Unreachable(error) => match has_left(links, peer) {
                true => lost(&PeerState::Left),
                false => Some((**error).clone()),
            },
            Slot::Closed | Slot::Opening { .. } => lost(links.lost_elsewhere(lane, peer, now)?),
        }
    }

    /// The error of the first operation whose time is up.
    fn overdue(&self, core: &mut Core, now: Instant) -> Option<Error> {
        let is_late = |work: &&Arc<WorkState>| work.deadline.is_some_and(|due| now >= due);
        let mut collectives = core.operations.iter().map(|operation| &operation.work);
        let late = collectives.find(is_late).map(Arc::clone);
        let message = || core.matching.overdue(now);
        let (work, peer) = late.map(|work| (work, None)).or_else(message)?;
        let mut blamed = peer;
        visit_waits(core, |_, waiting| blamed = blamed.or(Some(waiting.peer)));
        let first = || core.matching.under_way().find_map(|message| message.peer);
        let blamed = blamed.or_else(first);
        let history = blamed.and_then(|rank| Some((rank, core.waits.history(rank)?)));
        let history = history.map_or_else(String::new, |(rank, told)| {
            let number = self.membership.members.number(rank);
            format!(" ({number} {told})")
        });
        let mut error = Error::new(
            Code::Timeout,
            format!(
                "timed out after {:.3} s on {}: {}{history}; is that rank stuck, slow, or in another operation?",
                now.saturating_duration_since(work.started).as_secs_f64(),
                self.own_number(),
                self.describe_waits(core)
            ),
        )
        .with_operation(work.name());
        error.peer = blamed;
        Some(error)
    }

    /// The waits of everything under way, in words.
    pub(crate) fn describe_waits(&self, core: &Core) -> String {
        let (mut waits, mut more) = (Vec::new(), 0);
        visit_waits(
            core,
            |operation,
             Waiting {
                 peer,
                 direction,
                 bytes,
                 of,
             }| {
                if waits.len() == WAITS_NAMED {
                    more += 1;
                    return;
                }
                let (verb, preposition) = match direction {
                    Direction::Send => ("sent", "to"),
                    Direction::Receive => ("received", "from"),
                    Direction::Meet => ("done", "and waits for"),
                };
                waits.push(format!(
                    "{} has {verb} {bytes} of {of} bytes {preposition} {}",
                    operation.work.name(),
                    self.name_of(peer)
                ));
            },
        );
        let mut messages = core.matching.under_way();
        for UnderWay {
            work, peer, bytes, ..
        } in messages.by_ref().take(WAITS_NAMED - waits.len())
        {
            let peer = peer.map_or_else(|| "any rank".to_owned(), |rank| self.name_of(rank));
            waits.push(format!("{} waits for {peer} ({bytes} bytes)", work.name()));
        }
        more += messages.count();
        let mut text = waits.join("; ");
        if more > 0 {
            text.push_str(&format!("; and {more} more"));
        }
        if text.is_empty() {
            return "nothing is under way".into();
        }
        text + &self.stalls(core)
    }

    /// Announces on the links that matter that this thread is about to sleep, and moves `until` forward to the next
    /// deadline. Returns true when there is something to do already.
    pub(crate) fn arm(&self, core: &mut Core, until: &mut Option<Instant>) -> bool {
        for (_, _, open) in core.links.iter_open() {
            open.interest = Interest::default();
        }
        let mut wanted = Vec::new();
        visit_waits(core, |_, waiting| {
            wanted.push((waiting.peer, waiting.direction))
        });
        for (peer, direction) in wanted {
            if let Some(open) = core.links.open(Lane::Collective, peer) {
                match direction {
                    Direction::Send => open.interest.writable = true,
                    Direction::Receive => open.interest.readable = true,
                    Direction::Meet => {}
                }
            }
        }
        if core.matching.is_busy() {
            for peer in 0..self.world {
                let writable = core.matching.has_outgoing(peer);
                if let Some(open) = core.links.open(Lane::PointToPoint, peer) {
                    open.interest = Interest {
                        readable: true,
                        writable,
                    };
                }
            }
        }
        let deadlines = core.operations.iter().flat_map(|operation| {
            let told = (self.world > 1).then_some(operation.tell);
            [operation.work.deadline, told]
        });
        let others = [core.matching.due(), core.links.next_loss(self.clock.now())];
        *until = deadlines.chain(others).chain([*until]).flatten().min();
        let mut ready = self.has_mail() || self.awaits_the_gone(core);
        let is_crossing = |operation: &Operation| operation.run.is_crossing();
        if core.operations.iter().any(is_crossing) {
            // Before the last look: that finds what came before this, and what comes after this rings.
            core.shared.arm();
            let may_cross = |operation: &Operation| operation.run.may_cross(&core.shared);
            ready |= core.operations.iter().any(may_cross);
        }
        let mut is_to_be_looked_at = false;
        for (_, _, open) in core.links.iter_open() {
            if open.ended.is_some() {
                continue;
            }
            is_to_be_looked_at |= open.link.is_in_doubt();
            if open.interest != Interest::default() {
                ready |= open.link.arm(open.interest);
                is_to_be_looked_at |= open.link.is_unanswered();
            }
        }
        if is_to_be_looked_at {
            let look = self.clock.now() + LOOK_INTERVAL;
            *until = Some(until.map_or(look, |until| until.min(look)));
        }
        if !ready {
            self.note_wait(core);
        }
        ready
    }

    /// The thread waits: for the peer of the first step that a collective has not done, since those of later ones may wait for
    /// the same rank; for all ranks that are missing where they meet. For the senders of messages a caller waits where there is
    /// no collective: a message that was asked for early may well come later.
    pub(crate) fn note_wait(&self, core: &mut Core) {
        let now = self.clock.now();
        core.waits.pause(|| now);
        let mut awaited = core.waits.room();
        let mut last = None;
        visit_waits(core, |operation, waiting| {
            let of = Some(operation.work.sequence);
            if waiting.direction == Direction::Meet || of != last {
                awaited.push(waiting.peer);
            }
            last = of;
        });
        if core.leader && core.operations.is_empty() {
            let messages = core.matching.under_way();
            awaited.extend(messages.filter_map(|message| message.peer));
        }
        core.waits.begin(now, awaited);
    }

    /// Whether something under way cannot end since a peer has. That is to be looked at, and rings no more.
    fn awaits_the_gone(&self, core: &Core) -> bool {
        let messages = core.links.ended(Lane::PointToPoint);
        let mut messages = messages.map(|peer| core.matching.dependence(peer));
        messages.any(|dependence| dependence == Dependence::Yes)
    }

    /// Withdraws what [`Group::arm`] announced.
    pub(crate) fn disarm(&self, core: &mut Core) {
        core.waits.pause(|| self.clock.now());
        core.shared.disarm();
        for (_, _, open) in core.links.iter_open() {
            if open.interest != Interest::default() {
                open.link.disarm();
                open.interest = Interest::default();
            }
        }
    }

    /// Whether the group has been closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

/// Whether `peer` has left in good order: its farewell came on the point-to-point link or, when that was not open, on
/// the other one; or it said so when it was asked for one of them.
fn has_left(links: &LinkTable, peer: Rank) -> bool {
    let lanes = [Lane::PointToPoint, Lane::Collective].into_iter();
    for lane in lanes {
        match links.slot(lane, peer) {
            Slot::Open(open) => return open.ended == Some(PeerState::Left),
            Slot::Unreachable(error) if error.is_of_one_that_left() => return true,
            Slot::Unreachable(_) | Slot::Closed | Slot::Opening { .. } => {}
        }
    }
    false
}

/// Calls `visit` for every message that an operation waits for now.
pub(crate) fn visit_waits(core: &Core, mut visit: impl FnMut(&Operation, Waiting)) {
    for (index, operation) in core.operations.iter().enumerate().take(MOST_MOVED) {
        if !operation.after.is_empty() {
            continue;
        }
        let earlier = &core.operations[..index];
        let free = |direction: (Rank, Direction)| {
            earlier
                .iter()
                .all(|operation| operation.run.has_left(direction))
        };
        operation
            .run
            .waiting(&free, &core.shared, |waiting| visit(operation, waiting));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::Communicator;
    use crate::config::Config;

    #[test]
    fn a_link_that_is_still_in_the_mail_is_not_missing() {
        let ranks = Communicator::local(2, &Config::default()).unwrap();
        let group = ranks[0].group();
        let mut core = group.core.lock();
        assert!(group.has_mail());
        let error = group.gone(&mut core, (Lane::PointToPoint, 1), Instant::now());
        assert!(error.is_none(), "{error:?}");
        assert!(core.links.open(Lane::PointToPoint, 1).is_some());
    }
}
