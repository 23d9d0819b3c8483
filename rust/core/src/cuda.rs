//! Calls to CUDA that a caller makes before it calls a communicator: the device of an address, the device of a stream, and the
//! order of two streams (one goes on only after the other). The doors that are given bare addresses and streams make a
//! [`DeviceStream`](crate::types::DeviceStream) of them with these calls. Also memory of a device that peers can read in place.

use crate::error::{Error, Result};
use crate::transport::cuda::driver::{Device, Driver, Stream};
pub use crate::transport::cuda::driver::{
    LentStream, device_if_in_use, device_of, device_of_stream, look_again, may_be_in_use, order,
};
use crate::transport::cuda::heap;
use crate::types::DeviceStream;

/// Whether what is put into `stream` becomes part of a graph now, instead of being carried out.
///
/// # Errors
/// `Unsupported` without CUDA's driver; `InvalidArgument` when the capture has failed, and for the legacy default stream
/// while another one is being captured.
pub fn is_capturing(stream: DeviceStream) -> Result<bool> {
    Stream::of(stream)?.is_capturing()
}

/// Whether `stream` has done all that was put into it.
///
/// # Errors
/// Those of [`is_capturing`]; `InvalidArgument` for a stream that is being captured; `System` when work in it failed.
pub fn is_idle(stream: DeviceStream) -> Result<bool> {
    match Stream::of_now(stream)? {
        (stream, false) => stream.is_idle(),
        (_, true) => Err(Error::invalid(
            "the stream is being captured into a graph, and this is to wait for it",
        )),
    }
}

/// Checks that this process sees the device of this number, as the driver counts them.
///
/// # Errors
/// `Unsupported` without CUDA's driver or without any device; `InvalidArgument` when there is no such device.
pub fn check_device(number: u32) -> Result<()> {
    Driver::load()?.check(number)
}

/// The address of `bytes` bytes of a device's memory, at a multiple of 512, that the other ranks of the host can read where
/// they lie ([`heap`]). May be called during a capture.
///
/// # Errors
/// Those of [`check_device`]; `System` where there is not so much memory left; `Unsupported` where the driver shares none
/// between processes.
pub fn allocate(device: u32, bytes: usize) -> Result<u64> {
    heap::allocate(Device::of(device)?, bytes)
}

/// Gives back what [`allocate`] gave, once the device has done all that was enqueued. False, at once, where it gave no such
/// memory.
///
/// # Errors
/// Those of [`check_device`]; `System` where the driver does not say when that is: then the memory stays taken.
pub fn free(device: u32, address: u64) -> Result<bool> {
    heap::free(Device::of(device)?, address)
}
