//! The arithmetic of one element, and the loops over many: the reference for every compilation of
//! them.
//!
//! An operator is an empty type that implements [`Combine`] for the numbers it is defined on.
//! Signed and unsigned integers share a loop wherever two's complement makes them the same; the
//! parts of complex numbers are floats, except under multiplication; a bool is a `u8` under the
//! logical operators.

use std::marker::PhantomData;

use super::simd::{Body, Tier};
use crate::types::{DataType, ReduceOp};

/// The loops of one operator on one accumulation type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loops {
    /// `acc = acc op src`.
    pub(super) fold: fn(Tier, &mut [u8], &[u8]),
    /// `acc = (acc op a) op b`: more of the memory is under way at once than with one after the other.
    pub(super) fold_two: fn(Tier, &mut [u8], &[u8], &[u8]),
    /// `dst = a op b`.
    pub(super) fold_into: fn(Tier, &mut [u8], &[u8], &[u8]),
}

/// The loops of `op` on the accumulation type of `dtype`, if they mean something together.
pub(super) fn loops(op: ReduceOp, dtype: DataType) -> Option<Loops> {
    match op.accumulator(dtype) {
        DataType::Float32 => float::<f32, 4>(op),
        DataType::Float64 => float::<f64, 8>(op),
        DataType::Int8 => integer::<i8, u8, 1>(op),
        DataType::Int16 => integer::<i16, u16, 2>(op),
        DataType::Int32 => integer::<i32, u32, 4>(op),
        DataType::Int64 => integer::<i64, u64, 8>(op),
        DataType::UInt8 => integer::<u8, u8, 1>(op),
        DataType::UInt16 => integer::<u16, u16, 2>(op),
        DataType::UInt32 => integer::<u32, u32, 4>(op),
        DataType::UInt64 => integer::<u64, u64, 8>(op),
        DataType::Int128 => Some(Loops::of::<Sum, i128, 16>()),
        DataType::Bool => boolean(op),
        DataType::Complex64 => complex::<f32, 4, 8>(op),
        DataType::Complex128 => complex::<f64, 8, 16>(op),
        _ => None,
    }
}

fn float<T, const N: usize>(op: ReduceOp) -> Option<Loops>
where
    T: Number<N> + Logic,
    Sum: Combine<T>,
    Prod: Combine<T>,
    Min: Combine<T>,
    Max: Combine<T>,
{
    Some(match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => Loops::of::<Sum, T, N>(),
        ReduceOp::Prod => Loops::of::<Prod, T, N>(),
        ReduceOp::Min => Loops::of::<Min, T, N>(),
        ReduceOp::Max => Loops::of::<Max, T, N>(),
        ReduceOp::Land => Loops::of::<Land, T, N>(),
        ReduceOp::Lor => Loops::of::<Lor, T, N>(),
        ReduceOp::Lxor => Loops::of::<Lxor, T, N>(),
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => return None,
    })
}

/// `T` is the type and `U` the unsigned one of its size. Bits are combined as bytes, whatever the size.
fn integer<T, U, const N: usize>(op: ReduceOp) -> Option<Loops>
where
    T: Number<N>,
    U: Number<N> + Logic,
    Sum: Combine<U>,
    Prod: Combine<U>,
    Min: Combine<T>,
    Max: Combine<T>,
{
    Some(match op {
        ReduceOp::Sum => Loops::of::<Sum, U, N>(),
        ReduceOp::Prod => Loops::of::<Prod, U, N>(),
        ReduceOp::Min => Loops::of::<Min, T, N>(),
        ReduceOp::Max => Loops::of::<Max, T, N>(),
        ReduceOp::Band => Loops::of::<Band, u8, 1>(),
        ReduceOp::Bor => Loops::of::<Bor, u8, 1>(),
        ReduceOp::Bxor => Loops::of::<Bxor, u8, 1>(),
        ReduceOp::Land => Loops::of::<Land, U, N>(),
        ReduceOp::Lor => Loops::of::<Lor, U, N>(),
        ReduceOp::Lxor => Loops::of::<Lxor, U, N>(),
        ReduceOp::Avg | ReduceOp::PremulSum(_) => return None,
    })
}

