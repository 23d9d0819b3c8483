//! The signals by which the ranks of a host tell each other about their windows.

use crate::types::Rank;

/// Halves of a window: see [`plan::windows`](super::windows).
pub const HALVES: usize = 2;

/// The most ranks that can meet in windows: the bits of [`Peers`].
pub const MOST_RANKS: usize = 128;

/// A set of ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Peers(u128);

impl Peers {
    /// All of a group of `world` ranks but `rank`.
    #[inline]
    pub fn others(rank: Rank, world: usize) -> Self {
        (0..world).filter(|peer| *peer != rank).collect()
    }

    /// No rank.
    #[inline]
    pub const fn none() -> Self {
        Self(0)
    }

    /// Whether `rank` is among them.
    #[inline]
    pub const fn contains(self, rank: Rank) -> bool {
        rank < MOST_RANKS && self.0 >> rank & 1 == 1
    }

    /// Whether there is none.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// A bit for each of the first 64 ranks.
    #[inline]
    pub const fn first_bits(self) -> u64 {
        self.0 as u64
    }

    /// The ranks in ascending order.
    #[inline]
    pub fn iter(self) -> impl Iterator<Item = Rank> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let rank = (left != 0).then(|| left.trailing_zeros() as Rank)?;
            left &= left - 1;
            Some(rank)
        })
    }

    /// These and those.
    #[must_use]
    #[inline]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The same without `rank`.
    #[must_use]
    #[inline]
    pub const fn without(self, rank: Rank) -> Self {
        Self(self.0 & !(1 << rank))
    }
}

impl FromIterator<Rank> for Peers {
    /// Ranks below [`MOST_RANKS`].
    fn from_iter<T: IntoIterator<Item = Rank>>(ranks: T) -> Self {
        Self(ranks.into_iter().fold(0, |set, rank| set | 1 << rank))
    }
}

/// The binary semaphores of an ordered pair of ranks (owner of a window, reader) and a half of that window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Semaphore {
    /// The owner's half holds what it contributes.
    Contributions,
    /// The owner's half holds its part of the result.
    Results,
    /// The reader has no use for what is in the half. At first set; the owner waits for it, the reader signals it.
    Empty,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_hold_ranks_up_to_the_last() {
        let ranks = [0, 3, 63, 64, 101, MOST_RANKS - 1];
        let set: Peers = ranks.into_iter().collect();
        assert!(set.iter().eq(ranks));
        assert!((0..2 * MOST_RANKS).all(|rank| set.contains(rank) == ranks.contains(&rank)));
        let fewer = set.without(64).without(0);
        assert!(fewer.iter().eq([3, 63, 101, MOST_RANKS - 1]));
        assert_eq!(fewer.union([0, 64].into_iter().collect()), set);
        assert!(Peers::none().is_empty() && !set.is_empty());
        assert!(
            ranks
                .iter()
                .fold(set, |set, rank| set.without(*rank))
                .is_empty()
        );
        assert_eq!(Peers::others(70, 100).iter().count(), 99);
        assert_eq!(Peers::others(1, 3).first_bits(), 0b101);
    }
}
