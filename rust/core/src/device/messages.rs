//! Sending and receiving device memory: through registered host memory and the host's own matching, so tags and receives
//! from any rank work as they do there, on every topology.
//!
//! A send copies its buffer out on the stream, and then the host sends it: the stream does not wait for the peer. A receive
//! is known to the host at once; the stream waits for it and copies it in.
//!
//! [`BounceBuffer`] is the memory between.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::buffer::Memory;
use crate::engine::{Group, PointToPoint, WorkState};
use crate::error::Result;
use crate::transport::cuda::driver::{Device, Pinned, Stream};
use crate::transport::cuda::kernels::{self, Guard};
use crate::types::{DataType, Rank};

use super::bounce::{BounceBuffer, Direction};

/// The messages of a group that are under way.
pub(super) struct Messages(Mutex<Vec<Message>>);

/// What a message is, on this side.
enum Side {
    Send {
        to: Rank,
        /// The host's send, once the stream has filled the buffer.
        posted: Option<Result<Arc<WorkState>>>,
    },
    Receive {
        posted: Arc<WorkState>,
    },
}

struct Message {
    work: Arc<WorkState>,
    side: Side,
    dtype: DataType,
    tag: u64,
    timeout: Duration,
    buffer: BounceBuffer,
    /// A stream holds a part of it, and will not say when it has got past that.
    is_torn: bool,
}

/// One message, as it was asked for.
pub(super) struct Wanted<'a> {
    pub(super) dtype: DataType,
    pub(super) memory: &'a Memory,
    pub(super) tag: u64,
    pub(super) timeout: Duration,
    pub(super) work: Arc<WorkState>,
}

/// What became of a message that has ended.
pub(super) type Ended = (Arc<WorkState>, Result<()>);

impl Message {
    /// Its buffer is for others now, unless a stream may still use it.
    fn let_go(self) {
        match self.is_torn {
            true => std::mem::forget(self.buffer),
            false => self.buffer.give_back(),
        }
    }

