//! The operations of a communicator on the memory of one device.
//!
//! A submission is checked, numbered and enqueued under the lock of the queue, which the attendant never takes: to
//! enqueue may have to wait for room in a stream, and that stream for the attendant. What is under way is on the board,
//! whose lock is held for moments only.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

use crate::buffer::Memory;
use crate::communicator::PointToPoint;
use crate::engine::{Completion, Fingerprint, Group, Identity, Request, Sizes, WorkState};
use crate::error::{Code, Error, Result};
use crate::plan::windows::{Peers, Plan};
use crate::transport::cuda::driver::{Device, Stream};
use crate::transport::cuda::flags::{Announced, Mark, Signal, Spot};
use crate::transport::cuda::kernels;
use crate::types::{Collective, DataType, DeviceStream, Rank, ReduceOp};

use super::attendant::{self, Found, dispose};
use super::copies::check_memory;
use super::direct::{Plans, Ticket};
use super::formation::{Way, form};
use super::messages::{Messages, Wanted};
use super::words::{Word, Words};

/// How often deadlines and the state of peers are looked at.
const LOOK: Duration = Duration::from_millis(10);
/// How long after a failure operations end although their streams have not got past them.
const GRACE: Duration = Duration::from_secs(5);
/// How long a window that is closed is kept for peers that have not unmapped it.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long for peers whose streams have not read what is in it.
const READING: Duration = Duration::from_secs(60);

/// Those of this process whose way has been found, for ranks that share it.
static HERE: Mutex<Vec<(Identity, Weak<DeviceGroup>)>> = Mutex::new(Vec::new());

/// The operations of one communicator on one device.
pub(crate) struct DeviceGroup {
    device: &'static Device,
    parent: Arc<Group>,
    /// All ranks of the parent, for what the device layer has them do on the host.
    cpu: Arc<Group>,
    words: Words,
    /// Found at the first collective; gone when it has been taken down.
    way: RwLock<Option<Arc<Way>>>,
    /// Held by who finds it.
    forming: Mutex<()>,
    queue: Mutex<Queue>,
    board: Mutex<Board>,
    messages: Messages,
    failure: OnceLock<(Error, Instant)>,
    /// When it was closed.
    closed: OnceLock<Instant>,
    /// Operations have become part of graphs, which may be replayed at any time.
    captured: AtomicBool,
}

/// What submissions share.
#[derive(Default)]
struct Queue {
    number: u64,
    /// The last collective that is no part of a graph.
    last: u64,
    stream: Option<DeviceStream>,
    plans: Plans,
}

/// What is under way.
#[derive(Default)]
struct Board {
    pending: VecDeque<Pending>,
    /// The number of the last one that was put here.
    last: u64,
    looked: Option<Instant>,
}

/// A collective that a stream has not got past.
struct Pending {
    work: Arc<WorkState>,
    number: u64,
    stream: DeviceStream,
    print: Fingerprint,
    /// Of the direct way.
    plan: Option<Arc<Plan>>,
    /// Peers whose announcement has not been compared.
    unheard: Peers,
}

impl DeviceGroup {
    /// The `index`-th device that this rank uses with the group `parent`.
    pub(super) fn new(parent: &Arc<Group>, device: u32, index: usize) -> Result<Arc<Self>> {
        let device = Device::of(device)?;
        let ranks: Vec<Rank> = (0..parent.world()).collect();
        let label = [b"device ".as_slice(), &index.to_le_bytes()].concat();
        let words = Words::new(device)?;
        let cpu = parent
            .subgroup(&ranks, &label)?
            .ok_or_else(|| Error::internal("a rank that is not in its own group"))?;
        let group = Arc::new(Self {
            device,
            parent: Arc::clone(parent),
            cpu,
            words,
            way: RwLock::new(None),
            forming: Mutex::new(()),
            queue: Mutex::default(),
            board: Mutex::default(),
            messages: Messages::default(),
            failure: OnceLock::new(),
            closed: OnceLock::new(),
            captured: AtomicBool::new(false),
        });
        attendant::attend(Arc::clone(&group))?;
        Ok(group)
    }

