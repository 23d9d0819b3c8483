//! Longer windows, for which the ranks of a device group meet again.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::engine::{Group, Request};
use crate::error::{Error, Result};
use crate::transport::cuda::driver::Device;

use super::attendant;
use super::direct::Direct;
use super::formation::{Opened, gather, open_windows};
use super::state::{DeviceGroup, Way};

impl DeviceGroup {
    /// Has the ranks meet for the longer windows that `request` wants, and returns the way with what comes of it.
    pub(super) fn widen(&self, request: &Request) -> Result<Arc<Way>> {
        // The host has a part in collectives under way, and its operations have the same order on all ranks.
        self.drain()?;
        let _forming = self.forming.lock();
        self.check_alive()?;
        let gone = || Error::invalid("this communicator has been closed");
        let before = self.way.read().as_ref().map(Arc::clone).ok_or_else(gone)?;
        let Way::Direct(direct) = &*before else {
            return Ok(before);
        };
        let Some(half) = direct.wanted(request, self.parent.world()) else {
            return Ok(before);
        };
        // A rank that is in another operation finds that out, and this one hears of it.
        let number = self.queue.lock().number + 1;
        let print = request.fingerprint(number, 1).encode();
        direct.flags.announce(number - 1, &print);
        // The driver may wait for streams that receive, and what they receive may be sent after this.
        let groups = attendant::groups();
        let is_quiet = groups.iter().all(|group| group.messages.works().is_empty());
        let widened = widen(self.device, &self.cpu, direct, half, is_quiet);
        let widened = widened.inspect_err(|error| {
            if error.code.is_fatal() {
                self.fail(error.clone());
            }
        })?;
        let Some(direct) = widened else {
            return Ok(before);
        };
        let way = Arc::new(Way::Direct(direct));
        self.queue.lock().plans.clear();
        *self.way.write() = Some(Arc::clone(&way));
        Ok(way)
    }
}

/// The same group with longer windows, where all ranks are quiet and none lacks the memory for them. Blocks until all ranks
/// have come. Operations under way in the windows of `direct` go on.
///
/// # Errors
/// What ends a collective of the host.
fn widen(
    device: &'static Device,
    cpu: &Group,
    direct: &Direct,
    half: usize,
    is_quiet: bool,
) -> Result<Option<Direct>> {
    let all = gather(cpu, &[u8::from(is_quiet)])?;
    if all.iter().any(|[is_quiet]| *is_quiet == 0) {
        direct.put_off();
        return Ok(None);
    }
    let windows = match open_windows(device, cpu, half)? {
        Ok(Opened { windows, .. }) => windows,
        Err(refusal) => {
            tracing::info!(
                rank = cpu.rank(),
                "the windows on device {} stay at twice {} bytes: {refusal}",
                device.number(),
                direct.half
            );
            direct.stay();
            return Ok(None);
        }
    };
    let before = direct.older.iter().chain(&direct.windows).map(Arc::clone);
    Ok(Some(Direct {
        flags: Arc::clone(&direct.flags),
        half: windows.own().half_bytes(),
        windows: Some(Arc::new(windows)),
        places: direct.places.clone(),
        older: before.collect(),
        brief: direct.brief.as_ref().map(Arc::clone),
        most: AtomicUsize::new(direct.most.load(Ordering::Relaxed)),
        put_off: AtomicUsize::new(0),
        devices: direct.devices,
        takes_turns: direct.takes_turns,
    }))
}
