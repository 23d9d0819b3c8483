//! Whether private memory is better read by the peer or copied through the ring, by what messages of that length have
//! taken lately.
//!
//! The ring costs two copies, one by each side; reading costs one, but the kernel looks every page up. Which is less depends on
//! the length, and on where the two processes run at the moment: between cores that share a cache the ring's bytes never leave
//! it, while between cores that do not every line of the ring changes hands twice; two ranks on one core copy in turn. In
//! virtual machines that was seen to change within seconds and without a word. So nothing is assumed: the receiver times each
//! long message from its first byte to its last, adds what the sender had spent before it came, and tells the sender in the
//! shared header. The sender chooses for each message, and tries what it has not used for a while.

use std::time::{Duration, Instant};

use crate::rarely::Rarely;

/// Messages from this length on are timed: shorter ones are never lent.
const TIMED_FROM: usize = FIRST_CLASS - FIRST_CLASS / 16;

/// Lengths are told apart by powers of two, from this one on; those of the last class are longer.
const FIRST_CLASS: usize = 64 << 10;
pub(super) const CLASSES: usize = 11;

/// The class of a message of `bytes`. A streamed message may come without its beginning, which travels with the header.
pub(super) fn class(bytes: usize) -> usize {
    let units = bytes.saturating_add(FIRST_CLASS / 16) / FIRST_CLASS;
    (units.max(1).ilog2() as usize).min(CLASSES - 1)
}

/// A faster message takes a pace half of the way there, a slower one an eighth, and it counts as no more than `MOST_COUNTED`
/// times the pace: a process that loses its core meanwhile, or meets cold memory, says little of what memory can do.
const FASTER: u32 = 2;
const SLOWER: u32 = 8;
const MOST_COUNTED: u32 = 4;

const MIB: u64 = 1 << 20;

/// How long moving bytes has taken lately: nanoseconds for a MiB, 0 when nothing is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Pace(u32);

impl Pace {
    /// Takes into account that `bytes` took so long.
    fn note(&mut self, bytes: usize, nanos: u64) {
        let sample = nanos.saturating_mul(MIB) / (bytes as u64).max(1);
        let sample = u32::try_from(sample).unwrap_or(u32::MAX).max(1);
        self.0 = match self.0 {
            0 => sample,
            before if sample < before => before - (before - sample).div_ceil(FASTER),
            before => {
                let sample = sample.min(before.saturating_mul(MOST_COUNTED));
                before.saturating_add((sample - before).div_ceil(SLOWER))
            }
        };
    }
}

/// The recent paces of messages of one class in one direction.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Paces {
    ring: Pace,
    loan: Pace,
}

impl Paces {
    /// As one word of the shared header.
    fn word(self) -> u64 {
        u64::from(self.ring.0) << 32 | u64::from(self.loan.0)
    }

    /// The paces in such a word. A peer may say anything: only choices depend on it.
    pub(super) fn of(word: u64) -> Self {
        Self {
            ring: Pace((word >> 32) as u32),
            loan: Pace(word as u32),
        }
    }

    fn are_known(&self) -> bool {
        self.ring.0 > 0 && self.loan.0 > 0
    }
}

/// The receiver's measurements.
#[derive(Debug, Default)]
pub(super) struct Clock {
    paces: [Paces; CLASSES],
    streaming: Streaming,
}

/// The message that is coming through the ring.
#[derive(Debug, Default)]
struct Streaming {
    bytes: usize,
    left: usize,
    since: Option<Instant>,
    /// Nanoseconds that the sender had spent on it before.
    before: u64,
}

impl Clock {
    /// The paces of messages as long as `bytes`.
    pub(super) fn paces(&self, bytes: usize) -> Paces {
        self.paces[class(bytes)]
    }

    /// Whether a receiver that asks for `most` bytes of the ring is to be timed.
    #[inline]
    pub(super) fn times(&self, most: usize) -> bool {
        most >= TIMED_FROM || (most == self.streaming.left && most > 0)
    }

    /// Of `most` bytes, the rest of a message, `count` came in the time since `started`. `spent`: nanoseconds that the
    /// sender says it has spent. Returns the class whose paces have changed.
    pub(super) fn note_streamed(
        &mut self,
        most: usize,
        count: usize,
        started: Instant,
        spent: impl FnOnce() -> u64,
    ) -> Option<usize> {
        let streaming = &mut self.streaming;
        if most != streaming.left {
            *streaming = Streaming {
                bytes: most,
                left: most,
                ..Streaming::default()
            };
        }
        if count == 0 {
            return None;
        }
        let since = *streaming.since.get_or_insert_with(|| {
            streaming.before = spent();
            started
        });
        streaming.left -= count;
        if streaming.left > 0 {
            return None;
        }
        let Streaming { bytes, before, .. } = std::mem::take(streaming);
        let class = class(bytes);
        let nanos = nanoseconds(since.elapsed()).saturating_add(before);
        self.paces[class].ring.note(bytes, nanos);
        Some(class)
    }

