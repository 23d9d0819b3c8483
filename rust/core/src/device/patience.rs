//! How long calls wait for a moment at which nothing is under way in the process.

use std::time::{Duration, Instant};

/// How long calls do not wait for a still moment after one has in vain: at first, and at most. It becomes twice as long each
/// time.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How long a call waits: a 25th of the pause that follows, and at most so long. Where other processes compute on all cores,
/// the thread that ends what is under way may run some milliseconds later only.
const WAITED_PART: u32 = 25;
const LONGEST_WAIT: Duration = Duration::from_millis(20);

/// When calls wait for a still moment.
#[derive(Debug, Default)]
pub(super) struct Patience {
    /// When a call may wait again, and the pause after that.
    from: Option<Instant>,
    pause: Duration,
}

impl Patience {
    /// Until when this call may wait, if it may.
    pub(super) fn next(&mut self) -> Option<Instant> {
        let now = Instant::now();
        if self.from.is_some_and(|from| now < from) {
            return None;
        }
        self.pause = (2 * self.pause).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.from = Some(now + self.pause);
        Some(now + (self.pause / WAITED_PART).min(LONGEST_WAIT))
    }
}
