//! Who else uses the cores, as seen by a rank that gives its core away while it waits.
//!
//! To Linux's scheduler a thread that yields has had its turn, so one that computes gets a whole slice for it: some
//! milliseconds at every message. A thread that sleeps has used little, and is let in soon after it is woken. So beside
//! somebody who computes a rank yields once and then sleeps: it is often woken on another core, and this one is left to
//! him. Where the only yield is long, too, there is somebody on every core, and it sleeps at once. Beside ranks that do
//! nothing but wait for each other yields are the fastest, since nobody has to be woken.
//!
//! Measured with each of the three alone, 4 ranks on 2 cores, microseconds for an all_reduce of 8 bytes and of 256 KiB of
//! private memory:
//!
//! | | nobody else | a shell that loops | two of them |
//! |---|---|---|---|
//! | many yields | 6, 140 | 1400, 5800 | 4000, 16000 |
//! | one, then sleep | 5, 160 | 10, 270 | 1700, 8000 |
//! | sleep | 60, 700 | 58, 670 | 64, 1200 |
//!
//! All ranks of a host should be of one mind. One that yields has had its turn, those that sleep have not, so that it has
//! to wait for its core beside them as beside somebody who computes, and finds what it feared. So all ask again at the
//! same time, at the turn of a [`PERIOD`] of the clock that all of them read.

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

/// A yield that takes longer has gone to somebody who computes: what ranks do between two yields takes some tens of
/// microseconds for each that shares the core, a slice of the scheduler some milliseconds.
const LONG: u64 = 1_000_000;

/// No single yield says more than a slice does.
const SLICE: u64 = 4_000_000;

/// At the turn of which time what was found is asked again: it may have been somebody's few milliseconds, but to ask
/// costs a slice or two.
const PERIOD: u64 = 40_000_000;

/// Within how many periods the question is answered: what is found later is something new.
const ANSWER: u64 = 4;

/// How often the time until the next question doubles while the answer stays the same: to 1.3 seconds. Calls
/// that come every two milliseconds then pay a slice in one of three hundred, and not in one of twenty.
const MOST_PATIENCE: u32 = 5;

/// What a rank has found.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Contention {
    kind: Kind,
    /// What it was until it was asked again.
    before: Kind,
    /// In which period the newer of them was found, or it was asked again.
    since: u64,
    /// How often it was asked again in a row and found as before.
    patience: u32,
    /// How long the core was away in the last yield of this wait, if that was long.
    last: u64,
    /// The same on average over the last waits: nanoseconds.
    away: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    /// Nobody, or ranks that wait as well.
    #[default]
    Ranks,
    /// Somebody computes on some core.
    Busy,
    /// Somebody computes also where a rank is woken.
    BusyEverywhere,
}

impl Kind {
    /// Over how many waits is averaged, and which average says that it is worse: three with long yields of many; where a
    /// wait has one yield only, two of a few.
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
}

impl Contention {
    /// How often a wait may yield before it sleeps, if it would do so `usual` times beside ranks.
    #[inline]
    pub(crate) fn yields(&mut self, usual: u32, now: impl FnOnce() -> Moment) -> u32 {
        if self.kind != Kind::Ranks {
            self.ask_again(now());
        }
        match self.kind {
            Kind::Ranks => usual,
            Kind::Busy => usual.min(1),
            Kind::BusyEverywhere => 0,
        }
    }

    fn ask_again(&mut self, now: Moment) {
        let period = now / PERIOD;
        if period >> self.patience != self.since >> self.patience {
            (self.before, self.kind, self.since) = (self.kind, Kind::Ranks, period);
            // One wait tells that it is as before.
            self.away = Kind::Ranks.limit().1 / 4 * 3;
        }
    }

    /// A yield began and ended then.
    #[inline]
    pub(crate) fn note(&mut self, given: Moment, now: Moment) {
        self.last = match now.saturating_sub(given) {
            short if short < LONG => 0,
            long => long.min(SLICE),
        };
    }

    /// What was waited for has come, after such a yield. Where it has not come after a long one a peer is late, and may be
    /// who computes: that nobody gets round.
    #[inline]
    pub(crate) fn end_wait(&mut self, now: impl FnOnce() -> Moment) {
        let last = std::mem::take(&mut self.last);
        if last == 0 && self.away == 0 {
            return;
        }
        let (averaged, most) = self.kind.limit();
        self.away = (self.away * (averaged - 1) + last) / averaged;
        if self.away > most {
            self.grow_worse(now());
        }
    }

    fn grow_worse(&mut self, now: Moment) {
        let period = now / PERIOD;
        // A wait or two may have been lucky since the question.
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
    }

    impl Waits {
        fn new() -> Self {
            Self {
                contention: Contention::default(),
                now: 1_000 * MILLI,
            }
        }

        fn yields(&mut self) -> u32 {
            self.contention.yields(USUAL, || self.now)
        }

        /// A wait that ends after a yield of that length.
        fn wait(&mut self, away: Moment) {
            self.contention.note(self.now, self.now + away);
            self.now += away;
            self.contention.end_wait(|| self.now);
        }

        /// Waits whose first yields are so long, where there are any; how many there were until it changed its mind.
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
    fn ranks_and_a_single_delay_are_no_company() {
        let mut waits = Waits::new();
        for _ in 0..3 {
            waits.wait(20 * MILLI);
            for _ in 0..1000 {
                waits.wait(LONG - 1);
                assert_eq!(waits.yields(), USUAL);
            }
        }
    }

    #[test]
    fn a_late_peer_is_no_company() {
        let mut waits = Waits::new();
        for _ in 0..100 {
            for _ in 0..10 {
                waits.contention.note(waits.now, waits.now + 4 * MILLI);
            }
            waits.wait(LONG - 1);
            assert_eq!(waits.yields(), USUAL);
        }
    }

    #[test]
    fn who_loses_the_core_to_others_sleeps_soon_and_then_at_once() {
        let mut waits = Waits::new();
        assert_eq!(waits.until_other(3 * MILLI), 4);
        assert_eq!(waits.yields(), 1);
        assert_eq!(waits.until_other(3 * MILLI), 2);
        assert_eq!(waits.yields(), 0);
    }

    #[test]
    fn it_is_asked_again_at_the_same_time_by_all() {
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
        // What was found anew is asked again soon.
        waits.now += 32 * PERIOD;
        assert_eq!(waits.yields(), USUAL);
        waits.now += ANSWER * PERIOD;
        waits.until_other(3 * MILLI);
        waits.now += PERIOD;
        assert_eq!(waits.yields(), USUAL);
    }

    #[test]
    fn what_has_gone_is_forgotten() {
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
