//! Point-to-point: which message meets which receive.
//!
//! The point-to-point lane of a link carries frames, each a header and for some a payload. A short message is sent
//! at once ([`Kind::Eager`]); when no receive waits for it, it is kept. A long one is offered ([`Kind::Offer`]) where
//! the receiver can read it in the sender's memory: with a receive that waits for it that is all. Else it is declined, or
//! was announced ([`Kind::Request`]) in the first place, and its payload follows ([`Kind::Data`]) once the receiver is
//! ready ([`Kind::Ready`]), so that a frame's payload always has a place to go and no message can block another one
//! behind it. A receiver that is busy with something else may be about to post the receive: while its thread waits awake
//! ([`Matching::hold_offers`]), and wants nothing else of that peer, an offer waits as well. One message at a time is
//! offered to a peer. What a sender may have kept at the other side is bounded by [`CREDIT`]; beyond it short messages
//! are announced too.
//!
//! A message from rank r with tag t meets the first posted receive that asks for r (or for any rank) and t, in the
//! order of sending; a receive meets the first kept message that fits, in the order of arrival.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::buffer::Memory;
use crate::error::{Error, Result};
use crate::transport::Loan;
use crate::transport::endpoint::Lane;
use crate::types::{DataType, Rank};

use crate::engine::collective::transfer::TURN;
use crate::engine::links::{LinkTable, OpenLink, PeerLink};
use crate::engine::message::frame::{
    Announced, CREDIT, Frame, HEADER, Kept, Kind, Outgoing, Peer, Posted, Sent, Sink, corrupt,
    declined, fill,
};
use crate::engine::work::WorkState;

/// The point-to-point state of a group.
pub(crate) struct Matching {
    rank: Rank,
    peers: Vec<Peer>,
    posted: VecDeque<Posted>,
    kept: VecDeque<Kept>,
    next_id: u64,
    eager_bytes: usize,
    holds_offers: bool,
    /// The payload of a short message on its way from the link to where it goes.
    inbox: Vec<u8>,
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

    /// Starts a send. To oneself it needs a receive in flight.
    pub(crate) fn send(
        &mut self,
        dtype: DataType,
        memory: Memory,
        (to, tag): (Rank, u64),
        work: &Arc<WorkState>,
        finished: &mut Finished,
    ) -> Result<()> {
        if to == self.rank {
            return self.send_to_self(dtype, &memory, tag, work, finished);
        }
        let id = self.next_id;
        self.next_id += 1;
        let bytes = memory.len();
        let frame = Frame {
            kind: Kind::Eager,
            dtype: dtype as u8,
            tag,
            id,
            bytes: bytes as u64,
        };
        let peer = &mut self.peers[to];
        let work = Arc::clone(work);
        if bytes <= self.eager_bytes && peer.in_flight + bytes <= CREDIT {
            peer.in_flight += bytes;
            let header = frame.encode();
            peer.outgoing.push_back(Outgoing {
                header,
                payload: memory,
                sent: 0,
                lendable: false,
                offered: false,
                loan: None,
                work: Some(work),
            });
        } else if !peer.offering {
            peer.offering = true;
            let frame = Frame {
                kind: Kind::Offer,
                ..frame
            };
            peer.outgoing.push_back(Outgoing {
                header: frame.encode(),
                payload: memory,
                sent: 0,
                lendable: false,
                offered: true,
                loan: None,
                work: Some(work),
            });
        } else {
            let frame = Frame {
                kind: Kind::Request,
                ..frame
            };
            peer.push_control(frame);
            peer.announced.push(Announced {
                id,
                payload: memory,
                frame,
                work,
            });
        }
        Ok(())
    }

    fn send_to_self(
        &mut self,
        dtype: DataType,
        memory: &Memory,
        tag: u64,
        work: &Arc<WorkState>,
        finished: &mut Finished,
    ) -> Result<()> {
        let rank = self.rank;
        let fits = |posted: &Posted| posted.fits(rank, tag);
        let Some(at) = self.posted.iter().position(fits) else {
            return Err(Error::invalid(format!(
                "rank {rank} sends to itself with tag {tag} but has no matching receive in flight; start the receive \
                 first"
            )));
        };
        if self.posted[at].dtype != dtype || self.posted[at].memory.len() != memory.len() {
            let posted = &self.posted[at];
            return Err(Error::invalid(format!(
                "rank {rank} sends itself {} bytes of {dtype} (tag {tag}) but its receive in flight expects {} bytes \
                 of {}",
                memory.len(),
                posted.memory.len(),
                posted.dtype
            )));
        }
        let posted = self.posted.remove(at).expect("an index just found");
        let mut done = 0;
        while done < memory.len() {
            let source = memory.read(done, memory.len() - done);
            let target = posted.memory.write(done, source.len());
            target.copy_from_slice(&source[..target.len()]);
            done += target.len();
        }
        posted.work.set_source(rank);
        finished.push((posted.work, Ok(())));
        finished.push((Arc::clone(work), Ok(())));
        Ok(())
    }

