//! One round of agreement: every rank sends every other one message, a *proposal*.
//!
//! A proposal offers memory, or says in the place of the message's length why the rank offers none. When a rank has heard
//! all proposals it decides, and all ranks decide alike, because all have heard the same. The proposals are also where
//! ranks find that they are not in the same operation.

use crate::engine::collective::header::{Fingerprint, HEADER};
use crate::engine::collective::operands::Operands;
use crate::engine::collective::run::{Direction, Waiting};
use crate::engine::collective::transfer::{difference, no_message};
use crate::engine::links::{LinkTable, OpenLink, PeerLink};
use crate::error::{Error, Result};
use crate::heap::Held;
use crate::transport::endpoint::Lane;
use crate::transport::{Lending, Loan, Neighbour, SharedSpan, Ticket};
use crate::types::Rank;

/// Whether all operations before this one are done with a direction of a link.
pub(super) type Free<'a> = &'a dyn Fn((Rank, Direction)) -> bool;

/// The proposal of a rank to all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Proposal {
    /// Offers memory.
    Offer,
    /// Offers nothing: its buffer lies where no peer reaches it.
    Private,
    /// Offers nothing: what peers read of its buffer they can as well read by messages, or they read nothing of it.
    PreferMessages,
    /// Offers nothing, as [`Self::Private`], and reports that the windows were slow.
    SlowWindows,
}

impl Proposal {
    /// The mark in the place of a message's length, for a proposal that needs one: no message is as long.
    fn mark(self) -> Option<usize> {
        match self {
            Self::Offer | Self::Private => None,
            Self::PreferMessages => Some(usize::MAX),
            Self::SlowWindows => Some(usize::MAX - 1),
        }
    }
}

/// The state of the round with one peer.
#[derive(Debug, Default)]
struct Peer {
    /// Bytes of the message that have been sent, where it offers nothing and is streamed.
    sent: usize,
    sent_all: bool,
    /// This rank's offer to it.
    ticket: Option<Ticket>,
    heard: Option<Proposal>,
    /// Its offer to this rank.
    offered: Option<SharedSpan>,
}

/// One rank's part.
#[derive(Debug)]
pub(super) struct AgreementRound {
    /// By rank; the own place is empty.
    peers: Vec<Peer>,
    /// This rank's proposal; `None` until it is known.
    pub(super) proposal: Option<Proposal>,
}

impl AgreementRound {
    pub(super) fn new(world: usize) -> Self {
        Self {
            peers: (0..world).map(|_| Peer::default()).collect(),
            proposal: None,
        }
    }

    /// Makes this rank's proposal by asking each link: `yes` if all can. Unknown while it is not its turn, some link is
    /// not open yet, or a peer has not said whether it reaches the memory. The rank waits for that, so that the proposal
    /// does not depend on when the answer comes.
    pub(super) fn propose(
        &mut self,
        operands: &Operands,
        links: &mut LinkTable,
        free: Free<'_>,
        yes: Proposal,
        mut ask: impl FnMut(&mut PeerLink) -> Option<bool>,
    ) {
        let mut can = Some(true);
        for peer in peers(operands) {
            let is_free = free((peer, Direction::Send)) && free((peer, Direction::Receive));
            let Some(open) = links.open(Lane::Collective, peer).filter(|_| is_free) else {
                return;
            };
            // All are asked at the same time.
            let here = ask(&mut open.link);
            can = can.zip(here).map(|(can, here)| can && here);
        }
        self.proposal = can.map(|can| if can { yes } else { Proposal::Private });
    }

