//! Proves plans, by running them on symbols.
//!
//! [`verify`] executes the plans of all ranks of a world together, [`verify_row`] those of several operations one after
//! the other. A buffer's element is not a number but an *expression*: a contribution (rank, element), `left op right`, or
//! a finished sum. Expressions are made once and known by number, so that two ranks hold the same expression exactly when
//! the numbers are equal: same contributions, same order, hence the same bits.
//!
//! The proof, for the given window of steps:
//! - every output element is right, every contribution is in it exactly once, every sum was finished exactly
//!   once and all ranks have the same expression; nothing else was written;
//! - a prefix has exactly the contributions of the ranks from 0 on that belong to it, as `((x0 op x1) op x2) op ...`, so it is
//!   bit for bit what continues the prefix of the rank before;
//! - nothing is read before it is written; spans lie inside their buffers; the input is never written;
//! - partial sums are never rounded when [`Shape::widen`] is set;
//! - messages pair in order, length and wire type, and none is left over;
//! - the plans complete over links that hold nothing: a transfer happens only when both its steps are active;
//! - in memory that ranks share, windows, outputs that they lend and buffers that are read in place, no rank writes what
//!   another may be using or has not read yet, or reads what may not have been written in this operation; no semaphore is set
//!   twice, and the end leaves all as at the beginning (`order` says how).
//!
//! The order of events is up to a [`Schedule`]. Completing one step never disables another and messages pair by their
//! position on a link, so if the plans complete in one order they complete in all; several orders are run all the same,
//! because that argument is about [`Step::must_follow`], which is under test too. For the same reason a plan that
//! completes within a window completes in any larger one and over links that do hold something.

pub(crate) mod contract;
pub(crate) mod expression;
mod in_place;
mod local;
mod memory;
mod order;
pub(crate) mod rank_set;
mod run;
#[cfg(test)]
mod tests;

use self::run::Run;
use super::signals::{MOST_RANKS, Peers};
use super::{Buffer, Order, Plan, Shape, Sources, Step};

/// The largest world that [`verify`] takes: the ranks that contribute to a sum are bits of a limited number of words.
pub const MAX_WORLD: usize = 128 * MOST_WORDS;
const MOST_WORDS: usize = 32;

/// The traffic of a verified set of plans, per rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Messages sent.
    pub messages: Vec<usize>,
    /// Elements sent.
    pub sent: Vec<usize>,
    /// Elements received.
    pub received: Vec<usize>,
    /// Whether every result is `((x0 op x1) op x2) op ...`, in the order of the ranks.
    pub in_rank_order: bool,
}

/// One operation: the plans and shapes of all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Operation<'a> {
    /// By rank.
    pub plans: &'a [Plan],
    /// By rank.
    pub shapes: &'a [Shape<'a>],
    /// The half of the windows that its chunks begin with.
    pub first: usize,
    /// Ranks whose buffers peers read in place, with the steps that come last then ([`InPlace`](super::windows::InPlace)).
    pub in_place: Peers,
}

/// In which order transfers and local steps that can happen do happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// The one that became possible first.
    Oldest,
    /// The one that became possible last.
    Newest,
    /// Any, by a generator with this seed.
    Random(u64),
}

const SCHEDULES: [Schedule; 4] = [
    Schedule::Oldest,
    Schedule::Newest,
    Schedule::Random(1),
    Schedule::Random(2),
];

/// Runs the plans of all ranks together, in several orders, and proves the result. `plans[r]` and `shapes[r]`
/// are rank r's; an executor with a window of `window` steps or more is covered.
///
/// # Errors
/// The first thing that is wrong, in words: the rank, the step, the element.
pub fn verify(plans: &[Plan], shapes: &[Shape], window: usize) -> Result<Report, String> {
    let operation = Operation {
        plans,
        shapes,
        first: 0,
        in_place: Peers::none(),
    };
    verify_row(&[operation], window, 0)
}

