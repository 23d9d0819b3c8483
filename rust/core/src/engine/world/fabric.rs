//! Links between simulated hosts: bytes take their time, arrive in pieces, find buffers full, and are lost with their hosts.
//!
//! A link keeps the contract of [`Link`](crate::transport::Link): an ordered stream in each direction, and a control channel
//! beside it. How late, how many at a time and after which control frame the bytes of one stream arrive is as the seed has it.
//!
//! The stream is a [`Connection`](crate::transport::tcp::Connection), the one of links over TCP, on sockets that are simulated.
//! In an outage a socket loses bytes that it has taken, each side sees that at a time of its own or not at all, and then both
//! get another one.
//!
//! `socket`: sockets that break. `link`: the ends that the ranks have.

mod link;
mod socket;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) use self::link::SimulatedLink;
use self::socket::Cable;
use super::random::Random;
use super::scenario::Seat;
use crate::engine::clock::Clock;
use crate::locks::Mutex;
use crate::transport::{Interest, Notice, Position};

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
    /// When the way out of each host is free.
    free_at: Vec<Instant>,
}

/// A link, seen from outside.
struct Wire {
    ends: [End; 2],
    /// Its sockets, one after the other.
    cables: Vec<Cable>,
    /// The side that opens its connection.
    dials: usize,
    /// It does not break before.
    breaks_at: Instant,
}

/// One side of a link, with the words that are on their way to the other side.
struct End {
    seat: Seat,
    conditions: Conditions,
    said: VecDeque<(Instant, Said)>,
    /// The first of those has woken the other side.
    has_rung: bool,
    heard: Heard,
    armed: Option<Interest>,
    /// The socket that it uses, and whether that has yet to carry what comes before the caller's bytes.
    cable: usize,
    is_greeting: bool,
    /// The bit of the next header that is not what it should be.
    lie: Option<u64>,
    has_lied: bool,
    /// Nothing that this side sends arrives any more, without a sign.
    is_dark: bool,
    /// Until then no word of this side arrives.
    broken_until: Instant,
    has_left: bool,
    is_gone: bool,
}

