//! How the bytes of a message pass between a stream and the host: through registered memory, at once where there is room for
//! all of them, and in pieces where there is not.
//!
//! Memory is not registered for a message while anything is under way: the driver may then wait until the device is idle, which
//! it is not while a stream waits for a peer, and the peer may wait for the very message. So a message takes a part of what
//! is registered already, and leaves room for others: half of the longest part there is at most when all of it fits, an
//! eighth otherwise. In that eighth two pieces take turns, and the host copies each from or to ordinary memory of the
//! whole message. So a stream that sends waits for the host, never for the peer. The pieces of a receive are few, however long
//! it is: a stream takes a thousand commands or so before a call waits for room in it, and that stream waits for a peer.
//!
//! Two words count the pieces that each side has moved:
//!
//! | | the stream | the host |
//! |---|---|---|
//! | a send | fills a place when the host has emptied it | empties a place when the stream has filled it |
//! | a receive | empties a place when the host has filled it | fills a place that the stream emptied, once it has the message |
//!
//! A message that fits has one piece, which the host sends from where it is, or receives into it.
//!
//! A long message may lie in a [depot](crate::transport::cuda::depot) instead, which the receiver learns when it comes. So its
//! stream *fetches* each piece from an address that the host writes down before it counts the first: of the piece's place, or
//! of the sender's depot for all pieces. The addresses of all pieces are copied to the device at once: between two kernels
//! nothing then makes the device turn to another process.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::buffer::Memory;
use crate::error::Result;
use crate::heap::Scratch;
use crate::transport::cuda::driver::{Device, MemoryOperation, Pinned, Stream};
use crate::transport::cuda::kernels::{self, Guard, Segment};

use super::copies::{Copies, Origin, for_each_run};
use super::note::NOTED_FROM;

/// Bytes of the words, after those of the message.
const WORDS: usize = 256;
/// Bytes of an address.
const ADDRESS: usize = 8;
/// Bytes of the addresses that pieces are fetched from, before the words.
const ADDRESSES: usize = MOST_PIECES * ADDRESS;
/// Pieces that take turns.
const TURNS: usize = 2;
/// Bytes of a piece, unless there were more than [`MOST_PIECES`].
const SMALLEST_PIECE: usize = 4096;
const LARGEST_PIECE: usize = 1 << 20;
/// The most pieces of a receive: each is three commands, and they wait for the peer.
const MOST_PIECES: usize = 256;
/// The longest message that is not cut, where there is room.
const LONGEST_UNCUT: usize = 64 << 20;

/// A message's way between a stream and the host.
pub(super) struct BounceBuffer {
    window: Pinned,
    cut: MessageCut,
    /// The whole message, where it has several pieces.
    whole: Option<Scratch>,
    /// Pieces that the host has moved.
    moved: u32,
}

/// Which way a message goes.
#[derive(Clone, Copy)]
pub(super) enum Direction {
    /// From the device. The stream waits for the host alone.
    Out,
    /// To the device.
    In,
    /// To the device, from where the host says.
    Fetched,
}

/// How a message is cut, and where its stream finds the pieces and the words.
#[derive(Clone, Copy)]
pub(super) struct MessageCut {
    window: u64,
    words: u64,
    /// The addresses that pieces are fetched from.
    addresses: Option<u64>,
    bytes: usize,
    /// Of a piece.
    piece: usize,
    pieces: u32,
}

/// A word: how many pieces a side has moved.
#[derive(Clone, Copy)]
enum Count {
    Stream,
    Host,
}

/// Whether a message of `bytes` bytes would take more than it may of what is registered.
pub(super) fn lacks_room(device: &Device, bytes: usize) -> bool {
    wanted(bytes) > Pinned::most_at_once(device) / 2
}

/// Has memory registered for messages of `bytes` bytes. To be called while the driver waits for no peer.
pub(super) fn make_room(device: &'static Device, bytes: usize) {
    let wanted = wanted(bytes);
    // Few different lengths, so that messages that grow do not need ever more.
    let room = 2 * (wanted - WORDS).next_power_of_two() + 2 * SMALLEST_PIECE;
    match Pinned::shared(device, room) {
        Ok(room) => room.give_back(),
        Err(error) => tracing::debug!("a message of {bytes} bytes goes in small pieces: {error}"),
    }
}

