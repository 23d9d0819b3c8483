//! The thread of a process that drives groups in which no caller waits. It sleeps when there is nothing to do, and ends when
//! told to.
//!
//! Waking a thread costs more than a short message takes, and a thread that wakes takes a core from a rank that could use
//! it. So the thread does not go to sleep as soon as callers drive their groups themselves: for a few milliseconds it
//! naps, and looks around every fraction of one. Meanwhile short operations are handed to it without waking it; most of
//! them are waited for, and done, before it looks.
//!
//! It also attends to the links on which peers ask whether this process runs, whatever the groups do: see `questions`. And
//! it looks after groups in which peers may wait for what no operation here expects: see `idle_groups`.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::error::Result;
use crate::locks::Mutex;
use crate::transport::endpoint::Lane;
use crate::types::Rank;

use crate::engine::collective::pair_counts::Outlook;
use crate::engine::drive::backoff::{Backoff, Next, Parker};
use crate::engine::drive::handover::{Handover, Look};
use crate::engine::drive::idle_groups::{IdleGroup, IdleGroups};

/// A group that the thread drives. It has operations, in which callers wait or do not, and links.
pub(crate) trait Driven: Send + Sync + 'static {
    /// Its number among those of this process.
    fn number(&self) -> u32;

    /// Where its links ring.
    fn parker(&self) -> &Parker;

    /// One turn of the thread, which keeps away while another thread drives.
    fn drive(&self, look_around: bool) -> Findings;

    /// Whether there is nothing more to do for the thread, which is noted then.
    fn dismiss(&self) -> bool;

    /// Announces on all links that the thread is about to sleep, until `until` at most. True when it must not.
    fn prepare_sleep(&self, until: &mut Option<Instant>) -> bool;

    /// The thread is awake again.
    fn finish_sleep(&self);

    /// Reads what has come over a link, and answers if it is a question.
    fn attend(&self, lane: Lane, peer: Rank);

    /// Looks at what comes from peers without being waited for. `seen`: how many operations there had been the last time.
    fn look_out(&self, seen: &mut u64) -> Outlook;
}

/// The process's progress thread, seen from outside.
pub(crate) struct Progress<G> {
    handover: Handover<Arc<G>>,
    parker: Parker,
    /// By their numbers, those with links that the thread attends to.
    attended: Mutex<FxHashMap<u32, Weak<G>>>,
    /// The groups to look after that the thread has not taken in yet.
    newcomers: Mutex<Vec<IdleGroup<G>>>,
}

/// The findings of the thread in a group.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Findings {
    /// Something moved.
    pub(crate) moved: bool,
    /// Operations are under way that no other thread drives.
    pub(crate) waits: bool,
    /// Operations were handed over since the last look.
    pub(crate) recent: bool,
}

/// Rounds between two looks at deadlines and at the state of peers, beside the one before each sleep.
const ROUNDS_PER_LOOK: u32 = 256;

/// How long a short operation may wait for the thread; a hundredth of a core's time goes into looking so often.
const NAP_LENGTH: Duration = Duration::from_micros(250);

/// Naps, since something was last handed over, before the sleep that another thread has to end.
const NAPS: u32 = 16;

