//! A collective, on one rank, as data: a list of steps over spans of buffers.
//!
//! A plan is made by a pure function of the [`Shape`] of the request, so that it can be proved correct,
//! simulated and cached without a socket (see [`check`]). It is *sequential*: its meaning is that of running
//! its steps one after the other. The executor may overlap a step with earlier unfinished ones when they
//! share no link direction and no bytes (two reads are fine), within a window of at least [`MIN_WINDOW`]
//! steps. Pipelining falls out of that; authors of algorithms never write it. With a window of one, exchanges
//! deadlock on links that hold nothing, which is why the window is at least two: the usual `Send` then `Recv`
//! pair of an exchange progresses at once.
//!
//! # Buffers and element types
//!
//! `Input` and `Output` hold elements of the request's type. `Scratch` belongs to the plan and holds elements
//! of the *accumulation* type. In a collective that reduces, that is float32 for the 16-bit and 8-bit floats
//! and the same type for all others; in one that only moves elements it is the request's own type, always, so
//! that the detour through `Scratch` keeps every bit (a NaN's payload too). A message carries the elements of
//! the span it was sent from: [`Wire::Element`] from `Input` and `Output`, [`Wire::Partial`] from `Scratch`.
//! `Copy` between `Scratch` and the others converts.
//!
//! # Windows
//!
//! Ranks of one host also meet in [`Buffer::Window`], memory that all of them map: [`windows`] makes such plans. No
//! message orders their steps, so they signal and wait, and an executor takes their steps [in order](Order::InOrder).
//! Where their buffers lie in memory that all of them map, they [lend](Plan::lends) them to each other: [`in_place`].
//!
//! # Making one
//!
//! [`select::select`] names the algorithm that [`cost::predict`] finds cheapest, [`build`] makes this rank's
//! plan by it; [`check::verify`] proves a new algorithm.
//!
//! # Messages of no elements
//!
//! They are left out on both sides, except in a barrier, which has no others. But sender and receiver leave out the same
//! only if they were given the same counts, and a rank that leaves out all of its messages never learns that it was not.
//!
//! - Where all ranks should know all counts, and they are per rank or zero, the first message in each direction of each
//!   link is always sent: every message shows both sides whether they agree.
//! - Where two ranks alone know what goes between them ([`Collective::is_between_pairs`]), nothing is sent for nothing.
//!   An exchange with few neighbours costs what the neighbours cost, in messages and in links, however many ranks there
//!   are. That one side has something where the other has nothing is found beside the messages, by the engine.
#![forbid(unsafe_code)]

mod bruck;
mod build;
mod builder;
pub mod check;
pub mod cost;
mod direct;
mod doubling;
mod halving;
pub mod hierarchical;
pub mod in_place;
mod ring;
pub mod select;
pub mod shared;
pub mod signals;
pub mod simulate;
pub mod staged;
#[cfg(test)]
mod tests;
pub mod topology;
mod tree;
pub mod windows;

use std::collections::BTreeMap;

pub use self::build::{DEFAULT_CHUNK, applicable, applicable_on, build, build_chunked, build_on};
use self::signals::{Peers, Semaphore};
pub use crate::types::Algorithm;
use crate::types::{Collective, Rank};

/// The smallest number of steps that an executor must be willing to have unfinished at once.
pub const MIN_WINDOW: usize = 2;

/// Memory that a plan works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// The caller's input; never written.
    Input,
    /// The caller's output. When the request is in place it also holds the input.
    Output,
    /// The plan's own memory, [`Plan::scratch`] elements of the accumulation type, uninitialised at first.
    Scratch,
    /// A half of a window: memory of `rank` that it alone writes and that all ranks of its host read. It holds
    /// elements of the request's type. [`Step::Signal`] and [`Step::Wait`] order its use by the ranks.
    Window {
        /// The owner.
        rank: u8,
        /// Counted from the half that the operation begins with.
        half: u8,
    },
}