    /// A loan of `bytes` was read to its end since `started`. Returns its class.
    pub(super) fn note_lent(&mut self, bytes: usize, started: Instant) -> usize {
        let class = class(bytes);
        self.paces[class]
            .loan
            .note(bytes, nanoseconds(started.elapsed()));
        class
    }

    /// The word that tells the sender the paces of a class.
    pub(super) fn word(&self, class: usize) -> u64 {
        self.paces[class].word()
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// How long the sender has spent on copying the message that it streams.
#[derive(Debug, Default)]
pub(super) struct Filling {
    left: usize,
    nanos: u64,
}

impl Filling {
    /// Begins or goes on with the timing of `bytes` that a sender offers; returns their kind.
    #[inline]
    pub(super) fn begin(&mut self, bytes: usize) -> Offered {
        if bytes == self.left && bytes > 0 {
            Offered::Rest
        } else if bytes >= TIMED_FROM {
            (self.left, self.nanos) = (bytes, 0);
            Offered::Message
        } else {
            Offered::Short
        }
    }

    /// Of the message that was begun `count` bytes have been copied since `started`. Returns how long the bytes so far
    /// have taken.
    pub(super) fn note(&mut self, count: usize, started: Instant) -> u64 {
        self.left = self.left.saturating_sub(count);
        self.nanos = self.nanos.saturating_add(nanoseconds(started.elapsed()));
        self.nanos
    }
}

/// The kind of the bytes that a sender offers to the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Offered {
    /// Nothing that is timed.
    Short,
    /// A long message.
    Message,
    /// The rest of it.
    Rest,
}

/// A sender's choices, message by message, for each class.
#[derive(Debug)]
pub(super) struct Choices {
    classes: [Choice; CLASSES],
    log: Rarely,
}

impl Default for Choices {
    fn default() -> Self {
        Self {
            classes: Default::default(),
            log: Rarely::new(8, Duration::from_secs(10)),
        }
    }
}

impl Choices {
    /// From now on several threads read what is lent and as long as `bytes`, or longer.
    pub(super) fn read_by_several(&mut self, bytes: usize) {
        for choice in &mut self.classes[class(bytes)..] {
            choice.is_even = true;
        }
    }

    /// Whether to lend `bytes` of private memory. Where both directions are in use both count, and both sides choose by
    /// the same numbers: of messages that cross by different ways one side copies while the other waits for it.
    pub(super) fn prefer_loan(&mut self, bytes: usize, outgoing: Paces, incoming: Paces) -> bool {
        let choice = &mut self.classes[class(bytes)];
        let before = choice.faster;
        let lends = choice.prefers_loan_at(Instant::now(), bytes, outgoing, incoming);
        if choice.faster != before {
            self.tell(bytes, outgoing);
        }
        lends
    }

    /// Logs the way that has turned out to be the faster one for messages as long as `bytes`.
    #[cold]
    fn tell(&mut self, bytes: usize, paces: Paces) {
        if let Some(suppressed) = self.log.line() {
            let way = match self.classes[class(bytes)].faster {
                Some(Carrier::Loan) => "the peer reads them where they lie",
                _ => "they are copied through the ring",
            };
            let us_per_mib = |pace: Pace| pace.0 / 1000;
            tracing::debug!(
                bytes,
                ring_us_per_mib = us_per_mib(paces.ring),
                loan_us_per_mib = us_per_mib(paces.loan),
                suppressed,
                "messages of this length from private memory: {way}"
            );
        }
    }
}

/// How a long message goes to a peer on the same host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carrier {
    Ring,
    Loan,
}

#[derive(Debug, Default)]
struct Choice {
    /// When a message was last copied into the ring, and when one was last lent.
    streamed: Option<Instant>,
    lent: Option<Instant>,
    /// How many bytes more are to go through the ring, or to be lent, to see how fast that is.
    trying: usize,
    trying_loans: usize,
    /// How often either has been looked at again.
    looks: u32,
    /// The way that was the faster one when both were last compared.
    faster: Option<Carrier>,
    /// Two threads read what is lent, and so either way takes two cores.
    is_even: bool,
}

/// How long a pace counts at most before that way is used again to see; for messages from `LONG_FROM` on, where to see costs
/// more.
const FRESH_FOR: Duration = Duration::from_millis(500);
const FRESH_WHEN_LONG: Duration = Duration::from_secs(4);
const LONG_FROM: usize = 8 << 20;

