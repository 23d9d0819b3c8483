//! A depot: memory of a device in which a process leaves long messages for the ranks of its host, which map it and fetch them.
//!
//! A process has one on each device, while a group there has use for it. A message takes a [`Slot`] until its receiver has
//! fetched it.
//!
//! Two ranks tell each other of their depots in the page of the link between them ([`DepotWords`]): the owner leaves a record
//! there, and the reader, once it has mapped the depot or the driver has refused to, says so. Mapping is for a thread that
//! calls anyhow: the driver may make a call wait that another thread of the process is in the middle of. So the owner goes
//! on by other ways until it sees that the reader has mapped the depot.
//!
//! The page, in words of 32 bits. The words from 0 on are about the depot of the lower rank, those from 64 on about the depot
//! of the higher one:
//!
//! ```text
//!   0       1 once the record is there; the owner writes it
//!   1..35   the record
//!   40      1 once the owner says where its lane to the reader is, 2 where there is no room for one
//!   41, 42  where the lane begins in the depot and how long a half of it is, in units of 256 bytes
//!   48      what the reader makes of it ([`Mapped`])
//!   128..   the words of both lanes ([`lane`](super::lane))
//! ```

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::driver::{Device, Stream};
use super::room::FreeRanges;
use super::window::{RECORD, Record, Window};
use crate::error::Result;
use crate::locks::Mutex;
use crate::transport::Page;

/// The part of a device's memory that a depot is, and its least and greatest length.
const PART_OF_MEMORY: usize = 256;
const SMALLEST_DEPOT: usize = 32 << 20;
const LARGEST_DEPOT: usize = 512 << 20;

/// Slots begin at multiples of this.
const ALIGNMENT: usize = 256;
/// The most bytes of a half of a lane.
const LONGEST_HALF: usize = 16 << 20;
/// Bytes behind the slots for words: one for each piece of a message that is being fetched.
const WORDS: usize = 256 << 10;
const WORD: usize = 8;

const RECORD_WORDS: usize = RECORD / 4;
const OF_HIGHER: usize = 64;
const LANE: usize = 40;
const MAPPED: usize = 48;

const _: () = assert!(RECORD.is_multiple_of(4) && RECORD_WORDS < LANE);

/// Those of this process, one on each device.
static DEPOTS: Mutex<Vec<Weak<Depot>>> = Mutex::new(Vec::new());

/// A process's own depot on a device.
#[derive(Debug)]
pub(crate) struct Depot {
    device: &'static Device,
    window: Arc<Window>,
    slots: Mutex<FreeRanges>,
    words: Mutex<FreeRanges>,
    /// Bytes of the longest message.
    longest: usize,
    /// Where the words begin.
    first_word: usize,
    /// How many slots have come back.
    fetched: AtomicU64,
}

/// A part of a depot, taken until it is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    depot: Arc<Depot>,
    at: usize,
    bytes: usize,
}

impl Depot {
    /// This process's depot on `device`, made now if there is none.
    ///
    /// # Errors
    /// `System` where there is no memory for it.
    pub(crate) fn of(device: &'static Device) -> Result<Arc<Self>> {
        let mut all = DEPOTS.lock();
        all.retain(|depot| depot.strong_count() > 0);
        let mut there = all.iter().filter_map(Weak::upgrade);
        if let Some(depot) = there.find(|depot| depot.device.number() == device.number()) {
            return Ok(depot);
        }
        let bytes = (device.memory() / PART_OF_MEMORY).clamp(SMALLEST_DEPOT, LARGEST_DEPOT);
        let bytes = 1_usize << bytes.ilog2();
        // Readers find out by the first bytes whether they have mapped what they should.
        let end = ALIGNMENT + bytes;
        let window = Window::create_apart(device, (end + WORDS) / 2)?;
        let depot = Arc::new(Self {
            device,
            window,
            slots: Mutex::new(FreeRanges::new(ALIGNMENT, end)),
            words: Mutex::new(FreeRanges::new(end, end + WORDS)),
            longest: bytes,
            first_word: end,
            fetched: AtomicU64::new(0),
        });
        all.push(Arc::downgrade(&depot));
        Ok(depot)
    }

    /// Room for a message; `None` where there is none now.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> Option<Slot> {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        let at = self.slots.lock().take(bytes)?;
        Some(self.slot(at, bytes))
    }

    /// Whether there could be room for a message of `bytes` bytes.
    pub(crate) fn could_hold(&self, bytes: usize) -> bool {
        bytes <= self.longest
    }

    /// How many messages have been fetched.
    pub(crate) fn fetched(&self) -> u64 {
        self.fetched.load(Ordering::Acquire)
    }

    /// Words of 8 bytes, `bytes` bytes in all, for kernels of this process; `None` where too many are in use.
    pub(crate) fn words(self: &Arc<Self>, bytes: usize) -> Option<Slot> {
        let at = self.words.lock().take(bytes)?;
        Some(self.slot(at, bytes))
    }

    /// One word, 0 at first.
    ///
    /// # Errors
    /// `System`.
    pub(crate) fn zeroed_word(self: &Arc<Self>) -> Result<Option<Slot>> {
        let Some(word) = self.words(WORD) else {
            return Ok(None);
        };
        Stream::create(self.device)?.write(word.address(), &[0; WORD])?;
        Ok(Some(word))
    }

    /// Bytes of a half of a lane to each of `world` ranks: all of them take half of the depot at most.
    pub(crate) fn half_of_lane(&self, world: usize) -> usize {
        let half = self.longest / (4 * world.max(1));
        half.clamp(ALIGNMENT, LONGEST_HALF) / ALIGNMENT * ALIGNMENT
    }

    /// The record by which peers map it.
    ///
    /// # Errors
    /// As [`Window::record`]; that of the driver where it shares no memory between processes is left to the readers.
    pub(crate) fn record(&self) -> Result<Record> {
        self.window.record()
    }

    /// Its first byte, as this process knows it.
    pub(crate) fn address(&self) -> u64 {
        self.window.half(0)
    }

    /// Bytes of the device's memory.
    pub(crate) fn bytes(&self) -> usize {
        2 * self.window.half_bytes()
    }

    fn slot(self: &Arc<Self>, at: usize, bytes: usize) -> Slot {
        Slot {
            depot: Arc::clone(self),
            at,
            bytes,
        }
    }
}

