//! Exponential back-off: what has failed is tried again after 1, 3, 7, ... operations.
//!
//! All ranks count alike, since an operation is taken up when all before it have been decided
//! ([`SharedRun::advance`](super::run::SharedRun::advance)), and what makes an attempt fail is told to all of them. So
//! they agree on which operations make an attempt.

use std::time::Duration;

use crate::types::Collective;

/// The attempts at one thing.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Backoff {
    /// Failures, less those that a success has made up for.
    failures: u32,
    /// Operations that make no attempt.
    skip: u32,
}

impl Backoff {
    /// After how many failures the time to the next attempt grows no more.
    const MOST_FAILURES: u32 = 6;

    /// Whether this operation makes an attempt.
    fn attempts(&mut self) -> bool {
        let attempts = self.skip == 0;
        self.skip = self.skip.saturating_sub(1);
        attempts
    }

    /// An attempt has ended. Returns how many operations make none.
    fn note(&mut self, succeeded: bool) -> u32 {
        if succeeded {
            self.failures /= 2;
        } else {
            self.failures = (self.failures + 1).min(Self::MOST_FAILURES);
            self.skip = (1 << self.failures) - 1;
        }
        self.skip
    }
}

/// Agreements, by kinds and sizes of operations as far as 64 numbers tell them apart: whether a program's buffers lie in
/// the heap seldom changes from one call to the next of the same size.
#[derive(Debug)]
pub(super) struct Agreements([Backoff; 64]);

impl Agreements {
    fn of(&mut self, collective: Collective, count: usize) -> &mut Backoff {
        let both = (count as u64) << 4 | collective as u64 & 15;
        let mixed = both.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &mut self.0[(mixed >> 58) as usize]
    }

    /// Whether an operation on `count` elements tries to agree.
    pub(super) fn attempts(&mut self, collective: Collective, count: usize) -> bool {
        self.of(collective, count).attempts()
    }

    /// A round has ended. Returns how many operations of this size do without one.
    pub(super) fn note(&mut self, collective: Collective, count: usize, agreed: bool) -> u32 {
        self.of(collective, count).note(agreed)
    }
}

impl Default for Agreements {
    fn default() -> Self {
        Self([Backoff::default(); 64])
    }
}

/// How fast the windows are, and which operations avoid them.
///
/// Ranks that share cores meet in the windows for every chunk. Where another program computes on one of the cores, a rank
/// that yields at a meeting runs again when that program's time slice ends, a hundred times as long as a chunk takes.
/// Messages need fewer meetings. So a rank that has found the windows slow says so in its next proposal, and some
/// operations avoid them.
#[derive(Debug)]
pub(super) struct WindowSpeed {
    backoff: Backoff,
    /// This rank has found them slow and not said so.
    unreported: bool,
    /// A chunk takes tens of microseconds, and as many more for each rank on the same core; a time slice some
    /// milliseconds.
    slow: Duration,
    slow_per_rank: Duration,
}

impl Default for WindowSpeed {
    fn default() -> Self {
        Self {
            backoff: Backoff::default(),
            unreported: false,
            slow: Duration::from_micros(200),
            slow_per_rank: Duration::from_micros(20),
        }
    }
}

impl WindowSpeed {
    /// Windows that are never found slow.
    #[cfg(test)]
    pub(super) fn unlimited() -> Self {
        Self {
            slow: Duration::MAX,
            slow_per_rank: Duration::ZERO,
            ..Self::default()
        }
    }

    /// Whether this operation may go through them.
    pub(super) fn attempts(&mut self) -> bool {
        self.backoff.attempts()
    }

    /// An operation of `world` ranks has taken the time `chunk` for each chunk.
    pub(super) fn observe(&mut self, chunk: Duration, world: usize) {
        let limit = self
            .slow
            .saturating_add(self.slow_per_rank.saturating_mul(world as u32));
        self.unreported |= chunk > limit;
    }

    /// Whether this rank reports that they were slow, once.
    pub(super) fn report(&mut self) -> bool {
        std::mem::take(&mut self.unreported)
    }

    /// An operation goes through them, and some rank has reported that the one before was slow, or none has. Returns how
    /// many operations avoid them.
    pub(super) fn note(&mut self, reported: bool) -> u32 {
        self.backoff.note(!reported)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUM: Collective = Collective::AllReduce;

    /// The operations out of `count` that go through windows, which are slow as long as that holds.
    fn attempts(speed: &mut WindowSpeed, count: usize, is_slow: bool) -> Vec<usize> {
        (0..count)
            .filter(|_| {
                let attempts = speed.attempts();
                if attempts {
                    let reported = speed.report();
                    speed.note(reported);
                    let micros = if is_slow { 3000 } else { 80 };
                    speed.observe(Duration::from_micros(micros), 8);
                }
                attempts
            })
            .collect()
    }

    #[test]
    fn slow_windows_are_avoided_and_tried_again() {
        let mut speed = WindowSpeed::default();
        assert_eq!(attempts(&mut speed, 100, false).len(), 100);
        let slow = attempts(&mut speed, 60, true);
        assert_eq!(slow, [0, 1, 3, 7, 15, 31]);
        assert!(attempts(&mut speed, 2000, true).len() < 35);
        // Not at once, but for good.
        attempts(&mut speed, 600, false);
        assert_eq!(attempts(&mut speed, 100, false).len(), 100);
        assert_eq!(speed.backoff.failures, 0);
    }

    #[test]
    fn failures_make_agreements_rarer() {
        let mut agreements = Agreements::default();
        let mut asked = Vec::new();
        for operation in 0..300 {
            if agreements.attempts(SUM, 1000) {
                asked.push(operation);
                agreements.note(SUM, 1000, false);
            }
        }
        assert_eq!(asked, [0, 2, 6, 14, 30, 62, 126, 190, 254]);
        let next = (300..400).find(|_| agreements.attempts(SUM, 1000));
        assert_eq!(next, Some(318));
        assert!(agreements.attempts(Collective::Reduce, 1000));
        agreements.note(SUM, 1000, true);
        assert!(agreements.attempts(SUM, 1000) && agreements.attempts(SUM, 1000));
        assert!(agreements.attempts(SUM, 1001));
    }
}
