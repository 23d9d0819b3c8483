//! Combining contributions: every operator on every element type.
//!
//! A reduction has three moments. Contributions are *folded* into an accumulator, whose type is
//! that of the elements or a wider one ([`ReduceOp::accumulator`]); when all have come the result
//! is *finished*: divided by the world size for an average, made 0 or 1 for a logical operator, and
//! rounded once to the element type. A [`Kernel`] is one operator on one type with the loops looked
//! up, so that nothing is decided per chunk. Contributions that are all at hand are combined in one
//! pass ([`Kernel::reduce`], [`Kernel::fold_all`]).
//!
//! All slices are raw bytes of whole elements and need no alignment. The loops are written once,
//! over arrays of bytes (`ops`, `small_float`), and compiled for several instruction sets (`simd`);
//! each compilation does the same arithmetic in the same order, so results have the same bits on
//! every machine, with one exception the hardware makes: which of two NaNs a sum or product hands
//! on.
//!
//! The operators at the edges:
//! * Integers wrap in sums and products. Their averages do not: the sum has 128 bits on all its way
//!   and is divided toward zero. They have no premultiplied sum.
//! * An average of floats is their sum, divided at the end. A sum beyond the largest number of the
//!   accumulation type, 3.4e38 for float32 and smaller ones, is infinite, and so is the average.
//! * Min and max give the positive quiet NaN as soon as one contribution is NaN. Of -0 and +0 the
//!   earlier one stays.
//! * Logical operators ask whether a contribution is zero; NaN is not. The result is 0 or 1 in the
//!   element type, also with one rank: [`Kernel::finish`] sees to it.
//! * A bool is true when its byte is not zero; results are 0 or 1. Sum and max are "or", prod and
//!   min are "and", and the bitwise operators are the logical ones.
//! * `PremulSum` folds as `Sum` does: each rank passes its own contribution through [`scale`]
//!   first.

mod cache;
mod convert;
mod copy;
pub mod int8;
mod many;
mod ops;
mod simd;
mod small_float;
#[cfg(test)]
mod tests;
mod types;

pub use cache::last_level as last_level_cache;
pub use copy::{Streaming, copy, copy_hinted, copy_raw};
pub use many::{Pass, Source};
pub use types::{DataType, Meaningless, ReduceOp};

use ops::{Divide, Loops, Scale, Truth};
use simd::Tier;

/// Bytes that conversions and finishing handle at a time: enough to amortise a call, little enough
/// to stay in L1.
const BLOCK: usize = 1024;

/// One operator on one element type, looked up once per operation.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    op: ReduceOp,
    element: DataType,
    accumulator: DataType,
    tier: Tier,
    loops: Loops,
}

impl Kernel {
    /// The kernel of `op` on `dtype`, for the best instruction set this processor has.
    ///
    /// # Errors
    /// [`Meaningless`] for combinations without meaning, as [`ReduceOp::check`] has them.
    pub fn new(op: ReduceOp, dtype: DataType) -> Result<Self, Meaningless> {
        Self::on(Tier::best(), op, dtype)
    }

    /// The type of the contributions and of the result.
    #[inline]
    pub fn element(&self) -> DataType {
        self.element
    }

    /// The type in which contributions are folded, as [`ReduceOp::accumulator`] has it.
    #[inline]
    pub fn accumulator(&self) -> DataType {
        self.accumulator
    }

    /// The kernel of the same operator on elements of the accumulation type.
    #[must_use]
    #[inline]
    pub fn of_partials(self) -> Self {
        Self {
            element: self.accumulator,
            ..self
        }
    }

    /// `dst = src`, from the element type to the accumulation type; a plain copy when they are the same.
    #[inline]
    pub fn widen(&self, dst: &mut [u8], src: &[u8]) {
        assert_lengths(self.accumulator, dst.len(), self.element, src.len());
        convert::widen(self.tier, (self.element, self.accumulator), dst, src);
    }

