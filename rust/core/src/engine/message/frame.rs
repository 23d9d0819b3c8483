//! The frames of the point-to-point lane, as they go over the link. [`matching`](super::matching) describes the protocol.

use crate::engine::collective::header::{u32_at, u64_at};
use crate::error::{Code, Error, Result};
use crate::types::Rank;

/// Bytes of a frame header; the same as on the collective lane, so that links keep one kind of partial header.
pub(crate) const HEADER: usize = crate::engine::collective::header::HEADER;

/// Bytes of a note, which travels in the place of a longer message whose payload lies elsewhere.
pub(crate) const NOTE: usize = 32;

const MAGIC: u32 = u32::from_le_bytes(*b"UNP1");

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
    /// The payload is a note of [`NOTE`] bytes that stands for a message of `bytes` bytes.
    pub(crate) is_note: bool,
    pub(crate) tag: u64,
    /// The sender's number of the message; in `Credit` unused.
    pub(crate) id: u64,
    /// Bytes of the message; in `Credit` the bytes given back.
    pub(crate) bytes: u64,
}

impl Frame {
    /// Bytes that follow the header of a frame with a payload.
    pub(crate) fn payload(&self) -> usize {
        match self.is_note {
            true => NOTE,
            false => usize::try_from(self.bytes).unwrap_or(usize::MAX),
        }
    }

    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4] = self.kind as u8;
        out[5] = self.dtype;
        out[6] = u8::from(self.is_note);
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
            Some(kind) if u32_at(bytes, 0) == MAGIC && bytes[6] <= 1 => Ok(Self {
                kind,
                dtype: bytes[5],
                is_note: bytes[6] == 1,
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
