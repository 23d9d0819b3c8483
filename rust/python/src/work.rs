//! An operation under way, as Python sees it.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::errors::exception;
use crate::joined::Shared;
use crate::message::Message;
use crate::running::{self, Patience};

/// An operation under way, as operations with ``async_op=True`` return it.
///
/// The arrays of the operation are kept alive until it has ended, also when the Work is dropped.
/// Until then they must not be written to, and those that are written by it not read. On a CUDA
/// device it has ended when its stream has got past it; what is put into that stream later may use
/// them without waiting here.
///
/// Examples
/// --------
/// >>> work = comm.all_reduce(gradient, async_op=True)
/// >>> loss = evaluate()
/// >>> work.wait()
#[pyclass(frozen, module = "unisono", name = "Work", generic)]
pub(crate) struct Work {
    inner: unisono::Work,
    value: Py<PyAny>,
    // An operation ends with its communicator, and dropping that closes it.
    shared: Arc<Shared>,
}

impl Work {
    pub(crate) fn new(shared: Arc<Shared>, inner: unisono::Work, value: Py<PyAny>) -> Self {
        Self {
            inner,
            value,
            shared,
        }
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        match self.inner.result() {
            Some(Err(error)) => Err(exception(py, &error)),
            _ => Ok(()),
        }
    }
}

#[pymethods]
impl Work {
    /// Wait until the operation has ended.
    ///
    /// Parameters
    /// ----------
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds to wait; 0: not at all. Without it, as long as the operation may take, which its own
    ///     timeout says.
    ///
    /// Raises
    /// ------
    /// TimeoutError
    ///     The wait was over before the operation, which goes on; or the operation itself took
    ///     longer than it may.
    /// Error
    ///     Whatever ended the operation.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Patience>) -> PyResult<()> {
        running::wait(py, &self.inner, timeout.map(|patience| patience.0))?;
        self.check(py)
    }

    /// Wait until the operation has ended and return what it would have returned when blocking.
    ///
    /// Parameters
    /// ----------
    /// timeout : float or datetime.timedelta, optional
    ///     As in `wait`.
    ///
    /// Returns
    /// -------
    /// array
    ///     The array with the result; None for operations and ranks without one; a `Message` for a
    ///     receive.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As `wait`.
    #[pyo3(signature = (timeout=None))]
    fn result(&self, py: Python<'_>, timeout: Option<Patience>) -> PyResult<Py<PyAny>> {
        self.wait(py, timeout)?;
        match self.inner.received() {
            Some(received) => Ok(Py::new(py, Message::from(received))?.into_any()),
            None => Ok(self.value.clone_ref(py)),
        }
    }

    /// Whether the operation has ended, well or not. Does not wait.
    fn done(&self) -> bool {
        self.inner.is_done()
    }

    /// The error that ended the operation; None when it went well or still goes on.
    fn exception(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let error = self.check(py).err()?;
        Some(error.into_value(py).into_any())
    }

    /// The rank that a received message came from; None before, and for every other operation.
    #[getter]
    fn source(&self) -> Option<usize> {
        self.inner.source()
    }

    /// How many seconds the operation took; None while it goes on.
    #[getter]
    fn duration(&self) -> Option<f64> {
        self.inner.duration().map(|took| took.as_secs_f64())
    }

    /// The name of the operation, with its number in its communicator: ``"all_reduce #17"``.
    #[getter]
    fn operation(&self) -> String {
        self.inner.name()
    }

    fn __repr__(&self) -> String {
        let state = match self.inner.result() {
            None => "under way".to_owned(),
            Some(Ok(())) => "done".to_owned(),
            Some(Err(error)) => format!("failed: {}", error.message),
        };
        let rank = self.shared.comm.rank();
        format!(
            "<unisono.Work {} on rank {rank}: {state}>",
            self.inner.name()
        )
    }
}
