//! A plan over windows, carried out by the processor: what a rank contributes is copied piece by piece to where the
//! others read it, and what they have made of it is copied back.
//!
//! For memory that peers do not reach. It is read once and written once, by its own rank, and a piece is written again
//! soon after it was read: what goes back and forth between ranks stays in the caches. Reading the peers' memory with
//! `process_vm_readv` instead spares copies but takes turns at cold memory, page by page.

use std::sync::Arc;

use crate::engine::collective::operands::Operands;
use crate::engine::collective::run::{Direction, Waiting};
use crate::engine::links::LinkTable;
use crate::plan::shared::LINE;
use crate::plan::signals::{MOST_RANKS, Semaphore};
use crate::plan::windows::{Room, Shots, build, build_in_step};
use crate::plan::{Buffer, Order, Plan, Shape, Sources, Span, Step};
use crate::reduce::{Source, Streaming, copy_hinted};
use crate::types::{Collective, Rank};

use super::windows::Windows;

/// Bytes that are worked on between two turns of other operations.
const TURN: usize = 256 << 10;

/// The plan of an operation of that shape, in chunks of so many bytes.
pub(super) fn plan(shape: &Shape, element_size: usize, chunk: usize) -> Option<Plan> {
    let room = |bytes| Room {
        half: bytes / element_size,
        align: LINE / element_size,
    };
    match shape.collective {
        Collective::AllReduce => build_in_step(shape, &room(2 * chunk)),
        _ => build(shape, &room(chunk), Shots::One, false),
    }
}

/// One rank's part.
#[derive(Debug)]
pub(super) struct WindowRun {
    plan: Arc<Plan>,
    /// The next step.
    next: usize,
    /// The rank up to which all are known to have come as far as it needs.
    met: Rank,
    /// Bytes that have been worked on since the last pause.
    turn: usize,
}

