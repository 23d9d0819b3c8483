//! The field's words for what is reduced: element types and operators.
//!
//! Their numbers travel on the wire and are the C ABI's, so they are explicit and never reused.

use std::fmt;

/// The type of one element of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DataType {
    /// IEEE 754 binary16.
    Float16 = 1,
    /// The upper half of a binary32.
    BFloat16 = 2,
    /// IEEE 754 binary32.
    Float32 = 3,
    /// IEEE 754 binary64.
    Float64 = 4,
    /// OCP 8-bit float, 4 exponent bits, no infinities (`e4m3fn`).
    Float8E4M3 = 5,
    /// OCP 8-bit float, 5 exponent bits (`e5m2`).
    Float8E5M2 = 6,
    /// Signed 8-bit integer.
    Int8 = 7,
    /// Signed 16-bit integer.
    Int16 = 8,
    /// Signed 32-bit integer.
    Int32 = 9,
    /// Signed 64-bit integer.
    Int64 = 10,
    /// Unsigned 8-bit integer.
    UInt8 = 11,
    /// Unsigned 16-bit integer.
    UInt16 = 12,
    /// Unsigned 32-bit integer.
    UInt32 = 13,
    /// Unsigned 64-bit integer.
    UInt64 = 14,
    /// One byte, 0 or 1.
    Bool = 15,
    /// Two binary32: real, imaginary.
    Complex64 = 16,
    /// Two binary64: real, imaginary.
    Complex128 = 17,
    /// Two's complement of 128 bits: the sum of integers that is under way to their average. It is the type of no rank's
    /// elements: no operator takes it, and [`Self::ALL`] is without it.
    Int128 = 18,
}

impl DataType {
    /// Every type that elements have, in the order of their numbers.
    pub const ALL: [Self; 17] = [
        Self::Float16,
        Self::BFloat16,
        Self::Float32,
        Self::Float64,
        Self::Float8E4M3,
        Self::Float8E5M2,
        Self::Int8,
        Self::Int16,
        Self::Int32,
        Self::Int64,
        Self::UInt8,
        Self::UInt16,
        Self::UInt32,
        Self::UInt64,
        Self::Bool,
        Self::Complex64,
        Self::Complex128,
    ];

    /// Bytes of one element: a power of two, which the compiler is shown, since many processors divide slowly.
    #[inline]
    pub const fn size(self) -> usize {
        1 << match self {
            Self::Float8E4M3 | Self::Float8E5M2 | Self::Int8 | Self::UInt8 | Self::Bool => 0,
            Self::Float16 | Self::BFloat16 | Self::Int16 | Self::UInt16 => 1,
            Self::Float32 | Self::Int32 | Self::UInt32 => 2,
            Self::Float64 | Self::Int64 | Self::UInt64 | Self::Complex64 => 3,
            Self::Complex128 | Self::Int128 => 4,
        }
    }

    /// Whether the type is a real floating-point type.
    #[inline]
    pub const fn is_float(self) -> bool {
        matches!(
            self,
            Self::Float16
                | Self::BFloat16
                | Self::Float32
                | Self::Float64
                | Self::Float8E4M3
                | Self::Float8E5M2
        )
    }

    /// Whether the type is a signed or unsigned integer.
    #[inline]
    pub(crate) const fn is_integer(self) -> bool {
        !self.is_float() && !self.is_complex() && !matches!(self, Self::Bool)
    }

    /// Whether the type is complex.
    #[inline]
    pub const fn is_complex(self) -> bool {
        matches!(self, Self::Complex64 | Self::Complex128)
    }

    /// The name users know it by (`float32`).
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float16 => "float16",
            Self::BFloat16 => "bfloat16",
            Self::Float32 => "float32",
            Self::Float64 => "float64",
            Self::Float8E4M3 => "float8_e4m3fn",
            Self::Float8E5M2 => "float8_e5m2",
            Self::Int8 => "int8",
            Self::Int16 => "int16",
            Self::Int32 => "int32",
            Self::Int64 => "int64",
            Self::UInt8 => "uint8",
            Self::UInt16 => "uint16",
            Self::UInt32 => "uint32",
            Self::UInt64 => "uint64",
            Self::Bool => "bool",
            Self::Complex64 => "complex64",
            Self::Complex128 => "complex128",
            Self::Int128 => "int128",
        }
    }

    /// The type with this number, if there is one.
    #[inline]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number).checked_sub(1)?).copied()
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

