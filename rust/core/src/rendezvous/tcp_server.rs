//! The server of the built-in [TCP store](super::tcp_store): where it listens, and its life. What its thread does
//! is next door, in `tcp_service`.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use socket2::{Domain, Protocol, Socket, Type};

use super::tcp_service::Server;
use super::tcp_store::{identity, split_address};
use crate::error::{Error, Result};

/// A running store server. It ends, with its thread, when dropped.
#[derive(Debug)]
pub struct TcpStoreServer {
    address: SocketAddr,
    identity: [u8; 32],
    stop: Arc<AtomicBool>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
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
        Self::start_any(host, &[port], "")
    }

    /// Serves the job called `job` at the first of `ports` of `host` that is free.
    ///
    /// # Errors
    /// As [`TcpStoreServer::start`].
    pub fn start_any(host: &str, ports: &[u16], job: &str) -> Result<Self> {
        let mut last = io::Error::from(ErrorKind::InvalidInput);
        // A client that probes a port may hold it for a moment by connecting to itself, so try twice.
        for pause in [Some(Duration::from_millis(150)), None] {
            for &port in ports {
                match listen(host, port) {
                    Ok(listener) => return Self::run(listener, identity(job)),
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
        Err(Error::system(
            format!("serve the store at {host} port {ports:?}"),
            format!("{last}{hint}"),
        ))
    }

    fn run(listener: TcpListener, identity: [u8; 32]) -> Result<Self> {
        let failed = |cause: io::Error| Error::system("start the store server", cause);
        let address = listener.local_addr().map_err(failed)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|cause| failed(cause.into()))?;
        let wake = Arc::new(wake);
        let stop = Arc::new(AtomicBool::new(false));
        let server = Server::new(listener, identity, Arc::clone(&wake), Arc::clone(&stop))
            .map_err(failed)?;
        let thread = thread::Builder::new()
            .name("unisono-store".to_owned())
            .spawn(move || server.serve())
            .map_err(failed)?;
        Ok(Self {
            address,
            identity,
            stop,
            wake,
            thread: Some(thread),
        })
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

    pub(super) fn identity(&self) -> [u8; 32] {
        self.identity
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // An eventfd that is full wakes as well.
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Listens at `host` and `port`, as [`TcpStoreServer::start`] documents.
fn listen(host: &str, port: u16) -> io::Result<TcpListener> {
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
    let is_name = host.parse::<IpAddr>().is_err() && host != "localhost";
    if is_name && addresses.iter().all(|address| address.ip().is_loopback()) {
        return listen_everywhere(port);
    }
    let mut last = io::Error::from(ErrorKind::NotFound);
    for address in addresses {
        match listen_at(address) {
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
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM.nonblocking().cloexec(),
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() && address.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&address.into())?;
    socket.listen(4096)?;
    Ok(socket.into())
}
