//! The messages between the two ranks of a pair: requests to the target, answers from it.
//!
//! A request and its answer are messages of a fixed length, and so is every piece of the data but the last. The tags say
//! which is which, so requests need not wait for each other:
//!
//! ```text
//! tag 0         request: kind, 1 to 4 (8)  number (8)  region (16)  offset (8)  length (8), little-endian
//! tag 2 number  the data: to the target for a write (kind 1), from it for a read (kind 2)
//!               or where the initiator's bytes lie on a device, for a target that maps them to write (3) or read (4)
//! tag 2 number + 1  answer (8), after the data; without any where a read is refused
//! ```
//!
//! A target that does not map the initiator's bytes says so, and the initiator asks for the same with the data.

use crate::error::{Code, Error, Result};
use crate::types::Rank;

/// The rank whose memory is read and written, to which the other comes.
pub(super) const TARGET: Rank = 0;

/// The rank that asks for transfers.
pub(super) const INITIATOR: Rank = 1;

/// The tag of requests.
pub(super) const REQUESTS: u64 = 0;

/// The length of a request in bytes.
pub(super) const LENGTH: usize = 48;

/// The length of an answer in bytes.
pub(super) const ANSWER: usize = 8;

/// The most bytes of data in one message. A target that refuses a write must still take the data that is under way, so this
/// bounds the memory that it needs.
pub(super) const PIECE: usize = 64 << 20;

/// The most bytes that a target copies while it keeps other threads of its process from their streams.
const MAPPED_PIECE: usize = 16 << 20;

/// The name of a region, drawn at random.
pub(super) type RegionId = [u8; 16];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Write = 1,
    Read = 2,
}

/// A request of the initiator to the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) kind: Kind,
    /// The target copies the bytes on its device, where it maps those of the initiator. Else they travel.
    pub(super) is_mapped: bool,
    /// Counted by the initiator, from 1.
    pub(super) number: u64,
    pub(super) region: RegionId,
    pub(super) offset: u64,
    pub(super) length: u64,
}

impl Request {
    pub(super) fn to_bytes(self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        let kind = self.kind as u64 + 2 * u64::from(self.is_mapped);
        bytes[..8].copy_from_slice(&kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.number.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.region);
        bytes[32..40].copy_from_slice(&self.offset.to_le_bytes());
        bytes[40..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// Reads the request that a peer has sent.
    ///
    /// # Errors
    /// `Mismatch` for what no initiator sends.
    pub(super) fn from_bytes(bytes: &[u8; LENGTH]) -> Result<Self> {
        let number = |at: usize| {
            let bytes = bytes[at..at + 8].try_into().expect("eight bytes");
            u64::from_le_bytes(bytes)
        };
        let kind = match number(0) {
            1 | 3 => Kind::Write,
            2 | 4 => Kind::Read,
            _ => return Err(unknown()),
        };
        let request = Self {
            kind,
            is_mapped: number(0) > 2,
            number: number(8),
            region: bytes[16..32].try_into().expect("sixteen bytes"),
            offset: number(32),
            length: number(40),
        };
        // The tags are twice the number, and lengths are those of memory.
        let is_possible = (1..=u64::MAX / 4).contains(&request.number)
            && (1..=isize::MAX as u64).contains(&request.length);
        is_possible.then_some(request).ok_or_else(unknown)
    }

    pub(super) fn data_tag(&self) -> u64 {
        2 * self.number
    }

    pub(super) fn answer_tag(&self) -> u64 {
        2 * self.number + 1
    }

    /// The pieces in which the data travels, or is copied: offsets from its beginning, and lengths.
    pub(super) fn pieces(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let length = usize::try_from(self.length).expect("the length of memory");
        match self.is_mapped {
            true => pieces(length, MAPPED_PIECE),
            false => pieces(length, PIECE),
        }
    }
}

fn pieces(length: usize, piece: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..length)
        .step_by(piece)
        .map(move |offset| (offset, piece.min(length - offset)))
}

#[cold]
fn unknown() -> Error {
    Error::new(
        Code::Mismatch,
        "a request for a peer's memory that no initiator of this version sends",
    )
}

/// How the target has answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Done = 0,
    /// No such region is registered there, or no longer.
    NoRegion = 1,
    /// The range does not lie in the region.
    OutOfRange = 2,
    /// The target cannot map the initiator's bytes, which are to travel.
    NotMapped = 3,
    /// It cannot at this time.
    NotMappedNow = 4,
}

impl Answer {
    pub(super) fn to_bytes(self) -> [u8; ANSWER] {
        (self as u64).to_le_bytes()
    }

    /// Whether the target did not map the bytes, and whether it may do so later.
    pub(super) fn is_unmapped(bytes: [u8; ANSWER]) -> Option<bool> {
        match u64::from_le_bytes(bytes) {
            3 => Some(false),
            4 => Some(true),
            _ => None,
        }
    }

    /// The answer as the result of the request.
    ///
    /// # Errors
    /// `InvalidArgument` for what the target has refused, `Mismatch` for what no target answers.
    pub(super) fn result(bytes: [u8; ANSWER], request: &Request) -> Result<()> {
        let Request { offset, length, .. } = request;
        match u64::from_le_bytes(bytes) {
            0 => Ok(()),
            1 => Err(Error::invalid(
                "the peer has no such memory registered, or no longer: get its descriptor anew from the peer",
            )),
            2 => Err(Error::invalid(format!(
                "{length} bytes at offset {offset} do not lie in the peer's registered memory"
            ))),
            _ => Err(Error::new(
                Code::Mismatch,
                "an answer that no target of this version gives",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Request {
        Request {
            kind: Kind::Read,
            is_mapped: false,
            number: 7,
            region: [5; 16],
            offset: 4096,
            length: 100,
        }
    }

    #[test]
    fn a_request_is_read_as_it_was_written() {
        let bytes = example().to_bytes();
        let request = Request::from_bytes(&bytes).unwrap();
        assert_eq!((request.data_tag(), request.answer_tag()), (14, 15));
        assert_eq!(request.to_bytes(), bytes);
        let mapped = Request {
            is_mapped: true,
            ..example()
        };
        assert_eq!(Request::from_bytes(&mapped.to_bytes()).unwrap(), mapped);
        // Kind, number and length that none has.
        for (at, value) in [
            (0, 0_u64),
            (0, 5),
            (8, 0),
            (8, u64::MAX),
            (40, 0),
            (40, u64::MAX),
        ] {
            let mut wrong = bytes;
            wrong[at..at + 8].copy_from_slice(&value.to_le_bytes());
            assert_eq!(
                Request::from_bytes(&wrong).unwrap_err().code,
                Code::Mismatch
            );
        }
    }

    #[test]
    fn pieces_are_the_whole() {
        for length in [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5] {
            let mut end = 0;
            for (offset, bytes) in pieces(length, PIECE) {
                assert!(offset == end && bytes > 0 && bytes <= PIECE);
                end += bytes;
            }
            assert_eq!(end, length);
        }
    }
}
