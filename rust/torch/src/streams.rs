//! Devices and their streams.

use unisono::cuda::LentStream;
use unisono::error::Error;
use unisono::fence::guard;

use crate::ffi;
use crate::status::{ok, outcome, status};
use crate::values::stream;

/// A stream that a group has to itself; empty when none could be had, which the status beside it says.
pub(crate) struct OwnStream(Option<LentStream>);

/// Success if this process sees the device, which torch's word does not prove.
pub(crate) fn check_device(device: i32) -> ffi::Status {
    outcome(guard(|| {
        let device = u32::try_from(device)
            .map_err(|_| Error::invalid(format!("there is no device {device}")))?;
        unisono::cuda::check_device(device)
    }))
}

/// Whether what is put into a stream becomes part of a graph. Where that cannot be found out, an operation will say
/// why.
pub(crate) fn is_capturing(place: ffi::Place) -> bool {
    let capturing = guard(|| stream(place).map_or(Ok(false), unisono::cuda::is_capturing));
    capturing.unwrap_or(false)
}

/// A stream of a device that belongs to the caller alone until it is dropped.
pub(crate) fn lend_stream(device: i32) -> ffi::Lent {
    let lent = guard(|| {
        let device = u32::try_from(device)
            .map_err(|_| Error::internal(format!("a stream of the device {device}")))?;
        LentStream::of(device)
    });
    let (status, stream) = match lent {
        Ok(stream) => (ok(), Some(stream)),
        Err(error) => (status(&error), None),
    };
    ffi::Lent {
        status,
        stream: Box::new(OwnStream(stream)),
    }
}

impl OwnStream {
    /// The driver's handle of it; 0 of an empty one.
    pub(crate) fn handle(&self) -> usize {
        self.0.as_ref().map_or(0, |stream| stream.handle().stream)
    }
}
