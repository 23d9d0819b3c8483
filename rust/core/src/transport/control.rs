//! The control channel: a stream socket beside a link's data, never behind it.
//!
//! It carries five kinds of frame. A doorbell is one byte and wakes a peer that sleeps on the
//! socket; the others are `{kind: u8, length: u16 little-endian, payload}`. Everything read from it
//! is treated as hostile: a frame has a bounded length, and the first byte that no member would
//! send ends the channel with a description of it, since nothing after it can be trusted to be a
//! frame.
//!
//! Nothing here blocks. What the socket does not take is kept and tried again on the next call, and
//! once more when the channel is dropped. The end of the socket is the end of the peer: an orderly
//! one announces it with a farewell, so an end without it means that the process is gone.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::{Notice, PeerState, Position};
use crate::error::Code;

/// The longest text of a [`Notice`] that travels, in bytes; longer ones are cut between characters.
pub const MAX_MESSAGE: usize = 4096;

const DOORBELL: u8 = 1;
const ABORT: u8 = 2;
const FAREWELL: u8 = 3;
const HEARTBEAT: u8 = 4;
const POSITION: u8 = 5;

/// Kind and length.
const HEADER: usize = 3;
/// Code, origin, whether there is a culprit, culprit.
const NOTICE_HEADER: usize = 1 + 4 + 1 + 4;
const MAX_PAYLOAD: usize = NOTICE_HEADER + MAX_MESSAGE;
/// How many reads one call makes at most, so that a flooding peer cannot hold its caller.
const MAX_READS: usize = 16;

/// One frame of the control channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Wakes a sleeper; says nothing else.
    Doorbell,
    /// The sender aborted its group.
    Abort(Notice),
    /// The sender closes in good order and will send no more.
    Farewell,
    /// The sender is alive. Nothing sends it yet; it is accepted so that older ranks understand
    /// newer ones.
    Heartbeat,
    /// What the sender is in and waits for us with.
    Position(Position),
}

impl Frame {
    /// Reads the frame at the start of `bytes` and says how long it is; `None` when more bytes are
    /// needed.
    ///
    /// # Errors
    /// A description of the bytes when they are no frame.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, String> {
        let kind = match bytes.first() {
            None => return Ok(None),
            Some(&DOORBELL) => return Ok(Some((Self::Doorbell, 1))),
            Some(&kind @ (ABORT | FAREWELL | HEARTBEAT | POSITION)) => kind,
            Some(kind) => return Err(format!("unknown frame kind {kind:#04x}")),
        };
        let &[_, low, high, ref rest @ ..] = bytes else {
            return Ok(None);
        };
        let length = usize::from(u16::from_le_bytes([low, high]));
        if length > MAX_PAYLOAD || (kind == FAREWELL && length != 0) {
            return Err(format!("frame kind {kind:#04x} of {length} bytes"));
        }
        let Some(payload) = rest.get(..length) else {
            return Ok(None);
        };
        let frame = match kind {
            ABORT => Self::Abort(parse_notice(payload)?),
            FAREWELL => Self::Farewell,
            POSITION => Self::Position(
                payload
                    .try_into()
                    .map_err(|_| format!("position of {length} bytes"))?,
            ),
            _ => Self::Heartbeat,
        };
        Ok(Some((frame, HEADER + length)))
    }

    /// Appends the frame's bytes to `out`.
    pub fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Doorbell => out.push(DOORBELL),
            Self::Farewell => out.extend_from_slice(&[FAREWELL, 0, 0]),
            Self::Heartbeat => out.extend_from_slice(&[HEARTBEAT, 0, 0]),
            Self::Position(position) => {
                out.push(POSITION);
                out.extend_from_slice(&(position.len() as u16).to_le_bytes());
                out.extend_from_slice(position);
            }
            Self::Abort(notice) => {
                let message = truncated(&notice.message).as_bytes();
                let length = (NOTICE_HEADER + message.len()) as u16;
                out.push(ABORT);
                out.extend_from_slice(&length.to_le_bytes());
                out.push(notice.code as u8);
                out.extend_from_slice(&notice.origin.to_le_bytes());
                out.push(u8::from(notice.culprit.is_some()));
                out.extend_from_slice(&notice.culprit.unwrap_or(0).to_le_bytes());
                out.extend_from_slice(message);
            }
        }
    }
}

/// The notice in an abort frame's payload.
fn parse_notice(payload: &[u8]) -> Result<Notice, String> {
    let &[
        code,
        o0,
        o1,
        o2,
        o3,
        named,
        c0,
        c1,
        c2,
        c3,
        ref message @ ..,
    ] = payload
    else {
        return Err(format!("abort notice of {} bytes", payload.len()));
    };
    let Some(code) = Code::from_number(code) else {
        return Err(format!("abort notice with unknown code {code}"));
    };
    let culprit = match named {
        0 => None,
        1 => Some(u32::from_le_bytes([c0, c1, c2, c3])),
        other => return Err(format!("abort notice with culprit flag {other}")),
    };
    let Ok(message) = std::str::from_utf8(message) else {
        return Err("abort notice that is not UTF-8".to_owned());
    };
    Ok(Notice {
        code,
        origin: u32::from_le_bytes([o0, o1, o2, o3]),
        culprit,
        message: message.to_owned(),
    })
}

