//! How the ranks that are left of a group agree on who they are.
//!
//! The lowest rank that is not lost leads. The others follow it, each over a link of the two alone:
//!
//! ```text
//! a rank                       the leader
//!     | report                     |
//!     | -------------------------> |   has a report of each rank that is not lost
//!     | propose {ballot, living}   |
//!     | <------------------------- |
//!     | accept {ballot}            |
//!     | -------------------------> |   all that live have accepted: it is decided
//!     | decide {living}            |
//!     | <------------------------- |   the caller goes on
//!     | heard                      |
//!     | -------------------------> |   all that live have heard it
//!     | over                       |
//!     | <------------------------- |   nothing more will be asked
//! ```
//!
//! A leader that loses a rank meanwhile proposes again, without it. When a leader is lost, the next rank leads: it gathers
//! reports anew, and proposes the proposal with the highest ballot that any of them has accepted. That can have been decided,
//! because all that live accept before anything is decided; so nothing else ever is, and a rank that has died since may be part
//! of the decision. Ranks that have gone on answer until it is over: a rank that has not heard the decision keeps all of them.
//!
//! A link that breaks between two ranks that live is opened again, and both send once more all that they had sent: to hear a
//! message twice changes nothing.
//!
//! A rank is lost in one of three ways ([`Loss`]). Its process has ended: it is left out. Its process lives and does not take
//! part any more: nothing is decided. It cannot be reached, and may live: then the ranks that take part must be
//! more than half of the group, or half of it with its lowest rank. So of two parts of a group that cannot reach each other one
//! goes on at most.
//!
//! The protocol is that of the single decree of Paxos (Lamport 1998). Its quorum is all ranks that live, where it is known of
//! the others that their processes have ended, and the majority where it is not.

use std::collections::{BTreeMap, BTreeSet};

use super::message::{Ballot, Decision, Message, Refusal};
use crate::types::Rank;

/// How a rank is lost to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// Its process has ended.
    Ended,
    /// It cannot be reached, and may live.
    Cut,
    /// It lives, and does not take part any more.
    Absent,
}

/// An event between this rank and another one.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Message(Message),
    Lost(Loss),
}

/// A request to the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Open the link to this rank, and keep it open: once for each.
    Open(Rank),
    /// Send this over the link, which is open or on its way.
    Send(Rank, Message),
}

/// How it ended for this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// This rank goes on, with the others that live.
    Decided(Decision),
    /// The others go on without this rank.
    LeftOut(Decision),
    Refused(Refusal),
}

/// One rank's part in an agreement.
#[derive(Debug)]
pub(crate) struct Agreement {
    rank: Rank,
    world: usize,
    excluded: BTreeSet<Rank>,
    ended: u64,
    lost: BTreeMap<Rank, Loss>,
    /// The ranks that a link has been opened to.
    opened: BTreeSet<Rank>,
    accepted: Option<(Ballot, Decision)>,
    /// Counts the proposals of this rank.
    round: u32,
    role: Role,
    outcome: Option<Outcome>,
    is_over: bool,
    actions: Vec<Action>,
}

#[derive(Debug)]
enum Role {
    Begins,
    Follows(Rank),
    Leads(Lead),
}

/// The state of a rank that leads.
#[derive(Debug, Default)]
struct Lead {
    /// The ranks that have reported, and how far they had come.
    reports: BTreeMap<Rank, u64>,
    /// The highest proposal of an earlier leader that this rank or one that has reported had accepted.
    inherited: Option<(Ballot, Decision)>,
    /// That was decided.
    is_settled: bool,
    stage: Stage,
}

#[derive(Debug, Default)]
enum Stage {
    #[default]
    Gathers,
    Proposes {
        decision: Decision,
        accepted_by: BTreeSet<Rank>,
    },
    Tells {
        decision: Decision,
        heard_by: BTreeSet<Rank>,
    },
}

