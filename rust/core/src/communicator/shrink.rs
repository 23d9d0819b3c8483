//! A communicator of the ranks that are left: they agree on who they are, and form a group.
//!
//! The [`Agreement`] decides; this carries its messages. Each goes over a group of the two ranks alone, which fails when one of
//! them is gone and at no other time, and which shares nothing with the group that has failed. A message that comes is handled
//! by the thread that tells of completions, so a rank goes on answering the others when its own call has returned.

use std::cell::UnsafeCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Communicator;
use crate::buffer::Memory;
use crate::engine::membership::agreement::{Action, Agreement, Event, Loss, Outcome};
use crate::engine::membership::message::{Decision, Message, Refusal};
use crate::engine::{Group, PointToPoint};
use crate::error::{Code, Error, Result};
use crate::interrupts;
use crate::locks::{Condvar, Mutex};
use crate::transport::endpoint::Presence;
use crate::types::{DataType, Rank};

/// The label of the groups of two.
const PAIR: &[u8] = b"shrink, two ranks";
/// The label of the group of all that are left.
const LEFT: &[u8] = b"shrunk";
/// The tag of all messages.
const TAG: u64 = 0;

/// The communicator that one of the ranks that are left comes from.
#[derive(Debug)]
pub(super) struct Former {
    /// The number that each rank had there.
    ranks: Vec<Rank>,
    /// The collectives up to this number had ended there on each of them.
    ended: u64,
}

/// One rank's part in the agreement, with the ways to the others.
pub(super) struct Shrinking {
    group: Arc<Group>,
    state: Mutex<State>,
    /// The agreement has ended for this rank.
    changed: Condvar,
}

struct State {
    agreement: Agreement,
    pairs: BTreeMap<Rank, Arc<Group>>,
    /// The failures of groups of two.
    failures: BTreeMap<Rank, Error>,
    /// This rank takes part no more.
    has_left: bool,
}

impl fmt::Debug for Shrinking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shrinking({:?})", self.state.lock().agreement)
    }
}

/// The bytes of a message under way, which the engine reads or writes until its operation has ended.
struct Bytes(UnsafeCell<Vec<u8>>);

// SAFETY: the engine alone touches the bytes until the operation that they were given to has ended; then its completion has
// them, and nothing else does.
unsafe impl Sync for Bytes {}

impl Bytes {
    /// The bytes, and a view for an operation whose completion keeps them.
    fn lend(mut bytes: Vec<u8>) -> (Arc<Self>, Memory) {
        let (start, length) = (bytes.as_mut_ptr(), bytes.len());
        // SAFETY: the completion of the operation keeps them until it has ended, and nothing else has them.
        let memory = unsafe { Memory::from_raw_parts(start, length) };
        (Arc::new(Self(UnsafeCell::new(bytes))), memory)
    }

    /// A copy.
    ///
    /// # Safety
    /// The operation that they were lent to has ended.
    unsafe fn read(&self) -> Vec<u8> {
        // SAFETY: the engine has let go of them.
        unsafe { (&*self.0.get()).clone() }
    }
}

impl Shrinking {
    fn begin(group: &Arc<Group>, excluded: BTreeSet<Rank>) -> Arc<Self> {
        let ended = group.core.lock().ended();
        let agreement = Agreement::new(group.rank(), group.world(), excluded, ended);
        let this = Arc::new(Self {
            group: Arc::clone(group),
            state: Mutex::new(State {
                agreement,
                pairs: BTreeMap::new(),
                failures: BTreeMap::new(),
                has_left: false,
            }),
            changed: Condvar::new(),
        });
        let mut state = this.state.lock();
        let actions = state.agreement.begin();
        this.act(&mut state, actions);
        drop(state);
        this
    }

    /// The number of `peer` in the group of it and this rank.
    fn number(&self, peer: Rank) -> Rank {
        usize::from(peer > self.group.rank())
    }

