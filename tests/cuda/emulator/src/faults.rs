//! Errors and delays on request: the nth call of a function, or the nth operation of a kind when the stream gets to it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::settings::settings;
use crate::status::{Outcome, Status};

/// An error to give at a certain time.
#[derive(Debug)]
pub(crate) struct Fault {
    name: String,
    at: u64,
    onwards: bool,
    status: Status,
    seen: AtomicU64,
}

impl Fault {
    pub(crate) fn new(name: &str, at: u64, onwards: bool, status: Status) -> Self {
        Self {
            name: name.to_string(),
            at,
            onwards,
            status,
            seen: AtomicU64::new(0),
        }
    }
}

/// Counts one occurrence of `name` (a driver function or a kind of operation), and fails it if that was asked for.
pub(crate) fn occur(name: &str) -> Outcome {
    let mut outcome = Ok(());
    for fault in settings().faults.iter().filter(|fault| fault.name == name) {
        let now = fault.seen.fetch_add(1, Ordering::Relaxed) + 1;
        if now == fault.at || (fault.onwards && now > fault.at) {
            outcome = Err(fault.status);
        }
    }
    outcome
}

/// Sleeps as long as was asked for before anything of this name.
pub(crate) fn delay(name: &str) {
    if let Some(&time) = settings().delays.get(name) {
        std::thread::sleep(Duration::from_micros(time));
    }
}

/// A small generator of repeatable pauses, one for each queue.
#[derive(Debug)]
pub(crate) struct Pauses(u64);

impl Pauses {
    /// The pauses of queue number `queue` under the seed asked for.
    pub(crate) fn new(queue: u64) -> Self {
        let mixed = (settings().seed ^ queue.wrapping_mul(0x9e37_79b9_7f4a_7c15))
            .wrapping_mul(0xbf58_476d_1ce4_e5b9);
        Self(mixed | 1)
    }

    /// Pauses for a random time within what was asked for; not at all by default.
    pub(crate) fn pause(&mut self) {
        let most = settings().random_delay;
        if most == 0 {
            return;
        }
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // Half of the operations go through at once: a queue must also overtake others, not only lag.
        if self.0 & 1 == 0 {
            std::thread::sleep(Duration::from_micros((self.0 >> 1) % (most + 1)));
        }
    }
}
