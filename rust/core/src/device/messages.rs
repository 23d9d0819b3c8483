//! Sending and receiving device memory: through registered host memory and the host's own matching, so tags and receives
//! from any rank work as they do there, on every topology.
//!
//! A send copies its buffer out on the stream, and then the host sends it: the stream does not wait for the peer. A receive
//! is known to the host at once; the stream waits for it and copies it in.
//!
//! [`BounceBuffer`] is the memory between. A long message goes another way if it can ([`depots`](super::depots)): the host
//! carries a note alone. [`message`](super::message) is one of them.

use std::sync::Arc;

use crate::buffer::Memory;
use crate::engine::{Group, PointToPoint, WorkState};
use crate::error::Result;
use crate::locks::Mutex;
use crate::transport::cuda::depot::Slot;
use crate::transport::cuda::driver::{Device, Pinned, Stream};
use crate::transport::cuda::kernels::{self, Guard};
use crate::types::{Collective, DataType, Rank};

use super::bounce::{BounceBuffer, Direction};
use super::depots::{Depots, Getting};
use super::lanes::Lanes;
use super::message::{Ended, Long, Message, Side, Wanted, result_of};
use super::note::Note;

/// The messages of a group.
pub(super) struct Messages {
    under_way: Mutex<Vec<Message>>,
    pub(super) depots: Depots,
    pub(super) lanes: Lanes,
}

impl Messages {
    /// None yet. The group has registered memory of its own already, which keeps the pool.
    ///
    /// # Errors
    /// `System` when the driver registers no memory; `Unsupported` where kernels cannot be loaded.
    pub(super) fn new(device: &'static Device) -> Result<Self> {
        Pinned::stock(device)?;
        // The kernels that a receive enqueues: to load them later may wait for a stream that waits for a peer.
        kernels::prepare(device, DataType::UInt8, None)?;
        Ok(Self {
            under_way: Mutex::default(),
            depots: Depots::new(device),
            lanes: Lanes::default(),
        })
    }

    /// Enqueues a send; of a long one to the slot that it has been given, if any. `hurry` rouses the attendant.
    ///
    /// # Errors
    /// Those of the driver.
    pub(super) fn send(
        &self,
        wanted: Wanted,
        (to, slot): (Rank, Option<Slot>),
        stream: &Stream,
        hurry: impl FnOnce(),
    ) -> Result<()> {
        let place = slot.as_ref().map(Slot::address);
        let bytes = match place {
            Some(_) => 0,
            None => wanted.memory.len(),
        };
        let buffer = BounceBuffer::new(stream.device(), bytes, Direction::Out)?;
        let cut = buffer.cut();
        let long = wanted.is_long.then(|| {
            let note = Note {
                number: self.depots.number(),
                offset: slot.as_ref().map(|slot| slot.offset() as u64),
            };
            Long::new(wanted.memory.len(), Some(note), slot)
        });
        // Before it is enqueued, since the stream waits for the host; and without the lock then: to enqueue may have to wait
        // for room in the stream, and the stream for the attendant, which takes the lock.
        let work = Arc::clone(&wanted.work);
        self.under_way.lock().push(Message {
            work: wanted.work,
            side: Side::Send { to, posted: None },
            dtype: wanted.dtype,
            tag: wanted.tag,
            timeout: wanted.timeout,
            buffer,
            long,
            is_torn: false,
        });
        // In the middle of being enqueued, too, the stream may wait for the host.
        hurry();
        let enqueued = match place {
            Some(place) => cut.enqueue_leave(wanted.memory, place, stream),
            None => cut.enqueue_send(wanted.memory, stream),
        };
        if enqueued.is_err() {
            self.take_back(&work);
        }
        enqueued
    }

