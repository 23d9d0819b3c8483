//! Copies between memory of whatever kind, which the caller waits for.

use std::ptr;

use super::device::Relaxed;
use super::pointer::{Kind, place};
use super::{Device, Stream};
use crate::error::{Error, Result};

/// Whether memory is a device's, or managed.
fn is_on(device: &'static Device, address: u64) -> Result<bool> {
    let kind = place(device, address)?.kind;
    Ok(matches!(kind, Kind::Device | Kind::Managed))
}

impl Stream {
    /// Copies between any two places of this process, on the host or on a device, after what is in the stream, and waits until
    /// the bytes are there. Not during its capture.
    ///
    /// # Errors
    /// `System`.
    ///
    /// # Safety
    /// Until then `from` is readable and `to` writable, by the host or by the device, and no other code uses what is written.
    pub(crate) unsafe fn transfer(&self, to: *mut u8, from: *const u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let (target, source) = (
            to.expose_provenance() as u64,
            from.expose_provenance() as u64,
        );
        let sides = (is_on(self.device, target)?, is_on(self.device, source)?);
        let _relaxed = Relaxed::begin(self.device.driver);
        let doing = format_args!("copy {bytes} bytes from {source:#x} to {target:#x}");
        match sides {
            (false, false) => {
                // SAFETY: the caller's promise.
                unsafe { ptr::copy(from, to, bytes) };
                return Ok(());
            }
            (true, true) if target != source && target.abs_diff(source) < bytes as u64 => {
                return Err(Error::invalid(
                    "memory of a device is not copied to a place that overlaps it",
                ));
            }
            (true, true) => self.copy(target, source, bytes)?,
            // SAFETY: the caller's promise; the stream is waited for, below.
            (true, false) => self.call(doing, |symbols| unsafe {
                (symbols.memcpy_to_device)(target, from.cast(), bytes, self.raw)
            })?,
            // SAFETY: as above.
            (false, true) => self.call(doing, |symbols| unsafe {
                (symbols.memcpy_to_host)(to.cast(), source, bytes, self.raw)
            })?,
        }
        self.synchronize()
    }
}
