//! The staged way: ranks that cannot read each other's device memory, and short collectives of processes that share a device.
//! Chunks go through slots of registered host memory:
//! the stream fills a slot and writes a word; the attendant sees it and has the group on the host carry out the collective
//! there (in memory that peers on the host read in place, over TCP beyond); it writes a word that the stream waits for,
//! and the stream empties the slot. Slots take turns, so copies and the network work at the same time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::buffer::Memory;
use crate::engine::{Group, Request, Sizes, WorkState};
use crate::error::{Error, Result};
use crate::locks::Mutex;
use crate::plan::Shape;
use crate::plan::staged::{Chunk, Part, SlotSpan, chunks, is_known, nothing};
use crate::transport::cuda::driver::{Device, MemoryOperation, Pinned, Stream};
use crate::transport::cuda::kernels::Guard;
use crate::types::{Collective, DataType, Rank, ReduceOp};

use super::copies::{Copies, Origin, locate};
use super::state::HOST_PATIENCE;
use super::words::{Word, Words, is_at_least};

/// Slots that take turns.
const SLOTS: usize = 4;
/// Bytes of a slot: long enough to hide the turn of the host, short enough that the first is soon on its way.
pub(super) const SLOT: usize = 4 << 20;

/// The state of a group that goes the staged way.
pub(super) struct Staged {
    slots: Pinned,
    /// Bytes of one.
    slot: usize,
    cpu: Arc<Group>,
    /// Why it goes this way.
    pub(super) reason: String,
    /// Results have the bits that the direct way gives them.
    in_rank_order: bool,
    jobs: Mutex<Jobs>,
}

/// The attendant's work, in the order of the operations.
#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    /// Collectives of the host under way: the number of the chunk, if it has one.
    running: VecDeque<(Option<u32>, Arc<WorkState>)>,
    /// Chunks that were ever enqueued.
    chunks: u32,
    /// For each operation, its last chunk and its poison: the bytes that fill a slot, again and again, if its result cannot be
    /// made.
    poison: VecDeque<(u32, u64)>,
    /// When streams were first to be let pass.
    failed: Option<Instant>,
}

/// One operation's chunks.
struct Job {
    kind: Kind,
    known: bool,
    left: VecDeque<(u32, Chunk)>,
    /// How many there were.
    own: u64,
    agreement: Option<Agreement>,
    /// The empty chunk to take part with when the own chunks have run out, and how often.
    nothing: Chunk,
    further: u64,
}

/// The properties that the chunks of an operation have in common.
#[derive(Clone, Copy)]
struct Kind {
    collective: Collective,
    dtype: DataType,
    op: Option<ReduceOp>,
    root: Rank,
    timeout: Duration,
}

/// The most chunks that any rank has, being found out. It is kept until the operation that does it has ended.
struct Agreement {
    most: Box<[u64; 1]>,
    work: Arc<WorkState>,
}

/// An operation that has been cut, not yet enqueued.
pub(super) struct CutOperation {
    chunks: Vec<Chunk>,
    nothing: Chunk,
    known: bool,
}

impl Staged {
    /// With slots of `slot` bytes.
    ///
    /// # Errors
    /// `System` when there is no memory for them.
    pub(super) fn new(
        device: &'static Device,
        cpu: &Arc<Group>,
        (slot, reason): (usize, String),
    ) -> Result<Self> {
        Ok(Self {
            slots: Pinned::shared(device, SLOTS * slot)?,
            slot,
            cpu: Arc::clone(cpu),
            reason,
            in_rank_order: false,
            jobs: Mutex::default(),
        })
    }

    /// For operations that would otherwise go the direct way, in which one kernel reduces in rank order: their results have the
    /// same bits.
    pub(super) fn in_rank_order(self) -> Self {
        Self {
            in_rank_order: true,
            ..self
        }
    }

    /// Bytes of host memory.
    pub(super) fn bytes(&self) -> usize {
        self.slots.bytes()
    }

