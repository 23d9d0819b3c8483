//! A region as its peers know it.

use super::request::RegionId;
use crate::error::{Error, Result};

/// The name of a port, drawn at random.
pub(super) type PortId = [u8; 16];

const MAGIC: &[u8; 8] = b"unisomem";

/// The layout below, of memory of the host and of a device.
const KINDS: [u64; 2] = [1, 2];

/// Registered memory of a peer, or a part of it. Who has it may read and write that memory through a
/// [`Port`](super::Port) that is connected to the peer's.
///
/// It travels as [`BYTES`](Self::BYTES) bytes:
///
/// ```text
/// magic "unisomem" (8)  1, or 2 for memory of a device (8)  port (16)  region (16)  offset (8)  length (8), little-endian
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RemoteRegion {
    pub(super) port: PortId,
    pub(super) region: RegionId,
    pub(super) is_on_device: bool,
    pub(super) offset: u64,
    pub(super) length: u64,
}

impl RemoteRegion {
    /// Its length where it travels, in bytes.
    pub const BYTES: usize = 64;

    /// To be given to the peer that may use the memory.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..16].copy_from_slice(&KINDS[usize::from(self.is_on_device)].to_le_bytes());
        bytes[16..32].copy_from_slice(&self.port);
        bytes[32..48].copy_from_slice(&self.region);
        bytes[48..56].copy_from_slice(&self.offset.to_le_bytes());
        bytes[56..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// Reads the region that a peer has given away as `bytes`.
    ///
    /// # Errors
    /// `InvalidArgument` for what is none.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let Ok(bytes) = <&[u8; Self::BYTES]>::try_from(bytes) else {
            return Err(Error::invalid(format!(
                "{} bytes do not describe a peer's memory: {} do",
                bytes.len(),
                Self::BYTES
            )));
        };
        let number = |at: usize| {
            let bytes = bytes[at..at + 8].try_into().expect("eight bytes");
            u64::from_le_bytes(bytes)
        };
        let id = |at: usize| bytes[at..at + 16].try_into().expect("sixteen bytes");
        if bytes[..8] != *MAGIC
            || !KINDS.contains(&number(8))
            || number(48).checked_add(number(56)).is_none()
        {
            return Err(Error::invalid(
                "these bytes describe no memory of a peer, or were made by another version of unisono",
            ));
        }
        Ok(Self {
            port: id(16),
            region: id(32),
            is_on_device: number(8) == KINDS[1],
            offset: number(48),
            length: number(56),
        })
    }

    /// How many bytes it has.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Whether it has none: an empty part.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Whether it lies on a device of its process.
    pub fn is_on_device(&self) -> bool {
        self.is_on_device
    }

    /// `length` bytes of it, from `offset` on.
    ///
    /// # Errors
    /// `InvalidArgument` when they do not lie in it.
    pub fn part(&self, offset: u64, length: u64) -> Result<Self> {
        match offset.checked_add(length) {
            Some(end) if end <= self.length => Ok(Self {
                offset: self.offset + offset,
                length,
                ..*self
            }),
            _ => Err(Error::invalid(format!(
                "{length} bytes at offset {offset} do not lie in the peer's {} bytes",
                self.length
            ))),
        }
    }
}

impl std::fmt::Debug for RemoteRegion {
    /// Without what gives access.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RemoteRegion({} bytes)", self.length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_read_as_it_was_written_and_nothing_else_is() {
        let whole = RemoteRegion {
            port: [1; 16],
            region: [2; 16],
            is_on_device: true,
            offset: 0,
            length: 100,
        };
        let part = whole.part(40, 60).unwrap().part(10, 50).unwrap();
        assert_eq!((part.offset, part.len()), (50, 50));
        assert_eq!(RemoteRegion::from_bytes(&part.to_bytes()).unwrap(), part);
        assert!(part.part(1, 50).is_err() && part.part(u64::MAX, 1).is_err());
        assert!(RemoteRegion::from_bytes(&part.to_bytes()[1..]).is_err());
        for at in [0, 8, 55, 63] {
            let mut wrong = RemoteRegion {
                offset: u64::MAX - 50,
                ..part
            }
            .to_bytes();
            wrong[at] ^= 0x80;
            let read = RemoteRegion::from_bytes(&wrong);
            // An offset and a length that overflow, a magic and a version of something else.
            assert_eq!(read.is_ok(), at == 55, "byte {at}");
        }
    }
}
