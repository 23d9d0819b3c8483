//! One direction of a link in memory: a ring of bytes with one producer and one consumer.
//!
//! `tail` counts the bytes ever published, `head` those ever released; both only grow, and their difference is what the ring
//! holds. The producer alone writes `tail`, the consumer alone writes `head`, and each keeps its own index privately and the
//! other's as last seen, so that a small message costs one store and, most of the time, no look at the other side's cache line.
//! The other side's index is checked when it is read: an impossible index is an error and never an address.
//!
//! # Overlap
//! A large transfer is published and released in chunks, so that one side copies into the ring
//! while the other copies out of it. A release costs the producer a cache miss, so small ones are
//! saved up to [`lag`] bytes. That much room may be held back while the consumer has emptied the
//! ring, and never more, so a sender is never stuck before the bytes its receiver waits for: those
//! fit into the room that is left.
//!
//! # Sleeping
//! Before it sleeps, a side raises its flag, issues a sequentially consistent fence and looks at
//! the other side's index once more. After it has moved its index, a side issues such a fence and
//! looks at the other's flag. One of the two fences comes first. If the sleeper's does, the mover
//! sees the flag and rings the doorbell; if the mover's does, the sleeper sees the index and stays
//! awake. Both may happen, which costs a needless doorbell; neither cannot. (This is the
//! store-buffering shape of Dekker's algorithm.) The mover takes the flag down by a swap, so a
//! sleep costs at most one doorbell.
//!
//! The ring is generic over its [`Memory`]: the tests model-check the same code with loom over
//! memory that reports every unordered access.

use std::sync::atomic::Ordering;

use crate::error::{Code, Error, Result};
use crate::sync::Word;

/// The longest element that can be folded.
pub(super) const MAX_ALIGN: usize = 16;

/// How many bytes of a large transfer are published at once. While the consumer copies them the producer copies the next,
/// so the transfer takes as long as the slower copy, and the first and the last of these.
const PUBLISHED: usize = 8 << 10;

/// The same where ranks share cores: a reader that has caught up yields its core.
const PUBLISHED_IN_A_CROWD: usize = 32 << 10;

/// How many bytes of a large transfer are taken and released at once.
const RELEASED: usize = 32 << 10;

/// The memory that the two sides of a ring share. All words are zero at first.
pub(super) trait Memory {
    /// A word of the shared memory.
    type Word: Word<Value = u64>;

    /// Bytes the ring holds: a power of two.
    fn capacity(&self) -> usize;
    /// Bytes ever published. Written by the producer.
    fn tail(&self) -> &Self::Word;
    /// Bytes ever released. Written by the consumer.
    fn head(&self) -> &Self::Word;
    /// 1 while the producer sleeps until there is room. Raised by the producer, taken down by
    /// either.
    fn producer_asleep(&self) -> &Self::Word;
    /// 1 while the consumer sleeps until there are bytes. Raised by the consumer, taken down by
    /// either.
    fn consumer_asleep(&self) -> &Self::Word;
    /// A sequentially consistent fence.
    fn fence(&self);

    /// Copies `bytes` into the ring's memory at offset `at`.
    ///
    /// # Safety
    /// `at + bytes.len() <= capacity()`, and those bytes are not published.
    unsafe fn write(&self, at: usize, bytes: &[u8]);

    /// Copies the ring's memory at offset `at` into `bytes`.
    ///
    /// # Safety
    /// `at + bytes.len() <= capacity()`, and those bytes are published and not released.
    unsafe fn read(&self, at: usize, bytes: &mut [u8]);

    /// Lends `length` bytes of the ring's memory at offset `at` to `fold`.
    ///
    /// # Safety
    /// `at + length <= capacity()`, and those bytes are published and not released.
    unsafe fn lend(&self, at: usize, length: usize, fold: &mut dyn FnMut(&[u8]));
}