impl Lead {
    /// A proposal that this rank, `own`, or one that has reported had accepted. One that this rank made by itself was not
    /// decided.
    fn hear_of(&mut self, accepted: Option<(Ballot, Decision)>, own: Rank) {
        if let Some((ballot, decision)) = accepted
            && ballot.leader as Rank != own
            && self
                .inherited
                .as_ref()
                .is_none_or(|(last, _)| *last < ballot)
        {
            self.inherited = Some((ballot, decision));
        }
    }
}

impl Agreement {
    /// The part of `rank`, which is not `excluded`. The collectives up to number `ended` have ended on it.
    pub(crate) fn new(rank: Rank, world: usize, excluded: BTreeSet<Rank>, ended: u64) -> Self {
        Self {
            rank,
            world,
            excluded,
            ended,
            lost: BTreeMap::new(),
            opened: BTreeSet::new(),
            accepted: None,
            round: 0,
            role: Role::Begins,
            outcome: None,
            is_over: false,
            actions: Vec::new(),
        }
    }

    /// The part of the same rank in another attempt, after this one came to nothing here. Others may have decided meanwhile
    /// what it had accepted.
    pub(crate) fn again(&self, excluded: BTreeSet<Rank>) -> Self {
        let mut next = Self::new(self.rank, self.world, excluded, self.ended);
        next.round = self.round;
        next.accepted = match &self.role {
            // The proposal of this rank is that of an earlier leader.
            Role::Leads(lead) if lead.inherited.is_some() => lead.inherited.clone(),
            _ => self.accepted.clone(),
        };
        next
    }

    /// Begins.
    pub(crate) fn begin(&mut self) -> Vec<Action> {
        self.take_role();
        std::mem::take(&mut self.actions)
    }

    /// Takes in an event.
    pub(crate) fn handle(&mut self, from: Rank, event: Event) -> Vec<Action> {
        if self.is_over {
            self.tell_late(from, &event);
        } else if !self.lost.contains_key(&from) {
            match event {
                Event::Message(Message::Leave) => self.lose(from, Loss::Absent),
                Event::Message(message) => self.hear(from, message),
                Event::Lost(loss) => self.lose(from, loss),
            }
        }
        std::mem::take(&mut self.actions)
    }

    /// Leaves these ranks out, too, unless they are in a proposal of an earlier leader.
    pub(crate) fn exclude(&mut self, ranks: BTreeSet<Rank>) -> Vec<Action> {
        if self.is_over {
            return Vec::new();
        }
        self.excluded.extend(ranks);
        self.gather_again(|decision, excluded| !decision.living.is_disjoint(excluded));
        let report = self.report();
        match self.role {
            Role::Follows(leader) if self.candidates().any(|rank| rank == leader) => {
                self.send([leader], &report);
            }
            Role::Follows(_) if self.outcome.is_none() => self.take_role(),
            Role::Leads(_) => self.advance(),
            _ => {}
        }
        std::mem::take(&mut self.actions)
    }

    /// This rank takes part no more. If it leads, that is the end for all.
    pub(crate) fn leave(&mut self) -> Vec<Action> {
        match &self.role {
            _ if self.is_over => {}
            Role::Follows(leader) => self.actions.push(Action::Send(*leader, Message::Leave)),
            Role::Leads(lead) => {
                let told: Vec<Rank> = lead.reports.keys().copied().collect();
                self.send(told, &Message::Leave);
                self.end(Outcome::Refused(Refusal::Absent([self.rank].into())));
                self.is_over = true;
            }
            Role::Begins => {}
        }
        std::mem::take(&mut self.actions)
    }

    /// A rank that reports when all is over hears how it ended.
    fn tell_late(&mut self, from: Rank, event: &Event) {
        let (Event::Message(Message::Report { .. }), Role::Leads(_)) = (event, &self.role) else {
            return;
        };
        let told = match &self.outcome {
            Some(Outcome::Decided(decision) | Outcome::LeftOut(decision)) => {
                Message::Decide(decision.clone())
            }
            Some(Outcome::Refused(refusal)) => Message::Refuse(refusal.clone()),
            None => return,
        };
        self.send([from], &told);
    }

