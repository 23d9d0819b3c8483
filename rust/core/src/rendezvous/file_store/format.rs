//! The bytes of the file. A header names the process that made it; one record for each set follows:
//!
//! ```text
//! header:  magic (8)  id (16)  length of creator (4)  creator  check (4)
//! record:  magic (4)  key length (4)  value length (4)  check (4)  key  value  check (8)
//! ```
//!
//! An incomplete record at the end was left by a process that died while it wrote. The check in a record's head tells this
//! case from a damaged length, which is an error like all other damage: nothing is guessed.

use sha2::{Digest, Sha256};

use crate::rendezvous::store::{MAX_KEY, MAX_VALUE};

const FILE_MAGIC: &[u8; 8] = b"unisono1";
pub(in crate::rendezvous) const RECORD_MAGIC: &[u8; 4] = b"rec\n";
/// Magic, id and the creator's length.
pub(super) const HEADER_FIXED: usize = 8 + 16 + 4;
/// The longest creator that is believed.
pub(super) const MAX_CREATOR: usize = 1024;
/// Magic, two lengths, check.
pub(super) const RECORD_HEAD: usize = 16;
pub(super) const RECORD_CHECK: usize = 8;

/// The outcome of parsing a prefix of something.
pub(super) enum Parsed<T> {
    Complete(T),
    Incomplete,
    Damaged,
}

/// The head of the file.
pub(in crate::rendezvous) struct Header {
    pub(super) id: [u8; 16],
    pub(super) creator: String,
    pub(super) len: usize,
}

impl Header {
    pub(in crate::rendezvous) fn write(id: &[u8; 16], creator: &str) -> Vec<u8> {
        let mut bytes = FILE_MAGIC.to_vec();
        bytes.extend(id);
        bytes.extend((creator.len() as u32).to_le_bytes());
        bytes.extend(creator.as_bytes());
        let check = digest(&[&bytes]);
        bytes.extend(&check[..4]);
        bytes
    }

    pub(super) fn parse(bytes: &[u8]) -> Parsed<Self> {
        let magic = &bytes[..bytes.len().min(FILE_MAGIC.len())];
        if !FILE_MAGIC.starts_with(magic) {
            return Parsed::Damaged;
        }
        let Some(fixed) = bytes.get(..HEADER_FIXED) else {
            return Parsed::Incomplete;
        };
        let length = u32_at(fixed, 24) as usize;
        if length > MAX_CREATOR {
            return Parsed::Damaged;
        }
        let end = HEADER_FIXED + length;
        let (Some(content), Some(check)) = (bytes.get(..end), bytes.get(end..end + 4)) else {
            return Parsed::Incomplete;
        };
        let Ok(creator) = std::str::from_utf8(&content[HEADER_FIXED..]) else {
            return Parsed::Damaged;
        };
        if check != &digest(&[content])[..4] {
            return Parsed::Damaged;
        }
        let mut id = [0; 16];
        id.copy_from_slice(&fixed[8..24]);
        Parsed::Complete(Self {
            id,
            creator: creator.to_owned(),
            len: end + 4,
        })
    }
}

pub(in crate::rendezvous) fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let mut bytes = RECORD_MAGIC.to_vec();
    bytes.extend((key.len() as u32).to_le_bytes());
    bytes.extend((value.len() as u32).to_le_bytes());
    let check = digest(&[&bytes]);
    bytes.extend(&check[..4]);
    bytes.extend(key.as_bytes());
    bytes.extend(value);
    let check = digest(&[&bytes]);
    bytes.extend(&check[..RECORD_CHECK]);
    bytes
}

/// The lengths of key and value from a record's head.
pub(super) fn record_lengths(head: &[u8]) -> Parsed<(usize, usize)> {
    let magic = &head[..head.len().min(RECORD_MAGIC.len())];
    if !RECORD_MAGIC.starts_with(magic) {
        return Parsed::Damaged;
    }
    if head.len() < RECORD_HEAD {
        return Parsed::Incomplete;
    }
    let (key, value) = (u32_at(head, 4) as usize, u32_at(head, 8) as usize);
    if head[12..16] != digest(&[&head[..12]])[..4] || key > MAX_KEY || value > MAX_VALUE {
        return Parsed::Damaged;
    }
    Parsed::Complete((key, value))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut four = [0; 4];
    four.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(four)
}

pub(in crate::rendezvous) fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part);
    }
    hash.finalize().into()
}
