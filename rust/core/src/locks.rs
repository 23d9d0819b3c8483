//! Locks and condition variables. Threads wait for them in the kernel, by the address of one word.
//!
//! So nothing but the word itself says that a thread waits. That is what a forked child needs, which makes locks of its own
//! and leaves its parent's as they were: a library that lists waiting threads for the whole process (`parking_lot` is one)
//! has its parent's threads on that list, writes to their memory, and finds threads of the child's own there by then.
//!
//! (`device` keeps its `RwLock`, which a thread may read again while it reads: no device is used in the child of a process
//! that used one.)
//!
//! Besides, the lock knows how many threads wait for it, so that one that hardly ever lets go of it can let them have it
//! ([`MutexGuard::bump`](lock_api::MutexGuard::bump)). The standard library's does not, and costs a look at the panics of the
//! process each time; what a panic leaves is the business of the fences ([`crate::fence`]).

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use lock_api::{GuardNoSend, RawMutex, RawMutexFair};
use rustix::io::Errno;
use rustix::thread::futex::{self, Flags, Timespec};

/// A value that one thread uses at a time.
pub type Mutex<T> = lock_api::Mutex<Lock, T>;

/// A thread has the lock while it has this.
pub type MutexGuard<'a, T> = lock_api::MutexGuard<'a, Lock, T>;

/// How often a thread looks again before it sleeps: most locks are held for less time than that takes.
const SPINS: u32 = 100;

/// How often a thread that lets others have its lock first yields to them before it takes it again regardless.
const YIELDS: u32 = 1000;

/// A lock: the second of those in "Futexes Are Tricky" (Drepper, 2011).
#[derive(Debug)]
pub struct Lock {
    state: AtomicU32,
    /// How many threads wait.
    waiting: AtomicU32,
}

const FREE: u32 = 0;
const TAKEN: u32 = 1;
/// It is taken, and threads may sleep until it is not.
const AWAITED: u32 = 2;

// SAFETY: a thread has the lock when it has changed the state from `FREE`, which no other one does before it is `FREE` again,
// and that is written by the thread that has the lock alone. Acquire and release: what one did with the lock is done for the
// next.
unsafe impl RawMutex for Lock {
    const INIT: Self = Self {
        state: AtomicU32::new(FREE),
        waiting: AtomicU32::new(0),
    };

    type GuardMarker = GuardNoSend;

    #[inline]
    fn lock(&self) {
        if !self.try_lock() {
            self.wait();
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        let taken = self
            .state
            .compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok()
    }

    #[inline]
    unsafe fn unlock(&self) {
        if self.state.swap(FREE, Ordering::Release) == AWAITED {
            self.wake();
        }
    }
}

// SAFETY: as above. Fairness is as good as `YIELDS`.
unsafe impl RawMutexFair for Lock {
    unsafe fn unlock_fair(&self) {
        // SAFETY: the caller has the lock.
        unsafe { self.unlock() };
    }

    #[inline]
    unsafe fn bump(&self) {
        let waiting = self.waiting.load(Ordering::Relaxed);
        if waiting > 0 {
            // SAFETY: the caller has the lock, and has it again afterwards.
            unsafe { self.let_pass(waiting) };
        }
    }
}

impl Lock {
    #[cold]
    fn wait(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut spins = 0..SPINS;
        while spins.next().is_some() && self.state.load(Ordering::Relaxed) == TAKEN {
            std::hint::spin_loop();
        }
        // Whoever sleeps leaves the lock as awaited when it has it: others may sleep, too.
        while self.state.swap(AWAITED, Ordering::Acquire) != FREE {
            let _ = futex::wait(&self.state, Flags::PRIVATE, AWAITED, None);
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    #[cold]
    fn wake(&self) {
        // It fails for no word that can be read.
        let _ = futex::wake(&self.state, Flags::PRIVATE, 1);
    }

    /// Lets go of the lock until one of the threads that wait has had it.
    ///
    /// # Safety
    /// The caller has the lock.
    #[cold]
    unsafe fn let_pass(&self, waiting: u32) {
        // SAFETY: as the caller promises.
        unsafe { self.unlock() };
        for _ in 0..YIELDS {
            if self.waiting.load(Ordering::Relaxed) < waiting {
                break;
            }
            std::thread::yield_now();
        }
        self.lock();
    }
}

/// Where threads that have a lock wait for a change of what it protects. One may wake without any.
#[derive(Debug, Default)]
pub struct Condvar {
    changes: AtomicU32,
}

/// Why a wait with an end was over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// The time was up.
    pub fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    /// One at which no thread waits.
    pub const fn new() -> Self {
        Self {
            changes: AtomicU32::new(0),
        }
    }

    /// Lets go of the lock until there is a change.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.sleep(guard, None);
    }

