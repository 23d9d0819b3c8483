//! The loops of this module, compiled for the instruction sets of this processor and chosen while
//! running.
//!
//! A loop is a value that implements [`Body`]. [`Tier::run`] inlines it into a function that
//! enables a set of target features, where the compiler vectorises it; nothing here writes vector
//! code by hand but the conversions between float16 and float32, which have instructions of their
//! own. No tier enables fused multiply-add, so that all give the same bits. On aarch64 the baseline
//! has NEON and the plain compilation uses it.

/// A loop over buffers it holds. Implementations mark `run` as `inline(always)`: a call would leave
/// the target features.
pub(super) trait Body {
    fn run(self);
}

/// An instruction set that this processor has. There is no other way to one than detection, which
/// is what makes calling into it sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tier(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Plain,
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Tier {
    /// The widest one.
    pub(super) fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if has_avx2() {
            return Self(Set::Avx2);
        }
        Self(Set::Plain)
    }

    /// Every one, the plain one first.
    #[cfg(test)]
    pub(super) fn all() -> Vec<Self> {
        let mut all = vec![Self(Set::Plain)];
        #[cfg(target_arch = "x86_64")]
        if has_avx2() {
            all.push(Self(Set::Avx2));
        }
        all
    }

    /// Runs the loop, compiled for this instruction set.
    #[inline]
    pub(super) fn run(self, body: impl Body) {
        match self.0 {
            Set::Plain => body.run(),
            // SAFETY: a `Tier` of this set exists only after `has_avx2` found all the features that
            // `avx2` enables.
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => unsafe { x86::avx2(body) },
        }
    }

    /// float16 to float32 by the processor's own instruction, if it has one: the bytes of `src` it
    /// converted. The rest is the caller's.
    pub(super) fn widen_f16(self, dst: &mut [u8], src: &[u8]) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: every set but the plain one includes the features found by `has_avx2`, f16c
            // among them.
            Set::Avx2 => unsafe { x86::widen_f16(dst, src) },
            Set::Plain => {
                let _ = (dst, src);
                0
            }
        }
    }

    /// float32 to float16, to nearest even, likewise: the bytes of `src` it converted.
    pub(super) fn narrow_f16(self, dst: &mut [u8], src: &[u8]) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `widen_f16`.
            Set::Avx2 => unsafe { x86::narrow_f16(dst, src) },
            Set::Plain => {
                let _ = (dst, src);
                0
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps,
        _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_storeu_ps,
    };

    use super::Body;

    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn avx2(body: impl Body) {
        body.run();
    }

    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn widen_f16(dst: &mut [u8], src: &[u8]) -> usize {
        let (wide, _) = dst.as_chunks_mut::<32>();
        let (narrow, _) = src.as_chunks::<16>();
        for (wide, narrow) in wide.iter_mut().zip(narrow) {
            // SAFETY: the arrays have exactly the 16 bytes read and the 32 written, and neither
            // access needs alignment.
            unsafe {
                let eight = _mm_loadu_si128(narrow.as_ptr().cast::<__m128i>());
                _mm256_storeu_ps(wide.as_mut_ptr().cast::<f32>(), _mm256_cvtph_ps(eight));
            }
        }
        wide.len().min(narrow.len()) * 16
    }

    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn narrow_f16(dst: &mut [u8], src: &[u8]) -> usize {
        let (narrow, _) = dst.as_chunks_mut::<16>();
        let (wide, _) = src.as_chunks::<32>();
        for (narrow, wide) in narrow.iter_mut().zip(wide) {
            // SAFETY: the arrays have exactly the 32 bytes read and the 16 written, and neither
            // access needs alignment.
            unsafe {
                let eight = _mm256_loadu_ps(wide.as_ptr().cast::<f32>());
                let half = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(eight);
                _mm_storeu_si128(narrow.as_mut_ptr().cast::<__m128i>(), half);
            }
        }
        wide.len().min(narrow.len()) * 32
    }
}
