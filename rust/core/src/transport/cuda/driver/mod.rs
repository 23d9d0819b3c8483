//! The CUDA driver behind safe objects.
//!
//! The library (`libcuda.so.1`, which comes with the GPU's kernel modules) is looked for once per process, by the
//! first call of [`Driver::load`]; unisono links to nothing of CUDA. Version 12.0 is the oldest that will do.
//!
//! **Contexts.** A [`Device`] is the device's *primary* context, the one that torch, CuPy, JAX and the CUDA runtime use.
//! It is retained once and for the life of the process: memory, streams and events that belong to it are then valid for
//! as long as the process lives, and no call here depends on which context the calling thread has current. Each call
//! pushes the context and pops it again, so the thread finds its own as it left it.
//!
//! **Threads.** All objects may be used from any thread. Only a stream handle 2 ([`Stream`]) and the capture mode belong to one
//! thread: set-up calls (allocating, loading, registering) are forbidden to a thread while a graph is being captured anywhere
//! in the process, unless the thread's mode says that it knows what it does. Those calls do not belong to the captured work and
//! are done in relaxed mode.
//!
//! **The end.** Objects may outlive the driver, which shuts down in an exit handler: what they then release is gone
//! already, and is passed over in silence, as it is when the context was destroyed. A forked child has no use of
//! the driver of its parent, and what it drops it leaves alone.

mod device;
mod event;
mod failure;
mod lent;
mod locate;
mod memory;
mod module;
mod pinned;
mod pointer;
mod pool;
mod registered;
mod stream;
mod symbols;
mod transfer;
mod trial;

use std::sync::OnceLock;

pub use self::device::Device;
pub use self::event::Event;
pub(in crate::transport::cuda) use self::failure::Failure;
pub use self::lent::LentStream;
pub use self::locate::{
    device_if_in_use, device_of, device_of_stream, look_again, may_be_in_use, order,
};
pub use self::memory::{DeviceMemory, HANDLE, Handle, Imported, export};
pub(in crate::transport::cuda) use self::module::{Function, Module};
pub use self::pinned::Pinned;
pub use self::pointer::{AddressInfo, Kind, allocation, check_buffer, only_on_device, place};
pub use self::registered::Registered;
pub use self::stream::{MemoryOperation, Stream, StreamIdentity};
use self::symbols::{Library, Symbols};
use crate::error::{Error, Result};
use crate::fork::Home;

/// The oldest driver that will do, as `cuDriverGetVersion` gives it: CUDA 12.0.
const OLDEST: i32 = 12_000;

/// The result of the one attempt to load the driver.
static LOADED: OnceLock<Result<Driver>> = OnceLock::new();
/// The process in which the driver was initialised, or is about to be: this one, or one that it was forked from.
static USED_IN: OnceLock<Home> = OnceLock::new();

/// The driver, loaded and initialised.
pub struct Driver {
    version: i32,
    pub(in crate::transport::cuda) symbols: Symbols,
    /// Made when first asked for, never released.
    devices: Box<[OnceLock<Device>]>,
}

