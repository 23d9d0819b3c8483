//! The commands that a collective of the direct way puts into a stream: its plan, step by step.

use crate::engine::Request;
use crate::error::{Error, Result};
use crate::plan::signals::{HALVES, Peers, Semaphore};
use crate::plan::{Buffer, Plan, Sources, Span, Step};
use crate::transport::cuda::driver::Stream;
use crate::transport::cuda::flags::{Batch, Receipt};
use crate::transport::cuda::kernels::{self, Contributions, Guard, Place, Segment};
use crate::transport::cuda::window::Windows;
use crate::types::{Collective, Rank, ReduceOp};

use super::copies::{Copies, Origin, locate, try_each_run};
use super::direct::{Direct, flag_of, half_of};
use super::places::{FoundPlaces, Places};
use super::words::{PASSED, Word, Words, replayed};

/// An operation on its way into a stream.
pub(super) struct Ticket<'a> {
    pub(super) request: &'a Request,
    pub(super) plan: &'a Plan,
    pub(super) number: u64,
    pub(super) rank: Rank,
    pub(super) world: usize,
    /// As [`Shape::contributors`](crate::plan::Shape::contributors).
    pub(super) contributors: usize,
    /// The last operation's number, unless that is known to have been on the same stream.
    pub(super) after: Option<u64>,
    /// The number of the wait that its first step would be.
    pub(super) first_wait: u32,
    /// It becomes part of a graph: it may be carried out many times, so that all it writes are constants.
    pub(super) captured: bool,
    /// Where ranks may read the buffers of others in place: the parts of this rank's that are, and the number that identifies
    /// the operation.
    pub(super) in_place: Option<(&'a FoundPlaces, u32)>,
}

