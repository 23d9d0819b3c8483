//! The direct way: ranks of one host whose devices read each other's windows. An operation is enqueued whole on the
//! caller's stream; ranks meet there by words in pages that they share, and no host waits for anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustc_hash::FxHashMap;

use crate::engine::{PlanKey, Request, Sizes};
use crate::error::{Error, Result};
use crate::plan::signals::{HALVES, Semaphore};
use crate::plan::windows::{self, Room, Shots};
use crate::plan::{Buffer, Plan, Shape, Sources, Span, Step};
use crate::transport::cuda::driver::Stream;
use crate::transport::cuda::flags::{Batch, Flags, Receipt, Signal, Spot};
use crate::transport::cuda::kernels::{self, Guard, Segment};
use crate::transport::cuda::window::Windows;
use crate::types::{Collective, Rank, ReduceOp};

use super::copies::{Copies, locate, try_each_run};
use super::staged::Staged;
use super::words::{PASSED, Word, Words, replayed};

/// Work on memory is fastest from multiples of so many bytes on.
const ALIGNMENT: usize = 16;

/// From this size on two shots are better where they save anything.
const TWO_SHOTS_FROM: usize = 256 << 10;

/// Plans kept for reuse; beyond it the cache starts anew.
const CACHED_PLANS: usize = 256;

/// Bytes of the longest buffer of a collective that goes through host memory where processes share a device. On an H200 with 16
/// cores an all_reduce of 512 KiB between 2 ranks takes 0.20 ms so and 0.18 ms through windows at the rate of many calls, and
/// 0.24 and 0.45 ms where each call is waited for; 1 MiB between 4 ranks 0.52 and 0.55 ms, and 0.56 and 1.08 ms.
fn most_brief(world: usize) -> usize {
    (256 << 10) * world.min(4)
}

/// How often the ranks meet in vain for longer windows before they do no more.
const PUT_OFF: usize = 16;

/// Bytes of a slot for them: the longest fits one.
pub(super) fn brief_slot(world: usize) -> usize {
    2 * most_brief(world)
}

/// About what a device could move in the time in which it goes from one process to another (an H200: 0.14 ms at 4.2 TB/s).
const TURN: usize = 512 << 20;

/// What a group has that goes the direct way.
pub(super) struct Direct {
    pub(super) flags: Arc<Flags>,
    /// `None` in a world of one.
    pub(super) windows: Option<Arc<Windows>>,
    /// Those from before: operations may be under way in them, and graphs use them as long as there are any.
    pub(super) older: Vec<Arc<Windows>>,
    /// For short collectives, where processes share a device: no copy there waits for this process's turn.
    pub(super) brief: Option<Arc<Staged>>,
    /// Bytes of a half.
    pub(super) half: usize,
    /// The most that a half may become; the same on all ranks.
    pub(super) most: AtomicUsize,
    /// How often growing was put off, which is the same on all ranks.
    pub(super) put_off: AtomicUsize,
    /// How many devices the ranks have together.
    pub(super) devices: usize,
    /// Several processes use one of them, so that their work takes turns there.
    pub(super) takes_turns: bool,
}

/// Plans by what they were made from.
pub(super) type Plans = FxHashMap<PlanKey, Arc<Plan>>;

/// An operation on its way into a stream.
pub(super) struct Ticket<'a> {
    pub(super) request: &'a Request,
    pub(super) plan: &'a Plan,
    pub(super) number: u64,
    pub(super) rank: Rank,
    pub(super) world: usize,
    /// The last operation's number, unless that is known to have been on the same stream.
    pub(super) after: Option<u64>,
    /// The number of the wait that its first step would be.
    pub(super) first_wait: u32,
    /// It becomes part of a graph: it may be carried out many times, so that all it writes are constants.
    pub(super) captured: bool,
}

