//! The ends of simulated links.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::super::random::Random;
use super::socket::SimulatedSocket;
use super::{End, Fabric, Heard, Said, State, Wire};
use crate::error::{Code, Error, Result};
use crate::transport::cipher::Failure;
use crate::transport::tcp::Connection;
use crate::transport::{
    ControlChannel, Interest, Link, MESSAGE_HEADER, Notice, PeerState, Position,
};

/// A peer that has not answered for so long does not run.
const SILENCE: Duration = Duration::from_millis(500);

/// One end of a link of a [`Fabric`].
pub(in super::super) struct SimulatedLink {
    fabric: Arc<Fabric>,
    wire: usize,
    side: usize,
    connection: Connection<SimulatedSocket>,
    /// Bytes that have been received and not been taken.
    received: VecDeque<u8>,
    /// How many of them the last fold left: a part of an element.
    part: usize,
}

impl SimulatedLink {
    pub(super) fn new(fabric: Arc<Fabric>, wire: usize, side: usize) -> Self {
        let socket = SimulatedSocket::new(Arc::clone(&fabric), wire, 0, side);
        Self {
            fabric,
            wire,
            side,
            connection: Connection::new(socket, None).expect("it takes all options"),
            received: VecDeque::new(),
            part: 0,
        }
    }

    /// The wire, random numbers and the time.
    fn look<T>(&self, act: impl FnOnce(&mut Wire, &mut Random, Instant) -> T) -> T {
        let now = self.fabric.clock.now();
        let State { wires, random, .. } = &mut *self.fabric.state.lock();
        act(&mut wires[self.wire], random, now)
    }

    /// This side and the other one.
    fn with<T>(&self, act: impl FnOnce(&mut End, &mut End, Instant) -> T) -> T {
        self.look(|wire, _, now| {
            let [first, second] = &mut wire.ends;
            match self.side {
                0 => act(first, second, now),
                _ => act(second, first, now),
            }
        })
    }

    /// Whether the peer has left or ended.
    fn is_over(&self) -> bool {
        self.with(|this, _, _| this.heard.has_left || this.heard.has_ended)
    }

    fn say(&self, said: Said) {
        self.look(|wire, _, now| {
            let end = &mut wire.ends[self.side];
            let last = wire.cables[end.cable].last_arrival(self.side);
            end.say(said, now, last);
        });
    }

    /// Goes on over the socket that has taken the place of this one, if there is one.
    fn renew(&mut self) {
        let side = self.side;
        let (cable, next, is_suspected) = self.look(|wire, _, now| {
            let cable = wire.ends[side].cable;
            let given = (cable + 1..wire.cables.len()).rev();
            let next = given
                .into_iter()
                .find(|next| wire.cables[*next].is_given(side, now));
            (cable, next, wire.cables[cable].is_suspected(side, now))
        });
        if is_suspected {
            self.connection.freeze(true);
        }
        let Some(next) = next else { return };
        let socket = SimulatedSocket::new(Arc::clone(&self.fabric), self.wire, next, side);
        let number = u32::try_from(next).expect("few outages");
        let replaced = self.connection.replace(number, socket, None, &[]);
        replaced.expect("it takes all options");
        self.look(|wire, random, now| {
            wire.cables[cable].close(side, now, random);
            wire.ends[side].cable = next;
        });
    }

    /// As many of `count` bytes, which could go or come now, as one call moves.
    fn at_once(&self, count: usize, side: usize) -> usize {
        self.look(|wire, random, _| {
            let limit = wire.ends[side].conditions.at_once;
            // How often a rank looks in vain must decide nothing.
            match count >= limit {
                true => 1 + random.below(limit),
                false => count,
            }
        })
    }

    /// Receives until there are `count` bytes, as far as they have arrived.
    fn fill(&mut self, count: usize) -> Result<()> {
        let mut bytes = vec![0; count.saturating_sub(self.received.len())];
        while self.received.len() < count {
            let wanted = count - self.received.len();
            match self.connection.receive(&mut bytes[..wanted]) {
                Ok(received) => self.received.extend(&bytes[..received]),
                Err(Failure::Socket(Errno::AGAIN)) => break,
                Err(failure) => {
                    let what = format!("a simulated socket failed: {failure:?}");
                    return Err(Error::new(Code::Internal, what));
                }
            }
        }
        Ok(())
    }

    /// Takes bytes that have arrived, a random number of up to `most` and a multiple of `align`.
    fn take(&mut self, most: usize, align: usize) -> Result<Vec<u8>> {
        self.renew();
        let limit = self.look(|wire, _, _| wire.ends[1 - self.side].conditions.at_once);
        self.fill(most.min(limit.max(align)))?;
        // Not always all of it, but always something.
        let wanted = self.at_once(self.received.len(), 1 - self.side);
        let count = self.received.len().min(wanted.max(align)).min(most) / align * align;
        self.part = match count {
            0 => self.received.len(),
            _ => 0,
        };
        Ok(self.received.drain(..count).collect())
    }
}

