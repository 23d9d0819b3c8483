//! How a rank tells a peer of memory that the peer may map: one [`Record`] after the other, in a page that both have.
//!
//! ```text
//!   0       the number of the record, from 1 on; the owner writes it after
//!   1..35   the record
//!  40       the number of the last record that the reader has looked at; it writes it after
//!  41       whether it has mapped that
//! ```

use std::sync::atomic::{AtomicU32, Ordering};

use super::window::{RECORD, Record};

/// The words that it takes.
pub(super) const TOLD_WORDS: usize = 48;

const RECORD_WORDS: usize = RECORD / 4;
const ANSWER: usize = 40;

const _: () = assert!(RECORD.is_multiple_of(4) && RECORD_WORDS < ANSWER);

/// A reader's answer to a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Which one, from 1 on; 0 for none yet.
    pub number: u32,
    /// It has mapped the memory.
    pub is_mapped: bool,
}

/// The words by which one rank tells another, as either sees them.
#[derive(Clone, Copy, Debug)]
pub struct Telling<'a>(pub(super) &'a [AtomicU32]);

impl Telling<'_> {
    /// Tells of memory by a record with a number: the next one, once the last has been answered to.
    pub fn tell(&self, number: u32, record: &Record) {
        for (word, bytes) in self.0[1..].iter().zip(record.encode().chunks_exact(4)) {
            let value = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
            word.store(value, Ordering::Relaxed);
        }
        self.0[0].store(number, Ordering::Release);
    }

    /// The number of the last record, 0 for none.
    pub fn number(&self) -> u32 {
        self.0[0].load(Ordering::Acquire)
    }

    /// The last record, and its number.
    pub fn told(&self) -> Option<(u32, Record)> {
        let number = self.number();
        if number == 0 {
            return None;
        }
        let mut bytes = [0; RECORD];
        for (bytes, word) in bytes.chunks_exact_mut(4).zip(&self.0[1..]) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        Some((number, Record::decode(&bytes)))
    }

    /// Answers to the last record.
    pub fn answer(&self, answer: Told) {
        self.0[ANSWER + 1].store(u32::from(answer.is_mapped), Ordering::Relaxed);
        self.0[ANSWER].store(answer.number, Ordering::Release);
    }

    /// The last answer.
    pub fn answered(&self) -> Told {
        let number = self.0[ANSWER].load(Ordering::Acquire);
        Told {
            number,
            is_mapped: self.0[ANSWER + 1].load(Ordering::Relaxed) == 1,
        }
    }
}
