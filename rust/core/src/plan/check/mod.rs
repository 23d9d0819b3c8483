//! Proves plans, by running them on symbols.
//!
//! [`verify`] executes the plans of all ranks of a world together. A buffer's element is not a number but an
//! *expression*: a contribution (rank, element), `left op right`, or a finished sum. Expressions are made
//! once and known by number, so that two ranks hold the same expression exactly when the numbers are equal:
//! same contributions, same order, hence the same bits.
//!
//! What is proved, for the given window:
//! - every output element is right, every contribution is in it exactly once, every sum was finished exactly
//!   once and all ranks have the same expression; nothing else was written;
//! - nothing is read before it is written; spans lie inside their buffers; the input is never written;
//! - partial sums are never rounded when [`Shape::widen`] is set;
//! - messages pair in order, length and wire type, and none is left over;
//! - the plans complete over links that hold nothing: a transfer happens only when both its steps are active.
//!
//! Which transfers happen first is up to an [`Order`]. Completing one step never disables another and
//! messages pair by their position on a link, so if the plans complete in one order they complete in all;
//! several orders are run all the same, because that argument is about
//! [`Step::must_follow`](super::Step::must_follow), which is under test too. For the same reason a plan that completes
//! within a window completes in any larger one and over links that do hold something.

pub(in crate::plan) mod contract;
pub(in crate::plan) mod expression;
pub(in crate::plan) mod rank_set;
mod run;
#[cfg(test)]
mod tests;

use self::run::Run;
use super::{Plan, Shape};

/// The largest world that [`verify`] takes: the ranks that contribute to a sum are bits of so many words.
pub const MAX_WORLD: usize = 128 * MOST_WORDS;
const MOST_WORDS: usize = 32;

/// What a verified set of plans moves, per rank.
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

/// In which order transfers and local steps that can happen do happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// What could happen first.
    Oldest,
    /// What can happen since last.
    Newest,
    /// Any, by a generator with this seed.
    Random(u64),
}

/// Runs the plans of all ranks together, in several orders, and proves the result. `plans[r]` and `shapes[r]`
/// are rank r's; an executor with a window of `window` steps or more is covered.
///
/// # Errors
/// The first thing that is wrong, in words: the rank, the step, the element.
pub fn verify(plans: &[Plan], shapes: &[Shape], window: usize) -> Result<Report, String> {
    if plans.is_empty() || plans.len() != shapes.len() || plans.len() > MAX_WORLD {
        return Err(format!(
            "{} plans and {} shapes: one of each per rank is wanted, for 1 to {MAX_WORLD} ranks",
            plans.len(),
            shapes.len()
        ));
    }
    for (rank, shape) in shapes.iter().enumerate() {
        if shape.rank != rank || shape.world != plans.len() {
            return Err(format!(
                "shape {rank} of {} is for rank {} of {}",
                plans.len(),
                shape.rank,
                shape.world
            ));
        }
    }
    let orders = [
        Order::Oldest,
        Order::Newest,
        Order::Random(1),
        Order::Random(2),
    ];
    let mut report = None;
    for order in orders {
        let completed = match plans.len() {
            0..=128 => Run::<1>::new(plans, shapes, window, order).complete(),
            _ => Run::<MOST_WORDS>::new(plans, shapes, window, order).complete(),
        };
        report = Some(
            completed.map_err(|problem| format!("{problem} (window {window}, order {order:?})"))?,
        );
    }
    Ok(report.unwrap_or_default())
}
