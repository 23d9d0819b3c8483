//! One TCP connection: bytes out, bytes in, as they are or sealed.
//!
//! It outlives its socket. When that breaks, nothing goes until another socket to the same peer takes its place, which
//! [`mending`](super::mending) brings. Over that both sides first say how many bytes they have received in all, eight bytes
//! each, little-endian; then each sends again what the other lacks, and goes on.

mod resumption;

use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::PollFlags;
use rustix::io::Errno;

pub(super) use self::resumption::say;
use super::ledger::Ledger;
use super::socket::Socket;
use crate::transport::cipher::{Cipher, Failure, RECORD, Sealed};
use crate::transport::control::describe;

/// A connection that never blocks.
#[derive(Debug)]
pub(crate) struct Connection<S = TcpStream> {
    socket: S,
    /// The number of sockets that it had before this one.
    sockets: u32,
    /// The encryption of its bytes, where they are encrypted.
    sealed: Option<Box<Sealed>>,
    stage: Stage,
    /// How much of this side's count has gone over this socket, and what has come of the peer's.
    told: usize,
    heard: usize,
    count: [u8; COUNT],
    ledger: Ledger,
    /// Bytes that former sockets had received and that have not been taken.
    backlog: VecDeque<u8>,
    /// This side sends no more.
    is_finished: bool,
    /// Another socket is about to take the place of this one, which has not broken. The peer may have closed it already, and
    /// what its system acknowledges may be lost.
    is_frozen: bool,
}

/// The bytes that go over the socket.
#[derive(Debug)]
enum Stage {
    /// The caller's bytes.
    Flowing,
    /// The counts of both sides.
    Greeting,
    /// Bytes that had gone before.
    Repeating,
    /// Nothing, until there is another socket.
    Broken {
        cause: String,
        /// All that had arrived has been taken.
        is_dry: bool,
    },
    /// Nothing any more: the two sides do not fit together.
    Beyond(String),
}

/// Bytes that may go over a connection that is being replaced.
const MOST_FROZEN: usize = 8 << 20;

/// Bytes of the count that begins a further socket.
const COUNT: usize = size_of::<u64>();

impl<S: Socket> Connection<S> {
    /// # Errors
    /// When the socket does not take its options.
    pub(crate) fn new(socket: S, cipher: Option<Cipher>) -> std::io::Result<Self> {
        socket.set_up()?;
        let sealed = cipher.map(|cipher| Box::new(Sealed::new(cipher)));
        Ok(Self {
            socket,
            sockets: 0,
            sealed,
            stage: Stage::Flowing,
            told: COUNT,
            heard: COUNT,
            count: [0; COUNT],
            ledger: Ledger::default(),
            backlog: VecDeque::new(),
            is_finished: false,
            is_frozen: false,
        })
    }

    /// The connection with its bytes sealed, in both directions, before it has carried any.
    pub(super) fn seal(&mut self, cipher: Cipher) {
        self.sealed = Some(Box::new(Sealed::new(cipher)));
    }

    pub(super) fn is_sealed(&self) -> bool {
        self.sealed.is_some()
    }

    pub(super) fn socket(&self) -> &S {
        &self.socket
    }

