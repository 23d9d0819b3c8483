//! The memory two ranks of a host share: a header, slots and rings for both directions, and a page for others' use.
//!
//! The segment is a memfd: it has no name, and goes when the last process that maps it does,
//! however that ends. It is sealed against changing its size before the peer sees it, and the peer
//! checks the seals before it maps it, so that no access to it can fault because the other side cut
//! it short.

#[cfg(test)]
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::{self, MemfdFlags, SealFlags};
use rustix::mm::{self, MapFlags, ProtFlags};

use super::loans::Ledger;
use super::mark::Mark;
use super::pace::CLASSES;
use super::page::Page;
use super::ring::Memory;
use super::slots::{Board, ROOM, SLOT, SLOTS};
use crate::error::{Code, Error, Result};
use crate::fork::{InChild, map_shared, unshare};
use crate::heap::foreign::Foreign;
use crate::reduce::copy_raw;

/// The smallest ring: an element of 16 bytes fits whatever room the consumer holds back.
pub const MIN_CAPACITY: usize = 64;
/// The largest ring.
pub const MAX_CAPACITY: usize = 1 << 30;

/// `unisono` and the version of this layout.
const MAGIC: u64 = u64::from_le_bytes(*b"unisono\x09");
/// Where the slots begin: after a page for the header and the words of both directions.
const BOARDS: usize = 4096;
/// Where the page begins that is not the transport's own ([`Page`]), after the slots of both directions: at a multiple of 64
/// KiB, which is at least the length of the system's pages anywhere. Where those are longer than a [`Page`], the first ring
/// begins in the same one.
const PAGE: usize = (BOARDS + 2 * SLOTS * SLOT).next_multiple_of(64 << 10);
/// Where the first ring's bytes begin.
const DATA: usize = PAGE + Page::BYTES;
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// A word on cache lines of its own (two, since processors fetch them in pairs).
#[repr(C, align(128))]
struct Line(AtomicU64);

/// A mark and where it is, apart from all others: written once.
#[repr(C, align(128))]
struct MarkWords {
    address: AtomicU64,
    bytes: [AtomicU64; 2],
}

/// Words that are written together now and then, apart from all others.
#[repr(C, align(128))]
struct Paces([AtomicU64; CLASSES]);

/// The words of one direction: of its ring, slots and loans. Each has one writer in the common case, and the flags are
/// written only around sleeps, so that looking at them costs nothing while neither side sleeps.
#[repr(C)]
struct Words {
    tail: Line,
    head: Line,
    producer_asleep: Line,
    consumer_asleep: Line,
    taken: Line,
    returned: Line,
    declined: Line,
    moved: Line,
    moved_to: Line,
    revoked: Line,
    writing: Line,
    filling: Line,
    paces: Paces,
    mark: MarkWords,
}

/// The two words at the beginning of a slot; its room follows.
#[repr(C)]
struct SlotWords {
    stamp: AtomicU64,
    after: AtomicU64,
}

/// The first page.
#[repr(C)]
struct Header {
    magic: AtomicU64,
    capacity: AtomicU64,
    /// From the side that made the segment, and to it.
    directions: [Words; 2],
}

const _: () = assert!(size_of::<Header>() <= BOARDS);
const _: () = assert!(size_of::<SlotWords>() + ROOM == SLOT);

/// A mapped segment.
pub(super) struct Segment {
    base: NonNull<u8>,
    capacity: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is unmapped once, on drop. Its shared contents are atomic
// words, and bytes that the rings hand from one side to the other by those words.
unsafe impl Send for Segment {}
// SAFETY: as above; `Segment` itself has no interior that changes.
unsafe impl Sync for Segment {}

impl Segment {
    /// A segment for another process, and the descriptor to give it.
    pub(super) fn create(capacity: usize) -> Result<(Arc<Self>, OwnedFd)> {
        check_capacity(capacity)?;
        let doing = "make a shared memory segment";
        let length = length_of(capacity);
        let file = fs::memfd_create("unisono", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|errno| Error::system(doing, errno))?;
        fs::ftruncate(&file, length as u64).map_err(|errno| Error::system(doing, errno))?;
        fs::fcntl_add_seals(&file, SEALS).map_err(|errno| Error::system(doing, errno))?;
        let segment = Self::map(Some(&file), capacity)?;
        segment.write_header();
        Ok((Arc::new(segment), file))
    }

    /// A segment for two threads of this process.
    pub(super) fn anonymous(capacity: usize) -> Result<Arc<Self>> {
        check_capacity(capacity)?;
        let segment = Self::map(None, capacity)?;
        segment.write_header();
        Ok(Arc::new(segment))
    }

