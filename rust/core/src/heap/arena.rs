//! The heap itself: blocks from segments, which come when they are needed and go when they are empty.
//!
//! Freed memory is kept for the next block of its size, with the pages that it has: having the kernel take 64 MiB back and
//! clear them again costs several times what it takes to reduce them, and training allocates and frees the same sizes in every
//! step. The waste is bounded: a segment without a block is given back whole, after it has been empty for [`RETAINED`], at once
//! while no link shares the heap, and at once when its room is needed for another. A segment is as large as the largest of what
//! was asked for, [`SMALLEST_SEGMENT`], and all that there is already (to [`LARGEST_SEGMENT`]), so that a few segments suffice
//! whatever the heap grows to, while a huge block has one of its own that goes with it.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::blocks::{Block, Blocks, IsOver};
use super::limit;
use super::owners::CHUNK;
use super::page::page;
use super::places::Places;
use super::region::Region;
use super::segment::Segment;
use crate::locks::Mutex;

/// Blocks begin at multiples of this: two blocks never share a cache line.
pub(super) const GRAIN: usize = 64;
/// Blocks from this size on consist of whole pages.
const WHOLE_PAGES_FROM: usize = 64 << 10;
/// The size of a small segment.
const SMALLEST_SEGMENT: usize = 64 << 20;
/// The size up to which segments grow with the heap.
const LARGEST_SEGMENT: usize = 1 << 30;
/// How long an empty segment waits for the next block.
const RETAINED: Duration = Duration::from_secs(10);

/// The numbers of segments, which are never used twice in a process.
static NUMBERS: AtomicU32 = AtomicU32::new(1);
/// How many segments were given back in this process.
static RETIRED: AtomicU64 = AtomicU64::new(0);

/// A place in memory as peers know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The number of the segment, not 0.
    pub segment: u32,
    /// Bytes from its beginning.
    pub offset: u64,
}

/// The usage of a heap, in bytes where nothing else is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// In blocks.
    pub in_use: usize,
    /// The most that was ever in blocks at one time.
    pub peak: usize,
    /// In segments; only pages that were touched take memory.
    pub reserved: usize,
    /// To which `reserved` may grow.
    pub limit: usize,
    /// The number of blocks.
    pub blocks: usize,
    /// The number of segments.
    pub segments: usize,
}

/// A heap. A process has one ([`super`]); tests make their own.
pub(super) struct Arena {
    limit: OnceLock<AtomicUsize>,
    region: OnceLock<Option<Arc<Region>>>,
    state: Mutex<Blocks>,
    /// Links whose peers may have mapped segments.
    sharers: AtomicUsize,
    /// Whether [`Arena::detach`] took anything away from the peers.
    has_detached: AtomicBool,
    /// Whether it was said that there is no room.
    complained: AtomicBool,
    retained: Duration,
}

impl Arena {
    pub(super) const fn new() -> Self {
        Self::retaining(RETAINED)
    }

    pub(super) const fn retaining(retained: Duration) -> Self {
        Self {
            limit: OnceLock::new(),
            region: OnceLock::new(),
            state: Mutex::new(Blocks::new()),
            sharers: AtomicUsize::new(0),
            has_detached: AtomicBool::new(false),
            complained: AtomicBool::new(false),
            retained,
        }
    }

    pub(super) fn allocate(&self, bytes: usize, align: usize) -> Option<Block> {
        if self.limit() == 0 {
            return None;
        }
        let (bytes, align) = rounded(bytes, align)?;
        let region = self.region()?;
        let mut retired = Vec::new();
        let block = {
            let mut state = self.state.lock();
            self.reclaim(&mut state);
            let block = match state.take(bytes, align) {
                Some(block) => Ok(block),
                None => self
                    .grow(&mut state, region, bytes, &mut retired)
                    .and_then(|()| state.take(bytes, align).ok_or("no memory".to_owned())),
            };
            self.retire_idle(&mut state, &mut retired);
            block
        };
        self.dispose(retired);
        block
            .inspect_err(|reason| self.complain(bytes, reason))
            .ok()
    }

    /// Frees the block at `address`. False when there is none.
    ///
    /// # Safety
    /// The block is no longer used, in this process or by an operation that is under way.
    pub(super) unsafe fn free(&self, address: NonNull<u8>) -> bool {
        let mut retired = Vec::new();
        let found = {
            let mut state = self.state.lock();
            let found = state.put(address);
            self.reclaim(&mut state);
            self.retire_idle(&mut state, &mut retired);
            found
        };
        self.dispose(retired);
        found
    }

