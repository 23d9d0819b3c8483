//! A gate that threads pass while they make something that a forked child must not have unentered, and that a fork closes.
//!
//! Threads that are inside and forks under way are counted in one word, so each change of either sees the other. A thread
//! that enters while the gate is closed waits without a trace in the word, and the fork has only those to wait for that
//! were inside when it closed the gate.
//!
//! The work of a thread inside happens before the end of the fork's wait for it: the thread leaves with release and the fork
//! looks with acquire. The work of a fork while the gate is closed happens before a later entry of a thread, in the same way.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::sync::Word;

/// Threads inside in the lower half, forks under way in the upper one.
pub(super) struct Gate<W = AtomicU32>(W);

const FORK: u32 = 1 << 16;

impl Gate {
    pub(super) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }
}

impl<W: Word<Value = u32>> Gate<W> {
    /// Goes inside, unless the gate is closed.
    pub(super) fn try_enter(&self) -> Option<Inside<'_, W>> {
        let mut seen = self.0.load(Ordering::Relaxed);
        while seen < FORK {
            let entered =
                self.0
                    .compare_exchange(seen, seen + 1, Ordering::Acquire, Ordering::Relaxed);
            match entered {
                Ok(_) => return Some(Inside(self)),
                Err(now) => seen = now,
            }
        }
        None
    }

    /// Goes inside. Calls `pause` as long as the gate is closed.
    pub(super) fn enter(&self, mut pause: impl FnMut()) -> Inside<'_, W> {
        loop {
            match self.try_enter() {
                Some(inside) => return inside,
                None => pause(),
            }
        }
    }

    /// Closes the gate and waits until no thread is inside, calling `pause` at most `patience` times. False when one is still.
    pub(super) fn close(&self, patience: u32, mut pause: impl FnMut()) -> bool {
        let mut seen = self.0.fetch_add(FORK, Ordering::Acquire);
        for _ in 0..patience {
            if seen.is_multiple_of(FORK) {
                return true;
            }
            pause();
            seen = self.0.load(Ordering::Acquire);
        }
        seen.is_multiple_of(FORK)
    }

    /// Opens it again, in the parent. Another fork may keep it closed.
    pub(super) fn open(&self) {
        self.0.fetch_sub(FORK, Ordering::Release);
    }

    /// Opens it in a child, which has one thread, outside.
    pub(super) fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// A thread is inside while it has this.
pub(super) struct Inside<'a, W: Word<Value = u32> = AtomicU32>(&'a Gate<W>);

impl<W: Word<Value = u32>> Drop for Inside<'_, W> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Release);
    }
}

/// Threads that go inside and forks that close the gate, under every interleaving and order that loom can produce.
#[cfg(all(test, loom))]
mod model {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::Gate;
    use crate::sync::model::{AtomicU32, explore};

    struct Process {
        gate: Gate<AtomicU32>,
        /// The values that threads make inside and a child looks at, one for each thread.
        made: [UnsafeCell<u32>; 2],
    }

    // SAFETY: that what is made is shared rightly is what is tested; loom reports it if it is not.
    unsafe impl Sync for Process {}

    impl Process {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                gate: Gate(AtomicU32::new(0)),
                made: [UnsafeCell::new(0), UnsafeCell::new(0)],
            })
        }

        /// Returns how many were made: none where the gate was closed, since loom has no end of a loop that waits for
        /// another one.
        fn make(&self, place: usize) -> u32 {
            let Some(_inside) = self.gate.try_enter() else {
                return 0;
            };
            // SAFETY: loom refuses the access while a fork may be looking.
            self.made[place].with_mut(|made| unsafe { *made += 1 });
            1
        }

        /// The values that a child would find; `None` where the fork would have to wait more than once.
        fn fork(&self) -> Option<[u32; 2]> {
            let found = self.gate.close(1, thread::yield_now).then(|| {
                // SAFETY: loom refuses the access while a thread may be making something.
                [0, 1].map(|place| self.made[place].with(|made| unsafe { *made }))
            });
            self.gate.open();
            found
        }
    }

    #[test]
    fn loom_a_fork_finds_nothing_half_made() {
        explore(Some(3), || {
            let process = Process::new();
            let makers = [0, 1].map(|place| {
                let process = Arc::clone(&process);
                thread::spawn(move || process.make(place))
            });
            process.fork();
            let made = makers.map(|maker| maker.join().unwrap());
            assert_eq!(process.fork(), Some(made));
        });
    }

    #[test]
    fn loom_two_forks_at_once_keep_the_gate_closed() {
        explore(Some(3), || {
            let process = Process::new();
            let other = {
                let process = Arc::clone(&process);
                thread::spawn(move || process.fork())
            };
            let maker = {
                let process = Arc::clone(&process);
                thread::spawn(move || process.make(0))
            };
            process.fork();
            other.join().unwrap();
            let made = maker.join().unwrap();
            assert_eq!(process.fork(), Some([made, 0]));
        });
    }
}