    /// Gives the stream what the host has received, once that has ended. Returns whether anything moved.
    fn deliver(&mut self, is_received: bool) -> bool {
        let Side::Receive { posted } = &self.side else {
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
        let Side::Receive { posted } = &self.side else {
            return self.buffer.release();
        };
        if is_late || posted.result().is_some() {
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
        match &self.side {
            Side::Send { posted, .. } => match posted.as_ref()? {
                Ok(work) => work.result().cloned(),
                Err(refusal) => Some(Err(refusal.clone())),
            },
            Side::Receive { posted } => posted.result().cloned(),
        }
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
        Ok(Self(Mutex::default()))
    }

    /// Enqueues a send. `hurry` rouses the attendant.
    ///
    /// # Errors
    /// Those of the driver.
    pub(super) fn send(
        &self,
        wanted: Wanted,
        to: Rank,
        stream: &Stream,
        hurry: impl FnOnce(),
    ) -> Result<()> {
        let buffer = BounceBuffer::new(stream.device(), wanted.memory.len(), Direction::Out)?;
        let cut = buffer.cut();
        // Before it is enqueued, since the stream waits for the host; and without the lock then: to enqueue may have to wait for
        // room in the stream, and the stream for the attendant, which takes the lock.
        let work = Arc::clone(&wanted.work);
        self.0.lock().push(Message {
            work: wanted.work,
            side: Side::Send { to, posted: None },
            dtype: wanted.dtype,
            tag: wanted.tag,
            timeout: wanted.timeout,
            buffer,
            is_torn: false,
        });
        // In the middle of being enqueued, too, the stream may wait for the host.
        hurry();
        let enqueued = cut.enqueue_send(wanted.memory, stream);
        if enqueued.is_err() {
            self.take_back(&work);
        }
        enqueued
    }

    /// Asks the host for a message and enqueues what puts it into place. `hurry` rouses the attendant.
    ///
    /// # Errors
    /// Those of the driver, and of a receive on the host.
    pub(super) fn receive(
        &self,
        wanted: Wanted,
        from: Option<Rank>,
        (stream, cpu): (&Stream, &Group),
        hurry: impl FnOnce(),
    ) -> Result<()> {
        let buffer = BounceBuffer::new(stream.device(), wanted.memory.len(), Direction::In)?;
        let cut = buffer.cut();
        let options = PointToPoint {
            timeout: Some(wanted.timeout),
            ..PointToPoint::default()
        };
        let work = Arc::clone(&wanted.work);
        {
            // In one piece, so that receives are posted in the order in which they are listed.
            let mut under_way = self.0.lock();
            // SAFETY: the message keeps the buffer until the receive has ended, and moves nothing of it before.
            let view = unsafe { buffer.view() };
            let posted = match cpu.receive(wanted.dtype, view, (from, wanted.tag), options) {
                Ok(posted) => posted,
                Err(refusal) => {
                    buffer.give_back();
                    return Err(refusal);
                }
            };
            under_way.push(Message {
                work: wanted.work,
                side: Side::Receive { posted },
                dtype: wanted.dtype,
                tag: wanted.tag,
                timeout: wanted.timeout,
                buffer,
                is_torn: false,
            });
        }
        hurry();
        // The buffer stays until the stream has said that it is past it.
        let (enqueued, told) = cut.enqueue_receive(wanted.memory, stream);
        if told.is_err() {
            self.give_up(&work);
        }
        enqueued.and(told)
    }

    /// Whether a message is under way.
    pub(super) fn has(&self, work: &Arc<WorkState>) -> bool {
        let under_way = self.0.lock();
        under_way
            .iter()
            .any(|message| Arc::ptr_eq(&message.work, work))
    }

    /// No stream will say that it is past a message.
    fn give_up(&self, work: &Arc<WorkState>) {
        let mut under_way = self.0.lock();
        let mut messages = under_way.iter_mut();
        if let Some(message) = messages.find(|message| Arc::ptr_eq(&message.work, work)) {
            // The group fails, and lets the stream pass then.
            message.is_torn = true;
        }
    }

    /// Forgets a send of which a stream holds a part, and lets the stream pass that.
    fn take_back(&self, work: &Arc<WorkState>) {
        let mut under_way = self.0.lock();
        let mut messages = under_way.iter();
        if let Some(at) = messages.position(|message| Arc::ptr_eq(&message.work, work)) {
            let message = under_way.remove(at);
            message.buffer.release();
            std::mem::forget(message.buffer);
        }
    }

    /// The attendant's turn. Returns whether anything moved and whether anything is under way.
    ///
    /// # Errors
    /// What ended a message on the host.
    pub(super) fn advance(&self, cpu: &Group, ended: &mut Vec<Ended>) -> Result<(bool, bool)> {
        let mut under_way = self.0.lock();
        let mut moved = false;
        for at in 0..under_way.len() {
            moved |= post(&mut under_way, at, cpu)?;
            let message = &mut under_way[at];
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
        for message in &mut *self.0.lock() {
            message.release(is_late);
        }
    }

    /// Ends those that neither a stream nor the host uses any more, or all of them.
    pub(super) fn abandon(&self, all: bool, ended: &mut Vec<Arc<WorkState>>) {
        let mut under_way = self.0.lock();
        let mut at = 0;
        while at < under_way.len() {
            let message = &under_way[at];
            let unposted = matches!(message.side, Side::Send { posted: None, .. });
            let is_over = message.is_passed() && (unposted || message.result().is_some());
            if is_over || all {
                let message = under_way.remove(at);
                ended.push(Arc::clone(&message.work));
                match is_over {
                    true => message.let_go(),
                    // A stream may still write there, whenever.
                    false => std::mem::forget(message.buffer),
                }
            } else {
                at += 1;
            }
        }
    }

    /// The operations under way.
    pub(super) fn works(&self) -> Vec<Arc<WorkState>> {
        let under_way = self.0.lock();
        under_way
            .iter()
            .map(|message| Arc::clone(&message.work))
            .collect()
    }

    /// Bytes of host memory.
    pub(super) fn bytes(&self) -> usize {
        let under_way = self.0.lock();
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
    // SAFETY: the message keeps the buffer until the send has ended, and it has been filled.
    let view = unsafe { message.buffer.view() };
    match cpu.send(message.dtype, view, (to, tag), options) {
        Err(error) if error.code.is_fatal() => return Err(error),
        sent => *posted = Some(sent),
    }
    Ok(true)
}
