//! Where the heap's segments are mapped: one range of addresses, reserved once.
//!
//! It is divided into chunks. A segment begins at a chunk, and a table ([`Owners`]) says which segment lies there, so that
//! an address is traced to its segment by a subtraction and two loads, without a lock. Reserved addresses cost nothing
//! but themselves: no memory, and no claim on any.

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use super::owners::{CHUNK, Owners};
use super::page::page;
use crate::fork::{InChild, map_shared, unshare};

/// The least that is worth reserving.
const FEWEST_CHUNKS: usize = 4;

/// A range of addresses of this process.
pub(super) struct Region {
    base: NonNull<u8>,
    owners: Owners,
}

// SAFETY: the addresses belong to the process, not to a thread; everything else is atomic.
unsafe impl Send for Region {}
// SAFETY: as above. Mapping and unmapping take `&self`, and their callers own the range that they name.
unsafe impl Sync for Region {}

impl Region {
    /// Reserves `bytes`, or as many as the kernel grants where addresses are limited.
    pub(super) fn reserve(bytes: usize) -> Result<Self, Errno> {
        let mut chunks = bytes.div_ceil(CHUNK).max(FEWEST_CHUNKS);
        loop {
            // A chunk more than is used leaves room to begin at a multiple of the chunk.
            let length = (chunks + 1).checked_mul(CHUNK).ok_or(Errno::NOMEM)?;
            match map_nothing(ptr::null_mut(), length, MapFlags::empty()) {
                Ok(start) => return Ok(Self::over(start, length)),
                Err(errno) if chunks <= FEWEST_CHUNKS => return Err(errno),
                Err(_) => chunks = (chunks / 2).max(FEWEST_CHUNKS),
            }
        }
    }

    /// The chunks in the reservation of `length` bytes from `start`; what is before and after them is given back.
    fn over(start: *mut u8, length: usize) -> Self {
        let chunks = length / CHUNK - 1;
        let skipped = start.addr().next_multiple_of(CHUNK) - start.addr();
        let rest = CHUNK - skipped;
        let base = start.wrapping_add(skipped);
        // SAFETY: both are parts of the reservation just made, outside the chunks, and nothing is mapped there.
        let result =
            unsafe { unmap(start, skipped).and(unmap(base.wrapping_add(chunks * CHUNK), rest)) };
        debug_assert!(result.is_ok());
        Self {
            base: NonNull::new(base).expect("the kernel does not map address zero unasked"),
            owners: Owners::new(chunks),
        }
    }

    /// The number of addresses.
    pub(super) fn length(&self) -> usize {
        self.owners.chunks() * CHUNK
    }

    /// Whether `address` is in it.
    pub(super) fn contains(&self, address: usize) -> bool {
        address.wrapping_sub(self.base.addr().get()) < self.length()
    }

    /// The segment in which all of `address..address + bytes` lies, and where.
    #[inline]
    pub(super) fn locate(&self, address: usize, bytes: usize) -> Option<(u32, usize)> {
        let at = address.wrapping_sub(self.base.addr().get());
        self.owners.locate(at, bytes)
    }

    /// The address of offset `at`.
    pub(super) fn address(&self, at: usize) -> NonNull<u8> {
        assert!(at < self.length());
        // SAFETY: inside the reservation.
        unsafe { self.base.add(at) }
    }

    /// Maps `file`, `length` bytes long, to read and write at offset `at`, as segment `number` (not 0).
    ///
    /// The range is the caller's own: chunks that hold no segment.
    pub(super) fn map(
        &self,
        number: u32,
        file: BorrowedFd<'_>,
        at: usize,
        length: usize,
    ) -> Result<(), Errno> {
        assert!(number != 0 && at.is_multiple_of(CHUNK) && length <= self.length() - at);
        let chunks = at / CHUNK..(at + length).div_ceil(CHUNK);
        assert!(!self.owners.any_in(chunks.clone()));
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let place = self.address(at).as_ptr().cast();
        map_shared(length, InChild::copy_of(file, 0), || {
            // SAFETY: it replaces a part of our own reservation, in which nothing is mapped: no segment (asserted above).
            unsafe { mm::mmap(place, length, access, flags, file, 0) }
        })?;
        // SAFETY: a hint about the mapping just made: fewer and larger pages where the system has them for shared memory.
        let _ = unsafe { mm::madvise(place, length, Advice::LinuxHugepage) };
        self.owners.enter(number, chunks, length);
        Ok(())
    }

