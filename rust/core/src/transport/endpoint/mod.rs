//! The endpoint: a process's listening sockets, and how links are opened and accepted through them.
//!
//! A process publishes one [`Address`]: an abstract Unix socket (a name without a file, gone with its process) and a
//! TCP address, or several where the user names several interfaces: a peer tries them in that order. Beside those on the
//! network there is one on loopback, for peers that share it; if all do, it is the only one that stays (`outside.rs`).
//!
//! Links are opened when first needed, by whichever side needs one first; when both do at once, the attempt of the lower
//! rank wins. `membership.rs` keeps who is doing what and decides that in one place, so that both
//! sides come to the same single link:
//!
//! - a side begins to connect only while it has neither this link nor an accepted attempt of the peer in hand;
//! - a side that is connecting turns away the attempt of a higher rank, and takes the attempt of a lower one.
//!
//! So of two attempts that meet, the higher rank's is turned away by the lower rank, which is connecting.
//!
//! Every connection passes the handshake of [`crate::transport::handshake`] first. A shared memory link is one Unix
//! connection (its control channel) over which the initiator then passes the segment. A TCP link is two connections
//! that carry the same link id: the stream and its control channel.

mod accept;
mod address;
mod connect;
mod interface;
mod membership;
mod outside;
#[cfg(test)]
mod tests;
mod wire;

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Resource, getrlimit};

pub use self::address::{Address, HostId, network_namespace};
pub use self::connect::{ConnectRequest, Outcome};
pub use crate::config::TransportChoice;
pub use crate::transport::handshake::Lane;
pub use crate::transport::keys::GroupKey;

use self::accept::{Listeners, Parked};
pub use self::interface::Hint;
pub(crate) use self::interface::hint;
use self::membership::Membership;
use self::outside::Outside;
pub use self::outside::Seat;
use self::wire::{Cut, Patience};
use crate::error::{Error, Result};
use crate::fork::{self, Home};
use crate::rarely::Rarely;
use crate::threads;
use crate::transport::Link;
use crate::transport::keys::{Hex, random_bytes};
use crate::types::Rank;

/// How an endpoint listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointOptions {
    /// Sets this process's host apart: processes with different labels use TCP even on one host.
    pub host: Option<String>,
    /// The network interfaces or local addresses to listen on, as [`crate::config::Config::interface`] has them; chosen by
    /// route when `None`.
    pub interface: Option<String>,
    /// What other libraries are told about interfaces: used where `interface` is `None`.
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

/// A group's word on links that its peers open, and where they arrive.
///
/// Called on short-lived threads of the endpoint, with no lock held. A gate that holds the endpoint must hold it
/// weakly, or unregister before it goes.
pub trait Gate: Send + Sync {
    /// Whether the group wants this link now. The endpoint has already settled crossing and duplicate attempts.
    fn admit(&self, from: Rank, lane: Lane) -> Verdict;

    /// The link is there. Called once at most for a `(from, lane)`.
    fn established(&self, from: Rank, lane: Lane, link: Box<dyn Link>);
}

/// What a [`Gate`] says to a peer that wants to open a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Come in.
    Accept,
    /// This side's own attempt wins; the peer should wait for it.
    Crossing,
    /// There is such a link already.
    Duplicate,
    /// The group has been closed here.
    Left,
}

/// What bounds the acceptor.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// For one connection, from accept to link.
    handshake: Duration,
    /// For a group to be registered here after a peer first spoke of it.
    unknown_group: Duration,
    /// For how long this side comes again where it is refused: the peer may not have registered the group yet.
    refusals: Duration,
    /// Connections in the handshake at one time.
    simultaneous: usize,
    /// How long a connection that has not proved itself keeps its place when others wait for one.
    grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            unknown_group: Duration::from_secs(3),
            refusals: Duration::from_secs(30),
            simultaneous: most_simultaneous(),
            grace: Duration::from_millis(250),
        }
    }
}

/// Connections in the handshake at one time: a small part of the descriptors that this process may have, so that those
/// who stay silent cannot use them up.
fn most_simultaneous() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    let descriptors = usize::try_from(limit.unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
    (descriptors / 16).clamp(4, 64)
}

type Groups = HashMap<([u8; 16], Rank), Arc<Membership>>;

/// What the endpoint, its accepting thread and its handshakes share.
struct Shared {
    address: Address,
    ring_bytes: usize,
    limits: Limits,
    /// By group id and by the rank that this process has in it: threads of one process may be several ranks.
    groups: Mutex<Groups>,
    registered: Condvar,
    /// The groups that were unregistered last: peers that come too late are told so.
    departed: Mutex<VecDeque<Arc<Membership>>>,
    /// Streams of TCP links that wait for their control connections.
    parked: Mutex<Vec<Parked>>,
    /// Set once, when no group needs to be reached from other hosts any more.
    inside_only: AtomicBool,
    /// Set once, when the endpoint goes.
    stopping: AtomicBool,
    /// Wakes the accepting thread.
    wake: OwnedFd,
    /// Hosts about which a fall back to TCP has been logged.
    told: Mutex<HashSet<HostId>>,
    /// Bounds what is logged of connections that were turned away.
    strangers: Mutex<Rarely>,
}

