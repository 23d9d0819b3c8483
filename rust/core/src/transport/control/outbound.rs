//! The queue of bytes to send, and of the descriptors that travel with some of them; and the frames that are to be said again.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};

use super::Frame;
use crate::transport::cipher::Sealed;
use crate::transport::{Notice, Position};

/// A queue of frames.
#[derive(Debug, Default)]
pub(super) struct Outbound {
    bytes: Vec<u8>,
    /// Each with the position in `bytes` of the byte that it travels with, in order.
    files: VecDeque<(usize, OwnedFd)>,
}

impl Outbound {
    /// Adds a frame, and the descriptor that its first byte carries.
    pub(super) fn push(&mut self, frame: &Frame, file: Option<OwnedFd>) {
        self.files.extend(file.map(|file| (self.bytes.len(), file)));
        frame.write(&mut self.bytes);
    }

    /// The bytes that wait.
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Drops everything.
    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.files.clear();
    }

    /// Sends as much as the socket takes. True when nothing is left.
    pub(super) fn flush(
        &mut self,
        socket: BorrowedFd<'_>,
        mut sealed: Option<&mut Sealed>,
    ) -> bool {
        while !self.bytes.is_empty() {
            let sent = match &mut sealed {
                None => self.transmit(socket),
                Some(sealed) => sealed.send(&socket, &self.bytes),
            };
            match sent {
                Ok(count) => self.sent(count),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return false,
                // Too many descriptors of this user are on their way, so the kernel takes no further one. The frame goes
                // without it, and the peer says that it could not map the segment.
                Err(Errno::TOOMANYREFS) => drop(self.files.pop_front()),
                // The peer's end is gone. Reading says so too, after what arrived before it.
                Err(_) => self.clear(),
            }
        }
        true
    }

    /// One system call. A descriptor travels with the first byte of a call, so a call ends before the byte of the next
    /// descriptor.
    fn transmit(&self, socket: BorrowedFd<'_>) -> Result<usize, Errno> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let at = |index: usize| {
            self.files
                .get(index)
                .map_or(self.bytes.len(), |file| file.0)
        };
        let Some((0, file)) = self.files.front() else {
            return send(socket, &self.bytes[..at(0)], flags);
        };
        let files = [file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut messages = SendAncillaryBuffer::new(&mut space);
        messages.push(SendAncillaryMessage::ScmRights(&files));
        sendmsg(
            socket,
            &[IoSlice::new(&self.bytes[..at(1)])],
            &mut messages,
            flags,
        )
    }

    fn sent(&mut self, count: usize) {
        self.bytes.drain(..count);
        if count > 0 && self.files.front().is_some_and(|file| file.0 == 0) {
            self.files.pop_front();
        }
        for file in &mut self.files {
            file.0 -= count;
        }
    }
}

/// The frames that hold until they are said otherwise. When another socket takes the place of a broken one, nothing is known of
/// the fate of the last frames, so these are said again; to hear one twice changes nothing.
#[derive(Debug, Default)]
pub(super) struct Standing {
    framing: Option<u64>,
    framing_heard: bool,
    position: Option<Position>,
    abort: Option<Notice>,
    farewell: bool,
}

impl Standing {
    pub(super) fn note(&mut self, frame: &Frame) {
        match frame {
            Frame::Framing(from) => self.framing = Some(*from),
            Frame::FramingHeard => self.framing_heard = true,
            Frame::Position(position) => self.position = Some(*position),
            Frame::Abort(notice) => self.abort = Some(notice.clone()),
            Frame::Farewell => self.farewell = true,
            _ => {}
        }
    }

    /// The frames, in the order in which they are to be said.
    pub(super) fn frames(&self) -> impl Iterator<Item = Frame> {
        let bare = |said: bool, frame| said.then_some(frame);
        [
            self.framing.map(Frame::Framing),
            bare(self.framing_heard, Frame::FramingHeard),
            self.position.map(Frame::Position),
            self.abort.clone().map(Frame::Abort),
            bare(self.farewell, Frame::Farewell),
        ]
        .into_iter()
        .flatten()
    }
}
