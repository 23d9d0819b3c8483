//! Sends: which way a message goes, and how what is on its way gets on.

use std::sync::Arc;

use super::frame::{Frame, HEADER, Kind, declined};
use super::matching::{Finished, Matching};
use super::outgoing::{Outgoing, Sent};
use super::peer::{Announced, CREDIT, Posted};
use crate::buffer::Memory;
use crate::engine::links::{LinkTable, PeerLink};
use crate::engine::work::WorkState;
use crate::error::{Error, Result};
use crate::transport::Loan;
use crate::transport::endpoint::Lane;
use crate::types::{DataType, Rank};

impl Matching {
    /// Starts a send, with `note_of` of a note that stands for a message of so many bytes. To oneself it needs a receive in
    /// flight.
    pub(crate) fn send(
        &mut self,
        dtype: DataType,
        (memory, note_of): (Memory, Option<usize>),
        (to, tag): (Rank, u64),
        work: &Arc<WorkState>,
        finished: &mut Finished,
    ) -> Result<()> {
        if to == self.rank {
            return self.send_to_self(dtype, (&memory, note_of), tag, work, finished);
        }
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
        (memory, note_of): (&Memory, Option<usize>),
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
        let posted = &self.posted[at];
        let sent = note_of.unwrap_or(memory.len());
        let received = posted.bytes();
        if posted.dtype != dtype || received != sent || posted.memory.len() != memory.len() {
            return Err(Error::invalid(format!(
                "rank {rank} sends itself {sent} bytes of {dtype} (tag {tag}) but its receive in flight expects {received} \
                 bytes of {}",
                posted.dtype
            )));
        }
        let mut posted = self.posted.remove(at).expect("an index just found");
        memory.for_each_run(0, memory.len(), |at, run| posted.memory.copy_from(at, run));
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
