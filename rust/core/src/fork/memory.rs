//! The memory of this process that other processes have mapped too, and what a forked child has in its place.
//!
//! A child inherits such mappings as they are: it would write its parent's gradients, and move the words by which its parent
//! and the peers hand messages to each other. So every one is entered here, and before `fork` returns in the child, memory of
//! the child's own takes its place, at the same addresses.
//!
//! Of the heap that is a private mapping of the same file, which costs nothing until it is written: what the child writes,
//! it alone sees. A page that it has not written goes on showing what the parent, or a peer, writes there after the fork.
//! A snapshot would need a copy of all that is in the heap at every fork, since neither the parent nor the peers could go on
//! writing to the pages that they share with each other otherwise. Everything else the child has no use of, and gets zeros.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use rustix::io::Result;
use rustix::mm::{self, MapFlags, ProtFlags};

use super::{PerProcess, enter};
use crate::locks::Mutex;

/// The replacement of shared memory in a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InChild {
    /// The same bytes, until it writes them: those of this file from here on. The file stays open for as long as the mapping
    /// is entered.
    Copy { file: RawFd, from: u64 },
    /// Zeros.
    Zeros,
}

impl InChild {
    /// A copy of what `file` holds from there on.
    pub(crate) fn copy_of(file: impl AsFd, from: u64) -> Self {
        Self::Copy {
            file: file.as_fd().as_raw_fd(),
            from,
        }
    }

    fn skipping(self, bytes: usize) -> Self {
        match self {
            Self::Copy { file, from } => Self::Copy {
                file,
                from: from + bytes as u64,
            },
            Self::Zeros => Self::Zeros,
        }
    }
}

/// The mappings of this process that it shares.
#[derive(Debug, Default)]
struct Mapped(Vec<(Range<usize>, InChild)>);

/// Those of this process.
static MAPPED: PerProcess<Mutex<Mapped>> = PerProcess::new(Mutex::default);

/// Maps `length` bytes of shared memory by `map`, which returns where, and enters them: no fork comes between the two.
///
/// # Errors
/// Those of `map`.
pub(crate) fn map_shared(
    length: usize,
    in_child: InChild,
    map: impl FnOnce() -> Result<*mut c_void>,
) -> Result<*mut c_void> {
    let _inside = enter();
    let mut mapped = MAPPED.lock();
    let place = map()?;
    mapped.add(addresses(place, length), in_child);
    Ok(place)
}

/// Calls `change`, after which `length` bytes from `place` on are shared no more: it unmaps them, or maps other memory there.
///
/// # Errors
/// Those of `change`, which has changed nothing then.
pub(crate) fn unshare(
    place: *mut c_void,
    length: usize,
    change: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let _inside = enter();
    let mut mapped = MAPPED.lock();
    change()?;
    mapped.remove(addresses(place, length));
    Ok(())
}

fn addresses(place: *mut c_void, length: usize) -> Range<usize> {
    let start = place.expose_provenance();
    start..start + length
}

impl Mapped {
    /// These addresses are shared from here on. Earlier entries do not cover them any more.
    fn add(&mut self, addresses: Range<usize>, in_child: InChild) {
        self.remove(addresses.clone());
        self.0.push((addresses, in_child));
    }

    /// These addresses are not shared any more.
    fn remove(&mut self, addresses: Range<usize>) {
        let mut rest = Vec::new();
        self.0.retain(|(range, in_child)| {
            if range.start >= addresses.end || addresses.start >= range.end {
                return true;
            }
            if range.start < addresses.start {
                rest.push((range.start..addresses.start, *in_child));
            }
            if range.end > addresses.end {
                let skipped = addresses.end - range.start;
                rest.push((addresses.end..range.end, in_child.skipping(skipped)));
            }
            false
        });
        self.0.append(&mut rest);
    }
}

/// In a child, before `fork` returns there: puts memory of its own in the place of all that was entered.
pub(super) fn replace_all() {
    // The gate keeps threads from having the lock at a fork.
    let parents = MAPPED.inherited().next().and_then(Mutex::try_lock);
    for (addresses, in_child) in parents.iter().flat_map(|mapped| &mapped.0) {
        replace(addresses, *in_child);
    }
}

fn replace(addresses: &Range<usize>, in_child: InChild) {
    let place = std::ptr::with_exposed_provenance_mut(addresses.start);
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    // SAFETY: what is entered is mapped, so this takes the place of a mapping of this library's. No other thread is in this
    // process. References to it find the same bytes, or belong to the parent's runtime, which is not used here. A refusal of
    // the kernel does no harm: the mapping is then as it was.
    let _ = unsafe {
        match in_child {
            InChild::Copy { file, from } => {
                let file = BorrowedFd::borrow_raw(file);
                mm::mmap(place, addresses.len(), access, flags, file, from)
            }
            InChild::Zeros => mm::mmap_anonymous(place, addresses.len(), access, flags),
        }
    };
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::super::tests::in_child;
    use super::*;

    const BYTES: usize = 1 << 16;

    /// Two words in different pages of a shared mapping that is entered.
    fn words(in_child: impl FnOnce(BorrowedFd<'_>) -> InChild) -> [&'static AtomicU32; 2] {
        let file = memfd_create("unisono test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, BYTES as u64).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let in_child = in_child(file.as_fd());
        let start = map_shared(BYTES, in_child, || {
            let place = std::ptr::null_mut();
            // SAFETY: a fresh mapping.
            unsafe { mm::mmap(place, BYTES, access, MapFlags::SHARED, &file, 0) }
        });
        let start = start.unwrap();
        std::mem::forget(file);
        // SAFETY: mapped for good, aligned, and used as atomics alone.
        [0, BYTES / 2].map(|at| unsafe { AtomicU32::from_ptr(start.cast::<u8>().add(at).cast()) })
    }

    #[test]
    fn what_a_child_writes_it_alone_sees() {
        let [first, second] = words(|file| InChild::copy_of(file, 0));
        first.store(1, Ordering::Relaxed);
        let seen = in_child(|| {
            let same = first.load(Ordering::Relaxed) == 1;
            first.store(2, Ordering::Relaxed);
            second.store(2, Ordering::Relaxed);
            same && first.load(Ordering::Relaxed) == 2
        });
        assert!(seen);
        let values = [first, second].map(|word| word.load(Ordering::Relaxed));
        assert_eq!(values, [1, 0]);
    }

    #[test]
    fn what_a_child_has_no_use_of_is_zero_there_and_reaches_nobody() {
        let [first, _] = words(|_| InChild::Zeros);
        first.store(1, Ordering::Relaxed);
        assert!(in_child(
            || first.fetch_add(5, Ordering::Relaxed) == 0 && first.load(Ordering::Relaxed) == 5
        ));
        assert_eq!(first.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_part_that_is_taken_out_leaves_what_is_around_it() {
        let copy = |from| InChild::Copy { file: 7, from };
        let mut mapped = Mapped::default();
        mapped.add(1000..5000, copy(0));
        mapped.add(9000..9500, InChild::Zeros);
        mapped.remove(2000..3000);
        mapped.0.sort_by_key(|(range, _)| range.start);
        let all = [
            (1000..2000, copy(0)),
            (3000..5000, copy(2000)),
            (9000..9500, InChild::Zeros),
        ];
        assert_eq!(mapped.0, all);
        mapped.add(2000..3000, copy(1000));
        mapped.remove(0..10_000);
        assert_eq!(mapped.0, []);
    }
}
