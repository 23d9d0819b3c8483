//! Links between simulated hosts: bytes take their time, arrive in pieces, find buffers full, and are lost with their hosts.
//!
//! A link keeps the contract of [`Link`]: an ordered stream in each direction, and a control channel beside it. How late, how
//! many at a time and after which control frame the bytes of one stream arrive is as the seed has it.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Seat;
use super::random::Random;
use crate::engine::clock::Clock;
use crate::error::Result;
use crate::locks::{Mutex, MutexGuard};
use crate::transport::{
    ControlChannel, Interest, Link, MESSAGE_HEADER, Notice, PeerState, Position,
};

/// A peer that has not answered for so long does not run.
const SILENCE: Duration = Duration::from_millis(500);

/// All simulated links of a world.
pub(super) struct Fabric {
    clock: Clock,
    state: Mutex<State>,
}

struct State {
    random: Random,
    wires: Vec<Wire>,
    /// Ranks that a link has woken, and when.
    calls: Vec<(Instant, Seat)>,
}

/// A link, seen from outside.
struct Wire {
    ends: [End; 2],
}

/// One side of a link, with the bytes and words that are on their way to the other side.
struct End {
    seat: Seat,
    conditions: Conditions,
    /// Bytes that this side has sent and the other one has not read, and when they arrive.
    stream: VecDeque<(Instant, VecDeque<u8>)>,
    /// When the last of it will have been put on the wire.
    free_at: Instant,
    said: VecDeque<(Instant, Said)>,
    /// The first of those has woken the other side.
    has_rung: bool,
    heard: Heard,
    armed: Option<Interest>,
    /// Bytes that the last fold left: a part of an element.
    part: usize,
    /// The bit of the next header that is not what it should be.
    lie: Option<u64>,
    has_lied: bool,
    /// Nothing that this side sends arrives any more, without a sign.
    is_dark: bool,
    /// Until then nothing that this side sends arrives; it is kept, and sent once more.
    broken_until: Instant,
    is_gone: bool,
}

/// The properties of one direction of a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Conditions {
    pub(super) latency: Duration,
    /// For a byte.
    pub(super) nanoseconds: u64,
    /// Bytes under way at the same time.
    pub(super) buffer: usize,
    /// The most bytes that go or come with one call.
    pub(super) at_once: usize,
}

enum Said {
    Position(Position),
    Abort(Notice),
    Farewell,
    /// The process has ended.
    End,
    Question,
    Answer,
}

/// Words that a side has heard from the other.
#[derive(Default)]
struct Heard {
    position: Option<Position>,
    abort: Option<Notice>,
    has_left: bool,
    has_ended: bool,
    /// Since when a question has not been answered.
    asked: Option<Instant>,
}