    /// The segment that a peer made. Its size and seals are the kernel's word; only its header is
    /// the peer's.
    pub(super) fn open(file: &OwnedFd) -> Result<Arc<Self>> {
        let untrusted = |what: String| {
            Err(Error::new(
                Code::Untrusted,
                format!("the peer's shared memory segment is refused: {what}"),
            ))
        };
        let seals = match fs::fcntl_get_seals(file) {
            Ok(seals) => seals,
            Err(errno) => return untrusted(format!("it cannot be sealed ({errno})")),
        };
        if !seals.contains(SEALS) {
            return untrusted(format!("its size can still be changed (seals {seals:?})"));
        }
        let size = fs::fstat(file)
            .map_err(|errno| Error::system("look at the peer's shared memory segment", errno))?
            .st_size;
        let capacity = usize::try_from(size).unwrap_or(0).saturating_sub(DATA) / 2;
        if check_capacity(capacity).is_err() || length_of(capacity) as i64 != size {
            return untrusted(format!("no segment has {size} bytes"));
        }
        let segment = Self::map(Some(file), capacity)?;
        let magic = segment.header().magic.load(Ordering::Acquire);
        let stated = segment.header().capacity.load(Ordering::Relaxed);
        if magic != MAGIC {
            return untrusted(format!("it begins with {magic:#018x}, not {MAGIC:#018x}"));
        }
        if stated != capacity as u64 {
            return untrusted(format!(
                "it states rings of {stated} bytes, its size {capacity}"
            ));
        }
        Ok(Arc::new(segment))
    }

    fn map(file: Option<&OwnedFd>, capacity: usize) -> Result<Self> {
        let length = length_of(capacity);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let place = ptr::null_mut();
        let mapped = map_shared(length, InChild::Zeros, || {
            // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
            unsafe {
                match file {
                    Some(file) => mm::mmap(place, length, access, MapFlags::SHARED, file, 0),
                    None => mm::mmap_anonymous(place, length, access, MapFlags::SHARED),
                }
            }
        });
        let base = mapped.map_err(|errno| {
            Error::system(format_args!("map {length} bytes of shared memory"), errno)
        })?;
        match NonNull::new(base.cast()) {
            Some(base) => Ok(Self { base, capacity }),
            None => Err(Error::internal("shared memory was mapped at address zero")),
        }
    }

