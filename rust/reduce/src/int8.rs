//! float32 in 8 bits: blocks of [`BLOCK`] numbers that share a scale, the largest magnitude among them divided by 127.
//!
//! A number becomes the nearest multiple of its block's scale, so it is off by at most 1/254 of the largest magnitude
//! in its block. A block with a NaN or an infinity in it becomes NaN as a whole: what is not finite stays so. Blocks of
//! magnitudes below 2^-121, by which 127 cannot be divided in float32, become zero.
//!
//! Coded, a block is its scale and then a byte for each number; the last block may be shorter.

use super::simd::{Body, Tier};

/// Numbers that share a scale.
pub const BLOCK: usize = 128;
/// Bytes of a scale.
const SCALE: usize = 4;
/// From 2^23 to 2^24 floats are whole numbers, and their bits count them.
const WHOLE: f32 = 12_582_912.0;

/// Bytes that `count` numbers take.
#[inline]
pub fn coded_bytes(count: usize) -> usize {
    count + SCALE * count.div_ceil(BLOCK)
}

/// Codes `values` into `coded`, which is [`coded_bytes`] long.
pub fn encode(values: &[f32], coded: &mut [u8]) {
    assert_eq!(coded.len(), coded_bytes(values.len()));
    Tier::best().run(Encode { values, coded });
}

/// `values` becomes what is coded.
pub fn decode(coded: &[u8], values: &mut [f32]) {
    assert_eq!(coded.len(), coded_bytes(values.len()));
    Tier::best().run(Decode { coded, values });
}

/// Adds what is coded to `values`.
pub fn add_decoded(coded: &[u8], values: &mut [f32]) {
    assert_eq!(coded.len(), coded_bytes(values.len()));
    Tier::best().run(AddDecoded { coded, values });
}

struct Encode<'a> {
    values: &'a [f32],
    coded: &'a mut [u8],
}

struct Decode<'a> {
    coded: &'a [u8],
    values: &'a mut [f32],
}

struct AddDecoded<'a> {
    coded: &'a [u8],
    values: &'a mut [f32],
}

impl Body for Encode<'_> {
    #[inline(always)]
    fn run(self) {
        let blocks = self.values.chunks(BLOCK);
        for (values, coded) in blocks.zip(self.coded.chunks_mut(BLOCK + SCALE)) {
            // As integers, the magnitudes of floats are in order, with what is not finite at the end.
            let magnitudes = values.iter().map(|value| value.to_bits() & (u32::MAX >> 1));
            let largest = f32::from_bits(magnitudes.fold(0, u32::max));
            let reciprocal = 127.0 / largest;
            let mut scale = largest / 127.0;
            if (127.0 * scale).is_infinite() {
                scale = scale.next_down();
            }
            let (scale, factor) = match (largest.is_finite(), reciprocal.is_finite()) {
                (true, true) => (scale, reciprocal),
                (true, false) => (0.0, 0.0),
                (false, _) => (f32::NAN, 0.0),
            };
            let (head, codes) = coded.split_at_mut(SCALE);
            head.copy_from_slice(&scale.to_le_bytes());
            for (code, value) in codes.iter_mut().zip(values) {
                // The product is at most 127 and one rounding. The sum is rounded to a whole number, to even where two are as
                // near, whose low byte is the product's.
                *code = (value * factor + WHOLE).to_bits() as u8;
            }
        }
    }
}

#[inline(always)]
fn scale_of(coded: &[u8]) -> (f32, &[u8]) {
    let (head, codes) = coded.split_first_chunk::<SCALE>().expect("a scale");
    (f32::from_le_bytes(*head), codes)
}

#[inline(always)]
fn value_of(code: u8, scale: f32) -> f32 {
    f32::from(code.cast_signed()) * scale
}

