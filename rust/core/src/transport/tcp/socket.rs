//! The socket of a connection, as far as the connection knows it: the system's, or a simulated one of a world.

use std::io::IoSlice;
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionread};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

use super::kernel;
use crate::fork;
use crate::transport::cipher::Carrier;

/// One socket to a peer. None of its calls blocks.
pub(crate) trait Socket: Carrier {
    /// Prepares a socket that was made just now.
    ///
    /// # Errors
    /// When it does not take its options.
    fn set_up(&self) -> std::io::Result<()>;

    /// Takes the first bytes of these pieces, three at most, as many as go now.
    ///
    /// # Errors
    /// `AGAIN` when none go.
    fn send_pieces(&self, pieces: &[&[u8]]) -> Result<usize, Errno>;

    /// Whether nothing more will come and all that came has been received.
    ///
    /// # Errors
    /// Those of a call that receives.
    fn is_at_its_end(&self) -> Result<bool, Errno>;

    /// Which of `wanted` it is ready for now; also `HUP` and `ERR`.
    fn ready(&self, wanted: PollFlags) -> PollFlags;

    /// The error that has broken it, once.
    fn take_error(&self) -> Option<Errno>;

    /// Bytes that have come and have not been received.
    fn arrived(&self) -> usize;

    /// Bytes that it has taken and the peer's system has not acknowledged.
    fn unacknowledged(&self) -> usize;

    /// Whether it has asked for an answer to some of these again and again, in vain.
    fn is_unanswered(&self) -> bool;

    /// Tells the peer that no more bytes come.
    fn end_sending(&self);
}

impl Socket for TcpStream {
    fn set_up(&self) -> std::io::Result<()> {
        fork::keep_private(self);
        self.set_nonblocking(true)?;
        self.set_nodelay(true)
    }

    fn send_pieces(&self, pieces: &[&[u8]]) -> Result<usize, Errno> {
        let empty = || IoSlice::new(&[]);
        let mut slices = [empty(), empty(), empty()];
        for (slice, piece) in slices.iter_mut().zip(pieces) {
            *slice = IoSlice::new(piece);
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let slices = &slices[..pieces.len()];
        sendmsg(self, slices, &mut SendAncillaryBuffer::default(), flags)
    }

    fn is_at_its_end(&self) -> Result<bool, Errno> {
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        match recv(self, &mut [0; 1], flags) {
            Ok((_, count)) => Ok(count == 0),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    fn ready(&self, wanted: PollFlags) -> PollFlags {
        let mut fds = [PollFd::from_borrowed_fd(self.as_fd(), wanted)];
        match poll(&mut fds, Some(&Timespec::default())) {
            Ok(_) => fds[0].revents(),
            Err(_) => PollFlags::empty(),
        }
    }

    fn take_error(&self) -> Option<Errno> {
        let error = TcpStream::take_error(self).ok().flatten()?;
        Errno::from_io_error(&error)
    }

    fn arrived(&self) -> usize {
        ioctl_fionread(self).map_or(0, |bytes| bytes as usize)
    }

    fn unacknowledged(&self) -> usize {
        kernel::unacknowledged(self)
    }

    fn is_unanswered(&self) -> bool {
        kernel::is_unanswered(self.as_fd())
    }

    fn end_sending(&self) {
        let _ = self.shutdown(Shutdown::Write);
    }
}