    pub(super) fn number(&self) -> u32 {
        self.device.number()
    }

    /// Collectives so far.
    pub(super) fn sequence(&self) -> u64 {
        self.queue.lock().number
    }

    /// Enqueues a collective.
    ///
    /// # Errors
    /// `InvalidArgument` and `Unsupported` before anything is enqueued; the first cause of a group that is dead.
    pub(super) fn submit(
        self: &Arc<Self>,
        request: Request,
        completion: Option<Completion>,
    ) -> Result<Arc<WorkState>> {
        let (rank, world) = (self.parent.rank(), self.parent.world());
        let named = request
            .stream
            .ok_or_else(|| Error::internal("an operation on a device without a stream"))?;
        request.check(rank, world)?;
        let stream = Stream::of(named)?;
        for (what, memory) in [("input", &request.input), ("output", &request.output)] {
            if let Some(memory) = memory {
                check_memory(self.device, memory, what)?;
            }
        }
        let way = self.way()?;
        // The host reduces what is staged.
        let op = request.op.filter(|_| matches!(*way, Way::Direct(_)));
        kernels::prepare(self.device, request.dtype, op)?;
        let timeout = request.timeout.unwrap_or_else(|| self.parent.timeout());
        let mut queue = self.queue.lock();
        self.check_alive()?;
        let captured = stream.is_capturing()?;
        let number = queue.number + 1;
        let work = WorkState::new(request.collective, number, timeout, completion);
        let work = Arc::new(work);
        let after = queue
            .stream
            .filter(|last| *last != named)
            .map(|_| queue.last);
        let shape = request.shape(rank, world);
        let pending = |plan: Option<Arc<Plan>>, algorithm| Pending {
            work: Arc::clone(&work),
            number,
            stream: named,
            print: fingerprint(&request, number, algorithm),
            unheard: match plan {
                Some(_) => Peers::others(rank, world),
                None => Peers::none(),
            },
            plan,
        };
        let enqueued = match &*way {
            Way::Direct(direct) => {
                let plan = direct.plan(&request, &shape, &mut queue.plans)?;
                let pending = pending(Some(Arc::clone(&plan)), 1);
                self.refuse_shared_stream(named)?;
                direct.flags.announce(number - 1, &pending.print.encode());
                self.put_up(pending, captured);
                let ticket = Ticket {
                    request: &request,
                    plan: &plan,
                    number,
                    rank,
                    world,
                    after,
                    captured,
                };
                direct.enqueue(&ticket, &stream, &self.words)
            }
            Way::Staged(_) if captured => return Err(uncapturable(&way)),
            Way::Staged(staged) => {
                let cut = staged.cut(&request, &shape)?;
                self.put_up(pending(None, 0), false);
                let target = (&stream, &self.words);
                staged.enqueue(cut, &request, target, (number, after, timeout))
            }
        };
        queue.number = number;
        if let Err(error) = enqueued {
            // The others wait for what is missing.
            self.fail(error.clone());
            return Err(error);
        }
        if captured {
            self.captured.store(true, Ordering::Relaxed);
            self.parent.end(&work, Ok(()));
        } else {
            (queue.last, queue.stream) = (number, Some(named));
        }
        drop(queue);
        self.parent.keep_record(&work);
        attendant::wake();
        Ok(work)
    }

    fn put_up(&self, pending: Pending, captured: bool) {
        if captured {
            return;
        }
        let mut board = self.board.lock();
        board.last = pending.number;
        board.pending.push_back(pending);
    }