    /// Where a chunk's slot begins.
    fn offset(&self, counter: u32) -> usize {
        place_of(counter) * self.slot
    }

    /// The same, as the device knows it.
    fn address(&self, counter: u32) -> u64 {
        self.slots.address() + self.offset(counter) as u64
    }

    /// Gives the slots back: neither a stream nor the host will touch them any more.
    pub(super) fn give_back(self) {
        self.slots.give_back();
    }

    /// Cuts an operation into chunks.
    ///
    /// # Errors
    /// `Internal` for what should have been refused before.
    pub(super) fn cut(&self, request: &Request, shape: &Shape) -> Result<CutOperation> {
        let chunks = chunks(shape, self.slot / request.dtype.size())
            .ok_or_else(|| Error::internal(format!("no chunks for {}", request.collective)))?;
        Ok(CutOperation {
            chunks,
            nothing: nothing(shape),
            known: is_known(shape),
        })
    }

    /// Puts an operation into a stream, and on the attendant's list; `hurry` rouses that.
    ///
    /// # Errors
    /// Those of the driver, after which the stream may hold a part of it.
    pub(super) fn enqueue(
        &self,
        cut: CutOperation,
        request: &Request,
        (stream, words): (&Stream, &Words),
        (number, after, timeout): (u64, Option<u64>, Duration),
        hurry: impl FnOnce(),
    ) -> Result<()> {
        let first = self.accept(&cut, request, timeout);
        // In the middle of being enqueued, too, the stream may wait for the host.
        hurry();
        let mut queue = Queueing {
            staged: self,
            request,
            stream,
            words,
            operations: Vec::new(),
        };
        let begun = write(words, Word::Begun, number as u32);
        let counter = |index: usize| first.wrapping_add(index as u32);
        match after {
            Some(after) => queue.operations.extend([
                MemoryOperation::WaitAtLeast {
                    address: words.address(Word::Done),
                    value: after as u32,
                },
                begun,
            ]),
            // Said together with the first chunk, where nothing has to be waited for.
            None if cut.chunks.is_empty() => queue.operations.push(begun),
            None => {}
        }
        for (index, chunk) in cut.chunks.iter().enumerate() {
            if let Some(before) = index.checked_sub(SLOTS) {
                queue.empty(counter(before), &cut.chunks[before])?;
            }
            queue.fill(counter(index), chunk)?;
            if index == 0 && after.is_none() {
                queue.operations.push(begun);
            }
            let filled = write(words, Word::Filled, counter(index));
            queue.operations.push(filled);
        }
        for index in cut.chunks.len().saturating_sub(SLOTS)..cut.chunks.len() {
            queue.empty(counter(index), &cut.chunks[index])?;
        }
        let done = write(words, Word::Done, number as u32);
        queue.operations.push(done);
        queue.operate()
    }

    /// The number of its first chunk.
    fn accept(&self, cut: &CutOperation, request: &Request, timeout: Duration) -> u32 {
        let mut jobs = self.jobs.lock();
        let first = jobs.chunks.wrapping_add(1);
        jobs.chunks = jobs.chunks.wrapping_add(cut.chunks.len() as u32);
        let numbered = (0..).map(|index: u32| first.wrapping_add(index));
        let left: VecDeque<_> = numbered.zip(cut.chunks.iter().cloned()).collect();
        if let Some((last, _)) = left.back() {
            let poison = Guard::new(0, 0, request.dtype).poison;
            jobs.poison.push_back((*last, poison));
        }
        jobs.waiting.push_back(Job {
            kind: Kind {
                collective: request.collective,
                dtype: request.dtype,
                op: request.op,
                root: request.root,
                timeout,
            },
            known: cut.known,
            own: left.len() as u64,
            left,
            agreement: None,
            nothing: cut.nothing.clone(),
            further: 0,
        });
        first
    }