/// The longest prefix of `message` that may travel.
fn truncated(message: &str) -> &str {
    let mut end = message.len().min(MAX_MESSAGE);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    &message[..end]
}

/// This side's end of a control channel.
#[derive(Debug)]
pub struct Control {
    socket: OwnedFd,
    /// The start of a frame whose rest has not arrived.
    inbound: Vec<u8>,
    /// Frames that the socket has not taken yet.
    outbound: Vec<u8>,
    state: PeerState,
    /// The last position the peer sent and nobody has taken.
    position: Option<Position>,
    /// Nothing more will be read: the peer's end closed, failed, or sent what no member sends.
    ended: bool,
    /// `state` has changed, or a position has come, since the caller last asked.
    news: bool,
}

impl Control {
    /// A control channel over a connected stream socket, Unix or TCP, that carries nothing else
    /// from here on.
    pub fn new(socket: impl Into<OwnedFd>) -> Self {
        Self {
            socket: socket.into(),
            inbound: Vec::new(),
            outbound: Vec::new(),
            state: PeerState::Present,
            position: None,
            ended: false,
            news: false,
        }
    }

    /// Wakes the peer. When the socket is full the peer has bytes to read, which wake it as well.
    pub fn ring_doorbell(&mut self) {
        if self.flush() {
            self.outbound.push(DOORBELL);
            self.flush();
            if self.outbound.len() == 1 {
                self.outbound.clear();
            }
        }
    }

    /// Sends `frame`, now or as soon as the socket takes it.
    pub fn send(&mut self, frame: &Frame) {
        frame.write(&mut self.outbound);
        self.flush();
    }

    /// Reads what has arrived and says how the peer is. An abort outranks a farewell, a farewell a
    /// loss.
    pub fn peer_state(&mut self) -> PeerState {
        self.flush();
        self.drain();
        self.news = false;
        self.state.clone()
    }

    /// What the peer last said it is in, if that has not been taken yet.
    pub fn take_position(&mut self) -> Option<Position> {
        self.position.take()
    }

    /// Whether the last [`Control::drain`] learned something that [`Control::peer_state`] has not
    /// told yet.
    pub fn has_news(&self) -> bool {
        self.news
    }

