//! How many stripes pay: measured, by what the kernel says of each connection.
//!
//! A connection's rate is the bytes that the peer's kernel has acknowledged, by the time in which some were on their way:
//! what the program does in between does not count. A sender measures its first connection, then 4 stripes, and keeps
//! those only if they are faster. If they are so much faster that each of them seems to be capped, it tries 8. The first
//! connection is measured only while bytes have been on their way for some time without a pause: what is soon through
//! has little to gain.
//!
//! A trial says what was true at its time: other traffic on the line, or messages of another kind, may have decided it. So
//! where a few stripes did not pay they are tried again after [`REST_BYTES`] bytes, and then ever more rarely.

use std::time::Duration;

use crate::transport::tcp::kernel::Traffic;

/// Bytes after which a rate is taken.
const SAMPLE_BYTES: u64 = 24 << 20;

/// During a trial of stripes the rate is also looked at after every `GLANCE_BYTES` bytes: the trial ends if the stripes carry
/// less than was carried before, and have been busy for at least `BRIEFLY_BUSY`. Where messages are short a whole sample is
/// hundreds of them.
const GLANCE_BYTES: u64 = 4 << 20;
const BRIEFLY_BUSY: Duration = Duration::from_millis(30);

/// The kernel counts time in ticks of some milliseconds, so a rate is taken over at least the time `LEAST_BUSY`, or over
/// `MOST_BYTES` bytes.
const LEAST_BUSY: Duration = Duration::from_millis(100);
const MOST_BYTES: u64 = 1 << 30;

/// Bytes that connections get to come up to speed.
const WARM_UP: u64 = 8 << 20;

/// A transfer that is through sooner says nothing of long messages: several connections save little of its time, and a trial
/// would disturb it.
const BRIEF_TRANSFER: Duration = Duration::from_millis(10);

/// Stripes that are tried first, and if those pay more than [`CAPPED_GAIN`].
const FEW_STRIPES: usize = 4;
const MANY_STRIPES: usize = 8;

/// Stripes must carry this many times as much. A smaller gain may be chance, and costs descriptors.
const LEAST_GAIN: f64 = 1.15;

/// Bytes that long messages send from a trial that did not pay to the next one: 32 MiB that are slower are little then. Each
/// further trial that did not pay multiplies the number by `MORE_REST`.
const REST_BYTES: u64 = 1 << 30;
const MORE_REST: u64 = 4;

/// From here on what bounds the rate is each connection, and more of them carry more.
const CAPPED_GAIN: f64 = 2.0;

/// Where the measuring stands.
#[derive(Debug)]
pub(in crate::transport::tcp) struct Pace {
    stage: Stage,
    /// How many times stripes did not pay.
    failures: u8,
    /// Bytes sent in this stage, the numbers of them at which the next sample and the next glance are due, and the figures of
    /// the connections when the sample began.
    sent: u64,
    next: u64,
    glance: u64,
    begun: Option<Vec<Traffic>>,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    /// A measurement with `used` stripes, or none; `before` has the number of stripes before that, and their bytes a second.
    Trial {
        used: usize,
        before: Option<(usize, f64)>,
    },
    /// More stripes are on their way.
    Wanting { number: usize, before: (usize, f64) },
    /// One connection is used until `until` bytes have been sent.
    Resting { until: u64 },
    /// Nothing changes any more.
    Settled,
}

impl Pace {
    pub(in crate::transport::tcp) fn new() -> Self {
        let (used, before) = (0, None);
        Self {
            stage: Stage::Trial { used, before },
            failures: 0,
            sent: 0,
            next: WARM_UP + SAMPLE_BYTES,
            glance: WARM_UP + GLANCE_BYTES,
            begun: None,
        }
    }

    /// Of a link that stays as it is.
    pub(in crate::transport::tcp) fn settled() -> Self {
        Self {
            stage: Stage::Settled,
            ..Self::new()
        }
    }

    /// Sets the number of stripes that the link needs.
    #[cfg(test)]
    pub(in crate::transport::tcp) fn want(&mut self, number: usize) {
        let before = (0, 0.0);
        self.stage = Stage::Wanting { number, before };
    }

    /// Uses one connection for some time, and then tries again.
    pub(in crate::transport::tcp) fn rest(&mut self) {
        let until = REST_BYTES.saturating_mul(MORE_REST.saturating_pow(self.failures.into()));
        *self = Self {
            stage: Stage::Resting { until },
            failures: self.failures.saturating_add(1),
            ..Self::new()
        };
    }

    /// Long messages have sent some bytes, which are not measured. Whether the next ones are.
    #[inline]
    pub(in crate::transport::tcp) fn rested(&mut self, bytes: usize) -> bool {
        let Stage::Resting { until } = self.stage else {
            return false;
        };
        self.sent += bytes as u64;
        let is_over = self.sent >= until;
        if is_over {
            *self = Self {
                failures: self.failures,
                ..Self::new()
            };
        }
        is_over
    }

