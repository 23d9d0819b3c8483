//! A message that is under way on this rank: what its stream and the host do with it, one after the other.

use std::sync::Arc;
use std::time::Duration;

use crate::buffer::Memory;
use crate::engine::{Group, NOTE, PointToPoint, Received, WorkState};
use crate::error::{Error, Result};
use crate::transport::cuda::depot::Slot;
use crate::transport::cuda::kernels::Guard;
use crate::types::{Collective, DataType, Rank};

use super::bounce::BounceBuffer;
use super::depots::Depots;
use super::note::Note;

/// This rank's side of a message.
pub(super) enum Side {
    Send {
        to: Rank,
        /// The host's send, once the stream has filled the buffer.
        posted: Option<Result<Arc<WorkState>>>,
    },
    Receive {
        posted: Arc<WorkState>,
        /// The rank that it was asked for from, where it is long and copies.
        copies_from: Option<Option<Rank>>,
    },
}

pub(super) struct Message {
    pub(super) work: Arc<WorkState>,
    pub(super) side: Side,
    pub(super) dtype: DataType,
    pub(super) tag: u64,
    pub(super) timeout: Duration,
    pub(super) buffer: BounceBuffer,
    pub(super) long: Option<Long>,
    /// A stream holds a part of it, and will not say when it has got past that.
    pub(super) is_torn: bool,
}

/// Further state of a message in whose place a note travels.
pub(super) struct Long {
    /// Notes stay where they are until the host has sent or received them.
    pub(super) note: Box<[u8; NOTE]>,
    pub(super) end: Box<[u8; NOTE]>,
    pub(super) bytes: usize,
    /// Of a send, where it lies; of a receive, words for its kernels.
    pub(super) slot: Option<Slot>,
    /// The host's operation after the note. It sends or receives the message that follows. For a message left in a depot, the
    /// receiver sends another note once it has been fetched, and the sender receives that note.
    pub(super) next: Option<Result<Arc<WorkState>>>,
}

/// One message, as it was asked for.
pub(super) struct Wanted<'a> {
    pub(super) dtype: DataType,
    pub(super) memory: &'a Memory,
    pub(super) tag: u64,
    pub(super) timeout: Duration,
    pub(super) work: Arc<WorkState>,
    /// A note travels in its place.
    pub(super) is_long: bool,
}

/// A message that has ended, and its result.
pub(super) type Ended = (Arc<WorkState>, Result<()>);

impl Message {
    /// Its buffer is for others now, unless a stream may still use it.
    pub(super) fn let_go(self) {
        match self.is_torn {
            true => self.leave(),
            false => self.buffer.give_back(),
        }
    }

    /// A stream may still use what it has, whenever.
    pub(super) fn leave(self) {
        std::mem::forget((self.buffer, self.long));
    }

    /// Gives the stream what the host has received, once that has ended. Returns whether anything moved.
    pub(super) fn deliver(&mut self, is_received: bool) -> bool {
        let Side::Receive { posted, .. } = &self.side else {
            return false;
        };
        if let Some(received) = posted.received() {
            self.work.set_received(Received {
                bytes: self.long.as_ref().map_or(received.bytes, |long| long.bytes),
                ..received
            });
        }
        if is_received {
            return self.buffer.put();
        }
        let poison = Guard::new(0, 0, self.dtype).poison;
        // SAFETY: the receive has ended.
        unsafe { self.buffer.spoil(poison) }
    }

    /// Lets the stream pass, after a failure. The data of a receive must not change any more then: before `is_late` nothing
    /// happens while the receive is under way.
    pub(super) fn release(&mut self, is_late: bool) {
        let Side::Receive { posted, .. } = &self.side else {
            return self.buffer.release();
        };
        if is_late || posted.result().is_some() && self.has_ended_next() {
            let poison = Guard::new(0, 0, self.dtype).poison;
            // SAFETY: the receive has ended, or the group has failed and what it still brings is not used.
            unsafe { self.buffer.spoil(poison) };
        }
    }

    /// Whether the stream is past it, or will not say so.
    pub(super) fn is_passed(&self) -> bool {
        self.is_torn || self.buffer.is_passed()
    }

    /// How the host's part has ended.
    pub(super) fn result(&self) -> Option<Result<()>> {
        let first = match &self.side {
            Side::Send { posted, .. } => result_of(posted.as_ref()?)?,
            Side::Receive { posted, .. } => posted.result().cloned()?,
        };
        match &self.long {
            Some(long) if first.is_ok() => {
                let ended = result_of(long.next.as_ref()?)?;
                Some(ended.map_err(|error| Error {
                    operation: Some(self.work.name()),
                    ..error
                }))
            }
            _ => Some(first),
        }
    }

    /// Where it lies in the depot, if this rank sends it.
    pub(super) fn slot_of_send(&mut self) -> Option<Slot> {
        match self.side {
            Side::Send { .. } => self.long.as_mut()?.slot.take(),
            Side::Receive { .. } => None,
        }
    }

