//! The words in which a link and its group speak of broken connections, which are made again.
//!
//! The side that had opened a connection opens it again; the other waits for it, and looks meanwhile whether the peer's process
//! is still there. The link only says what has broken ([`Breach`]) and takes what was made ([`Mend`]); threads of the endpoint
//! do the rest. A connection over which nothing comes back is opened again too, while the system still tries the old one:
//! routers may have forgotten it, and where the network was cut the system tries again ever more rarely. A connection that
//! carries data goes on where it was (`connection.rs`). On the control channel both sides say again what holds (`control`).

use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use crate::transport::cipher::Cipher;

/// One of the connections of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The one that carries the bytes of both directions.
    Data,
    /// The control channel.
    Control,
    /// A stripe, for what the side that opened it sends, by its number.
    Stripe(u8),
}

impl Part {
    /// Bytes of the written form.
    pub(in crate::transport) const BYTES: usize = 2;

    pub(in crate::transport) fn write(self) -> [u8; Self::BYTES] {
        match self {
            Self::Data => [0, 0],
            Self::Control => [1, 0],
            Self::Stripe(number) => [2, number],
        }
    }

    /// `None` for what no member would write.
    pub(in crate::transport) fn read(bytes: [u8; Self::BYTES]) -> Option<Self> {
        match bytes {
            [0, 0] => Some(Self::Data),
            [1, 0] => Some(Self::Control),
            [2, number] => Some(Self::Stripe(number)),
            _ => None,
        }
    }
}

/// A socket of a connection: the connection, and how many sockets it had before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketId {
    /// The connection.
    pub part: Part,
    /// The number of sockets that it had before this one.
    pub number: u32,
}

impl SocketId {
    /// Bytes of the written form.
    pub(in crate::transport) const BYTES: usize = Part::BYTES + 4;

    pub(in crate::transport) fn write(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..Part::BYTES].copy_from_slice(&self.part.write());
        bytes[Part::BYTES..].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    /// `None` for what no member would write.
    pub(in crate::transport) fn read(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let [kind, stripe, number @ ..] = *bytes;
        Some(Self {
            part: Part::read([kind, stripe])?,
            number: u32::from_le_bytes(number),
        })
    }
}

/// The break of a connection, or the suspicion of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breach {
    /// The socket that broke.
    pub socket: SocketId,
    /// This side opens the connection again; else the peer does.
    pub is_ours: bool,
    /// The break, in words.
    pub cause: String,
    /// Nothing comes back from the peer's host. The system goes on asking, and decides when it is lost.
    pub is_dark: bool,
    /// The system has asked the peer's host in vain for as long as that may be silent.
    pub was_silent: bool,
}

/// The reason why a connection cannot be opened again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hindrance {
    /// The peer's process has ended.
    Ended,
    /// The peer has left the group.
    Left,
    /// It has not come about so far, in words.
    NotSoFar(String),
}

/// A further socket for a connection of a link.
pub struct Mend {
    pub(super) socket: SocketId,
    /// This side has opened it.
    pub(super) is_ours: bool,
    pub(super) stream: TcpStream,
    pub(super) cipher: Option<Cipher>,
    /// Bytes that go over it first, in clear: the answer to the peer's handshake.
    pub(super) answer: Vec<u8>,
}

impl std::fmt::Debug for Mend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mend({:?})", self.socket)
    }
}

impl Mend {
    /// `stream` is to be `socket`, encrypted if there is a cipher. `is_ours`: this side has opened it.
    pub fn new(socket: SocketId, is_ours: bool, stream: TcpStream, cipher: Option<Cipher>) -> Self {
        Self {
            socket,
            is_ours,
            stream,
            cipher,
            answer: Vec::new(),
        }
    }

    /// The same with the answer to the peer's handshake, which goes over the socket when that has taken its place: the peer
    /// does not close the socket before while this side still goes by the bytes that its system acknowledges.
    #[must_use]
    pub fn answering(mut self, answer: &[u8]) -> Self {
        self.answer = answer.to_vec();
        self
    }

    /// The socket that it is to be.
    pub fn socket(&self) -> SocketId {
        self.socket
    }
}

impl AsFd for Mend {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// The time from the first break of a link's connections until all of them carry bytes again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outage {
    /// When it was noticed.
    pub since: Instant,
    /// The first break, in words.
    pub cause: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_read_as_they_were_written() {
        for part in [
            Part::Data,
            Part::Control,
            Part::Stripe(0),
            Part::Stripe(255),
        ] {
            let socket = SocketId { part, number: 258 };
            assert_eq!(SocketId::read(&socket.write()), Some(socket));
        }
        for bytes in [[0, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0]] {
            assert_eq!(SocketId::read(&bytes), None);
        }
    }
}
