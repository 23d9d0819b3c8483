//! The input from which a plan is made.

use crate::types::{Collective, Rank};

/// How many elements each rank contributes or gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts<'a> {
    /// The same number everywhere.
    ///
    /// all_reduce, reduce, broadcast, scan, exscan: the length of the buffer. all_gather, gather: the length of each
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
    /// The input lies in the output buffer already and `Input` must not be used. all_reduce, reduce, scan, exscan: at the
    /// same place. all_gather: as this rank's block. broadcast is always in place. Not for the others.
    pub in_place: bool,
    /// Reductions must accumulate in `Scratch`, because the accumulation type is wider than the element type.
    pub widen: bool,
}

impl Shape<'_> {
    /// The ranks whose inputs are in a result of this rank, in a reduction: those from 0 to below this number.
    #[inline]
    pub const fn contributors(&self) -> usize {
        match self.collective {
            Collective::Scan => self.rank + 1,
            Collective::Exscan => self.rank,
            _ => self.world,
        }
    }
}
