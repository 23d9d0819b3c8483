//! The listening sockets of an endpoint: an abstract Unix socket, and TCP on the network and on loopback.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};

use socket2::SockRef;

use super::interface::{self, Hint};
use crate::error::{Error, Result};
use crate::fork;
use crate::transport::keys::{Hex, random_bytes};

/// How an endpoint listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointOptions {
    /// Sets this process's host apart: processes with different labels use TCP even on one host.
    pub host: Option<String>,
    /// The network interfaces or local addresses to listen on, as [`crate::config::Config::interface`] has them; chosen by
    /// route when `None`.
    pub interface: Option<String>,
    /// The setting of another library for its interfaces: used where `interface` is `None`.
    pub hint: Option<Hint>,
    /// The rendezvous master; the address that leads to it is published.
    pub towards: Option<SocketAddr>,
    /// All ranks are known to be on this host: it listens on loopback, unless `interface` says otherwise.
    pub one_host: bool,
    /// Bytes of each direction's ring in a shared memory link; a power of two.
    pub ring_bytes: usize,
}

impl Default for EndpointOptions {
    fn default() -> Self {
        Self {
            host: None,
            interface: None,
            hint: None,
            towards: None,
            one_host: false,
            ring_bytes: 1 << 20,
        }
    }
}

/// The listening sockets that the accepting thread waits on.
pub(super) struct Listeners {
    pub(super) unix: Option<UnixListener>,
    /// Where `unisono status` asks.
    pub(super) status: Option<UnixListener>,
    /// Those that stay as long as the endpoint.
    pub(super) inside: Vec<TcpListener>,
    /// Those that are closed when no group needs them any more.
    pub(super) outside: Vec<TcpListener>,
}

/// The sockets of an endpoint on the network and on loopback.
pub(super) struct Listening {
    /// Those that stay as long as the endpoint.
    pub(super) inside: Vec<TcpListener>,
    /// Those that are for other hosts alone.
    pub(super) outside: Vec<TcpListener>,
    /// The addresses of both.
    pub(super) addresses: Vec<SocketAddr>,
    /// The addresses that were chosen for other hosts, each with the reason.
    pub(super) chosen: Vec<(SocketAddr, String)>,
}

/// Listens on the network, and on loopback for the ranks of this host.
pub(super) fn listen(options: &EndpointOptions) -> Result<Listening> {
    let wanted = options.interface.as_deref();
    let choices = interface::choose(
        wanted,
        options.hint.as_ref(),
        options.towards,
        options.one_host,
    )?;
    let inside = interface::inside(wanted, &choices);
    let (mut outside, mut chosen) = (Vec::new(), Vec::new());
    for choice in choices {
        let (listener, address) = listen_tcp(choice.ip)
            .map_err(|cause| Error::system(format!("listen on {}", choice.ip), cause))?;
        tracing::info!(%address, reason = %choice.reason, "listening");
        outside.push(listener);
        chosen.push((address, choice.reason));
    }
    let mut addresses: Vec<_> = chosen.iter().map(|(address, _)| *address).collect();
    // A host that has no loopback of version 4 does without.
    let inside = match inside.and_then(|ip| listen_tcp(ip).ok()) {
        Some((listener, address)) => {
            addresses.push(address);
            vec![listener]
        }
        None => std::mem::take(&mut outside),
    };
    Ok(Listening {
        inside,
        outside,
        addresses,
        chosen,
    })
}

/// The address by which the other ranks reach this host: that of the interface `wanted` (a name or an address), else
/// loopback where all of them are known to be here, else that of the default route.
///
/// # Errors
/// `InvalidArgument` when `wanted` is none of this host's.
pub fn own_address(wanted: Option<&str>, one_host: bool) -> Result<IpAddr> {
    let choices = interface::choose(wanted, interface::hint().as_ref(), None, one_host)?;
    Ok(choices[0].ip)
}

fn listen_tcp(ip: IpAddr) -> std::io::Result<(TcpListener, SocketAddr)> {
    let listener = fork::make_private(|| TcpListener::bind((ip, 0)))?;
    listener.set_nonblocking(true)?;
    // Members wait there beside strangers; the kernel may have less.
    SockRef::from(&listener).listen(4096)?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// An abstract Unix socket with a random name, or nothing where the system has none.
pub(super) fn listen_unix() -> Result<(Option<UnixListener>, Vec<u8>)> {
    let name = format!("unisono-{}", Hex(&random_bytes::<16>()?)).into_bytes();
    match listen_abstract(&name) {
        Ok(listener) => Ok((Some(listener), name)),
        Err(cause) => {
            tracing::warn!(%cause, "no Unix socket, so no shared memory: all links will use TCP");
            Ok((None, Vec::new()))
        }
    }
}

/// The socket where `unisono status` asks, named so that it finds the socket. A process whose system refuses it is not asked.
pub(super) fn listen_for_questions() -> Option<UnixListener> {
    let random = random_bytes::<4>().ok()?;
    let name = format!("unisono-status-{}-{}", std::process::id(), Hex(&random));
    listen_abstract(name.as_bytes()).ok()
}

fn listen_abstract(name: &[u8]) -> std::io::Result<UnixListener> {
    let address = UnixAddr::from_abstract_name(name)?;
    let listener = fork::make_private(|| UnixListener::bind_addr(&address))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
