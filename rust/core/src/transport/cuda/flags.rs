//! How the streams of two ranks of a host meet: binary semaphores in a page that both have mapped and registered.
//!
//! A rank's [window](super::window) has two halves, which take turns. For each half, each ordered pair of an *owner* and
//! a *reader* of a window, and each of two *meetings*, there are two words:
//!
//! - `full`: set by the owner when what it has put there can be read; awaited and cleared by the reader.
//! - `empty`: set by the reader when it has read; awaited and cleared by the owner, before it puts something there again.
//!   Set at first.
//!
//! The operations that set and await them are constant, so the same commands can be captured in a graph and replayed. A word is
//! set only when it has been cleared, since the rank that sets it has waited for the other word of the pair: `full` is set
//! after `empty` was awaited, and `empty` after `full` was.
//!
//! The write that clears a word leaves the number of the wait in it ([`Receipt`]), so that the host sees from the words alone
//! how far its stream has come. Nothing else is written for that, since each write makes the stream wait for all that it did
//! before. In graphs, which write constants, the number says nothing.
//!
//! A wait ends at [`READY`] or [`ABORT`]. On a failure [`Flags::release`] stores both into every word that this rank
//! waits for; a stream that passes clears the word it waited for, but not those that it comes to later, so it is called
//! again until the stream has drained.
//!
//! The page, in words of 32 bits; rank `a` is the lower one of the pair:
//!
//! ```text
//!    0..256   16 flags, 16 words (64 bytes) apart: [owner: a, b][half][meeting][full, empty]
//!  256, 272   what a and b have come to ([`Mark`])
//!  288..352   where contributions lie, 4 places of 3 words ([`Located`]), 16 words apart: [owner: a, b][half]
//!  352..448   what each tells of its memory ([`Telling`]), 48 words each: a, b
//!  512..1024  two rings of 16 announcements of 16 words: from a, from b
//! ```
//!
//! An announcement is what a rank says of an operation before it enqueues it: its number, and [`ANNOUNCEMENT`] bytes that
//! the two sides compare. The host writes and reads it.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use super::announcements::{self, HEAD, Stated};
use super::driver::{Device, MemoryOperation, Registered, Stream};
use super::telling::{TOLD_WORDS, Telling};
use crate::error::{Error, Result};
use crate::transport::{MESSAGE_HEADER, Page};
use crate::types::Rank;

/// The value of a flag that is set.
pub const READY: u32 = 1;
/// The bit that ends a wait without what was waited for.
pub const ABORT: u32 = 2;
/// Bytes of an announcement: what goes before a message on the host says the same.
pub const ANNOUNCEMENT: usize = MESSAGE_HEADER;

const STRIDE: usize = 16;
const MARKS: usize = 256;
const LOCATIONS: usize = 288;
/// Words of a location.
const LOCATION: usize = 3;
const TOLD: usize = 352;
const RINGS: usize = 512;
const RING: usize = 16;
const ENTRY: usize = 16;
/// Words of the bytes that were announced.
const BODY: usize = ANNOUNCEMENT / 4;

const _: () = assert!(TOLD + 2 * TOLD_WORDS <= RINGS);
const _: () = assert!(HEAD + BODY <= ENTRY);
const _: () = assert!(RINGS + 2 * RING * ENTRY == Page::WORDS);

/// The meaning of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// The owner of a window: it can be read.
    Full,
    /// A reader: it can be written again.
    Empty,
}

/// Which flags of a pair: those of a half, in the first or second meeting over its present contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spot {
    /// The half of the window, 0 or 1.
    pub half: usize,
    /// 0, or 1 for the second meeting of a two-shot reduction.
    pub meeting: usize,
}

/// Where a rank's contribution lies that is not in its half: what the words of a [`Place`](super::kernels::Place) say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Located {
    /// Which of the segments that it has told of, from 1 on.
    pub entry: u32,
    /// From the beginning of that, in units of 16 bytes.
    pub units: i32,
    /// In which operation.
    pub operation: u32,
}

/// The value that a stream leaves in a word that it has awaited: the number of the wait, modulo 2^30.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receipt(u32);

impl Receipt {
    /// Of a wait that is carried out more than once.
    pub const NONE: Self = Self(0);

    /// Of wait number `number`.
    pub fn new(number: u32) -> Self {
        Self(number << 2)
    }

    /// Whether a word holds one of `numbers`, which go on from the largest with 0.
    fn is_of(word: u32, numbers: &Range<u32>) -> bool {
        let length = numbers.end.wrapping_sub(numbers.start);
        (word >> 2).wrapping_sub(numbers.start) & (u32::MAX >> 2) < length
    }
}

const _: () = assert!(READY | ABORT == 3);

/// The state of a peer's announcement of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announced {
    /// The peer has not come to the operation yet.
    NotYet,
    /// This.
    As([u8; ANNOUNCEMENT]),
    /// It was overwritten by a later one.
    Past,
}

