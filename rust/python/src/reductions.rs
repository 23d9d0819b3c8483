//! The collectives that reduce.

#![expect(
    clippy::too_many_arguments,
    reason = "they are the arguments of a Python method, most of them optional and given by keyword"
)]

use std::sync::Arc;
use std::sync::mpsc::channel;

use pyo3::prelude::*;
use unisono::buffer::Memory;
use unisono::error::Error;
use unisono::types::{DataType, ReduceOp};
use unisono::{Request, Sizes};

use crate::arrays::{Array, stacked};
use crate::collectives::none;
use crate::communicator::Communicator;
use crate::counts::Counts;
use crate::errors::exception;
use crate::how::{How, Stream};
use crate::operator::Operator;
use crate::running::{Seconds, elsewhere};

#[pymethods]
impl Communicator {
    /// Reduce the arrays of all ranks; every rank gets the result, with the same bits.
    ///
    /// Parameters
    /// ----------
    /// array : array
    ///     This rank's contribution, of the same type and number of elements on all ranks. Without `out`
    ///     the result replaces it.
    /// op : str or ReduceOp, optional
    ///     How contributions are combined: "sum", "avg", "prod", "min", "max", "band", "bor", "bxor",
    ///     "land", "lor", "lxor" or ``ReduceOp.premul_sum(factor)``.
    /// out : array, optional
    ///     Where the result goes; `array` then stays as it is.
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
    ///     `out` if it was given, else `array`.
    ///
    /// Raises
    /// ------
    /// UnsupportedError
    ///     The operator has no meaning for the type, such as the minimum of complex numbers.
    /// Error
    ///     As every operation.
    #[pyo3(signature = (array, op=Operator::DEFAULT, *, out=None, async_op=false, timeout=None, stream=None), text_signature = "($self, array, op='sum', *, out=None, async_op=False, timeout=None, stream=None)")]
    fn all_reduce(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: Operator,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("all_reduce", async_op, timeout, stream);
        self.reduce_to_all(py, (array, out), &how, |dtype, source, target| {
            Request::all_reduce(dtype, op.0, source, target)
        })
    }

    /// Reduce the arrays of the ranks up to this one, as MPI_Scan does.
    ///
    /// Rank r gets ``((x0 op x1) op ...) op xr``, in exactly this order, whatever the algorithm: each result is, bit for bit,
    /// what continues that of the rank before, and the same in every run. 16-bit and 8-bit floats are summed in float32, and
    /// the result of each rank is rounded once. "avg" is the average of these r + 1 arrays.
    ///
    /// Parameters
    /// ----------
    /// array : array
    ///     This rank's contribution, of the same type and number of elements on all ranks. Without `out`
    ///     the result replaces it.
    /// op : str or ReduceOp, optional
    ///     How contributions are combined: "sum", "avg", "prod", "min", "max", "band", "bor", "bxor",
    ///     "land", "lor", "lxor" or ``ReduceOp.premul_sum(factor)``.
    /// out : array, optional
    ///     Where the result goes; `array` then stays as it is.
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
    ///     `out` if it was given, else `array`.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As `all_reduce`.
    #[pyo3(signature = (array, op=Operator::DEFAULT, *, out=None, async_op=false, timeout=None, stream=None), text_signature = "($self, array, op='sum', *, out=None, async_op=False, timeout=None, stream=None)")]
    fn scan(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: Operator,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("scan", async_op, timeout, stream);
        self.reduce_to_all(py, (array, out), &how, |dtype, source, target| {
            Request::scan(dtype, op.0, source, target)
        })
    }

    /// Reduce the arrays of the ranks before this one, as MPI_Exscan does.
    ///
    /// Rank r gets the result that `scan` gives rank r - 1, bit for bit; "avg" is the average of r arrays. Rank 0 gets none:
    /// `out`, or without it `array`, stays as it is there. Fill `out` with what rank 0 shall have, such as zeros for a sum.
    ///
    /// Parameters
    /// ----------
    /// array : array
    ///     This rank's contribution, of the same type and number of elements on all ranks. Without `out`
    ///     the result replaces it, but on rank 0.
    /// op : str or ReduceOp, optional
    ///     How contributions are combined: "sum", "avg", "prod", "min", "max", "band", "bor", "bxor",
    ///     "land", "lor", "lxor" or ``ReduceOp.premul_sum(factor)``.
    /// out : array, optional
    ///     Where the result goes; `array` then stays as it is.
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
    ///     `out` if it was given, else `array`.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As `all_reduce`.
    #[pyo3(signature = (array, op=Operator::DEFAULT, *, out=None, async_op=false, timeout=None, stream=None), text_signature = "($self, array, op='sum', *, out=None, async_op=False, timeout=None, stream=None)")]
    fn exscan(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: Operator,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("exscan", async_op, timeout, stream);
        self.reduce_to_all(py, (array, out), &how, |dtype, source, target| {
            Request::exscan(dtype, op.0, source, Some(target))
        })
    }

