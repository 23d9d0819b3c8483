//! What is asked for, in numbers that all formulas use.

use crate::plan::DEFAULT_CHUNK;
use crate::types::Collective;

/// What is asked for, in bytes.
pub(in crate::plan) struct Work {
    pub(in crate::plan) world: usize,
    /// Elements of the whole that is reduced or broadcast; of one block for the others.
    pub(in crate::plan) elements: usize,
    pub(in crate::plan) bytes: f64,
    /// How many times as long partial sums are.
    pub(in crate::plan) widening: f64,
    /// Elements of a piece: [`piece_length`](crate::plan::piece_length).
    pub(in crate::plan) piece: usize,
}

impl Work {
    pub(in crate::plan) fn pieces(elements: usize) -> f64 {
        elements.div_ceil(DEFAULT_CHUNK).max(1) as f64
    }

    /// Of a plan whose pieces are [`Self::piece`] long.
    pub(in crate::plan) fn pieces_of(&self, elements: usize) -> f64 {
        elements.div_ceil(self.piece).max(1) as f64
    }

    /// Bytes of the longer of a rank's two buffers.
    pub(in crate::plan) fn longer_buffer(&self, collective: Collective) -> f64 {
        match collective {
            Collective::AllReduce | Collective::Reduce | Collective::Broadcast => self.bytes,
            _ => self.bytes * self.world as f64,
        }
    }

    pub(in crate::plan) fn slice(&self) -> f64 {
        self.bytes / self.world as f64
    }

    pub(in crate::plan) fn pieces_of_slice(&self) -> f64 {
        Self::pieces(self.elements.div_ceil(self.world))
    }

    /// Rounds of recursive doubling, and whether some ranks are guests of others.
    pub(in crate::plan) fn doublings(&self) -> (usize, bool) {
        (self.world.ilog2() as usize, !self.world.is_power_of_two())
    }

    /// Whether a sum is made in its place, where the caches have it: of two ranks, which need no order for that. What
    /// is larger is better summed up elsewhere and then stored past the caches.
    pub(in crate::plan) fn is_summed_in_cache(&self, cache: f64) -> bool {
        const TOUCHED: f64 = 4.0;
        self.world == 2 && self.bytes * TOUCHED <= cache
    }

    /// Rounds of Bruck's algorithms.
    pub(in crate::plan) fn bruck_rounds(&self) -> usize {
        (usize::BITS - (self.world - 1).leading_zeros()) as usize
    }
}
