//! A connection that was accepted, up to the link that it becomes: what every transport needs to serve one.

use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::membership::{Claim, Membership};
use super::shared::Shared;
use super::wire::{Cut, Patience};
use crate::error::Error;
use crate::transport::handshake::{Answer, Answers, Hello};

/// An accepted connection.
pub(super) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Stream {
    /// Who is there, for logs.
    pub(super) fn peer(&self) -> String {
        match self {
            Self::Tcp(stream) => peer_of(stream),
            Self::Unix(_) => "a process of this host".to_owned(),
        }
    }
}

pub(super) fn peer_of(stream: &TcpStream) -> String {
    match stream.peer_addr() {
        Ok(address) => address.to_string(),
        Err(_) => "an address that is gone".to_owned(),
    }
}

/// Why a connection was turned away, for the log.
pub(super) struct Reason {
    text: String,
    /// It happens among members: attempts that cross, and ranks that leave.
    pub(super) is_usual: bool,
}

impl Reason {
    pub(super) fn new(text: String) -> Self {
        Self {
            text,
            is_usual: false,
        }
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<Cut> for Reason {
    fn from(cut: Cut) -> Self {
        let is_usual = matches!(cut, Cut::Closed | Cut::Refused | Cut::CalledOff);
        let text = match cut {
            Cut::Closed | Cut::Refused => {
                "it closed the connection during the handshake".to_owned()
            }
            Cut::TimedOut | Cut::Silent => "it did not complete the handshake in time".to_owned(),
            Cut::CalledOff => {
                "it had not completed the handshake when its place was needed".to_owned()
            }
            Cut::System(error) => error.to_string(),
        };
        Self { text, is_usual }
    }
}

impl From<Error> for Reason {
    fn from(error: Error) -> Self {
        Self::new(error.message)
    }
}

/// The place of a proven member whose link is being made; given back on drop.
pub(super) struct VisitorSlot(Arc<Shared>);

impl VisitorSlot {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        shared.visiting.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(shared))
    }
}

impl Drop for VisitorSlot {
    fn drop(&mut self) {
        self.0.visiting.fetch_sub(1, Ordering::AcqRel);
        self.0.wake_acceptor();
    }
}

/// A connection from a proven member.
pub(super) struct Visit<'a> {
    pub(super) shared: &'a Shared,
    pub(super) membership: Arc<Membership>,
    pub(super) hello: Hello,
    pub(super) answers: Answers,
    pub(super) patience: Patience<'a>,
}

impl Visit<'_> {
    pub(super) fn answer(&mut self, stream: impl AsFd, answer: Answer) -> Result<(), Reason> {
        let frame = self.answers.frame(answer)?;
        Ok(self.patience.write(stream, &frame)?)
    }

    /// The right to make this link; `None` after the answer that refuses it.
    pub(super) fn claim(&mut self, stream: impl AsFd) -> Result<Option<Claim>, Reason> {
        let Hello { from, lane, .. } = self.hello;
        if self.membership.is_closed() {
            self.answer(stream, Answer::Left)?;
            return Ok(None);
        }
        match self
            .membership
            .claim_accepting(from, lane, &self.patience)?
        {
            Ok(claim) => Ok(Some(claim)),
            Err(answer) => {
                tracing::debug!(from, %lane, ?answer, "refused a link");
                self.answer(stream, answer)?;
                Ok(None)
            }
        }
    }

    /// The end of a connection for a transport whose connections come over another kind of socket.
    pub(super) fn turn_away(mut self, stream: &Stream) -> Result<(), Reason> {
        self.answer(stream, Answer::Failed)?;
        Err(Reason::new(
            "it came over the wrong kind of socket".to_owned(),
        ))
    }
}
