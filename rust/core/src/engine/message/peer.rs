//! One side's state of its traffic with one peer: the messages on their way, and those that wait for something.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::frame::{Frame, Kind, corrupt};
use super::meeting::Posted;
use super::outgoing::Outgoing;
use crate::buffer::Memory;
use crate::engine::work::WorkState;
use crate::error::Result;
use crate::transport::Ticket;
use crate::types::{DataType, Rank};

/// Bytes of unasked-for payload that a receiver keeps for one sender before that sender must ask first.
pub(crate) const CREDIT: usize = 4 << 20;

/// Messages that a receiver keeps for one sender, announced ones and empty ones among them. No program that works has as
/// many for which no receive is posted.
const MOST_KEPT: usize = 1 << 20;

/// A send that was announced and waits for the receiver.
pub(crate) struct Announced {
    pub(crate) payload: Memory,
    pub(crate) frame: Frame,
    pub(crate) work: Arc<WorkState>,
}

/// Where the payload now arriving goes.
pub(crate) enum Sink {
    Receive {
        memory: Memory,
        dtype: DataType,
        work: Arc<WorkState>,
        done: usize,
        eager: bool,
    },
    Keep {
        frame: Frame,
        payload: Vec<u8>,
        done: usize,
    },
}

/// One side's view of its traffic with one peer.
///
/// [`Peer::under_way`] and [`Peer::is_idle`] name every field: a new one does not compile before both say what it may hold.
/// They are two, since every short call asks each peer whether it is idle: over the first one, the second takes more
/// instructions (`benchmarks/instructions.py`).
#[derive(Default)]
pub(crate) struct Peer {
    pub(crate) outgoing: VecDeque<Outgoing>,
    /// By the numbers of the messages.
    pub(crate) announced: BTreeMap<u64, Announced>,
    /// Receives whose message was announced and may now come, by its number.
    pub(crate) ready: BTreeMap<u64, Posted>,
    pub(crate) sink: Option<Sink>,
    /// An offer that a receive may yet be posted for; what the peer sent after it has not been looked at.
    pub(crate) held: Option<Frame>,
    /// Sends whose payload is lent and may be read later than what was sent after it.
    pub(crate) lent: VecDeque<(Ticket, Outgoing)>,
    /// A message is offered, or about to be: the next long one is announced.
    pub(crate) offering: bool,
    /// Bytes that the peer may be keeping for us.
    pub(crate) in_flight: usize,
    /// Bytes of the peer's that are no longer kept and not yet given back.
    pub(crate) freed: usize,
    /// Bytes of the peer's that are kept, or for which there is room.
    kept_bytes: usize,
    /// Messages of the peer's that are kept.
    kept: usize,
}

impl Peer {
    /// The sends to this peer and the receives that have met a message of its, wherever they are: with the bytes of each. None
    /// of them ends without the peer.
    pub(crate) fn under_way(&self) -> impl Iterator<Item = (&Arc<WorkState>, usize)> {
        let Self {
            outgoing,
            announced,
            ready,
            sink,
            lent,
            // No receive has met these.
            held: _,
            kept: _,
            // Accounts.
            offering: _,
            in_flight: _,
            freed: _,
            kept_bytes: _,
        } = self;
        let arriving = match sink {
            Some(Sink::Receive { work, memory, .. }) => Some((work, memory.len())),
            Some(Sink::Keep { .. }) | None => None,
        };
        let lent = lent.iter().map(|(_, frame)| frame);
        let sent = lent.chain(outgoing).filter_map(|frame| {
            let work = frame.work.as_ref()?;
            Some((work, frame.payload.len()))
        });
        let announced = announced.values();
        let ready = ready.values();
        arriving
            .into_iter()
            .chain(ready.map(|posted| (&posted.work, posted.bytes())))
            .chain(announced.map(|announced| (&announced.work, announced.frame.bytes as usize)))
            .chain(sent)
    }

    /// Whether there is nothing to send to this peer, to read of it or to hear from it.
    pub(crate) fn is_idle(&self) -> bool {
        let Self {
            outgoing,
            announced,
            ready,
            sink,
            lent,
            // A receive will look at it.
            held: _,
            kept: _,
            offering: _,
            in_flight: _,
            freed: _,
            kept_bytes: _,
        } = self;
        outgoing.is_empty()
            && announced.is_empty()
            && ready.is_empty()
            && lent.is_empty()
            && sink.is_none()
    }

