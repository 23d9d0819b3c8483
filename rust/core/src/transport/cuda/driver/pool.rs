//! Registered host memory in slabs, from which parts are handed out.
//!
//! To register memory, and more so to unregister it, the driver may wait until the context is idle; and a stream that waits
//! for a peer waits perhaps for what this host does next. So an operation takes its part from a slab that has been
//! registered before, and gives it back without a call. Slabs serve all groups of the process on a device; the first is
//! made with the first group ([`Pinned`](super::Pinned)), each further one doubles what there is, and all go when no part
//! of any is in use: with the last group.

use std::ops::Range;
use std::sync::Arc;

use super::pinned::{Slab, make_slab};
use super::{Device, is_forked};
use crate::error::{Error, Result};
use crate::locks::Mutex;

/// Parts are multiples of this, and begin at such.
pub(super) const GRAIN: usize = 4096;
/// The largest slab that is made in advance of need.
const MOST_AHEAD: usize = 64 << 20;

/// The kind of memory that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlabKind {
    /// Peers on the host read it in place, if that can be.
    Shared,
    /// No other process sees it.
    Private,
}

impl SlabKind {
    /// Bytes of the first slab: words and tables for dozens of groups; messages of some length.
    fn first(self) -> usize {
        match self {
            Self::Shared => 8 << 20,
            Self::Private => 256 * GRAIN,
        }
    }
}

static POOL: Mutex<Pool> = Mutex::new(Pool {
    slabs: Vec::new(),
    parts: 0,
});

/// Held by the thread that makes a slab.
static MAKING: Mutex<()> = Mutex::new(());

struct Pool {
    slabs: Vec<Kept>,
    /// That are in use, of all slabs, or about to be.
    parts: usize,
}

struct Kept {
    slab: Arc<Slab>,
    device: u32,
    kind: SlabKind,
    gaps: Gaps,
}

impl Kept {
    fn is_of(&self, device: &Device, kind: SlabKind) -> bool {
        self.device == device.number() && self.kind == kind
    }
}

/// A part of a slab, which goes back when it is dropped.
pub(super) struct SlabPart {
    /// `None` while its slab is being made.
    slab: Option<Arc<Slab>>,
    pub(super) range: Range<usize>,
    /// Neither a stream nor the host will touch it any more, so it may be handed out again.
    is_clean: bool,
}

impl SlabPart {
    /// At least `bytes` bytes of a device's pool.
    ///
    /// # Errors
    /// As [`Pinned::shared`](super::Pinned::shared).
    pub(super) fn take(device: &'static Device, kind: SlabKind, bytes: usize) -> Result<Self> {
        let bytes = bytes
            .max(1)
            .checked_next_multiple_of(GRAIN)
            .ok_or_else(|| Error::invalid(format!("{bytes} bytes are more than there can be")))?;
        if let Some(part) = Self::find(device, kind, bytes) {
            return Ok(part);
        }
        // Of two ranks of a process that need a slab one makes it: the other's call could wait for the first one's stream.
        let _making = MAKING.lock();
        if let Some(part) = Self::find(device, kind, bytes) {
            return Ok(part);
        }
        let there: usize = {
            let mut pool = POOL.lock();
            pool.parts += 1;
            let slabs = pool.slabs.iter();
            let slabs = slabs.filter(|kept| kept.is_of(device, kind));
            slabs.map(|kept| kept.slab.bytes()).sum()
        };
        // From here on dropping it gives back what was counted.
        let mut part = Self {
            slab: None,
            range: 0..bytes,
            is_clean: false,
        };
        let ahead = bytes.max(kind.first()).max(there.min(MOST_AHEAD));
        let slab = match make_slab(device, kind, ahead) {
            Err(_) if ahead > bytes => make_slab(device, kind, bytes),
            made => made,
        };
        let slab = Arc::new(slab?);
        let mut gaps = Gaps::whole(slab.bytes());
        gaps.take(bytes);
        part.slab = Some(Arc::clone(&slab));
        POOL.lock().slabs.push(Kept {
            slab,
            device: device.number(),
            kind,
            gaps,
        });
        Ok(part)
    }