impl Buffer {
    /// A half of the window of a rank, one of [`signals::MOST_RANKS`] at most.
    pub const fn window(rank: Rank, half: usize) -> Self {
        assert!(rank < signals::MOST_RANKS && half < signals::HALVES);
        Self::Window {
            rank: rank as u8,
            half: half as u8,
        }
    }
}

/// `len` elements of `buffer` from element `offset` on. A span may be empty: a message of no elements still
/// synchronises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// The buffer.
    pub buffer: Buffer,
    /// The first element.
    pub offset: usize,
    /// The number of elements.
    pub len: usize,
}

impl Span {
    /// `len` elements of `buffer` from `offset`.
    pub const fn new(buffer: Buffer, offset: usize, len: usize) -> Self {
        Self {
            buffer,
            offset,
            len,
        }
    }

    /// Whether both have an element in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.buffer == other.buffer
            && self.len > 0
            && other.len > 0
            && self.offset < other.offset + other.len
            && other.offset < self.offset + self.len
    }
}

/// The element type of a message's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wire {
    /// Elements of the request's type.
    Element,
    /// Partial results, in the accumulation type.
    Partial,
}

/// Where the contributions to a [`Step::ReduceAll`] lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sources {
    /// In the windows of all ranks.
    Windows {
        /// Counted from the half that the operation begins with.
        half: usize,
        /// In every half.
        offset: usize,
        /// This rank's contribution where it is not in its half; as long as the result.
        own: Option<Span>,
    },
    /// In the outputs of all ranks, which [lend](Plan::lends) them: where the result goes.
    Outputs,
}

/// One action of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Send `src` to rank `to` as one message.
    Send {
        /// The receiving rank.
        to: Rank,
        /// What is sent. From `Scratch` the message is `Partial`, else `Element`.
        src: Span,
    },
    /// Receive the next message of rank `from` into `dst`, converting `wire` to `dst`'s type.
    Recv {
        /// The sending rank.
        from: Rank,
        /// Where it goes; exactly as long as the message.
        dst: Span,
        /// What the message carries.
        wire: Wire,
    },
    /// `dst = dst op incoming`, with the next message of rank `from`. When `wire` is `Element` and `dst` is
    /// in `Scratch`, the incoming elements are widened.
    Fold {
        /// The sending rank.
        from: Rank,
        /// The left operand and the result.
        dst: Span,
        /// What the message carries.
        wire: Wire,
    },
    /// `dst = src`; widens into `Scratch`, rounds out of it. In a plan that is premultiplied (see [`windows::build`]) what
    /// comes from the caller's memory is multiplied on the way.
    Copy {
        /// Read.
        src: Span,
        /// Written; as long as `src`.
        dst: Span,
    },
    /// `dst = dst op src`; widens `src` when only `dst` is in `Scratch`.
    Reduce {
        /// The right operand.
        src: Span,
        /// The left operand and the result.
        dst: Span,
    },
    /// `dst = finish(src)`: what completes a reduction. Divides by the world size for `avg` and rounds out of
    /// `Scratch`. `src == dst` is allowed. Each reduced element is finished exactly once, on the rank that
    /// completes it, before it is sent on as a result.
    Finish {
        /// A complete sum in the accumulation type.
        src: Span,
        /// The result.
        dst: Span,
    },
    /// `dst = finish(x0 op x1 op ...)` in the order of the ranks and in one pass, of what all ranks contribute. In one
    /// pass means that a sum in a wider type is rounded once.
    ReduceAll {
        /// Where the contributions lie.
        srcs: Sources,
        /// The result.
        dst: Span,
        /// Ranks that lend their outputs: there the result is stored as well, at the same place.
        copies: Peers,
    },
    /// Set a semaphore of a half for each of these ranks: what this rank did before, they see after their wait.
    Signal {
        /// Counted from the half that the operation begins with.
        half: usize,
        /// Of this rank's half; [`Semaphore::Empty`] is that of theirs.
        what: Semaphore,
        /// To which ranks.
        to: Peers,
    },
    /// Wait until each rank of `from` has set its semaphore, and unset those of `take`.
    Wait {
        /// Counted from the half that the operation begins with.
        half: usize,
        /// Of their halves; [`Semaphore::Empty`] is that of this rank's.
        what: Semaphore,
        /// For which ranks.
        from: Peers,
        /// Some or all of them.
        take: Peers,
    },
}

