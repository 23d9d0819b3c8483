//! The beginning of every connection: both ends prove that they are the ranks they say they are before either believes
//! a byte.
//!
//! ```text
//! initiator                                             acceptor
//!     | magic, version, suite, group id, from, to,           |
//!     |   first Noise message {purpose, lane, link id}       |
//!     | ---------------------------------------------------> |   looks up the group and the public key of `from`
//!     |   "go on", second Noise message                      |
//!     | <--------------------------------------------------- |
//!     |   first transport message, empty                     |
//!     | ---------------------------------------------------> |   only now acts on what it was asked for
//!     |   transport message {answer}                         |
//!     | <--------------------------------------------------- |
//! ```
//!
//! The Noise pattern is `KKpsk0` (Noise Protocol Framework, revision 34; library `snow`): each side holds its own private key
//! and knows the other's public key from the group's table, and the job's secret, where there is one, is mixed in first. The
//! clear bytes before the first message are its prologue, so no field can be changed on the way. The first message proves that
//! the initiator holds its key, but it could be a recording; the empty message after the second one cannot, since that depends
//! on the acceptor's fresh key.
//!
//! A hello that is wrong in any way is answered by one byte ([`Reply::Refused`]), the same for every reason.
//!
//! The handshake ends with the keys of a [`Cipher`](super::cipher::Cipher), which encrypts the connection where the group asks
//! for that. Otherwise the bytes that follow are as they are, and an attacker on the path can read and alter them.
//!
//! This module does no I/O: it makes frames and judges them. Each side is a chain of types, one for each state that it
//! is in: [`Initiator`] and [`Proven`]; [`Stranger`], [`Challenged`] and [`Answers`].

mod acceptor;
mod initiator;
mod noise;
#[cfg(test)]
pub(super) mod tests;
mod words;

pub use self::acceptor::{Answers, Challenged, Stranger};
pub use self::initiator::{Initiator, Proven};
pub use self::words::{Answer, Hello, Lane, Purpose, Reply};

/// The first bytes of every connection.
pub const MAGIC: [u8; 8] = *b"unisono\n";
/// The version of the handshake and of what follows it.
pub const VERSION: u16 = 5;
/// Bytes that are sent in clear before the first Noise message.
const CLEAR: usize = 36;
/// Purpose, lane, link.
pub(super) const REQUEST: usize = 18;
/// The authentication tag of a message.
const TAG: usize = 16;
/// A public key that is made for one connection.
const KEY: usize = 32;
/// Bytes of the initiator's first frame.
pub const HELLO_BYTES: usize = CLEAR + KEY + REQUEST + TAG;
/// Bytes of the acceptor's first frame after its first byte, which is a [`Reply`].
pub const CHALLENGE_BYTES: usize = KEY + TAG;
/// Bytes of the initiator's second frame.
pub const PROOF_BYTES: usize = TAG;
/// Bytes of each answer of the acceptor.
pub const ANSWER_BYTES: usize = 1 + TAG;
