//! The header in front of every message, and what it proves.
//!
//! A message on the collective lane is a [`Fingerprint`] and its payload. The receiver knows from its own plan what
//! must come next, so every field of the fingerprint is compared before a byte of the payload is looked at.

use crate::error::{Code, Error};
use crate::transport::{MESSAGE_HEADER, POSITION_BYTES, Position};
use crate::types::{Collective, DataType, Rank, ReduceOp};

use crate::engine::members::Members;

/// Bytes of a header.
pub(crate) const HEADER: usize = MESSAGE_HEADER;

const MAGIC: u32 = u32::from_le_bytes(*b"UNI1");

/// Fields that may differ, as errors name them.
const COUNT: &str = "count";
const LENGTH: &str = "message length";

/// The description of a message and its operation. Both sides compute it; a difference is an error on both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    /// The operation's number in the group.
    pub(crate) sequence: u64,
    pub(crate) collective: u8,
    pub(crate) dtype: u8,
    /// 0 when nothing is reduced.
    pub(crate) op: u8,
    pub(crate) algorithm: u8,
    pub(crate) root: u32,
    /// Elements of the operation where all ranks know them, else 0.
    pub(crate) count: u64,
    /// Of the counts per rank, where all ranks know them: a [`digest`], else 0.
    pub(crate) counts: u32,
    /// Bytes of this message's payload.
    pub(crate) length: u64,
}

