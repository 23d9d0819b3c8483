//! The shared heap: memory that peers on this host work on in place.
//!
//! A process has one heap. It hands out blocks from memfd segments ([`allocate`], [`Buffer`]), and tells for any
//! address whether it lies in one ([`locate`]). A link between two processes of a host passes the segments' descriptors
//! to the peer, which maps them ([`PeerHeap`]): a collective then folds from the memory of the peer that wrote
//! it, without a copy in between, and may store sums to it. Memory from here is otherwise like any other: it may be
//! passed to every operation, and operations take every other memory.
//!
//! The heap is bounded by the setting `heap_bytes`. When it is full, or the kernel refuses, there is simply no block,
//! and the caller takes private memory; that is logged once. Memory is committed as it is touched.
//!
//! A forked child begins with an empty heap of its own. The blocks of its parent are at the same addresses, in memory of the
//! child's own: only the child sees what it writes there. Pages that it has not written show what the parent, or a peer, writes
//! there later (see `fork::memory` for why). A block that the child frees stays as it is.

mod arena;
mod blocks;
mod buffer;
pub(crate) mod foreign;
mod limit;
mod owners;
mod page;
mod peer;
mod places;
mod region;
mod scratch;
mod segment;
#[cfg(test)]
mod tests;
mod window;

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use self::arena::Arena;
pub use self::arena::{Place, Statistics};
pub use self::blocks::Block;
pub use self::blocks::IsOver;
pub use self::buffer::Buffer;
pub use self::page::page;
pub use self::peer::{Held, Identity, PeerHeap};
pub(crate) use self::scratch::Scratch;
pub use self::window::{Layout, PeerWindow, Window};

use crate::config::Config;
use crate::fork::{Home, PerProcess};

/// The heap of this process.
static HEAP: PerProcess<Arena> = PerProcess::new(|| {
    let heap = Arena::new();
    // The limit that the program has given its heap holds for a forked child, too.
    if let Some(bytes) = HEAP.inherited().next().and_then(Arena::limit_if_known) {
        heap.set_limit(bytes);
    }
    heap
});

/// A block of at least `bytes` bytes at a multiple of `align` (a power of two up to 64 MiB; 64 and more is had in any case, a
/// page for 64 KiB and more). `None` when the heap is full or turned off (`heap_bytes` is 0). The content of the block is
/// unspecified, but initialised; [`Block::used`] says how much of it is not zero already.
pub fn allocate(bytes: usize, align: usize) -> Option<Block> {
    HEAP.allocate(bytes, align)
}

/// As [`allocate`], and every byte is zero. Memory that was never used is not touched.
pub fn allocate_zeroed(bytes: usize, align: usize) -> Option<Block> {
    let block = allocate(bytes, align)?;
    // SAFETY: the block was just made and belongs to no other code.
    unsafe { block.address.write_bytes(0, block.used) };
    Some(block)
}

/// Frees the block that begins at `address`. False, and nothing else, when there is none. A block that this process has from
/// the one that it was forked from stays as it is.
///
/// # Safety
/// The block is no longer used, in this process or by an operation that is under way.
pub unsafe fn free(address: NonNull<u8>) -> bool {
    let is_inherited = || {
        let mut before = HEAP.inherited();
        before.any(|heap| heap.contains(address.as_ptr()))
    };
    // SAFETY: as the caller promises.
    let was_own = unsafe { HEAP.free(address) };
    was_own || is_inherited()
}

/// Takes `address..address + bytes` away from a peer that may be writing to it: it stays as it is, in memory of this
/// process's own. It is not located any more, and its block, when it is freed, is not handed out again before it `is_over`.
pub(crate) fn detach(address: usize, bytes: usize, is_over: IsOver) {
    HEAP.detach(address, bytes, is_over);
}

/// Where `address..address + bytes` lies, for peers. `None` when it is not, as a whole, in a segment of the heap. For
/// memory that the caller has a right to use the answer stays true until that is freed.
///
/// A subtraction and a few loads; no lock, unless memory was ever taken away from a peer that had stopped.
#[inline]
pub fn locate(address: *const u8, bytes: usize) -> Option<Place> {
    HEAP.locate(address, bytes)
}

/// The descriptor of a segment, to be passed to a peer. `None` when there is no such segment any more, or no
/// descriptor left.
pub fn segment_file(segment: u32) -> Option<OwnedFd> {
    HEAP.segment_file(segment).or_else(|| window::file(segment))
}

/// Whether segment `segment` has not been given back. A number stands for the same segment for ever.
pub fn is_live(segment: u32) -> bool {
    HEAP.is_live(segment) || window::is_open(segment)
}

/// How many segments have been given back so far. While this stays the same, so does every answer of [`is_live`] that
/// was true; it costs one load.
#[inline]
pub fn retired() -> u64 {
    arena::retired()
}

/// The usage of the heap.
pub fn statistics() -> Statistics {
    HEAP.statistics()
}

/// Bounds the heap to `bytes` from here on; 0 turns it off. It keeps the memory that it has already.
pub fn set_limit(bytes: usize) {
    HEAP.set_limit(bytes);
}

/// Gives segments without a block back to the system now rather than later.
pub fn trim() {
    HEAP.trim();
}

/// Bounds the heap as `config` says, if it does: the last group to be made decides for the process.
pub(crate) fn configure(config: &Config) {
    if let Some(bytes) = config.heap_bytes {
        set_limit(bytes.0);
    }
}

/// Held by each link whose peer may map segments. While there is none, empty segments are not kept.
#[derive(Debug)]
pub(crate) struct Sharing(Home);

impl Sharing {
    pub(crate) fn begin() -> Self {
        HEAP.add_sharer();
        Self(Home::here())
    }
}

impl Drop for Sharing {
    fn drop(&mut self) {
        if self.0.is_here() {
            HEAP.remove_sharer();
        }
    }
}