    fn act(self: &Arc<Self>, state: &mut State, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Open(peer) => self.open(state, peer),
                Action::Send(to, message) => self.send(state, to, &message),
            }
        }
    }

    fn open(self: &Arc<Self>, state: &mut State, peer: Rank) {
        let own = self.group.rank();
        let ranks = [own.min(peer), own.max(peer)];
        let made = self.group.part(&ranks, PAIR);
        let made = made.and_then(|pair| pair.ok_or_else(|| Error::internal("not of this pair")));
        let opened = made.and_then(|pair| {
            pair.set_timeout(Duration::ZERO);
            state.pairs.insert(peer, Arc::clone(&pair));
            self.receive(&pair, peer)
        });
        if let Err(error) = opened {
            // As if it had been opened and had failed: the agreement hears of it later.
            let this = Arc::clone(self);
            let tell = Box::new(move |_| this.failed(peer, error));
            self.group.staff.completions.tell(tell, Ok(()));
        }
    }

    fn send(&self, state: &State, to: Rank, message: &Message) {
        let Some(pair) = state.pairs.get(&to) else {
            return;
        };
        let (bytes, memory) = Bytes::lend(message.to_bytes(self.group.world()));
        let options = PointToPoint {
            completion: Some(Box::new(move |_| drop(bytes))),
            ..PointToPoint::default()
        };
        // If it fails, so does the receive that is under way.
        let _ = pair.send(DataType::UInt8, memory, (self.number(to), TAG), options);
    }

    fn receive(self: &Arc<Self>, pair: &Arc<Group>, peer: Rank) -> Result<()> {
        let (bytes, memory) = Bytes::lend(vec![0; Message::length(self.group.world())]);
        let (this, same) = (Arc::clone(self), Arc::clone(pair));
        let heard = move |result: Result<()>| match result {
            // SAFETY: the operation has ended.
            Ok(()) => this.heard(&same, peer, &unsafe { bytes.read() }),
            Err(error) => this.failed(peer, error),
        };
        let options = PointToPoint {
            completion: Some(Box::new(heard)),
            ..PointToPoint::default()
        };
        let place = (Some(self.number(peer)), TAG);
        pair.receive(DataType::UInt8, memory, place, options)
            .map(drop)
    }

    /// A message has come.
    fn heard(self: &Arc<Self>, pair: &Arc<Group>, peer: Rank, bytes: &[u8]) {
        let Some(message) = Message::from_bytes(bytes, self.group.world()) else {
            let what = format!("{} sent no message of an agreement", self.group.name_of(peer));
            pair.abort(&what);
            return self.failed(peer, Error::new(Code::Untrusted, what));
        };
        self.handle(peer, Event::Message(message));
        if let Err(error) = self.receive(pair, peer)
            && !self.state.lock().has_left
        {
            self.failed(peer, error);
        }
    }

    /// The group with `peer` has failed.
    fn failed(self: &Arc<Self>, peer: Rank, error: Error) {
        let endpoint = self.group.membership.endpoint();
        let address = self.group.membership.members[peer].address.as_ref();
        let presence = match (endpoint, address) {
            (Some(endpoint), Some(address)) => endpoint.presence(address),
            // Inside a process ranks live as long as it does.
            _ => Presence::There,
        };
        tracing::debug!(peer, ?presence, %error, "lost amid an agreement");
        self.state.lock().failures.insert(peer, error);
        self.handle(
            peer,
            Event::Lost(match presence {
                Presence::There => Loss::Absent,
                Presence::Gone => Loss::Ended,
                Presence::Unknown => Loss::Cut,
            }),
        );
    }

    fn handle(self: &Arc<Self>, peer: Rank, event: Event) {
        let is_lost = matches!(event, Event::Lost(_));
        let mut state = self.state.lock();
        let had_ended = state.agreement.outcome().is_some();
        let actions = state.agreement.handle(peer, event);
        self.act(&mut state, actions);
        if !had_ended && state.agreement.outcome().is_some() {
            self.changed.notify_all();
        }
        // A leader sends the last message, and its pairs go when the others have gone.
        let unneeded: Vec<_> = match state.agreement.is_over() {
            true if !state.agreement.leads() => std::mem::take(&mut state.pairs)
                .into_values()
                .collect(),
            true if is_lost => state.pairs.remove(&peer).into_iter().collect(),
            _ => Vec::new(),
        };
        drop(state);
        unneeded.iter().for_each(|pair| pair.close());
    }

    /// Waits for the outcome.
    fn wait(&self, patience: Duration) -> Result<Outcome> {
        let until = Instant::now().checked_add(patience);
        loop {
            interrupts::check().map_err(|reason| {
                Error::new(Code::Aborted, format!("interrupted in shrink: {reason}"))
            })?;
            let mut state = self.state.lock();
            if let Some(outcome) = state.agreement.outcome() {
                return Ok(outcome.clone());
            }
            if state.has_left {
                return Err(Error::new(Code::Aborted, "shrink was called off"));
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                let awaited = state.agreement.awaited();
                return Err(self.late(&awaited, patience));
            }
            let pause = left.map_or(interrupts::SLICE, |left| left.min(interrupts::SLICE));
            self.changed.wait_for(&mut state, pause);
        }
    }

    /// Takes part no more.
    pub(super) fn leave(&self) {
        let mut state = self.state.lock();
        if state.has_left {
            return;
        }
        state.has_left = true;
        if state.agreement.outcome().is_none() {
            let peers = state.pairs.keys();
            peers.for_each(|peer| self.send(&state, *peer, &Message::Leave));
        }
        let pairs = std::mem::take(&mut state.pairs);
        drop(state);
        self.changed.notify_all();
        pairs.values().for_each(|pair| pair.close());
    }

    /// These ranks by their names.
    fn names(&self, ranks: &BTreeSet<Rank>) -> String {
        let names = ranks.iter().map(|rank| self.group.name_of(*rank));
        names.collect::<Vec<_>>().join(", ")
    }

    fn late(&self, awaited: &BTreeSet<Rank>, patience: Duration) -> Error {
        let what = format!(
            "shrink: the ranks that are left have not agreed within {} ms; this one waits for: {}",
            patience.as_millis(),
            self.names(awaited)
        );
        about(Error::new(Code::Timeout, what), awaited)
    }

    /// The error of a refusal, with what is known of the ranks that it is about.
    fn refused(&self, refusal: &Refusal) -> Error {
        let (code, ranks, what) = match refusal {
            Refusal::Minority(ranks) => (
                Code::PeerLost,
                ranks,
                "cannot be reached from here and may live, and the ranks that reach each other are not the majority: they do \
                 not go on by themselves, since the others may",
            ),
            Refusal::Absent(ranks) => (
                Code::Timeout,
                ranks,
                "did not call shrink, though the process runs: call it again when they do, or exclude them",
            ),
        };
        let mut text = format!("shrink: {} {what}", self.names(ranks));
        let state = self.state.lock();
        let mut why = ranks.iter().filter_map(|rank| state.failures.get(rank));
        if let Some(error) = why.next() {
            text.push_str(&format!(" ({})", error.message));
        }
        about(Error::new(code, text), ranks)
    }
}

