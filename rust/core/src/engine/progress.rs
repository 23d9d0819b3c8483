//! The thread of a process that drives groups nobody waits for. It sleeps when there is nothing to do, and ends when told
//! to.
//!
//! Waking a thread costs more than a short message takes, and a thread that wakes takes a core from a rank that could use
//! it. So the thread does not go to sleep as soon as callers drive their groups themselves: for a few milliseconds it
//! naps, and looks around every fraction of one. Meanwhile short operations are handed to it without waking it; most of
//! them are waited for, and done, before it looks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::Result;

use super::group::Group;
use super::sleep::{Next, Patience, Sleeper};

/// The process's progress thread, seen from outside.
pub(crate) struct Progress {
    entrance: Mutex<Entrance>,
    sleeper: Sleeper,
    stopping: AtomicBool,
}

/// Where groups are handed to the thread.
#[derive(Default)]
struct Entrance {
    groups: Vec<Arc<Group>>,
    /// The thread comes to look without being woken.
    is_attended: bool,
}

/// What the thread found in a group.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Found {
    /// Something moved.
    pub(super) moved: bool,
    /// Operations are under way that nobody else drives.
    pub(super) waits: bool,
    /// Operations were handed over since the last look.
    pub(super) recent: bool,
}

/// Rounds between two looks at deadlines and at the state of peers, beside the one before each sleep.
const ROUNDS_PER_LOOK: u32 = 256;

/// How long a short operation may wait for the thread; a hundredth of a core's time goes into looking so often.
const NAP: Duration = Duration::from_micros(250);

/// Naps, since something was last handed over, before the sleep that somebody has to end.
const NAPS: u32 = 16;

impl Progress {
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            entrance: Mutex::default(),
            sleeper: Sleeper::new()?,
            stopping: AtomicBool::new(false),
        })
    }

    /// Hands a group with operations under way to the thread, which looks at it soon, or `at_once`. The caller holds the
    /// group's lock and has marked it as watched; the group is open, so the thread has not been told to end.
    pub(super) fn adopt(&self, group: Arc<Group>, at_once: bool) {
        let mut entrance = self.entrance.lock();
        entrance.groups.push(group);
        if at_once || !entrance.is_attended {
            drop(entrance);
            self.sleeper.ring();
        }
    }

    /// Ends the thread's nap: a group that it watches needs it at once.
    pub(super) fn wake(&self) {
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
        let mut naps = 0;
        let mut rounds = 0_u32;
        while self.admit(&mut groups, &mut naps) {
            // Also while one group moves without a pause: the waits of the others may be in vain.
            rounds = rounds.wrapping_add(1);
            let look_around = rounds.is_multiple_of(ROUNDS_PER_LOOK);
            let mut all = Found::default();
            for group in &groups {
                let found = group.drive(look_around);
                all.moved |= found.moved;
                all.waits |= found.waits;
                all.recent |= found.recent;
            }
            if all.moved || all.recent {
                naps = 0;
            }
            if all.moved {
                patience.reset();
            } else if all.waits {
                match patience.next() {
                    Next::Spin | Next::Yield => std::thread::yield_now(),
                    Next::Sleep => {
                        self.sleep(&mut groups);
                        patience.reset();
                    }
                }
            } else if naps < NAPS && !self.is_stopping() {
                naps += 1;
                patience.reset();
                self.sleeper.nap(NAP);
            } else {
                groups.retain(|group| !group.dismiss());
            }
        }
    }

    /// Takes in what was handed over. Sleeps while there is nothing to do; returns false when that is for good.
    fn admit(&self, groups: &mut Vec<Arc<Group>>, naps: &mut u32) -> bool {
        loop {
            let mut entrance = self.entrance.lock();
            if !entrance.groups.is_empty() {
                *naps = 0;
                groups.append(&mut entrance.groups);
            }
            entrance.is_attended = !groups.is_empty();
            if entrance.is_attended {
                return true;
            }
            drop(entrance);
            // Before this flag was set, every group that was ever handed over had been.
            if self.is_stopping() && self.entrance.lock().groups.is_empty() {
                return false;
            }
            self.sleeper.sleep_forever();
        }
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Sleeps until something happens to one of the groups that nobody else drives.
    fn sleep(&self, groups: &mut Vec<Arc<Group>>) {
        groups.retain(|group| !group.dismiss());
        let mut until = None;
        let mut ready = groups.is_empty();
        for group in &*groups {
            self.sleeper.watch_set(group.sleeper());
            ready |= group.prepare_sleep(&mut until);
        }
        if !ready && self.stop_attending() {
            self.sleeper.sleep(until);
        }
        for group in &*groups {
            group.finish_sleep();
            self.sleeper.forget_set(group.sleeper());
        }
    }

    /// From now on whoever hands a group over wakes the thread. False when somebody has, meanwhile.
    fn stop_attending(&self) -> bool {
        let mut entrance = self.entrance.lock();
        entrance.is_attended = !entrance.groups.is_empty();
        !entrance.is_attended
    }
}
