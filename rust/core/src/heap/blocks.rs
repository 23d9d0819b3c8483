//! The bytes of segments that are in use, and those that were taken away from peers that may still be writing there.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;

use super::page::page;
use super::places::Places;
use super::segment::Segment;

/// Whether a peer that has stopped in the middle of writing can write no more: it has gone on, or ended.
pub type IsOver = Arc<dyn Fn() -> bool + Send + Sync>;

/// Memory that a heap handed out. It is the caller's until it is freed; nothing happens when this is
/// dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The first byte: at least at a multiple of 64, and of a page for blocks of 64 KiB and more.
    pub address: NonNull<u8>,
    /// At least the bytes that were asked for.
    pub bytes: usize,
    /// The number of bytes, from the first on, that may hold data of earlier blocks; the rest is zero.
    pub used: usize,
}

// SAFETY: an address and two numbers; using the address is unsafe anyway.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

/// The blocks and segments of a heap.
pub(super) struct Blocks {
    pub(super) segments: BTreeMap<u32, Segment>,
    /// By address.
    pub(super) blocks: Option<HashMap<usize, Held>>,
    /// The region's chunks.
    pub(super) chunks: Option<Places>,
    /// Bytes of segments that peers do not share any more.
    pub(super) detached: Vec<Detached>,
    /// Blocks that were freed and lie in them.
    withheld: Vec<Held>,
    /// Empty segments.
    pub(super) idle: usize,
    pub(super) in_use: usize,
    pub(super) peak: usize,
    pub(super) reserved: usize,
}

/// A block that is in use.
#[derive(Clone, Copy)]
pub(super) struct Held {
    segment: u32,
    offset: usize,
    bytes: usize,
}

/// Bytes that were taken away from a peer that may still be writing there.
pub(super) struct Detached {
    segment: u32,
    /// Whole pages.
    bytes: Range<usize>,
    is_over: IsOver,
    /// The pages are of this process's own; else the system refused them.
    is_private: bool,
}

impl Detached {
    pub(super) fn overlaps(&self, segment: u32, bytes: &Range<usize>) -> bool {
        self.segment == segment && self.bytes.start < bytes.end && bytes.start < self.bytes.end
    }
}

impl Held {
    fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.bytes
    }
}

impl Blocks {
    pub(super) const fn new() -> Self {
        Self {
            segments: BTreeMap::new(),
            blocks: None,
            chunks: None,
            detached: Vec::new(),
            withheld: Vec::new(),
            idle: 0,
            in_use: 0,
            peak: 0,
            reserved: 0,
        }
    }

    /// A block in the oldest segment that has room, so that the youngest become empty.
    pub(super) fn take(&mut self, bytes: usize, align: usize) -> Option<Block> {
        let (segment, offset) = self.segments.values_mut().find_map(|segment| {
            let offset = segment.places.take(bytes, align)?;
            Some((segment, offset))
        })?;
        if !segment.commit(offset, bytes) {
            segment.places.put(offset, bytes);
            return None;
        }
        let address = segment.address(offset);
        let used = segment.fresh.saturating_sub(offset).min(bytes);
        segment.fresh = segment.fresh.max(offset + bytes);
        if segment.idle_since.take().is_some() {
            self.idle -= 1;
        }
        let held = Held {
            segment: segment.number,
            offset,
            bytes,
        };
        self.blocks.as_mut()?.insert(address.addr().get(), held);
        self.in_use += bytes;
        self.peak = self.peak.max(self.in_use);
        Some(Block {
            address,
            bytes,
            used,
        })
    }

