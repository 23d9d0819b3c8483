//! An operation from C: blocking in the calling thread, started for a handle, or started for an open group.

use std::time::Duration;

use unisono::error::{Error, Result};
use unisono::types::{DataType, DeviceStream, Rank};
use unisono::{PointToPoint, Received, Request};

use crate::error::output;
use crate::group;
use crate::joined::{COMMUNICATORS, Communicator, Joined};
use crate::types::{Buffer, Checked};
use crate::work::{self, Work};

/// Carries out the collective that `request` makes, or starts it. Always inlined, and the request is made where the core
/// takes it from: a copy of it costs as much as everything else that is done here.
#[inline(always)]
pub(crate) fn collective(
    joined: &Joined,
    options: &Checked,
    work: *mut *mut Work,
    request: impl FnOnce() -> Request,
) -> Result<()> {
    if !work.is_null() || !options.are_plain() || group::is_open() {
        return otherwise(joined, request(), options, work);
    }
    // SAFETY: C promises that the buffers stay what the header asks of them until the operation has ended.
    unsafe { joined.comm.run(request()).map(drop) }
}

/// Starts a collective for a handle or for the group that is open, or carries it out with a timeout of its own.
#[inline(never)]
fn otherwise(
    joined: &Joined,
    mut request: Request,
    options: &Checked,
    work: *mut *mut Work,
) -> Result<()> {
    request.timeout = options.timeout;
    request.stream = options.device_stream()?;
    let is_on_stream = request.stream.is_some();
    if work.is_null() && !group::is_open() {
        // SAFETY: as in `collective`. On a device this returns when the operation has been put into its stream.
        return unsafe { joined.comm.run(request).map(drop) };
    }
    // SAFETY: as in `collective`.
    let started = unsafe { joined.comm.start(request, None)? };
    if work.is_null() {
        group::add(started, is_on_stream);
    } else {
        output("work", work)?.write(work::handle(started)?);
    }
    Ok(())
}

/// A send or a receive.
pub(crate) struct Message {
    pub(crate) dtype: DataType,
    pub(crate) buffer: Buffer,
    pub(crate) peer: Peer,
    pub(crate) tag: u64,
}

#[derive(Clone, Copy)]
pub(crate) enum Peer {
    To(Rank),
    From(Option<Rank>),
}

impl Message {
    /// Starts it.
    pub(crate) fn start(self, joined: &Joined, options: &Checked) -> Result<unisono::Work> {
        self.start_in(joined, options.timeout, options.device_stream()?)
    }

    fn start_in(
        self,
        joined: &Joined,
        timeout: Option<Duration>,
        stream: Option<DeviceStream>,
    ) -> Result<unisono::Work> {
        let how = PointToPoint {
            timeout,
            stream,
            takes_shorter: true,
            ..PointToPoint::default()
        };
        let memory = self.buffer.memory();
        // SAFETY: as in `collective`.
        unsafe {
            match self.peer {
                Peer::To(to) => joined.comm.send(self.dtype, memory, to, self.tag, how),
                Peer::From(from) => joined.comm.receive(self.dtype, memory, from, self.tag, how),
            }
        }
    }

    /// Makes it a part of the group that is open.
    pub(crate) fn add_to_group(
        self,
        comm: *const Communicator,
        joined: &Joined,
        options: &Checked,
    ) -> Result<()> {
        let stream = options.device_stream()?;
        let timeout = options.timeout;
        if stream.is_some() && matches!(self.peer, Peer::From(_)) {
            group::add_last(Receive {
                comm,
                message: self,
                timeout,
                stream,
            });
        } else {
            let is_on_stream = stream.is_some();
            group::add(self.start_in(joined, timeout, stream)?, is_on_stream);
        }
        Ok(())
    }

    /// Carries it out, or puts it into its stream. Returns which message came, of a receive; waits for its source on a
    /// stream only if that is `asked` for and not known otherwise.
    #[inline]
    pub(crate) fn run(
        self,
        joined: &Joined,
        options: &Checked,
        asked: bool,
    ) -> Result<Option<Received>> {
        if options.have_stream() {
            return self.enqueue(joined, options, asked);
        }
        let Self {
            dtype,
            buffer,
            peer,
            tag,
        } = self;
        // SAFETY: as in `collective`.
        unsafe {
            match peer {
                Peer::To(to) => joined
                    .comm
                    .send_now(dtype, buffer.memory(), (to, tag), options.timeout)
                    .map(|()| None),
                Peer::From(from) => joined
                    .comm
                    .receive_now(dtype, buffer.memory(), (from, tag), options.timeout)
                    .map(Some),
            }
        }
    }

    /// Carries out this send and that receive at the same time, or puts them into their stream in this order; as
    /// [`Message::run`].
    pub(crate) fn exchange(
        self,
        received: Self,
        joined: &Joined,
        options: &Checked,
        asked: bool,
    ) -> Result<Option<Received>> {
        let (Peer::To(to), Peer::From(from)) = (self.peer, received.peer) else {
            return Err(Error::internal("an exchange of two messages of one kind"));
        };
        if options.have_stream() {
            self.start(joined, options)?;
            return received.enqueue(joined, options, asked);
        }
        let outgoing = (self.buffer.memory(), to, self.tag);
        let incoming = (received.buffer.memory(), from, received.tag);
        // SAFETY: as in `collective`.
        unsafe {
            joined
                .comm
                .send_receive_now(self.dtype, outgoing, incoming, options.timeout)
                .map(Some)
        }
    }

    fn enqueue(self, joined: &Joined, options: &Checked, asked: bool) -> Result<Option<Received>> {
        let Self { dtype, peer, .. } = self;
        // A stream takes a message of exactly this length.
        let bytes = self.buffer.memory().len();
        let started = self.start(joined, options)?;
        Ok(match peer {
            Peer::From(None) if asked => {
                started.wait(None)?;
                started.received()
            }
            // Without a question for it, any number stands for the source.
            Peer::From(from) => Some(Received {
                source: from.unwrap_or_default(),
                bytes,
                dtype,
            }),
            Peer::To(_) => None,
        })
    }
}

/// A receive in a stream, held back to the end of its group: the stream waits for the message, and what the group sends
/// must not come after that.
pub(crate) struct Receive {
    comm: *const Communicator,
    message: Message,
    timeout: Option<Duration>,
    stream: Option<DeviceStream>,
}

impl Receive {
    /// Starts it.
    pub(crate) fn start(self) -> Result<unisono::Work> {
        let joined = COMMUNICATORS.find(self.comm)?;
        self.message.start_in(&joined, self.timeout, self.stream)
    }
}

/// A tag that C gives. Those from 2^63 on are the runtime's.
pub(crate) fn tag(tag: u64) -> Result<u64> {
    if i64::try_from(tag).is_err() {
        return Err(Error::invalid(format!(
            "the tag {tag} is more than INT64_MAX"
        )));
    }
    Ok(tag)
}
