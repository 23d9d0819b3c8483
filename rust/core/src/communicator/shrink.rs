//! A communicator of the ranks that are left: they agree on who they are, and form a group.
//!
//! The [`Agreement`] decides; this carries its messages. Each goes over a group of the two ranks alone, which fails when one of
//! them is gone or the link between them breaks, and which shares nothing with the group that has failed. Between ranks that
//! live another one takes its place. A message that comes is handled by the thread that tells of completions, so a rank goes on
//! answering the others when its own call has returned.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::bytes::Bytes;
use crate::descriptors;
use crate::engine::membership::agreement::{Action, Agreement, Event, Loss, Outcome};
use crate::engine::membership::message::{Decision, Message, Refusal};
use crate::engine::{Group, PointToPoint, WorkState};
use crate::error::{Code, Error, Result};
use crate::interrupts;
use crate::locks::{Condvar, Mutex};
use crate::transport::endpoint::{ConnectRequest, Lane, Presence, Seat};
use crate::types::{DataType, Rank};

/// The label of the groups of two.
const PAIR: &[u8] = b"shrink, two ranks";
/// The label of the group of all that are left.
const LEFT: &[u8] = b"shrunk";
/// The same where they keep their numbers.
const KEPT: &[u8] = b"masked";
/// How long a rank that leaves waits until the others have heard what was decided.
const HEARD_WITHIN: Duration = Duration::from_secs(5);
/// How long a rank is waited for before it is asked whether it has left, and until the next is asked.
const ASKED_AFTER: Duration = Duration::from_secs(3);
/// How long its answer may take.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);
/// Between two looks for a rank that cannot be reached.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// The tag of all messages.
const TAG: u64 = 0;

/// The numbers of the ranks that are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Numbers {
    /// From 0 on, in the order of those that they had.
    Anew,
    /// Those that they had.
    Kept,
}

/// The communicator that one of the ranks that are left comes from.
#[derive(Debug)]
pub(super) struct Former {
    /// The number that each rank had there.
    pub(super) ranks: Vec<Rank>,
    /// The collectives up to this number had ended there on each of them.
    pub(super) ended: u64,
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
    pairs: BTreeMap<Rank, Pair>,
    /// How many groups there have been with each rank. The rank that is behind catches up: a group that the other one has left
    /// fails at once.
    numbers: BTreeMap<Rank, u32>,
    /// The last failure of each group of two.
    failures: BTreeMap<Rank, Error>,
    /// This rank takes part no more.
    has_left: bool,
    /// A call has made the communicator of those that are left.
    has_gone_on: bool,
    /// The ranks without a way to them have been looked for.
    has_looked: bool,
}

/// The way to one rank.
#[derive(Default)]
struct Pair {
    /// `None` between two of them.
    group: Option<Arc<Group>>,
    /// The receive that is under way in it.
    receive: Option<Arc<WorkState>>,
    /// All that was sent over them.
    sent: Vec<Message>,
}

impl fmt::Debug for Shrinking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shrinking({:?})", self.state.lock().agreement)
    }
}

