//! Teams whose ranks keep the numbers of a larger group, while other ranks of that are gone: calls have the blocks of all.

use super::program::{Call, Share, Store};
use super::random::Random;
use crate::engine::mask::Mask;
use crate::engine::{Request, Sizes};
use crate::error::Result;
use crate::types::{Collective, Rank};

/// Bytes of the blocks of numbers that are gone. Nothing may write them, and what is read of them is wrong.
const GONE: u8 = 0x5a;

/// The numbers of the ranks of a team.
#[derive(Clone, Debug)]
pub(super) struct Numbers {
    world: usize,
    living: Vec<Rank>,
}

impl Numbers {
    /// The numbers of `team` ranks that are left where one to three more are gone.
    pub(super) fn random(random: &mut Random, team: usize) -> Self {
        let world = team + 1 + random.below(3);
        let mut living: Vec<Rank> = (0..world).collect();
        while living.len() > team {
            living.remove(random.below(living.len()));
        }
        Self { world, living }
    }

    fn mask(&self, place: usize) -> Mask {
        Mask::new(self.world, self.living.clone(), place)
    }

    /// The rank of the team's group with the number of this one.
    pub(super) fn place(&self, own: usize, peer: usize) -> usize {
        let place = self.mask(own).place(self.living[peer]);
        place.expect("one that is left")
    }

    /// The part of the rank at this place with blocks of those that are gone.
    pub(super) fn widen(&self, call: &Call, place: usize, share: Share) -> Share {
        let input = call.collective.gives_blocks();
        let output = call.collective.takes_blocks();
        let sizes = call.sizes(place);
        let team = self.living.len();
        let (send, recv) = match &sizes {
            Sizes::Even(count) => (vec![*count; team], vec![*count; team]),
            Sizes::PerRank(counts) => (counts.clone(), counts.clone()),
            Sizes::PerPair { send, recv } => (send.clone(), recv.clone()),
        };
        let gone = self.gone(call, place, &sizes);
        let spread = |bytes: &[u8], counts: &[usize]| {
            let of_all = self.of_all(counts, gone).into_iter().enumerate();
            let (mut rest, size) = (bytes, call.dtype.size());
            let block = |(number, count): (Rank, usize)| match self.living.contains(&number) {
                true => rest.split_off(..count * size).expect("a block").to_vec(),
                false => vec![GONE; count * size],
            };
            of_all.flat_map(block).collect::<Vec<u8>>()
        };
        let widen = |store: Store, counts: &[usize]| {
            Store::new(&spread(store.content(), counts), call.in_heap)
        };
        Share {
            input: share.input.map(|store| match input {
                true => widen(store, &send),
                false => store,
            }),
            output: share.output.map(|store| match output {
                true => widen(store, &recv),
                false => store,
            }),
            expected: share.expected.map(|bytes| match output {
                true => spread(&bytes, &recv),
                false => bytes,
            }),
        }
    }

    /// Has the group of the team carry out the call of the rank at this place.
    pub(super) fn carry<T>(
        &self,
        call: &Call,
        (place, share): (usize, &Share),
        act: impl FnOnce(Request) -> Result<T>,
    ) -> Result<T> {
        let sizes = call.sizes(place);
        let gone = self.gone(call, place, &sizes);
        let sizes = match sizes {
            Sizes::Even(count) => Sizes::Even(count),
            Sizes::PerRank(counts) => Sizes::PerRank(self.of_all(&counts, gone)),
            Sizes::PerPair { send, recv } => Sizes::PerPair {
                send: self.of_all(&send, gone),
                recv: self.of_all(&recv, gone),
            },
        };
        let request = call.request(share, (self.living[call.root], sizes));
        self.mask(place).carry(request, act)
    }

    /// Elements of a block of a number that is gone.
    fn gone(&self, call: &Call, place: usize, sizes: &Sizes) -> usize {
        let is_rooted = matches!(call.collective, Collective::Gather | Collective::Scatter);
        match sizes {
            Sizes::Even(count) => *count,
            Sizes::PerRank(_) if is_rooted && place != call.root => 0,
            _ => call.data as usize % 4,
        }
    }

    /// The counts of all numbers.
    fn of_all(&self, counts: &[usize], gone: usize) -> Vec<usize> {
        let mut of_all = vec![gone; self.world];
        for (number, count) in self.living.iter().zip(counts) {
            of_all[*number] = *count;
        }
        of_all
    }
}
