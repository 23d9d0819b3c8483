//! The group and its collectives: what the three doors call.

mod bytes;
mod candidate;
mod clocks;
mod grow;
mod int8;
mod messages;
mod shrink;
mod work;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub use self::candidate::Candidate;
use self::grow::Growing;
use self::shrink::{Former, Numbers, Shrinking};
pub use self::work::Work;
use crate::config::Config;
use crate::device::{self, Devices};
use crate::engine::bootstrap::Comer;
use crate::engine::{Completion, Group, Mask, Request, WorkState};
use crate::error::{Code, Error, Result};
use crate::fence::{self, contained};
use crate::fork::Own;
use crate::heap;
use crate::locks::Mutex;
#[cfg(any(test, fuzzing))]
use crate::plan::cost::Rounded;
use crate::rendezvous::store::Store;
use crate::rendezvous::{Meeting, MeetingPlace};
use crate::types::{Collective, Rank};

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
    levels: Own<int8::Levels>,
    /// The agreement of the ranks that are left, once it has been called for.
    shrinking: Own<Mutex<Option<Arc<Shrinking>>>>,
    former: Option<Former>,
    /// The numbers of its ranks, if they have kept those of before.
    mask: Option<Arc<Mask>>,
    /// The ranks that came when it formed, if it formed by a meeting.
    newcomers: Vec<Rank>,
    /// Where its ranks met, and will meet others.
    place: Option<MeetingPlace>,
    /// How many met, with those that are gone since.
    met: usize,
    /// On the rank that serves the store: others may still need it to join.
    meeting: Arc<Mutex<Option<Meeting>>>,
    /// How often rank 0 has called for a vote on growing.
    votes: AtomicU64,
    /// How many windows there have been.
    windows: AtomicU64,
}

impl Communicator {
    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    pub(crate) fn shared_group(&self) -> Own<Arc<Group>> {
        self.group.clone()
    }

    /// A communicator of the same ranks for a window, numbered from 0, and their numbers here, where those are others.
    pub(crate) fn for_a_window(&self) -> Result<(Self, Option<Arc<Mask>>)> {
        self.group.check_alive()?;
        let label = self.windows.fetch_add(1, Ordering::Relaxed).to_le_bytes();
        let places: Vec<usize> = (0..self.group.world()).collect();
        let part = self
            .group
            .part_that_keeps_its_numbers(&places, &[b"window".as_slice(), &label].concat());
        let part = self
            .here(part)?
            .ok_or_else(|| Error::internal("not of its own group"))?;
        Ok((Self::new(part), self.mask.clone()))
    }

    /// Forms a group of `world` ranks that meet at `place`. Blocks until all have come. Where this process serves the store, it
    /// does so until all have joined or the communicator is closed.
    ///
    /// # Errors
    /// As [`MeetingPlace::open`] and [`join`](Self::join).
    pub fn meet(place: MeetingPlace, (rank, world): (Rank, usize), config: Config) -> Result<Self> {
        let meeting = place.open(rank, world, &config)?;
        let comm = Self::join(meeting.store(), rank, world, config)?;
        Ok(comm.at(place, meeting))
    }

    /// Forms a group of `world` ranks that meet through `store`. Blocks until all have come.
    ///
    /// # Errors
    /// `InvalidArgument` for a rank out of range; `Timeout` naming the ranks that did not come; `Mismatch` when
    /// ranks disagree on the world size or on settings, or two claim one number; `System` for the rest.
    pub fn join(store: &dyn Store, rank: Rank, world: usize, config: Config) -> Result<Self> {
        let patience = config.join_timeout.duration();
        Self::join_within(store, (rank, world), config, patience)
    }

