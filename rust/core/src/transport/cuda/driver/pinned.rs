//! Host memory of unisono's own that devices use: slots of staged operations, buffers of messages, and words. It comes from
//! slabs that are registered in advance and kept ([`pool`](super::pool)).
//!
//! It is mapped shared even where no other process is to see it. The driver pins the pages; were they private, a `fork`
//! (a data loader's, say) could leave the device with the old page of one that the process then gets a copy of.

use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use rustix::mm::{self, MapFlags, ProtFlags};

use super::pool::{SlabKind, SlabPart};
use super::{Device, Registered};
use crate::buffer::Memory;
use crate::error::{Error, Result};
use crate::fork::{InChild, map_shared, unshare};
use crate::heap;

/// Registered host memory: the host reads and writes it, streams of the device copy from and to it, and write and await
/// its words. It begins at a multiple of 4096 and is as long as one.
///
/// Dropping it calls nothing of the driver as long as anything of this kind is in use in the process. It is
/// not used again until then, unless its owner knows that no stream will touch it any more ([`Pinned::give_back`]).
pub struct Pinned {
    part: SlabPart,
}

/// Pages that are registered together.
pub(super) struct Slab {
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

impl Slab {
    pub(super) fn bytes(&self) -> usize {
        self.registered.bytes()
    }
}

/// Registers at least `bytes` bytes, for which the driver may wait until the context is idle.
///
/// # Errors
/// As [`Pinned::shared`].
pub(super) fn make_slab(device: &'static Device, kind: SlabKind, bytes: usize) -> Result<Slab> {
    let page = crate::heap::page();
    let bytes = bytes
        .checked_next_multiple_of(page)
        .ok_or_else(|| Error::invalid(format!("{bytes} bytes are more than there can be")))?;
    // A block of the heap has its pages for itself: it begins at one and is as long as some.
    let shared = match kind {
        SlabKind::Shared => heap::allocate_zeroed(bytes, page),
        SlabKind::Private => None,
    };
    let block = match shared {
        Some(block) => Block {
            start: block.address,
            bytes,
            shared: true,
        },
        None => Block::map(bytes)?,
    };
    let (start, bytes, shared) = (block.start, block.bytes, block.shared);
    // SAFETY: whole pages, which stay while the block lives.
    let registered = unsafe { Registered::pages(device, start, bytes, Arc::new(block))? };
    Ok(Slab { registered, shared })
}

impl Block {
    fn map(bytes: usize) -> Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let mapped = map_shared(bytes, InChild::Zeros, || {
            // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
            unsafe { mm::mmap_anonymous(ptr::null_mut(), bytes, access, MapFlags::SHARED) }
        });
        let start = mapped
            .map_err(|errno| Error::system(format_args!("map {bytes} bytes"), errno))
            .map(|start| NonNull::new(start.cast()))?
            .ok_or_else(|| Error::internal("memory was mapped at address zero"))?;
        Ok(Self {
            start,
            bytes,
            shared: false,
        })
    }
}

impl Pinned {
    /// At least `bytes` bytes, in the heap that peers on the host read in place, if there is room. Their contents are
    /// unspecified at first.
    ///
    /// # Errors
    /// `System` when there is no such memory, or the driver cannot register it.
    pub fn shared(device: &'static Device, bytes: usize) -> Result<Self> {
        let part = SlabPart::take(device, SlabKind::Shared, bytes)?;
        Ok(Self { part })
    }

    /// As [`Pinned::shared`], of what has been registered before: calls nothing of the driver. `None` where that is too little.
    pub(crate) fn shared_at_once(device: &'static Device, bytes: usize) -> Option<Self> {
        let part = SlabPart::of_what_is_there(device, SlabKind::Shared, bytes)?;
        Some(Self { part })
    }

    /// The most bytes that [`Pinned::shared_at_once`] has now.
    pub(crate) fn most_at_once(device: &Device) -> usize {
        SlabPart::longest(device, SlabKind::Shared)
    }

