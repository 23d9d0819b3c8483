//! Point to point: send and receive, to be awaited or in the calling thread.

use std::time::Duration;

use super::{Communicator, Work};
use crate::buffer::Memory;
use crate::device;
use crate::engine::{Inbound, Outbound, PointToPoint, Received};
use crate::error::Result;
use crate::types::{DataType, Rank};

impl Communicator {
    /// Starts to send `memory`, whole elements of `dtype`, to rank `to`.
    ///
    /// The message meets the first receive on `to` that asks for this rank and `tag`, in the order of sending. It
    /// is complete when the memory may be used again, which does not mean that it has been received.
    ///
    /// # Errors
    /// As [`Communicator::start`].
    ///
    /// # Safety
    /// As for [`Communicator::start`].
    pub unsafe fn send(
        &self,
        dtype: DataType,
        memory: Memory,
        to: Rank,
        tag: u64,
        options: PointToPoint,
    ) -> Result<Work> {
        match &self.mask {
            None => self.send_in_group(dtype, memory, (to, tag), options),
            Some(mask) => {
                let (to, options) = (mask.place(to)?, mask.options(options));
                mask.here(self.send_in_group(dtype, memory, (to, tag), options))
            }
        }
    }

    #[inline]
    fn send_in_group(
        &self,
        dtype: DataType,
        memory: Memory,
        (to, tag): (Rank, u64),
        options: PointToPoint,
    ) -> Result<Work> {
        if options.stream.is_some() {
            let started = self.devices.send(dtype, &memory, (to, tag), options)?;
            return Ok(self.on_device(started));
        }
        device::refuse_memory(&memory, "buffer")?;
        let state = self.group.send(dtype, memory, (to, tag), options)?;
        Ok(self.on_host(state))
    }

    /// Starts to receive into `memory`, whole elements of `dtype`, from rank `from`, or from any (`None`). The
    /// message must have exactly this type and length, or with `takes_shorter` at most this length.
    ///
    /// # Errors
    /// As [`Communicator::start`]. A message of another type or length is a `Mismatch`, fatal on both sides.
    ///
    /// # Safety
    /// As for [`Communicator::start`].
    pub unsafe fn receive(
        &self,
        dtype: DataType,
        memory: Memory,
        from: Option<Rank>,
        tag: u64,
        options: PointToPoint,
    ) -> Result<Work> {
        match &self.mask {
            None => self.receive_in_group(dtype, memory, (from, tag), options),
            Some(mask) => {
                let (from, options) = (mask.place_of_any(from)?, mask.options(options));
                mask.here(self.receive_in_group(dtype, memory, (from, tag), options))
            }
        }
    }

    #[inline]
    fn receive_in_group(
        &self,
        dtype: DataType,
        memory: Memory,
        (from, tag): (Option<Rank>, u64),
        options: PointToPoint,
    ) -> Result<Work> {
        if options.stream.is_some() {
            let started = self.devices.receive(dtype, &memory, (from, tag), options)?;
            return Ok(self.on_device(started));
        }
        device::refuse_memory(&memory, "buffer")?;
        let state = self.group.receive(dtype, memory, (from, tag), options)?;
        Ok(self.on_host(state))
    }

    /// Ends a receive that no message has met with `Aborted`. Returns whether it did; one that has met its message goes on.
    pub(crate) fn cancel_receive(&self, work: &Work) -> bool {
        self.group.cancel_receive(&work.state)
    }

    /// As [`Communicator::send`], in the calling thread, until the memory may be used again.
    ///
    /// # Errors
    /// As [`Communicator::send`], and whatever ends the operation.
    ///
    /// # Safety
    /// As for [`Communicator::start`]; the operation has completed when this returns.
    pub unsafe fn send_now(
        &self,
        dtype: DataType,
        memory: Memory,
        (to, tag): (Rank, u64),
        timeout: Option<Duration>,
    ) -> Result<()> {
        device::refuse_memory(&memory, "buffer")?;
        let mut outgoing = Outbound {
            dtype,
            memory,
            to,
            tag,
        };
        if let Some(mask) = &self.mask {
            outgoing.to = mask.place(to)?;
            return mask.after(|| self.group.send_now(outgoing, timeout));
        }
        self.group.send_now(outgoing, timeout)
    }

    /// As [`Communicator::receive`], in the calling thread, until the message has come, which may be shorter than
    /// `memory`: the rest stays as it is.
    ///
    /// # Errors
    /// As [`Communicator::receive`], and whatever ends the operation.
    ///
    /// # Safety
    /// As for [`Communicator::start`]; the operation has completed when this returns.
    pub unsafe fn receive_now(
        &self,
        dtype: DataType,
        memory: Memory,
        (from, tag): (Option<Rank>, u64),
        timeout: Option<Duration>,
    ) -> Result<Received> {
        device::refuse_memory(&memory, "buffer")?;
        let mut incoming = Inbound {
            dtype,
            memory,
            from,
            tag,
        };
        if let Some(mask) = &self.mask {
            incoming.from = mask.place_of_any(from)?;
            let received = mask.after(|| self.group.receive_now(incoming, timeout))?;
            return Ok(mask.numbered(received));
        }
        self.group.receive_now(incoming, timeout)
    }

    /// Looks for the first message from rank `from`, or from any, with this tag, for at most `timeout` (`None`: as long as
    /// it takes), and leaves it to the next receive that asks for it. Returns `None` if there is none by then.
    ///
    /// Two threads that probe find the same message. One on its way to a receive is not found.
    ///
    /// # Errors
    /// As [`Communicator::receive`]; no timeout.
    pub fn probe(
        &self,
        from: Option<Rank>,
        tag: u64,
        timeout: Option<Duration>,
    ) -> Result<Option<Received>> {
        let Some(mask) = &self.mask else {
            return self.group.probe_now((from, tag), timeout);
        };
        let from = mask.place_of_any(from)?;
        let found = mask.after(|| self.group.probe_now((from, tag), timeout))?;
        Ok(found.map(|found| mask.numbered(found)))
    }

    /// Sends `outgoing` to a rank and receives `incoming` from one, the same or another, at the same time and in the
    /// calling thread: MPI's `Sendrecv`. Each is the memory, the other rank and the tag; the two must not overlap. The
    /// message that comes may be shorter than its memory.
    ///
    /// Ranks that all exchange with their neighbours cannot wait for each other in a ring, as those that all send
    /// first may.
    ///
    /// # Errors
    /// As [`Communicator::send`] and [`Communicator::receive`], and whatever ends them.
    ///
    /// # Safety
    /// As for [`Communicator::start`]; both operations have completed when this returns.
    pub unsafe fn send_receive_now(
        &self,
        dtype: DataType,
        (outgoing, to, send_tag): (Memory, Rank, u64),
        (incoming, from, receive_tag): (Memory, Option<Rank>, u64),
        timeout: Option<Duration>,
    ) -> Result<Received> {
        device::refuse_memory(&outgoing, "buffer to send")?;
        device::refuse_memory(&incoming, "buffer to receive into")?;
        let mut outgoing = Outbound {
            dtype,
            memory: outgoing,
            to,
            tag: send_tag,
        };
        let mut incoming = Inbound {
            dtype,
            memory: incoming,
            from,
            tag: receive_tag,
        };
        if let Some(mask) = &self.mask {
            (outgoing.to, incoming.from) = (mask.place(to)?, mask.place_of_any(from)?);
            let received = mask.after(|| self.group.exchange_now(outgoing, incoming, timeout))?;
            return Ok(mask.numbered(received));
        }
        self.group.exchange_now(outgoing, incoming, timeout)
    }
}
