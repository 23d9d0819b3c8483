//! Detects that other programs compute on the cores of the ranks, from how long a yield takes.
//!
//! Linux's scheduler counts a yield as the end of a turn, so a program that computes on the same core then runs for a
//! whole time slice: some milliseconds for every message. A thread that sleeps has used little of its turn and runs soon
//! after it is woken. So next to a program that computes a rank yields once and then sleeps; the kernel often wakes it on
//! another core. Where that single yield is long as well, every core has such a program, and the rank sleeps at once.
//! Where only ranks share the cores, yielding is the fastest, since no thread has to be woken.
//!
//! Measured with each of the three alone, 4 ranks on 2 cores, microseconds for an all_reduce of 8 bytes and of 256 KiB of
//! private memory:
//!
//! | | no other program | one that computes | two of them |
//! |---|---|---|---|
//! | many yields | 6, 140 | 1400, 5800 | 4000, 16000 |
//! | one, then sleep | 5, 160 | 10, 270 | 1700, 8000 |
//! | sleep | 60, 700 | 58, 670 | 64, 1200 |
//!
//! All ranks of a host should wait alike. A rank that yields next to ranks that sleep waits for its core as if one of them
//! computed, and concludes that one does. So all ranks try yields again at the same time: when a [`PERIOD`] of the
//! monotonic clock begins, which they all read.

use nix::time::{ClockId, clock_gettime};

/// Nanoseconds of the monotonic clock, which all processes of a host read.
pub(crate) type Moment = u64;

/// The time.
pub(crate) fn now() -> Moment {
    // There always is one.
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |now| {
        (now.tv_sec() as u64) * 1_000_000_000 + now.tv_nsec() as u64
    })
}

/// A longer yield means that a program computes on this core: what ranks do between two yields takes some tens of
/// microseconds for each rank on the core, a time slice of the scheduler some milliseconds.
const SHORTEST_LOSS: u64 = 1_000_000;

/// A yield counts for no more than a time slice.
const TIME_SLICE: u64 = 4_000_000;

/// Yields are tried again when such a period begins. The other program may have computed for some milliseconds only; but
/// a try costs a time slice or two.
const PERIOD: u64 = 40_000_000;

/// A try has its result within this many periods; a later finding is a new one.
const ANSWER: u64 = 4;

/// How often the time until the next try doubles while the result stays the same: to 1.3 seconds. Calls that come every
/// two milliseconds then pay a time slice in one of three hundred, and not in one of twenty.
const MOST_PATIENCE: u32 = 5;

/// The findings of a rank.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Contention {
    kind: Kind,
    /// The kind until the try that is going on.
    before: Kind,
    /// The period in which `kind` last changed.
    since: u64,
    /// How many tries in a row have had the same result.
    patience: u32,
    /// How long the last yield of this wait took, if that was long.
    last: u64,
    /// The same on average over the last waits: nanoseconds.
    away: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    /// No other program, or ranks that wait as well.
    #[default]
    Ranks,
    /// A program computes on some core.
    Busy,
    /// Programs compute also on the cores on which ranks are woken.
    BusyEverywhere,
}

impl Kind {
    /// Over how many waits to average, and the average above which the next kind holds: three waits with long yields out
    /// of many; where a wait has one yield only, two out of a few.
    const fn limit(self) -> (u64, u64) {
        match self {
            Self::Ranks => (32, 300_000),
            Self::Busy | Self::BusyEverywhere => (4, 1_000_000),
        }
    }

    const fn worse(self) -> Self {
        match self {
            Self::Ranks => Self::Busy,
            Self::Busy | Self::BusyEverywhere => Self::BusyEverywhere,
        }
    }

    /// How a rank then waits, for the log.
    const fn way_to_wait(self) -> &'static str {
        match self {
            Self::Ranks => "yields, for long before it sleeps",
            Self::Busy => "yields once, then sleeps: a program computes on a core of the ranks",
            Self::BusyEverywhere => "sleeps at once: programs compute on every core",
        }
    }
}

impl Contention {
    /// How often a wait may yield before it sleeps, where it may do so `usual` times if only ranks share the cores.
    #[inline]
    pub(crate) fn yields(&mut self, usual: u32, now: impl FnOnce() -> Moment) -> u32 {
        if self.kind != Kind::Ranks {
            self.try_again(now());
        }
        match self.kind {
            Kind::Ranks => usual,
            Kind::Busy => usual.min(1),
            Kind::BusyEverywhere => 0,
        }
    }

    fn try_again(&mut self, now: Moment) {
        let period = now / PERIOD;
        if period >> self.patience != self.since >> self.patience {
            (self.before, self.kind, self.since) = (self.kind, Kind::Ranks, period);
            // One long yield is then enough to find that it is as before.
            self.away = Kind::Ranks.limit().1 / 4 * 3;
        }
    }

    /// A yield began and ended then.
    #[inline]
    pub(crate) fn note(&mut self, given: Moment, now: Moment) {
        self.last = match now.saturating_sub(given) {
            short if short < SHORTEST_LOSS => 0,
            long => long.min(TIME_SLICE),
        };
    }