impl Driver {
    /// Loads and initialises the driver, once per process: a failure is kept, too.
    ///
    /// # Errors
    /// `Unsupported`, with what to do, when there is no driver library, when it is the toolkit's stub or older than
    /// CUDA 12.0, or when no device is visible; `System` when the driver cannot be initialised; `InvalidArgument` in a
    /// process that was forked after its parent had loaded the driver.
    pub fn load() -> Result<&'static Self> {
        if is_forked() {
            return Err(Error::invalid(
                "CUDA cannot be used in a process that was forked after its parent used it; start processes with \
                 spawn or forkserver",
            ));
        }
        match LOADED.get_or_init(Self::find) {
            Ok(driver) => Ok(driver),
            Err(error) => Err(error.clone()),
        }
    }

    /// The driver, if it has been loaded in this process.
    pub(in crate::transport::cuda) fn loaded() -> Option<&'static Self> {
        LOADED.get()?.as_ref().ok().filter(|_| !is_forked())
    }

    /// A device that has been opened already, if there is one.
    fn any_open(&'static self) -> Option<&'static Device> {
        self.devices.iter().find_map(OnceLock::get)
    }

    /// The newest CUDA that the driver supports: 1000 times the major version plus 10 times the minor one (12040).
    pub fn version(&self) -> i32 {
        self.version
    }

    /// How many devices are visible to this process.
    pub fn devices(&self) -> usize {
        self.devices.len()
    }

    /// Checks that this process sees a device with this number, without a context on it.
    ///
    /// # Errors
    /// `InvalidArgument` when there is no such device.
    pub fn check(&self, number: u32) -> Result<()> {
        if (number as usize) < self.devices.len() {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "there is no device {number}: this process sees {} (CUDA_VISIBLE_DEVICES)",
            self.devices.len()
        )))
    }

    /// The device with this number, as this process counts them. The first call for a device retains its primary
    /// context, which takes a fraction of a second if it has not been used yet.
    ///
    /// # Errors
    /// `InvalidArgument` when there is no such device; `System` when the driver refuses the context (no memory left,
    /// another process has the device for itself).
    pub fn device(&'static self, number: u32) -> Result<&'static Device> {
        self.check(number)?;
        let place = &self.devices[number as usize];
        // A failure is not kept: memory may be free the next time.
        if let Some(device) = place.get() {
            return Ok(device);
        }
        // Should two threads open it at once, its context is retained once too often, which is for ever anyway.
        let device = Device::open(self, number)?;
        Ok(place.get_or_init(|| device))
    }

    /// The device with this identity ([`Device::uuid`]), if this process sees it.
    ///
    /// # Errors
    /// As [`Driver::device`].
    pub(crate) fn device_with(&'static self, uuid: [u8; 16]) -> Result<Option<&'static Device>> {
        for number in 0..self.devices.len() as u32 {
            if Device::uuid_of(self, number)? == uuid {
                return self.device(number).map(Some);
            }
        }
        Ok(None)
    }

    fn find() -> Result<Self> {
        let library = Library::load().map_err(|why| {
            Error::unsupported(format!(
                "there is no CUDA driver here ({why}). It comes with the GPU's driver; in a container it is put there \
                 by the NVIDIA container toolkit (docker run --gpus all). Everything that is not on a GPU works \
                 without it"
            ))
        })?;
        // SAFETY: the library is the driver, and the signatures are those of `cuda.h`.
        let symbols = unsafe { Symbols::resolve(&library) }.map_err(|name| {
            Error::unsupported(format!(
                "the CUDA driver that was found has no {name}: it is older than CUDA 12.0; update the GPU's driver"
            ))
        })?;
        let mut version = 0;
        // SAFETY: it stores a number, and may be called before anything else.
        let code = unsafe { (symbols.driver_get_version)(&mut version) };
        // A stub cannot tell its version; `cuInit` says what it is.
        if code == 0 && version < OLDEST {
            return Err(Error::unsupported(format!(
                "the CUDA driver is too old: it supports CUDA {}.{} and 12.0 is needed; update the GPU's driver",
                version / 1000,
                version % 1000 / 10
            )));
        }
        let _ = USED_IN.set(Home::here());
        Self::initialise(symbols, version)
    }

    fn initialise(symbols: Symbols, version: i32) -> Result<Self> {
        let failed = |doing: &str, code| Err(Failure(code).in_words(doing, Some(&symbols)));
        // SAFETY: the argument must be 0; any thread may call it, any number of times.
        let code = unsafe { (symbols.init)(0) };
        if code != 0 {
            return failed("initialise the CUDA driver", code);
        }
        let mut count = 0;
        // SAFETY: it stores a number.
        let code = unsafe { (symbols.device_get_count)(&mut count) };
        if code != 0 {
            return failed("count the CUDA devices", code);
        }
        let count = usize::try_from(count).unwrap_or(0);
        if count == 0 {
            return failed("count the CUDA devices", symbols::numbers::NO_DEVICE);
        }
        tracing::debug!(version, devices = count, "the CUDA driver is loaded");
        Ok(Self {
            version,
            symbols,
            devices: (0..count).map(|_| OnceLock::new()).collect(),
        })
    }
}

/// Whether this process was forked from one that used the driver: nothing of it may be touched.
pub(in crate::transport::cuda) fn is_forked() -> bool {
    USED_IN.get().is_some_and(|home| !home.is_here())
}
