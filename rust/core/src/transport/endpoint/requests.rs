//! Requests for links, and the answers: the messages between two processes of one host that know each other
//! (`acquaintance.rs`).
//!
//! Every message has the same length, so each is written and read whole. With a request go two files: the segment of the link,
//! and a socket for its control channel.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::transport::handshake::{Answer, Lane};

/// A request for a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::transport) struct Opening {
    /// The answer has the same.
    pub(in crate::transport) number: u32,
    pub(in crate::transport) lane: Lane,
    /// The id of the group.
    pub(in crate::transport) group: [u8; 16],
    pub(in crate::transport) from: u32,
    pub(in crate::transport) to: u32,
}

/// The messages on the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::transport) enum Message {
    Open(Opening),
    Answer(u32, Answer),
}

/// The end of an acquaintance: it has gone, does not read, or has sent what no member would.
pub(super) struct Gone;

/// Bytes of every message.
const MESSAGE: usize = 2 + 4 + 16 + 4 + 4;
const OPEN: u8 = 1;
const ANSWER: u8 = 2;

impl Message {
    pub(in crate::transport) fn write(self) -> [u8; MESSAGE] {
        let mut bytes = [0; MESSAGE];
        match self {
            Self::Open(opening) => {
                bytes[0] = OPEN;
                bytes[1] = opening.lane as u8;
                bytes[2..6].copy_from_slice(&opening.number.to_le_bytes());
                bytes[6..22].copy_from_slice(&opening.group);
                bytes[22..26].copy_from_slice(&opening.from.to_le_bytes());
                bytes[26..].copy_from_slice(&opening.to.to_le_bytes());
            }
            Self::Answer(number, answer) => {
                bytes[0] = ANSWER;
                bytes[1] = answer as u8;
                bytes[2..6].copy_from_slice(&number.to_le_bytes());
            }
        }
        bytes
    }

    /// `None` for what no member would send.
    pub(in crate::transport) fn read(bytes: &[u8; MESSAGE]) -> Option<Self> {
        let number = |at: usize| {
            let four = bytes[at..at + 4].try_into().expect("four bytes");
            u32::from_le_bytes(four)
        };
        match bytes[0] {
            OPEN => Some(Self::Open(Opening {
                number: number(2),
                lane: Lane::from_number(bytes[1])?,
                group: bytes[6..22].try_into().expect("16 bytes"),
                from: number(22),
                to: number(26),
            })),
            ANSWER if bytes[6..] == [0; MESSAGE - 6] => {
                Some(Self::Answer(number(2), Answer::from_number(bytes[1])?))
            }
            _ => None,
        }
    }

    /// Sends it whole, or not at all: it is shorter than what the kernel takes at once.
    pub(super) fn send(self, socket: &UnixStream, files: &[OwnedFd]) -> Result<(), Gone> {
        let bytes = self.write();
        let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
            return Err(Gone);
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        loop {
            match sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags) {
                Ok(MESSAGE) => return Ok(()),
                Err(Errno::INTR) => {}
                _ => return Err(Gone),
            }
        }
    }

    /// The next message, if one has come, and its files: fewer than were sent where this process has no descriptors left.
    pub(super) fn receive(socket: &UnixStream) -> Result<Option<(Self, Vec<OwnedFd>)>, Gone> {
        let mut bytes = [0; MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut parts = [IoSliceMut::new(&mut bytes)];
        match recvmsg(socket, &mut parts, &mut control, flags) {
            Ok(received) if received.bytes == MESSAGE => {}
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            _ => return Err(Gone),
        }
        let mut files = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                files.extend(some);
            }
        }
        Ok(Some((Self::read(&bytes).ok_or(Gone)?, files)))
    }

    /// A request for each lane, and every answer.
    #[cfg(test)]
    pub(in crate::transport) fn samples() -> Vec<Self> {
        let open = |lane| {
            Self::Open(Opening {
                number: 7,
                lane,
                group: *b"sixteen of them.",
                from: 1,
                to: 258,
            })
        };
        let answers = (0..=u8::MAX).filter_map(Answer::from_number);
        let answers = answers.map(|answer| Self::Answer(7, answer));
        [Lane::Collective, Lane::PointToPoint]
            .map(open)
            .into_iter()
            .chain(answers)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let samples = Message::samples();
        for message in &samples {
            assert_eq!(Message::read(&message.write()), Some(*message));
        }
        let is_answer = |message: &&Message| matches!(message, Message::Answer(..));
        assert_eq!(samples.iter().filter(is_answer).count(), 6);
    }

    #[test]
    fn what_no_member_would_send_is_refused() {
        let answer = Message::Answer(7, Answer::Accept).write();
        let with = |at: usize, byte| {
            let mut bytes = answer;
            bytes[at] = byte;
            bytes
        };
        for bytes in [
            [0; MESSAGE],
            with(0, 3),
            with(1, 0),
            with(1, 7),
            with(29, 1),
        ] {
            assert_eq!(Message::read(&bytes), None);
        }
    }
}