impl Shrinking {
    /// Begins an agreement, also after one that was in vain.
    fn begin(group: &Arc<Group>, excluded: BTreeSet<Rank>, vain: Option<&Self>) -> Arc<Self> {
        descriptors::make_room(group.world());
        let (agreement, numbers) = match vain.map(|vain| vain.state.lock()) {
            Some(vain) => (vain.agreement.again(excluded), vain.numbers.clone()),
            None => {
                let ended = group.core.lock().ended();
                let agreement = Agreement::new(group.rank(), group.world(), excluded, ended);
                (agreement, BTreeMap::new())
            }
        };
        let this = Arc::new(Self {
            group: Arc::clone(group),
            state: Mutex::new(State {
                agreement,
                pairs: BTreeMap::new(),
                numbers,
                failures: BTreeMap::new(),
                has_left: false,
                has_gone_on: false,
                has_looked: false,
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
                Action::Send(to, message) => self.send(state, to, message),
            }
        }
    }

    /// Opens the next group with `peer`, and sends again all that was sent over those before.
    fn open(self: &Arc<Self>, state: &mut State, peer: Rank) {
        if state.has_left {
            return;
        }
        let own = self.group.rank();
        let ranks = [own.min(peer), own.max(peer)];
        let number = state.numbers.entry(peer).or_default();
        *number += 1;
        let label = [PAIR, &number.to_le_bytes()].concat();
        let pair = state.pairs.entry(peer).or_default();
        let made = self.group.part(&ranks, &label);
        let made = made.and_then(|group| group.ok_or_else(|| Error::internal("not of this pair")));
        let opened = made.and_then(|group| {
            group.set_timeout(Duration::ZERO);
            pair.group = Some(Arc::clone(&group));
            for message in &pair.sent {
                self.post(&group, peer, message);
            }
            pair.receive = Some(self.receive(&group, peer)?);
            Ok(())
        });
        if let Err(error) = opened {
            // As if it had been opened and had failed: the agreement hears of it later.
            let this = Arc::clone(self);
            let tell = Box::new(move |_| this.failed(peer, error));
            self.group.staff.completions.tell(tell, Ok(()));
        }
    }

    fn send(&self, state: &mut State, to: Rank, message: Message) {
        if let Some(pair) = state.pairs.get_mut(&to) {
            if let Some(group) = &pair.group {
                self.post(group, to, &message);
            }
            pair.sent.push(message);
        }
    }

    fn post(&self, pair: &Group, to: Rank, message: &Message) {
        let (bytes, memory) = Bytes::lend(message.to_bytes(self.group.world()));
        let options = PointToPoint {
            completion: Some(Box::new(move |_| drop(bytes))),
            ..PointToPoint::default()
        };
        // If it fails, so does the receive that is under way.
        let _ = pair.send(DataType::UInt8, memory, (self.number(to), TAG), options);
    }

    fn receive(self: &Arc<Self>, pair: &Arc<Group>, peer: Rank) -> Result<Arc<WorkState>> {
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
    }

    /// A message has come.
    fn heard(self: &Arc<Self>, pair: &Arc<Group>, peer: Rank, bytes: &[u8]) {
        let Some(message) = Message::from_bytes(bytes, self.group.world()) else {
            let what = format!(
                "{} sent no message of an agreement",
                self.group.name_of(peer)
            );
            pair.abort(&what);
            return self.failed(peer, Error::new(Code::Untrusted, what));
        };
        self.handle(peer, Event::Message(message));
        let mut state = self.state.lock();
        let Some(next) = state.pairs.get_mut(&peer) else {
            return;
        };
        match self.receive(pair, peer) {
            Ok(work) => next.receive = Some(work),
            Err(error) => {
                drop(state);
                self.failed(peer, error);
            }
        }
    }

    /// The group with `peer` has failed.
    fn failed(self: &Arc<Self>, peer: Rank, error: Error) {
        let mut state = self.state.lock();
        let Some(pair) = state.pairs.get_mut(&peer) else {
            return;
        };
        let failed = pair.group.take();
        let is_over = state.agreement.is_over();
        state.failures.insert(peer, error);
        drop(state);
        if let Some(group) = failed {
            group.close();
        }
        if is_over {
            return self.handle(peer, Event::Lost(Loss::Absent));
        }
        let has_address = self.group.membership.members[peer].address.is_some();
        if !has_address || self.group.membership.endpoint().is_none() {
            // Inside a process ranks live as long as it does, and no link breaks.
            return self.handle(peer, Event::Lost(Loss::Absent));
        }
        // It takes a while, and not the thread that tells of completions.
        let this = Arc::clone(self);
        let judge = move |_: &Arc<Group>, seat: &Seat, request: &ConnectRequest<'_>| {
            let presence = seat.presence(request.target);
            let has_left = presence == Presence::There && has_left(seat, request);
            this.judged(peer, presence, has_left);
        };
        let place = (Lane::PointToPoint, peer);
        let begun = self.group.with_request_in_background(place, true, judge);
        if begun.is_err() {
            self.judged(peer, Presence::There, false);
        }
    }

    /// It is known whether the process of a rank is there, with which a group has failed, and whether it has left the group
    /// that it shrinks.
    fn judged(self: &Arc<Self>, peer: Rank, presence: Presence, has_left: bool) {
        let loss = match presence {
            Presence::Gone => Loss::Ended,
            Presence::Unknown => {
                self.handle(peer, Event::Lost(Loss::Cut));
                return self.look_for_the_rest();
            }
            Presence::There if has_left => {
                let what = "it has closed the communicator, and may have gone on without this rank";
                let error = Error::new(Code::Aborted, what);
                self.state.lock().failures.insert(peer, error);
                Loss::Absent
            }
            Presence::There => {
                let mut state = self.state.lock();
                if !state.has_left && !state.agreement.is_over() {
                    self.open(&mut state, peer);
                }
                return;
            }
        };
        self.handle(peer, Event::Lost(loss));
    }

    /// A rank cannot be reached. Those that this one has no way to yet may be cut off with it: they are looked for at once,
    /// and not each when it is its turn to lead.
    fn look_for_the_rest(self: &Arc<Self>) {
        let mut state = self.state.lock();
        let unheard: Vec<Rank> = match std::mem::replace(&mut state.has_looked, true) {
            true => Vec::new(),
            false => state.agreement.unheard().collect(),
        };
        drop(state);
        let limit = self.group.mending_limit();
        for peer in unheard {
            let this = Arc::clone(self);
            let look = move |_: &Arc<Group>, seat: &Seat, request: &ConnectRequest<'_>| {
                let until = Instant::now() + limit;
                while this.needs_to_find(peer) {
                    let loss = match seat.glance(request.target) {
                        Presence::There => return,
                        Presence::Gone => Loss::Ended,
                        Presence::Unknown if Instant::now() >= until => Loss::Cut,
                        Presence::Unknown => {
                            // The next in line has the turn meanwhile.
                            request.turn.inspect(|turn| turn.waits());
                            thread::sleep(LOOK_INTERVAL);
                            continue;
                        }
                    };
                    return this.found(peer, loss);
                }
            };
            let place = (Lane::PointToPoint, peer);
            let _ = self.group.with_request_in_background(place, false, look);
        }
    }