impl Fabric {
    pub(super) fn new(clock: Clock, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            clock,
            state: Mutex::new(State {
                random: Random::new(seed),
                wires: Vec::new(),
                calls: Vec::new(),
            }),
        })
    }

    /// A link between two ranks, each with the properties of its direction.
    pub(super) fn link(self: &Arc<Self>, ends: [(Seat, Conditions); 2]) -> [SimulatedLink; 2] {
        let now = self.clock.now();
        let ends = ends.map(|(seat, conditions)| End {
            seat,
            conditions,
            stream: VecDeque::new(),
            free_at: now,
            said: VecDeque::new(),
            has_rung: false,
            heard: Heard::default(),
            armed: None,
            part: 0,
            lie: None,
            has_lied: false,
            is_dark: false,
            broken_until: now,
            is_gone: false,
        });
        let mut state = self.state.lock();
        state.wires.push(Wire { ends });
        let wire = state.wires.len() - 1;
        [0, 1].map(|side| SimulatedLink {
            fabric: Arc::clone(self),
            wire,
            side,
        })
    }

    /// From now on nothing that this rank sends to other hosts arrives, and nothing arrives there.
    pub(super) fn darken(&self, seat: Seat) {
        for wire in &mut self.state.lock().wires {
            if wire.ends.iter().any(|end| end.seat == seat) {
                wire.ends.iter_mut().for_each(|end| end.is_dark = true);
            }
        }
    }

    /// The connections of this rank to other hosts break, and are mended then: all that was on its way arrives after that.
    pub(super) fn interrupt(&self, seat: Seat, until: Instant) {
        let now = self.clock.now();
        for wire in &mut self.state.lock().wires {
            if wire.ends.iter().any(|end| end.seat == seat) {
                wire.ends
                    .iter_mut()
                    .for_each(|end| end.interrupt(now, until));
            }
        }
    }

    /// From now on one header that this rank sends on each of its links has a wrong bit, chosen by `how`.
    pub(super) fn lie(&self, seat: Seat, how: u64) {
        for end in self
            .state
            .lock()
            .wires
            .iter_mut()
            .flat_map(|wire| &mut wire.ends)
        {
            if end.seat == seat && !end.has_lied {
                (end.lie, end.has_lied) = (Some(how), true);
            }
        }
    }

    /// This rank's host goes, and takes along a part of what it had sent.
    pub(super) fn lose_sent(&self, seat: Seat) {
        let now = self.clock.now();
        let State { random, wires, .. } = &mut *self.state.lock();
        for end in wires.iter_mut().flat_map(|wire| &mut wire.ends) {
            if end.seat != seat {
                continue;
            }
            let on_the_way = end.stream.iter().filter(|(arrives, _)| *arrives > now);
            let lost = on_the_way.count();
            let lost = random.below(lost + 1);
            end.stream.truncate(end.stream.len() - lost);
        }
    }

    /// The ranks that links wake now. A link rings once for each time that it was armed.
    pub(super) fn take_calls(&self) -> Vec<Seat> {
        let now = self.clock.now();
        let mut state = self.state.lock();
        let mut woken = Vec::new();
        for wire in &mut state.wires {
            for side in [0, 1] {
                if wire.next_for(side).is_some_and(|moment| moment <= now) {
                    wire.ends[side].armed = None;
                    let peer = &mut wire.ends[1 - side];
                    peer.has_rung |= peer.said.front().is_some_and(|(at, _)| *at <= now);
                    woken.push(wire.ends[side].seat);
                }
            }
        }
        state.calls.retain(|(moment, seat)| {
            if *moment <= now {
                woken.push(*seat);
            }
            *moment > now
        });
        woken.sort_unstable();
        woken.dedup();
        woken
    }

    /// When a link wakes a rank next.
    pub(super) fn next_call(&self) -> Option<Instant> {
        let state = self.state.lock();
        let wires = state.wires.iter();
        let armed = wires.flat_map(|wire| [wire.next_for(0), wire.next_for(1)]);
        let called = state.calls.iter().map(|(moment, _)| Some(*moment));
        armed.chain(called).flatten().min()
    }
}

impl Wire {
    /// When something arrives that wakes this side: words always do, once.
    fn next_for(&self, side: usize) -> Option<Instant> {
        let peer = &self.ends[1 - side];
        let news = peer.said.front().map(|(arrives, _)| *arrives);
        let news = news.filter(|_| !peer.has_rung);
        let bytes = self.next_bytes_for(side);
        news.into_iter().chain(bytes).min()
    }

    /// When bytes arrive that this side sleeps for.
    fn next_bytes_for(&self, side: usize) -> Option<Instant> {
        let interest = self.ends[side].armed?;
        let peer = &self.ends[1 - side];
        let mut count = 0;
        let more = peer.stream.iter().find(|(_, bytes)| {
            count += bytes.len();
            count > self.ends[side].part
        });
        more.map(|(arrives, _)| *arrives)
            .filter(|_| interest.readable)
    }
}

impl End {
    /// Bytes of this side's that have arrived.
    fn arrived(&self, now: Instant) -> usize {
        let arrived = self
            .stream
            .iter()
            .take_while(|(arrives, _)| *arrives <= now);
        arrived.map(|(_, bytes)| bytes.len()).sum()
    }

    fn held(&self) -> usize {
        self.stream.iter().map(|(_, bytes)| bytes.len()).sum()
    }

    fn room(&self) -> usize {
        self.conditions.buffer.saturating_sub(self.held())
    }

    fn send(&mut self, bytes: &[u8], now: Instant) {
        if self.is_dark {
            return;
        }
        let Conditions {
            latency,
            nanoseconds,
            ..
        } = self.conditions;
        let takes = Duration::from_nanos(nanoseconds * bytes.len() as u64);
        self.free_at = self.free_at.max(now).max(self.broken_until) + takes;
        self.stream
            .push_back((self.free_at + latency, bytes.iter().copied().collect()));
    }

