//! Simulated sockets, which break: with bytes on their way, and not for both sides at once.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::super::random::Random;
use super::{Conditions, Fabric, State};
use crate::transport::cipher::Carrier;
use crate::transport::tcp::Socket;

/// After this time without an answer a system has sent the same bytes more than once.
const UNANSWERED: Duration = Duration::from_millis(600);

/// Bytes that arrive together, at the most.
const SEGMENT: usize = 64 << 10;

/// Two connected sockets.
pub(super) struct Cable {
    halves: [Half; 2],
}

/// A socket, with the bytes that are on their way from it.
struct Half {
    /// When its side gets it.
    given_at: Instant,
    /// Bytes that the other side has not received, and when they arrive.
    stream: VecDeque<(Instant, VecDeque<u8>)>,
    /// When the last of them will have been put on the wire.
    free_at: Instant,
    /// Nothing that it takes from then on arrives.
    cut_at: Option<Instant>,
    /// Bytes that it has taken and that are never acknowledged.
    lost: usize,
    /// Its side sees the break from then on.
    ends_at: Option<Instant>,
    /// Its side takes the way for dark from then on, and is about to open another.
    suspected_from: Option<Instant>,
}

impl Cable {
    pub(super) fn new(given_at: [Instant; 2]) -> Self {
        let halves = given_at.map(|given_at| Half {
            given_at,
            stream: VecDeque::new(),
            free_at: given_at,
            cut_at: None,
            lost: 0,
            ends_at: None,
            suspected_from: None,
        });
        Self { halves }
    }

    /// Whether this side has it.
    pub(super) fn is_given(&self, side: usize, now: Instant) -> bool {
        self.halves[side].given_at <= now
    }

    /// Whether this side takes the way for dark.
    pub(super) fn is_suspected(&self, side: usize, now: Instant) -> bool {
        self.halves[side]
            .suspected_from
            .is_some_and(|from| from <= now)
    }

    /// When the next bytes arrive at this side.
    pub(super) fn next_arrival(&self, side: usize) -> Option<Instant> {
        let next = self.halves[1 - side].stream.front();
        next.map(|(arrives, _)| *arrives)
    }

    /// When the last bytes of this side arrive.
    pub(super) fn last_arrival(&self, side: usize) -> Option<Instant> {
        let last = self.halves[side].stream.back();
        last.map(|(arrives, _)| *arrives)
    }

    /// Drops what is on its way to this side, which reads nothing more.
    pub(super) fn discard(&mut self, side: usize) {
        self.halves[1 - side].stream.clear();
    }

    /// The host of this side goes, and takes along a part of what it had sent.
    pub(super) fn lose_sent(&mut self, side: usize, now: Instant, random: &mut Random) {
        let half = &mut self.halves[side];
        let on_the_way = half.on_the_way(now).count();
        let lost = random.below(on_the_way + 1);
        half.stream.truncate(half.stream.len() - lost);
    }

    /// It breaks, or is taken for broken, and another one takes its place then. `dials`: the side that opens that one. Returns
    /// when a side sees something of it.
    pub(super) fn interrupt(
        &mut self,
        (now, then): (Instant, Instant),
        dials: usize,
        random: &mut Random,
    ) -> Vec<(Instant, usize)> {
        let breaks = !random.once_in(4);
        let mut seen = Vec::new();
        for side in [0, 1] {
            let within = (then - now).min(UNANSWERED);
            let moment = random.below(within.as_nanos() as usize + 1);
            let moment = now + Duration::from_nanos(moment as u64);
            let half = &mut self.halves[side];
            if breaks {
                half.cut(now, random);
            }
            if breaks && random.below(3) > 0 {
                let ends_at = half.ends_at.map_or(moment, |before| before.min(moment));
                half.ends_at = Some(ends_at);
                seen.push((ends_at, side));
            } else if side == dials {
                half.suspected_from.get_or_insert(moment);
            }
        }
        seen
    }

