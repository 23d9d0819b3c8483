//! Sends: which way a message goes, and how what is on its way gets on.

use std::sync::Arc;

use super::frame::{Frame, HEADER, Kind, declined};
use super::matching::{Finished, Matching};
use super::meeting::note_received;
use super::outgoing::{Outgoing, Sent};
use super::peer::{Announced, CREDIT};
use crate::buffer::Memory;
use crate::engine::links::{LinkTable, PeerLink};
use crate::engine::work::WorkState;
use crate::error::{Error, Result};
use crate::transport::Loan;
use crate::transport::endpoint::Lane;
use crate::types::{DataType, Rank};

impl Matching {
    /// Starts a send; with `note_of`, of a note that stands for a message of that length. A send to oneself ends at once:
    /// without a receive the message is kept.
    pub(crate) fn send(
        &mut self,
        dtype: DataType,
        (memory, note_of): (Memory, Option<usize>),
        (to, tag): (Rank, u64),
        work: &Arc<WorkState>,
        finished: &mut Finished,
    ) -> Result<()> {
        let id = self.next_id;
        self.next_id += 1;
        let bytes = memory.len();
        let frame = Frame {
            kind: Kind::Eager,
            dtype: dtype as u8,
            is_note: note_of.is_some(),
            tag,
            id,
            bytes: note_of.unwrap_or(bytes) as u64,
        };
        if to == self.rank {
            return self.send_to_self(frame, &memory, work, finished);
        }
        self.note_deadline(work);
        let peer = &mut self.peers[to];
        let work = Arc::clone(work);
        if bytes <= self.eager_bytes && peer.in_flight + bytes <= CREDIT {
            peer.in_flight += bytes;
            let eager = Outgoing::eager(frame, memory, work);
            peer.outgoing.push_back(eager);
        } else if !peer.offering {
            peer.offering = true;
            let frame = Frame {
                kind: Kind::Offer,
                ..frame
            };
            let offer = Outgoing::offer_of(frame, memory, work);
            peer.outgoing.push_back(offer);
        } else {
            let frame = Frame {
                kind: Kind::Request,
                ..frame
            };
            peer.push_control(frame);
            let announced = Announced {
                payload: memory,
                frame,
                work,
            };
            peer.announced.insert(id, announced);
        }
        Ok(())
    }

    fn send_to_self(
        &mut self,
        frame: Frame,
        memory: &Memory,
        work: &Arc<WorkState>,
        finished: &mut Finished,
    ) -> Result<()> {
        let rank = self.rank;
        match self.posted.first_for(rank, frame.tag) {
            Some(posted) => {
                posted.check_own(&frame)?;
                let met = Arc::clone(&posted.work);
                let mut posted = self.posted.take(&met).expect("the receive just found");
                memory.for_each_run(0, memory.len(), |at, run| posted.memory.copy_from(at, run));
                note_received(&posted.work, rank, (posted.dtype, memory.len()));
                finished.push((posted.work, Ok(())));
            }
            None => {
                let mut payload = Vec::new();
                payload.try_reserve_exact(memory.len()).map_err(|_| {
                    Error::invalid(format!(
                        "rank {rank} sends itself {} bytes before it receives them, and there is no memory to keep them; \
                         start the receive first",
                        memory.len()
                    ))
                })?;
                memory.for_each_run(0, memory.len(), |_, run| payload.extend_from_slice(run));
                self.keep(rank, frame, Some(payload), finished)?;
            }
        }
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
            is_note: false,
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

    pub(super) fn advance_outgoing(
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
            if frame.sent == 0 && frame.is_credit() && open.link.has_left() {
                // To a peer that is closing its socket it could cost what that one has sent before. Nor does it read
                // what an encrypted link still owes it.
                peer.outgoing.pop_front();
                continue;
            }
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
    pub(super) fn look_at_loans(
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
}
