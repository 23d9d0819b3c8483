//! When a call of the driver that may wait for the device is sure to return: while no stream of this process waits for a
//! peer, and none begins to.

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::attendant;

/// Shared by calls that put something into a stream; held alone by one that is about to have the driver wait.
static CALLS: RwLock<()> = RwLock::new(());

/// Until the guard goes, something may be put into a stream that waits for a peer.
pub(super) fn enter() -> RwLockReadGuard<'static, ()> {
    // Calls may be inside one another.
    CALLS.read_recursive()
}

/// Until the guard goes, nothing that waits for a peer is in a stream. `None`, at once, where that cannot be said.
pub(crate) fn still() -> Option<RwLockWriteGuard<'static, ()>> {
    let groups = attendant::groups();
    // Operations that have ended are taken off first.
    groups.iter().for_each(|group| group.settle());
    let alone = CALLS.try_write()?;
    // Those that came meanwhile, too.
    let groups = attendant::groups();
    let is_still = groups.iter().all(|group| !group.is_busy());
    is_still.then_some(alone)
}
