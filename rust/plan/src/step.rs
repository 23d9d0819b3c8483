//! The language of plans: steps over spans of buffers.

use std::collections::BTreeMap;

use super::signals::{self, Peers, Semaphore};
use crate::types::Rank;

/// Memory that a plan works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// The caller's input; never written.
    Input,
    /// The caller's output. When the request is in place it also holds the input.
    Output,
    /// The plan's own memory, [`Plan::scratch`] elements of the accumulation type, uninitialised at first.
    Scratch,
    /// A half of a window: memory of `rank` that all ranks of its host read, and that it alone writes but for
    /// [`Step::ReduceAll`]. It holds elements of the request's type. [`Step::Signal`] and [`Step::Wait`] order its use by the
    /// ranks.
    Window {
        /// The owner.
        rank: u8,
        /// Counted from the half that the operation begins with.
        half: u8,
    },
}

impl Buffer {
    /// A half of the window of a rank, one of [`signals::MOST_RANKS`] at most.
    #[inline]
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
    #[inline]
    pub const fn new(buffer: Buffer, offset: usize, len: usize) -> Self {
        Self {
            buffer,
            offset,
            len,
        }
    }

    /// Whether both have an element in common.
    #[inline]
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
        /// The elements to send. From `Scratch` the message is `Partial`, else `Element`.
        src: Span,
    },
    /// Receive the next message of rank `from` into `dst`, converting `wire` to `dst`'s type.
    Recv {
        /// The sending rank.
        from: Rank,
        /// Where it goes; exactly as long as the message.
        dst: Span,
        /// The element type of the message.
        wire: Wire,
    },
    /// `dst = dst op incoming`, with the next message of rank `from`. When `wire` is `Element` and `dst` is
    /// in `Scratch`, the incoming elements are widened.
    Fold {
        /// The sending rank.
        from: Rank,
        /// The left operand and the result.
        dst: Span,
        /// The element type of the message.
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
    /// `dst = finish(src)`: what completes a reduction. Divides by the number of contributors for `avg` and rounds out of
    /// `Scratch`. `src == dst` is allowed. Each reduced element is finished exactly once, on the rank that
    /// completes it, before it is sent on as a result.
    Finish {
        /// A complete sum in the accumulation type.
        src: Span,
        /// The result.
        dst: Span,
    },
    /// `dst = finish(x0 op x1 op ...)` in the order of the ranks and in one pass, of what the
    /// [contributors](super::Shape::contributors) to this rank's result give. In one pass means that a sum in a wider type is
    /// rounded once.
    ReduceAll {
        /// Where the contributions lie.
        srcs: Sources,
        /// The result.
        dst: Span,
        /// Other ranks whose contribution the result replaces as well.
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
    #[inline]
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
    #[inline]
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
    #[inline]
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
    #[inline]
    pub(crate) fn must_follow(&self, earlier: &Self) -> bool {
        self.shares_link(earlier) || self.depends_on(earlier)
    }

    /// The first of these reasons.
    #[inline]
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
    #[inline]
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

/// The longest piece, in elements, that is worked on as a whole where an algorithm forwards what it receives
/// (tree, ring) or folds several contributions into one sum (direct). Long enough to hide a message's
/// latency, short enough to be still in the cache when its turn comes again.
pub const DEFAULT_CHUNK: usize = 32 * 1024;

/// In which order an executor takes the steps of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// A step may overlap with earlier unfinished ones: see [the module above](super).
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
