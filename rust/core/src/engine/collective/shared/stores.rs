//! Whether what ranks write to their windows stays in their caches, or goes past them to memory.
//!
//! Between cores that share a cache the reader finds it there. Between cores that share none (of two sockets, or of two
//! parts of one chip) each line is fetched out of the writer's own cache, one by one, while memory is read ahead: there an
//! operation takes a third of the time if the writer passes its caches by.
//!
//! Nothing tells which cores those are. A virtual machine shows one cache where there are two, and systems move processes
//! between cores. So rank 0 tries the other way now and then, for each collective and length by itself. It says what it
//! does in its window, in a word for each collective with one bit for each length, and the others do likewise. One that
//! looks too early does as before, which is right as well: it is each rank's own affair how it writes.
//!
//! On a machine that others use the time of one operation varies by more than the two ways differ. So a trial goes back and
//! forth between them, a few operations on each, and compares neighbours in time. It ends with the first pair
//! in which the other way is not faster, as most trials do; to be taken, the other way must be faster many times in a row.

use std::time::Duration;

use crate::reduce::Streaming;

/// Operations that go one way before the next goes the other, in a trial: the fastest of them counts.
const SAMPLES: u32 = 2;
/// Operations after a change that do not count: the others may not have seen it.
const SETTLING: u32 = 1;
/// How many pairs in a row must be won by the other way.
const PAIRS: u32 = 4;
/// The share of the time that the faster way has to save in each pair.
const GAIN: f64 = 0.1;
/// After how many operations there is a trial: at first, after another one at the least, and at most.
const FIRST_TRIAL_AFTER: u32 = 4;
const SHORTEST_PAUSE: u32 = 32;
const LONGEST_PAUSE: u32 = 4096;

/// The way of operations of about one length, and the trials of the other way.
#[derive(Clone, Copy, Debug)]
struct Habit {
    streams: bool,
    /// The next operation goes the other way.
    tries: bool,
    /// Pairs that the other way has won in the trial that is going on; `None` between trials.
    won: Option<u32>,
    /// Operations since the trial began or ended, or since the way last changed in it.
    since: u32,
    /// The fastest operation since then, and the fastest on the way that is kept to just before.
    fastest: Duration,
    kept: Duration,
    /// Operations from one trial to the next.
    pause: u32,
}

impl Default for Habit {
    fn default() -> Self {
        Self {
            streams: false,
            tries: false,
            won: None,
            since: 0,
            fastest: Duration::MAX,
            kept: Duration::MAX,
            pause: FIRST_TRIAL_AFTER,
        }
    }
}

impl Habit {
    fn now(&self) -> bool {
        self.streams != self.tries
    }

    /// An operation has taken the time `taken`. Returns whether the way changes for good.
    fn note(&mut self, taken: Duration) -> bool {
        self.since += 1;
        let Some(won) = self.won else {
            if self.since >= self.pause {
                self.won = Some(0);
                self.turn(false);
            }
            return false;
        };
        if self.since > SETTLING {
            self.fastest = self.fastest.min(taken);
        }
        if self.since < SETTLING + SAMPLES {
            return false;
        }
        if !self.tries {
            self.kept = self.fastest;
            self.turn(true);
            return false;
        }
        let wins = self.fastest.as_secs_f64() < self.kept.as_secs_f64() * (1.0 - GAIN);
        match wins {
            true if won + 1 < PAIRS => {
                self.won = Some(won + 1);
                self.turn(false);
            }
            _ => self.end(wins),
        }
        wins && self.won.is_none()
    }

    /// The next operations of a trial go the other way, or the usual one.
    fn turn(&mut self, tries: bool) {
        (self.tries, self.since, self.fastest) = (tries, 0, Duration::MAX);
    }

