//! Sets of ranks.

use std::ops::{BitAnd, BitOr, BitOrAssign, Not};

use crate::types::Rank;

/// A set of ranks below 128 times `WORDS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RankSet<const WORDS: usize>([u128; WORDS]);

const BITS: usize = u128::BITS as usize;

impl<const WORDS: usize> RankSet<WORDS> {
    pub(crate) const EMPTY: Self = Self([0; WORDS]);

    /// One rank alone.
    pub(crate) fn of(rank: Rank) -> Self {
        let mut set = Self::EMPTY;
        set.0[rank / BITS] = 1 << (rank % BITS);
        set
    }

    /// All ranks below `world`.
    pub(crate) fn below(world: usize) -> Self {
        Self(std::array::from_fn(|word| {
            match world.saturating_sub(word * BITS) {
                0 => 0,
                rest => u128::MAX >> (BITS - rest.min(BITS)),
            }
        }))
    }

    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::EMPTY
    }

    /// Whether all members are less than all those of `other`, which has some.
    pub(crate) fn is_below(&self, other: &Self) -> bool {
        let last = (0..WORDS).rev().find_map(|word| {
            let bits = self.0[word];
            (bits != 0).then(|| word * BITS + bits.ilog2() as usize)
        });
        let first = (0..WORDS).find_map(|word| {
            let bits = other.0[word];
            (bits != 0).then(|| word * BITS + bits.trailing_zeros() as usize)
        });
        last < first
    }

    /// The members, in order.
    pub(crate) fn ranks(&self) -> Vec<Rank> {
        let is_member = |rank: &Rank| self.0[rank / BITS] >> (rank % BITS) & 1 == 1;
        (0..WORDS * BITS).filter(is_member).collect()
    }
}

impl<const WORDS: usize> BitAnd for RankSet<WORDS> {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(std::array::from_fn(|word| self.0[word] & other.0[word]))
    }
}

impl<const WORDS: usize> BitOr for RankSet<WORDS> {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(std::array::from_fn(|word| self.0[word] | other.0[word]))
    }
}

impl<const WORDS: usize> BitOrAssign for RankSet<WORDS> {
    fn bitor_assign(&mut self, other: Self) {
        *self = *self | other;
    }
}

impl<const WORDS: usize> Not for RankSet<WORDS> {
    type Output = Self;

    fn not(self) -> Self {
        Self(self.0.map(|word| !word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_what_their_ranks_say() {
        let some = RankSet::<3>::of(0) | RankSet::of(127) | RankSet::of(128) | RankSet::of(300);
        assert_eq!(some.ranks(), [0, 127, 128, 300]);
        for world in [0, 1, 127, 128, 129, 384] {
            let all = RankSet::<3>::below(world);
            assert_eq!(all.ranks(), (0..world).collect::<Vec<_>>());
            assert_eq!(
                (all & !some).ranks().len() + (all & some).ranks().len(),
                world
            );
        }
        assert!(RankSet::<3>::below(300).is_below(&RankSet::of(300)));
        assert!(!some.is_below(&RankSet::of(129)));
        assert!(RankSet::<3>::EMPTY.is_below(&some));
    }
}