    /// Bytes of the longest part of a device's pool that can be had without a call of the driver.
    pub(super) fn longest(device: &Device, kind: SlabKind) -> usize {
        let pool = POOL.lock();
        let slabs = pool.slabs.iter();
        let slabs = slabs.filter(|kept| kept.is_of(device, kind));
        let gaps = slabs.flat_map(|kept| &kept.gaps.0);
        gaps.map(ExactSizeIterator::len).max().unwrap_or(0)
    }

    /// A part of a slab that is there, of at least `bytes` bytes.
    pub(super) fn of_what_is_there(
        device: &'static Device,
        kind: SlabKind,
        bytes: usize,
    ) -> Option<Self> {
        Self::find(device, kind, bytes.max(1).checked_next_multiple_of(GRAIN)?)
    }

    /// A part of a slab that is there; `bytes` is a multiple of [`GRAIN`].
    fn find(device: &'static Device, kind: SlabKind, bytes: usize) -> Option<Self> {
        let mut pool = POOL.lock();
        let slabs = pool.slabs.iter_mut();
        let mut slabs = slabs.filter(|kept| kept.is_of(device, kind));
        let (slab, range) = slabs.find_map(|kept| {
            let range = kept.gaps.take(bytes)?;
            Some((Arc::clone(&kept.slab), range))
        })?;
        pool.parts += 1;
        Some(Self {
            slab: Some(slab),
            range,
            is_clean: false,
        })
    }

    pub(super) fn slab(&self) -> &Slab {
        self.slab
            .as_ref()
            .expect("it has one when it is handed out")
    }

    /// It may be handed out again when it is dropped. Otherwise it stays out of use while its slab lives: a stream that
    /// was given up may still write there.
    pub(super) fn set_clean(&mut self) {
        self.is_clean = true;
    }
}

impl Drop for SlabPart {
    fn drop(&mut self) {
        if is_forked() {
            // The lock may be held by a thread that is not here.
            return;
        }
        let unused = {
            let mut pool = POOL.lock();
            let own = self.slab.as_ref();
            let of = |kept: &&mut Kept| own.is_some_and(|own| Arc::ptr_eq(own, &kept.slab));
            if self.is_clean
                && let Some(kept) = pool.slabs.iter_mut().find(of)
            {
                kept.gaps.give_back(self.range.clone());
            }
            pool.parts -= 1;
            match pool.parts {
                0 => std::mem::take(&mut pool.slabs),
                _ => Vec::new(),
            }
        };
        // Without the lock: the driver may wait.
        drop(unused);
    }
}

/// The free parts of a slab: ranges in order, none touching the next.
struct Gaps(Vec<Range<usize>>);

impl Gaps {
    fn whole(bytes: usize) -> Self {
        let whole = std::iter::once(0..bytes);
        Self(whole.collect())
    }

    fn take(&mut self, bytes: usize) -> Option<Range<usize>> {
        let at = self.0.iter().position(|gap| gap.len() >= bytes)?;
        let gap = &mut self.0[at];
        let taken = gap.start..gap.start + bytes;
        gap.start += bytes;
        if gap.start == gap.end {
            self.0.remove(at);
        }
        Some(taken)
    }

    fn give_back(&mut self, range: Range<usize>) {
        let at = self.0.partition_point(|gap| gap.start < range.start);
        self.0.insert(at, range);
        for at in [at, at.saturating_sub(1)] {
            if self
                .0
                .get(at + 1)
                .is_some_and(|next| next.start == self.0[at].end)
            {
                self.0[at].end = self.0.remove(at + 1).end;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_taken_and_join_again() {
        let mut gaps = Gaps::whole(100);
        let parts = [10, 30, 20, 40].map(|bytes| gaps.take(bytes).unwrap());
        assert_eq!(parts, [0..10, 10..40, 40..60, 60..100]);
        assert_eq!(gaps.take(1), None);
        let [a, b, c, d] = parts;
        gaps.give_back(b);
        gaps.give_back(d);
        assert_eq!(gaps.0, [10..40, 60..100]);
        assert_eq!(gaps.take(35), Some(60..95));
        gaps.give_back(c);
        assert_eq!(gaps.0, [10..60, 95..100]);
        gaps.give_back(60..95);
        gaps.give_back(a);
        assert_eq!(gaps.0, Gaps::whole(100).0);
    }
}
