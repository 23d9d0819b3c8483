//! The tools with which every algorithm is written: a list of steps that grows, blocks of a buffer, and where a rank's
//! own contribution lies.

use std::ops::Range;

use super::{Buffer, Counts, Plan, Shape, Span, Step, Wire};
use crate::types::Rank;

/// A plan being written. Steps over empty spans are left out here, once for all algorithms: sender and
/// receiver know the same length, so both leave out the same messages.
///
/// That they know the same is not certain. See "Messages of no elements" in [`super`] for what is done where all ranks
/// should know all counts: the first message of each link direction is sent also when it is empty. Algorithms ask for a
/// message at least once in each direction that they use.
pub(super) struct Steps {
    plan: Plan,
    first: Option<First>,
}

/// The peers that nothing has been sent to yet, and those that nothing has been received from.
struct First {
    to: Vec<bool>,
    from: Vec<bool>,
}

impl Steps {
    /// No steps yet, of a plan for `shape`.
    pub(super) fn of(shape: &Shape) -> Self {
        let agreed = matches!(shape.counts, Counts::Even(1..));
        let is_between_pairs = shape.collective.is_between_pairs();
        Self {
            plan: Plan::default(),
            first: (!agreed && !is_between_pairs).then(|| First {
                to: vec![true; shape.world],
                from: vec![true; shape.world],
            }),
        }
    }

    /// The finished plan.
    pub(super) fn done(self) -> Plan {
        self.plan
    }

    /// `len` more elements of scratch memory.
    pub(super) fn scratch(&mut self, len: usize) -> Span {
        let span = Span::new(Buffer::Scratch, self.plan.scratch, len);
        self.plan.scratch += len;
        span
    }

    /// Sends `src`.
    pub(super) fn send(&mut self, to: Rank, src: Span) {
        if self.is_first(|first| &mut first.to[to]) || src.len > 0 {
            self.plan.steps.push(Step::Send { to, src });
        }
    }

    /// Receives into `dst`.
    pub(super) fn recv(&mut self, from: Rank, dst: Span, wire: Wire) {
        if self.is_first(|first| &mut first.from[from]) || dst.len > 0 {
            self.plan.steps.push(Step::Recv { from, dst, wire });
        }
    }

    /// `dst = dst op incoming`.
    pub(super) fn fold(&mut self, from: Rank, dst: Span, wire: Wire) {
        if self.is_first(|first| &mut first.from[from]) || dst.len > 0 {
            self.plan.steps.push(Step::Fold { from, dst, wire });
        }
    }

    /// Whether this is the first message in its direction, and goes also when it is empty.
    fn is_first(&mut self, direction: impl FnOnce(&mut First) -> &mut bool) -> bool {
        let first = self.first.as_mut().map(direction);
        first.is_some_and(std::mem::take)
    }

    /// `dst = src`, unless it is the same place.
    pub(super) fn copy(&mut self, src: Span, dst: Span) {
        if dst.len > 0 && src != dst {
            self.plan.steps.push(Step::Copy { src, dst });
        }
    }

    /// `dst = dst op src`.
    pub(super) fn reduce(&mut self, src: Span, dst: Span) {
        if dst.len > 0 {
            self.plan.steps.push(Step::Reduce { src, dst });
        }
    }

    /// `dst = finish(src)`.
    pub(super) fn finish(&mut self, src: Span, dst: Span) {
        if dst.len > 0 {
            self.plan.steps.push(Step::Finish { src, dst });
        }
    }

    /// Tells `to` that this rank has come, and all it has heard from.
    pub(super) fn signal(&mut self, to: Rank) {
        let src = Span::new(Buffer::Scratch, 0, 0);
        self.plan.steps.push(Step::Send { to, src });
    }

    /// Waits for the signal of `from`.
    pub(super) fn await_signal(&mut self, from: Rank) {
        self.plan.steps.push(Step::Recv {
            from,
            dst: Span::new(Buffer::Scratch, 0, 0),
            wire: Wire::Partial,
        });
    }
}