    /// The attendant's turn: starts what has been filled, and notes what has ended. Returns whether there was anything,
    /// and whether there will be.
    ///
    /// # Errors
    /// What ended a collective of the host.
    pub(super) fn advance(&self, words: &Words) -> Result<(bool, bool)> {
        let mut jobs = self.jobs.lock();
        let mut moved = false;
        while let Some(mut job) = jobs.waiting.pop_front() {
            moved |= self.start(&mut job, &mut jobs, words)?;
            if !job.is_over() {
                jobs.waiting.push_front(job);
                break;
            }
        }
        while let Some((counter, work)) = jobs.running.front() {
            let Some(result) = work.result() else { break };
            result.clone()?;
            if let Some(counter) = *counter {
                words.store(Word::Finished, counter);
                while let Some((last, _)) = jobs.poison.front()
                    && is_at_least(counter, *last)
                {
                    jobs.poison.pop_front();
                }
            }
            jobs.running.pop_front();
            moved = true;
        }
        let waits = !jobs.waiting.is_empty() || !jobs.running.is_empty();
        Ok((moved, waits))
    }

    /// Whether there is anything to be done on the host.
    pub(super) fn is_busy(&self) -> bool {
        let jobs = self.jobs.lock();
        !jobs.waiting.is_empty() || !jobs.running.is_empty()
    }

    /// Whether nothing of it is under way on the host.
    pub(super) fn is_quiet(&self) -> bool {
        let mut jobs = self.jobs.lock();
        jobs.running.retain(|(_, work)| work.result().is_none());
        jobs.running.is_empty()
    }

    /// Lets the stream pass what it has come to, after a failure: what was to be done is not done, and results are no numbers.
    /// To be called again until the stream has drained.
    pub(super) fn release(&self, words: &Words) {
        let mut jobs = self.jobs.lock();
        jobs.running.retain(|(_, work)| work.result().is_none());
        let started = |job: &Job| {
            job.agreement
                .as_ref()
                .is_some_and(|agreement| agreement.work.result().is_none())
        };
        jobs.waiting.retain(started);
        let since = *jobs.failed.get_or_insert_with(Instant::now);
        if !jobs.running.is_empty() && since.elapsed() < HOST_PATIENCE {
            return;
        }
        // Chunk by chunk, as the stream has filled their slots: it fills one again when it has emptied it.
        let filled = words.load(Word::Filled);
        let mut finished = words.load(Word::Finished);
        while !is_at_least(finished, filled) {
            finished = finished.wrapping_add(1);
            while let Some((last, _)) = jobs.poison.front()
                && !is_at_least(*last, finished)
            {
                jobs.poison.pop_front();
            }
            let poison = jobs.poison.front().map_or(0, |(_, poison)| *poison);
            // SAFETY: no operation of the host uses the slot, or one that the group has given up; the stream has put there what
            // only such an operation would have read, and comes to it again when it is told.
            unsafe { self.slots.fill(self.offset(finished), self.slot, poison) };
        }
        words.store(Word::Finished, finished);
    }

    /// Starts what can be started of one operation.
    fn start(&self, job: &mut Job, jobs: &mut Jobs, words: &Words) -> Result<bool> {
        if !job.known && job.agreement.is_none() {
            job.agreement = Some(self.agree(job)?);
        }
        if let Some(agreement) = &job.agreement {
            let Some(result) = agreement.work.result() else {
                return Ok(false);
            };
            result.clone()?;
            job.further = agreement.most[0] - job.own;
            job.agreement = None;
            job.known = true;
        }
        let filled = words.load(Word::Filled);
        let mut moved = false;
        while let Some((counter, _)) = job.left.front() {
            // Counters are never further apart than there are slots, once the first has been filled.
            if !is_at_least(filled, *counter) {
                return Ok(moved);
            }
            let (counter, chunk) = job.left.pop_front().expect("it was just seen");
            let request = self.request(job.kind, &chunk, self.offset(counter));
            jobs.running
                .push_back((Some(counter), self.cpu.submit(request, None, true)?));
            moved = true;
        }
        while job.further > 0 {
            job.further -= 1;
            let request = self.request(job.kind, &job.nothing, 0);
            jobs.running
                .push_back((None, self.cpu.submit(request, None, true)?));
            moved = true;
        }
        Ok(moved)
    }

