//! Links: one ordered, reliable, two-way byte stream between two ranks of a group, and what carries it.
//!
//! A link never blocks and never interprets the bytes it carries. Beside the stream it has a *control channel*
//! that is never behind data: it carries the peer's farewell, abort notice and position, and ends when the peer's process
//! ends. Three transports implement it: [`local`] (inside a process), [`shm`] (inside a host) and [`tcp`]. What only a peer
//! on the same host can do, read and write memory where it lies, is a trait beside it, [`Neighbour`].
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
pub mod neighbour;
pub mod shm;
pub mod tcp;
mod terms;

#[cfg(test)]
mod suite;

use std::os::fd::BorrowedFd;

pub use self::neighbour::{Neighbour, Shareable};
pub(crate) use self::shm::WRITERS_PATIENCE;
pub use self::shm::{Page, Shared};
pub use self::terms::{Lending, Loan, Terms, Ticket};
use crate::error::{Code, Result};

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

/// Payloads up to this length are copied together with their header.
const TOGETHER: usize = 216;

/// Bytes with which every message begins; the link does not interpret them.
pub const MESSAGE_HEADER: usize = 40;

/// One ordered reliable stream between two ranks of a group.
///
/// Every method returns at once. `Ok(0)` means "not now", and also stands for the end of the stream: a broken
/// connection is not an error of these calls but shows in [`Link::peer_state`], after the bytes that arrived
/// before it have been delivered. An `Err` means that the peer broke the link's own rules (corrupt ring indices).
pub trait Link: Send {
    /// Takes as many bytes of `bytes` as fit, and makes them visible to the peer.
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize>;

    /// Sends the rest of a header, at least one byte, and then the payload, as far as that goes now: by one system call
    /// where sending takes one. A short message is published at once.
    fn try_send_message(&mut self, header: &[u8], payload: &[u8]) -> Result<usize> {
        let mut together = [0; MESSAGE_HEADER + TOGETHER];
        let payload = &payload[..payload.len().min(TOGETHER)];
        together[..header.len()].copy_from_slice(header);
        together[header.len()..][..payload.len()].copy_from_slice(payload);
        self.try_send(&together[..header.len() + payload.len()])
    }

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

    /// What the peer can do besides, if it is on this host.
    fn neighbour(&mut self) -> Option<&mut dyn Neighbour> {
        None
    }

    /// The peer is lost when its host has not answered for this many seconds; where the peer is on another host. What is
    /// only slow, or stopped, is not lost.
    fn lose_silent_host_after(&mut self, _seconds: Option<u32>) {}

    /// Announces that this side is about to sleep on [`Link::fds`] until one of `interest` can be served. Returns
    /// true when that is already so (then do not sleep). Must be followed by [`Link::disarm`].
    fn arm(&mut self, interest: Interest) -> bool;

    /// Withdraws the announcement of [`Link::arm`] and consumes what woke the sleeper.
    fn disarm(&mut self);

    /// The descriptors to watch edge-triggered (readable, writable and hang-up) while armed.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;

    /// Reads the control channel and says how the peer is. Cheap enough to call on every pass of a wait loop
    /// that found nothing else to do; not on the hot path.
    fn peer_state(&mut self) -> PeerState;

    /// Sends an abort notice on the control channel, as far as that goes without blocking. The stream is dead
    /// afterwards.
    fn send_abort(&mut self, notice: &Notice);

    /// Says farewell on the control channel: this side will send no more, and bytes sent before stay readable
    /// for the peer. Called once, before the link is dropped in good order.
    fn send_farewell(&mut self);

    /// Whether the peer has said farewell: it reads nothing more. Looks at the control channel, so it is not for the hot path.
    fn has_left(&mut self) -> bool {
        false
    }

    /// After [`Link::send_farewell`]: whether the peer, or its system, has all that was sent. What still comes is discarded.
    /// Where a link is dropped before, and more comes, what has not arrived may be lost.
    fn is_delivered(&mut self) -> bool {
        true
    }

    /// Tells the peer on the control channel what this side is in.
    fn send_position(&mut self, position: &Position);

    /// What the peer last said it is in, once; [`Link::peer_state`] reads it in.
    fn take_position(&mut self) -> Option<Position>;

    /// Asks the peer's process for a sign of life, unless it owes one. [`Link::peer_state`] reads the answer in.
    fn ask(&mut self) {}

    /// The descriptor on which the peer's questions come, where a thread must call [`Link::peer_state`] to answer them
    /// also while this side does nothing with the link.
    fn questions(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Why a peer that is [`PeerState::Present`] does not seem to run, in words that follow its name, if it does not.
    fn stall(&self) -> Option<String> {
        None
    }

    /// Bytes of memory that this side holds for the link.
    fn memory(&self) -> usize;

    /// A word for logs and errors: `shared memory`, `tcp 10.0.0.7:4321`.
    fn describe(&self) -> String;
}
