//! The depots of a group's ranks, for its long messages, and the notes that travel in their place.
//!
//! A long message between ranks of one host is copied to the sender's [depot](crate::transport::cuda::depot), and the
//! receiver's stream fetches it from there; the host carries a [note](super::note) that says where. Whether a message is long
//! depends on its length alone, so that both sides know. Where the receiver has not mapped the sender's depot, or that has no
//! room left, the note says so, and the message follows by way of host memory.
//!
//! A stream cannot choose how it gets a message: what is enqueued for a receive either copies from host memory, by an engine,
//! or [*fetches*](crate::transport::cuda::kernels::Segment::base), by a kernel that also reads host memory, but slowly. So a
//! rank tells a peer that it has mapped its depot when no receive that copies could meet a message of that peer any more, and
//! from then on all that could fetch.
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::engine::Group;
use crate::error::{Code, Error, Result};
use crate::locks::Mutex;
use crate::transport::cuda::depot::{Depot, DepotWords, Mapped, Slot};
use crate::transport::cuda::driver::Device;
use crate::transport::cuda::mappings::map;
use crate::transport::cuda::window::{PeerWindow, Record};
use crate::types::Rank;

use super::disposal::{LONGEST_READING, LONGEST_UNMAPPING, dispose};
use super::note::NOTED_FROM;
use super::patience::Patience;
use super::pause::pause;

/// How long a send waits for room in the depot. Where that has been in vain, none does until something has been fetched.
const LONGEST_WAIT_FOR_ROOM: Duration = Duration::from_millis(100);

/// Whether messages of `bytes` bytes between the ranks of a group are long: the same for the sender and the receiver. None is
/// where nothing is to go through memory of the device.
pub(super) fn is_long(cpu: &Group, bytes: usize) -> bool {
    let told = cpu.config().window_bytes;
    let has_windows = told.is_none_or(|bytes| bytes.0 > 0);
    bytes >= NOTED_FROM && has_windows && cpu.is_on_one_host()
}

/// The depots of a group.
pub(super) struct Depots {
    device: &'static Device,
    /// Held by a thread that makes or maps depots. The attendant does not take it, since the driver may have a call wait.
    preparing: Mutex<()>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_closed: bool,
    own: Option<Arc<Depot>>,
    /// Why there is none, once it has been found out.
    is_refused: bool,
    peers: Vec<Peer>,
    sent: u64,
    patience: Patience,
    /// Receives from any rank under way that copy.
    copying: usize,
    /// How many messages had been fetched when a send last waited for room in vain.
    was_full: Option<u64>,
    /// Of messages that failed: a peer may still fetch from there.
    left: Vec<Slot>,
    /// A word for [`Guard::seen`](crate::transport::cuda::kernels::Guard::seen).
    seen: Option<Slot>,
}

#[derive(Clone, Default)]
struct Peer {
    pair: Option<DepotWords>,
    is_told: bool,
    is_looked_at: bool,
    /// Its depot could not be mapped.
    is_refused: bool,
    depot: Option<Arc<PeerWindow>>,
    /// It knows that its depot is mapped.
    may_leave: bool,
    /// Receives from it under way that copy.
    copying: usize,
    /// The lane to it, and the bytes of a half.
    lane: Option<(Arc<Slot>, usize)>,
    has_offered: bool,
}

/// Where the halves of a lane are.
pub(super) struct LanePlace {
    pub(super) pair: DepotWords,
    /// Of the first half, as this rank's device knows it.
    pub(super) address: u64,
    /// Bytes of a half.
    pub(super) piece: usize,
    /// Keeps the lane while it is in use.
    _slot: Option<Arc<Slot>>,
}

/// How a receive gets its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Getting {
    /// From host memory.
    Copies,
    /// From where the host says.
    Fetches,
}

impl Depots {
    pub(super) fn new(device: &'static Device) -> Self {
        Self {
            device,
            preparing: Mutex::default(),
            state: Mutex::default(),
        }
    }

    /// Whether there is something to [prepare](Self::prepare).
    pub(super) fn lacks_something(&self, cpu: &Group) -> bool {
        let mut state = self.state.lock();
        if state.is_closed {
            return false;
        }
        let mut lacks = false;
        let may_make = state.own.is_none() && !state.is_refused;
        for rank in (0..cpu.world()).filter(|rank| *rank != cpu.rank()) {
            // This calls nothing of the driver.
            state.publish(rank, cpu);
            let peer = state.peer(rank, cpu);
            lacks |= peer.lacks_something() || may_make;
        }
        lacks
    }