    /// Two ranks of one process in one stream would wait for each other: what is behind cannot come first.
    fn refuse_shared_stream(&self, named: DeviceStream) -> Result<()> {
        let identity = self.parent.identity();
        let siblings: Vec<Arc<Self>> = HERE
            .lock()
            .iter()
            .filter(|(of, _)| *of == identity)
            .filter_map(|(_, group)| group.upgrade())
            .filter(|group| !std::ptr::eq(&raw const **group, self))
            .collect();
        let Some(other) = siblings.iter().find(|other| other.waits_in(named)) else {
            return Ok(());
        };
        Err(Error::invalid(format!(
            "ranks {} and {} are in one process and use the same stream of device {}: each needs a stream of its own, \
             since what one of them waits for comes after its wait",
            other.parent.rank(),
            self.parent.rank(),
            named.device
        )))
    }

    /// Whether an operation is under way in this stream.
    fn waits_in(&self, named: DeviceStream) -> bool {
        self.settle();
        let board = self.board.lock();
        board.pending.iter().any(|pending| pending.stream == named)
    }

    /// The way, found now if it has not been.
    fn way(self: &Arc<Self>) -> Result<Arc<Way>> {
        if let Some(way) = &*self.way.read() {
            return Ok(Arc::clone(way));
        }
        let _forming = self.forming.lock();
        self.check_alive()?;
        if let Some(way) = &*self.way.read() {
            return Ok(Arc::clone(way));
        }
        let way = form(self.device, &self.cpu).inspect_err(|error| {
            if error.code.is_fatal() {
                self.fail(error.clone());
            }
        })?;
        let way = Arc::new(way);
        *self.way.write() = Some(Arc::clone(&way));
        HERE.lock()
            .push((self.parent.identity(), Arc::downgrade(self)));
        Ok(way)
    }

