//! Short messages in one direction of a link: a few slots of fixed size, each with its stamp beside its bytes.
//!
//! A message in the ring costs its receiver two cache misses, one after the other: the index, then the bytes. A
//! slot's stamp is on the cache line on which its message begins, so a message of a few words costs one. Stamps
//! are numbers that grow, at places that nothing else is written to, so a slot is full when it bears the number that
//! comes next. A slot has room for 4 KiB: up to there a message is short enough not to be copied from both ends at once.
//!
//! Slots and ring carry one stream of messages. Each post says after how many bytes of the ring it comes
//! ([`Post::after`]), and is published before any later byte of the ring; so a reader that finds bytes in the ring and no
//! post, and after that still no post at its place, knows that the bytes come first.
//!
//! A post either carries a message or announces one that is *lent* (see `loans`).
//!
//! The flags of sleepers are the ring's, and the same argument holds for them: to publish, and to give slots back, is a
//! sequentially consistent exchange followed by a look at the flag. An exchange and a load of that order keep theirs also
//! where the processor's is weak, as do a release and an acquire on aarch64; on x86-64 it costs less than a store and a fence.

use std::sync::atomic::Ordering;

use crate::error::{Code, Error, Result};
use crate::sync::Word;

/// Slots of one direction. The model checker gets by with few.
pub(super) const SLOTS: usize = if cfg!(loom) { 2 } else { 16 };

/// Bytes of a slot: 68 cache lines, so that the first ones of different slots share no set of a cache.
pub(super) const SLOT: usize = 4352;

/// Bytes of a message that a slot holds, beside its stamp and position.
pub(super) const ROOM: usize = SLOT - 16;

/// How many messages the receiver takes before it gives the slots back.
const LAG: u64 = SLOTS.div_ceil(4) as u64;

const LENGTH_BITS: u32 = 13;
const LOAN_BIT: u64 = 1 << LENGTH_BITS;
const NUMBER_SHIFT: u32 = LENGTH_BITS + 1;

/// The memory that the two sides of the slots share. All words are zero at first.
pub(super) trait Board {
    type Word: Word<Value = u64>;

    /// The number, kind and length of the message in the slot. Written by the sender, last.
    fn stamp(&self, slot: usize) -> &Self::Word;
    /// After how many bytes of the ring it comes. Written by the sender.
    fn after(&self, slot: usize) -> &Self::Word;
    /// Messages ever taken. Written by the receiver.
    fn taken(&self) -> &Self::Word;
    /// The ring's flags.
    fn producer_asleep(&self) -> &Self::Word;
    /// The ring's flags.
    fn consumer_asleep(&self) -> &Self::Word;

    /// Copies `bytes` into the slot's room at `at`.
    ///
    /// # Safety
    /// `at + bytes.len() <= ROOM`, and the slot is not published.
    unsafe fn write(&self, slot: usize, at: usize, bytes: &[u8]);

    /// Lends the first `length` bytes of the slot's room to `take`.
    ///
    /// # Safety
    /// `length <= ROOM`, and the slot is published and not given back.
    unsafe fn lend(&self, slot: usize, length: usize, take: &mut dyn FnMut(&[u8]));
}

/// A message that has been posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Post {
    /// After how many bytes of the ring it comes.
    pub(super) after: u64,
    pub(super) length: usize,
    /// It announces a loan.
    pub(super) lent: bool,
}

/// The end that posts.
pub(super) struct Poster<B> {
    board: B,
    posted: u64,
    /// `taken` as last seen.
    taken: u64,
}

impl<B: Board> Poster<B> {
    pub(super) fn new(board: B) -> Self {
        Self {
            board,
            posted: 0,
            taken: 0,
        }
    }

    /// Whether a slot is free.
    #[inline]
    pub(super) fn has_room(&mut self) -> Result<bool> {
        if self.posted - self.taken < SLOTS as u64 {
            return Ok(true);
        }
        // Acquire: the receiver has finished reading what it gave back.
        let taken = self.board.taken().load(Ordering::Acquire);
        if taken < self.taken || taken > self.posted {
            return Err(corrupt(format_args!(
                "{taken} messages taken of {}",
                self.posted
            )));
        }
        self.taken = taken;
        Ok(self.posted - taken < SLOTS as u64)
    }