    /// Makes this rank's depot, tells the peers of it, and maps theirs. To be called while the driver waits for no peer.
    pub(super) fn prepare(&self, cpu: &Group) {
        let _one = self.preparing.lock();
        let lacks_own = {
            let state = self.state.lock();
            !state.is_closed && state.own.is_none() && !state.is_refused
        };
        if lacks_own {
            let own = own_depot(self.device);
            let seen = own
                .as_ref()
                .and_then(|own| own.zeroed_word().ok().flatten());
            let mut state = self.state.lock();
            state.is_refused = own.is_none();
            if !state.is_closed {
                (state.own, state.seen) = (own, seen);
            }
        }
        for rank in (0..cpu.world()).filter(|rank| *rank != cpu.rank()) {
            let found = {
                let mut state = self.state.lock();
                if state.is_closed {
                    return;
                }
                state.publish(rank, cpu);
                state.peer(rank, cpu).found()
            };
            let Some((pair, record)) = found else {
                continue;
            };
            let mapped = map(self.device, &record);
            let mut state = self.state.lock();
            if state.is_closed {
                drop(state);
                return dispose(move || drop(mapped));
            }
            pair.say(match mapped {
                Ok(_) => Mapped::Lane,
                Err(_) => Mapped::Refused,
            });
            match mapped {
                Ok(depot) => state.peer(rank, cpu).depot = Some(depot),
                Err(error) => {
                    state.peer(rank, cpu).is_refused = true;
                    tracing::debug!(
                        rank = cpu.rank(),
                        "messages from rank {rank} on device {} go through host memory: {error}",
                        self.device.number()
                    );
                }
            }
        }
        self.state.lock().tell();
    }

    /// As [`Depots::prepare`], also while something is under way, and has a lane to every peer.
    pub(super) fn offer_lanes(&self, cpu: &Group) {
        self.prepare(cpu);
        let mut state = self.state.lock();
        let own = state.own.clone();
        if own.is_none() && !state.is_refused {
            return;
        }
        for peer in &mut state.peers {
            let Some(pair) = peer.pair.as_ref().filter(|_| !peer.has_offered) else {
                continue;
            };
            peer.has_offered = true;
            peer.lane = own.as_ref().and_then(|own| {
                let half = own.half_of_lane(cpu.world());
                Some((Arc::new(own.take(2 * half)?), half))
            });
            let place = peer.lane.as_ref();
            pair.publish_lane(place.map(|(slot, half)| (slot.offset(), *half)));
        }
    }

    /// The lane to or from `peer`, once both can reach it.
    ///
    /// # Errors
    /// `Unsupported` where that will not be.
    pub(super) fn lane(&self, peer: Rank, receives: bool) -> Result<Option<LanePlace>> {
        let state = self.state.lock();
        let refused = |reason: String| {
            Err(Error::unsupported(format!(
                "messages with rank {peer} cannot be captured in a graph: {reason}"
            )))
        };
        let device = self.device.number();
        let Some(peer) = state.peers.get(peer) else {
            return Ok(None);
        };
        let Some(pair) = &peer.pair else {
            return Ok(None);
        };
        if !receives {
            if state.is_refused {
                return refused(format!("device {device} has no memory left for them"));
            }
            if peer.has_offered && peer.lane.is_none() {
                return refused(format!(
                    "the memory of device {device} that is for messages is taken by others under way"
                ));
            }
            let is_mapped = match pair.said() {
                Mapped::Refused | Mapped::NoMore => {
                    return refused("its driver does not map memory of this process".to_owned());
                }
                Mapped::NotYet => false,
                Mapped::Yes | Mapped::Lane => true,
            };
            let lane = peer.lane.as_ref().filter(|_| is_mapped);
            return Ok(lane.map(|(slot, piece)| LanePlace {
                pair: pair.clone(),
                address: slot.address(),
                piece: *piece,
                _slot: Some(Arc::clone(slot)),
            }));
        }
        if pair.published_lane() == Some(None) {
            return refused("it has no memory left for them".to_owned());
        }
        let (Some(lane), Some(depot)) = (pair.published_lane().flatten(), &peer.depot) else {
            return match peer.is_refused {
                true => refused("the driver does not map its memory".to_owned()),
                false => Ok(None),
            };
        };
        let (offset, piece) = lane;
        if piece == 0 || offset.saturating_add(2 * piece) > depot.bytes() {
            return refused("it gave a place that it does not have".to_owned());
        }
        Ok(Some(LanePlace {
            pair: pair.clone(),
            address: depot.half(0) + offset as u64,
            piece,
            _slot: None,
        }))
    }