impl Step {
    /// The half of a window that the step is about, if it is about one.
    pub fn half(&self) -> Option<usize> {
        let of = |span: Span| match span.buffer {
            Buffer::Window { half, .. } => Some(usize::from(half)),
            _ => None,
        };
        match *self {
            Self::ReduceAll {
                srcs: Sources::Windows { half, .. },
                ..
            }
            | Self::Signal { half, .. }
            | Self::Wait { half, .. } => Some(half),
            Self::Copy { src, dst } => of(src).or(of(dst)),
            _ => None,
        }
    }

    /// The spans the step reads, of this rank's own memory in [`Step::ReduceAll`].
    pub fn reads(&self) -> [Option<Span>; 2] {
        match *self {
            Self::Send { src, .. } | Self::Copy { src, .. } | Self::Finish { src, .. } => {
                [Some(src), None]
            }
            Self::Recv { .. } | Self::Signal { .. } | Self::Wait { .. } => [None, None],
            Self::ReduceAll { srcs, dst, .. } => match srcs {
                Sources::Windows { own, .. } => [own, None],
                Sources::Outputs => [Some(dst), None],
            },
            Self::Fold { dst, .. } => [Some(dst), None],
            Self::Reduce { src, dst } => [Some(src), Some(dst)],
        }
    }

    /// The span the step writes, of this rank's own memory.
    pub fn writes(&self) -> Option<Span> {
        match *self {
            Self::Send { .. } | Self::Signal { .. } | Self::Wait { .. } => None,
            Self::Recv { dst, .. }
            | Self::Fold { dst, .. }
            | Self::Copy { dst, .. }
            | Self::Reduce { dst, .. }
            | Self::Finish { dst, .. }
            | Self::ReduceAll { dst, .. } => Some(dst),
        }
    }

    /// Whether this step may start only after `earlier`, an unfinished step before it in the same plan, has
    /// ended. This is the one definition of the rule, for executors and for the checker:
    ///
    /// - both use the same direction of the same link, or
    /// - one writes bytes that the other reads or writes, or
    /// - this is a `Send` of no elements of `Scratch` and `earlier` a `Recv` of none into it. Such messages carry
    ///   no bytes to tell that one depends on the other, and a barrier consists of them: "I have heard from ..."
    ///   is what they say.
    pub fn must_follow(&self, earlier: &Self) -> bool {
        self.shares_link(earlier) || self.depends_on(earlier)
    }

    /// The first of these reasons.
    pub fn shares_link(&self, earlier: &Self) -> bool {
        match (self, earlier) {
            (Self::Send { to, .. }, Self::Send { to: other, .. }) => to == other,
            (
                Self::Recv { from, .. } | Self::Fold { from, .. },
                Self::Recv { from: other, .. } | Self::Fold { from: other, .. },
            ) => from == other,
            _ => false,
        }
    }

    /// The others.
    pub fn depends_on(&self, earlier: &Self) -> bool {
        if let (Self::Send { src, .. }, Self::Recv { dst, .. }) = (self, earlier)
            && (src.len, src.buffer) == (0, Buffer::Scratch)
            && (dst.len, dst.buffer) == (0, Buffer::Scratch)
        {
            return true;
        }
        let touches = |writer: &Self, other: &Self| {
            writer.writes().is_some_and(|written| {
                let touched = |span: &Span| span.overlaps(&written);
                other.reads().iter().flatten().any(touched)
                    || other.writes().as_ref().is_some_and(touched)
            })
        };
        touches(self, earlier) || touches(earlier, self)
    }
}

/// In which order an executor takes the steps of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// A step may overlap with earlier unfinished ones: see the [module](self).
    #[default]
    Overlapping,
    /// One after the other. Plans that signal and wait are such: what a signal says is that all before it is done.
    InOrder,
}

