//! The runtime after a `fork`: a child has a runtime of its own, which is empty.
//!
//! A child has a copy of everything that its parent has in memory, and none of its threads. So whatever the parent's runtime
//! is (groups, threads, locks that a thread may have held, keys of the process) is left in the child as it is: not used, not
//! waited for, not freed. The child's own begins anew:
//!
//! - A value that a process has once lies in a [`PerProcess`], which is empty in a child.
//! - Each part of a group, a link or a listener bears the mark of the process that made it ([`Home`]). Its methods refuse to
//!   work elsewhere, and its drop reaches nothing outside: no farewell, no flag in shared memory, no wait for a thread. [`Own`]
//!   leaves whole trees of values as they are in a child; its memory goes with the process.
//! - Sockets are replaced in the child by something harmless (`sockets`), and memory that is shared with other processes by
//!   memory of the child's own (`memory`). So whatever the child does, its parent and the parent's peers do not see it.
//!
//! Entries for the child are made inside a gate, which a fork closes (`gate`). All of this is done by handlers of
//! `pthread_atfork`: a child that was made by the bare system call has none of it, and must execute a program or exit.

mod gate;
mod memory;
mod sockets;

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use self::gate::{Gate, Inside};
use crate::error::{Code, Error, Result};

pub(crate) use self::memory::{InChild, map_shared, unshare};
pub(crate) use self::sockets::{keep_private, make_private};

/// How many forks lie between the first process that was watched and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);
static WATCHED: AtomicBool = AtomicBool::new(false);

/// Threads that enter something for forked children are inside.
static GATE: Gate = Gate::new();

/// How often a fork yields to threads inside before it goes on regardless. They need microseconds.
const YIELDS: u32 = 10_000;

/// From now on children of this process are recognised.
pub(crate) fn watch() {
    if WATCHED.load(Ordering::Acquire) {
        return;
    }
    // Where two threads come here at once, the handlers run twice at each fork, which changes nothing. A lock would stay
    // taken in a child that is forked meanwhile.
    //
    // SAFETY: the handlers are plain functions that live as long as the process. The one for the child reads what is never
    // freed, takes no lock that it would wait for, and makes system calls, which is allowed between `fork` and `exec`.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    WATCHED.store(true, Ordering::Release);
}

/// Lets a thread enter something for forked children: none is forked while it is inside.
fn enter() -> Inside<'static> {
    watch();
    GATE.enter(std::thread::yield_now)
}

extern "C" fn before_fork() {
    // An entry that a thread makes later than this counts as made after the fork: the child shares its socket or memory.
    let _ = GATE.close(YIELDS, std::thread::yield_now);
}

extern "C" fn in_parent() {
    GATE.open();
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    GATE.reset();
    sockets::replace_all();
    memory::replace_all();
}

/// The process that made something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Home(u32);

impl Home {
    /// This process.
    pub(crate) fn here() -> Self {
        watch();
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether this is the process, and not a fork of it.
    #[inline]
    pub(crate) fn is_here(self) -> bool {
        self.0 == GENERATION.load(Ordering::Relaxed)
    }

    /// Refuses to go on in a fork of it.
    ///
    /// # Errors
    /// `Aborted` there.
    #[inline]
    pub(crate) fn check(self) -> Result<()> {
        match self.is_here() {
            true => Ok(()),
            false => Err(inherited()),
        }
    }
}

#[cold]
fn inherited() -> Error {
    Error::new(
        Code::Aborted,
        "this belongs to the process that this one was forked from: its threads and connections do not survive a fork; \
         make a communicator in this process, or start processes with spawn or forkserver",
    )
}

/// A value for a static: made when it is first used in a process, and anew in a forked child. There the parent's stays as
/// it was at the fork, and is not looked at: a thread that is not in the child may have held its locks.
///
/// No thread waits for another one that makes it. Of two values that are made at once, one is dropped.
pub struct PerProcess<T: 'static> {
    newest: AtomicPtr<Entry<T>>,
    make: fn() -> T,
}

struct Entry<T> {
    home: Home,
    /// That of the process that this one was forked from, if it had one.
    before: *const Self,
    value: T,
}

// SAFETY: a `PerProcess` makes values in whatever thread uses it first, and hands out shared references to them.
unsafe impl<T: Send + Sync> Sync for PerProcess<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Send for PerProcess<T> {}

impl<T> PerProcess<T> {
    /// One whose values `make` makes.
    pub const fn new(make: fn() -> T) -> Self {
        Self {
            newest: AtomicPtr::new(ptr::null_mut()),
            make,
        }
    }