/// A state that a rank has come to, for good, as its host tells the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// It has failed: the work of its stream from here on means nothing.
    Failed,
    /// It has unmapped the windows of the others.
    Unmapped,
}

/// The flags between this rank and the others of its group, on one device.
pub struct Flags {
    rank: Rank,
    pairs: Vec<Option<Pair>>,
}

struct Pair {
    page: Page,
    registered: Registered,
    /// This rank is the lower one.
    lower: bool,
}

impl Flags {
    /// Registers the pages with the device and sets the `empty` flags of the windows that this rank reads. `pages` has an
    /// element for every rank of the group: the page of the link to it
    /// ([`Neighbour::page`](crate::transport::Neighbour::page)), `None` for this rank and for those without one.
    ///
    /// Both ranks of a pair make their `Flags` once, over a page that was not used before.
    ///
    /// # Errors
    /// As [`Registered::page`].
    pub fn new(device: &'static Device, rank: Rank, pages: Vec<Option<Page>>) -> Result<Self> {
        let pairs = pages.into_iter().enumerate().map(|(peer, page)| {
            let Some(page) = page.filter(|_| peer != rank) else {
                return Ok(None);
            };
            Ok(Some(Pair {
                registered: Registered::page(device, &page)?,
                page,
                lower: rank < peer,
            }))
        });
        let flags = Self {
            rank,
            pairs: pairs.collect::<Result<_>>()?,
        };
        for pair in flags.pairs.iter().flatten() {
            for spot in Spot::ALL {
                let word = pair.told(Signal::Empty, spot);
                pair.word(word).store(READY, Ordering::Release);
            }
        }
        Ok(flags)
    }

    /// An empty list of operations, for [`Batch::submit`].
    pub fn batch(&self) -> Batch<'_> {
        Batch {
            flags: self,
            operations: Vec::with_capacity(16),
            failure: None,
        }
    }

    /// Lets every wait of this rank pass, on the stream and in what is enqueued later: sets all the words that it may
    /// wait for. To be called again until the stream has drained, since a stream clears what it waited for.
    pub fn release(&self) {
        for pair in self.pairs.iter().flatten() {
            for signal in [Signal::Full, Signal::Empty] {
                for spot in Spot::ALL {
                    pair.word(pair.awaited(signal, spot))
                        .store(READY | ABORT, Ordering::Release);
                }
            }
        }
    }

    /// Tells all peers, before anything that follows from it.
    pub fn mark(&self, mark: Mark) {
        for pair in self.pairs.iter().flatten() {
            pair.word(pair.mark(pair.lower))
                .fetch_or(mark.bit(), Ordering::AcqRel);
        }
    }

    /// The peers that have told so.
    pub fn marked(&self, mark: Mark) -> impl Iterator<Item = Rank> {
        let pairs = self.pairs.iter().enumerate();
        pairs.filter_map(move |(peer, pair)| {
            let pair = pair.as_ref()?;
            let word = pair.word(pair.mark(!pair.lower)).load(Ordering::Acquire);
            (word & mark.bit() != 0).then_some(peer)
        })
    }

    /// Those of `peers` that have not said `signal` at `spot`: the ranks that this rank waits for, when it waits there. A peer
    /// whose word has been cleared since it was set is named, too.
    pub fn missing(
        &self,
        signal: Signal,
        spot: Spot,
        peers: impl IntoIterator<Item = Rank>,
    ) -> Vec<Rank> {
        self.missing_before(signal, spot, peers, &(0..0))
    }

    /// As [`Flags::missing`], without those whose word one of the waits of these numbers has cleared.
    pub fn missing_before(
        &self,
        signal: Signal,
        spot: Spot,
        peers: impl IntoIterator<Item = Rank>,
        waits: &Range<u32>,
    ) -> Vec<Rank> {
        let is_missing = |&peer: &Rank| {
            let word = self.awaited(signal, spot, peer);
            word.is_some_and(|word| word & READY == 0 && !Receipt::is_of(word, waits))
        };
        peers.into_iter().filter(is_missing).collect()
    }

    /// Whether one of the waits of these numbers has cleared the word of one of `peers`.
    pub fn has_waited(
        &self,
        signal: Signal,
        spot: Spot,
        peers: impl IntoIterator<Item = Rank>,
        waits: &Range<u32>,
    ) -> bool {
        let is_cleared = |peer| {
            let word = self.awaited(signal, spot, peer);
            word.is_some_and(|word| word & READY == 0 && Receipt::is_of(word, waits))
        };
        peers.into_iter().any(is_cleared)
    }

    /// The word by which a peer tells this rank.
    fn awaited(&self, signal: Signal, spot: Spot, peer: Rank) -> Option<u32> {
        let pair = self.pairs.get(peer)?.as_ref()?;
        let word = pair.word(pair.awaited(signal, spot));
        Some(word.load(Ordering::Acquire))
    }

    /// Tells `peers` what operation number `number` (from 0, without gaps) is here, before it is enqueued. The last 16 can
    /// be read.
    pub fn announce(&self, number: u64, announcement: &[u8; ANNOUNCEMENT]) {
        for pair in self.pairs.iter().flatten() {
            pair.announce(number, announcement);
        }
    }

    /// The announcement of operation number `number` by `peer`, as far as there is one.
    pub fn announced(&self, peer: Rank, number: u64) -> Announced {
        match self.pairs.get(peer).and_then(Option::as_ref) {
            Some(pair) => pair.announced(number),
            None => Announced::NotYet,
        }
    }

    /// The word in which `peer` marks, as the device knows it: the lowest bit is [`Mark::Failed`]. 0 for this rank.
    pub fn marks(&self, peer: Rank) -> u64 {
        let pair = self.pairs.get(peer).and_then(Option::as_ref);
        pair.map_or(0, |pair| pair.address(pair.mark(!pair.lower)))
    }

    /// The part of the page in which this rank tells `peer` of its memory, if they share one.
    pub fn telling(&self, peer: Rank) -> Option<Telling<'_>> {
        let pair = self.pairs.get(peer)?.as_ref()?;
        Some(Telling(pair.told_words(pair.lower)))
    }

    /// The same in which `peer` tells this rank.
    pub fn heard(&self, peer: Rank) -> Option<Telling<'_>> {
        let pair = self.pairs.get(peer)?.as_ref()?;
        Some(Telling(pair.told_words(!pair.lower)))
    }

    /// Where `peer` says where its contribution in `half` lies, as the device knows it ([`Batch::locate`]); 0 for this rank.
    pub(crate) fn location(&self, peer: Rank, half: usize) -> u64 {
        let pair = self.pairs.get(peer).and_then(Option::as_ref);
        pair.map_or(0, |pair| pair.address(pair.location(!pair.lower, half)))
    }

    fn pair(&self, peer: Rank) -> Result<&Pair> {
        self.pairs
            .get(peer)
            .and_then(Option::as_ref)
            .ok_or_else(|| {
                Error::internal(format!(
                    "rank {} shares no page with rank {peer}",
                    self.rank
                ))
            })
    }
}

