//! A group of ranks: its links and operations behind one lock, and how callers submit and wait.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::fork::Home;
use crate::locks::{Condvar, Mutex, MutexGuard};
use crate::plan::cost::Costs;
use crate::plan::select::{self, Choice, choose};
use crate::plan::topology::Topology;
use crate::plan::{Algorithm, Shape};
use crate::processors::cores;
use crate::reduce::Workers;
use crate::transport::endpoint::{Lane, Seat};
use crate::transport::keys::{GroupKey, Hex};
use crate::transport::{Hindrance, Link, Mend, Notice, SocketId, Stripe};
use crate::types::{Collective, DataType, Rank};

use crate::engine::clock::Clock;
use crate::engine::collective::pair_counts::Pairs;
use crate::engine::collective::plan_cache::PlanStore;
use crate::engine::collective::request::Request;
use crate::engine::collective::run::{PlanRun, ReuseKey};
use crate::engine::collective::shared::SharedMemory;
use crate::engine::drive::backoff::{Backoff, Parker};
use crate::engine::drive::threads::{RuntimeThreads, ThreadsGuard};
use crate::engine::group::local_groups::LocalGroups;
use crate::engine::links::LinkTable;
use crate::engine::mailbox::Mailbox;
use crate::engine::members::Members;
use crate::engine::message::matching::{Finished, Matching};
use crate::engine::reports::Recorder;
use crate::engine::timeline::Timeline;
use crate::engine::traffic::Traffic;
use crate::engine::waits::{OnGroup, Waits};
use crate::engine::work::WorkState;

/// Bytes of an operation that takes longer than the progress thread's nap: it is worth waking it.
pub(crate) const WAKES_THREAD_FROM: usize = 1 << 20;

/// How a group reaches its members.
pub(crate) struct Membership {
    pub(crate) members: Members,
    pub(crate) key: GroupKey,
    /// Where they reach this process, until the group is closed; `None` inside one process.
    pub(crate) endpoint: Mutex<Option<Seat>>,
    pub(crate) topology: Topology,
    /// The costs, as rank 0 of the group that all members came from measured them.
    pub(crate) costs: Costs,
    /// Where its parts come from, inside one process.
    pub(crate) local_groups: Option<Arc<LocalGroups<Arc<Group>>>>,
}

/// Cores that the ranks of a host use for their messages to other hosts, where links outrun one.
const MOST_MOVERS: usize = 4;

/// Bytes a second that one thread may send and receive at the same time. Its rate is the least that is taken for a fast link's.
const A_CORE_MOVES: f64 = 2e9;

/// How many threads of each rank have a share of a long piece, the same on all members: as many as the user asks for. Else it
/// is one, but more where a core moves no more than a link between hosts does: the ranks of a host then use [`MOST_MOVERS`]
/// cores together, and no more than half of those that rank 0's host has.
pub(crate) fn threads(config: &Config, topology: &Topology, costs: &Costs) -> usize {
    if let Some(threads) = config.threads {
        return threads.0;
    }
    let is_fast = costs.remote_byte * A_CORE_MOVES <= 1.0;
    // One thread opens encrypted bytes.
    if !topology.has_several_hosts() || !is_fast || config.encrypt.0 {
        return 1;
    }
    let beside = topology.hosts().iter().map(Vec::len).max().unwrap_or(1);
    let free = topology.cores_per_host / (2 * beside);
    free.min(MOST_MOVERS / beside).max(1)
}

/// The most ranks that any group of this process has had on its host.
static BESIDE: AtomicUsize = AtomicUsize::new(1);

/// How many of those threads this rank has. A group of one rank of each host may be one of several, each with other ranks
/// of the host. All of those ranks count: `ever_beside`.
fn own_threads(
    config: &Config,
    topology: &Topology,
    rank: Rank,
    ever_beside: &AtomicUsize,
) -> usize {
    let here = topology.host_of[rank];
    let beside = topology.host_of.iter().filter(|host| **host == here);
    let beside = beside.count();
    let most = ever_beside.fetch_max(beside, Ordering::Relaxed).max(beside);
    match config.threads {
        Some(threads) => threads.0,
        None => topology.threads.min(MOST_MOVERS / most).max(1),
    }
}

impl Membership {
    pub(crate) fn endpoint(&self) -> Option<Seat> {
        self.endpoint.lock().clone()
    }