    pub(crate) fn push_control(&mut self, frame: Frame) {
        self.outgoing.push_back(Outgoing::control(frame));
    }

    /// Room for `bytes` of a message that `rank`, which this peer is, sends without being asked.
    ///
    /// # Errors
    /// When it has more there than it may: what it counts as kept here is never less than what is.
    pub(crate) fn room(&mut self, rank: Rank, bytes: usize) -> Result<Vec<u8>> {
        let all = self.kept_bytes.saturating_add(bytes);
        if all > CREDIT {
            return Err(corrupt(rank, "more bytes than it may without asking"));
        }
        self.kept_bytes = all;
        Ok(vec![0; bytes])
    }

    /// Counts a message of `rank`, which this peer is, that is kept.
    ///
    /// # Errors
    /// When there are too many.
    pub(crate) fn note_kept(&mut self, rank: Rank) -> Result<()> {
        if self.kept >= MOST_KEPT {
            return Err(corrupt(
                rank,
                "more than a million messages that no receive takes",
            ));
        }
        self.kept += 1;
        Ok(())
    }

    /// A message that was kept has met its receive.
    pub(crate) fn note_met(&mut self) {
        self.kept -= 1;
    }

    /// The `bytes` that there was [`Peer::room`] for have been used.
    pub(crate) fn give_back_room(&mut self, bytes: usize) {
        self.kept_bytes -= bytes;
        self.give_back(bytes);
    }

    /// Turns an offer into a message that has been announced.
    pub(crate) fn announce(&mut self, offer: Outgoing, frame: Frame) {
        self.offering = false;
        if let Some(work) = offer.work {
            let announced = Announced {
                payload: offer.payload,
                frame,
                work,
            };
            self.announced.insert(frame.id, announced);
        }
    }

    /// Refuses what announces a message again that has been announced and has met its receive.
    ///
    /// # Errors
    /// Of `rank`, which this peer is.
    pub(crate) fn check_new(&self, rank: Rank, frame: &Frame) -> Result<()> {
        match self.ready.contains_key(&frame.id) {
            true => Err(corrupt(rank, "two messages with one number")),
            false => Ok(()),
        }
    }

    /// Tells the sender to go on, and remembers where the payload goes.
    pub(crate) fn make_ready(&mut self, frame: Frame, posted: Posted) {
        self.push_control(Frame {
            kind: Kind::Ready,
            ..frame
        });
        self.ready.insert(frame.id, posted);
    }

    /// Notes that `bytes` of an eager message are no longer kept, and tells the sender now and then.
    pub(crate) fn give_back(&mut self, bytes: usize) {
        self.freed += bytes;
        if self.freed >= CREDIT / 4 {
            let bytes = std::mem::take(&mut self.freed) as u64;
            self.push_control(Frame {
                kind: Kind::Credit,
                dtype: 0,
                is_note: false,
                tag: 0,
                id: 0,
                bytes,
            });
        }
    }
}

impl Sink {
    /// Into a receive that has met its message, which came unasked for if `eager`.
    pub(crate) fn of(posted: Posted, eager: bool) -> Self {
        let Posted {
            memory,
            dtype,
            work,
            ..
        } = posted;
        Self::Receive {
            memory,
            dtype,
            work,
            done: 0,
            eager,
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        match self {
            Self::Receive { memory, done, .. } => *done == memory.len(),
            Self::Keep { payload, done, .. } => *done == payload.len(),
        }
    }

    pub(crate) fn rest(&mut self) -> &mut [u8] {
        match self {
            Self::Receive { memory, done, .. } => memory.write(*done, memory.len() - *done),
            Self::Keep { payload, done, .. } => &mut payload[*done..],
        }
    }

    /// Puts in the whole payload of a message that was posted; of a lent one it comes later.
    pub(crate) fn fill(&mut self, payload: &[u8]) {
        let mut done = 0;
        while done < payload.len() && !self.is_full() {
            let rest = self.rest();
            let run = rest.len().min(payload.len() - done);
            rest[..run].copy_from_slice(&payload[done..done + run]);
            self.advance(run);
            done += run;
        }
    }

    pub(crate) fn advance(&mut self, bytes: usize) {
        match self {
            Self::Receive { done, .. } | Self::Keep { done, .. } => *done += bytes,
        }
    }
}
