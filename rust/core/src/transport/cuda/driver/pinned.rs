//! Host memory of unisono's own that devices use: slots of staged operations, and words.
//!
//! It is mapped shared even where no other process is to see it. The driver pins the pages; were they private, a `fork`
//! (a data loader's, say) could leave the device with the old page of one that the process then gets a copy of.

use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use rustix::mm::{self, MapFlags, ProtFlags};

use super::{Device, Registered};
use crate::buffer::Memory;
use crate::error::{Error, Result};
use crate::heap;

const PAGE: usize = 4096;

/// Registered host memory: the host reads and writes it, streams of the device copy from and to it, and write and await
/// its words. Whole pages, zero at first.
pub struct Pinned {
    registered: Registered,
    shared: bool,
}

/// Where it lies; freed on drop, which is after it has been unregistered.
struct Block {
    start: NonNull<u8>,
    bytes: usize,
    /// It lies in the heap that peers on the host can read.
    shared: bool,
}

// SAFETY: it owns its memory, as a `Vec<u8>` would, and gives no access.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Pinned {
    /// At least `bytes` bytes, in the heap that peers on the host read in place, if there is room.
    ///
    /// # Errors
    /// `System` when there is no such memory, or the driver cannot register it.
    pub fn shared(device: &'static Device, bytes: usize) -> Result<Self> {
        let bytes = pages(bytes)?;
        // The block has its pages for itself: it begins at one and is as long as some.
        let Some(block) = heap::allocate_zeroed(bytes, PAGE) else {
            return Self::private(device, bytes);
        };
        Self::of(
            device,
            Block {
                start: block.address,
                bytes,
                shared: true,
            },
        )
    }

    /// At least `bytes` bytes that no other process sees.
    ///
    /// # Errors
    /// As [`Pinned::shared`].
    pub fn private(device: &'static Device, bytes: usize) -> Result<Self> {
        let bytes = pages(bytes)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let mapped =
            unsafe { mm::mmap_anonymous(ptr::null_mut(), bytes, access, MapFlags::SHARED) };
        let start = mapped
            .map_err(|errno| Error::system(format_args!("map {bytes} bytes"), errno))
            .map(|start| NonNull::new(start.cast()))?
            .ok_or_else(|| Error::internal("memory was mapped at address zero"))?;
        Self::of(
            device,
            Block {
                start,
                bytes,
                shared: false,
            },
        )
    }

    fn of(device: &'static Device, block: Block) -> Result<Self> {
        let (start, bytes, shared) = (block.start, block.bytes, block.shared);
        // SAFETY: whole pages, which stay while the block lives.
        let registered = unsafe { Registered::pages(device, start, bytes, Arc::new(block))? };
        Ok(Self { registered, shared })
    }

    /// The first byte, as the device knows it; the others follow.
    pub fn address(&self) -> u64 {
        self.registered.address()
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.registered.bytes()
    }

    /// Whether peers on the host can read it in place.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// A view of `bytes` bytes from `offset` on, for an operation of the engine. It does not keep the memory: whoever uses
    /// it keeps `self` until the operation has ended, and sees to it that neither the host nor a stream writes what
    /// another one uses, as for every [`Memory`].
    pub fn view(&self, offset: usize, bytes: usize) -> Memory {
        assert!(bytes <= self.bytes() && offset <= self.bytes() - bytes);
        // SAFETY: the bytes are inside the allocation; that it is used by one at a time is the order of the
        // operation, which the caller keeps (see above).
        unsafe { Memory::from_raw_parts(self.registered.start().add(offset).as_ptr(), bytes) }
    }

    /// The word at `offset`, a multiple of 4. The device knows it as [`Pinned::address`] plus `offset`. A word that is
    /// used so is not part of a [`Pinned::view`] that is in use.
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.bytes());
        // SAFETY: inside the allocation, which lives as long as `self`, and aligned; host and device access it as a
        // word.
        unsafe { self.registered.start().add(offset).cast().as_ref() }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({} bytes, shared: {})", self.bytes(), self.shared)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.shared {
            // SAFETY: it came from the heap, and whoever used it held the `Pinned`.
            unsafe { heap::free(self.start) };
            return;
        }
        // SAFETY: this is a mapping that was made for the block, whole; whoever used it held the `Pinned`.
        let result = unsafe { mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(result.is_ok());
    }
}

fn pages(bytes: usize) -> Result<usize> {
    bytes
        .max(1)
        .checked_next_multiple_of(PAGE)
        .ok_or_else(|| Error::invalid(format!("{bytes} bytes are more than there can be")))
}
