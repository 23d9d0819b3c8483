//! Links: one ordered, reliable, two-way byte stream between two ranks of a group, and what carries it.
//!
//! A link never blocks and never interprets the bytes it carries. Beside the stream it has a *control channel* that is never
//! behind data ([`ControlChannel`]): it carries the peer's farewell, abort notice and position, and ends when the peer's
//! process ends. Three transports implement it: [`local`] (inside a process), [`shm`] (inside a host) and [`tcp`]. Only peers
//! on the same host can read and write memory where it lies; the trait for that is [`Neighbour`].
//!
//! [`cuda`] is no link: it is what operations on device memory are made of, between ranks whose links tell of each
//! other's end.

mod channel;
pub mod cipher;
pub(crate) mod control;
pub mod cuda;
pub mod endpoint;
pub(crate) mod ends;
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
pub(crate) mod suite;

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

pub use self::channel::{ControlChannel, Notice, POSITION_BYTES, PeerState, Position};
pub(crate) use self::neighbour::READ_BY_SEVERAL_FROM;
pub use self::neighbour::{Neighbour, Shareable};
pub(crate) use self::shm::WRITERS_PATIENCE;
pub use self::shm::{Page, SharedSpan};
pub use self::tcp::mending::{Breach, Hindrance, Mend, Outage, Part, SocketId};
pub use self::tcp::stripes::Stripe;
pub use self::terms::{Lending, Loan, Terms, Ticket};
use crate::error::Result;
use crate::reduce::Workers;

/// The events that a sleeper wants to be woken for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// Bytes to receive.
    pub readable: bool,
    /// Room to send.
    pub writable: bool,
}

/// Payloads up to this length are copied together with their header.
const COPIED_TOGETHER: usize = 216;

/// Bytes with which every message begins; the link does not interpret them.
pub const MESSAGE_HEADER: usize = 40;

/// One ordered reliable stream between two ranks of a group.
///
/// Every method returns at once. `Ok(0)` means "not now", and also stands for the end of the stream: a broken
/// connection is not an error of these calls but shows in [`ControlChannel::peer_state`], after the bytes that arrived
/// before it have been delivered. An `Err` means that the peer broke the link's own rules (corrupt ring indices).
pub trait Link: ControlChannel + Send {
    /// Takes as many bytes of `bytes` as fit, and makes them visible to the peer. The next call that sends must begin with the
    /// bytes that it did not take: some of them may be on their way.
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize>;

    /// Sends the rest of a header, at least one byte, and then the payload, as far as that goes now: by one system call
    /// where sending takes one. A short message is published at once.
    fn try_send_message(&mut self, header: &[u8], payload: &[u8]) -> Result<usize> {
        let mut together = [0; MESSAGE_HEADER + COPIED_TOGETHER];
        let payload = &payload[..payload.len().min(COPIED_TOGETHER)];
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

    /// These threads may take part in what is sent and received.
    fn share(&mut self, _workers: &Arc<Workers>) {}

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

    /// Further connections that this side should open to the peer for what it sends, by their numbers; told once.
    fn wants_stripes(&mut self) -> Option<Range<u8>> {
        None
    }

    /// Adds such a connection, of either direction. Its descriptor is to be watched with those of [`Link::fds`].
    fn add_stripe(&mut self, _stripe: Stripe) {}

    /// Those that this side wanted do not all come.
    fn give_up_stripes(&mut self) {}

    /// A connection of the link that has broken and is to be made again; told once. The peer is present meanwhile.
    fn wants_mending(&mut self) -> Option<Breach> {
        None
    }

    /// A further socket for such a connection. Its descriptor is to be watched with those of [`Link::fds`].
    fn mend(&mut self, _mend: Mend) {}

    /// The connection that had this socket is not made again, for that reason.
    fn cannot_mend(&mut self, _socket: SocketId, _why: &Hindrance) {}

    /// Whether the connection that had this socket is still to be made again.
    fn needs_mending(&self, _socket: SocketId) -> bool {
        false
    }

    /// Whether the peer owes an answer: its state is to be looked at some times a second.
    fn is_unanswered(&self) -> bool {
        false
    }

    /// Whether it is to be looked at some times a second, since it is not known whether anything comes back.
    fn is_in_doubt(&self) -> bool {
        false
    }

    /// Whether not all connections of the link carry bytes.
    fn is_mending(&self) -> bool {
        false
    }

    /// Whether one of them that does not, or over which nothing comes back, has bytes that the peer may lack. A peer that has
    /// left needs none.
    fn is_owing(&self) -> bool {
        false
    }

    /// Whether the peer's system has all that was sent, as far as that is known. A peer that has left needs nothing.
    fn is_settled(&self) -> bool {
        true
    }

    /// The last time in which they did not, once it is over; told once.
    fn take_healed(&mut self) -> Option<Outage> {
        None
    }

    /// The header of the next message, if it has arrived: the message stays where it is. Asked between two messages.
    fn peek(&mut self) -> Result<Option<[u8; MESSAGE_HEADER]>> {
        Ok(None)
    }

    /// The peer as a [`Neighbour`], if it is on this host.
    fn neighbour(&mut self) -> Option<&mut dyn Neighbour> {
        None
    }

    /// Announces that this side is about to sleep on [`Link::fds`] until one of `interest` can be served. Returns true when
    /// that is already so (then do not sleep). A part of an element that [`Link::try_fold`] has left, and nothing more, is no
    /// reason to stay awake. Must be followed by [`Link::disarm`].
    fn arm(&mut self, interest: Interest) -> bool;

    /// Withdraws the announcement of [`Link::arm`] and consumes what woke the sleeper.
    fn disarm(&mut self);

    /// The descriptors to watch edge-triggered (readable, writable and hang-up) while armed.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;

    /// Bytes of memory that this side holds for the link.
    fn memory(&self) -> usize;

    /// A word for logs and errors: `shared memory`, `tcp 10.0.0.7:4321`.
    fn describe(&self) -> String;
}
