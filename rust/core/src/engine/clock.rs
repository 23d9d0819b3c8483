//! The time of a group: the system's, or that of a simulated world.
//!
//! The engine asks its group's clock, so that a test can be all ranks at once and let hours pass in milliseconds
//! (`crate::engine::world`). Files that wait for a group, or make its connections, ask the system; `tests/rust/layers.rs`
//! has their names.

#[cfg(any(test, feature = "simulate"))]
use std::sync::Arc;
#[cfg(any(test, feature = "simulate"))]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Where a group reads the time.
#[derive(Clone, Debug, Default)]
pub(crate) enum Clock {
    #[default]
    System,
    #[cfg(any(test, feature = "simulate"))]
    Simulated(Arc<SimulatedTime>),
}

/// A time that moves when it is told to.
#[cfg(any(test, feature = "simulate"))]
#[derive(Debug)]
pub(crate) struct SimulatedTime {
    start: Instant,
    nanoseconds: AtomicU64,
}

impl Clock {
    /// A clock that stands still until it is [set forward](Clock::advance). Its copies show the same time.
    #[cfg(any(test, feature = "simulate"))]
    pub(crate) fn simulated() -> Self {
        Self::Simulated(Arc::new(SimulatedTime {
            start: Instant::now(),
            nanoseconds: AtomicU64::new(0),
        }))
    }

    #[inline]
    pub(crate) fn now(&self) -> Instant {
        match self {
            Self::System => Instant::now(),
            #[cfg(any(test, feature = "simulate"))]
            Self::Simulated(time) => {
                time.start + Duration::from_nanos(time.nanoseconds.load(Ordering::Relaxed))
            }
        }
    }

    /// The time since `earlier`, zero if that is yet to come.
    #[inline]
    pub(crate) fn since(&self, earlier: Instant) -> Duration {
        self.now().saturating_duration_since(earlier)
    }

    #[cfg(any(test, feature = "simulate"))]
    pub(crate) fn is_simulated(&self) -> bool {
        matches!(self, Self::Simulated(_))
    }

    /// Sets a simulated clock forward to `moment`. It never goes back.
    #[cfg(any(test, feature = "simulate"))]
    pub(crate) fn advance(&self, moment: Instant) {
        if let Self::Simulated(time) = self {
            let passed = moment.saturating_duration_since(time.start);
            let nanoseconds = u64::try_from(passed.as_nanos()).unwrap_or(u64::MAX);
            time.nanoseconds.fetch_max(nanoseconds, Ordering::Relaxed);
        }
    }
}