    /// The algorithms for `shape`, the same on all members. `wanted`: the one that the user asks for.
    pub(crate) fn choose(
        &self,
        shape: &Shape,
        dtype: DataType,
        wanted: Option<Algorithm>,
    ) -> Choice {
        choose(shape, dtype.size(), &self.topology, &self.costs, wanted)
    }

    /// As [`Membership::choose`] for a reduction that folds in rank order, whatever the user asks for.
    pub(crate) fn choose_in_rank_order(&self, shape: &Shape, dtype: DataType) -> Choice {
        let choice = self.choose(shape, dtype, None);
        select::in_rank_order(choice, shape, dtype.size(), &self.topology, &self.costs)
    }

    /// The predicted time of each algorithm for `shape`, in microseconds, the cheapest first.
    pub(crate) fn prices(&self, shape: &Shape, dtype: DataType) -> String {
        let prices = select::prices(shape, dtype.size(), &self.topology, &self.costs);
        let words = prices
            .iter()
            .map(|(algorithm, seconds)| format!("{algorithm} {:.1} us", seconds * 1e6));
        words.collect::<Vec<_>>().join(", ")
    }
}

/// Results from the threads that make connections.
pub(crate) enum Mail {
    Established {
        lane: Lane,
        peer: Rank,
        link: Box<dyn Link>,
    },
    /// The peer is making the connection; ours gave way.
    Awaited { lane: Lane, peer: Rank },
    Failed {
        lane: Lane,
        peer: Rank,
        error: Error,
    },
    /// A further connection of a link that is established, or none: those that this side wanted do not come.
    Striped {
        lane: Lane,
        peer: Rank,
        stripe: Option<Stripe>,
    },
    /// A further socket for a connection of a link, in the place of one that broke.
    Mended { lane: Lane, peer: Rank, mend: Mend },
    /// The connection that had this socket is not made again, for that reason.
    Beyond {
        lane: Lane,
        peer: Rank,
        socket: SocketId,
        why: Hindrance,
    },
}

/// Everything of one communicator.
pub(crate) struct Group {
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    /// Its number among the groups of this process.
    pub(crate) number: u32,
    pub(crate) membership: Membership,
    pub(crate) config: Config,
    pub(crate) clock: Clock,
    pub(crate) core: Mutex<Core>,
    /// Signalled when an operation ends and when the leader leaves.
    pub(crate) turn: Condvar,
    mailbox: Mailbox<Mail>,
    pub(crate) parker: Parker,
    /// The first cause, once the group is dead, and the notice of it for others.
    pub(crate) failure: OnceLock<(Error, Notice)>,
    pub(crate) closed: Arc<AtomicBool>,
    timeout_ms: AtomicU64,
    pub(crate) staff: Arc<RuntimeThreads>,
    /// Until the group is closed.
    pub(crate) stay: Mutex<Option<Arc<ThreadsGuard>>>,
    pub(crate) workers: Option<Arc<Workers>>,
    /// Two threads may read what peers on this host lend.
    pub(crate) reads_by_two: AtomicBool,
    /// The process that is a member.
    pub(crate) home: Home,
    pub(crate) this: Weak<Self>,
    /// The window that it serves.
    pub(crate) window: OnceLock<Weak<dyn OnGroup>>,
}

/// The state that the lock protects.
pub(crate) struct Core {
    pub(crate) links: LinkTable,
    /// The common state of operations that are done in the memory of the host, if all ranks agree.
    pub(crate) shared: SharedMemory,
    /// Collectives under way, in their order.
    pub(crate) operations: Vec<Operation>,
    pub(crate) matching: Matching,
    pub(crate) finished: Finished,
    /// A caller leads; the progress thread keeps away.
    pub(crate) leader: bool,
    /// The leader sleeps and must be rung for.
    pub(crate) sleeping: bool,
    /// The progress thread sleeps, woken by what was under way when it fell asleep: for anything newer it must be
    /// rung for.
    pub(crate) dozing: bool,
    pub(crate) followers: usize,
    /// The progress thread has the group on its list.
    pub(crate) watched: bool,
    /// Operations were handed to it since it last looked.
    pub(crate) handed_over: bool,
    /// The record of operations in which only the two ranks involved know the counts between them, once there has been one.
    pub(crate) pairs: Option<Box<Pairs>>,
    /// When to ask next whether the peers that are waited for run.
    pub(crate) next_question: Option<Instant>,
    /// How the leader waits.
    pub(crate) backoff: Backoff,
    pub(crate) sequence: u64,
    /// How many had ended when the group failed.
    pub(crate) ended_before_failure: Option<u64>,
    pub(crate) messages: u64,
    pub(crate) plans: PlanStore,
    /// Executions that have ended, the oldest first.
    #[expect(clippy::vec_box, reason = "they move in and out by their pointers")]
    pub(crate) spare_executions: Vec<Box<PlanRun>>,
    pub(crate) recorder: Recorder,
    pub(crate) waits: Waits,
    pub(crate) traffic: Traffic,
    /// The operations as the trace has them, until the group is closed, if there is to be a trace.
    pub(crate) timeline: Option<Box<Timeline>>,
}

