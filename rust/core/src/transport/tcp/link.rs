//! A link over two TCP connections: one for the bytes, which it carries as they are, and one for
//! control.
//!
//! Small receives go through a buffer, so that a message's header and what follows it cost one
//! system call; large ones go from the kernel straight into their destination. A fold lends the
//! buffer.
//!
//! The two connections end independently, and the network may show the end of one while bytes or a
//! farewell are still on their way on the other. So the link's end is reported when both have
//! ended, or `SETTLE` after the first: a rank that sees it can receive all that came before, and a peer
//! that said farewell is not taken for lost. After a farewell the bytes before it may be on their way
//! for long, on a slow network, and their end comes, or that of the host: there is no such limit. An
//! abort is reported at once.

use std::io::IoSlice;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, send, sendmsg};
use socket2::SockRef;

use super::keepalive;
use super::kernel::unacknowledged;
use crate::error::{Code, Error, Result};
use crate::fork;
use crate::transport::cipher::{Cipher, Failure, RECORD, Sealed};
use crate::transport::control::{Control, Frame, describe};
use crate::transport::{
    ControlChannel, Interest, Link, MESSAGE_HEADER, Notice, PeerState, Position,
};

/// How long the end of one connection waits for the end of the other.
const SETTLE: Duration = Duration::from_millis(200);

/// How long an answer of the peer's process may take before it is worth a word.
const SILENCE: Duration = Duration::from_secs(1);

/// Size of the receive buffer: what a loopback or a 100 Gb/s link delivers between two looks at it.
const BUFFER: usize = 256 << 10;
/// From this size on a receive bypasses the buffer.
const DIRECT: usize = 32 << 10;
/// The most one call moves, so that a caller with several links comes round to all of them.
const FAIR: usize = 4 << 20;

/// One end of a link over TCP.
pub struct TcpLink {
    data: TcpStream,
    /// What seals the bytes of `data`, where they are encrypted.
    sealed: Option<Box<Sealed>>,
    control: Control,
    peer: String,
    buffer: Buffer,
    /// Receiving has come to its end.
    drained: bool,
    /// This side has said farewell.
    leaving: bool,
    /// What ended the data connection, as first seen by sending or receiving.
    broken: Option<String>,
    /// After how many seconds without an answer the peer's host is lost.
    host_limit: Option<u32>,
    /// When the first of the two connections was seen to have ended.
    ending_since: Option<Instant>,
    /// Whether something was seen that [`ControlChannel::peer_state`] has not told yet. While an end settles
    /// this keeps the caller from sleeping, since no descriptor announces that the time is up.
    news: bool,
}

impl TcpLink {
    /// This side's end of a link over two connections to the same peer, of which `control` is its
    /// control channel. `peer` is the peer's address, for messages.
    ///
    /// # Errors
    /// `System` when a socket does not take its options.
    pub fn new(data: TcpStream, control: TcpStream, peer: String) -> Result<Self> {
        fork::keep_private(&data);
        for socket in [&data, &control] {
            socket
                .set_nonblocking(true)
                .and_then(|()| socket.set_nodelay(true))
                .map_err(|cause| Error::system(format_args!("set up tcp {peer}"), cause))?;
        }
        Ok(Self {
            data,
            sealed: None,
            control: Control::new(control),
            peer,
            buffer: Buffer::default(),
            drained: false,
            leaving: false,
            broken: None,
            host_limit: None,
            ending_since: None,
            news: false,
        })
    }

    /// The link with all that it carries encrypted, in both directions. Both ends do so before they use it.
    #[must_use]
    pub fn encrypted(self, data: Cipher, control: Cipher) -> Self {
        Self {
            sealed: Some(Box::new(Sealed::new(data))),
            control: self.control.encrypted(control),
            ..self
        }
    }

    /// Makes the system call, again after a signal; returns how many bytes it sent.
    fn sent_by(&mut self, mut call: impl FnMut(&mut Self) -> Result<usize, Errno>) -> usize {
        while self.broken.is_none() && !self.leaving {
            match call(self) {
                Ok(count) => return count,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(errno) => self.end(describe(errno)),
            }
        }
        0
    }

