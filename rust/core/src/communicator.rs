//! The group and its collectives: what the three doors call.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::buffer::Memory;
use crate::config::Config;
use crate::device::{self, DeviceGroup, Devices};
use crate::engine::{Completion, Group, Inbound, Outbound, PointToPoint, Request, WorkState};
use crate::error::{Code, Error, Result};
use crate::fence::{self, contained};
use crate::fork::{self, Own};
use crate::heap;
#[cfg(test)]
use crate::plan::cost::Rounded;
use crate::rendezvous::store::Store;
use crate::types::{Collective, DataType, Rank};

/// How long a wait for operations of several groups stays with one of them.
const TURN: Duration = Duration::from_micros(200);

/// A group of ranks that communicate.
///
/// All ranks of a group call the same collectives in the same order; point-to-point operations are matched by
/// rank and tag instead. Several threads may use one communicator at once, as long as the order of collectives
/// is the same everywhere. After an error that is fatal ([`crate::error::Code::is_fatal`]) every further
/// operation fails with the first cause.
///
/// Dropping the communicator closes it in good order.
#[derive(Debug)]
pub struct Communicator {
    group: Own<Arc<Group>>,
    devices: Own<Devices>,
}

impl Communicator {
    #[cfg(any(test, fuzzing))]
    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// Forms a group of `world` ranks that meet through `store`. Blocks until all have come.
    ///
    /// # Errors
    /// `InvalidArgument` for a rank out of range; `Timeout` naming the ranks that did not come; `Mismatch` when
    /// ranks disagree on the world size or on settings, or two claim one number; `System` for the rest.
    pub fn join(store: &dyn Store, rank: Rank, world: usize, config: Config) -> Result<Self> {
        heap::configure(&config);
        Ok(Self::new(Group::join(store, rank, world, config)?))
    }

    /// `world` communicators inside this process, one per thread that plays a rank. For tests and tools.
    ///
    /// # Errors
    /// `System` when descriptors run out.
    pub fn local(world: usize, config: &Config) -> Result<Vec<Self>> {
        heap::configure(config);
        Ok(Group::local(world, config)?
            .into_iter()
            .map(Self::new)
            .collect())
    }

    /// As [`local`](Self::local), with algorithms chosen by `costs` and not by those of this machine.
    #[cfg(test)]
    pub(crate) fn local_at(world: usize, config: &Config, costs: Rounded) -> Result<Vec<Self>> {
        heap::configure(config);
        let groups = Group::local_at(world, config, costs)?;
        Ok(groups.into_iter().map(Self::new).collect())
    }

    fn new(group: Arc<Group>) -> Self {
        Self {
            devices: Own::new(Devices::new(&group)),
            group: Own::new(group),
        }
    }

    /// This process's number in the group.
    pub fn rank(&self) -> Rank {
        self.group.rank()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.group.world()
    }

    /// Starts a collective and returns at once. `completion` is called when it ends, on a thread made for that.
    ///
    /// # Errors
    /// `InvalidArgument` and `Unsupported` before anything is sent; the first cause of a group that is dead. The
    /// completion is then not called.
    ///
    /// # Safety
    /// The request's memory keeps the promise of [`Memory::from_raw_parts`] until the operation has completed,
    /// also when the returned [`Work`] is dropped.
    pub unsafe fn start(&self, request: Request, completion: Option<Completion>) -> Result<Work> {
        if request.stream.is_some() {
            let started = self.devices.submit(request, completion)?;
            return Ok(self.on_device(started));
        }
        device::refuse_device_memory(&request)?;
        let state = self.group.submit(request, completion, true)?;
        Ok(self.on_host(state))
    }

    /// As [`Communicator::start`], for a caller that drives the operation itself: it calls [`Work::wait`] at once.
    /// Until then, and between two calls of it, it can be that no thread drives the operation on this rank.
    ///
    /// # Errors
    /// As [`Communicator::start`].
    ///
    /// # Safety
    /// As for [`Communicator::start`].
    pub unsafe fn begin(&self, request: Request) -> Result<Work> {
        if request.stream.is_some() {
            let started = self.devices.submit(request, None)?;
            return Ok(self.on_device(started));
        }
        self.prepare(&request)?;
        let state = self.group.begin_now(request)?;
        Ok(self.on_host(state))
    }