    /// Sends a short message now, if nothing is in the way. Returns false when it has to be started instead.
    pub(crate) fn send_at_once(
        &mut self,
        links: &mut LinkTable,
        dtype: DataType,
        memory: &Memory,
        (to, tag): (Rank, u64),
    ) -> Result<bool> {
        let bytes = memory.len();
        let peer = &mut self.peers[to];
        if to == self.rank
            || bytes > self.eager_bytes
            || peer.in_flight + bytes > CREDIT
            || !peer.outgoing.is_empty()
        {
            return Ok(false);
        }
        let Some(open) = links.open(Lane::PointToPoint, to) else {
            return Ok(false);
        };
        let payload = memory.read(0, bytes);
        if payload.len() != bytes {
            return Ok(false);
        }
        let frame = Frame {
            kind: Kind::Eager,
            dtype: dtype as u8,
            tag,
            id: self.next_id,
            bytes: bytes as u64,
        };
        let header = frame.encode();
        let sent = match HEADER + bytes <= open.post_limit {
            true => open.link.try_post(&header, payload)?,
            false => open.link.try_stream(&header, payload)?,
        };
        if sent {
            self.next_id += 1;
            peer.in_flight += bytes;
        }
        Ok(sent)
    }

    /// Whether a receive from `from` may look for its message on the link: no other receive, and nothing that came
    /// before, could have to do with it.
    pub(crate) fn may_look(&self, from: Rank) -> bool {
        from != self.rank
            && self.posted.is_empty()
            && self.kept.is_empty()
            && self.peers[from].sink.is_none()
            && self.peers[from].held.is_none()
    }

    /// Receives a short message if it is the next that came. Anything else that came is taken in.
    pub(crate) fn look(
        &mut self,
        links: &mut LinkTable,
        wanted: &mut Wanted<'_>,
        finished: &mut Finished,
    ) -> Result<Look> {
        let from = wanted.from;
        if wanted.memory.len() > self.eager_bytes {
            // It may be offered, and is declined unless the receive has been started.
            return Ok(Look::Otherwise);
        }
        let Some(open) = links.open(Lane::PointToPoint, from) else {
            return Ok(Look::Otherwise);
        };
        if wanted.arrived.is_none() {
            if let Some(frame) = take_whole(open, from, &mut self.inbox)? {
                if !wanted.is_met_by(&frame) || wanted.memory.len() != self.inbox.len() {
                    self.take_in(from, frame, &mut open.link, finished)?;
                    return Ok(Look::Otherwise);
                }
                fill(wanted.memory, &self.inbox);
                return self.finish_look(wanted, links, finished);
            }
            if open.header_bytes == 0 && !open.link.is_streaming()? {
                return Ok(Look::Nothing);
            }
            if open.post_limit == 0 {
                // Each look would be a system call.
                return Ok(Look::Otherwise);
            }
            if !open.read_header()? {
                return Ok(Look::Nothing);
            }
            open.header_bytes = 0;
            let frame = Frame::decode(&open.header, from)?;
            if !wanted.is_met_by(&frame) {
                self.accept(from, frame, &mut open.link, finished)?;
                return Ok(Look::Otherwise);
            }
        }
        let (before, length) = (wanted.arrived.unwrap_or(0), wanted.memory.len());
        let mut arrived = before;
        while arrived < length {
            let rest = wanted.memory.write(arrived, length - arrived);
            match open.link.try_recv(rest)? {
                0 => break,
                count => arrived += count,
            }
        }
        wanted.arrived = Some(arrived);
        if arrived == length {
            return self.finish_look(wanted, links, finished);
        }
        Ok(match arrived > before {
            true => Look::Some,
            false => Look::Nothing,
        })
    }

    fn finish_look(
        &mut self,
        wanted: &Wanted<'_>,
        links: &mut LinkTable,
        finished: &mut Finished,
    ) -> Result<Look> {
        let from = wanted.from;
        self.peers[from].give_back(wanted.memory.len());
        if !self.peers[from].outgoing.is_empty() {
            self.advance_outgoing(from, links, finished)?;
        }
        Ok(Look::Received)
    }

