//! Notes: what the host carries in the place of a long message, which lies in its sender's [depot](super::depots) or follows.

use crate::engine::NOTE;

/// Bytes of the shortest message that is worth a note.
pub(super) const NOTED_FROM: usize = 2 << 20;

/// Tags from here on are for what follows notes; the tags of users are less.
pub(super) const FIRST_INTERNAL_TAG: u64 = 1 << 62;
const FOLLOWS: u64 = FIRST_INTERNAL_TAG;
const FETCHED: u64 = FIRST_INTERNAL_TAG | 1 << 61;

/// The note that travels in the place of a long message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Note {
    /// Its number, of those that its sender sends in the group.
    pub(super) number: u64,
    /// Where it lies in the sender's depot; `None` where it follows.
    pub(super) offset: Option<u64>,
}

impl Note {
    pub(super) fn encode(&self) -> [u8; NOTE] {
        let mut out = [0; NOTE];
        out[..8].copy_from_slice(&self.number.to_le_bytes());
        out[8] = u8::from(self.offset.is_some());
        out[16..24].copy_from_slice(&self.offset.unwrap_or(0).to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8; NOTE]) -> Self {
        let part =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        Self {
            number: part(0),
            offset: (bytes[8] == 1).then(|| part(16)),
        }
    }

    /// The tag of the message that follows it.
    pub(super) fn tag(&self) -> u64 {
        FOLLOWS | self.number
    }

    /// The tag of the note by which its receiver says that it has fetched it.
    pub(super) fn tag_of_end(&self) -> u64 {
        FETCHED | self.number
    }
}

#[cfg(test)]
mod tests {
    use super::Note;

    #[test]
    fn a_note_travels() {
        for offset in [None, Some(0), Some(u64::MAX)] {
            let note = Note { number: 77, offset };
            assert_eq!(Note::decode(&note.encode()), note);
        }
    }
}