    fn interrupt(&mut self, now: Instant, until: Instant) {
        self.broken_until = until;
        let bytes = self.stream.iter_mut().map(|(arrives, _)| arrives);
        let words = self.said.iter_mut().map(|(arrives, _)| arrives);
        for arrives in bytes.chain(words).filter(|arrives| **arrives > now) {
            *arrives = until.max(*arrives);
        }
    }

    fn say(&mut self, said: Said, now: Instant) {
        if self.is_dark || self.is_gone {
            return;
        }
        let mut arrives = now.max(self.broken_until) + self.conditions.latency;
        // An end is seen after the bytes that were sent before, and control frames come in their order.
        if matches!(said, Said::Farewell | Said::End) {
            arrives = self
                .stream
                .back()
                .map_or(arrives, |(last, _)| arrives.max(*last));
        }
        arrives = self
            .said
            .back()
            .map_or(arrives, |(last, _)| arrives.max(*last));
        self.said.push_back((arrives, said));
        self.has_rung = false;
    }
}

/// One end of a link of a [`Fabric`].
pub(super) struct SimulatedLink {
    fabric: Arc<Fabric>,
    wire: usize,
    side: usize,
}

impl SimulatedLink {
    /// This side, the other one, random numbers and the time.
    fn with<T>(&self, act: impl FnOnce(&mut End, &mut End, &mut Random, Instant) -> T) -> T {
        let now = self.fabric.clock.now();
        let mut state = self.fabric.state.lock();
        let State { wires, random, .. } = &mut *state;
        let [first, second] = &mut wires[self.wire].ends;
        match self.side {
            0 => act(first, second, random, now),
            _ => act(second, first, random, now),
        }
    }

    /// Takes bytes that have arrived, a random number of up to `most` and a multiple of `align`, and wakes a sender that waits
    /// for room.
    fn take(&self, most: usize, align: usize) -> Vec<u8> {
        let (taken, calls) = self.with(|this, peer, random, now| {
            let arrived = peer.arrived(now);
            let mut count = arrived.min(most);
            // Not always all of it, but always something.
            if count > peer.conditions.at_once {
                count = align.max(1 + random.below(peer.conditions.at_once));
            }
            count = count.min(most).min(arrived) / align * align;
            this.part = if count == 0 {
                arrived.min(align - 1)
            } else {
                0
            };
            let mut taken = Vec::with_capacity(count);
            while taken.len() < count {
                let (_, front) = peer.stream.front_mut().expect("they have arrived");
                let part = (count - taken.len()).min(front.len());
                taken.extend(front.drain(..part));
                if front.is_empty() {
                    peer.stream.pop_front();
                }
            }
            let waits = peer.armed.is_some_and(|interest| interest.writable);
            let call = (count > 0 && waits).then_some((now + peer.conditions.latency, peer.seat));
            (taken, call)
        });
        let mut state: MutexGuard<'_, State> = self.fabric.state.lock();
        state.calls.extend(calls);
        taken
    }
}

impl Link for SimulatedLink {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize> {
        Ok(self.with(|this, peer, random, now| {
            if peer.is_gone {
                return 0;
            }
            let room = this.room().min(bytes.len());
            let count = match room > this.conditions.at_once {
                true => 1 + random.below(this.conditions.at_once),
                false => room,
            };
            if count > 0 {
                this.send(&bytes[..count], now);
            }
            count
        }))
    }

    fn try_send_message(&mut self, header: &[u8], payload: &[u8]) -> Result<usize> {
        let mut together = [header, &payload[..payload.len().min(100)]].concat();
        let is_whole = header.len() == MESSAGE_HEADER;
        let lie = self.with(|this, _, _, _| this.lie.take_if(|_| is_whole));
        if let Some(how) = lie {
            let bit = how as usize % (8 * MESSAGE_HEADER);
            together[bit / 8] ^= 1 << (bit % 8);
        }
        self.try_send(&together)
    }

    fn try_recv(&mut self, bytes: &mut [u8]) -> Result<usize> {
        let taken = self.take(bytes.len(), 1);
        bytes[..taken.len()].copy_from_slice(&taken);
        Ok(taken.len())
    }

