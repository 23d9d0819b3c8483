//! Copies and fills, as calls: what kind of memory the addresses are, and whether the caller waits.

use std::sync::Arc;

use crate::capture;
use crate::memory;
use crate::operation::{Operation, Place, Source};
use crate::status::{Outcome, Status};
use crate::stream::Stream;

/// The side where an address lies, as the call says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Device,
    Host,
    /// Either: unified addresses tell.
    Any,
}

/// Looks up where an address lies at the call, when the driver can still refuse it.
///
/// # Errors
/// `INVALID_VALUE` for device memory that is not, or not wholly, allocated.
fn place(address: u64, bytes: usize, side: Side) -> Outcome<Place> {
    match memory::find(address) {
        Some((region, offset)) => {
            let inside = bytes <= region.bytes - offset;
            let right = side != Side::Host || region.is_host();
            if inside && right {
                Ok(Place::Known(address))
            } else {
                Err(Status::INVALID_VALUE)
            }
        }
        None if side == Side::Device || memory::is_device_address(address) || address == 0 => {
            Err(Status::INVALID_VALUE)
        }
        None => Ok(Place::Pageable(address as usize)),
    }
}

fn is_host(place: Place) -> bool {
    match place {
        Place::Known(address) => memory::find(address).is_some_and(|(region, _)| region.is_host()),
        Place::Pageable(_) => true,
    }
}

/// Copies in stream order. Pageable host memory is read before the call returns, and written before it returns; a copy
/// from host to host memory is done when it returns, whatever memory it is.
///
/// # Errors
/// `INVALID_VALUE`; `STREAM_CAPTURE_UNSUPPORTED` for pageable memory during a capture; as [`Stream::enqueue`].
pub(crate) fn copy(
    stream: &Arc<Stream>,
    to: (u64, Side),
    from: (u64, Side),
    bytes: usize,
) -> Outcome {
    if bytes == 0 {
        return Ok(());
    }
    let to = place(to.0, bytes, to.1)?;
    let from = place(from.0, bytes, from.1)?;
    let pageable = |place| matches!(place, Place::Pageable(_));
    if pageable(to) || pageable(from) {
        capture::refuse_capturing(stream)?;
    }
    let source = match from {
        Place::Known(_) => Source::At(from),
        // Both sides pageable: the caller waits anyway.
        Place::Pageable(_) if pageable(to) => Source::At(from),
        Place::Pageable(address) => {
            // SAFETY: the caller passes memory of this many bytes to copy from, and the call has not returned.
            let staged = unsafe { std::slice::from_raw_parts(address as *const u8, bytes) };
            Source::Staged(staged.into())
        }
    };
    let point = stream.enqueue(Operation::Copy {
        to,
        from: source,
        bytes,
    })?;
    if pageable(to) || (is_host(to) && is_host(from)) {
        point.wait();
        stream.context.check()?;
    }
    Ok(())
}

/// Copies and waits until it is done.
pub(crate) fn copy_and_wait(
    stream: &Arc<Stream>,
    to: (u64, Side),
    from: (u64, Side),
    bytes: usize,
) -> Outcome {
    copy(stream, to, from, bytes)?;
    stream.end().wait();
    stream.context.check()
}

/// Repeats a pattern of `width` bytes `count` times.
pub(crate) fn fill(
    stream: &Arc<Stream>,
    to: u64,
    pattern: [u8; 4],
    width: usize,
    count: usize,
) -> Outcome {
    let bytes = count.checked_mul(width).ok_or(Status::INVALID_VALUE)?;
    if bytes == 0 {
        return Ok(());
    }
    if !to.is_multiple_of(width as u64) {
        return Err(Status::INVALID_VALUE);
    }
    let to = place(to, bytes, Side::Device)?;
    stream.enqueue(Operation::Fill {
        to,
        pattern,
        width,
        bytes,
    })?;
    Ok(())
}
