//! The frames of the point-to-point lane, and what one side knows of its traffic with one peer. The protocol is told
//! in [`super::matching`].

use std::collections::VecDeque;
use std::sync::Arc;

use crate::buffer::Memory;
use crate::error::{Code, Error, Result};
use crate::types::{DataType, Rank};

use super::wire::{u32_at, u64_at};
use super::work::WorkState;

/// Bytes of a frame header; the same as on the collective lane, so that links keep one kind of partial header.
pub(super) const HEADER: usize = super::wire::HEADER;

const MAGIC: u32 = u32::from_le_bytes(*b"UNP1");

/// Bytes of unasked-for payload that a receiver keeps for one sender before that sender must ask first.
pub(super) const CREDIT: usize = 4 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Eager = 1,
    Request = 2,
    Ready = 3,
    Data = 4,
    Credit = 5,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) dtype: u8,
    pub(super) tag: u64,
    /// The sender's number of the message; in `Credit` unused.
    pub(super) id: u64,
    /// Payload bytes of the message; in `Credit` the bytes given back.
    pub(super) bytes: u64,
}

impl Frame {
    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4] = self.kind as u8;
        out[5] = self.dtype;
        out[8..16].copy_from_slice(&self.tag.to_le_bytes());
        out[16..24].copy_from_slice(&self.id.to_le_bytes());
        out[24..32].copy_from_slice(&self.bytes.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8; HEADER], peer: Rank) -> Result<Self> {
        let kind = match bytes[4] {
            1 => Some(Kind::Eager),
            2 => Some(Kind::Request),
            3 => Some(Kind::Ready),
            4 => Some(Kind::Data),
            5 => Some(Kind::Credit),
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

pub(super) fn corrupt(peer: Rank, what: &str) -> Error {
    Error::new(
        Code::Untrusted,
        format!("rank {peer} sent {what}; its stream is corrupt"),
    )
    .with_peer(peer)
}

/// A frame on its way out.
pub(super) struct Outgoing {
    pub(super) header: [u8; HEADER],
    pub(super) payload: Memory,
    /// Bytes of header and payload already sent.
    pub(super) sent: usize,
    /// Completed when the whole frame has been sent.
    pub(super) work: Option<Arc<WorkState>>,
}

/// A send that was announced and waits for the receiver.
pub(super) struct Announced {
    pub(super) id: u64,
    pub(super) payload: Memory,
    pub(super) frame: Frame,
    pub(super) work: Arc<WorkState>,
}

/// A receive that waits for its message.
pub(super) struct Posted {
    pub(super) from: Option<Rank>,
    pub(super) tag: u64,
    pub(super) dtype: DataType,
    pub(super) memory: Memory,
    pub(super) work: Arc<WorkState>,
}

/// A message that came before its receive.
pub(super) struct Kept {
    pub(super) from: Rank,
    pub(super) frame: Frame,
    /// The payload of an eager message; `None` for an announced one.
    pub(super) payload: Option<Vec<u8>>,
}

/// Where the payload now arriving goes.
pub(super) enum Sink {
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
pub(super) struct Peer {
    pub(super) outgoing: VecDeque<Outgoing>,
    pub(super) announced: Vec<Announced>,
    /// Receives whose message was announced and may now come.
    pub(super) ready: Vec<(u64, Posted)>,
    pub(super) sink: Option<Sink>,
    /// Bytes that the peer may be keeping for us.
    pub(super) in_flight: usize,
    /// Bytes of the peer's that are no longer kept and not yet given back.
    pub(super) freed: usize,
}

impl Peer {
    pub(super) fn push_control(&mut self, frame: Frame) {
        let header = frame.encode();
        self.outgoing.push_back(Outgoing {
            header,
            payload: Memory::empty(),
            sent: 0,
            work: None,
        });
    }

    /// Tells the sender to go on, and remembers where the payload goes.
    pub(super) fn make_ready(&mut self, frame: Frame, posted: Posted) {
        self.push_control(Frame {
            kind: Kind::Ready,
            ..frame
        });
        self.ready.push((frame.id, posted));
    }

    /// Notes that `bytes` of an eager message are no longer kept, and tells the sender now and then.
    pub(super) fn give_back(&mut self, bytes: usize) {
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
    pub(super) fn fits(&self, from: Rank, tag: u64) -> bool {
        self.tag == tag && self.from.is_none_or(|rank| rank == from)
    }

    pub(super) fn check(&self, rank: Rank, from: Rank, frame: &Frame) -> Result<()> {
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
        .with_peer(from)
        .with_operation(self.work.name()))
    }

    pub(super) fn fill(&self, payload: &[u8]) {
        let mut done = 0;
        while done < payload.len() {
            let target = self.memory.write(done, payload.len() - done);
            target.copy_from_slice(&payload[done..done + target.len()]);
            done += target.len();
        }
    }
}

impl Sink {
    pub(super) fn is_full(&self) -> bool {
        match self {
            Self::Receive { memory, done, .. } => *done == memory.len(),
            Self::Keep { payload, done, .. } => *done == payload.len(),
        }
    }

    pub(super) fn rest(&mut self) -> &mut [u8] {
        match self {
            Self::Receive { memory, done, .. } => memory.write(*done, memory.len() - *done),
            Self::Keep { payload, done, .. } => &mut payload[*done..],
        }
    }

    pub(super) fn advance(&mut self, bytes: usize) {
        match self {
            Self::Receive { done, .. } | Self::Keep { done, .. } => *done += bytes,
        }
    }
}
