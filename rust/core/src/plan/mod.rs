//! A collective, on one rank, as data: a list of steps over spans of three buffers.
//!
//! A plan is made by a pure function of the [`Shape`] of the request, so that it can be proved correct,
//! simulated and cached without a socket (see [`check`]). It is *sequential*: its meaning is that of running its
//! steps one after the other. The executor may overlap a step with earlier unfinished ones when they share no
//! link direction and no bytes (two reads are fine), within a window of at least [`MIN_WINDOW`] steps. Pipelining
//! falls out of that; authors of algorithms never write it. With a window of one, exchanges deadlock on links
//! that hold nothing, which is why the window is at least two: the usual `Send` then `Recv` pair of an exchange
//! progresses at once.
//!
//! # Buffers and element types
//!
//! `Input` and `Output` hold elements of the request's type. `Scratch` belongs to the plan and holds elements of
//! the *accumulation* type, which is float32 for the 16-bit and 8-bit floats and the same type for all others.
//! A message carries the elements of the span it was sent from: [`Wire::Element`] from `Input` and `Output`,
//! [`Wire::Partial`] from `Scratch`. `Copy` between `Scratch` and the others converts.
#![forbid(unsafe_code)]

use std::fmt;

use crate::types::{Collective, Rank};

/// The smallest number of steps that an executor must be willing to have unfinished at once.
pub const MIN_WINDOW: usize = 2;

/// One of the three buffers a plan works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// The caller's input; never written.
    Input,
    /// The caller's output. When the request is in place it also holds the input.
    Output,
    /// The plan's own memory, [`Plan::scratch`] elements of the accumulation type, uninitialised at first.
    Scratch,
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
    /// `dst = dst op incoming`, with the next message of rank `from`. When `wire` is `Element` and `dst` is in
    /// `Scratch`, the incoming elements are widened.
    Fold {
        /// The sending rank.
        from: Rank,
        /// The left operand and the result.
        dst: Span,
        /// What the message carries.
        wire: Wire,
    },
    /// `dst = src`; widens into `Scratch`, rounds out of it.
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
}

/// The steps of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// In program order.
    pub steps: Vec<Step>,
    /// Elements of scratch memory needed.
    pub scratch: usize,
}

/// How many elements each rank contributes or gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts<'a> {
    /// The same number everywhere.
    ///
    /// all_reduce, reduce, broadcast: the length of the buffer. all_gather, gather: the length of each
    /// contribution. reduce_scatter, scatter: the length of each result. all_to_all: the length of each block.
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

/// The families of algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Everyone to everyone: the fewest rounds, one fixed order of reduction at any size.
    Direct,
    /// Around a ring: each link direction of each rank is used by one neighbour only.
    Ring,
    /// Double binary tree (Sanders, Speck, Träff 2009).
    Tree,
    /// Recursive doubling: log2(n) exchanges of everything.
    RecursiveDoubling,
    /// Recursive halving, then doubling (Rabenseifner 2004; any world size).
    Halving,
    /// Bruck et al. 1997: log2(n) rounds for all_to_all, all_gather and barrier.
    Bruck,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Self; 6] = [
        Self::Direct,
        Self::Ring,
        Self::Tree,
        Self::RecursiveDoubling,
        Self::Halving,
        Self::Bruck,
    ];

    /// The name used in settings and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Ring => "ring",
            Self::Tree => "tree",
            Self::RecursiveDoubling => "recursive_doubling",
            Self::Halving => "halving",
            Self::Bruck => "bruck",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
