//! How memory is lent between ranks of one host: on what terms, and what becomes of it.

/// A message that has been lent to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Counted from 1 in each direction.
    pub number: u64,
    /// The peer is known to be able to read it, so other messages may be sent before it is back. One that is not may
    /// be refused.
    pub proven: bool,
}

/// The outcome of an attempt to lend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lending {
    /// The peer may read the payload where it lies.
    Lent(Ticket),
    /// The link can carry no message now.
    NotNow,
    /// This payload is to be streamed.
    Unfit,
}

/// The state of a message that was lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loan {
    /// The peer has not finished reading it.
    Out,
    /// It may be changed again.
    Returned,
    /// The peer cannot read it there, and waits for the payload in the stream.
    Refused,
    /// The peer has not read it: it was lent as an [offer](Terms::Offer), and there is no place for it yet.
    Declined,
}

/// On what terms a payload is lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terms {
    /// The peer may turn out not to reach the memory, and refuses the loan then.
    Loan,
    /// Only if the peer is known to reach it, so the ticket is always proven; the peer may [decline](super::Neighbour::decline)
    /// to read it. The next may be offered when the one before is back.
    Offer,
}
