//! Division by the number of ranks, toward zero, without an instruction that divides integers: the
//! processors have none for vectors, and the others are slow.
//!
//! Up to 32 bits a float division with enough digits is exact. A quotient of integers that is not
//! whole is at least `1 / world` from the next whole number, more than rounding moves it. 64 bits
//! are multiplied by a reciprocal (Granlund and Montgomery, "Division by invariant integers using
//! multiplication", 1994, figure 4.1).

/// The number of ranks, ready to divide by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Divisor {
    world: usize,
    /// What exceeds 2^64 in the reciprocal, times 2^64 by a power of two.
    reciprocal: u64,
    shifts: (u32, u32),
}

impl Divisor {
    /// # Panics
    /// If there are no ranks.
    pub(super) fn new(world: usize) -> Self {
        assert_ne!(world, 0, "an average over no ranks");
        let divisor = world as u64;
        let bits = u64::BITS - (divisor - 1).leading_zeros();
        let rest = (1_u128 << bits) - u128::from(divisor);
        Self {
            world,
            reciprocal: ((rest << 64) / u128::from(divisor)) as u64 + 1,
            shifts: (bits.min(1), bits.saturating_sub(1)),
        }
    }

    #[inline(always)]
    fn unsigned(self, number: u64) -> u64 {
        let high = ((u128::from(self.reciprocal) * u128::from(number)) >> 64) as u64;
        (high + ((number - high) >> self.shifts.0)) >> self.shifts.1
    }
}

/// A number that can be divided by the number of ranks.
pub(super) trait Share: Copy {
    /// Integers toward zero.
    fn share(self, by: Divisor) -> Self;
}

macro_rules! by_float {
    ($float:ty: $($number:ty),*) => {$(
        impl Share for $number {
            #[inline(always)]
            fn share(self, by: Divisor) -> Self {
                (self as $float / by.world as $float) as Self
            }
        }
    )*};
}

by_float!(f32: f32, i8, u8, i16, u16);
by_float!(f64: f64, i32, u32);

impl Share for u64 {
    #[inline(always)]
    fn share(self, by: Divisor) -> Self {
        by.unsigned(self)
    }
}

impl Share for i64 {
    #[inline(always)]
    fn share(self, by: Divisor) -> Self {
        let quotient = by.unsigned(self.unsigned_abs()) as i64;
        if self < 0 {
            quotient.wrapping_neg()
        } else {
            quotient
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORLDS: [usize; 24] = [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        9,
        10,
        11,
        64,
        100,
        127,
        128,
        255,
        384,
        641,
        65_535,
        65_537,
        (1 << 24) + 1,
        (1 << 31) - 1,
        (1 << 32) + 1,
        1 << 63,
        usize::MAX,
    ];

    /// All numbers of 16 bits and fewer.
    #[test]
    fn short_integers_divide_exactly() {
        for world in WORLDS {
            let by = Divisor::new(world);
            for number in 0..=u16::MAX {
                let exact = |number: i64| number / i64::try_from(world).unwrap_or(i64::MAX);
                let signed = number as i16;
                assert_eq!(i64::from(number.share(by)), exact(number.into()));
                assert_eq!(i64::from(signed.share(by)), exact(signed.into()));
                if let Ok(byte) = u8::try_from(number) {
                    let signed = byte as i8;
                    assert_eq!(i64::from(byte.share(by)), exact(byte.into()));
                    assert_eq!(i64::from(signed.share(by)), exact(signed.into()));
                }
            }
        }
    }

    /// Around the multiples of the divisor, where a quotient steps.
    #[test]
    fn long_integers_divide_exactly() {
        for world in WORLDS {
            let by = Divisor::new(world);
            let multiples = [0, 1, 2, 3, 1 << 15, u64::MAX / 3, u64::MAX / 2, u64::MAX]
                .map(|near| near / world as u64 * world as u64);
            let near = |of: u64| (0..9).map(move |i| of.wrapping_add(i).wrapping_sub(4));
            let ends = [0, 1 << 31, 1 << 32, 1 << 63].into_iter().flat_map(near);
            for number in multiples.into_iter().flat_map(near).chain(ends) {
                assert_eq!(
                    number.share(by),
                    number / world as u64,
                    "{number} / {world}"
                );
                let (short, world) = (number as u32, world as u128);
                assert_eq!(u128::from(short.share(by)), u128::from(short) / world);
                let exact = |number: i64| (i128::from(number) / world as i128) as i64;
                let signed = number as i64;
                assert_eq!(signed.share(by), exact(signed), "{signed} / {world}");
                let signed = number as i32;
                assert_eq!(i64::from(signed.share(by)), exact(signed.into()));
            }
        }
    }

    #[test]
    #[should_panic(expected = "no ranks")]
    fn there_is_at_least_one_rank() {
        Divisor::new(0);
    }
}