/// Operations on flags and words in the order in which a stream carries them out, enqueued with one call.
#[must_use = "nothing is enqueued before `submit`"]
pub struct Batch<'a> {
    flags: &'a Flags,
    operations: Vec<MemoryOperation>,
    failure: Option<Error>,
}

impl Batch<'_> {
    /// Sets the flags by which `peers` learn `signal`: `Full` of this rank's own window, `Empty` of theirs.
    pub fn tell(
        mut self,
        signal: Signal,
        spot: Spot,
        peers: impl IntoIterator<Item = Rank>,
    ) -> Self {
        self.for_each(peers, |pair, operations| {
            operations.push(MemoryOperation::Write {
                address: pair.address(pair.told(signal, spot)),
                value: READY,
            });
        });
        self
    }

    /// Says to `peer` where this rank's contribution in `half` lies, if not there; to be told after it.
    pub fn locate(mut self, peer: Rank, half: usize, located: Option<Located>) -> Self {
        self.for_each([peer], |pair, operations| {
            let at = pair.location(pair.lower, half);
            let words = match located {
                None => [0, 0, 0],
                Some(located) => [
                    located.entry,
                    located.units.cast_unsigned(),
                    located.operation,
                ],
            };
            // Without an entry the others say nothing.
            let used = if located.is_some() { LOCATION } else { 1 };
            for (index, value) in words.into_iter().enumerate().take(used) {
                let address = pair.address(at + index);
                operations.push(MemoryOperation::Write { address, value });
            }
        });
        self
    }

    /// Waits until all of `peers` have said `signal`, `Full` of their windows, `Empty` of this rank's own, and clears it.
    pub fn wait(
        mut self,
        signal: Signal,
        spot: Spot,
        peers: impl IntoIterator<Item = Rank>,
        receipt: Receipt,
    ) -> Self {
        let waits = self.operations.len();
        self = self.look(signal, spot, peers);
        for at in waits..self.operations.len() {
            if let MemoryOperation::WaitAny { address, .. } = self.operations[at] {
                self.operations.push(MemoryOperation::Write {
                    address,
                    value: receipt.0,
                });
            }
        }
        self
    }

    /// Waits until all of `peers` have said `signal`, and leaves it so.
    pub fn look(
        mut self,
        signal: Signal,
        spot: Spot,
        peers: impl IntoIterator<Item = Rank>,
    ) -> Self {
        self.for_each(peers, |pair, operations| {
            operations.push(MemoryOperation::WaitAny {
                address: pair.address(pair.awaited(signal, spot)),
                mask: READY | ABORT,
            });
        });
        self
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty() && self.failure.is_none()
    }

    /// Stores `value` into a word ([`Pinned`](super::driver::Pinned)): how far the stream has come.
    pub fn write(mut self, address: u64, value: u32) -> Self {
        self.operations
            .push(MemoryOperation::Write { address, value });
        self
    }

    /// Waits until a word is `value` or later, in the cyclic order.
    pub(crate) fn wait_at_least(mut self, address: u64, value: u32) -> Self {
        self.operations
            .push(MemoryOperation::WaitAtLeast { address, value });
        self
    }

    /// Enqueues them.
    ///
    /// # Errors
    /// As [`Stream::operate`]; `Internal` when a peer was named without whom this rank shares no page.
    pub fn submit(self, stream: &Stream) -> Result<()> {
        match self.failure {
            Some(error) => Err(error),
            None => stream.operate(&self.operations),
        }
    }

    fn for_each(
        &mut self,
        peers: impl IntoIterator<Item = Rank>,
        mut push: impl FnMut(&Pair, &mut Vec<MemoryOperation>),
    ) {
        for peer in peers {
            match self.flags.pair(peer) {
                Ok(pair) => push(pair, &mut self.operations),
                Err(error) => self.failure = Some(error),
            }
        }
    }
}

