//! NEON, which every processor of this architecture has.
//!
//! The compiler vectorises with it by itself; here is what it does not find. The conversions of halves are written as
//! instructions, since the compiler has a name for them only beside a type `f16` that is not stable.
//!
//! Not SVE: what is reduced is bound by memory, for which 128 bits suffice, and of the servers' processors only Graviton 3
//! has wider registers. Nor stores past the caches: these processors see for themselves that whole lines are being written
//! one after the other, and stop fetching them.

use std::arch::aarch64::{
    float32x4_t, uint16x8_t, vaddq_f32, vdupq_n_f32, vget_low_u16, vld1q_f32, vld1q_u16,
    vreinterpretq_f32_u32, vshll_high_n_u16, vshll_n_u16, vst1q_f32, vst1q_u16,
};
use std::arch::asm;

/// Eight float16 as two times four float32. A NaN keeps its bits and is made quiet.
#[inline]
fn widen_eight(halves: uint16x8_t) -> [float32x4_t; 2] {
    let (low, high): (float32x4_t, float32x4_t);
    // SAFETY: two conversions between registers, which every processor has.
    unsafe {
        asm!(
            "fcvtl {low:v}.4s, {halves:v}.4h",
            "fcvtl2 {high:v}.4s, {halves:v}.8h",
            low = out(vreg) low,
            high = lateout(vreg) high,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    [low, high]
}

/// The inverse, to nearest even.
#[inline]
fn narrow_eight([low, high]: [float32x4_t; 2]) -> uint16x8_t {
    let halves: uint16x8_t;
    // SAFETY: as above. The first one clears the upper half, which the second one then fills.
    unsafe {
        asm!(
            "fcvtn {halves:v}.4h, {low:v}.4s",
            "fcvtn2 {halves:v}.8h, {high:v}.4s",
            halves = out(vreg) halves,
            low = in(vreg) low,
            high = in(vreg) high,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    halves
}

/// Eight bfloat16: the upper halves of float32s.
#[inline]
fn widen_eight_bf16(halves: uint16x8_t) -> [float32x4_t; 2] {
    // SAFETY: every processor has these instructions.
    unsafe {
        let low = vshll_n_u16::<16>(vget_low_u16(halves));
        let high = vshll_high_n_u16::<16>(halves);
        [vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(high)]
    }
}

pub(super) fn widen_f16(dst: &mut [u8], src: &[u8]) -> usize {
    let (wide, _) = dst.as_chunks_mut::<32>();
    let (narrow, _) = src.as_chunks::<16>();
    for (wide, narrow) in wide.iter_mut().zip(narrow) {
        // SAFETY: the arrays have exactly the 16 bytes read and the 32 written, and no access needs alignment.
        unsafe {
            let [low, high] = widen_eight(vld1q_u16(narrow.as_ptr().cast()));
            let wide = wide.as_mut_ptr().cast::<f32>();
            vst1q_f32(wide, low);
            vst1q_f32(wide.add(4), high);
        }
    }
    wide.len().min(narrow.len()) * 16
}

pub(super) fn narrow_f16(dst: &mut [u8], src: &[u8]) -> usize {
    let (narrow, _) = dst.as_chunks_mut::<16>();
    let (wide, _) = src.as_chunks::<32>();
    for (narrow, wide) in narrow.iter_mut().zip(wide) {
        // SAFETY: the arrays have exactly the 32 bytes read and the 16 written, and no access needs alignment.
        unsafe {
            let wide = wide.as_ptr().cast::<f32>();
            let halves = narrow_eight([vld1q_f32(wide), vld1q_f32(wide.add(4))]);
            vst1q_u16(narrow.as_mut_ptr().cast(), halves);
        }
    }
    wide.len().min(narrow.len()) * 32
}

macro_rules! sum {
    ($name:ident, $widen:path) => {
        /// `acc = ((acc + s0) + s1) ...` in float32, without `acc` at the start unless `begun`, for
        /// as many elements as fill registers: how many that were.
        pub(super) fn $name(acc: &mut [u8], begun: bool, sources: &[&[u8]]) -> usize {
            // Eight registers at a time, so that additions need not wait for each other.
            let (blocks, _) = acc.as_chunks_mut::<128>();
            for (i, acc) in blocks.iter_mut().enumerate() {
                let acc = acc.as_mut_ptr().cast::<f32>();
                let load = |source: &&[u8]| {
                    let bytes: &[u8; 64] =
                        source[i * 64..].first_chunk().expect("as many elements");
                    let halves = bytes.as_ptr().cast::<u16>();
                    // SAFETY: the array has the 64 bytes read, and the loads need no alignment.
                    [0, 1, 2, 3].map(|k| $widen(unsafe { vld1q_u16(halves.add(8 * k)) }))
                };
                let (mut sums, rest) = if begun {
                    let held = [0, 1, 2, 3].map(|k| {
                        // SAFETY: the array has the 128 bytes read, and the loads need no alignment.
                        [0, 4].map(|half| unsafe { vld1q_f32(acc.add(8 * k + half)) })
                    });
                    (held, sources)
                } else {
                    match sources {
                        [first, rest @ ..] => (load(first), rest),
                        // SAFETY: every processor has the instruction.
                        [] => ([[unsafe { vdupq_n_f32(0.0) }; 2]; 4], sources),
                    }
                };
                for source in rest {
                    let terms = load(source);
                    for (sum, term) in sums.as_flattened_mut().iter_mut().zip(terms.as_flattened())
                    {
                        // SAFETY: likewise.
                        *sum = unsafe { vaddq_f32(*sum, *term) };
                    }
                }
                for (k, sum) in sums.as_flattened().iter().enumerate() {
                    // SAFETY: the array has the 128 bytes written, and the stores need no alignment.
                    unsafe { vst1q_f32(acc.add(4 * k), *sum) };
                }
            }
            blocks.len() * 32
        }
    };
}

sum!(sum_f16, widen_eight);
sum!(sum_bf16, widen_eight_bf16);