    /// Reads what has arrived, doorbells included.
    pub fn drain(&mut self) {
        let mut chunk = [0; 1024];
        for _ in 0..MAX_READS {
            if self.ended {
                return;
            }
            match recv(&self.socket, &mut chunk, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => self.end("connection closed".to_owned()),
                Ok((_, count)) => {
                    self.take(&chunk[..count]);
                    if count < chunk.len() {
                        return;
                    }
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => {}
                Err(errno) => self.end(describe(errno)),
            }
        }
    }

    /// The socket to watch.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Applies every whole frame of what was kept and `bytes`, and keeps the rest.
    fn take(&mut self, bytes: &[u8]) {
        self.inbound.extend_from_slice(bytes);
        let mut done = 0;
        loop {
            match Frame::parse(&self.inbound[done..]) {
                Ok(Some((frame, length))) => {
                    done += length;
                    self.apply(frame);
                }
                Ok(None) => break,
                Err(what) => {
                    self.inbound.clear();
                    return self.end(format!("{what} on the control channel"));
                }
            }
        }
        self.inbound.drain(..done);
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

    /// Sends what is waiting. True when nothing is left.
    fn flush(&mut self) -> bool {
        while !self.outbound.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(&self.socket, &self.outbound, flags) {
                Ok(count) => drop(self.outbound.drain(..count)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return false,
                // The peer's end is gone. Reading says so too, after what arrived before it.
                Err(_) => self.outbound.clear(),
            }
        }
        true
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.flush();
    }
}

/// What a failed socket call saw, in words.
pub(super) fn describe(errno: Errno) -> String {
    match errno {
        Errno::CONNRESET => "connection reset".to_owned(),
        Errno::PIPE => "connection closed".to_owned(),
        Errno::TIMEDOUT => "connection timed out".to_owned(),
        other => std::io::Error::from(other).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use proptest::prelude::*;

    use super::*;

    fn notice(message: &str) -> Notice {
        Notice {
            code: Code::PeerLost,
            origin: 7,
            culprit: Some(3),
            message: message.to_owned(),
        }
    }

    fn pair() -> (Control, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Control::new(ours), theirs)
    }

    #[test]
    fn frames_survive_the_trip_byte_by_byte() {
        let frames = [
            Frame::Doorbell,
            Frame::Heartbeat,
            Frame::Position([9; 40]),
            Frame::Abort(notice("rank 3 died")),
            Frame::Abort(Notice {
                culprit: None,
                ..notice("")
            }),
            Frame::Farewell,
        ];
        for frame in frames {
            let mut bytes = Vec::new();
            frame.write(&mut bytes);
            for cut in 0..bytes.len() {
                assert_eq!(Frame::parse(&bytes[..cut]), Ok(None));
            }
            let length = bytes.len();
            bytes.push(DOORBELL);
            assert_eq!(Frame::parse(&bytes), Ok(Some((frame, length))));
        }
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let mut bytes = Vec::new();
        Frame::Abort(notice(&"x€".repeat(4000))).write(&mut bytes);
        let Ok(Some((Frame::Abort(seen), _))) = Frame::parse(&bytes) else {
            panic!("the notice did not parse");
        };
        assert!(seen.message.len() <= MAX_MESSAGE && seen.message.len() > MAX_MESSAGE - 4);
        assert!("x€".repeat(4000).starts_with(&seen.message));
    }

    #[test]
    fn an_abort_outranks_a_farewell_and_both_outrank_the_end() {
        let (mut control, mut peer) = pair();
        assert_eq!(control.peer_state(), PeerState::Present);
        peer.write_all(&[DOORBELL, HEARTBEAT, 2, 0, 9, 9]).unwrap();
        assert_eq!(control.peer_state(), PeerState::Present);
        peer.write_all(&[FAREWELL, 0, 0]).unwrap();
        assert_eq!(control.peer_state(), PeerState::Left);
        let mut bytes = Vec::new();
        Frame::Abort(notice("why")).write(&mut bytes);
        peer.write_all(&bytes).unwrap();
        drop(peer);
        assert_eq!(control.peer_state(), PeerState::Aborted(notice("why")));
        assert_eq!(control.peer_state(), PeerState::Aborted(notice("why")));
    }

    #[test]
    fn an_end_without_farewell_is_a_loss_told_once_as_news() {
        let (mut control, peer) = pair();
        drop(peer);
        assert!(!control.has_news());
        control.drain();
        assert!(control.has_news());
        assert_eq!(
            control.peer_state(),
            PeerState::Lost("connection closed".to_owned())
        );
        assert!(!control.has_news());
    }

    #[test]
    fn garbage_ends_the_channel_and_is_described() {
        let cases: [(&[u8], &str); 5] = [
            (&[0x7f], "unknown frame kind 0x7f on the control channel"),
            (
                &[ABORT, 0xff, 0xff],
                "frame kind 0x02 of 65535 bytes on the control channel",
            ),
            (
                &[FAREWELL, 1, 0, 0],
                "frame kind 0x03 of 1 bytes on the control channel",
            ),
            (
                &[ABORT, 1, 0, 4],
                "abort notice of 1 bytes on the control channel",
            ),
            (
                &[ABORT, 10, 0, 99, 0, 0, 0, 0, 0, 0, 0, 0, 0],
                "abort notice with unknown code 99 on the control channel",
            ),
        ];
        for (bytes, what) in cases {
            let (mut control, mut peer) = pair();
            peer.write_all(bytes).unwrap();
            peer.write_all(&[FAREWELL, 0, 0]).unwrap();
            assert_eq!(control.peer_state(), PeerState::Lost(what.to_owned()));
        }
    }

    #[test]
    fn a_full_socket_delays_frames_and_drops_doorbells() {
        let (mut control, mut peer) = pair();
        rustix::net::sockopt::set_socket_send_buffer_size(&control.socket, 4096).unwrap();
        let sent = Frame::Abort(notice(&"m".repeat(MAX_MESSAGE)));
        while control.outbound.is_empty() {
            control.send(&sent);
        }
        let waiting = control.outbound.len();
        control.ring_doorbell();
        assert_eq!(control.outbound.len(), waiting);
        let mut received = Vec::new();
        let reader = std::thread::spawn(move || {
            peer.read_to_end(&mut received).unwrap();
            received
        });
        while !control.flush() {
            std::thread::yield_now();
        }
        drop(control);
        let received = reader.join().unwrap();
        let mut at = 0;
        while let Some((frame, length)) = Frame::parse(&received[at..]).unwrap() {
            assert_eq!(frame, sent);
            at += length;
        }
        assert_eq!(at, received.len());
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(Some((_, length))) = Frame::parse(&bytes) {
                prop_assert!(length >= 1 && length <= bytes.len());
            }
        }

        #[test]
        fn any_text_travels(message in ".{0,2000}", code in 1u8..=9, culprit: Option<u32>) {
            let code = Code::from_number(code).unwrap();
            let notice = Notice { code, origin: 1, culprit, message };
            let mut bytes = Vec::new();
            Frame::Abort(notice.clone()).write(&mut bytes);
            let Ok(Some((Frame::Abort(seen), _))) = Frame::parse(&bytes) else {
                return Err(TestCaseError::fail("the notice did not parse"));
            };
            prop_assert!(notice.message.starts_with(&seen.message));
            let message = notice.message.clone();
            prop_assert_eq!(Notice { message, ..seen }, notice);
        }
    }
}
