//! The shared heap, for torch's tensors.

use std::ptr::{self, NonNull};

use unisono::fence::guard;
use unisono::heap;

/// Whether there can be memory in the heap.
pub(crate) fn heap_enabled() -> bool {
    guard(|| Ok(heap::statistics().limit > 0)).unwrap_or(false)
}

/// A block of at least `bytes` bytes at a multiple of 64; null when there is no room.
pub(crate) fn heap_allocate(bytes: usize) -> *mut u8 {
    let block = guard(|| Ok(heap::allocate(bytes, 64)));
    let block = block.ok().flatten();
    block.map_or(ptr::null_mut(), |block| block.address.as_ptr())
}

/// Frees a block. False when there is none at `address`.
///
/// # Safety
/// As for [`heap::free`].
pub(crate) unsafe fn heap_free(address: *mut u8) -> bool {
    // SAFETY: as the caller promises.
    let free = |address| unsafe { heap::free(address) };
    // After a defect the block is leaked: to torch's allocator it would be a foreign one.
    NonNull::new(address).is_some_and(|address| guard(|| Ok(free(address))).unwrap_or(true))
}

/// The usage of the process's heap, beside a group's own figures.
pub(crate) fn usage() -> impl Iterator<Item = (&'static str, u64)> {
    let heap = heap::statistics();
    [
        ("heap_bytes", heap.in_use),
        ("heap_peak_bytes", heap.peak),
        ("heap_reserved_bytes", heap.reserved),
        ("heap_limit_bytes", heap.limit),
    ]
    .map(|(name, amount)| (name, amount as u64))
    .into_iter()
}
