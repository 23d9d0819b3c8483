//! The field's vocabulary as types: ranks, element types, reduction operators, collectives.
//!
//! Numbers given to `DataType`, `ReduceOp` and `Collective` travel on the wire and will be the C ABI's, so
//! they are explicit and never reused.

use std::fmt;

/// A process's number in a communicator, `0..world_size`.
pub type Rank = usize;

/// The order in which an operation on device memory happens: a stream of a CUDA device.
///
/// The operation comes after the work that is in the stream already, and what is put into the stream later comes after
/// the operation. All buffers of the operation lie on that device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceStream {
    /// The device's number in this process, as CUDA counts them (after `CUDA_VISIBLE_DEVICES`).
    pub device: u32,
    /// A `CUstream` (which is what a `cudaStream_t` is), as a number. 0 is the legacy default stream.
    pub stream: usize,
}

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
    pub const fn is_integer(self) -> bool {
        !self.is_float() && !self.is_complex() && !matches!(self, Self::Bool)
    }

    /// Whether the type is complex.
    pub const fn is_complex(self) -> bool {
        matches!(self, Self::Complex64 | Self::Complex128)
    }

    /// The name users know it by (`float32`).
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
            pub const fn number(self) -> u8 {
                match self {
                    $(Self::$name { .. } => $number,)+
                }
            }

            /// The name users know it by (`sum`).
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
    pub const fn has_meaning_for(self, dtype: DataType) -> bool {
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
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The operations of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Collective {
    /// Every rank gets the reduction of all inputs.
    AllReduce = 1,
    /// The root gets the reduction of all inputs.
    Reduce = 2,
    /// Every rank gets the root's buffer.
    Broadcast = 3,
    /// Every rank gets all inputs, in rank order.
    AllGather = 4,
    /// Rank r gets block r of the reduction of all inputs.
    ReduceScatter = 5,
    /// The root gets all inputs, in rank order.
    Gather = 6,
    /// Rank r gets block r of the root's input.
    Scatter = 7,
    /// Rank r gets block r of every rank's input, in rank order.
    AllToAll = 8,
    /// No rank leaves before all ranks have come.
    Barrier = 9,
    /// Point-to-point send.
    Send = 10,
    /// Point-to-point receive.
    Recv = 11,
}

impl Collective {
    /// Every operation, in the order of their numbers.
    pub const ALL: [Self; 11] = [
        Self::AllReduce,
        Self::Reduce,
        Self::Broadcast,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::Barrier,
        Self::Send,
        Self::Recv,
    ];

    /// Whether what goes from one rank to another is known to these two alone, unless all ranks give the same count.
    pub const fn is_between_pairs(self) -> bool {
        matches!(self, Self::Gather | Self::Scatter | Self::AllToAll)
    }

    /// The name users know it by (`all_reduce`).
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::Reduce => "reduce",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all_to_all",
            Self::Barrier => "barrier",
            Self::Send => "send",
            Self::Recv => "recv",
        }
    }

    /// The operation with this number, if there is one.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number).checked_sub(1)?).copied()
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

macro_rules! algorithms {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+) => {
        /// The families of algorithms.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Algorithm {
            $($(#[doc = $doc])+ $name,)+
        }

        impl Algorithm {
            /// Every algorithm.
            pub const ALL: [Self; [$(Algorithm::$name),+].len()] = [$(Self::$name),+];

            /// What the setting takes, in words.
            pub(crate) const ACCEPTS: &str = concat!("auto", $(", ", $text),+);

            /// The name used in settings and reports.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)+
                }
            }
        }
    };
}

algorithms! {
    /// Each rank to each other rank: the fewest rounds, one fixed order of reduction at any size.
    Direct = "direct",
    /// Direct in two shots: each rank reduces its slice from all ranks, then sends it to all. The volume of the ring in
    /// two rounds, and the order of reduction of `Direct`.
    TwoShot = "two_shot",
    /// Around a ring: each link direction of each rank is used by one neighbour only.
    Ring = "ring",
    /// Double binary tree (Sanders, Speck, Träff 2009).
    Tree = "tree",
    /// Recursive doubling: log2(n) exchanges of everything.
    RecursiveDoubling = "recursive_doubling",
    /// Recursive halving, then doubling (Rabenseifner 2004; any world size).
    Halving = "halving",
    /// Bruck et al. 1997: log2(n) rounds for all_to_all, all_gather and barrier.
    Bruck = "bruck",
    /// Inside each host, across the hosts by all ranks at once, inside each host. See plan/hierarchical/.
    Hierarchical = "hierarchical",
    /// Copy-in, copy-out: chunk by chunk through windows, memory of each rank that all ranks of the host map. For
    /// buffers that the peers cannot reach. See plan/windows/.
    Windows = "windows",
    /// An all_reduce in one pass over the buffers of all ranks, where they lie in the heap that the ranks of the host
    /// share: each rank sums up its slice of all of them and stores the sum to all of them.
    InPlace = "in_place",
}

impl Algorithm {
    /// Its number in [`Self::ALL`], by which ranks compare what they do.
    pub fn number(self) -> u8 {
        Self::ALL
            .iter()
            .position(|known| *known == self)
            .unwrap_or(0) as u8
    }

    /// Whether all ranks must share memory for it, and agree on that before.
    pub const fn needs_shared_memory(self) -> bool {
        matches!(self, Self::Windows | Self::InPlace)
    }
}

impl fmt::Display for Algorithm {
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
        for collective in Collective::ALL {
            assert_eq!(Collective::from_number(collective as u8), Some(collective));
        }
        assert_eq!(DataType::from_number(0), None);
        assert_eq!(DataType::from_number(18), None);
        assert_eq!(ReduceOp::name_of(0), "none");
    }
}
