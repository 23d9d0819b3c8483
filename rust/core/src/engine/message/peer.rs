//! What one side knows of its traffic with one peer: what is on its way, and what waits for something.

use std::collections::VecDeque;
use std::sync::Arc;

use super::frame::{Frame, Kind, corrupt};
use super::outgoing::Outgoing;
use crate::buffer::Memory;
use crate::engine::work::WorkState;
use crate::error::{Code, Error, Result};
use crate::transport::Ticket;
use crate::types::{DataType, Rank};

/// Bytes of unasked-for payload that a receiver keeps for one sender before that sender must ask first.
pub(crate) const CREDIT: usize = 4 << 20;

/// Messages that a receiver keeps for one sender, announced ones and empty ones among them. No program that works has as
/// many for which no receive is posted.
const MOST_KEPT: usize = 1 << 20;

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
    /// How long the message is that a note in `memory` stands for.
    pub(crate) note_of: Option<usize>,
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
        self.outgoing.push_back(Outgoing::control(frame));
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
                is_note: false,
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
        let bytes = self.bytes();
        if frame.dtype == self.dtype as u8 && frame.bytes == bytes as u64 {
            return match frame.is_note == self.note_of.is_some() {
                true => Ok(()),
                false => Err(corrupt(from, "a message in another form than it receives")),
            };
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
                "the {field} differs: rank {rank} receives {bytes} bytes of {} but rank {from} sends {} bytes of {theirs} \
                 (tag {}); both sides of a message must have the same type and length",
                self.dtype,
                frame.bytes,
                self.tag
            ),
        )
        .with_field(field)
        .with_peer(from)
        .with_operation(self.work.name()))
    }

    /// Bytes of the message.
    pub(crate) fn bytes(&self) -> usize {
        self.note_of.unwrap_or(self.memory.len())
    }

    pub(crate) fn fill(&mut self, payload: &[u8]) {
        self.memory.copy_from(0, payload);
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
