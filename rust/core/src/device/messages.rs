//! Sending and receiving device memory: through registered host memory and the host's own matching, so tags and receives
//! from any rank work as they do there, on every topology.
//!
//! A send copies its buffer out on the stream, and then the host sends it: the stream does not wait for the peer. A receive
//! is known to the host at once; the stream waits for it and copies it in.
//!
//! [`BounceBuffer`] is the memory between. A long message goes another way if it can ([`depots`](super::depots)): the host carries
//! a note alone.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::buffer::Memory;
use crate::engine::{Group, NOTE, PointToPoint, WorkState};
use crate::error::{Error, Result};
use crate::transport::cuda::depot::Slot;
use crate::transport::cuda::driver::{Device, Pinned, Stream};
use crate::transport::cuda::kernels::{self, Guard};
use crate::types::{Collective, DataType, Rank};

use super::bounce::{BounceBuffer, Direction};
use super::depots::{Depots, Getting, Note};
use super::lanes::Lanes;

/// The messages of a group.
pub(super) struct Messages {
    under_way: Mutex<Vec<Message>>,
    pub(super) depots: Depots,
    pub(super) lanes: Lanes,
}

/// What a message is, on this side.
enum Side {
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

struct Message {
    work: Arc<WorkState>,
    side: Side,
    dtype: DataType,
    tag: u64,
    timeout: Duration,
    buffer: BounceBuffer,
    long: Option<Long>,
    /// A stream holds a part of it, and will not say when it has got past that.
    is_torn: bool,
}

/// What a message has besides in whose place a note travels.
struct Long {
    /// Notes stay where they are until the host has sent or received them.
    note: Box<[u8; NOTE]>,
    end: Box<[u8; NOTE]>,
    bytes: usize,
    /// Of a send, where it lies; of a receive, a word for its kernels.
    slot: Option<Slot>,
    /// What the host does after the note: it sends or receives what follows; or of what has been left in a depot, it receives
    /// another note when it has been fetched, or sends that.
    next: Option<Result<Arc<WorkState>>>,
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

/// What became of a message that has ended.
pub(super) type Ended = (Arc<WorkState>, Result<()>);

impl Message {
    /// Its buffer is for others now, unless a stream may still use it.
    fn let_go(self) {
        match self.is_torn {
            true => self.leave(),
            false => self.buffer.give_back(),
        }
    }

    /// A stream may still use what it has, whenever.
    fn leave(self) {
        std::mem::forget((self.buffer, self.long));
    }

    /// Gives the stream what the host has received, once that has ended. Returns whether anything moved.
    fn deliver(&mut self, is_received: bool) -> bool {
        let Side::Receive { posted, .. } = &self.side else {
            return false;
        };
        if let Some(source) = posted.source() {
            self.work.set_source(source);
        }
        if is_received {
            return self.buffer.put();
        }
        let poison = Guard::new(0, 0, self.dtype).poison;
        // SAFETY: the receive has ended.
        unsafe { self.buffer.spoil(poison) }
    }

