//! Objects, pickled. The work is done in Python (`_objects.py`), by operations on arrays.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::communicator::{ANY_SOURCE, Communicator};

/// Calls a function of `_objects.py`.
fn call<'py>(
    py: Python<'py>,
    name: &str,
    arguments: impl IntoPyObject<'py, Target = PyTuple, Output = Bound<'py, PyTuple>, Error = PyErr>,
) -> PyResult<Bound<'py, PyAny>> {
    let function = py.import("unisono._objects")?.getattr(name)?;
    function.call1(arguments.into_pyobject(py)?)
}

#[pymethods]
impl Communicator {
    /// Collect an object of every rank on all ranks.
    ///
    /// Objects are pickled: what one rank sends, the others execute in part, so the ranks of a job must
    /// trust each other. For arrays `all_gather` is much faster.
    ///
    /// Parameters
    /// ----------
    /// value : object
    ///     This rank's, which can be pickled.
    ///
    /// Returns
    /// -------
    /// list
    ///     The objects of all ranks, in rank order; this rank's own as a copy.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As every operation.
    #[pyo3(signature = (value))]
    fn all_gather_object<'py>(
        slf: &Bound<'py, Self>,
        value: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        call(slf.py(), "all_gather", (slf, value))
    }

    /// Collect an object of every rank on one; see `all_gather_object`.
    ///
    /// Parameters
    /// ----------
    /// value : object
    ///     This rank's, which can be pickled.
    /// root : int, optional
    ///     The rank that gets them.
    ///
    /// Returns
    /// -------
    /// list or None
    ///     On the root the objects of all ranks, in rank order.
    #[pyo3(signature = (value, root=0))]
    fn gather_object<'py>(
        slf: &Bound<'py, Self>,
        value: &Bound<'py, PyAny>,
        root: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        call(slf.py(), "gather", (slf, value, root))
    }

    /// Give every rank a copy of an object of one; see `all_gather_object`.
    ///
    /// Parameters
    /// ----------
    /// value : object, optional
    ///     On the root the object; ignored elsewhere.
    /// root : int, optional
    ///     The rank that has it.
    ///
    /// Returns
    /// -------
    /// object
    ///     The root's object, on the root itself and not a copy.
    #[pyo3(signature = (value=None, root=0))]
    fn broadcast_object<'py>(
        slf: &Bound<'py, Self>,
        value: Option<&Bound<'py, PyAny>>,
        root: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        call(slf.py(), "broadcast", (slf, value, root))
    }

    /// Give every rank an object of its own from one; see `all_gather_object`.
    ///
    /// Parameters
    /// ----------
    /// values : sequence, optional
    ///     On the root an object for each rank; ignored elsewhere.
    /// root : int, optional
    ///     The rank that has them.
    ///
    /// Returns
    /// -------
    /// object
    ///     This rank's.
    #[pyo3(signature = (values=None, root=0))]
    fn scatter_object<'py>(
        slf: &Bound<'py, Self>,
        values: Option<&Bound<'py, PyAny>>,
        root: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        call(slf.py(), "scatter", (slf, values, root))
    }

    /// Send an object to one rank, which calls `recv_object`; see `all_gather_object`.
    ///
    /// Parameters
    /// ----------
    /// value : object
    ///     What to send; it is pickled, and may be changed when this returns.
    /// dest : int
    ///     The rank to send to.
    /// tag : int, optional
    ///     A number of your choice, 0 or more, which the receive must have as well.
    #[pyo3(signature = (value, dest, tag=0))]
    fn send_object<'py>(
        slf: &Bound<'py, Self>,
        value: &Bound<'py, PyAny>,
        dest: i64,
        tag: i64,
    ) -> PyResult<()> {
        call(slf.py(), "send", (slf, value, dest, tag)).map(drop)
    }

    /// Receive an object that `send_object` has sent. `probe` tells which rank has sent one.
    ///
    /// Parameters
    /// ----------
    /// source : int, optional
    ///     The rank to receive from; by default ``ANY_SOURCE``, whichever sends first.
    /// tag : int, optional
    ///     The tag of the message.
    ///
    /// Returns
    /// -------
    /// object
    ///     A copy of what was sent.
    #[pyo3(signature = (source=ANY_SOURCE, tag=0), text_signature = "($self, source=-1, tag=0)")]
    fn recv_object<'py>(
        slf: &Bound<'py, Self>,
        source: i64,
        tag: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        call(slf.py(), "receive", (slf, source, tag))
    }
}
