//! A group's links as the endpoint knows them: which exist, and which are being opened by whom.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::address::Address;
use super::conversation::Conversation;
use super::wire::{Cut, Patience};
use crate::error::{Error, Result};
use crate::locks::{Condvar, Mutex};
use crate::transport::handshake::{Answer, Lane};
use crate::transport::keys::GroupKey;
use crate::transport::{Link, Mend, Stripe};
use crate::types::Rank;

/// A group's word on links that its peers open, and where they arrive.
///
/// Called on a bounded number of threads of the endpoint, with no lock held. A gate that holds the endpoint must hold it
/// weakly, or unregister before it goes.
pub trait Gate: Send + Sync {
    /// Whether the group wants this link now. The endpoint has already settled crossing and duplicate attempts.
    fn admit(&self, from: Rank, lane: Lane) -> Verdict;

    /// The link is there. Called once at most for a `(from, lane)`.
    fn established(&self, from: Rank, lane: Lane, link: Box<dyn Link>);

    /// A further connection of an established link is there.
    fn striped(&self, from: Rank, lane: Lane, stripe: Stripe);

    /// A further socket for a connection of an established link is there, in the place of one that broke.
    fn mended(&self, from: Rank, lane: Lane, mend: Mend) {
        let _ = (from, lane, mend);
    }

    /// The state of the group on this rank, for `unisono status`. One-sided transports have none.
    fn status(&self) -> Option<Value> {
        None
    }

    /// Where another member listens, for questions of `unisono status`. One-sided transports do not tell.
    fn address_of(&self, peer: Rank) -> Option<Address> {
        let _ = peer;
        None
    }

    /// A conversation that a process with the key of this rank has begun. Groups have none.
    fn conversed(&self, from: Rank, conversation: Conversation) {
        let _ = (from, conversation);
    }
}

/// The answer of a [`Gate`] to a peer that wants to open a link.
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

/// This process's place in a group.
pub(super) struct Membership {
    pub(super) key: GroupKey,
    pub(super) rank: u32,
    pub(super) world_size: u32,
    gate: Arc<dyn Gate>,
    lanes: Mutex<HashMap<(u32, Lane), LinkState>>,
    changed: Condvar,
    closed: AtomicBool,
}

/// Where one link stands. Connecting and accepting may both be true: this side's attempt is then about to be
/// turned away by the peer, whose rank is lower, or to end by itself.
#[derive(Debug, Default)]
struct LinkState {
    connecting: bool,
    /// This side's attempt has a connection, by any transport. Until then the peer's attempt wins, since packets of this side
    /// may not reach the peer.
    reaches: bool,
    accepting: bool,
    linked: bool,
    /// The id of the peer's attempt that is or was accepted, where it takes more than one connection.
    accepted: Option<[u8; 16]>,
    /// Stripes that the peer has opened.
    stripes: u8,
    /// Since when this side knows that it cannot reach the peer, and why.
    unreached: Option<(Instant, Error)>,
}

/// For how long a peer that cannot be reached from here may still open the link from its side: where one of the two is behind
/// a router that lets connections through in one direction only. The group asks again every 2 seconds.
pub(super) const PEER_MAY_COME: Duration = Duration::from_secs(2);

/// How often a thread that waits for another attempt looks whether it is called off.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Whether this side should try to open a link.
pub(super) enum Permission {
    /// Try.
    Open(Claim),
    /// It is there, or on its way, or the peer has some time left to open it.
    Awaited,
    /// It cannot be reached, and it did not come.
    Closed(Error),
}

/// The right to open one link, from one side. Dropping it gives the right back.
pub(super) struct Claim {
    membership: Arc<Membership>,
    peer: u32,
    lane: Lane,
    accepting: bool,
}

impl Membership {
    pub(super) fn new(
        key: GroupKey,
        rank: Rank,
        world_size: usize,
        gate: Arc<dyn Gate>,
    ) -> Result<Self> {
        match (u32::try_from(rank), u32::try_from(world_size)) {
            (Ok(rank), Ok(world_size)) if rank < world_size => Ok(Self {
                key,
                rank,
                world_size,
                gate,
                lanes: Mutex::default(),
                changed: Condvar::new(),
                closed: AtomicBool::new(false),
            }),
            _ => Err(Error::invalid(format!(
                "rank {rank} is out of range for a world of {world_size}"
            ))),
        }
    }