/// How many consumed bytes the consumer may keep to itself before it releases them.
fn lag(capacity: usize) -> usize {
    (capacity / 8).clamp(1, RELEASED)
}

/// How much of `most` bytes at once, so that even a small ring is worked on from both ends.
fn chunk(capacity: usize, most: usize) -> usize {
    (capacity / 4).clamp(1, most)
}

/// The bytes in the ring by these indices; the peer wrote one of them.
#[inline]
fn held(tail: u64, head: u64, capacity: usize) -> Result<usize> {
    let held = tail.wrapping_sub(head);
    if held > capacity as u64 {
        return Err(corrupt(tail, head, capacity));
    }
    Ok(held as usize)
}

#[cold]
fn corrupt(tail: u64, head: u64, capacity: usize) -> Error {
    Error::new(
        Code::Untrusted,
        format!(
            "impossible indices in a shared memory ring of {capacity} bytes (published {tail}, \
             released {head}): the peer's memory is damaged or its version of unisono differs"
        ),
    )
}

/// The end that sends.
pub(super) struct Producer<M> {
    memory: M,
    tail: u64,
    /// `head` as last seen.
    head: u64,
    /// Bytes that are published at once.
    piece: usize,
    armed: bool,
}

impl<M: Memory> Producer<M> {
    /// The sending end of a fresh ring. There must be only one.
    pub(super) fn new(memory: M) -> Self {
        Self {
            piece: chunk(memory.capacity(), PUBLISHED),
            memory,
            tail: 0,
            head: 0,
            armed: false,
        }
    }

    /// The consumer may have to share its core.
    pub(super) fn publish_for_a_crowd(&mut self) {
        self.piece = chunk(self.memory.capacity(), PUBLISHED_IN_A_CROWD);
    }

    /// Bytes ever published.
    #[inline]
    pub(super) fn published(&self) -> u64 {
        self.tail
    }

    /// Bytes that the ring holds.
    pub(super) fn capacity(&self) -> usize {
        self.memory.capacity()
    }

    /// Copies in as much of `bytes` as there is room for, at most one ring's worth, so that a
    /// caller with several links comes round to all of them. Calls `wake` when the consumer sleeps.
    #[inline]
    pub(super) fn send(&mut self, bytes: &[u8], mut wake: impl FnMut()) -> Result<usize> {
        let capacity = self.memory.capacity();
        let limit = bytes.len().min(capacity);
        let mut sent = 0;
        while sent < limit {
            let piece = (limit - sent).min(self.piece);
            let room = self.room(piece)?;
            if room == 0 {
                break;
            }
            let piece = &bytes[sent..sent + piece.min(room)];
            self.write(piece);
            sent += piece.len();
            self.publish(piece.len(), &mut wake);
        }
        Ok(sent)
    }

    /// Copies both parts in, if there is room for them. The first, which is not published by itself, is short.
    pub(super) fn send_whole(
        &mut self,
        head: &[u8],
        rest: &[u8],
        wake: impl FnMut(),
    ) -> Result<bool> {
        let bytes = head.len() + rest.len();
        if rest.is_empty() || self.room(bytes)? < bytes {
            return Ok(false);
        }
        self.write(head);
        self.tail += head.len() as u64;
        let sent = self.send(rest, wake)?;
        debug_assert_eq!(sent, rest.len(), "there was room");
        Ok(true)
    }

    /// Announces a sleep until there is room. True when there is some already; also when the
    /// indices are corrupt, which the next [`Producer::send`] reports.
    pub(super) fn arm(&mut self) -> bool {
        self.armed = true;
        self.memory.producer_asleep().store(1, Ordering::Relaxed);
        self.memory.fence();
        self.room(usize::MAX).map_or(true, |room| room > 0)
    }

    /// Takes the announcement back. True when the peer has seen it, and rings or has rung the
    /// doorbell.
    pub(super) fn disarm(&mut self) -> bool {
        let armed = std::mem::take(&mut self.armed);
        armed && self.memory.producer_asleep().swap(0, Ordering::AcqRel) == 0
    }