    /// How many times stripes did not pay.
    pub(in crate::transport::tcp) fn failures(&self) -> u8 {
        self.failures
    }

    /// Whether what is sent is measured.
    pub(in crate::transport::tcp) fn is_measuring(&self) -> bool {
        matches!(self.stage, Stage::Trial { .. })
    }

    /// How many stripes there should be, if more than there are.
    pub(in crate::transport::tcp) fn wants(&self) -> Option<usize> {
        match self.stage {
            Stage::Wanting { number, .. } => Some(number),
            _ => None,
        }
    }

    /// The link uses `used` stripes now.
    pub(in crate::transport::tcp) fn began_to_use(&mut self, used: usize) {
        if let Stage::Wanting { before, .. } = self.stage {
            let before = Some(before);
            *self = Self {
                stage: Stage::Trial { used, before },
                failures: self.failures,
                ..Self::new()
            };
        }
    }

    /// Some bytes have been sent, and bytes have been on their way without a pause for some time. `measure` says what the
    /// connections in use have carried. Returns how many stripes are to be
    /// used from now on, if that changes.
    #[inline]
    pub(in crate::transport::tcp) fn sent(
        &mut self,
        bytes: usize,
        without_pause: Duration,
        measure: impl FnOnce() -> Vec<Traffic>,
    ) -> Option<usize> {
        let Stage::Trial { used, before } = self.stage else {
            return None;
        };
        // Once more stripes are in use all counts, so that those that carry less do not stay.
        if before.is_none() && without_pause < BRIEF_TRANSFER {
            return None;
        }
        self.sent += bytes as u64;
        match &self.begun {
            None if self.sent >= WARM_UP => {
                self.begun = Some(measure());
                None
            }
            Some(begun) if self.sent >= self.next => {
                let now = measure();
                if self.sent < MOST_BYTES && busy(begun, &now) < LEAST_BUSY {
                    self.next += SAMPLE_BYTES;
                    return None;
                }
                let rate = rate(begun, &now);
                self.conclude(used, before, rate)
            }
            Some(begun) if self.sent >= self.glance => {
                self.glance += GLANCE_BYTES;
                let (_, slower) = before?;
                let now = measure();
                let rate = rate(begun, &now).filter(|rate| *rate < slower)?;
                if busy(begun, &now) < BRIEFLY_BUSY {
                    return None;
                }
                self.conclude(used, before, Some(rate))
            }
            _ => None,
        }
    }

    fn conclude(
        &mut self,
        used: usize,
        before: Option<(usize, f64)>,
        rate: Option<f64>,
    ) -> Option<usize> {
        self.stage = Stage::Settled;
        let (fewer, slower, rate) = match (before, rate) {
            (Some((fewer, slower)), rate) => (fewer, slower, rate.unwrap_or(0.0)),
            (None, Some(rate)) => {
                let (number, before) = (FEW_STRIPES, (used, rate));
                self.stage = Stage::Wanting { number, before };
                return None;
            }
            (None, None) => return None,
        };
        tracing::debug!(
            from = fewer,
            to = used,
            before = slower,
            after = rate,
            "tried more connections for long messages (bytes a second)"
        );
        if rate < LEAST_GAIN * slower {
            if fewer == 0 {
                self.rest();
            }
            return Some(fewer);
        }
        if used < MANY_STRIPES && rate >= CAPPED_GAIN * slower {
            let (number, before) = (MANY_STRIPES, (used, rate));
            self.stage = Stage::Wanting { number, before };
        }
        None
    }
}

/// Bytes a second that the connections carried together; `None` where the kernel does not tell.
fn rate(begun: &[Traffic], now: &[Traffic]) -> Option<f64> {
    let since =
        |(begun, now): (&Traffic, &Traffic)| now.acknowledged.saturating_sub(begun.acknowledged);
    let bytes: u64 = begun.iter().zip(now).map(since).sum();
    let seconds = busy(begun, now).as_secs_f64();
    (bytes > 0 && seconds > 0.0).then(|| bytes as f64 / seconds)
}

