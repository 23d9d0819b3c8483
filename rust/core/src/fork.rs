//! Notices `fork`: a child has its parent's communicators but none of its threads, and must not touch them; and it
//! shares the memory of its parent's heap, in which it must not hand out or free anything.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Code, Error, Result};

/// This process was forked from one that was watched.
static CHILD: AtomicBool = AtomicBool::new(false);
/// This process has or had communicators.
static COMMUNICATES: AtomicBool = AtomicBool::new(false);
/// It was forked from one that had.
static ORPHANED: AtomicBool = AtomicBool::new(false);
static WATCHED: Once = Once::new();

extern "C" fn in_child() {
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
