//! One message from each rank to each other, in which it offers memory or says in a word what it would have.

use crate::engine::collective::header::{Fingerprint, HEADER};
use crate::engine::collective::run::{Direction, Waiting};
use crate::engine::collective::transfer::{Operands, difference, no_message};
use crate::engine::links::{LinkTable, OpenLink, PeerLink};
use crate::error::{Error, Result};
use crate::heap::Held;
use crate::transport::endpoint::Lane;
use crate::transport::{Lending, Loan, Shared, Ticket};
use crate::types::Rank;

/// Whether all operations before this one are done with a direction of a link.
pub(super) type Free<'a> = &'a dyn Fn((Rank, Direction)) -> bool;

/// What a rank says to all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Voice {
    /// It offers memory.
    Offer,
    /// It offers nothing.
    Plain,
    /// It offers nothing, and all could do without an agreement.
    Reluctant,
    /// It offers nothing, and has found the windows slow.
    Wary,
}

impl Voice {
    /// What stands in the place of a message's length where more is to be said than nothing: no message is as long.
    fn mark(self) -> Option<usize> {
        match self {
            Self::Offer | Self::Plain => None,
            Self::Reluctant => Some(usize::MAX),
            Self::Wary => Some(usize::MAX - 1),
        }
    }
}

/// What is known of one peer.
#[derive(Debug, Default)]
struct Partner {
    /// Bytes of the message that have been sent, where it offers nothing and is streamed.
    sent: usize,
    told: bool,
    /// What this rank offers it.
    ticket: Option<Ticket>,
    heard: Option<Voice>,
    /// What it offers this rank.
    offered: Option<Shared>,
}

/// One rank's part.
#[derive(Debug)]
pub(super) struct Ballot {
    /// By rank; the own place is empty.
    partners: Vec<Partner>,
    /// What this rank says. `None` until it knows.
    pub(super) voice: Option<Voice>,
}

impl Ballot {
    pub(super) fn new(world: usize) -> Self {
        Self {
            partners: (0..world).map(|_| Partner::default()).collect(),
            voice: None,
        }
    }

    /// Finds out what this rank says by asking each link: `yes` if all can. Unknown while it is not its turn, some link is
    /// not open yet, or a peer has not said whether it reaches the memory. That is waited for, so that what happens does
    /// not depend on when it comes.
    pub(super) fn make_up(
        &mut self,
        operands: &Operands,
        links: &mut LinkTable,
        free: Free<'_>,
        yes: Voice,
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
        self.voice = can.map(|can| if can { yes } else { Voice::Plain });
    }

    /// Tells the peers. `header` is for a peer, `offer` sends it with what is offered.
    pub(super) fn tell(
        &mut self,
        operands: &Operands,
        links: &mut LinkTable,
        header: impl Fn(Rank) -> [u8; HEADER],
        offer: impl Fn(&mut PeerLink, Rank, &[u8; HEADER]) -> Result<Lending>,
    ) -> Result<bool> {
        let Some(voice) = self.voice else {
            return Ok(false);
        };
        let mut moved = false;
        for peer in peers(operands) {
            let partner = &mut self.partners[peer];
            if partner.told {
                continue;
            }
            let (open, mut header) = (open(links, peer)?, header(peer));
            if let Some(mark) = voice.mark() {
                Fingerprint::write_length(&mut header, mark);
            }
            if voice == Voice::Offer {
                match offer(&mut open.link, peer, &header)? {
                    Lending::Lent(ticket) => (partner.ticket, partner.told) = (Some(ticket), true),
                    Lending::NotNow => {}
                    Lending::Unfit => {
                        return Err(Error::internal("memory that can be shared was not"));
                    }
                }
            } else if HEADER <= open.post_limit {
                partner.told = open.link.try_post(&header, &[])?;
            } else {
                partner.sent += open.link.try_send(&header[partner.sent..])?;
                partner.told = partner.sent == HEADER;
            }
            moved |= partner.told;
        }
        Ok(moved)
    }