/// A collective under way.
pub(crate) struct Operation {
    pub(crate) work: Arc<WorkState>,
    pub(crate) run: Box<PlanRun>,
    /// Operations that must end first, because they touch the same memory.
    pub(crate) after: Vec<u64>,
    /// When to tell this rank's position to the peers that it waits for.
    pub(crate) tell: Instant,
}

/// A clock, and threads that drive and call back: those of the process, or those of a simulated world, which drives by itself.
pub(crate) struct Surroundings {
    pub(crate) clock: Clock,
    pub(crate) staff: Arc<RuntimeThreads>,
    /// Has the threads stay for as long as the group is open.
    pub(crate) stay: Option<Arc<ThreadsGuard>>,
}

impl Surroundings {
    fn of_process() -> Result<Self> {
        let stay = ThreadsGuard::begin()?;
        Ok(Self {
            clock: Clock::System,
            staff: Arc::clone(stay.staff()),
            stay: Some(stay),
        })
    }
}

static NEXT_NUMBER: AtomicU32 = AtomicU32::new(1);

impl Group {
    pub(crate) fn assemble(
        rank: Rank,
        membership: Membership,
        config: Config,
    ) -> Result<Arc<Self>> {
        Self::assemble_in(Surroundings::of_process()?, rank, membership, config)
    }

    /// The same with a clock and threads of the caller's.
    pub(crate) fn assemble_in(
        surroundings: Surroundings,
        rank: Rank,
        membership: Membership,
        config: Config,
    ) -> Result<Arc<Self>> {
        let Surroundings { clock, staff, stay } = surroundings;
        let world = membership.members.len();
        let spin = config.spin_us.map(Duration::from_micros);
        let neighbours = membership.topology.ranks_beside(rank);
        let cores = cores();
        let core = Core {
            links: LinkTable::new(world),
            shared: SharedMemory::new(clock.clone()),
            operations: Vec::new(),
            matching: Matching::new(rank, membership.members.clone(), config.eager_bytes.0),
            finished: Vec::new(),
            leader: false,
            sleeping: false,
            dozing: false,
            followers: 0,
            watched: false,
            handed_over: false,
            pairs: None,
            next_question: None,
            backoff: Backoff::new(neighbours, cores, spin),
            sequence: 0,
            ended_before_failure: None,
            messages: 0,
            plans: PlanStore::default(),
            spare_executions: Vec::new(),
            recorder: Recorder::new(config.flight_records),
            waits: Waits::default(),
            traffic: Traffic::default(),
            timeline: Timeline::open(
                &config,
                Hex(&membership.key.id()).to_string(),
                (rank, membership.members.numbers().collect()),
            )?,
        };
        let parker = Parker::new()?;
        let threads = own_threads(&config, &membership.topology, rank, &BESIDE);
        Ok(Arc::new_cyclic(|this| Self {
            rank,
            world,
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
            membership,
            timeout_ms: AtomicU64::new(config.timeout.0.map_or(0, milliseconds)),
            workers: (threads > 1).then(|| Arc::new(Workers::new(threads))),
            reads_by_two: AtomicBool::new(false),
            config,
            clock,
            core: Mutex::new(core),
            turn: Condvar::new(),
            mailbox: Mailbox::new(),
            parker,
            failure: OnceLock::new(),
            closed: Arc::new(AtomicBool::new(false)),
            staff,
            home: Home::here(),
            stay: Mutex::new(stay),
            this: Weak::clone(this),
            window: OnceLock::new(),
        }))
    }

    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    pub(crate) fn world(&self) -> usize {
        self.world
    }

    pub(crate) fn parker(&self) -> &Parker {
        &self.parker
    }