    /// Receives into the buffer, as much as it has room for. True when something came.
    fn fill(&mut self) -> Result<bool> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let received = self.receive(buffer.room());
        buffer.end += received.as_ref().copied().unwrap_or(0);
        self.buffer = buffer;
        received.map(|count| count > 0)
    }

    /// Receives into `bytes` by one system call.
    fn receive(&mut self, bytes: &mut [u8]) -> Result<usize> {
        while !self.drained {
            let received = match &mut self.sealed {
                None => recv(&self.data, &mut *bytes, RecvFlags::DONTWAIT)
                    .map(|(_, count)| count)
                    .map_err(Failure::Socket),
                Some(sealed) => sealed.receive(self.data.as_fd(), bytes),
            };
            match received {
                Ok(0) => self.end_receiving("connection closed".to_owned()),
                Ok(count) => return Ok(count),
                Err(Failure::Socket(Errno::AGAIN)) => return Ok(0),
                Err(Failure::Socket(Errno::INTR)) => {}
                Err(Failure::Socket(errno)) => self.end_receiving(describe(errno)),
                Err(Failure::Forged) => {
                    self.end_receiving("forged bytes".to_owned());
                    return Err(self.forged());
                }
            }
        }
        Ok(0)
    }

    fn forged(&self) -> Error {
        let message = format!(
            "bytes from {} were changed, repeated or left out on the way: an attacker on the path, or a faulty device, alters the connection",
            self.peer
        );
        Error::new(Code::Untrusted, message)
    }

    fn end_receiving(&mut self, what: String) {
        self.drained = true;
        self.end(what);
    }

    fn end(&mut self, what: String) {
        if self.broken.is_none() {
            self.broken = Some(what);
            self.news = true;
        }
    }

    /// Whether nothing more will arrive on the data connection than what is here already.
    fn data_has_ended(&self) -> bool {
        let end = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        self.broken.is_some() || self.ready(PollFlags::RDHUP).intersects(end)
    }

    /// Which of `wanted` the data connection is ready for now; also `HUP` and `ERR`.
    fn ready(&self, wanted: PollFlags) -> PollFlags {
        let mut fds = [PollFd::from_borrowed_fd(self.data.as_fd(), wanted)];
        match poll(&mut fds, Some(&Timespec::default())) {
            Ok(_) => fds[0].revents(),
            Err(_) => PollFlags::empty(),
        }
    }
}

impl Link for TcpLink {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize> {
        let bytes = &bytes[..bytes.len().min(FAIR)];
        if bytes.is_empty() {
            return Ok(0);
        }
        Ok(self.sent_by(|link| match &mut link.sealed {
            None => send(&link.data, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
            Some(sealed) => sealed.send(link.data.as_fd(), bytes),
        }))
    }

    fn try_send_message(&mut self, header: &[u8], payload: &[u8]) -> Result<usize> {
        if self.sealed.is_some() {
            // What is sealed is copied in any case: in one record, the header and as much as fits behind it.
            let fits = payload.len().min(RECORD - MESSAGE_HEADER);
            return self.try_send(&[header, &payload[..fits]].concat());
        }
        let payload = &payload[..payload.len().min(FAIR)];
        let parts = [IoSlice::new(header), IoSlice::new(payload)];
        Ok(self.sent_by(|link| {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            sendmsg(
                &link.data,
                &parts,
                &mut SendAncillaryBuffer::default(),
                flags,
            )
        }))
    }

    fn try_recv(&mut self, bytes: &mut [u8]) -> Result<usize> {
        let mut received = self.buffer.take(bytes);
        if received == bytes.len() {
            return Ok(received);
        }
        if bytes.len() - received >= DIRECT {
            let limit = bytes.len().min(received + FAIR);
            received += self.receive(&mut bytes[received..limit])?;
        } else if self.fill()? {
            received += self.buffer.take(&mut bytes[received..]);
        }
        Ok(received)
    }

    fn try_fold(&mut self, max: usize, align: usize, fold: &mut dyn FnMut(&[u8])) -> Result<usize> {
        assert!(
            (1..=16).contains(&align) && max.is_multiple_of(align),
            "a fold of at most {max} bytes in elements of {align}"
        );
        let mut folded = 0;
        while folded < max.min(FAIR) {
            let run = self.buffer.bytes().len().min(max - folded) / align * align;
            if run > 0 {
                fold(&self.buffer.bytes()[..run]);
                self.buffer.start += run;
                folded += run;
            } else if !self.fill()? {
                break;
            }
        }
        Ok(folded)
    }

    fn peek(&mut self) -> Result<Option<[u8; MESSAGE_HEADER]>> {
        // A link over which nothing comes needs no buffer.
        let may_come = self.buffer.bytes().len() < MESSAGE_HEADER && !self.drained;
        if may_come
            && (self.ready(PollFlags::IN).contains(PollFlags::IN)
                || self.sealed.as_ref().is_some_and(|sealed| sealed.is_ready()))
        {
            self.fill()?;
        }
        Ok(self.buffer.bytes().first_chunk().copied())
    }

