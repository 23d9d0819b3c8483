//! Notices `fork`: a child has its parent's communicators but none of its threads, and must not touch them.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Code, Error, Result};

static FORKED: AtomicBool = AtomicBool::new(false);
static NOTED: Once = Once::new();

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// From now on children of this process are recognised.
pub(crate) fn note() {
    NOTED.call_once(|| {
        // SAFETY: the handler is a plain function that lives as long as the process and only stores to an atomic,
        // which is allowed between `fork` and `exec`.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// Refuses to go on in a forked child.
///
/// # Errors
/// `Aborted` in a process that was forked from one that uses unisono.
pub(crate) fn check() -> Result<()> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(Error::new(
            Code::Aborted,
            "this process was forked from one that uses unisono, whose threads and connections do not survive a fork; \
             start processes with spawn or forkserver, or use unisono only in the child",
        ));
    }
    Ok(())
}