/// Bytes that a message takes at most where there is room.
fn wanted(bytes: usize) -> usize {
    let places = match bytes <= LONGEST_UNCUT {
        true => bytes,
        false => TURNS * LARGEST_PIECE.max(least_fetched(bytes)),
    };
    match bytes < NOTED_FROM {
        true => places + WORDS,
        false => places + WORDS + ADDRESSES,
    }
}

/// The shortest piece, in bytes, that cuts a message into [`MOST_PIECES`] at most.
fn least(bytes: usize) -> usize {
    let least = bytes.div_ceil(MOST_PIECES);
    least.next_multiple_of(SMALLEST_PIECE).max(SMALLEST_PIECE)
}

/// The same of pieces that are fetched, each with one command more.
fn least_fetched(bytes: usize) -> usize {
    2 * least(bytes)
}

impl BounceBuffer {
    /// A buffer for a message of `bytes` bytes. Registers memory only where none is left for two pieces that are small enough.
    ///
    /// # Errors
    /// `System` where there is no memory.
    pub(super) fn new(device: &'static Device, bytes: usize, direction: Direction) -> Result<Self> {
        let room = Pinned::most_at_once(device);
        let is_fetched = matches!(direction, Direction::Fetched);
        let wanted = wanted(bytes);
        let tail = match is_fetched {
            true => WORDS + ADDRESSES,
            false => WORDS,
        };
        if bytes <= LONGEST_UNCUT
            && wanted <= room / 2
            && let Some(window) = Pinned::shared_at_once(device, wanted)
        {
            return Self::over(window, (bytes, bytes), is_fetched);
        }
        let least = match direction {
            Direction::Out => SMALLEST_PIECE,
            Direction::In => least(bytes),
            Direction::Fetched => least_fetched(bytes),
        };
        let usual = 1
            << (room / (8 * TURNS))
                .clamp(SMALLEST_PIECE, LARGEST_PIECE)
                .ilog2();
        let mut piece = least.max(usual);
        loop {
            let taken = bytes.min(TURNS * piece) + tail;
            if let Some(window) = Pinned::shared_at_once(device, taken) {
                return Self::over(window, (bytes, piece), is_fetched);
            }
            if piece / 2 < least {
                let window = Pinned::shared(device, taken)?;
                return Self::over(window, (bytes, piece), is_fetched);
            }
            piece /= 2;
        }
    }

    fn over(window: Pinned, (bytes, piece): (usize, usize), is_fetched: bool) -> Result<Self> {
        let pieces = bytes.div_ceil(piece.max(1)).max(1) as u32;
        let whole = match pieces {
            1 => None,
            _ => match Scratch::for_message(bytes) {
                Ok(whole) => Some(whole),
                Err(error) => {
                    window.give_back();
                    return Err(error);
                }
            },
        };
        let words = window.address() + (window.bytes() - WORDS) as u64;
        let buffer = Self {
            cut: MessageCut {
                window: window.address(),
                words,
                addresses: is_fetched.then(|| words - ADDRESSES as u64),
                bytes,
                piece,
                pieces,
            },
            window,
            whole,
            moved: 0,
        };
        buffer.store(Count::Stream, 0);
        buffer.store(Count::Host, 0);
        Ok(buffer)
    }

    /// The cut, for its stream.
    pub(super) fn cut(&self) -> MessageCut {
        self.cut
    }

    /// Bytes of registered memory.
    pub(super) fn bytes(&self) -> usize {
        self.window.bytes()
    }

    fn word(&self, count: Count) -> &AtomicU32 {
        let words = self.window.bytes() - WORDS;
        self.window.word(words + place_of(count))
    }

    fn load(&self, count: Count) -> u32 {
        self.word(count).load(Ordering::Acquire)
    }

    fn store(&self, count: Count, pieces: u32) {
        self.word(count).store(pieces, Ordering::Release);
    }

    /// The message as the host sends or receives it.
    ///
    /// # Safety
    /// Until the operation has ended, `self` lives; it sends once [`BounceBuffer::is_filled`], and no piece of what it receives
    /// is moved before it has ended.
    pub(super) unsafe fn view(&self) -> Memory {
        let Some(whole) = &self.whole else {
            // SAFETY: as the caller promises: a stream that sends has written all, one that receives waits for the host's
            // count.
            return unsafe { self.window.view(0, self.cut.bytes) };
        };
        let (start, _) = whole.memory().place(0, self.cut.bytes);
        // SAFETY: the bytes are the scratch's, which lives as long as `self`; the rest is the caller's promise.
        unsafe {
            Memory::from_raw_parts(std::ptr::with_exposed_provenance_mut(start), self.cut.bytes)
        }
    }