    /// Whether there is no way to this rank yet, and the agreement may need it.
    fn needs_to_find(&self, peer: Rank) -> bool {
        let state = self.state.lock();
        let is_open = !state.has_left && !state.agreement.is_over();
        is_open && state.agreement.unheard().any(|rank| rank == peer)
    }

    /// A rank that was looked for is lost, unless there is a way to it meanwhile: then that tells.
    fn found(self: &Arc<Self>, peer: Rank, loss: Loss) {
        if self.needs_to_find(peer) {
            self.handle(peer, Event::Lost(loss));
        }
    }

    fn handle(self: &Arc<Self>, peer: Rank, event: Event) {
        let is_lost = matches!(event, Event::Lost(_));
        let mut state = self.state.lock();
        if state.has_left {
            return;
        }
        let actions = state.agreement.handle(peer, event);
        self.act(&mut state, actions);
        if state.agreement.outcome().is_some() {
            self.changed.notify_all();
        }
        // A leader sends the last message, and its pairs go when the others have gone.
        let unneeded: Vec<_> = match state.agreement.is_over() {
            true if !state.agreement.leads() => {
                std::mem::take(&mut state.pairs).into_values().collect()
            }
            true if is_lost => state.pairs.remove(&peer).into_iter().collect(),
            _ => Vec::new(),
        };
        drop(state);
        close(unneeded);
    }

