//! Giving back what the driver holds.

use crate::threads;

/// Gives back what the driver may take its time to take back, on a thread of its own.
pub(super) fn dispose(give_back: impl FnOnce() + Send + 'static) {
    let dropping = threads::spawn("unisono-dispose", give_back);
    if let Err(cause) = dropping {
        tracing::warn!("no thread to give device memory back: {cause}");
    }
}
