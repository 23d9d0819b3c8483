//! The groups that the progress thread looks after although no caller waits in them.
//!
//! A rank that has nothing to exchange with a peer does not read what comes from it, and may do so little that it never
//! looks around by itself ([`crate::engine::collective::pair_counts`]). So the thread looks into such a group, a few times a
//! second while the group works. When the group has done nothing for one such pause, the thread has its links ring instead
//! and sleeps: a process that computes, or is idle, is not woken for this.

use std::sync::Weak;
use std::time::{Duration, Instant};

use crate::engine::collective::pair_counts::Outlook;
use crate::engine::drive::backoff::Parker;
use crate::engine::drive::progress::Driven;

/// The pause between two looks into a group that works.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// The thread's list.
pub(crate) struct IdleGroups<G> {
    idle_groups: Vec<IdleGroup<G>>,
}

/// A group of the list.
pub(crate) struct IdleGroup<G> {
    number: u32,
    group: Weak<G>,
    /// How many operations it had had at the last look.
    seen: u64,
    /// When to look; `None` when something rings first.
    due: Option<Instant>,
}

impl<G> IdleGroup<G> {
    /// The group with this number, to be looked into soon.
    pub(crate) fn new(number: u32, group: Weak<G>) -> Self {
        Self {
            number,
            group,
            seen: 0,
            due: Some(Instant::now() + LOOK_INTERVAL),
        }
    }
}

impl<G: Driven> IdleGroups<G> {
    pub(crate) fn new() -> Self {
        Self {
            idle_groups: Vec::new(),
        }
    }

    pub(crate) fn admit(&mut self, newcomers: &mut Vec<IdleGroup<G>>) {
        self.idle_groups.append(newcomers);
    }

    /// When to look next, if nothing rings before.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.idle_groups
            .iter()
            .filter_map(|idle_group| idle_group.due)
            .min()
    }

    /// Something has come for this group.
    pub(crate) fn rouse(&mut self, number: u32) {
        self.look_at(number, Duration::ZERO);
    }

    /// The thread drives this group: its links ring for other reasons.
    pub(crate) fn note_work(&mut self, number: u32) {
        self.look_at(number, LOOK_INTERVAL);
    }

    /// Has the group looked into after a pause, if it is to ring.
    fn look_at(&mut self, number: u32, pause: Duration) {
        for idle_group in &mut self.idle_groups {
            if idle_group.number == number {
                idle_group.due = idle_group.due.or_else(|| Some(Instant::now() + pause));
            }
        }
    }

    /// Looks into the groups whose time has come. Those that are to ring do it at `parker`.
    pub(crate) fn look_out(&mut self, parker: &Parker) {
        if self.idle_groups.is_empty() {
            return;
        }
        let now = Instant::now();
        self.idle_groups.retain_mut(|idle_group| {
            let Some(group) = idle_group.group.upgrade() else {
                return false;
            };
            if idle_group.due.is_none_or(|due| now < due) {
                return true;
            }
            parker.forget_set(group.parker());
            idle_group.due = None;
            match group.look_out(&mut idle_group.seen) {
                Outlook::Over => return false,
                Outlook::Busy => idle_group.due = Some(now + LOOK_INTERVAL),
                Outlook::Quiet => {
                    if !parker.watch_set_as(group.parker(), idle_group.number) {
                        idle_group.due = Some(now + LOOK_INTERVAL);
                    }
                }
            }
            true
        });
    }
}
