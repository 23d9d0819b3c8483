//! A plan over windows, carried out by the processor: a rank's contribution is copied piece by piece to where the others
//! read it, and the result is copied back.
//!
//! For memory that peers do not reach. It is read once and written once, by its own rank, and a piece is written again
//! soon after it was read: what goes back and forth between ranks stays in the caches. Reading the peers' memory with
//! `process_vm_readv` instead spares copies but takes turns at cold memory, page by page.

use std::sync::Arc;

use crate::engine::collective::elements::Elements;
use crate::engine::collective::operands::Operands;
use crate::engine::collective::run::{Direction, Waiting};
use crate::engine::collective::transfer::BYTES_PER_TURN;
use crate::engine::links::LinkTable;
use crate::plan::signals::{MOST_RANKS, Semaphore};
use crate::plan::{Buffer, Order, Plan, Sources, Span, Step};
use crate::reduce::{Source, Streaming};
use crate::types::Rank;

use super::windows::Windows;

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
        operands: &mut Operands,
        windows: &mut Windows,
        links: &mut LinkTable,
        alone: bool,
    ) -> bool {
        let before = self.next;
        self.turn = 0;
        while let Some(step) = self.plan.steps.get(self.next) {
            if !matches!(step, Step::Signal { .. }) {
                // Semaphores that are set one after the other are announced together.
                windows.wake(links);
            }
            if self.turn >= BYTES_PER_TURN || (alone && is_later(step)) {
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

    /// The peers that it waits for.
    pub(super) fn waiting(
        &self,
        operands: &Operands,
        windows: &Windows,
        mut visit: impl FnMut(Waiting),
    ) {
        let of = operands.buffers.longer();
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

    fn carry_out(&mut self, operands: &mut Operands, step: &Step, windows: &mut Windows) {
        let size = operands.elements.dtype.size();
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

/// Whether no other rank needs the step before all have met: a wait for data that others publish, or a copy that stays here.
fn is_later(step: &Step) -> bool {
    match *step {
        Step::Wait { what, .. } => what != Semaphore::Empty,
        Step::Copy { .. } => step.half().is_none(),
        _ => false,
    }
}

/// Copies `src`, of the caller's memory, into the own half.
fn put(operands: &Operands, windows: &mut Windows, src: Span, (half, dst): (u8, Span)) {
    let Operands {
        buffers, elements, ..
    } = operands;
    let size = elements.dtype.size();
    let memory = buffers.get(src.buffer);
    memory.for_each_run(src.offset * size, src.len * size, |done, run| {
        let streaming = windows.streaming();
        let half = windows.write(half.into(), dst.offset * size + done, run.len());
        elements.copy(half, run, streaming);
    });
}

fn reduce(
    operands: &mut Operands,
    windows: &mut Windows,
    (half, at): (usize, usize),
    own: Option<Span>,
    result: Span,
) {
    let Operands {
        buffers,
        elements,
        rank,
        ..
    } = operands;
    let (size, rank) = (elements.dtype.size(), *rank);
    let mut done = 0;
    while done < result.len * size {
        let (rest, at) = (result.len * size - done, at * size + done);
        let place = result.offset * size + done;
        let own = own.map(|own| (own.buffer, own.offset * size + done));
        done += match (result.buffer, own) {
            (Buffer::Window { .. }, own) => {
                let own = own.map(|(buffer, at)| buffers.get(buffer).read(at, rest));
                let bytes = own.map_or(rest, <[u8]>::len);
                let streaming = windows.streaming();
                let (dst, theirs) = windows.write_beside(half, (place, at), bytes);
                combine(elements, dst, streaming, |other| match own {
                    Some(own) if other == rank => Some(own),
                    _ => theirs(other),
                });
                bytes
            }
            (to, Some((from, at_own))) if (from, at_own) != (to, place) => {
                let (from, to) = ((from, at_own), (to, place));
                let (own, dst) = buffers.read_and_write(from, to, (rest, rest));
                let bytes = own.len().min(dst.len());
                let (own, dst) = (&own[..bytes], &mut dst[..bytes]);
                combine(elements, dst, Streaming::No, |other| match other == rank {
                    true => Some(own),
                    false => Some(windows.read(other, half, at, bytes)),
                });
                bytes
            }
            (to, own) => {
                let dst = buffers.write(to, place, rest);
                let bytes = dst.len();
                // The own contribution is there already.
                combine(elements, dst, Streaming::No, |other| {
                    (own.is_none() || other != rank).then(|| windows.read(other, half, at, bytes))
                });
                bytes
            }
        };
    }
}

/// `dst` becomes the result of all contributions in rank order: what `of` gives for a rank, or else what is in `dst`.
fn combine<'a>(
    elements: &Elements,
    dst: &mut [u8],
    streaming: Streaming,
    of: impl Fn(Rank) -> Option<&'a [u8]>,
) {
    let mut sources = [Source::Destination; MOST_RANKS];
    let sources = &mut sources[..elements.contributors()];
    for (rank, source) in sources.iter_mut().enumerate() {
        if let Some(contribution) = of(rank) {
            *source = Source::Element(contribution);
        }
    }
    elements.reduce_all(dst, sources, streaming);
}

fn get(
    operands: &mut Operands,
    windows: &mut Windows,
    (half, at): (usize, usize),
    from: Rank,
    to: Span,
) {
    let Operands {
        buffers, elements, ..
    } = operands;
    let size = elements.dtype.size();
    let (place, at, bytes) = (to.offset * size, at * size, to.len * size);
    if matches!(to.buffer, Buffer::Window { .. }) {
        let (dst, theirs) = windows.write_beside(half, (place, at), bytes);
        let theirs = theirs(from).expect("what is got is a peer's");
        return elements.copy(dst, theirs, Streaming::No);
    }
    let mut done = 0;
    while done < bytes {
        let dst = buffers.write(to.buffer, place + done, bytes - done);
        let theirs = windows.read(from, half, at + done, dst.len());
        elements.copy(dst, theirs, Streaming::No);
        done += dst.len();
    }
}

fn keep(operands: &mut Operands, src: Span, dst: Span) {
    let Operands {
        buffers, elements, ..
    } = operands;
    let (size, mut done) = (elements.dtype.size(), 0);
    while done < src.len * size {
        let from = (src.buffer, src.offset * size + done);
        let to = (dst.buffer, dst.offset * size + done);
        let rest = src.len * size - done;
        let (read, written) = buffers.read_and_write(from, to, (rest, rest));
        let bytes = read.len().min(written.len());
        elements.copy(&mut written[..bytes], &read[..bytes], Streaming::No);
        done += bytes;
    }
}
