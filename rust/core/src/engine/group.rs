//! A group of ranks: its links and operations behind one lock, and how callers submit and wait.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::buffer::{Memory, Scratch};
use crate::communicator::PointToPoint;
use crate::config::Config;
use crate::error::{Code, Error, Result};
use crate::health::{self, Recorder};
use crate::plan::select::Topology;
use crate::plan::{self, Algorithm};
use crate::reduce::{self, Kernel};
use crate::rendezvous::handshake::GroupKey;
use crate::transport::endpoint::{Address, Endpoint, Lane};
use crate::transport::{Link, Notice};
use crate::types::{Collective, DataType, Rank, ReduceOp};

use super::executor::{Execution, Operands, Prepared};
use super::links::LinkTable;
use super::matching::{Finished, Matching};
use super::progress;
use super::request::{Request, Sizes};
use super::sleep::{Next, Patience, Sleeper};
use super::wire::Fingerprint;
use super::work::{Completion, WorkState};

/// A rank as errors name it and links reach it.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    /// `host node7, pid 4321`.
    pub(crate) label: String,
    /// Where it listens; `None` inside one process.
    pub(crate) address: Option<Address>,
}

/// How a group reaches its members.
pub(crate) struct Membership {
    pub(crate) members: Vec<Member>,
    pub(crate) key: GroupKey,
    pub(crate) endpoint: Option<Arc<Endpoint>>,
    pub(crate) topology: Topology,
}

/// News from the threads that make connections.
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
}

/// Everything of one communicator.
pub(crate) struct Group {
    pub(super) rank: Rank,
    pub(super) world: usize,
    pub(super) membership: Membership,
    pub(super) config: Config,
    pub(super) core: Mutex<Core>,
    /// Signalled when an operation ends and when the leader leaves.
    turn: Condvar,
    mailbox: Mutex<Vec<Mail>>,
    has_mail: AtomicBool,
    sleeper: Sleeper,
    /// The first cause, once the group is dead, and the notice of it for others.
    failure: OnceLock<(Error, Notice)>,
    pub(super) closed: Arc<AtomicBool>,
    timeout_ms: AtomicU64,
    patience: Patience,
    pub(super) this: Weak<Self>,
}

/// What the lock protects.
pub(crate) struct Core {
    pub(super) links: LinkTable,
    /// Collectives under way, in their order.
    pub(super) operations: Vec<Operation>,
    pub(super) matching: Matching,
    pub(super) finished: Finished,
    /// A caller leads; the progress thread keeps away.
    leader: bool,
    /// The leader or the progress thread sleeps and must be rung for.
    sleeping: bool,
    followers: usize,
    /// The progress thread has the group on its list.
    watched: bool,
    sequence: u64,
    messages: u64,
    plans: HashMap<PlanKey, Arc<Prepared>>,
    spare_scratch: Vec<Scratch>,
    recorder: Recorder,
}

/// A collective under way.
pub(super) struct Operation {
    pub(super) work: Arc<WorkState>,
    pub(super) execution: Execution,
    /// Operations that must end first, because they touch the same memory.
    pub(super) after: Vec<u64>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct PlanKey {
    collective: Collective,
    count: usize,
    size: usize,
    root: Rank,
    in_place: bool,
    widen: bool,
}

/// Plans kept for reuse; beyond it the cache starts anew.
const CACHED_PLANS: usize = 512;

impl Group {
    pub(super) fn assemble(
        rank: Rank,
        membership: Membership,
        config: Config,
    ) -> Result<Arc<Self>> {
        progress::start()?;
        super::forming::note_process();
        let world = membership.members.len();
        let neighbours = membership.topology.ranks_beside(rank);
        let core = Core {
            links: LinkTable::new(world),
            operations: Vec::new(),
            matching: Matching::new(rank, world, config.eager_bytes.0),
            finished: Vec::new(),
            leader: false,
            sleeping: false,
            followers: 0,
            watched: false,
            sequence: 0,
            messages: 0,
            plans: HashMap::new(),
            spare_scratch: Vec::new(),
            recorder: Recorder::new(config.flight_records),
        };
        let sleeper = Sleeper::new()?;
        Ok(Arc::new_cyclic(|this| Self {
            rank,
            world,
            membership,
            timeout_ms: AtomicU64::new(
                config
                    .timeout
                    .0
                    .map_or(0, |timeout| timeout.as_millis() as u64),
            ),
            config,
            core: Mutex::new(core),
            turn: Condvar::new(),
            mailbox: Mutex::new(Vec::new()),
            has_mail: AtomicBool::new(false),
            sleeper,
            failure: OnceLock::new(),
            closed: Arc::new(AtomicBool::new(false)),
            patience: Patience::new(neighbours, super::forming::cores()),
            this: Weak::clone(this),
        }))
    }

    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    pub(crate) fn world(&self) -> usize {
        self.world
    }

