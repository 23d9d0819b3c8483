//! Which parts of a range are taken.

/// The free parts of a range, in order; none touches the next.
#[derive(Debug)]
pub(super) struct FreeRanges(Vec<(usize, usize)>);

impl FreeRanges {
    /// All of `begin..end`.
    pub(super) fn new(begin: usize, end: usize) -> Self {
        Self(vec![(begin, end)])
    }

    /// The beginning of `bytes` bytes that are free until now: of the first part that is long enough.
    pub(super) fn take(&mut self, bytes: usize) -> Option<usize> {
        let at = self
            .0
            .iter()
            .position(|(begin, end)| end - begin >= bytes)?;
        let (begin, end) = &mut self.0[at];
        let taken = *begin;
        *begin += bytes;
        if begin == end {
            self.0.remove(at);
        }
        Some(taken)
    }

    /// Gives back what [`FreeRanges::take`] gave.
    pub(super) fn give_back(&mut self, begin: usize, bytes: usize) {
        let at = self.0.partition_point(|part| part.0 < begin);
        self.0.insert(at, (begin, begin + bytes));
        if at + 1 < self.0.len() && self.0[at].1 == self.0[at + 1].0 {
            self.0[at].1 = self.0.remove(at + 1).1;
        }
        if at > 0 && self.0[at - 1].1 == self.0[at].0 {
            self.0[at - 1].1 = self.0.remove(at).1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::FreeRanges;

    proptest! {
        #[test]
        fn room_is_taken_once_and_comes_back_whole(
            steps in proptest::collection::vec((any::<bool>(), 1_usize..300), 1..200)
        ) {
            let mut room = FreeRanges::new(100, 1100);
            let mut taken: Vec<(usize, usize)> = Vec::new();
            for (takes, bytes) in steps {
                if !takes {
                    if let Some((at, bytes)) = taken.pop() {
                        room.give_back(at, bytes);
                    }
                } else if let Some(at) = room.take(bytes) {
                    prop_assert!(at >= 100 && at + bytes <= 1100);
                    let apart = |(other, length): &(usize, usize)| {
                        at + bytes <= *other || *other + *length <= at
                    };
                    prop_assert!(taken.iter().all(apart));
                    let place = bytes % (taken.len() + 1);
                    taken.insert(place, (at, bytes));
                }
            }
            for (at, bytes) in taken {
                room.give_back(at, bytes);
            }
            prop_assert_eq!(room.0, vec![(100, 1100)]);
        }
    }
}
