//! Where groups are handed to the progress thread, and what keeps it from sleeping past one.
//!
//! While the thread has groups it comes to look, and a group is handed over without waking it. Before it sleeps it takes
//! that back, under the same lock: a caller that hands a group over afterwards has to ring.

use std::sync::atomic::Ordering;

use crate::sync::{AtomicBool, Mutex};

/// Where groups of this kind wait for the thread.
pub(crate) struct Handover<G> {
    state: Mutex<State<G>>,
    stopping: AtomicBool,
}

struct State<G> {
    groups: Vec<G>,
    /// The thread comes to look without being woken.
    is_attended: bool,
}

/// The result of a look by the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// It has groups; `newly` when some have been handed over since.
    Groups { newly: bool },
    /// It has none, and is to sleep until the bell rings.
    Nothing,
    /// It has none, and there will be none.
    Over,
}

impl<G> Handover<G> {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(State {
                groups: Vec::new(),
                is_attended: false,
            }),
            stopping: AtomicBool::new(false),
        }
    }

    /// Hands a group over. Returns whether the bell must be rung for it.
    #[must_use]
    pub(crate) fn hand_over(&self, group: G) -> bool {
        let mut state = self.state.lock();
        state.groups.push(group);
        !state.is_attended
    }

    /// Nothing will be handed over any more. The bell must be rung after it.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Takes in what was handed over.
    pub(crate) fn look(&self, groups: &mut Vec<G>) -> Look {
        let mut state = self.state.lock();
        let newly = !state.groups.is_empty();
        groups.append(&mut state.groups);
        state.is_attended = !groups.is_empty();
        if state.is_attended {
            return Look::Groups { newly };
        }
        drop(state);
        // Before this flag was set, every group that was ever handed over had been.
        match self.is_stopping() && self.state.lock().groups.is_empty() {
            true => Look::Over,
            false => Look::Nothing,
        }
    }

    /// From now on a thread that hands a group over rings. False when one has been handed over meanwhile.
    pub(crate) fn stop_attending(&self) -> bool {
        let mut state = self.state.lock();
        state.is_attended = !state.groups.is_empty();
        !state.is_attended
    }
}

/// The thread and the callers that hand groups over, under every interleaving that loom can produce.
#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::{AtomicBool, Handover, Look, Ordering};
    use crate::sync::model::{Bell, explore};

    /// The group that waits for something; the others are done when they are looked at.
    const SLOW: u32 = 1;

    struct Office {
        handover: Handover<u32>,
        bell: Bell,
        /// The event that the slow group waits for has happened.
        has_happened: AtomicBool,
        /// Rung when a group is done that is not the slow one.
        done: Bell,
    }

    impl Office {
        fn adopt(&self, group: u32) {
            if self.handover.hand_over(group) {
                self.bell.ring();
            }
        }

        fn happen(&self) {
            self.has_happened.store(true, Ordering::Release);
            self.bell.ring();
        }

        fn stop(&self) {
            self.handover.stop();
            self.bell.ring();
        }

        /// As the progress thread does it. Returns the sum of the groups that were done.
        fn work(&self) -> u32 {
            let (mut groups, mut sum) = (Vec::new(), 0);
            loop {
                match self.handover.look(&mut groups) {
                    Look::Over => return sum,
                    Look::Nothing => self.bell.sleep(),
                    Look::Groups { .. } => {
                        let before = sum;
                        groups.retain(|group| self.waits(*group, &mut sum));
                        if sum == before && self.handover.stop_attending() {
                            self.bell.sleep();
                        }
                    }
                }
            }
        }

        fn waits(&self, group: u32, sum: &mut u32) -> bool {
            if group == SLOW && !self.has_happened.load(Ordering::Acquire) {
                return true;
            }
            *sum += group;
            if group != SLOW {
                self.done.ring();
            }
            false
        }
    }

    fn check(test: impl Fn(Arc<Office>) + Send + Sync + 'static) {
        explore(Some(3), move || {
            let office = Arc::new(Office {
                handover: Handover::new(),
                bell: Bell::new(),
                has_happened: AtomicBool::new(false),
                done: Bell::new(),
            });
            let same = Arc::clone(&office);
            let worker = thread::spawn(move || same.work());
            test(Arc::clone(&office));
            assert_eq!(worker.join().unwrap(), SLOW + 2);
        });
    }

    /// The event that the slow group waits for happens only when the second group is done.
    #[test]
    fn loom_no_group_is_slept_past() {
        check(|office| {
            office.adopt(SLOW);
            office.adopt(2);
            office.done.sleep();
            office.happen();
            office.stop();
        });
    }

    #[test]
    fn loom_two_hand_groups_over_at_once() {
        check(|office| {
            let other = {
                let office = Arc::clone(&office);
                thread::spawn(move || office.adopt(2))
            };
            office.adopt(SLOW);
            office.done.sleep();
            other.join().unwrap();
            office.happen();
            office.stop();
        });
    }
}
