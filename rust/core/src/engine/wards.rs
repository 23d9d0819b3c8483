//! The groups that the progress thread looks after although nobody waits in them.
//!
//! A rank that has nothing to exchange with a peer does not read what comes from it, and may do so little that it never
//! looks around by itself ([`super::pairs`]). So the thread looks into such a group, a few times a second while the group
//! works. When it has done nothing for one such pause, the thread has its links ring instead and sleeps: a process that
//! computes, or is idle, is not woken for this.

use std::sync::Weak;
use std::time::{Duration, Instant};

use super::group::Group;
use super::pairs::Outlook;
use super::sleep::Sleeper;

/// The pause between two looks into a group that works.
const PAUSE: Duration = Duration::from_millis(250);

/// The thread's list.
#[derive(Default)]
pub(super) struct Wards {
    wards: Vec<Ward>,
}

/// A group of the list.
pub(super) struct Ward {
    number: u32,
    group: Weak<Group>,
    /// How many operations it had had at the last look.
    seen: u64,
    /// When to look; `None` when something rings first.
    due: Option<Instant>,
}

impl Ward {
    /// The group with this number, to be looked into soon.
    pub(super) fn new(number: u32, group: Weak<Group>) -> Self {
        Self {
            number,
            group,
            seen: 0,
            due: Some(Instant::now() + PAUSE),
        }
    }
}

impl Wards {
    pub(super) fn admit(&mut self, newcomers: &mut Vec<Ward>) {
        self.wards.append(newcomers);
    }

    /// When to look next, if nothing rings before.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.wards.iter().filter_map(|ward| ward.due).min()
    }

    /// Something has come for this group.
    pub(super) fn rouse(&mut self, number: u32) {
        self.look_at(number, Duration::ZERO);
    }

    /// The thread drives this group: its links ring for other reasons.
    pub(super) fn note_work(&mut self, number: u32) {
        self.look_at(number, PAUSE);
    }

    /// Has the group looked into after a pause, if it is to ring.
    fn look_at(&mut self, number: u32, pause: Duration) {
        for ward in &mut self.wards {
            if ward.number == number {
                ward.due = ward.due.or_else(|| Some(Instant::now() + pause));
            }
        }
    }

    /// Looks into the groups whose time has come. Those that are to ring do it at `sleeper`.
    pub(super) fn look_out(&mut self, sleeper: &Sleeper) {
        if self.wards.is_empty() {
            return;
        }
        let now = Instant::now();
        self.wards.retain_mut(|ward| {
            let Some(group) = ward.group.upgrade() else {
                return false;
            };
            if ward.due.is_none_or(|due| now < due) {
                return true;
            }
            sleeper.forget_set(group.sleeper());
            ward.due = None;
            match group.look_out(&mut ward.seen) {
                Outlook::Over => return false,
                Outlook::Busy => ward.due = Some(now + PAUSE),
                Outlook::Quiet => {
                    if !sleeper.watch_set_as(group.sleeper(), ward.number) {
                        ward.due = Some(now + PAUSE);
                    }
                }
            }
            true
        });
    }
}
