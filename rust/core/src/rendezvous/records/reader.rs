//! Numbers, texts and runs of bytes, as records have them.

use super::Refused;
use crate::error::ForeignText;

/// Appends `bytes` with its length. Lengths were checked when the introduction was.
pub(super) fn put(to: &mut Vec<u8>, bytes: &[u8]) {
    to.extend((bytes.len() as u16).to_le_bytes());
    to.extend(bytes);
}

/// The bytes that have not been parsed yet.
pub(super) struct Reader<'a> {
    pub(super) rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        Some(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn bytes(&mut self, most: usize) -> Option<&'a [u8]> {
        let length = usize::from(self.u16()?);
        if length > most {
            return None;
        }
        self.take(length)
    }

    pub(super) fn text(&mut self, most: usize) -> Option<String> {
        ForeignText::read(self.bytes(most)?).map(String::from)
    }

    /// Nothing may follow.
    pub(super) fn finish(self) -> Result<(), Refused> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(Refused::Malformed)
        }
    }
}
