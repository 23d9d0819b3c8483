//! From an element type to the accumulation type and back.
//!
//! [`small_float`] has the floats; integers are extended to 128 bits, and cut off again once an average has made them fit.

use std::marker::PhantomData;

use super::ops::Number;
use super::simd::{Body, Tier};
use super::{copy, small_float};
use crate::types::DataType;

/// An element type, and the type that its elements are accumulated in.
type Types = (DataType, DataType);

/// `dst = src`, from the element type to the accumulation type.
pub(super) fn widen(tier: Tier, (element, accumulator): Types, dst: &mut [u8], src: &[u8]) {
    match accumulator {
        accumulator if accumulator == element => copy(dst, src),
        DataType::Int128 => extend(tier, element, dst, src),
        _ => small_float::widen(tier, element, dst, src),
    }
}

/// `dst = src`, from the accumulation type to the element type.
pub(super) fn narrow(tier: Tier, (element, accumulator): Types, dst: &mut [u8], src: &[u8]) {
    match accumulator {
        accumulator if accumulator == element => copy(dst, src),
        DataType::Int128 => cut(tier, element, dst, src),
        _ => small_float::narrow(tier, element, dst, src),
    }
}

fn extend(tier: Tier, element: DataType, dst: &mut [u8], src: &[u8]) {
    match element {
        DataType::Int8 => tier.run(Extend::<i8, 1>(dst, src, PhantomData)),
        DataType::Int16 => tier.run(Extend::<i16, 2>(dst, src, PhantomData)),
        DataType::Int32 => tier.run(Extend::<i32, 4>(dst, src, PhantomData)),
        DataType::Int64 => tier.run(Extend::<i64, 8>(dst, src, PhantomData)),
        DataType::UInt8 => tier.run(Extend::<u8, 1>(dst, src, PhantomData)),
        DataType::UInt16 => tier.run(Extend::<u16, 2>(dst, src, PhantomData)),
        DataType::UInt32 => tier.run(Extend::<u32, 4>(dst, src, PhantomData)),
        DataType::UInt64 => tier.run(Extend::<u64, 8>(dst, src, PhantomData)),
        other => unreachable!("{other} is not an integer"),
    }
}

/// Signed and unsigned numbers of a size have the same low bits.
fn cut(tier: Tier, element: DataType, dst: &mut [u8], src: &[u8]) {
    match element.size() {
        1 => tier.run(Cut::<u8, 1>(dst, src, PhantomData)),
        2 => tier.run(Cut::<u16, 2>(dst, src, PhantomData)),
        4 => tier.run(Cut::<u32, 4>(dst, src, PhantomData)),
        8 => tier.run(Cut::<u64, 8>(dst, src, PhantomData)),
        other => unreachable!("no integer has {other} bytes"),
    }
}

struct Extend<'a, T, const N: usize>(&'a mut [u8], &'a [u8], PhantomData<T>);

impl<T: Number<N> + Into<i128>, const N: usize> Body for Extend<'_, T, N> {
    #[inline(always)]
    fn run(self) {
        let (wide, _) = self.0.as_chunks_mut::<16>();
        let (narrow, _) = self.1.as_chunks::<N>();
        for (wide, narrow) in wide.iter_mut().zip(narrow) {
            *wide = T::read(*narrow).into().write();
        }
    }
}

struct Cut<'a, T, const N: usize>(&'a mut [u8], &'a [u8], PhantomData<T>);

impl<T: Number<N> + Low, const N: usize> Body for Cut<'_, T, N> {
    #[inline(always)]
    fn run(self) {
        let (narrow, _) = self.0.as_chunks_mut::<N>();
        let (wide, _) = self.1.as_chunks::<16>();
        for (narrow, wide) in narrow.iter_mut().zip(wide) {
            *narrow = T::low(i128::read(*wide)).write();
        }
    }
}

/// An integer of the low bits of another one.
trait Low {
    fn low(wide: i128) -> Self;
}

macro_rules! low {
    ($($number:ty)+) => {
        $(impl Low for $number {
            #[inline(always)]
            fn low(wide: i128) -> Self {
                wide as Self
            }
        })+
    };
}

low!(u8 u16 u32 u64);