    /// The room there is; looks at the consumer's index only when what is known of it leaves less
    /// than `wanted`.
    #[inline]
    fn room(&mut self, wanted: usize) -> Result<usize> {
        let capacity = self.memory.capacity();
        let mut room = capacity - held(self.tail, self.head, capacity)?;
        if room < wanted {
            // Acquire: the consumer has finished reading what it released.
            let head = self.memory.head().load(Ordering::Acquire);
            room = capacity - held(self.tail, head, capacity)?;
            self.head = head;
        }
        Ok(room)
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        let capacity = self.memory.capacity();
        let at = self.tail as usize & (capacity - 1);
        let (first, rest) = bytes.split_at(bytes.len().min(capacity - at));
        // SAFETY: both parts end within the ring by the split, and `room` found the bytes from
        // `tail` on released, so that the consumer is done with them and does not look before
        // `tail` is published.
        unsafe {
            self.memory.write(at, first);
            if !rest.is_empty() {
                self.memory.write(0, rest);
            }
        }
    }

    #[inline]
    fn publish(&mut self, count: usize, wake: &mut impl FnMut()) {
        self.tail += count as u64;
        // Release: a reader that sees the new tail sees the bytes before it.
        self.memory.tail().store(self.tail, Ordering::Release);
        self.memory.fence();
        let flag = self.memory.consumer_asleep();
        if flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::AcqRel) != 0 {
            wake();
        }
    }
}

/// The end that receives.
pub(super) struct Consumer<M> {
    memory: M,
    head: u64,
    /// `head` as the producer knows it: at most [`lag`] behind.
    released: u64,
    /// `tail` as last seen.
    tail: u64,
    armed: bool,
    /// Bytes that the last fold left: a part of an element, whose rest has yet to come.
    part: usize,
}

impl<M: Memory> Consumer<M> {
    /// The receiving end of a fresh ring. There must be only one.
    pub(super) fn new(memory: M) -> Self {
        Self {
            memory,
            head: 0,
            released: 0,
            tail: 0,
            armed: false,
            part: 0,
        }
    }

    /// Whether bytes have arrived.
    #[inline]
    pub(super) fn has_bytes(&mut self) -> Result<bool> {
        Ok(self.available(1)? > 0)
    }

    /// Whether all bytes before the one numbered `end` have been published or consumed.
    pub(super) fn has_up_to(&mut self, end: u64) -> Result<bool> {
        let missing = end.saturating_sub(self.head);
        let wanted = usize::try_from(missing).unwrap_or(usize::MAX);
        Ok(self.available(wanted)? >= wanted)
    }

    /// Bytes ever consumed.
    #[inline]
    pub(super) fn consumed(&self) -> u64 {
        self.head
    }

    /// Fills `bytes` with what has arrived, and leaves it where it is. False when there is less.
    pub(super) fn peek(&mut self, bytes: &mut [u8]) -> Result<bool> {
        let is_here = self.available(bytes.len())? >= bytes.len();
        if is_here {
            self.read(bytes);
        }
        Ok(is_here)
    }

    /// Copies out as many bytes as have arrived and fit, at most one ring's worth. Calls `wake`
    /// when the producer sleeps.
    #[inline]
    pub(super) fn recv(&mut self, bytes: &mut [u8], mut wake: impl FnMut()) -> Result<usize> {
        let capacity = self.memory.capacity();
        let limit = bytes.len().min(capacity);
        let mut received = 0;
        self.part = 0;
        while received < limit {
            let piece = (limit - received).min(chunk(capacity, RELEASED));
            let piece = piece.min(self.available(piece)?);
            if piece == 0 {
                break;
            }
            self.read(&mut bytes[received..received + piece]);
            received += piece;
            self.release(piece, &mut wake);
        }
        Ok(received)
    }