    pub(crate) fn sleeper(&self) -> &Sleeper {
        &self.sleeper
    }

    pub(crate) fn set_timeout(&self, timeout: Duration) {
        self.timeout_ms
            .store(timeout.as_millis() as u64, Ordering::Relaxed);
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed))
    }

    pub(crate) fn error(&self) -> Option<Error> {
        self.failure.get().map(|(error, _)| error.clone())
    }

    /// What other ranks are told of the failure.
    pub(super) fn notice(&self) -> Option<&Notice> {
        self.failure.get().map(|(_, notice)| notice)
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.core.lock().sequence
    }

    /// What operations under way wait for, in words.
    pub(crate) fn waits(&self) -> String {
        self.describe_waits(&self.core.lock())
    }

    pub(crate) fn recent_operations(&self) -> Vec<String> {
        self.core.lock().recorder.lines()
    }

    /// `rank 3 (host node7, pid 4321)`.
    pub(super) fn name_of(&self, rank: Rank) -> String {
        format!("rank {rank} ({})", self.membership.members[rank].label)
    }

    /// Refuses work on a group that is dead, closed, or inherited by a fork.
    fn check_alive(&self) -> Result<()> {
        super::forming::check_process()?;
        if let Some((first, _)) = self.failure.get() {
            let mut error = first.clone();
            error.operation = None;
            error.message = format!(
                "this communicator is dead since an earlier failure: {}; destroy it and make a new one",
                error.message
            );
            return Err(error);
        }
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::invalid("this communicator has been closed"));
        }
        Ok(())
    }

    /// Starts a collective. With `background` somebody drives it although nobody waits.
    pub(crate) fn submit(
        &self,
        request: Request,
        completion: Option<Completion>,
        background: bool,
    ) -> Result<Arc<WorkState>> {
        self.check_alive()?;
        request.check(self.rank, self.world)?;
        let (request, premultiplied) = premultiplied(request);
        let timeout = request.timeout.unwrap_or_else(|| self.timeout());
        let mut core = self.core.lock();
        self.check_alive()?;
        core.sequence += 1;
        let work = Arc::new(WorkState::new(
            request.collective,
            core.sequence,
            timeout,
            completion,
        ));
        core.recorder.record(&work);
        let operation = self.operation(&mut core, request, premultiplied, Arc::clone(&work))?;
        for peer in operation.execution.peers() {
            self.ensure_link(&mut core.links, Lane::Collective, peer);
        }
        core.operations.push(operation);
        self.step(&mut core);
        self.after_submit(&mut core, background);
        Ok(work)
    }

    fn operation(
        &self,
        core: &mut Core,
        request: Request,
        premultiplied: Option<Scratch>,
        work: Arc<WorkState>,
    ) -> Result<Operation> {
        let prepared = self.prepared(core, &request)?;
        let kernel = match request.op {
            Some(op) => Some(Kernel::new(op, request.dtype)?),
            None => None,
        };
        let count = match &request.sizes {
            Sizes::Even(count) => *count,
            // Everybody knows all counts of these; of the others each rank knows its own only.
            Sizes::PerRank(counts)
                if matches!(
                    request.collective,
                    Collective::AllGather | Collective::ReduceScatter
                ) =>
            {
                counts.iter().sum()
            }
            _ => 0,
        };
        let fingerprint = Fingerprint {
            sequence: work.sequence,
            collective: request.collective as u8,
            dtype: request.dtype as u8,
            op: request.op.map_or(0, ReduceOp::number),
            algorithm: prepared.algorithm,
            root: request.root as u32,
            count: count as u64,
            length: 0,
        };
        let operands = Operands {
            input: request.input.unwrap_or_else(Memory::empty),
            output: request.output.unwrap_or_else(Memory::empty),
            dtype: request.dtype,
            kernel,
        };
        let bytes = prepared.plan.scratch * operands.partial().size();
        let scratch = (bytes > 0).then(|| core.take_scratch(bytes));
        let mut execution = Execution::new(
            prepared,
            operands,
            scratch,
            fingerprint,
            (self.rank, self.world),
        );
        execution.premultiplied = premultiplied;
        let after = core
            .operations
            .iter()
            .filter(|earlier| earlier.execution.overlaps(&execution))
            .map(|earlier| earlier.work.sequence)
            .collect();
        Ok(Operation {
            work,
            execution,
            after,
        })
    }

    /// The plan of a request, from the cache when it has been made before.
    fn prepared(&self, core: &mut Core, request: &Request) -> Result<Arc<Prepared>> {
        let shape = request.shape(self.rank, self.world);
        let key = match &request.sizes {
            Sizes::Even(count) => Some(PlanKey {
                collective: request.collective,
                count: *count,
                size: request.dtype.size(),
                root: request.root,
                in_place: shape.in_place,
                widen: shape.widen,
            }),
            _ => None,
        };
        if let Some(found) = key.as_ref().and_then(|key| core.plans.get(key)) {
            return Ok(Arc::clone(found));
        }
        let mut algorithm =
            plan::select::select(&shape, request.dtype.size(), &self.membership.topology);
        if let Some(wanted) = self.config.algorithm
            && plan::applicable(wanted, &shape)
        {
            algorithm = wanted;
        }
        let plan = plan::build(algorithm, &shape).ok_or_else(|| {
            Error::internal(format!("no {algorithm} plan for {}", request.collective))
        })?;
        let number = Algorithm::ALL
            .iter()
            .position(|known| *known == algorithm)
            .unwrap_or(0);
        let prepared = Arc::new(Prepared::new(plan, number as u8));
        if let Some(key) = key {
            if core.plans.len() >= CACHED_PLANS {
                core.plans.clear();
            }
            core.plans.insert(key, Arc::clone(&prepared));
        }
        Ok(prepared)
    }

    /// Starts a send.
    pub(crate) fn send(
        &self,
        dtype: DataType,
        memory: Memory,
        to: Rank,
        tag: u64,
        options: PointToPoint,
    ) -> Result<Arc<WorkState>> {
        self.check_rank(to, "send to")?;
        check_elements(dtype, &memory, "send")?;
        self.message(Collective::Send, Some(to), options, |core, work| {
            core.matching
                .send(dtype, memory, (to, tag), work, &mut core.finished)
        })
    }

    /// Starts a receive.
    pub(crate) fn receive(
        &self,
        dtype: DataType,
        memory: Memory,
        from: Option<Rank>,
        tag: u64,
        options: PointToPoint,
    ) -> Result<Arc<WorkState>> {
        if let Some(from) = from {
            self.check_rank(from, "receive from")?;
        }
        check_elements(dtype, &memory, "recv")?;
        self.message(Collective::Recv, from, options, |core, work| {
            core.matching
                .receive(dtype, memory, (from, tag), work, &mut core.finished)
        })
    }

    fn check_rank(&self, rank: Rank, what: &str) -> Result<()> {
        if rank >= self.world {
            return Err(Error::invalid(format!(
                "{what} rank {rank}: the group has {} ranks",
                self.world
            )));
        }
        Ok(())
    }

    fn message(
        &self,
        collective: Collective,
        peer: Option<Rank>,
        options: PointToPoint,
        start: impl FnOnce(&mut Core, &Arc<WorkState>) -> Result<()>,
    ) -> Result<Arc<WorkState>> {
        self.check_alive()?;
        let timeout = options.timeout.unwrap_or_else(|| self.timeout());
        let mut core = self.core.lock();
        self.check_alive()?;
        let sequence = core.messages + 1;
        let work = Arc::new(WorkState::new(
            collective,
            sequence,
            timeout,
            options.completion,
        ));
        if let Err(error) = start(&mut core, &work) {
            if error.code.is_fatal() {
                self.fail(&mut core, error.clone());
            }
            return Err(error);
        }
        core.messages = sequence;
        core.recorder.record(&work);
        match peer {
            Some(peer) => self.ensure_link(&mut core.links, Lane::PointToPoint, peer),
            None => (0..self.world)
                .for_each(|peer| self.ensure_link(&mut core.links, Lane::PointToPoint, peer)),
        }
        self.step(&mut core);
        self.after_submit(&mut core, true);
        Ok(work)
    }

    /// Sees to it that somebody drives what was just submitted.
    fn after_submit(&self, core: &mut Core, background: bool) {
        if core.sleeping {
            self.sleeper.ring();
        }
        if background {
            self.hand_over(core);
        }
    }

    /// Gives the group to the progress thread if it needs driving and nobody does it.
    fn hand_over(&self, core: &mut Core) {
        if core.is_busy()
            && !core.leader
            && !core.watched
            && let Some(this) = self.this.upgrade()
        {
            core.watched = true;
            progress::adopt(this);
        }
    }

    /// Waits for the end of an operation, leading the group meanwhile if nobody else does.
    pub(crate) fn wait(&self, work: &WorkState, timeout: Option<Duration>) -> Result<()> {
        if let Some(result) = work.result() {
            return result.clone();
        }
        super::forming::check_process()?;
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut core = self.core.lock();
        loop {
            if let Some(result) = work.result() {
                return result.clone();
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                let waits = self.describe_waits(&core);
                return Err(Error::new(
                    Code::Timeout,
                    format!(
                        "the wait ended after {:.3} s, before the operation: {waits}",
                        timeout.unwrap_or_default().as_secs_f64()
                    ),
                )
                .with_operation(work.name()));
            }
            if core.leader {
                core.followers += 1;
                match until {
                    Some(until) => {
                        let _ = self.turn.wait_until(&mut core, until);
                    }
                    None => self.turn.wait(&mut core),
                }
                core.followers -= 1;
                continue;
            }
            core.leader = true;
            self.lead(&mut core, work, until);
            core.leader = false;
            if core.followers > 0 {
                self.turn.notify_all();
            } else {
                self.hand_over(&mut core);
            }
        }
    }

    /// Steps the group until `work` has ended or the time is up.
    fn lead(&self, core: &mut MutexGuard<'_, Core>, work: &WorkState, until: Option<Instant>) {
        let mut patience = self.patience;
        while work.result().is_none() {
            if self.step(core) {
                patience.reset();
                continue;
            }
            match patience.next() {
                Next::Spin => std::hint::spin_loop(),
                Next::Yield => MutexGuard::unlocked(core, std::thread::yield_now),
                Next::Sleep => {
                    let mut wake = until;
                    if !self.arm(core, &mut wake) {
                        core.sleeping = true;
                        MutexGuard::unlocked(core, || self.sleeper.sleep(wake));
                        core.sleeping = false;
                    }
                    self.disarm(core);
                    self.look_around(core);
                    patience.reset();
                }
            }
            if patience.is_time_to_look_around() {
                self.look_around(core);
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return;
            }
        }
    }

    /// One turn of the progress thread. Returns whether the group stays on its list.
    pub(crate) fn drive(&self, moved: &mut bool, look_around: bool) -> bool {
        let mut core = self.core.lock();
        if core.leader {
            core.watched = false;
            return false;
        }
        *moved |= self.step(&mut core);
        if look_around {
            self.look_around(&mut core);
        }
        core.watched = core.is_busy();
        core.watched
    }

    /// Announces on all links that the progress thread is about to sleep. Returns true when it must not.
    pub(crate) fn prepare_sleep(&self, until: &mut Option<Instant>) -> bool {
        let mut core = self.core.lock();
        self.arm(&mut core, until)
    }

    /// The progress thread is awake again.
    pub(crate) fn finish_sleep(&self) {
        let mut core = self.core.lock();
        self.disarm(&mut core);
        self.look_around(&mut core);
    }

    /// Posts news for whoever steps the group next.
    pub(super) fn post(&self, mail: Mail) {
        self.mailbox.lock().push(mail);
        self.has_mail.store(true, Ordering::Release);
        self.sleeper.ring();
    }

    /// News since the last look.
    pub(super) fn take_mail(&self) -> Vec<Mail> {
        if !self.has_mail.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        std::mem::take(&mut self.mailbox.lock())
    }

    pub(super) fn has_mail(&self) -> bool {
        self.has_mail.load(Ordering::Acquire)
    }

    /// Ends operations that a step has completed.
    pub(super) fn settle(&self, core: &mut Core) {
        for (work, result) in std::mem::take(&mut core.finished) {
            if let Some((completion, result)) = work.finish(result) {
                progress::tell(completion, result);
            }
        }
        if core.followers > 0 {
            self.turn.notify_all();
        }
    }

    /// The group is dead: every operation fails with the first cause, and the other ranks are told.
    pub(super) fn fail(&self, core: &mut Core, error: Error) {
        let notice = health::notice(&error, self.rank);
        self.fail_with(core, error, &notice);
    }

    /// As [`Group::fail`], passing on another rank's notice.
    pub(super) fn fail_with(&self, core: &mut Core, error: Error, notice: &Notice) {
        if self.failure.set((error.clone(), notice.clone())).is_err() {
            return;
        }
        tracing::warn!(rank = self.rank, error = %error, "the group has failed");
        // Each operation's error names the operation itself.
        let each = Error {
            operation: None,
            ..error
        };
        for operation in core.operations.drain(..) {
            core.finished.push((operation.work, Err(each.clone())));
        }
        for work in core.matching.clear() {
            core.finished.push((work, Err(each.clone())));
        }
        for (_, _, open) in core.links.iter_open() {
            open.link.send_abort(notice);
        }
        self.settle(core);
        self.sleeper.ring();
    }

    /// Ends every operation on every rank.
    pub(crate) fn abort(&self, reason: &str) {
        let error = Error::new(
            Code::Aborted,
            format!("rank {} aborted the group: {reason}", self.rank),
        );
        self.fail(&mut self.core.lock(), error);
    }

    /// Leaves in good order.
    pub(crate) fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if super::forming::check_process().is_err() {
            return;
        }
        if let Some(endpoint) = &self.membership.endpoint {
            endpoint.unregister(&self.membership.key.id, self.rank);
        }
        let mut core = self.core.lock();
        if core.is_busy() {
            self.abort_on_close(&mut core);
        } else {
            for (_, _, open) in core.links.iter_open() {
                open.link.send_farewell();
            }
        }
        core.links = LinkTable::new(self.world);
    }

    fn abort_on_close(&self, core: &mut Core) {
        let waits = self.describe_waits(core);
        let error = Error::new(
            Code::Aborted,
            format!(
                "rank {} closed its communicator while operations were under way: {waits}",
                self.rank
            ),
        );
        self.fail(core, error);
    }
}

