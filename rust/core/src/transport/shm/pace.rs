//! Whether private memory is better read by the peer or copied through the ring, by what both have taken lately.
//!
//! The ring costs two copies, of which each side does one; reading costs one, but the kernel looks every page up. Which
//! is less depends on where the two processes run at the moment: between cores that share a cache the ring's bytes never
//! leave it, while between cores that do not every line of the ring changes hands twice. In virtual
//! machines that was seen to change within seconds and without a word. So both sides time what they move and tell each
//! other in the shared header; the sender chooses for each message, and tries what it has not used for a while.

use std::time::{Duration, Instant};

use super::ring::CHUNK;

/// Moves from this length on are timed: shorter ones say more of the clock.
pub(super) const TIMED_FROM: usize = 32 << 10;

/// A faster move takes a pace half of the way there, a slower one an eighth, and it counts as no more than so many times
/// the pace: a process that loses its core meanwhile, or meets cold memory, says little of what memory can do.
const FASTER: u64 = 2;
const SLOWER: u64 = 8;
const MOST: u64 = 4;

const MIB: u64 = 1 << 20;

/// How long moving bytes has taken lately: nanoseconds for a MiB, 0 when nothing is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Pace(pub(super) u64);

impl Pace {
    /// Takes into account that `bytes` took so long.
    pub(super) fn note(&mut self, bytes: usize, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let sample = nanos.saturating_mul(MIB) / (bytes as u64).max(1);
        let sample = sample.max(1);
        self.0 = match self.0 {
            0 => sample,
            before if sample < before => before - (before - sample).div_ceil(FASTER),
            before => {
                let sample = sample.min(before.saturating_mul(MOST));
                before.saturating_add((sample - before).div_ceil(SLOWER))
            }
        };
    }
}

/// What one direction has taken lately.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Paces {
    /// Copying into the ring, and out of it.
    pub(super) filling: Pace,
    pub(super) emptying: Pace,
    /// Reading private memory of the sender.
    pub(super) reading: Pace,
}

impl Paces {
    fn are_known(&self) -> bool {
        let known = [self.filling, self.emptying, self.reading];
        known.iter().all(|pace| pace.0 > 0)
    }

    /// Both copies through the ring, one after the other.
    fn ring(&self) -> u64 {
        self.filling.0.saturating_add(self.emptying.0)
    }

    /// Both copies of a message of `bytes` at the same time: at the pace of the slower one, but for the piece that is
    /// first in and last out, and for what the two wait for each other.
    fn ring_alone(&self, bytes: usize) -> u64 {
        let (slower, faster) = (
            self.filling.max(self.emptying),
            self.filling.min(self.emptying),
        );
        let ends = faster.0.saturating_mul(CHUNK as u64) / (bytes as u64).max(1);
        let pace = slower.0.saturating_add(ends);
        pace.saturating_add(pace / 8)
    }
}

/// A sender's choice, message by message.
#[derive(Debug, Default)]
pub(super) struct Choice {
    /// When something was last copied into the ring, and when something was last lent.
    filled: Option<Instant>,
    lent: Option<Instant>,
    /// How many bytes more are to go through the ring, or to be lent, to see how fast that is.
    trying: usize,
    trying_loans: usize,
    /// How often either has been looked at again.
    looks: u32,
}

/// What a loan takes beside the reading, in nanoseconds: it is announced, and comes back.
const LOAN: u64 = 3_000;

/// How long a pace counts at most before that way is used again to see; for messages from `LONG` on, where to see costs
/// more.
const FRESH: Duration = Duration::from_millis(500);
const FRESH_WHEN_LONG: Duration = Duration::from_secs(4);
const LONG: usize = 8 << 20;

/// How long it counts at first, and then each time twice as long: what is measured first is measured on cold memory, and
/// one process that loses its core may spoil it.
const FRESH_AT_FIRST: Duration = Duration::from_millis(2);

/// Bytes by which a way is tried: the first of them say how long its memory was unused.
const TRIED: usize = 1 << 20;

impl Choice {
    /// Something was copied into the ring.
    pub(super) fn note_filling(&mut self) {
        self.filled = Some(Instant::now());
    }

    /// Whether to lend `bytes` of private memory. A message that is alone goes through the ring about as fast as the
    /// slower of the two copies. Otherwise (`incoming`) both count, and both sides go by both directions, where both are
    /// in use: messages that cross go the same way, or one side copies while the other waits for it.
    pub(super) fn prefers_loan(
        &mut self,
        bytes: usize,
        outgoing: Paces,
        incoming: Option<Paces>,
    ) -> bool {
        self.prefers_loan_at(Instant::now(), bytes, outgoing, incoming)
    }