    /// Takes `address..address + bytes` away from the peers: their writes there are no longer seen here, and they get no word
    /// of it. The memory of these pages is not handed out again before it `is_over`. Memory elsewhere cannot be taken away.
    pub(super) fn detach(&self, address: usize, bytes: usize, is_over: IsOver) {
        let region = self.region.get().and_then(Option::as_ref);
        // Also where a page of it was taken away before, with what lies beside it.
        let located = region.and_then(|region| region.locate(address, bytes));
        let Some((segment, first)) = located else {
            tracing::warn!(
                bytes,
                "do not use the memory at {address:#x} again, which is not in the heap: a peer is still writing there"
            );
            return;
        };
        let mut state = self.state.lock();
        match state.detach(segment, first..first + bytes, &is_over) {
            Ok(()) => tracing::warn!(
                bytes,
                "a peer has stopped while it was writing to shared memory, which it loses; what is freed there is used \
                 again when that peer goes on or ends"
            ),
            Err(errno) => tracing::warn!(
                bytes,
                "do not use the memory at {address:#x} again: a peer has stopped while it was writing there, and may go \
                 on ({errno})"
            ),
        }
        self.has_detached.store(true, Ordering::Release);
    }

    pub(super) fn contains(&self, address: *const u8) -> bool {
        let region = self.region.get().and_then(Option::as_ref);
        region.is_some_and(|region| region.contains(address.addr()))
    }

    #[inline]
    pub(super) fn locate(&self, address: *const u8, bytes: usize) -> Option<Place> {
        let region = self.region.get()?.as_ref()?;
        let (segment, offset) = region.locate(address.addr(), bytes)?;
        if self.is_detached(segment, offset, bytes) {
            return None;
        }
        let offset = offset as u64;
        Some(Place { segment, offset })
    }

    /// Whether some of these bytes were taken away from the peers. One load while nothing ever was.
    #[inline]
    fn is_detached(&self, segment: u32, offset: usize, bytes: usize) -> bool {
        self.has_detached.load(Ordering::Acquire) && {
            let state = self.state.lock();
            let bytes = offset..offset + bytes;
            let mut detached = state.detached.iter();
            detached.any(|detached| detached.overlaps(segment, &bytes))
        }
    }

    /// Takes back what no peer can be writing to any more.
    fn reclaim(&self, state: &mut Blocks) {
        if !state.detached.is_empty() {
            state.reclaim();
            let has_detached = !state.detached.is_empty();
            self.has_detached.store(has_detached, Ordering::Release);
        }
    }

    pub(super) fn segment_file(&self, number: u32) -> Option<OwnedFd> {
        let state = self.state.lock();
        let segment = state.segments.get(&number)?;
        segment.file.as_fd().try_clone_to_owned().ok()
    }

    pub(super) fn is_live(&self, number: u32) -> bool {
        self.state.lock().segments.contains_key(&number)
    }

    pub(super) fn statistics(&self) -> Statistics {
        let limit = self.limit();
        let state = self.state.lock();
        Statistics {
            in_use: state.in_use,
            peak: state.peak,
            reserved: state.reserved,
            limit,
            blocks: state.blocks.as_ref().map_or(0, HashMap::len),
            segments: state.segments.len(),
        }
    }

    pub(super) fn limit(&self) -> usize {
        self.limit_word().load(Ordering::Relaxed)
    }

    pub(super) fn set_limit(&self, bytes: usize) {
        self.limit_word().store(bytes, Ordering::Relaxed);
    }

    /// The limit, if it was set or has been read.
    pub(super) fn limit_if_known(&self) -> Option<usize> {
        Some(self.limit.get()?.load(Ordering::Relaxed))
    }

    fn limit_word(&self) -> &AtomicUsize {
        self.limit
            .get_or_init(|| AtomicUsize::new(limit::from_environment()))
    }

    /// Gives empty segments back now.
    pub(super) fn trim(&self) {
        let mut retired = Vec::new();
        self.state.lock().retire(&mut retired, |_| true);
        self.dispose(retired);
    }

    pub(super) fn add_sharer(&self) {
        self.sharers.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn remove_sharer(&self) {
        if self.sharers.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.trim();
        }
    }

