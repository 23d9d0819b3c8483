//! Operations on device memory, in the order of the caller's streams.
//!
//! A [`Devices`] belongs to a communicator and has a [`DeviceGroup`] for each device that this rank uses with it. A call
//! enqueues the whole operation on the caller's stream and returns. Ranks whose devices read each other's memory go the
//! *direct* way: they meet on their streams by words in host memory, one kernel reads what all of them have put into
//! their windows. All others go the *staged* way, through host memory and the engine, as do short collectives of processes that
//! share a device. So do messages between two ranks, unless they are long ([`depots`]), or part of a graph ([`lanes`]).
//!
//! Collectives of one communicator on several streams come one after the other, as they were called; those of one graph
//! that is being captured belong on one stream, or on streams that the capturer has put in order. Ranks of one process
//! that share a device need a stream each.

mod attendant;
mod bounce;
mod closing;
mod commands;
mod copies;
mod depots;
mod direct;
mod disposal;
mod exchange;
mod formation;
mod group;
mod growth;
mod lanes;
mod level;
mod message;
mod messages;
mod note;
mod patience;
mod pause;
mod places;
mod replay;
mod staged;
mod state;
mod stillness;
mod watch;
mod words;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::buffer::Memory;
use crate::engine::{Completion, Group, PointToPoint, Request, WorkState};
use crate::error::{Code, Error, Result};
use crate::locks::Mutex;
use crate::transport::cuda::driver::only_on_device;
use crate::types::{DataType, Rank};

pub(crate) use self::state::DeviceGroup;
pub(crate) use self::stillness::still;

/// An operation, and the group that it is under way in.
pub(crate) type Started = (Arc<DeviceGroup>, Arc<WorkState>);

/// The device groups of a communicator, in the order in which this rank began to use their devices. Ranks that use
/// several devices with one communicator begin with them in the same order.
pub(crate) struct Devices {
    parent: Arc<Group>,
    groups: Mutex<Groups>,
}

#[derive(Default)]
struct Groups {
    all: Vec<Arc<DeviceGroup>>,
    /// None is added any more.
    is_closed: bool,
}

impl Devices {
    pub(crate) fn new(parent: &Arc<Group>) -> Self {
        Self {
            parent: Arc::clone(parent),
            groups: Mutex::default(),
        }
    }

    fn group(&self, device: u32) -> Result<Arc<DeviceGroup>> {
        self.parent.check_alive()?;
        let mut groups = self.groups.lock();
        if let Some(found) = groups.all.iter().find(|group| group.number() == device) {
            return Ok(Arc::clone(found));
        }
        if groups.is_closed {
            return Err(Error::invalid("this communicator has been closed"));
        }
        let group = DeviceGroup::new(&self.parent, device, groups.all.len())?;
        groups.all.push(Arc::clone(&group));
        Ok(group)
    }

    /// None in a forked child, in which the lock may be taken for ever.
    fn all(&self) -> Vec<Arc<DeviceGroup>> {
        match self.parent.home.check() {
            Ok(()) => self.groups.lock().all.clone(),
            Err(_) => Vec::new(),
        }
    }

    /// Enqueues a collective.
    ///
    /// # Errors
    /// `InvalidArgument` and `Unsupported` before anything is enqueued; the first cause of a group that is dead.
    pub(crate) fn submit(
        &self,
        request: Request,
        completion: Option<Completion>,
    ) -> Result<Started> {
        let group = self.group(device_of(request.stream)?)?;
        let work = group.submit(request, completion)?;
        Ok((group, work))
    }

    /// Enqueues a send.
    ///
    /// # Errors
    /// As [`Devices::submit`].
    pub(crate) fn send(
        &self,
        dtype: DataType,
        memory: &Memory,
        place: (Rank, u64),
        options: PointToPoint,
    ) -> Result<Started> {
        let group = self.group(device_of(options.stream)?)?;
        let work = group.send(dtype, memory, place, options)?;
        Ok((group, work))
    }