impl Fingerprint {
    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4] = self.collective;
        out[5] = self.dtype;
        out[6] = self.op;
        out[7] = self.algorithm;
        out[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        out[16..24].copy_from_slice(&self.count.to_le_bytes());
        out[24..32].copy_from_slice(&self.length.to_le_bytes());
        out[32..36].copy_from_slice(&self.root.to_le_bytes());
        out[36..40].copy_from_slice(&self.counts.to_le_bytes());
        out
    }

    /// Puts another number into an encoded fingerprint.
    #[inline]
    pub(crate) fn write_sequence(encoded: &mut [u8; HEADER], sequence: u64) {
        encoded[8..16].copy_from_slice(&sequence.to_le_bytes());
    }

    /// Puts another length into an encoded fingerprint.
    #[inline]
    pub(crate) fn write_length(encoded: &mut [u8; HEADER], length: usize) {
        encoded[24..32].copy_from_slice(&(length as u64).to_le_bytes());
    }

    /// Whether two encoded fingerprints are the same, without a call of `memcmp`: every message is checked so.
    #[inline]
    pub(crate) fn is_same(a: &[u8; HEADER], b: &[u8; HEADER]) -> bool {
        const { assert!(HEADER >= 32 && HEADER <= 40) };
        let differs = |at| u64_at(a, at) ^ u64_at(b, at);
        // The last two words share bytes.
        differs(0) | differs(8) | differs(16) | differs(24) | differs(HEADER - 8) == 0
    }

    /// The fingerprint in `bytes`; `None` when it does not begin as one.
    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        if u32_at(bytes, 0) != MAGIC {
            return None;
        }
        Some(Self {
            collective: bytes[4],
            dtype: bytes[5],
            op: bytes[6],
            algorithm: bytes[7],
            sequence: u64_at(bytes, 8),
            count: u64_at(bytes, 16),
            length: u64_at(bytes, 24),
            root: u32_at(bytes, 32),
            counts: u32_at(bytes, 36),
        })
    }

    /// Whether it is of an operation in which two ranks alone know what goes from one to the other.
    pub(crate) fn is_between_pairs(&self) -> bool {
        let collective = Collective::from_number(self.collective);
        self.count == 0 && collective.is_some_and(Collective::is_between_pairs)
    }

    /// The root of a collective that has one.
    pub(crate) fn root_of_one(&self) -> Option<Rank> {
        let collective = Collective::from_number(self.collective);
        let has_root = collective.is_some_and(Collective::has_root);
        has_root.then_some(self.root as Rank)
    }

    /// `all_reduce #5`.
    pub(crate) fn name(&self) -> String {
        let name = Collective::from_number(self.collective).map_or("unknown", Collective::name);
        format!("{name} #{}", self.sequence)
    }

    /// The operation in words: `all_reduce #5 (float32, 1024 elements, sum)`.
    /// A count of zero is named only where it is the `field` that differs.
    fn describe(&self, field: &str) -> String {
        let name = Collective::from_number(self.collective).map_or("unknown", Collective::name);
        let mut parts = Vec::new();
        if let Some(dtype) = DataType::from_number(self.dtype)
            && self.collective != Collective::Barrier as u8
        {
            parts.push(dtype.name().to_owned());
        }
        if self.count > 0 || field == COUNT {
            parts.push(format!("{} elements", self.count));
        }
        if self.op > 0 {
            parts.push(ReduceOp::name_of(self.op).to_owned());
        }
        if let Some(root) = self.root_of_one() {
            parts.push(format!("root {root}"));
        }
        if field == LENGTH {
            parts.push(format!("message of {}", self.describe_length()));
        }
        if parts.is_empty() {
            return format!("{name} #{}", self.sequence);
        }
        format!("{name} #{} ({})", self.sequence, parts.join(", "))
    }

    /// `3 elements, 12 bytes`. A reduction may send elements of a wider type; there it is bytes alone.
    fn describe_length(&self) -> String {
        let bytes = self.length;
        let size = DataType::from_number(self.dtype).map_or(0, DataType::size) as u64;
        match size {
            1.. if self.op == 0 && bytes.is_multiple_of(size) => {
                format!("{} elements, {bytes} bytes", bytes / size)
            }
            _ => format!("{bytes} bytes"),
        }
    }

    /// The error of a receiver `rank` that expected `self` and got `theirs` from `peer`, two of these `members`.
    pub(crate) fn mismatch(
        &self,
        theirs: &Self,
        (rank, peer): (Rank, Rank),
        members: &Members,
    ) -> Error {
        // Messages come in the order of their operations.
        if theirs.sequence < self.sequence && theirs.is_between_pairs() {
            return theirs
                .one_sided((peer, theirs.length), (rank, 0), members)
                .with_peer(peer);
        }
        if theirs.sequence > self.sequence && self.is_between_pairs() {
            return self
                .one_sided((peer, 0), (rank, self.length), members)
                .with_peer(peer);
        }
        let field = if self.sequence != theirs.sequence {
            "operation number"
        } else if self.collective != theirs.collective {
            "operation"
        } else if self.dtype != theirs.dtype {
            "dtype"
        } else if self.op != theirs.op {
            "operator"
        } else if self.root != theirs.root {
            "root"
        } else if self.count != theirs.count {
            COUNT
        } else if self.counts != theirs.counts && self.length == theirs.length {
            "distribution of the counts over the ranks"
        } else if self.counts == theirs.counts && self.algorithm != theirs.algorithm {
            "algorithm"
        } else {
            LENGTH
        };
        Error::new(
            Code::Mismatch,
            format!(
                "the {field} differs: {} called {} but {} called {}; every rank must call the same operations in the same \
                 order with matching arguments",
                members.name(rank),
                self.describe(field),
                members.name(peer),
                theirs.describe(field)
            ),
        )
        .with_field(field)
        .with_peer(peer)
    }

    /// The error where one of two ranks has nothing for the other: `sender` sends `sent` bytes, and `receiver` expects
    /// `expected`.
    pub(crate) fn one_sided(
        &self,
        (sender, sent): (Rank, u64),
        (receiver, expected): (Rank, u64),
        members: &Members,
    ) -> Error {
        let dtype = DataType::from_number(self.dtype).map_or("unknown", DataType::name);
        let amount = |length| Self { length, ..*self }.describe_length();
        Error::new(
            Code::Mismatch,
            format!(
                "the {LENGTH} differs: in {} ({dtype}) {} sends {} to {}, which expects {}; the counts that two ranks give \
                 for what goes between them must be the same",
                self.name(),
                members.name(sender),
                amount(sent),
                members.name(receiver),
                amount(expected)
            ),
        )
        .with_field(LENGTH)
    }
}