impl<G: Driven> Progress<G> {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            handover: Handover::new(),
            parker: Parker::new()?,
            attended: Mutex::default(),
            newcomers: Mutex::default(),
        })
    }

    /// Hands a group with operations under way to the thread, which looks at it soon, or `at_once`. The caller holds the
    /// group's lock and has marked it as watched; the group is open, so the thread has not been told to end.
    pub(crate) fn adopt(&self, group: Arc<G>, at_once: bool) {
        if self.handover.hand_over(group) || at_once {
            self.parker.unpark();
        }
    }

    /// Ends the thread's nap: a group that it watches needs it at once.
    pub(crate) fn wake(&self) {
        self.parker.unpark();
    }

    /// Has the thread read what comes over the link with these descriptors, `(group, peer, lane)`, when something does.
    pub(crate) fn attend(
        &self,
        questions: BorrowedFd<'_>,
        (number, peer, lane): (u32, Rank, Lane),
        group: Weak<G>,
    ) {
        self.attended.lock().insert(number, group);
        let key = (u64::from(number) << 32) | ((peer as u64) << 1) | lane as u64;
        // Without memory for the entry, questions wait for a step of the group.
        let _ = self.parker.watch_as(questions, key);
    }

    /// Has the thread look after the group with this number for as long as it is open.
    pub(crate) fn look_after(&self, number: u32, group: Weak<G>) {
        self.newcomers.lock().push(IdleGroup::new(number, group));
        self.parker.unpark();
    }

    /// A group has been closed.
    pub(crate) fn forget(&self, number: u32) {
        self.attended.lock().remove(&number);
    }

    /// Something has come over links with these keys.
    fn hear(&self, keys: Vec<u64>, idle_groups: &mut IdleGroups<G>) {
        for key in keys {
            let number = (key >> 32) as u32;
            if key == Parker::set_key(number) {
                idle_groups.rouse(number);
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
    fn look_out(&self, idle_groups: &mut IdleGroups<G>) {
        idle_groups.admit(&mut self.newcomers.lock());
        idle_groups.look_out(&self.parker);
    }

    /// Every group has been closed: the thread ends when it has let go of them.
    pub(crate) fn stop(&self) {
        self.handover.stop();
        self.parker.unpark();
    }

    /// The thread's work.
    pub(crate) fn run(&self) {
        let mut groups: Vec<Arc<G>> = Vec::new();
        let mut backoff = Backoff::of_background();
        let mut naps = 0;
        let mut rounds = 0_u32;
        let mut idle_groups = IdleGroups::new();
        while self.admit(&mut groups, &mut naps, &mut idle_groups) {
            // Also while one group moves without a pause: the waits of the others may be in vain.
            rounds = rounds.wrapping_add(1);
            let look_around = rounds.is_multiple_of(ROUNDS_PER_LOOK);
            if look_around {
                self.hear(self.parker.clear(), &mut idle_groups);
                self.look_out(&mut idle_groups);
            }
            let mut all = Findings::default();
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
                backoff.reset();
            } else if all.waits {
                match backoff.next() {
                    Next::Spin | Next::Yield => std::thread::yield_now(),
                    Next::Sleep => {
                        self.sleep(&mut groups, &mut idle_groups);
                        backoff.reset();
                    }
                }
            } else if naps < NAPS && !self.handover.is_stopping() {
                naps += 1;
                backoff.reset();
                self.parker.nap(NAP_LENGTH);
            } else {
                groups.retain(|group| !group.dismiss());
            }
        }
    }

    /// Takes in what was handed over. Sleeps while there is nothing to do; returns false when that is for good.
    fn admit(
        &self,
        groups: &mut Vec<Arc<G>>,
        naps: &mut u32,
        idle_groups: &mut IdleGroups<G>,
    ) -> bool {
        loop {
            match self.handover.look(groups) {
                Look::Groups { newly } => {
                    if newly {
                        *naps = 0;
                    }
                    return true;
                }
                Look::Over => return false,
                Look::Nothing => {
                    let keys = self.parker.sleep_long(idle_groups.next_due());
                    self.hear(keys, idle_groups);
                    self.look_out(idle_groups);
                }
            }
        }
    }

    /// Sleeps until something happens to one of the groups that no other thread drives.
    fn sleep(&self, groups: &mut Vec<Arc<G>>, idle_groups: &mut IdleGroups<G>) {
        groups.retain(|group| !group.dismiss());
        let mut until = idle_groups.next_due();
        let mut ready = groups.is_empty();
        for group in &*groups {
            self.parker.watch_set(group.parker());
            idle_groups.note_work(group.number());
            ready |= group.prepare_sleep(&mut until);
        }
        let mut keys = Vec::new();
        if !ready && self.handover.stop_attending() {
            keys = self.parker.sleep(until);
        }
        for group in &*groups {
            group.finish_sleep();
            self.parker.forget_set(group.parker());
        }
        self.hear(keys, idle_groups);
        self.look_out(idle_groups);
    }
}