    /// Sends the proposal. `header` makes a peer's message, `offer` sends it with the memory on offer.
    pub(super) fn send(
        &mut self,
        operands: &Operands,
        links: &mut LinkTable,
        header: impl Fn(Rank) -> [u8; HEADER],
        offer: impl Fn(&mut PeerLink, Rank, &[u8; HEADER]) -> Result<Lending>,
    ) -> Result<bool> {
        let Some(proposal) = self.proposal else {
            return Ok(false);
        };
        let mut moved = false;
        for peer in peers(operands) {
            let state = &mut self.peers[peer];
            if state.sent_all {
                continue;
            }
            let (open, mut header) = (open(links, peer)?, header(peer));
            if let Some(mark) = proposal.mark() {
                Fingerprint::write_length(&mut header, mark);
            }
            if proposal == Proposal::Offer {
                match offer(&mut open.link, peer, &header)? {
                    Lending::Lent(ticket) => (state.ticket, state.sent_all) = (Some(ticket), true),
                    Lending::NotNow => {}
                    Lending::Unfit => {
                        return Err(Error::internal("memory that can be shared was not"));
                    }
                }
            } else if HEADER <= open.post_limit {
                state.sent_all = open.link.try_post(&header, &[])?;
            } else {
                state.sent += open.link.try_send(&header[state.sent..])?;
                state.sent_all = state.sent == HEADER;
            }
            moved |= state.sent_all;
        }
        Ok(moved)
    }