    fn prefers_loan_at(
        &mut self,
        now: Instant,
        bytes: usize,
        outgoing: Paces,
        incoming: Option<Paces>,
    ) -> bool {
        let fresh = match bytes < LONG {
            true => FRESH.min(FRESH_AT_FIRST.saturating_mul(1 << self.looks.min(8))),
            false => FRESH_WHEN_LONG,
        };
        let is_stale =
            |since: Option<Instant>| since.is_none_or(|since| now.duration_since(since) >= fresh);
        if is_stale(self.filled) {
            self.trying = TRIED;
            self.looks = self.looks.saturating_add(1);
        }
        let lend = if self.trying > 0 {
            self.trying = self.trying.saturating_sub(bytes);
            false
        } else if !outgoing.are_known() {
            let rings = outgoing.filling.0 > 0 && outgoing.emptying.0 > 0;
            if rings {
                self.trying_loans = TRIED.saturating_sub(bytes);
            }
            rings
        } else if is_stale(self.lent) {
            self.trying_loans = TRIED.saturating_sub(bytes);
            self.looks = self.looks.saturating_add(1);
            true
        } else if self.trying_loans > 0 {
            self.trying_loans = self.trying_loans.saturating_sub(bytes);
            true
        } else {
            let (ring, reading) = match incoming {
                None => (outgoing.ring_alone(bytes), outgoing.reading.0),
                Some(incoming) if incoming.are_known() => (
                    outgoing.ring().saturating_add(incoming.ring()),
                    outgoing.reading.0.saturating_add(incoming.reading.0),
                ),
                Some(_) => (outgoing.ring(), outgoing.reading.0),
            };
            let of = |pace: u64| pace.saturating_mul(bytes as u64) / MIB;
            of(reading).saturating_add(LOAN) < of(ring)
        };
        *if lend {
            &mut self.lent
        } else {
            &mut self.filled
        } = Some(now);
        lend
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    #[test]
    fn a_pace_follows_what_is_measured_and_no_single_delay() {
        let mut pace = Pace::default();
        pace.note(1 << 20, 100 * MICRO);
        assert_eq!(pace.0, 100_000);
        pace.note(1 << 19, 50 * MICRO);
        assert_eq!(pace.0, 100_000);
        pace.note(1 << 20, Duration::from_secs(1));
        assert!(pace.0 < 200_000);
        for _ in 0..100 {
            pace.note(1 << 20, 300 * MICRO);
        }
        assert!((280_000..=300_000).contains(&pace.0), "{pace:?}");
        pace.note(0, Duration::MAX);
        pace.note(usize::MAX, Duration::ZERO);
        assert!(pace.0 > 0);
    }

    #[test]
    fn the_faster_way_is_chosen_and_the_other_looked_at_again() {
        let mib = 1 << 20;
        let paces = |ring: u64, reading: u64| Paces {
            filling: Pace(ring),
            emptying: Pace(ring),
            reading: Pace(reading),
        };
        let (unknown, fast, slow) = (Paces::default(), paces(1_000, 9_000), paces(9_000, 1_000));
        let mut choice = Choice::default();
        let mut now = Instant::now();
        assert!(
            !choice.prefers_loan_at(now, mib, unknown, Some(unknown)),
            "first the ring"
        );
        assert!(
            choice.prefers_loan_at(now, mib, paces(1_000, 0), Some(unknown)),
            "then a loan"
        );
        assert!(!choice.prefers_loan_at(now, mib, fast, Some(unknown)));
        assert!(choice.prefers_loan_at(now, mib, slow, Some(unknown)));
        assert!(
            choice.prefers_loan_at(now, mib, fast, Some(paces(90_000, 1_000))),
            "on the whole it is faster"
        );
        assert!(
            !choice.prefers_loan_at(now, 1000, slow, Some(unknown)),
            "a loan takes a word back and forth"
        );
        let even = paces(60_000, 90_000);
        assert!(choice.prefers_loan_at(now, mib, even, Some(unknown)));
        assert!(
            !choice.prefers_loan_at(now, mib, even, None),
            "alone both copies are made at the same time"
        );
        now += FRESH;
        assert!(
            !choice.prefers_loan_at(now, mib, slow, Some(unknown)),
            "the ring is tried"
        );
        assert!(
            choice.prefers_loan_at(now, mib, fast, Some(unknown)),
            "and a loan"
        );
        assert!(!choice.prefers_loan_at(now, mib, fast, Some(unknown)));
        // Sooner at first: what was measured then may have been bad luck.
        now += FRESH / 10;
        assert!(!choice.prefers_loan_at(now, mib, slow, Some(unknown)));
        assert!(choice.prefers_loan_at(now, mib, fast, Some(unknown)));
        // Long messages are no way to see.
        assert!(!choice.prefers_loan_at(now, 64 * mib, fast, Some(unknown)));
    }
}