    pub(super) fn copies_from(&self) -> Option<Option<Rank>> {
        match self.side {
            Side::Send { .. } => None,
            Side::Receive { copies_from, .. } => copies_from,
        }
    }

    /// Whether the host does nothing after the note.
    pub(super) fn has_ended_next(&self) -> bool {
        let next = self.long.as_ref().and_then(|long| long.next.as_ref());
        next.is_none_or(|next| result_of(next).is_some())
    }

    /// Does what comes after a note. Returns whether there was anything.
    ///
    /// # Errors
    /// What ends the group.
    pub(super) fn go_on(&mut self, cpu: &Group, depots: &Depots) -> Result<bool> {
        if self.long.as_ref().is_none_or(|long| long.next.is_some()) {
            return Ok(false);
        }
        let next = match &self.side {
            Side::Send {
                to,
                posted: Some(Ok(_)),
            } => {
                let to = *to;
                self.after_sending(to, cpu)
            }
            Side::Receive { .. } => return self.after_receiving(cpu, depots),
            Side::Send { .. } => None,
        };
        self.note_next(next)
    }

    /// Notes that the host's next operation, if there is one, has begun.
    fn note_next(&mut self, next: Option<Result<Arc<WorkState>>>) -> Result<bool> {
        match (next, &mut self.long) {
            (Some(Err(error)), _) if error.code.is_fatal() => Err(error),
            (Some(next), Some(long)) => {
                long.next = Some(next);
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    fn options(&self) -> PointToPoint {
        PointToPoint {
            timeout: Some(self.timeout),
            ..PointToPoint::default()
        }
    }

    /// After a note has been sent: sends what follows, or hears that what lies in the depot has been fetched.
    fn after_sending(&mut self, to: Rank, cpu: &Group) -> Option<Result<Arc<WorkState>>> {
        let options = self.options();
        let long = self.long.as_mut()?;
        let note = Note::decode(&long.note);
        if long.slot.is_some() {
            let what = (Collective::Send, self.dtype, long.bytes);
            let place = (Some(to), note.tag_of_end());
            // SAFETY: the message keeps the note, and does not look at it.
            let end = unsafe { Memory::of_mut(long.end.as_mut_slice()) };
            return Some(cpu.receive_note(what, end, place, options));
        }
        // SAFETY: the message keeps the buffer until the send has ended, and it has been filled.
        let view = unsafe { self.buffer.view() };
        Some(cpu.send(self.dtype, view, (to, note.tag()), options))
    }

    /// After a note has come: receives what follows, or has the stream fetch what lies in the sender's depot, and says when it
    /// has.
    fn after_receiving(&mut self, cpu: &Group, depots: &Depots) -> Result<bool> {
        let options = self.options();
        let (
            Side::Receive {
                posted,
                copies_from,
            },
            Some(long),
        ) = (&self.side, &mut self.long)
        else {
            return Ok(false);
        };
        let (Some(Ok(())), Some(received)) = (posted.result(), posted.received()) else {
            return Ok(false);
        };
        let from = received.source;
        let note = Note::decode(&long.note);
        let Some(offset) = note.offset else {
            let place = (Some(from), note.tag());
            // SAFETY: the message keeps the buffer until the receive has ended, and moves nothing of it before.
            let view = unsafe { self.buffer.view() };
            let received = cpu.receive(self.dtype, view, place, options);
            return self.note_next(Some(received));
        };
        if self.buffer.awaits_all() {
            let bytes = match copies_from {
                None => long.bytes,
                // It cannot get it from there.
                Some(_) => usize::MAX,
            };
            let place = depots.place(from, offset, bytes)?;
            self.buffer.put_from(place);
            return Ok(true);
        }
        if !self.buffer.is_passed() && !self.is_torn {
            return Ok(false);
        }
        // SAFETY: the message keeps the note until the send has ended.
        let end = unsafe { Memory::of_mut(long.end.as_mut_slice()) };
        let place = (from, note.tag_of_end());
        let told = cpu.send_note((self.dtype, long.bytes), end, place, options);
        self.note_next(Some(told))
    }
}

impl Long {
    /// A message of `bytes` bytes, with the note that is sent, if it is sent.
    pub(super) fn new(bytes: usize, note: Option<Note>, slot: Option<Slot>) -> Self {
        let nothing = [0; NOTE];
        Self {
            note: Box::new(note.map_or(nothing, |note| note.encode())),
            end: Box::new(nothing),
            bytes,
            slot,
            next: None,
        }
    }
}

/// How what the host was asked for has ended.
pub(super) fn result_of(posted: &Result<Arc<WorkState>>) -> Option<Result<()>> {
    match posted {
        Ok(work) => work.result().cloned(),
        Err(refusal) => Some(Err(refusal.clone())),
    }
}
