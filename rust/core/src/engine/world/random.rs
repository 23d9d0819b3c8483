//! Random numbers from a seed.

/// SplitMix64 (Steele, Lea, Flood 2014): every seed gives another sequence, the same on every machine.
#[derive(Clone, Debug)]
pub(in crate::engine) struct Random(u64);

impl Random {
    pub(in crate::engine) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(in crate::engine) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub(in crate::engine) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }

    /// True once in `times`.
    pub(in crate::engine) fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub(in crate::engine) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// A length of any order of magnitude up to `most`: as likely below 10 as above a tenth of it.
    pub(in crate::engine) fn length(&mut self, most: usize) -> usize {
        let bits = self.below(most.max(1).ilog2() as usize + 2) as u32;
        self.below((1_usize << bits).min(most + 1))
    }
}
