//! Python's signals in waits that torch calls with the GIL released: their handlers run, and what one raises goes through
//! C++ to Python as it is.
//!
//! torch's bindings let C++ exceptions alone through. So the Python exception stays here, in the thread that waited, while
//! the wait ends with an error like any other; the status of that error has a code of its own, and the C++ exception that is
//! made of it takes the Python one along (`csrc/python_error.hpp`).

use std::cell::{Cell, RefCell};

use pyo3::prelude::*;
use unisono::error::{Code, Error, Result};
use unisono::interrupts;

use crate::ffi;
use crate::status::{ok, status};

thread_local! {
    /// The exception that a handler has raised in a wait of this thread, until C++ takes it.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// Handlers run after what this thread does now, which has no caller who could get an exception.
    static LATER: Cell<bool> = const { Cell::new(false) };
}

/// Has the core's waits run Python's handlers, and sleep without the GIL.
pub(crate) fn hear() {
    interrupts::check_with(run_handlers);
    interrupts::sleep_with(|sleep| without_the_gil(sleep));
}

/// Runs `body`, without the GIL meanwhile. For calls that come with it or without: torch's bindings of symmetric memory hold
/// it, its operators do not.
pub(crate) fn without_the_gil<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    let mut body = Some(body);
    let mut run = || body.take().map(|body| body());
    // No interpreter, no GIL.
    let ran = Python::try_attach(|py| py.detach(&mut run)).flatten();
    ran.or_else(run)
        .expect("it has run in one way or the other")
}

fn run_handlers() -> std::result::Result<(), String> {
    if LATER.get() {
        return Ok(());
    }
    // Not while the interpreter goes away.
    Python::try_attach(|py| {
        py.check_signals().map_err(|raised| {
            let reason = raised.to_string();
            RAISED.set(Some(raised));
            reason.trim_end_matches([' ', ':']).to_owned()
        })
    })
    .unwrap_or(Ok(()))
}

/// Runs `body`, whose waits run no handlers.
pub(crate) fn later<T>(body: impl FnOnce() -> T) -> T {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            LATER.set(self.0);
        }
    }
    let _before = Before(LATER.replace(true));
    body()
}

/// Whether a handler has raised in a wait of this thread.
pub(crate) fn is_raised() -> bool {
    RAISED.with_borrow(Option::is_some)
}

/// The status of an error that ended something in which this thread may have waited.
pub(crate) fn status_of_wait(error: &Error) -> ffi::Status {
    let mut status = status(error);
    if is_raised() {
        status.code = ffi::Code::Interrupted.repr;
    }
    status
}

/// As [`outcome`](crate::status::outcome), of something in which this thread may have waited.
pub(crate) fn outcome_of_wait(result: Result<()>) -> ffi::Status {
    result.map_or_else(|error| status_of_wait(&error), |()| ok())
}

/// Runs the handlers of signals in a wait of C++'s own.
pub(crate) fn check_signals() -> ffi::Status {
    match interrupts::check() {
        Ok(()) => ok(),
        Err(reason) => {
            let error = Error::new(Code::Aborted, format!("interrupted: {reason}"));
            status_of_wait(&error)
        }
    }
}

/// The exception that a handler has raised in a wait of this thread; null where it was taken already.
pub(crate) fn take_raised() -> ffi::Raised {
    let nothing = || ffi::Raised {
        class_: 0,
        value: 0,
        traceback: 0,
        message: String::new(),
    };
    let Some(raised) = RAISED.take() else {
        return nothing();
    };
    let taken = Python::try_attach(|py| ffi::Raised {
        class_: raised.get_type(py).into_ptr().expose_provenance(),
        value: raised.value(py).clone().into_ptr().expose_provenance(),
        traceback: raised
            .traceback(py)
            .map_or(0, |traceback| traceback.into_ptr().expose_provenance()),
        message: raised.to_string(),
    });
    taken.unwrap_or_else(nothing)
}

/// Gives up a reference that [`take_raised`] gave.
///
/// # Safety
/// `object` came from there, is not 0, and is given up once.
pub(crate) unsafe fn give_up(object: usize) {
    let object = std::ptr::with_exposed_provenance_mut(object);
    // While the interpreter goes away it stays as it is.
    Python::try_attach(|py| {
        // SAFETY: the caller vouches for the reference, which is counted, so its object is alive.
        drop(unsafe { Bound::<PyAny>::from_owned_ptr(py, object) });
    });
}
