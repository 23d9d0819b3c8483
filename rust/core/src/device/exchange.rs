//! A message between two ranks, from the call to the stream: checked, with memory made ready for it while that may be, and
//! enqueued or captured.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::buffer::Memory;
use crate::engine::{PointToPoint, Received, WorkState};
use crate::error::{Error, Result};
use crate::transport::cuda::depot::Slot;
use crate::transport::cuda::driver::Stream;
use crate::types::{Collective, DataType, Rank};

use super::attendant;
use super::bounce::{lacks_room, make_room};
use super::copies::check_memory;
use super::depots::is_long;
use super::lanes::check_capture;
use super::message::Wanted;
use super::note::FIRST_INTERNAL_TAG;
use super::pause::pause;
use super::state::DeviceGroup;
use super::stillness::still;
use super::words::Word;

/// Where a message comes from or goes to.
#[derive(Clone, Copy)]
enum End {
    To(Rank),
    From(Option<Rank>),
}

impl End {
    fn collective(self) -> Collective {
        match self {
            Self::To(_) => Collective::Send,
            Self::From(_) => Collective::Recv,
        }
    }
}

impl DeviceGroup {
    /// Enqueues a send.
    ///
    /// # Errors
    /// As [`DeviceGroup::submit`].
    pub(super) fn send(
        &self,
        dtype: DataType,
        memory: &Memory,
        (to, tag): (Rank, u64),
        options: PointToPoint,
    ) -> Result<Arc<WorkState>> {
        self.cpu.check_rank(to, "send to")?;
        self.message(End::To(to), (dtype, memory, tag), options)
    }

    /// Enqueues a receive.
    ///
    /// # Errors
    /// As [`DeviceGroup::submit`].
    pub(super) fn receive(
        &self,
        dtype: DataType,
        memory: &Memory,
        (from, tag): (Option<Rank>, u64),
        options: PointToPoint,
    ) -> Result<Arc<WorkState>> {
        if let Some(from) = from {
            self.cpu.check_rank(from, "receive from")?;
        }
        self.message(End::From(from), (dtype, memory, tag), options)
    }

    fn message(
        &self,
        end: End,
        (dtype, memory, tag): (DataType, &Memory, u64),
        options: PointToPoint,
    ) -> Result<Arc<WorkState>> {
        let collective = end.collective();
        let named = options
            .stream
            .ok_or_else(|| Error::internal("a message of a device without a stream"))?;
        check(collective, (dtype, memory, tag))?;
        let entered = self.device.enter()?;
        let (stream, captured) = Stream::of_now(named)?;
        check_memory(self.device, memory, "buffer")?;
        self.device.memory_operations()?;
        self.check_alive()?;
        let is_long = is_long(&self.cpu, memory.len());
        let slot = match captured {
            true => None,
            false => self.make_room_for(end, memory.len(), is_long),
        };
        let _call = self.come_in()?;
        self.check_alive()?;
        let timeout = options.timeout.unwrap_or_else(|| self.parent.timeout());
        let work = WorkState::new(collective, 0, (Instant::now(), timeout), options.completion);
        let work = Arc::new(work);
        let wanted = Wanted {
            dtype,
            memory,
            tag,
            timeout,
            work: Arc::clone(&work),
            is_long,
        };
        if captured {
            return self.capture(end, &wanted, &stream);
        }
        let enqueued = match end {
            End::To(to) => {
                let to = (to, slot);
                self.messages.send(wanted, to, &stream, attendant::hurry)
            }
            End::From(from) => {
                let host = (&stream, &*self.cpu, self.words.address(Word::Dead));
                self.messages.receive(wanted, from, host, attendant::hurry)
            }
        };
        drop(entered);
        if let Err(error) = enqueued {
            // A receive that the host knows of would take another one's message.
            if error.code.is_fatal() || self.messages.has(&work) {
                self.fail(error.clone());
            }
            return Err(error);
        }
        self.parent.keep_record(&work);
        attendant::hurry();
        Ok(work)
    }

    /// Has a message become part of a graph.
    fn capture(&self, end: End, wanted: &Wanted, stream: &Stream) -> Result<Arc<WorkState>> {
        let work = Arc::clone(&wanted.work);
        let (peer, receives) = match end {
            End::To(to) => (Some(to), false),
            End::From(from) => (from, true),
        };
        let peer = check_capture(&self.cpu, end.collective(), peer)?;
        let lanes = &self.messages.lanes;
        let host = (&*self.cpu, &self.messages.depots);
        let captured = lanes
            .capture(wanted, (peer, receives), (stream, &self.words), host)
            .inspect_err(|error| {
                if error.code.is_fatal() {
                    self.fail(error.clone());
                }
            })?;
        // The peer counts on it.
        captured.inspect_err(|error| self.fail(error.clone()))?;
        if receives {
            work.set_received(Received {
                source: peer,
                bytes: wanted.memory.len(),
                dtype: wanted.dtype,
            });
        }
        self.captured.store(true, Ordering::Relaxed);
        self.parent.end(&work, Ok(()));
        self.parent.keep_record(&work);
        attendant::hurry();
        Ok(work)
    }

    /// Has memory ready for a message, as far as that is possible while no stream waits for a peer. Returns where a long one
    /// may be left.
    fn make_room_for(&self, end: End, bytes: usize, is_long: bool) -> Option<Slot> {
        let depots = &self.messages.depots;
        if is_long && depots.lacks_something(&self.cpu) {
            self.await_stillness(depots.patience(), || depots.prepare(&self.cpu));
        }
        if let End::To(to) = end
            && is_long
            && let Some(slot) = depots.take(to, bytes)
        {
            return Some(slot);
        }
        if lacks_room(self.device, bytes)
            && let Some(_still) = still()
        {
            make_room(self.device, bytes);
        }
        None
    }

    /// Does something while nothing is under way in the process, if there is such a moment at once or, if it is to be waited
    /// for, until then.
    pub(super) fn await_stillness(&self, until: Option<Instant>, act: impl FnOnce()) {
        let mut looks = 0;
        loop {
            if let Some(_still) = still() {
                return act();
            }
            if self.failure.get().is_some() || until.is_none_or(|until| Instant::now() >= until) {
                return;
            }
            pause(&mut looks);
        }
    }
}

/// Refuses what is no message.
fn check(collective: Collective, (dtype, memory, tag): (DataType, &Memory, u64)) -> Result<()> {
    if !memory.len().is_multiple_of(dtype.size()) {
        return Err(Error::invalid(format!(
            "{collective}: {} bytes are not a whole number of {dtype} elements",
            memory.len()
        )));
    }
    if tag >= FIRST_INTERNAL_TAG {
        return Err(Error::invalid(format!(
            "{collective}: tag {tag} is too large for messages of device memory, whose tags are less than 2^62"
        )));
    }
    Ok(())
}