    /// Starts the receive of a message whose beginning was found.
    pub(crate) fn receive_rest(&mut self, wanted: &Wanted<'_>, work: &Arc<WorkState>) {
        debug_assert!(wanted.arrived.is_some() && self.peers[wanted.from].sink.is_none());
        self.peers[wanted.from].sink = Some(Sink::Receive {
            memory: wanted.memory.clone(),
            work: Arc::clone(work),
            done: wanted.arrived.unwrap_or(0),
            eager: true,
        });
    }

    /// Takes in a message that came whole, its payload in the inbox.
    fn take_in(
        &mut self,
        from: Rank,
        frame: Frame,
        link: &mut PeerLink,
        finished: &mut Finished,
    ) -> Result<()> {
        self.accept(from, frame, link, finished)?;
        if let Some(sink) = &mut self.peers[from].sink {
            sink.fill(&self.inbox);
        }
        Ok(())
    }

    /// Starts a receive.
    pub(crate) fn receive(
        &mut self,
        dtype: DataType,
        memory: Memory,
        (from, tag): (Option<Rank>, u64),
        work: &Arc<WorkState>,
        finished: &mut Finished,
    ) -> Result<()> {
        let posted = Posted {
            from,
            tag,
            dtype,
            memory,
            work: Arc::clone(work),
        };
        let fits = |kept: &Kept| posted.fits(kept.from, kept.frame.tag);
        let Some(at) = self.kept.iter().position(fits) else {
            self.posted.push_back(posted);
            return Ok(());
        };
        let kept = self.kept.remove(at).expect("an index just found");
        self.peers[kept.from].note_met();
        posted.check(self.rank, kept.from, &kept.frame)?;
        match kept.payload {
            Some(payload) => {
                posted.fill(&payload);
                posted.work.set_source(kept.from);
                finished.push((posted.work, Ok(())));
                self.peers[kept.from].give_back_room(payload.len());
            }
            None => self.peers[kept.from].make_ready(kept.frame, posted),
        }
        Ok(())
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

    fn advance_outgoing(
        &mut self,
        rank: Rank,
        links: &mut LinkTable,
        finished: &mut Finished,
    ) -> Result<bool> {
        let Some(open) = links.open(Lane::PointToPoint, rank) else {
            return Ok(false);
        };
        let mut moved = self.look_at_loans(rank, &mut open.link, finished)?;
        let peer = &mut self.peers[rank];
        while let Some(frame) = peer.outgoing.front_mut() {
            let before = frame.sent;
            let sent = frame.advance(&mut open.link)?;
            moved |= frame.sent != before || sent != Sent::NotNow;
            match sent {
                Sent::NotNow => return Ok(moved),
                Sent::Whole => {
                    let frame = peer.outgoing.pop_front().expect("the frame just sent");
                    finished.extend(frame.work.map(|work| (work, Ok(()))));
                }
                Sent::Lent(ticket) => {
                    let frame = peer.outgoing.pop_front().expect("the frame just sent");
                    peer.lent.push_back((ticket, frame));
                }
                Sent::Unfit => {
                    let offer = peer.outgoing.pop_front().expect("the frame just tried");
                    let frame = Frame {
                        kind: Kind::Request,
                        ..Frame::decode(&offer.header, rank)?
                    };
                    peer.announce(offer, frame);
                    peer.push_control(frame);
                    // In the place of the offer.
                    peer.outgoing.rotate_right(1);
                }
            }
        }
        Ok(moved)
    }

    /// Ends the sends whose lent payloads have come back, and announces the one that was declined.
    fn look_at_loans(
        &mut self,
        rank: Rank,
        link: &mut PeerLink,
        finished: &mut Finished,
    ) -> Result<bool> {
        let peer = &mut self.peers[rank];
        let mut moved = false;
        while let Some((ticket, frame)) = peer.lent.front() {
            let loan = link.loan(*ticket)?;
            match loan {
                Loan::Out => break,
                Loan::Declined if !frame.offered => return Err(link.blame(declined())),
                _ => {}
            }
            let (_, frame) = peer.lent.pop_front().expect("the loan just looked at");
            moved = true;
            if loan == Loan::Declined {
                let announcement = Frame {
                    kind: Kind::Request,
                    ..Frame::decode(&frame.header, rank)?
                };
                peer.announce(frame, announcement);
                continue;
            }
            peer.offering &= !frame.offered;
            finished.extend(frame.work.map(|work| (work, Ok(()))));
        }
        Ok(moved)
    }

    fn advance_incoming(
        &mut self,
        rank: Rank,
        links: &mut LinkTable,
        finished: &mut Finished,
    ) -> Result<bool> {
        let Some(open) = links.open(Lane::PointToPoint, rank) else {
            return Ok(false);
        };
        let mut moved = false;
        let mut turn = 0;
        loop {
            if let Some(sink) = &mut self.peers[rank].sink {
                while !sink.is_full() {
                    match open.link.try_recv(sink.rest())? {
                        0 => return Ok(moved),
                        n => {
                            sink.advance(n);
                            turn += n;
                        }
                    }
                    moved = true;
                    if turn >= TURN && !sink.is_full() {
                        return Ok(true);
                    }
                }
                self.close_sink(rank, finished)?;
            }
            if self.posted.is_empty() && !finished.is_empty() {
                // A caller whose wait has ended may post a receive for the next message, which would now be kept or
                // declined.
                return Ok(moved);
            }
            let frame = if let Some(held) = self.peers[rank].held.take() {
                held
            } else if let Some(frame) = take_whole(open, rank, &mut self.inbox)? {
                if frame.kind != Kind::Offer {
                    self.take_in(rank, frame, &mut open.link, finished)?;
                    moved = true;
                    continue;
                }
                frame
            } else {
                let before = open.header_bytes;
                let complete = open.read_header()?;
                moved |= open.header_bytes > before;
                if !complete {
                    return Ok(moved);
                }
                open.header_bytes = 0;
                Frame::decode(&open.header, rank)?
            };
            if self.holds(rank, &frame) {
                self.peers[rank].held = Some(frame);
                return Ok(moved);
            }
            self.accept(rank, frame, &mut open.link, finished)?;
            moved = true;
        }
    }

    /// Whether to leave an offer for now: nothing else is wanted of that peer, so nothing waits for what comes after it.
    fn holds(&self, rank: Rank, frame: &Frame) -> bool {
        let peer = &self.peers[rank];
        let may_meet = |posted: &Posted| posted.from.is_none_or(|from| from == rank);
        self.holds_offers
            && frame.kind == Kind::Offer
            && peer.announced.is_empty()
            && peer.ready.is_empty()
            && !self.posted.iter().any(may_meet)
    }

    /// Takes in a frame header; afterwards the peer's sink is where its payload goes.
    #[expect(clippy::too_many_lines, reason = "one arm for each kind of frame")]
    fn accept(
        &mut self,
        rank: Rank,
        frame: Frame,
        link: &mut PeerLink,
        finished: &mut Finished,
    ) -> Result<()> {
        let length = usize::try_from(frame.bytes).unwrap_or(usize::MAX);
        match frame.kind {
            Kind::Eager => match self.take_posted(rank, &frame)? {
                Some(posted) => {
                    let Posted { memory, work, .. } = posted;
                    self.peers[rank].sink = Some(Sink::Receive {
                        memory,
                        work,
                        done: 0,
                        eager: true,
                    });
                }
                None => {
                    let payload = self.peers[rank].room(rank, length)?;
                    self.peers[rank].sink = Some(Sink::Keep {
                        frame,
                        payload,
                        done: 0,
                    });
                }
            },
            Kind::Request => match self.take_posted(rank, &frame)? {
                Some(posted) => self.peers[rank].make_ready(frame, posted),
                None => self.keep(rank, frame, None)?,
            },
            Kind::Offer => match self.take_posted(rank, &frame)? {
                Some(Posted { memory, work, .. }) => {
                    self.peers[rank].sink = Some(Sink::Receive {
                        memory,
                        work,
                        done: 0,
                        eager: false,
                    });
                }
                None => {
                    link.as_neighbour(|peer| peer.decline());
                    let frame = Frame {
                        kind: Kind::Request,
                        ..frame
                    };
                    self.keep(rank, frame, None)?;
                }
            },
            Kind::Ready => {
                // The answer may be to an offer, declined before it.
                self.look_at_loans(rank, link, finished)?;
                let peer = &mut self.peers[rank];
                let at = peer
                    .announced
                    .iter()
                    .position(|announced| announced.id == frame.id);
                let at = at.ok_or_else(|| corrupt(rank, "an answer to a message never sent"))?;
                let announced = peer.announced.remove(at);
                let header = Frame {
                    kind: Kind::Data,
                    ..announced.frame
                }
                .encode();
                peer.outgoing.push_back(Outgoing {
                    header,
                    payload: announced.payload,
                    sent: 0,
                    lendable: true,
                    offered: false,
                    loan: None,
                    work: Some(announced.work),
                });
            }
            Kind::Data => {
                let peer = &mut self.peers[rank];
                let at = peer.ready.iter().position(|(id, _)| *id == frame.id);
                let at = at.ok_or_else(|| corrupt(rank, "a payload that was not asked for"))?;
                peer.ready[at].1.check(self.rank, rank, &frame)?;
                let (_, posted) = peer.ready.remove(at);
                let Posted { memory, work, .. } = posted;
                peer.sink = Some(Sink::Receive {
                    memory,
                    work,
                    done: 0,
                    eager: false,
                });
            }
            Kind::Credit => {
                let peer = &mut self.peers[rank];
                peer.in_flight = peer.in_flight.saturating_sub(length);
            }
        }
        Ok(())
    }

    /// A payload has come whole: completes its receive or keeps the message.
    fn close_sink(&mut self, rank: Rank, finished: &mut Finished) -> Result<()> {
        match self.peers[rank].sink.take() {
            Some(Sink::Receive {
                memory,
                work,
                eager,
                ..
            }) => {
                work.set_source(rank);
                finished.push((work, Ok(())));
                if eager {
                    self.peers[rank].give_back(memory.len());
                }
            }
            Some(Sink::Keep { frame, payload, .. }) => {
                // A receive may have been posted while the payload was arriving.
                match self.take_posted(rank, &frame)? {
                    Some(posted) => {
                        posted.fill(&payload);
                        posted.work.set_source(rank);
                        finished.push((posted.work, Ok(())));
                        self.peers[rank].give_back_room(payload.len());
                    }
                    None => self.keep(rank, frame, Some(payload))?,
                }
            }
            None => {}
        }
        Ok(())
    }

    /// Keeps a message for which no receive is posted.
    fn keep(&mut self, from: Rank, frame: Frame, payload: Option<Vec<u8>>) -> Result<()> {
        self.peers[from].note_kept(from)?;
        self.kept.push_back(Kept {
            from,
            frame,
            payload,
        });
        Ok(())
    }

    /// The receive that the message meets. One that differs in type or length stays posted, to fail with the group.
    fn take_posted(&mut self, from: Rank, frame: &Frame) -> Result<Option<Posted>> {
        match self
            .posted
            .iter()
            .position(|posted| posted.fits(from, frame.tag))
        {
            Some(at) => {
                self.posted[at].check(self.rank, from, frame)?;
                Ok(self.posted.remove(at))
            }
            None => Ok(None),
        }
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
            add(&posted.work, posted.from, posted.memory.len());
        }
        for (rank, peer) in self.peers.iter().enumerate() {
            let lent = peer.lent.iter().map(|(_, frame)| frame);
            for frame in peer.outgoing.iter().chain(lent) {
                if let Some(work) = &frame.work {
                    add(work, Some(rank), frame.payload.len());
                }
            }
            for announced in &peer.announced {
                add(&announced.work, Some(rank), announced.payload.len());
            }
            for (_, posted) in &peer.ready {
                add(&posted.work, Some(rank), posted.memory.len());
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

/// What a receive that has not been started asks for.
pub(crate) struct Wanted<'a> {
    pub(crate) from: Rank,
    pub(crate) tag: u64,
    pub(crate) dtype: DataType,
    pub(crate) memory: &'a Memory,
    /// How much of the payload has come, once the message has begun to.
    pub(crate) arrived: Option<usize>,
}

impl Wanted<'_> {
    fn is_met_by(&self, frame: &Frame) -> bool {
        frame.kind == Kind::Eager
            && frame.tag == self.tag
            && frame.dtype == self.dtype as u8
            && frame.bytes == self.memory.len() as u64
    }
}

/// What such a receive has found.
pub(crate) enum Look {
    Received,
    /// A part of the message.
    Some,
    Nothing,
    /// Something that only a receive that has been started can deal with.
    Otherwise,
}

/// The frame of the next message, if it was posted or lent, with the payload of a posted one in `inbox`.
fn take_whole(open: &mut OpenLink, rank: Rank, inbox: &mut Vec<u8>) -> Result<Option<Frame>> {
    if open.header_bytes > 0 {
        return Ok(None);
    }
    let mut frame = Ok(None);
    open.link.try_take(&mut |message| {
        frame = match message.split_first_chunk::<HEADER>() {
            Some((header, payload)) => {
                inbox.clear();
                inbox.extend_from_slice(payload);
                Frame::decode(header, rank).map(Some)
            }
            None => Err(corrupt(rank, "bytes that do not begin a message")),
        };
    })?;
    frame
}

#[cfg(test)]
mod tests;
