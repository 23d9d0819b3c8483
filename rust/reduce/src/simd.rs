//! The loops of this module, compiled for the instruction sets of this processor and chosen while
//! running.
//!
//! A loop is a value that implements [`Body`]. [`Tier::run`] inlines it into a function that
//! enables a set of target features, where the compiler vectorises it. By hand there are only copies, the
//! conversions between float16 and float32 and the stores past the caches ([`Streamer`]), which
//! have instructions of their own, and sums of halves, which the compiler would not keep in
//! registers. The compiler never makes one rounding of two by fusing a product
//! and a sum, whatever the features, so all give the same bits. On aarch64 the baseline has NEON, so
//! that set differs from the plain one only in what is written by hand.

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::types::DataType;

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
    #[cfg_attr(
        all(target_arch = "aarch64", not(test)),
        expect(
            dead_code,
            reason = "every processor has the other one; tests compare the two"
        )
    )]
    Plain,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Tier {
    /// The widest one.
    pub(super) fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if has_avx512() {
            return Self(Set::Avx512);
        } else if has_avx2() {
            return Self(Set::Avx2);
        }
        #[cfg(target_arch = "aarch64")]
        return Self(Set::Neon);
        #[cfg(not(target_arch = "aarch64"))]
        Self(Set::Plain)
    }

    /// Every one, the plain one first.
    #[cfg(test)]
    pub(super) fn all() -> Vec<Self> {
        [
            Some(Self(Set::Plain)),
            #[cfg(target_arch = "x86_64")]
            has_avx2().then_some(Self(Set::Avx2)),
            #[cfg(target_arch = "x86_64")]
            has_avx512().then_some(Self(Set::Avx512)),
            #[cfg(target_arch = "aarch64")]
            Some(Self(Set::Neon)),
        ]
        .into_iter()
        .flatten()
        .collect()
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
            // SAFETY: the same with `has_avx512` and `avx512`.
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => unsafe { x86::avx512(body) },
            #[cfg(target_arch = "aarch64")]
            Set::Neon => body.run(),
        }
    }

    /// float16 to float32 by the processor's own instruction, if it has one: the bytes of `src` it
    /// converted. The rest is the caller's.
    pub(super) fn widen_f16(self, dst: &mut [u8], src: &[u8]) -> usize {
        match self.0 {
            // SAFETY: a `Tier` of this set exists only after `has_avx2` found f16c among others.
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => unsafe { x86::widen_f16(dst, src) },
            // SAFETY: `has_avx512` found the features.
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => unsafe { x86::widen_f16_wide(dst, src) },
            #[cfg(target_arch = "aarch64")]
            Set::Neon => neon::widen_f16(dst, src),
            Set::Plain => {
                let _ = (dst, src);
                0
            }
        }
    }

    /// float32 to float16, to nearest even, likewise: the bytes of `src` it converted.
    pub(super) fn narrow_f16(self, dst: &mut [u8], src: &[u8]) -> usize {
        match self.0 {
            // SAFETY: as in `widen_f16`.
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => unsafe { x86::narrow_f16(dst, src) },
            // SAFETY: as in `widen_f16`.
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => unsafe { x86::narrow_f16_wide(dst, src) },
            #[cfg(target_arch = "aarch64")]
            Set::Neon => neon::narrow_f16(dst, src),
            Set::Plain => {
                let _ = (dst, src);
                0
            }
        }
    }

    /// `acc = ((acc + s0) + s1) ...` in float32 of float16 or bfloat16 sources, without `acc` at the
    /// start unless `begun`; the sums stay in registers. The elements it summed; the rest is the
    /// caller's.
    pub(super) fn sum_halves(
        self,
        small: DataType,
        acc: &mut [u8],
        begun: bool,
        sources: &[&[u8]],
    ) -> usize {
        match (self.0, small) {
            // SAFETY: every set but the plain one exists only after `has_avx2` found the features.
            #[cfg(target_arch = "x86_64")]
            (Set::Avx2 | Set::Avx512, DataType::Float16) => unsafe {
                x86::sum_f16(acc, begun, sources)
            },
            // SAFETY: likewise.
            #[cfg(target_arch = "x86_64")]
            (Set::Avx2 | Set::Avx512, DataType::BFloat16) => unsafe {
                x86::sum_bf16(acc, begun, sources)
            },
            #[cfg(target_arch = "aarch64")]
            (Set::Neon, DataType::Float16) => neon::sum_f16(acc, begun, sources),
            #[cfg(target_arch = "aarch64")]
            (Set::Neon, DataType::BFloat16) => neon::sum_bf16(acc, begun, sources),
            _ => {
                let _ = (acc, begun, sources);
                0
            }
        }
    }

    /// Copies `len` bytes through registers, at least [`LINE`]. False, and nothing is done, where there are none to be
    /// had, or where the C library does nothing else (aarch64).
    ///
    /// # Safety
    /// As for [`std::ptr::copy_nonoverlapping`].
    pub(super) unsafe fn copy(self, src: *const u8, dst: *mut u8, len: usize) -> bool {
        match self.0 {
            // SAFETY: the caller's word; and as in `widen_f16`.
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => unsafe { x86::copy_avx2(src, dst, len) },
            // SAFETY: likewise.
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => unsafe { x86::copy_avx512(src, dst, len) },
            _ => {
                let _ = (src, dst, len);
                return false;
            }
        }
        #[cfg(target_arch = "x86_64")]
        true
    }

    /// Copies past the caches, for what would be evicted anyway before it is read.
    pub(super) fn streamer(self) -> Streamer {
        Streamer(self)
    }
}

/// Stores that go to memory without fetching what they replace.
///
/// The processor may deliver such stores after later ordinary ones, a release store to an atomic
/// among them. Dropping the streamer fences them, so that what is published after that is seen
/// after the data. A function that makes one has fenced when it returns.
pub(super) struct Streamer(
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "there the stores are ordinary ones")
    )]
    Tier,
);

impl Streamer {
    /// `dst = src`, equally long.
    ///
    /// Lines of 64 bytes that `dst` covers whole bypass the caches; parts of lines at its ends do
    /// not. A copy in pieces should have its seams where lines begin.
    pub(super) fn copy(&self, dst: &mut [u8], src: &[u8]) {
        assert_eq!(dst.len(), src.len(), "a copy between different lengths");
        #[cfg(target_arch = "x86_64")]
        {
            let head = dst.as_ptr().align_offset(LINE).min(dst.len());
            let (dst_head, dst) = dst.split_at_mut(head);
            let (src_head, src) = src.split_at(head);
            dst_head.copy_from_slice(src_head);
            let (lines, dst_tail) = dst.as_chunks_mut::<LINE>();
            let (src, src_tail) = src.as_chunks::<LINE>();
            match self.0.0 {
                // SAFETY: `lines` begins on a multiple of LINE, or is empty, and there are as many
                // in `src`. Dropping `self` fences.
                Set::Plain => unsafe { x86::stream(lines, src) },
                // SAFETY: likewise; and a `Tier` of this set exists only after detection.
                Set::Avx2 => unsafe { x86::stream_avx2(lines, src) },
                // SAFETY: likewise.
                Set::Avx512 => unsafe { x86::stream_avx512(lines, src) },
            }
            dst_tail.copy_from_slice(src_tail);
        }
        #[cfg(not(target_arch = "x86_64"))]
        super::copy(dst, src);
    }
}

impl Drop for Streamer {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        x86::fence();
    }
}

/// Bytes of a cache line, the unit in which memory is written.
pub(super) const LINE: usize = 64;

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512dq")
        && std::arch::is_x86_feature_detected!("avx512vl")
}
