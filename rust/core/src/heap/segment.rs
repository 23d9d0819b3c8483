//! One memfd of the heap, mapped by the process that owns it.
//!
//! It is sealed against changing its size, so that a peer that maps it cannot fault on it whatever its owner does. Memory is
//! committed page by page as it is touched.
//!
//! Peers may write to it: an all_reduce in one pass stores each sum to the buffers of all ranks. That is a right to a whole
//! segment; a peer that keeps the protocol uses only the parts that are shared with it. Memory that peers only read lies
//! elsewhere, in windows (`window.rs`), which the kernel keeps them from writing.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::fs::{self, FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::owners::CHUNK;
use super::places::Places;
use super::region::Region;

/// The seals that a segment must have.
pub(super) const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// A memfd, its mapping, and which of its bytes are free.
pub(super) struct Segment {
    pub(super) number: u32,
    pub(super) file: OwnedFd,
    pub(super) places: Places,
    /// The bytes from here on were never handed out, and are zero.
    pub(super) fresh: usize,
    /// Since when no block has been in it.
    pub(super) idle_since: Option<Instant>,
    region: Arc<Region>,
    /// Where in the region.
    at: usize,
    length: usize,
    strict: bool,
}

impl Segment {
    /// A segment of `length` bytes at offset `at` of `region`, whose chunks there are free. `strict`: the system
    /// counts memory before it is touched.
    pub(super) fn create(
        number: u32,
        region: &Arc<Region>,
        at: usize,
        length: usize,
        strict: bool,
    ) -> Result<Self, Errno> {
        let file = memory(length)?;
        seal(&file, SealFlags::empty())?;
        region.map(number, file.as_fd(), at, length)?;
        Ok(Self {
            number,
            file,
            places: Places::new(length),
            fresh: 0,
            idle_since: Some(Instant::now()),
            region: Arc::clone(region),
            at,
            length,
            strict,
        })
    }

    /// The length in bytes.
    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// The offsets in the region that belong to this segment until it is dropped.
    pub(super) fn chunks(&self) -> (usize, usize) {
        (self.at, self.length.next_multiple_of(CHUNK))
    }

    /// The address of a byte.
    pub(super) fn address(&self, offset: usize) -> std::ptr::NonNull<u8> {
        assert!(offset < self.length);
        self.region.address(self.at + offset)
    }

    /// Gives this process pages of its own for these bytes, which are whole pages: see [`Region::detach`].
    pub(super) fn detach(&self, bytes: Range<usize>) -> Result<(), Errno> {
        let (file, at) = (self.file.as_fd(), self.at + bytes.start);
        self.region
            .detach(file, bytes.start as u64, at, bytes.len())
    }

    /// Undoes [`Segment::detach`]: see [`Region::attach`].
    ///
    /// # Safety
    /// No block lies in these bytes.
    pub(super) unsafe fn attach(&self, bytes: Range<usize>) -> Result<(), Errno> {
        let (file, at) = (self.file.as_fd(), self.at + bytes.start);
        // SAFETY: as the caller promises.
        unsafe {
            self.region
                .attach(file, bytes.start as u64, at, bytes.len())
        }
    }

    /// Makes sure that there is memory for a block, where the system would otherwise notice only when it is touched,
    /// and then end the process. False when there is none.
    pub(super) fn commit(&self, offset: usize, bytes: usize) -> bool {
        // FALLOC_FL_KEEP_SIZE: growing is sealed off, even by nothing.
        let flags = FallocateFlags::KEEP_SIZE;
        !self.strict || fs::fallocate(&self.file, flags, offset as u64, bytes as u64).is_ok()
    }
}

/// With this seal only the owner's existing mapping can write to a segment; later mappings and `write` calls cannot.
pub(super) const READ_ONLY: SealFlags = SealFlags::FUTURE_WRITE;

/// Seals what [`memory`] made with `seals` against all further seals.
pub(super) fn seal(file: &OwnedFd, seals: SealFlags) -> Result<(), Errno> {
    fs::fcntl_add_seals(file, seals | SealFlags::SEAL)
}

/// A memfd of `length` bytes, all zero, which keeps that length. To be [sealed](seal).
pub(super) fn memory(length: usize) -> Result<OwnedFd, Errno> {
    // A file beyond this limit is not refused: the process gets a signal that ends it.
    if getrlimit(Resource::Fsize)
        .current
        .is_some_and(|limit| limit < length as u64)
    {
        return Err(Errno::FBIG);
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = fs::memfd_create("unisono heap", flags)?;
    fs::ftruncate(&file, length as u64)?;
    fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(file)
}

impl Drop for Segment {
    fn drop(&mut self) {
        // Gives the memory back at once, also where a peer has not yet let go of its mapping of it.
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punched = fs::fallocate(&self.file, flags, 0, self.length as u64);
        debug_assert!(punched.is_ok());
        // SAFETY: the heap drops a segment when no block is left in it.
        let unmapped = unsafe { self.region.unmap(self.at, self.length) };
        debug_assert!(unmapped.is_ok());
    }
}