    /// How it ended, once it has for this rank.
    pub(crate) fn outcome(&self) -> Option<&Outcome> {
        self.outcome.as_ref()
    }

    pub(crate) fn leads(&self) -> bool {
        matches!(self.role, Role::Leads(_))
    }

    /// Whether this rank has gone on with what an earlier leader had proposed.
    #[cfg(test)]
    pub(crate) fn has_inherited(&self) -> bool {
        matches!(&self.role, Role::Leads(lead) if lead.inherited.is_some())
    }

    /// Whether no other rank needs this one any more.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// The ranks that it waits for.
    pub(crate) fn awaited(&self) -> BTreeSet<Rank> {
        let Role::Leads(lead) = &self.role else {
            return match self.role {
                Role::Follows(leader) => [leader].into(),
                _ => BTreeSet::new(),
            };
        };
        match &lead.stage {
            Stage::Gathers => self.unreported(lead),
            Stage::Proposes {
                decision,
                accepted_by: have,
            }
            | Stage::Tells {
                decision,
                heard_by: have,
            } => self.others(decision).difference(have).copied().collect(),
        }
    }

    /// The ranks that may take part and that there is no link to.
    pub(crate) fn unheard(&self) -> impl Iterator<Item = Rank> {
        self.candidates().filter(|rank| !self.opened.contains(rank))
    }

    /// The ranks that may take part, as far as this one knows, without itself.
    fn candidates(&self) -> impl Iterator<Item = Rank> {
        let binding = match &self.role {
            Role::Leads(lead) => lead.inherited.as_ref(),
            _ => {
                let accepted = self.accepted.as_ref();
                accepted.filter(|(ballot, _)| !self.is_own(*ballot))
            }
        };
        let may = move |rank: &Rank| match binding {
            Some((_, decision)) => decision.living.contains(rank),
            None => !self.excluded.contains(rank),
        };
        let others = (0..self.world).filter(|rank| *rank != self.rank);
        others.filter(move |rank| may(rank) && !self.lost.contains_key(rank))
    }

    /// Whether this rank has made that proposal: it knows whether it was decided.
    fn is_own(&self, ballot: Ballot) -> bool {
        ballot.leader as Rank == self.rank
    }

    /// Those of a decision that are not lost, without this one.
    fn others(&self, decision: &Decision) -> BTreeSet<Rank> {
        let others = decision.living.iter().copied();
        let is_there = |rank: &Rank| *rank != self.rank && !self.lost.contains_key(rank);
        others.filter(is_there).collect()
    }

    fn unreported(&self, lead: &Lead) -> BTreeSet<Rank> {
        let missing = |rank: &Rank| !lead.reports.contains_key(rank);
        self.candidates().filter(missing).collect()
    }

    fn send(&mut self, to: impl IntoIterator<Item = Rank>, message: &Message) {
        let sent = to.into_iter().map(|to| Action::Send(to, message.clone()));
        self.actions.extend(sent);
    }

    fn end(&mut self, outcome: Outcome) {
        self.outcome.get_or_insert(outcome);
    }

    /// Leads, or follows the rank that does.
    fn take_role(&mut self) {
        let candidates: Vec<Rank> = self.candidates().collect();
        match candidates.first() {
            Some(&leader) if leader < self.rank => {
                self.role = Role::Follows(leader);
                self.open(leader);
                let report = self.report();
                self.send([leader], &report);
            }
            _ => {
                let mut lead = Lead {
                    is_settled: self.outcome.is_some(),
                    ..Lead::default()
                };
                lead.hear_of(self.accepted.clone(), self.rank);
                self.role = Role::Leads(lead);
                self.advance();
            }
        }
    }

    fn open(&mut self, rank: Rank) {
        if self.opened.insert(rank) {
            self.actions.push(Action::Open(rank));
        }
    }