    pub(crate) fn set_timeout(&self, timeout: Duration) {
        self.timeout_ms
            .store(milliseconds(timeout), Ordering::Relaxed);
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed))
    }

    pub(crate) fn error(&self) -> Option<Error> {
        self.failure.get().map(|(error, _)| error.clone())
    }

    /// The notice by which this rank tells the others of the failure.
    pub(crate) fn notice(&self) -> Option<&Notice> {
        self.failure.get().map(|(_, notice)| notice)
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.lock_here().map_or(0, |core| core.sequence)
    }

    /// The waits of operations under way, in words.
    pub(crate) fn waits(&self) -> String {
        self.lock_here()
            .map_or_else(String::new, |core| self.describe_waits(&core))
    }

    pub(crate) fn recent_operations(&self) -> Vec<String> {
        self.lock_here()
            .map_or_else(Vec::new, |core| core.recorder.lines(self.clock.now()))
    }

    /// The lock, for what may also be asked in a forked child: there it may be taken for ever, and is left alone.
    pub(crate) fn lock_here(&self) -> Option<MutexGuard<'_, Core>> {
        self.home.check().ok()?;
        Some(self.core.lock())
    }

    /// `rank 3 (host node7, pid 4321)`, as [`Members::name`].
    pub(crate) fn name_of(&self, rank: Rank) -> String {
        self.membership.members.name(rank)
    }

    /// This rank's, as [`Members::number`].
    pub(crate) fn own_number(&self) -> String {
        self.membership.members.number(self.rank)
    }

    /// Refuses work on a group that is dead, closed, or inherited by a fork.
    #[inline]
    pub(crate) fn check_alive(&self) -> Result<()> {
        match self.failure.get().is_none() && !self.closed.load(Ordering::Acquire) {
            true => self.home.check(),
            false => self.refuse(),
        }
    }

    /// Refuses work on a group that is closed, or inherited by a fork. It may have failed.
    pub(crate) fn check_open(&self) -> Result<()> {
        self.home.check()?;
        match self.closed.load(Ordering::Acquire) {
            true => Err(Error::invalid("this communicator has been closed")),
            false => Ok(()),
        }
    }

    #[cold]
    fn refuse(&self) -> Result<()> {
        self.home.check()?;
        if let Some((first, _)) = self.failure.get() {
            let mut error = first.clone();
            error.operation = None;
            error.message = format!(
                "this communicator is dead since an earlier failure: {}; shrink it to go on with the ranks that are left, \
                 or destroy it and make a new one",
                error.message
            );
            return Err(error);
        }
        self.check_open()
    }

    /// Posts mail for the thread that steps the group next. Must not be called under the group's lock.
    pub(crate) fn post(&self, mail: Mail) {
        self.mailbox.post(mail);
        self.parker.unpark();
        // No thread steps a group that has failed or is closed: either the thread that ends it reads this mail, or this
        // one sees the end.
        if self.failure.get().is_some() || self.is_closed() {
            self.read_mail(&mut self.core.lock());
        }
    }

    /// The mail since the last call.
    pub(crate) fn take_mail(&self) -> Vec<Mail> {
        self.mailbox.take()
    }

    pub(crate) fn has_mail(&self) -> bool {
        self.mailbox.has_mail()
    }

    /// Ends operations that a step has completed.
    pub(crate) fn settle(&self, core: &mut Core) {
        let now = self.clock.now();
        core.waits.moved(|| now);
        for (work, result) in std::mem::take(&mut core.finished) {
            if let Some(timeline) = &mut core.timeline {
                timeline.end(&work, (&result, now), core.waits.spells());
            }
            let waited = core.waits.end(work.place.row());
            // A message may be asked for long before it is sent, and nothing tells that wait from the time that it moves.
            if result.is_ok() && !matches!(work.collective, Collective::Send | Collective::Recv) {
                core.traffic.time(work.place, (work.started, now), waited);
            }
            if let Some((completion, result)) = work.finish(result, now) {
                self.staff.completions.tell(completion, result);
            }
        }
        if core.followers > 0 {
            self.turn.notify_all();
        }
    }
}

impl Core {
    /// Whether there is anything to move.
    pub(crate) fn is_busy(&self) -> bool {
        !self.operations.is_empty() || self.matching.is_busy()
    }

    /// The collectives up to this number have ended here.
    pub(crate) fn ended(&self) -> u64 {
        let first = self.operations.first();
        let before = first.map_or(self.sequence, |operation| operation.work.sequence - 1);
        self.ended_before_failure.unwrap_or(before)
    }