    /// Gives this process pages of its own where `bytes` of a segment lie. Those that it has already stay: they would be
    /// lost for what the file holds.
    pub(super) fn detach(
        &mut self,
        number: u32,
        bytes: Range<usize>,
        is_over: &IsOver,
    ) -> Result<(), Errno> {
        let Some(segment) = self.segments.get(&number) else {
            return Ok(());
        };
        let mut before: Vec<Range<usize>> = Vec::new();
        for detached in &self.detached {
            if detached.segment == number && detached.is_private {
                before.push(detached.bytes.clone());
            }
        }
        before.sort_by_key(|range| range.start);
        let end = bytes.end.next_multiple_of(page()).min(segment.length());
        let start = bytes.start / page() * page();
        let (mut at, mut result) = (start, Ok(()));
        for range in before.into_iter().chain(std::iter::once(end..end)) {
            let gap = at..range.start.min(end);
            if !gap.is_empty() {
                let detached = segment.detach(gap.clone());
                self.detached.push(Detached {
                    segment: number,
                    bytes: gap,
                    is_over: Arc::clone(is_over),
                    is_private: detached.is_ok(),
                });
                result = result.and(detached);
            }
            at = at.max(range.end);
        }
        // This peer, too, may be writing to what was taken away from another.
        for detached in &mut self.detached {
            if detached.overlaps(number, &(start..end)) && !Arc::ptr_eq(&detached.is_over, is_over)
            {
                let (one, other) = (Arc::clone(&detached.is_over), Arc::clone(is_over));
                detached.is_over = Arc::new(move || one() && other());
            }
        }
        result
    }

    /// Shares again what was taken away from peers that can write no more, where no block is in use any more, and frees
    /// the blocks that had to wait for it.
    pub(super) fn reclaim(&mut self) {
        let Self {
            segments,
            blocks,
            detached,
            ..
        } = self;
        let is_used = |detached: &Detached| {
            let mut blocks = blocks.iter().flat_map(HashMap::values);
            blocks.any(|held| detached.overlaps(held.segment, &held.range()))
        };
        detached.retain(|detached| {
            if is_used(detached) || !(detached.is_over)() {
                return true;
            }
            let segment = segments.get(&detached.segment);
            // SAFETY: no block lies there.
            let attach = |segment: &Segment| unsafe { segment.attach(detached.bytes.clone()) };
            segment.is_some_and(|segment| detached.is_private && attach(segment).is_err())
        });
        for held in std::mem::take(&mut self.withheld) {
            self.put_back(held);
        }
    }

    pub(super) fn put(&mut self, address: NonNull<u8>) -> bool {
        let blocks = self.blocks.as_mut();
        let held = blocks.and_then(|blocks| blocks.remove(&address.addr().get()));
        held.inspect(|held| self.put_back(*held)).is_some()
    }

    /// Frees a block that is in use no more, or withholds it.
    fn put_back(&mut self, held: Held) {
        let mut detached = self.detached.iter();
        if detached.any(|detached| detached.overlaps(held.segment, &held.range())) {
            return self.withheld.push(held);
        }
        self.in_use -= held.bytes;
        if let Some(segment) = self.segments.get_mut(&held.segment) {
            segment.places.put(held.offset, held.bytes);
            if segment.places.is_untouched() {
                segment.idle_since = Some(Instant::now());
                self.idle += 1;
            }
        }
    }

    /// Takes the empty segments out of the table whose time of becoming so is `due`.
    pub(super) fn retire(&mut self, retired: &mut Vec<Segment>, due: impl Fn(Instant) -> bool) {
        if self.idle == 0 {
            return;
        }
        let before = retired.len();
        let due = |_: &u32, segment: &mut Segment| segment.idle_since.is_some_and(&due);
        retired.extend(extract(&mut self.segments, due));
        for segment in &retired[before..] {
            self.idle -= 1;
            self.reserved -= segment.length();
        }
    }
}

/// Removes and returns what `which` holds for.
fn extract<K: Ord + Copy, V>(
    map: &mut BTreeMap<K, V>,
    mut which: impl FnMut(&K, &mut V) -> bool,
) -> Vec<V> {
    let keys: Vec<K> = map
        .iter_mut()
        .filter_map(|(key, value)| which(key, value).then_some(*key))
        .collect();
    keys.iter().filter_map(|key| map.remove(key)).collect()
}
