//! The frames of the point-to-point lane, and what one side knows of its traffic with one peer. The protocol is
//! described in [`crate::engine::message::matching`].

use std::collections::VecDeque;
use std::sync::Arc;

use crate::buffer::Memory;
use crate::error::{Code, Error, Result};
use crate::transport::{Lending, Loan, Terms, Ticket};
use crate::types::{DataType, Rank};

use crate::engine::collective::header::{u32_at, u64_at};
use crate::engine::links::{PeerLink, Runs};
use crate::engine::work::WorkState;

/// Bytes of a frame header; the same as on the collective lane, so that links keep one kind of partial header.
pub(crate) const HEADER: usize = crate::engine::collective::header::HEADER;

const MAGIC: u32 = u32::from_le_bytes(*b"UNP1");

/// Bytes of unasked-for payload that a receiver keeps for one sender before that sender must ask first.
pub(crate) const CREDIT: usize = 4 << 20;

/// Messages that a receiver keeps for one sender, announced ones and empty ones among them. No program that works has as
/// many for which no receive is posted.
const MOST_KEPT: usize = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Eager = 1,
    Request = 2,
    Ready = 3,
    Data = 4,
    Credit = 5,
    Offer = 6,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    pub(crate) dtype: u8,
    pub(crate) tag: u64,
    /// The sender's number of the message; in `Credit` unused.
    pub(crate) id: u64,
    /// Payload bytes of the message; in `Credit` the bytes given back.
    pub(crate) bytes: u64,
}

impl Frame {
    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4] = self.kind as u8;
        out[5] = self.dtype;
        out[8..16].copy_from_slice(&self.tag.to_le_bytes());
        out[16..24].copy_from_slice(&self.id.to_le_bytes());
        out[24..32].copy_from_slice(&self.bytes.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8; HEADER], peer: Rank) -> Result<Self> {
        let kind = match bytes[4] {
            1 => Some(Kind::Eager),
            2 => Some(Kind::Request),
            3 => Some(Kind::Ready),
            4 => Some(Kind::Data),
            5 => Some(Kind::Credit),
            6 => Some(Kind::Offer),
            _ => None,
        };
        match kind {
            Some(kind) if u32_at(bytes, 0) == MAGIC => Ok(Self {
                kind,
                dtype: bytes[5],
                tag: u64_at(bytes, 8),
                id: u64_at(bytes, 16),
                bytes: u64_at(bytes, 24),
            }),
            _ => Err(corrupt(peer, "bytes that do not begin a message")),
        }
    }
}

/// The error of a peer that declines what was not offered.
pub(crate) fn declined() -> Error {
    Error::new(
        Code::Untrusted,
        "a peer declined a message that it had to take; its memory is damaged or its version of unisono differs",
    )
}

pub(crate) fn corrupt(peer: Rank, what: &str) -> Error {
    Error::new(
        Code::Untrusted,
        format!("rank {peer} sent {what}; its stream is corrupt"),
    )
    .with_peer(peer)
}

/// A frame on its way out.
pub(crate) struct Outgoing {
    pub(crate) header: [u8; HEADER],
    pub(crate) payload: Memory,
    /// Bytes of header and payload already sent.
    pub(crate) sent: usize,
    /// The payload may be lent: it is not complete before the receiver has read it.
    pub(crate) lendable: bool,
    /// It is an offer: lent, or else announced.
    pub(crate) offered: bool,
    /// It is lent.
    pub(crate) loan: Option<Ticket>,
    /// Completed when the whole frame has been sent.
    pub(crate) work: Option<Arc<WorkState>>,
}

/// How far a frame has come in one attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// Not to its end.
    NotNow,
    Whole,
    /// Its payload will be read where it lies; other frames may follow.
    Lent(Ticket),
    /// It cannot be offered.
    Unfit,
}

impl Outgoing {
    /// Sends as much as goes now.
    pub(crate) fn advance(&mut self, link: &mut PeerLink) -> Result<Sent> {
        if self.offered {
            return self.offer(link);
        }
        if let Some(ticket) = self.loan {
            match link.loan(ticket)? {
                Loan::Out => return Ok(Sent::NotNow),
                Loan::Returned => return Ok(Sent::Whole),
                Loan::Declined => return Err(link.blame(declined())),
                Loan::Refused => {
                    (self.loan, self.lendable) = (None, false);
                    self.sent = HEADER;
                }
            }
        }
        let length = self.payload.len();
        if self.sent == 0 && HEADER + length <= link.post_limit() {
            let run = self.payload.read(0, length);
            let posted = if run.len() == length {
                link.try_post(&self.header, run)?
            } else {
                link.try_post(&self.header, &self.payload.gather(0, length))?
            };
            return Ok(if posted { Sent::Whole } else { Sent::NotNow });
        }
        if self.sent == 0 && self.lendable {
            match self.lend(link, Terms::Loan)? {
                Lending::NotNow => return Ok(Sent::NotNow),
                Lending::Unfit => {}
                Lending::Lent(ticket) if ticket.proven => return Ok(Sent::Lent(ticket)),
                Lending::Lent(ticket) => {
                    self.loan = Some(ticket);
                    return Ok(Sent::NotNow);
                }
            }
        }
        self.stream(link)
    }

