//! Point-to-point: which message meets which receive.
//!
//! The point-to-point lane of a link carries frames, each a header and for some a payload. A short message is sent at
//! once ([`Kind::Eager`](super::frame::Kind::Eager)); when no receive waits for it, it is kept. A long one is offered
//! ([`Kind::Offer`](super::frame::Kind::Offer)) where the receiver can read it in the sender's memory: with a receive
//! that waits for it that is all. Else it is declined, or was announced
//! ([`Kind::Request`](super::frame::Kind::Request)) in the first place, and its payload follows
//! ([`Kind::Data`](super::frame::Kind::Data)) once the receiver is ready ([`Kind::Ready`](super::frame::Kind::Ready)),
//! so that a frame's payload always has a place to go and no message can block another one behind it. A receiver that
//! is busy with something else may be about to post the receive: while its thread waits awake
//! ([`Matching::hold_offers`]), and wants nothing else of that peer, an offer waits as well. One message at a time is
//! offered to a peer. [`CREDIT`](super::peer::CREDIT) bounds the bytes that the other side keeps for a sender; beyond it
//! short messages are announced too.
//!
//! A message from rank r with tag t meets the first posted receive that asks for r (or for any rank) and t, in the
//! order of sending; a receive meets the first kept message that fits, in the order of arrival. A message of a rank to itself
//! is copied, to its receive or to the kept messages.
//!
//! Where a message under way can be is known in one place ([`Peer::under_way`], beside the receives that are posted). Whom a
//! rank depends on ([`Matching::dependence`]), what is late, what reports name and what fails with the group follow from it.

use std::sync::Arc;
use std::time::Instant;

use crate::error::Result;
use crate::transport::READ_BY_SEVERAL_FROM;
use crate::transport::endpoint::Lane;
use crate::types::Rank;

use crate::engine::links::LinkTable;
use crate::engine::members::Members;
use crate::engine::work::WorkState;

use super::meeting::{Arrivals, Receives};
use super::peer::Peer;

/// The point-to-point state of a group.
pub(crate) struct Matching {
    pub(super) rank: Rank,
    pub(super) members: Members,
    pub(super) peers: Vec<Peer>,
    pub(super) posted: Receives,
    pub(super) kept: Arrivals,
    pub(super) next_id: u64,
    pub(super) eager_bytes: usize,
    pub(super) holds_offers: bool,
    /// The payload of a short message on its way from the link to where it goes.
    pub(super) inbox: Vec<u8>,
    /// No message is late before; `None`: none ever is.
    due: Option<Instant>,
}

/// Reading this many bytes takes longer than it takes to wake a thread.
const LONG_TO_READ: usize = 256 << 10;

/// A message under way: a send or a receive of this rank's.
pub(crate) struct UnderWay<'a> {
    pub(crate) work: &'a Arc<WorkState>,
    /// The rank that it cannot end without; `None`: any rank will do.
    pub(crate) peer: Option<Rank>,
    pub(crate) bytes: usize,
    pub(crate) is_probe: bool,
}

/// Whether what is under way can end without a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dependence {
    /// It has nothing to do with that rank.
    No,
    /// A receive takes what comes first, from that rank or another one.
    Any,
    /// Something cannot end without it.
    Yes,
}

/// Works that ended in a step, with their results.
pub(crate) type Finished = Vec<(Arc<WorkState>, Result<()>)>;

impl Matching {
    pub(crate) fn new(rank: Rank, members: Members, eager_bytes: usize) -> Self {
        Self {
            rank,
            peers: (0..members.len()).map(|_| Peer::default()).collect(),
            members,
            posted: Receives::default(),
            kept: Arrivals::default(),
            next_id: 0,
            eager_bytes,
            holds_offers: false,
            inbox: Vec::new(),
            due: None,
        }
    }

    /// Whether anything is under way that needs links to be driven.
    pub(crate) fn is_busy(&self) -> bool {
        !self.posted.is_empty() || !self.peers.iter().all(Peer::is_idle)
    }

    /// Whether to leave an offer that no receive waits for, in case a receive is posted soon, instead of declining it.
    pub(crate) fn hold_offers(&mut self, hold: bool) {
        self.holds_offers = hold;
    }

    /// No offer is left any more. Returns whether one was.
    pub(crate) fn release_offers(&mut self) -> bool {
        self.holds_offers = false;
        self.peers.iter().any(|peer| peer.held.is_some())
    }

    /// Takes a receive back that no message has met. Returns whether it was there.
    pub(crate) fn withdraw(&mut self, work: &WorkState) -> bool {
        self.posted.take(work).is_some()
    }

