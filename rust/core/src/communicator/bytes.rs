//! The bytes of a message that a communicator sends for itself.

use std::cell::UnsafeCell;
use std::sync::Arc;

use crate::buffer::Memory;

/// The bytes of a message under way, which the engine reads or writes until its operation has ended.
pub(super) struct Bytes(UnsafeCell<Vec<u8>>);

// SAFETY: the engine alone touches the bytes until the operation that they were given to has ended; then its completion has
// them, and nothing else does.
unsafe impl Sync for Bytes {}

impl Bytes {
    /// The bytes, and a view for an operation whose completion keeps them.
    pub(super) fn lend(mut bytes: Vec<u8>) -> (Arc<Self>, Memory) {
        let (start, length) = (bytes.as_mut_ptr(), bytes.len());
        // SAFETY: the completion of the operation keeps them until it has ended, and nothing else has them.
        let memory = unsafe { Memory::from_raw_parts(start, length) };
        (Arc::new(Self(UnsafeCell::new(bytes))), memory)
    }

    /// A copy.
    ///
    /// # Safety
    /// The operation that they were lent to has ended.
    pub(super) unsafe fn read(&self) -> Vec<u8> {
        // SAFETY: the engine has let go of them.
        unsafe { (&*self.0.get()).clone() }
    }
}