    /// Drops a proposal of this rank that is not decided, if `is_wrong` says so of it and of the excluded ranks.
    fn gather_again(&mut self, is_wrong: impl FnOnce(&Decision, &BTreeSet<Rank>) -> bool) {
        if let Role::Leads(lead) = &mut self.role
            && let Stage::Proposes { decision, .. } = &lead.stage
            && !lead.is_settled
            && is_wrong(decision, &self.excluded)
        {
            lead.stage = Stage::Gathers;
        }
    }

    fn report(&self) -> Message {
        Message::Report {
            excluded: self.excluded.clone(),
            ended: self.ended,
            accepted: self.accepted.clone(),
            is_decided: self.outcome.is_some(),
        }
    }

    fn lose(&mut self, rank: Rank, loss: Loss) {
        self.lost.insert(rank, loss);
        match &mut self.role {
            Role::Follows(leader) if *leader == rank => {
                if loss == Loss::Absent && self.outcome.is_none() {
                    self.end(Outcome::Refused(Refusal::Absent([rank].into())));
                    self.is_over = true;
                } else {
                    self.take_role();
                }
            }
            Role::Leads(lead) => {
                lead.reports.remove(&rank);
                // One that was taken over stays as it is, but those that are left may be too few to decide it.
                self.gather_again(|decision, _| decision.living.contains(&rank));
                self.advance();
            }
            _ => {}
        }
    }

    fn hear(&mut self, from: Rank, message: Message) {
        match &mut self.role {
            Role::Follows(leader) if *leader == from => self.hear_leader(from, message),
            Role::Leads(lead) => match message {
                Message::Report {
                    excluded,
                    ended,
                    accepted,
                    is_decided,
                } => {
                    lead.reports.insert(from, ended);
                    lead.is_settled |= is_decided;
                    lead.hear_of(accepted, self.rank);
                    self.excluded.extend(excluded);
                    self.advance();
                }
                Message::Accept(ballot) if ballot.round == self.round => {
                    if let Stage::Proposes { accepted_by, .. } = &mut lead.stage {
                        accepted_by.insert(from);
                        self.advance();
                    }
                }
                Message::Heard => {
                    if let Stage::Tells { heard_by, .. } = &mut lead.stage {
                        heard_by.insert(from);
                        self.advance();
                    }
                }
                _ => {}
            },
            _ => {}
        }
    }

    fn hear_leader(&mut self, leader: Rank, message: Message) {
        match message {
            Message::Propose(ballot, decision) => {
                // An older one is here for the second time.
                let last = self.accepted.as_ref().map(|(last, _)| *last);
                if last.is_none_or(|last| last < ballot) {
                    self.accepted = Some((ballot, decision));
                }
                if last.is_none_or(|last| last <= ballot) {
                    self.send([leader], &Message::Accept(ballot));
                }
            }
            Message::Decide(decision) => {
                self.send([leader], &Message::Heard);
                if decision.living.contains(&self.rank) {
                    self.end(Outcome::Decided(decision));
                } else {
                    self.end(Outcome::LeftOut(decision));
                    self.is_over = true;
                }
            }
            Message::Refuse(refusal) => {
                self.end(Outcome::Refused(refusal));
                self.is_over = true;
            }
            Message::Over => self.is_over = self.outcome.is_some(),
            _ => {}
        }
    }

    /// Goes on as leader as far as what is known allows.
    fn advance(&mut self) {
        if let Role::Leads(lead) = &self.role
            && matches!(lead.stage, Stage::Gathers)
        {
            let missing = self.unreported(lead);
            missing.into_iter().for_each(|rank| self.open(rank));
        }
        let Role::Leads(lead) = &self.role else {
            return;
        };
        match &lead.stage {
            Stage::Gathers if self.unreported(lead).is_empty() => match self.next_decision(lead) {
                Ok(decision) => self.propose(decision),
                Err(refusal) => self.refuse(refusal),
            },
            Stage::Proposes {
                decision,
                accepted_by,
            } if self.others(decision).is_subset(accepted_by) => {
                let decision = decision.clone();
                self.decide(decision);
            }
            Stage::Tells { decision, heard_by }
                if self.others(decision).is_subset(heard_by) && !self.is_over =>
            {
                let others = self.others(decision);
                self.is_over = true;
                self.send(others, &Message::Over);
            }
            _ => {}
        }
    }

