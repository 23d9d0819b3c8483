//! A plan in place, carried out by the processor: [`plan::in_place`](crate::plan::in_place) says what it is.
//!
//! A rank sums up its slice of all buffers block by block, and stores each sum to all of them while the lines it was made
//! of are still in the cache.
//!
//! # Safety of the memory
//!
//! A rank leaves alone the memory that it shares, until that is back. Rank `r` alone uses slice `r`, and each rank's own
//! slice is shared with no rank: the checker proves this of the plan. After a failure see
//! [`Neighbour::await_writer`](crate::transport::Neighbour::await_writer).

use std::sync::Arc;

use crate::engine::collective::elements::Elements;
use crate::engine::collective::operands::Operands;
use crate::engine::collective::transfer::BYTES_PER_TURN;
use crate::plan::signals::{MOST_RANKS, Peers};
use crate::plan::{Buffer, Plan, Sources, Span, Step};
use crate::reduce::{Source, Streaming};
use crate::transport::SharedSpan;
use crate::types::Rank;

/// Bytes of the slice that are summed up before they are stored: with as many from every rank they stay in the cache.
const SUMMED_AT_ONCE: usize = 4 << 10;

/// Bytes of the slice between two looks at whether the peers still share.
const BYTES_PER_LOOK: usize = 64 << 10;

/// One rank's part.
#[derive(Debug)]
pub(super) struct InPlaceRun {
    plan: Arc<Plan>,
    /// The next step, and how many of its bytes are done.
    next: usize,
    done: usize,
    /// The byte at which the slice that the peers share begins in their outputs.
    slice: usize,
}

impl InPlaceRun {
    /// For a plan whose steps lie in the slice that the peers share, which begins at byte `slice` of their outputs.
    pub(super) fn new(plan: Arc<Plan>, slice: usize) -> Self {
        debug_assert!(plan.lends);
        Self {
            plan,
            next: 0,
            done: 0,
            slice,
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.next == self.plan.steps.len()
    }

    /// Works for one turn on the memory that the peers share. False when one has taken it back: its end, or its abort, will
    /// be heard of.
    pub(super) fn advance<'a>(
        &mut self,
        operands: &mut Operands,
        shared: impl Iterator<Item = (Rank, &'a mut SharedSpan)>,
    ) -> bool {
        let Some(&Step::ReduceAll {
            srcs: Sources::Outputs,
            dst,
            copies,
        }) = self.plan.steps.get(self.next)
        else {
            unreachable!("a plan in place reduces, and that is all");
        };
        let mut together: Vec<(Rank, &mut SharedSpan)> = Vec::with_capacity(operands.world);
        together.extend(shared);
        let (start, bytes) = bytes_of(operands, dst);
        let allowed = work(
            operands,
            (start, bytes, start - self.slice),
            &mut self.done,
            (&mut together, copies),
        );
        if self.done == bytes {
            (self.next, self.done) = (self.next + 1, 0);
        }
        allowed
    }
}

/// Where a span of the output begins, and how long it is.
fn bytes_of(operands: &Operands, span: Span) -> (usize, usize) {
    let size = operands.elements.dtype.size();
    (span.offset * size, span.len * size)
}

/// Sums up and stores some more of a span, from its byte `done` on. The span has `bytes` bytes, from `start` on in the own
/// output, and from `theirs` on in the memory that each peer shares.
fn work(
    operands: &mut Operands,
    (start, bytes, theirs): (usize, usize, usize),
    done: &mut usize,
    (shared, copies): (&mut [(Rank, &mut SharedSpan)], Peers),
) -> bool {
    let threads = operands
        .elements
        .workers
        .as_ref()
        .map(|workers| workers.threads());
    let most = BYTES_PER_TURN * threads.unwrap_or(1);
    let end = bytes.min(*done + most);
    let (stretch, block) = match threads {
        Some(_) => (most, most),
        None => (BYTES_PER_LOOK, SUMMED_AT_ONCE),
    };
    while *done < end {
        let stretch = stretch.min(end - *done);
        let allowed = shared.iter_mut().all(|(_, shared)| shared.begin());
        if allowed {
            for at in (0..stretch).step_by(block) {
                let (at, count) = (*done + at, block.min(stretch - at));
                let Operands {
                    buffers, elements, ..
                } = operands;
                let sum = buffers.write(Buffer::Output, start + at, count);
                reduce(elements, sum, theirs + at, (&mut *shared, copies));
            }
            *done += stretch;
        }
        shared.iter_mut().for_each(|(_, shared)| shared.end());
        if !allowed {
            return false;
        }
    }
    true
}

/// `sum` and the same bytes of what is shared, which are `at` bytes from its beginning, become the sum of all, in rank order.
fn reduce(
    elements: &Elements,
    sum: &mut [u8],
    at: usize,
    (shared, copies): (&mut [(Rank, &mut SharedSpan)], Peers),
) {
    let world = elements.contributors();
    let mut sources = [Source::Destination; MOST_RANKS];
    for (peer, shared) in &*shared {
        // Two numbers have one sum in either order, which is then made where the own one lies.
        let place = if world == 2 { 1 } else { *peer };
        sources[place] = Source::Element(shared.read(at, sum.len()));
    }
    elements.reduce_all(sum, &sources[..world], Streaming::No);
    for (_, shared) in shared.iter_mut().filter(|(peer, _)| copies.contains(*peer)) {
        elements.copy(shared.write(at, sum.len()), sum, Streaming::No);
    }
}
