//! One TCP connection: bytes out, bytes in, as they are or sealed.

use std::io::IoSlice;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionread};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, send, sendmsg};

use crate::fork;
use crate::transport::cipher::{Cipher, Failure, RECORD, Sealed};

/// A connected socket that never blocks.
#[derive(Debug)]
pub(super) struct Connection {
    socket: TcpStream,
    /// The encryption of its bytes, where they are encrypted.
    sealed: Option<Box<Sealed>>,
}

impl Connection {
    /// # Errors
    /// When the socket does not take its options.
    pub(super) fn new(socket: TcpStream, cipher: Option<Cipher>) -> std::io::Result<Self> {
        fork::keep_private(&socket);
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        let sealed = cipher.map(|cipher| Box::new(Sealed::new(cipher)));
        Ok(Self { socket, sealed })
    }

    /// The connection with its bytes sealed, in both directions, before it has carried any.
    pub(super) fn seal(&mut self, cipher: Cipher) {
        self.sealed = Some(Box::new(Sealed::new(cipher)));
    }

    pub(super) fn is_sealed(&self) -> bool {
        self.sealed.is_some()
    }

    pub(super) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Sends as much of `bytes` as goes now. The next call must begin with the bytes that did not go.
    ///
    /// # Errors
    /// `AGAIN` when nothing went.
    pub(super) fn send(&mut self, bytes: &[u8]) -> Result<usize, Errno> {
        match &mut self.sealed {
            None => send(
                &self.socket,
                bytes,
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            ),
            Some(sealed) => sealed.send(self.socket.as_fd(), bytes),
        }
    }

    /// As [`Connection::send`], of some pieces one after the other, by one system call.
    ///
    /// # Errors
    /// `AGAIN` when nothing went.
    pub(super) fn send_pieces(&mut self, pieces: &[&[u8]]) -> Result<usize, Errno> {
        if let Some(sealed) = &mut self.sealed {
            // Sealed bytes are copied in any case: as many as fit in one record.
            let mut record = Vec::new();
            for piece in pieces {
                let fits = piece.len().min(RECORD - record.len());
                record.extend_from_slice(&piece[..fits]);
            }
            return sealed.send(self.socket.as_fd(), &record);
        }
        let empty = || IoSlice::new(&[]);
        let mut slices = [empty(), empty(), empty()];
        for (slice, piece) in slices.iter_mut().zip(pieces) {
            *slice = IoSlice::new(piece);
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        sendmsg(
            &self.socket,
            &slices[..pieces.len()],
            &mut SendAncillaryBuffer::default(),
            flags,
        )
    }

    /// Receives into `bytes` by one system call; 0: the peer's end has closed.
    ///
    /// # Errors
    /// `AGAIN` when nothing is there.
    pub(super) fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, Failure> {
        match &mut self.sealed {
            None => Ok(recv(&self.socket, bytes, RecvFlags::DONTWAIT)?.1),
            Some(sealed) => sealed.receive(self.socket.as_fd(), bytes),
        }
    }

    /// Receives all of `bytes`, which have [arrived](Connection::arrived).
    ///
    /// # Errors
    /// When the connection is broken.
    pub(super) fn receive_all(&self, bytes: &mut [u8]) -> Result<(), Errno> {
        let mut received = 0;
        while received < bytes.len() {
            match recv(&self.socket, &mut bytes[received..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(Errno::PIPE),
                Ok((_, count)) => received += count,
                Err(Errno::AGAIN | Errno::INTR) => std::thread::yield_now(),
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Bytes that the kernel has; 0 where they are sealed, since how many were sent shows when they are opened.
    pub(super) fn arrived(&self) -> usize {
        match self.sealed {
            None => ioctl_fionread(&self.socket).map_or(0, |bytes| bytes as usize),
            Some(_) => 0,
        }
    }

    /// Whether something to receive is here already, or arrives now.
    pub(super) fn may_receive(&self) -> bool {
        self.has_opened() || self.ready(PollFlags::IN).contains(PollFlags::IN)
    }

    /// Whether [`Connection::receive`] has something without the socket.
    pub(super) fn has_opened(&self) -> bool {
        self.sealed.as_ref().is_some_and(|sealed| sealed.is_ready())
    }

    /// Whether bytes that did not count as sent are sealed already.
    pub(super) fn owes(&self) -> bool {
        self.sealed.as_ref().is_some_and(|sealed| sealed.owes())
    }

    /// Which of `wanted` it is ready for now; also `HUP` and `ERR`.
    pub(super) fn ready(&self, wanted: PollFlags) -> PollFlags {
        let mut fds = [PollFd::from_borrowed_fd(self.socket.as_fd(), wanted)];
        match poll(&mut fds, Some(&Timespec::default())) {
            Ok(_) => fds[0].revents(),
            Err(_) => PollFlags::empty(),
        }
    }

    /// Whether nothing more will arrive than what the kernel has.
    pub(super) fn has_ended(&self) -> bool {
        let end = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        self.ready(PollFlags::RDHUP).intersects(end)
    }

    /// Whether the peer has closed its end and all before that has been received.
    pub(super) fn is_at_its_end(&self) -> bool {
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        !self.has_opened()
            && self.has_ended()
            && matches!(recv(&self.socket, &mut [0; 1], flags), Ok((_, 0)))
    }

    /// Tells the peer that this side sends no more.
    pub(super) fn finish(&self) {
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    /// Bytes of memory.
    pub(super) fn memory(&self) -> usize {
        self.sealed.as_ref().map_or(0, |sealed| sealed.memory())
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
