//! Sending and receiving device memory: through registered host memory and the host's own matching, so tags and receives
//! from any rank work as they do there, on every topology.
//!
//! A send copies its buffer out on the stream, and then the host sends it: the stream does not wait for the peer. A receive
//! is known to the host at once; the stream waits for it and copies it in.
//!
//! The memory between comes from the process's pool ([`Pinned`]), which has some when the first group forms and grows
//! when more is under way at once: only then the driver registers memory in the middle of things, for which it may wait
//! until the device is idle.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;

use crate::buffer::Memory;
use crate::engine::{Group, PointToPoint, WorkState};
use crate::error::Result;
use crate::transport::cuda::driver::{Device, MemoryOperation, Pinned, Stream};
use crate::transport::cuda::kernels::{self, Guard};
use crate::types::{DataType, Rank};

use super::copies::Copies;

/// Words after a buffer's bytes.
const WORDS: usize = 256;

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
    bytes: usize,
    buffer: Pinned,
    /// A stream holds a part of it, and will not say when it has got past that.
    is_torn: bool,
}

/// A word of a buffer.
#[derive(Clone, Copy)]
enum Mark {
    /// The buffer holds the message: by the stream that sends, by the host that receives.
    Filled,
    /// The stream has no use for it any more.
    Done,
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
    fn place(&self, mark: Mark) -> usize {
        place(&self.buffer, mark)
    }

    fn is(&self, mark: Mark) -> bool {
        self.buffer.word(self.place(mark)).load(Ordering::Acquire) != 0
    }

    fn set(&self, mark: Mark) {
        self.buffer
            .word(self.place(mark))
            .store(1, Ordering::Release);
    }