impl Direct {
    /// The plan of a request, and which shots it takes; the same on all ranks.
    ///
    /// # Errors
    /// `Internal` for what should have been refused before.
    pub(super) fn plan(
        &self,
        request: &Request,
        shape: &Shape,
        plans: &mut Plans,
    ) -> Result<Arc<Plan>> {
        let size = request.dtype.size();
        let premultiplied = matches!(request.op, Some(ReduceOp::PremulSum(_)));
        let key = PlanKey::of(shape, size).map(|key| PlanKey {
            premultiplied,
            ..key
        });
        if let Some(plan) = key.as_ref().and_then(|key| plans.get(key)) {
            return Ok(Arc::clone(plan));
        }
        let align = (ALIGNMENT / size).max(1);
        let room = Room {
            half: self.half / size,
            align,
        };
        let shots = self.shots(request, shape);
        let plan = windows::build(shape, &room, shots, premultiplied).ok_or_else(|| {
            Error::internal(format!("no plan over windows for {}", request.collective))
        })?;
        let plan = Arc::new(plan);
        if let Some(key) = key {
            if plans.len() >= CACHED_PLANS {
                plans.clear();
            }
            plans.insert(key, Arc::clone(&plan));
        }
        Ok(plan)
    }

    /// Counted in what crosses the memory of one device, or the wires between several.
    fn shots(&self, request: &Request, shape: &Shape) -> Shots {
        let bytes = match request.sizes {
            Sizes::Even(count) => count * request.dtype.size(),
            _ => 0,
        };
        let pays = match request.collective {
            // With two ranks a half of everything is read in either case.
            Collective::AllReduce => shape.world > 2,
            // Between devices, a root's wire is the bottleneck; within one there is none.
            Collective::Reduce | Collective::Broadcast => shape.world > 2 && self.devices > 1,
            _ => false,
        };
        match (pays, self.takes_turns && self.devices == 1) {
            // A second meeting costs a device about half a turn more for each chunk. Of that chunk the ranks move
            // 5 world - 1 times its bytes then, and world (world + 3) times in one shot.
            (true, true) => {
                let saved = bytes.min(self.half) * (shape.world - 1).pow(2);
                match 2 * saved >= TURN {
                    true => Shots::ByFirst,
                    false => Shots::One,
                }
            }
            (true, false) if bytes >= TWO_SHOTS_FROM => Shots::Two,
            _ => Shots::One,
        }
    }

    /// What carries out `request` through host memory, if that is better. Counts that not every rank knows say nothing.
    pub(super) fn brief(&self, request: &Request, world: usize) -> Option<&Staged> {
        let bytes = longest_buffer(request, world)?;
        let is_brief = (1..=most_brief(world)).contains(&bytes);
        self.brief.as_deref().filter(|_| is_brief)
    }

    /// How long a half should become before `request` is enqueued, if it is too short for it and may grow: where processes
    /// share a device, each chunk costs it a turn of every rank. Counts that not every rank knows say nothing.
    pub(super) fn wanted(&self, request: &Request, world: usize) -> Option<usize> {
        let blocks = match request.collective {
            Collective::ReduceScatter | Collective::AllToAll | Collective::Scatter => world,
            _ => 1,
        };
        let bytes = even_bytes(request, blocks)?;
        let most = self.most.load(Ordering::Relaxed);
        let wanted = bytes.checked_next_power_of_two().unwrap_or(most).min(most);
        (bytes > self.half && wanted > self.half).then_some(wanted)
    }

    /// Bytes of this rank's windows.
    pub(super) fn bytes(&self) -> usize {
        let windows = self.older.iter().chain(&self.windows);
        windows
            .map(|windows| HALVES * windows.own().half_bytes())
            .sum()
    }

    /// Notes that the windows could not grow this time. To be called on all ranks alike.
    pub(super) fn put_off(&self) {
        if self.put_off.fetch_add(1, Ordering::Relaxed) >= PUT_OFF {
            self.stay();
        }
    }

    /// Lets the windows stay as they are. To be called on all ranks alike.
    pub(super) fn stay(&self) {
        self.most.store(self.half, Ordering::Relaxed);
    }

    /// What kernels that have to do with peers look at.
    fn guard(&self, words: &Words, ticket: &Ticket<'_>) -> Guard {
        let seen = self
            .windows
            .as_ref()
            .map_or(0, |windows| windows.own().word());
        Guard::new(words.address(Word::Dead), seen, ticket.request.dtype)
    }