/// A number that differs where two lists of counts do, but for one pair in four thousand million.
pub(crate) fn digest(counts: &[usize]) -> u32 {
    // FNV-1a over whole numbers, whose upper half depends on all of them.
    let mixed = counts
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, count| {
            (hash ^ *count as u64).wrapping_mul(0x0000_0100_0000_01b3)
        });
    (mixed ^ mixed >> 32) as u32
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// The position that a rank tells a peer for which it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    /// The operation it is in.
    pub(crate) fingerprint: Fingerprint,
    /// Bytes that it expects next from the peer, none of them received yet.
    pub(crate) expects: u64,
    /// Bytes that it has for the peer next.
    pub(crate) sends: u64,
}

impl Told {
    pub(crate) fn encode(&self) -> Position {
        let mut out = [0; POSITION_BYTES];
        out[..HEADER].copy_from_slice(&self.fingerprint.encode());
        out[HEADER..HEADER + 8].copy_from_slice(&self.expects.to_le_bytes());
        out[HEADER + 8..].copy_from_slice(&self.sends.to_le_bytes());
        out
    }

    /// Decodes `position`; `None` when it does not begin as a fingerprint.
    pub(crate) fn decode(position: &Position) -> Option<Self> {
        Some(Self {
            fingerprint: Fingerprint::decode(position.first_chunk()?)?,
            expects: u64_at(position, HEADER),
            sends: u64_at(position, HEADER + 8),
        })
    }
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Fingerprint {
        Fingerprint {
            sequence: 5,
            collective: Collective::AllReduce as u8,
            dtype: DataType::Float32 as u8,
            op: ReduceOp::Sum.number(),
            algorithm: 1,
            root: 0,
            count: 1024,
            counts: 7,
            length: 4096,
        }
    }

    #[test]
    fn survives_the_wire() {
        assert_eq!(Fingerprint::decode(&sample().encode()), Some(sample()));
        let mut bytes = sample().encode();
        bytes[0] ^= 1;
        assert_eq!(Fingerprint::decode(&bytes), None);
    }

    /// Where only two ranks know their counts, a message that comes too early or too late is one that the other side does
    /// not know of.
    #[test]
    fn the_number_of_another_operation_shows_what_one_side_alone_has() {
        let exchange = |sequence, length| Fingerprint {
            sequence,
            collective: Collective::AllToAll as u8,
            op: 0,
            count: 0,
            counts: 0,
            length,
            ..sample()
        };
        let barrier = |sequence| Fingerprint {
            sequence,
            collective: Collective::Barrier as u8,
            length: 0,
            ..sample()
        };
        let members = Members::numbered(0..4);
        let late = barrier(9).mismatch(&exchange(8, 12), (0, 3), &members);
        let early = exchange(8, 12).mismatch(&barrier(9), (3, 0), &members);
        let (zero, three) = (members.name(0), members.name(3));
        let parts = [
            format!(
                "in all_to_all #8 (float32) {three} sends 3 elements, 12 bytes to {zero}, which expects 0 elements, 0 bytes"
            ),
            format!(
                "in all_to_all #8 (float32) {zero} sends 0 elements, 0 bytes to {three}, which expects 3 elements, 12 bytes"
            ),
        ];
        for ((error, part), peer) in [late, early].iter().zip(parts).zip([3, 0]) {
            assert_eq!((error.code, error.peer), (Code::Mismatch, Some(peer)));
            assert!(error.message.contains(&part), "{error}");
        }
        // All ranks know the counts of a reduction.
        let error = sample().mismatch(&barrier(9), (0, 3), &members);
        assert!(error.message.contains("operation number"), "{error}");
    }

    #[test]
    fn a_difference_names_both_ranks_and_the_field() {
        let theirs = Fingerprint {
            dtype: DataType::Float64 as u8,
            ..sample()
        };
        // Numbered otherwise in the whole job.
        let members = Members::numbered([0, 2, 4, 6]);
        let error = sample().mismatch(&theirs, (0, 3), &members);
        assert_eq!(error.code, Code::Mismatch);
        assert_eq!(error.peer, Some(3));
        for part in [
            "dtype",
            "rank 0 (host h0, pid 100)",
            "rank 3 (global rank 6, host h6, pid 106)",
            "float32",
            "float64",
            "all_reduce #5",
        ] {
            assert!(
                error.message.contains(part),
                "{part} is missing in: {}",
                error.message
            );
        }
    }
}
