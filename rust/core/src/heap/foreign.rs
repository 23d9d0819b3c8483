//! Memory that another process may write at any time, whatever it has promised.
//!
//! # Why slices may be made of it
//!
//! By the protocol of links and plans the other process leaves bytes alone while a slice over them lives here: it has
//! published, lent or shared them, and is told only afterwards that they were read. Such memory goes to proven members of
//! the job alone, but a member may break the protocol. Then this process sees other numbers than were sent. Nothing else
//! can come of it, because what is read there is copied or reduced, for which every pattern of bits is valid, and is never
//! used as a length, an address or a condition. Words that are such (indices, semaphores) are atomics, and are checked.

use std::ptr::NonNull;

/// Bytes that another process may write too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Foreign {
    start: NonNull<u8>,
    bytes: usize,
}

impl Foreign {
    /// `bytes` bytes from `start` on.
    ///
    /// # Safety
    /// They are mapped, and a read of them cannot fault, for as long as a slice of them is used.
    #[inline]
    pub(crate) const unsafe fn new(start: NonNull<u8>, bytes: usize) -> Self {
        Self { start, bytes }
    }

    /// The bytes, to be used as numbers: see the [module](self).
    ///
    /// # Safety
    /// The protocol keeps the other process from writing them while the slice lives, and nothing in this one does.
    #[inline]
    pub(crate) unsafe fn numbers<'a>(self) -> &'a [u8] {
        // SAFETY: mapped, as the caller of `new` promised; for the rest see the module.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// The same, to write.
    ///
    /// # Safety
    /// The protocol keeps the other process from reading and writing them while the slice lives, which is the only one
    /// of this process.
    #[inline]
    pub(crate) unsafe fn numbers_mut<'a>(self) -> &'a mut [u8] {
        // SAFETY: as in `numbers`.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}