    /// Sends as much of `bytes` as goes now. The next call must begin with the bytes that did not go.
    ///
    /// # Errors
    /// `AGAIN` when nothing went.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<usize, Errno> {
        self.send_pieces(&[bytes])
    }

    /// As [`Connection::send`], of some pieces one after the other, by one system call.
    ///
    /// # Errors
    /// `AGAIN` when nothing went.
    pub(super) fn send_pieces(&mut self, pieces: &[&[u8]]) -> Result<usize, Errno> {
        if !self.is_flowing() && !self.go_on() {
            return Err(Errno::AGAIN);
        }
        if self.is_frozen && self.ledger.kept() > MOST_FROZEN {
            return Err(Errno::AGAIN);
        }
        let taken = match self.ledger.ahead() {
            0 => self.transmit(pieces),
            ahead => match after(pieces, ahead) {
                rest if rest.iter().all(|piece| piece.is_empty()) => Ok(0),
                rest => self.transmit(&rest),
            },
        };
        let taken = match taken {
            Ok(taken) => taken,
            // More may have been acknowledged of what had gone.
            Err(Errno::AGAIN) if self.ledger.ahead() > 0 => 0,
            Err(errno @ (Errno::AGAIN | Errno::INTR)) => return Err(errno),
            Err(errno) => {
                self.stop(&describe(errno));
                return Err(Errno::AGAIN);
            }
        };
        let Self {
            ledger,
            socket,
            sealed,
            is_frozen,
            ..
        } = self;
        let lacking = || match is_frozen {
            true => usize::MAX,
            false => lacking(socket, sealed.is_some()),
        };
        match ledger.note_sent(pieces, taken, lacking) {
            0 => Err(Errno::AGAIN),
            counted => Ok(counted),
        }
    }

    fn transmit(&mut self, pieces: &[&[u8]]) -> Result<usize, Errno> {
        if let Some(sealed) = &mut self.sealed {
            if let [bytes] = pieces {
                return sealed.send(&self.socket, bytes);
            }
            // Sealed bytes are copied in any case: as many as fit in one record.
            let mut record = Vec::new();
            for piece in pieces {
                let fits = piece.len().min(RECORD - record.len());
                record.extend_from_slice(&piece[..fits]);
            }
            return sealed.send(&self.socket, &record);
        }
        if let [bytes] = pieces {
            return self.socket.send(bytes);
        }
        self.socket.send_pieces(pieces)
    }

    /// Receives into `bytes`, by one system call where there is something.
    ///
    /// # Errors
    /// `AGAIN` when nothing is there.
    pub(crate) fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, Failure> {
        if !self.backlog.is_empty() {
            return Ok(self.take_backlog(bytes));
        }
        if !self.is_flowing() {
            self.go_on();
            if !self.delivers() {
                return Err(Errno::AGAIN.into());
            }
        }
        match self.take_in(bytes) {
            Ok(0) if !bytes.is_empty() => self.dry_up("connection closed"),
            Ok(count) => {
                self.ledger.note_received(count);
                return Ok(count);
            }
            Err(Failure::Socket(errno)) if !matches!(errno, Errno::AGAIN | Errno::INTR) => {
                self.dry_up(&describe(errno));
            }
            failed => return failed,
        }
        Err(Errno::AGAIN.into())
    }

    /// Moves as much of the backlog into `bytes` as fits.
    fn take_backlog(&mut self, bytes: &mut [u8]) -> usize {
        let count = bytes.len().min(self.backlog.len());
        for (to, from) in bytes.iter_mut().zip(self.backlog.drain(..count)) {
            *to = from;
        }
        count
    }

    fn take_in(&mut self, bytes: &mut [u8]) -> Result<usize, Failure> {
        match &mut self.sealed {
            None => Ok(self.socket.receive(bytes)?),
            Some(sealed) => sealed.receive(&self.socket, bytes),
        }
    }

    /// The socket has broken, and nothing more comes from it.
    fn dry_up(&mut self, what: &str) {
        self.stop(what);
        if let Stage::Broken { is_dry, .. } = &mut self.stage {
            *is_dry = true;
        }
    }

    /// The socket has broken: nothing goes, and what had arrived can be received.
    pub(super) fn stop(&mut self, what: &str) {
        if !matches!(self.stage, Stage::Broken { .. } | Stage::Beyond(_)) {
            self.stage = Stage::Broken {
                cause: what.to_owned(),
                is_dry: false,
            };
        }
    }

    /// Whether the socket has broken, as far as was seen.
    #[cfg(test)]
    pub(super) fn is_broken(&self) -> bool {
        matches!(self.stage, Stage::Broken { .. })
    }

    /// Why the socket has broken, if it has.
    pub(crate) fn cause(&self) -> Option<&str> {
        match &self.stage {
            Stage::Broken { cause, .. } => Some(cause),
            _ => None,
        }
    }

    /// Whether nothing more comes from the socket.
    fn is_dry(&self) -> bool {
        matches!(
            self.stage,
            Stage::Broken { is_dry: true, .. } | Stage::Beyond(_)
        )
    }

    /// Why no other socket can take the place of this one, if that is so.
    pub(crate) fn beyond(&self) -> Option<&str> {
        match &self.stage {
            Stage::Beyond(cause) => Some(cause),
            _ => None,
        }
    }

    /// Whether the caller's bytes go.
    pub(crate) fn is_flowing(&self) -> bool {
        matches!(self.stage, Stage::Flowing)
    }

    /// Whether it has bytes that the peer may lack, and they do not go.
    pub(crate) fn is_owing(&self) -> bool {
        match self.stage {
            Stage::Flowing => self.socket.unacknowledged() > 0 && self.socket.is_unanswered(),
            Stage::Greeting | Stage::Repeating | Stage::Broken { .. } => self.ledger.kept() > 0,
            Stage::Beyond(_) => false,
        }
    }

    /// Looks whether the socket has broken, or the peer has closed its end.
    pub(crate) fn look(&mut self) {
        let end = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        if self.is_flowing() && self.ready(PollFlags::RDHUP).intersects(end) {
            let cause = self.socket.take_error().map(describe);
            self.stop(&cause.unwrap_or_else(|| "connection closed".to_owned()));
        }
    }

    /// Whether another socket is about to take the place of this one, though it has not broken.
    pub(crate) fn freeze(&mut self, is_frozen: bool) {
        self.is_frozen = is_frozen;
    }

    /// Bytes received in all.
    pub(super) fn received(&self) -> u64 {
        self.ledger.received()
    }

    /// This number of bytes had been received before.
    pub(super) fn go_on_from(&mut self, received: u64) {
        self.ledger.set_received(received);
    }

    /// The number of sockets that it had before the present one.
    pub(super) fn sockets(&self) -> u32 {
        self.sockets
    }

    /// Whether bytes may go now.
    pub(crate) fn may_send(&self) -> bool {
        match self.stage {
            Stage::Flowing => self.ready(PollFlags::OUT).contains(PollFlags::OUT),
            _ => self.may_go_on(),
        }
    }

    /// Receives all of `bytes`, which have [arrived](Connection::arrived).
    ///
    /// # Errors
    /// When they have not.
    pub(super) fn receive_all(&mut self, bytes: &mut [u8]) -> Result<(), Errno> {
        let mut received = self.take_backlog(bytes);
        self.ledger.note_received(bytes.len() - received);
        while received < bytes.len() {
            match self.socket.receive(&mut bytes[received..]) {
                Ok(0) => return Err(Errno::PIPE),
                Ok(count) => received += count,
                Err(Errno::AGAIN | Errno::INTR) => std::thread::yield_now(),
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Bytes that are here; 0 where they are sealed, since how many were sent shows when they are opened.
    pub(super) fn arrived(&self) -> usize {
        match &self.sealed {
            Some(_) => 0,
            None if !self.backlog.is_empty() => self.backlog.len(),
            None if self.heard < COUNT => 0,
            None => self.socket.arrived(),
        }
    }

    /// Whether something to receive is here already, or arrives now.
    pub(crate) fn may_receive(&self) -> bool {
        self.has_opened() || (!self.is_dry() && self.ready(PollFlags::IN).contains(PollFlags::IN))
    }

    /// Whether [`Connection::receive`] has something without the socket.
    pub(super) fn has_opened(&self) -> bool {
        !self.backlog.is_empty() || self.sealed.as_ref().is_some_and(|sealed| sealed.is_ready())
    }

    /// Whether bytes that did not count as sent are sealed already.
    pub(super) fn owes(&self) -> bool {
        self.ledger.ahead() > 0 || self.sealed.as_ref().is_some_and(|sealed| sealed.owed() > 0)
    }

    /// Which of `wanted` the socket is ready for now; also `HUP` and `ERR`.
    pub(super) fn ready(&self, wanted: PollFlags) -> PollFlags {
        self.socket.ready(wanted)
    }

    /// Whether nothing more will arrive over this socket than what the kernel has.
    pub(super) fn has_ended(&self) -> bool {
        let end = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let is_broken = matches!(self.stage, Stage::Broken { .. } | Stage::Beyond(_));
        is_broken || self.ready(PollFlags::RDHUP).intersects(end)
    }

    /// Whether the peer has closed its end and all before that has been received.
    pub(super) fn is_at_its_end(&mut self) -> bool {
        if self.has_opened() || !self.is_flowing() || !self.has_ended() {
            return false;
        }
        match self.socket.is_at_its_end() {
            Ok(is_there) => is_there,
            // Told once.
            Err(errno) => {
                self.stop(&describe(errno));
                false
            }
        }
    }

    /// Whether the peer's system has all that was sent, or never will.
    pub(crate) fn is_acknowledged(&self) -> bool {
        match self.stage {
            // The end of the stream counts as one byte, and is acknowledged late.
            Stage::Flowing => self.socket.unacknowledged() <= 1,
            Stage::Greeting | Stage::Repeating => false,
            Stage::Broken { .. } | Stage::Beyond(_) => true,
        }
    }

    /// Tells the peer that this side sends no more.
    pub(super) fn finish(&mut self) {
        self.is_finished = true;
        if self.is_flowing() {
            self.socket.end_sending();
        }
    }

    /// Bytes of memory.
    pub(super) fn memory(&self) -> usize {
        let sealed = self.sealed.as_ref().map_or(0, |sealed| sealed.memory());
        sealed + self.ledger.memory() + self.backlog.capacity()
    }
}

/// The bytes of `pieces`, three at most, after the first `skipped` ones.
fn after<'a>(pieces: &[&'a [u8]], mut skipped: usize) -> [&'a [u8]; 3] {
    let mut rest: [&[u8]; 3] = [&[]; 3];
    for (rest, piece) in rest.iter_mut().zip(pieces) {
        let passed = skipped.min(piece.len());
        skipped -= passed;
        *rest = &piece[passed..];
    }
    rest
}

/// How many of the last bytes that went over the socket the peer's system may lack. Of a record that has not come whole the
/// peer has nothing.
fn lacking(socket: &impl Socket, is_sealed: bool) -> usize {
    match socket.unacknowledged() {
        0 => 0,
        bytes => bytes + if is_sealed { RECORD } else { 0 },
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