    /// Enqueues a receive.
    ///
    /// # Errors
    /// As [`Devices::submit`].
    pub(crate) fn receive(
        &self,
        dtype: DataType,
        memory: &Memory,
        place: (Option<Rank>, u64),
        options: PointToPoint,
    ) -> Result<Started> {
        let group = self.group(device_of(options.stream)?)?;
        let work = group.receive(dtype, memory, place, options)?;
        Ok((group, work))
    }

    /// Waits for the collectives that are under way on the devices.
    ///
    /// # Errors
    /// The first failure.
    pub(crate) fn drain(&self) -> Result<()> {
        self.all().iter().try_for_each(|group| group.drain())
    }

    /// Waits until everything on the devices has ended, messages too, for at most `timeout`.
    ///
    /// # Errors
    /// The first failure; `Timeout` when the time is up first.
    pub(crate) fn finish(&self, timeout: Option<Duration>) -> Result<()> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.all().iter().try_for_each(|group| group.finish(until))
    }

    /// Whether no device was used.
    pub(crate) fn is_empty(&self) -> bool {
        !self.parent.home.is_here() || self.groups.lock().all.is_empty()
    }

    /// Collectives on all devices.
    pub(crate) fn sequence(&self) -> u64 {
        self.all().iter().map(|group| group.sequence()).sum()
    }

    /// Ends everything under way.
    pub(crate) fn abort(&self, reason: &str) {
        if !self.parent.home.is_here() {
            return;
        }
        for group in self.all() {
            group.fail(Error::new(
                Code::Aborted,
                format!("{} aborted the group: {reason}", self.parent.own_number()),
            ));
        }
    }

    /// Leaves in good order.
    pub(crate) fn close(&self) {
        if !self.parent.home.is_here() {
            return;
        }
        self.groups.lock().is_closed = true;
        for group in self.all() {
            group.close();
        }
    }

    /// Their resources: `device_bytes`, `pinned_bytes`, and `device_operations` under way.
    pub(crate) fn memory(&self) -> Vec<(&'static str, u64)> {
        let mut sums = (0, 0, 0);
        for group in self.all() {
            let (device, host, under_way) = group.memory();
            sums = (sums.0 + device, sums.1 + host, sums.2 + under_way);
        }
        vec![
            ("device_bytes", sums.0),
            ("pinned_bytes", sums.1),
            ("device_operations", sums.2),
        ]
    }
}

impl std::fmt::Debug for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Devices").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for DeviceGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceGroup(device {})", self.number())
    }
}

/// Refuses memory of a device that was given without a stream, where that is known.
///
/// # Errors
/// `InvalidArgument`, with what to do.
pub(crate) fn refuse_device_memory(request: &Request) -> Result<()> {
    for (what, memory) in [("input", &request.input), ("output", &request.output)] {
        if let Some(memory) = memory {
            refuse_memory(memory, what)?;
        }
    }
    Ok(())
}

/// As [`refuse_device_memory`], of one buffer.
///
/// # Errors
/// As [`refuse_device_memory`].
pub(crate) fn refuse_memory(memory: &Memory, what: &str) -> Result<()> {
    if memory.is_empty() {
        return Ok(());
    }
    let (address, _) = memory.place(0, 1);
    match only_on_device(address as u64) {
        None => Ok(()),
        Some(device) => Err(Error::invalid(format!(
            "the {what} is memory of device {device}, but no stream was given: give the stream in whose order the \
             operation is to happen"
        ))),
    }
}

/// Yields, or sleeps for a moment, between two looks of a caller that waits for operations of several groups.
pub(crate) fn pause(looks: &mut u32) {
    pause::pause(looks);
}

/// How long a look around in another group may take while a device's operation is awaited.
pub(crate) const LONGEST_LOOK_AROUND: Duration = Duration::from_micros(50);

fn device_of(stream: Option<crate::types::DeviceStream>) -> Result<u32> {
    stream
        .map(|stream| stream.device)
        .ok_or_else(|| Error::internal("an operation on a device without a stream"))
}
