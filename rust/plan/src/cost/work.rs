//! The request, in numbers that all formulas use.

use crate::DEFAULT_CHUNK;
use crate::types::Collective;

/// The request, in bytes.
pub(crate) struct Work {
    pub(crate) world: usize,
    /// Elements of the whole that is reduced or broadcast; of one block for the others.
    pub(crate) elements: usize,
    pub(crate) bytes: f64,
    /// How many times as long partial sums are.
    pub(crate) widening: f64,
    /// Elements of a piece: [`piece_length`](crate::piece_length).
    pub(crate) piece: usize,
}

impl Work {
    pub(crate) fn pieces(elements: usize) -> f64 {
        elements.div_ceil(DEFAULT_CHUNK).max(1) as f64
    }

    /// Of a plan whose pieces are [`Self::piece`] long.
    pub(crate) fn pieces_of(&self, elements: usize) -> f64 {
        elements.div_ceil(self.piece).max(1) as f64
    }

    /// Bytes of the longer of a rank's two buffers.
    pub(crate) fn longer_buffer(&self, collective: Collective) -> f64 {
        self.bytes * collective.blocks(self.world) as f64
    }

    pub(crate) fn slice(&self) -> f64 {
        self.bytes / self.world as f64
    }

    pub(crate) fn pieces_of_slice(&self) -> f64 {
        Self::pieces(self.elements.div_ceil(self.world))
    }

    /// Whether a sum is made in its place, where the caches have it: of two ranks, which need no order for that. A
    /// larger sum is better made elsewhere and then stored past the caches.
    pub(crate) fn is_summed_in_cache(&self, cache: f64) -> bool {
        const TOUCHED: f64 = 4.0;
        self.world == 2 && self.bytes * TOUCHED <= cache
    }

    /// Rounds of Bruck's algorithms.
    pub(crate) fn bruck_rounds(&self) -> usize {
        (usize::BITS - (self.world - 1).leading_zeros()) as usize
    }
}