macro_rules! operators {
    ($($(#[doc = $doc:literal])+ $name:ident $(($factor:ty = $one:literal))? = $number:literal $text:literal,)+) => {
        /// How the contributions of the ranks are combined, element by element.
        ///
        /// The factor of `PremulSum` multiplies this rank's contribution before the sum.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub enum ReduceOp {
            $($(#[doc = $doc])+ $name $(($factor))?,)+
        }

        impl ReduceOp {
            /// Every operator (with factor 1 for `PremulSum`), in the order of their numbers.
            pub const ALL: [Self; [$($number),+].len()] = [$(Self::$name $(($one))?),+];

            /// The operator's number on the wire, from 1; 0 stands for "no operator".
            #[inline]
            pub const fn number(self) -> u8 {
                match self {
                    $(Self::$name { .. } => $number,)+
                }
            }

            /// The name users know it by (`sum`).
            #[inline]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name { .. } => $text,)+
                }
            }
        }
    };
}

operators! {
    /// Sum.
    Sum = 1 "sum",
    /// Sum divided by the number of ranks (not of bools); of integers without the digits after the point.
    Avg = 2 "avg",
    /// Product.
    Prod = 3 "prod",
    /// Minimum; NaN wins.
    Min = 4 "min",
    /// Maximum; NaN wins.
    Max = 5 "max",
    /// Bitwise and (integers and bool).
    Band = 6 "band",
    /// Bitwise or (integers and bool).
    Bor = 7 "bor",
    /// Bitwise exclusive or (integers and bool).
    Bxor = 8 "bxor",
    /// Logical and: 1 where every contribution is non-zero, else 0.
    Land = 9 "land",
    /// Logical or: 1 where any contribution is non-zero, else 0.
    Lor = 10 "lor",
    /// Logical exclusive or: 1 where an odd number of contributions is non-zero, else 0.
    Lxor = 11 "lxor",
    /// Sum of each contribution times its rank's factor (floats and complex numbers).
    PremulSum(f64 = 1.0) = 12 "premul_sum",
}

impl ReduceOp {
    /// The name of the operator with this wire number (`none` for 0 and unknown numbers).
    #[inline]
    pub fn name_of(number: u8) -> &'static str {
        match usize::from(number)
            .checked_sub(1)
            .and_then(|i| Self::ALL.get(i))
        {
            Some(op) => op.name(),
            None => "none",
        }
    }

    /// The type in which contributions of `dtype` are accumulated: float32 for the 16-bit and 8-bit floats, which are rounded
    /// once at the end; int128 for averages of integers, whose sum need not fit their type; else the type itself.
    #[inline]
    pub const fn accumulator(self, dtype: DataType) -> DataType {
        match dtype {
            DataType::Float16
            | DataType::BFloat16
            | DataType::Float8E4M3
            | DataType::Float8E5M2 => DataType::Float32,
            dtype if matches!(self, Self::Avg) && dtype.is_integer() => DataType::Int128,
            other => other,
        }
    }

    /// Whether the operator has a meaning for `dtype`: complex numbers have no order, floats no bits, complex numbers no
    /// truth, integers no fractions to be multiplied by.
    #[inline]
    pub(crate) const fn has_meaning_for(self, dtype: DataType) -> bool {
        if matches!(dtype, DataType::Int128) {
            return false;
        }
        match self {
            Self::Sum | Self::Prod => true,
            Self::Avg => !matches!(dtype, DataType::Bool),
            Self::PremulSum(_) => dtype.is_float() || dtype.is_complex(),
            Self::Min | Self::Max | Self::Land | Self::Lor | Self::Lxor => !dtype.is_complex(),
            Self::Band | Self::Bor | Self::Bxor => !dtype.is_complex() && !dtype.is_float(),
        }
    }

    /// Refuses combinations that mean nothing: order on complex numbers, bits of floats, logic on complex, factors of
    /// integers.
    ///
    /// # Errors
    /// [`Meaningless`], naming the operator and the type.
    #[inline]
    pub fn check(self, dtype: DataType) -> Result<(), Meaningless> {
        match self.has_meaning_for(dtype) {
            true => Ok(()),
            false => Err(Meaningless { op: self, dtype }),
        }
    }
}

/// An operator that has no meaning for an element type, as [`ReduceOp::has_meaning_for`] has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Meaningless {
    /// The operator.
    pub op: ReduceOp,
    /// The type.
    pub dtype: DataType,
}

impl fmt::Display for Meaningless {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, dtype } = self;
        let hint = match op {
            ReduceOp::Avg => "; average the bytes as uint8",
            ReduceOp::PremulSum(_) => "; multiply before a sum",
            _ => "",
        };
        write!(f, "operator {op} has no meaning for {dtype}{hint}")
    }
}

impl std::error::Error for Meaningless {}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lead_back_to_their_values() {
        for dtype in DataType::ALL {
            assert_eq!(DataType::from_number(dtype as u8), Some(dtype));
        }
        for op in ReduceOp::ALL {
            assert_eq!(ReduceOp::name_of(op.number()), op.name());
        }
        assert_eq!(DataType::from_number(0), None);
        assert_eq!(DataType::from_number(18), None);
        assert_eq!(ReduceOp::name_of(0), "none");
    }
}
