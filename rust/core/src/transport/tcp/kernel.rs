//! What the kernel knows of a TCP connection.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// How long a packet to the peer's kernel and the answer take, as measured so far; `None` where that is not known.
pub(in crate::transport) fn round_trip(socket: BorrowedFd<'_>) -> Option<Duration> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which are those of `info`, and both outlive the call.
    let asked = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    // SAFETY: it consists of integers, and began as zeros.
    let info = unsafe { info.assume_init() };
    (asked == 0 && info.tcpi_rtt > 0).then(|| Duration::from_micros(info.tcpi_rtt.into()))
}

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
