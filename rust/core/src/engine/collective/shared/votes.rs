//! How votes have ended, and which operations go without one.

use std::time::Duration;

use crate::types::Collective;

/// By kinds and sizes of operations, as far as 64 numbers tell them apart.
///
/// All ranks count the same votes in the same order, since an operation is taken up when all before it have been decided
/// ([`Consent::advance`](super::Consent::advance)). So they agree on which operations go without a vote.
#[derive(Debug)]
pub(super) struct Votes {
    records: [Record; 64],
}

#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// Votes that failed, one after the other.
    failures: u32,
    /// Operations that go without a vote.
    skip: u32,
}

impl Votes {
    /// After how many failures there are no more operations left out than before.
    const MOST_FAILURES: u32 = 6;

    fn record(&mut self, collective: Collective, count: usize) -> &mut Record {
        let both = (count as u64) << 4 | collective as u64 & 15;
        let mixed = both.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &mut self.records[(mixed >> 58) as usize]
    }

    /// Whether an operation on so many elements is worth a vote.
    pub(super) fn ask(&mut self, collective: Collective, count: usize) -> bool {
        let record = self.record(collective, count);
        let left_out = record.skip > 0;
        record.skip = record.skip.saturating_sub(1);
        !left_out
    }

    pub(super) fn note(&mut self, collective: Collective, count: usize, agreed: bool) {
        let record = self.record(collective, count);
        if agreed {
            *record = Record::default();
            return;
        }
        record.failures = (record.failures + 1).min(Self::MOST_FAILURES);
        record.skip = (1 << record.failures) - 1;
    }
}

impl Default for Votes {
    fn default() -> Self {
        Self {
            records: [Record::default(); 64],
        }
    }
}

/// How fast the windows are, and which operations keep away from them.
///
/// Ranks that share cores go through windows in step: where somebody else computes on one of the cores, who gives it away
/// at a meeting gets it back when that one's time slice ends, which is a hundred times as long as a chunk takes. Messages
/// need fewer turns. So a rank that has found the windows slow says so in its next vote, and then some operations keep
/// away: 1, 3, 7 ... of them, as long as it is not faster when it is tried again. All count the same.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// This rank has found them slow and not said so.
    wary: bool,
    /// Complaints, less those that were followed by none.
    complaints: u32,
    /// Operations that keep away.
    skip: u32,
    #[cfg(test)]
    pub(super) is_patient: bool,
}

impl Pace {
    /// After how many complaints no more operations keep away than before.
    const MOST_COMPLAINTS: u32 = 8;

    /// Whether the next operation may go through windows.
    pub(super) fn ask(&mut self) -> bool {
        let left_out = self.skip > 0;
        self.skip = self.skip.saturating_sub(1);
        !left_out
    }

    /// So long an operation has taken for each chunk.
    pub(super) fn observe(&mut self, chunk: Duration, world: usize) {
        #[cfg(test)]
        if self.is_patient {
            return;
        }
        self.wary |= chunk > SLOW + SLOW_PER_RANK * world as u32;
    }

    /// Whether this rank complains in its vote, once.
    pub(super) fn complain(&mut self) -> bool {
        std::mem::take(&mut self.wary)
    }

    /// An operation goes through windows, and somebody has complained of those before it, or nobody has.
    pub(super) fn note(&mut self, complaint: bool) {
        if complaint {
            self.complaints = (self.complaints + 1).min(Self::MOST_COMPLAINTS);
            self.skip = (1 << self.complaints) - 1;
        } else {
            // The attempt before was not slow.
            self.complaints /= 2;
        }
    }
}

/// A chunk takes tens of microseconds, and as many more for each rank on the same core; a time slice some milliseconds.
const SLOW: Duration = Duration::from_micros(200);
const SLOW_PER_RANK: Duration = Duration::from_micros(20);

#[cfg(test)]
mod tests {
    use super::*;

    const SUM: Collective = Collective::AllReduce;

    /// The operations out of `count` that go through windows, which are slow as long as that holds.
    fn attempts(pace: &mut Pace, count: usize, is_slow: bool) -> Vec<usize> {
        (0..count)
            .filter(|_| {
                let goes = pace.ask();
                if goes {
                    let complaint = pace.complain();
                    pace.note(complaint);
                    let micros = if is_slow { 3000 } else { 80 };
                    pace.observe(Duration::from_micros(micros), 8);
                }
                goes
            })
            .collect()
    }

    #[test]
    fn slow_windows_are_kept_away_from_and_tried_again() {
        let mut pace = Pace::default();
        assert_eq!(attempts(&mut pace, 100, false).len(), 100);
        let slow = attempts(&mut pace, 60, true);
        assert_eq!(slow, [0, 1, 3, 7, 15, 31]);
        assert!(attempts(&mut pace, 2000, true).len() < 12);
        // Not at once, but for good.
        attempts(&mut pace, 600, false);
        assert_eq!(attempts(&mut pace, 100, false).len(), 100);
        assert_eq!(pace.complaints, 0);
    }

    #[test]
    fn failures_make_votes_rarer() {
        let mut votes = Votes::default();
        let mut asked = Vec::new();
        for operation in 0..300 {
            if votes.ask(SUM, 1000) {
                asked.push(operation);
                votes.note(SUM, 1000, false);
            }
        }
        assert_eq!(asked, [0, 2, 6, 14, 30, 62, 126, 190, 254]);
        let next = (300..400).find(|_| votes.ask(SUM, 1000));
        assert_eq!(next, Some(318));
        assert!(votes.ask(Collective::Reduce, 1000));
        votes.note(SUM, 1000, true);
        assert!(votes.ask(SUM, 1000) && votes.ask(SUM, 1000) && votes.ask(SUM, 1001));
    }
}
