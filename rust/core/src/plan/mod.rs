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
//! # Algorithms
//!
//! Each has a file with its plans and its row of this table ([`Family`]): what it serves, and what it costs.
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
mod shape;
pub mod shared;
pub mod signals;
pub mod simulate;
pub mod staged;
mod step;
#[cfg(test)]
mod tests;
pub mod topology;
mod tree;
pub mod windows;

use std::collections::BTreeMap;

pub use self::build::{DEFAULT_CHUNK, applicable, applicable_on, build, build_chunked, build_on};
use self::cost::{Bill, Work};
pub use self::shape::{Counts, Shape};
pub use self::step::{Buffer, Sources, Span, Step, Wire};
pub use crate::types::Algorithm;
use crate::types::Collective;

/// The smallest number of steps that an executor must be willing to have unfinished at once.
pub const MIN_WINDOW: usize = 2;

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

/// An algorithm: what it serves, how it makes plans, and what they cost.
struct Family {
    /// Whether it has a plan for a well-formed shape with messages alone, wherever the ranks are. What depends on where
    /// they are says no: see [`hierarchical::serves`], [`shared::serves`](super::shared::serves).
    serves: fn(&Shape) -> bool,
    /// This rank's plan of what it serves, between several ranks, with pieces of at most so many elements where it works
    /// in pieces.
    build: fn(&Shape, usize) -> Option<Plan>,
    /// Puts all that the plan does on the bill: the plan, counted instead of made.
    price: fn(Collective, &Work, &mut Bill),
}

impl Family {
    /// An algorithm whose plans depend on where the ranks are, and are made elsewhere.
    const fn of_places(price: fn(Collective, &Work, &mut Bill)) -> Self {
        Self {
            serves: |_| false,
            build: |_, _| None,
            price,
        }
    }
}

/// The row of an algorithm.
fn family(algorithm: Algorithm) -> &'static Family {
    match algorithm {
        Algorithm::Direct => &direct::DIRECT,
        Algorithm::TwoShot => &direct::TWO_SHOT,
        Algorithm::Ring => &ring::FAMILY,
        Algorithm::Tree => &tree::FAMILY,
        Algorithm::RecursiveDoubling => &doubling::FAMILY,
        Algorithm::Halving => &halving::FAMILY,
        Algorithm::Bruck => &bruck::FAMILY,
        Algorithm::Hierarchical => &hierarchical::FAMILY,
        Algorithm::Windows => &windows::FAMILY,
        Algorithm::InPlace => &in_place::FAMILY,
    }
}