    /// As [`join`](Self::join), of a group that is a part of a job: `numbers` are those of its ranks in the whole job, by which
    /// errors name them too.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn join_part(
        store: &dyn Store,
        (rank, numbers): (Rank, &[Rank]),
        config: Config,
    ) -> Result<Self> {
        heap::configure(&config);
        let place = (rank, numbers.len());
        let patience = config.join_timeout.duration();
        let comer = Comer {
            numbers: Some(numbers),
            ..Comer::new(place)
        };
        let group = Group::join(store, &comer, (config, patience))?;
        Self::met(group)
    }

    /// As [`join`](Self::join), but it may take as long as `patience`. Links that open later have the time of the setting.
    pub(crate) fn join_within(
        store: &dyn Store,
        (rank, world): (Rank, usize),
        config: Config,
        patience: Duration,
    ) -> Result<Self> {
        heap::configure(&config);
        let comer = Comer::new((rank, world));
        let group = Group::join(store, &comer, (config, patience))?;
        Self::met(group)
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
    #[cfg(any(test, fuzzing))]
    pub(crate) fn local_at(world: usize, config: &Config, costs: Rounded) -> Result<Vec<Self>> {
        heap::configure(config);
        let groups = Group::local_at(world, config, costs)?;
        Ok(groups.into_iter().map(Self::new).collect())
    }

    fn new(group: Arc<Group>) -> Self {
        Self {
            devices: Own::new(Devices::new(&group)),
            levels: Own::new(int8::Levels::default()),
            shrinking: Own::new(Mutex::new(None)),
            former: None,
            mask: None,
            newcomers: Vec::new(),
            place: None,
            met: group.world(),
            meeting: Arc::new(Mutex::new(None)),
            votes: AtomicU64::new(0),
            windows: AtomicU64::new(0),
            group: Own::new(group),
        }
    }

    /// Of a group that formed by a meeting.
    fn met(group: Arc<Group>) -> Result<Self> {
        let newcomers = group.membership.members.newcomers();
        let mut comm = Self::new(group);
        comm.newcomers = newcomers;
        comm.compare_clocks()?;
        Ok(comm)
    }

    /// Its ranks have met here.
    fn at(mut self, place: MeetingPlace, meeting: Meeting) -> Self {
        self.place = Some(place);
        self.meeting = Arc::new(Mutex::new(meeting.joined()));
        self
    }

    /// The settings that it was made with.
    pub fn config(&self) -> &Config {
        &self.group.config
    }

    /// This process's number in the group.
    pub fn rank(&self) -> Rank {
        match &self.mask {
            Some(mask) => mask.rank(),
            None => self.group.rank(),
        }
    }

    /// The number of ranks; of a [masked](Self::mask) communicator with those that are gone.
    pub fn world_size(&self) -> usize {
        match &self.mask {
            Some(mask) => mask.world(),
            None => self.group.world(),
        }
    }

    /// The ranks that take part: all of them; in a [masked](Self::mask) communicator those that are left.
    pub fn living(&self) -> Vec<Rank> {
        match &self.mask {
            Some(mask) => mask.living().to_vec(),
            None => (0..self.group.world()).collect(),
        }
    }

    /// Whether this rank, one of the group's numbers, takes part.
    ///
    /// # Errors
    /// `InvalidArgument` for one that is gone, in a [masked](Self::mask) communicator.
    pub fn check_living(&self, rank: Rank) -> Result<()> {
        match &self.mask {
            Some(mask) => mask.place(rank).map(drop),
            None => Ok(()),
        }
    }

    /// Whether it is [masked](Self::mask).
    pub fn is_masked(&self) -> bool {
        self.mask.is_some()
    }

    /// The place in the group of the rank with this number.
    #[inline]
    fn place(&self, rank: Rank) -> Result<usize> {
        match &self.mask {
            Some(mask) => mask.place(rank),
            None => Ok(rank),
        }
    }

    /// The number of the rank at this place in the group.
    #[inline]
    fn number(&self, place: usize) -> Rank {
        match &self.mask {
            Some(mask) => mask.number(place),
            None => place,
        }
    }

    /// An error of the group, with the number that its peer has here.
    fn renumber(&self, error: Error) -> Error {
        match &self.mask {
            Some(mask) => mask.renumber(error),
            None => error,
        }
    }

    /// A result of the group, whose error has the number that its peer has here.
    fn here<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| self.renumber(error))
    }

    /// Starts a collective and returns at once. `completion` is called when it ends, on a thread made for that.
    ///
    /// # Errors
    /// `InvalidArgument` and `Unsupported` before anything is sent; the first cause of a group that is dead. The
    /// completion is then not called.
    ///
    /// # Safety
    /// The request's memory keeps the promise of
    /// [`Memory::from_raw_parts`](crate::buffer::Memory::from_raw_parts) until the operation has completed, also when
    /// the returned [`Work`] is dropped.
    pub unsafe fn start(&self, request: Request, completion: Option<Completion>) -> Result<Work> {
        if let Some(mask) = &self.mask {
            return mask.carry(request, |request| {
                self.start_in_group(request, mask.completion(completion))
            });
        }
        self.start_in_group(request, completion)
    }

    #[inline(always)]
    fn start_in_group(&self, request: Request, completion: Option<Completion>) -> Result<Work> {
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
    pub unsafe fn begin(&self, mut request: Request) -> Result<Work> {
        if let Some(mask) = &self.mask {
            return mask.carry(request, |mut request| self.begin_in_group(&mut request));
        }
        self.begin_in_group(&mut request)
    }

    #[inline(always)]
    fn begin_in_group(&self, request: &mut Request) -> Result<Work> {
        if request.stream.is_some() {
            let started = self.devices.submit(request.take(), None)?;
            return Ok(self.on_device(started));
        }
        self.prepare(request)?;
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
    pub unsafe fn run(&self, mut request: Request) -> Result<u64> {
        if let Some(mask) = &self.mask {
            return mask.carry(request, |mut request| self.run_in_group(&mut request));
        }
        self.run_in_group(&mut request)
    }

    #[inline(always)]
    fn run_in_group(&self, request: &mut Request) -> Result<u64> {
        if request.stream.is_some() {
            return Ok(self.devices.submit(request.take(), None)?.1.sequence);
        }
        self.prepare(request)?;
        self.group.run(request)
    }

    /// Prepares an operation on the host that the caller drives: a barrier waits for the devices, device memory is refused.
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
            mask: self.mask.clone(),
            state,
        }
    }

    fn on_device(&self, (device, state): device::Started) -> Work {
        Work {
            group: self.group.clone(),
            device: Some(Own::new(device)),
            mask: self.mask.clone(),
            state,
        }
    }

    /// How long `request` would take, without carrying it out: the prediction by which its algorithm is chosen.
    ///
    /// # Errors
    /// As [`Communicator::start`] for a request that would be refused.
    pub fn estimate(&self, request: Request) -> Result<Duration> {
        match &self.mask {
            None => self.group.estimate(&request),
            Some(mask) => mask.carry(request, |request| self.group.estimate(&request)),
        }
    }

    /// How long a message of `bytes` to or from `peer` would take, as [`Communicator::estimate`].
    pub fn estimate_message(&self, peer: Option<Rank>, bytes: usize) -> Duration {
        let place = peer.and_then(|peer| self.place(peer).ok());
        self.group.estimate_message(place, bytes)
    }

    /// Whether buffers of devices may be read by the other ranks where they lie, if they were
    /// [allocated](crate::cuda::allocate) for that: all ranks are on one host, and the setting `window_bytes` is not 0.
    pub fn reads_devices_in_place(&self) -> bool {
        let window = self.group.config().window_bytes;
        let has_windows = window.is_none_or(|bytes| bytes.0 > 0);
        self.group.world() > 1 && has_windows && self.group.is_on_one_host()
    }

    /// The resources that the communicator holds on this rank: `links` that are open, `link_bytes` and `scratch_bytes` of
    /// memory, `operations` under way, `plans` kept; `device_bytes` of device memory and `pinned_bytes` of the host's for them,
    /// and `device_operations` under way there.
    pub fn memory(&self) -> Vec<(&'static str, u64)> {
        let mut memory = self.group.memory();
        memory.extend(self.devices.memory());
        memory
    }

    /// The operations that this rank has called, and the ranks that it has waited for in them, as JSON:
    ///
    /// ```text
    /// {"rank": 0, "collectives": 10000, "messages": 0,
    ///  "waited": {"seconds": 41.2, "operations": 9310,
    ///             "by_rank": [{"rank": 6, "global": 6, "process": "host b, pid 7", "seconds": 40.9, "operations": 9304,
    ///                          "last": 9200, "median_seconds": 0.0042, "longest_seconds": 0.31}],
    ///             "by_operation": {"all_reduce": {"operations": 9310, "seconds": 41.2, "by_size": [
    ///               {"up_to": 4096, "operations": 9310, "seconds": 41.2,
    ///                "by_rank": [{"rank": 6, "seconds": 40.9, "last": 9200}]}]}}},
    ///  "called": {"all_reduce": {"operations": 10000, "bytes": 40000000, "timed": 9400, "moving_seconds": 0.9, "by_size": [
    ///               {"up_to": 4096, "operations": 10000, "bytes": 40000000, "timed": 9400, "moving_seconds": 0.9}]}}}
    /// ```
    ///
    /// `last` counts the operations in which no rank was waited for longer. An operation waits if it does not end within a few
    /// looks, some tens of microseconds; such an operation is timed as well, and moves data while it does not wait. Of several
    /// under way the one that ends first has the time. A rank that was late has waited little itself: compare the ranks.
    /// Operations on device memory are not watched, nor those that carry 8-bit numbers between hosts.
    ///
    /// # Errors
    /// `Aborted` in a forked child of the process that joined.
    pub fn stats(&self) -> Result<String> {
        self.check_process()?;
        Ok(self.group.stats().to_string())
    }

    /// Blocks until every rank has called it, like [`Request::barrier`], and on failure rank 0 names every rank
    /// that is missing, not only the first.
    ///
    /// # Errors
    /// `Timeout` naming the missing ranks.
    pub fn monitored_barrier(&self, timeout: Duration, report_all: bool) -> Result<()> {
        self.here(self.group.monitored_barrier(timeout, report_all))
    }

    /// Splits the group: ranks that give the same `color` form a new group, numbered by `key` and then by rank.
    /// `None` for no group. Every rank of this group must call it.
    ///
    /// # Errors
    /// As a collective.
    pub fn split(&self, color: Option<i64>, key: i64) -> Result<Option<Self>> {
        Ok(self.here(self.group.split(color, key))?.map(Self::new))
    }

    /// The group of some of this group's ranks, numbered in the order of `ranks`; `None` where this rank is not
    /// among them. Its members all call it with the same `ranks` and `label`, and never twice with the same two; the
    /// others need not. Nothing is sent before the first operation.
    ///
    /// # Errors
    /// `InvalidArgument` for a rank that is out of range or there twice; the first cause of a group that is dead.
    pub fn subgroup(&self, ranks: &[Rank], label: &[u8]) -> Result<Option<Self>> {
        self.part(&self.places(ranks)?, label)
    }

    /// As [`subgroup`](Self::subgroup), of the ranks at these places in the group.
    fn part(&self, places: &[usize], label: &[u8]) -> Result<Option<Self>> {
        // Apart from the labels that `split` makes.
        let label = [b"subgroup".as_slice(), label].concat();
        Ok(self
            .here(self.group.subgroup(places, &label))?
            .map(Self::new))
    }

    fn places(&self, ranks: &[Rank]) -> Result<Vec<usize>> {
        ranks.iter().map(|rank| self.place(*rank)).collect()
    }

    /// A communicator of the ranks that are left, numbered in the order of their numbers here. All of them call it, usually
    /// after an operation has failed because a rank is gone; those that are gone, and those of `excluded`, need not. It needs
    /// neither the store nor rank 0, and ranks may go while it is under way.
    ///
    /// The ranks agree on the result: each that returns has the same. A rank whose process has ended is left out. One that
    /// runs is waited for, for as long as `patience`; after that the call may be made again, with other ranks excluded, and
    /// goes on from there. Ranks that cannot be reached, and may live, are left out by a majority alone (of half the ranks, the
    /// half with the lowest). This communicator stays as it is: close it when it is not needed any more.
    ///
    /// # Errors
    /// `InvalidArgument` where this rank is excluded, or a rank is out of range, or this has succeeded before; `Timeout` naming
    /// ranks that did not call it; `PeerLost` in a minority; `Aborted` where the others go on without this rank, or one of
    /// them has closed the communicator or was interrupted.
    pub fn shrink(&self, excluded: &[Rank], patience: Duration) -> Result<Self> {
        let (group, Former { ranks, ended }) = self.left(Numbers::Anew, excluded, patience)?;
        let ranks = ranks.into_iter().map(|place| self.number(place)).collect();
        Ok(self.with_the_left(group, Former { ranks, ended }))
    }

    /// As [`shrink`](Self::shrink), but the ranks keep their numbers: [`rank`](Self::rank) and [`world_size`](Self::world_size)
    /// are those of this communicator, [`living`](Self::living) has the ranks that are left, and each collective is one of
    /// those. Reductions and averages are of what they give. Where a buffer has a block for each rank, it has one for each that
    /// is gone, too: nothing reads or writes that. A rank that is gone is no root, and no message goes to it.
    ///
    /// # Errors
    /// As [`shrink`](Self::shrink).
    pub fn mask(&self, excluded: &[Rank], patience: Duration) -> Result<Self> {
        let world = self.world_size();
        let (group, Former { ranks, ended }) = self.left(Numbers::Kept, excluded, patience)?;
        let living = ranks.into_iter().map(|place| self.number(place)).collect();
        let mask = Mask::new(world, living, group.rank());
        let ranks = (0..world).collect();
        let mut masked = self.with_the_left(group, Former { ranks, ended });
        masked.mask = Some(Arc::new(mask));
        Ok(masked)
    }

    /// The group of the ranks that are left, with their places in this one's.
    fn left(
        &self,
        numbers: Numbers,
        excluded: &[Rank],
        patience: Duration,
    ) -> Result<(Arc<Group>, Former)> {
        // Those that are gone already need no mention.
        let is_gone = |rank: &&Rank| {
            self.is_masked() && **rank < self.world_size() && self.place(**rank).is_err()
        };
        let excluded: Vec<Rank> = excluded
            .iter()
            .filter(|rank| !is_gone(rank))
            .copied()
            .collect();
        let places = self.places(&excluded)?;
        let wish = (numbers, &places[..], patience);
        self.here(shrink::shrink(&self.group, &self.shrinking, wish))
    }

    fn with_the_left(&self, group: Arc<Group>, former: Former) -> Self {
        let mut left = Self::new(group);
        left.former = Some(former);
        left.place = self.place.clone();
        left.met = self.met;
        left.meeting = Arc::clone(&self.meeting);
        left
    }

    /// A communicator of `world` ranks: those of this one and others, which come as at the start of the job, to `place`. Blocks
    /// until all are there, at most `patience`. All ranks of this one call it with the same arguments. Each rank has the number
    /// that it had at the start of the job, and those that come have the rest, so a process may take the place of one that is
    /// gone. Without `place` they meet where this one's ranks met, and without `world` they are as many as met when this one
    /// formed, or the one that it was shrunk from.
    ///
    /// All ranks get the new communicator or none does; in vain, they may call it again or go on with this one, which stays as
    /// it is: close it when it is not needed any more.
    ///
    /// # Errors
    /// `InvalidArgument` where it is not known where to meet, or all are there, or the number of a rank is not below `world`;
    /// `Timeout` naming ranks that did not come or did not call it; `Aborted` where another rank of this communicator has
    /// failed to meet those that come; and the first cause of this communicator's failure, if it fails meanwhile.
    pub fn grow(
        &self,
        place: Option<MeetingPlace>,
        world: Option<usize>,
        patience: Duration,
    ) -> Result<Self> {
        let is_given = place.is_some();
        let place = place.or_else(|| self.place.clone());
        let place = place.filter(|place| is_given || !place.is_for_once());
        let place = place.ok_or_else(|| {
            Error::invalid(
                "grow: the ranks of this communicator have met where those that come cannot meet them (a file, an id, a store \
                 of the program, another communicator): give the URL of a place, and those that come the same one",
            )
        })?;
        let world = world.unwrap_or(self.met);
        let growing = Growing {
            group: &self.group,
            votes: &self.votes,
            meeting: &self.meeting,
        };
        let grown = grow::grow(growing, &place, world, patience);
        // Of the errors of a meeting, those of this group alone have its numbers.
        let (group, meeting) = match self.group.error() {
            Some(_) => self.here(grown)?,
            None => grown?,
        };
        Ok(Self::met(group)?.at(place, meeting))
    }

    /// The ranks that came when this communicator formed: all of them, or those that a smaller one [took in](Self::grow). Of
    /// one that was split or shrunk from another there are none.
    pub fn newcomers(&self) -> &[Rank] {
        &self.newcomers
    }

    /// The number that each rank had in the communicator that this one was [shrunk](Self::shrink) or [masked](Self::mask) from;
    /// `None` for others.
    pub fn former_ranks(&self) -> Option<&[Rank]> {
        self.former.as_ref().map(|former| &*former.ranks)
    }

    /// The collectives of that communicator up to this number, counted from 1, had ended on each of these ranks. A rank where
    /// [more](Self::ended) had ended may have results that others do not have.
    pub fn former_ended(&self) -> Option<u64> {
        self.former.as_ref().map(|former| former.ended)
    }

    /// The collectives up to this number, counted from 1, have ended on this rank; of a communicator that has failed, before it
    /// did. Those on device memory do not count.
    pub fn ended(&self) -> u64 {
        let core = self.group.lock_here();
        core.map_or(0, |core| core.ended())
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
        self.group.error().map(|error| self.renumber(error))
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

    /// Refuses to go on in a forked child of the process that joined: it has none of the threads and connections.
    ///
    /// # Errors
    /// `Aborted` there.
    pub fn check_process(&self) -> Result<()> {
        self.group.check()
    }

    /// Ends every operation on every rank with an error that gives `reason`.
    pub fn abort(&self, reason: &str) {
        if let Some(agreement) = self.agreement() {
            agreement.leave();
        }
        self.devices.abort(reason);
        self.levels.each().for_each(|level| level.abort(reason));
        self.group.abort(reason);
        // Those that were made meanwhile, too.
        self.levels.each().for_each(|level| level.abort(reason));
    }

    /// Waits for the operations that are under way on devices, in their streams. Call it before closing, unless those
    /// operations are to fail.
    ///
    /// # Errors
    /// The first failure; `Timeout` when `timeout` runs out first, after which they go on.
    pub fn finish(&self, timeout: Option<Duration>) -> Result<()> {
        self.check_process()?;
        self.here(self.devices.finish(timeout))
    }

    /// Leaves the group in good order: operations still under way here fail, data already sent stays readable for
    /// the others. Idempotent.
    pub fn close(&self) {
        if let Some(agreement) = self.agreement() {
            agreement.await_the_others();
            agreement.leave();
        }
        self.devices.close();
        self.levels.each().for_each(Self::close);
        self.group.close();
        self.levels.each().for_each(Self::close);
        if self.check_process().is_ok() {
            let meeting = self.meeting.lock().take();
            drop(meeting);
        }
    }

    /// The agreement of the ranks that are left, if it has begun in this process.
    fn agreement(&self) -> Option<Arc<Shrinking>> {
        let is_here = self.shrinking.is_here();
        is_here.then(|| self.shrinking.lock().clone()).flatten()
    }

    /// The latest operations of this rank, one line per operation, oldest first: for reports.
    pub fn recent_operations(&self) -> Vec<String> {
        let levels = self.levels.each().flat_map(Self::recent_operations);
        self.group
            .recent_operations()
            .into_iter()
            .chain(levels)
            .collect()
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.close();
    }
}
