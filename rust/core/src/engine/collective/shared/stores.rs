//! Whether what ranks write to their windows stays in their caches, or goes past them to memory.
//!
//! Between cores that share a cache the reader finds it there. Between cores that share none (of two sockets, or of two
//! parts of one chip) each line is fetched out of the writer's own cache, one by one, while memory is read ahead: there an
//! operation takes a third of the time if the writer passes its caches by.
//!
//! Nothing tells which cores those are. A virtual machine shows one cache where there are two, and systems move processes
//! between cores. So rank 0 tries both ways, for each collective and length by itself, takes the faster one, and tries the
//! other again after more and more operations. It says what it does in its window, in a word for each collective with one
//! bit for each length, and the others do likewise. One that looks too early does as before, which is right as well: it is each rank's own affair
//! how it writes.

use std::time::Duration;

use crate::reduce::Streaming;

/// Operations whose times are compared; the fastest of them counts.
const SAMPLES: u32 = 4;
/// Operations after a change that do not count: the others may not have seen it.
const SETTLING: u32 = 1;
/// After how many operations the other way is tried again: at first, and at most.
const SOON: u32 = 32;
const LATE: u32 = 4096;
/// What the other way has to save to be taken.
const GAIN: f64 = 0.1;

/// What to do with operations of about one length.
#[derive(Clone, Copy, Debug)]
struct Habit {
    streams: bool,
    /// The other way is being tried.
    tries: bool,
    /// Operations since the way was last changed.
    since: u32,
    /// The fastest of the last ones on the way that is kept to, and of those on the other.
    kept: Duration,
    tried: Duration,
    /// After how many operations the other way is tried.
    until: u32,
}

impl Default for Habit {
    fn default() -> Self {
        Self {
            streams: false,
            tries: false,
            since: 0,
            kept: Duration::MAX,
            tried: Duration::MAX,
            until: SETTLING + SAMPLES,
        }
    }
}

impl Habit {
    fn now(&self) -> bool {
        self.streams != self.tries
    }

    /// An operation has taken so long. Returns whether the way changes for good.
    fn note(&mut self, taken: Duration) -> bool {
        self.since += 1;
        if self.since <= SETTLING {
            return false;
        }
        if self.tries {
            self.tried = self.tried.min(taken);
            return self.since == SETTLING + SAMPLES && self.decide();
        }
        // Of the last ones: what came long ago says nothing.
        if self.since + SAMPLES > self.until {
            self.kept = self.kept.min(taken);
        }
        if self.since >= self.until {
            (self.tries, self.since, self.tried) = (true, 0, Duration::MAX);
        }
        false
    }

    /// The trial is over.
    fn decide(&mut self) -> bool {
        let better = self.tried.as_secs_f64() < self.kept.as_secs_f64() * (1.0 - GAIN);
        self.streams ^= better;
        self.until = match better {
            true => SOON,
            false => (2 * self.until).clamp(SOON, LATE),
        };
        (self.tries, self.since, self.kept) = (false, 0, Duration::MAX);
        better
    }
}

/// One bit for each length, in powers of two: set where what is written goes past the caches.
pub(super) type Mask = u64;

/// The lengths that are told apart.
const LENGTHS: usize = Mask::BITS as usize;

/// How the ranks write to their windows in one collective.
#[derive(Debug)]
pub(super) struct Stores {
    /// By length. Rank 0's alone mean something.
    habits: [Habit; LENGTHS],
    mask: Mask,
}

impl Default for Stores {
    fn default() -> Self {
        Self {
            habits: [Habit::default(); LENGTHS],
            mask: 0,
        }
    }
}

impl Stores {
    /// What rank 0 says.
    pub(super) fn mask(&self) -> Mask {
        self.mask
    }

    /// An operation on so many bytes has taken so long.
    pub(super) fn note(&mut self, bytes: usize, taken: Duration) {
        let length = length(bytes);
        let habit = &mut self.habits[length];
        let (kept, tried) = (habit.kept, habit.tried);
        if habit.note(taken) {
            tracing::debug!(
                bytes,
                past_the_caches = habit.streams,
                before = ?kept,
                now = ?tried.min(taken),
                "changed the way in which operations of about this length write to windows"
            );
        }
        self.mask = self.mask & !(1 << length) | Mask::from(habit.now()) << length;
    }
}

/// The bit of an operation on so many bytes.
fn length(bytes: usize) -> usize {
    bytes.max(1).ilog2() as usize
}

/// What the mask says of an operation on so many bytes.
pub(super) fn way(mask: Mask, bytes: usize) -> Streaming {
    match mask >> length(bytes) & 1 {
        0 => Streaming::No,
        _ => Streaming::Yes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 300_000;

    /// How many of `count` operations stream, where they take so many microseconds then and otherwise.
    fn streamed(stores: &mut Stores, count: usize, streaming: u64, keeping: u64) -> usize {
        (0..count)
            .filter(|_| {
                let streams = way(stores.mask(), BYTES) == Streaming::Yes;
                let micros = if streams { streaming } else { keeping };
                stores.note(BYTES, Duration::from_micros(micros));
                streams
            })
            .count()
    }

    #[test]
    fn the_faster_way_is_taken_and_the_other_tried_seldom() {
        let mut stores = Stores::default();
        let trial = (SETTLING + SAMPLES) as usize;
        assert_eq!(streamed(&mut stores, trial, 30, 100), 0);
        assert!(streamed(&mut stores, 1000, 30, 100) > 930);
        // The cores are others now.
        assert!(streamed(&mut stores, 2000, 100, 30) < 1200);
        assert!(streamed(&mut stores, 10_000, 100, 30) < 60);
    }

    #[test]
    fn a_little_faster_is_not_enough() {
        let mut stores = Stores::default();
        assert!(streamed(&mut stores, 1000, 95, 100) < 40);
    }

    #[test]
    fn one_slow_operation_decides_nothing() {
        let mut stores = Stores::default();
        let mut disturbed = 0;
        for operation in 0..1000 {
            let streams = way(stores.mask(), BYTES) == Streaming::Yes;
            disturbed += usize::from(streams);
            let micros = if operation % 3 == 0 { 4000 } else { 100 };
            stores.note(BYTES, Duration::from_micros(micros));
        }
        assert!(disturbed < 60, "{disturbed}");
    }

    #[test]
    fn lengths_have_ways_of_their_own() {
        let mut stores = Stores::default();
        streamed(&mut stores, 20, 30, 100);
        assert_eq!(way(stores.mask(), BYTES), Streaming::Yes);
        assert_eq!(way(stores.mask(), BYTES * 4), Streaming::No);
        assert_eq!(way(stores.mask(), 0), Streaming::No);
        assert_eq!(way(u64::MAX, usize::MAX), Streaming::Yes);
    }
}