    fn check_alive(&self) -> Result<()> {
        self.parent.check_alive()?;
        match self.failure.get() {
            Some((error, _)) => Err(Error {
                operation: None,
                ..error.clone()
            }),
            None => Ok(()),
        }
    }

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
        self.message(
            Collective::Send,
            (dtype, memory, tag),
            options,
            |wanted, stream| self.messages.send(wanted, to, stream),
        )
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
        self.message(
            Collective::Recv,
            (dtype, memory, tag),
            options,
            |wanted, stream| self.messages.receive(wanted, from, (stream, &self.cpu)),
        )
    }

    fn message(
        &self,
        collective: Collective,
        (dtype, memory, tag): (DataType, &Memory, u64),
        options: PointToPoint,
        enqueue: impl FnOnce(Wanted, &Stream) -> Result<()>,
    ) -> Result<Arc<WorkState>> {
        let named = options
            .stream
            .ok_or_else(|| Error::internal("a message of a device without a stream"))?;
        if !memory.len().is_multiple_of(dtype.size()) {
            return Err(Error::invalid(format!(
                "{collective}: {} bytes are not a whole number of {dtype} elements",
                memory.len()
            )));
        }
        let stream = Stream::of(named)?;
        check_memory(self.device, memory, "buffer")?;
        self.device.memory_operations()?;
        self.check_alive()?;
        if stream.is_capturing()? {
            return Err(Error::unsupported(format!(
                "{collective} cannot be captured in a graph: messages of device memory go through the host"
            )));
        }
        let timeout = options.timeout.unwrap_or_else(|| self.parent.timeout());
        let work = WorkState::new(collective, 0, timeout, options.completion);
        let work = Arc::new(work);
        let wanted = Wanted {
            dtype,
            memory,
            tag,
            timeout,
            work: Arc::clone(&work),
        };
        if let Err(error) = enqueue(wanted, &stream) {
            if error.code.is_fatal() {
                self.fail(error.clone());
            }
            return Err(error);
        }
        self.parent.keep_record(&work);
        attendant::wake();
        Ok(work)
    }

    /// Waits until the stream has got past an operation, or it has failed.
    ///
    /// # Errors
    /// The operation's own; `Timeout` when the time is up first.
    pub(crate) fn wait(&self, work: &WorkState, timeout: Option<Duration>) -> Result<()> {
        if let Some(result) = work.result() {
            return result.clone();
        }
        crate::fork::check()?;
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut looks = 0_u32;
        loop {
            self.settle();
            if let Some(result) = work.result() {
                return result.clone();
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Err(Error::new(
                    Code::Timeout,
                    format!(
                        "the wait ended after {:.3} s, before the operation: {}",
                        timeout.unwrap_or_default().as_secs_f64(),
                        self.describe()
                    ),
                )
                .with_operation(work.name()));
            }
            pause(&mut looks);
        }
    }

    /// Waits for everything that is under way here.
    ///
    /// # Errors
    /// The first failure.
    pub(super) fn drain(&self) -> Result<()> {
        let last = {
            let board = self.board.lock();
            board.pending.back().map(|last| Arc::clone(&last.work))
        };
        for work in self.messages.works().into_iter().chain(last) {
            self.wait(&work, None)?;
        }
        Ok(())
    }

    /// Waits until everything here has ended, messages too, or until `until`.
    ///
    /// # Errors
    /// The first failure; `Timeout` when the time is up first.
    pub(super) fn finish(&self, until: Option<Instant>) -> Result<()> {
        let last = {
            let board = self.board.lock();
            board.pending.back().map(|last| Arc::clone(&last.work))
        };
        let works = last.into_iter().chain(self.messages.works());
        works.into_iter().try_for_each(|work| {
            self.wait(
                &work,
                until.map(|until| until.saturating_duration_since(Instant::now())),
            )
        })
    }

    /// Ends the operations that the stream has got past.
    pub(crate) fn settle(&self) {
        let mut passed = Vec::new();
        {
            let mut board = self.board.lock();
            while let Some(front) = board.pending.front()
                && self.words.has_passed(Word::Done, front.number)
            {
                passed.extend(board.pending.pop_front());
            }
        }
        for mut pending in passed {
            let verdict = self.compare(&mut pending).and_then(|()| self.check_peers());
            if let Err(error) = &verdict {
                self.fail(error.clone());
            }
            let result = match self.failure.get() {
                Some((error, _)) => Err(Error {
                    operation: None,
                    ..error.clone()
                }),
                None => verdict,
            };
            self.parent.end(&pending.work, result);
        }
    }

    /// Compares what the peers have announced of an operation with this rank's.
    fn compare(&self, pending: &mut Pending) -> Result<()> {
        let way = self.way.read();
        let Some(Way::Direct(direct)) = way.as_deref() else {
            return Ok(());
        };
        for peer in pending.unheard.iter() {
            let announced = direct.flags.announced(peer, pending.number - 1);
            if let Announced::As(bytes) = announced
                && let Some(theirs) = Fingerprint::decode(&bytes)
                && theirs != pending.print
            {
                let error = pending.print.mismatch(&theirs, self.parent.rank(), peer);
                return Err(error.with_operation(pending.work.name()));
            }
            if announced != Announced::NotYet {
                pending.unheard = pending.unheard.without(peer);
            }
        }
        Ok(())
    }

    /// Refuses what peers that have failed may have spoilt.
    fn check_peers(&self) -> Result<()> {
        let way = self.way.read();
        let Some(Way::Direct(direct)) = way.as_deref() else {
            return Ok(());
        };
        let Some(peer) = direct.flags.marked(Mark::Failed).next() else {
            return Ok(());
        };
        drop(way);
        // It has told the host's group why, or is about to.
        Err(self.cpu.lost(|_| true).unwrap_or_else(|| {
            Error::new(
                Code::Aborted,
                format!(
                    "{} has failed in an earlier operation",
                    self.cpu.name_of(peer)
                ),
            )
            .with_peer(peer)
        }))
    }

    /// The group is dead of `error`; the first one stays.
    pub(super) fn fail(&self, error: Error) {
        if self.failure.set((error.clone(), Instant::now())).is_err() {
            return;
        }
        if let Some(Way::Direct(direct)) = self.way.read().as_deref() {
            // Before anything that streams do when they are let pass.
            direct.flags.mark(Mark::Failed);
        }
        self.cpu.fail_of(error.clone());
        self.parent.fail_of(error);
        self.release();
        attendant::wake();
    }

    /// Lets streams pass whatever they wait for.
    fn release(&self) {
        match self.way.read().as_deref() {
            Some(Way::Direct(direct)) => direct.flags.release(),
            Some(Way::Staged(staged)) => staged.release(&self.words),
            None => {}
        }
        self.messages.release();
        self.words
            .store(Word::Ordered, self.board.lock().last as u32);
    }

    /// Whether the attendant is needed.
    pub(super) fn is_busy(&self) -> bool {
        !self.board.lock().pending.is_empty()
            || !self.messages.works().is_empty()
            || self.closed.get().is_some()
    }

    /// The attendant's turn.
    pub(super) fn attend(self: &Arc<Self>) -> Found {
        self.settle();
        let mut ended = Vec::new();
        let found = match self.failure.get() {
            None => self.advance(&mut ended),
            Some((error, since)) => {
                self.release();
                self.abandon(error, since.elapsed() > GRACE);
                match self.is_drained() {
                    true => Ok(Found::Nothing),
                    false => Ok(Found::Streams),
                }
            }
        };
        for (work, result) in ended {
            self.parent.end(&work, result);
        }
        let found = found.unwrap_or_else(|error| {
            self.fail(error);
            Found::Moved
        });
        match self.closed.get() {
            Some(since) => self.take_down(*since, found),
            // What is replayed still has to be let pass.
            None if found == Found::Nothing && self.failure.get().is_some() => {
                match self.captured.load(Ordering::Relaxed) {
                    true => Found::Streams,
                    false => Found::Nothing,
                }
            }
            None => found,
        }
    }

    /// Moves what can be moved, and looks around now and then.
    fn advance(&self, ended: &mut Vec<super::messages::Ended>) -> Result<Found> {
        let (mut moved, mut duty) = (false, false);
        if let Some(Way::Staged(staged)) = self.way.read().as_deref() {
            (moved, duty) = staged.advance(&self.words)?;
        }
        let messages = self.messages.advance(&self.cpu, ended)?;
        moved |= messages.0;
        duty |= messages.1;
        self.look_around()?;
        let waits = !self.board.lock().pending.is_empty();
        Ok(match (moved, duty, waits) {
            (true, _, _) => Found::Moved,
            (_, true, _) => Found::Duty,
            (_, _, true) => Found::Streams,
            _ => Found::Nothing,
        })
    }

    /// Ends what failed, where neither the stream nor the host uses its memory any more, or `all` of it.
    fn abandon(&self, error: &Error, all: bool) {
        let mut ended = Vec::new();
        self.messages.abandon(all, &mut ended);
        if all {
            let mut board = self.board.lock();
            ended.extend(board.pending.drain(..).map(|pending| pending.work));
        }
        for work in ended {
            let error = Error {
                operation: None,
                ..error.clone()
            };
            self.parent.end(&work, Err(error));
        }
    }

    /// Whether no stream is in an operation of this group, as far as it told.
    fn is_drained(&self) -> bool {
        let last = self.board.lock().last;
        let host = match self.way.read().as_deref() {
            Some(Way::Staged(staged)) => staged.is_quiet(),
            _ => true,
        };
        host && self.words.has_passed(Word::Done, last) && self.messages.works().is_empty()
    }

    /// Looks for mismatches, deaths and deadlines.
    fn look_around(&self) -> Result<()> {
        let now = Instant::now();
        let mut board = self.board.lock();
        let due = board.looked.is_none_or(|last| now >= last + LOOK);
        if board.pending.is_empty() || !due {
            return Ok(());
        }
        board.looked = Some(now);
        for pending in board.pending.iter_mut().take(16) {
            self.compare(pending)?;
        }
        let late = board
            .pending
            .iter()
            .find(|pending| {
                pending
                    .work
                    .deadline
                    .is_some_and(|deadline| now >= deadline)
            })
            .map(|pending| Arc::clone(&pending.work));
        let first = board.pending.front().map(|pending| pending.number - 1);
        drop(board);
        self.check_peers()?;
        if let Some(error) = self.parent.error() {
            return Err(error);
        }
        if let Some(error) = self.cpu.lost(|peer| self.has_not_called(peer, first)) {
            return Err(error);
        }
        match late {
            Some(work) if work.result().is_none() => Err(self.overdue(&work)),
            _ => Ok(()),
        }
    }

    /// Whether a peer has not come to operation `number`, counted from 0.
    fn has_not_called(&self, peer: Rank, number: Option<u64>) -> bool {
        match (self.way.read().as_deref(), number) {
            (Some(Way::Direct(direct)), Some(number)) => {
                direct.flags.announced(peer, number) == Announced::NotYet
            }
            _ => false,
        }
    }

    fn overdue(&self, work: &WorkState) -> Error {
        let (words, blamed) = self.waits();
        let mut error = Error::new(
            Code::Timeout,
            format!(
                "timed out after {:.3} s on rank {}: {words}; is that rank stuck, slow, or in another operation?",
                work.started.elapsed().as_secs_f64(),
                self.parent.rank(),
            ),
        )
        .with_operation(work.name());
        error.peer = blamed;
        error
    }

    /// What is waited for, in words.
    pub(crate) fn describe(&self) -> String {
        self.waits().0
    }

    /// In words, and the first rank that is waited for.
    fn waits(&self) -> (String, Option<Rank>) {
        let board = self.board.lock();
        let Some(front) = board.pending.front() else {
            return (self.cpu.waits(), None);
        };
        let name = front.work.name();
        if !self.words.has_passed(Word::Begun, front.number) {
            let text = format!(
                "this rank's stream has not come to {name} yet: work that was enqueued before it is still under way"
            );
            return (text, None);
        }
        let way = self.way.read();
        let (Some(Way::Direct(direct)), Some(plan)) = (way.as_deref(), &front.plan) else {
            return (format!("{name}: {}", self.cpu.waits()), None);
        };
        let at = self.words.load(Word::Step) as usize;
        let ranks = (self.parent.rank(), self.parent.world());
        let (missing, what) = match plan.steps.get(at) {
            Some(step) => direct.missing(step, front.number, ranks),
            None => (Vec::new(), ""),
        };
        if missing.is_empty() {
            return (format!("{name} is being carried out on the device"), None);
        }
        let described = missing.iter().map(|&peer| {
            let state = match direct.flags.announced(peer, front.number - 1) {
                Announced::NotYet => "has not called it",
                _ => "has called it, its stream has not come to it",
            };
            format!("{} ({state})", self.cpu.name_of(peer))
        });
        let described: Vec<String> = described.collect();
        let text = format!("{name} waits for {} {what}", described.join(", "));
        (text, missing.first().copied())
    }

    /// Leaves in good order; what is still under way fails. What the driver holds is given back soon after.
    pub(super) fn close(&self) {
        if self.closed.get().is_some() {
            return;
        }
        self.settle();
        let unfinished = !self.board.lock().pending.is_empty() || !self.messages.works().is_empty();
        if unfinished && self.failure.get().is_none() {
            let waits = self.describe();
            self.fail(Error::new(
                Code::Aborted,
                format!(
                    "rank {} closed its communicator while operations were under way: {waits}",
                    self.parent.rank()
                ),
            ));
        }
        // Others may have more chunks of an operation that this rank's stream has got past.
        let since = Instant::now();
        let mut looks = 0;
        while self.has_duty() && self.failure.get().is_none() && since.elapsed() < GRACE {
            pause(&mut looks);
        }
        self.cpu.close();
        let _ = self.closed.set(Instant::now());
        attendant::wake();
    }

    /// Whether the host has something to do for others.
    fn has_duty(&self) -> bool {
        match self.way.read().as_deref() {
            Some(Way::Staged(staged)) => staged.is_busy(),
            _ => false,
        }
    }

    /// Takes down what is closed, once no stream of this rank uses it.
    fn take_down(self: &Arc<Self>, since: Instant, found: Found) -> Found {
        if found != Found::Nothing && since.elapsed() < 2 * GRACE {
            return found.max(Found::Streams);
        }
        let way = self.way.write().take();
        if let Some(way) = way {
            match Arc::try_unwrap(way) {
                Ok(way) => {
                    let has_failed = self.failure.get().is_some();
                    dispose(move || take_apart(way, has_failed));
                }
                Err(way) => {
                    // A call that has just found it closed.
                    *self.way.write() = Some(way);
                    return Found::Streams;
                }
            }
        }
        self.messages.clear();
        HERE.lock()
            .retain(|(_, group)| !std::ptr::eq(group.as_ptr(), Arc::as_ptr(self)));
        Found::Gone
    }

    /// What it holds: bytes of the device, bytes of registered host memory, operations under way.
    pub(super) fn memory(&self) -> (u64, u64, u64) {
        let (device, host) = match self.way.read().as_deref() {
            Some(Way::Direct(direct)) if direct.windows.is_some() => (2 * direct.half, 0),
            Some(Way::Staged(staged)) => (0, staged.bytes()),
            _ => (0, 0),
        };
        let under_way = self.board.lock().pending.len() + self.messages.works().len();
        let host = host + self.messages.bytes();
        (device as u64, host as u64, under_way as u64)
    }
}