    /// Takes in what the others say, in messages that begin with `expected`.
    pub(super) fn hear(
        &mut self,
        operands: &Operands,
        links: &mut LinkTable,
        free: Free<'_>,
        expected: &[u8; HEADER],
    ) -> Result<bool> {
        let mut moved = false;
        for peer in peers(operands) {
            let partner = &mut self.partners[peer];
            if partner.heard.is_some() || !free((peer, Direction::Receive)) {
                continue;
            }
            let Some(open) = links.open(Lane::Collective, peer) else {
                continue;
            };
            if let Some((voice, offered)) = take(open, expected, (operands.rank, peer))? {
                (partner.heard, partner.offered) = (Some(voice), offered);
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Whether everybody has been told and heard.
    pub(super) fn is_complete(&self, operands: &Operands) -> bool {
        self.others(operands)
            .all(|(_, partner)| partner.told && partner.heard.is_some())
    }

    /// Whether everybody, this rank too, says that. Only of a complete one.
    pub(super) fn all_say(&self, operands: &Operands, voice: Voice) -> bool {
        let mut others = self.others(operands);
        self.voice == Some(voice) && others.all(|(_, partner)| partner.heard == Some(voice))
    }

    /// Whether anybody, this rank too, says that. Only of a complete one.
    pub(super) fn any_says(&self, operands: &Operands, voice: Voice) -> bool {
        let mut others = self.others(operands);
        self.voice == Some(voice) || others.any(|(_, partner)| partner.heard == Some(voice))
    }

    /// What the others offer, by rank.
    pub(super) fn offered(&mut self) -> impl Iterator<Item = (Rank, &mut Shared)> {
        let partners = self.partners.iter_mut().enumerate();
        partners.filter_map(|(peer, partner)| Some((peer, partner.offered.as_mut()?)))
    }

    /// Gives back what the others offer, and keeps it all the same, by rank.
    pub(super) fn keep_offered(&mut self, links: &mut LinkTable) -> Vec<Option<Held>> {
        let mut kept = Vec::with_capacity(self.partners.len());
        for (peer, partner) in self.partners.iter_mut().enumerate() {
            let held = partner.offered.take().map(Shared::into_held);
            if held.is_some()
                && let Some(open) = links.open(Lane::Collective, peer)
            {
                open.link.give_back();
            }
            kept.push(held);
        }
        kept
    }

    /// Gives back what was used.
    pub(super) fn give_back(&mut self, links: &mut LinkTable) {
        self.return_by(links, |link| link.give_back());
    }

    /// Gives back what was not.
    pub(super) fn decline(&mut self, links: &mut LinkTable) {
        self.return_by(links, |link| link.decline());
    }

    fn return_by(&mut self, links: &mut LinkTable, give: impl Fn(&mut PeerLink)) {
        for (peer, partner) in self.partners.iter_mut().enumerate() {
            if partner.offered.take().is_some()
                && let Some(open) = links.open(Lane::Collective, peer)
            {
                give(&mut open.link);
            }
        }
    }

    /// Whether all has been said, and nothing is with the others that was not seen to be back.
    pub(super) fn is_settled(&self, operands: &Operands) -> bool {
        let mut others = self.others(operands);
        others
            .all(|(_, partner)| partner.told && partner.heard.is_some() && partner.ticket.is_none())
    }

    /// Whether nothing is with the others any more; it is to come back as `expected`.
    pub(super) fn is_back(
        &mut self,
        operands: &Operands,
        links: &mut LinkTable,
        expected: Loan,
    ) -> Result<bool> {
        let mut all = true;
        for peer in peers(operands) {
            let partner = &mut self.partners[peer];
            let Some(ticket) = partner.ticket else {
                continue;
            };
            match open(links, peer)?.link.loan(ticket)? {
                Loan::Out => all = false,
                back if back == expected => partner.ticket = None,
                other => {
                    return Err(Error::internal(format!(
                        "rank {peer} has counted other votes: {other:?}"
                    ))
                    .with_peer(peer));
                }
            }
        }
        Ok(all)
    }

    /// What it waits for, in reports and to be woken for. `bytes`: of a rank's slice.
    pub(super) fn waiting(
        &self,
        operands: &Operands,
        bytes: impl Fn(Rank) -> usize,
        mut visit: impl FnMut(Waiting),
    ) {
        // Before that nobody need be there any more to give something back.
        let is_complete = self.is_complete(operands);
        for (peer, partner) in self.others(operands) {
            let mut wait = |direction, done: usize, of| {
                visit(Waiting {
                    peer,
                    direction,
                    bytes: done,
                    of,
                });
            };
            let theirs = bytes(peer);
            if !partner.told {
                // Until all have answered whether they reach the memory there is nothing to send.
                let direction = match self.voice {
                    Some(_) => Direction::Send,
                    None => Direction::Meet,
                };
                wait(direction, 0, theirs);
            }
            if partner.heard.is_none() {
                wait(Direction::Receive, 0, bytes(operands.rank));
            } else if is_complete && partner.ticket.is_some() {
                wait(Direction::Send, theirs, theirs);
            }
        }
    }

    fn others<'a>(&'a self, operands: &Operands) -> impl Iterator<Item = (Rank, &'a Partner)> {
        let rank = operands.rank;
        let partners = self.partners.iter().enumerate();
        partners.filter(move |(peer, _)| *peer != rank)
    }
}

/// The next message, if it is there: what the peer says, and offers.
fn take(
    open: &mut OpenLink,
    expected: &[u8; HEADER],
    (rank, peer): (Rank, Rank),
) -> Result<Option<(Voice, Option<Shared>)>> {
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
    let mut voice = Voice::Plain;
    if rest.is_some() && !Fingerprint::is_same(&open.header, expected) {
        let says = |voice: &Voice| {
            let mut marked = *expected;
            voice.mark().is_some_and(|mark| {
                Fingerprint::write_length(&mut marked, mark);
                Fingerprint::is_same(&open.header, &marked)
            })
        };
        match [Voice::Reluctant, Voice::Wary].into_iter().find(says) {
            Some(said) => voice = said,
            None => return Err(difference(expected, &open.header, rank, peer)),
        }
    }
    if rest != Some(0) {
        return Err(no_message(peer));
    }
    let offered = if taken { open.link.shared()? } else { None };
    if offered.is_some() {
        voice = Voice::Offer;
    }
    Ok(Some((voice, offered)))
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
