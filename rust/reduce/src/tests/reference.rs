//! The expected results of reductions, computed from the definitions: integers in 128 bits, floats in
//! float64 with one rounding per step, small floats through tables of all their values.

use crate::types::{DataType, ReduceOp};

/// One element.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Float(f64),
    Int(i128),
    Bool(bool),
    Complex(f64, f64),
}

impl Value {
    /// Whether NaN stands in the same places and all else is equal.
    pub(super) fn same_nan(&self, other: &Self) -> bool {
        let same = |a: f64, b: f64| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        match (self, other) {
            (Self::Float(a), Self::Float(b)) => same(*a, *b),
            (Self::Complex(a, b), Self::Complex(c, d)) => same(*a, *c) && same(*b, *d),
            _ => self == other,
        }
    }
}

/// A float format: bits of exponent, bits after the point, whether the top exponent means infinity.
#[derive(Clone, Copy)]
pub(super) struct Format {
    pub(super) exponent: u32,
    pub(super) mantissa: u32,
    pub(super) infinity: bool,
}

impl Format {
    pub(super) fn of(dtype: DataType) -> Self {
        let (exponent, mantissa, infinity) = match dtype {
            DataType::Float16 => (5, 10, true),
            DataType::BFloat16 => (8, 7, true),
            DataType::Float8E4M3 => (4, 3, false),
            DataType::Float8E5M2 => (5, 2, true),
            other => panic!("{other} is not a small float"),
        };
        Self {
            exponent,
            mantissa,
            infinity,
        }
    }

    fn sign_bit(self) -> u32 {
        1 << (self.exponent + self.mantissa)
    }

    /// The magnitude bits of the largest finite value.
    fn largest(self) -> u32 {
        let top = (1 << self.exponent) - 1;
        if self.infinity {
            (top << self.mantissa) - 1
        } else {
            self.sign_bit() - 2
        }
    }

    pub(super) fn decode(self, bits: u32) -> f64 {
        let magnitude = bits & (self.sign_bit() - 1);
        let value = if magnitude <= self.largest() {
            self.finite(magnitude)
        } else if self.infinity && magnitude == self.largest() + 1 {
            f64::INFINITY
        } else {
            f64::NAN
        };
        if bits & self.sign_bit() != 0 {
            -value
        } else {
            value
        }
    }

    /// As if there were no special values.
    fn finite(self, magnitude: u32) -> f64 {
        let bias = (1 << (self.exponent - 1)) - 1;
        let exponent = (magnitude >> self.mantissa) as i32;
        let fraction = f64::from(magnitude & ((1 << self.mantissa) - 1));
        let whole = f64::from(1 << self.mantissa);
        if exponent == 0 {
            fraction / whole * 2_f64.powi(1 - bias)
        } else {
            (1.0 + fraction / whole) * 2_f64.powi(exponent - bias)
        }
    }

    /// The nearest value's bits, the even one of two; by bisection over all values.
    pub(super) fn encode(self, value: f64) -> u32 {
        let sign = if value.is_sign_negative() {
            self.sign_bit()
        } else {
            0
        };
        if value.is_nan() {
            return self.sign_bit() - 1;
        }
        let value = value.abs();
        let (mut below, mut above) = (0, self.largest() + 1);
        if value >= self.finite(above) {
            below = above;
        }
        while above - below > 1 {
            let middle = (below + above) / 2;
            if self.finite(middle) <= value {
                below = middle;
            } else {
                above = middle;
            }
        }
        let half_way = (self.finite(below) + self.finite(above)) / 2.0;
        let up = value > half_way || (value == half_way && below % 2 == 1);
        let nearest = if up { above } else { below };
        let limit = self.largest() + u32::from(self.infinity);
        sign | nearest.min(limit)
    }
}