    /// Whether a collective under way takes long enough to wake a thread for it.
    pub(crate) fn has_large(&self) -> bool {
        let is_large = |operation: &Operation| operation.run.bytes() >= WAKES_THREAD_FROM;
        self.operations.iter().any(is_large)
    }

    /// Whether an operation of this rank is under way.
    pub(crate) fn has_unfinished(&self) -> bool {
        !self.operations.is_empty() || self.matching.under_way().next().is_some()
    }

    /// A collective under way has ended: the one at this place.
    pub(crate) fn complete(&mut self, index: usize) {
        let operation = self.operations.remove(index);
        if let Some(timeline) = &mut self.timeline {
            timeline.choose(operation.work.sequence, operation.run.algorithm());
        }
        self.recycle(operation.run);
        self.finished.push((operation.work, Ok(())));
    }

    /// Keeps what a run that has ended can pass on to the next.
    pub(crate) fn recycle(&mut self, mut run: Box<PlanRun>) {
        run.share(None);
        run.release();
        if !run.is_short()
            && let Some(scratch) = run.take_scratch()
        {
            self.plans.return_scratch(scratch);
        }
        if let Some(bounce) = run.take_bounce() {
            self.plans.return_bounce(bounce);
        }
        self.spare_executions.push(run);
    }

    /// A spare run that can carry out `request`, which has this reuse_key.
    pub(crate) fn take_reusable(
        &mut self,
        reuse_key: &ReuseKey,
        request: &Request,
    ) -> Option<Box<PlanRun>> {
        let suits = |spare: &PlanRun| spare.is_like(reuse_key) && spare.fits(request);
        let last = self.spare_executions.pop_if(|spare| suits(spare));
        if last.is_some() {
            return last;
        }
        let found = self
            .spare_executions
            .iter()
            .rposition(|spare| suits(spare))?;
        Some(self.spare_executions.remove(found))
    }

    /// The memory of a spare run, once there are enough of them.
    pub(crate) fn take_spare(&mut self) -> Option<Box<PlanRun>> {
        const MOST_SPARE: usize = 4;
        if self.spare_executions.len() < MOST_SPARE {
            return None;
        }
        let mut spare = self.spare_executions.remove(0);
        if let Some(scratch) = spare.take_scratch() {
            self.plans.return_scratch(scratch);
        }
        Some(spare)
    }
}

/// A timeout in milliseconds, where 0 means none: a shorter one than a millisecond is not that.
fn milliseconds(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("rank", &self.rank)
            .field("world", &self.world)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_host_share_cores_also_where_each_is_alone_in_its_group() {
        let config = Config::default();
        let ever_beside = AtomicUsize::new(1);
        let of = |ranks| {
            let topology = Topology {
                threads: 4,
                ..Topology::even(2, ranks, 64)
            };
            own_threads(&config, &topology, ranks, &ever_beside)
        };
        let as_groups_come = [1, 2, 1, 8, 2, 1].map(of);
        assert_eq!(as_groups_come, [4, 2, 2, 1, 1, 1]);
        let mut asked_for = Config::default();
        asked_for.set("threads", "3").unwrap();
        let topology = Topology::even(2, 1, 64);
        assert_eq!(own_threads(&asked_for, &topology, 0, &ever_beside), 3);
    }

    #[test]
    fn threads_are_taken_where_links_outrun_a_core_and_cores_are_free() {
        let of = |(hosts, ranks, cores), rate: f64, settings: &[(&str, &str)]| {
            let mut config = Config::default();
            for (name, value) in settings {
                config.set(name, value).unwrap();
            }
            let costs = Costs {
                remote_byte: 1.0 / rate,
                ..Costs::TYPICAL
            };
            threads(&config, &Topology::even(hosts, ranks, cores), &costs)
        };
        assert_eq!(of((2, 1, 16), 3e9, &[]), 4);
        assert_eq!(of((2, 1, 4), 3e9, &[]), 2);
        assert_eq!(of((2, 1, 2), 3e9, &[]), 1);
        assert_eq!(of((2, 2, 16), 3e9, &[]), 2);
        assert_eq!(of((4, 8, 96), 3e9, &[]), 1);
        assert_eq!(of((1, 2, 16), 3e9, &[]), 1);
        assert_eq!(of((2, 1, 16), 1.25e9, &[]), 1);
        assert_eq!(of((2, 1, 16), 3e9, &[("encrypt", "on")]), 1);
        assert_eq!(of((1, 8, 2), 1e8, &[("threads", "3")]), 3);
    }
}