    /// Whether `rank` is another member.
    pub(super) fn has_peer(&self, rank: u32) -> bool {
        rank < self.world_size && rank != self.rank
    }

    /// Whether this is `rank` of the group with this id.
    pub(super) fn is(&self, id: &[u8; 16], rank: Rank) -> bool {
        self.key.id() == *id && self.rank as Rank == rank
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Claims the link to `peer` for an attempt of this side, unless it exists, is being opened already or has no way.
    pub(super) fn claim_connecting(self: &Arc<Self>, peer: u32, lane: Lane) -> Permission {
        let mut lanes = self.lanes.lock();
        let state = lanes.entry((peer, lane)).or_default();
        if state.linked || state.accepting || state.connecting {
            return Permission::Awaited;
        }
        match &state.unreached {
            Some((since, _)) if since.elapsed() < PEER_MAY_COME => return Permission::Awaited,
            Some((_, error)) => return Permission::Closed(error.clone()),
            None => {}
        }
        state.connecting = true;
        Permission::Open(self.claim(peer, lane, false))
    }

    /// This side cannot reach `peer`, for that reason. The peer may still be able to reach this side.
    pub(super) fn cannot_reach(&self, peer: u32, lane: Lane, error: Error) {
        let mut lanes = self.lanes.lock();
        let state = lanes.entry((peer, lane)).or_default();
        state.unreached.get_or_insert((Instant::now(), error));
    }

    /// Claims the link from `peer` for an attempt of that side, or says what to answer. Waits while an earlier
    /// attempt of the peer is being taken apart.
    pub(super) fn claim_accepting(
        self: &Arc<Self>,
        peer: u32,
        lane: Lane,
        patience: &Patience<'_>,
    ) -> Result<Result<Claim, Answer>, Cut> {
        let mut lanes = self.lanes.lock();
        loop {
            let state = lanes.entry((peer, lane)).or_default();
            if let Some(begun) = state.begin_to_accept(self.rank < peer) {
                drop(lanes);
                return Ok(begun.and_then(|()| self.admit(peer, lane)));
            }
            patience.left()?;
            self.changed.wait_for(&mut lanes, LOOK_INTERVAL);
        }
    }

    /// As [`Self::claim_accepting`] without a wait: an earlier attempt that is being taken apart fails this one.
    pub(super) fn claim_at_once(self: &Arc<Self>, peer: u32, lane: Lane) -> Result<Claim, Answer> {
        let begun = {
            let mut lanes = self.lanes.lock();
            let state = lanes.entry((peer, lane)).or_default();
            state.begin_to_accept(self.rank < peer)
        };
        begun.unwrap_or(Err(Answer::Failed))?;
        self.admit(peer, lane)
    }

    /// The claim of a link that is being accepted, if the group wants it.
    fn admit(self: &Arc<Self>, peer: u32, lane: Lane) -> Result<Claim, Answer> {
        let claim = self.claim(peer, lane, true);
        match self.gate.admit(peer as Rank, lane) {
            Verdict::Accept => Ok(claim),
            Verdict::Crossing => Err(Answer::Crossing),
            Verdict::Duplicate => Err(Answer::Duplicate),
            Verdict::Left => Err(Answer::Left),
        }
    }

    /// Whether `peer` may open a further connection of its link: there is one, and it has not opened too many.
    pub(super) fn takes_stripe(&self, peer: u32, lane: Lane) -> bool {
        let mut lanes = self.lanes.lock();
        let state = lanes.entry((peer, lane)).or_default();
        let may = state.linked && state.stripes < u8::MAX;
        state.stripes += u8::from(may);
        may
    }

    pub(super) fn status(&self) -> Option<Value> {
        self.gate.status()
    }

    /// Where another member listens.
    pub(super) fn address_of(&self, peer: Rank) -> Option<Address> {
        let is_peer = u32::try_from(peer).is_ok_and(|peer| self.has_peer(peer));
        is_peer.then(|| self.gate.address_of(peer)).flatten()
    }

    pub(super) fn converse(&self, peer: u32, conversation: Conversation) {
        self.gate.conversed(peer as Rank, conversation);
    }

    /// The group gets a further connection of its link from `peer`.
    pub(super) fn deliver_stripe(&self, peer: u32, lane: Lane, stripe: Stripe) {
        self.gate.striped(peer as Rank, lane, stripe);
    }

    /// The group gets a further socket for a connection of its link from `peer`.
    pub(super) fn deliver_mend(&self, peer: u32, lane: Lane, mend: Mend) {
        self.gate.mended(peer as Rank, lane, mend);
    }

    /// Whether the link to `peer` is there.
    pub(super) fn is_linked(&self, peer: u32, lane: Lane) -> bool {
        let lanes = self.lanes.lock();
        lanes.get(&(peer, lane)).is_some_and(|state| state.linked)
    }

    /// Whether the attempt with this id has made the link. Waits until a connection of it that came before is seen to.
    pub(super) fn was_made_by(
        &self,
        attempt: &[u8; 16],
        (peer, lane): (u32, Lane),
        patience: &Patience<'_>,
    ) -> Result<bool, Cut> {
        let mut lanes = self.lanes.lock();
        loop {
            let state = lanes.entry((peer, lane)).or_default();
            if state.accepted.as_ref() != Some(attempt) {
                return Ok(false);
            }
            if state.linked || !state.accepting {
                return Ok(state.linked);
            }
            patience.left()?;
            self.changed.wait_for(&mut lanes, LOOK_INTERVAL);
        }
    }

    fn claim(self: &Arc<Self>, peer: u32, lane: Lane, accepting: bool) -> Claim {
        Claim {
            membership: Arc::clone(self),
            peer,
            lane,
            accepting,
        }
    }

    /// Whether the link from `peer` is there or on its way.
    pub(super) fn expects(&self, peer: u32, lane: Lane) -> bool {
        let lanes = self.lanes.lock();
        let state = lanes.get(&(peer, lane));
        state.is_some_and(|state| state.linked || state.accepting)
    }
}

impl LinkState {
    /// An attempt of the peer begins, or is answered. `wins`: of two attempts that meet, this side's goes on. `None`: an
    /// earlier attempt of the peer is being taken apart.
    fn begin_to_accept(&mut self, wins: bool) -> Option<Result<(), Answer>> {
        if self.linked {
            return Some(Err(Answer::Duplicate));
        }
        if self.reaches && wins {
            return Some(Err(Answer::Crossing));
        }
        let may = !std::mem::replace(&mut self.accepting, true);
        may.then_some(Ok(()))
    }
}

impl Claim {
    /// The link exists.
    pub(super) fn linked(&self) {
        let mut lanes = self.membership.lanes.lock();
        lanes.entry((self.peer, self.lane)).or_default().linked = true;
    }

