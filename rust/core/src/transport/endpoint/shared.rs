//! The state that an endpoint, its accepting thread and its handshakes share, and the limits of an acceptor.

use std::collections::{HashMap, VecDeque};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit};

use super::acquaintance::Acquaintances;
use super::address::{Address, HostId};
use super::membership::{Claim, Membership};
use super::turns::Turns;
use crate::locks::Mutex;
use crate::rarely::Rarely;
use crate::transport::cipher::Cipher;
use crate::types::Rank;

/// The limits of the acceptor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// For one connection, from accept to link.
    pub(super) handshake: Duration,
    /// For a group to be registered here after a peer first spoke of it.
    pub(super) unknown_group: Duration,
    /// For how long this side comes again where it is refused: the peer may not have registered the group yet.
    pub(super) refusals: Duration,
    /// Connections in the handshake at one time.
    pub(super) simultaneous: usize,
    /// How long a connection that has not proved itself keeps its place when others wait for one.
    pub(super) grace: Duration,
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
/// that stay silent cannot use them up.
fn most_simultaneous() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    let descriptors = usize::try_from(limit.unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
    (descriptors / 16).clamp(4, 64)
}

pub(super) type Groups = HashMap<([u8; 16], Rank), Arc<Membership>>;

/// The state that the endpoint, its accepting thread and its handshakes share.
pub(super) struct Shared {
    pub(super) this: Weak<Self>,
    pub(super) address: Address,
    pub(super) ring_bytes: usize,
    pub(super) limits: Limits,
    /// By group id and by the rank that this process has in it: threads of one process may be several ranks.
    pub(super) groups: Mutex<Groups>,
    /// The groups that were unregistered last: peers that come too late are told so.
    pub(super) departed: Mutex<VecDeque<Arc<Membership>>>,
    /// Streams of TCP links that wait for their control connections.
    pub(super) parked: Mutex<Vec<Parked>>,
    /// Set once, when no group needs to be reached from other hosts any more.
    pub(super) inside_only: AtomicBool,
    /// Set once, when the endpoint goes.
    pub(super) stopping: AtomicBool,
    /// Wakes the accepting thread.
    pub(super) wake: OwnedFd,
    /// The addresses that were chosen for other hosts, each with the reason.
    pub(super) chosen: Vec<(SocketAddr, String)>,
    /// By host, why transports could not be used; told once for each.
    pub(super) set_back: Mutex<HashMap<HostId, Vec<String>>>,
    /// Bounds what is logged of connections that were turned away.
    pub(super) strangers: Mutex<Rarely>,
    /// The threads on which this side opens links.
    pub(super) turns: Arc<Turns>,
    /// The threads on which links that proven members open are made.
    pub(super) visits: Arc<Turns>,
    /// The threads on which this side asks ranks elsewhere for their states.
    pub(super) inquiries: Arc<Turns>,
    /// Proven members whose links are being made.
    pub(super) visiting: AtomicUsize,
    /// To whom they are opened by one message.
    pub(super) acquaintances: Acquaintances,
    /// Bytes a second to other hosts, or that they cannot be told; once that is known.
    pub(super) rate: Mutex<Option<Option<f64>>>,
}

impl Shared {
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.acquaintances.wake();
        self.wake_acceptor();
    }

    pub(super) fn wake_acceptor(&self) {
        // Fails only when the counter is full, and then the thread is being woken already.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Keeps the word of a group that has been left, in place of the oldest ones.
    pub(super) fn remember(&self, membership: Arc<Membership>) {
        const MOST_DEPARTED: usize = 256;
        let mut departed = self.departed.lock();
        departed.push_back(membership);
        let surplus = departed.len().saturating_sub(MOST_DEPARTED);
        let forgotten: Vec<_> = departed.drain(..surplus).collect();
        drop(departed);
        drop(forgotten);
    }

    /// The rank of the group with this id, also when it was left lately.
    pub(super) fn group(&self, (id, to): ([u8; 16], Rank)) -> Option<Arc<Membership>> {
        if let Some(membership) = self.groups.lock().get(&(id, to)) {
            return Some(Arc::clone(membership));
        }
        let departed = self.departed.lock();
        let mut left = departed.iter().rev();
        left.find(|member| member.is(&id, to)).map(Arc::clone)
    }
}

/// The stream of a TCP link whose control connection is to follow. No thread waits for that: it is kept here for a while.
pub(super) struct Parked {
    pub(super) link: [u8; 16],
    pub(super) claim: Claim,
    pub(super) data: TcpStream,
    /// The cipher of the stream, where the group asks for encryption.
    pub(super) cipher: Option<Cipher>,
    pub(super) expires: Instant,
}

impl Parked {
    pub(super) fn belongs_to(&self, membership: &Arc<Membership>) -> bool {
        Arc::ptr_eq(self.claim.membership(), membership)
    }
}
