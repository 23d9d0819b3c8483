//! What a socket has been given that the peer's system has not acknowledged.

use std::os::fd::{AsRawFd, BorrowedFd};

/// How many bytes of a TCP connection the peer's system has not acknowledged, the end of the stream counted as one; 0 where
/// that cannot be asked.
pub(super) fn unacknowledged(socket: BorrowedFd<'_>) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: `SIOCOUTQ`, which has this number, stores one `int`, and `bytes` outlives the call.
    let asked = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    match asked {
        0 => usize::try_from(bytes).unwrap_or(0),
        _ => 0,
    }
}