    /// The addresses, reserved at the first call: twice what the heap may grow to, so that holes which segments of
    /// several chunks leave do not matter.
    fn region(&self) -> Option<&Arc<Region>> {
        let reserve = || {
            let bytes = self.limit().max(limit::of_the_machine()).saturating_mul(2);
            let region = Region::reserve(bytes)
                .inspect_err(|errno| self.complain(bytes, &format!("no addresses: {errno}")))
                .ok()?;
            let mut state = self.state.lock();
            state.blocks = Some(HashMap::new());
            state.chunks = Some(Places::new(region.length()));
            Some(Arc::new(region))
        };
        self.region.get_or_init(reserve).as_ref()
    }

    /// Adds a segment in which a block of `bytes` finds room.
    fn grow(
        &self,
        state: &mut Blocks,
        region: &Arc<Region>,
        bytes: usize,
        retired: &mut Vec<Segment>,
    ) -> Result<(), String> {
        let limit = self.limit();
        let least = bytes.next_multiple_of(page());
        if state.reserved + least > limit {
            state.retire(retired, |_| true);
        }
        let room = limit.saturating_sub(state.reserved) / page() * page();
        if least > room {
            let reserved = state.reserved;
            return Err(format!(
                "{reserved} of {limit} bytes (heap_bytes) are taken"
            ));
        }
        let length = state
            .reserved
            .clamp(SMALLEST_SEGMENT, LARGEST_SEGMENT)
            .max(least)
            .min(room);
        let chunks = state.chunks.as_mut().ok_or("no addresses")?;
        let span = length.next_multiple_of(CHUNK);
        let at = chunks
            .take(span, CHUNK)
            .ok_or("its addresses are scattered")?;
        let number = next_number();
        match Segment::create(number, region, at, length, limit::is_strict()) {
            Ok(segment) => {
                state.segments.insert(number, segment);
                state.reserved += length;
                state.idle += 1;
                Ok(())
            }
            Err(errno) => {
                chunks.put(at, span);
                Err(refusal(errno))
            }
        }
    }

    fn retire_idle(&self, state: &mut Blocks, retired: &mut Vec<Segment>) {
        if state.idle == 0 {
            return;
        }
        if self.sharers.load(Ordering::Relaxed) == 0 {
            // No peer has mapped them; making them anew costs us as little as it costs malloc.
            return state.retire(retired, |_| true);
        }
        let now = Instant::now();
        state.retire(retired, |since| now.duration_since(since) >= self.retained);
    }

    /// Ends segments that are no longer in the table, with the lock not held: giving back their pages takes time.
    fn dispose(&self, retired: Vec<Segment>) {
        for segment in retired {
            let (at, length) = segment.chunks();
            drop(segment);
            note_retired();
            if let Some(chunks) = &mut self.state.lock().chunks {
                chunks.put(at, length);
            }
        }
    }

    fn complain(&self, bytes: usize, reason: &str) {
        // Only once logging is set up, which the first group does: memory may be allocated before that.
        let heard = tracing::enabled!(tracing::Level::WARN);
        if heard && !self.complained.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                bytes,
                "the shared heap has no room, and memory is private from here on where it has none: {reason}"
            );
        }
    }
}

/// The size and alignment that a block really gets.
fn rounded(bytes: usize, align: usize) -> Option<(usize, usize)> {
    if !align.is_power_of_two() || align > CHUNK || bytes > isize::MAX as usize / 2 {
        return None;
    }
    Some(if bytes >= WHOLE_PAGES_FROM {
        (bytes.next_multiple_of(page()), align.max(page()))
    } else {
        (bytes.max(1).next_multiple_of(GRAIN), align.max(GRAIN))
    })
}

fn refusal(errno: Errno) -> String {
    match errno {
        Errno::FBIG => "the size of files is limited (ulimit -f)".to_owned(),
        Errno::MFILE => "too many open files (ulimit -n)".to_owned(),
        errno => format!("the system refused a segment: {errno}"),
    }
}

/// The number of a segment that is about to be made.
pub(super) fn next_number() -> u32 {
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

/// A segment has gone.
pub(super) fn note_retired() {
    RETIRED.fetch_add(1, Ordering::Release);
}

/// How many segments were given back so far in this process, in any heap.
pub(super) fn retired() -> u64 {
    RETIRED.load(Ordering::Acquire)
}

#[cfg(test)]
impl Arena {
    /// Keeps every thread of the process out of the heap.
    pub(super) fn hold(&self) -> impl Drop {
        self.state.lock()
    }
}