    /// Puts an operation into a stream.
    ///
    /// # Errors
    /// Those of the driver, after which the stream may hold a part of it.
    pub(super) fn enqueue(&self, ticket: &Ticket, stream: &Stream, words: &Words) -> Result<()> {
        let mut queue = Queueing {
            direct: self,
            ticket,
            stream,
            words,
            copies: Copies::new(self.guard(words, ticket)),
            batch: Some(self.flags.batch()),
        };
        if let Some(number) = ticket.after.filter(|_| !ticket.captured) {
            queue.batch(|batch| batch.wait_at_least(words.address(Word::Done), number as u32))?;
        }
        if ticket.captured && ticket.world > 1 {
            queue.batch(|batch| {
                batch
                    .write(words.address(Word::Step), PASSED)
                    .write(words.address(Word::Replayed), replayed(ticket.number))
            })?;
        }
        for (index, step) in ticket.plan.steps.iter().enumerate() {
            queue.step(index, step)?;
        }
        if !ticket.captured {
            queue.batch(|batch| batch.write(words.address(Word::Done), ticket.number as u32))?;
        } else if ticket.world > 1 {
            queue.batch(|batch| batch.write(words.address(Word::Replayed), 0))?;
        }
        queue.meet()?;
        queue.copies.flush(stream)
    }

    /// The ranks that the stream waits for at `step` of a captured plan, and in words for what.
    pub(super) fn missing(&self, step: &Step, number: u64) -> (Vec<Rank>, &'static str) {
        let Step::Wait {
            half, what, from, ..
        } = *step
        else {
            return (Vec::new(), "");
        };
        let (signal, spot) = flag_of(half, number, what);
        (self.flags.missing(signal, spot, from.iter()), purpose(what))
    }

    /// Where a stream is in operation number `number`, which it has not got past, as its words say.
    pub(super) fn progress(&self, plan: &Plan, number: u64, first_wait: u32) -> Progress {
        let end = first_wait.wrapping_add(plan.steps.len() as u32);
        let mut has_begun = false;
        for (index, step) in plan.steps.iter().enumerate() {
            let Step::Wait {
                half,
                what,
                from,
                take,
            } = *step
            else {
                continue;
            };
            let (signal, spot) = flag_of(half, number, what);
            // Words are used again within an operation, so that a later wait may have left its own.
            let waits = first_wait.wrapping_add(index as u32)..end;
            let missing = self.flags.missing_before(signal, spot, from.iter(), &waits);
            if !missing.is_empty() {
                return Progress::WaitsFor(missing, purpose(what));
            }
            let takes = take.iter().next().is_some();
            let has_waited = self.flags.has_waited(signal, spot, take.iter(), &waits);
            match (takes && !has_waited, has_begun) {
                // None is missing, and it has not come there.
                (true, true) => return Progress::Works,
                (true, false) => return Progress::Before,
                _ => has_begun |= has_waited,
            }
        }
        match has_begun {
            true => Progress::Works,
            false => Progress::Unknown,
        }
    }
}

/// Bytes of the longest buffer of any rank, where each rank knows that.
fn longest_buffer(request: &Request, world: usize) -> Option<usize> {
    match request.collective {
        Collective::AllReduce | Collective::Reduce | Collective::Broadcast => {
            even_bytes(request, 1)
        }
        _ => even_bytes(request, world),
    }
}

/// Bytes of so many blocks, where all have the same length, which each rank knows.
fn even_bytes(request: &Request, blocks: usize) -> Option<usize> {
    match request.sizes {
        Sizes::Even(count) => count.checked_mul(request.dtype.size())?.checked_mul(blocks),
        _ => None,
    }
}

/// How far a stream is in an operation.
pub(super) enum Progress {
    /// Its words do not tell: it waits for nothing that it clears.
    Unknown,
    /// It has not come to it.
    Before,
    /// At a wait for these ranks, or before it; in words, for what.
    WaitsFor(Vec<Rank>, &'static str),
    /// It waits for none.
    Works,
}

/// For what a semaphore is awaited.
fn purpose(what: Semaphore) -> &'static str {
    match what {
        Semaphore::Empty => "to have read what an earlier operation left",
        Semaphore::Contributions => "to contribute",
        Semaphore::Results => "to finish its part",
    }
}

