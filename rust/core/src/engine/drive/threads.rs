//! The threads that work for the groups of a process: they are there while a group is open.
//!
//! The first group of a process starts them; closing the last one makes them end, without waiting for them. A group
//! that is made later starts new ones, even if some of the first have not ended yet.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::fork::{Home, PerProcess};
use crate::locks::Mutex;
use crate::reduce::Workers;
use crate::threads;

use crate::engine::drive::completions::CompletionThreads;
use crate::engine::drive::progress::Progress;
use crate::engine::state::Group;

/// The threads, as a group reaches them.
pub(crate) struct RuntimeThreads {
    pub(crate) progress: Arc<Progress<Group>>,
    pub(crate) completions: Arc<CompletionThreads>,
    /// Two threads, for groups in which one rank waits while the other copies; the second is started when it is needed.
    pub(crate) readers: Arc<Workers>,
}

impl RuntimeThreads {
    /// The common part of groups and threads, before any thread runs.
    pub(crate) fn not_started() -> Result<Self> {
        Ok(Self {
            progress: Arc::new(Progress::new()?),
            completions: Arc::default(),
            readers: Arc::new(Workers::new(2)),
        })
    }
}

/// The guard that keeps the threads running: every open group has it.
pub(crate) struct ThreadsGuard {
    threads: Arc<RuntimeThreads>,
    home: Home,
}

static CURRENT: PerProcess<Mutex<Weak<ThreadsGuard>>> = PerProcess::new(Mutex::default);

impl ThreadsGuard {
    /// Has the threads stay for one group more, and brings them in for the first.
    ///
    /// # Errors
    /// `System` when the system refuses a thread or a descriptor.
    pub(crate) fn begin() -> Result<Arc<Self>> {
        let mut current = CURRENT.lock();
        if let Some(stay) = current.upgrade() {
            return Ok(stay);
        }
        let stay = Self {
            threads: Arc::new(RuntimeThreads::not_started()?),
            home: Home::here(),
        };
        // If one cannot be started, dropping this ends the others.
        stay.start()
            .map_err(|cause| Error::system("start the threads that drive operations", cause))?;
        let stay = Arc::new(stay);
        *current = Arc::downgrade(&stay);
        Ok(stay)
    }

    pub(crate) fn staff(&self) -> &Arc<RuntimeThreads> {
        &self.threads
    }

    fn start(&self) -> std::io::Result<()> {
        let RuntimeThreads {
            progress,
            completions,
            readers: _,
        } = &*self.threads;
        let progress = Arc::clone(progress);
        threads::spawn("unisono-drive", move || progress.run())?;
        completions.start()
    }
}

impl Drop for ThreadsGuard {
    fn drop(&mut self) {
        // A forked child has none of the threads, and their locks as they were.
        if self.home.is_here() {
            self.threads.progress.stop();
            self.threads.completions.stop();
        }
    }
}

/// Waits until the threads that worked for this process's groups have ended, which they do soon after the last group
/// was closed; at most `limit`. For a caller that is about to destroy what completions use, as an interpreter that
/// ends.
///
/// Returns whether they have ended: false at once while a group of this process is open. A forked child has none of its
/// parent's groups and threads.
pub fn wait_for_threads(limit: Duration) -> bool {
    let is_open = || CURRENT.lock().strong_count() > 0;
    !is_open() && threads::wait_for_end(limit)
}