    /// `dst = src`, from the accumulation type to the element type; a plain copy when they are the same.
    ///
    /// Floats are rounded to nearest with ties to even. A float that is too large becomes infinite, but in `float8_e4m3fn`,
    /// which has no infinity, the largest finite value (as torch 2.15 does; in 2.11 it was NaN). NaN stays NaN. An average of
    /// integers always fits.
    #[inline]
    pub fn narrow(&self, dst: &mut [u8], src: &[u8]) {
        assert_lengths(self.element, dst.len(), self.accumulator, src.len());
        convert::narrow(self.tier, (self.element, self.accumulator), dst, src);
    }

    /// `acc = acc op src`, both in the accumulation type and equally long.
    ///
    /// # Panics
    /// If the lengths differ or are not whole elements; so do all functions here.
    #[inline]
    pub fn fold(&self, acc: &mut [u8], src: &[u8]) {
        assert_lengths(self.accumulator(), acc.len(), self.accumulator(), src.len());
        (self.loops.fold)(self.tier, acc, src);
    }

    /// `acc = acc op src` with `acc` in the accumulation type and `src` in the element type.
    pub fn fold_element(&self, acc: &mut [u8], src: &[u8]) {
        assert_lengths(self.accumulator(), acc.len(), self.element, src.len());
        if !self.converts() {
            return (self.loops.fold)(self.tier, acc, src);
        }
        let done = self.sum_halves(acc, true, &[src]);
        let acc = &mut acc[done * self.accumulator.size()..];
        let src = &src[done * self.element.size()..];
        let mut scratch = Scratch::new();
        let blocks = acc.chunks_mut(BLOCK).zip(src.chunks(self.narrow_block()));
        for (acc, src) in blocks {
            let wide = scratch.first(acc.len());
            self.widen(wide, src);
            (self.loops.fold)(self.tier, acc, wide);
        }
    }

    /// `dst = a op b`, all in the accumulation type and equally long.
    #[inline]
    pub fn fold_into(&self, dst: &mut [u8], a: &[u8], b: &[u8]) {
        let wide = self.accumulator();
        assert_lengths(wide, dst.len(), wide, a.len());
        assert_lengths(wide, dst.len(), wide, b.len());
        (self.loops.fold_into)(self.tier, dst, a, b);
    }

    /// `dst = result`, from the fold of all contributions: `src` is in the accumulation type, `dst`
    /// in the element type. An average is divided by `world`, logical operators and bools become 0
    /// or 1, small floats are rounded.
    pub fn finish(&self, dst: &mut [u8], src: &[u8], world: usize) {
        assert_lengths(self.element, dst.len(), self.accumulator(), src.len());
        if self.converts() {
            if matches!(self.ending(), Ending::Keep) {
                return self.narrow(dst, src);
            }
            let mut scratch = Scratch::new();
            let blocks = dst.chunks_mut(self.narrow_block()).zip(src.chunks(BLOCK));
            for (dst, src) in blocks {
                let wide = scratch.first(src.len());
                wide.copy_from_slice(src);
                self.end(wide, world);
                self.narrow(dst, wide);
            }
        } else if matches!(self.ending(), Ending::Keep) {
            copy(dst, src);
        } else {
            for (dst, src) in dst.chunks_mut(BLOCK).zip(src.chunks(BLOCK)) {
                dst.copy_from_slice(src);
                self.end(dst, world);
            }
        }
    }

    /// [`Kernel::finish`] in place, for element types that are their own accumulator. It changes
    /// nothing except for averages, logical operators and bools.
    ///
    /// # Panics
    /// Also if the element type is not its own accumulator.
    #[inline]
    pub fn finish_in_place(&self, buf: &mut [u8], world: usize) {
        assert_eq!(
            self.element,
            self.accumulator(),
            "a result in {} cannot be finished in place",
            self.element
        );
        assert_lengths(self.element, buf.len(), self.element, buf.len());
        self.end(buf, world);
    }