    /// Lets the stream pass, after a failure. What is to be received must not change any more then: before `is_late` that is
    /// waited for.
    fn release(&mut self, is_late: bool) {
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
    fn is_passed(&self) -> bool {
        self.is_torn || self.buffer.is_passed()
    }

    /// How the host's part has ended.
    fn result(&self) -> Option<Result<()>> {
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
    fn slot_of_send(&mut self) -> Option<Slot> {
        match self.side {
            Side::Send { .. } => self.long.as_mut()?.slot.take(),
            Side::Receive { .. } => None,
        }
    }

    fn copies_from(&self) -> Option<Option<Rank>> {
        match self.side {
            Side::Send { .. } => None,
            Side::Receive { copies_from, .. } => copies_from,
        }
    }

    /// Whether the host does nothing after the note.
    fn has_ended_next(&self) -> bool {
        let next = self.long.as_ref().and_then(|long| long.next.as_ref());
        next.is_none_or(|next| result_of(next).is_some())
    }

    /// Does what comes after a note. Returns whether there was anything.
    ///
    /// # Errors
    /// What ends the group.
    fn go_on(&mut self, cpu: &Group, depots: &Depots) -> Result<bool> {
        let Some(long) = &mut self.long else {
            return Ok(false);
        };
        let options = PointToPoint {
            timeout: Some(self.timeout),
            ..PointToPoint::default()
        };
        let next = match &self.side {
            Side::Send {
                to,
                posted: Some(Ok(_)),
            } if long.next.is_none() => {
                let (to, note) = (*to, Note::decode(&long.note));
                match long.slot {
                    Some(_) => {
                        let what = (Collective::Send, self.dtype, long.bytes);
                        let place = (Some(to), note.tag_of_end());
                        // SAFETY: the message keeps the note, and does not look at it.
                        let end = unsafe { Memory::of_mut(long.end.as_mut_slice()) };
                        cpu.receive_note(what, end, place, options)
                    }
                    None => {
                        // SAFETY: the message keeps the buffer until the send has ended, and it has been filled.
                        let view = unsafe { self.buffer.view() };
                        match cpu.send(self.dtype, view, (to, note.tag()), options) {
                            // To itself a rank sends what it has begun to receive.
                            Err(error) if to == cpu.rank() && !error.code.is_fatal() => {
                                return Ok(false);
                            }
                            sent => sent,
                        }
                    }
                }
            }
            Side::Receive {
                posted,
                copies_from,
            } if long.next.is_none() => {
                let (Some(Ok(())), Some(from)) = (posted.result(), posted.source()) else {
                    return Ok(false);
                };
                let note = Note::decode(&long.note);
                let Some(offset) = note.offset else {
                    let place = (Some(from), note.tag());
                    // SAFETY: the message keeps the buffer until the receive has ended, and moves nothing of it before.
                    let view = unsafe { self.buffer.view() };
                    long.next = Some(cpu.receive(self.dtype, view, place, options));
                    return Ok(true);
                };
                if self.buffer.awaits_all() {
                    let bytes = match copies_from {
                        None => long.bytes,
                        // It cannot get it from there.
                        Some(_) => usize::MAX,
                    };
                    let place = depots.place((from, cpu.rank()), offset, bytes)?;
                    self.buffer.put_from(place);
                    return Ok(true);
                }
                if !self.buffer.is_passed() && !self.is_torn {
                    return Ok(false);
                }
                // SAFETY: the message keeps the note until the send has ended.
                let end = unsafe { Memory::of_mut(long.end.as_mut_slice()) };
                let place = (from, note.tag_of_end());
                cpu.send_note((self.dtype, long.bytes), end, place, options)
            }
            _ => return Ok(false),
        };
        match next {
            Err(error) if error.code.is_fatal() => Err(error),
            next => {
                long.next = Some(next);
                Ok(true)
            }
        }
    }
}

/// How what the host was asked for has ended.
fn result_of(posted: &Result<Arc<WorkState>>) -> Option<Result<()>> {
    match posted {
        Ok(work) => work.result().cloned(),
        Err(refusal) => Some(Err(refusal.clone())),
    }
}

impl Messages {
    /// None yet. The group has registered memory of its own already, which keeps the pool.
    ///
    /// # Errors
    /// `System` when the driver registers no memory; `Unsupported` where kernels cannot be loaded.
    pub(super) fn new(device: &'static Device) -> Result<Self> {
        Pinned::stock(device)?;
        // What a receive enqueues: to load it later may wait for a stream that waits for a peer.
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
        let long = wanted.is_long.then(|| Long {
            note: Box::new(
                Note {
                    number: self.depots.number(),
                    offset: slot.as_ref().map(|slot| slot.offset() as u64),
                }
                .encode(),
            ),
            end: Box::new([0; NOTE]),
            bytes: wanted.memory.len(),
            slot,
            next: None,
        });
        // Before it is enqueued, since the stream waits for the host; and without the lock then: to enqueue may have to wait for
        // room in the stream, and the stream for the attendant, which takes the lock.
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

    /// Asks the host for a message and enqueues what puts it into place, which looks at the word at `dead` whether the group has
    /// failed. `hurry` rouses the attendant.
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
        let mut long = wanted.is_long.then(|| Long {
            note: Box::new([0; NOTE]),
            end: Box::new([0; NOTE]),
            bytes,
            slot: match getting {
                Getting::Copies => None,
                Getting::Fetches => self.depots.word(),
            },
            next: None,
        });
        let slot = long.as_ref().and_then(|long| long.slot.as_ref());
        let word = slot.map(Slot::address);
        let options = PointToPoint {
            timeout: Some(wanted.timeout),
            ..PointToPoint::default()
        };
        let work = Arc::clone(&wanted.work);
        {
            // In one piece, so that receives are posted in the order in which they are listed.
            let mut under_way = self.under_way.lock();
            let (dtype, place) = (wanted.dtype, (from, wanted.tag));
            let posted = match &mut long {
                Some(long) => {
                    // SAFETY: the message keeps the note where it is, and looks at it when the receive has ended.
                    let note = unsafe { Memory::of_mut(long.note.as_mut_slice()) };
                    let what = (Collective::Recv, dtype, bytes);
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
                work: wanted.work,
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
        }
        hurry();
        // The buffer stays until the stream has said that it is past it.
        let (enqueued, told) = match getting {
            Getting::Copies => cut.enqueue_receive(wanted.memory, stream),
            Getting::Fetches => {
                let guard = Guard::new(dead, self.depots.seen(), wanted.dtype);
                cut.enqueue_fetch(wanted.memory, (word, guard), stream)
            }
        };
        if told.is_err() {
            self.give_up(&work);
        }
        enqueued.and(told)
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

    /// Forgets a send of which a stream holds a part, and lets the stream pass that.
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
