//! Memory that an operation owns while it runs: private, or in the heap where peers read it.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use crate::buffer::Memory;

/// Memory that an operation owns while it runs: uninitialised, aligned to a cache line.
#[derive(Debug)]
pub(crate) struct Scratch {
    start: NonNull<u8>,
    bytes: usize,
    /// It lies in the heap that peers on the host can read.
    shared: bool,
}

// SAFETY: `Scratch` owns its allocation, as a `Vec<u8>` would.
unsafe impl Send for Scratch {}

impl Scratch {
    const ALIGNMENT: usize = 64;

    /// At least `bytes` bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        let layout = Self::layout(bytes);
        // SAFETY: the layout's size is not zero (see `layout`).
        let start = NonNull::new(unsafe { alloc(layout) });
        match start {
            Some(start) => Self {
                start,
                bytes: layout.size(),
                shared: false,
            },
            None => handle_alloc_error(layout),
        }
    }

    /// At least `bytes` bytes in the shared heap, if there is room.
    pub(crate) fn shared(bytes: usize) -> Option<Self> {
        let block = super::allocate(bytes, Self::ALIGNMENT)?;
        Some(Self {
            start: block.address,
            bytes: block.bytes,
            shared: true,
        })
    }

    /// The length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// A view of the first `bytes` bytes. It is used only while `self` lives (the executor keeps both together), and
    /// what is read through it was written before (`plan::check` proves that of every plan).
    pub(crate) fn view(&self, bytes: usize) -> Memory {
        assert!(bytes <= self.bytes);
        // SAFETY: the allocation is valid for as long as `self` lives.
        unsafe { Memory::from_raw_parts(self.start.as_ptr(), bytes) }
    }

    fn layout(bytes: usize) -> Layout {
        let bytes = bytes.max(1).next_multiple_of(Self::ALIGNMENT);
        Layout::from_size_align(bytes, Self::ALIGNMENT).expect("a size below isize::MAX")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.shared {
            // SAFETY: `start` came from the heap, and an operation that used it has ended or revoked what it lent.
            unsafe { super::free(self.start) };
            return;
        }
        // SAFETY: `start` came from `alloc` with this layout: `bytes` is already a multiple of the alignment.
        unsafe { dealloc(self.start.as_ptr(), Self::layout(self.bytes)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_is_aligned_and_large_enough() {
        let scratch = Scratch::new(100);
        assert!(scratch.len() >= 100);
        let view = scratch.view(100);
        assert_eq!(view.place(0, 1).0 % 64, 0);
    }
}
