//! Kernels against the reference in [`reference`], and every instruction set against the plain
//! loops.

mod conversions;
mod many;
mod reference;

use std::ops::{Deref, DerefMut};

use proptest::prelude::*;

use super::simd::Tier;
use super::{DataType, Kernel, Meaningless, ReduceOp, scale_on};
use reference::{Random, Value, contribution, decode, encode, reduce};

/// Bytes that begin `offset` bytes after an aligned address.
struct Shifted {
    storage: Vec<u8>,
    start: usize,
    len: usize,
}

impl Shifted {
    fn new(offset: usize, content: &[u8]) -> Self {
        let storage = vec![0; content.len() + offset + 64];
        let start = storage.as_ptr().addr().next_multiple_of(64) - storage.as_ptr().addr() + offset;
        let len = content.len();
        let mut shifted = Self {
            storage,
            start,
            len,
        };
        shifted.copy_from_slice(content);
        shifted
    }

    fn zeros(offset: usize, len: usize) -> Self {
        Self::new(offset, &vec![0; len])
    }
}

impl Deref for Shifted {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.storage[self.start..][..self.len]
    }
}

impl DerefMut for Shifted {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.storage[self.start..][..self.len]
    }
}

/// Every operator with every type it has a meaning for.
fn meaningful() -> impl Iterator<Item = (ReduceOp, DataType)> {
    let pairs = ReduceOp::ALL
        .into_iter()
        .flat_map(|op| DataType::ALL.map(|dtype| (op, dtype)));
    pairs.filter(|(op, dtype)| op.check(*dtype).is_ok())
}

/// Reduces as an operation does: the first contribution widened, the others folded in turn, the
/// fold finished. Every second contribution is widened by itself and folded as an accumulator.
fn run(tier: Tier, op: ReduceOp, dtype: DataType, ranks: &[Vec<u8>], offset: usize) -> Vec<u8> {
    let kernel = Kernel::on(tier, op, dtype).unwrap();
    let wide = ranks[0].len() / dtype.size() * kernel.accumulator().size();
    let mut acc = Shifted::zeros(offset, wide);
    kernel.widen(&mut acc, &ranks[0]);
    for (rank, contribution) in ranks.iter().enumerate().skip(1) {
        let src = Shifted::new(offset * 3 % 17, contribution);
        if rank % 2 == 0 {
            let mut src_wide = Shifted::zeros(offset + 1, wide);
            kernel.widen(&mut src_wide, &src);
            kernel.fold(&mut acc, &src_wide);
        } else {
            kernel.fold_element(&mut acc, &src);
        }
    }
    let mut result = Shifted::zeros(offset + 2, ranks[0].len());
    kernel.finish(&mut result, &acc, ranks.len());
    if kernel.element() == kernel.accumulator() {
        kernel.finish_in_place(&mut acc, ranks.len());
        assert_same(dtype, &result, &acc, "finish and finish_in_place");
    }
    result.to_vec()
}

/// The same bits, or both NaN: which NaN a sum of several hands on is the hardware's choice.
fn assert_same(dtype: DataType, left: &[u8], right: &[u8], what: &str) {
    assert_eq!(left.len(), right.len(), "{what}");
    let elements = left
        .chunks_exact(dtype.size())
        .zip(right.chunks_exact(dtype.size()));
    for (i, (l, r)) in elements.enumerate() {
        let (value_l, value_r) = (decode(dtype, l), decode(dtype, r));
        assert!(
            l == r || value_l.same_nan(&value_r),
            "{what}, element {i}: {value_l:?} ({l:02x?}) and {value_r:?} ({r:02x?})"
        );
    }
}

fn check(op: ReduceOp, dtype: DataType, ranks: &[Vec<u8>], offset: usize) {
    let expected = reduce(op, dtype, ranks);
    for tier in Tier::all() {
        let what = format!("{op} of {dtype} by {} ranks on {tier:?}", ranks.len());
        assert_same(
            dtype,
            &run(tier, op, dtype, ranks, offset),
            &expected,
            &what,
        );
    }
}

#[test]
fn every_operator_matches_the_reference_at_every_length() {
    let mut random = Random::new(1);
    for (op, dtype) in meaningful() {
        for count in (0..=40).chain([63, 64, 65, 127, 255, 256, 257, 300, 513, 1025]) {
            let ranks: Vec<_> = (0..1 + count % 5)
                .map(|_| contribution(dtype, count, &mut random))
                .collect();
            check(op, dtype, &ranks, count % 16);
        }
    }
}

