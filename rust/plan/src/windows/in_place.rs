//! The parts of a plan over windows that need not be put there, where peers can read a rank's buffers themselves.
//!
//! A rank puts data into its half for its peers alone. So an executor may skip that, and have the peers read where the buffer
//! lies: the plan, and what the other ranks do, stay the same. In an `all_reduce` the peers also store the result there, as
//! they would in the half. In other collectives the rank goes on, as the last of its steps, when all have read: then its buffer
//! is its own again.
//!
//! [`check`](super::super::check) proves plans with any of their ranks in place, by what is found here.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{Buffer, Peers, Plan, Semaphore, Span, Step};
use crate::types::{Collective, Rank};

/// A step that puts a part of a buffer into a half, for peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Put {
    step: usize,
    /// Of the caller's memory.
    pub src: Span,
    /// Where it would begin in the half.
    pub at: usize,
}

/// The parts of a rank's operation that are read in place. `L` says where a half would begin if the data put into it lay there
/// as it lies in the buffer.
#[derive(Clone, Debug)]
pub struct InPlace<L> {
    skipped: BTreeSet<usize>,
    published: Vec<Published<L>>,
    /// Which halves peers may still read at the end.
    read: Vec<(usize, Peers)>,
}

#[derive(Clone, Debug)]
struct Published<L> {
    /// The step.
    step: usize,
    by_peer: Vec<(Rank, L)>,
    /// Where peers leave results.
    results: Option<L>,
}

impl<L: Copy + PartialEq> InPlace<L> {
    /// Asks `locate` for each part that is put for these peers, and skips what is put between two waits where all parts are
    /// located.
    pub fn find(
        plan: &Plan,
        collective: Collective,
        mut locate: impl FnMut(&Put, Peers) -> Option<L>,
    ) -> Self {
        let mut found = Self {
            skipped: BTreeSet::new(),
            published: Vec::new(),
            read: Vec::new(),
        };
        let mut puts: Vec<Put> = Vec::new();
        for (index, step) in plan.steps.iter().enumerate() {
            match *step {
                Step::Wait {
                    what: Semaphore::Empty,
                    ..
                } => puts.clear(),
                Step::Copy { src, dst } if is_put(src, dst) => puts.push(Put {
                    step: index,
                    src,
                    at: dst.offset,
                }),
                Step::Signal {
                    what: Semaphore::Contributions,
                    half,
                    to,
                } => {
                    // The result is stored there as well.
                    let may_be = |put: &Put| {
                        collective != Collective::AllReduce || put.src.buffer == Buffer::Output
                    };
                    let puts = std::mem::take(&mut puts);
                    let located = puts.iter().map(|put| match may_be(put) {
                        true => locate(put, to),
                        false => None,
                    });
                    if let Some(located) = located.collect::<Option<Vec<L>>>() {
                        found.publish((index, half, to), collective, &puts, &located);
                    }
                }
                _ => {}
            }
        }
        found
    }

    fn publish(
        &mut self,
        (step, half, to): (usize, usize, Peers),
        collective: Collective,
        puts: &[Put],
        located: &[L],
    ) {
        let Some(first) = located.first() else {
            return;
        };
        let is_one = located.iter().all(|other| other == first);
        let has_blocks = collective.gives_blocks();
        // All peers read the same, or each the block that was put for it, in the order of the ranks.
        let by_peer: Vec<(Rank, L)> = match is_one {
            true => to.iter().map(|peer| (peer, *first)).collect(),
            false if has_blocks && to.iter().count() == located.len() => {
                to.iter().zip(located.iter().copied()).collect()
            }
            false => return,
        };
        self.skipped.extend(puts.iter().map(|put| put.step));
        let is_given = collective == Collective::AllReduce;
        self.published.push(Published {
            step,
            by_peer,
            results: is_given.then_some(*first),
        });
        // The results of an all_reduce come after all reads.
        if !is_given {
            self.read.retain(|(other, _)| *other != half);
            self.read.push((half, to));
        }
    }

    /// Whether there is anything.
    pub fn is_any(&self) -> bool {
        !self.published.is_empty()
    }

    /// Whether a step of the plan puts what peers read in place.
    pub fn skips(&self, step: usize) -> bool {
        self.skipped.contains(&step)
    }

    /// Where `peer` reads what a step publishes; `None` in the half.
    pub fn located(&self, step: usize, peer: Rank) -> Option<L> {
        let published = self.published(step)?;
        let found = published.by_peer.iter().find(|(rank, _)| *rank == peer);
        found.map(|(_, located)| *located)
    }

    /// Where peers store results after a step has published; `None` in the half, or nowhere.
    pub fn results(&self, step: usize) -> Option<L> {
        self.published(step)?.results
    }

    fn published(&self, step: usize) -> Option<&Published<L>> {
        self.published
            .iter()
            .find(|published| published.step == step)
    }

    /// The plan with which the rank goes on when all peers have read.
    pub fn complete(&self, plan: Arc<Plan>) -> Arc<Plan> {
        if self.read.is_empty() {
            return plan;
        }
        let mut plan = Plan::clone(&plan);
        let waits = self.read.iter().map(|(half, readers)| Step::Wait {
            half: *half,
            what: Semaphore::Empty,
            from: *readers,
            take: Peers::none(),
        });
        plan.steps.extend(waits);
        Arc::new(plan)
    }
}

fn is_put(src: Span, dst: Span) -> bool {
    let is_window = |span: Span| matches!(span.buffer, Buffer::Window { .. });
    is_window(dst) && !is_window(src)
}