    /// Takes the pieces of a send that the stream has moved. Returns whether there was one.
    pub(super) fn take(&mut self) -> bool {
        let there = self.load(Count::Stream);
        let before = self.moved;
        while self.moved < there {
            if let Some(whole) = &mut self.whole {
                let (place, first, bytes) = self.cut.piece(self.moved);
                // SAFETY: the stream has written the piece, and waits for the count before it writes there again.
                let from = unsafe { self.window.view(place, bytes) };
                whole
                    .write(first, bytes)
                    .copy_from_slice(from.read(0, bytes));
            }
            self.moved += 1;
            self.store(Count::Host, self.moved);
        }
        self.moved > before
    }

    /// Whether the whole of a send is with the host.
    pub(super) fn is_filled(&self) -> bool {
        self.moved == self.cut.pieces
    }

    /// Writes down where a piece is fetched from, if it is: the message would begin `address`.
    fn lead(&self, index: u32, address: u64) {
        if self.cut.addresses.is_none() {
            return;
        }
        let at = self.window.bytes() - WORDS - ADDRESSES + index as usize * ADDRESS;
        let halves = [address as u32, (address >> 32) as u32];
        for (half, at) in halves.into_iter().zip([at, at + 4]) {
            // The stream reads it after the count.
            self.window.word(at).store(half, Ordering::Relaxed);
        }
    }

    /// The address where the message would begin, if the piece is in its place.
    fn beginning(&self, index: u32) -> u64 {
        let (place, first, _) = self.cut.piece(index);
        (self.cut.window + place as u64).wrapping_sub(first as u64)
    }

    /// Whether the stream has been given nothing of a receive.
    pub(super) fn awaits_all(&self) -> bool {
        self.moved == 0
    }

    /// Has the stream fetch each piece from its place.
    fn lead_to_places(&self) {
        for index in 0..self.cut.pieces {
            self.lead(index, self.beginning(index));
        }
    }

    /// Has the stream fetch the whole message from `address` on, memory of the device that it can read.
    pub(super) fn put_from(&mut self, address: u64) {
        for index in self.moved..self.cut.pieces {
            self.lead(index, address);
        }
        self.moved = self.cut.pieces;
        self.release();
    }

    /// Gives the stream the pieces of a receive for which there is a place. Returns whether there was one.
    pub(super) fn put(&mut self) -> bool {
        let until = self.load(Count::Stream).saturating_add(TURNS as u32);
        let before = self.moved;
        while self.moved < until.min(self.cut.pieces) {
            if let Some(whole) = &self.whole {
                let (place, first, bytes) = self.cut.piece(self.moved);
                // SAFETY: the stream has read what was there before, and waits for the count before it reads this.
                let mut to = unsafe { self.window.view(place, bytes) };
                to.write(0, bytes)
                    .copy_from_slice(whole.memory().read(first, bytes));
            }
            if self.moved == 0 {
                self.lead_to_places();
            }
            self.moved += 1;
            self.store(Count::Host, self.moved);
        }
        self.moved > before
    }

    /// Ends a receive whose data will not come: lets the stream pass, which finds the bytes of `poison` again and again.
    /// Returns whether that is news. Pieces that the stream was given before stay.
    ///
    /// # Safety
    /// The operation of [`BounceBuffer::view`] has ended, or what comes of it is not used.
    pub(super) unsafe fn spoil(&mut self, poison: u64) -> bool {
        if self.moved == self.cut.pieces {
            return false;
        }
        // SAFETY: the stream may be reading pieces that it was given, of a message that is lost all the same; the rest is the
        // caller's promise.
        unsafe { self.window.fill(0, self.places(), poison) };
        if self.moved == 0 {
            self.lead_to_places();
        }
        self.moved = self.cut.pieces;
        self.release();
        true
    }

    /// Bytes of the window that are for pieces.
    fn places(&self) -> usize {
        let addresses = self.cut.addresses.map_or(0, |_| ADDRESSES);
        self.window.bytes() - WORDS - addresses
    }

    /// Lets the stream pass, whatever is there.
    pub(super) fn release(&self) {
        self.store(Count::Host, self.cut.pieces);
    }

    /// Whether the stream is past the message.
    pub(super) fn is_passed(&self) -> bool {
        self.load(Count::Stream) == self.cut.pieces
    }

    /// Its memory is for others now.
    pub(super) fn give_back(self) {
        self.window.give_back();
    }
}

fn place_of(count: Count) -> usize {
    128 * count as usize
}