    /// As [`Condvar::wait`], for `limit` at most.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, limit: Duration) -> WaitTimeoutResult {
        // A limit that no clock reaches is none.
        let limit = Timespec::try_from(limit).ok();
        self.sleep(guard, limit)
    }

    /// As [`Condvar::wait`], until `until` at the latest.
    pub fn wait_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        until: Instant,
    ) -> WaitTimeoutResult {
        self.wait_for(guard, until.saturating_duration_since(Instant::now()))
    }

    /// There is a change, for one of the threads that wait.
    pub fn notify_one(&self) {
        self.notify(1);
    }

    /// There is a change, for all of them.
    pub fn notify_all(&self) {
        self.notify(i32::MAX as u32);
    }

    fn sleep<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        limit: Option<Timespec>,
    ) -> WaitTimeoutResult {
        // The lock orders this: a change that comes after it was let go of has another number, and the kernel does not wait.
        let seen = self.changes.load(Ordering::Relaxed);
        let waited = MutexGuard::unlocked(guard, || {
            futex::wait(&self.changes, Flags::PRIVATE, seen, limit.as_ref())
        });
        WaitTimeoutResult(waited == Err(Errno::TIMEDOUT))
    }

    fn notify(&self, threads: u32) {
        self.changes.fetch_add(1, Ordering::Relaxed);
        // It fails for no word that can be read.
        let _ = futex::wake(&self.changes, Flags::PRIVATE, threads);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_that_waits_gets_the_lock_from_one_that_never_lets_go_of_it() {
        let mutex = Arc::new(Mutex::new(false));
        let mut guard = mutex.lock();
        let waiter = thread::spawn({
            let mutex = Arc::clone(&mutex);
            move || *mutex.lock() = true
        });
        while !*guard {
            MutexGuard::bump(&mut guard);
        }
        drop(guard);
        waiter.join().unwrap();
    }

    #[test]
    fn a_thread_that_comes_back_from_a_condition_waits_for_the_lock_like_any_other() {
        let shared = Arc::new((Mutex::new(0), Condvar::new()));
        let waiter = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let (mutex, changed) = &*shared;
                let mut value = mutex.lock();
                *value = 1;
                while *value < 2 {
                    changed.wait(&mut value);
                }
                *value = 3;
            }
        });
        let (mutex, changed) = &*shared;
        while *mutex.lock() < 1 {
            thread::yield_now();
        }
        let mut value = mutex.lock();
        *value = 2;
        changed.notify_one();
        while *value < 3 {
            MutexGuard::bump(&mut value);
        }
        drop(value);
        waiter.join().unwrap();
    }

    #[test]
    fn a_wait_ends_with_its_time() {
        let (mutex, changed) = (Mutex::new(()), Condvar::new());
        let until = Instant::now() + Duration::from_millis(2);
        while !changed.wait_until(&mut mutex.lock(), until).timed_out() {}
        assert!(Instant::now() >= until);
        assert!(changed.wait_until(&mut mutex.lock(), until).timed_out());
    }

    #[test]
    fn a_panic_poisons_nothing_and_leaves_the_guard_whole() {
        let mutex = Mutex::new(1);
        let mut guard = mutex.lock();
        let panics = || MutexGuard::unlocked(&mut guard, || panic!("on purpose"));
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        *guard = 2;
        assert!(mutex.try_lock().is_none());
        drop(guard);
        let panics = || {
            let _guard = mutex.lock();
            panic!("on purpose");
        };
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        assert_eq!(*mutex.lock(), 2);
        assert_eq!(mutex.into_inner(), 2);
    }
}
