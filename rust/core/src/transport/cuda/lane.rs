//! A lane: the way by which messages of one rank reach another without the host, as they do in a graph.
//!
//! It is a part of the sender's [depot](super::depot), two halves that take turns. For each half there are two words in the
//! page of the link, [`Signal::Full`] and [`Signal::Empty`], as between the owner and a reader of a [window](super::window):
//! the sender's stream waits until a half is empty, fills it and says so, and the receiver's stream waits for that, empties it
//! and says so. The operations that set and await them are constant ([`flags`](super::flags) says why that is enough).
//!
//! The words, from word 128 of the page on and 16 apart: `[sender: lower, higher][half][full, empty]`.

use std::sync::atomic::Ordering;

use super::driver::{Device, MemoryOperation, Registered};
use super::flags::{ABORT, READY, Signal};
use crate::error::Result;
use crate::transport::Page;

const BEGIN: usize = 128;
const STRIDE: usize = 16;

/// One end of a lane.
#[derive(Debug)]
pub(crate) struct LaneWords {
    page: Page,
    registered: Registered,
    /// The lower rank of the link sends.
    lower_sends: bool,
    /// The signal that this end waits for.
    awaits: Signal,
}

impl LaneWords {
    /// Its end for the rank that sends, or receives, which makes both halves empty: once each.
    ///
    /// # Errors
    /// As [`Registered::page`].
    pub(crate) fn open(
        device: &'static Device,
        page: Page,
        lower_sends: bool,
        receives: bool,
    ) -> Result<Self> {
        let lane = Self {
            registered: Registered::page(device, &page)?,
            page,
            lower_sends,
            awaits: match receives {
                true => Signal::Full,
                false => Signal::Empty,
            },
        };
        if receives {
            for half in 0..2 {
                lane.store(Signal::Empty, half, READY);
            }
        }
        Ok(lane)
    }

    /// Waits until the other end has said that it is done with `half`, and clears that.
    pub(crate) fn wait(&self, half: usize) -> [MemoryOperation; 2] {
        let address = self.address(self.awaits, half);
        [
            MemoryOperation::WaitAny {
                address,
                mask: READY | ABORT,
            },
            MemoryOperation::Write { address, value: 0 },
        ]
    }

    /// Says that this end is done with `half`.
    pub(crate) fn tell(&self, half: usize) -> MemoryOperation {
        let told = match self.awaits {
            Signal::Full => Signal::Empty,
            Signal::Empty => Signal::Full,
        };
        MemoryOperation::Write {
            address: self.address(told, half),
            value: READY,
        }
    }

    /// Lets every wait of this end pass. To be called again until the stream has drained.
    pub(crate) fn release(&self) {
        for half in 0..2 {
            self.store(self.awaits, half, READY | ABORT);
        }
    }

    fn store(&self, signal: Signal, half: usize, value: u32) {
        self.page.words()[self.word(signal, half)].store(value, Ordering::Release);
    }

    fn word(&self, signal: Signal, half: usize) -> usize {
        assert!(half < 2);
        let sender = usize::from(!self.lower_sends);
        let signal = usize::from(signal == Signal::Empty);
        BEGIN + STRIDE * (4 * sender + 2 * half + signal)
    }

    fn address(&self, signal: Signal, half: usize) -> u64 {
        self.registered.address() + 4 * self.word(signal, half) as u64
    }
}