fn boolean(op: ReduceOp) -> Option<Loops> {
    Some(match op {
        ReduceOp::Prod | ReduceOp::Min | ReduceOp::Band | ReduceOp::Land => {
            Loops::of::<Land, u8, 1>()
        }
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor | ReduceOp::Lor => Loops::of::<Lor, u8, 1>(),
        ReduceOp::Bxor | ReduceOp::Lxor => Loops::of::<Lxor, u8, 1>(),
        ReduceOp::Avg | ReduceOp::PremulSum(_) => return None,
    })
}

/// `T` is the type of a part, of `PART` bytes; a whole number has `WHOLE`.
fn complex<T, const PART: usize, const WHOLE: usize>(op: ReduceOp) -> Option<Loops>
where
    T: Number<PART>,
    Sum: Combine<T>,
    Prod: Combine<Complex<T>>,
    Complex<T>: Number<WHOLE>,
{
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => Some(Loops::of::<Sum, T, PART>()),
        ReduceOp::Prod => Some(Loops::of::<Prod, Complex<T>, WHOLE>()),
        _ => None,
    }
}

impl Loops {
    fn of<O: Combine<T>, T: Number<N>, const N: usize>() -> Self {
        Self {
            fold: |tier, acc, src| {
                let number = PhantomData::<(O, T)>;
                tier.run(Fold::<O, T, N> { acc, src, number });
            },
            fold_two: |tier, acc, a, b| {
                let number = PhantomData::<(O, T)>;
                tier.run(FoldTwo::<O, T, N> { acc, a, b, number });
            },
            fold_into: |tier, dst, a, b| {
                let number = PhantomData::<(O, T)>;
                tier.run(FoldInto::<O, T, N> { dst, a, b, number });
            },
        }
    }
}

struct Fold<'a, O, T, const N: usize> {
    acc: &'a mut [u8],
    src: &'a [u8],
    number: PhantomData<(O, T)>,
}

impl<O: Combine<T>, T: Number<N>, const N: usize> Body for Fold<'_, O, T, N> {
    #[inline(always)]
    fn run(self) {
        let (acc, _) = self.acc.as_chunks_mut::<N>();
        let (src, _) = self.src.as_chunks::<N>();
        for (acc, src) in acc.iter_mut().zip(src) {
            *acc = O::combine(T::read(*acc), T::read(*src)).write();
        }
    }
}

struct FoldTwo<'a, O, T, const N: usize> {
    acc: &'a mut [u8],
    a: &'a [u8],
    b: &'a [u8],
    number: PhantomData<(O, T)>,
}

impl<O: Combine<T>, T: Number<N>, const N: usize> Body for FoldTwo<'_, O, T, N> {
    #[inline(always)]
    fn run(self) {
        let (acc, _) = self.acc.as_chunks_mut::<N>();
        let (a, _) = self.a.as_chunks::<N>();
        let (b, _) = self.b.as_chunks::<N>();
        for ((acc, a), b) in acc.iter_mut().zip(a).zip(b) {
            let one = O::combine(T::read(*acc), T::read(*a));
            *acc = O::combine(one, T::read(*b)).write();
        }
    }
}

struct FoldInto<'a, O, T, const N: usize> {
    dst: &'a mut [u8],
    a: &'a [u8],
    b: &'a [u8],
    number: PhantomData<(O, T)>,
}

impl<O: Combine<T>, T: Number<N>, const N: usize> Body for FoldInto<'_, O, T, N> {
    #[inline(always)]
    fn run(self) {
        let (dst, _) = self.dst.as_chunks_mut::<N>();
        let (a, _) = self.a.as_chunks::<N>();
        let (b, _) = self.b.as_chunks::<N>();
        for ((dst, a), b) in dst.iter_mut().zip(a).zip(b) {
            *dst = O::combine(T::read(*a), T::read(*b)).write();
        }
    }
}

/// A number of `N` bytes.
pub(super) trait Number<const N: usize>: Copy {
    fn read(bytes: [u8; N]) -> Self;
    fn write(self) -> [u8; N];
}

/// A number as a truth value.
pub(super) trait Logic: Copy {
    /// 1 for true, 0 for false.
    fn from_truth(truth: bool) -> Self;
    /// Whether it is anything but zero; NaN is.
    fn truth(self) -> bool;
}

/// An operator on two numbers.
pub(super) trait Combine<T> {
    fn combine(a: T, b: T) -> T;
}

pub(super) struct Sum;
pub(super) struct Prod;
pub(super) struct Min;
pub(super) struct Max;
pub(super) struct Band;
pub(super) struct Bor;
pub(super) struct Bxor;
pub(super) struct Land;
pub(super) struct Lor;
pub(super) struct Lxor;

