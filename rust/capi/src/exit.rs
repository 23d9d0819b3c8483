//! The end of the process: what is left open is closed in good order, and the threads end before it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::communicator::COMMUNICATORS;
use crate::fence::fence;

/// How long the exit may wait for our threads, which need far less.
const THREADS_END: Duration = Duration::from_secs(1);

static PREPARED: AtomicBool = AtomicBool::new(false);

/// From now on `exit` closes what is open, in forked children too, which inherit the handler.
pub(crate) fn prepare() {
    if !PREPARED.swap(true, Ordering::Relaxed) {
        // SAFETY: a plain function of this library, which is never unloaded (it is linked with -z nodelete).
        unsafe { libc::atexit(close_all) };
    }
}

extern "C" fn close_all() {
    // The process ends: no caller is left to get an error.
    let _ = fence(|| {
        for joined in COMMUNICATORS.all() {
            joined.close();
        }
        unisono::wait_for_threads(THREADS_END);
        Ok(())
    });
}