proptest! {
    #[test]
    fn any_reduction_matches_the_reference(
        pair in prop::sample::select(meaningful().collect::<Vec<_>>()),
        seed in any::<u64>(),
        world in 1..9_usize,
        count in 0..700_usize,
        offset in 0..33_usize,
    ) {
        let (op, dtype) = pair;
        let mut random = Random::new(seed);
        let ranks: Vec<_> = (0..world).map(|_| contribution(dtype, count, &mut random)).collect();
        check(op, dtype, &ranks, offset);
    }
}

#[test]
fn pairs_without_meaning_are_refused() {
    for op in ReduceOp::ALL {
        for dtype in DataType::ALL {
            match Kernel::new(op, dtype) {
                Ok(kernel) => {
                    assert!(op.check(dtype).is_ok(), "{op} of {dtype} was accepted");
                    assert_eq!(kernel.element(), dtype);
                    assert_eq!(kernel.accumulator(), op.accumulator(dtype));
                }
                Err(error) => {
                    assert_eq!(error, Meaningless { op, dtype });
                    assert!(op.check(dtype).is_err(), "{op} of {dtype} was refused");
                }
            }
        }
    }
}

/// One element reduced over ranks, by value.
fn one(op: ReduceOp, dtype: DataType, values: &[Value]) -> Value {
    let ranks: Vec<_> = values.iter().map(|v| encode(dtype, v)).collect();
    decode(dtype, &run(Tier::best(), op, dtype, &ranks, 1))
}

#[test]
fn integers_wrap() {
    let ints = |values: &[i128]| values.iter().map(|v| Value::Int(*v)).collect::<Vec<_>>();
    let sum = one(ReduceOp::Sum, DataType::Int8, &ints(&[100, 100]));
    assert_eq!(sum, Value::Int(-56));
    let product = one(ReduceOp::Prod, DataType::UInt8, &ints(&[20, 20]));
    assert_eq!(product, Value::Int(144));
}

/// The sum of 200, 200 and 200 is 88 in a byte, that of two of the largest numbers -2 in each signed type.
#[test]
fn averages_of_integers_do_not_wrap() {
    for dtype in DataType::ALL.into_iter().filter(|d| d.is_integer()) {
        let signed = matches!(
            dtype,
            DataType::Int8 | DataType::Int16 | DataType::Int32 | DataType::Int64
        );
        let bits = 8 * dtype.size() as u32;
        let (least, most) = match signed {
            true => (-(1_i128 << (bits - 1)), (1_i128 << (bits - 1)) - 1),
            false => (0, (1_i128 << bits) - 1),
        };
        let average = |values: &[i128]| {
            let values: Vec<_> = values.iter().map(|v| Value::Int(*v)).collect();
            one(ReduceOp::Avg, dtype, &values)
        };
        assert_eq!(average(&[most; 7]), Value::Int(most), "{dtype}");
        assert_eq!(average(&[least; 7]), Value::Int(least), "{dtype}");
        assert_eq!(average(&[most, most - 1]), Value::Int(most - 1), "{dtype}");
        if signed {
            assert_eq!(average(&[-3, -2]), Value::Int(-2), "{dtype}: toward zero");
            assert_eq!(average(&[least, most]), Value::Int(0), "{dtype}");
        }
    }
}

#[test]
fn integers_have_no_factor_and_bools_no_average() {
    for dtype in DataType::ALL {
        let factor = ReduceOp::PremulSum(2.0).check(dtype);
        let has_fractions = dtype.is_float() || dtype.is_complex();
        assert_eq!(factor.is_ok(), has_fractions, "{dtype}");
        let average = ReduceOp::Avg.check(dtype);
        assert_eq!(average.is_ok(), dtype != DataType::Bool, "{dtype}");
        for error in [factor, average].into_iter().filter_map(Result::err) {
            assert!(error.to_string().contains("; "), "{error} gives no advice");
        }
    }
}

/// An average is the sum, divided: what float32 cannot add up is infinite.
#[test]
fn an_average_beyond_its_type_is_infinite() {
    let large = |dtype: DataType| {
        let value = if dtype == DataType::Float64 {
            1.7e308
        } else {
            3.3e38
        };
        one(
            ReduceOp::Avg,
            dtype,
            &[Value::Float(value), Value::Float(value)],
        )
    };
    for dtype in [DataType::Float32, DataType::Float64, DataType::BFloat16] {
        assert_eq!(large(dtype), Value::Float(f64::INFINITY), "{dtype}");
    }
}

