//! Memory of a device that peers may read and write where it lies: what users are handed for buffers of large collectives.
//!
//! It consists of segments. Peers map each segment as a whole; blocks are parts of segments. A segment goes when none of its
//! blocks is taken and no group has told peers of it ([`ToldSegment`]).
//!
//! A block that is freed may be in use by work that has been enqueued. So [`free`] waits until the device has done all of it,
//! as the driver does when it frees memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustc_hash::FxHashMap;

use super::driver::{Device, DeviceMemory, is_forked};
use super::room::FreeRanges;
use super::window::{Record, Window};
use crate::error::{Code, Error, Result};
use crate::locks::Mutex;

/// Blocks begin at multiples of this.
const ALIGNMENT: usize = 512;
/// The least bytes of a segment, where there is memory for it: few segments are soon mapped.
const SEGMENT: usize = 64 << 20;
/// Bytes of an allocation that the driver does not cut from another one.
const ALLOCATION: usize = 2 << 20;

static SEGMENTS: Mutex<Vec<Arc<Segment>>> = Mutex::new(Vec::new());
/// Blocks that were to be freed when the driver had no memory left to say whether the device has done what was enqueued.
static LATE: Mutex<Vec<(Arc<Segment>, u64)>> = Mutex::new(Vec::new());
/// As many segments as there are.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Memory that peers map as a whole.
#[derive(Debug)]
pub struct Segment {
    device: &'static Device,
    window: Arc<Window>,
    blocks: Mutex<Blocks>,
}

/// A segment that the peers of a group have been told of, until this is dropped.
#[derive(Debug)]
pub struct ToldSegment(Arc<Segment>);

#[derive(Debug)]
struct Blocks {
    room: FreeRanges,
    /// How many groups have told peers of the segment.
    shared: usize,
    /// Bytes of those that are taken, by their addresses.
    taken: FxHashMap<u64, usize>,
}

impl Segment {
    fn create(device: &'static Device, bytes: usize) -> Result<Self> {
        // Peers find out by the first bytes whether they have mapped what they should.
        let end = ALIGNMENT + bytes;
        let window = Window::create_apart(device, end.div_ceil(2))?;
        if let Some(refusal) = window.refusal() {
            return Err(refusal.clone());
        }
        Ok(Self {
            device,
            window,
            blocks: Mutex::new(Blocks {
                room: FreeRanges::new(ALIGNMENT, end),
                shared: 0,
                taken: FxHashMap::default(),
            }),
        })
    }

    /// Its first byte, as this process knows it.
    pub fn address(&self) -> u64 {
        self.window.half(0)
    }

    fn take(&self, bytes: usize) -> Option<u64> {
        let mut blocks = self.blocks.lock();
        let at = blocks.room.take(bytes)?;
        let address = self.address() + at as u64;
        blocks.taken.insert(address, bytes);
        Some(address)
    }

    /// Whether these bytes lie in one of its blocks.
    fn holds(&self, address: u64, bytes: u64) -> bool {
        let end = self.address() + 2 * self.window.half_bytes() as u64;
        address >= self.address() && address < end && bytes <= end - address
    }
}

impl ToldSegment {
    /// For a group that is about to tell its peers.
    pub fn new(segment: Arc<Segment>) -> Self {
        segment.blocks.lock().shared += 1;
        Self(segment)
    }

    /// Whether it is this one.
    pub fn is(&self, segment: &Arc<Segment>) -> bool {
        Arc::ptr_eq(&self.0, segment)
    }

    /// The record by which peers map it.
    ///
    /// # Errors
    /// As [`Window::record`].
    pub fn record(&self) -> Result<Record> {
        self.0.window.record()
    }
}

impl Drop for ToldSegment {
    /// Waits until the device is idle, where the segment goes.
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        self.0.blocks.lock().shared -= 1;
        leave(&self.0);
    }
}

/// Takes off a segment that is of no use.
fn leave(segment: &Arc<Segment>) {
    let mut segments = SEGMENTS.lock();
    let blocks = segment.blocks.lock();
    if blocks.taken.is_empty() && blocks.shared == 0 {
        segments.retain(|other| !Arc::ptr_eq(other, segment));
        COUNT.store(segments.len(), Ordering::Release);
    }
}

/// A block of `bytes` bytes of memory of `device`, at a multiple of 512. May be called during a capture.
///
/// # Errors
/// `System` where there is not so much left; `Unsupported` where the driver shares no memory with other processes.
pub fn allocate(device: &'static Device, bytes: usize) -> Result<u64> {
    let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
    let of_device = |segment: &&Arc<Segment>| segment.device.number() == device.number();
    let found = {
        let segments = SEGMENTS.lock();
        let mut there = segments.iter().filter(of_device);
        there.find_map(|segment| segment.take(bytes))
    };
    if let Some(address) = found {
        return Ok(address);
    }
    // Without the lock: the driver may have this wait.
    let segment = match Segment::create(device, bytes.max(SEGMENT)) {
        Err(error) if bytes < SEGMENT && error.code == Code::System => {
            Segment::create(device, bytes)?
        }
        created => created?,
    };
    let address = segment
        .take(bytes)
        .ok_or_else(|| Error::internal("a new segment has no room"))?;
    let mut segments = SEGMENTS.lock();
    segments.push(Arc::new(segment));
    COUNT.store(segments.len(), Ordering::Release);
    Ok(address)
}

/// Gives back a block of `device`, once the device has done all that was enqueued. False, at once, where it is none.
///
/// # Errors
/// `System` where the driver does not say when that is: then the block is given back with a later one.
pub fn free(device: &'static Device, address: u64) -> Result<bool> {
    let is_its = |segment: &&Arc<Segment>| segment.blocks.lock().taken.contains_key(&address);
    let Some(segment) = SEGMENTS.lock().iter().find(is_its).cloned() else {
        return Ok(false);
    };
    let mut blocks = vec![(segment, address)];
    let is_of = |(segment, _): &mut (Arc<Segment>, u64)| segment.device.number() == device.number();
    blocks.extend(LATE.lock().extract_if(.., is_of));
    if let Err(error) = await_rest(device) {
        LATE.lock().append(&mut blocks);
        return Err(error);
    }
    for (segment, address) in blocks {
        let mut blocks = segment.blocks.lock();
        if let Some(bytes) = blocks.taken.remove(&address) {
            let at = (address - segment.address()) as usize;
            blocks.room.give_back(at, bytes);
        }
        drop(blocks);
        leave(&segment);
    }
    Ok(true)
}

/// The segment in which these bytes lie. Cheap where there is none.
pub fn find(address: u64, bytes: u64) -> Option<Arc<Segment>> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    let segments = SEGMENTS.lock();
    segments
        .iter()
        .find(|segment| segment.holds(address, bytes))
        .cloned()
}

/// Waits until a device has done all that was enqueued when this was called.
///
/// It makes and frees an allocation: the driver waits for the context before it takes memory back. To synchronise the
/// context itself would invalidate captures that other threads may have under way in it.
///
/// # Errors
/// `System` where there is no memory left for that.
pub(crate) fn await_rest(device: &'static Device) -> Result<()> {
    DeviceMemory::allocate(device, ALLOCATION).map(drop)
}
