//! The page of a link that the transport itself does not use.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use super::segment::Segment;

/// A page of memory that both ends of a link have mapped: page aligned, zero at first, theirs to agree upon. It stays
/// mapped while a clone of it lives, also when the link is gone.
#[derive(Clone)]
pub struct Page {
    words: NonNull<[AtomicU32; Page::WORDS]>,
    /// Keeps the mapping.
    _segment: Arc<Segment>,
}

// SAFETY: the pointer leads into a mapping that belongs to the process and that the `Arc` keeps; it is of atomic words.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// Its length in bytes.
    pub const BYTES: usize = 4096;
    /// Its length in words.
    pub const WORDS: usize = Self::BYTES / 4;

    /// # Safety
    /// `start` is the first byte of such a page of `segment`, and all processes access it by atomic words only.
    pub(super) unsafe fn new(segment: Arc<Segment>, start: NonNull<u8>) -> Self {
        Self {
            words: start.cast(),
            _segment: segment,
        }
    }

    /// Its words.
    pub fn words(&self) -> &[AtomicU32; Self::WORDS] {
        // SAFETY: a page of atomic words, by the promise made to `new`, mapped while `_segment` lives. Every bit pattern
        // is a value, and the peer may change it at any time.
        unsafe { self.words.as_ref() }
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Page({:?})", self.words)
    }
}
