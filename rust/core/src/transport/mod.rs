//! Links: one ordered, reliable, two-way byte stream between two ranks of a group, and what carries it.
//!
//! A link never blocks and never interprets the bytes it carries. Beside the stream it has a *control channel*
//! that is never behind data: it carries the peer's farewell, abort notice and position, and ends when the peer's process
//! ends. Three transports implement it: [`local`] (inside a process), [`shm`] (inside a host) and [`tcp`].
//!
//! [`cuda`] is no link: it is what operations on device memory are made of, between ranks whose links tell of each
//! other's end.

pub mod cipher;
pub mod control;
pub mod cuda;
pub mod endpoint;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
pub mod handshake;
pub mod keys;
pub mod local;
pub mod shm;
pub mod tcp;

#[cfg(test)]
mod suite;

use std::os::fd::BorrowedFd;
use std::time::Instant;

pub(crate) use self::shm::WRITERS_PATIENCE;
pub use self::shm::{Page, Shared};
use crate::error::{Code, Result};
use crate::heap::Window;

/// What the peer last said, or did, on the control channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// Nothing: the peer is there.
    Present,
    /// It closed its communicator in good order. What it had sent before can still be received.
    Left,
    /// It aborted its group and says why.
    Aborted(Notice),
    /// Its end of the control channel closed without a farewell: the process ended, or the host is gone. What it
    /// had sent before can still be received. The string says what was seen (`connection reset`).
    Lost(String),
}

/// Why a group was aborted, as it travels from rank to rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The kind of the first failure.
    pub code: Code,
    /// The rank that noticed it first.
    pub origin: u32,
    /// The rank that caused it, if one did.
    pub culprit: Option<u32>,
    /// In words.
    pub message: String,
}

/// What a rank is in, as it tells a peer that it waits for; the link does not interpret it.
pub type Position = [u8; POSITION_BYTES];

/// Bytes of a [`Position`]: a message's header and two lengths.
pub const POSITION_BYTES: usize = MESSAGE_HEADER + 16;

/// What a sleeper wants to be woken for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// Bytes to receive.
    pub readable: bool,
    /// Room to send.
    pub writable: bool,
}

/// Bytes with which every message begins; the link does not interpret them.
pub const MESSAGE_HEADER: usize = 40;

/// A message that has been lent to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Counted from 1 in each direction.
    pub number: u64,
    /// The peer is known to be able to read it, so other messages may be sent before it is back. One that is not may
    /// be refused.
    pub proven: bool,
}

/// What became of an attempt to lend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lending {
    /// The peer may read the payload where it lies.
    Lent(Ticket),
    /// The link can carry no message now.
    NotNow,
    /// This payload is to be streamed.
    Unfit,
}

/// What has become of a message that was lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loan {
    /// The peer has not finished reading it.
    Out,
    /// It may be changed again.
    Returned,
    /// The peer cannot read it there, and waits for the payload in the stream.
    Refused,
    /// The peer has not read it: it had been offered ([`Link::try_offer`]), and there is no place for it yet.
    Declined,
}

/// One ordered reliable stream between two ranks of a group.
///
/// Every method returns at once. `Ok(0)` means "not now", and also stands for the end of the stream: a broken
/// connection is not an error of these calls but shows in [`Link::peer_state`], after the bytes that arrived
/// before it have been delivered. An `Err` means that the peer broke the link's own rules (corrupt ring indices).
pub trait Link: Send {
    /// Takes as many bytes of `bytes` as fit, and makes them visible to the peer.
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize>;

    /// Fills `bytes` as far as bytes have arrived.
    fn try_recv(&mut self, bytes: &mut [u8]) -> Result<usize>;

    /// [`Link::try_recv`] where the receiver has its own way to copy from memory to memory: past the caches, or by several
    /// threads.
    fn try_recv_by(&mut self, copy: &dyn Fn(&mut [u8], &[u8]), bytes: &mut [u8]) -> Result<usize> {
        let (most, mut done) = (bytes.len(), 0);
        self.try_fold(most, 1, &mut |run| {
            copy(&mut bytes[done..done + run.len()], run);
            done += run.len();
        })
    }