    /// At least `bytes` bytes that no other process sees, zero at first.
    ///
    /// # Errors
    /// As [`Pinned::shared`].
    pub fn private(device: &'static Device, bytes: usize) -> Result<Self> {
        let part = SlabPart::take(device, SlabKind::Private, bytes)?;
        let pinned = Self { part };
        // SAFETY: these bytes of the slab are this part's alone, and no stream writes there: a part is handed out again
        // only when its last owner has said so.
        unsafe { ptr::write_bytes(pinned.start().as_ptr(), 0, pinned.bytes()) };
        Ok(pinned)
    }

    /// Has memory of both kinds ready, so that the next few that are wanted need no call of the driver. To be called
    /// while nothing that waits for a peer is in a stream, by a caller that has some of it and keeps it.
    ///
    /// # Errors
    /// As [`Pinned::shared`].
    pub fn stock(device: &'static Device) -> Result<()> {
        Self::private(device, 1)?.give_back();
        Self::shared(device, 1)?.give_back();
        Ok(())
    }

    /// Lets others have it: no stream will touch it any more.
    pub fn give_back(mut self) {
        self.part.set_clean();
    }

    fn start(&self) -> NonNull<u8> {
        // SAFETY: the part lies in its slab.
        unsafe {
            self.part
                .slab()
                .registered
                .start()
                .add(self.part.range.start)
        }
    }

    /// The first byte, as the device knows it; the others follow.
    pub fn address(&self) -> u64 {
        self.part.slab().registered.address() + self.part.range.start as u64
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.part.range.len()
    }

    /// Whether peers on the host can read it in place.
    pub fn is_shared(&self) -> bool {
        self.part.slab().shared
    }

    /// A view of `bytes` bytes from `offset` on, for an operation of the engine.
    ///
    /// # Safety
    /// Until the operation has ended, `self` lives, and neither the host nor a stream writes to the bytes; nor do they read
    /// them, where it writes.
    pub unsafe fn view(&self, offset: usize, bytes: usize) -> Memory {
        assert!(bytes <= self.bytes() && offset <= self.bytes() - bytes);
        // SAFETY: the bytes are inside the allocation, and the caller promises the rest.
        unsafe { Memory::from_raw_parts(self.start().add(offset).as_ptr(), bytes) }
    }

    /// Fills `bytes` bytes from `offset` on with the 8 bytes of `pattern`, again and again. `offset` and `bytes` are multiples
    /// of 8.
    ///
    /// # Safety
    /// No operation of the host and no stream needs what is there.
    pub unsafe fn fill(&self, offset: usize, bytes: usize, pattern: u64) {
        assert!(bytes <= self.bytes() && offset <= self.bytes() - bytes);
        assert!((offset | bytes).is_multiple_of(8));
        // SAFETY: inside the allocation, which begins at a page.
        let start: *mut u64 = unsafe { self.start().add(offset).cast().as_ptr() };
        for at in 0..bytes / 8 {
            // SAFETY: as above; the caller promises that nothing depends on what is overwritten.
            unsafe { start.add(at).write(pattern) };
        }
    }

    /// The word at `offset`, a multiple of 4. The device knows it as [`Pinned::address`] plus `offset`. A word that is
    /// used so is not part of a [`Pinned::view`] that is in use.
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.bytes());
        // SAFETY: inside the allocation, which lives as long as `self`, and aligned; host and device access it as a
        // word.
        unsafe { self.start().add(offset).cast().as_ref() }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Pinned({} bytes, shared: {})",
            self.bytes(),
            self.is_shared()
        )
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.shared {
            // SAFETY: it came from the heap, and all code that used it held the `Pinned`.
            unsafe { heap::free(self.start) };
            return;
        }
        let start = self.start.as_ptr().cast();
        let result = unshare(start, self.bytes, || {
            // SAFETY: this is a mapping that was made for the block, whole; all code that used it held the `Pinned`.
            unsafe { mm::munmap(start, self.bytes) }
        });
        debug_assert!(result.is_ok());
    }
}
