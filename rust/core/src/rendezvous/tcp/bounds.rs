//! The most that clients can make a [TCP store's server](super::server) keep.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::process::{Resource, getrlimit};

use crate::fork::PerProcess;

/// More connections than this are not kept at once, however many descriptors there are.
const MOST_CONNECTIONS: usize = 1 << 14;
/// The most connections that have proved nothing yet.
const MOST_UNPROVEN: usize = 256;

/// The connections of all servers of this process.
static OPEN: PerProcess<AtomicUsize> = PerProcess::new(AtomicUsize::default);

/// How many connections a server keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    /// All of them; they leave half of the process's descriptors to others.
    pub(super) total: usize,
    /// Those that have not proved that they know the store's key.
    pub(super) unproven: usize,
}

impl Bounds {
    /// For a process that may have `descriptors`.
    pub(super) fn of(descriptors: u64) -> Self {
        let half = usize::try_from(descriptors / 2).unwrap_or(usize::MAX);
        let total = half.clamp(8, MOST_CONNECTIONS);
        Self {
            total,
            unproven: (total / 4).clamp(4, MOST_UNPROVEN),
        }
    }

    /// For this process.
    pub(super) fn here() -> Self {
        // No limit is no number.
        Self::of(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX))
    }

    /// Whether no more connections may be kept by a server that has `own` of them.
    pub(super) fn are_reached(&self, own: usize) -> bool {
        own.max(OPEN.load(Ordering::Relaxed)) >= self.total
    }
}

/// One connection, counted while it lives.
#[derive(Debug)]
pub(super) struct Counted(());

impl Counted {
    pub(super) fn new() -> Self {
        OPEN.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Bytes that may be kept, by all together.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    used: Arc<AtomicUsize>,
    most: usize,
}

/// More than the budget.
#[derive(Debug)]
pub(super) struct Exceeded;

impl Budget {
    pub(super) fn new(most: usize) -> Self {
        Self {
            used: Arc::new(AtomicUsize::new(0)),
            most,
        }
    }

    pub(super) fn share(&self) -> Share {
        Share {
            budget: self.clone(),
            bytes: 0,
        }
    }
}

/// The bytes of a budget that one holder keeps; given back when it is dropped.
#[derive(Debug)]
pub(super) struct Share {
    budget: Budget,
    bytes: usize,
}

impl Share {
    /// Keeps `bytes` from now on, or what it kept so far if the budget has no more. One thread at a time may call it.
    pub(super) fn resize(&mut self, bytes: usize) -> Result<(), Exceeded> {
        let used = self.budget.used.load(Ordering::Relaxed) - self.bytes;
        if bytes > self.bytes && used.saturating_add(bytes) > self.budget.most {
            return Err(Exceeded);
        }
        self.budget.used.store(used + bytes, Ordering::Relaxed);
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_descriptors_to_others() {
        for descriptors in [32, 64, 256, 1024, 4096, 1 << 20, u64::MAX] {
            let bounds = Bounds::of(descriptors);
            assert!(bounds.total as u64 <= descriptors / 2, "{descriptors}");
            assert!(bounds.unproven <= bounds.total / 2, "{descriptors}");
        }
        let usual = Bounds {
            total: 512,
            unproven: 128,
        };
        assert_eq!(Bounds::of(1024), usual);
    }

    #[test]
    fn a_budget_is_kept_and_given_back() {
        let budget = Budget::new(100);
        let (mut one, mut two) = (budget.share(), budget.share());
        one.resize(60).expect("room");
        two.resize(41).expect_err("no room");
        two.resize(40).expect("room");
        one.resize(61).expect_err("no room");
        one.resize(50).expect("less");
        two.resize(50).expect("room");
        drop(one);
        two.resize(100).expect("all");
        drop(two);
        assert_eq!(budget.used.load(Ordering::Relaxed), 0);
    }
}
