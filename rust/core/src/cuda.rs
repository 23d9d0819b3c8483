//! What a caller asks CUDA before it asks a communicator for anything: on which device memory lies, of which device a
//! stream is, and that one stream goes on only after another. The doors that are given bare addresses and streams make
//! a [`DeviceStream`](crate::types::DeviceStream) of them with it.

use crate::error::Result;
use crate::transport::cuda::driver::{Driver, Stream};
pub use crate::transport::cuda::driver::{
    LentStream, device_if_in_use, device_of, device_of_stream, look_again, may_be_in_use, order,
};
use crate::types::DeviceStream;

/// Whether what is put into `stream` becomes part of a graph now, instead of being carried out.
///
/// # Errors
/// `Unsupported` without CUDA's driver; `InvalidArgument` when the capture has failed, and for the legacy default stream
/// while another one is being captured.
pub fn is_capturing(stream: DeviceStream) -> Result<bool> {
    Stream::of(stream)?.is_capturing()
}

/// Checks that this process sees the device of this number, as the driver counts them.
///
/// # Errors
/// `Unsupported` without CUDA's driver or without any device; `InvalidArgument` when there is no such device.
pub fn check_device(number: u32) -> Result<()> {
    Driver::load()?.check(number)
}
