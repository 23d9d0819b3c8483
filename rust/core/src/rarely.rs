//! A bound on log lines that others can cause.

use std::time::{Duration, Instant};

/// Lets some log lines through at once, and then one in each period. It bounds what unknown clients can make us log.
#[derive(Debug)]
pub(crate) struct Rarely {
    every: Duration,
    /// Lines that may be written at once, counted in lines.
    left: u32,
    most: u32,
    refilled: Instant,
    suppressed: u64,
}

impl Rarely {
    /// For events that unknown clients can cause: five lines at once, then one each ten seconds.
    pub(crate) fn strangers() -> Self {
        Self::new(5, Duration::from_secs(10))
    }

    pub(crate) fn new(most: u32, every: Duration) -> Self {
        Self {
            every,
            left: most,
            most,
            refilled: Instant::now(),
            suppressed: 0,
        }
    }

    /// Whether a line may be written now: how many were not, since the last one.
    pub(crate) fn line(&mut self) -> Option<u64> {
        self.line_at(Instant::now())
    }

    fn line_at(&mut self, now: Instant) -> Option<u64> {
        let periods =
            now.saturating_duration_since(self.refilled).as_nanos() / self.every.as_nanos();
        if periods > 0 {
            self.refilled = now;
            self.left = self
                .left
                .saturating_add(u32::try_from(periods).unwrap_or(u32::MAX));
            self.left = self.left.min(self.most);
        }
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                Some(std::mem::take(&mut self.suppressed))
            }
            None => {
                self.suppressed += 1;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_writes_few_lines_and_counts_the_rest() {
        let second = Duration::from_secs(1);
        let mut lines = Rarely::new(3, second);
        let begun = Instant::now();
        let written = (0..1000).filter_map(|_| lines.line_at(begun)).count();
        assert_eq!(written, 3);
        assert_eq!(lines.line_at(begun + second), Some(997));
        assert_eq!(lines.line_at(begun + second), None);
        let later = begun + 100 * second;
        let written: Vec<u64> = (0..10).filter_map(|_| lines.line_at(later)).collect();
        assert_eq!(written, [1, 0, 0]);
    }
}
