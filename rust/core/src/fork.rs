//! Notices `fork`: a child has its parent's communicators but none of its threads, and must not touch them; and it
//! shares the memory of its parent's heap, in which it must not hand out or free anything. Of its parent's sockets it has
//! nothing: see `sockets`.
//!
//! What a process shares with others (rings, sockets, threads, locks) bears the mark of the process that made it
//! ([`Home`]). A forked child has a copy of every such thing, and drops its copies as it likes; what a drop does to the
//! outside (a farewell, a flag in shared memory, a wait for a thread) happens only in the process that made it. [`Own`]
//! leaves whole trees of values as they are in a child: its memory goes with the process, and the kernel closes its
//! copies of descriptors.

mod gate;
mod sockets;

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::error::{Code, Error, Result};

pub(crate) use self::sockets::{keep_private, make_private};

/// This process was forked from one that was watched.
static CHILD: AtomicBool = AtomicBool::new(false);
/// This process has or had communicators.
static COMMUNICATES: AtomicBool = AtomicBool::new(false);
/// It was forked from one that had.
static ORPHANED: AtomicBool = AtomicBool::new(false);
/// How many forks lie between the first process that was watched and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);
static WATCHED: Once = Once::new();

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    CHILD.store(true, Ordering::Relaxed);
    if COMMUNICATES.load(Ordering::Relaxed) {
        ORPHANED.store(true, Ordering::Relaxed);
    }
}

/// From now on children of this process are recognised.
pub(crate) fn watch() {
    WATCHED.call_once(|| {
        // SAFETY: the handler is a plain function that lives as long as the process and only touches atomics, which is
        // allowed between `fork` and `exec`.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// From now on children of this process may not communicate.
pub(crate) fn note() {
    watch();
    COMMUNICATES.store(true, Ordering::Relaxed);
}

/// Whether this process was forked from one that was watched.
#[inline]
pub(crate) fn is_child() -> bool {
    CHILD.load(Ordering::Relaxed)
}

/// Refuses to go on in a forked child.
///
/// # Errors
/// `Aborted` in a process that was forked from one that has communicators.
#[inline]
pub fn check() -> Result<()> {
    match ORPHANED.load(Ordering::Relaxed) {
        true => Err(orphaned()),
        false => Ok(()),
    }
}

#[cold]
fn orphaned() -> Error {
    Error::new(
        Code::Aborted,
        "this process was forked from one that uses unisono, whose threads and connections do not survive a fork; \
         start processes with spawn or forkserver, or use unisono only in the child",
    )
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