    fn try_fold(&mut self, max: usize, align: usize, fold: &mut dyn FnMut(&[u8])) -> Result<usize> {
        let taken = self.take(max, align);
        // In two runs, as a buffer that wraps around lends it.
        let middle = taken.len() / align / 2 * align;
        for run in [&taken[..middle], &taken[middle..]] {
            if !run.is_empty() {
                fold(run);
            }
        }
        Ok(taken.len())
    }

    fn peek(&mut self) -> Result<Option<[u8; MESSAGE_HEADER]>> {
        Ok(self.with(|_, peer, _, now| {
            let arrived = peer
                .stream
                .iter()
                .take_while(|(arrives, _)| *arrives <= now);
            let bytes: Vec<u8> = arrived.flat_map(|(_, bytes)| bytes).copied().collect();
            bytes.first_chunk().copied()
        }))
    }

    fn arm(&mut self, interest: Interest) -> bool {
        self.with(|this, peer, _, now| {
            let has_bytes = peer.arrived(now) > this.part;
            let has_news = peer
                .said
                .front()
                .is_some_and(|(arrives, _)| *arrives <= now);
            let has_room = this.room() > 0 && !peer.is_gone;
            let is_ready =
                has_news || interest.readable && has_bytes || interest.writable && has_room;
            this.armed = Some(interest);
            is_ready
        })
    }

    fn disarm(&mut self) {
        self.with(|this, _, _, _| this.armed = None);
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn memory(&self) -> usize {
        0
    }

    fn describe(&self) -> String {
        "a simulated link".into()
    }
}

impl ControlChannel for SimulatedLink {
    fn peer_state(&mut self) -> PeerState {
        self.with(|this, peer, _, now| {
            while peer
                .said
                .front()
                .is_some_and(|(arrives, _)| *arrives <= now)
            {
                let Some((_, said)) = peer.said.pop_front() else {
                    break;
                };
                match said {
                    Said::Position(position) => this.heard.position = Some(position),
                    Said::Abort(notice) => this.heard.abort = Some(notice),
                    Said::Farewell => this.heard.has_left = true,
                    Said::End => this.heard.has_ended = true,
                    Said::Question => this.say(Said::Answer, now),
                    Said::Answer => this.heard.asked = None,
                }
                peer.has_rung = false;
            }
            match &this.heard {
                Heard {
                    abort: Some(notice),
                    ..
                } => PeerState::Aborted(notice.clone()),
                Heard { has_left: true, .. } => PeerState::Left,
                Heard {
                    has_ended: true, ..
                } => PeerState::Lost("connection closed".into()),
                _ => PeerState::Present,
            }
        })
    }

    fn send_abort(&mut self, notice: &Notice) {
        self.with(|this, _, _, now| this.say(Said::Abort(notice.clone()), now));
    }

    fn send_farewell(&mut self) {
        self.with(|this, _, _, now| this.say(Said::Farewell, now));
    }

    fn has_left(&mut self) -> bool {
        self.peer_state() == PeerState::Left
    }

    fn is_delivered(&mut self) -> bool {
        // Bytes that come are discarded.
        self.take(usize::MAX, 1);
        self.with(|this, _, _, _| this.stream.is_empty())
    }

    fn send_position(&mut self, position: &Position) {
        self.with(|this, _, _, now| this.say(Said::Position(*position), now));
    }

    fn take_position(&mut self) -> Option<Position> {
        self.with(|this, _, _, _| this.heard.position.take())
    }

    fn ask(&mut self) {
        self.with(|this, _, _, now| {
            if this.heard.asked.is_none() {
                this.heard.asked = Some(now);
                this.say(Said::Question, now);
            }
        });
    }

    fn stall(&self) -> Option<String> {
        self.with(|this, _, _, now| {
            let silence = now.saturating_duration_since(this.heard.asked?);
            let seconds = silence.as_secs_f64();
            (silence >= SILENCE).then(|| format!("its process has not answered for {seconds:.1} s"))
        })
    }
}

impl Drop for SimulatedLink {
    fn drop(&mut self) {
        self.with(|this, peer, _, now| {
            this.say(Said::End, now);
            (this.is_gone, this.armed) = (true, None);
            // It reads nothing more.
            peer.stream.clear();
        });
    }
}
