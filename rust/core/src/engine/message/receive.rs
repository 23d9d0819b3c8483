//! Receives that have been started, and what comes in: each frame meets a receive, or is kept.

use std::sync::Arc;

use super::frame::{Frame, HEADER, Kind, corrupt};
use super::matching::{Finished, Matching};
use super::meeting::{Kept, Posted, note_received};
use super::outgoing::Outgoing;
use super::peer::Sink;
use crate::engine::collective::transfer::BYTES_PER_TURN;
use crate::engine::links::{LinkTable, OpenLink, PeerLink};
use crate::error::Result;
use crate::transport::endpoint::Lane;
use crate::types::Rank;

impl Matching {
    /// Starts a receive. Returns whether it has met its message.
    pub(crate) fn receive(&mut self, posted: Posted, finished: &mut Finished) -> Result<bool> {
        let (from, tag) = (posted.from, posted.tag);
        let Some((at, kept)) = self.kept.first_for(from, tag, self.peers.len()) else {
            self.note_deadline(&posted.work);
            self.posted.push(posted);
            return Ok(false);
        };
        if posted.is_probe {
            kept.answer(&posted.work)?;
            finished.push((posted.work, Ok(())));
            return Ok(true);
        }
        if kept.from == self.rank {
            // Both sides are this rank's, so it is told, and the message waits for another receive.
            posted.check_own(&kept.frame)?;
        } else {
            self.peers[kept.from].check_new(kept.from, &kept.frame)?;
        }
        let Kept {
            from,
            frame,
            payload,
        } = self.kept.take(at).expect("a message just found");
        if from != self.rank {
            self.peers[from].note_met();
            posted.check((&self.members, self.rank), from, &frame)?;
        }
        match payload {
            Some(payload) => {
                finished.push((posted.cut_to(&frame).complete(from, &payload), Ok(())));
                if from != self.rank {
                    self.peers[from].give_back_room(payload.len());
                }
            }
            None => {
                self.note_deadline(&posted.work);
                self.peers[from].make_ready(frame, posted.cut_to(&frame));
            }
        }
        Ok(true)
    }

    pub(super) fn advance_incoming(
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
                    if turn >= BYTES_PER_TURN && !sink.is_full() {
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
        self.holds_offers
            && frame.kind == Kind::Offer
            && peer.announced.is_empty()
            && peer.ready.is_empty()
            && !self.posted.ask_for(Some(rank))
            && !self.posted.ask_for(None)
    }

    /// Takes in a frame header; afterwards the peer's sink is where its payload goes.
    pub(super) fn accept(
        &mut self,
        rank: Rank,
        frame: Frame,
        link: &mut PeerLink,
        finished: &mut Finished,
    ) -> Result<()> {
        let length = frame.payload();
        match frame.kind {
            Kind::Eager => match self.take_posted(rank, &frame)? {
                Some(posted) => self.peers[rank].sink = Some(Sink::of(posted, true)),
                None => {
                    let payload = self.peers[rank].room(rank, length)?;
                    self.peers[rank].sink = Some(Sink::Keep {
                        frame,
                        payload,
                        done: 0,
                    });
                }
            },
            Kind::Request => {
                self.peers[rank].check_new(rank, &frame)?;
                match self.take_posted(rank, &frame)? {
                    Some(posted) => self.peers[rank].make_ready(frame, posted),
                    None => self.keep(rank, frame, None, finished)?,
                }
            }
            Kind::Offer => match self.take_posted(rank, &frame)? {
                Some(posted) => self.peers[rank].sink = Some(Sink::of(posted, false)),
                None => {
                    link.as_neighbour(|peer| peer.decline());
                    let frame = Frame {
                        kind: Kind::Request,
                        ..frame
                    };
                    self.keep(rank, frame, None, finished)?;
                }
            },
            Kind::Ready => {
                // The answer may be to an offer, declined before it.
                self.look_at_loans(rank, link, finished)?;
                let peer = &mut self.peers[rank];
                let announced = peer.announced.remove(&frame.id);
                let announced =
                    announced.ok_or_else(|| corrupt(rank, "an answer to a message never sent"))?;
                let frame = Frame {
                    kind: Kind::Data,
                    ..announced.frame
                };
                let data = Outgoing::data(frame, announced.payload, announced.work);
                peer.outgoing.push_back(data);
            }
            Kind::Data => {
                let peer = &mut self.peers[rank];
                let posted = peer.ready.get(&frame.id);
                let posted =
                    posted.ok_or_else(|| corrupt(rank, "a payload that was not asked for"))?;
                posted.check((&self.members, self.rank), rank, &frame)?;
                let posted = peer.ready.remove(&frame.id).expect("just looked at");
                peer.sink = Some(Sink::of(posted, false));
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
                dtype,
                work,
                eager,
                ..
            }) => {
                note_received(&work, rank, (dtype, memory.len()));
                finished.push((work, Ok(())));
                if eager {
                    self.peers[rank].give_back(memory.len());
                }
            }
            Some(Sink::Keep { frame, payload, .. }) => {
                // A receive may have been posted while the payload was arriving.
                match self.take_posted(rank, &frame)? {
                    Some(posted) => {
                        finished.push((posted.complete(rank, &payload), Ok(())));
                        self.peers[rank].give_back_room(payload.len());
                    }
                    None => self.keep(rank, frame, Some(payload), finished)?,
                }
            }
            None => {}
        }
        Ok(())
    }

    /// Keeps a message for which no receive is posted, and answers the probes that look for it.
    pub(super) fn keep(
        &mut self,
        from: Rank,
        frame: Frame,
        payload: Option<Vec<u8>>,
        finished: &mut Finished,
    ) -> Result<()> {
        if from != self.rank {
            self.peers[from].note_kept(from)?;
        }
        let kept = Kept {
            from,
            frame,
            payload,
        };
        while let Some(probe) = self.posted.first_probe_for(from, frame.tag) {
            let work = Arc::clone(&probe.work);
            kept.answer(&work)?;
            self.posted.take(&work);
            finished.push((work, Ok(())));
        }
        self.kept.push(kept);
        Ok(())
    }

    /// The receive that the message meets, cut to it. One that does not fit stays posted, to fail with the group.
    fn take_posted(&mut self, from: Rank, frame: &Frame) -> Result<Option<Posted>> {
        let Some(posted) = self.posted.first_for(from, frame.tag) else {
            return Ok(None);
        };
        posted.check((&self.members, self.rank), from, frame)?;
        let work = Arc::clone(&posted.work);
        Ok(self.posted.take(&work).map(|posted| posted.cut_to(frame)))
    }

    /// Takes in a message that came whole, its payload in the inbox.
    pub(super) fn take_in(
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
}

/// The frame of the next message, if it was posted or lent, with the payload of a posted one in `inbox`.
pub(super) fn take_whole(
    open: &mut OpenLink,
    rank: Rank,
    inbox: &mut Vec<u8>,
) -> Result<Option<Frame>> {
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