    /// Receives the others' proposals, in messages that begin with `expected`.
    pub(super) fn receive(
        &mut self,
        operands: &Operands,
        links: &mut LinkTable,
        free: Free<'_>,
        expected: &[u8; HEADER],
    ) -> Result<bool> {
        let mut moved = false;
        for peer in peers(operands) {
            let state = &mut self.peers[peer];
            if state.heard.is_some() || !free((peer, Direction::Receive)) {
                continue;
            }
            let Some(open) = links.open(Lane::Collective, peer) else {
                continue;
            };
            if let Some((proposal, offered)) = take(open, expected, (operands, peer))? {
                (state.heard, state.offered) = (Some(proposal), offered);
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Whether all proposals have been sent and received.
    pub(super) fn is_complete(&self, operands: &Operands) -> bool {
        self.others(operands)
            .all(|(_, state)| state.sent_all && state.heard.is_some())
    }

    /// Whether every rank, this one too, proposes that. Only of a complete round.
    pub(super) fn all_propose(&self, operands: &Operands, proposal: Proposal) -> bool {
        let mut others = self.others(operands);
        self.proposal == Some(proposal) && others.all(|(_, state)| state.heard == Some(proposal))
    }

    /// Whether any rank, this one too, proposes that. Only of a complete round.
    pub(super) fn any_proposes(&self, operands: &Operands, proposal: Proposal) -> bool {
        let mut others = self.others(operands);
        self.proposal == Some(proposal) || others.any(|(_, state)| state.heard == Some(proposal))
    }

    /// The offers of the others, by rank.
    pub(super) fn offered(&mut self) -> impl Iterator<Item = (Rank, &mut SharedSpan)> {
        let peers = self.peers.iter_mut().enumerate();
        peers.filter_map(|(peer, state)| Some((peer, state.offered.as_mut()?)))
    }

    /// Gives back what the others offer, and keeps it all the same, by rank.
    pub(super) fn keep_offered(&mut self, links: &mut LinkTable) -> Vec<Option<Held>> {
        let mut kept = Vec::with_capacity(self.peers.len());
        for (peer, state) in self.peers.iter_mut().enumerate() {
            let held = state.offered.take().map(SharedSpan::into_held);
            if held.is_some()
                && let Some(open) = links.open(Lane::Collective, peer)
            {
                open.link.as_neighbour(|peer| peer.give_back());
            }
            kept.push(held);
        }
        kept
    }

    /// Gives back what the others offer, and this rank has used.
    pub(super) fn give_back(&mut self, links: &mut LinkTable) {
        self.return_by(links, |peer| peer.give_back());
    }

    /// Gives back what the others offer, and this rank has not used.
    pub(super) fn decline(&mut self, links: &mut LinkTable) {
        self.return_by(links, |peer| peer.decline());
    }

    fn return_by(&mut self, links: &mut LinkTable, give: impl Fn(&mut dyn Neighbour)) {
        for (peer, state) in self.peers.iter_mut().enumerate() {
            if state.offered.take().is_some()
                && let Some(open) = links.open(Lane::Collective, peer)
            {
                open.link.as_neighbour(&give);
            }
        }
    }

    /// Whether the round is complete, and everything offered has come back.
    pub(super) fn is_settled(&self, operands: &Operands) -> bool {
        let mut others = self.others(operands);
        others.all(|(_, state)| state.sent_all && state.heard.is_some() && state.ticket.is_none())
    }

    /// Whether everything offered has come back; as `expected`, or the ranks have decided differently.
    pub(super) fn is_back(
        &mut self,
        operands: &Operands,
        links: &mut LinkTable,
        expected: Loan,
    ) -> Result<bool> {
        let mut all = true;
        for peer in peers(operands) {
            let state = &mut self.peers[peer];
            let Some(ticket) = state.ticket else {
                continue;
            };
            match open(links, peer)?.link.loan(ticket)? {
                Loan::Out => all = false,
                back if back == expected => state.ticket = None,
                other => {
                    return Err(Error::internal(format!(
                        "rank {peer} has decided differently: {other:?}"
                    ))
                    .with_peer(peer));
                }
            }
        }
        Ok(all)
    }

    /// Its waits, for reports and wake-ups. `bytes`: of a rank's slice. `reads`: whether the next message from a peer is for
    /// this round.
    pub(super) fn waiting(
        &self,
        operands: &Operands,
        bytes: impl Fn(Rank) -> usize,
        reads: impl Fn(Rank) -> bool,
        mut visit: impl FnMut(Waiting),
    ) {
        // Before that no peer need be there to give something back.
        let is_complete = self.is_complete(operands);
        for (peer, state) in self.others(operands) {
            let mut wait = |direction, done: usize, of| {
                visit(Waiting {
                    peer,
                    direction,
                    bytes: done,
                    of,
                });
            };
            let theirs = bytes(peer);
            if !state.sent_all {
                // Until all peers have said whether they reach the memory there is nothing to send.
                let direction = match self.proposal {
                    Some(_) => Direction::Send,
                    None => Direction::Meet,
                };
                wait(direction, 0, theirs);
            }
            if state.heard.is_none() {
                let direction = match reads(peer) {
                    true => Direction::Receive,
                    false => Direction::Meet,
                };
                wait(direction, 0, bytes(operands.rank));
            } else if is_complete && state.ticket.is_some() {
                wait(Direction::Send, theirs, theirs);
            }
        }
    }

    fn others<'a>(&'a self, operands: &Operands) -> impl Iterator<Item = (Rank, &'a Peer)> {
        let rank = operands.rank;
        let peers = self.peers.iter().enumerate();
        peers.filter(move |(peer, _)| *peer != rank)
    }
}

/// The peer's proposal, if it has arrived, and the memory that it offers.
fn take(
    open: &mut OpenLink,
    expected: &[u8; HEADER],
    (operands, peer): (&Operands, Rank),
) -> Result<Option<(Proposal, Option<SharedSpan>)>> {
    let OpenLink { link, header, .. } = open;
    let mut rest = None;
    let taken = open.header_bytes == 0
        && link.try_take(&mut |message| {
            if let Some((theirs, payload)) = message.split_first_chunk::<HEADER>() {
                (*header, rest) = (*theirs, Some(payload.len()));
            }
        })?;
    if !taken {
        if !open.read_header()? {
            return Ok(None);
        }
        (open.header_bytes, rest) = (0, Some(0));
    }
    let mut proposal = Proposal::Private;
    if rest.is_some() && !Fingerprint::is_same(&open.header, expected) {
        let says = |proposal: &Proposal| {
            let mut marked = *expected;
            proposal.mark().is_some_and(|mark| {
                Fingerprint::write_length(&mut marked, mark);
                Fingerprint::is_same(&open.header, &marked)
            })
        };
        match [Proposal::PreferMessages, Proposal::SlowWindows]
            .into_iter()
            .find(says)
        {
            Some(said) => proposal = said,
            None => return Err(difference(expected, &open.header, operands, peer)),
        }
    }
    if rest != Some(0) {
        return Err(no_message(peer));
    }
    let offered = if taken { open.link.shared()? } else { None };
    if offered.is_some() {
        proposal = Proposal::Offer;
    }
    Ok(Some((proposal, offered)))
}

fn peers(operands: &Operands) -> impl Iterator<Item = Rank> + use<> {
    let rank = operands.rank;
    (0..operands.world).filter(move |peer| *peer != rank)
}

fn open(links: &mut LinkTable, peer: Rank) -> Result<&mut OpenLink> {
    links
        .open(Lane::Collective, peer)
        .ok_or_else(|| Error::internal(format!("the link to rank {peer} is gone")))
}