    fn on(tier: Tier, op: ReduceOp, dtype: DataType) -> Result<Self, Meaningless> {
        op.check(dtype)?;
        Ok(Self {
            op,
            element: dtype,
            accumulator: op.accumulator(dtype),
            tier,
            loops: ops::loops(op, dtype).ok_or(Meaningless { op, dtype })?,
        })
    }

    /// Whether the accumulation type is another than the element type.
    #[inline]
    fn converts(&self) -> bool {
        self.element != self.accumulator
    }

    /// Bytes of elements that are [`BLOCK`] bytes of accumulator.
    fn narrow_block(&self) -> usize {
        BLOCK / self.accumulator.size() * self.element.size()
    }

    /// [`Tier::sum_halves`] if this kernel sums, else nothing.
    fn sum_halves(&self, acc: &mut [u8], begun: bool, sources: &[&[u8]]) -> usize {
        match self.op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => {
                self.tier.sum_halves(self.element, acc, begun, sources)
            }
            _ => 0,
        }
    }

    #[inline]
    fn ending(&self) -> Ending {
        match self.op {
            ReduceOp::Land | ReduceOp::Lor | ReduceOp::Lxor => Ending::Truth,
            _ if self.element == DataType::Bool => Ending::Truth,
            ReduceOp::Avg => Ending::Divide,
            _ => Ending::Keep,
        }
    }

    /// The last step before rounding, on accumulators in place.
    #[inline]
    fn end(&self, buf: &mut [u8], world: usize) {
        match self.ending() {
            Ending::Keep => {}
            Ending::Divide => {
                debug_assert_ne!(world, 0, "an average over no ranks");
                Divide { world }.apply(self.tier, self.accumulator(), buf);
            }
            Ending::Truth => Truth.apply(self.tier, self.accumulator(), buf),
        }
    }
}

/// The last step, once all contributions are folded.
enum Ending {
    Keep,
    Divide,
    Truth,
}

/// `dst = src * factor`, both in `dtype`.
///
/// Floats and the parts of complex numbers multiply by the factor rounded to their type; 16-bit and
/// 8-bit floats do so in float32 and round once.
///
/// # Panics
/// Of other types, for which [`ReduceOp::check`] refuses the operator.
pub fn scale(dtype: DataType, dst: &mut [u8], src: &[u8], factor: f64) {
    scale_on(Tier::best(), dtype, dst, src, factor);
}

fn scale_on(tier: Tier, dtype: DataType, dst: &mut [u8], src: &[u8], factor: f64) {
    assert_lengths(dtype, dst.len(), dtype, src.len());
    let scale = Scale { factor };
    let wide_type = ReduceOp::PremulSum(factor).accumulator(dtype);
    if wide_type == dtype {
        for (dst, src) in dst.chunks_mut(BLOCK).zip(src.chunks(BLOCK)) {
            dst.copy_from_slice(src);
            scale.apply(tier, dtype, dst);
        }
        return;
    }
    let mut scratch = Scratch::new();
    let block = BLOCK / wide_type.size() * dtype.size();
    for (dst, src) in dst.chunks_mut(block).zip(src.chunks(block)) {
        let wide = scratch.first(src.len() / dtype.size() * wide_type.size());
        small_float::widen(tier, dtype, wide, src);
        scale.apply(tier, wide_type, wide);
        small_float::narrow(tier, dtype, dst, wide);
    }
}

/// One block of accumulators between a conversion and a fold.
#[repr(align(64))]
struct Scratch([u8; BLOCK]);

impl Scratch {
    fn new() -> Self {
        Self([0; BLOCK])
    }

    fn first(&mut self, bytes: usize) -> &mut [u8] {
        &mut self.0[..bytes]
    }
}

#[inline]
fn assert_lengths(a: DataType, a_bytes: usize, b: DataType, b_bytes: usize) {
    assert!(
        a_bytes.is_multiple_of(a.size())
            && b_bytes.is_multiple_of(b.size())
            && a_bytes / a.size() == b_bytes / b.size(),
        "{a_bytes} bytes of {a} and {b_bytes} bytes of {b} are not as many whole elements"
    );
}