    /// Its buffer is for others now, unless a stream may still use it.
    fn let_go(self) {
        match self.is_torn {
            true => std::mem::forget(self.buffer),
            false => self.buffer.give_back(),
        }
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

fn place(buffer: &Pinned, mark: Mark) -> usize {
    buffer.bytes() - WORDS + 128 * mark as usize
}

fn write(buffer: u64, place: usize) -> MemoryOperation {
    MemoryOperation::Write {
        address: buffer + place as u64,
        value: 1,
    }
}

/// A buffer whose words are zero.
fn buffer_for(device: &'static Device, bytes: usize) -> Result<Pinned> {
    let buffer = Pinned::shared(device, bytes + WORDS)?;
    for mark in [Mark::Filled, Mark::Done] {
        buffer
            .word(place(&buffer, mark))
            .store(0, Ordering::Release);
    }
    Ok(buffer)
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

    /// Enqueues a send.
    ///
    /// # Errors
    /// Those of the driver.
    pub(super) fn send(&self, wanted: Wanted, to: Rank, stream: &Stream) -> Result<()> {
        let bytes = wanted.memory.len();
        // The lock is not held while anything is enqueued: that may have to wait for room in a stream that waits for
        // the attendant, which takes the lock.
        let buffer = buffer_for(stream.device(), bytes)?;
        let mut copies = Copies::new(Guard::NONE);
        copies.gather(wanted.memory, 0, bytes, buffer.address());
        copies.flush(stream)?;
        stream.operate(&[
            write(buffer.address(), place(&buffer, Mark::Filled)),
            write(buffer.address(), place(&buffer, Mark::Done)),
        ])?;
        self.0.lock().push(Message {
            work: wanted.work,
            side: Side::Send { to, posted: None },
            dtype: wanted.dtype,
            tag: wanted.tag,
            timeout: wanted.timeout,
            bytes,
            buffer,
            is_torn: false,
        });
        Ok(())
    }

    /// Asks the host for a message and enqueues what puts it into place; `dead` is where the group's [`Word::Dead`] is.
    ///
    /// # Errors
    /// Those of the driver, and of a receive on the host.
    pub(super) fn receive(
        &self,
        wanted: Wanted,
        from: Option<Rank>,
        (stream, cpu): (&Stream, &Group),
        dead: u64,
    ) -> Result<()> {
        let bytes = wanted.memory.len();
        let buffer = buffer_for(stream.device(), bytes)?;
        let options = PointToPoint {
            timeout: Some(wanted.timeout),
            ..PointToPoint::default()
        };
        let address = buffer.address();
        let (filled, done) = (place(&buffer, Mark::Filled), place(&buffer, Mark::Done));
        {
            // In one piece, so that receives are posted in the order in which they are listed.
            let mut under_way = self.0.lock();
            // SAFETY: the message keeps the buffer until the receive has ended, and the stream waits for that.
            let view = unsafe { buffer.view(0, bytes) };
            let posted = cpu.receive(wanted.dtype, view, (from, wanted.tag), options)?;
            under_way.push(Message {
                work: wanted.work,
                side: Side::Receive { posted },
                dtype: wanted.dtype,
                tag: wanted.tag,
                timeout: wanted.timeout,
                bytes,
                buffer,
                is_torn: false,
            });
        }
        // The buffer stays until the stream has said that it is done with it.
        let wait = MemoryOperation::WaitAny {
            address: address + filled as u64,
            mask: 1,
        };
        let mut copies = Copies::new(Guard::new(dead, wanted.dtype));
        let enqueued = stream.operate(&[wait]).and_then(|()| {
            copies.scatter(address, wanted.memory, 0, bytes);
            copies.flush_from_host(stream)
        });
        let told = stream.operate(&[write(address, done)]);
        if told.is_err() {
            self.give_up(address);
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

    /// No stream will say that it is done with the message at `address`.
    fn give_up(&self, address: u64) {
        let mut under_way = self.0.lock();
        let mut messages = under_way.iter_mut();
        if let Some(message) = messages.find(|message| message.buffer.address() == address) {
            message.is_torn = true;
            message.set(Mark::Filled);
            message.set(Mark::Done);
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
            let message = &under_way[at];
            let Some(result) = message.result() else {
                continue;
            };
            match result {
                Err(error) if error.code.is_fatal() => return Err(error),
                _ => {}
            }
            if let Side::Receive { posted } = &message.side
                && !message.is(Mark::Filled)
            {
                if let Some(source) = posted.source() {
                    message.work.set_source(source);
                }
                message.set(Mark::Filled);
                moved = true;
            }
        }
        let mut at = 0;
        while at < under_way.len() {
            let message = &under_way[at];
            if let Some(result) = message.result()
                && message.is(Mark::Done)
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

    /// Lets streams pass, after a failure.
    pub(super) fn release(&self) {
        for message in &*self.0.lock() {
            message.set(Mark::Filled);
        }
    }

    /// Ends those that neither a stream nor the host uses any more, or all of them.
    pub(super) fn abandon(&self, all: bool, ended: &mut Vec<Arc<WorkState>>) {
        let mut under_way = self.0.lock();
        let mut at = 0;
        while at < under_way.len() {
            let message = &under_way[at];
            let unposted = matches!(message.side, Side::Send { posted: None, .. });
            let is_over = message.is(Mark::Done) && (unposted || message.result().is_some());
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
        under_way.iter().map(|message| message.buffer.bytes()).sum()
    }
}

/// Has the host send a message that the stream has filled in, after those before it to the same rank and tag.
fn post(messages: &mut [Message], at: usize, cpu: &Group) -> Result<bool> {
    let (before, rest) = messages.split_at_mut(at);
    let message = &mut rest[0];
    let filled = message.is(Mark::Filled);
    let Side::Send { to, posted } = &mut message.side else {
        return Ok(false);
    };
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
    if posted.is_some() || !filled || before.iter().any(is_before) {
        return Ok(false);
    }
    let options = PointToPoint {
        timeout: Some(message.timeout),
        ..PointToPoint::default()
    };
    // SAFETY: the message keeps the buffer until the send has ended, and the stream has filled it.
    let view = unsafe { message.buffer.view(0, message.bytes) };
    match cpu.send(message.dtype, view, (to, tag), options) {
        Err(error) if error.code.is_fatal() => return Err(error),
        sent => *posted = Some(sent),
    }
    Ok(true)
}