/// A complex number: real part, imaginary part.
#[derive(Clone, Copy)]
pub(super) struct Complex<T>(T, T);

impl<T: Logic> Combine<T> for Land {
    #[inline(always)]
    fn combine(a: T, b: T) -> T {
        T::from_truth(a.truth() & b.truth())
    }
}

impl<T: Logic> Combine<T> for Lor {
    #[inline(always)]
    fn combine(a: T, b: T) -> T {
        T::from_truth(a.truth() | b.truth())
    }
}

impl<T: Logic> Combine<T> for Lxor {
    #[inline(always)]
    fn combine(a: T, b: T) -> T {
        T::from_truth(a.truth() ^ b.truth())
    }
}

macro_rules! combine {
    ($op:ty, $number:ty, |$a:ident, $b:ident| $result:expr) => {
        impl Combine<$number> for $op {
            #[inline(always)]
            fn combine($a: $number, $b: $number) -> $number {
                $result
            }
        }
    };
}

macro_rules! number {
    ($number:ty, $size:literal, $zero:literal, $one:literal) => {
        impl Number<$size> for $number {
            #[inline(always)]
            fn read(bytes: [u8; $size]) -> Self {
                Self::from_ne_bytes(bytes)
            }
            #[inline(always)]
            fn write(self) -> [u8; $size] {
                self.to_ne_bytes()
            }
        }

        impl Logic for $number {
            #[inline(always)]
            fn from_truth(truth: bool) -> Self {
                if truth { $one } else { $zero }
            }
            #[inline(always)]
            fn truth(self) -> bool {
                self != $zero
            }
        }
    };
}

macro_rules! integer {
    ($number:ty, $size:literal) => {
        number!($number, $size, 0, 1);
        combine!(Sum, $number, |a, b| a.wrapping_add(b));
        combine!(Prod, $number, |a, b| a.wrapping_mul(b));
        combine!(Min, $number, |a, b| a.min(b));
        combine!(Max, $number, |a, b| a.max(b));
    };
}

macro_rules! float {
    ($number:ty, $size:literal) => {
        number!($number, $size, 0.0, 1.0);
        combine!(Sum, $number, |a, b| a + b);
        combine!(Prod, $number, |a, b| a * b);
        combine!(Min, $number, |a, b| {
            let least = if b < a { b } else { a };
            let ordered = !(a.is_nan() | b.is_nan());
            if ordered { least } else { <$number>::NAN }
        });
        combine!(Max, $number, |a, b| {
            let most = if b > a { b } else { a };
            let ordered = !(a.is_nan() | b.is_nan());
            if ordered { most } else { <$number>::NAN }
        });

        impl Shared for $number {
            #[inline(always)]
            fn share(self, world: usize) -> Self {
                self / world as Self
            }
        }

        impl Scaled for $number {
            #[inline(always)]
            fn scale(self, factor: f64) -> Self {
                self * factor as Self
            }
        }
    };
}

macro_rules! complex {
    ($part:ty, $part_size:literal, $size:literal) => {
        impl Number<$size> for Complex<$part> {
            #[inline(always)]
            fn read(bytes: [u8; $size]) -> Self {
                let (parts, _) = bytes.as_chunks::<$part_size>();
                Self(<$part>::read(parts[0]), <$part>::read(parts[1]))
            }
            #[inline(always)]
            fn write(self) -> [u8; $size] {
                let mut bytes = [0; $size];
                let (parts, _) = bytes.as_chunks_mut::<$part_size>();
                parts[0] = self.0.write();
                parts[1] = self.1.write();
                bytes
            }
        }

        combine!(Prod, Complex<$part>, |a, b| Complex(
            a.0 * b.0 - a.1 * b.1,
            a.0 * b.1 + a.1 * b.0
        ));
    };
}

/// The share of one rank in a number.
trait Shared: Copy {
    fn share(self, world: usize) -> Self;
}

/// The product with a factor common to all elements, as [`super::scale`] has it.
trait Scaled: Copy {
    fn scale(self, factor: f64) -> Self;
}

impl Number<16> for i128 {
    #[inline(always)]
    fn read(bytes: [u8; 16]) -> Self {
        Self::from_ne_bytes(bytes)
    }
    #[inline(always)]
    fn write(self) -> [u8; 16] {
        self.to_ne_bytes()
    }
}