/// The error, with the first of these ranks for a culprit.
fn about(error: Error, ranks: &BTreeSet<Rank>) -> Error {
    match ranks.first() {
        Some(first) => error.with_peer(*first),
        None => error,
    }
}

impl Communicator {
    /// A communicator of the ranks that are left, numbered in the order of their numbers here. All of them call it, usually
    /// after an operation has failed because a rank is gone; those that are gone, and those of `excluded`, need not. It needs
    /// neither the store nor rank 0, and ranks may go while it is under way.
    ///
    /// The ranks agree on the result: each that returns has the same. A rank whose process has ended is left out. One that
    /// runs and does not call this within `patience`, and within 30 s in any case, fails the call on all, which may then be
    /// made again. Ranks that cannot be reached, and may live, are left out by a majority alone (of half the ranks, the half
    /// with the lowest). This communicator stays as it is: close it when it is not needed any more.
    ///
    /// # Errors
    /// `InvalidArgument` where this rank is excluded, or a rank is out of range, or this has succeeded before; `Timeout` naming
    /// the ranks that did not call it; `PeerLost` in a minority; `Aborted` where the others go on without this rank.
    pub fn shrink(&self, excluded: &[Rank], patience: Duration) -> Result<Self> {
        self.group.check_open()?;
        for rank in excluded {
            self.group.check_rank(*rank, "exclude")?;
        }
        let excluded: BTreeSet<Rank> = excluded.iter().copied().collect();
        if excluded.contains(&self.rank()) {
            return Err(Error::invalid(
                "a rank cannot exclude itself: close the communicator, and leave shrink to the others",
            ));
        }
        let shrinking = {
            let mut kept = self.shrinking.lock();
            if kept.is_some() {
                return Err(Error::invalid(
                    "this communicator has been shrunk, or is being shrunk by another thread",
                ));
            }
            let begun = Shrinking::begin(&self.group, excluded);
            kept.insert(begun).clone()
        };
        let ended = shrinking.wait(patience).and_then(|outcome| match outcome {
            Outcome::Decided(decision) => self.go_on(&decision),
            Outcome::LeftOut(decision) => Err(Error::new(
                Code::Aborted,
                format!(
                    "shrink: {} go on without this rank, which one of them could not reach or excluded",
                    shrinking.names(&decision.living)
                ),
            )),
            Outcome::Refused(refusal) => Err(shrinking.refused(&refusal)),
        });
        if ended.is_err() {
            shrinking.leave();
            *self.shrinking.lock() = None;
        }
        ended
    }

    fn go_on(&self, decision: &Decision) -> Result<Self> {
        let ranks: Vec<Rank> = decision.living.iter().copied().collect();
        let group = self.group.part(&ranks, LEFT)?;
        let group = group.ok_or_else(|| Error::internal("a rank that lives is left out"))?;
        tracing::info!(
            rank = self.rank(),
            left = ranks.len(),
            of = self.world_size(),
            ended = decision.ended,
            "the ranks that are left go on"
        );
        let mut shrunk = Self::new(group);
        shrunk.former = Some(Former {
            ranks,
            ended: decision.ended,
        });
        Ok(shrunk)
    }

    /// The number that each rank had in the communicator that this one was [shrunk](Self::shrink) from; `None` for others.
    pub fn former_ranks(&self) -> Option<&[Rank]> {
        self.former.as_ref().map(|former| &*former.ranks)
    }

    /// The collectives of that communicator up to this number, counted from 1, had ended on each of these ranks. A rank where
    /// [more](Self::ended) had ended may have results that others do not have.
    pub fn former_ended(&self) -> Option<u64> {
        self.former.as_ref().map(|former| former.ended)
    }

    /// The collectives up to this number, counted from 1, have ended on this rank; of a communicator that has failed, before it
    /// did. Those on device memory do not count.
    pub fn ended(&self) -> u64 {
        let core = self.group.lock_here();
        core.map_or(0, |core| core.ended())
    }
}
