//! A copy that avoids the slow cases of the C library's.
//!
//! For lengths from some KiB to the size of the L2 cache, glibc on x86-64 copies with `rep movsb` where
//! the processor calls it fast. On AMD's Zen 3 and Zen 4 that instruction falls to about 1 GB/s, a
//! thirtieth, when the destination's place in its page is the source's or a few bytes further on
//! (glibc bug 30994). Collectives meet this often: a ring begins a page, an array from `malloc` 16
//! bytes after one, and two buffers of a heap both begin pages. Short pieces go through vector registers instead, at full
//! speed, and between buffers a whole copy does so here: on Intel's Cascade Lake an all_reduce in the heap takes a tenth to a
//! fifth less time than with pieces. (Into a ring they are as fast.)
//!
//! Large copies bypass the caches. The C library would too, but it sees each call alone, while
//! collectives copy in blocks; and what it takes for the size of the caches in a virtual machine can
//! be that of the whole host.

use std::ptr;

use super::cache;
use super::simd::Tier;

/// Distances from source to destination are taken modulo this.
const PAGE: usize = 4096;

/// Distances below this are avoided: the slow ones, up to 31, and some margin.
const NEAR_DISTANCE: usize = 64;

/// Shorter than any copy for which the C library takes `rep movsb`.
const PIECE: usize = 1024;

/// Longer than any copy for which it does; what bypasses the caches is best left whole.
const LONGEST_CUT: usize = 4 << 20;

/// Whether what is written should pass the caches by.
///
/// An ordinary store fetches the line it writes to and lets something else out of the caches for
/// it. A streaming one does neither: a copy moves two thirds of the bytes. But a later read of the
/// destination then finds it in memory, not in the cache. So it pays exactly when the caches would
/// not have kept it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Streaming {
    /// Ordinary stores.
    #[default]
    No,
    /// Stores to memory, where the processor has them (x86-64; elsewhere ordinary ones).
    Yes,
}

impl Streaming {
    /// Whether the processor has such stores: without them it would only cost the way round through a buffer.
    pub const EXISTS: bool = cfg!(target_arch = "x86_64");

    /// The choice for an operation during which the cores that share a cache touch `bytes` bytes, read
    /// and written: streaming from the size of the last cache on. A copy alone touches twice its
    /// length; in a collective, what all ranks of this host read and write counts.
    #[inline]
    pub fn for_footprint(bytes: usize) -> Self {
        if Self::EXISTS && bytes > cache::last_level() {
            Self::Yes
        } else {
            Self::No
        }
    }
}

/// `dst = src`, equally long; streaming if they are too large together for the caches.
///
/// # Panics
/// If the lengths differ.
#[inline]
pub fn copy(dst: &mut [u8], src: &[u8]) {
    if src.len() <= PIECE {
        return copy_hinted(dst, src, Streaming::No);
    }
    copy_hinted(dst, src, Streaming::for_footprint(2 * src.len()));
}

/// [`copy`] for a part of something larger, whose whole the caller knows.
///
/// Streamed data is visible to other processors before anything that this thread stores later.
///
/// # Panics
/// If the lengths differ.
#[inline]
pub fn copy_hinted(dst: &mut [u8], src: &[u8], streaming: Streaming) {
    assert!(dst.len() == src.len(), "a copy between different lengths");
    match src.len() <= PIECE {
        true => dst.copy_from_slice(src),
        false => copy_long(dst, src, streaming),
    }
}

fn copy_long(dst: &mut [u8], src: &[u8], streaming: Streaming) {
    if streaming == Streaming::Yes {
        return Tier::best().streamer().copy(dst, src);
    }
    copy_cached(dst, src);
}

/// [`copy`] by ordinary stores.
pub(super) fn copy_cached(dst: &mut [u8], src: &[u8]) {
    assert!(dst.len() == src.len(), "a copy between different lengths");
    let (from, to, len) = (src.as_ptr(), dst.as_mut_ptr(), src.len());
    // SAFETY: both are as long as that, and a slice to write overlaps no other.
    unsafe {
        if !(is_slow(from, to, len) && Tier::best().copy(from, to, len)) {
            copy_raw(from, to, len);
        }
    }
}

/// Whether the C library may be slow.
#[inline]
fn is_slow(src: *const u8, dst: *mut u8, len: usize) -> bool {
    let ahead = dst.addr().wrapping_sub(src.addr()) % PAGE;
    cfg!(target_arch = "x86_64") && ahead < NEAR_DISTANCE && len > PIECE && len <= LONGEST_CUT
}

/// Copies `len` bytes by ordinary stores of the C library, in short pieces where it would be slow.
///
/// # Safety
/// As for [`ptr::copy_nonoverlapping`].
#[inline]
pub unsafe fn copy_raw(src: *const u8, dst: *mut u8, len: usize) {
    let piece = if is_slow(src, dst, len) {
        PIECE
    } else {
        len.max(1)
    };
    for at in (0..len).step_by(piece) {
        // SAFETY: a part of what the caller vouches for.
        unsafe { ptr::copy_nonoverlapping(src.add(at), dst.add(at), piece.min(len - at)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_exceeds_the_cache_arrives() {
        let content: Vec<u8> = (0..cache::last_level() / 2 + 77)
            .map(|i| (i * 31 % 251) as u8)
            .collect();
        let is_streamed = Streaming::for_footprint(2 * content.len()) == Streaming::Yes;
        assert_eq!(is_streamed, cfg!(target_arch = "x86_64"));
        let mut space = vec![0; content.len()];
        copy(&mut space, &content);
        assert!(space == content);
    }

    #[test]
    fn registers_of_every_width_copy_every_byte_and_no_other() {
        let content: Vec<u8> = (0..1500).map(|i| (i * 31 % 251) as u8).collect();
        let mut space = vec![0; content.len() + PAGE];
        for tier in Tier::all() {
            for offset in [0, 1, 16, 63, 64] {
                for len in (64..700).chain([1024, 1025, 1499, 1500]) {
                    space.fill(0xaa);
                    let (to, from) = (space[offset..].as_mut_ptr(), content.as_ptr());
                    // SAFETY: both have as many bytes, and do not overlap.
                    if !unsafe { tier.copy(from, to, len) } {
                        continue;
                    }
                    assert!(space[offset..][..len] == content[..len]);
                    assert!(space[..offset].iter().all(|b| *b == 0xaa));
                    assert!(space[offset + len..].iter().all(|b| *b == 0xaa));
                }
            }
        }
    }

    #[test]
    fn every_byte_arrives_whatever_the_distance() {
        let content: Vec<u8> = (0..3 * PIECE + 7).map(|i| (i * 31 % 251) as u8).collect();
        let mut space = vec![0; content.len() + PAGE];
        for offset in [0, 1, 16, 63, 64, 2048, 4095] {
            for len in [0, 1, 63, 64, 130, PIECE, PIECE + 1, content.len()] {
                for streaming in [Streaming::No, Streaming::Yes] {
                    space.fill(0xaa);
                    copy_hinted(&mut space[offset..][..len], &content[..len], streaming);
                    assert_eq!(space[offset..][..len], content[..len]);
                    assert!(space[..offset].iter().all(|b| *b == 0xaa));
                    assert!(space[offset + len..].iter().all(|b| *b == 0xaa));
                }
            }
        }
    }
}