impl Spot {
    /// All that there are.
    pub const ALL: [Self; 4] = [
        Self {
            half: 0,
            meeting: 0,
        },
        Self {
            half: 0,
            meeting: 1,
        },
        Self {
            half: 1,
            meeting: 0,
        },
        Self {
            half: 1,
            meeting: 1,
        },
    ];
}

impl Mark {
    fn bit(self) -> u32 {
        match self {
            Self::Failed => 1,
            Self::Unmapped => 2,
        }
    }
}

impl Pair {
    /// The index of the word in which the lower or the higher rank marks.
    fn mark(&self, of_lower: bool) -> usize {
        MARKS + STRIDE * usize::from(!of_lower)
    }

    /// The index of the first word that says where the lower or the higher rank's contribution lies.
    fn location(&self, of_lower: bool, half: usize) -> usize {
        assert!(half < 2);
        LOCATIONS + STRIDE * (2 * usize::from(!of_lower) + half)
    }

    /// The words in which the lower or the higher rank tells of its memory.
    fn told_words(&self, of_lower: bool) -> &[AtomicU32] {
        let at = TOLD + TOLD_WORDS * usize::from(!of_lower);
        &self.page.words()[at..at + TOLD_WORDS]
    }

    /// The index of the word of the window that the lower or the higher rank owns.
    fn flag(owner_is_lower: bool, signal: Signal, spot: Spot) -> usize {
        assert!(spot.half < 2 && spot.meeting < 2);
        let owner = usize::from(!owner_is_lower);
        let signal = usize::from(signal == Signal::Empty);
        STRIDE * (8 * owner + 4 * spot.half + 2 * spot.meeting + signal)
    }

    /// The word that this rank sets.
    fn told(&self, signal: Signal, spot: Spot) -> usize {
        // `Full` is said by the owner, `Empty` by the reader.
        Self::flag(self.lower == (signal == Signal::Full), signal, spot)
    }

    /// The word that this rank waits for.
    fn awaited(&self, signal: Signal, spot: Spot) -> usize {
        Self::flag(self.lower != (signal == Signal::Full), signal, spot)
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        &self.page.words()[index]
    }

    fn address(&self, index: usize) -> u64 {
        self.registered.address() + 4 * index as u64
    }

    fn entry(&self, from_lower: bool, number: u64) -> &[AtomicU32] {
        let place = (number % RING as u64) as usize;
        let at = RINGS + ENTRY * (RING * usize::from(!from_lower) + place);
        &self.page.words()[at..at + HEAD + BODY]
    }

    fn announce(&self, number: u64, announcement: &[u8; ANNOUNCEMENT]) {
        let mut body = [0; BODY];
        for (word, bytes) in body.iter_mut().zip(announcement.chunks_exact(4)) {
            *word = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        }
        announcements::write(self.entry(self.lower, number), number, &body);
    }

    fn announced(&self, number: u64) -> Announced {
        let mut body = [0; BODY];
        match announcements::read(self.entry(!self.lower, number), number, &mut body) {
            Stated::NotYet => Announced::NotYet,
            Stated::Past => Announced::Past,
            Stated::Here => {
                let mut bytes = [0; ANNOUNCEMENT];
                for (bytes, word) in bytes.chunks_exact_mut(4).zip(body) {
                    bytes.copy_from_slice(&word.to_le_bytes());
                }
                Announced::As(bytes)
            }
        }
    }
}
