//! The endpoint: a process's listening sockets, and how links are opened and accepted through them.
//!
//! A process publishes one [`Address`]: an abstract Unix socket (a name without a file, gone with its process) and a
//! TCP address, or several where the user names several interfaces: a peer tries them in that order. Beside those on the
//! network there is one on loopback, for peers that share it; if all do, it is the only one that stays (`outside.rs`).
//!
//! Links are opened when first needed, by whichever side needs one first; when both do at once, the attempt of the lower
//! rank wins. `membership.rs` keeps which rank is doing what and decides that in one place, so that both
//! sides come to the same single link:
//!
//! - a side begins to connect only while it has neither this link nor an accepted attempt of the peer in hand;
//! - a side that is connecting turns away the attempt of a higher rank, and takes the attempt of a lower one.
//!
//! So of two attempts that meet, the higher rank's is turned away by the lower rank, which is connecting.
//!
//! Every connection passes the handshake of [`crate::transport::handshake`] first. By which transport a peer is reached
//! is decided by one table, `transports/mod.rs`: its rows are tried in their order. Two processes of one host shake hands
//! once; then they open links by messages (`acquaintance.rs`).

mod accept;
mod acquaintance;
mod address;
mod attempt;
mod connect;
mod conversation;
mod crowd;
mod distance;
mod guest;
mod inquiry;
mod interface;
mod listen;
mod membership;
mod outside;
mod presence;
mod rate;
mod requests;
mod shared;
mod status;
#[cfg(test)]
mod tests;
mod transports;
mod turns;
mod visit;
mod wire;

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use serde_json::{Value, json};

pub use self::acquaintance::{Hear, Heard};
pub(crate) use self::address::network_namespace;
pub use self::address::{Address, HostId};
pub use self::attempt::ConnectRequest;
pub use self::connect::Outcome;
pub use self::conversation::Conversation;
pub use self::interface::Hint;
pub(crate) use self::interface::hint;
pub use self::listen::{EndpointOptions, own_address};
pub use self::membership::{Gate, Verdict};
pub use self::outside::Seat;
pub use self::presence::Presence;
#[cfg(any(test, fuzzing))]
pub(in crate::transport) use self::requests::Message;
pub use self::transports::Again;
pub use self::turns::Turn;
pub use crate::config::TransportChoice;
pub use crate::transport::handshake::Lane;
pub use crate::transport::keys::GroupKey;

use self::accept::Acceptor;
use self::acquaintance::Acquaintances;
use self::listen::{Listeners, Listening, listen, listen_for_questions, listen_unix};
use self::membership::Membership;
use self::outside::Outside;
use self::shared::{Limits, Shared};
use self::turns::Turns;
use crate::error::{Error, Result};
use crate::fork::{Home, PerProcess};
use crate::locks::Mutex;
use crate::rarely::Rarely;
use crate::threads;
use crate::transport::keys::Hex;
use crate::transport::{SocketId, Stripe};
use crate::types::Rank;

