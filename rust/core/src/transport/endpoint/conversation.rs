//! Messages between two processes that have no group in common yet: one holds a key that the other gave away, and comes by it.
//!
//! A conversation is one TCP connection, sealed under the keys of its handshake whatever the settings say, since public keys go
//! over it. It carries a few short messages, each with its length (4 bytes, little-endian) before it.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::wire::{Cut, Patience};
use crate::error::{Code, Error, Result};
use crate::transport::cipher::{Cipher, Failure, Sealed};

/// The most bytes of one message.
const LONGEST_MESSAGE: usize = 64 << 10;
/// Bytes before a message: its length.
const HEAD: usize = 4;

/// A conversation with one process.
pub struct Conversation {
    stream: TcpStream,
    sealed: Sealed,
    /// The beginning of the next message.
    incoming: Vec<u8>,
    ends: Arc<AtomicBool>,
}

impl std::fmt::Debug for Conversation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Conversation({:?})", self.stream)
    }
}

impl Conversation {
    pub(super) fn new(stream: TcpStream, cipher: Cipher) -> Self {
        Self {
            stream,
            sealed: Sealed::new(cipher),
            incoming: Vec::new(),
            ends: Arc::default(),
        }
    }

    /// From now on all waits fail once `ends` is set.
    pub fn end_with(&mut self, ends: Arc<AtomicBool>) {
        self.ends = ends;
    }

    /// Sends a message.
    ///
    /// # Errors
    /// `Timeout` at the deadline, `System` when the other side has gone, `Aborted` when it is called off.
    pub fn send(&mut self, message: &[u8], deadline: Instant) -> Result<()> {
        if message.len() > LONGEST_MESSAGE {
            return Err(Error::internal("a message of a conversation is too long"));
        }
        let mut frame = (message.len() as u32).to_le_bytes().to_vec();
        frame.extend(message);
        let mut rest = &frame[..];
        while !rest.is_empty() {
            match self.sealed.send(&self.stream, rest) {
                Ok(count) => rest = &rest[count..],
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(_) => return Err(gone()),
            }
        }
        Ok(())
    }

    /// The next message; `None` when it has not come by the deadline.
    ///
    /// # Errors
    /// `System` when the other side has gone, `Untrusted` when it does not keep the form, `Aborted` when it is called off.
    pub fn receive(&mut self, deadline: Instant) -> Result<Option<Vec<u8>>> {
        loop {
            if let Some(message) = self.take_message()? {
                return Ok(Some(message));
            }
            let mut room = [0; 4096];
            match self.sealed.receive(&self.stream, &mut room) {
                Ok(0) => return Err(gone()),
                Ok(count) => self.incoming.extend(&room[..count]),
                Err(Failure::Socket(Errno::AGAIN)) => match self.wait(PollFlags::IN, deadline) {
                    Ok(()) => {}
                    Err(error) if error.code == Code::Timeout => return Ok(None),
                    Err(error) => return Err(error),
                },
                Err(Failure::Socket(_)) => return Err(gone()),
                Err(Failure::Forged) => return Err(broken()),
            }
        }
    }

    fn take_message(&mut self) -> Result<Option<Vec<u8>>> {
        let Some((head, rest)) = self.incoming.split_first_chunk::<HEAD>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*head) as usize;
        if length > LONGEST_MESSAGE {
            return Err(broken());
        }
        let message = rest.get(..length).map(<[u8]>::to_vec);
        if message.is_some() {
            self.incoming.drain(..HEAD + length);
        }
        Ok(message)
    }

    fn wait(&self, events: PollFlags, deadline: Instant) -> Result<()> {
        let patience = Patience {
            deadline,
            called_off: [&self.ends; 2],
            turn: None,
        };
        patience
            .ready(self.stream.as_fd(), events)
            .map_err(|cut| match cut {
                Cut::TimedOut => Error::new(Code::Timeout, "the other process says nothing"),
                Cut::CalledOff => Error::new(Code::Aborted, "called off"),
                _ => gone(),
            })
    }
}

fn gone() -> Error {
    Error::new(Code::System, "the other process has closed the connection")
}

fn broken() -> Error {
    let what = "the other process says what no process of this version says";
    Error::new(Code::Untrusted, what)
}
