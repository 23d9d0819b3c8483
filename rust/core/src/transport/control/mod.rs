//! The control channel: a stream socket beside a link's data, never behind it.
//!
//! It carries a few kinds of frame ([`Frame`]). A doorbell is one byte and wakes a peer that sleeps on the
//! socket; the others are `{kind: u8, length: u16 little-endian, payload}`. Everything read from it
//! is treated as hostile: a frame has a bounded length, and the first byte that no member would
//! send ends the channel with a description of it, since nothing after it can be trusted to be a
//! frame.
//!
//! Nothing here blocks. Bytes that the socket does not take are kept and tried again on the next call, and once more when the
//! channel is dropped. The end of the socket is the end of the peer: an orderly one announces it with a farewell, so an end
//! without it means that the process is gone. A peer that breaks the rules is another matter: it is not said to be gone.
//!
//! Where the socket can be replaced after a break (`tcp`), both sides say again over the next one what holds (`outbound.rs`).
//!
//! Between processes of a host it also passes the segments of their heaps (`segments.rs`).

mod frame;
mod outbound;
mod segments;
#[cfg(test)]
mod tests;

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recv, recvmsg,
};

use self::outbound::{Outbound, Standing};
use self::segments::Segments;
use super::cipher::{Cipher, Failure, Sealed};
use super::tcp::mending::SocketId;
use super::{PeerState, Position};
use crate::fork::{self, Home};

pub(crate) use self::frame::Frame;
#[cfg(any(test, fuzzing))]
pub(crate) use self::frame::MAX_MESSAGE;

/// How many reads one call makes at most, so that a flooding peer cannot hold its caller.
const MAX_READS: usize = 16;

/// Words of broken connections that are kept until they are taken: more than a link has connections.
const MOST_BROKEN: usize = 64;

/// The sign of an end that the socket does not show, in words.
const NOT_THE_SOCKET: &str = "the system says so";

/// This side's end of a control channel.
#[derive(Debug)]
pub(crate) struct Control {
    socket: OwnedFd,
    /// The start of a frame whose rest has not arrived.
    inbound: Vec<u8>,
    /// Frames that the socket has not taken yet.
    outbound: Outbound,
    state: PeerState,
    /// Since when the peer owes an answer.
    asked: Option<Instant>,
    /// This side owes one.
    owes: bool,
    /// The peer has asked, until that is taken.
    questioned: bool,
    /// The last position that the peer sent, while it has not been taken.
    position: Option<Position>,
    /// The peer's announcement of frames, and whether it has answered that of this side, until they are taken.
    framing: Option<u64>,
    framing_heard: bool,
    /// Connections that the peer sees broken, until they are taken.
    broken: Vec<SocketId>,
    /// The words of this side that hold, where another socket may take the place of this one.
    standing: Standing,
    /// Nothing more will be read: the peer's end closed, failed, or sent what no member sends.
    ended: bool,
    /// `state` has changed, or a position has come, since the caller last asked.
    news: bool,
    /// On a channel that passes them.
    segments: Option<Segments>,
    /// The encryption of the frames, where they are encrypted.
    sealed: Option<Box<Sealed>>,
    home: Home,
}

impl Control {
    /// A control channel over a connected stream socket, Unix or TCP, that carries nothing else
    /// from here on. It passes no segments, and a peer that sends one ends it.
    pub(crate) fn new(socket: impl Into<OwnedFd>) -> Self {
        Self::over(socket.into(), None)
    }

    /// As [`Control::new`], to a process of this host: each side can map the segments of the other's heap.
    pub(crate) fn with_segments(socket: UnixStream) -> Self {
        Self::over(socket.into(), Some(Segments::new()))
    }

    /// The channel with all its frames encrypted. It passes no segments, and nothing has been sent on it.
    #[must_use]
    pub(crate) fn encrypted(mut self, cipher: Cipher) -> Self {
        self.sealed = Some(Box::new(Sealed::new(cipher)));
        self
    }

    fn over(socket: OwnedFd, segments: Option<Segments>) -> Self {
        fork::keep_private(&socket);
        Self {
            socket,
            segments,
            sealed: None,
            home: Home::here(),
            inbound: Vec::new(),
            outbound: Outbound::default(),
            state: PeerState::Present,
            asked: None,
            owes: false,
            questioned: false,
            position: None,
            framing: None,
            framing_heard: false,
            broken: Vec::new(),
            standing: Standing::default(),
            ended: false,
            news: false,
        }
    }

    /// Wakes the peer. When the socket is full the peer has bytes to read, which wake it as well.
    pub(crate) fn ring_doorbell(&mut self) {
        if self.flush() {
            self.outbound.push(&Frame::Doorbell, None);
            if !self.flush() {
                self.outbound.clear();
            }
        }
    }