    /// A word of the device's memory for kernels that look whether the group has failed; 0 where there is none.
    pub(super) fn seen(&self) -> u64 {
        self.state.lock().seen.as_ref().map_or(0, Slot::address)
    }

    /// A message has failed that a peer may still fetch from its slot, if it has one.
    pub(super) fn leave(&self, slot: Option<Slot>) {
        let Some(slot) = slot else {
            return;
        };
        let mut state = self.state.lock();
        match state.is_closed {
            // The peers have been waited for.
            true => dispose(move || drop(slot)),
            false => state.left.push(slot),
        }
    }

    /// Until when a call may wait for a moment at which it can [prepare](Self::prepare) something.
    pub(super) fn patience(&self) -> Option<Instant> {
        self.state.lock().patience.next()
    }

    /// Room for a message of `bytes` bytes that rank `to` can fetch, after a while where there is none at once; `None` where it
    /// has to follow its note.
    pub(super) fn take(&self, to: Rank, bytes: usize) -> Option<Slot> {
        let own = {
            let state = self.state.lock();
            let pair = state.peers.get(to).and_then(|peer| peer.pair.as_ref());
            let is_mapped = pair.is_some_and(|pair| pair.said() == Mapped::Yes);
            state.own.as_ref().filter(|_| is_mapped).map(Arc::clone)
        };
        let own = own?;
        if !own.could_hold(bytes) {
            return None;
        }
        let (since, mut looks) = (Instant::now(), 0);
        loop {
            if let Some(slot) = own.take(bytes) {
                return Some(slot);
            }
            let fetched = own.fetched();
            let mut state = self.state.lock();
            if state.was_full == Some(fetched) || since.elapsed() > LONGEST_WAIT_FOR_ROOM {
                state.was_full = Some(fetched);
                return None;
            }
            drop(state);
            pause(&mut looks);
        }
    }

    /// How a receive that begins now gets its message.
    pub(super) fn begin(&self, from: Option<Rank>, cpu: &Group) -> Getting {
        let mut state = self.state.lock();
        let may_leave = |peer: &Peer| peer.may_leave;
        let fetches = match from {
            Some(from) => state.peer(from, cpu).may_leave,
            None => state.peers.iter().any(may_leave),
        };
        match (fetches, from) {
            (true, _) => return Getting::Fetches,
            (false, Some(from)) => state.peer(from, cpu).copying += 1,
            (false, None) => state.copying += 1,
        }
        Getting::Copies
    }

    /// A receive that copies has ended.
    pub(super) fn end(&self, from: Option<Rank>) {
        let mut state = self.state.lock();
        match from {
            Some(from) => {
                if let Some(peer) = state.peers.get_mut(from) {
                    peer.copying -= 1;
                }
            }
            None => state.copying -= 1,
        }
        state.tell();
    }

    /// `bytes` bytes of words for a message that is to be fetched, if there is room.
    pub(super) fn words(&self, bytes: usize) -> Option<Slot> {
        self.state.lock().own.as_ref()?.words(bytes)
    }

    /// The number of the next long message that this rank sends.
    pub(super) fn number(&self) -> u64 {
        let mut state = self.state.lock();
        state.sent += 1;
        state.sent
    }

    /// Where the device finds a message of `bytes` bytes that lies `offset` bytes from the beginning of `from`'s depot.
    ///
    /// # Errors
    /// `Untrusted` where there is no such place.
    pub(super) fn place(&self, from: Rank, offset: u64, bytes: usize) -> Result<u64> {
        let state = self.state.lock();
        let depot = state.peers.get(from).and_then(|peer| peer.depot.as_ref());
        let (address, length) = depot.map_or((0, 0), |depot| (depot.half(0), depot.bytes()));
        let end = offset.checked_add(bytes as u64);
        match end.is_some_and(|end| end <= length as u64) {
            true => Ok(address + offset),
            false => Err(Error::new(
                Code::Untrusted,
                format!("rank {from} left a message where this rank has nothing of it mapped; its memory is damaged"),
            )
            .with_peer(from)),
        }
    }