    /// Carries out a collective in the calling thread. Returns its number in the group. On device memory it returns when
    /// the operation is enqueued. A barrier without a stream comes after the collectives that are under way on devices here.
    ///
    /// # Errors
    /// As [`Communicator::start`], and whatever ends the operation.
    ///
    /// # Safety
    /// As for [`Communicator::start`]; the operation has completed when this returns.
    pub unsafe fn run(&self, request: Request) -> Result<u64> {
        if request.stream.is_some() {
            return Ok(self.devices.submit(request, None)?.1.sequence);
        }
        self.prepare(&request)?;
        self.group.run(request)
    }

    /// What comes before an operation on the host that the caller drives.
    fn prepare(&self, request: &Request) -> Result<()> {
        if request.collective == Collective::Barrier && !self.devices.is_empty() {
            self.devices.drain()?;
        }
        device::refuse_device_memory(request)
    }

    fn on_host(&self, state: Arc<WorkState>) -> Work {
        Work {
            group: self.group.clone(),
            device: None,
            state,
        }
    }

    fn on_device(&self, (device, state): device::Started) -> Work {
        Work {
            group: self.group.clone(),
            device: Some(Own::new(device)),
            state,
        }
    }

    /// How long `request` would take, without carrying it out: its plans are simulated with typical costs of memory
    /// and networks.
    ///
    /// # Errors
    /// As [`Communicator::start`] for a request that would be refused.
    pub fn estimate(&self, request: &Request) -> Result<Duration> {
        self.group.estimate(request)
    }

    /// How long a message of `bytes` to or from `peer` would take, as [`Communicator::estimate`].
    pub fn estimate_message(&self, peer: Option<Rank>, bytes: usize) -> Duration {
        self.group.estimate_message(peer, bytes)
    }