    /// This side's attempt has got a connection. Whether it goes on: it does not where the peer's attempt was quicker.
    pub(super) fn goes_on(&self) -> bool {
        let mut lanes = self.membership.lanes.lock();
        let state = lanes.entry((self.peer, self.lane)).or_default();
        state.reaches |= !(state.accepting || state.linked);
        state.reaches
    }

    /// It is for the attempt with this id, which may ask again: it may not hear that it was accepted.
    pub(super) fn identify(&self, attempt: [u8; 16]) {
        let mut lanes = self.membership.lanes.lock();
        let state = lanes.entry((self.peer, self.lane)).or_default();
        state.accepted = Some(attempt);
    }

    /// The link exists, and the group gets it.
    pub(super) fn deliver(self, mut link: Box<dyn Link>) {
        self.linked();
        let membership = Arc::clone(&self.membership);
        let (peer, lane) = (self.peer, self.lane);
        drop(self);
        if membership.is_closed() {
            link.send_farewell();
        } else {
            membership.gate.established(peer as Rank, lane, link);
        }
    }

    pub(super) fn is_for(&self, membership: &Arc<Membership>, peer: u32, lane: Lane) -> bool {
        Arc::ptr_eq(&self.membership, membership) && self.peer == peer && self.lane == lane
    }

    pub(super) fn membership(&self) -> &Arc<Membership> {
        &self.membership
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut lanes = self.membership.lanes.lock();
        let state = lanes.entry((self.peer, self.lane)).or_default();
        if self.accepting {
            state.accepting = false;
        } else {
            (state.connecting, state.reaches) = (false, false);
        }
        self.membership.changed.notify_all();
    }
}
