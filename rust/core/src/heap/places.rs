//! Which bytes of a range are free: pure bookkeeping, kept outside the memory it speaks of, so that pages of the range
//! are touched by their users alone.
//!
//! Best fit, and of equals the lowest: an ordered set of free runs by size finds the place, an ordered map by offset
//! joins a freed run with its neighbours. Both are logarithmic, which suits a few thousand blocks that are each worth
//! a system call; a heap of small objects would want size classes.

use std::collections::{BTreeMap, BTreeSet};

/// The free runs of `0..length`.
#[derive(Debug)]
pub(super) struct Places {
    length: usize,
    free: usize,
    /// Offset to length. No two runs touch.
    runs: BTreeMap<usize, usize>,
    /// `(length, offset)` of the same runs.
    sizes: BTreeSet<(usize, usize)>,
}

impl Places {
    /// All of `0..length` is free.
    pub(super) fn new(length: usize) -> Self {
        let mut places = Self {
            length,
            free: 0,
            runs: BTreeMap::new(),
            sizes: BTreeSet::new(),
        };
        places.put(0, length);
        places
    }

    /// Takes `length` bytes at a multiple of `align` (a power of two) and says where.
    pub(super) fn take(&mut self, length: usize, align: usize) -> Option<usize> {
        debug_assert!(length > 0 && align.is_power_of_two());
        // The first run that is long enough nearly always is the one: only an alignment above that of the run's
        // start can pass it over, and a run of `length + align` bytes passes none.
        let (size, start, at) = self.sizes.range((length, 0)..).find_map(|&(size, start)| {
            let at = start.checked_next_multiple_of(align)?;
            (at - start <= size - length).then_some((size, start, at))
        })?;
        self.remove(start, size);
        self.insert(start, at - start);
        self.insert(at + length, start + size - (at + length));
        Some(at)
    }

    /// Gives `at..at + length`, which was taken, back.
    pub(super) fn put(&mut self, at: usize, length: usize) {
        let (mut start, mut end) = (at, at + length);
        debug_assert!(end <= self.length);
        if let Some((&before, &size)) = self.runs.range(..at).next_back() {
            debug_assert!(before + size <= at, "{at} was free already");
            if before + size == at {
                self.remove(before, size);
                start = before;
            }
        }
        if let Some((&after, &size)) = self.runs.range(at..).next() {
            debug_assert!(end <= after, "{after} was free already");
            if end == after {
                self.remove(after, size);
                end += size;
            }
        }
        self.insert(start, end - start);
    }

    /// Whether nothing is taken.
    pub(super) fn is_untouched(&self) -> bool {
        self.free == self.length
    }

    fn insert(&mut self, start: usize, size: usize) {
        if size > 0 {
            self.runs.insert(start, size);
            self.sizes.insert((size, start));
            self.free += size;
        }
    }

    fn remove(&mut self, start: usize, size: usize) {
        self.runs.remove(&start);
        self.sizes.remove(&(size, start));
        self.free -= size;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_best_fit_is_the_smallest_run_that_is_long_enough() {
        let mut places = Places::new(1000);
        let taken: Vec<_> = [100, 10, 300, 10, 200, 10, 370]
            .map(|length| (places.take(length, 1).unwrap(), length))
            .into();
        assert_eq!(places.take(1, 1), None);
        for index in [0, 2, 4] {
            places.put(taken[index].0, taken[index].1);
        }
        assert_eq!(places.take(150, 1), Some(taken[4].0));
        assert_eq!(places.take(100, 1), Some(taken[0].0));
        assert_eq!(places.take(301, 1), None);
    }

    #[test]
    fn an_alignment_passes_over_runs_that_cannot_hold_it() {
        let mut places = Places::new(4096 + 64);
        let head = places.take(64, 64).unwrap();
        assert_eq!(head, 0);
        assert_eq!(places.take(4096, 4096), None);
        places.put(head, 64);
        assert_eq!(places.take(64, 4096), Some(0));
        assert_eq!(places.take(64, 4096), Some(4096));
        assert_eq!(places.take(4033, 64), None);
        assert_eq!(places.take(4032, 64), Some(64));
        assert_eq!(places.free, 0);
    }

    #[derive(Clone, Debug)]
    enum Call {
        Take(usize, u32),
        Put(usize),
    }

    fn calls() -> impl Strategy<Value = Vec<Call>> {
        let call = prop_oneof![
            (1_usize..400, 0_u32..8).prop_map(|(length, shift)| Call::Take(length, shift)),
            any::<usize>().prop_map(Call::Put),
        ];
        proptest::collection::vec(call, 1..200)
    }

    proptest! {
        /// Against a model that marks every byte.
        #[test]
        fn what_is_taken_is_aligned_and_disjoint_and_what_is_given_back_joins(calls in calls()) {
            const LENGTH: usize = 2000;
            let mut places = Places::new(LENGTH);
            let mut marked = vec![false; LENGTH];
            let mut taken: Vec<(usize, usize)> = Vec::new();
            for call in calls {
                match call {
                    Call::Take(length, shift) => {
                        let align = 1 << shift;
                        let fits = |at: &usize| {
                            at + length <= LENGTH && !marked[*at..at + length].contains(&true)
                        };
                        let possible = (0..LENGTH).step_by(align).any(|at| fits(&at));
                        match places.take(length, align) {
                            Some(at) => {
                                prop_assert!(at % align == 0 && fits(&at));
                                marked[at..at + length].fill(true);
                                taken.push((at, length));
                            }
                            None => prop_assert!(!possible),
                        }
                    }
                    Call::Put(index) if !taken.is_empty() => {
                        let (at, length) = taken.swap_remove(index % taken.len());
                        marked[at..at + length].fill(false);
                        places.put(at, length);
                    }
                    Call::Put(_) => {}
                }
                let free = marked.iter().filter(|taken| !**taken).count();
                prop_assert_eq!(places.free, free);
                // Neighbouring free bytes are in one run.
                let starts = (0..LENGTH).filter(|&at| !marked[at] && (at == 0 || marked[at - 1]));
                prop_assert_eq!(places.runs.len(), starts.count());
                prop_assert_eq!(places.runs.len(), places.sizes.len());
                prop_assert_eq!(places.is_untouched(), taken.is_empty());
            }
        }
    }
}