impl WindowRun {
    pub(super) fn new(plan: Arc<Plan>) -> Self {
        debug_assert_eq!(plan.order, Order::InOrder);
        Self {
            plan,
            next: 0,
            met: 0,
            turn: 0,
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.next == self.plan.steps.len()
    }

    /// How many halves it goes on by from the one that it began with; the same on all ranks.
    pub(super) fn halves(&self) -> usize {
        let mut steps = self.plan.steps.iter().rev();
        steps.find_map(Step::half).map_or(0, |half| half + 1)
    }

    /// Goes on as far as that goes now. Returns whether anything moved. `alone`: only with what others wait for.
    pub(super) fn advance(
        &mut self,
        operands: &Operands,
        windows: &mut Windows,
        links: &mut LinkTable,
        alone: bool,
    ) -> bool {
        let before = self.next;
        self.turn = 0;
        while let Some(step) = self.plan.steps.get(self.next) {
            if !matches!(step, Step::Signal { .. }) {
                // What has been set one after the other is told of at once.
                windows.wake(links);
            }
            if self.turn >= TURN || (alone && is_later(step)) {
                break;
            }
            if let Some(peer) = self.blocker(windows) {
                self.met = peer;
                break;
            }
            let step = *step;
            self.carry_out(operands, &step, windows);
            (self.next, self.met) = (self.next + 1, 0);
        }
        windows.wake(links);
        self.next != before
    }

    /// The first peer that the next step waits for.
    #[inline]
    fn blocker(&self, windows: &Windows) -> Option<Rank> {
        match *self.plan.steps.get(self.next)? {
            Step::Wait {
                half, what, from, ..
            } => windows.missing(half, what, from, self.met).next(),
            _ => None,
        }
    }

    /// Whether the next step waits for no rank.
    pub(super) fn may_go_on(&self, windows: &Windows) -> bool {
        self.blocker(windows).is_none()
    }

    /// What it waits for.
    pub(super) fn waiting(
        &self,
        operands: &Operands,
        windows: &Windows,
        mut visit: impl FnMut(Waiting),
    ) {
        let of = operands.output.len().max(operands.input.len());
        let steps = self.plan.steps.len().max(1);
        let bytes = (of as u128 * self.next as u128 / steps as u128) as usize;
        let visit = |peer| {
            visit(Waiting {
                peer,
                direction: Direction::Meet,
                bytes,
                of,
            });
        };
        if let Some(&Step::Wait {
            half, what, from, ..
        }) = self.plan.steps.get(self.next)
        {
            windows.missing(half, what, from, 0).for_each(visit);
        }
    }

    fn carry_out(&mut self, operands: &Operands, step: &Step, windows: &mut Windows) {
        let size = operands.dtype.size();
        match *step {
            Step::Signal { half, what, to } => windows.signal(half, what, to),
            Step::Wait {
                half, what, take, ..
            } => windows.take(half, what, take),
            Step::Copy { src, dst } => {
                self.turn += src.len * size;
                match (src.buffer, dst.buffer) {
                    (Buffer::Window { rank, half }, _) => {
                        let half = usize::from(half);
                        get(operands, windows, (half, src.offset), rank.into(), dst);
                    }
                    (_, Buffer::Window { half, .. }) => put(operands, windows, src, (half, dst)),
                    _ => keep(operands, src, dst),
                }
            }
            Step::ReduceAll {
                srcs: Sources::Windows { half, offset, own },
                dst,
                ..
            } => {
                self.turn += dst.len * size * 2;
                reduce(operands, windows, (half, offset), own, dst);
            }
            Step::ReduceAll {
                srcs: Sources::Outputs,
                ..
            } => unreachable!("a plan over windows lends no buffers"),
            Step::Send { .. }
            | Step::Recv { .. }
            | Step::Fold { .. }
            | Step::Reduce { .. }
            | Step::Finish { .. } => unreachable!("a plan over windows sends no messages"),
        }
    }
}

/// Whether others do without what a step does until all have met: a wait for what they publish, and what stays here.
fn is_later(step: &Step) -> bool {
    match *step {
        Step::Wait { what, .. } => what != Semaphore::Empty,
        Step::Copy { .. } => step.half().is_none(),
        _ => false,
    }
}

/// Copies `src`, of the caller's memory, into the own half.
fn put(operands: &Operands, windows: &mut Windows, src: Span, (half, dst): (u8, Span)) {
    let start = dst.offset * operands.dtype.size();
    for_runs(operands, src, |done, run| {
        let streaming = windows.streaming();
        let half = windows.write(half.into(), start + done, run.len());
        copy(operands, half, run, streaming);
    });
}

/// Calls `visit` with the runs of a span, and where they begin in it, in bytes.
fn for_runs(operands: &Operands, span: Span, visit: impl FnMut(usize, &[u8])) {
    let (memory, size) = (operands.memory(span.buffer), operands.dtype.size());
    memory.for_each_run(span.offset * size, span.len * size, visit);
}

fn reduce(
    operands: &Operands,
    windows: &mut Windows,
    (half, at): (usize, usize),
    own: Option<Span>,
    result: Span,
) {
    let size = operands.dtype.size();
    let place = result.offset;
    let mut done = 0;
    while done < result.len * size {
        let mut bytes = result.len * size - done;
        let contribution = own.map(|own| {
            let run = operands
                .memory(own.buffer)
                .read(own.offset * size + done, bytes);
            bytes = run.len();
            run
        });
        match result.buffer {
            Buffer::Window { .. } => {
                let (place, at) = (place * size + done, at * size + done);
                let streaming = windows.streaming();
                let (dst, theirs) = windows.write_beside(half, (place, at), bytes);
                combine(operands, dst, (contribution, streaming), theirs);
            }
            _ => {
                let dst = operands.output.write(place * size + done, bytes);
                bytes = dst.len();
                let theirs = |rank| Some(windows.read(rank, half, at * size + done, bytes));
                let is_there =
                    own.is_some_and(|own| (own.buffer, own.offset) == (Buffer::Output, place));
                match is_there {
                    true => combine(operands, dst, (None, Streaming::No), |rank| {
                        theirs(rank).filter(|_| rank != operands.rank)
                    }),
                    false => {
                        let contribution = contribution.map(|run| &run[..bytes]);
                        combine(operands, dst, (contribution, Streaming::No), theirs);
                    }
                }
            }
        }
        done += bytes;
    }
}

/// `dst` becomes the result of all contributions in rank order. This rank's is `own`; or what `theirs` gives for it; or
/// what is in `dst`.
fn combine<'a>(
    operands: &Operands,
    dst: &mut [u8],
    (own, streaming): (Option<&'a [u8]>, Streaming),
    theirs: impl Fn(Rank) -> Option<&'a [u8]>,
) {
    let mut sources = [Source::Destination; MOST_RANKS];
    for (rank, source) in sources[..operands.world].iter_mut().enumerate() {
        let contribution = match own {
            Some(own) if rank == operands.rank => Some(own),
            _ => theirs(rank),
        };
        if let Some(contribution) = contribution {
            *source = Source::Element(contribution);
        }
    }
    let (sources, kernel) = (&sources[..operands.world], operands.reducer());
    match &operands.workers {
        Some(workers) => workers.reduce(kernel, dst, sources, operands.world, streaming),
        None => kernel.reduce(dst, sources, operands.world, streaming),
    }
}

fn get(
    operands: &Operands,
    windows: &mut Windows,
    (half, at): (usize, usize),
    from: Rank,
    to: Span,
) {
    let (size, mut done) = (operands.dtype.size(), 0);
    let (place, len) = (to.offset, to.len);
    if matches!(to.buffer, Buffer::Window { .. }) {
        let (place, at) = (place * size, at * size);
        let (dst, theirs) = windows.write_beside(half, (place, at), len * size);
        let theirs = theirs(from).expect("what is got is a peer's");
        return copy(operands, dst, theirs, Streaming::No);
    }
    while done < len * size {
        let dst = operands
            .output
            .write(place * size + done, len * size - done);
        copy(
            operands,
            dst,
            windows.read(from, half, at * size + done, dst.len()),
            Streaming::No,
        );
        done += dst.len();
    }
}

fn keep(operands: &Operands, src: Span, dst: Span) {
    let size = operands.dtype.size();
    for_runs(operands, src, |at_run, run| {
        let mut done = 0;
        while done < run.len() {
            let start = dst.offset * size + at_run + done;
            let dst = operands.memory(dst.buffer).write(start, run.len() - done);
            copy(operands, dst, &run[done..done + dst.len()], Streaming::No);
            done += dst.len();
        }
    });
}

fn copy(operands: &Operands, dst: &mut [u8], src: &[u8], streaming: Streaming) {
    match &operands.workers {
        Some(workers) => workers.copy(dst, src, streaming),
        None => copy_hinted(dst, src, streaming),
    }
}