#[test]
fn nan_wins_min_and_max_with_one_pattern() {
    for dtype in DataType::ALL.into_iter().filter(|d| d.is_float()) {
        for op in [ReduceOp::Min, ReduceOp::Max] {
            let number = encode(dtype, &Value::Float(1.0));
            let nan = encode(dtype, &Value::Float(-f64::NAN));
            let results = [[&number, &nan], [&nan, &number], [&nan, &nan]]
                .map(|pair| run(Tier::best(), op, dtype, &pair.map(Vec::clone), 0));
            assert!(
                decode(dtype, &results[0]).same_nan(&Value::Float(f64::NAN)),
                "{op} of {dtype}"
            );
            assert!(
                results.iter().all(|r| *r == results[0]),
                "{op} of {dtype}: {results:?}"
            );
        }
    }
}

#[test]
fn logic_makes_zero_or_one_of_a_single_contribution() {
    for (op, dtype) in meaningful() {
        let logical = matches!(op, ReduceOp::Land | ReduceOp::Lor | ReduceOp::Lxor);
        if logical && dtype != DataType::Bool {
            let seven = if dtype.is_float() {
                Value::Float(7.0)
            } else {
                Value::Int(7)
            };
            let one_of = one(op, dtype, &[seven]);
            assert!(
                one_of == Value::Int(1) || one_of == Value::Float(1.0),
                "{op} of {dtype}"
            );
        } else if dtype == DataType::Bool {
            assert_eq!(
                run(Tier::best(), op, dtype, &[vec![0, 7, 1]], 0),
                [0, 1, 1],
                "{op} of {dtype}"
            );
        }
    }
}

#[test]
fn halves_are_rounded_once() {
    // In float16, 2048 + 1 is 2048 at each of four steps; the sum is 2052.
    let mut values = vec![Value::Float(2048.0)];
    values.extend([const { Value::Float(1.0) }; 4]);
    assert_eq!(
        one(ReduceOp::Sum, DataType::Float16, &values),
        Value::Float(2052.0)
    );
    // 60000 + 60000 exceeds float16, their average does not.
    let large = [const { Value::Float(60000.0) }; 2];
    let average = one(ReduceOp::Avg, DataType::Float16, &large);
    assert_eq!(average, Value::Float(60000.0));
    assert_eq!(
        one(ReduceOp::Sum, DataType::Float16, &large),
        Value::Float(f64::INFINITY)
    );
}

#[test]
fn scale_multiplies_in_the_type() {
    let scaled = |dtype: DataType, value: Value, factor: f64| {
        let src = Shifted::new(1, &encode(dtype, &value).repeat(21));
        let mut first = None;
        for tier in Tier::all() {
            let mut dst = Shifted::zeros(3, src.len());
            scale_on(tier, dtype, &mut dst, &src, factor);
            let results: Vec<_> = dst.chunks(dtype.size()).map(|e| decode(dtype, e)).collect();
            assert!(
                results.iter().all(|r| *r == results[0]),
                "{dtype}: {results:?}"
            );
            assert_eq!(*first.get_or_insert(results[0].clone()), results[0]);
        }
        first.unwrap()
    };
    for dtype in DataType::ALL.into_iter().filter(|d| d.is_float()) {
        assert_eq!(scaled(dtype, Value::Float(6.0), 0.5), Value::Float(3.0));
    }
    let complex = scaled(DataType::Complex128, Value::Complex(6.0, -2.0), 0.5);
    assert_eq!(complex, Value::Complex(3.0, -1.0));
}

#[test]
fn scaled_floats_are_rounded_once() {
    let mut random = Random::new(3);
    for dtype in DataType::ALL.into_iter().filter(|d| d.is_float()) {
        let src = contribution(dtype, 1500, &mut random);
        for factor in [1.0 / 3.0, -7.7, 1e-3] {
            let single = ReduceOp::Sum.accumulator(dtype) == DataType::Float32;
            let round = |x: f64| if single { f64::from(x as f32) } else { x };
            let expected = src
                .chunks(dtype.size())
                .flat_map(|e| match decode(dtype, e) {
                    Value::Float(x) => encode(dtype, &Value::Float(round(x * round(factor)))),
                    other => panic!("{other:?} is not a float"),
                });
            let expected: Vec<u8> = expected.collect();
            for tier in Tier::all() {
                let mut dst = Shifted::zeros(5, src.len());
                scale_on(tier, dtype, &mut dst, &src, factor);
                let what = format!("{dtype} times {factor} on {tier:?}");
                assert_same(dtype, &dst, &expected, &what);
            }
        }
    }
}

#[test]
#[should_panic(expected = "not as many whole elements")]
fn lengths_that_differ_are_a_mistake() {
    let kernel = Kernel::new(ReduceOp::Sum, DataType::Float16).unwrap();
    kernel.fold_element(&mut [0; 16], &[0; 6]);
}
