//! The memory of peers that this process has mapped: one mapping serves all groups of the process.

use std::sync::{Arc, Weak};

use super::driver::Device;
use super::window::{PeerWindow, Record};
use crate::error::Result;
use crate::locks::Mutex;

static MAPPINGS: Mutex<Vec<Mapping>> = Mutex::new(Vec::new());

struct Mapping {
    /// The device that it is mapped for.
    device: u32,
    record: Record,
    window: Weak<PeerWindow>,
}

/// The memory that a peer has made a record of, mapped for `device`. Dropping the last use of it may wait until the device is
/// idle.
///
/// # Errors
/// As [`PeerWindow::open`].
pub(crate) fn map(device: &'static Device, record: &Record) -> Result<Arc<PeerWindow>> {
    let mut all = MAPPINGS.lock();
    all.retain(|mapping| mapping.window.strong_count() > 0);
    let found = all
        .iter()
        .find(|mapping| mapping.device == device.number() && mapping.record == *record);
    if let Some(window) = found.and_then(|mapping| mapping.window.upgrade()) {
        return Ok(window);
    }
    let window = Arc::new(PeerWindow::open(device, record)?);
    all.push(Mapping {
        device: device.number(),
        record: record.clone(),
        window: Arc::downgrade(&window),
    });
    Ok(window)
}