    /// Sends `frame`, now or as soon as the socket takes it.
    pub(crate) fn send(&mut self, frame: &Frame) {
        if self.segments.is_none() {
            self.standing.note(frame);
        }
        self.outbound.push(frame, None);
        self.flush();
    }

    /// Goes on over another socket, which has carried nothing, on a channel that passes no segments. The words of this
    /// side that hold are said again.
    pub(super) fn replace(&mut self, socket: TcpStream, cipher: Option<Cipher>) {
        // The last words that had come before.
        self.drain();
        fork::keep_private(&socket);
        self.socket = socket.into();
        self.sealed = cipher.map(|cipher| Box::new(Sealed::new(cipher)));
        self.inbound.clear();
        self.outbound.clear();
        (self.asked, self.owes) = (None, false);
        if matches!(self.state, PeerState::Lost(_)) {
            self.state = PeerState::Present;
        }
        self.ended = matches!(self.state, PeerState::Broken(_));
        for frame in self.standing.frames() {
            self.outbound.push(&frame, None);
        }
        self.flush();
    }

    /// The connections that the peer has seen to be broken since the last call.
    pub(super) fn take_broken(&mut self) -> Vec<SocketId> {
        std::mem::take(&mut self.broken)
    }

    /// Reads what has arrived and says how the peer is. An abort outranks a farewell, a farewell a
    /// loss.
    pub(crate) fn peer_state(&mut self) -> PeerState {
        self.retract_segments();
        self.flush();
        self.drain();
        self.news = false;
        self.state.clone()
    }

    /// Asks whether the peer's process runs, unless it has not answered yet.
    pub(crate) fn ask(&mut self) {
        if self.asked.is_none() && !self.ended {
            self.asked = Some(Instant::now());
            self.send(&Frame::Question);
        }
    }

    /// How long the peer's process has owed an answer, as far as has been read.
    pub(crate) fn silence(&self) -> Option<Duration> {
        self.asked.map(|asked| asked.elapsed())
    }

    /// Whether the peer has asked since the last call: it has waited for this side for a while.
    pub(super) fn take_questioned(&mut self) -> bool {
        std::mem::take(&mut self.questioned)
    }

    /// The last position that the peer sent, if it has not been taken yet.
    pub(crate) fn take_position(&mut self) -> Option<Position> {
        self.position.take()
    }

    /// From which byte on the peer's stream consists of frames, if it has just said so.
    pub(crate) fn take_framing(&mut self) -> Option<u64> {
        self.framing.take()
    }

    /// Whether the peer has just said that it knows from which byte on this side's stream consists of frames.
    pub(crate) fn take_framing_heard(&mut self) -> bool {
        std::mem::take(&mut self.framing_heard)
    }

    /// As [`Control::peer_state`], where `pidfd` becomes readable and `sign` hangs up when the peer's process ends: the socket
    /// stays open for as long as any process has a copy of it.
    pub(crate) fn peer_state_beside(
        &mut self,
        pidfd: BorrowedFd<'_>,
        sign: Option<BorrowedFd<'_>>,
    ) -> PeerState {
        self.retract_segments();
        self.flush();
        if !self.ended {
            let wanted = PollFlags::IN | PollFlags::RDHUP;
            let mut fds = [
                PollFd::new(&self.socket, wanted),
                PollFd::from_borrowed_fd(pidfd, PollFlags::IN),
                // That it hangs up is told in any case, and anything else of it is of no interest.
                PollFd::from_borrowed_fd(sign.unwrap_or(pidfd), PollFlags::empty()),
            ];
            // It fails only for want of the kernel's memory, and then the next look tells.
            let looked = poll(&mut fds, Some(&Timespec::default()));
            let ready = looked.map(|_| fds.map(|fd| !fd.revents().is_empty()));
            let [speaks, ended, hung_up] = ready.unwrap_or_default();
            let gone = ended || hung_up;
            // The frames that it sent before its end count.
            let all = (speaks || gone) && self.drain();
            if gone && all {
                self.end(NOT_THE_SOCKET.to_owned());
            }
        }
        self.news = false;
        self.state.clone()
    }

    /// Whether the peer has said farewell, as far as has been read.
    pub(crate) fn has_left(&self) -> bool {
        self.state == PeerState::Left
    }

    /// Whether the last [`Control::drain`] learned something that [`Control::peer_state`] has not
    /// told yet.
    pub(crate) fn has_news(&self) -> bool {
        self.news
    }

    /// Reads what has arrived, doorbells included, and answers a question. Returns whether that was all: of a flood it
    /// reads a part.
    pub(crate) fn drain(&mut self) -> bool {
        let all = self.read();
        // One answer for any number of questions: a peer that does not read them cannot pile them up.
        if std::mem::take(&mut self.owes) && self.outbound.len() == 0 {
            self.send(&Frame::Answer);
        }
        all
    }