impl Core {
    /// Whether anything is under way.
    pub(super) fn is_busy(&self) -> bool {
        !self.operations.is_empty() || self.matching.is_busy()
    }

    fn take_scratch(&mut self, bytes: usize) -> Scratch {
        match self
            .spare_scratch
            .iter()
            .position(|scratch| scratch.len() >= bytes)
        {
            Some(found) => self.spare_scratch.swap_remove(found),
            None => Scratch::new(bytes),
        }
    }

    /// Keeps a few pieces of scratch memory, the largest ones, for the operations to come.
    pub(super) fn return_scratch(&mut self, scratch: Scratch) {
        const KEPT: usize = 4;
        self.spare_scratch.push(scratch);
        if self.spare_scratch.len() > KEPT {
            self.spare_scratch.sort_by_key(Scratch::len);
            self.spare_scratch.remove(0);
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("rank", &self.rank)
            .field("world", &self.world)
            .finish()
    }
}

/// Turns `premul_sum` into `sum` of an input multiplied beforehand, in memory of the operation's own.
fn premultiplied(mut request: Request) -> (Request, Option<Scratch>) {
    let Some(ReduceOp::PremulSum(factor)) = request.op else {
        return (request, None);
    };
    let source = match request.input.as_ref().or(request.output.as_ref()) {
        Some(source) if !source.is_empty() => source,
        _ => return (request, None),
    };
    let bytes = source.len();
    let scratch = Scratch::new(bytes);
    let target = scratch.view(bytes);
    let mut done = 0;
    while done < bytes {
        let run = source.read(done, bytes - done);
        reduce::scale(request.dtype, target.write(done, run.len()), run, factor);
        done += run.len();
    }
    request.input = Some(target);
    (request, Some(scratch))
}

fn check_elements(dtype: DataType, memory: &Memory, operation: &str) -> Result<()> {
    if memory.len() % dtype.size() != 0 {
        return Err(Error::invalid(format!(
            "{operation}: {} bytes are not a whole number of {dtype} elements",
            memory.len()
        )));
    }
    Ok(())
}