    /// What the communicator holds on this rank: `links` that are open, `link_bytes` and `scratch_bytes` of memory,
    /// `operations` under way, `plans` kept; `device_bytes` of device memory and `pinned_bytes` of the host's for them, and
    /// `device_operations` under way there.
    pub fn memory(&self) -> Vec<(&'static str, u64)> {
        let mut memory = self.group.memory();
        memory.extend(self.devices.memory());
        memory
    }

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
        if options.stream.is_some() {
            let started = self.devices.send(dtype, &memory, (to, tag), options)?;
            return Ok(self.on_device(started));
        }
        device::refuse_memory(&memory, "buffer")?;
        let state = self.group.send(dtype, memory, (to, tag), options)?;
        Ok(self.on_host(state))
    }

    /// Starts to receive into `memory`, whole elements of `dtype`, from rank `from`, or from any (`None`). The
    /// message must have exactly this type and length.
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
        if options.stream.is_some() {
            let started = self.devices.receive(dtype, &memory, (from, tag), options)?;
            return Ok(self.on_device(started));
        }
        device::refuse_memory(&memory, "buffer")?;
        let state = self.group.receive(dtype, memory, (from, tag), options)?;
        Ok(self.on_host(state))
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
        let outgoing = Outbound {
            dtype,
            memory,
            to,
            tag,
        };
        self.group.send_now(outgoing, timeout)
    }

    /// As [`Communicator::receive`], in the calling thread, until the message has come. Returns the rank it came from.
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
    ) -> Result<Rank> {
        device::refuse_memory(&memory, "buffer")?;
        let incoming = Inbound {
            dtype,
            memory,
            from,
            tag,
        };
        self.group.receive_now(incoming, timeout)
    }

    /// Sends `outgoing` to a rank and receives `incoming` from one, the same or another, at the same time and in the
    /// calling thread: MPI's `Sendrecv`. Each is the memory, the other rank and the tag; the two must not overlap. Returns
    /// the rank that the message came from.
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
    ) -> Result<Rank> {
        device::refuse_memory(&outgoing, "buffer to send")?;
        device::refuse_memory(&incoming, "buffer to receive into")?;
        let outgoing = Outbound {
            dtype,
            memory: outgoing,
            to,
            tag: send_tag,
        };
        let incoming = Inbound {
            dtype,
            memory: incoming,
            from,
            tag: receive_tag,
        };
        self.group.exchange_now(outgoing, incoming, timeout)
    }

    /// Blocks until every rank has called it, like [`Request::barrier`], and on failure rank 0 names every rank
    /// that is missing, not only the first.
    ///
    /// # Errors
    /// `Timeout` naming the missing ranks.
    pub fn monitored_barrier(&self, timeout: Duration, report_all: bool) -> Result<()> {
        self.group.monitored_barrier(timeout, report_all)
    }

    /// Splits the group: ranks that give the same `color` form a new group, numbered by `key` and then by rank.
    /// `None` for no group. Every rank of this group must call it.
    ///
    /// # Errors
    /// As a collective.
    pub fn split(&self, color: Option<i64>, key: i64) -> Result<Option<Self>> {
        Ok(self.group.split(color, key)?.map(Self::new))
    }

    /// The group of some of this group's ranks, numbered in the order of `ranks`; `None` where this rank is not
    /// among them. Its members all call it with the same `ranks` and `label`, and never twice with the same two; the
    /// others need not. Nothing is sent before the first operation.
    ///
    /// # Errors
    /// `InvalidArgument` for a rank that is out of range or there twice; the first cause of a group that is dead.
    pub fn subgroup(&self, ranks: &[Rank], label: &[u8]) -> Result<Option<Self>> {
        // Apart from the labels that `split` makes.
        let label = [b"subgroup".as_slice(), label].concat();
        Ok(self.group.subgroup(ranks, &label)?.map(Self::new))
    }

    /// How long an operation may take from now on, unless its request says otherwise. Zero: for ever.
    pub fn set_timeout(&self, timeout: Duration) {
        self.group.set_timeout(timeout);
    }

    /// How long an operation may take.
    pub fn timeout(&self) -> Duration {
        self.group.timeout()
    }

    /// The first cause, once the group is dead.
    pub fn error(&self) -> Option<Error> {
        self.group.error()
    }

    /// The number of the last collective that was started here. Those on device memory are counted apart, and added.
    pub fn sequence(&self) -> u64 {
        self.group.sequence() + self.devices.sequence()
    }

    /// Runs `body`, a call of a door's, with this communicator. A panic in it becomes an `Internal` error; and such an
    /// error is the end of the communicator: after a defect no rank knows what the others wait for, so all of them learn
    /// of it.
    ///
    /// # Errors
    /// Those of `body`, and `Internal`.
    #[inline]
    pub fn guard<T>(&self, body: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        let result = fence::guard(|| body(self));
        if let Err(error) = &result {
            self.end_if_defect(error);
        }
        result
    }

    #[cold]
    fn end_if_defect(&self, error: &Error) {
        if error.code == Code::Internal {
            let _ = contained(|| self.abort(&error.message));
        }
    }

    /// Ends every operation on every rank with an error that gives `reason`.
    pub fn abort(&self, reason: &str) {
        self.devices.abort(reason);
        self.group.abort(reason);
    }

    /// Waits for the operations that are under way on devices, in their streams. Call it before closing, unless those
    /// operations are to fail.
    ///
    /// # Errors
    /// The first failure; `Timeout` when `timeout` runs out first, after which they go on.
    pub fn finish(&self, timeout: Option<Duration>) -> Result<()> {
        fork::check()?;
        self.devices.finish(timeout)
    }

    /// Leaves the group in good order: operations still under way here fail, data already sent stays readable for
    /// the others. Idempotent.
    pub fn close(&self) {
        self.devices.close();
        self.group.close();
    }

    /// What this rank was last in, one line per operation, oldest first: for reports.
    pub fn recent_operations(&self) -> Vec<String> {
        self.group.recent_operations()
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.close();
    }
}

