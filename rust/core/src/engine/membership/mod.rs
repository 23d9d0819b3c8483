//! Who is in a group after some of its ranks are gone: the agreement of those that are left.
//!
//! `agreement`: the protocol, as a machine without clock, thread or socket. `message`: its messages, as they travel. `tests`:
//! all ranks of an agreement in one thread, with messages, deaths and cuts in an order that a seed decides. The driver is
//! `crate::communicator::shrink`, which carries the messages over groups of two.

pub(crate) mod agreement;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
pub(crate) mod message;
#[cfg(test)]
mod tests;