/// As [`verify`], for operations one after the other in windows of `half` elements per half. The report is of all
/// of them together.
///
/// # Errors
/// As there.
pub fn verify_row(operations: &[Operation], window: usize, half: usize) -> Result<Report, String> {
    let world = operations.first().map_or(0, |first| first.plans.len());
    for operation in operations {
        check_form(operation, world, half > 0)?;
    }
    let mut report = None;
    for schedule in SCHEDULES {
        let completed = match world {
            0..=128 => Run::<1>::new(operations, window, half, schedule).complete(),
            129..=1024 => Run::<8>::new(operations, window, half, schedule).complete(),
            _ => Run::<MOST_WORDS>::new(operations, window, half, schedule).complete(),
        };
        report = Some(
            completed
                .map_err(|problem| format!("{problem} (window {window}, order {schedule:?})"))?,
        );
    }
    Ok(report.unwrap_or_default())
}

/// Whether an operation has a plan and a shape for every rank, of a kind that this world can run.
fn check_form(operation: &Operation, world: usize, has_windows: bool) -> Result<(), String> {
    let Operation { plans, shapes, .. } = *operation;
    let is_one_each = plans.len() == shapes.len() && plans.len() == world;
    if plans.is_empty() || !is_one_each || world > MAX_WORLD {
        return Err(format!(
            "{} plans and {} shapes: one of each per rank is wanted, for 1 to {MAX_WORLD} ranks",
            plans.len(),
            shapes.len()
        ));
    }
    for (rank, shape) in shapes.iter().enumerate() {
        if shape.rank != rank || shape.world != world {
            return Err(format!(
                "shape {rank} of {world} is for rank {} of {}",
                shape.rank, shape.world
            ));
        }
    }
    let lends = plans[0].lends;
    if plans.iter().any(|plan| plan.lends != lends) {
        return Err("some ranks lend their outputs and others do not".into());
    }
    if (has_windows || lends) && world > MOST_RANKS {
        return Err(format!("{world} ranks share memory: {MOST_RANKS} at most"));
    }
    for (rank, plan) in plans.iter().enumerate() {
        let wrong = |step: &Step| !fits(step, plan, world, has_windows);
        if let Some(step) = plan.steps.iter().position(wrong) {
            return Err(format!(
                "step {step} of rank {rank}, {:?}, is none of its kind of plan: by messages, through windows in order, or in \
                 outputs that are lent, in order",
                plan.steps[step]
            ));
        }
    }
    Ok(())
}

/// Whether a step is one that the executor of its plan can run. Steps that overlap are in no order that clocks could show, so
/// what ranks do in memory that they share is in order.
fn fits(step: &Step, plan: &Plan, world: usize, has_windows: bool) -> bool {
    let uses = |is: fn(Buffer) -> bool| {
        let mut spans = step.reads().into_iter().flatten().chain(step.writes());
        spans.any(|span| is(span.buffer))
    };
    let in_scratch = uses(|buffer| buffer == Buffer::Scratch);
    let in_windows =
        step.half().is_some() || uses(|buffer| matches!(buffer, Buffer::Window { .. }));
    if plan.lends {
        let Step::ReduceAll { srcs, dst, copies } = *step else {
            return false;
        };
        let is_own = srcs == Sources::Outputs && dst.buffer == Buffer::Output;
        return is_own && plan.order == Order::InOrder && copies.iter().all(|peer| peer < world);
    }
    if plan.order == Order::Overlapping {
        return !in_windows && !matches!(step, Step::ReduceAll { .. });
    }
    let is_in_range = |peers: Peers| peers.iter().all(|peer| peer < world);
    match *step {
        Step::Copy { .. } => !in_scratch && (has_windows || !in_windows),
        Step::ReduceAll { srcs, copies, .. } => {
            matches!(srcs, Sources::Windows { .. })
                && is_in_range(copies)
                && !in_scratch
                && (has_windows || world == 1)
        }
        Step::Signal { to: peers, .. } | Step::Wait { from: peers, .. } => {
            has_windows && is_in_range(peers)
        }
        Step::Send { .. }
        | Step::Recv { .. }
        | Step::Fold { .. }
        | Step::Reduce { .. }
        | Step::Finish { .. } => false,
    }
}
