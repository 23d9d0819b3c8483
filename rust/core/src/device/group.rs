//! The operations of a communicator on the memory of one device.
//!
//! A submission is checked, numbered and enqueued under the lock of the queue, which the attendant never takes: to
//! enqueue may have to wait for room in a stream, and that stream for the attendant. Operations under way are on the
//! board, whose lock is held for moments only.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::RwLock;

use crate::engine::{Completion, Group, Request, WorkState, interrupted};
use crate::error::{Code, Error, Result};
use crate::interrupts::Checks;
use crate::locks::Mutex;
use crate::plan::Plan;
use crate::plan::signals::Peers;
use crate::transport::cuda::driver::{Device, MemoryOperation, Stream, StreamIdentity};
use crate::transport::cuda::kernels;
use crate::types::Rank;

use super::attendant;
use super::commands::Ticket;
use super::copies::check_memory;
use super::direct::Direct;
use super::formation::form;
use super::messages::Messages;
use super::pause::pause;
use super::staged::Staged;
use super::state::{DeviceGroup, HERE, Pending, Queue, Rest, Way};
use super::words::{Word, Words};

/// A collective that is being enqueued.
struct Enqueueing<'a> {
    request: &'a Request,
    stream: &'a Stream,
    /// Of the stream, where it is known and captures nothing.
    identity: Option<StreamIdentity>,
    work: &'a Arc<WorkState>,
    number: u64,
    /// The last collective's number, unless that is known to have been on the same stream.
    after: Option<u64>,
    captured: bool,
    timeout: Duration,
}

impl Enqueueing<'_> {
    /// As the board has it, of a way that has no plan and hears nothing of peers.
    fn pending(&self, algorithm: u8) -> Pending {
        Pending {
            work: Arc::clone(self.work),
            number: self.number,
            stream: self.identity,
            print: self.request.fingerprint(self.number, algorithm),
            plan: None,
            first_wait: 0,
            unheard: Peers::none(),
        }
    }
}

impl DeviceGroup {
    /// The `index`-th device that this rank uses with the group `parent`.
    pub(super) fn new(parent: &Arc<Group>, device: u32, index: usize) -> Result<Arc<Self>> {
        let device = Device::of(device)?;
        let ranks: Vec<Rank> = (0..parent.world()).collect();
        let label = [b"device ".as_slice(), &index.to_le_bytes()].concat();
        let words = Words::new(device)?;
        let messages = Messages::new(device)?;
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
            messages,
            failure: OnceLock::new(),
            closed: OnceLock::new(),
            captured: AtomicBool::new(false),
            health: Arc::default(),
            rest: Rest::default(),
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
        let named = request
            .stream
            .ok_or_else(|| Error::internal("an operation on a device without a stream"))?;
        request.check(self.parent.rank(), self.parent.world())?;
        let entered = self.device.enter()?;
        let (stream, captured) = Stream::of_now(named)?;
        if !captured {
            self.map_buffers(&request);
        }
        let _call = self.come_in()?;
        let way = self.prepare(&request, captured)?;
        let timeout = request.timeout.unwrap_or_else(|| self.parent.timeout());
        let mut queue = self.queue.lock();
        self.check_alive()?;
        let number = queue.number + 1;
        let is_awaited = completion.is_some();
        let work = WorkState::new(
            request.collective,
            number,
            (Instant::now(), timeout),
            completion,
        );
        let work = Arc::new(work);
        let identity = match captured {
            true => None,
            false => stream.identity_outside_captures(),
        };
        let is_same = identity.is_some() && identity == queue.stream;
        let turn = Enqueueing {
            request: &request,
            stream: &stream,
            identity,
            work: &work,
            number,
            after: (queue.last > 0 && !is_same).then_some(queue.last),
            captured,
            timeout,
        };
        let (enqueued, is_staged) = self.enqueue(&way, &turn, &mut queue)?;
        drop(entered);
        queue.number = number;
        if let Err(error) = enqueued {
            // The others wait for what is missing.
            self.fail(error.clone());
            if !captured {
                self.take_back(number, &stream);
            }
            return Err(error);
        }
        if captured {
            self.parent.end(&work, Ok(()));
        } else {
            (queue.last, queue.stream) = (number, identity);
        }
        drop(queue);
        self.parent.keep_record(&work);
        match is_awaited || is_staged {
            true => attendant::hurry(),
            false => attendant::wake(),
        }
        Ok(work)
    }

    /// Maps buffers of peers that `request` may read in place, as far as that is possible while no stream waits for a peer.
    fn map_buffers(&self, request: &Request) {
        let Some(way) = self.way.read().clone() else {
            return;
        };
        let Way::Direct(direct) = &*way else {
            return;
        };
        let shape = request.shape(self.parent.rank(), self.parent.world());
        if let Some(places) = direct.places.as_deref()
            && direct.is_in_place(request, &shape)
        {
            places.tell(&direct.flags);
            if places.lacks_something(&direct.flags) {
                self.await_stillness(places.patience(), || places.map(&direct.flags));
            }
        }
    }