    fn write_header(&self) {
        let header = self.header();
        header
            .capacity
            .store(self.capacity as u64, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping is page-aligned, longer than a header (asserted above) and lives as
        // long as `self`. A header is atomic words only, for which any bytes are a value and which
        // the peer may change at any time.
        unsafe { self.base.cast::<Header>().as_ref() }
    }

    /// One of the two rings: 0 from the side that made the segment, 1 to it.
    pub(super) fn ring(self: &Arc<Self>, index: usize) -> RingMemory {
        let words = NonNull::from(&self.header().directions[index]);
        // SAFETY: the offset is within the mapping, whose length is `length_of(capacity)`.
        let data = unsafe { self.base.add(DATA + index * self.capacity) };
        RingMemory {
            words,
            data,
            capacity: self.capacity,
            _segment: Arc::clone(self),
        }
    }

    /// The page that is not the transport's own.
    pub(super) fn page(self: &Arc<Self>) -> Page {
        // SAFETY: the page lies within the mapping, between the slots and `DATA`, at a multiple of its length from the
        // beginning, which is page aligned; nothing else touches it.
        unsafe { Page::new(Arc::clone(self), self.base.add(PAGE)) }
    }

    /// The slots and the account of loans of one direction, numbered as rings are.
    pub(super) fn board(self: &Arc<Self>, index: usize) -> BoardMemory {
        // SAFETY: the slots of both directions lie within the mapping, before its `DATA`.
        let slots = unsafe { self.base.add(BOARDS + index * SLOTS * SLOT) };
        BoardMemory {
            words: NonNull::from(&self.header().directions[index]),
            slots,
            _segment: Arc::clone(self),
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let (base, length) = (self.base.as_ptr().cast(), length_of(self.capacity));
        let result = unshare(base, length, || {
            // SAFETY: this is the mapping that `map` made, whole, or what a forked child has in its place; the rings that
            // point into it hold the `Arc` around `self`, so none is left.
            unsafe { mm::munmap(base, length) }
        });
        debug_assert!(result.is_ok());
    }
}

pub(super) fn length_of(capacity: usize) -> usize {
    DATA + 2 * capacity
}

fn check_capacity(capacity: usize) -> Result<()> {
    if !capacity.is_power_of_two() || !(MIN_CAPACITY..=MAX_CAPACITY).contains(&capacity) {
        return Err(Error::invalid(format!(
            "a ring of {capacity} bytes: the capacity is a power of two from {MIN_CAPACITY} to \
             {MAX_CAPACITY}"
        )));
    }
    Ok(())
}

/// One ring of a segment.
pub(super) struct RingMemory {
    words: NonNull<Words>,
    data: NonNull<u8>,
    capacity: usize,
    /// Keeps the mapping.
    _segment: Arc<Segment>,
}

// SAFETY: the pointers lead into a mapping that belongs to the process and that the `Arc` keeps.
unsafe impl Send for RingMemory {}

impl RingMemory {
    #[inline]
    fn words(&self) -> &Words {
        // SAFETY: it came from a reference into the segment, which `_segment` keeps mapped.
        unsafe { self.words.as_ref() }
    }
}

impl Memory for RingMemory {
    type Word = AtomicU64;

    #[inline]
    fn capacity(&self) -> usize {
        self.capacity
    }

    #[inline]
    fn tail(&self) -> &AtomicU64 {
        &self.words().tail.0
    }

    #[inline]
    fn head(&self) -> &AtomicU64 {
        &self.words().head.0
    }

    #[inline]
    fn producer_asleep(&self) -> &AtomicU64 {
        &self.words().producer_asleep.0
    }

    #[inline]
    fn consumer_asleep(&self) -> &AtomicU64 {
        &self.words().consumer_asleep.0
    }

    #[inline]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    #[inline]
    unsafe fn write(&self, at: usize, bytes: &[u8]) {
        // SAFETY: the caller keeps the destination within the ring and on bytes that are not published. The
        // only slices of the ring are those `lend` makes, of published bytes, so `bytes` cannot overlap it.
        unsafe { copy_raw(bytes.as_ptr(), self.data.add(at).as_ptr(), bytes.len()) }
    }

    #[inline]
    unsafe fn read(&self, at: usize, bytes: &mut [u8]) {
        // SAFETY: the caller keeps the source within the ring; an exclusive slice cannot overlap it. No
        // reference to the peer's bytes is formed. A peer that writes them meanwhile breaks the ring's rules
        // and spoils numbers, nothing else.
        unsafe { copy_raw(self.data.add(at).as_ptr(), bytes.as_mut_ptr(), bytes.len()) }
    }

    #[inline]
    unsafe fn lend(&self, at: usize, length: usize, fold: &mut dyn FnMut(&[u8])) {
        // SAFETY: the caller keeps the run within the ring, which stays mapped at its full size
        // (sealed). The bytes are published and not released, so that the peer does not write them
        // while the slice lives.
        fold(unsafe { Foreign::new(self.data.add(at), length).numbers() });
    }
}

/// The slots of one direction of a segment.
#[derive(Clone)]
pub(super) struct BoardMemory {
    words: NonNull<Words>,
    slots: NonNull<u8>,
    /// Keeps the mapping.
    _segment: Arc<Segment>,
}

// SAFETY: as for `RingMemory`.
unsafe impl Send for BoardMemory {}
// SAFETY: what can be done without unsafe code are accesses to atomic words.
unsafe impl Sync for BoardMemory {}

impl BoardMemory {
    #[inline]
    fn words(&self) -> &Words {
        // SAFETY: it came from a reference into the segment, which `_segment` keeps mapped.
        unsafe { self.words.as_ref() }
    }

    /// Tells the readers of lent memory the mark by which they know this process. Before it lends anything.
    pub(super) fn tell_mark(&self, mark: Mark) {
        let words = &self.words().mark;
        words.address.store(mark.address, Ordering::Relaxed);
        for (word, bytes) in words.bytes.iter().zip(mark.bytes) {
            word.store(bytes, Ordering::Relaxed);
        }
    }

    /// The mark by which the lender is known, once it has lent something.
    pub(super) fn mark(&self) -> Mark {
        let words = &self.words().mark;
        Mark {
            address: words.address.load(Ordering::Relaxed),
            bytes: [0, 1].map(|at| words.bytes[at].load(Ordering::Relaxed)),
        }
    }

    #[inline]
    fn slot(&self, slot: usize) -> NonNull<u8> {
        assert!(slot < SLOTS);
        // SAFETY: within the slots of this direction, by the assertion.
        unsafe { self.slots.add(slot * SLOT) }
    }

    #[inline]
    fn slot_words(&self, slot: usize) -> &SlotWords {
        // SAFETY: every slot begins with these words, aligned, since slots begin at multiples of 64 bytes from a page;
        // nothing but atomic accesses touches them.
        unsafe { self.slot(slot).cast::<SlotWords>().as_ref() }
    }

    #[inline]
    fn room(&self, slot: usize) -> *mut u8 {
        self.slot(slot)
            .as_ptr()
            .wrapping_add(size_of::<SlotWords>())
    }
}

impl Board for BoardMemory {
    type Word = AtomicU64;

    #[inline]
    fn stamp(&self, slot: usize) -> &AtomicU64 {
        &self.slot_words(slot).stamp
    }

    #[inline]
    fn after(&self, slot: usize) -> &AtomicU64 {
        &self.slot_words(slot).after
    }

    #[inline]
    fn taken(&self) -> &AtomicU64 {
        &self.words().taken.0
    }

    #[inline]
    fn producer_asleep(&self) -> &AtomicU64 {
        &self.words().producer_asleep.0
    }

    #[inline]
    fn consumer_asleep(&self) -> &AtomicU64 {
        &self.words().consumer_asleep.0
    }

    #[inline]
    unsafe fn write(&self, slot: usize, at: usize, bytes: &[u8]) {
        // SAFETY: the caller keeps the destination within the room of a slot that is not published; no slice of that slot
        // exists.
        unsafe {
            ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                self.room(slot).wrapping_add(at),
                bytes.len(),
            );
        }
    }

    #[inline]
    unsafe fn lend(&self, slot: usize, length: usize, take: &mut dyn FnMut(&[u8])) {
        // SAFETY: as in `RingMemory::lend`: within the mapping, published and not given back while the slice lives. A
        // peer that writes all the same changes a header that is compared, or numbers.
        take(unsafe { std::slice::from_raw_parts(self.room(slot), length) });
    }
}

impl Ledger for BoardMemory {
    type Word = AtomicU64;