/// How long it counts at first, and then each time twice as long: what is measured first is measured on cold memory, and
/// one process that loses its core may spoil it.
const FRESH_AT_FIRST: Duration = Duration::from_millis(2);

/// Bytes by which a way is tried: the first of them say how long its memory was unused.
const TRIED_BYTES: usize = 1 << 20;

/// The ring has to be faster by this much, 3 : 4. The receiver's measurements say nothing of the sender's copy, which keeps a
/// core from other work, nor of the word and its answer that go before a message that cannot be offered.
const RING_AHEAD: (u64, u64) = (3, 4);

impl Choice {
    fn prefers_loan_at(
        &mut self,
        now: Instant,
        bytes: usize,
        outgoing: Paces,
        incoming: Paces,
    ) -> bool {
        let fresh = match bytes < LONG_FROM {
            true => FRESH_FOR.min(FRESH_AT_FIRST.saturating_mul(1 << self.looks.min(8))),
            false => FRESH_WHEN_LONG,
        };
        let is_stale =
            |since: Option<Instant>| since.is_none_or(|since| now.duration_since(since) >= fresh);
        if is_stale(self.streamed) {
            self.trying = TRIED_BYTES;
            self.looks = self.looks.saturating_add(1);
        }
        let lend = if self.trying > 0 {
            self.trying = self.trying.saturating_sub(bytes);
            false
        } else if !outgoing.are_known() {
            let rings = outgoing.ring.0 > 0;
            if rings {
                self.trying_loans = TRIED_BYTES.saturating_sub(bytes);
            }
            rings
        } else if is_stale(self.lent) {
            self.trying_loans = TRIED_BYTES.saturating_sub(bytes);
            self.looks = self.looks.saturating_add(1);
            true
        } else if self.trying_loans > 0 {
            self.trying_loans = self.trying_loans.saturating_sub(bytes);
            true
        } else {
            let incoming = match incoming.are_known() {
                true => incoming,
                false => Paces::default(),
            };
            let both = |out: Pace, back: Pace| u64::from(out.0) + u64::from(back.0);
            let ahead = match self.is_even {
                true => (1, 1),
                false => RING_AHEAD,
            };
            let lends = both(outgoing.loan, incoming.loan) * ahead.0
                < both(outgoing.ring, incoming.ring) * ahead.1;
            self.faster = Some(if lends { Carrier::Loan } else { Carrier::Ring });
            lends
        };
        *if lend {
            &mut self.lent
        } else {
            &mut self.streamed
        } = Some(now);
        lend
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: Duration = Duration::from_micros(1);
    const SECOND: Duration = Duration::from_secs(1);
    const MILLION: u64 = 1_000_000;

    #[test]
    fn lengths_are_told_apart_by_powers_of_two() {
        for (bytes, expected) in [
            (0, 0),
            (FIRST_CLASS, 0),
            (2 * FIRST_CLASS - FIRST_CLASS / 16 - 1, 0),
            (2 * FIRST_CLASS, 1),
            // Without the beginning that came with the header.
            (2 * FIRST_CLASS - 216, 1),
            (1 << 20, 4),
            (64 << 20, 10),
            (usize::MAX, 10),
        ] {
            assert_eq!(class(bytes), expected, "{bytes} bytes");
        }
        const { assert!(FIRST_CLASS - 216 >= TIMED_FROM) };
    }

    #[test]
    fn a_pace_follows_what_is_measured_and_no_single_delay() {
        let mut pace = Pace::default();
        pace.note(1 << 20, 100_000);
        assert_eq!(pace.0, 100_000);
        pace.note(1 << 19, 50_000);
        assert_eq!(pace.0, 100_000);
        pace.note(1 << 20, 1000 * MILLION);
        assert!(pace.0 < 200_000);
        for _ in 0..100 {
            pace.note(1 << 20, 300_000);
        }
        assert!((280_000..=300_000).contains(&pace.0), "{pace:?}");
        pace.note(0, u64::MAX);
        pace.note(usize::MAX, 0);
        assert!(pace.0 > 0);
        let paces = Paces {
            ring: Pace(7),
            loan: Pace(u32::MAX),
        };
        let told = Paces::of(paces.word());
        assert_eq!((told.ring, told.loan), (paces.ring, paces.loan));
    }

    #[test]
    fn a_message_is_timed_from_its_first_byte_to_its_last() {
        let mut clock = Clock::default();
        let started = Instant::now().checked_sub(1000 * MICRO).unwrap();
        let bytes = 1 << 20;
        assert!(clock.times(bytes) && !clock.times(0) && !clock.times(100));
        // Nothing has come yet: that is not the message's time.
        let nothing = clock.note_streamed(bytes, 0, started, || unreachable!());
        assert_eq!(nothing, None);
        assert_eq!(clock.note_streamed(bytes, 1000, started, || 500_000), None);
        assert!(clock.times(bytes - 1000));
        let end = clock.note_streamed(
            bytes - 1000,
            bytes - 1000,
            Instant::now(),
            || unreachable!(),
        );
        assert_eq!(end, Some(4));
        let pace = clock.paces(bytes).ring.0;
        assert!(
            (1_500_000..u32::MAX).contains(&pace),
            "what the sender had spent before is counted: {pace}"
        );
        // Half a message that is given up, and the next.
        let now = Instant::now();
        assert_eq!(clock.note_streamed(bytes, 1000, started, || 0), None);
        assert_eq!(
            clock.note_streamed(bytes / 2, bytes / 2, now, || 0),
            Some(3)
        );
        assert_eq!(clock.note_lent(bytes, started), 4);
        assert!(clock.paces(bytes).loan.0 >= 1_000_000);
        assert_eq!(Paces::of(clock.word(3)).loan.0, 0);
    }

    #[test]
    fn a_sender_adds_up_what_it_spends_on_a_message() {
        let mut filling = Filling::default();
        let started = Instant::now().checked_sub(10 * SECOND).unwrap();
        assert_eq!(filling.begin(1000), Offered::Short);
        assert_eq!(filling.begin(FIRST_CLASS), Offered::Message);
        let first = filling.note(FIRST_CLASS - 1000, started);
        assert!(first >= 10_000 * MILLION);
        assert_eq!(filling.begin(1000), Offered::Rest);
        assert!(filling.note(1000, started) >= first + 10_000 * MILLION);
        assert_eq!(filling.begin(1000), Offered::Short, "this is another one");
        assert_eq!(filling.begin(FIRST_CLASS), Offered::Message);
        assert!(filling.note(1, Instant::now()) < 10_000 * MILLION);
    }

    #[test]
    fn the_ways_are_equals_where_several_threads_read() {
        let mut choices = Choices::default();
        choices.read_by_several(4 << 20);
        let are_even = choices.classes.map(|choice| choice.is_even);
        assert!(!are_even[class(2 << 20)] && are_even[class(4 << 20)..].iter().all(|even| *even));
        let paces = Paces {
            ring: Pace(90),
            loan: Pace(100),
        };
        for (is_even, lends) in [(true, false), (false, true)] {
            let now = Instant::now();
            let mut choice = Choice {
                streamed: Some(now),
                lent: Some(now),
                is_even,
                ..Choice::default()
            };
            let unknown = Paces::default();
            assert_eq!(choice.prefers_loan_at(now, 4 << 20, paces, unknown), lends);
        }
    }

    #[test]
    fn the_faster_way_is_chosen_and_the_other_looked_at_again() {
        let mib = 1 << 20;
        let paces = |ring, loan| Paces {
            ring: Pace(ring),
            loan: Pace(loan),
        };
        let unknown = Paces::default();
        let (ring, loan) = (paces(1_000, 9_000), paces(9_000, 1_000));
        let mut choice = Choice::default();
        let mut now = Instant::now();
        let mut prefers =
            |now, bytes, out, back| -> bool { choice.prefers_loan_at(now, bytes, out, back) };
        assert!(!prefers(now, mib, unknown, unknown), "first the ring");
        assert!(!prefers(now, mib, unknown, unknown), "until it is timed");
        assert!(prefers(now, mib, paces(1_000, 0), unknown), "then a loan");
        assert!(!prefers(now, mib, ring, unknown));
        assert!(prefers(now, mib, loan, unknown));
        assert!(
            prefers(now, mib, paces(8_000, 9_000), unknown),
            "not enough"
        );
        assert!(!prefers(now, mib, paces(6_000, 9_000), unknown));
        assert!(
            prefers(now, mib, ring, paces(90_000, 1_000)),
            "on the whole it is faster"
        );
        assert!(!prefers(now, mib, ring, paces(90_000, 0)));
        now += FRESH_FOR;
        assert!(!prefers(now, mib, loan, unknown), "the ring is tried");
        assert!(prefers(now, mib, ring, unknown), "and a loan");
        assert!(!prefers(now, mib, ring, unknown));
        // Sooner at first: what was measured then may have been bad luck.
        now += FRESH_FOR / 10;
        assert!(!prefers(now, mib, loan, unknown));
        assert!(prefers(now, mib, ring, unknown));
        // Long messages are no way to see.
        assert!(!prefers(now, 64 * mib, ring, unknown));
    }
}