/// An operation under way. Dropping it does not end the operation.
#[derive(Clone, Debug)]
pub struct Work {
    group: Own<Arc<Group>>,
    /// Of an operation on device memory.
    device: Option<Own<Arc<DeviceGroup>>>,
    state: Arc<WorkState>,
}

impl Work {
    /// Whether the operation has ended, well or not. One on device memory ends when its stream has got past it.
    pub fn is_done(&self) -> bool {
        self.result().is_some()
    }

    /// The result, if it has ended.
    pub fn result(&self) -> Option<Result<()>> {
        if self.state.result().is_none()
            && let Some(device) = &self.device
            && fork::check().is_ok()
        {
            device.settle();
        }
        self.state.result().cloned()
    }

    /// Waits for the end, driving the group from this thread meanwhile.
    ///
    /// # Errors
    /// The operation's own; or `Timeout` when `timeout` runs out first, after which the operation goes on.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        match &self.device {
            Some(device) => device.wait(&self.state, timeout),
            None => self.group.wait(&self.state, timeout),
        }
    }

    /// Waits until one of `works` has ended, well or not, driving their groups from this thread meanwhile. Returns which
    /// one and how; `None` when `timeout` runs out first, or there are none.
    ///
    /// # Errors
    /// `Aborted` in a forked child, which cannot wait.
    pub fn wait_any(
        works: &[&Self],
        timeout: Option<Duration>,
    ) -> Result<Option<(usize, Result<()>)>> {
        let Some(first) = works.first() else {
            return Ok(None);
        };
        if works.iter().any(|work| work.device.is_some()) {
            return Self::wait_any_by_looking(works, timeout);
        }
        let of = |group: &Arc<Group>| -> Vec<&WorkState> {
            let same = works.iter().filter(|work| Arc::ptr_eq(&work.group, group));
            same.map(|work| &*work.state).collect()
        };
        let one_group = of(&first.group);
        if one_group.len() == works.len() {
            return first.group.wait_any(&one_group, timeout);
        }
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        // Their groups take turns; what happens in the others meanwhile is the progress thread's business.
        for work in works.iter().cycle() {
            let ended = |(at, work): (usize, &&Self)| Some((at, work.result()?));
            if let Some(ended) = works.iter().enumerate().find_map(ended) {
                return Ok(Some(ended));
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                break;
            }
            work.group.wait_any(&of(&work.group), Some(TURN))?;
        }
        Ok(None)
    }

    /// As [`Work::wait_any`], where streams are awaited: no thread drives those.
    fn wait_any_by_looking(
        works: &[&Self],
        timeout: Option<Duration>,
    ) -> Result<Option<(usize, Result<()>)>> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut looks = 0;
        loop {
            let ended = |(at, work): (usize, &&Self)| Some((at, work.result()?));
            if let Some(ended) = works.iter().enumerate().find_map(ended) {
                return Ok(Some(ended));
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(None);
            }
            for work in works.iter().filter(|work| work.device.is_none()) {
                work.group.wait_any(&[&work.state], Some(device::TURN))?;
            }
            device::pause(&mut looks);
        }
    }

    /// What the group waits for on this rank now, in words, for reports of a wait that was given up.
    pub fn waits_for(&self) -> String {
        match &self.device {
            Some(device) => device.describe(),
            None => self.group.waits(),
        }
    }

    /// The rank a message came from, once a receive has completed.
    pub fn source(&self) -> Option<Rank> {
        self.state.source()
    }

    /// The operation's number in its group.
    pub fn sequence(&self) -> u64 {
        self.state.sequence
    }

    /// How long it took, once it has ended.
    pub fn duration(&self) -> Option<Duration> {
        self.state.duration()
    }

    /// `all_reduce #17`.
    pub fn name(&self) -> String {
        self.state.name()
    }
}
