//! The memory of a rank of this host, as it is mapped here: of the host, or of a device. Bytes are copied into it and out of
//! it, and the program may have its address.
//!
//! Copies where memory of a device may take part are the driver's, in a stream of the window's own ([`Copies`]), and are
//! waited for: a put is there when it returns, as in the memory of the host.
//!
//! The owner of device memory must not free it before the others have unmapped it. So each mapping counts as a view of it, from
//! before it is made until after it has gone.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::fork::Home;
use crate::heap;
use crate::locks::Mutex;
use crate::transport::cuda::driver::{Stream, only_on_device};
use crate::transport::cuda::span::{Mapped, Span};
use crate::transport::ends::End;

/// A rank's memory, mapped here.
pub(super) enum Held {
    Host(heap::Held),
    /// None once the window is closed.
    Device(Mutex<Option<Arc<OnDevice>>>),
}

/// Memory of a device, mapped here.
#[derive(Debug)]
pub(super) struct OnDevice {
    /// None while it is dropped.
    mapped: Option<Mapped>,
    start: NonNull<u8>,
    end: End,
    home: Home,
}

// SAFETY: it is an address of memory that belongs to the process; to use it is unsafe.
unsafe impl Send for OnDevice {}
// SAFETY: as above.
unsafe impl Sync for OnDevice {}

impl OnDevice {
    /// Maps the memory of the rank at the other end for the device of `copies`.
    ///
    /// # Errors
    /// As [`Mapped::open`]; and `Unsupported` where the copies are none of a device's, or the window is closed there.
    pub(super) fn open(span: &Span, end: &End, copies: &Copies) -> Result<Self> {
        let Some(stream) = &copies.0 else {
            return Err(span.device().err().unwrap_or_else(|| {
                Error::unsupported("this process cannot use the device on which it lies")
            }));
        };
        if !end.begin_view() {
            return Err(Error::unsupported("its window is closed"));
        }
        let mapped = Mapped::open(stream.device(), span).inspect_err(|_| end.end_view())?;
        let start = std::ptr::with_exposed_provenance_mut(mapped.address() as usize);
        Ok(Self {
            mapped: Some(mapped),
            start: NonNull::new(start).unwrap_or(NonNull::dangling()),
            end: end.clone(),
            home: Home::here(),
        })
    }
}

impl Drop for OnDevice {
    /// Waits until the device is idle, where it is the last use of the mapping.
    fn drop(&mut self) {
        if self.home.is_here() {
            drop(self.mapped.take());
            self.end.end_view();
        }
    }
}

/// Memory that stays mapped while this lives.
pub(super) enum Kept<'a> {
    Host(&'a heap::Held),
    Device(Arc<OnDevice>),
}

impl Held {
    pub(super) fn on_device(mapped: OnDevice) -> Self {
        Self::Device(Mutex::new(Some(Arc::new(mapped))))
    }

    /// None once the window is closed.
    pub(super) fn keep(&self) -> Option<Kept<'_>> {
        Some(match self {
            Self::Host(held) => Kept::Host(held),
            Self::Device(mapped) => Kept::Device(mapped.lock().clone()?),
        })
    }

    /// The window is closed: what has a view of it keeps it.
    pub(super) fn let_go(&self) {
        if let Self::Device(mapped) = self {
            let mapped = mapped.lock().take();
            // Without the lock: the driver may wait.
            drop(mapped);
        }
    }
}

impl Kept<'_> {
    #[inline]
    pub(super) fn start(&self) -> NonNull<u8> {
        match self {
            Self::Host(held) => held.start(),
            Self::Device(mapped) => mapped.start,
        }
    }

    /// The mapping, for one who keeps it for long.
    pub(super) fn mapping(&self) -> Option<Arc<OnDevice>> {
        match self {
            Self::Host(_) => None,
            Self::Device(mapped) => Some(Arc::clone(mapped)),
        }
    }
}

/// Copies between the ranks' memory and a caller's: by this thread, or by a stream where a rank exposes memory of a device.
pub(super) struct Copies(pub(super) Option<Arc<Stream>>);

impl Copies {
    /// The stream, for memory that the host cannot read.
    pub(super) fn stream_for(&self, start: *const u8) -> Option<Arc<Stream>> {
        let stream = self.0.as_ref()?;
        only_on_device(start.expose_provenance() as u64).map(|_| Arc::clone(stream))
    }

    /// Copies bytes, which are there when it returns.
    ///
    /// # Errors
    /// `System` when the driver fails.
    ///
    /// # Safety
    /// `from` is readable and `to` writable; where there is a stream, by it. No other code uses them meanwhile, or the ranks
    /// agree on what comes of it.
    #[inline]
    pub(super) unsafe fn copy(&self, to: *mut u8, from: *const u8, bytes: usize) -> Result<()> {
        match &self.0 {
            None => {
                // SAFETY: the caller's promise. No reference to the bytes is made, which a peer may be using.
                unsafe { std::ptr::copy(from, to, bytes) };
                Ok(())
            }
            // SAFETY: the caller's promise.
            Some(stream) => unsafe { stream.transfer(to, from, bytes) },
        }
    }
}