    /// This side uses another one from now on. A system acknowledges some bytes after its program has received the last.
    pub(super) fn close(&mut self, side: usize, now: Instant, random: &mut Random) {
        let peer = &mut self.halves[1 - side];
        if peer.cut_at.is_none() {
            peer.cut(now, random);
            let lost: usize = peer.lost;
            peer.lost = random.below(lost + 1);
        }
        peer.stream.clear();
    }
}

impl Half {
    fn on_the_way(&self, now: Instant) -> impl Iterator<Item = usize> {
        let segments = self.stream.iter().filter(move |(at, _)| *at > now);
        segments.map(|(_, bytes)| bytes.len())
    }

    /// Nothing of it arrives any more but for some of the bytes that are on their way. Nothing more is acknowledged.
    fn cut(&mut self, now: Instant, random: &mut Random) {
        if self.cut_at.is_some() {
            return;
        }
        self.cut_at = Some(now);
        self.lost = self.on_the_way(now).sum();
        let lost = random.below(self.on_the_way(now).count() + 1);
        self.stream.truncate(self.stream.len() - lost);
    }

    fn room(&self, conditions: Conditions) -> usize {
        let held: usize = self.stream.iter().map(|(_, bytes)| bytes.len()).sum();
        conditions.buffer.saturating_sub(held + self.lost)
    }

    /// Takes what there is room for. `shared`: when the way out of its host is free, if other links go that way, too.
    fn send(
        &mut self,
        bytes: &[u8],
        now: Instant,
        (conditions, shared): (Conditions, Option<&mut Instant>),
    ) -> usize {
        let count = self.room(conditions).min(bytes.len());
        if self.cut_at.is_some() {
            self.lost += count;
            return count;
        }
        let free_at = shared.unwrap_or(&mut self.free_at);
        for segment in bytes[..count].chunks(SEGMENT) {
            let takes =
                Duration::from_nanos(conditions.femtoseconds * segment.len() as u64 / 1_000_000);
            *free_at = (*free_at).max(now) + takes;
            let arrives = *free_at + conditions.latency;
            self.stream
                .push_back((arrives, segment.iter().copied().collect()));
        }
        count
    }

    /// Bytes that have arrived by then.
    fn arrived(&self, by: Instant) -> usize {
        let arrived = self.stream.iter().take_while(|(at, _)| *at <= by);
        arrived.map(|(_, bytes)| bytes.len()).sum()
    }

    fn receive(&mut self, bytes: &mut [u8], by: Instant) -> usize {
        let mut done = 0;
        while let Some((_, front)) = self.stream.front_mut().filter(|(at, _)| *at <= by) {
            let count = front.len().min(bytes.len() - done);
            for (to, from) in bytes[done..].iter_mut().zip(front.drain(..count)) {
                *to = from;
            }
            done += count;
            if !front.is_empty() {
                break;
            }
            self.stream.pop_front();
        }
        done
    }

    /// Whether its side knows that it has broken.
    fn has_ended(&self, now: Instant) -> bool {
        self.ends_at.is_some_and(|at| at <= now)
    }
}

/// One side of a [`Cable`].
pub(super) struct SimulatedSocket {
    fabric: Arc<Fabric>,
    wire: usize,
    cable: usize,
    side: usize,
}

/// A socket as a call finds it.
struct Seen<'a> {
    this: &'a mut Half,
    peer: &'a mut Half,
    conditions: Conditions,
    /// When the way out of its host is free, where that is shared.
    free_at: Option<&'a mut Instant>,
    /// Nothing that it takes arrives.
    is_dark: bool,
    /// The process at the other end has ended.
    has_peer: bool,
    now: Instant,
    /// The last moment at which bytes could arrive.
    by: Instant,
}

impl SimulatedSocket {
    pub(super) fn new(fabric: Arc<Fabric>, wire: usize, cable: usize, side: usize) -> Self {
        Self {
            fabric,
            wire,
            cable,
            side,
        }
    }

