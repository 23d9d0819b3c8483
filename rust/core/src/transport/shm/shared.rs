//! Memory of a peer that this side may read and write, until it gives it back.

use std::fmt;

use super::loans::Writer;
use super::segment::BoardMemory;
use crate::heap::Held;

/// A span of a peer's heap that the peer shares ([`Neighbour::try_share`](crate::transport::Neighbour::try_share)). It is to be
/// dropped before it is given back.
pub struct SharedSpan {
    held: Held,
    writer: Writer<BoardMemory>,
}

impl SharedSpan {
    pub(super) fn new(held: Held, writer: Writer<BoardMemory>) -> Self {
        Self { held, writer }
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> usize {
        self.held.len()
    }

    /// Whether this side can write it at all: a peer that shares other memory lies.
    pub(crate) fn is_writable(&self) -> bool {
        self.held.is_writable()
    }

    /// The memory, where the peer leaves it for good.
    pub(crate) fn into_held(self) -> Held {
        self.held
    }

    /// `bytes` of it from `at` on.
    ///
    /// # Panics
    /// If there are fewer bytes.
    #[inline]
    pub fn read(&self, at: usize, bytes: usize) -> &[u8] {
        // SAFETY: the peer shares the span and leaves it alone until it is given back, which is after this is dropped;
        // this side writes it through an exclusive borrow of this alone (`write`). Should the peer write all the same,
        // or have revoked it, other numbers are seen; they are used as numbers only.
        unsafe { self.held.read(at, bytes) }
    }

    /// Begins to write. False when the peer has taken back what it shared. Every `begin` that is true is followed by
    /// [`SharedSpan::end`] soon: the peer may be waiting for it.
    #[inline]
    pub fn begin(&mut self) -> bool {
        self.writer.raise()
    }

    /// Ends writing.
    #[inline]
    pub fn end(&mut self) {
        self.writer.lower();
    }

    /// `bytes` of it from `at` on, to write.
    ///
    /// # Panics
    /// If there are fewer bytes, or not between [`SharedSpan::begin`] and [`SharedSpan::end`].
    #[inline]
    pub fn write(&mut self, at: usize, bytes: usize) -> &mut [u8] {
        assert!(
            self.writer.is_raised(),
            "shared memory is written unannounced"
        );
        // SAFETY: as in `read`; and a peer that takes the span back waits until the flag is lowered before it uses it.
        unsafe { self.held.write(at, bytes) }
    }
}

impl fmt::Debug for SharedSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedSpan({:?})", self.held)
    }
}
