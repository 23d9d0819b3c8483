//! Windows of tensors: what `csrc/window.cpp` calls the core for.

use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use cxx::UniquePtr;
use unisono::cuda;
use unisono::error::{Error, Result};
use unisono::fence::guard;
use unisono::types::DataType;
use unisono::window;

use crate::ffi;
use crate::group::Group;
use crate::interrupts::{outcome_of_wait, status_of_wait};
use crate::status::ok;
use crate::values::timeout;

/// A window; none when it could not be made, which the status beside it says.
pub(crate) struct Window(Option<Arc<window::Window>>);

/// The transfer of a put; none where the bytes are there already, or where it failed.
pub(crate) struct Transfer(Option<window::Transfer>);

/// A peer's memory; none where there is no view of it.
pub(crate) struct View(#[expect(dead_code, reason = "it is kept")] Option<window::View>);

/// The tensors that own memory, on their way to whichever thread lets go of them.
pub(crate) struct Owner(#[expect(dead_code, reason = "it is kept")] UniquePtr<ffi::Keeper>);

// SAFETY: the C++ class behind it holds tensors, whose counts are atomic, and nothing else is done with it than to destroy it.
unsafe impl Send for Owner {}
// SAFETY: as above.
unsafe impl Sync for Owner {}

impl Owner {
    pub(crate) fn new(owner: UniquePtr<ffi::Keeper>) -> Self {
        Self(owner)
    }
}

/// Exposes `memory`, which `owner` keeps, to the other ranks, which all call this. Each gets the `note` of all.
///
/// # Safety
/// As for [`Communicator::window`](unisono::Communicator::window).
pub(crate) unsafe fn expose(
    group: &Group,
    memory: ffi::Piece,
    note: &[u8],
    owner: UniquePtr<ffi::Keeper>,
) -> ffi::Exposed {
    let owner = Box::new(Owner::new(owner));
    let made = group.guard_wait(|communicator| {
        let start = ptr::with_exposed_provenance_mut(memory.address);
        let what = (DataType::UInt8, note);
        // SAFETY: the caller's promise is the one asked for here.
        unsafe { communicator.window((start, memory.bytes), what, owner) }
    });
    let (status, window) = apart(made);
    ffi::Exposed {
        status,
        window: Box::new(Window(window.map(unisono_python::register_window))),
    }
}

/// Writes `source`, which `owner` keeps, into the memory of a rank, `offset` bytes from its beginning.
///
/// # Safety
/// As for [`Window::put`](window::Window::put).
pub(crate) unsafe fn put(
    window: &Window,
    to: usize,
    offset: usize,
    source: ffi::Piece,
    owner: UniquePtr<ffi::Keeper>,
) -> ffi::Begun {
    let owner = Box::new(Owner::new(owner));
    let begun = window.guard(|window| {
        let start = ptr::with_exposed_provenance(source.address);
        // SAFETY: the caller's promise is the one asked for here.
        unsafe { window.put(to, offset, (start, source.bytes), owner) }
    });
    let (status, transfer) = apart(begun);
    ffi::Begun {
        status,
        transfer: Box::new(Transfer(transfer.flatten())),
    }
}

/// The memory of a rank, as it is mapped here.
pub(crate) fn view(window: &Window, rank: usize) -> ffi::Viewed {
    let viewed = window.guard(|window| {
        let view = window.view(rank)?;
        let address = view.start().as_ptr().expose_provenance();
        let device = match view.is_on_device() {
            true => cuda::device_of(address)?,
            false => None,
        };
        Ok((address, device.map_or(-1, i64::from), view))
    });
    let (status, viewed) = apart(viewed);
    let (address, device, view) = match viewed {
        Some((address, device, view)) => (address, device, Some(view)),
        None => (0, -1, None),
    };
    ffi::Viewed {
        status,
        address,
        device,
        view: Box::new(View(view)),
    }
}

impl Window {
    fn guard<T>(&self, body: impl FnOnce(&window::Window) -> Result<T>) -> Result<T> {
        guard(|| match &self.0 {
            Some(window) => body(window),
            None => Err(Error::internal("the window was never made")),
        })
    }

    /// Whether some rank exposes memory of a device.
    pub(crate) fn has_devices(&self) -> bool {
        self.guard(|window| Ok(window.has_devices()))
            .unwrap_or_default()
    }

    /// The length of a rank's memory in bytes; 0 for a rank that there is not.
    pub(crate) fn bytes(&self, rank: usize) -> usize {
        let described = self.guard(|window| Ok(window.described(rank)?.0));
        described.unwrap_or(0)
    }

    /// The note of a rank.
    pub(crate) fn note(&self, rank: usize) -> Vec<u8> {
        let described = self.guard(|window| Ok(window.described(rank)?.2.to_vec()));
        described.unwrap_or_default()
    }

    pub(crate) fn signal(&self, to: usize) -> ffi::Status {
        outcome_of_wait(self.guard(|window| window.signal(to)))
    }

    /// Takes a signal of a rank; waits for one for at most `timeout_ms`, for as long as the group allows when it is negative.
    pub(crate) fn wait_signal(&self, from: usize, timeout_ms: i64) -> ffi::Status {
        outcome_of_wait(self.guard(|window| {
            let usual = Some(window.timeout()).filter(|limit| !limit.is_zero());
            window.wait_signal(from, timeout(timeout_ms).or(usual))
        }))
    }

    /// Takes a signal of a rank, if one has come. False, and success, when none has.
    pub(crate) fn try_wait_signal(&self, from: usize) -> ffi::Tried {
        let tried = self.guard(|window| window.try_wait_signal(from, Some(Duration::ZERO)));
        let (status, has_come) = apart(tried);
        ffi::Tried {
            status,
            has_come: has_come.unwrap_or(false),
        }
    }

    /// Waits until all ranks have called it; then all that any has put before is there.
    pub(crate) fn fence(&self) -> ffi::Status {
        outcome_of_wait(self.guard(window::Window::fence))
    }

    pub(crate) fn close(&self) {
        if let Some(window) = &self.0 {
            let _ = guard(|| window.close());
        }
    }
}

impl Transfer {
    pub(crate) fn is_done(&self) -> bool {
        self.0.as_ref().is_none_or(window::Transfer::is_done)
    }

    /// Waits for at most `timeout_ms`, for ever when it is negative.
    pub(crate) fn wait(&self, timeout_ms: i64) -> ffi::Status {
        outcome_of_wait(guard(|| match &self.0 {
            Some(transfer) => transfer.wait(timeout(timeout_ms)),
            None => Ok(()),
        }))
    }
}

fn apart<T>(result: Result<T>) -> (ffi::Status, Option<T>) {
    match result {
        Ok(value) => (ok(), Some(value)),
        Err(error) => (status_of_wait(&error), None),
    }
}