impl Shared for i128 {
    /// Toward zero.
    #[inline(always)]
    fn share(self, world: usize) -> Self {
        match i64::try_from(self) {
            Ok(short) if world < 1 << 31 => Self::from(short / world as i64),
            _ => self / world as Self,
        }
    }
}

// As many numbers of 64 bits as there may be ranks stay far below 128.
combine!(Sum, i128, |a, b| a + b);
combine!(Band, u8, |a, b| a & b);
combine!(Bor, u8, |a, b| a | b);
combine!(Bxor, u8, |a, b| a ^ b);
integer!(i8, 1);
integer!(i16, 2);
integer!(i32, 4);
integer!(i64, 8);
integer!(u8, 1);
integer!(u16, 2);
integer!(u32, 4);
integer!(u64, 8);
float!(f32, 4);
float!(f64, 8);
complex!(f32, 4, 8);
complex!(f64, 8, 16);

/// Something done to every element alone, in place.
trait Each<T>: Copy {
    fn each(self, number: T) -> T;
}

/// Division by the number of ranks.
#[derive(Clone, Copy)]
pub(super) struct Divide {
    pub(super) world: usize,
}

/// Multiplication by a factor.
#[derive(Clone, Copy)]
pub(super) struct Scale {
    pub(super) factor: f64,
}

/// Whether it is anything but zero, as 1 or 0.
#[derive(Clone, Copy)]
pub(super) struct Truth;

impl Divide {
    pub(super) fn apply(self, tier: Tier, dtype: DataType, buf: &mut [u8]) {
        match dtype {
            DataType::Int128 => run_each::<i128, 16>(self, tier, buf),
            dtype => apply_to_reals(self, tier, dtype, buf),
        }
    }
}

impl Scale {
    pub(super) fn apply(self, tier: Tier, dtype: DataType, buf: &mut [u8]) {
        apply_to_reals(self, tier, dtype, buf);
    }
}

impl Truth {
    /// On accumulation types that have a truth.
    pub(super) fn apply(self, tier: Tier, dtype: DataType, buf: &mut [u8]) {
        match dtype {
            DataType::Float32 => run_each::<f32, 4>(self, tier, buf),
            DataType::Float64 => run_each::<f64, 8>(self, tier, buf),
            DataType::Int8 | DataType::UInt8 | DataType::Bool => {
                run_each::<u8, 1>(self, tier, buf);
            }
            DataType::Int16 | DataType::UInt16 => run_each::<u16, 2>(self, tier, buf),
            DataType::Int32 | DataType::UInt32 => run_each::<u32, 4>(self, tier, buf),
            DataType::Int64 | DataType::UInt64 => run_each::<u64, 8>(self, tier, buf),
            other => unreachable!("{other} has no truth"),
        }
    }
}

impl<T: Shared> Each<T> for Divide {
    #[inline(always)]
    fn each(self, number: T) -> T {
        number.share(self.world)
    }
}

impl<T: Scaled> Each<T> for Scale {
    #[inline(always)]
    fn each(self, number: T) -> T {
        number.scale(self.factor)
    }
}

impl<T: Logic> Each<T> for Truth {
    #[inline(always)]
    fn each(self, number: T) -> T {
        T::from_truth(number.truth())
    }
}

/// On accumulation types; a complex number is its parts.
fn apply_to_reals<E>(each: E, tier: Tier, dtype: DataType, buf: &mut [u8])
where
    E: Each<f32> + Each<f64>,
{
    match dtype {
        DataType::Float32 | DataType::Complex64 => run_each::<f32, 4>(each, tier, buf),
        DataType::Float64 | DataType::Complex128 => run_each::<f64, 8>(each, tier, buf),
        other => unreachable!("{other} is neither divided nor scaled"),
    }
}

fn run_each<T: Number<N>, const N: usize>(each: impl Each<T>, tier: Tier, buf: &mut [u8]) {
    let number = PhantomData::<T>;
    tier.run(InPlace::<_, T, N> { each, buf, number });
}

struct InPlace<'a, E, T, const N: usize> {
    each: E,
    buf: &'a mut [u8],
    number: PhantomData<T>,
}

impl<E: Each<T>, T: Number<N>, const N: usize> Body for InPlace<'_, E, T, N> {
    #[inline(always)]
    fn run(self) {
        let (numbers, _) = self.buf.as_chunks_mut::<N>();
        for number in numbers {
            *number = self.each.each(T::read(*number)).write();
        }
    }
}
