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
//! offered to a peer. What a sender may have kept at the other side is bounded by [`CREDIT`](super::peer::CREDIT);
//! beyond it short messages are announced too.
//!
//! A message from rank r with tag t meets the first posted receive that asks for r (or for any rank) and t, in the
//! order of sending; a receive meets the first kept message that fits, in the order of arrival.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::error::Result;
use crate::transport::endpoint::Lane;
use crate::types::Rank;

use crate::engine::links::LinkTable;
use crate::engine::work::WorkState;

use super::peer::{Kept, Peer, Posted, Sink};

/// The point-to-point state of a group.
pub(crate) struct Matching {
    pub(super) rank: Rank,
    pub(super) peers: Vec<Peer>,
    pub(super) posted: VecDeque<Posted>,
    pub(super) kept: VecDeque<Kept>,
    pub(super) next_id: u64,
    pub(super) eager_bytes: usize,
    pub(super) holds_offers: bool,
    /// The payload of a short message on its way from the link to where it goes.
    pub(super) inbox: Vec<u8>,
}

/// Reading this many bytes takes longer than it takes to wake a thread.
const LONG_TO_READ: usize = 256 << 10;

/// What an operation waits for, for reports.
pub(crate) struct PendingMessage {
    pub(crate) work: Arc<WorkState>,
    pub(crate) peer: Option<Rank>,
    pub(crate) bytes: usize,
}

/// Works that ended in a step, with their results.
pub(crate) type Finished = Vec<(Arc<WorkState>, Result<()>)>;

impl Matching {
    pub(crate) fn new(rank: Rank, world: usize, eager_bytes: usize) -> Self {
        Self {
            rank,
            peers: (0..world).map(|_| Peer::default()).collect(),
            posted: VecDeque::new(),
            kept: VecDeque::new(),
            next_id: 0,
            eager_bytes,
            holds_offers: false,
            inbox: Vec::new(),
        }
    }

    /// Whether anything is under way that needs links to be driven.
    pub(crate) fn is_busy(&self) -> bool {
        !self.posted.is_empty()
            || self.peers.iter().any(|peer| {
                !peer.outgoing.is_empty()
                    || !peer.announced.is_empty()
                    || !peer.ready.is_empty()
                    || !peer.lent.is_empty()
                    || peer.sink.is_some()
            })
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

    /// Whether no message has met this receive.
    pub(crate) fn is_posted(&self, work: &Arc<WorkState>) -> bool {
        let mut posted = self.posted.iter().rev();
        posted.any(|posted| Arc::ptr_eq(&posted.work, work))
    }

    /// Takes a receive back that no message has met. Returns whether it was there.
    pub(crate) fn withdraw(&mut self, work: &Arc<WorkState>) -> bool {
        let before = self.posted.len();
        self.posted
            .retain(|posted| !Arc::ptr_eq(&posted.work, work));
        self.posted.len() < before
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

    /// The peers whose links must be open for what is under way: all of them while a receive takes any source, so
    /// that their end is noticed.
    pub(crate) fn needed(&self, world: usize) -> Vec<Rank> {
        if self.posted.iter().any(|posted| posted.from.is_none()) {
            return (0..world).filter(|rank| *rank != self.rank).collect();
        }
        (0..world)
            .filter(|rank| {
                *rank != self.rank
                    && (self.has_outgoing(*rank)
                        || !self.peers[*rank].announced.is_empty()
                        || self.posted.iter().any(|posted| posted.from == Some(*rank)))
            })
            .collect()
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

    /// Whether frames wait to be sent to `rank`, or to come back from there.
    pub(crate) fn has_outgoing(&self, rank: Rank) -> bool {
        !self.peers[rank].outgoing.is_empty() || !self.peers[rank].lent.is_empty()
    }

    /// Whether something under way cannot end without `rank`.
    pub(crate) fn depends_on(&self, rank: Rank) -> bool {
        let peer = &self.peers[rank];
        !peer.announced.is_empty()
            || !peer.ready.is_empty()
            || !peer.lent.is_empty()
            || peer.outgoing.iter().any(|frame| frame.work.is_some())
            || matches!(peer.sink, Some(Sink::Receive { .. }))
            || self.posted.iter().any(|posted| posted.from == Some(rank))
    }

    /// Drops what would be left to do with a peer that has gone when nothing depends on it.
    pub(crate) fn forget(&mut self, rank: Rank) {
        if !self.depends_on(rank) {
            self.peers[rank].outgoing.clear();
            self.peers[rank].sink = None;
        }
    }

    /// Whether a receive from any source waits.
    pub(crate) fn waits_for_any(&self) -> bool {
        self.posted.iter().any(|posted| posted.from.is_none())
    }

    /// Everything under way.
    pub(crate) fn pending(&self) -> Vec<PendingMessage> {
        let mut list = Vec::new();
        let mut add = |work: &Arc<WorkState>, peer, bytes| {
            list.push(PendingMessage {
                work: Arc::clone(work),
                peer,
                bytes,
            });
        };
        for posted in &self.posted {
            add(&posted.work, posted.from, posted.bytes());
        }
        for (rank, peer) in self.peers.iter().enumerate() {
            let lent = peer.lent.iter().map(|(_, frame)| frame);
            for frame in peer.outgoing.iter().chain(lent) {
                if let Some(work) = &frame.work {
                    add(work, Some(rank), frame.payload.len());
                }
            }
            for announced in &peer.announced {
                add(&announced.work, Some(rank), announced.frame.bytes as usize);
            }
            for (_, posted) in &peer.ready {
                add(&posted.work, Some(rank), posted.bytes());
            }
            if let Some(Sink::Receive { work, memory, .. }) = &peer.sink {
                add(work, Some(rank), memory.len());
            }
        }
        list
    }

    /// Forgets everything, because the group is dead; returns the works that have to fail.
    pub(crate) fn clear(&mut self) -> Vec<Arc<WorkState>> {
        let works = self
            .pending()
            .into_iter()
            .map(|pending| pending.work)
            .collect();
        self.posted.clear();
        self.kept.clear();
        for peer in &mut self.peers {
            *peer = Peer::default();
        }
        works
    }
}