    /// Lends the frame, if it is long enough and of few enough pieces.
    fn lend(&self, link: &mut PeerLink, terms: Terms) -> Result<Lending> {
        let length = self.payload.len();
        let Some((_, most_runs)) = link.lends().filter(|(least, _)| length >= *least) else {
            return Ok(Lending::Unfit);
        };
        let mut runs = Runs::default();
        if !runs.fill(&self.payload, 0, length, most_runs) {
            return Ok(Lending::Unfit);
        }
        link.try_lend(&self.header, runs.as_slice(), terms)
    }

    fn offer(&self, link: &mut PeerLink) -> Result<Sent> {
        Ok(match self.lend(link, Terms::Offer)? {
            Lending::NotNow => Sent::NotNow,
            Lending::Unfit => Sent::Unfit,
            Lending::Lent(ticket) => Sent::Lent(ticket),
        })
    }

    fn stream(&mut self, link: &mut PeerLink) -> Result<Sent> {
        let total = HEADER + self.payload.len();
        while self.sent < total {
            let sent = if self.sent < HEADER {
                link.try_send(&self.header[self.sent..])?
            } else {
                let at = self.sent - HEADER;
                link.try_send(self.payload.read(at, self.payload.len() - at))?
            };
            if sent == 0 {
                return Ok(Sent::NotNow);
            }
            self.sent += sent;
        }
        Ok(Sent::Whole)
    }
}

/// A send that was announced and waits for the receiver.
pub(crate) struct Announced {
    pub(crate) id: u64,
    pub(crate) payload: Memory,
    pub(crate) frame: Frame,
    pub(crate) work: Arc<WorkState>,
}

/// A receive that waits for its message.
pub(crate) struct Posted {
    pub(crate) from: Option<Rank>,
    pub(crate) tag: u64,
    pub(crate) dtype: DataType,
    pub(crate) memory: Memory,
    pub(crate) work: Arc<WorkState>,
}

/// A message that came before its receive.
pub(crate) struct Kept {
    pub(crate) from: Rank,
    pub(crate) frame: Frame,
    /// The payload of an eager message; `None` for an announced one.
    pub(crate) payload: Option<Vec<u8>>,
}

/// Where the payload now arriving goes.
pub(crate) enum Sink {
    Receive {
        memory: Memory,
        work: Arc<WorkState>,
        done: usize,
        eager: bool,
    },
    Keep {
        frame: Frame,
        payload: Vec<u8>,
        done: usize,
    },
}

/// One side's view of its traffic with one peer.
#[derive(Default)]
pub(crate) struct Peer {
    pub(crate) outgoing: VecDeque<Outgoing>,
    pub(crate) announced: Vec<Announced>,
    /// Receives whose message was announced and may now come.
    pub(crate) ready: Vec<(u64, Posted)>,
    pub(crate) sink: Option<Sink>,
    /// An offer that a receive may yet be posted for; what the peer sent after it has not been looked at.
    pub(crate) held: Option<Frame>,
    /// Sends whose payload is lent and may be read later than what was sent after it.
    pub(crate) lent: VecDeque<(Ticket, Outgoing)>,
    /// A message is offered, or about to be: the next long one is announced.
    pub(crate) offering: bool,
    /// Bytes that the peer may be keeping for us.
    pub(crate) in_flight: usize,
    /// Bytes of the peer's that are no longer kept and not yet given back.
    pub(crate) freed: usize,
    /// Bytes of the peer's that are kept, or for which there is room.
    kept_bytes: usize,
    /// Messages of the peer's that are kept.
    kept: usize,
}

impl Peer {
    pub(crate) fn push_control(&mut self, frame: Frame) {
        let header = frame.encode();
        self.outgoing.push_back(Outgoing {
            header,
            payload: Memory::empty(),
            sent: 0,
            lendable: false,
            offered: false,
            loan: None,
            work: None,
        });
    }

