//! Who else uses the cores, as seen by a rank that gives its core away while it waits.
//!
//! To Linux's scheduler a thread that yields has had its turn, so one that computes gets a whole slice for it: some
//! milliseconds at every message. A thread that sleeps has used little, and is let in soon after it is woken. So beside
//! somebody who computes a rank yields once and then sleeps: it is often woken on another core, and this one is left to
//! him. Where the only yield is long, too, there is somebody on every core, and it sleeps at once. Beside ranks that do
//! nothing but wait for each other yields are the fastest, since nobody has to be woken.
//!
//! Measured with 4 ranks on 2 cores, microseconds for an all_reduce of 8 bytes and of 256 KiB of private memory:
//!
//! | | nobody else | a shell that loops | two of them |
//! |---|---|---|---|
//! | many yields | 6, 140 | 1400, 5800 | 4000, 16000 |
//! | one, then sleep | 5, 160 | 10, 270 | 1700, 8000 |
//! | sleep | 60, 700 | 58, 670 | 64, 1200 |
//!
//! The mind must be changed by all ranks of a host together: beside those that sleep one that yields has to wait as
//! beside somebody who computes. So whatever is found is asked again at the turn of a period ([`PERIODS`]) of the
//! clock that all of them read.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the monotonic clock, which all processes of a host read.
pub(super) type Moment = u64;

/// The time.
pub(super) fn now() -> Moment {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec as u64) * 1_000_000_000 + now.tv_nsec as u64
}

/// A yield that takes longer has gone to somebody who computes: what ranks do between two yields takes some tens of
/// microseconds for each that shares the core, a slice of the scheduler some milliseconds.
const LONG: u64 = 1_000_000;

/// No single yield says more than a slice does.
const SLICE: u64 = 4_000_000;

/// At the turn of which times what was found is asked again: soon, since it may have been somebody's few milliseconds,
/// and less often where the answer has been the same before, since it costs a slice or two.
const PERIODS: [u64; 3] = [10_000_000, 40_000_000, 160_000_000];

/// What a rank has found.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Company {
    kind: Kind,
    /// What it was until it was asked again.
    before: Kind,
    /// When the newer of them was found, or it was asked again.
    since: Moment,
    /// Which of the periods.
    period: usize,
    /// How long the core is away in long yields, on average over the last yields: nanoseconds.
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
    /// Over how many yields is averaged, and which average says that it is worse: two long ones of many; where a wait
    /// has one yield only, two of a few.
    const fn limit(self) -> (u64, u64) {
        match self {
            Self::Ranks => (32, 150_000),
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

impl Company {
    /// How often a wait may yield before it sleeps, if it would do so `usual` times beside ranks.
    #[inline]
    pub(super) fn yields(&mut self, usual: u32, now: impl FnOnce() -> Moment) -> u32 {
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
        let period = PERIODS[self.period];
        if now / period != self.since / period {
            (self.before, self.kind, self.since) = (self.kind, Kind::Ranks, now);
            // One long yield tells that it is as before.
            self.away = Kind::Ranks.limit().1 / 4 * 3;
        }
    }

    /// A yield began and ended then.
    #[inline]
    pub(super) fn note(&mut self, given: Moment, now: Moment) {
        let away = match now.saturating_sub(given) {
            short if short < LONG => 0,
            long => long.min(SLICE),
        };
        if away == 0 && self.away == 0 {
            return;
        }
        let (averaged, most) = self.kind.limit();
        self.away = (self.away * (averaged - 1) + away) / averaged;
        if self.away > most {
            self.grow_worse(now);
        }
    }

    fn grow_worse(&mut self, now: Moment) {
        let is_as_before =
            self.before != Kind::Ranks && now.saturating_sub(self.since) < PERIODS[self.period];
        if is_as_before {
            self.kind = self.before;
            self.period = (self.period + 1).min(PERIODS.len() - 1);
        } else {
            self.kind = self.kind.worse();
            self.period = 0;
        }
        (self.before, self.since, self.away) = (Kind::Ranks, now, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Moment = 1_000_000;
    const USUAL: u32 = 1000;

    /// A rank's waits, one after the other.
    struct Waits {
        company: Company,
        now: Moment,
    }

    impl Waits {
        fn new() -> Self {
            Self {
                company: Company::default(),
                now: 1_000 * MILLI,
            }
        }

        fn yields(&mut self) -> u32 {
            self.company.yields(USUAL, || self.now)
        }

        /// Waits whose first yields are so long, where there are any; how many there were until it changed its mind.
        fn until_other(&mut self, away: Moment) -> usize {
            let before = self.yields();
            (1..)
                .find(|_| {
                    assert!(self.yields() > 0);
                    self.company.note(self.now, self.now + away);
                    self.now += away;
                    self.yields() != before
                })
                .expect("a number")
        }
    }

    #[test]
    fn ranks_and_a_single_delay_are_no_company() {
        let mut waits = Waits::new();
        for _ in 0..3 {
            waits.company.note(waits.now, waits.now + 20 * MILLI);
            for _ in 0..1000 {
                waits.company.note(waits.now, waits.now + LONG - 1);
                waits.now += LONG;
                assert_eq!(waits.yields(), USUAL);
            }
        }
    }

    #[test]
    fn who_loses_the_core_to_others_sleeps_soon_and_then_at_once() {
        let mut waits = Waits::new();
        assert_eq!(waits.until_other(3 * MILLI), 2);
        assert_eq!(waits.yields(), 1);
        assert_eq!(waits.until_other(3 * MILLI), 2);
        assert_eq!(waits.yields(), 0);
    }

    #[test]
    fn it_is_asked_again_at_the_same_time_by_all_and_less_often_when_the_answer_is_the_same() {
        let mut waits = Waits::new();
        waits.until_other(3 * MILLI);
        waits.until_other(3 * MILLI);
        for period in [PERIODS[0], PERIODS[1], PERIODS[2], PERIODS[2]] {
            let turn = (waits.now / period + 1) * period;
            waits.now = turn - 1;
            assert_eq!(waits.yields(), 0);
            waits.now = turn;
            assert_eq!(waits.yields(), USUAL);
            assert_eq!(waits.until_other(3 * MILLI), 1);
            assert_eq!(waits.yields(), 0);
        }
    }

    #[test]
    fn what_has_gone_is_forgotten() {
        let mut waits = Waits::new();
        waits.until_other(3 * MILLI);
        waits.until_other(3 * MILLI);
        waits.now += PERIODS[0];
        for _ in 0..1000 {
            assert_eq!(waits.yields(), USUAL);
            waits.company.note(waits.now, waits.now + 1000);
        }
        // Much later it is found as at first.
        waits.now += PERIODS[2];
        assert_eq!(waits.until_other(3 * MILLI), 2);
        assert_eq!(waits.yields(), 1);
    }
}