    /// Returns how it went once a part of the collective may be in the stream, and whether it goes through host memory.
    ///
    /// # Errors
    /// What refuses it before.
    fn enqueue(
        &self,
        way: &Way,
        turn: &Enqueueing<'_>,
        queue: &mut Queue,
    ) -> Result<(Result<()>, bool)> {
        let world = self.parent.world();
        Ok(match way {
            Way::Direct(direct) => {
                let brief = direct.brief(turn.request, world);
                match brief.filter(|_| !turn.captured) {
                    Some(brief) => (self.enqueue_brief(direct, brief, turn)?, true),
                    None => (self.enqueue_direct(direct, turn, queue)?, false),
                }
            }
            Way::Staged(_) if turn.captured => return Err(uncapturable(way)),
            Way::Staged(staged) => (self.enqueue_staged(staged, turn.pending(0), turn)?, true),
        })
    }

    /// The way that `request` goes, with what it needs of the device there.
    fn prepare(self: &Arc<Self>, request: &Request, captured: bool) -> Result<Arc<Way>> {
        for (what, memory) in [("input", &request.input), ("output", &request.output)] {
            if let Some(memory) = memory {
                check_memory(self.device, memory, what)?;
            }
        }
        let mut way = self.way()?;
        // While a graph is captured nothing else may have to wait.
        if let Way::Direct(direct) = &*way
            && !captured
            && direct.wanted(request, self.parent.world()).is_some()
        {
            way = self.widen(request)?;
        }
        // The host reduces what is staged.
        let op = request.op.filter(|_| matches!(*way, Way::Direct(_)));
        if !kernels::is_prepared(self.device, request.dtype, op) {
            // The driver may wait for it anyhow, and would not hear that it has failed.
            self.drain()?;
            kernels::prepare(self.device, request.dtype, op)?;
        }
        Ok(way)
    }

    /// Returns how it went once a part of the collective may be in the stream.
    ///
    /// # Errors
    /// What refuses it before.
    fn enqueue_direct(
        &self,
        direct: &Direct,
        turn: &Enqueueing<'_>,
        queue: &mut Queue,
    ) -> Result<Result<()>> {
        let (rank, world) = (self.parent.rank(), self.parent.world());
        let (request, number) = (turn.request, turn.number);
        let shape = request.shape(rank, world);
        let plan = direct.plan(request, &shape, &mut queue.plans)?;
        self.refuse_shared_stream(turn.identity)?;
        let pending = turn.pending(1);
        let print = pending.print.encode();
        let in_place = direct.in_place(&plan, (request, &shape), &print);
        let plan = match &in_place {
            Some((in_place, _)) => in_place.complete(plan),
            None => plan,
        };
        // From 1: words that nothing has been left in are 0.
        let first_wait = queue.steps.wrapping_add(1);
        queue.steps = queue.steps.wrapping_add(plan.steps.len() as u32);
        let pending = Pending {
            plan: Some(Arc::clone(&plan)),
            first_wait,
            unheard: Peers::others(rank, world),
            ..pending
        };
        direct.flags.announce(number - 1, &print);
        match turn.captured {
            true => self.put_into_graph(&pending, &plan),
            false => self.put_up(pending),
        }
        let ticket = Ticket {
            request,
            plan: &plan,
            number,
            rank,
            world,
            contributors: shape.contributors(),
            after: turn.after,
            first_wait,
            captured: turn.captured,
            in_place: in_place.as_ref().map(|(found, number)| (found, *number)),
        };
        Ok(direct.enqueue(&ticket, turn.stream, &self.words))
    }

    /// As [`Self::enqueue_direct`], of what goes through host memory for once. Peers are told of it as of what does not.
    fn enqueue_brief(
        &self,
        direct: &Direct,
        brief: &Staged,
        turn: &Enqueueing<'_>,
    ) -> Result<Result<()>> {
        self.refuse_shared_stream(turn.identity)?;
        let pending = Pending {
            unheard: Peers::others(self.parent.rank(), self.parent.world()),
            ..turn.pending(1)
        };
        let print = pending.print.encode();
        direct.flags.announce(turn.number - 1, &print);
        self.enqueue_staged(brief, pending, turn)
    }

    /// As [`Self::enqueue_direct`].
    fn enqueue_staged(
        &self,
        staged: &Staged,
        pending: Pending,
        turn: &Enqueueing<'_>,
    ) -> Result<Result<()>> {
        let shape = turn.request.shape(self.parent.rank(), self.parent.world());
        let cut = staged.cut(turn.request, &shape)?;
        self.put_up(pending);
        let target = (turn.stream, &self.words);
        let order = (turn.number, turn.after, turn.timeout);
        Ok(staged.enqueue(cut, turn.request, target, order, attendant::hurry))
    }