/// The steps of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// In program order.
    pub steps: Vec<Step>,
    /// Elements of scratch memory needed.
    pub scratch: usize,
    /// Whether steps may overlap.
    pub order: Order,
    /// The ranks lend each other their outputs: none takes its first step before all have lent theirs, and none has ended
    /// before all have given back what they were lent.
    pub lends: bool,
}

impl Plan {
    /// Elements of the longest message that is sent or received.
    pub fn longest_message(&self) -> usize {
        let elements = |step: &Step| match *step {
            Step::Send { src, .. } => src.len,
            Step::Recv { dst, .. } | Step::Fold { dst, .. } => dst.len,
            _ => 0,
        };
        self.steps.iter().map(elements).max().unwrap_or(0)
    }

    /// For each step, whether it receives what no later step reads.
    pub fn last_receives(&self) -> Vec<bool> {
        let mut read = BTreeMap::<Buffer, Ranges>::new();
        let mut last = vec![false; self.steps.len()];
        for (i, step) in self.steps.iter().enumerate().rev() {
            if let Step::Recv { dst, .. } = step {
                last[i] = !read.entry(dst.buffer).or_default().overlap(dst);
            }
            for span in step.reads().into_iter().flatten() {
                read.entry(span.buffer).or_default().add(&span);
            }
        }
        last
    }

    /// The same plan with every send as early as the steps before it allow, in the order of the sends. For a caller
    /// that does one step after the other: without this it could wait for a peer before it sends what another one
    /// needs.
    #[must_use]
    pub fn sends_first(self) -> Self {
        let mut steps: Vec<Step> = Vec::with_capacity(self.steps.len());
        for step in self.steps {
            let must_precede =
                |earlier: &Step| matches!(earlier, Step::Send { .. }) || step.must_follow(earlier);
            let place = match step {
                Step::Send { .. } => steps.iter().rposition(must_precede).map_or(0, |at| at + 1),
                _ => steps.len(),
            };
            steps.insert(place, step);
        }
        Self { steps, ..self }
    }
}

/// Ranges of one buffer, joined where they touch: by their starts, their ends.
#[derive(Default)]
struct Ranges(BTreeMap<usize, usize>);

impl Ranges {
    fn overlap(&self, span: &Span) -> bool {
        let before_end = self.0.range(..span.offset + span.len).next_back();
        before_end.is_some_and(|(_, end)| *end > span.offset)
    }

    fn add(&mut self, span: &Span) {
        if span.len == 0 {
            return;
        }
        let (mut start, mut end) = (span.offset, span.offset + span.len);
        while let Some((&from, &to)) = self.0.range(..=end).next_back()
            && to >= start
        {
            self.0.remove(&from);
            (start, end) = (start.min(from), end.max(to));
        }
        self.0.insert(start, end);
    }
}

/// How many elements each rank contributes or gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts<'a> {
    /// The same number everywhere.
    ///
    /// all_reduce, reduce, broadcast: the length of the buffer. all_gather, gather: the length of each
    /// contribution. reduce_scatter, scatter: the length of each result. all_to_all: the length of each
    /// block.
    Even(usize),
    /// One number per rank (all_gather, gather, reduce_scatter, scatter).
    PerRank(&'a [usize]),
    /// all_to_all: elements to each rank, and elements from each rank.
    PerPair {
        /// To each rank; `Input` holds them in rank order.
        send: &'a [usize],
        /// From each rank; `Output` holds them in rank order.
        recv: &'a [usize],
    },
}

/// Everything a plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape<'a> {
    /// The operation.
    pub collective: Collective,
    /// The rank whose plan is wanted.
    pub rank: Rank,
    /// The number of ranks.
    pub world: usize,
    /// Sizes, in elements.
    pub counts: Counts<'a>,
    /// The root of a rooted collective (0 otherwise).
    pub root: Rank,
    /// The input lies in the output buffer already and `Input` must not be used. all_reduce, reduce: at the
    /// same place. all_gather: as this rank's block. broadcast is always in place. Not for the others.
    pub in_place: bool,
    /// Reductions must accumulate in `Scratch`, because the accumulation type is wider than the element type.
    pub widen: bool,
}
