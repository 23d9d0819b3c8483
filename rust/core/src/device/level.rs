//! How deep the attendant sleeps, so that a thread which has something new for it knows whether to wake it.
//!
//! Before it sleeps the attendant says so, issues a sequentially consistent fence and looks once more at what there is to
//! do. A thread that has added something issues such a fence and looks at the level. One of the two fences comes first:
//! either the attendant sees what was added, or the thread sees that it sleeps and wakes it.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::sync::{Word, fence};

/// Awake, napping or asleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    /// It looks soon.
    Awake,
    /// It looks again by itself, but not soon.
    Napping,
    /// It looks when it is woken.
    Asleep,
}

/// The level of a sleeper, for others to see.
pub(super) struct Sleeper<W = AtomicU32>(W);

impl Sleeper {
    pub(super) const fn new() -> Self {
        Self(AtomicU32::new(Level::Awake as u32))
    }
}

impl<W: Word<Value = u32>> Sleeper<W> {
    /// Says that it is about to sleep. The caller must look for work once more after that.
    pub(super) fn lie_down(&self, level: Level) {
        self.0.store(level as u32, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Says that it is awake.
    pub(super) fn get_up(&self) {
        self.0.store(Level::Awake as u32, Ordering::Relaxed);
    }

    /// Whether it must be woken from this level or a deeper one, so that it sees what this thread has just added. Costs a
    /// fence and a load.
    pub(super) fn sleeps(&self, from: Level) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) >= from as u32
    }
}

/// A sleeper and a thread that adds something, under every interleaving and order that loom can produce.
#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::{Level, Ordering, Sleeper};
    use crate::sync::model::{AtomicBool, AtomicU32, Bell, explore};

    #[test]
    fn loom_nothing_that_was_added_is_slept_past() {
        explore(None, || {
            let shared = Arc::new((
                Sleeper(AtomicU32::new(0)),
                AtomicBool::new(false),
                Bell::new(),
            ));
            let adder = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let (sleeper, added, bell) = &*shared;
                    added.store(true, Ordering::Relaxed);
                    if sleeper.sleeps(Level::Asleep) {
                        bell.ring();
                    }
                })
            };
            let (sleeper, added, bell) = &*shared;
            sleeper.lie_down(Level::Asleep);
            if !added.load(Ordering::Relaxed) {
                bell.sleep();
                assert!(added.load(Ordering::Relaxed));
            }
            sleeper.get_up();
            adder.join().unwrap();
        });
    }
}