/// The listening sockets of a process and the thread that accepts on them.
///
/// Several endpoints in one process work independently. Dropping it ends the thread, which closes the sockets, without
/// waiting for that; links made through it live on.
pub struct Endpoint {
    shared: Arc<Shared>,
    home: Home,
    /// What the groups hold that keeps it open to other hosts; `None` before the first.
    outside: Mutex<Option<Weak<Outside>>>,
}

fn listen_tcp(ip: IpAddr) -> std::io::Result<(TcpListener, SocketAddr)> {
    let listener = fork::make_private(|| TcpListener::bind((ip, 0)))?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// The sockets that stay as long as the endpoint, those that are for other hosts alone, and the addresses of both.
type Listening = (Vec<TcpListener>, Vec<TcpListener>, Vec<SocketAddr>);

/// Listens on the network, and on loopback for the ranks of this host.
fn listen(options: &EndpointOptions) -> Result<Listening> {
    let wanted = options.interface.as_deref();
    let choices = interface::choose(
        wanted,
        options.hint.as_ref(),
        options.towards,
        options.one_host,
    )?;
    let inside = interface::inside(wanted, &choices);
    let (mut chosen, mut addresses) = (Vec::new(), Vec::new());
    for choice in choices {
        let (listener, address) = listen_tcp(choice.ip)
            .map_err(|cause| Error::system(format!("listen on {}", choice.ip), cause))?;
        tracing::info!(%address, reason = %choice.reason, "listening");
        chosen.push(listener);
        addresses.push(address);
    }
    // A host that has no loopback of version 4 does without.
    Ok(match inside.and_then(|ip| listen_tcp(ip).ok()) {
        Some((listener, address)) => {
            addresses.push(address);
            (vec![listener], chosen, addresses)
        }
        None => (chosen, Vec::new(), addresses),
    })
}

/// The address by which the other ranks reach this host: that of the interface `wanted` (a name or an address), else
/// loopback where all of them are known to be here, else that of the default route.
///
/// # Errors
/// `InvalidArgument` when `wanted` is none of this host's.
pub fn own_address(wanted: Option<&str>, one_host: bool) -> Result<IpAddr> {
    let choices = interface::choose(wanted, hint().as_ref(), None, one_host)?;
    Ok(choices[0].ip)
}

impl Endpoint {
    /// Opens the sockets and begins to accept.
    ///
    /// # Errors
    /// `InvalidArgument` for an interface that does not exist or a bad host label, `System` when no socket can be
    /// opened.
    pub fn start(options: EndpointOptions) -> Result<Arc<Self>> {
        Self::start_with(&options, Limits::default())
    }

    /// The endpoint of this process for these options: the running one, as long as a group holds it and it is open to other
    /// hosts, else a new one. A forked child gets its own.
    ///
    /// # Errors
    /// As [`Endpoint::start`].
    pub fn global(options: &EndpointOptions) -> Result<Seat> {
        static RUNNING: Mutex<Vec<(u32, EndpointOptions, Weak<Endpoint>)>> = Mutex::new(Vec::new());
        let pid = std::process::id();
        let mut running = RUNNING.lock();
        running.retain(|(owner, _, endpoint)| *owner == pid && endpoint.strong_count() > 0);
        let found = running.iter().filter(|(_, with, _)| with == options);
        let mut found = found.filter_map(|(_, _, endpoint)| Seat::new(&endpoint.upgrade()?));
        if let Some(seat) = found.next() {
            return Ok(seat);
        }
        let endpoint = Self::start(options.clone())?;
        running.push((pid, options.clone(), Arc::downgrade(&endpoint)));
        Ok(Seat::new(&endpoint).expect("nothing has closed it"))
    }

    fn start_with(options: &EndpointOptions, limits: Limits) -> Result<Arc<Self>> {
        let host = HostId::this(options.host.as_deref())?;
        let (inside, outside, tcp) = listen(options)?;
        let (unix, unix_name) = listen_unix()?;
        let address = Address {
            host,
            hostname: address::hostname(),
            pid: std::process::id(),
            unix_name,
            tcp,
        };
        let shared = Arc::new(Shared {
            address,
            ring_bytes: options.ring_bytes,
            limits,
            groups: Mutex::default(),
            registered: Condvar::new(),
            departed: Mutex::default(),
            parked: Mutex::default(),
            inside_only: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|cause| Error::system("create an eventfd", cause))?,
            told: Mutex::default(),
            strangers: Mutex::new(Rarely::strangers()),
        });
        threads::spawn("unisono-accept", {
            let shared = Arc::clone(&shared);
            let listeners = Listeners {
                unix,
                inside,
                outside,
            };
            move || accept::run(&shared, listeners)
        })
        .map_err(|cause| Error::system("start the accepting thread", cause))?;
        Ok(Arc::new(Self {
            shared,
            home: Home::here(),
            outside: Mutex::default(),
        }))
    }

    /// What to publish, so that others can connect.
    pub fn address(&self) -> &Address {
        &self.shared.address
    }

    /// Lets members of the group with `key`, in which this process is `rank` of `world_size`, open links to it.
    /// Register before publishing the address: a peer that comes earlier is kept waiting a few seconds, then
    /// turned away, and tries again.
    ///
    /// # Errors
    /// `InvalidArgument` when the rank is out of range or the group is registered already.
    pub fn register(
        &self,
        key: GroupKey,
        rank: Rank,
        world_size: usize,
        gate: Arc<dyn Gate>,
    ) -> Result<()> {
        let id = key.id();
        let membership = Arc::new(Membership::new(key, rank, world_size, gate)?);
        let mut groups = self.shared.groups.lock();
        if groups.contains_key(&(id, rank)) {
            return Err(Error::invalid(format!(
                "group {} is registered already",
                Hex(&id)
            )));
        }
        groups.insert((id, rank), membership);
        self.shared.registered.notify_all();
        Ok(())
    }

    /// Lets nobody in any more for `rank` of the group with this id. Its links live on; its gate is not called again once
    /// calls that have begun are over.
    pub fn unregister(&self, id: &[u8; 16], rank: Rank) {
        let membership = self.shared.groups.lock().remove(&(*id, rank));
        if let Some(membership) = membership {
            membership.close();
            self.shared.remember(Arc::clone(&membership));
            let parked = {
                let mut all = self.shared.parked.lock();
                all.extract_if(.., |parked| parked.belongs_to(&membership))
                    .collect::<Vec<_>>()
            };
            drop(parked);
        }
    }

    /// Opens the link that `request` describes. Blocks until it is there, the peer turns out to be connecting
    /// itself, or the deadline has passed. Between processes of one host it tries shared memory first.
    ///
    /// # Errors
    /// `PeerLost` when the peer cannot be reached, `Untrusted` when what is there does not know the group,
    /// `Timeout` at the deadline, `Aborted` when called off; the peer is named in each.
    pub fn connect(&self, request: &ConnectRequest<'_>) -> Result<Outcome> {
        let own = (request.key.id(), request.from);
        let membership = self.shared.groups.lock().get(&own).cloned();
        let membership = membership.ok_or_else(|| {
            Error::internal(format!(
                "connect in group {}, which is not registered",
                Hex(&request.key.id())
            ))
        })?;
        connect::connect(&self.shared, &membership, request)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if !self.home.is_here() {
            // The thread is in the parent of this fork, and so may be a thread that has the locks.
            return;
        }
        self.shared.stop();
        let groups = std::mem::take(&mut *self.shared.groups.lock());
        for membership in groups.values() {
            membership.close();
        }
        let parked = std::mem::take(&mut *self.shared.parked.lock());
        drop((groups, parked));
    }
}