    #[inline]
    fn newest(&self) -> Option<&'static Entry<T>> {
        // SAFETY: null, or an entry that `begin` has leaked. Acquire: it was written before.
        unsafe { self.newest.load(Ordering::Acquire).as_ref() }
    }

    #[cold]
    fn begin(&self) -> &'static T {
        let value = (self.make)();
        let mut entry = Box::new(Entry {
            home: Home::here(),
            before: ptr::null(),
            value,
        });
        loop {
            let newest = self.newest();
            if let Some(other) = newest.filter(|entry| entry.home.is_here()) {
                return &other.value;
            }
            let before = newest.map_or(ptr::null_mut(), |newest| ptr::from_ref(newest).cast_mut());
            entry.before = before;
            let place = Box::into_raw(entry);
            let put =
                self.newest
                    .compare_exchange(before, place, Ordering::AcqRel, Ordering::Relaxed);
            match put {
                // SAFETY: it is leaked from here on.
                Ok(_) => return unsafe { &(*place).value },
                // SAFETY: it came from a box, and no other thread has seen it.
                Err(_) => entry = unsafe { Box::from_raw(place) },
            }
        }
    }

    /// The values of the processes that this one was forked from, as they were at the forks. A lock in them may be
    /// taken for ever: it can be tried.
    pub fn inherited(&self) -> impl Iterator<Item = &'static T> {
        let mut next = self.newest();
        std::iter::from_fn(move || {
            let entry = next?;
            // SAFETY: null, or an entry that is leaked.
            next = unsafe { entry.before.as_ref() };
            Some(entry)
        })
        .filter(|entry| !entry.home.is_here())
        .map(|entry| &entry.value)
    }
}

impl<T> Deref for PerProcess<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        match self.newest() {
            Some(entry) if entry.home.is_here() => &entry.value,
            _ => self.begin(),
        }
    }
}

/// A value of the process that made it. A forked child's copy of it is never dropped: what dropping does may reach what
/// parent and child share, or wait for a lock or a thread that only the parent has.
///
/// A copy of it has the home of the original.
pub(crate) struct Own<T> {
    value: ManuallyDrop<T>,
    home: Home,
}

impl<T> Own<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            value: ManuallyDrop::new(value),
            home: Home::here(),
        }
    }

    /// Refuses to go on in a fork of the process that made it.
    ///
    /// # Errors
    /// `Aborted` there.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        self.home.check()
    }

    /// Whether this is the process that made it.
    pub(crate) fn is_here(&self) -> bool {
        self.home.is_here()
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if self.home.is_here() {
            // SAFETY: the value is not used again, since `self` goes.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

impl<T> Deref for Own<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Own<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T: Clone> Clone for Own<T> {
    fn clone(&self) -> Self {
        Self {
            value: self.value.clone(),
            home: self.home,
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Own<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::locks::Mutex;

    /// Whether `body`, which waits for nothing, holds in a forked child.
    pub(crate) fn in_child(body: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child makes system calls, and allocates, which the C library allows. An alarm ends it if this test
        // cannot.
        let child = match unsafe { libc::fork() } {
            0 => {
                // SAFETY: as above.
                unsafe { libc::alarm(30) };
                let holds = body();
                // SAFETY: as above.
                unsafe { libc::_exit(i32::from(!holds)) };
            }
            child => child,
        };
        let mut status = 0;
        // SAFETY: the kernel writes one number.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        status == 0
    }

    #[test]
    fn what_a_parent_made_is_refused_in_its_child() {
        let (home, own) = (Home::here(), Own::new(5));
        assert!(home.check().is_ok());
        assert!(in_child(|| !home.is_here()
            && Home::here().is_here()
            && *own == 5));
        assert!(home.is_here());
    }

    #[test]
    fn a_child_has_its_own_and_does_not_wait_for_its_parent_s_locks() {
        static VALUE: PerProcess<Mutex<u32>> = PerProcess::new(|| Mutex::new(1));
        *VALUE.lock() = 2;
        let held = VALUE.lock();
        let child = in_child(|| {
            let fresh = *VALUE.lock() == 1;
            *VALUE.lock() = 3;
            fresh && *VALUE.lock() == 3 && VALUE.inherited().count() == 1
        });
        drop(held);
        assert!(child);
        assert_eq!(*VALUE.lock(), 2);
        assert_eq!(VALUE.inherited().count(), 0);
    }

    #[test]
    fn all_threads_have_one() {
        static MADE: AtomicU32 = AtomicU32::new(0);
        static VALUE: PerProcess<AtomicU32> =
            PerProcess::new(|| AtomicU32::new(MADE.fetch_add(1, Ordering::Relaxed)));
        let places: Vec<usize> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| ptr::from_ref::<AtomicU32>(&VALUE).addr()))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert!(places.iter().all(|place| *place == places[0]));
    }
}
