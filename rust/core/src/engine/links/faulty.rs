//! A link over which nothing moves, for tests of what fails on it.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use crate::error::Result;
use crate::heap::{Held, IsOver, Place};
use crate::transport::{
    ControlChannel, Interest, Lending, Link, Loan, MESSAGE_HEADER, Neighbour, Notice, Page,
    PeerState, Position, Shareable, SharedSpan, Terms, Ticket,
};

/// The things that a caller asks of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    Send,
    Receive,
    State,
    Arm,
    Disarm,
    Abort,
}

/// A link that calls a function wherever something is asked of it. That may return an error, or panic.
pub(crate) struct Faulty<F> {
    pub(crate) reach: F,
    /// Whether the peer is on this host.
    pub(crate) is_near: bool,
}

impl<F: FnMut(At) -> Result<()> + Send> Faulty<F> {
    fn reach(&mut self, at: At) -> Result<()> {
        (self.reach)(at)
    }
}

impl<F: FnMut(At) -> Result<()> + Send> Link for Faulty<F> {
    fn try_send(&mut self, _: &[u8]) -> Result<usize> {
        self.reach(At::Send).map(|()| 0)
    }

    fn try_recv(&mut self, _: &mut [u8]) -> Result<usize> {
        self.reach(At::Receive).map(|()| 0)
    }

    fn try_fold(&mut self, _: usize, _: usize, _: &mut dyn FnMut(&[u8])) -> Result<usize> {
        self.reach(At::Receive).map(|()| 0)
    }

    fn try_post(&mut self, _: &[u8; MESSAGE_HEADER], _: &[u8]) -> Result<bool> {
        self.reach(At::Send).map(|()| false)
    }

    fn try_stream(&mut self, _: &[u8; MESSAGE_HEADER], _: &[u8]) -> Result<bool> {
        self.reach(At::Send).map(|()| false)
    }

    fn try_take(&mut self, _: &mut dyn FnMut(&[u8])) -> Result<bool> {
        self.reach(At::Receive).map(|()| false)
    }

    fn is_streaming(&mut self) -> Result<bool> {
        self.reach(At::Receive).map(|()| false)
    }

    fn peek(&mut self) -> Result<Option<[u8; MESSAGE_HEADER]>> {
        self.reach(At::Receive).map(|()| None)
    }

    fn neighbour(&mut self) -> Option<&mut dyn Neighbour> {
        match self.is_near {
            true => Some(self),
            false => None,
        }
    }

    fn arm(&mut self, _: Interest) -> bool {
        self.reach(At::Arm).is_err()
    }

    fn disarm(&mut self) {
        let _ = self.reach(At::Disarm);
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn memory(&self) -> usize {
        0
    }

    fn describe(&self) -> String {
        "a faulty link".into()
    }
}

impl<F: FnMut(At) -> Result<()> + Send> ControlChannel for Faulty<F> {
    fn peer_state(&mut self) -> PeerState {
        let _ = self.reach(At::State);
        PeerState::Present
    }

    fn send_abort(&mut self, _: &Notice) {
        let _ = self.reach(At::Abort);
    }

    fn send_farewell(&mut self) {}

    fn send_position(&mut self, _: &Position) {}

    fn take_position(&mut self) -> Option<Position> {
        None
    }
}

impl<F: FnMut(At) -> Result<()> + Send> Neighbour for Faulty<F> {
    fn lends_from(&self) -> usize {
        1
    }

    fn most_lent_runs(&self) -> usize {
        1
    }

    fn lend_private_from(&mut self, _: usize) {}

    fn expect_a_crowd(&mut self) {}

    fn try_lend(
        &mut self,
        _: &[u8; MESSAGE_HEADER],
        _: &[(usize, usize)],
        _: Terms,
    ) -> Result<Lending> {
        self.reach(At::Send).map(|()| Lending::NotNow)
    }

    fn loan(&mut self, _: Ticket) -> Result<Loan> {
        self.reach(At::Send).map(|()| Loan::Out)
    }

    fn decline(&mut self) {}

    fn can_share(&mut self, _: Shareable<'_>) -> Option<bool> {
        None
    }

    fn try_share(&mut self, _: &[u8; MESSAGE_HEADER], _: Shareable<'_>) -> Result<Lending> {
        self.reach(At::Send).map(|()| Lending::NotNow)
    }

    fn shared(&mut self) -> Result<Option<SharedSpan>> {
        self.reach(At::Receive).map(|()| None)
    }

    fn give_back(&mut self) {}

    fn await_writer(&mut self, _: Instant) {}

    fn wake(&mut self) {}

    fn page(&self) -> Page {
        unreachable!("no test asks for the page")
    }

    fn reach(&self, _: Place, _: usize) -> Result<Option<Held>> {
        Ok(None)
    }

    fn end_of_program(&self) -> IsOver {
        unreachable!("no test asks for the end of a program")
    }
}