/// Which flags are a semaphore's. Operations begin with the halves in turn.
fn flag_of(half: usize, number: u64, what: Semaphore) -> (Signal, Spot) {
    let (signal, meeting) = match what {
        Semaphore::Contributions => (Signal::Full, 0),
        Semaphore::Results => (Signal::Full, 1),
        Semaphore::Empty => (Signal::Empty, 0),
    };
    let half = half_of(half, number);
    (signal, Spot { half, meeting })
}

fn half_of(half: usize, number: u64) -> usize {
    (half + (number % HALVES as u64) as usize) % HALVES
}

/// A stream being filled: at any time either copies or meetings are collected, not both.
struct Queueing<'a> {
    direct: &'a Direct,
    ticket: &'a Ticket<'a>,
    stream: &'a Stream,
    words: &'a Words,
    copies: Copies,
    /// Always there, but while it is being added to.
    batch: Option<Batch<'a>>,
}

impl<'a> Queueing<'a> {
    /// Adds meetings, after the copies so far.
    fn batch(&mut self, add: impl FnOnce(Batch<'a>) -> Batch<'a>) -> Result<()> {
        self.copies.flush(self.stream)?;
        let batch = self
            .batch
            .take()
            .unwrap_or_else(|| self.direct.flags.batch());
        self.batch = Some(add(batch));
        Ok(())
    }

    /// Enqueues the meetings so far, before work on memory.
    fn meet(&mut self) -> Result<()> {
        if let Some(batch) = self.batch.take().filter(|batch| !batch.is_empty()) {
            batch.submit(self.stream)?;
        }
        Ok(())
    }

    /// Has `wait` leave a receipt. As part of a graph it cannot: there the stream notes the step at which it waits.
    fn waiting(
        &mut self,
        index: usize,
        wait: impl FnOnce(Batch<'a>, Receipt) -> Batch<'a>,
    ) -> Result<()> {
        let step = self.words.address(Word::Step);
        let ticket = self.ticket;
        self.batch(|batch| match ticket.captured {
            true => wait(batch.write(step, index as u32), Receipt::NONE).write(step, PASSED),
            false => {
                let number = ticket.first_wait.wrapping_add(index as u32);
                wait(batch, Receipt::new(number))
            }
        })
    }

    fn step(&mut self, index: usize, step: &Step) -> Result<()> {
        let number = self.ticket.number;
        match *step {
            Step::Wait {
                half,
                what,
                from,
                take,
            } => {
                let (signal, spot) = flag_of(half, number, what);
                let rest = from.iter().filter(move |peer| !take.contains(*peer));
                self.waiting(index, |batch, receipt| {
                    let batch = batch.wait(signal, spot, take.iter(), receipt);
                    batch.look(signal, spot, rest)
                })
            }
            Step::Signal { half, what, to } => {
                let (signal, spot) = flag_of(half, number, what);
                self.batch(|batch| batch.tell(signal, spot, to.iter()))
            }
            Step::Copy { src, dst } => match (src.buffer, dst.buffer) {
                (Buffer::Window { rank, half }, _) => {
                    let from = self.window(rank.into(), half.into(), src.offset)?;
                    self.get(from, dst)
                }
                (_, Buffer::Window { rank, half }) => {
                    let to = self.window(rank.into(), half.into(), dst.offset)?;
                    self.put(src, to)
                }
                _ => self.keep(src, dst),
            },
            Step::ReduceAll {
                srcs: Sources::Windows { half, offset, own },
                dst,
                ..
            } => self.reduce((half, offset), own, dst),
            Step::ReduceAll {
                srcs: Sources::Outputs,
                ..
            } => Err(Error::internal("a plan over windows lends buffers")),
            Step::Send { .. }
            | Step::Recv { .. }
            | Step::Fold { .. }
            | Step::Reduce { .. }
            | Step::Finish { .. } => Err(Error::internal("a plan over windows sends messages")),
        }
    }

    /// The device's address of an element of a half.
    fn window(&self, rank: Rank, half: usize, at: usize) -> Result<u64> {
        let windows = self.direct.windows.as_ref();
        let windows = windows.ok_or_else(|| Error::internal("a world of one has no windows"))?;
        let offset = (at * self.ticket.request.dtype.size()) as u64;
        Ok(windows.half(rank, half_of(half, self.ticket.number)) + offset)
    }

    fn factor(&self) -> Option<f64> {
        match self.ticket.request.op {
            Some(ReduceOp::PremulSum(factor)) => Some(factor),
            _ => None,
        }
    }

    fn put(&mut self, src: Span, to: u64) -> Result<()> {
        let request = self.ticket.request;
        let (memory, offset) = locate(request, src)?;
        let bytes = src.len * request.dtype.size();
        self.meet()?;
        let Some(factor) = self.factor() else {
            // A rank that has failed may write where a peer still reads, which is to see it.
            self.copies.guarded().gather(memory, offset, bytes, to);
            return Ok(());
        };
        let (stream, size) = (self.stream, request.dtype.size());
        try_each_run(memory, offset, bytes, |done, address, run| {
            let count = (run / size) as u64;
            kernels::scale(
                stream,
                request.dtype,
                to + done as u64,
                address,
                count,
                factor,
            )
        })?;
        let scaled = Segment {
            from: 0,
            to,
            bytes: bytes as u64,
        };
        kernels::poison(stream, &[scaled], self.guard())
    }

    fn guard(&self) -> Guard {
        self.direct.guard(self.words, self.ticket)
    }

    fn keep(&mut self, src: Span, dst: Span) -> Result<()> {
        let request = self.ticket.request;
        let (from, to) = (locate(request, src)?, locate(request, dst)?);
        let size = request.dtype.size();
        self.meet()?;
        let Some(factor) = self.factor() else {
            self.copies.between(from, to, src.len * size);
            return Ok(());
        };
        let stream = self.stream;
        try_each_run(from.0, from.1, src.len * size, |before, address, run| {
            try_each_run(to.0, to.1 + before, run, |done, out, part| {
                let count = (part / size) as u64;
                kernels::scale(
                    stream,
                    request.dtype,
                    out,
                    address + done as u64,
                    count,
                    factor,
                )
            })
        })
    }

    fn get(&mut self, from: u64, dst: Span) -> Result<()> {
        let request = self.ticket.request;
        let bytes = dst.len * request.dtype.size();
        self.meet()?;
        if let Buffer::Window { rank, half } = dst.buffer {
            let to = self.window(rank.into(), half.into(), dst.offset)?;
            self.copies.guarded().push(from, to, bytes);
        } else {
            let (memory, offset) = locate(request, dst)?;
            self.copies.guarded().scatter(from, memory, offset, bytes);
        }
        Ok(())
    }

    fn reduce(&mut self, (half, at): (usize, usize), own: Option<Span>, dst: Span) -> Result<()> {
        let (ticket, request) = (self.ticket, self.ticket.request);
        let size = request.dtype.size();
        let op = request
            .op
            .ok_or_else(|| Error::internal("a reduction without an operator"))?;
        let sources: Vec<u64> = match &self.direct.windows {
            Some(windows) => windows
                .halves(half_of(half, ticket.number), (at * size) as u64)
                .collect(),
            None => vec![0],
        };
        let own = own.map(|span| locate(request, span)).transpose()?;
        self.copies.flush(self.stream)?;
        self.meet()?;
        let stream = self.stream;
        let guard = self.guard();
        // A launch for every run of the own contribution and of the result.
        let launch = |done: usize, own: Option<u64>, out: u64, bytes: usize| {
            let mut from: Vec<u64> = sources.iter().map(|at| at + done as u64).collect();
            if let Some(own) = own {
                from[ticket.rank] = own;
            }
            kernels::reduce(
                stream,
                (request.dtype, op),
                out,
                &from,
                (bytes / size) as u64,
                (ticket.world as u32, guard),
            )
        };
        let with_own = |done: usize, out: u64, bytes: usize| match own {
            None => launch(done, None, out, bytes),
            Some((memory, offset)) => {
                try_each_run(memory, offset + done, bytes, |before, address, run| {
                    launch(done + before, Some(address), out + before as u64, run)
                })
            }
        };
        if let Buffer::Window { rank, half } = dst.buffer {
            let out = self.window(rank.into(), half.into(), dst.offset)?;
            with_own(0, out, dst.len * size)?;
        } else {
            let (memory, offset) = locate(request, dst)?;
            try_each_run(memory, offset, dst.len * size, with_own)?;
        }
        Ok(())
    }
}
