//! A place in a stream that others can wait for.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// Reached once, when the stream has got past it.
#[derive(Debug, Default)]
pub(crate) struct Point {
    at: Mutex<Option<Instant>>,
    reached: Condvar,
}

impl Point {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// A point that lies behind already.
    pub(crate) fn passed() -> Arc<Self> {
        let point = Self::new();
        point.reach();
        point
    }

    pub(crate) fn reach(&self) {
        *self.at.lock() = Some(Instant::now());
        self.reached.notify_all();
    }

    pub(crate) fn time(&self) -> Option<Instant> {
        *self.at.lock()
    }

    pub(crate) fn is_reached(&self) -> bool {
        self.time().is_some()
    }

    pub(crate) fn wait(&self) {
        let mut at = self.at.lock();
        while at.is_none() {
            self.reached.wait(&mut at);
        }
    }
}