    /// The decision that follows from the reports of all ranks that are not lost.
    fn next_decision(&self, lead: &Lead) -> Result<Decision, Refusal> {
        let own = (self.rank, self.ended);
        let reports = lead.reports.iter().map(|(rank, ended)| (*rank, *ended));
        let wanted = |rank: &Rank| !self.excluded.contains(rank);
        let taken: BTreeMap<Rank, u64> = reports
            .chain([own])
            .filter(|(rank, _)| wanted(rank))
            .collect();
        if !lead.is_settled {
            self.may_decide(&taken.keys().copied().collect())?;
        }
        let fresh = || Decision {
            living: taken.keys().copied().collect(),
            ended: taken.values().copied().min().unwrap_or(0),
        };
        let inherited = lead.inherited.as_ref();
        Ok(inherited.map_or_else(fresh, |(_, decision)| decision.clone()))
    }

    /// Whether the ranks that take part may decide anything.
    fn may_decide(&self, taking: &BTreeSet<Rank>) -> Result<(), Refusal> {
        let wanted = |rank: &Rank| !self.excluded.contains(rank);
        let lost = |how: Loss| -> BTreeSet<Rank> {
            let lost = self.lost.iter().filter(|(_, loss)| **loss == how);
            lost.map(|(rank, _)| *rank).filter(wanted).collect()
        };
        let (absent, cut) = (lost(Loss::Absent), lost(Loss::Cut));
        if !absent.is_empty() {
            return Err(Refusal::Absent(absent));
        }
        let all: Vec<Rank> = (0..self.world).filter(wanted).collect();
        let (twice, has_lowest) = (2 * taking.len(), taking.first() == all.first());
        let is_enough = twice > all.len() || twice == all.len() && has_lowest;
        match cut.is_empty() || is_enough {
            true => Ok(()),
            false => Err(Refusal::Minority(cut)),
        }
    }

    fn propose(&mut self, decision: Decision) {
        let others = self.others(&decision);
        others.iter().for_each(|rank| self.open(*rank));
        let Role::Leads(lead) = &mut self.role else {
            return;
        };
        self.round += 1;
        let ballot = Ballot {
            leader: u32::try_from(self.rank).unwrap_or(u32::MAX),
            round: self.round,
        };
        lead.stage = Stage::Proposes {
            decision: decision.clone(),
            accepted_by: BTreeSet::new(),
        };
        self.accepted = Some((ballot, decision.clone()));
        self.send(others, &Message::Propose(ballot, decision));
        self.advance();
    }

    fn decide(&mut self, decision: Decision) {
        let mut told = self.others(&decision);
        let Role::Leads(lead) = &mut self.role else {
            return;
        };
        // Also those that are left out.
        told.extend(lead.reports.keys());
        lead.stage = Stage::Tells {
            decision: decision.clone(),
            heard_by: BTreeSet::new(),
        };
        self.send(told, &Message::Decide(decision.clone()));
        let goes_on = decision.living.contains(&self.rank);
        self.end(match goes_on {
            true => Outcome::Decided(decision),
            false => Outcome::LeftOut(decision),
        });
        self.advance();
    }

    fn refuse(&mut self, refusal: Refusal) {
        let Role::Leads(lead) = &self.role else {
            return;
        };
        let told: Vec<Rank> = lead.reports.keys().copied().collect();
        self.send(told, &Message::Refuse(refusal.clone()));
        self.end(Outcome::Refused(refusal));
        self.is_over = true;
    }
}
