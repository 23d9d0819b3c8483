//! What the doors ask of CUDA before they ask a communicator for anything: on which device memory lies, of which device
//! a stream is, and that one stream goes on only after another.

use crate::error::{Error, Result};
use crate::types::DeviceStream;

/// The device whose memory lies at `address`; `None` for memory of the host.
///
/// # Errors
/// `Unsupported` without CUDA's driver.
pub fn device_of(_address: usize) -> Result<Option<u32>> {
    Err(absent())
}

/// The device of `stream`, a `CUstream`; of the default streams (0, 1, 2) the device that is current in this thread.
///
/// # Errors
/// `Unsupported` without CUDA's driver; `InvalidArgument` for what is no stream.
pub fn device_of_stream(_stream: usize) -> Result<u32> {
    Err(absent())
}

/// Has what is put into `later` from now on wait for all that is in `earlier` by now. Does not block.
///
/// # Errors
/// As [`device_of_stream`].
pub fn order(_earlier: DeviceStream, _later: DeviceStream) -> Result<()> {
    Err(absent())
}

/// Whether [`device_if_in_use`] may have something to say. Costs next to nothing.
#[inline]
pub fn may_be_in_use() -> bool {
    false
}

/// The device whose memory lies at `address`, if this process uses CUDA already, whether through this library or not.
pub fn device_if_in_use(_address: usize) -> Option<u32> {
    None
}

fn absent() -> Error {
    Error::unsupported("memory of a CUDA device needs CUDA's driver, libcuda.so.1")
}