    fn read(&mut self) -> bool {
        let mut chunk = [0; 1024];
        for _ in 0..MAX_READS {
            if self.ended {
                return true;
            }
            match self.receive(&mut chunk) {
                Ok((0, _)) => self.end("connection closed".to_owned()),
                Ok((count, more)) => {
                    // Whatever it says, it runs.
                    self.asked = None;
                    self.take(&chunk[..count]);
                    if count < chunk.len() && !more {
                        return true;
                    }
                }
                Err(Failure::Socket(Errno::AGAIN)) => return true,
                Err(Failure::Socket(Errno::INTR)) => {}
                Err(Failure::Socket(errno)) => self.end(describe(errno)),
                Err(Failure::Forged) => self.refuse(
                    "the control channel's bytes were changed, repeated or left out on the way"
                        .to_owned(),
                ),
            }
        }
        false
    }

    /// Receives into `chunk`, and descriptors to `segments`. Says how many bytes came, and whether more may be there
    /// although they do not fill the chunk: the kernel ends a read after the bytes that came with a descriptor.
    fn receive(&mut self, chunk: &mut [u8]) -> Result<(usize, bool), Failure> {
        if let Some(sealed) = &mut self.sealed {
            let count = sealed.receive(&self.socket, chunk)?;
            return Ok((count, sealed.is_ready()));
        }
        let Some(segments) = &mut self.segments else {
            let (_, count) = recv(&self.socket, chunk, RecvFlags::DONTWAIT)?;
            return Ok((count, false));
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut messages = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut parts = [IoSliceMut::new(chunk)];
        let received = recvmsg(&self.socket, &mut parts, &mut messages, flags)?;
        let mut more = received.flags.contains(ReturnFlags::CTRUNC);
        for message in messages.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                more = true;
                segments.keep(files);
            }
        }
        Ok((received.bytes, more))
    }

    /// The socket to watch.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Applies every whole frame of what was kept and `bytes`, and keeps the rest.
    fn take(&mut self, bytes: &[u8]) {
        self.inbound.extend_from_slice(bytes);
        let mut done = 0;
        while !self.ended {
            match Frame::parse(&self.inbound[done..]) {
                Ok(Some((frame, length))) => {
                    done += length;
                    self.apply(frame);
                }
                Ok(None) => break,
                Err(what) => {
                    self.inbound.clear();
                    return self.refuse(format!("{what} on the control channel"));
                }
            }
        }
        self.inbound.drain(..done);
        let strays = |segments: &Segments| segments.has_strays(self.inbound.is_empty());
        if self.segments.as_ref().is_some_and(strays) {
            self.refuse("a descriptor without a frame on the control channel".to_owned());
        }
    }

    fn apply(&mut self, frame: Frame) {
        let state = match frame {
            Frame::Abort(notice) if !matches!(self.state, PeerState::Aborted(_)) => {
                PeerState::Aborted(notice)
            }
            Frame::Farewell if self.state == PeerState::Present => PeerState::Left,
            Frame::Position(position) => {
                self.position = Some(position);
                self.news = true;
                return;
            }
            Frame::Question => {
                (self.owes, self.questioned) = (true, true);
                return;
            }
            Frame::Framing(from) => {
                self.framing = Some(from);
                self.news = true;
                return;
            }
            Frame::FramingHeard => {
                self.framing_heard = true;
                self.news = true;
                return;
            }
            Frame::Broken(socket) => {
                if self.broken.len() < MOST_BROKEN {
                    self.broken.push(socket);
                }
                self.news = true;
                return;
            }
            Frame::Segment(identity) => return self.admit(identity),
            Frame::SegmentAnswer { segment, mapped } => return self.answered(segment, mapped),
            Frame::SegmentGone(segment) => return self.forget(segment),
            _ => return,
        };
        self.state = state;
        self.news = true;
    }

    fn end(&mut self, what: String) {
        self.ended = true;
        if self.state == PeerState::Present {
            self.state = PeerState::Lost(what);
            self.news = true;
        }
    }

    /// The peer has broken the rules. That outranks what it may have said before of itself.
    pub(super) fn refuse(&mut self, what: String) {
        self.ended = true;
        if !matches!(self.state, PeerState::Aborted(_)) {
            self.state = PeerState::Broken(what);
            self.news = true;
        }
    }

    /// Sends what is waiting. True when nothing is left.
    fn flush(&mut self) -> bool {
        self.outbound
            .flush(self.socket.as_fd(), self.sealed.as_deref_mut())
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd()
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // A forked child has only a copy of the queue: its parent sends these frames.
        if self.home.is_here() {
            self.flush();
        }
    }
}

/// The error of a failed socket call, in words.
pub(super) fn describe(errno: Errno) -> String {
    match errno {
        Errno::CONNRESET => "connection reset".to_owned(),
        Errno::PIPE => "connection closed".to_owned(),
        Errno::CONNABORTED => "connection aborted".to_owned(),
        Errno::TIMEDOUT => "connection timed out".to_owned(),
        other => std::io::Error::from(other).to_string(),
    }
}
