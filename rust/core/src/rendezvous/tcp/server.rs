//! The server of the built-in [TCP store](super::store): where it listens, and its life. The work of its thread is in
//! `service`.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use socket2::{Domain, Protocol, Socket, Type};

use super::service::{Control, Expected, Server};
use super::store::{port_range, split_address};
use super::wire::StoreKey;
use crate::error::{Error, Result};
use crate::fork::{self, Home};
use crate::locks::Mutex;

/// How long the name of this host may take to become known.
const NAMING: Duration = Duration::from_secs(10);
/// Between two attempts to find it.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// A running store server. It ends, with its thread, when dropped, or when the meeting that it was started for is over.
#[derive(Debug)]
pub struct TcpStoreServer {
    address: SocketAddr,
    key: StoreKey,
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
    home: Home,
}

impl TcpStoreServer {
    /// Serves at `address` (`host:port`, IPv6 in brackets; port 0 takes a free one).
    ///
    /// The server listens at that address alone, with two exceptions, which listen at all addresses: a name that
    /// means loopback here (Debian maps a host's own name to 127.0.1.1, other hosts do not), and an address that
    /// is not this host's own (a service address, a translated one).
    ///
    /// # Errors
    /// `System` when the port is taken or the name unknown, `InvalidArgument` for an address that is none.
    pub fn start(address: &str) -> Result<Self> {
        let (host, port) = split_address(address)?;
        Self::start_any(host, &[port], &StoreKey::new("", None))
    }

    /// Serves clients that have `key` at the first of `ports` of `host` that is free.
    ///
    /// # Errors
    /// As [`TcpStoreServer::start`].
    pub fn start_any(host: &str, ports: &[u16], key: &StoreKey) -> Result<Self> {
        let failed = |cause: String| {
            let ports = port_range(ports);
            Error::system(format!("serve the store at {host} port {ports}"), cause)
        };
        let addresses = resolve(host).map_err(|cause| {
            failed(format!(
                "{cause}; this name comes from MASTER_ADDR or the URL, and has to lead to this host"
            ))
        })?;
        let mut last = io::Error::from(ErrorKind::InvalidInput);
        // A client that probes a port may hold it for a moment by connecting to itself, so try twice.
        for pause in [Some(Duration::from_millis(150)), None] {
            for &port in ports {
                match listen(host, &addresses, port) {
                    Ok(listener) => return Self::run(listener, key.clone()),
                    Err(cause) => last = cause,
                }
            }
            match pause {
                Some(pause) if last.kind() == ErrorKind::AddrInUse => thread::sleep(pause),
                _ => break,
            }
        }
        let hint = match last.kind() {
            ErrorKind::AddrInUse => {
                "; another program or an earlier run holds it: choose another port"
            }
            _ => "",
        };
        Err(failed(format!("{last}{hint}")))
    }

    fn run(listener: TcpListener, key: StoreKey) -> Result<Self> {
        let failed = |cause: io::Error| Error::system("start the store server", cause);
        let address = listener.local_addr().map_err(failed)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|cause| failed(cause.into()))?;
        let control = Arc::new(Control {
            stop: AtomicBool::new(false),
            wake,
            meeting: Mutex::new(None),
        });
        let server = Server::new(listener, key.clone(), Arc::clone(&control)).map_err(failed)?;
        let thread = thread::Builder::new()
            .name("unisono-store".to_owned())
            .spawn(move || server.serve())
            .map_err(failed)?;
        Ok(Self {
            address,
            key,
            control,
            thread: Some(thread),
            home: Home::here(),
        })
    }

    /// From now on the server ends when all of `world` ranks have left the meeting, and `patience` after rank 0 has.
    pub(in crate::rendezvous) fn end_with_meeting(&self, world: usize, patience: Duration) {
        *self.control.meeting.lock() = Some(Expected { world, patience });
    }

    /// Ends the server, without waiting for that: waits for keys fail.
    pub(in crate::rendezvous) fn stop(&self) {
        self.control.stop.store(true, Ordering::Release);
        // An eventfd that is full wakes as well.
        let _ = rustix::io::write(&self.control.wake, &1_u64.to_ne_bytes());
    }

    /// Whether the server has ended by itself.
    pub(in crate::rendezvous) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// The address by which this process reaches the server.
    pub fn own_address(&self) -> SocketAddr {
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
                SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
            });
        }
        address
    }

    /// The address by which other ranks reach the server, if that is known: one that listens at all addresses was given a name
    /// that means loopback here, or an address that is not this host's, and neither tells.
    pub(in crate::rendezvous) fn address_for_others(&self) -> Option<SocketAddr> {
        (!self.address.ip().is_unspecified()).then_some(self.address)
    }

    pub(in crate::rendezvous) fn key(&self) -> &StoreKey {
        &self.key
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        if !self.home.is_here() {
            // The parent's server goes on, and there is no thread here to wait for or to let go.
            return std::mem::forget(thread);
        }
        self.stop();
        let _ = thread.join();
    }
}

/// The addresses of `host`. A name may become known only now: that of a pod, when its service has seen it run.
fn resolve(host: &str) -> io::Result<Vec<IpAddr>> {
    retry_for(NAMING, || {
        let addresses = (host, 0).to_socket_addrs()?;
        Ok(addresses.map(|address| address.ip()).collect())
    })
}

/// The first success of `attempt`, or its last failure, which is after `limit`.
fn retry_for<T>(limit: Duration, mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        match attempt() {
            Err(_) if Instant::now() < deadline => thread::sleep(limit.min(RETRY_PAUSE)),
            result => return result,
        }
    }
}

/// Listens at `host`, which has these addresses, and `port`, as [`TcpStoreServer::start`] documents.
fn listen(host: &str, addresses: &[IpAddr], port: u16) -> io::Result<TcpListener> {
    let is_name = host.parse::<IpAddr>().is_err() && host != "localhost";
    if is_name && addresses.iter().all(IpAddr::is_loopback) {
        return listen_everywhere(port);
    }
    let mut last = io::Error::from(ErrorKind::NotFound);
    for &address in addresses {
        match listen_at((address, port).into()) {
            Ok(listener) => return Ok(listener),
            Err(cause) => last = cause,
        }
    }
    if last.kind() == ErrorKind::AddrNotAvailable {
        tracing::warn!(
            host,
            port,
            "not an address of this host: the store listens at all addresses"
        );
        return listen_everywhere(port);
    }
    Err(last)
}

fn listen_everywhere(port: u16) -> io::Result<TcpListener> {
    match listen_at((Ipv6Addr::UNSPECIFIED, port).into()) {
        Err(cause) if cause.kind() != ErrorKind::AddrInUse => {
            listen_at((Ipv4Addr::UNSPECIFIED, port).into())
        }
        listening => listening,
    }
}

fn listen_at(address: SocketAddr) -> io::Result<TcpListener> {
    let domain = Domain::for_address(address);
    let kind = Type::STREAM.nonblocking().cloexec();
    let socket = fork::make_private(|| Socket::new(domain, kind, Some(Protocol::TCP)))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() && address.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&address.into())?;
    socket.listen(4096)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_becomes_known_is_waited_for_and_another_is_not_for_long() {
        let unknown = || io::Error::other("failed to lookup address information");
        let mut answers = [Err(unknown()), Ok(3)].into_iter();
        let found = retry_for(Duration::from_secs(60), || answers.next().expect("two"));
        assert_eq!(found.expect("known at last"), 3);
        let never = retry_for(Duration::from_millis(20), || Err::<(), _>(unknown()));
        assert!(never.is_err());
    }
}