pub(super) fn decode(dtype: DataType, bytes: &[u8]) -> Value {
    let f32_at = |i: usize| f64::from(f32::from_ne_bytes(bytes[i..i + 4].try_into().unwrap()));
    let f64_at = |i: usize| f64::from_ne_bytes(bytes[i..i + 8].try_into().unwrap());
    let mut word = [0; 8];
    if dtype.size() <= 8 && !dtype.is_complex() {
        word[..bytes.len()].copy_from_slice(bytes);
    }
    let unsigned = u64::from_le_bytes(word);
    let unused = 64 - 8 * dtype.size().min(8) as u32;
    match dtype {
        DataType::Float32 => Value::Float(f32_at(0)),
        DataType::Float64 => Value::Float(f64_at(0)),
        DataType::Complex64 => Value::Complex(f32_at(0), f32_at(4)),
        DataType::Complex128 => Value::Complex(f64_at(0), f64_at(8)),
        DataType::Bool => Value::Bool(bytes[0] != 0),
        _ if dtype.is_float() => Value::Float(Format::of(dtype).decode(unsigned as u32)),
        DataType::Int128 => Value::Int(i128::from_ne_bytes(bytes.try_into().unwrap())),
        DataType::Int8 | DataType::Int16 | DataType::Int32 | DataType::Int64 => {
            Value::Int(i128::from((unsigned << unused) as i64 >> unused))
        }
        _ => Value::Int(i128::from(unsigned)),
    }
}

pub(super) fn encode(dtype: DataType, value: &Value) -> Vec<u8> {
    match (dtype, value) {
        (DataType::Float32, Value::Float(v)) => (*v as f32).to_ne_bytes().to_vec(),
        (DataType::Float64, Value::Float(v)) => v.to_ne_bytes().to_vec(),
        (DataType::Complex64, Value::Complex(re, im)) => {
            [(*re as f32).to_ne_bytes(), (*im as f32).to_ne_bytes()].concat()
        }
        (DataType::Complex128, Value::Complex(re, im)) => {
            [re.to_ne_bytes(), im.to_ne_bytes()].concat()
        }
        (DataType::Bool, Value::Bool(v)) => vec![u8::from(*v)],
        (_, Value::Float(v)) => Format::of(dtype).encode(*v).to_le_bytes()[..dtype.size()].to_vec(),
        (_, Value::Int(v)) => v.to_le_bytes()[..dtype.size()].to_vec(),
        (_, other) => panic!("{other:?} is not a {dtype}"),
    }
}

/// The result of an operation, from all contributions in rank order.
pub(super) fn reduce(op: ReduceOp, dtype: DataType, ranks: &[Vec<u8>]) -> Vec<u8> {
    let elements = 0..ranks[0].len() / dtype.size();
    elements
        .flat_map(|i| {
            let at = i * dtype.size()..(i + 1) * dtype.size();
            let values = ranks.iter().map(|r| decode(dtype, &r[at.clone()]));
            encode(dtype, &reduce_one(op, dtype, values.collect()))
        })
        .collect()
}

