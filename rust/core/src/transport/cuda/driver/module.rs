//! Kernels: a loaded module, and its functions.

use std::ffi::CStr;
use std::ptr;

use cudarc::driver::sys::{CUfunction, CUmodule};

use super::{Device, Failure};
use crate::error::Result;

/// A loaded module. It stays loaded for the life of the process, as its device's context does.
pub(in crate::transport::cuda) struct Module {
    device: &'static Device,
    raw: CUmodule,
}

// SAFETY: the handle may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A kernel of a module that stays loaded.
#[derive(Clone, Copy)]
pub(in crate::transport::cuda) struct Function {
    pub(super) raw: CUfunction,
    /// Blocks of as many threads as it was asked for that the device runs at a time.
    pub(in crate::transport::cuda) blocks: u32,
}

// SAFETY: the handle may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

#[cfg(test)]
impl Function {
    pub(in crate::transport::cuda) fn new(raw: CUfunction, blocks: u32) -> Self {
        Self { raw, blocks }
    }
}

impl Module {
    /// Compiles PTX for the device and loads it, which takes some milliseconds the first time on a machine (the driver
    /// keeps what it compiled). May be called during a capture.
    ///
    /// # Errors
    /// `Unsupported` when the driver is too old for it or lacks its compiler; `System`.
    pub(in crate::transport::cuda) fn load(
        device: &'static Device,
        name: &str,
        ptx: &CStr,
    ) -> Result<Self> {
        let _entered = device.set_up()?;
        let mut raw = ptr::null_mut();
        // SAFETY: it stores a handle; the text ends with a zero.
        let code =
            unsafe { (device.driver.symbols.module_load_data)(&mut raw, ptx.as_ptr().cast()) };
        Failure::check(code).map_err(|failure| {
            let (major, minor) = device.capability();
            failure.while_doing(format_args!(
                "load the kernels for {name} on device {} ({}, compute capability {major}.{minor}, driver for CUDA \
                 {}.{})",
                device.number(),
                device.name(),
                device.driver.version() / 1000,
                device.driver.version() % 1000 / 10,
            ))
        })?;
        Ok(Self { device, raw })
    }

    /// The kernel of that name, to be launched in blocks of `threads` threads, and loaded: the driver loads lazily, and
    /// would otherwise do so, and perhaps wait for the whole context, at the first launch.
    ///
    /// # Errors
    /// `System` when there is none.
    pub(in crate::transport::cuda) fn function(
        &self,
        name: &CStr,
        threads: u32,
    ) -> Result<Function> {
        let _entered = self.device.set_up()?;
        let mut raw = ptr::null_mut();
        // SAFETY: it stores a handle; the text ends with a zero.
        let code = unsafe {
            (self.device.driver.symbols.module_get_function)(&mut raw, self.raw, name.as_ptr())
        };
        Failure::check(code)
            .map_err(|failure| failure.while_doing(format_args!("find the kernel {name:?}")))?;
        if let Some(load) = self.device.driver.symbols.func_load {
            // SAFETY: the function is of this device.
            Failure::check(unsafe { load(raw) })
                .map_err(|failure| failure.while_doing(format_args!("load the kernel {name:?}")))?;
        }
        let mut blocks = 0;
        // Older drivers load it when its registers are asked for, which this has to know.
        // SAFETY: it stores a number; the function is of this device.
        let code =
            unsafe { (self.device.driver.symbols.occupancy)(&mut blocks, raw, threads as i32, 0) };
        Failure::check(code)
            .map_err(|failure| failure.while_doing(format_args!("look at the kernel {name:?}")))?;
        let blocks = u32::try_from(blocks).unwrap_or(0).max(1);
        Ok(Function {
            raw,
            blocks: blocks.saturating_mul(self.device.multiprocessors()),
        })
    }
}
