//! A word that one rank changes and another one changes back, and the sleep until it does.
//!
//! # Sleeping
//!
//! A thread counts itself among the sleepers, issues a sequentially consistent fence and tries once more before it sleeps. A
//! thread that has changed a word issues such a fence and looks at the count. One of the fences comes first, so either the
//! sleeper finds the word changed or the other thread finds the sleeper, and wakes it. The kernel compares the word once more.
//! A process that dies in its sleep stays counted, which costs others a needless call of the system for each change.
//!
//! It is generic over its words: the test model-checks the same code with loom.

use std::sync::atomic::Ordering;

use crate::sync::{Word, fence};

/// A word, and the count of the threads that sleep until it, or another one of the same count, changes.
pub(super) struct Flag<'a, W> {
    pub(super) word: &'a W,
    pub(super) sleepers: &'a W,
}

impl<W: Word<Value = u32>> Flag<'_, W> {
    /// Changes the word if it is `from`. Returns whether there are sleepers to be woken, or else the value of the word.
    #[inline]
    pub(super) fn change(&self, from: u32, to: u32) -> Result<bool, u32> {
        // The side that changes it back sees everything that this side did before, and the other way round.
        self.word
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)?;
        fence(Ordering::SeqCst);
        Ok(self.sleepers.load(Ordering::Relaxed) != 0)
    }

    /// Announces that this thread is about to sleep. It must try once more after this.
    pub(super) fn arm(&self) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// This thread sleeps no more.
    pub(super) fn disarm(&self) {
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Two ranks, under every interleaving and every weak ordering that loom can produce.
#[cfg(all(test, loom))]
mod model {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::sync::model::{AtomicU32, Bell, explore};

    #[derive(Default)]
    struct Host {
        word: AtomicU32,
        sleepers: AtomicU32,
        memory: UnsafeCell<u32>,
    }

    // SAFETY: that the memory is shared rightly is what is tested; loom reports it if it is not.
    unsafe impl Sync for Host {}

    impl Host {
        fn flag(&self) -> Flag<'_, AtomicU32> {
            Flag {
                word: &self.word,
                sleepers: &self.sleepers,
            }
        }
    }

    #[test]
    fn loom_a_sleeper_is_woken_and_finds_the_memory_written() {
        explore(None, || {
            let host = Arc::new(Host::default());
            let bell = Bell::new();
            let (other, rung) = (Arc::clone(&host), bell.clone());
            let thread = thread::spawn(move || {
                // SAFETY: see `Host`.
                other.memory.with_mut(|memory| unsafe { *memory = 7 });
                if other.flag().change(0, 1).expect("no other thread sets it") {
                    rung.ring();
                }
            });
            let flag = host.flag();
            if flag.change(1, 0).is_err() {
                flag.arm();
                // The kernel compares the word in the same way.
                if flag.change(1, 0).is_err() {
                    bell.sleep();
                    assert_eq!(flag.change(1, 0), Ok(true));
                }
                flag.disarm();
            }
            // SAFETY: as above.
            assert_eq!(host.memory.with(|memory| unsafe { *memory }), 7);
            thread.join().unwrap();
        });
    }
}
