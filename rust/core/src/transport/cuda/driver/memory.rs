//! Device memory: own, and of other processes.

use std::ffi::c_char;
use std::fmt;

use cudarc::driver::sys::{CUdeviceptr, CUipcMemHandle};

use super::symbols::numbers;
use super::{Device, Failure, Stream};
use crate::error::Result;

/// Bytes of a [`Handle`].
pub const HANDLE: usize = 64;

/// The handle by which another process of the host maps memory of this one; its bytes mean something to the driver alone.
pub type Handle = [u8; HANDLE];

/// Exported memory is rounded up to this, so that a peer that maps it sees nothing else: the driver's own pages are as
/// large, and what it maps are whole pages.
const GRANULARITY: usize = 2 << 20;

/// Memory of a device, freed on drop. Its contents are unspecified at first.
///
/// Dropping it waits for the work that the device has (the driver sees to that), so no stream may be waiting for
/// something that only the dropping thread would do.
pub struct DeviceMemory {
    device: &'static Device,
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// At least `bytes` bytes, at a multiple of 256, whole pages of the device (2 MiB). May be called during a capture.
    ///
    /// # Errors
    /// `System` when there is not so much left.
    pub fn allocate(device: &'static Device, bytes: usize) -> Result<Self> {
        let bytes = Self::length(bytes);
        let _entered = device.set_up()?;
        let mut address: CUdeviceptr = 0;
        // SAFETY: it stores an address.
        Failure::check(unsafe { (device.driver.symbols.mem_alloc)(&mut address, bytes) }).map_err(
            |failure| {
                failure.while_doing(format_args!(
                    "allocate {bytes} bytes on device {}",
                    device.number()
                ))
            },
        )?;
        Ok(Self {
            device,
            address,
            bytes,
        })
    }

    /// How long memory is that was allocated for `bytes` bytes.
    pub fn length(bytes: usize) -> usize {
        bytes.max(1).next_multiple_of(GRANULARITY)
    }

    /// The device that it lies on.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// The first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The handle by which other processes of the host map it ([`Imported::open`]). They should have dropped their mappings
    /// before this is dropped; until then they may see whatever is in the memory.
    ///
    /// # Errors
    /// `Unsupported` or `System` where the driver does not share memory between processes (some virtual machines,
    /// Windows' Linux, Tegra).
    pub fn export(&self) -> Result<Handle> {
        export(self.device, self.address, self.bytes)
    }

    /// Writes `bytes` from `offset` on, and waits until they are there. Not ordered with any stream.
    ///
    /// # Errors
    /// `System`.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        assert!(bytes.len() <= self.bytes && offset <= self.bytes - bytes.len());
        Stream::create(self.device)?.write(self.address + offset as u64, bytes)
    }

    /// Reads from `offset` on. As [`DeviceMemory::write`].
    ///
    /// # Errors
    /// `System`.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        assert!(bytes.len() <= self.bytes && offset <= self.bytes - bytes.len());
        Stream::create(self.device)?.read(self.address + offset as u64, bytes)
    }
}

/// As [`DeviceMemory::export`], of an allocation of `bytes` bytes that begins at `address` and is not unisono's own.
///
/// # Errors
/// As there, and for memory that the driver maps for its user (`cuMemMap`) or has in a pool (`cuMemAllocAsync`).
pub fn export(device: &'static Device, address: u64, bytes: usize) -> Result<Handle> {
    let _entered = device.set_up()?;
    let mut handle = CUipcMemHandle {
        reserved: [0; HANDLE],
    };
    // SAFETY: it stores 64 bytes; an address that is not the first of an allocation is refused.
    Failure::check(unsafe { (device.driver.symbols.ipc_get_mem_handle)(&mut handle, address) })
        .map_err(|failure| {
            failure.while_doing(format_args!(
                "export {bytes} bytes of device {} to other processes",
                device.number()
            ))
        })?;
    Ok(handle.reserved.map(|byte| byte.to_ne_bytes()[0]))
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: the address is one that was allocated, and is not used again: all code that used it held this object.
        self.device.release("free device memory", |symbols| unsafe {
            (symbols.mem_free)(self.address)
        });
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "DeviceMemory({} bytes at {:#x} of device {})",
            self.bytes,
            self.address,
            self.device.number()
        )
    }
}

/// Memory of another process, mapped for a device of this one. Unmapped on drop.
pub struct Imported {
    device: &'static Device,
    address: u64,
    bytes: usize,
}

impl Imported {
    /// Maps the `bytes` bytes that another process of this host exported ([`DeviceMemory::export`]). The memory may be
    /// of another device, if the two reach each other. One that is mapped already is counted and mapped once.
    ///
    /// # Errors
    /// `Unsupported` when the devices do not reach each other; `System` when the driver refuses, which it does for memory
    /// of this very process, between containers that do not share their PID or IPC namespaces, and when the exporter
    /// has ended.
    pub fn open(device: &'static Device, handle: &Handle, bytes: usize) -> Result<Self> {
        let _entered = device.set_up()?;
        let raw = CUipcMemHandle {
            reserved: handle.map(|byte| c_char::from_ne_bytes([byte])),
        };
        let mut address: CUdeviceptr = 0;
        // SAFETY: it stores an address; a handle that is none is refused.
        Failure::check(unsafe {
            (device.driver.symbols.ipc_open_mem_handle)(
                &mut address,
                raw,
                numbers::IPC_LAZY_ENABLE_PEER_ACCESS,
            )
        })
        .map_err(|failure| {
            let mut error = failure.while_doing(format_args!(
                "map {bytes} bytes of another process for device {}",
                device.number()
            ));
            error.message.push_str(
                "; processes in containers need the same PID and IPC namespaces for this",
            );
            error
        })?;
        Ok(Self {
            device,
            address,
            bytes,
        })
    }

    /// The first byte, as this process knows it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The length in bytes, as the exporter gave it.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Reads from `offset` on, and waits until it is there. Not ordered with any stream.
    ///
    /// # Errors
    /// `System`.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        assert!(bytes.len() <= self.bytes && offset <= self.bytes - bytes.len());
        Stream::create(self.device)?.read(self.address + offset as u64, bytes)
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        // SAFETY: the address is one that was mapped, and is not used again: all code that used it held this object.
        self.device
            .release("unmap memory of another process", |symbols| unsafe {
                (symbols.ipc_close_mem_handle)(self.address)
            });
    }
}

impl fmt::Debug for Imported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Imported({} bytes at {:#x} for device {})",
            self.bytes,
            self.address,
            self.device.number()
        )
    }
}