    fn arm(&mut self, interest: Interest) -> bool {
        if self.news || self.control.has_news() {
            return true;
        }
        let is_here = !self.buffer.bytes().is_empty()
            || self.sealed.as_ref().is_some_and(|sealed| sealed.is_ready());
        if interest.readable && is_here {
            return true;
        }
        // Readiness is watched by its edges, and this asks for its level: what an earlier wake-up
        // announced and has not been taken since is not slept through.
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::IN, interest.readable && !self.drained);
        let may_send = self.broken.is_none() && !self.leaving;
        wanted.set(PollFlags::OUT, interest.writable && may_send);
        !wanted.is_empty() && self.ready(wanted).intersects(wanted)
    }

    fn disarm(&mut self) {}

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.data.as_fd(), self.control.fd()]
    }

    fn memory(&self) -> usize {
        self.buffer.memory.len() + self.sealed.as_ref().map_or(0, |sealed| sealed.memory())
    }

    fn describe(&self) -> String {
        match self.sealed {
            None => format!("tcp {}", self.peer),
            Some(_) => format!("encrypted tcp {}", self.peer),
        }
    }
}

impl ControlChannel for TcpLink {
    fn peer_state(&mut self) -> PeerState {
        self.news = false;
        let said = self.control.peer_state();
        if matches!(said, PeerState::Aborted(_)) {
            return said;
        }
        let control_ended = said != PeerState::Present;
        let data_ended = self.data_has_ended();
        if !control_ended && !data_ended {
            return PeerState::Present;
        }
        if said == PeerState::Left && !data_ended {
            return PeerState::Present;
        }
        let since = *self.ending_since.get_or_insert_with(Instant::now);
        if control_ended != data_ended && since.elapsed() < SETTLE {
            self.news = true;
            return PeerState::Present;
        }
        match said {
            PeerState::Present => PeerState::Lost(
                self.broken
                    .clone()
                    .unwrap_or_else(|| "connection closed".to_owned()),
            ),
            said => said,
        }
    }

    fn lose_silent_host_after(&mut self, seconds: Option<u32>) {
        self.host_limit = seconds;
        let Some(seconds) = seconds else { return };
        let control = SockRef::from(&self.control);
        if let Err(cause) = keepalive::limit(&self.data, control, seconds) {
            tracing::warn!(peer = %self.peer, %cause, "the end of this peer's host may go unnoticed");
        }
    }

    fn ask(&mut self) {
        self.control.ask();
    }

    fn questions(&self) -> Option<BorrowedFd<'_>> {
        Some(self.control.fd())
    }

    fn stall(&self) -> Option<String> {
        let silence = self
            .control
            .silence()
            .filter(|silence| *silence >= SILENCE)?;
        let seconds = silence.as_secs_f64();
        // A host that had not answered for that long would be lost.
        let limit = self
            .host_limit
            .map(|limit| Duration::from_secs(limit.into()));
        Some(match limit.is_some_and(|limit| silence > limit + SILENCE) {
            true => format!(
                "its host answers, but its process has not for {seconds:.1} s: it is stopped, or starved of time or memory"
            ),
            false => format!(
                "its process has not answered for {seconds:.1} s: it is stopped, or starved of time or memory, or its \
                 host cannot be reached"
            ),
        })
    }

    fn send_abort(&mut self, notice: &Notice) {
        self.control.send(&Frame::Abort(notice.clone()));
    }

    fn send_farewell(&mut self) {
        self.control.send(&Frame::Farewell);
        // The peer sees the end of the bytes at once, also where this side keeps the link for a
        // while. Failing to say so costs the peer the time to settle.
        self.leaving = true;
        let _ = self.data.shutdown(Shutdown::Write);
    }

    fn has_left(&mut self) -> bool {
        self.control.drain();
        self.control.has_left()
    }

    fn is_delivered(&mut self) -> bool {
        // A socket that is closed while something unread is there, or to which something comes afterwards, resets the
        // connection: what it had not sent by then is lost.
        let (mut unread, mut discarded) = ([0; 4096], 0);
        while !self.drained {
            match self.receive(&mut unread) {
                Ok(0) => break,
                Ok(_) if discarded > FAIR => return false,
                Ok(count) => discarded += count,
                Err(_) => return true,
            }
        }
        // The end of the stream counts as one, and is acknowledged late.
        self.drained || unacknowledged(self.data.as_fd()) <= 1
    }

    fn send_position(&mut self, position: &Position) {
        self.control.send(&Frame::Position(*position));
    }

    fn take_position(&mut self) -> Option<Position> {
        self.control.take_position()
    }
}

/// Bytes that were received ahead of the calls that want them. Its memory is made when first
/// needed.
#[derive(Default)]
struct Buffer {
    memory: Vec<u8>,
    start: usize,
    end: usize,
}