/// The properties of one direction of a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Conditions {
    pub(super) latency: Duration,
    /// For a byte.
    pub(super) femtoseconds: u64,
    /// Bytes under way at the same time.
    pub(super) buffer: usize,
    /// The most bytes that go or come with one call.
    pub(super) at_once: usize,
    /// The host of its sender, if all links of that host share one way out.
    pub(super) host: Option<usize>,
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
                free_at: Vec::new(),
            }),
        })
    }

    /// A link between two ranks, each with the properties of its direction.
    pub(super) fn link(self: &Arc<Self>, ends: [(Seat, Conditions); 2]) -> [SimulatedLink; 2] {
        let now = self.clock.now();
        let ends = ends.map(|(seat, conditions)| End {
            seat,
            conditions,
            said: VecDeque::new(),
            has_rung: false,
            heard: Heard::default(),
            armed: None,
            cable: 0,
            is_greeting: false,
            lie: None,
            has_lied: false,
            is_dark: false,
            broken_until: now,
            has_left: false,
            is_gone: false,
        });
        let mut state = self.state.lock();
        let dials = state.random.below(2);
        let hosts = ends.iter().filter_map(|end| end.conditions.host);
        let hosts = hosts.max().map_or(0, |last| last + 1);
        let hosts = hosts.max(state.free_at.len());
        state.free_at.resize(hosts, now);
        state.wires.push(Wire {
            ends,
            cables: vec![Cable::new([now; 2])],
            dials,
            breaks_at: now,
        });
        let wire = state.wires.len() - 1;
        drop(state);
        [0, 1].map(|side| SimulatedLink::new(Arc::clone(self), wire, side))
    }

    /// From now on nothing that this rank sends to other hosts arrives, and nothing arrives there.
    pub(super) fn darken(&self, seat: Seat) {
        for wire in &mut self.state.lock().wires {
            if wire.ends.iter().any(|end| end.seat == seat) {
                wire.ends.iter_mut().for_each(|end| end.is_dark = true);
            }
        }
    }

    /// The connections of this rank to other hosts break, if it is time: now, and perhaps again, until they are mended then.
    pub(super) fn interrupt(&self, seat: Seat, until: Instant) {
        let now = self.clock.now();
        let State {
            random,
            wires,
            calls,
            ..
        } = &mut *self.state.lock();
        for wire in wires {
            let has_left = wire.ends.iter().any(|end| end.has_left || end.is_gone);
            let is_its = wire.ends.iter().any(|end| end.seat == seat);
            if is_its && !has_left && wire.breaks_at <= now && now < until {
                wire.interrupt((now, until), random, calls);
            }
        }
    }

    /// From now on one header that this rank sends on each of its links has a wrong bit, chosen by `how`.
    pub(super) fn lie(&self, seat: Seat, how: u64) {
        let mut state = self.state.lock();
        for end in state.wires.iter_mut().flat_map(|wire| &mut wire.ends) {
            if end.seat == seat && !end.has_lied {
                (end.lie, end.has_lied) = (Some(how), true);
            }
        }
    }

    /// This rank's host goes, and takes along a part of what it had sent.
    pub(super) fn lose_sent(&self, seat: Seat) {
        let now = self.clock.now();
        let State { random, wires, .. } = &mut *self.state.lock();
        for wire in wires {
            for side in [0, 1] {
                if wire.ends[side].seat == seat {
                    wire.cables[wire.ends[side].cable].lose_sent(side, now, random);
                }
            }
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
        let this = &self.ends[side];
        // Before the caller's bytes come those of a new socket.
        let is_awaited = |interest: &Interest| interest.readable || this.is_greeting;
        let bytes = this.armed.filter(is_awaited);
        let bytes = bytes.and_then(|_| self.cables[this.cable].next_arrival(side));
        news.into_iter().chain(bytes).min()
    }

    /// The connection breaks, and is mended then, or breaks again before.
    fn interrupt(
        &mut self,
        (now, until): (Instant, Instant),
        random: &mut Random,
        calls: &mut Vec<(Instant, Seat)>,
    ) {
        let nanoseconds = |time: Duration| time.as_nanos() as usize;
        let mended_at = match random.once_in(2) {
            true => until,
            false => now + Duration::from_nanos(random.length(nanoseconds(until - now)) as u64),
        };
        self.breaks_at = mended_at + Duration::from_nanos(random.length(20_000_000) as u64);
        for end in &mut self.ends {
            end.delay_words(now, mended_at);
        }
        // The side that opens the connection gets the socket last.
        let answer: Duration = self.ends.iter().map(|end| end.conditions.latency).sum();
        let mut given_at = [mended_at; 2];
        given_at[self.dials] += answer;
        let last = self.cables.last_mut().expect("the first");
        let seen = last.interrupt((now, mended_at), self.dials, random);
        let given = given_at.into_iter().enumerate();
        let events = seen.into_iter().chain(given.map(|(side, at)| (at, side)));
        calls.extend(events.map(|(at, side)| (at, self.ends[side].seat)));
        self.cables.push(Cable::new(given_at));
    }
}

impl End {
    fn delay_words(&mut self, now: Instant, until: Instant) {
        self.broken_until = self.broken_until.max(until);
        let words = self.said.iter_mut().map(|(arrives, _)| arrives);
        for arrives in words.filter(|arrives| **arrives > now) {
            *arrives = until.max(*arrives);
        }
    }

    /// Says it. The bytes that were sent before have arrived at `last`: an end is told after that.
    fn say(&mut self, said: Said, now: Instant, last: Option<Instant>) {
        if self.is_dark || self.is_gone {
            return;
        }
        self.has_left |= matches!(said, Said::Farewell | Said::End);
        let mut arrives = now.max(self.broken_until) + self.conditions.latency;
        // An end is seen after the bytes that were sent before, and control frames come in their order.
        if matches!(said, Said::Farewell | Said::End) {
            arrives = last.map_or(arrives, |last| arrives.max(last));
        }
        arrives = self
            .said
            .back()
            .map_or(arrives, |(last, _)| arrives.max(*last));
        self.said.push_back((arrives, said));
        self.has_rung = false;
    }
}