impl Direct {
    /// The guard of kernels that have to do with peers.
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
    pub(super) fn enqueue(
        &self,
        ticket: &Ticket<'_>,
        stream: &Stream,
        words: &Words,
    ) -> Result<()> {
        let mut queue = Queueing {
            direct: self,
            ticket,
            stream,
            words,
            copies: Copies::new(self.guard(words, ticket)),
            batch: Some(self.flags.batch()),
            own: [None; HALVES],
            reading: Reading::Windows,
            has_looked: false,
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
    /// For each half, where it would begin if this rank's buffer were in it, while that is published in its place.
    own: [Option<u64>; HALVES],
    reading: Reading,
    /// It has been looked at since the last wait whether a peer has failed.
    has_looked: bool,
}

/// Where the stream finds what peers have published last.
#[derive(Clone, Copy)]
enum Reading {
    /// In their windows.
    Windows,
    /// Where each of them says, which has not been looked up.
    Unknown,
    /// From the addresses on that are in words, which kernels look at by this.
    Bases(Guard),
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

    /// Waits for a semaphore of all of `from`, and takes those of `take`.
    fn wait(
        &mut self,
        index: usize,
        (half, what): (usize, Semaphore),
        (from, take): (Peers, Peers),
    ) -> Result<()> {
        let (signal, spot) = flag_of(half, self.ticket.number, what);
        match what {
            Semaphore::Empty => self.own[half] = None,
            Semaphore::Contributions if self.ticket.in_place.is_some() => {
                self.reading = Reading::Unknown;
            }
            _ => self.reading = Reading::Windows,
        }
        let rest = from.iter().filter(move |peer| !take.contains(*peer));
        self.waiting(index, |batch, receipt| {
            let batch = batch.wait(signal, spot, take.iter(), receipt);
            batch.look(signal, spot, rest)
        })?;
        // Meanwhile the group may have failed.
        self.has_looked = false;
        self.copies.guard_by(self.guard());
        Ok(())
    }

    fn step(&mut self, index: usize, step: &Step) -> Result<()> {
        let number = self.ticket.number;
        match *step {
            Step::Wait {
                half,
                what,
                from,
                take,
            } => self.wait(index, (half, what), (from, take)),
            Step::Signal { half, what, to } => {
                let (signal, spot) = flag_of(half, number, what);
                if what == Semaphore::Contributions {
                    self.locate(index, (half, spot.half), to)?;
                }
                self.batch(|batch| batch.tell(signal, spot, to.iter()))
            }
            Step::Copy { src, dst } => match (src.buffer, dst.buffer) {
                (Buffer::Window { rank, half }, Buffer::Output) if self.gets_given(rank.into()) => {
                    self.get_given((half.into(), src.offset), dst)
                }
                (Buffer::Window { rank, half }, _) => {
                    let from = self.source(rank.into(), half.into(), src.offset)?;
                    self.get(from, dst)
                }
                (_, Buffer::Window { .. }) if self.skips(index) => Ok(()),
                (_, Buffer::Window { rank, half }) => {
                    let to = self.window(rank.into(), half.into(), dst.offset)?;
                    self.put(src, to)
                }
                _ => self.keep(src, dst),
            },
            Step::ReduceAll {
                srcs: Sources::Windows { half, offset, own },
                dst,
                copies,
            } => self.reduce((half, offset), own, (dst, copies.first_bits())),
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

    /// Whether what lies in the half of `rank` has been stored there by peers.
    fn gets_given(&self, rank: Rank) -> bool {
        rank == self.ticket.rank && self.ticket.request.collective == Collective::AllReduce
    }

    /// Says to `to` where what step `index` publishes in a half of the plan, and in which one of the window, lies instead.
    fn locate(&mut self, index: usize, (half, number): (usize, usize), to: Peers) -> Result<()> {
        let Some((in_place, _)) = self.ticket.in_place else {
            return Ok(());
        };
        self.own[half] = in_place.results(index).map(|(_, begin)| begin);
        self.batch(|batch| {
            to.iter().fold(batch, |batch, peer| {
                let located = in_place.located(index, peer).map(|(told, _)| told);
                batch.locate(peer, number, located)
            })
        })
    }

    fn skips(&self, step: usize) -> bool {
        let in_place = self.ticket.in_place;
        in_place.is_some_and(|(in_place, _)| in_place.skips(step))
    }

    fn windows(&self) -> Result<&'a Windows> {
        let windows = self.direct.windows.as_deref();
        windows.ok_or_else(|| Error::internal("a world of one has no windows"))
    }

    /// Where what a rank has published in a half begins to be read from element `at` on.
    fn source(&mut self, rank: Rank, half: usize, at: usize) -> Result<Origin> {
        let offset = (at * self.ticket.request.dtype.size()) as u64;
        if rank == self.ticket.rank {
            let window = self.window(rank, half, at)?;
            let own = self.own[half].map(|begin| begin.wrapping_add(offset));
            return Ok(Origin::at(own.unwrap_or(window)));
        }
        match self.find(half)? {
            Some((bases, _)) => Ok(Origin {
                at: offset,
                base: bases + 8 * rank as u64,
            }),
            None => Ok(Origin::at(self.window(rank, half, at)?)),
        }
    }

    /// The words with the addresses at which the data that peers have published in a half begins, looked up now if they have
    /// not been, and the guard of the kernels that read it. `None` where the data is in the peers' windows.
    fn find(&mut self, half: usize) -> Result<Option<(u64, Guard)>> {
        let guard = match self.reading {
            Reading::Windows => return Ok(None),
            Reading::Bases(guard) => guard,
            Reading::Unknown => {
                let guard = self.look(half)?;
                self.reading = Reading::Bases(guard);
                guard
            }
        };
        Ok(Some((self.windows()?.own().bases(), guard)))
    }

    /// Looks where peers have published, and whether one of them has failed. Returns what kernels look at from now on.
    fn look(&mut self, half: usize) -> Result<Guard> {
        let (direct, ticket) = (self.direct, self.ticket);
        let missing = || Error::internal("a group without places reads in place");
        let places: &Places = direct.places.as_deref().ok_or_else(missing)?;
        let (_, operation) = ticket.in_place.ok_or_else(missing)?;
        let number = half_of(half, ticket.number);
        let windows = self.windows()?;
        let all: Vec<Place> = (0..ticket.world)
            .map(|rank| match rank == ticket.rank {
                // Its own addresses are known.
                true => Place::default(),
                false => Place {
                    words: direct.flags.location(rank, number),
                    table: places.table(rank),
                    window: windows.half(rank, number),
                    operation: operation.into(),
                    failed: direct.flags.marks(rank),
                },
            })
            .collect();
        self.copies.flush(self.stream)?;
        self.meet()?;
        let bases = windows.own().bases();
        let guard = kernels::find_places(self.stream, &all, bases, self.guard())?;
        self.copies.guard_by(guard);
        Ok(guard)
    }

    /// The device's address of an element of a half.
    fn window(&self, rank: Rank, half: usize, at: usize) -> Result<u64> {
        let windows = self.windows()?;
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
        let scaled = Segment::new(0, to, bytes as u64);
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

    /// Gets what peers have stored in this rank's half, or looks after it where that is its buffer: a peer that has failed has
    /// stored nothing.
    fn get_given(&mut self, (half, at): (usize, usize), dst: Span) -> Result<()> {
        if self.ticket.in_place.is_some() && !self.has_looked {
            self.look(half)?;
            self.has_looked = true;
        }
        let from = self.source(self.ticket.rank, half, at)?;
        self.get(from, dst)
    }

    fn get(&mut self, from: Origin, dst: Span) -> Result<()> {
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

    fn reduce(
        &mut self,
        (half, at): (usize, usize),
        own: Option<Span>,
        (dst, copies): (Span, u64),
    ) -> Result<()> {
        let (ticket, request) = (self.ticket, self.ticket.request);
        let size = request.dtype.size();
        let op = request
            .op
            .ok_or_else(|| Error::internal("a reduction without an operator"))?;
        let mut sources = vec![0];
        let (mut bases, mut guard) = (0, self.guard());
        if ticket.world > 1 {
            sources = (0..ticket.contributors)
                .map(|rank| self.source(rank, half, at).map(|source| source.at))
                .collect::<Result<_>>()?;
            if let Some(found) = self.find(half)? {
                (bases, guard) = found;
            }
        }
        let own = own.map(|span| locate(request, span)).transpose()?;
        self.copies.flush(self.stream)?;
        self.meet()?;
        let stream = self.stream;
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
                Contributions {
                    at: &from,
                    bases,
                    copies,
                },
                (bytes / size) as u64,
                (ticket.contributors as u32, guard),
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