    /// Lends arrived bytes to `fold` in runs of multiples of `align`, in total at most `max` and
    /// one ring's worth. An element that lies across the end of the memory is put together outside
    /// it.
    pub(super) fn fold(
        &mut self,
        max: usize,
        align: usize,
        fold: &mut dyn FnMut(&[u8]),
        mut wake: impl FnMut(),
    ) -> Result<usize> {
        assert!(
            (1..=MAX_ALIGN).contains(&align) && max.is_multiple_of(align),
            "a fold of at most {max} bytes in elements of {align}"
        );
        let capacity = self.memory.capacity();
        let limit = max.min(capacity / align * align);
        let mut folded = 0;
        self.part = 0;
        while folded < limit {
            let piece = (limit - folded).min(chunk(capacity, RELEASED).max(align));
            let available = self.available(piece)?;
            let piece = piece.min(available) / align * align;
            if piece == 0 {
                self.part = available;
                break;
            }
            let at = self.head as usize & (capacity - 1);
            let run = piece.min(capacity - at) / align * align;
            let run = if run == 0 {
                let mut element = [0; MAX_ALIGN];
                self.read(&mut element[..align]);
                fold(&element[..align]);
                align
            } else {
                // SAFETY: the run ends within the ring by the minimum above, and `available` found
                // that many bytes from `head` on published; the producer leaves them alone until
                // they are released.
                unsafe { self.memory.lend(at, run, fold) };
                run
            };
            folded += run;
            self.release(run, &mut wake);
        }
        Ok(folded)
    }

    /// Announces a sleep until there are bytes. True when there are some already, more than the part
    /// of an element that the last fold left; also when the indices are corrupt, which the next call
    /// that receives reports.
    pub(super) fn arm(&mut self) -> bool {
        self.armed = true;
        self.memory.consumer_asleep().store(1, Ordering::Relaxed);
        self.memory.fence();
        self.available(usize::MAX)
            .map_or(true, |bytes| bytes > self.part)
    }

    /// Takes the announcement back. True when the peer has seen it, and rings or has rung the
    /// doorbell.
    pub(super) fn disarm(&mut self) -> bool {
        let armed = std::mem::take(&mut self.armed);
        armed && self.memory.consumer_asleep().swap(0, Ordering::AcqRel) == 0
    }

    /// The bytes that have arrived; looks at the producer's index only when fewer than `wanted` are
    /// known of.
    #[inline]
    fn available(&mut self, wanted: usize) -> Result<usize> {
        let capacity = self.memory.capacity();
        let mut available = held(self.tail, self.head, capacity)?;
        if available < wanted {
            // Acquire: the bytes before the tail are as the producer wrote them.
            let tail = self.memory.tail().load(Ordering::Acquire);
            // More than the producer was told it may have is as impossible as more than the ring
            // holds.
            held(tail, self.released, capacity)?;
            available = held(tail, self.head, capacity)?;
            self.tail = tail;
        }
        Ok(available)
    }

    #[inline]
    fn read(&self, bytes: &mut [u8]) {
        let capacity = self.memory.capacity();
        let at = self.head as usize & (capacity - 1);
        let length = bytes.len();
        let (first, rest) = bytes.split_at_mut(length.min(capacity - at));
        // SAFETY: both parts end within the ring by the split, and `available` found that many
        // bytes from `head` on published; the producer leaves them alone until they are released.
        unsafe {
            self.memory.read(at, first);
            if !rest.is_empty() {
                self.memory.read(0, rest);
            }
        }
    }

    #[inline]
    fn release(&mut self, count: usize, wake: &mut impl FnMut()) {
        self.head += count as u64;
        if self.head - self.released < lag(self.memory.capacity()) as u64 {
            return;
        }
        self.released = self.head;
        // Release: a writer that sees the new head may overwrite what was read before it.
        self.memory.head().store(self.head, Ordering::Release);
        self.memory.fence();
        let flag = self.memory.producer_asleep();
        if flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::AcqRel) != 0 {
            wake();
        }
    }
}
