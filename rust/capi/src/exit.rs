//! The end of the process: what is left open is closed in good order, and the threads end before it.

use std::process;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::communicator::COMMUNICATORS;
use crate::fence::fence;

/// How long the exit may wait for our threads, which need far less.
const THREADS_END: Duration = Duration::from_secs(1);

static PREPARED: Once = Once::new();
/// The process that did: the handlers of a forked child are its parent's.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// From now on `exit` closes what is open.
pub(crate) fn prepare() {
    PREPARED.call_once(|| {
        PROCESS.store(process::id(), Ordering::Relaxed);
        // SAFETY: a plain function of this library, which is never unloaded (it is linked with -z nodelete).
        unsafe { libc::atexit(close_all) };
    });
}

extern "C" fn close_all() {
    if process::id() != PROCESS.load(Ordering::Relaxed) {
        return;
    }
    // The process ends: no caller is left to get an error.
    let _ = fence(|| {
        for joined in COMMUNICATORS.all() {
            joined.close();
        }
        unisono::wait_for_threads(THREADS_END);
        Ok(())
    });
}