    /// Room for `bytes` of a message that `rank`, which this peer is, sends without being asked.
    ///
    /// # Errors
    /// When it has more there than it may: what it counts as kept here is never less than what is.
    pub(crate) fn room(&mut self, rank: Rank, bytes: usize) -> Result<Vec<u8>> {
        let all = self.kept_bytes.saturating_add(bytes);
        if all > CREDIT {
            return Err(corrupt(rank, "more bytes than it may without asking"));
        }
        self.kept_bytes = all;
        Ok(vec![0; bytes])
    }

    /// Counts a message of `rank`, which this peer is, that is kept.
    ///
    /// # Errors
    /// When there are too many.
    pub(crate) fn note_kept(&mut self, rank: Rank) -> Result<()> {
        if self.kept >= MOST_KEPT {
            return Err(corrupt(
                rank,
                "more than a million messages that no receive takes",
            ));
        }
        self.kept += 1;
        Ok(())
    }

    /// A message that was kept has met its receive.
    pub(crate) fn note_met(&mut self) {
        self.kept -= 1;
    }

    /// The `bytes` that there was [`Peer::room`] for have been used.
    pub(crate) fn give_back_room(&mut self, bytes: usize) {
        self.kept_bytes -= bytes;
        self.give_back(bytes);
    }

    /// Turns an offer into a message that has been announced.
    pub(crate) fn announce(&mut self, offer: Outgoing, frame: Frame) {
        self.offering = false;
        if let Some(work) = offer.work {
            self.announced.push(Announced {
                id: frame.id,
                payload: offer.payload,
                frame,
                work,
            });
        }
    }

    /// Tells the sender to go on, and remembers where the payload goes.
    pub(crate) fn make_ready(&mut self, frame: Frame, posted: Posted) {
        self.push_control(Frame {
            kind: Kind::Ready,
            ..frame
        });
        self.ready.push((frame.id, posted));
    }

    /// Notes that `bytes` of an eager message are no longer kept, and tells the sender now and then.
    pub(crate) fn give_back(&mut self, bytes: usize) {
        self.freed += bytes;
        if self.freed >= CREDIT / 4 {
            let bytes = std::mem::take(&mut self.freed) as u64;
            self.push_control(Frame {
                kind: Kind::Credit,
                dtype: 0,
                tag: 0,
                id: 0,
                bytes,
            });
        }
    }
}

impl Posted {
    pub(crate) fn fits(&self, from: Rank, tag: u64) -> bool {
        self.tag == tag && self.from.is_none_or(|rank| rank == from)
    }

    pub(crate) fn check(&self, rank: Rank, from: Rank, frame: &Frame) -> Result<()> {
        if frame.dtype == self.dtype as u8 && frame.bytes == self.memory.len() as u64 {
            return Ok(());
        }
        let theirs = DataType::from_number(frame.dtype).map_or("an unknown type", DataType::name);
        let field = if frame.dtype == self.dtype as u8 {
            "length"
        } else {
            "dtype"
        };
        Err(Error::new(
            Code::Mismatch,
            format!(
                "the {field} differs: rank {rank} receives {} bytes of {} but rank {from} sends {} bytes of {theirs} \
                 (tag {}); both sides of a message must have the same type and length",
                self.memory.len(),
                self.dtype,
                frame.bytes,
                self.tag
            ),
        )
        .with_field(field)
        .with_peer(from)
        .with_operation(self.work.name()))
    }

    pub(crate) fn fill(&self, payload: &[u8]) {
        fill(&self.memory, payload);
    }
}

/// Copies a whole payload into `memory`, which is as long.
pub(crate) fn fill(memory: &Memory, payload: &[u8]) {
    let mut done = 0;
    while done < payload.len() {
        let target = memory.write(done, payload.len() - done);
        target.copy_from_slice(&payload[done..done + target.len()]);
        done += target.len();
    }
}

impl Sink {
    pub(crate) fn is_full(&self) -> bool {
        match self {
            Self::Receive { memory, done, .. } => *done == memory.len(),
            Self::Keep { payload, done, .. } => *done == payload.len(),
        }
    }

    pub(crate) fn rest(&mut self) -> &mut [u8] {
        match self {
            Self::Receive { memory, done, .. } => memory.write(*done, memory.len() - *done),
            Self::Keep { payload, done, .. } => &mut payload[*done..],
        }
    }

    /// Puts in the whole payload of a message that was posted; of a lent one it comes later.
    pub(crate) fn fill(&mut self, payload: &[u8]) {
        let mut done = 0;
        while done < payload.len() && !self.is_full() {
            let rest = self.rest();
            let run = rest.len().min(payload.len() - done);
            rest[..run].copy_from_slice(&payload[done..done + run]);
            self.advance(run);
            done += run;
        }
    }

    pub(crate) fn advance(&mut self, bytes: usize) {
        match self {
            Self::Receive { done, .. } | Self::Keep { done, .. } => *done += bytes,
        }
    }
}
