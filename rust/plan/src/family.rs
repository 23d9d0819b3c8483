//! The properties of each algorithm beside its plans.

use super::cost::{Bill, Work};
use super::{Plan, Shape};
use crate::types::Collective;

/// An algorithm: what it serves, how it makes plans, and what they cost.
pub(super) struct Family {
    /// Whether it has a plan for a well-formed shape with messages alone, wherever the ranks are. An algorithm that
    /// depends on where they are says no: see [`hierarchical::serves`], [`shared::serves`](super::shared::serves).
    pub(super) serves: fn(&Shape) -> bool,
    /// This rank's plan for a shape that it serves, between several ranks; the number limits the elements of a piece where it
    /// works in pieces.
    pub(super) build: fn(&Shape, usize) -> Option<Plan>,
    /// Puts all that the plan does on the bill: the plan, counted instead of made.
    pub(super) price: fn(Collective, &Work, &mut Bill),
}

impl Family {
    /// An algorithm whose plans depend on where the ranks are, and are made elsewhere.
    pub(super) const fn built_elsewhere(price: fn(Collective, &Work, &mut Bill)) -> Self {
        Self {
            serves: |_| false,
            build: |_, _| None,
            price,
        }
    }
}