/// Gives back what a way holds. The others may still read this rank's window, and have it mapped.
fn take_apart(way: Way, has_failed: bool) {
    let Way::Direct(direct) = way else {
        return;
    };
    let Some(windows) = direct.windows else {
        return;
    };
    let others = Peers::others(windows.rank(), windows.len());
    let own = windows.close_peers();
    direct.flags.mark(Mark::Unmapped);
    let since = Instant::now();
    loop {
        let gone: Peers = direct.flags.marked(Mark::Unmapped).collect();
        let still: Vec<Rank> = others.iter().filter(|peer| !gone.contains(*peer)).collect();
        let is_read = (0..2).all(|half| {
            let spot = Spot { half, meeting: 0 };
            let readers = still.iter().copied();
            direct
                .flags
                .missing(Signal::Empty, spot, readers)
                .is_empty()
        });
        let limit = match is_read || has_failed {
            true => PATIENCE,
            false => READING,
        };
        if still.is_empty() || since.elapsed() > limit {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(own);
}

/// Gives the core away, and sleeps for moments when that has not helped.
pub(super) fn pause(looks: &mut u32) {
    *looks = looks.saturating_add(1);
    match *looks {
        0..=200 => std::thread::yield_now(),
        201..=400 => std::thread::sleep(Duration::from_micros(20)),
        _ => std::thread::sleep(Duration::from_micros(200)),
    }
}

fn fingerprint(request: &Request, sequence: u64, algorithm: u8) -> Fingerprint {
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
    Fingerprint {
        sequence,
        collective: request.collective as u8,
        dtype: request.dtype as u8,
        op: request.op.map_or(0, ReduceOp::number),
        algorithm,
        root: request.root as u32,
        count: count as u64,
        length: 0,
    }
}

fn uncapturable(way: &Way) -> Error {
    let reason = match way {
        Way::Staged(staged) => staged.reason.as_str(),
        Way::Direct(_) => "",
    };
    Error::unsupported(format!(
        "collectives of this communicator cannot be captured in a graph, because they go through host memory: {reason}"
    ))
}