    #[inline]
    fn returned(&self) -> &AtomicU64 {
        &self.words().returned.0
    }

    #[inline]
    fn declined(&self) -> &AtomicU64 {
        &self.words().declined.0
    }

    #[inline]
    fn moved(&self) -> &AtomicU64 {
        &self.words().moved.0
    }

    #[inline]
    fn moved_to(&self) -> &AtomicU64 {
        &self.words().moved_to.0
    }

    #[inline]
    fn revoked(&self) -> &AtomicU64 {
        &self.words().revoked.0
    }

    #[inline]
    fn writing(&self) -> &AtomicU64 {
        &self.words().writing.0
    }

    #[inline]
    fn filling(&self) -> &AtomicU64 {
        &self.words().filling.0
    }

    #[inline]
    fn paces(&self, class: usize) -> &AtomicU64 {
        &self.words().paces.0[class]
    }

    #[inline]
    fn producer_asleep(&self) -> &AtomicU64 {
        &self.words().producer_asleep.0
    }

    #[inline]
    fn consumer_asleep(&self) -> &AtomicU64 {
        &self.words().consumer_asleep.0
    }

    #[inline]
    fn fence(&self, order: Ordering) {
        fence(order);
    }
}

/// Writes raw words into a segment, as a broken peer would.
#[cfg(test)]
impl Segment {
    pub(super) fn corrupt_header(&self, magic: Option<u64>, capacity: Option<u64>) {
        if let Some(magic) = magic {
            self.header().magic.store(magic, Ordering::Release);
        }
        if let Some(capacity) = capacity {
            self.header().capacity.store(capacity, Ordering::Release);
        }
    }

    /// Where the words of one direction lie: those of a ring, then the account of slots and of loans.
    pub(super) fn words_at(index: usize) -> Range<usize> {
        let start = std::mem::offset_of!(Header, directions) + index * size_of::<Words>();
        start..start + size_of::<Words>()
    }

    /// Where slot `slot` of one direction lies.
    pub(super) fn slot_at(index: usize, slot: usize) -> usize {
        BOARDS + (index * SLOTS + slot) * SLOT
    }

    /// Overwrites a word before the rings' bytes.
    pub(super) fn scribble(&self, at: usize, word: u64) {
        assert!(at.is_multiple_of(8) && at + 8 <= DATA);
        // SAFETY: within the mapping and aligned, by the assertion; whatever else is there, tests access it from this
        // thread alone.
        unsafe { self.base.add(at).cast::<AtomicU64>().as_ref() }.store(word, Ordering::Release);
    }

    pub(super) fn corrupt_ring(&self, index: usize, tail: Option<u64>, head: Option<u64>) {
        let words = &self.header().directions[index];
        if let Some(tail) = tail {
            words.tail.0.store(tail, Ordering::Release);
        }
        if let Some(head) = head {
            words.head.0.store(head, Ordering::Release);
        }
    }
}
