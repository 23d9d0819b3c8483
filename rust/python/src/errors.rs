//! The core's errors as Python's exceptions, which are defined in `unisono/errors.py`: abi3 of Python 3.10 cannot
//! derive a native class from an exception, and there they can be read.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use unisono::error::{Code, Error};

/// A line below the traceback of a program that a lost rank has ended, on Python 3.11 and newer.
const GOES_ON: &str = "The ranks that are left can go on: comm.shrink() makes a group of them, comm.mask() one in which \
     they keep their numbers, and comm.grow() takes in other processes (see docs/faults.md).";

static CLASSES: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// `error` as an exception of the class that belongs to its code.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    match make(py, error) {
        Ok(value) => PyErr::from_value(value),
        // Only if the Python half of the package is damaged; the message is what matters then.
        Err(cause) => {
            let plain = PyRuntimeError::new_err(error.to_string());
            plain.set_cause(py, Some(cause));
            plain
        }
    }
}

fn make<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let classes = CLASSES
        .get_or_try_init(py, || py.import("unisono.errors").map(Bound::unbind))?
        .bind(py);
    let value = classes
        .getattr(class_name(error.code))?
        .call1((error.to_string(),))?;
    value.setattr("peer", error.peer)?;
    value.setattr("operation", error.operation.as_deref())?;
    let says_more = error.message.starts_with("shrink: ");
    if error.code == Code::PeerLost && !says_more && value.hasattr("add_note")? {
        value.call_method1("add_note", (GOES_ON,))?;
    }
    Ok(value)
}

const fn class_name(code: Code) -> &'static str {
    match code {
        Code::InvalidArgument => "InvalidArgumentError",
        Code::Unsupported => "UnsupportedError",
        Code::Timeout => "TimeoutError",
        Code::PeerLost => "PeerLostError",
        Code::Mismatch => "MismatchError",
        Code::Aborted => "AbortedError",
        Code::System => "SystemCallError",
        Code::Untrusted => "UntrustedError",
        Code::Internal => "InternalError",
        // A code that the core has gained since.
        _ => "Error",
    }
}

/// A wrong argument, refused before anything is sent.
pub(crate) fn invalid(py: Python<'_>, message: impl Into<String>) -> PyErr {
    exception(py, &Error::invalid(message))
}

/// A request that cannot be carried out here, refused before anything is sent.
pub(crate) fn unsupported(py: Python<'_>, message: impl Into<String>) -> PyErr {
    exception(py, &Error::unsupported(message))
}
