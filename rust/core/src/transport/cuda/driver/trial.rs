//! The abilities of a device, found out by trying.

use std::sync::atomic::Ordering;

use super::{Device, Event, MemoryOperation, Pinned, Stream};
use crate::error::{Error, Result};

impl Device {
    /// Finds out, by trying, whether this device's streams can write and await words of host memory
    /// ([`Stream::operate`]). Tried once; it takes some tens of microseconds.
    ///
    /// # Errors
    /// Why not: `Unsupported`, or `System`.
    pub fn memory_operations(&'static self) -> Result<()> {
        self.memory_operations
            .get_or_init(|| self.try_memory_operations())
            .clone()
    }

    fn try_memory_operations(&'static self) -> Result<()> {
        let words = Pinned::private(self, 4096)?;
        let stream = Stream::create(self)?;
        let event = Event::new(self)?;
        let word = words.address();
        stream.operate(&[
            MemoryOperation::Write {
                address: word,
                value: 3,
            },
            MemoryOperation::WaitAny {
                address: word,
                mask: 1,
            },
            MemoryOperation::WaitAtLeast {
                address: word,
                value: 2,
            },
            MemoryOperation::Write {
                address: word + 64,
                value: 7,
            },
        ])?;
        stream.record(&event)?;
        event.synchronize()?;
        let seen = words.word(64).load(Ordering::Acquire);
        if seen != 7 {
            return Err(Error::unsupported(format!(
                "device {} took memory operations and did not carry them out",
                self.number()
            )));
        }
        Ok(())
    }
}