    fn agree(&self, job: &Job) -> Result<Agreement> {
        let mut most = Box::new([job.own]);
        // SAFETY: the box stays where it is until the operation has ended: see [`Agreement`].
        let memory = unsafe { Memory::of_mut(most.as_mut_slice()) };
        let request = Request::all_reduce(DataType::UInt64, ReduceOp::Max, None, memory);
        let request = request.with_timeout(job.kind.timeout);
        let work = self.cpu.submit(request, None, true)?;
        Ok(Agreement { most, work })
    }

    fn request(&self, kind: Kind, chunk: &Chunk, slot: usize) -> Request {
        let size = kind.dtype.size();
        // SAFETY: the slots live as long as the group, which its operations do not outlive; and a slot is the chunk's alone
        // until its operation has ended, for only then the stream is told to go on.
        let view =
            |place: SlotSpan| unsafe { self.slots.view(slot + place.at * size, place.len * size) };
        Request {
            collective: kind.collective,
            dtype: kind.dtype,
            op: kind.op,
            root: kind.root,
            input: chunk.input.map(view),
            output: chunk.output.map(view),
            sizes: match chunk.part.clone() {
                Part::Even(count) => Sizes::Even(count),
                Part::PerRank(counts) => Sizes::PerRank(counts),
                Part::PerPair { send, recv } => Sizes::PerPair { send, recv },
            },
            timeout: Some(kind.timeout),
            stream: None,
            in_rank_order: self.in_rank_order,
        }
    }
}

impl Job {
    fn is_over(&self) -> bool {
        self.known && self.agreement.is_none() && self.left.is_empty() && self.further == 0
    }
}

/// The number of a chunk's slot.
fn place_of(counter: u32) -> usize {
    counter as usize % SLOTS
}

/// A stream being filled: meetings are collected until a copy has to come after them.
struct Queueing<'a> {
    staged: &'a Staged,
    request: &'a Request,
    stream: &'a Stream,
    words: &'a Words,
    operations: Vec<MemoryOperation>,
}

impl Queueing<'_> {
    /// Enqueues the meetings so far.
    fn operate(&mut self) -> Result<()> {
        let enqueued = self.stream.operate(&self.operations);
        self.operations.clear();
        enqueued
    }

    /// Copies into a slot.
    fn fill(&mut self, counter: u32, chunk: &Chunk) -> Result<()> {
        let size = self.request.dtype.size();
        let slot = self.staged.address(counter);
        let mut copies = Copies::new(Guard::NONE);
        for (span, at) in &chunk.puts {
            let (memory, offset) = locate(self.request, *span)?;
            copies.gather(memory, offset, span.len * size, slot + (at * size) as u64);
        }
        if !copies.is_empty() {
            self.operate()?;
            copies.flush(self.stream)?;
        }
        Ok(())
    }

    /// Copies out of a slot when the host is done with it.
    fn empty(&mut self, counter: u32, chunk: &Chunk) -> Result<()> {
        self.operations.push(MemoryOperation::WaitAtLeast {
            address: self.words.address(Word::Finished),
            value: counter,
        });
        let size = self.request.dtype.size();
        let slot = self.staged.address(counter);
        let mut copies = Copies::new(Guard::NONE);
        for (at, span) in &chunk.gets {
            let (memory, offset) = locate(self.request, *span)?;
            copies.scatter(
                Origin::at(slot + (at * size) as u64),
                memory,
                offset,
                span.len * size,
            );
        }
        if !copies.is_empty() {
            self.operate()?;
            copies.flush_by_engine(self.stream)?;
        }
        Ok(())
    }
}

fn write(words: &Words, word: Word, value: u32) -> MemoryOperation {
    MemoryOperation::Write {
        address: words.address(word),
        value,
    }
}