    /// The wait has ended with the last yield that was noted. Long yields before that one do not count: a peer was late,
    /// and it may be a rank of this group that computes, which no way to wait makes faster.
    ///
    /// Returns how ranks wait from now on, in words, where that is a new finding.
    #[inline]
    pub(crate) fn end_wait(&mut self, now: impl FnOnce() -> Moment) -> Option<&'static str> {
        let last = std::mem::take(&mut self.last);
        if last == 0 && self.away == 0 {
            return None;
        }
        let (averaged, most) = self.kind.limit();
        self.away = (self.away * (averaged - 1) + last) / averaged;
        if self.away <= most {
            return None;
        }
        self.grow_worse(now());
        (self.patience == 0).then(|| self.kind.way_to_wait())
    }

    #[cold]
    fn grow_worse(&mut self, now: Moment) {
        let period = now / PERIOD;
        // A wait or two may have been lucky since the try began.
        let is_as_before = self.before != Kind::Ranks && period - self.since < ANSWER;
        (self.kind, self.patience) = if is_as_before {
            (self.before, MOST_PATIENCE.min(self.patience + 1))
        } else {
            (self.kind.worse(), 0)
        };
        (self.before, self.since, self.away) = (Kind::Ranks, period, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Moment = 1_000_000;
    const USUAL: u32 = 1000;

    /// A rank's waits, one after the other.
    struct Waits {
        contention: Contention,
        now: Moment,
        /// The findings, in words.
        told: Vec<&'static str>,
    }

    impl Waits {
        fn new() -> Self {
            Self {
                contention: Contention::default(),
                now: 1_000 * MILLI,
                told: Vec::new(),
            }
        }

        fn yields(&mut self) -> u32 {
            self.contention.yields(USUAL, || self.now)
        }

        /// A wait that ends after a yield of that length.
        fn wait(&mut self, away: Moment) {
            self.contention.note(self.now, self.now + away);
            self.now += away;
            self.told.extend(self.contention.end_wait(|| self.now));
        }

        /// Waits that each end after a yield of length `away`. Returns how many there were until the way to wait changed.
        fn until_other(&mut self, away: Moment) -> usize {
            let before = self.yields();
            (1..)
                .find(|_| {
                    assert!(self.yields() > 0);
                    self.wait(away);
                    self.yields() != before
                })
                .expect("a number")
        }
    }

    #[test]
    fn ranks_and_a_single_delay_are_no_contention() {
        let mut waits = Waits::new();
        for _ in 0..3 {
            waits.wait(20 * MILLI);
            for _ in 0..1000 {
                waits.wait(SHORTEST_LOSS - 1);
                assert_eq!(waits.yields(), USUAL);
            }
        }
    }

    #[test]
    fn a_late_peer_is_no_contention() {
        let mut waits = Waits::new();
        for _ in 0..100 {
            for _ in 0..10 {
                waits.contention.note(waits.now, waits.now + 4 * MILLI);
            }
            waits.wait(SHORTEST_LOSS - 1);
            assert_eq!(waits.yields(), USUAL);
        }
    }

    #[test]
    fn long_yields_make_a_rank_sleep_soon_and_then_at_once() {
        let mut waits = Waits::new();
        assert_eq!(waits.until_other(3 * MILLI), 4);
        assert_eq!(waits.yields(), 1);
        assert_eq!(waits.until_other(3 * MILLI), 2);
        assert_eq!(waits.yields(), 0);
        let findings = [Kind::Busy, Kind::BusyEverywhere].map(Kind::way_to_wait);
        assert_eq!(waits.told, findings);
    }

    #[test]
    fn all_ranks_try_yields_again_at_the_same_time() {
        let mut waits = Waits::new();
        waits.until_other(3 * MILLI);
        waits.until_other(3 * MILLI);
        // Ever less often, as long as it is as before.
        for apart in [1, 2, 4, 8, 16, 32, 32] {
            let turn = (waits.now / PERIOD / apart + 1) * apart * PERIOD;
            waits.now = turn - 1;
            assert_eq!(waits.yields(), 0);
            waits.now = turn;
            assert_eq!(waits.yields(), USUAL);
            assert_eq!(waits.until_other(3 * MILLI), 1);
            assert_eq!(waits.yields(), 0);
        }
        assert_eq!(waits.told.len(), 2, "the same finding is told once");
        // After a new finding the first try comes soon.
        waits.now += 32 * PERIOD;
        assert_eq!(waits.yields(), USUAL);
        waits.now += ANSWER * PERIOD;
        waits.until_other(3 * MILLI);
        waits.now += PERIOD;
        assert_eq!(waits.yields(), USUAL);
    }

    #[test]
    fn contention_that_has_ended_is_forgotten() {
        let mut waits = Waits::new();
        waits.until_other(3 * MILLI);
        waits.until_other(3 * MILLI);
        waits.now += PERIOD;
        for _ in 0..1000 {
            assert_eq!(waits.yields(), USUAL);
            waits.wait(1000);
        }
        // Much later it is found as at first.
        waits.now += ANSWER * PERIOD;
        assert_eq!(waits.until_other(3 * MILLI), 4);
        assert_eq!(waits.yields(), 1);
    }
}