/// How long the busiest of them was.
fn busy(begun: &[Traffic], now: &[Traffic]) -> Duration {
    let since = |(begun, now): (&Traffic, &Traffic)| now.busy_us.saturating_sub(begun.busy_us);
    Duration::from_micros(begun.iter().zip(now).map(since).max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends until the pace says something, over connections that carry `rate` bytes a second together, in equal parts.
    fn run(pace: &mut Pace, stripes: usize, rate: f64) -> Option<usize> {
        let connections = stripes.max(1) as u64;
        let mut sent = 0;
        for _ in 0..2000 {
            sent += 1 << 20;
            let told = Traffic {
                acknowledged: sent / connections,
                busy_us: (sent as f64 / rate * 1e6) as u64,
            };
            let measure = || vec![told; stripes.max(1)];
            let changed = pace.sent(1 << 20, BRIEF_TRANSFER, measure);
            if changed.is_some() || pace.wants().is_some() {
                return changed;
            }
        }
        None
    }

    /// One connection carried 100 MB/s, and there are a few stripes now.
    fn with_a_few() -> Pace {
        let mut pace = Pace::new();
        assert_eq!(run(&mut pace, 0, 1e8), None);
        pace.began_to_use(FEW_STRIPES);
        pace
    }

    #[test]
    fn what_is_capped_gets_more_connections_as_long_as_they_carry_more() {
        let mut pace = Pace::new();
        assert_eq!(run(&mut pace, 0, 1e8), None);
        assert_eq!(pace.wants(), Some(FEW_STRIPES));
        // The peer and its connections take their time.
        assert_eq!(run(&mut pace, 0, 1e8), None);
        pace.began_to_use(FEW_STRIPES);
        assert_eq!(run(&mut pace, FEW_STRIPES, 3.9e8), None);
        assert_eq!(pace.wants(), Some(MANY_STRIPES));
        pace.began_to_use(MANY_STRIPES);
        assert_eq!(run(&mut pace, MANY_STRIPES, 7e8), None);
        assert_eq!(pace.wants(), None);
    }

    #[test]
    fn what_a_few_fill_gets_no_more() {
        let mut pace = with_a_few();
        assert_eq!(run(&mut pace, FEW_STRIPES, 1.5e8), None);
        assert_eq!(pace.wants(), None);
    }

    #[test]
    fn what_does_not_pay_is_given_up() {
        let mut pace = with_a_few();
        assert_eq!(run(&mut pace, FEW_STRIPES, 1.1e8), Some(0));
        assert_eq!(pace.wants(), None);
        let mut pace = with_a_few();
        assert_eq!(run(&mut pace, FEW_STRIPES, 3.9e8), None);
        pace.began_to_use(MANY_STRIPES);
        assert_eq!(run(&mut pace, MANY_STRIPES, 4e8), Some(FEW_STRIPES));
        assert_eq!(pace.wants(), None);
    }

    #[test]
    fn what_did_not_pay_is_tried_again_ever_more_rarely() {
        let mut pace = with_a_few();
        let part = 1 << 20;
        for rest in [REST_BYTES, MORE_REST * REST_BYTES] {
            let before = pace.failures();
            assert_eq!(run(&mut pace, FEW_STRIPES, 1.1e8), Some(0));
            assert_eq!(pace.failures(), before + 1);
            for _ in 0..rest / part {
                assert!(!pace.is_measuring());
                let _ = pace.rested(part as usize);
            }
            assert!(pace.is_measuring());
            assert_eq!(run(&mut pace, 0, 1e8), None);
            assert_eq!(pace.wants(), Some(FEW_STRIPES));
            pace.began_to_use(FEW_STRIPES);
        }
        // Stripes that pay this time stay.
        assert_eq!(run(&mut pace, FEW_STRIPES, 1.5e8), None);
        assert!(!pace.is_measuring() && pace.wants().is_none());
    }

    #[test]
    fn what_carries_less_is_given_up_soon() {
        let until_given_up = |rate| {
            let mut pace = with_a_few();
            let mut sent = 0;
            let mut step = |_| {
                sent += 1 << 18;
                let told = Traffic {
                    acknowledged: sent / FEW_STRIPES as u64,
                    busy_us: (sent as f64 / rate * 1e6) as u64,
                };
                pace.sent(1 << 18, BRIEF_TRANSFER, || vec![told; FEW_STRIPES])
            };
            assert_eq!((0..2000).find_map(&mut step), Some(0));
            sent
        };
        assert_eq!(until_given_up(0.7e8), WARM_UP + GLANCE_BYTES);
        assert_eq!(until_given_up(1.1e8), WARM_UP + SAMPLE_BYTES);
    }

    #[test]
    fn what_is_soon_through_tries_nothing() {
        let mut pace = Pace::new();
        let mut sent = 0;
        for _ in 0..2000 {
            sent += 1 << 20;
            let told = Traffic {
                acknowledged: sent,
                busy_us: sent / 100,
            };
            assert_eq!(pace.sent(1 << 20, BRIEF_TRANSFER / 2, || vec![told]), None);
        }
        assert_eq!(pace.wants(), None);
    }

    #[test]
    fn stripes_over_which_nothing_goes_are_given_up() {
        let mut pace = with_a_few();
        let silent = |_| {
            pace.sent(1 << 20, BRIEF_TRANSFER, || {
                vec![Traffic::default(); FEW_STRIPES]
            })
        };
        assert_eq!((0..2000).find_map(silent), Some(0));
    }

    #[test]
    fn a_kernel_that_tells_nothing_changes_nothing() {
        let mut pace = Pace::new();
        for _ in 0..2000 {
            assert_eq!(
                pace.sent(1 << 20, BRIEF_TRANSFER, || vec![Traffic::default()]),
                None
            );
        }
        assert_eq!(pace.wants(), None);
        let mut pace = Pace::settled();
        assert_eq!(run(&mut pace, 0, 1e8), None);
        assert_eq!(pace.wants(), None);
    }
}