    /// Waits for the outcome.
    fn wait(self: &Arc<Self>, patience: Duration) -> Result<Outcome> {
        let until = Instant::now().checked_add(patience);
        let (mut asks_at, mut asked) = (Instant::now() + ASKED_AFTER, 0);
        loop {
            if Instant::now() >= asks_at {
                self.ask_one(asked);
                (asks_at, asked) = (Instant::now() + ASKED_AFTER, asked + 1);
            }
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

    /// Asks one of the ranks that it waits for, and has no link to, whether it has left the group: then it will not come.
    fn ask_one(self: &Arc<Self>, turn: usize) {
        let state = self.state.lock();
        let is_away = |peer: &Rank| {
            let group = state.pairs.get(peer).and_then(|pair| pair.group.as_ref());
            group.is_some_and(|group| {
                let mut core = group.core.lock();
                core.links
                    .open(Lane::PointToPoint, self.number(*peer))
                    .is_none()
            })
        };
        let away: Vec<Rank> = state
            .agreement
            .awaited()
            .into_iter()
            .filter(is_away)
            .collect();
        drop(state);
        if away.is_empty() {
            return;
        }
        let peer = away[turn % away.len()];
        let place = (Lane::PointToPoint, peer);
        let has_left = self.group.with_request(place, None, has_left);
        if matches!(has_left, Ok(true)) {
            self.judged(peer, Presence::There, true);
        }
    }

    fn exclude(self: &Arc<Self>, ranks: BTreeSet<Rank>) {
        let mut state = self.state.lock();
        let actions = state.agreement.exclude(ranks);
        self.act(&mut state, actions);
    }

    /// Whether it has ended without a decision. The ways to the others are closed then.
    fn was_in_vain(&self) -> bool {
        let state = self.state.lock();
        let is_refused = matches!(state.agreement.outcome(), Some(Outcome::Refused(_)));
        let is_in_vain = is_refused || state.has_left && state.agreement.outcome().is_none();
        drop(state);
        if is_in_vain {
            self.leave();
        }
        is_in_vain
    }

    /// Whether this is the first call to go on.
    fn is_first(&self) -> bool {
        !std::mem::replace(&mut self.state.lock().has_gone_on, true)
    }

    /// Where it is decided, waits until the others have heard it, for a while.
    pub(super) fn await_the_others(&self) {
        let until = Instant::now() + HEARD_WITHIN;
        let mut state = self.state.lock();
        while state.agreement.outcome().is_some() && !state.agreement.is_over() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.changed.wait_for(&mut state, left);
        }
    }

    /// Takes part no more.
    pub(super) fn leave(&self) {
        let mut state = self.state.lock();
        if state.has_left {
            return;
        }
        state.has_left = true;
        for action in state.agreement.leave() {
            if let Action::Send(to, message) = action {
                self.send(&mut state, to, message);
            }
        }
        let pairs = std::mem::take(&mut state.pairs);
        drop(state);
        self.changed.notify_all();
        close(pairs.into_values());
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
                Code::Aborted,
                ranks,
                "took part no more, though the process runs: call shrink again, and exclude such a rank if it does not",
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

/// Whether the peer of `request` says, soon, that it has left the group.
fn has_left(seat: &Seat, request: &ConnectRequest<'_>) -> bool {
    seat.has_left(&ConnectRequest {
        deadline: Instant::now() + ANSWERS_WITHIN,
        ..*request
    })
}

/// Closes them in good order.
fn close(pairs: impl IntoIterator<Item = Pair>) {
    for pair in pairs {
        if let Some(group) = pair.group {
            if let Some(work) = pair.receive {
                group.cancel_receive(&work);
            }
            group.close();
        }
    }
}

/// The error, with the first of these ranks for a culprit.
fn about(error: Error, ranks: &BTreeSet<Rank>) -> Error {
    match ranks.first() {
        Some(first) => error.with_peer(*first),
        None => error,
    }
}

/// The group of the ranks that are left of `group`, and where it comes from. `kept` has the agreement once it has begun.
pub(super) fn shrink(
    group: &Arc<Group>,
    kept: &Mutex<Option<Arc<Shrinking>>>,
    (numbers, excluded, patience): (Numbers, &[Rank], Duration),
) -> Result<(Arc<Group>, Former)> {
    group.check_open()?;
    for rank in excluded {
        group.check_rank(*rank, "exclude")?;
    }
    let excluded: BTreeSet<Rank> = excluded.iter().copied().collect();
    if excluded.contains(&group.rank()) {
        return Err(Error::invalid(
            "a rank cannot exclude itself: close the communicator, and leave shrink to the others",
        ));
    }
    let shrinking = {
        let mut kept = kept.lock();
        let vain = kept.take_if(|begun| begun.was_in_vain());
        match &*kept {
            Some(begun) => {
                begun.exclude(excluded);
                Arc::clone(begun)
            }
            None => {
                let begun = Shrinking::begin(group, excluded, vain.as_deref());
                kept.insert(begun).clone()
            }
        }
    };
    match shrinking.wait(patience)? {
        Outcome::Decided(decision) if shrinking.is_first() => go_on(group, &decision, numbers),
        Outcome::Decided(_) => Err(Error::invalid("this communicator has been shrunk")),
        Outcome::LeftOut(decision) => Err(Error::new(
            Code::Aborted,
            format!(
                "shrink: {} go on without this rank, which one of them could not reach or excluded",
                shrinking.names(&decision.living)
            ),
        )),
        Outcome::Refused(refusal) => Err(shrinking.refused(&refusal)),
    }
}

fn go_on(group: &Group, decision: &Decision, numbers: Numbers) -> Result<(Arc<Group>, Former)> {
    let ranks: Vec<Rank> = decision.living.iter().copied().collect();
    let left = match numbers {
        Numbers::Anew => group.part(&ranks, LEFT)?,
        Numbers::Kept => group.part_that_keeps_its_numbers(&ranks, KEPT)?,
    };
    let left = left.ok_or_else(|| Error::internal("a rank that lives is left out"))?;
    tracing::info!(
        rank = group.rank(),
        left = ranks.len(),
        of = group.world(),
        ended = decision.ended,
        "the ranks that are left go on"
    );
    let ended = decision.ended;
    Ok((left, Former { ranks, ended }))
}
