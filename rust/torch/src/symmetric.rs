//! Symmetric memory: what `csrc/symmetric.cpp` calls the core for.

use std::ptr;

use cxx::UniquePtr;
use unisono::error::{Error, Result};
use unisono::fence::guard;
use unisono::window;

use crate::ffi;
use crate::group::Group;
use crate::interrupts::{outcome_of_wait, status_of_wait, without_the_gil};
use crate::status::ok;
use crate::values::timeout;
use crate::window::Owner;

/// The memory of all ranks; none when it could not be exposed, which the status beside it says.
pub(crate) struct Symmetric(Option<window::Symmetric>);

/// Exposes `memory`, which `owner` keeps, to the other ranks, which all call this, and gives each a pad of `pad` bytes.
///
/// # Safety
/// As for [`Communicator::symmetric`](unisono::Communicator::symmetric).
pub(crate) unsafe fn rendezvous(
    group: &Group,
    memory: ffi::Piece,
    pad: usize,
    owner: UniquePtr<ffi::Keeper>,
) -> ffi::Met {
    let owner = Box::new(Owner::new(owner));
    let meet = || {
        group.guard_wait(|communicator| {
            let start = ptr::with_exposed_provenance_mut(memory.address);
            // SAFETY: the caller's promise is the one asked for here.
            unsafe { communicator.symmetric((start, memory.bytes), pad, owner) }
        })
    };
    let made = without_the_gil(meet);
    let (status, symmetric) = match made {
        Ok(symmetric) => (ok(), Some(symmetric)),
        Err(error) => (status_of_wait(&error), None),
    };
    for window in symmetric.iter().flat_map(window::Symmetric::windows) {
        unisono_python::close_at_the_end(window);
    }
    ffi::Met {
        status,
        symmetric: Box::new(Symmetric(symmetric)),
    }
}

impl Symmetric {
    fn guard<T>(&self, body: impl FnOnce(&window::Symmetric) -> Result<T>) -> Result<T> {
        guard(|| match &self.0 {
            Some(symmetric) => body(symmetric),
            None => Err(Error::internal("there was no rendezvous")),
        })
    }

    /// Where the memory of a rank begins here; 0 for a rank that is gone or that there is not.
    pub(crate) fn start(&self, rank: usize) -> usize {
        let start = self.guard(|symmetric| symmetric.start(rank));
        let start = start.ok().flatten();
        start.map_or(0, |start| start.as_ptr().expose_provenance())
    }

    /// As [`Symmetric::start`], of a rank's pad.
    pub(crate) fn pad(&self, rank: usize) -> usize {
        let start = self.guard(|symmetric| symmetric.pad(rank));
        let start = start.ok().flatten();
        start.map_or(0, |start| start.as_ptr().expose_provenance())
    }

    /// Signals to a rank; waits for at most `timeout_ms`, for as long as the group allows when it is negative.
    pub(crate) fn put_signal(&self, to: usize, channel: usize, timeout_ms: i64) -> ffi::Status {
        let limit = timeout(timeout_ms);
        outcome_of_wait(self.guard(|symmetric| symmetric.put_signal(to, channel, limit)))
    }

    pub(crate) fn wait_signal(&self, from: usize, channel: usize, timeout_ms: i64) -> ffi::Status {
        let limit = timeout(timeout_ms);
        outcome_of_wait(self.guard(|symmetric| symmetric.wait_signal(from, channel, limit)))
    }

    pub(crate) fn barrier(&self, channel: usize, timeout_ms: i64) -> ffi::Status {
        let limit = timeout(timeout_ms);
        outcome_of_wait(self.guard(|symmetric| symmetric.barrier(channel, limit)))
    }
}
