//! What an endpoint, its accepting thread and its handshakes share, and the bounds of an acceptor.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::process::{Resource, getrlimit};

use super::acquaintance::Acquaintances;
use super::address::{Address, HostId};
use super::membership::Membership;
use super::parked::Parked;
use super::turns::Turns;
use super::wire::{Cut, Patience};
use crate::rarely::Rarely;
use crate::types::Rank;

/// What bounds the acceptor.
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

/// What the endpoint, its accepting thread and its handshakes share.
pub(super) struct Shared {
    pub(super) this: Weak<Self>,
    pub(super) address: Address,
    pub(super) ring_bytes: usize,
    pub(super) limits: Limits,
    /// By group id and by the rank that this process has in it: threads of one process may be several ranks.
    pub(super) groups: Mutex<Groups>,
    pub(super) registered: Condvar,
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
    /// Hosts about which a fall back to TCP has been logged.
    pub(super) told: Mutex<HashSet<HostId>>,
    /// Bounds what is logged of connections that were turned away.
    pub(super) strangers: Mutex<Rarely>,
    /// Who opens links.
    pub(super) turns: Arc<Turns>,
    /// To whom they are opened by one message.
    pub(super) acquaintances: Acquaintances,
    /// Bytes a second to other hosts, or that they cannot be told; once that is known.
    pub(super) rate: Mutex<Option<Option<f64>>>,
    /// Bytes are thrown away for another process that measures.
    pub(super) is_being_measured: AtomicBool,
}

impl Shared {
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.registered.notify_all();
        self.acquaintances.wake();
        self.wake_acceptor();
    }

    pub(super) fn wake_acceptor(&self) {
        // Fails only when the counter is full, and then the thread is being woken already.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Keeps the word of a group that has been left, in place of the oldest ones.
    pub(super) fn remember(&self, membership: Arc<Membership>) {
        const KEPT: usize = 256;
        let mut departed = self.departed.lock();
        departed.push_back(membership);
        let surplus = departed.len().saturating_sub(KEPT);
        let forgotten: Vec<_> = departed.drain(..surplus).collect();
        drop(departed);
        drop(forgotten);
    }

    /// Rank `to` of the group with this id, also when it was left lately, if it is or was here.
    pub(super) fn known_group(&self, id: &[u8; 16], to: Rank) -> Option<Arc<Membership>> {
        if let Some(membership) = self.groups.lock().get(&(*id, to)) {
            return Some(Arc::clone(membership));
        }
        let departed = self.departed.lock();
        let found = departed.iter().rev().find(|member| member.is(id, to));
        found.map(Arc::clone)
    }

    /// Rank `to` of the group with this id, also when it was left lately; waits a little for it to be registered. `None`
    /// when it is not, or when `gone` says that the peer has hung up.
    pub(super) fn group(
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