impl Shared {
    fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.registered.notify_all();
        self.wake_acceptor();
    }

    fn wake_acceptor(&self) {
        // Fails only when the counter is full, and then the thread is being woken already.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Keeps the word of a group that has been left, in place of the oldest ones.
    fn remember(&self, membership: Arc<Membership>) {
        const KEPT: usize = 256;
        let mut departed = self.departed.lock();
        departed.push_back(membership);
        let surplus = departed.len().saturating_sub(KEPT);
        let forgotten: Vec<_> = departed.drain(..surplus).collect();
        drop(departed);
        drop(forgotten);
    }

    /// Rank `to` of the group with this id, also when it was left lately; waits a little for it to be registered. `None`
    /// when it is not, or when `gone` says that the peer has hung up.
    fn group(
        &self,
        (id, to): ([u8; 16], Rank),
        patience: &Patience<'_>,
        gone: impl Fn() -> bool,
    ) -> Result<Option<Arc<Membership>>, Cut> {
        const LOOK: Duration = Duration::from_millis(50);
        let until = Instant::now() + self.limits.unknown_group;
        let mut groups = self.groups.lock();
        loop {
            if let Some(membership) = groups.get(&(id, to)) {
                return Ok(Some(Arc::clone(membership)));
            }
            let departed = self.departed.lock();
            let mut left = departed.iter().rev();
            if let Some(membership) = left.find(|member| member.is(&id, to)) {
                return Ok(Some(Arc::clone(membership)));
            }
            drop(departed);
            patience.left()?;
            if gone() || Instant::now() >= until {
                return Ok(None);
            }
            self.registered.wait_for(&mut groups, LOOK);
        }
    }
}

/// An abstract Unix socket with a random name, or nothing where the system has none.
fn listen_unix() -> Result<(Option<UnixListener>, Vec<u8>)> {
    let name = format!("unisono-{}", Hex(&random_bytes::<16>()?)).into_bytes();
    let listen = || -> std::io::Result<UnixListener> {
        let address = UnixAddr::from_abstract_name(&name)?;
        let listener = fork::make_private(|| UnixListener::bind_addr(&address))?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    match listen() {
        Ok(listener) => Ok((Some(listener), name)),
        Err(cause) => {
            tracing::warn!(%cause, "no Unix socket, so no shared memory: all links will use TCP");
            Ok((None, Vec::new()))
        }
    }
}