    /// Sum or average arrays of float32 that travel between hosts in 8 bits: for slow links.
    ///
    /// Inside a host they are summed in float32. Between hosts 128 neighbours share a scale, which is the
    /// largest magnitude among them, and each becomes one of 255 multiples of 1/127 of it. With ``h``
    /// hosts a result is off by at most 1/254 of the largest magnitude among its neighbours, in each of
    /// ``h - 1`` hosts' sums and in the result; where hosts have different numbers of ranks, in the
    /// contributions of all ranks but one. All ranks get the same bits. A value that is not finite makes
    /// its 128 neighbours NaN, and neighbours that are all below 2**-121 become zero. Ranks that are all
    /// on one host exchange float32.
    ///
    /// Parameters
    /// ----------
    /// array : array
    ///     This rank's contribution in the memory of the host, float32, with the same number of elements on
    ///     all ranks. The result replaces it.
    /// op : str or ReduceOp, optional
    ///     "sum" or "avg".
    ///
    /// Returns
    /// -------
    /// array
    ///     `array`.
    ///
    /// Raises
    /// ------
    /// UnsupportedError
    ///     Another type than float32, another operator, or memory of a CUDA device.
    /// Error
    ///     As every operation.
    #[pyo3(signature = (array, op=Operator::DEFAULT), text_signature = "($self, array, op='sum')")]
    fn all_reduce_int8(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: Operator,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("all_reduce_int8", false, None, None);
        let given = Array::output(&how, "array", array)?;
        let average = match op.0 {
            ReduceOp::Sum => false,
            ReduceOp::Avg => true,
            op => {
                let what = format!("all_reduce_int8: {op} is not made of 8 bits; sum and avg are");
                return Err(exception(py, &Error::unsupported(what)));
            }
        };
        let mut floats = given.floats()?;
        let shared = Arc::clone(&self.shared);
        let (ended, end) = channel::<()>();
        let run = move || {
            // Dropped when nothing touches the array any more.
            let _ended = ended;
            // SAFETY: the caller sees to it that no other code uses the array, and gets it back only after the end.
            let values = unsafe { floats.slice() };
            shared
                .comm
                .guard(|comm| comm.all_reduce_int8(values, average))
        };
        elsewhere(py, run, || {
            self.core().abort("interrupted in all_reduce_int8");
            let _ = py.detach(move || end.recv());
        })?;
        Ok(array.clone().unbind())
    }

    /// Reduce the arrays of all ranks; one rank, the root, gets the result.
    ///
    /// Parameters
    /// ----------
    /// array : array
    ///     This rank's contribution, of the same type and number of elements on all ranks. On the root the
    ///     result replaces it, without `out`; on the others it stays as it is.
    /// op : str or ReduceOp, optional
    ///     How contributions are combined: "sum", "avg", "prod", "min", "max", "band", "bor", "bxor",
    ///     "land", "lor", "lxor" or ``ReduceOp.premul_sum(factor)``.
    /// root : int, optional
    ///     The rank that gets the result.
    /// out : array, optional
    ///     On the root, where the result goes.
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
    /// array, None or Work
    ///     On the root `out` if it was given, else `array`; None on the others.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As `all_reduce`.
    #[pyo3(signature = (array, op=Operator::DEFAULT, root=0, *, out=None, async_op=false, timeout=None, stream=None), text_signature = "($self, array, op='sum', root=0, *, out=None, async_op=False, timeout=None, stream=None)")]
    fn reduce(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: Operator,
        root: i64,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("reduce", async_op, timeout, stream);
        let root = self.check_rank(py, how.operation, "root", root)?;
        if root != self.core().rank() {
            self.refuse_out(py, how.operation, out)?;
            let array = Array::input(&how, "array", array)?;
            // SAFETY: `finish` keeps the arrays until the operation has ended; so everywhere in this file.
            let memory = unsafe { array.memory() };
            let request = Request::reduce(array.dtype(), op.0, root, Some(memory), None);
            return self.finish(py, request, vec![array], &none(py), &how);
        }
        let Some(given) = out else {
            let own = Array::output(&how, "array", array)?;
            // SAFETY: as above.
            let memory = unsafe { own.memory() };
            let request = Request::reduce(own.dtype(), op.0, root, None, Some(memory));
            return self.finish(py, request, vec![own], array, &how);
        };
        let input = Array::input(&how, "array", array)?;
        let out = Array::output(&how, "out", given)?;
        out.check_output_for(&input, input.count())?;
        // SAFETY: as above.
        let (source, target) = unsafe { (input.memory(), out.memory()) };
        let source = (!input.is_same_as(&out)).then_some(source);
        let request = Request::reduce(out.dtype(), op.0, root, source, Some(target));
        self.finish(py, request, vec![input, out], given, &how)
    }