    /// The trial is over.
    fn end(&mut self, other_is_faster: bool) {
        self.streams ^= other_is_faster;
        self.pause = match other_is_faster {
            true => SHORTEST_PAUSE,
            false => (2 * self.pause).clamp(SHORTEST_PAUSE, LONGEST_PAUSE),
        };
        self.won = None;
        self.turn(false);
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
    /// The mask that rank 0 publishes.
    pub(super) fn mask(&self) -> Mask {
        self.mask
    }

    /// An operation on `bytes` bytes has taken the time `taken`.
    pub(super) fn note(&mut self, bytes: usize, taken: Duration) {
        let length = length(bytes);
        let habit = &mut self.habits[length];
        let fastest = habit.fastest.min(taken);
        if habit.note(taken) {
            tracing::debug!(
                bytes,
                past_the_caches = habit.streams,
                before = ?habit.kept,
                now = ?fastest,
                "changed the way in which operations of about this length write to windows"
            );
        }
        self.mask = self.mask & !(1 << length) | Mask::from(habit.now()) << length;
    }
}

/// The bit of an operation on `bytes` bytes.
fn length(bytes: usize) -> usize {
    bytes.max(1).ilog2() as usize
}

/// The way that the mask gives for an operation on `bytes` bytes.
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

    /// How many of `count` operations stream, where they take `streaming` microseconds then and `keeping` otherwise.
    fn streamed(stores: &mut Stores, count: usize, streaming: u64, keeping: u64) -> usize {
        streamed_beside_others(stores, count, streaming, keeping, || 1.0)
    }

    /// The same where each takes `noise` times as long.
    fn streamed_beside_others(
        stores: &mut Stores,
        count: usize,
        streaming: u64,
        keeping: u64,
        mut noise: impl FnMut() -> f64,
    ) -> usize {
        (0..count)
            .filter(|_| {
                let streams = way(stores.mask(), BYTES) == Streaming::Yes;
                let micros = if streams { streaming } else { keeping };
                let taken = Duration::from_micros(micros).mul_f64(noise());
                stores.note(BYTES, taken);
                streams
            })
            .count()
    }

    #[test]
    fn the_faster_way_is_taken_and_the_other_tried_seldom() {
        let mut stores = Stores::default();
        let before = (FIRST_TRIAL_AFTER + SETTLING + SAMPLES) as usize;
        assert_eq!(streamed(&mut stores, before, 30, 100), 0);
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
    fn a_trial_of_the_slower_way_is_short() {
        let mut stores = Stores::default();
        assert_eq!(streamed(&mut stores, 30, 130, 100), 3);
        assert!(streamed(&mut stores, 1000, 130, 100) <= 5 * 3);
    }

    /// Operations that take up to three times as long as the shortest, as beside other programs.
    #[test]
    fn the_slower_way_is_not_taken_by_chance() {
        for seed in 1..=100_u64 {
            let mut state = seed;
            let noise = || {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(seed);
                1.0 + 2.0 * (state >> 33) as f64 / f64::from(1_u32 << 31)
            };
            let mut stores = Stores::default();
            let streamed = streamed_beside_others(&mut stores, 2000, 150, 100, noise);
            assert!(streamed < 150, "{streamed} of 2000, seed {seed}");
        }
    }

    #[test]
    fn one_slow_operation_decides_nothing() {
        let mut stores = Stores::default();
        let mut operation = 0;
        let noise = || {
            operation += 1;
            if operation % 3 == 0 { 40.0 } else { 1.0 }
        };
        let disturbed = streamed_beside_others(&mut stores, 1000, 100, 100, noise);
        assert!(disturbed < 60, "{disturbed}");
    }

    #[test]
    fn lengths_have_ways_of_their_own() {
        let mut stores = Stores::default();
        streamed(&mut stores, 50, 30, 100);
        assert_eq!(way(stores.mask(), BYTES), Streaming::Yes);
        assert_eq!(way(stores.mask(), BYTES * 4), Streaming::No);
        assert_eq!(way(stores.mask(), 0), Streaming::No);
        assert_eq!(way(u64::MAX, usize::MAX), Streaming::Yes);
    }
}
