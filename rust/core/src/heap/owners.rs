//! Which segment lies where in the region: a table with a row for each chunk of addresses, read without a lock.
//!
//! A segment is entered by the thread that maps it and struck out by the one that unmaps it, under the heap's lock. Any thread
//! may ask where an address lies, at any time, and for any address. The promises:
//!
//! - A thread that has been handed the address of a block in a way that orders memory finds the segment. A thread that
//!   has it in another way may find nothing, and then takes the memory for memory outside the heap, which is slower but
//!   right.
//! - A segment is never found longer than it is, so no access goes past its end. The length is written before the owner
//!   that leads to it, with release, and read after it, with acquire.
//! - While a segment is unmapped its old length or number may be found. Using its memory then is a mistake in any case.

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::sync::{AtomicU64, AtomicUsize};

/// Where a segment may begin; also the largest alignment a block can have.
pub(super) const CHUNK: usize = 64 << 20;

/// The table.
pub(super) struct Owners {
    /// Per chunk: the segment's number in the upper half and its first chunk in the lower, or 0.
    owners: Box<[AtomicU64]>,
    /// Per chunk: the length of the segment that begins there.
    lengths: Box<[AtomicUsize]>,
}

impl Owners {
    pub(super) fn new(chunks: usize) -> Self {
        Self {
            owners: (0..chunks).map(|_| AtomicU64::new(0)).collect(),
            lengths: (0..chunks).map(|_| AtomicUsize::new(0)).collect(),
        }
    }

    /// The number of chunks.
    pub(super) fn chunks(&self) -> usize {
        self.owners.len()
    }

    /// Whether a segment lies in one of these chunks.
    pub(super) fn any_in(&self, chunks: Range<usize>) -> bool {
        let mut owners = self.owners[chunks].iter();
        owners.any(|owner| owner.load(Ordering::Relaxed) != 0)
    }

    /// Enters segment `number` (not 0), `length` bytes long, in these chunks, which hold none.
    pub(super) fn enter(&self, number: u32, chunks: Range<usize>, length: usize) {
        self.lengths[chunks.start].store(length, Ordering::Relaxed);
        let owner = u64::from(number) << 32 | chunks.start as u64;
        for chunk in &self.owners[chunks] {
            chunk.store(owner, Ordering::Release);
        }
    }

    /// Strikes out what lies in these chunks.
    pub(super) fn strike(&self, chunks: Range<usize>) {
        for chunk in &self.owners[chunks] {
            chunk.store(0, Ordering::Release);
        }
    }

    /// The segment in which all of `at..at + bytes` lies, and where in it. `at` counts from the region's first address.
    #[inline]
    pub(super) fn locate(&self, at: usize, bytes: usize) -> Option<(u32, usize)> {
        let owner = self.owners.get(at / CHUNK)?.load(Ordering::Acquire);
        let (number, first) = ((owner >> 32) as u32, owner as u32 as usize);
        if number == 0 {
            return None;
        }
        let offset = at - first * CHUNK;
        let length = self.lengths[first].load(Ordering::Relaxed);
        let end = offset.checked_add(bytes)?;
        (end <= length).then_some((number, offset))
    }
}

/// Threads that map and threads that ask, under every interleaving and order that loom can produce.
#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::{AtomicUsize, CHUNK, Ordering, Owners};
    use crate::sync::model::explore;

    /// An address is handed over with this order on both sides, where 0 stands for none.
    fn hand_over(store: Ordering, load: Ordering, check: fn(Option<(u32, usize)>)) {
        explore(None, move || {
            let shared = Arc::new((Owners::new(2), AtomicUsize::new(0)));
            let mapper = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let (owners, address) = &*shared;
                    owners.enter(7, 0..2, CHUNK + 100);
                    address.store(CHUNK + 50, store);
                })
            };
            let (owners, address) = &*shared;
            let at = address.load(load);
            if at != 0 {
                check(owners.locate(at, 50));
            }
            mapper.join().unwrap();
        });
    }

    #[test]
    fn loom_an_address_that_was_handed_over_is_found() {
        hand_over(Ordering::Release, Ordering::Acquire, |found| {
            assert_eq!(found, Some((7, CHUNK + 50)));
        });
    }

    #[test]
    fn loom_an_address_from_nowhere_is_found_or_not() {
        hand_over(Ordering::Relaxed, Ordering::Relaxed, |found| {
            assert!(matches!(found, None | Some((7, _))), "{found:?}");
        });
    }

    /// A short segment takes the place of a long one.
    #[test]
    fn loom_no_segment_is_found_longer_than_it_is() {
        explore(None, || {
            let owners = Arc::new(Owners::new(2));
            owners.enter(1, 0..2, 2 * CHUNK);
            let mapper = {
                let owners = Arc::clone(&owners);
                thread::spawn(move || {
                    owners.strike(0..2);
                    owners.enter(2, 0..1, 100);
                })
            };
            let beyond = owners.locate(50, 100);
            assert!(matches!(beyond, None | Some((1, 50))), "{beyond:?}");
            let within = owners.locate(50, 50);
            assert!(matches!(within, None | Some((1 | 2, 50))), "{within:?}");
            mapper.join().unwrap();
        });
    }

    #[test]
    fn loom_what_lies_beside_is_found_throughout() {
        explore(None, || {
            let owners = Arc::new(Owners::new(2));
            owners.enter(3, 1..2, 64);
            let mapper = {
                let owners = Arc::clone(&owners);
                thread::spawn(move || {
                    owners.enter(1, 0..1, CHUNK);
                    owners.strike(0..1);
                    owners.enter(2, 0..1, 10);
                })
            };
            assert_eq!(owners.locate(CHUNK + 4, 60), Some((3, 4)));
            assert_eq!(owners.locate(CHUNK + 4, 61), None);
            mapper.join().unwrap();
        });
    }
}