/// The element type of a message sent from `buffer`.
pub(super) fn wire_from(buffer: Buffer) -> Wire {
    match buffer {
        Buffer::Input | Buffer::Output | Buffer::Window { .. } => Wire::Element,
        Buffer::Scratch => Wire::Partial,
    }
}

impl Span {
    /// `range` of this span, counted from its start.
    pub(super) fn part(&self, range: Range<usize>) -> Span {
        debug_assert!(range.start <= range.end && range.end <= self.len);
        Span::new(self.buffer, self.offset + range.start, range.len())
    }
}

impl Span {
    /// The `index`-th piece of `chunk` elements, shorter at the end of the span and empty past it.
    pub(super) fn piece(&self, index: usize, chunk: usize) -> Span {
        let start = self.len.min(index * chunk);
        self.part(start..self.len.min(start + chunk))
    }
}

/// How many pieces of `chunk` elements `len` elements make. At least one, which may be empty.
pub(super) fn pieces(len: usize, chunk: usize) -> usize {
    len.div_ceil(chunk).max(1)
}

/// Consecutive blocks of a span, by their boundaries.
pub(super) struct Blocks {
    bounds: Vec<usize>,
}

impl Blocks {
    /// Blocks of the given lengths.
    pub(super) fn of(counts: impl IntoIterator<Item = usize>) -> Self {
        let mut end = 0;
        let mut bounds = vec![0];
        bounds.extend(counts.into_iter().map(|count| {
            end += count;
            end
        }));
        Self { bounds }
    }

    /// `total` elements in `parts` blocks as equal as can be, the longer ones first.
    pub(super) fn split(total: usize, parts: usize) -> Self {
        Self::of((0..parts).map(|i| total / parts + usize::from(i < total % parts)))
    }

    /// The blocks of a request: `counts` if they are per rank, else slices of equal length.
    pub(super) fn of_shape(shape: &Shape) -> Self {
        match shape.counts {
            Counts::PerRank(counts) => Self::of(counts.iter().copied()),
            Counts::Even(count) => Self::of((0..shape.world).map(|_| count)),
            Counts::PerPair { .. } => unreachable!("only all_to_all has counts per pair"),
        }
    }

    /// Where block `i` lies.
    pub(super) fn range(&self, i: usize) -> Range<usize> {
        self.run(i..i + 1)
    }

    /// Where the consecutive blocks `run` lie.
    pub(super) fn run(&self, run: Range<usize>) -> Range<usize> {
        self.bounds[run.start]..self.bounds[run.end]
    }

    /// The length of all blocks together.
    pub(super) fn total(&self) -> usize {
        self.bounds[self.bounds.len() - 1]
    }

    /// The length of the longest block.
    pub(super) fn longest(&self) -> usize {
        self.bounds
            .windows(2)
            .map(|b| b[1] - b[0])
            .max()
            .unwrap_or(0)
    }
}

impl Shape<'_> {
    /// The count of a request with one count for all.
    pub(super) fn count(&self) -> usize {
        match self.counts {
            Counts::Even(count) => count,
            _ => unreachable!("{} takes one count for all ranks", self.collective),
        }
    }

    /// The rank `distance` places after this one, around the circle.
    pub(super) fn after(&self, distance: usize) -> Rank {
        (self.rank + distance) % self.world
    }

    /// The rank `distance` places before this one; `distance` is at most the world size.
    pub(super) fn before(&self, distance: usize) -> Rank {
        (self.rank + self.world - distance) % self.world
    }

    /// `count()` elements of `Output`: the result of all_reduce, reduce, broadcast, scan and exscan.
    pub(super) fn output(&self) -> Span {
        Span::new(Buffer::Output, 0, self.count())
    }

    /// This rank's contribution to all_reduce, reduce, scan or exscan.
    pub(super) fn contribution(&self) -> Span {
        debug_assert!(self.collective.reduces() && !self.collective.gives_blocks());
        let buffer = if self.in_place {
            Buffer::Output
        } else {
            Buffer::Input
        };
        Span::new(buffer, 0, self.count())
    }
}