/// The listening sockets of a process and the thread that accepts on them.
///
/// Several endpoints in one process work independently. Dropping it ends the thread, which closes the sockets, without
/// waiting for that; links made through it live on.
pub struct Endpoint {
    shared: Arc<Shared>,
    home: Home,
    /// The hold of the groups, which keeps it open to other hosts; `None` before the first group.
    outside: Mutex<Option<Weak<Outside>>>,
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
        type Running = Vec<(EndpointOptions, Weak<Endpoint>)>;
        static RUNNING: PerProcess<Mutex<Running>> = PerProcess::new(Mutex::default);
        let mut running = RUNNING.lock();
        running.retain(|(_, endpoint)| endpoint.strong_count() > 0);
        let found = running.iter().filter(|(with, _)| with == options);
        let mut found = found.filter_map(|(_, endpoint)| Seat::new(&endpoint.upgrade()?));
        if let Some(seat) = found.next() {
            return Ok(seat);
        }
        let endpoint = Self::start(options.clone())?;
        running.push((options.clone(), Arc::downgrade(&endpoint)));
        Ok(Seat::new(&endpoint).expect("nothing has closed it"))
    }

    fn start_with(options: &EndpointOptions, limits: Limits) -> Result<Arc<Self>> {
        let host = HostId::this(options.host.as_deref())?;
        let Listening {
            inside,
            outside,
            addresses: tcp,
            chosen,
        } = listen(options)?;
        let (unix, unix_name) = listen_unix()?;
        let address = Address {
            host,
            hostname: address::hostname(),
            pid: std::process::id(),
            unix_name,
            tcp,
        };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|cause| Error::system("create an eventfd", cause))?;
        let shared = Arc::new_cyclic(|this| Shared {
            this: Weak::clone(this),
            acquaintances: Acquaintances::default(),
            address,
            ring_bytes: options.ring_bytes,
            limits,
            groups: Mutex::default(),
            departed: Mutex::default(),
            parked: Mutex::default(),
            inside_only: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            wake,
            chosen,
            set_back: Mutex::default(),
            strangers: Mutex::new(Rarely::strangers()),
            turns: Arc::new(Turns::new("unisono-connect")),
            visits: Arc::new(Turns::new("unisono-link")),
            inquiries: Arc::new(Turns::new("unisono-ask")),
            visiting: AtomicUsize::new(0),
            rate: Mutex::default(),
        });
        let listeners = Listeners {
            unix,
            status: listen_for_questions(),
            inside,
            outside,
        };
        let acceptor = Acceptor::new(Arc::clone(&shared), listeners)?;
        threads::spawn("unisono-accept", move || acceptor.run())
            .map_err(|cause| Error::system("start the accepting thread", cause))?;
        Ok(Arc::new(Self {
            shared,
            home: Home::here(),
            outside: Mutex::default(),
        }))
    }

    /// The address to publish, so that others can connect.
    pub fn address(&self) -> &Address {
        &self.shared.address
    }

    /// The addresses at which other hosts reach this process, and the transports that could not be used inside this host, for
    /// `stats`.
    pub(crate) fn network(&self) -> Value {
        let chosen = self.shared.chosen.iter();
        let listening: Vec<_> = chosen
            .map(|(address, reason)| json!({"address": address.to_string(), "reason": reason}))
            .collect();
        let set_back = self.shared.set_back.lock();
        let reasons: Vec<_> = set_back.values().flatten().collect();
        json!({"listening": listening, "set_back": reasons})
    }

    /// The round trip to the farthest of these processes' hosts, and the address by which it was measured. Of many hosts only
    /// some are asked. `None` where all are on this host, or none has answered within half a second.
    pub fn farthest<'a>(
        &self,
        others: impl Iterator<Item = &'a Address>,
    ) -> Option<(Duration, SocketAddr)> {
        distance::farthest(&self.shared.address, others)
    }

    /// Whether the process that published this address still has it. Takes some seconds at most.
    pub fn presence(&self, address: &Address) -> Presence {
        presence::presence(&self.shared, address)
    }

    /// Whether the process that published this address has it at this moment. Takes two seconds at most for each address.
    pub fn glance(&self, address: &Address) -> Presence {
        presence::look(&self.shared, address)
    }

    /// Opens `socket`, which takes the place of one that broke, at one of the peer's addresses: try number `tries` of it.
    pub fn open_again(
        &self,
        request: &ConnectRequest<'_>,
        socket: SocketId,
        tries: usize,
    ) -> Again {
        connect::open_connection_again(&self.shared, request, socket, tries)
    }

    /// The bytes a second that one connection carries from here to the endpoint with this address; `None` where it does not
    /// say. Only the first call measures, unless the rate was [learned](Self::learn_rate) before.
    pub fn rate(&self, target: SocketAddr) -> Option<f64> {
        if let Some(known) = *self.shared.rate.lock() {
            return known;
        }
        let measured = rate::measure(target);
        *self.shared.rate.lock().get_or_insert(measured)
    }

    /// Another rank has measured the rate to other hosts.
    pub fn learn_rate(&self, rate: f64) {
        let mut known = self.shared.rate.lock();
        *known = Some(known.flatten().or(Some(rate)));
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
        drop(groups);
        self.shared.acquaintances.wake();
        self.shared.wake_acceptor();
        Ok(())
    }

    /// Lets no connection in any more for `rank` of the group with this id. Its links live on; its gate is not called again
    /// once calls that have begun are over.
    pub fn unregister(&self, id: &[u8; 16], rank: Rank) {
        let membership = self.shared.groups.lock().remove(&(*id, rank));
        if let Some(membership) = membership {
            membership.close();
            self.shared.acquaintances.forget(&membership);
            self.shared.remember(Arc::clone(&membership));
            let parked = {
                let mut all = self.shared.parked.lock();
                all.extract_if(.., |parked| parked.belongs_to(&membership))
                    .collect::<Vec<_>>()
            };
            drop(parked);
        }
    }

    /// Runs `job` on another thread, at once or after others that open links; before most of them if it `goes_first`. The job
    /// calls [`Self::connect`] with its turn in the request.
    ///
    /// # Errors
    /// `System` when the system refuses a thread.
    pub fn begin_to_connect(
        &self,
        goes_first: bool,
        job: impl FnOnce(&Turn) + Send + 'static,
    ) -> Result<()> {
        let begun = self.shared.turns.begin(goes_first, job);
        begun.map_err(|cause| Error::system("start a thread to connect", cause))
    }

    /// Asks a process of this host that has proved itself for the link between these ranks of the group, by one message;
    /// `hear` hears what becomes of it. False: the link is to be opened by [`Self::connect`].
    pub fn ask(&self, key: &GroupKey, (from, to): (Rank, Rank), lane: Lane, hear: Hear) -> bool {
        let membership = self.shared.groups.lock().get(&(key.id(), from)).cloned();
        let to = u32::try_from(to).unwrap_or(u32::MAX);
        membership
            .filter(|own| own.has_peer(to))
            .is_some_and(|membership| {
                let shared = &self.shared;
                shared
                    .acquaintances
                    .ask(shared, (&membership, to), lane, hear)
            })
    }

    /// Opens the link that `request` describes. Blocks until it is there, the peer turns out to be connecting
    /// itself, or the deadline has passed. Between processes of one host it tries shared memory first.
    ///
    /// # Errors
    /// `PeerLost` when the peer cannot be reached, `Untrusted` when what is there does not know the group,
    /// `Timeout` at the deadline, `Aborted` when called off; the peer is named in each.
    pub fn connect(&self, request: &ConnectRequest<'_>) -> Result<Outcome> {
        connect::connect(&self.shared, &self.membership(request)?, request)
    }

    /// Opens further connections with these numbers for what this side sends over the link that `request` describes, and
    /// gives each to `take`.
    ///
    /// # Errors
    /// When one does not come. The link goes on without.
    pub fn open_stripes(
        &self,
        request: &ConnectRequest<'_>,
        numbers: Range<u8>,
        take: impl FnMut(Stripe),
    ) -> Result<()> {
        self.membership(request)?;
        connect::open_stripes(&self.shared, request, numbers, take)
    }

    /// Begins a conversation with the peer of `request`, whose group need not be registered here: what this side knows of
    /// it is the key that the peer gave away.
    ///
    /// # Errors
    /// As [`Endpoint::connect`].
    pub fn converse(&self, request: &ConnectRequest<'_>) -> Result<Conversation> {
        connect::converse(&self.shared, request)
    }

    /// Whether the peer of `request` has left the group, and its process says so; not where no answer comes in time.
    pub fn has_left(&self, request: &ConnectRequest<'_>) -> bool {
        connect::has_left(&self.shared, request)
    }

    /// This process's place in the group of the request.
    fn membership(&self, request: &ConnectRequest<'_>) -> Result<Arc<Membership>> {
        let own = (request.key.id(), request.from);
        let membership = self.shared.groups.lock().get(&own).cloned();
        membership.ok_or_else(|| {
            Error::internal(format!(
                "connect in group {}, which is not registered",
                Hex(&request.key.id())
            ))
        })
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
