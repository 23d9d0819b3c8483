//! The kernel's figures for a TCP connection.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

/// Bytes of what is asked for of `TCP_INFO`, as linux/tcp.h has it since 4.9. An older kernel tells less.
const TOLD: usize = 176;

/// Where fields of it are.
const RETRANSMITS: usize = 2;
const PROBES: usize = 3;
const RTT: usize = 68;
const BYTES_ACKED: usize = 120;
const BUSY_TIME: usize = 168;

/// The traffic that a connection has sent so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Traffic {
    /// Bytes that the peer's kernel has acknowledged.
    pub(super) acknowledged: u64,
    /// Microseconds in which some were on their way.
    pub(super) busy_us: u64,
}

/// The traffic that a connection has sent so far; zero where it is not known.
pub(super) fn traffic(socket: &impl AsFd) -> Traffic {
    let told = ask(socket.as_fd());
    let at = |place| field(&told, place).map_or(0, u64::from_ne_bytes);
    Traffic {
        acknowledged: at(BYTES_ACKED),
        busy_us: at(BUSY_TIME),
    }
}

/// How long a packet to the peer's kernel and the answer take, as measured so far; `None` where that is not known.
pub(in crate::transport) fn round_trip(socket: BorrowedFd<'_>) -> Option<Duration> {
    let microseconds = u32::from_ne_bytes(field(&ask(socket), RTT)?);
    (microseconds > 0).then(|| Duration::from_micros(microseconds.into()))
}

/// Whether bytes have been sent again and again and none has been acknowledged: the way to the peer is dark, for this
/// connection at least. Where the interface is down that leads there none have been sent at all, and the system probes.
pub(super) fn is_unanswered(socket: BorrowedFd<'_>) -> bool {
    const SEVERAL: u8 = 2;
    let told = ask(socket);
    let times = |place| field(&told, place).is_some_and(|[times]| times >= SEVERAL);
    times(RETRANSMITS) || times(PROBES)
}

fn field<const N: usize>(told: &[u8], place: usize) -> Option<[u8; N]> {
    told.get(place..)?.first_chunk().copied()
}

/// As much of `TCP_INFO` as the kernel tells.
fn ask(socket: BorrowedFd<'_>) -> Vec<u8> {
    let mut told = vec![0; TOLD];
    let mut length = TOLD as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which `told` has, and both outlive the call.
    let asked = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            told.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    told.truncate(if asked == 0 { length as usize } else { 0 });
    told
}

/// How many bytes of a TCP connection the peer's system has not acknowledged, the end of the stream counted as one; 0 where
/// that cannot be asked.
pub(super) fn unacknowledged(socket: &impl AsFd) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: `SIOCOUTQ`, which has this number, stores one `int`, and `bytes` outlives the call.
    let asked = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    match asked {
        0 => usize::try_from(bytes).unwrap_or(0),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn the_kernel_counts_what_has_been_acknowledged() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut far = listener.accept().unwrap().0;
        let trip = round_trip(near.as_fd()).expect("the connection has been opened");
        assert!(trip < Duration::from_secs(1));
        let before = traffic(&near);
        near.write_all(&[1; 50_000]).unwrap();
        far.read_exact(&mut [0; 50_000]).unwrap();
        while unacknowledged(&near) > 0 {
            std::thread::yield_now();
        }
        let after = traffic(&near);
        assert_eq!(after.acknowledged - before.acknowledged, 50_000);
        assert!(after.busy_us < 60_000_000);
    }
}