    /// Lends arrived bytes in place: calls `fold` zero or more times with consecutive runs, each a non-zero
    /// multiple of `align` bytes long (`align` <= 16), in total at most `max` bytes (a multiple of `align`).
    /// Consumes what it lent and returns the total. The slices need not be aligned in memory.
    fn try_fold(&mut self, max: usize, align: usize, fold: &mut dyn FnMut(&[u8])) -> Result<usize>;

    /// The longest message, with its header, that may be posted; 0 where posting is no faster than the stream.
    fn post_limit(&self) -> usize {
        0
    }

    /// Sends a message whole, at its place in the stream. False: not now.
    fn try_post(&mut self, _header: &[u8; MESSAGE_HEADER], _payload: &[u8]) -> Result<bool> {
        Ok(false)
    }

    /// Sends a message that is too long to be posted, if the stream has room for all of it. False: nothing has been sent.
    fn try_stream(&mut self, _header: &[u8; MESSAGE_HEADER], _payload: &[u8]) -> Result<bool> {
        Ok(false)
    }

    /// Lends the next message to `take`, if it was posted or lent and not streamed. Of a posted message that is all of
    /// it; of a lent one it is the header, and [`Link::try_recv`] and [`Link::try_fold`] deliver the payload.
    fn try_take(&mut self, _take: &mut dyn FnMut(&[u8])) -> Result<bool> {
        Ok(false)
    }

    /// Whether the next message has begun to arrive in the stream. Asked between two messages, when
    /// [`Link::try_take`] found none.
    fn is_streaming(&mut self) -> Result<bool> {
        Ok(true)
    }

    /// The header of the next message, if it has arrived: the message stays where it is. Asked between two messages.
    fn peek(&mut self) -> Result<Option<[u8; MESSAGE_HEADER]>> {
        Ok(None)
    }

    /// Payloads from this length on may be lent.
    fn lends_from(&self) -> usize {
        usize::MAX
    }

    /// The most pieces that a lent payload may consist of.
    fn most_lent_runs(&self) -> usize {
        0
    }

    /// From which size on memory outside the shared heap is lent, instead of where that is measured to be faster.
    fn lend_private_from(&mut self, _bytes: usize) {}

    /// Ranks of this host share cores: it costs the peer more to find a message half there than to wait for it.
    fn expect_a_crowd(&mut self) {}

    /// The peer is lost when its host has not answered for this many seconds; where the peer is on another host. What is
    /// only slow, or stopped, is not lost.
    fn lose_silent_host_after(&mut self, _seconds: Option<u32>) {}

    /// Sends a message by its header and the place of its payload, `(address, bytes)` piece by piece. The memory must
    /// stay as it is until [`Link::loan`] says that it is back, or [`Link::send_abort`] or the end of the link has
    /// revoked it.
    fn try_lend(
        &mut self,
        _header: &[u8; MESSAGE_HEADER],
        _runs: &[(usize, usize)],
    ) -> Result<Lending> {
        Ok(Lending::Unfit)
    }

    /// As [`Link::try_lend`], for a message that the peer may [decline](Link::decline) to read. It is always proven;
    /// where it would not be, it is unfit. The next may be offered when the one before is back.
    fn try_offer(
        &mut self,
        _header: &[u8; MESSAGE_HEADER],
        _runs: &[(usize, usize)],
    ) -> Result<Lending> {
        Ok(Lending::Unfit)
    }

    /// Whether the memory from an address on, so many bytes, can be shared with the peer; `None` until the peer has said
    /// whether it reaches it, which wakes a sleeper.
    fn can_share(&mut self, _place: (usize, usize)) -> Option<bool> {
        Some(false)
    }

