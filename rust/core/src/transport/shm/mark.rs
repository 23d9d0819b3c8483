//! The mark of a process: random bytes in memory of its own. A reader of that memory knows by them that it is still the memory
//! it means.
//!
//! `process_vm_readv` names a process by its number. That may be another process's by then; and the process may have
//! executed another program, which keeps the number, and the pidfd, and lies at the same addresses where these are not
//! randomised. But all that one call reads, it reads in the memory of one program: the kernel looks that up once. So each call
//! reads the mark first, and then what it is for; what comes with the right mark is the right program's. Neither a program that
//! is executed nor a forked child has the mark: the kernel gives the one new memory, and the other a page of zeros.

use std::ptr::{self, NonNull};

use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use crate::fork::PerProcess;
use crate::heap::page;

/// Bytes of a mark.
pub(super) const BYTES: usize = 16;

/// Where a process has its mark, and what it is. All zeros: it has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) address: u64,
    pub(super) bytes: [u64; BYTES / 8],
}

impl Mark {
    /// This process's. `None` where the system cannot keep it from forked children (before Linux 4.14), or has no memory.
    pub(super) fn own() -> Option<Self> {
        static OWN: PerProcess<Option<Mark>> = PerProcess::new(Mark::make);
        *OWN
    }

    fn make() -> Option<Self> {
        let mut bytes = [0; BYTES];
        getrandom::fill(&mut bytes).ok()?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping touches no existing memory.
        let place =
            unsafe { mm::mmap_anonymous(ptr::null_mut(), page(), access, MapFlags::PRIVATE) };
        let place: NonNull<[u8; BYTES]> = NonNull::new(place.ok()?.cast())?;
        // SAFETY: the mapping just made, which is written before anything else knows of it, and stays for good.
        unsafe {
            place.write(bytes);
            mm::madvise(place.as_ptr().cast(), page(), Advice::LinuxWipeOnFork).ok()?;
        }
        Some(Self {
            address: place.as_ptr().expose_provenance() as u64,
            bytes: words(bytes),
        })
    }
}

/// Bytes of a mark as they were read.
pub(super) fn words(bytes: [u8; BYTES]) -> [u64; BYTES / 8] {
    let (words, _) = bytes.as_chunks::<8>();
    [0, 1].map(|at| u64::from_ne_bytes(words[at]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fork::tests::in_child;

    #[test]
    fn a_child_does_not_have_its_parents_mark() {
        let own = Mark::own().unwrap();
        let there = ptr::with_exposed_provenance::<[u64; 2]>(own.address as usize);
        // SAFETY: mapped for good, and written no more.
        let read = || unsafe { there.read_volatile() };
        assert_eq!((read(), Mark::own()), (own.bytes, Some(own)));
        assert!(in_child(|| {
            let new = Mark::own();
            read() == [0; 2] && new.is_some_and(|new| new.bytes != own.bytes)
        }));
    }
}
