//! The thread of a process that drives groups nobody waits for. It sleeps when there is nothing to do, and ends when told
//! to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::error::Result;

use super::group::Group;
use super::sleep::{Next, Patience, Sleeper};

/// The process's progress thread, seen from outside.
pub(crate) struct Progress {
    adopted: Mutex<Vec<Arc<Group>>>,
    sleeper: Sleeper,
    stopping: AtomicBool,
}

/// Rounds between two looks at deadlines and at the state of peers, beside the one before each sleep.
const ROUNDS_PER_LOOK: u32 = 256;

impl Progress {
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            adopted: Mutex::new(Vec::new()),
            sleeper: Sleeper::new()?,
            stopping: AtomicBool::new(false),
        })
    }

    /// Hands a group with operations under way to the thread. The caller holds the group's lock and has marked it as
    /// watched; the group is open, so the thread has not been told to end.
    pub(super) fn adopt(&self, group: Arc<Group>) {
        self.adopted.lock().push(group);
        self.sleeper.ring();
    }

    /// Every group has been closed: the thread ends when it has let go of them.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.sleeper.ring();
    }

    /// The thread's work.
    pub(super) fn run(&self) {
        let mut groups: Vec<Arc<Group>> = Vec::new();
        let mut patience = Patience::of_background();
        let mut rounds = 0_u32;
        loop {
            for group in self.adopted.lock().drain(..) {
                self.sleeper.watch_set(group.sleeper());
                groups.push(group);
                patience.reset();
            }
            let mut moved = false;
            // Also while one group moves without a pause: the waits of the others may be in vain.
            rounds = rounds.wrapping_add(1);
            let look_around = rounds.is_multiple_of(ROUNDS_PER_LOOK);
            groups.retain(|group| {
                let kept = group.drive(&mut moved, look_around);
                if !kept {
                    self.sleeper.forget_set(group.sleeper());
                }
                kept
            });
            if groups.is_empty() {
                // Before this flag was set, every group that was ever adopted had been.
                if self.stopping.load(Ordering::Acquire) && self.adopted.lock().is_empty() {
                    return;
                }
                self.sleeper.sleep_forever();
                continue;
            }
            if moved {
                patience.reset();
                continue;
            }
            match patience.next() {
                Next::Spin | Next::Yield => std::thread::yield_now(),
                Next::Sleep => {
                    self.sleep(&groups);
                    patience.reset();
                }
            }
        }
    }

    fn sleep(&self, groups: &[Arc<Group>]) {
        let mut until = None;
        let mut ready = false;
        for group in groups {
            ready |= group.prepare_sleep(&mut until);
        }
        if !ready && self.adopted.lock().is_empty() {
            self.sleeper.sleep(until);
        }
        for group in groups {
            group.finish_sleep();
        }
    }
}