    /// Posts the two parts as one message, if a slot is free. Calls `wake` when the receiver sleeps.
    ///
    /// # Panics
    /// If they are longer than [`ROOM`].
    #[inline]
    pub(super) fn post(
        &mut self,
        (after, lent): (u64, bool),
        (head, rest): (&[u8], &[u8]),
        wake: impl FnOnce(),
    ) -> Result<bool> {
        let length = head.len() + rest.len();
        assert!(length <= ROOM, "a message of {length} bytes in a slot");
        if !self.has_room()? {
            return Ok(false);
        }
        let slot = self.posted as usize % SLOTS;
        // SAFETY: both parts end within the room by the assertion. The slot is free: `has_room` found that what was in
        // it has been taken, and it is published below.
        unsafe {
            self.board.write(slot, 0, head);
            self.board.write(slot, head.len(), rest);
        }
        self.board.after(slot).store(after, Ordering::Relaxed);
        self.posted += 1;
        let kind = if lent { LOAN_BIT } else { 0 };
        let stamp = self.posted << NUMBER_SHIFT | kind | length as u64;
        self.board.stamp(slot).swap(stamp, Ordering::SeqCst);
        let flag = self.board.consumer_asleep();
        if flag.load(Ordering::SeqCst) != 0 && flag.swap(0, Ordering::AcqRel) != 0 {
            wake();
        }
        Ok(true)
    }
}

/// The end that takes.
pub(super) struct Taker<B> {
    board: B,
    taken: u64,
    /// `taken` as the sender knows it.
    released: u64,
}

impl<B: Board> Taker<B> {
    pub(super) fn new(board: B) -> Self {
        Self {
            board,
            taken: 0,
            released: 0,
        }
    }

    /// The message that has been posted next, if it has.
    #[inline]
    pub(super) fn peek(&self) -> Result<Option<Post>> {
        let slot = self.taken as usize % SLOTS;
        // Acquire: the message is as its sender wrote it.
        let stamp = self.board.stamp(slot).load(Ordering::Acquire);
        if stamp >> NUMBER_SHIFT != self.taken + 1 {
            return self.is_free(stamp).map(|()| None);
        }
        let length = (stamp & (LOAN_BIT - 1)) as usize;
        if length > ROOM {
            return Err(corrupt(format_args!("a message of {length} bytes")));
        }
        Ok(Some(Post {
            after: self.board.after(slot).load(Ordering::Relaxed),
            length,
            lent: stamp & LOAN_BIT != 0,
        }))
    }

    /// Lends the message `post`, which [`Taker::peek`] found, to `look`, and leaves it where it is.
    pub(super) fn look_at(&self, post: Post, look: &mut dyn FnMut(&[u8])) {
        let slot = self.taken as usize % SLOTS;
        // SAFETY: `peek` checked the length and found the slot published; it has not been given back since.
        unsafe { self.board.lend(slot, post.length, look) };
    }

    /// Lends the message `post`, which [`Taker::peek`] found, to `take`, and gives its slot back. Calls `wake` when the
    /// sender sleeps.
    #[inline]
    pub(super) fn take(&mut self, post: Post, take: &mut dyn FnMut(&[u8]), wake: impl FnOnce()) {
        let slot = self.taken as usize % SLOTS;
        // SAFETY: `peek` checked the length and found the slot published; it is given back below.
        unsafe { self.board.lend(slot, post.length, take) };
        self.taken += 1;
        if self.taken - self.released < LAG {
            return;
        }
        self.released = self.taken;
        // Also releases: a writer that sees the new count may overwrite what was read before it.
        self.board.taken().swap(self.taken, Ordering::SeqCst);
        let flag = self.board.producer_asleep();
        if flag.load(Ordering::SeqCst) != 0 && flag.swap(0, Ordering::AcqRel) != 0 {
            wake();
        }
    }

    /// Whether a stamp that is not the next one is of the message that was in the slot before.
    #[inline]
    fn is_free(&self, stamp: u64) -> Result<()> {
        let before = (self.taken + 1).saturating_sub(SLOTS as u64);
        if stamp >> NUMBER_SHIFT != before {
            return Err(corrupt(format_args!(
                "number {} where {} comes next",
                stamp >> NUMBER_SHIFT,
                self.taken + 1
            )));
        }
        Ok(())
    }
}

/// The error of a message that was posted at another place in the stream than the one it is found at.
#[cold]
pub(super) fn misplaced(after: u64, consumed: u64) -> Error {
    corrupt(format_args!(
        "a message that comes after {after} bytes of the ring where {consumed} have been read"
    ))
}

#[cold]
fn corrupt(what: std::fmt::Arguments<'_>) -> Error {
    Error::new(
        Code::Untrusted,
        format!(
            "impossible words in the slots of a shared memory link ({what}): the peer's memory is damaged or its \
             version of unisono differs"
        ),
    )
}
