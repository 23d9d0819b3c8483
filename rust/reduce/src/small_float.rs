//! Conversions between float32 and the 16-bit and 8-bit floats, to nearest with ties to even.
//!
//! Each is a handful of integer operations and selections without a branch, so that the loops
//! vectorise. Subnormal results are rounded by an addition: adding 2^23 times the smallest step
//! leaves the number of steps in the low bits. Values and NaN bits are those of the processor's
//! float16 instructions and of torch's casts (for bfloat16 NaNs torch's bits depend on how it
//! vectorises; here they are the upper half, made quiet).

use std::marker::PhantomData;

use super::simd::{Body, Tier};
use crate::types::DataType;

/// The bits of float32's infinity; everything above, the sign aside, is NaN.
const INFINITY: u32 = 0x7f80_0000;

/// `dst = src`, from the small type to float32.
pub(super) fn widen(tier: Tier, small: DataType, dst: &mut [u8], src: &[u8]) {
    match small {
        DataType::Float16 => {
            let done = tier.widen_f16(dst, src);
            tier.run(Widen::<F16, 2>::new(&mut dst[done * 2..], &src[done..]));
        }
        DataType::BFloat16 => tier.run(Widen::<Bf16, 2>::new(dst, src)),
        DataType::Float8E4M3 => tier.run(Widen::<E4M3, 1>::new(dst, src)),
        DataType::Float8E5M2 => tier.run(Widen::<E5M2, 1>::new(dst, src)),
        other => unreachable!("{other} is not a small float"),
    }
}

/// `dst = src`, from float32 to the small type.
pub(super) fn narrow(tier: Tier, small: DataType, dst: &mut [u8], src: &[u8]) {
    match small {
        DataType::Float16 => {
            let done = tier.narrow_f16(dst, src);
            tier.run(Narrow::<F16, 2>::new(&mut dst[done / 2..], &src[done..]));
        }
        DataType::BFloat16 => tier.run(Narrow::<Bf16, 2>::new(dst, src)),
        DataType::Float8E4M3 => tier.run(Narrow::<E4M3, 1>::new(dst, src)),
        DataType::Float8E5M2 => tier.run(Narrow::<E5M2, 1>::new(dst, src)),
        other => unreachable!("{other} is not a small float"),
    }
}

/// A float of `N` bytes that converts from and to the bits of a float32.
trait Small<const N: usize> {
    fn widen(bits: [u8; N]) -> u32;
    fn narrow(bits: u32) -> [u8; N];
}

struct F16;
struct Bf16;
struct E4M3;
struct E5M2;

impl Small<2> for F16 {
    #[inline(always)]
    fn widen(bits: [u8; 2]) -> u32 {
        widen_f16(u32::from(u16::from_ne_bytes(bits)))
    }

    #[inline(always)]
    fn narrow(bits: u32) -> [u8; 2] {
        let sign = (bits >> 16) & 0x8000;
        let magnitude = bits & 0x7fff_ffff;
        let nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
        let rounded = round::<10, 15>(magnitude).min(0x7c00);
        let result = if magnitude > INFINITY { nan } else { rounded };
        ((sign | result) as u16).to_ne_bytes()
    }
}

impl Small<2> for Bf16 {
    #[inline(always)]
    fn widen(bits: [u8; 2]) -> u32 {
        u32::from(u16::from_ne_bytes(bits)) << 16
    }

    #[inline(always)]
    fn narrow(bits: u32) -> [u8; 2] {
        let nan = (bits >> 16) | 0x40;
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let result = if bits & 0x7fff_ffff > INFINITY {
            nan
        } else {
            rounded
        };
        (result as u16).to_ne_bytes()
    }
}

impl Small<1> for E4M3 {
    #[inline(always)]
    fn widen([bits]: [u8; 1]) -> u32 {
        let sign = (u32::from(bits) & 0x80) << 24;
        let magnitude = u32::from(bits) & 0x7f;
        // Biases are 7 and 127. The one NaN has all bits set, and so it has in float32.
        let normal = (magnitude << 20) + ((127 - 7) << 23);
        let subnormal = steps(magnitude, 7 + 2);
        let finite = if magnitude < 8 { subnormal } else { normal };
        sign | if magnitude == 0x7f {
            0x7ff0_0000
        } else {
            finite
        }
    }