    /// From now on it may be carried out at any time, and the host does not know of it before.
    fn put_into_graph(&self, pending: &Pending, plan: &Arc<Plan>) {
        if self.parent.world() == 1 {
            return;
        }
        let mut board = self.board.lock();
        board.replays.remember(&pending.work, pending.number, plan);
        self.captured.store(true, Ordering::Relaxed);
    }

    fn put_up(&self, pending: Pending) {
        let mut board = self.board.lock();
        board.last = pending.number;
        board.pending.push_back(pending);
    }

    /// Takes back a collective whose commands are in the stream in part, after the group has failed. Where the stream can
    /// no longer say that it has got past them, it is let pass for a while.
    fn take_back(&self, number: u64, stream: &Stream) {
        let end = MemoryOperation::Write {
            address: self.words.address(Word::Done),
            value: number as u32,
        };
        let is_told = stream.operate(&[end]).is_ok();
        let mut board = self.board.lock();
        board.pending.retain(|pending| pending.number != number);
        if !is_told {
            board.last = board.pending.back().map_or_else(
                || u64::from(self.words.load(Word::Done)),
                |pending| pending.number,
            );
            board.is_torn = true;
        }
    }

    /// Two ranks of one process in one stream would wait for each other: what is behind cannot come first.
    fn refuse_shared_stream(&self, stream: Option<StreamIdentity>) -> Result<()> {
        let Some(stream) = stream else {
            return Ok(());
        };
        let identity = self.parent.identity();
        let siblings: Vec<Arc<Self>> = HERE
            .lock()
            .iter()
            .filter(|(of, _)| *of == identity)
            .filter_map(|(_, group)| group.upgrade())
            .filter(|group| !std::ptr::eq(&raw const **group, self))
            .collect();
        let Some(other) = siblings.iter().find(|other| other.waits_in(stream)) else {
            return Ok(());
        };
        Err(Error::invalid(format!(
            "ranks {} and {} are in one process and use the same stream of device {}: each needs a stream of its own, \
             since what one of them waits for comes after its wait",
            other.parent.rank(),
            self.parent.rank(),
            self.number()
        )))
    }

    /// Whether an operation is under way in this stream.
    fn waits_in(&self, stream: StreamIdentity) -> bool {
        let board = self.board.lock();
        board.pending.iter().any(|pending| {
            pending.stream == Some(stream) && !self.words.has_passed(Word::Done, pending.number)
        })
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

    pub(super) fn check_alive(&self) -> Result<()> {
        self.parent.check_alive()?;
        match self.failure.get() {
            Some((error, _)) => Err(Error {
                operation: None,
                ..error.clone()
            }),
            None => Ok(()),
        }
    }

    /// Waits until the stream has got past an operation, or it has failed.
    ///
    /// # Errors
    /// The operation's own; `Timeout` when the time is up first.
    pub(crate) fn wait(&self, work: &WorkState, timeout: Option<Duration>) -> Result<()> {
        if let Some(result) = work.result() {
            return result.clone();
        }
        self.parent.home.check()?;
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut looks = 0_u32;
        let mut checks = Checks::default();
        let mut raised = None;
        loop {
            self.settle();
            if let Some(result) = work.result() {
                return raised.map_or_else(|| result.clone(), Err);
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
            checks.next();
            if checks.are_due()
                && let Err(reason) = checks.run()
            {
                let error = interrupted(&self.parent.own_number(), work, &reason);
                self.fail(error.clone());
                raised = Some(error);
            }
            pause(&mut looks);
        }
    }

    /// Waits for the collectives that are under way here. Not for messages, whose other side may come only after what
    /// comes after this.
    ///
    /// # Errors
    /// The first failure.
    pub(super) fn drain(&self) -> Result<()> {
        self.last().map_or(Ok(()), |work| self.wait(&work, None))
    }

    /// Waits until everything here has ended, messages too, or until `until`.
    ///
    /// # Errors
    /// The first failure; `Timeout` when the time is up first.
    pub(super) fn finish(&self, until: Option<Instant>) -> Result<()> {
        let works = self.last().into_iter().chain(self.messages.works());
        works.into_iter().try_for_each(|work| {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            self.wait(&work, left)
        })
    }

    /// The last collective that a stream has not got past.
    fn last(&self) -> Option<Arc<WorkState>> {
        let board = self.board.lock();
        board.pending.back().map(|last| Arc::clone(&last.work))
    }

    /// Its resources: bytes of the device, bytes of registered host memory, operations under way.
    pub(super) fn memory(&self) -> (u64, u64, u64) {
        let (device, host) = match self.way.read().as_deref() {
            Some(way) => {
                let device = match way {
                    Way::Direct(direct) => direct.bytes(),
                    Way::Staged(_) => 0,
                };
                (device, way.staged().map_or(0, Staged::bytes))
            }
            None => (0, 0),
        };
        let under_way = self.board.lock().pending.len() + self.messages.works().len();
        let host = host + self.messages.bytes();
        let device = device + self.messages.depots.bytes();
        (device as u64, host as u64, under_way as u64)
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