impl Link for SimulatedLink {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize> {
        self.renew();
        if bytes.is_empty() {
            return Ok(0);
        }
        let limit = self.look(|wire, _, _| wire.ends[self.side].conditions.at_once);
        let count = match self.connection.may_send() {
            true => self.at_once(bytes.len(), self.side),
            false => bytes.len().min(limit),
        };
        match self.connection.send(&bytes[..count]) {
            Ok(count) => Ok(count),
            Err(errno) => {
                assert_eq!(errno, Errno::AGAIN, "a socket that breaks is replaced");
                Ok(0)
            }
        }
    }

    fn try_send_message(&mut self, header: &[u8], payload: &[u8]) -> Result<usize> {
        let mut together = [header, &payload[..payload.len().min(100)]].concat();
        let is_whole = header.len() == MESSAGE_HEADER;
        let lie = self.with(|this, _, _| this.lie.take_if(|_| is_whole));
        if let Some(how) = lie {
            let bit = how as usize % (8 * MESSAGE_HEADER);
            together[bit / 8] ^= 1 << (bit % 8);
        }
        self.try_send(&together)
    }

    fn try_recv(&mut self, bytes: &mut [u8]) -> Result<usize> {
        let taken = self.take(bytes.len(), 1)?;
        bytes[..taken.len()].copy_from_slice(&taken);
        Ok(taken.len())
    }

    fn try_fold(&mut self, max: usize, align: usize, fold: &mut dyn FnMut(&[u8])) -> Result<usize> {
        let taken = self.take(max, align)?;
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
        self.renew();
        self.fill(MESSAGE_HEADER)?;
        let first: Vec<u8> = self.received.iter().take(MESSAGE_HEADER).copied().collect();
        Ok(first.first_chunk().copied())
    }

    fn arm(&mut self, interest: Interest) -> bool {
        self.renew();
        let has_bytes = self.received.len() > self.part || self.connection.may_receive();
        let has_room = self.connection.may_send();
        let goes_on = self.connection.may_go_on();
        let is_greeting = !self.connection.is_flowing() && self.connection.cause().is_none();
        self.with(|this, peer, now| {
            let has_news = peer.said.front().is_some_and(|(at, _)| *at <= now);
            (this.armed, this.is_greeting) = (Some(interest), is_greeting);
            has_news || goes_on || interest.readable && has_bytes || interest.writable && has_room
        })
    }

    fn disarm(&mut self) {
        self.with(|this, _, _| this.armed = None);
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

    fn is_owing(&self) -> bool {
        self.connection.is_owing() && !self.is_over()
    }

    fn is_settled(&self) -> bool {
        self.connection.is_acknowledged() || self.is_over()
    }
}

impl ControlChannel for SimulatedLink {
    fn peer_state(&mut self) -> PeerState {
        self.renew();
        self.connection.look();
        self.connection.go_on();
        if let Some(what) = self.connection.beyond() {
            return PeerState::Lost(what.to_owned());
        }
        self.with(|this, peer, now| {
            let arrived = peer.said.iter().take_while(|(at, _)| *at <= now).count();
            for (_, said) in peer.said.drain(..arrived) {
                match said {
                    Said::Position(position) => this.heard.position = Some(position),
                    Said::Abort(notice) => this.heard.abort = Some(notice),
                    Said::Farewell => this.heard.has_left = true,
                    Said::End => this.heard.has_ended = true,
                    Said::Question => this.say(Said::Answer, now, None),
                    Said::Answer => this.heard.asked = None,
                }
            }
            peer.has_rung &= arrived == 0;
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
        self.say(Said::Abort(notice.clone()));
    }

    fn send_farewell(&mut self) {
        self.say(Said::Farewell);
    }

    fn has_left(&mut self) -> bool {
        self.peer_state() == PeerState::Left
    }

    fn is_delivered(&mut self) -> bool {
        // Bytes that come are discarded.
        while self.take(1 << 20, 1).is_ok_and(|taken| !taken.is_empty()) {}
        self.connection.is_acknowledged()
    }

    fn send_position(&mut self, position: &Position) {
        self.say(Said::Position(*position));
    }

    fn take_position(&mut self) -> Option<Position> {
        self.with(|this, _, _| this.heard.position.take())
    }

    fn ask(&mut self) {
        self.with(|this, _, now| {
            if this.heard.asked.is_none() {
                this.heard.asked = Some(now);
                this.say(Said::Question, now, None);
            }
        });
    }

    fn stall(&self) -> Option<String> {
        self.with(|this, _, now| {
            let silence = now.saturating_duration_since(this.heard.asked?);
            let seconds = silence.as_secs_f64();
            (silence >= SILENCE).then(|| format!("its process has not answered for {seconds:.1} s"))
        })
    }
}

impl Drop for SimulatedLink {
    fn drop(&mut self) {
        self.say(Said::End);
        self.with(|this, _, _| (this.is_gone, this.armed) = (true, None));
        // It reads nothing more.
        self.look(|wire, _, _| {
            for cable in &mut wire.cables {
                cable.discard(self.side);
            }
        });
    }
}