    /// Reduce the arrays of all ranks; rank r gets block r of the result.
    ///
    /// Parameters
    /// ----------
    /// array : array of shape (world_size, *S)
    ///     This rank's contribution to every block. With `out`, any shape of that many elements.
    /// op : str or ReduceOp, optional
    ///     How contributions are combined: "sum", "avg", "prod", "min", "max", "band", "bor", "bxor",
    ///     "land", "lor", "lxor" or ``ReduceOp.premul_sum(factor)``.
    /// out : array, optional
    ///     Where this rank's block of the result goes.
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
    /// array of shape S, or Work
    ///     This rank's block: `out` if it was given, else a new one, as in `all_gather`.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As `all_reduce`.
    #[pyo3(signature = (array, op=Operator::DEFAULT, *, out=None, async_op=false, timeout=None, stream=None), text_signature = "($self, array, op='sum', *, out=None, async_op=False, timeout=None, stream=None)")]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: Operator,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("reduce_scatter", async_op, timeout, stream);
        let input = Array::input(&how, "array", array)?;
        let block = self.block_shape(&input, out.is_some())?;
        let out = self.target(&how, out, &input, &block)?;
        let sizes = Sizes::Even(out.count());
        // SAFETY: as above.
        let (source, target) = unsafe { (input.memory(), out.memory()) };
        let request = Request::reduce_scatter(input.dtype(), op.0, source, target, sizes);
        let value = out.given().clone();
        self.finish(py, request, vec![input, out], &value, &how)
    }

    /// Reduce the arrays of all ranks; each rank gets some rows of the result.
    ///
    /// Parameters
    /// ----------
    /// array : array of shape (sum(counts), *R)
    ///     This rank's contribution to all rows.
    /// counts : sequence of int
    ///     The rows that each rank gets, along the first axis; the same list on all ranks.
    /// op : str or ReduceOp, optional
    ///     How contributions are combined: "sum", "avg", "prod", "min", "max", "band", "bor", "bxor",
    ///     "land", "lor", "lxor" or ``ReduceOp.premul_sum(factor)``.
    /// out : array, optional
    ///     Where this rank's rows of the result go.
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
    /// array of shape (counts[rank], *R), or Work
    ///     This rank's rows: `out` if it was given, else a new one, as in `all_gather`.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As `all_reduce`.
    #[pyo3(signature = (array, counts, op=Operator::DEFAULT, *, out=None, async_op=false, timeout=None, stream=None), text_signature = "($self, array, counts, op='sum', *, out=None, async_op=False, timeout=None, stream=None)")]
    fn reduce_scatter_v(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        counts: Counts,
        op: Operator,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("reduce_scatter_v", async_op, timeout, stream);
        let input = Array::input(&how, "array", array)?;
        counts.check(py, how.operation, "counts", self.core().world_size())?;
        let row = input.row_shape()?;
        let own = counts.0[self.core().rank()];
        let out = self.target(&how, out, &input, &stacked(own, row))?;
        let sizes = Sizes::PerRank(counts.elements(row));
        // SAFETY: as above.
        let (source, target) = unsafe { (input.memory(), out.memory()) };
        let request = Request::reduce_scatter(input.dtype(), op.0, source, target, sizes);
        let value = out.given().clone();
        self.finish(py, request, vec![input, out], &value, &how)
    }
}

impl Communicator {
    /// A reduction after which each rank has a result as long as its contribution: in `out`, or else in `array`. `make` gets
    /// the type, the input if it is another than the output, and the output.
    fn reduce_to_all(
        &self,
        py: Python<'_>,
        (array, out): (&Bound<'_, PyAny>, Option<&Bound<'_, PyAny>>),
        how: &How,
        make: impl FnOnce(DataType, Option<Memory>, Memory) -> Request,
    ) -> PyResult<Py<PyAny>> {
        let Some(given) = out else {
            let own = Array::output(how, "array", array)?;
            // SAFETY: as above.
            let request = make(own.dtype(), None, unsafe { own.memory() });
            return self.finish(py, request, vec![own], array, how);
        };
        let input = Array::input(how, "array", array)?;
        let out = Array::output(how, "out", given)?;
        out.check_output_for(&input, input.count())?;
        // SAFETY: as above.
        let (source, target) = unsafe { (input.memory(), out.memory()) };
        let source = (!input.is_same_as(&out)).then_some(source);
        let request = make(out.dtype(), source, target);
        self.finish(py, request, vec![input, out], given, how)
    }
}