impl Slot {
    /// Where it begins in the depot.
    pub(crate) fn offset(&self) -> usize {
        self.at
    }

    /// Its first byte, as this process knows it.
    pub(crate) fn address(&self) -> u64 {
        self.depot.address() + self.at as u64
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.at >= self.depot.first_word {
            return self.depot.words.lock().give_back(self.at, self.bytes);
        }
        self.depot.slots.lock().give_back(self.at, self.bytes);
        self.depot.fetched.fetch_add(1, Ordering::AcqRel);
    }
}

/// How far a reader is with a depot that it was told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Mapped {
    /// Nothing yet.
    NotYet = 0,
    /// It can fetch messages from there.
    Yes = 1,
    /// It cannot, and will not.
    Refused = 2,
    /// It does so no more.
    NoMore = 3,
    /// It has mapped it, and can fetch what comes by the lane.
    Lane = 4,
}

/// The words by which two ranks tell each other of their depots.
#[derive(Clone, Debug)]
pub(crate) struct DepotWords {
    page: Page,
    /// This rank is the lower one.
    lower: bool,
}

impl DepotWords {
    /// Over a page that nothing else uses.
    pub(crate) fn new(page: Page, lower: bool) -> Self {
        Self { page, lower }
    }

    /// Tells the peer of this rank's depot.
    pub(crate) fn publish(&self, record: &Record) {
        write(self.words(self.lower), &record.encode());
    }

    /// The peer's depot, once it has told of it.
    pub(crate) fn published(&self) -> Option<Record> {
        read(self.words(!self.lower)).map(|bytes| Record::decode(&bytes))
    }

    /// Tells the peer where this rank's lane to it is: the offset in the depot and the bytes of a half, multiples of 256; or
    /// that there is none.
    pub(crate) fn publish_lane(&self, place: Option<(usize, usize)>) {
        let words = self.words(self.lower);
        if let Some((offset, half)) = place {
            words[LANE + 1].store((offset / ALIGNMENT) as u32, Ordering::Relaxed);
            words[LANE + 2].store((half / ALIGNMENT) as u32, Ordering::Relaxed);
        }
        let state = if place.is_some() { 1 } else { 2 };
        words[LANE].store(state, Ordering::Release);
    }

    /// The peer's lane to this rank, as it has been published: `Some(None)` if there is none.
    pub(crate) fn published_lane(&self) -> Option<Option<(usize, usize)>> {
        let words = self.words(!self.lower);
        match words[LANE].load(Ordering::Acquire) {
            0 => None,
            1 => {
                let part = |at: usize| words[at].load(Ordering::Relaxed) as usize * ALIGNMENT;
                Some(Some((part(LANE + 1), part(LANE + 2))))
            }
            _ => Some(None),
        }
    }

    /// The page.
    pub(crate) fn page(&self) -> Page {
        self.page.clone()
    }

    /// Says how far this rank is with the peer's depot.
    pub(crate) fn say(&self, mapped: Mapped) {
        self.words(!self.lower)[MAPPED].store(mapped as u32, Ordering::Release);
    }

    /// How far the peer is with this rank's depot.
    pub(crate) fn said(&self) -> Mapped {
        match self.words(self.lower)[MAPPED].load(Ordering::Acquire) {
            0 => Mapped::NotYet,
            1 => Mapped::Yes,
            2 => Mapped::Refused,
            4 => Mapped::Lane,
            _ => Mapped::NoMore,
        }
    }

    fn words(&self, of_lower: bool) -> &[AtomicU32] {
        let at = match of_lower {
            true => 0,
            false => OF_HIGHER,
        };
        &self.page.words()[at..at + OF_HIGHER]
    }
}

/// Leaves bytes after a word that says that they are there.
fn write(words: &[AtomicU32], bytes: &[u8]) {
    for (word, bytes) in words[1..].iter().zip(bytes.chunks_exact(4)) {
        let value = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        word.store(value, Ordering::Relaxed);
    }
    words[0].store(1, Ordering::Release);
}

/// The bytes that [`write`] has left, if it has.
fn read<const N: usize>(words: &[AtomicU32]) -> Option<[u8; N]> {
    if words[0].load(Ordering::Acquire) == 0 {
        return None;
    }
    let mut bytes = [0; N];
    for (bytes, word) in bytes.chunks_exact_mut(4).zip(&words[1..]) {
        bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
    }
    Some(bytes)
}