impl MessageCut {
    /// A piece's place in the window, its first byte in the message, and its length.
    fn piece(&self, index: u32) -> (usize, usize, usize) {
        let first = index as usize * self.piece;
        let place = index as usize % TURNS * self.piece;
        (place, first, self.piece.min(self.bytes - first))
    }

    fn awaits_host(&self, pieces: u32) -> MemoryOperation {
        MemoryOperation::WaitAtLeast {
            address: self.words + place_of(Count::Host) as u64,
            value: pieces,
        }
    }

    fn counts(&self, pieces: u32) -> MemoryOperation {
        MemoryOperation::Write {
            address: self.words + place_of(Count::Stream) as u64,
            value: pieces,
        }
    }

    /// Enqueues what takes a message out of `memory`.
    ///
    /// # Errors
    /// Those of the driver.
    pub(super) fn enqueue_send(&self, memory: &Memory, stream: &Stream) -> Result<()> {
        let mut copies = Copies::new(Guard::NONE);
        for index in 0..self.pieces {
            let before = (index + 1).saturating_sub(TURNS as u32);
            // One call for the count of the last piece and the wait for the next.
            let mut operations = Vec::with_capacity(2);
            operations.extend((index > 0).then(|| self.counts(index)));
            operations.extend((before > 0).then(|| self.awaits_host(before)));
            stream.operate(&operations)?;
            let (place, first, bytes) = self.piece(index);
            copies.gather(memory, first, bytes, self.window + place as u64);
            copies.flush(stream)?;
        }
        stream.operate(&[self.counts(self.pieces)])
    }

    /// Enqueues what takes a message out of `memory` to `slot`, which has room for all of it, of a buffer for no bytes.
    ///
    /// # Errors
    /// Those of the driver.
    pub(super) fn enqueue_leave(&self, memory: &Memory, slot: u64, stream: &Stream) -> Result<()> {
        let mut copies = Copies::new(Guard::NONE);
        copies.gather(memory, 0, memory.len(), slot);
        copies.flush(stream)?;
        stream.operate(&[self.counts(self.pieces)])
    }

    /// Bytes of the addresses that pieces are fetched from.
    pub(super) fn addresses_bytes(&self) -> usize {
        self.pieces as usize * ADDRESS
    }

    /// As [`MessageCut::enqueue_receive`], of pieces that are fetched. At `words` is as much of the device's memory as the
    /// addresses take, this message's alone: they are brought there first, since all blocks of a kernel read one.
    pub(super) fn enqueue_fetch(
        &self,
        memory: &Memory,
        (words, guard): (Option<u64>, Guard),
        stream: &Stream,
    ) -> (Result<()>, Result<()>) {
        let put = (0..self.pieces).try_for_each(|index| {
            let mut operations = Vec::with_capacity(2);
            operations.extend((index > 0).then(|| self.counts(index)));
            operations.push(self.awaits_host(index + 1));
            stream.operate(&operations)?;
            let addresses = self.addresses.unwrap_or(0);
            if let (Some(words), 0) = (words, index) {
                stream.copy_from_host(words, addresses, self.addresses_bytes())?;
            }
            let address = words.unwrap_or(addresses) + u64::from(index) * ADDRESS as u64;
            let (_, first, bytes) = self.piece(index);
            let mut segments = Vec::new();
            for_each_run(memory, first, bytes, |done, to, run| {
                segments.push(Segment {
                    base: address,
                    ..Segment::new((first + done) as u64, to, run as u64)
                });
            });
            kernels::copy(stream, &segments, guard)
        });
        (put, stream.operate(&[self.counts(self.pieces)]))
    }

    /// Enqueues what puts a message into `memory`. Returns how the last count went, too: without it the stream does not say
    /// that it is past the message.
    pub(super) fn enqueue_receive(
        &self,
        memory: &Memory,
        stream: &Stream,
    ) -> (Result<()>, Result<()>) {
        let mut copies = Copies::new(Guard::NONE);
        let put = (0..self.pieces).try_for_each(|index| {
            let mut operations = Vec::with_capacity(2);
            operations.extend((index > 0).then(|| self.counts(index)));
            operations.push(self.awaits_host(index + 1));
            stream.operate(&operations)?;
            let (place, first, bytes) = self.piece(index);
            copies.scatter(Origin::at(self.window + place as u64), memory, first, bytes);
            copies.flush_by_engine(stream)
        });
        (put, stream.operate(&[self.counts(self.pieces)]))
    }
}