    /// As [`Link::try_offer`] of one piece, and the peer may also write to it until it gives it back. Only what
    /// [can be shared](Link::can_share). If it does not come back, [`Link::await_writer`] comes before the memory is used
    /// for anything else.
    fn try_share(
        &mut self,
        _header: &[u8; MESSAGE_HEADER],
        _place: (usize, usize),
    ) -> Result<Lending> {
        Ok(Lending::Unfit)
    }

    /// As [`Link::can_share`], of a window of this process.
    fn can_show(&mut self, _window: &Window) -> Option<bool> {
        Some(false)
    }

    /// As [`Link::try_share`] of a whole window. The peer may keep it when it has given it back.
    fn try_show(&mut self, _header: &[u8; MESSAGE_HEADER], _window: &Window) -> Result<Lending> {
        Ok(Lending::Unfit)
    }

    /// The memory that the message shares of which [`Link::try_take`] has just delivered the header, if it does. To be
    /// [given back](Link::give_back), or declined before it has been used.
    fn shared(&mut self) -> Result<Option<Shared>> {
        Ok(None)
    }

    /// Gives back what the peer shares.
    fn give_back(&mut self) {}

    /// After [`Link::send_abort`]: returns when the peer is not in the middle of writing to what is shared with it. It
    /// will not begin again. Where the peer has stopped in the middle that is waited for `until` then, and the heap takes
    /// the memory away from it.
    fn await_writer(&mut self, _until: Instant) {}

    /// Gives back the message that was offered and of which [`Link::try_take`] has just delivered the header, unread.
    fn decline(&mut self) {}

    /// What has become of a lent message.
    fn loan(&mut self, _ticket: Ticket) -> Result<Loan> {
        Ok(Loan::Returned)
    }

    /// Announces that this side is about to sleep on [`Link::fds`] until one of `interest` can be served. Returns
    /// true when that is already so (then do not sleep). Must be followed by [`Link::disarm`].
    fn arm(&mut self, interest: Interest) -> bool;

    /// Withdraws the announcement of [`Link::arm`] and consumes what woke the sleeper.
    fn disarm(&mut self);

    /// Wakes the peer, if it sleeps.
    fn wake(&mut self) {}

    /// The descriptors to watch edge-triggered (readable, writable and hang-up) while armed.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;

    /// The pidfd of the peer's process, which becomes readable when that ends, whoever keeps its sockets open. `None` where
    /// the peer is on another host or in this process, or cannot be named here. All links to one process have the same
    /// descriptor, which is closed with the last of them.
    fn peer_pidfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Reads the control channel and says how the peer is. Cheap enough to call on every pass of a wait loop
    /// that found nothing else to do; not on the hot path.
    fn peer_state(&mut self) -> PeerState;

    /// Sends an abort notice on the control channel, as far as that goes without blocking. The stream is dead
    /// afterwards.
    fn send_abort(&mut self, notice: &Notice);

    /// Says farewell on the control channel: this side will send no more, and bytes sent before stay readable
    /// for the peer. Called once, before the link is dropped in good order.
    fn send_farewell(&mut self);

    /// Tells the peer on the control channel what this side is in.
    fn send_position(&mut self, position: &Position);

    /// What the peer last said it is in, once; [`Link::peer_state`] reads it in.
    fn take_position(&mut self) -> Option<Position>;

    /// Asks the peer's process for a sign of life, unless it owes one. [`Link::peer_state`] reads the answer in.
    fn ask(&mut self) {}

    /// The descriptor on which the peer's questions come, where somebody must call [`Link::peer_state`] to answer them
    /// also while this side does nothing with the link.
    fn questions(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Why a peer that is [`PeerState::Present`] does not seem to run, in words that follow its name, if it does not.
    fn stall(&self) -> Option<String> {
        None
    }

    /// A page of memory that both ends have mapped, where the transport has such; the same on every call.
    fn page(&self) -> Option<Page> {
        None
    }

    /// Bytes of memory that this side holds for the link.
    fn memory(&self) -> usize;

    /// A word for logs and errors: `shared memory`, `tcp 10.0.0.7:4321`.
    fn describe(&self) -> String;
}