fn reduce_one(op: ReduceOp, dtype: DataType, values: Vec<Value>) -> Value {
    let world = values.len();
    let logical = matches!(op, ReduceOp::Land | ReduceOp::Lor | ReduceOp::Lxor);
    if logical || dtype == DataType::Bool {
        let truths = values.iter().filter(|v| truth(v)).count();
        let result = match op {
            ReduceOp::Land | ReduceOp::Prod | ReduceOp::Min | ReduceOp::Band => truths == world,
            ReduceOp::Lxor | ReduceOp::Bxor => truths % 2 == 1,
            _ => truths > 0,
        };
        return match dtype {
            DataType::Bool => Value::Bool(result),
            _ if dtype.is_float() => Value::Float(f64::from(u8::from(result))),
            _ => Value::Int(i128::from(result)),
        };
    }
    let accumulator = op.accumulator(dtype);
    let single = matches!(accumulator, DataType::Float32 | DataType::Complex64);
    let round = |x: f64| if single { f64::from(x as f32) } else { x };
    let wrap = |x: Value| match accumulator {
        DataType::Int128 => x,
        _ => decode(dtype, &encode(dtype, &x)),
    };
    let folded = values.into_iter().reduce(|a, b| match (a, b) {
        (Value::Float(a), Value::Float(b)) => Value::Float(round(combine_floats(op, a, b))),
        (Value::Int(a), Value::Int(b)) => wrap(Value::Int(combine_ints(op, a, b))),
        (Value::Complex(a, b), Value::Complex(c, d)) if op == ReduceOp::Prod => Value::Complex(
            round(round(a * c) - round(b * d)),
            round(round(a * d) + round(b * c)),
        ),
        (Value::Complex(a, b), Value::Complex(c, d)) => Value::Complex(round(a + c), round(b + d)),
        (a, b) => panic!("{a:?} and {b:?} do not combine"),
    });
    match folded.expect("at least one rank") {
        Value::Float(x) if op == ReduceOp::Avg => Value::Float(round(x / world as f64)),
        Value::Int(x) if op == ReduceOp::Avg => Value::Int(x / world as i128),
        Value::Complex(x, y) if op == ReduceOp::Avg => {
            Value::Complex(round(x / world as f64), round(y / world as f64))
        }
        other => other,
    }
}

fn truth(value: &Value) -> bool {
    match value {
        Value::Float(v) => *v != 0.0,
        Value::Int(v) => *v != 0,
        Value::Bool(v) => *v,
        Value::Complex(..) => panic!("no truth in complex numbers"),
    }
}

fn combine_floats(op: ReduceOp, a: f64, b: f64) -> f64 {
    let nan = a.is_nan() || b.is_nan();
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => a + b,
        ReduceOp::Prod => a * b,
        ReduceOp::Min | ReduceOp::Max if nan => f64::NAN,
        ReduceOp::Min if b < a => b,
        ReduceOp::Max if b > a => b,
        ReduceOp::Min | ReduceOp::Max => a,
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => panic!("no bits in floats"),
        ReduceOp::Land | ReduceOp::Lor | ReduceOp::Lxor => panic!("truth is counted"),
    }
}

fn combine_ints(op: ReduceOp, a: i128, b: i128) -> i128 {
    match op {
        ReduceOp::Prod => a.wrapping_mul(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        ReduceOp::Band => a & b,
        ReduceOp::Bor => a | b,
        ReduceOp::Bxor => a ^ b,
        ReduceOp::Sum | ReduceOp::Avg => a + b,
        ReduceOp::PremulSum(_) => panic!("no fractions in integers"),
        ReduceOp::Land | ReduceOp::Lor | ReduceOp::Lxor => panic!("truth is counted"),
    }
}

/// A small generator of numbers (xorshift64*, Vigna 2016), so that a seed names a case.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed ^ 0x9e37_79b9_7f4a_7c15 | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() >> 33) as usize % limit
    }
}

/// A rank's buffer: arbitrary bits, special values and small numbers, a third of each.
pub(super) fn contribution(dtype: DataType, count: usize, random: &mut Random) -> Vec<u8> {
    let special = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
        448.0,
        60000.0,
        1e-45,
        6e-8,
        3e38,
    ];
    let float = |random: &mut Random| match random.below(2) {
        0 => special[random.below(special.len())],
        _ => random.below(2001) as f64 / 8.0 - 125.0,
    };
    let mut bytes = Vec::with_capacity(count * dtype.size());
    for _ in 0..count {
        if random.below(3) == 0 {
            bytes.extend((0..dtype.size()).map(|_| (random.next() >> 40) as u8));
            continue;
        }
        let value = match dtype {
            DataType::Bool => Value::Bool(random.below(2) == 1),
            _ if dtype.is_complex() => Value::Complex(float(random), float(random)),
            _ if dtype.is_float() => Value::Float(float(random)),
            _ => Value::Int(random.below(41) as i128 - 20),
        };
        bytes.extend(encode(dtype, &value));
    }
    bytes
}
