//! The instruction sets of x86-64.

use std::arch::x86_64::{
    __m128i, __m256, __m256i, __m512i, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_sfence,
    _mm_storeu_si128, _mm_stream_si128, _mm256_add_ps, _mm256_castsi256_ps, _mm256_cvtepu16_epi32,
    _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_setzero_ps,
    _mm256_slli_epi32, _mm256_store_si256, _mm256_storeu_ps, _mm256_storeu_si256,
    _mm256_stream_si256, _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_store_si512, _mm512_storeu_ps, _mm512_storeu_si512, _mm512_stream_si512,
};

use super::{Body, LINE};

#[target_feature(enable = "avx2,f16c")]
pub(super) fn avx2(body: impl Body) {
    body.run();
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
pub(super) fn avx512(body: impl Body) {
    body.run();
}

#[target_feature(enable = "avx2,f16c")]
pub(super) fn widen_f16(dst: &mut [u8], src: &[u8]) -> usize {
    let (wide, _) = dst.as_chunks_mut::<32>();
    let (narrow, _) = src.as_chunks::<16>();
    for (wide, narrow) in wide.iter_mut().zip(narrow) {
        // SAFETY: the arrays have exactly the 16 bytes read and the 32 written, and neither access
        // needs alignment.
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
        // SAFETY: the arrays have exactly the 32 bytes read and the 16 written, and neither access
        // needs alignment.
        unsafe {
            let eight = _mm256_loadu_ps(wide.as_ptr().cast::<f32>());
            let half = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(eight);
            _mm_storeu_si128(narrow.as_mut_ptr().cast::<__m128i>(), half);
        }
    }
    wide.len().min(narrow.len()) * 32
}

#[target_feature(enable = "avx512f")]
pub(super) fn widen_f16_wide(dst: &mut [u8], src: &[u8]) -> usize {
    let (wide, _) = dst.as_chunks_mut::<64>();
    let (narrow, _) = src.as_chunks::<32>();
    for (wide, narrow) in wide.iter_mut().zip(narrow) {
        // SAFETY: the arrays have exactly the 32 bytes read and the 64 written, and neither access
        // needs alignment.
        unsafe {
            let sixteen = _mm256_loadu_si256(narrow.as_ptr().cast::<__m256i>());
            _mm512_storeu_ps(wide.as_mut_ptr().cast::<f32>(), _mm512_cvtph_ps(sixteen));
        }
    }
    wide.len().min(narrow.len()) * 32
}

#[target_feature(enable = "avx512f")]
pub(super) fn narrow_f16_wide(dst: &mut [u8], src: &[u8]) -> usize {
    let (narrow, _) = dst.as_chunks_mut::<32>();
    let (wide, _) = src.as_chunks::<64>();
    for (narrow, wide) in narrow.iter_mut().zip(wide) {
        // SAFETY: the arrays have exactly the 64 bytes read and the 32 written, and neither access
        // needs alignment.
        unsafe {
            let sixteen = _mm512_loadu_ps(wide.as_ptr().cast::<f32>());
            let half = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(sixteen);
            _mm256_storeu_si256(narrow.as_mut_ptr().cast::<__m256i>(), half);
        }
    }
    wide.len().min(narrow.len()) * 64
}

macro_rules! sum {
    ($name:ident, $widen:expr) => {
        /// `acc = ((acc + s0) + s1) ...` in float32, without `acc` at the start unless `begun`, for
        /// as many elements as fill registers: how many that were.
        #[target_feature(enable = "avx2,f16c")]
        pub(super) fn $name(acc: &mut [u8], begun: bool, sources: &[&[u8]]) -> usize {
            // Four registers at a time, so that additions need not wait for each other.
            let (blocks, _) = acc.as_chunks_mut::<128>();
            for (i, acc) in blocks.iter_mut().enumerate() {
                let acc = acc.as_mut_ptr().cast::<__m256>();
                let load = |source: &&[u8]| {
                    let bytes: &[u8; 64] =
                        source[i * 64..].first_chunk().expect("as many elements");
                    let bytes = bytes.as_ptr().cast::<__m128i>();
                    // SAFETY: the array has the 64 bytes read, and the loads need no alignment.
                    [0, 1, 2, 3].map(|k| $widen(unsafe { _mm_loadu_si128(bytes.add(k)) }))
                };
                let (mut sums, rest) = if begun {
                    // SAFETY: the array has the 128 bytes read, and the loads need no alignment.
                    let held = [0, 1, 2, 3].map(|k| unsafe { _mm256_loadu_ps(acc.add(k).cast()) });
                    (held, sources)
                } else {
                    match sources {
                        [first, rest @ ..] => (load(first), rest),
                        [] => ([_mm256_setzero_ps(); 4], sources),
                    }
                };
                for source in rest {
                    let terms = load(source);
                    for (sum, term) in sums.iter_mut().zip(terms) {
                        *sum = _mm256_add_ps(*sum, term);
                    }
                }
                for (k, sum) in sums.into_iter().enumerate() {
                    // SAFETY: the array has the 128 bytes written, and the stores need no alignment.
                    unsafe { _mm256_storeu_ps(acc.add(k).cast(), sum) };
                }
            }
            blocks.len() * 32
        }
    };
}

sum!(sum_f16, |half| _mm256_cvtph_ps(half));
sum!(sum_bf16, |half| {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
});

macro_rules! copy {
    ($name:ident, $features:literal, $register:ty, $load:path, $store:path, $store_aligned:path) => {
        /// `len` bytes from `src` to `dst`, four registers at a time, into whole lines.
        ///
        /// # Safety
        /// As for [`std::ptr::copy_nonoverlapping`], and `len` is at least [`LINE`].
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $name(src: *const u8, dst: *mut u8, len: usize) {
            const WIDTH: usize = size_of::<$register>();
            const FOUR: usize = 4 * WIDTH;
            debug_assert!(len >= LINE);
            // SAFETY: every access is within the `len` bytes. The first and the last registers need no alignment, and may
            // overlap what is copied beside them, which they copy from the same place; all others are stored to
            // multiples of their width.
            unsafe {
                let last = $load(src.add(len - WIDTH).cast());
                $store(dst.cast(), $load(src.cast()));
                let mut at = WIDTH - dst.addr() % WIDTH;
                while at + FOUR <= len {
                    let parts = [0, 1, 2, 3].map(|i| $load(src.add(at + i * WIDTH).cast()));
                    for (i, part) in parts.into_iter().enumerate() {
                        $store_aligned(dst.add(at + i * WIDTH).cast(), part);
                    }
                    at += FOUR;
                }
                while at + WIDTH <= len {
                    $store_aligned(dst.add(at).cast(), $load(src.add(at).cast()));
                    at += WIDTH;
                }
                $store(dst.add(len - WIDTH).cast(), last);
            }
        }
    };
}

copy!(
    copy_avx2,
    "avx2",
    __m256i,
    _mm256_loadu_si256,
    _mm256_storeu_si256,
    _mm256_store_si256
);
copy!(
    copy_avx512,
    "avx512f",
    __m512i,
    _mm512_loadu_si512,
    _mm512_storeu_si512,
    _mm512_store_si512
);

/// `dst = src` past the caches.
///
/// # Safety
/// `dst` begins on a multiple of LINE unless it is empty, and [`fence`] is called before anything
/// is published.
pub(super) unsafe fn stream(dst: &mut [[u8; LINE]], src: &[[u8; LINE]]) {
    for (dst, src) in dst.iter_mut().zip(src) {
        let to = dst.as_mut_ptr().cast::<__m128i>();
        let from = src.as_ptr().cast::<__m128i>();
        // SAFETY: both arrays have the 64 bytes accessed; `dst` is aligned for these stores by the
        // caller's word, and the loads need no alignment. All four are read before one is written
        // only for speed.
        unsafe {
            let parts = [0, 1, 2, 3].map(|i| _mm_loadu_si128(from.add(i)));
            for (i, part) in parts.into_iter().enumerate() {
                _mm_stream_si128(to.add(i), part);
            }
        }
    }
}

/// [`stream`] with 32 bytes at a time.
///
/// # Safety
/// As for [`stream`].
#[target_feature(enable = "avx2")]
pub(super) unsafe fn stream_avx2(dst: &mut [[u8; LINE]], src: &[[u8; LINE]]) {
    for (dst, src) in dst.iter_mut().zip(src) {
        let to = dst.as_mut_ptr().cast::<__m256i>();
        let from = src.as_ptr().cast::<__m256i>();
        // SAFETY: as in `stream`.
        unsafe {
            let parts = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
            _mm256_stream_si256(to, parts.0);
            _mm256_stream_si256(to.add(1), parts.1);
        }
    }
}

/// [`stream`] with a line at a time.
///
/// # Safety
/// As for [`stream`].
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn stream_avx512(dst: &mut [[u8; LINE]], src: &[[u8; LINE]]) {
    for (dst, src) in dst.iter_mut().zip(src) {
        // SAFETY: as in `stream`.
        unsafe {
            let line = _mm512_loadu_si512(src.as_ptr().cast::<__m512i>());
            _mm512_stream_si512(dst.as_mut_ptr().cast::<__m512i>(), line);
        }
    }
}

/// Orders what was streamed before every store that follows.
pub(super) fn fence() {
    // SAFETY: it only orders stores, and every x86-64 processor has it.
    unsafe { _mm_sfence() }
}
