//! Events: places in streams.

use std::fmt;
use std::ptr;

use cudarc::driver::sys::CUevent;

use super::symbols::numbers;
use super::{Device, Failure};
use crate::error::Result;

/// A place in a stream, for another stream or the host to wait for. It keeps no time.
pub struct Event {
    pub(super) device: &'static Device,
    pub(super) raw: CUevent,
}

// SAFETY: the handle may be used from any thread; the driver serialises.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that is recorded nowhere: waiting for it takes no time. May be made during a capture.
    ///
    /// # Errors
    /// `System`.
    pub fn new(device: &'static Device) -> Result<Self> {
        let _entered = device.set_up()?;
        let mut raw = ptr::null_mut();
        // SAFETY: it stores a handle.
        let code = unsafe {
            (device.driver.symbols.event_create)(&mut raw, numbers::EVENT_DISABLE_TIMING)
        };
        Failure::check(code).map_err(|failure| {
            failure.while_doing(format_args!("make an event on device {}", device.number()))
        })?;
        Ok(Self { device, raw })
    }

    /// Whether its stream has got past it. Not while the stream is being captured since it was recorded.
    ///
    /// # Errors
    /// `System` when work before it failed.
    pub fn is_done(&self) -> Result<bool> {
        let _entered = self.device.set_up()?;
        // SAFETY: the handle is an event's, which lives as long as `self`.
        match unsafe { (self.device.driver.symbols.event_query)(self.raw) } {
            numbers::SUCCESS => Ok(true),
            numbers::NOT_READY => Ok(false),
            code => Err(Failure(code).while_doing("ask for an event")),
        }
    }

    /// Waits, on the calling thread, until its stream has got past it.
    ///
    /// # Errors
    /// `System` when work before it failed.
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.device.set_up()?;
        // SAFETY: as in `is_done`.
        let code = unsafe { (self.device.driver.symbols.event_synchronize)(self.raw) };
        Failure::check(code).map_err(|failure| failure.while_doing("wait for an event"))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the handle is not used again. The driver keeps what unfinished work needs of it.
        self.device.release("destroy an event", |symbols| unsafe {
            (symbols.event_destroy)(self.raw)
        });
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event(device {})", self.device.number())
    }
}