    #[inline(always)]
    fn narrow(bits: u32) -> [u8; 1] {
        let magnitude = bits & 0x7fff_ffff;
        // There is no infinity: 0x7e is 448, the largest value, and 0x7f is NaN.
        let rounded = round::<3, 7>(magnitude).min(0x7e);
        let result = if magnitude > INFINITY { 0x7f } else { rounded };
        [((bits >> 24) & 0x80 | result) as u8]
    }
}

impl Small<1> for E5M2 {
    #[inline(always)]
    fn widen([bits]: [u8; 1]) -> u32 {
        // It is the upper half of a float16.
        widen_f16(u32::from(bits) << 8)
    }

    #[inline(always)]
    fn narrow(bits: u32) -> [u8; 1] {
        let magnitude = bits & 0x7fff_ffff;
        let rounded = round::<2, 15>(magnitude).min(0x7c);
        let result = if magnitude > INFINITY { 0x7f } else { rounded };
        [((bits >> 24) & 0x80 | result) as u8]
    }
}

#[inline(always)]
fn widen_f16(bits: u32) -> u32 {
    let sign = (bits & 0x8000) << 16;
    let magnitude = bits & 0x7fff;
    let normal = (magnitude << 13) + ((127 - 15) << 23);
    let subnormal = steps(magnitude, 15 + 9);
    let finite = if magnitude < 0x400 { subnormal } else { normal };
    // Infinity keeps its empty mantissa, a NaN its own, made quiet.
    let quiet = if magnitude > 0x7c00 { 0x0040_0000 } else { 0 };
    let special = (magnitude << 13) | INFINITY | quiet;
    sign | if magnitude >= 0x7c00 { special } else { finite }
}

/// The bits of `count * 2^-exponent` as a float32.
#[inline(always)]
fn steps(count: u32, exponent: u32) -> u32 {
    let step = f32::from_bits((127 - exponent) << 23);
    (count as i32 as f32 * step).to_bits()
}

/// The magnitude of a float32, rounded to a type with `MANTISSA` bits after the point and the given
/// bias, in that type's bits. A magnitude that exceeds the type comes out as a number beyond its
/// largest.
#[inline(always)]
fn round<const MANTISSA: u32, const BIAS: u32>(magnitude: u32) -> u32 {
    let shift = 23 - MANTISSA;
    let half_less_one = (1 << (shift - 1)) - 1;
    let even = (magnitude >> shift) & 1;
    // Both are computed and one is taken, so the result that is not may wrap.
    let normal = (magnitude.wrapping_add(half_less_one + even) >> shift)
        .wrapping_sub((127 - BIAS) << MANTISSA);
    // The smallest step is 2^(1 - BIAS - MANTISSA); a float32 of 2^23 times that counts in such
    // steps.
    let counter = (127 + 23 + 1 - BIAS - MANTISSA) << 23;
    let counted = f32::from_bits(magnitude) + f32::from_bits(counter);
    let subnormal = counted.to_bits().wrapping_sub(counter);
    let smallest_normal = (127 + 1 - BIAS) << 23;
    if magnitude < smallest_normal {
        subnormal
    } else {
        normal
    }
}

struct Widen<'a, S, const N: usize> {
    dst: &'a mut [u8],
    src: &'a [u8],
    small: PhantomData<S>,
}

impl<'a, S, const N: usize> Widen<'a, S, N> {
    fn new(dst: &'a mut [u8], src: &'a [u8]) -> Self {
        let small = PhantomData;
        Self { dst, src, small }
    }
}

impl<S: Small<N>, const N: usize> Body for Widen<'_, S, N> {
    #[inline(always)]
    fn run(self) {
        let (wide, _) = self.dst.as_chunks_mut::<4>();
        let (narrow, _) = self.src.as_chunks::<N>();
        for (wide, narrow) in wide.iter_mut().zip(narrow) {
            *wide = S::widen(*narrow).to_ne_bytes();
        }
    }
}

struct Narrow<'a, S, const N: usize> {
    dst: &'a mut [u8],
    src: &'a [u8],
    small: PhantomData<S>,
}

impl<'a, S, const N: usize> Narrow<'a, S, N> {
    fn new(dst: &'a mut [u8], src: &'a [u8]) -> Self {
        let small = PhantomData;
        Self { dst, src, small }
    }
}

impl<S: Small<N>, const N: usize> Body for Narrow<'_, S, N> {
    #[inline(always)]
    fn run(self) {
        let (narrow, _) = self.dst.as_chunks_mut::<N>();
        let (wide, _) = self.src.as_chunks::<4>();
        for (narrow, wide) in narrow.iter_mut().zip(wide) {
            *narrow = S::narrow(u32::from_ne_bytes(*wide));
        }
    }
}
