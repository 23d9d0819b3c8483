//! The operations that two ranks of one host have besides a [`Link`](super::Link)'s stream: to read memory where it lies, and
//! to share it.
//!
//! A message is *lent*: its header and the place of its payload go through the stream, and the peer then reads the payload with
//! [`try_recv`](super::Link::try_recv) or [`try_fold`](super::Link::try_fold) as if it had been streamed (a rendezvous by get,
//! in the terms of MPI). The lender keeps a [`Ticket`] and asks what has become of it. Memory that is *shared* the peer may
//! also write to, until it gives it back.

use std::time::Instant;

use super::{Lending, Loan, MESSAGE_HEADER, Page, SharedSpan, Terms, Ticket};
use crate::error::Result;
use crate::heap::{Held, IsOver, Place, Window};

/// From this length on several threads may read what is lent: reading so much takes several times as long as waking a thread.
pub(crate) const READ_BY_SEVERAL_FROM: usize = 4 << 20;

/// Memory that a peer may read and write.
#[derive(Clone, Copy, Debug)]
pub enum Shareable<'a> {
    /// An address and a number of bytes from there on.
    Span((usize, usize)),
    /// A window of this process. The peer may keep it mapped when it has given it back.
    Window(&'a Window),
}

/// The other end of a [`Link`](super::Link) between two ranks of one host.
///
/// As with a link, every method returns at once, but [`await_writer`](Neighbour::await_writer).
pub trait Neighbour {
    /// Payloads from this length on may be lent.
    fn lends_from(&self) -> usize;

    /// The most pieces that a lent payload may consist of.
    fn most_lent_runs(&self) -> usize;

    /// From which size on memory outside the shared heap is lent, instead of where that is measured to be faster.
    fn lend_private_from(&mut self, bytes: usize);

    /// Ranks of this host share cores: it costs the peer more to find a message half there than to wait for it.
    fn expect_a_crowd(&mut self);

    /// Sends a message by its header and the place of its payload, `(address, bytes)` piece by piece. The memory must
    /// stay as it is until [`Neighbour::loan`] says that it is back, or
    /// [`send_abort`](super::ControlChannel::send_abort) or the end of the link has revoked it.
    fn try_lend(
        &mut self,
        header: &[u8; MESSAGE_HEADER],
        runs: &[(usize, usize)],
        terms: Terms,
    ) -> Result<Lending>;

    /// The state of a lent or shared message.
    fn loan(&mut self, ticket: Ticket) -> Result<Loan>;

    /// Gives back, unread, the message whose header [`try_take`](super::Link::try_take) has just delivered. It was
    /// [offered](Terms::Offer) or shared.
    fn decline(&mut self);

    /// Whether this memory can be shared with the peer; `None` until the peer has said whether it reaches it, which wakes
    /// a sleeper.
    fn can_share(&mut self, what: Shareable<'_>) -> Option<bool>;

    /// Lends memory that the peer may also write to until it gives it back. Only what
    /// [can be shared](Neighbour::can_share). If it does not come back, [`Neighbour::await_writer`] comes before the
    /// memory is used for anything else.
    fn try_share(&mut self, header: &[u8; MESSAGE_HEADER], what: Shareable<'_>) -> Result<Lending>;

    /// The memory that a message shares, if it does; [`try_take`](super::Link::try_take) has just delivered its header. To be
    /// [given back](Neighbour::give_back), or declined before it has been used.
    fn shared(&mut self) -> Result<Option<SharedSpan>>;

    /// Gives back what the peer shares.
    fn give_back(&mut self);

    /// After [`send_abort`](super::ControlChannel::send_abort): returns when the peer is not in the middle of writing to memory
    /// that is shared with it. It will not begin again. Where the peer has stopped in the middle, this waits `until` then, and
    /// the heap takes the memory away from it.
    fn await_writer(&mut self, until: Instant);

    /// Wakes the peer, if it sleeps: a change in a window wakes no rank by itself.
    fn wake(&mut self);

    /// A page of memory that both ends have mapped; the same on every call.
    fn page(&self) -> Page;

    /// The peer's memory at this place of its heap, for ends that agree on its use by other means: the peer has found that it
    /// [can be shared](Neighbour::can_share). `None` where it cannot be mapped here. It stays mapped when the link is gone.
    fn reach(&self, place: Place, bytes: usize) -> Result<Option<Held>>;

    /// Tells, also when the link is gone, whether the peer's program is not there any more, as far as the system knows.
    fn end_of_program(&self) -> IsOver;
}
