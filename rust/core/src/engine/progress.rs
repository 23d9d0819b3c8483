//! The thread of a process that drives groups nobody waits for. It sleeps when there is nothing to do, and ends when told
//! to.
//!
//! Waking a thread costs more than a short message takes, and a thread that wakes takes a core from a rank that could use
//! it. So the thread does not go to sleep as soon as callers drive their groups themselves: for a few milliseconds it
//! naps, and looks around every fraction of one. Meanwhile short operations are handed to it without waking it; most of
//! them are waited for, and done, before it looks.
//!
//! It also attends to the links on which peers ask whether this process runs, whatever the groups do: see `questions`. And
//! it looks after groups in which peers may wait for what nobody here knows of: see `wards`.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::error::Result;
use crate::transport::endpoint::Lane;
use crate::types::Rank;

use super::entrance::{Entrance, Look};
use super::group::Group;
use super::sleep::{Next, Patience, Sleeper};
use super::wards::{Ward, Wards};

/// The process's progress thread, seen from outside.
pub(crate) struct Progress {
    entrance: Entrance<Arc<Group>>,
    sleeper: Sleeper,
    /// By their numbers, those with links that the thread attends to.
    attended: Mutex<FxHashMap<u32, Weak<Group>>>,
    /// The groups to look after that the thread has not taken in yet.
    newcomers: Mutex<Vec<Ward>>,
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
            entrance: Entrance::new(),
            sleeper: Sleeper::new()?,
            attended: Mutex::default(),
            newcomers: Mutex::default(),
        })
    }

    /// Hands a group with operations under way to the thread, which looks at it soon, or `at_once`. The caller holds the
    /// group's lock and has marked it as watched; the group is open, so the thread has not been told to end.
    pub(super) fn adopt(&self, group: Arc<Group>, at_once: bool) {
        if self.entrance.hand_over(group) || at_once {
            self.sleeper.ring();
        }
    }

    /// Ends the thread's nap: a group that it watches needs it at once.
    pub(super) fn wake(&self) {
        self.sleeper.ring();
    }

    /// Has the thread read what comes over the link with these descriptors, `(group, peer, lane)`, when something does.
    pub(super) fn attend(
        &self,
        questions: BorrowedFd<'_>,
        (number, peer, lane): (u32, Rank, Lane),
        group: Weak<Group>,
    ) {
        self.attended.lock().insert(number, group);
        let key = (u64::from(number) << 32) | ((peer as u64) << 1) | lane as u64;
        // Without memory for the entry, questions wait for a step of the group.
        let _ = self.sleeper.watch_as(questions, key);
    }

    /// Has the thread look after the group with this number for as long as it is open.
    pub(super) fn look_after(&self, number: u32, group: Weak<Group>) {
        self.newcomers.lock().push(Ward::new(number, group));
        self.sleeper.ring();
    }

    /// A group has been closed.
    pub(super) fn forget(&self, number: u32) {
        self.attended.lock().remove(&number);
    }

    /// Something has come over links with these keys.
    fn hear(&self, keys: Vec<u64>, wards: &mut Wards) {
        for key in keys {
            let number = (key >> 32) as u32;
            if key == Sleeper::set_key(number) {
                wards.rouse(number);
                continue;
            }
            let group = self.attended.lock().get(&number).and_then(Weak::upgrade);
            let lane = match key & 1 {
                0 => Lane::Collective,
                _ => Lane::PointToPoint,
            };
            if let Some(group) = group {
                group.attend(lane, (key as u32 >> 1) as Rank);
            }
        }
    }

    /// Looks after the groups whose time has come.
    fn look_out(&self, wards: &mut Wards) {
        wards.admit(&mut self.newcomers.lock());
        wards.look_out(&self.sleeper);
    }

    /// Every group has been closed: the thread ends when it has let go of them.
    pub(super) fn stop(&self) {
        self.entrance.stop();
        self.sleeper.ring();
    }

    /// The thread's work.
    pub(super) fn run(&self) {
        let mut groups: Vec<Arc<Group>> = Vec::new();
        let mut patience = Patience::of_background();
        let mut naps = 0;
        let mut rounds = 0_u32;
        let mut wards = Wards::default();
        while self.admit(&mut groups, &mut naps, &mut wards) {
            // Also while one group moves without a pause: the waits of the others may be in vain.
            rounds = rounds.wrapping_add(1);
            let look_around = rounds.is_multiple_of(ROUNDS_PER_LOOK);
            if look_around {
                self.hear(self.sleeper.clear(), &mut wards);
                self.look_out(&mut wards);
            }
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
                        self.sleep(&mut groups, &mut wards);
                        patience.reset();
                    }
                }
            } else if naps < NAPS && !self.entrance.is_stopping() {
                naps += 1;
                patience.reset();
                self.sleeper.nap(NAP);
            } else {
                groups.retain(|group| !group.dismiss());
            }
        }
    }

    /// Takes in what was handed over. Sleeps while there is nothing to do; returns false when that is for good.
    fn admit(&self, groups: &mut Vec<Arc<Group>>, naps: &mut u32, wards: &mut Wards) -> bool {
        loop {
            match self.entrance.look(groups) {
                Look::Groups { newly } => {
                    if newly {
                        *naps = 0;
                    }
                    return true;
                }
                Look::Over => return false,
                Look::Nothing => {
                    let keys = self.sleeper.sleep_long(wards.next_due());
                    self.hear(keys, wards);
                    self.look_out(wards);
                }
            }
        }
    }

    /// Sleeps until something happens to one of the groups that nobody else drives.
    fn sleep(&self, groups: &mut Vec<Arc<Group>>, wards: &mut Wards) {
        groups.retain(|group| !group.dismiss());
        let mut until = wards.next_due();
        let mut ready = groups.is_empty();
        for group in &*groups {
            self.sleeper.watch_set(group.sleeper());
            wards.note_work(group.number());
            ready |= group.prepare_sleep(&mut until);
        }
        let mut keys = Vec::new();
        if !ready && self.entrance.stop_attending() {
            keys = self.sleeper.sleep(until);
        }
        for group in &*groups {
            group.finish_sleep();
            self.sleeper.forget_set(group.sleeper());
        }
        self.hear(keys, wards);
        self.look_out(wards);
    }
}
