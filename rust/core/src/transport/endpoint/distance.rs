//! How far other hosts are: how long a packet there and the answer take.
//!
//! The kernels measure that whenever they open a connection, whatever the processes at both ends are doing. So a few
//! connections are opened to what others listen at, and closed again without a word.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use socket2::{Domain, Socket, Type};

use super::address::Address;
use super::wire::timespec;
use crate::fork;
use crate::transport::tcp::kernel::round_trip;

/// Hosts that are asked, at most: of many, some.
const MOST_HOSTS: usize = 8;

/// Connections to each address. The shortest round trip counts, since a disturbance makes it longer.
const TRIES: usize = 2;

/// How long a host may take to answer. The distance of a slower host is not known.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// A connection on its way.
struct Probe {
    host: usize,
    target: SocketAddr,
    socket: Socket,
}

/// The round trip to the farthest of the hosts of `others` that are not that of `own`, and the address by which it was
/// measured, the nearest one of that host. Of many hosts only some are asked. `None` where there are none, or none has
/// answered.
pub(super) fn farthest<'a>(
    own: &Address,
    others: impl Iterator<Item = &'a Address>,
) -> Option<(Duration, SocketAddr)> {
    let hosts = some_of(first_of_each_host(own, others));
    let mut probes: Vec<Probe> = Vec::new();
    for (host, there) in hosts.iter().enumerate() {
        for target in there.towards(own) {
            let sockets = (0..TRIES).filter_map(|_| begin(target).ok());
            probes.extend(sockets.map(|socket| Probe {
                host,
                target,
                socket,
            }));
        }
    }
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    let mut nearest: Vec<Option<(Duration, SocketAddr)>> = vec![None; hosts.len()];
    while probes.iter().any(|probe| nearest[probe.host].is_none()) && Instant::now() < deadline {
        let left = timespec(deadline.saturating_duration_since(Instant::now()));
        let mut fds: Vec<_> = probes
            .iter()
            .map(|probe| PollFd::new(&probe.socket, PollFlags::OUT))
            .collect();
        match poll(&mut fds, Some(&left)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => break,
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut ready = ready.into_iter();
        for probe in probes.extract_if(.., |_| ready.next().unwrap_or(false)) {
            let trip = round_trip(probe.socket.as_fd());
            if let (Ok(None), Some(trip)) = (probe.socket.take_error(), trip) {
                let found = (trip, probe.target);
                let before = &mut nearest[probe.host];
                *before = Some(before.map_or(found, |other| other.min(found)));
            }
        }
    }
    nearest.into_iter().flatten().max()
}

/// An address of each host that is not that of `own`.
fn first_of_each_host<'a>(
    own: &Address,
    others: impl Iterator<Item = &'a Address>,
) -> Vec<&'a Address> {
    let mut known = std::collections::HashSet::from([own.host().clone()]);
    others
        .filter(|other| known.insert(other.host().clone()))
        .collect()
}

/// At most `MOST_HOSTS` of them, spread from the first to the last.
pub(super) fn some_of<T>(all: Vec<T>) -> Vec<T> {
    let step = all.len().div_ceil(MOST_HOSTS).max(1);
    all.into_iter().step_by(step).collect()
}

/// Begins to connect.
fn begin(target: SocketAddr) -> std::io::Result<Socket> {
    let domain = Domain::for_address(target);
    let socket = fork::make_private(|| Socket::new(domain, Type::STREAM, None))?;
    socket.set_nonblocking(true)?;
    match socket.connect(&target.into()) {
        Err(error) if error.raw_os_error() != Some(Errno::INPROGRESS.raw_os_error()) => Err(error),
        _ => Ok(socket),
    }
}
