//! Memory that an operation owns while it runs: private, or in the heap where peers read it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use crate::buffer::Memory;
use crate::error::{Error, Result};

/// Memory that an operation owns while it runs, aligned to a cache line.
#[derive(Debug)]
pub(crate) struct Scratch {
    start: NonNull<u8>,
    /// All of it.
    memory: Memory,
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
        // Zeroed, so that every byte may be read: what is large comes so from the system, at no cost.
        // SAFETY: the layout's size is not zero (see `layout`).
        let start = NonNull::new(unsafe { alloc_zeroed(layout) });
        match start {
            // SAFETY: `alloc_zeroed` gave as many bytes, to this value alone.
            Some(start) => unsafe { Self::of(start, layout.size(), false) },
            None => handle_alloc_error(layout),
        }
    }

    /// At least `bytes` bytes in the shared heap, if there is room.
    pub(crate) fn shared(bytes: usize) -> Option<Self> {
        let block = super::allocate(bytes, Self::ALIGNMENT)?;
        // SAFETY: the heap gave as many bytes of a mapped file, which are never uninitialised, to this value alone. Peers
        // that they are lent to read them, which the writer waits for.
        Some(unsafe { Self::of(block.address, block.bytes, true) })
    }

    /// At least `bytes` bytes, in the shared heap if there is room.
    ///
    /// # Errors
    /// `System` where there is no such memory.
    pub(crate) fn for_message(bytes: usize) -> Result<Self> {
        if let Some(shared) = Self::shared(bytes) {
            return Ok(shared);
        }
        let layout = Self::layout(bytes);
        // SAFETY: as in `new`.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) });
        let start = start.ok_or_else(|| {
            Error::system(
                format_args!("allocate {bytes} bytes"),
                rustix::io::Errno::NOMEM,
            )
        })?;
        // SAFETY: as in `new`.
        Ok(unsafe { Self::of(start, layout.size(), false) })
    }

    /// # Safety
    /// The bytes are initialised, nothing else has to do with them, and they are given back when the value is dropped.
    unsafe fn of(start: NonNull<u8>, bytes: usize, shared: bool) -> Self {
        Self {
            start,
            // SAFETY: they live as long as `Self`, which owns the view: no safe code can move it out.
            memory: unsafe { Memory::from_raw_parts(start.as_ptr(), bytes) },
            shared,
        }
    }

    /// The length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    /// All of it, to read.
    #[inline]
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Bytes from `offset` on, at most `max` and at most to the end.
    #[inline]
    pub(crate) fn write(&mut self, offset: usize, max: usize) -> &mut [u8] {
        self.memory.write(offset, max)
    }

    /// See [`Memory::read_and_write`].
    pub(crate) fn read_and_write(
        &mut self,
        places: (usize, usize),
        max: usize,
    ) -> (&[u8], &mut [u8]) {
        self.memory.read_and_write(places, max)
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
        // SAFETY: `start` came from `alloc_zeroed` with this layout: its length is already a multiple of the alignment.
        unsafe { dealloc(self.start.as_ptr(), Self::layout(self.len())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_is_aligned_and_large_enough() {
        let scratch = Scratch::new(100);
        assert!(scratch.len() >= 100);
        assert_eq!(scratch.memory().place(0, 1).0 % 64, 0);
    }
}