    /// Bytes of the device's memory.
    pub(super) fn bytes(&self) -> usize {
        let state = self.state.lock();
        state.own.as_ref().map_or(0, |own| own.bytes())
    }

    /// Gives everything back, once no stream of this rank uses it: the lanes and what is mapped at once, and the own depot when
    /// the peers have unmapped it, of a group that `has_failed` soon. Nothing, where the device `is_lost`.
    pub(super) fn close(&self, is_lost: bool, has_failed: bool, lanes: impl Send + 'static) {
        let mut state = self.state.lock();
        state.is_closed = true;
        let own = Own {
            depot: state.own.take(),
            _left: std::mem::take(&mut state.left),
            _seen: state.seen.take(),
        };
        let peers = std::mem::take(&mut state.peers);
        drop(state);
        if own.depot.is_none() && peers.iter().all(|peer| peer.depot.is_none()) {
            return;
        }
        if is_lost {
            std::mem::forget((own, peers, lanes));
            return;
        }
        dispose(move || {
            drop(lanes);
            take_apart(own, peers, has_failed);
        });
    }
}

impl State {
    /// Tells a peer of the own depot, if there is one.
    fn publish(&mut self, rank: Rank, cpu: &Group) {
        let own = self.own.clone();
        let peer = self.peer(rank, cpu);
        if let (Some(pair), false, Some(Ok(record))) =
            (&peer.pair, peer.is_told, own.map(|own| own.record()))
        {
            pair.publish(&record);
            peer.is_told = true;
        }
    }

    /// Tells peers that their depots are mapped, where no receive that copies could meet a message of theirs.
    fn tell(&mut self) {
        if self.copying > 0 {
            return;
        }
        for peer in &mut self.peers {
            if let Some(pair) = &peer.pair
                && peer.depot.is_some()
                && !peer.may_leave
                && peer.copying == 0
            {
                peer.may_leave = true;
                pair.say(Mapped::Yes);
            }
        }
    }

    /// The state of `rank`, with its pair once the link to it is open.
    fn peer(&mut self, rank: Rank, cpu: &Group) -> &mut Peer {
        if self.peers.len() < cpu.world() {
            self.peers.resize(cpu.world(), Peer::default());
        }
        let peer = &mut self.peers[rank];
        if peer.pair.is_none() {
            let page = cpu.message_page(rank);
            peer.pair = page.map(|page| DepotWords::new(page, cpu.rank() < rank));
        }
        peer
    }
}

impl Peer {
    /// Whether it has told of a depot that has not been looked at.
    fn lacks_something(&self) -> bool {
        let pair = self.pair.as_ref().filter(|_| !self.is_looked_at);
        pair.is_some_and(|pair| pair.published().is_some())
    }

    /// The record of its depot, once: when the peer has published it and it has not been looked at.
    fn found(&mut self) -> Option<(DepotWords, Record)> {
        let pair = self.pair.as_ref().filter(|_| !self.is_looked_at)?;
        let record = pair.published()?;
        self.is_looked_at = true;
        Some((pair.clone(), record))
    }
}

fn own_depot(device: &'static Device) -> Option<Arc<Depot>> {
    match Depot::of(device) {
        Ok(depot) => Some(depot),
        Err(error) => {
            tracing::debug!("long messages go through host memory: {error}");
            None
        }
    }
}

/// A group's own depot, and its slots there.
struct Own {
    depot: Option<Arc<Depot>>,
    _left: Vec<Slot>,
    _seen: Option<Slot>,
}

/// Unmaps what this rank reads, and gives back what it owns once the peers have done the same: they may be behind in graphs,
/// unless the group has failed.
fn take_apart(own: Own, peers: Vec<Peer>, has_failed: bool) {
    let (mut readers, mut lanes) = (Vec::new(), Vec::new());
    for peer in peers {
        let Some(pair) = peer.pair else { continue };
        if peer.depot.is_some() {
            drop(peer.depot);
            pair.say(Mapped::NoMore);
        }
        lanes.extend(peer.lane);
        readers.extend(peer.is_told.then_some(pair));
    }
    let patience = match lanes.is_empty() || has_failed {
        true => LONGEST_UNMAPPING,
        false => LONGEST_READING,
    };
    let reads = |pair: &DepotWords| matches!(pair.said(), Mapped::Yes | Mapped::Lane);
    let since = Instant::now();
    while readers.iter().any(reads) && since.elapsed() < patience {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop((lanes, own));
}