    /// Asks the host for a message and enqueues what puts it into place, which looks at the word at `dead` whether the group
    /// has failed. `hurry` rouses the attendant.
    ///
    /// # Errors
    /// Those of the driver, and of a receive on the host.
    pub(super) fn receive(
        &self,
        wanted: Wanted,
        from: Option<Rank>,
        (stream, cpu, dead): (&Stream, &Group, u64),
        hurry: impl FnOnce(),
    ) -> Result<()> {
        let bytes = wanted.memory.len();
        let getting = match wanted.is_long {
            true => self.depots.begin(from, cpu),
            false => Getting::Copies,
        };
        let direction = match getting {
            Getting::Copies => Direction::In,
            Getting::Fetches => Direction::Fetched,
        };
        let copies_from = (wanted.is_long && getting == Getting::Copies).then_some(from);
        let buffer = match BounceBuffer::new(stream.device(), bytes, direction) {
            Ok(buffer) => buffer,
            Err(error) => {
                self.note_end(copies_from);
                return Err(error);
            }
        };
        let cut = buffer.cut();
        let long = wanted.is_long.then(|| {
            let slot = match getting {
                Getting::Copies => None,
                Getting::Fetches => self.depots.words(cut.addresses_bytes()),
            };
            Long::new(bytes, None, slot)
        });
        let slot = long.as_ref().and_then(|long| long.slot.as_ref());
        let words = slot.map(Slot::address);
        let work = Arc::clone(&wanted.work);
        self.expect(&wanted, (from, copies_from), (buffer, long), cpu)?;
        hurry();
        // The buffer stays until the stream has said that it is past it.
        let (enqueued, told) = match getting {
            Getting::Copies => cut.enqueue_receive(wanted.memory, stream),
            Getting::Fetches => {
                let guard = Guard::new(dead, self.depots.seen(), wanted.dtype);
                cut.enqueue_fetch(wanted.memory, (words, guard), stream)
            }
        };
        if told.is_err() {
            self.give_up(&work);
        }
        enqueued.and(told)
    }

    /// Asks the host for a message, and lists it.
    fn expect(
        &self,
        wanted: &Wanted,
        (from, copies_from): (Option<Rank>, Option<Option<Rank>>),
        (buffer, mut long): (BounceBuffer, Option<Long>),
        cpu: &Group,
    ) -> Result<()> {
        let options = PointToPoint {
            timeout: Some(wanted.timeout),
            ..PointToPoint::default()
        };
        let (dtype, place) = (wanted.dtype, (from, wanted.tag));
        // In one piece, so that receives are posted in the order in which they are listed.
        let mut under_way = self.under_way.lock();
        let posted = match &mut long {
            Some(long) => {
                let what = (Collective::Recv, dtype, long.bytes);
                // SAFETY: the message keeps the note where it is, and looks at it when the receive has ended.
                let note = unsafe { Memory::of_mut(long.note.as_mut_slice()) };
                cpu.receive_note(what, note, place, options)
            }
            None => {
                // SAFETY: the message keeps the buffer until the receive has ended, and moves nothing of it before.
                let view = unsafe { buffer.view() };
                cpu.receive(dtype, view, place, options)
            }
        };
        let posted = match posted {
            Ok(posted) => posted,
            Err(refusal) => {
                buffer.give_back();
                self.note_end(copies_from);
                return Err(refusal);
            }
        };
        under_way.push(Message {
            work: Arc::clone(&wanted.work),
            side: Side::Receive {
                posted,
                copies_from,
            },
            dtype,
            tag: wanted.tag,
            timeout: wanted.timeout,
            buffer,
            long,
            is_torn: false,
        });
        Ok(())
    }

    /// A receive that copies has ended, if it was one that matters.
    fn note_end(&self, copies_from: Option<Option<Rank>>) {
        if let Some(from) = copies_from {
            self.depots.end(from);
        }
    }

    /// Whether a message is under way.
    pub(super) fn has(&self, work: &Arc<WorkState>) -> bool {
        let under_way = self.under_way.lock();
        under_way
            .iter()
            .any(|message| Arc::ptr_eq(&message.work, work))
    }

    /// No stream will say that it is past a message.
    fn give_up(&self, work: &Arc<WorkState>) {
        let mut under_way = self.under_way.lock();
        let mut messages = under_way.iter_mut();
        if let Some(message) = messages.find(|message| Arc::ptr_eq(&message.work, work)) {
            // The group fails, and lets the stream pass then.
            message.is_torn = true;
        }
    }

    /// Forgets a send that is partly in a stream, and lets the stream pass that part.
    fn take_back(&self, work: &Arc<WorkState>) {
        let mut under_way = self.under_way.lock();
        let mut messages = under_way.iter();
        if let Some(at) = messages.position(|message| Arc::ptr_eq(&message.work, work)) {
            let message = under_way.remove(at);
            message.buffer.release();
            message.leave();
        }
    }

