//! The key of a choice and a plan, by which both are found again.

use crate::plan::{Counts, Shape};
use crate::types::{Collective, Rank};

/// Everything that a plan for even counts depends on, beside the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PlanKey {
    pub(crate) collective: Collective,
    pub(crate) count: usize,
    pub(crate) element_size: usize,
    pub(crate) root: Rank,
    pub(crate) in_place: bool,
    /// Bytes of an element of scratch memory.
    pub(crate) partial_size: usize,
    /// The input is multiplied on the way, by the plan itself.
    pub(crate) premultiplied: bool,
    /// It folds in rank order.
    pub(crate) in_rank_order: bool,
}

impl PlanKey {
    /// The key of a request with even counts, on elements of `element_size` bytes whose partial sums have `partial_size`;
    /// `None` for others.
    pub(crate) fn of(shape: &Shape, (element_size, partial_size): (usize, usize)) -> Option<Self> {
        let Counts::Even(count) = shape.counts else {
            return None;
        };
        Some(Self {
            collective: shape.collective,
            count,
            element_size,
            root: shape.root,
            in_place: shape.in_place,
            partial_size,
            premultiplied: false,
            in_rank_order: false,
        })
    }

    /// The same, for a request that folds in rank order or in any order.
    pub(crate) fn in_rank_order(self, in_rank_order: bool) -> Self {
        Self {
            in_rank_order,
            ..self
        }
    }

    /// The shape that it was made from, on rank `rank` of `world`.
    pub(crate) fn shape(&self, rank: Rank, world: usize) -> Shape<'static> {
        Shape {
            collective: self.collective,
            rank,
            world,
            counts: Counts::Even(self.count),
            root: self.root,
            in_place: self.in_place,
            widen: self.partial_size != self.element_size,
        }
    }
}
