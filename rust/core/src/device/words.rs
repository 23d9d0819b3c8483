//! Words by which a stream tells the host how far it has come, and the host tells the stream.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Result;
use crate::fork::Home;
use crate::transport::cuda::driver::{Device, Pinned};
use crate::types::Rank;

use super::disposal::dispose;

/// The most ranks of a host that meet on devices: kernels take a bit for each in a word, and the page of words has two lanes
/// for each.
pub(super) const MOST_RANKS: usize = 64;

/// A word of a group's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// The number of the last operation that the stream has got past. Streams alone write it, and wait for it.
    Done,
    /// The number of the operation that the stream has come to, of those that go the staged way.
    Begun,
    /// The step of its plan at which a stream that carries out a graph waits.
    Step,
    /// The number of the last chunk that the stream has put into its slot.
    Filled,
    /// The number of the last chunk that the host is done with.
    Finished,
    /// Not 0 once the group has failed: kernels look at it before they read what a peer has written. The host alone writes it.
    Dead,
    /// The number under which the collective was captured that the stream is carrying out as part of a graph, 0 when it is
    /// in none. The stream alone writes it.
    Replayed,
}

/// The value that a stream that carries out a graph writes into [`Word::Step`] when it waits no more.
pub(super) const PASSED: u32 = u32::MAX;

/// An operation's number as [`Word::Replayed`] has it.
pub(super) fn replayed(number: u64) -> u32 {
    (number as u32).max(1)
}

/// The words of a group: numbers that grow, modulo 2^32.
#[derive(Debug)]
pub(super) struct Words {
    /// Always there, until it is dropped.
    pinned: Option<Pinned>,
    is_clean: AtomicBool,
    home: Home,
}

impl Words {
    pub(super) fn new(device: &'static Device) -> Result<Self> {
        let pinned = Pinned::private(device, 4096)?;
        Ok(Self {
            pinned: Some(pinned),
            is_clean: AtomicBool::new(false),
            home: Home::here(),
        })
    }

    /// No stream will touch them any more.
    pub(super) fn set_clean(&self) {
        self.is_clean.store(true, Ordering::Relaxed);
    }

    fn pinned(&self) -> &Pinned {
        self.pinned.as_ref().expect("it goes when it is dropped")
    }

    /// As the device knows it.
    pub(super) fn address(&self, word: Word) -> u64 {
        self.pinned().address() + offset(word) as u64
    }

    /// A word that is not 0 while a stream that carries out a graph waits in a lane to or from a rank: it says for which piece.
    /// The stream alone writes it.
    pub(super) fn lane_address(&self, peer: Rank, receives: bool) -> u64 {
        self.pinned().address() + lane_offset(peer, receives) as u64
    }

    pub(super) fn lane(&self, peer: Rank, receives: bool) -> u32 {
        let word = self.pinned().word(lane_offset(peer, receives));
        word.load(Ordering::Acquire)
    }

    pub(super) fn load(&self, word: Word) -> u32 {
        self.pinned().word(offset(word)).load(Ordering::Acquire)
    }

    pub(super) fn store(&self, word: Word, value: u32) {
        self.pinned()
            .word(offset(word))
            .store(value, Ordering::Release);
    }

    /// Whether the word has come to `number`.
    pub(super) fn has_passed(&self, word: Word, number: u64) -> bool {
        is_at_least(self.load(word), number as u32)
    }
}

impl Drop for Words {
    /// The attendant may be the last to know of a group, and must not wait for the device.
    fn drop(&mut self) {
        if !self.home.is_here() {
            // A forked child has no thread for it, and the memory is its parent's.
            std::mem::forget(self.pinned.take());
            return;
        }
        if let Some(pinned) = self.pinned.take() {
            let is_clean = *self.is_clean.get_mut();
            dispose(move || match is_clean {
                true => pinned.give_back(),
                false => drop(pinned),
            });
        }
    }
}

/// Whether `value` is `number` or later, in the cyclic order.
pub(super) fn is_at_least(value: u32, number: u32) -> bool {
    value.wrapping_sub(number).cast_signed() >= 0
}

/// For [`MOST_RANKS`], after the others.
fn lane_offset(peer: Rank, receives: bool) -> usize {
    assert!(peer < MOST_RANKS);
    1024 + 16 * (2 * peer + usize::from(receives))
}

/// Each on cache lines of its own: the stream and the host write them at the same time.
fn offset(word: Word) -> usize {
    128 * word as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_go_round() {
        assert!(is_at_least(5, 5) && is_at_least(6, 5) && !is_at_least(4, 5));
        assert!(is_at_least(2, u32::MAX) && !is_at_least(u32::MAX, 2));
    }
}
