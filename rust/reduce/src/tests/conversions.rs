//! Conversions of the small floats: every code, and float32s around every rounding border.

use super::reference::{Format, Random};
use super::{Shifted, Tier};
use crate::types::{DataType, ReduceOp};
use crate::{Kernel, small_float};

const SMALL: [DataType; 4] = [
    DataType::Float16,
    DataType::BFloat16,
    DataType::Float8E4M3,
    DataType::Float8E5M2,
];

fn every_code(dtype: DataType) -> Vec<u32> {
    (0..1 << (8 * dtype.size())).collect()
}

fn bytes_of(dtype: DataType, codes: &[u32]) -> Vec<u8> {
    let low = |c: &u32| c.to_le_bytes()[..dtype.size()].to_vec();
    codes.iter().flat_map(low).collect()
}

fn widened(tier: Tier, dtype: DataType, codes: &[u32]) -> Vec<f32> {
    let src = Shifted::new(1, &bytes_of(dtype, codes));
    let mut dst = Shifted::zeros(3, codes.len() * 4);
    small_float::widen(tier, dtype, &mut dst, &src);
    dst.chunks(4)
        .map(|b| f32::from_ne_bytes(b.try_into().unwrap()))
        .collect()
}

fn narrowed(tier: Tier, dtype: DataType, floats: &[f32]) -> Vec<u32> {
    let bytes: Vec<u8> = floats.iter().flat_map(|f| f.to_ne_bytes()).collect();
    let src = Shifted::new(2, &bytes);
    let mut dst = Shifted::zeros(1, floats.len() * dtype.size());
    small_float::narrow(tier, dtype, &mut dst, &src);
    let code = |b: &[u8]| {
        b.iter()
            .rev()
            .fold(0, |code, byte| code << 8 | u32::from(*byte))
    };
    dst.chunks(dtype.size()).map(code).collect()
}

#[test]
fn every_code_widens_to_its_value() {
    for dtype in SMALL {
        let codes = every_code(dtype);
        let plain = widened(Tier::all()[0], dtype, &codes);
        for (code, float) in codes.iter().zip(&plain) {
            let value = Format::of(dtype).decode(*code);
            let same = f64::from(*float).to_bits() == value.to_bits();
            assert!(
                same || (float.is_nan() && value.is_nan()),
                "{dtype} {code:#x}: {float} is not {value}"
            );
        }
        for tier in Tier::all() {
            let bits = |floats: Vec<f32>| floats.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert!(
                bits(widened(tier, dtype, &codes)) == bits(plain.clone()),
                "{dtype} on {tier:?}"
            );
        }
    }
}

#[test]
fn every_code_survives_both_ways() {
    for dtype in SMALL {
        let codes = every_code(dtype);
        for tier in Tier::all() {
            let back = narrowed(tier, dtype, &widened(tier, dtype, &codes));
            for (code, back) in codes.iter().zip(back) {
                let value = Format::of(dtype).decode(*code);
                let nan = value.is_nan() && Format::of(dtype).decode(back).is_nan();
                assert!(
                    nan || back == *code,
                    "{dtype} {code:#x} on {tier:?}: {back:#x}"
                );
            }
        }
    }
}

/// Float32s of every sign, exponent and leading mantissa, with the low bits that decide a rounding.
fn borders() -> Vec<f32> {
    let low = [
        0, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff,
    ];
    let mut floats: Vec<f32> = (0..=0xffff_u32)
        .flat_map(|high| low.map(|low| f32::from_bits(high << 16 | low)))
        .collect();
    let mut random = Random::new(7);
    floats.extend((0..100_000).map(|_| f32::from_bits((random.next() >> 32) as u32)));
    floats
}

#[test]
fn float32_narrows_to_the_nearest() {
    let floats = borders();
    for dtype in SMALL {
        let plain = narrowed(Tier::all()[0], dtype, &floats);
        let format = Format::of(dtype);
        for (float, code) in floats.iter().zip(&plain) {
            let same = format.encode(f64::from(*float)) == *code;
            assert!(
                same || (float.is_nan() && format.decode(*code).is_nan()),
                "{dtype}: {float:e} ({:#x}) became {code:#x}",
                float.to_bits()
            );
        }
        for tier in Tier::all() {
            assert!(
                narrowed(tier, dtype, &floats) == plain,
                "{dtype} on {tier:?}"
            );
        }
    }
}

#[test]
fn float8_treats_what_is_too_large_as_torch_does() {
    let floats = [448.0, 464.0, 465.0, 1e9, f32::INFINITY, -1e9, f32::NAN];
    let e4m3 = narrowed(Tier::best(), DataType::Float8E4M3, &floats);
    assert_eq!(e4m3, [0x7e, 0x7e, 0x7e, 0x7e, 0x7e, 0xfe, 0x7f]);
    let floats = [57344.0, 61439.0, 61440.0, f32::NEG_INFINITY, f32::NAN];
    let e5m2 = narrowed(Tier::best(), DataType::Float8E5M2, &floats);
    assert_eq!(e5m2, [0x7b, 0x7b, 0x7c, 0xfc, 0x7f]);
}

#[test]
fn types_that_are_their_own_accumulator_are_copied() {
    let src: Vec<u8> = (0..48).collect();
    for dtype in DataType::ALL.into_iter().filter(|d| !SMALL.contains(d)) {
        let kernel = Kernel::new(ReduceOp::Sum, dtype).unwrap();
        let mut wide = vec![0; 48];
        kernel.widen(&mut wide, &src);
        assert_eq!(wide, src);
        let mut back = vec![0; 48];
        kernel.narrow(&mut back, &wide);
        assert_eq!(back, src);
    }
}
