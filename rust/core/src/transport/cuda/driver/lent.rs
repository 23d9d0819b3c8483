//! Streams for operations that need one to themselves.
//!
//! A stream that was in use is not destroyed but lent again, once what is in it has ended: others may know its handle longer
//! than the group that made it. An allocator that was told that a block is used in a stream records an event there when the
//! block is freed, which may be much later.

use super::{Device, Stream, is_forked};
use crate::error::Result;
use crate::locks::Mutex;
use crate::types::DeviceStream;

/// Those that are not lent now.
static SPARE: Mutex<Vec<Stream>> = Mutex::new(Vec::new());

/// A stream of the highest priority that no other code has until this is dropped. It does not wait for the legacy default
/// stream, nor that for it.
#[derive(Debug)]
pub struct LentStream {
    handle: DeviceStream,
    stream: Option<Stream>,
}

impl LentStream {
    /// A stream of this device with nothing in it. May be asked for during a capture.
    ///
    /// # Errors
    /// Those of [`Driver::load`](super::Driver::load) and [`Driver::device`](super::Driver::device); `System` when no stream
    /// can be made.
    pub fn of(device: u32) -> Result<Self> {
        let device = Device::of(device)?;
        let mut spare = SPARE.lock();
        let found = spare.iter().position(|stream| is_free(stream, device));
        let found = found.map(|at| spare.swap_remove(at));
        drop(spare);
        let stream = found.map_or_else(|| Stream::create_urgent(device), Ok)?;
        Ok(Self {
            handle: stream.handle(),
            stream: Some(stream),
        })
    }

    /// As it is named in requests. It means this stream for the life of the process, but after the end of this object
    /// the work of other code may be in it.
    pub fn handle(&self) -> DeviceStream {
        self.handle
    }
}

impl Drop for LentStream {
    fn drop(&mut self) {
        let stream = self.stream.take();
        if is_forked() {
            // Its parent's, and the lock may be held by a thread that the child does not have.
            std::mem::forget(stream);
        } else {
            SPARE.lock().extend(stream);
        }
    }
}

/// Whether the stream may be lent. One that takes part in a capture must not be asked whether it is idle.
fn is_free(stream: &Stream, device: &Device) -> bool {
    stream.device().number() == device.number()
        && matches!(stream.is_capturing(), Ok(false))
        && matches!(stream.is_idle(), Ok(true))
}
