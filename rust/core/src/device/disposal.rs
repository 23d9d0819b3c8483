//! Giving back what the driver holds.

use std::time::Duration;

use crate::threads;

/// How long memory that a rank gives back is kept for peers that have not unmapped it.
pub(super) const LONGEST_UNMAPPING: Duration = Duration::from_secs(3);
/// How long it is kept for peers whose streams or graphs may still read it.
pub(super) const LONGEST_READING: Duration = Duration::from_secs(60);

/// Gives back what the driver may take its time to take back, on a thread of its own.
pub(super) fn dispose(give_back: impl FnOnce() + Send + 'static) {
    let dropping = threads::spawn("unisono-dispose", give_back);
    if let Err(cause) = dropping {
        tracing::warn!("no thread to give device memory back: {cause}");
    }
}