    /// Moves frames in and out. Returns whether anything moved.
    pub(crate) fn advance(
        &mut self,
        links: &mut LinkTable,
        finished: &mut Finished,
    ) -> Result<bool> {
        let mut moved = false;
        // Sends come first: the peer may read them while this rank reads what has come. And a send that a peer has read
        // may end the caller's wait, and the caller may then post a receive for what has come.
        for rank in 0..self.peers.len() {
            if self.has_outgoing(rank) {
                moved |= self.advance_outgoing(rank, links, finished)?;
            }
        }
        for rank in 0..self.peers.len() {
            if links.open(Lane::PointToPoint, rank).is_some() {
                moved |= self.advance_incoming(rank, links, finished)?;
                moved |= self.advance_outgoing(rank, links, finished)?;
            }
        }
        Ok(moved)
    }

    /// Every message under way, in whichever state.
    pub(crate) fn under_way(&self) -> impl Iterator<Item = UnderWay<'_>> {
        let posted = self.posted.iter().map(|posted| UnderWay {
            work: &posted.work,
            peer: posted.from,
            bytes: posted.bytes(),
            is_probe: posted.is_probe,
        });
        let met = self.peers.iter().enumerate().flat_map(|(rank, peer)| {
            let under_way = peer.under_way();
            under_way.map(move |(work, bytes)| UnderWay {
                work,
                peer: Some(rank),
                bytes,
                is_probe: false,
            })
        });
        posted.chain(met)
    }

    /// Whether the messages of [`Matching::under_way`] can end without `rank`. A rank does not depend on itself.
    pub(crate) fn dependence(&self, rank: Rank) -> Dependence {
        let is_met = || self.peers[rank].under_way().next().is_some();
        if rank == self.rank {
            Dependence::No
        } else if self.posted.ask_for(Some(rank)) || is_met() {
            Dependence::Yes
        } else if self.posted.ask_for(None) {
            Dependence::Any
        } else {
            Dependence::No
        }
    }

    /// A message is under way from now on.
    pub(super) fn note_deadline(&mut self, work: &WorkState) {
        let earliest = self.due.into_iter().chain(work.deadline).min();
        self.due = earliest;
    }

    /// When to look for messages that are late, at the latest. It may turn out that none is.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// The first message whose time is up.
    pub(crate) fn overdue(&mut self, now: Instant) -> Option<(Arc<WorkState>, Option<Rank>)> {
        if self.due.is_none_or(|due| now < due) {
            return None;
        }
        let is_late = |message: &UnderWay<'_>| message.work.deadline.is_some_and(|due| now >= due);
        let late = self.under_way().find(is_late);
        let late = late.map(|late| (Arc::clone(late.work), late.peer));
        if late.is_none() {
            // Those that were due have ended.
            let deadlines = self.under_way().filter_map(|message| message.work.deadline);
            self.due = deadlines.min();
        }
        late
    }

    /// Whether all that is under way is long and lent, so that only the peers that read it have something to do.
    pub(crate) fn is_being_read(&self) -> bool {
        let mut lends = false;
        self.posted.is_empty()
            && self.peers.iter().all(|peer| {
                let mut lent = peer.lent.iter();
                lends |= lent.any(|(_, frame)| frame.payload.len() >= LONG_TO_READ);
                peer.outgoing.is_empty()
                    && peer.announced.is_empty()
                    && peer.ready.is_empty()
                    && peer.sink.is_none()
            })
            && lends
    }

    /// Whether something is lent that is long enough to be read by several threads.
    pub(crate) fn is_read_by_several(&self) -> bool {
        let mut lent = self.peers.iter().flat_map(|peer| &peer.lent);
        lent.any(|(_, frame)| frame.payload.len() >= READ_BY_SEVERAL_FROM)
    }

    /// Whether frames wait to be sent to `rank`, or to come back from there.
    pub(crate) fn has_outgoing(&self, rank: Rank) -> bool {
        !self.peers[rank].outgoing.is_empty() || !self.peers[rank].lent.is_empty()
    }

    /// Drops what would be left to do with a peer that has gone when nothing depends on it.
    pub(crate) fn forget(&mut self, rank: Rank) {
        if self.dependence(rank) != Dependence::Yes {
            self.peers[rank].outgoing.clear();
            self.peers[rank].sink = None;
        }
    }

    /// Whether a receive from any source waits.
    pub(crate) fn waits_for_any(&self) -> bool {
        self.posted.ask_for(None)
    }

    /// Forgets everything, because the group is dead; returns the works that have to fail.
    pub(crate) fn clear(&mut self) -> Vec<Arc<WorkState>> {
        let works = self.under_way();
        let works = works.map(|message| Arc::clone(message.work)).collect();
        (self.posted, self.kept) = (Receives::default(), Arrivals::default());
        for peer in &mut self.peers {
            *peer = Peer::default();
        }
        works
    }
}
