//! The threads that work for the groups of a process: they are there while a group is open.
//!
//! The first group to be made brings them in; the last one to be closed sends them home, without waiting for them. A
//! group that is made later brings in others, even if some of the first are still about to leave.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::threads;

use super::completions::Teller;
use super::forming::check_process;
use super::progress::Progress;

/// The threads, as a group reaches them.
pub(super) struct Staff {
    pub(super) progress: Arc<Progress>,
    pub(super) teller: Arc<Teller>,
}

/// What keeps the threads here: every open group has it.
pub(super) struct Stay(Arc<Staff>);

static CURRENT: Mutex<Weak<Stay>> = Mutex::new(Weak::new());

impl Stay {
    /// Has the threads stay for one group more, and brings them in for the first.
    ///
    /// # Errors
    /// `System` when the system refuses a thread or a descriptor.
    pub(super) fn begin() -> Result<Arc<Self>> {
        let mut current = CURRENT.lock();
        if let Some(stay) = current.upgrade() {
            return Ok(stay);
        }
        let stay = Self(Arc::new(Staff {
            progress: Arc::new(Progress::new()?),
            teller: Arc::default(),
        }));
        // If one cannot be started, dropping this ends the others.
        stay.start()
            .map_err(|cause| Error::system("start the threads that drive operations", cause))?;
        let stay = Arc::new(stay);
        *current = Arc::downgrade(&stay);
        Ok(stay)
    }

    pub(super) fn staff(&self) -> &Arc<Staff> {
        &self.0
    }

    fn start(&self) -> std::io::Result<()> {
        let Staff { progress, teller } = &*self.0;
        let progress = Arc::clone(progress);
        threads::spawn("unisono-drive", move || progress.run())?;
        teller.start()
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        // A forked child has none of the threads, and their locks as they were.
        if check_process().is_ok() {
            self.0.progress.stop();
            self.0.teller.stop();
        }
    }
}

/// Waits until the threads that worked for this process's groups have ended, which they do soon after the last group
/// was closed; at most `limit`. For who is about to take away what completions stand on, as an interpreter that ends.
///
/// Returns whether they have ended: false at once while a group is open, and in a forked child, which has none of them.
pub fn wait_for_threads(limit: Duration) -> bool {
    let is_open = || CURRENT.lock().strong_count() > 0;
    check_process().is_ok() && !is_open() && threads::wait_for_end(limit)
}