impl Body for Decode<'_> {
    #[inline(always)]
    fn run(self) {
        let blocks = self.values.chunks_mut(BLOCK);
        for (values, coded) in blocks.zip(self.coded.chunks(BLOCK + SCALE)) {
            let (scale, codes) = scale_of(coded);
            for (value, code) in values.iter_mut().zip(codes) {
                *value = value_of(*code, scale);
            }
        }
    }
}

impl Body for AddDecoded<'_> {
    #[inline(always)]
    fn run(self) {
        let blocks = self.values.chunks_mut(BLOCK);
        for (values, coded) in blocks.zip(self.coded.chunks(BLOCK + SCALE)) {
            let (scale, codes) = scale_of(coded);
            for (value, code) in values.iter_mut().zip(codes) {
                *value += value_of(*code, scale);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize) -> Vec<f32> {
        let mut state = 7_u32;
        (0..count)
            .map(|at| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let exponent = (at / BLOCK % 60) as i32 - 30;
                (state as f32 / u32::MAX as f32 - 0.5) * 2.0_f32.powi(exponent)
            })
            .collect()
    }

    fn coded(values: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; coded_bytes(values.len())];
        encode(values, &mut bytes);
        bytes
    }

    #[test]
    fn a_number_is_off_by_half_a_step_of_its_block() {
        for count in [0, 1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 60 * BLOCK + 77] {
            let values = numbers(count);
            let bytes = coded(&values);
            let mut back = vec![f32::NAN; count];
            decode(&bytes, &mut back);
            let mut sums = values.clone();
            add_decoded(&bytes, &mut sums);
            for at in 0..count {
                let block = &values[at / BLOCK * BLOCK..count.min((at / BLOCK + 1) * BLOCK)];
                let largest = block
                    .iter()
                    .fold(0.0_f32, |most, value| most.max(value.abs()));
                let off = (back[at] - values[at]).abs();
                assert!(off <= largest / 253.9, "{off} of {largest} at {at}");
                assert_eq!(sums[at], values[at] + back[at]);
            }
        }
    }

    #[test]
    fn what_is_coded_once_stays_what_it_is() {
        let mut once = numbers(1000);
        decode(&coded(&once.clone()), &mut once);
        let mut twice = vec![0.0; once.len()];
        decode(&coded(&once), &mut twice);
        for (once, twice) in once.iter().zip(&twice) {
            assert!((once - twice).abs() <= once.abs() * 1e-6, "{once} {twice}");
        }
    }

    #[test]
    fn a_block_with_what_is_not_finite_is_no_number() {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = numbers(3 * BLOCK);
            values[BLOCK + 3] = odd;
            let mut back = vec![0.0; values.len()];
            decode(&coded(&values), &mut back);
            for (at, value) in back.iter().enumerate() {
                assert_eq!(value.is_nan(), at / BLOCK == 1, "{odd} at {at}");
            }
        }
    }

    #[test]
    fn the_smallest_and_the_largest_are_no_trouble() {
        let back = |value: f32| {
            let mut back = [7.0; 2];
            decode(&coded(&[value, 0.0]), &mut back);
            assert_eq!(back[1], 0.0);
            back[0]
        };
        assert_eq!(back(0.0), 0.0);
        assert_eq!(back(f32::MIN_POSITIVE / 4.0), 0.0);
        assert_eq!(back(f32::from_bits(1)), 0.0);
        for value in [1.0, -1.0, f32::MAX, f32::MIN, 1e-30] {
            assert!((back(value) / value - 1.0).abs() < 1e-6, "{value}");
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let values = numbers(10 * BLOCK + 9);
        let codes = Tier::all().into_iter().map(|tier| {
            let mut bytes = vec![0; coded_bytes(values.len())];
            tier.run(Encode {
                values: &values,
                coded: &mut bytes,
            });
            bytes
        });
        let codes: Vec<_> = codes.collect();
        assert!(codes.windows(2).all(|pair| pair[0] == pair[1]));
    }
}