    /// The attendant's turn. Returns whether anything moved and whether anything is under way.
    ///
    /// # Errors
    /// What ended a message on the host.
    pub(super) fn advance(&self, cpu: &Group, ended: &mut Vec<Ended>) -> Result<(bool, bool)> {
        let mut moved = self.lanes.advance(cpu.rank())?;
        let mut under_way = self.under_way.lock();
        for at in 0..under_way.len() {
            moved |= post(&mut under_way, at, cpu)?;
            let message = &mut under_way[at];
            moved |= message.go_on(cpu, &self.depots)?;
            let Some(result) = message.result() else {
                continue;
            };
            match result {
                Err(error) if error.code.is_fatal() => return Err(error),
                result => moved |= message.deliver(result.is_ok()),
            }
        }
        let mut at = 0;
        while at < under_way.len() {
            let message = &under_way[at];
            if let Some(result) = message.result()
                && message.is_passed()
            {
                let message = under_way.remove(at);
                ended.push((Arc::clone(&message.work), result));
                self.note_end(message.copies_from());
                message.let_go();
                moved = true;
            } else {
                at += 1;
            }
        }
        Ok((moved, !under_way.is_empty()))
    }

    /// Lets streams pass, after a failure, `is_late` where that was some time ago. To be called again until all have passed.
    pub(super) fn release(&self, is_late: bool) {
        self.lanes.release();
        for message in &mut *self.under_way.lock() {
            message.release(is_late);
        }
    }

    /// Ends those that neither a stream nor the host uses any more, or all of them.
    pub(super) fn abandon(&self, all: bool, ended: &mut Vec<Arc<WorkState>>) {
        let mut under_way = self.under_way.lock();
        let mut at = 0;
        while at < under_way.len() {
            let message = &under_way[at];
            let has_ended = match &message.side {
                Side::Send { posted, .. } => posted
                    .as_ref()
                    .is_none_or(|posted| result_of(posted).is_some()),
                Side::Receive { posted, .. } => posted.result().is_some(),
            };
            let is_over = message.is_passed() && has_ended && message.has_ended_next();
            if is_over || all {
                let mut message = under_way.remove(at);
                ended.push(Arc::clone(&message.work));
                self.note_end(message.copies_from());
                match is_over {
                    true => {
                        self.depots.leave(message.slot_of_send());
                        message.let_go();
                    }
                    false => message.leave(),
                }
            } else {
                at += 1;
            }
        }
    }

    /// The operations under way.
    pub(super) fn works(&self) -> Vec<Arc<WorkState>> {
        let under_way = self.under_way.lock();
        under_way
            .iter()
            .map(|message| Arc::clone(&message.work))
            .collect()
    }

    /// Bytes of host memory.
    pub(super) fn bytes(&self) -> usize {
        let under_way = self.under_way.lock();
        let buffers = under_way.iter().map(|message| &message.buffer);
        buffers.map(BounceBuffer::bytes).sum()
    }
}

/// Takes what a stream has filled of a send, and has the host send it when that is all, after those before it to the same
/// rank and tag. Returns whether anything moved.
fn post(messages: &mut [Message], at: usize, cpu: &Group) -> Result<bool> {
    let (before, rest) = messages.split_at_mut(at);
    let message = &mut rest[0];
    let Side::Send { to, posted } = &mut message.side else {
        return Ok(false);
    };
    let moved = message.buffer.take();
    let (to, tag) = (*to, message.tag);
    let is_before = |other: &Message| {
        let Side::Send {
            to: other_to,
            posted: None,
        } = other.side
        else {
            return false;
        };
        other_to == to && other.tag == tag
    };
    let is_filled = message.buffer.is_filled();
    if posted.is_some() || !is_filled || before.iter().any(is_before) {
        return Ok(moved);
    }
    let options = PointToPoint {
        timeout: Some(message.timeout),
        ..PointToPoint::default()
    };
    let sent = match &mut message.long {
        Some(long) => {
            // SAFETY: the message keeps the note as it is until the send has ended.
            let note = unsafe { Memory::of_mut(long.note.as_mut_slice()) };
            cpu.send_note((message.dtype, long.bytes), note, (to, tag), options)
        }
        None => {
            // SAFETY: the message keeps the buffer until the send has ended, and it has been filled.
            let view = unsafe { message.buffer.view() };
            cpu.send(message.dtype, view, (to, tag), options)
        }
    };
    match sent {
        Err(error) if error.code.is_fatal() => return Err(error),
        sent => *posted = Some(sent),
    }
    Ok(true)
}