    /// Gives this process pages of its own, with the same contents, for `length` bytes (whole pages) at offset `at`, where
    /// `file` is mapped from `start` on. Later writes of peers to the file are not seen there any more.
    ///
    /// Other threads may go on using the bytes meanwhile.
    pub(super) fn detach(
        &self,
        file: BorrowedFd<'_>,
        start: u64,
        at: usize,
        length: usize,
    ) -> Result<(), Errno> {
        assert!(at.is_multiple_of(page()) && length <= self.length() - at);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        let place = self.address(at).as_ptr();
        unshare(place.cast(), length, || {
            // SAFETY: a mapping of the same bytes of the same file takes the place of the one that is there, in one step: a
            // read by another thread finds the same bytes, and a write goes to the one mapping or the other.
            unsafe { mm::mmap(place.cast(), length, access, flags, file, start) }.map(drop)
        })?;
        for page in (0..length).step_by(page()) {
            // SAFETY: within what has just been mapped. Other threads may be using the byte in whatever way; it is
            // replaced by itself, or another thread has just written it.
            let byte = unsafe { AtomicU8::from_ptr(place.add(page)) };
            // With the first write the page is copied. An exchange is one, where it would be left out if it were an
            // addition of nothing.
            let held = byte.load(Ordering::Relaxed);
            let _ = byte.compare_exchange(held, held, Ordering::AcqRel, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Undoes [`Region::detach`]: the bytes are the file's again, and what was written to the pages meanwhile is gone.
    ///
    /// # Safety
    /// The memory is in no block: this process does not use it.
    pub(super) unsafe fn attach(
        &self,
        file: BorrowedFd<'_>,
        start: u64,
        at: usize,
        length: usize,
    ) -> Result<(), Errno> {
        assert!(at.is_multiple_of(page()) && length <= self.length() - at);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let place = self.address(at).as_ptr();
        map_shared(length, InChild::copy_of(file, start), || {
            // SAFETY: a mapping of the same bytes of the same file takes the place of the one that is there, whose contents
            // are not needed, as the caller promises.
            unsafe { mm::mmap(place.cast(), length, access, flags, file, start) }
        })
        .map(drop)
    }

    /// Undoes [`Region::map`]: the addresses are reserved as before.
    ///
    /// # Safety
    /// The memory is no longer used.
    pub(super) unsafe fn unmap(&self, at: usize, length: usize) -> Result<(), Errno> {
        self.owners
            .strike(at / CHUNK..(at + length).div_ceil(CHUNK));
        let place = self.address(at).as_ptr();
        unshare(place.cast(), length, || {
            map_nothing(place, length, MapFlags::FIXED).map(drop)
        })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the reservation that `over` kept, whole; nothing in it is used when it is dropped.
        let result = unsafe { unmap(self.base.as_ptr(), self.length()) };
        debug_assert!(result.is_ok());
    }
}

/// Reserves `length` addresses, at `place` if the flags say `FIXED`.
fn map_nothing(place: *mut u8, length: usize, flags: MapFlags) -> Result<*mut u8, Errno> {
    let flags = flags | MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: without `FIXED` a fresh mapping touches no existing memory. With it, it replaces a segment of this
    // region that is no longer used, as `Region::unmap`'s caller promises.
    let mapped = unsafe { mm::mmap_anonymous(place.cast(), length, ProtFlags::empty(), flags) }?;
    Ok(mapped.cast())
}

/// # Safety
/// The range is mapped and not used.
unsafe fn unmap(start: *mut u8, length: usize) -> Result<(), Errno> {
    match length {
        0 => Ok(()),
        // SAFETY: as the caller promises.
        _ => unsafe { mm::munmap(start.cast(), length) },
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::fs;

    use super::*;

    fn file(bytes: usize) -> std::os::fd::OwnedFd {
        let file = fs::memfd_create("unisono test", fs::MemfdFlags::CLOEXEC).unwrap();
        fs::ftruncate(&file, bytes as u64).unwrap();
        file
    }

    #[test]
    fn what_is_detached_keeps_its_contents_to_itself() {
        let pages = page();
        let region = Region::reserve(4 * CHUNK).unwrap();
        let file = file(4 * pages);
        region.map(3, file.as_fd(), 0, 4 * pages).unwrap();
        let byte = |page: usize| {
            // SAFETY: mapped above and in use by this thread alone.
            unsafe { AtomicU8::from_ptr(region.address(page * pages + 7).as_ptr()) }
        };
        (0..4).for_each(|page| byte(page).store(page as u8 + 1, Ordering::Relaxed));
        region
            .detach(file.as_fd(), pages as u64, pages, 2 * pages)
            .unwrap();
        let file = std::fs::File::from(file);
        for page in 0..4 {
            use std::os::unix::fs::FileExt;

            assert_eq!(byte(page).load(Ordering::Relaxed), page as u8 + 1);
            file.write_all_at(&[99], (page * pages) as u64 + 7).unwrap();
        }
        let seen: Vec<u8> = (0..4)
            .map(|page| byte(page).load(Ordering::Relaxed))
            .collect();
        assert_eq!(seen, [99, 2, 3, 99]);
        // SAFETY: this thread alone uses it, as numbers.
        unsafe { region.attach(file.as_fd(), pages as u64, pages, pages) }.unwrap();
        assert_eq!(byte(1).load(Ordering::Relaxed), 99);
        assert_eq!(byte(2).load(Ordering::Relaxed), 3);
    }

    #[test]
    fn an_address_is_traced_to_the_segment_that_holds_all_of_it() {
        let region = Region::reserve(8 * CHUNK).unwrap();
        assert_eq!(region.length(), 8 * CHUNK);
        let base = region.address(0).addr().get();
        assert_eq!(base % CHUNK, 0);
        assert_eq!(region.locate(base, 1), None);
        let (small, large) = (file(8192), file(CHUNK + 4096));
        region.map(7, small.as_fd(), 0, 8192).unwrap();
        region.map(9, large.as_fd(), CHUNK, CHUNK + 4096).unwrap();
        assert_eq!(region.locate(base, 8192), Some((7, 0)));
        assert_eq!(region.locate(base + 100, 8092), Some((7, 100)));
        assert_eq!(region.locate(base + 100, 8093), None);
        assert_eq!(region.locate(base + 8192, 1), None);
        assert_eq!(region.locate(base + CHUNK - 1, 1), None);
        let far = base + 2 * CHUNK;
        assert_eq!(region.locate(far, 4096), Some((9, CHUNK)));
        assert_eq!(region.locate(far, 4097), None);
        assert_eq!(region.locate(far, usize::MAX), None);
        assert_eq!(region.locate(base + 8 * CHUNK, 1), None);
        assert_eq!(region.locate(base - 1, 1), None);
        // SAFETY: nothing refers to it.
        unsafe { region.unmap(CHUNK, CHUNK + 4096) }.unwrap();
        assert_eq!(region.locate(far, 1), None);
        assert_eq!(region.locate(base, 1), Some((7, 0)));
    }
}
