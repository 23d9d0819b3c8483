//! The collectives that move arrays between all ranks, and the barrier.

#![expect(
    clippy::too_many_arguments,
    reason = "they are the arguments of a Python method, most of them optional and given by keyword"
)]

use pyo3::prelude::*;
use unisono::{Request, Sizes};

use crate::arrays::{Array, stacked};
use crate::collectives::none;
use crate::communicator::Communicator;
use crate::counts::Counts;
use crate::how::{How, Stream};
use crate::running::Seconds;

#[pymethods]
impl Communicator {
    /// Give every rank the array of one rank, the root.
    ///
    /// Parameters
    /// ----------
    /// array : array
    ///     On the root, what to give; on the others, where it goes. Of the same type and number of elements
    ///     on all ranks, and on all ranks, the root too, one that can be written to and is contiguous.
    /// root : int, optional
    ///     The rank whose array it is.
    /// async_op : bool, optional
    ///     Return a `Work` at once instead of waiting.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds it may take. Without it, the communicator's timeout.
    /// stream : int or stream object, optional
    ///     For arrays on a CUDA device, the stream in whose order it happens, as a number or an object with
    ///     ``__cuda_stream__``, ``ptr`` (CuPy) or ``cuda_stream`` (torch). Without it, the array's own.
    ///
    /// Returns
    /// -------
    /// array or Work
    ///     `array`.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As every operation.
    #[pyo3(signature = (array, root=0, *, async_op=false, timeout=None, stream=None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        root: i64,
        async_op: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("broadcast", async_op, timeout, stream);
        let root = self.check_rank(py, how.operation, "root", root)?;
        // The root's is only read. But what the others must refuse, the root refuses too: an array that is right or wrong
        // by the rank would leave some ranks in the operation without the others.
        let own = Array::output(&how, "array", array)?;
        // SAFETY: `finish` keeps the arrays until the operation has ended; so everywhere in this file.
        let request = Request::broadcast(own.dtype(), root, unsafe { own.memory() });
        self.finish(py, request, vec![own], array, &how)
    }

    /// Give every rank the arrays of all ranks.
    ///
    /// Parameters
    /// ----------
    /// array : array of shape S
    ///     This rank's contribution, of the same type and number of elements on all ranks.
    /// out : array, optional
    ///     Where the result goes, of ``world_size`` times as many elements. `array` may be this rank's part
    ///     of it.
    /// async_op : bool, optional
    ///     Return a `Work` at once instead of waiting.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds it may take. Without it, the communicator's timeout.
    /// stream : int or stream object, optional
    ///     For arrays on a CUDA device, the stream in whose order it happens, as a number or an object with
    ///     ``__cuda_stream__``, ``ptr`` (CuPy) or ``cuda_stream`` (torch). Without it, the array's own.
    ///
    /// Returns
    /// -------
    /// array of shape (world_size, *S), or Work
    ///     The arrays of all ranks by rank: `out` if it was given, else a new one. A new one is a NumPy array
    ///     or a torch tensor like `array`; for other libraries it is a NumPy array.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As every operation.
    #[pyo3(signature = (array, *, out=None, async_op=false, timeout=None, stream=None))]
    fn all_gather(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("all_gather", async_op, timeout, stream);
        let (rank, world) = (self.core().rank(), self.core().world_size());
        let input = Array::input(&how, "array", array)?;
        let out = self.target(&how, out, &input, &stacked(world, input.shape()))?;
        // SAFETY: as above.
        let (source, target) = unsafe { (input.memory(), out.memory()) };
        let source = (!input.is_block_of(&out, rank, world)).then_some(source);
        let sizes = Sizes::Even(input.count());
        let request = Request::all_gather(input.dtype(), source, target, sizes);
        let value = out.given().clone();
        self.finish(py, request, vec![input, out], &value, &how)
    }

    /// Give every rank the arrays of all ranks, which may differ in their first extent.
    ///
    /// Parameters
    /// ----------
    /// array : array of shape (counts[rank], *R)
    ///     This rank's contribution.
    /// counts : sequence of int
    ///     The rows that each rank contributes, along the first axis; the same list on all ranks.
    /// out : array, optional
    ///     Where the result goes.
    /// async_op : bool, optional
    ///     Return a `Work` at once instead of waiting.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds it may take. Without it, the communicator's timeout.
    /// stream : int or stream object, optional
    ///     For arrays on a CUDA device, the stream in whose order it happens, as a number or an object with
    ///     ``__cuda_stream__``, ``ptr`` (CuPy) or ``cuda_stream`` (torch). Without it, the array's own.
    ///
    /// Returns
    /// -------
    /// array of shape (sum(counts), *R), or Work
    ///     The rows of all ranks by rank: `out` if it was given, else a new one, as in `all_gather`.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As every operation.
    #[pyo3(signature = (array, counts, *, out=None, async_op=false, timeout=None, stream=None))]
    fn all_gather_v(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        counts: Counts,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("all_gather_v", async_op, timeout, stream);
        let input = Array::input(&how, "array", array)?;
        counts.check(py, how.operation, "counts", self.core().world_size())?;
        let row = input.row_shape()?;
        let out = self.target(&how, out, &input, &stacked(counts.rows(), row))?;
        let sizes = Sizes::PerRank(counts.elements(row));
        // SAFETY: as above.
        let (source, target) = unsafe { (input.memory(), out.memory()) };
        let request = Request::all_gather(input.dtype(), Some(source), target, sizes);
        let value = out.given().clone();
        self.finish(py, request, vec![input, out], &value, &how)
    }

    /// Give block r of this rank's array to rank r, and get a block from every rank.
    ///
    /// Parameters
    /// ----------
    /// array : array of shape (world_size, *S)
    ///     The blocks to give, by rank. With `out`, any shape of that many elements.
    /// out : array, optional
    ///     Where the blocks of all ranks go, of as many elements.
    /// async_op : bool, optional
    ///     Return a `Work` at once instead of waiting.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds it may take. Without it, the communicator's timeout.
    /// stream : int or stream object, optional
    ///     For arrays on a CUDA device, the stream in whose order it happens, as a number or an object with
    ///     ``__cuda_stream__``, ``ptr`` (CuPy) or ``cuda_stream`` (torch). Without it, the array's own.
    ///
    /// Returns
    /// -------
    /// array of shape (world_size, *S), or Work
    ///     The blocks of all ranks by rank: `out` if it was given, else a new one, as in `all_gather`.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As every operation.
    #[pyo3(signature = (array, *, out=None, async_op=false, timeout=None, stream=None))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("all_to_all", async_op, timeout, stream);
        let input = Array::input(&how, "array", array)?;
        let block: usize = self.block_shape(&input, out.is_some())?.iter().product();
        let out = self.target(&how, out, &input, input.shape())?;
        // SAFETY: as above.
        let (source, target) = unsafe { (input.memory(), out.memory()) };
        let request = Request::all_to_all(input.dtype(), source, target, Sizes::Even(block));
        let value = out.given().clone();
        self.finish(py, request, vec![input, out], &value, &how)
    }

    /// Give each rank some rows of this rank's array, and get some from every rank.
    ///
    /// Parameters
    /// ----------
    /// array : array of shape (sum(send_counts), *R)
    ///     The rows to give, by rank.
    /// send_counts : sequence of int
    ///     The rows to give to each rank, along the first axis.
    /// recv_counts : sequence of int
    ///     The rows to get from each rank: what that rank's `send_counts` say for this one.
    /// out : array, optional
    ///     Where the rows of all ranks go.
    /// async_op : bool, optional
    ///     Return a `Work` at once instead of waiting.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds it may take. Without it, the communicator's timeout.
    /// stream : int or stream object, optional
    ///     For arrays on a CUDA device, the stream in whose order it happens, as a number or an object with
    ///     ``__cuda_stream__``, ``ptr`` (CuPy) or ``cuda_stream`` (torch). Without it, the array's own.
    ///
    /// Returns
    /// -------
    /// array of shape (sum(recv_counts), *R), or Work
    ///     The rows of all ranks by rank: `out` if it was given, else a new one, as in `all_gather`.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As every operation.
    #[pyo3(signature = (array, send_counts, recv_counts, *, out=None, async_op=false, timeout=None, stream=None))]
    fn all_to_all_v(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        send_counts: Counts,
        recv_counts: Counts,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("all_to_all_v", async_op, timeout, stream);
        let input = Array::input(&how, "array", array)?;
        let world = self.core().world_size();
        send_counts.check(py, how.operation, "send_counts", world)?;
        recv_counts.check(py, how.operation, "recv_counts", world)?;
        let row = input.row_shape()?;
        let out = self.target(&how, out, &input, &stacked(recv_counts.rows(), row))?;
        let (send, recv) = (send_counts.elements(row), recv_counts.elements(row));
        // SAFETY: as above.
        let (source, target) = unsafe { (input.memory(), out.memory()) };
        let sizes = Sizes::PerPair { send, recv };
        let request = Request::all_to_all(input.dtype(), source, target, sizes);
        let value = out.given().clone();
        self.finish(py, request, vec![input, out], &value, &how)
    }

    /// Wait until every rank has come.
    ///
    /// Parameters
    /// ----------
    /// async_op : bool, optional
    ///     Return a `Work` at once instead of waiting.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds it may take. Without it, the communicator's timeout.
    /// stream : int or stream object, optional
    ///     A stream of a CUDA device, as in `all_reduce`: then what is put into the stream later happens
    ///     after every rank's stream has come, and the call returns at once.
    ///
    /// Returns
    /// -------
    /// None or Work
    ///
    /// Raises
    /// ------
    /// Error
    ///     As every operation.
    #[pyo3(signature = (*, async_op=false, timeout=None, stream=None))]
    fn barrier(
        &self,
        py: Python<'_>,
        async_op: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("barrier", async_op, timeout, stream);
        self.finish(py, Request::barrier(), Vec::new(), &none(py), &how)
    }
}