    fn with<T>(&self, act: impl FnOnce(Seen<'_>) -> T) -> T {
        let now = self.fabric.clock.now();
        let State { wires, free_at, .. } = &mut *self.fabric.state.lock();
        let wire = &mut wires[self.wire];
        let conditions = wire.ends[self.side].conditions;
        let [first, second] = &mut wire.cables[self.cable].halves;
        let (this, peer) = match self.side {
            0 => (first, second),
            _ => (second, first),
        };
        let by = this.ends_at.map_or(now, |at| at.min(now));
        act(Seen {
            this,
            peer,
            conditions,
            free_at: conditions.host.map(|host| &mut free_at[host]),
            is_dark: wire.ends[self.side].is_dark,
            has_peer: !wire.ends[1 - self.side].is_gone,
            now,
            by,
        })
    }

    /// Wakes a sender that waits for room, once it knows.
    fn give_room(&self) {
        let now = self.fabric.clock.now();
        let mut state = self.fabric.state.lock();
        let peer = &state.wires[self.wire].ends[1 - self.side];
        if peer.armed.is_some_and(|interest| interest.writable) {
            let call = (now + peer.conditions.latency, peer.seat);
            state.calls.push(call);
        }
    }
}

impl Carrier for SimulatedSocket {
    fn send(&self, bytes: &[u8]) -> Result<usize, Errno> {
        self.with(|seen| {
            if seen.this.has_ended(seen.now) || !seen.has_peer {
                return Err(Errno::PIPE);
            }
            if seen.is_dark {
                seen.this.cut_at.get_or_insert(seen.now);
            }
            match seen
                .this
                .send(bytes, seen.now, (seen.conditions, seen.free_at))
            {
                0 => Err(Errno::AGAIN),
                count => Ok(count),
            }
        })
    }

    fn receive(&self, bytes: &mut [u8]) -> Result<usize, Errno> {
        let received = self.with(|seen| match seen.peer.receive(bytes, seen.by) {
            0 if seen.this.has_ended(seen.now) => Err(Errno::CONNRESET),
            0 => Err(Errno::AGAIN),
            count => Ok(count),
        });
        if received.is_ok() {
            self.give_room();
        }
        received
    }
}

impl Socket for SimulatedSocket {
    fn set_up(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn send_pieces(&self, pieces: &[&[u8]]) -> Result<usize, Errno> {
        self.send(&pieces.concat())
    }

    fn is_at_its_end(&self) -> Result<bool, Errno> {
        Ok(false)
    }

    fn ready(&self, wanted: PollFlags) -> PollFlags {
        self.with(|seen| {
            let has_ended = seen.this.has_ended(seen.now);
            let mut ready = PollFlags::empty();
            ready.set(PollFlags::IN, has_ended || seen.peer.arrived(seen.by) > 0);
            // As TCP has it: once a third of the buffer is free.
            let room = seen.this.room(seen.conditions);
            let is_free = seen.has_peer && room > seen.conditions.buffer / 3;
            ready.set(PollFlags::OUT, has_ended || is_free);
            ready &= wanted;
            ready.set(PollFlags::HUP | PollFlags::ERR, has_ended);
            ready
        })
    }

    fn take_error(&self) -> Option<Errno> {
        Some(Errno::CONNRESET)
    }

    fn arrived(&self) -> usize {
        self.with(|seen| seen.peer.arrived(seen.by))
    }

    fn unacknowledged(&self) -> usize {
        self.with(|seen| match seen.this.cut_at {
            Some(_) => seen.this.lost,
            None => seen.this.on_the_way(seen.now).sum(),
        })
    }

    fn is_unanswered(&self) -> bool {
        self.with(|seen| {
            seen.this
                .cut_at
                .is_some_and(|at| at + UNANSWERED <= seen.now)
        })
    }

    fn end_sending(&self) {}
}

impl fmt::Debug for SimulatedSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedSocket").finish_non_exhaustive()
    }
}