impl Buffer {
    /// What is in it.
    fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.end]
    }

    /// Moves as much of it into `bytes` as fits.
    fn take(&mut self, bytes: &mut [u8]) -> usize {
        let count = bytes.len().min(self.end - self.start);
        bytes[..count].copy_from_slice(&self.bytes()[..count]);
        self.start += count;
        count
    }

    /// The free room after its content, which moves to the front: at most part of an element, since
    /// more is received only when what is here does not suffice.
    fn room(&mut self) -> &mut [u8] {
        self.memory.resize(BUFFER, 0);
        self.memory.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        &mut self.memory[self.end..]
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::transport::suite;

    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (ours, listener.accept().unwrap().0)
    }

    fn links() -> (TcpLink, TcpLink) {
        let (data, control) = (connection(), connection());
        (
            TcpLink::new(data.0, control.0, "a".to_owned()).unwrap(),
            TcpLink::new(data.1, control.1, "b".to_owned()).unwrap(),
        )
    }

    /// Smaller socket buffers than this make loopback wait for delayed acknowledgements.
    const LEAST: usize = 64 << 10;

    fn make(capacity: usize) -> (Box<dyn Link>, Box<dyn Link>) {
        let (a, b) = links();
        let capacity = capacity.max(LEAST);
        for link in [&a, &b] {
            let socket = socket2::SockRef::from(&link.data);
            socket.set_send_buffer_size(capacity).unwrap();
            socket.set_recv_buffer_size(capacity).unwrap();
        }
        (Box::new(a), Box::new(b))
    }

    suite::conformance!(make);

    #[test]
    fn garbage_on_the_control_connection_is_a_loss() {
        let (data, control) = (connection(), connection());
        let mut link = TcpLink::new(data.0, control.0, "peer".to_owned()).unwrap();
        (&control.1).write_all(b"GET / HTTP/1.1\r\n").unwrap();
        drop(data.1);
        let what = "unknown frame kind 0x47 on the control channel".to_owned();
        assert_eq!(suite::end_of(&mut link), PeerState::Lost(what));
    }

    #[test]
    fn a_lone_end_is_reported_once_it_has_settled() {
        let (data, control) = (connection(), connection());
        let mut link = TcpLink::new(data.0, control.0, "peer".to_owned()).unwrap();
        drop(data.1);
        let start = Instant::now();
        assert_eq!(
            suite::end_of(&mut link),
            PeerState::Lost("connection closed".to_owned())
        );
        assert!(start.elapsed() >= SETTLE);
        drop(control.1);
    }

    #[test]
    fn a_farewell_that_overtakes_many_bytes_does_not_end_the_link() {
        let (mut a, mut b) = links();
        let (mut sent, mut received) = (0, 0);
        loop {
            match a.try_send(&[7; 100_000]).unwrap() {
                0 => break,
                count => sent += count,
            }
        }
        a.send_farewell();
        let until = Instant::now() + 2 * SETTLE;
        while Instant::now() < until {
            assert_eq!(b.peer_state(), PeerState::Present);
            std::thread::sleep(SETTLE / 20);
        }
        let mut bytes = vec![0; 100_000];
        while received < sent {
            received += b.try_recv(&mut bytes).unwrap();
        }
        assert_eq!(suite::end_of(&mut b), PeerState::Left);
    }

    #[test]
    fn farewells_are_seen_while_both_keep_the_link() {
        let (mut a, mut b) = links();
        assert_eq!(a.try_send(b"last words").unwrap(), 10);
        a.send_farewell();
        assert_eq!(suite::end_of(&mut b), PeerState::Left);
        assert_eq!(a.peer_state(), PeerState::Present);
        assert_eq!(b.try_send(b"answer").unwrap(), 6);
        b.send_farewell();
        assert_eq!(b.try_send(b"more").unwrap(), 0);
        assert_eq!(suite::end_of(&mut a), PeerState::Left);
        let mut bytes = [0; 100];
        assert_eq!(a.try_recv(&mut bytes).unwrap(), 6);
        assert_eq!(b.try_recv(&mut bytes).unwrap(), 10);
        assert_eq!(&bytes[..10], b"last words");
    }

    #[test]
    fn sending_into_a_closed_connection_leaves_received_bytes() {
        let (mut a, mut b) = links();
        assert_eq!(b.try_send(b"last words").unwrap(), 10);
        drop(b);
        while a.broken.is_none() {
            a.try_send(&[0; 1000]).unwrap();
        }
        assert!(matches!(suite::end_of(&mut a), PeerState::Lost(_)));
        let mut bytes = [0; 100];
        assert_eq!(a.try_recv(&mut bytes).unwrap(), 10);
        assert_eq!(&bytes[..10], b"last words");
        assert_eq!(a.try_recv(&mut bytes).unwrap(), 0);
        assert!(!a.arm(Interest {
            readable: true,
            writable: true
        }));
    }
}
