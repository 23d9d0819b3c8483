//! The collectives in which one rank, the root, has or gets the arrays of all.

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
use crate::errors::invalid;
use crate::how::{How, Stream};
use crate::running::Seconds;

#[pymethods]
impl Communicator {
    /// Give one rank, the root, the arrays of all ranks.
    ///
    /// Parameters
    /// ----------
    /// array : array of shape S
    ///     This rank's contribution, of the same type and number of elements on all ranks.
    /// root : int, optional
    ///     The rank that gets them.
    /// out : array, optional
    ///     On the root, where the result goes, of ``world_size`` times as many elements.
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
    /// array of shape (world_size, *S), None or Work
    ///     On the root the arrays of all ranks by rank: `out` if it was given, else a new one, as in
    ///     `all_gather`. None on the others.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As every operation.
    #[pyo3(signature = (array, root=0, *, out=None, async_op=false, timeout=None, stream=None))]
    fn gather(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        root: i64,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("gather", async_op, timeout, stream);
        let root = self.check_rank(py, how.operation, "root", root)?;
        let input = Array::input(&how, "array", array)?;
        let shape = stacked(self.core().world_size(), input.shape());
        let sizes = Sizes::Even(input.count());
        self.gather_to(py, (&how, root), input, out, (shape, sizes))
    }

    /// Give one rank, the root, the arrays of all ranks, which may differ in their first extent.
    ///
    /// Parameters
    /// ----------
    /// array : array of shape (counts[rank], *R)
    ///     This rank's contribution.
    /// counts : sequence of int, optional
    ///     On the root, the rows that each rank contributes. The others need not know.
    /// root : int, optional
    ///     The rank that gets them.
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
    /// array of shape (sum(counts), *R), None or Work
    ///     On the root the rows of all ranks by rank: `out` if it was given, else a new one, as in
    ///     `all_gather`. None on the others.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As every operation.
    #[pyo3(signature = (array, counts=None, root=0, *, out=None, async_op=false, timeout=None, stream=None))]
    fn gather_v(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        counts: Option<Counts>,
        root: i64,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("gather_v", async_op, timeout, stream);
        let root = self.check_rank(py, how.operation, "root", root)?;
        let input = Array::input(&how, "array", array)?;
        let row = input.row_shape()?;
        let counts = self.rooted_counts(py, (&how, root), counts, input.shape()[0])?;
        let shape = stacked(counts.rows(), row);
        let sizes = Sizes::PerRank(counts.elements(row));
        self.gather_to(py, (&how, root), input, out, (shape, sizes))
    }

    /// Give each rank one block of the array of one rank, the root.
    ///
    /// Parameters
    /// ----------
    /// array : array of shape (world_size, *S), or None
    ///     On the root, the blocks by rank; with `out`, any shape of that many elements. None on the others.
    /// root : int, optional
    ///     The rank whose array it is.
    /// out : array, optional
    ///     Where this rank's block goes. Only the root can do without, since it alone knows the type.
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
    ///     As every operation.
    #[pyo3(signature = (array=None, root=0, *, out=None, async_op=false, timeout=None, stream=None))]
    fn scatter(
        &self,
        py: Python<'_>,
        array: Option<&Bound<'_, PyAny>>,
        root: i64,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("scatter", async_op, timeout, stream);
        let root = self.check_rank(py, how.operation, "root", root)?;
        let input = self.root_array(py, (&how, root), array)?;
        let out = match &input {
            Some(input) => {
                self.target(&how, out, input, &self.block_shape(input, out.is_some())?)?
            }
            None => Self::expected_out(py, &how, out)?,
        };
        let sizes = Sizes::Even(out.count());
        self.scatter_from(py, root, (input, out), sizes, &how)
    }

    /// Give each rank some rows of the array of one rank, the root.
    ///
    /// Parameters
    /// ----------
    /// array : array of shape (sum(counts), *R), or None
    ///     On the root, the rows by rank; None on the others.
    /// counts : sequence of int, optional
    ///     On the root, the rows that each rank gets. The others need not know those of each other.
    /// root : int, optional
    ///     The rank whose array it is.
    /// out : array, optional
    ///     Where this rank's rows go. Only the root can do without, since it alone knows the type.
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
    ///     As every operation.
    #[pyo3(signature = (array=None, counts=None, root=0, *, out=None, async_op=false, timeout=None, stream=None))]
    fn scatter_v(
        &self,
        py: Python<'_>,
        array: Option<&Bound<'_, PyAny>>,
        counts: Option<Counts>,
        root: i64,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
        stream: Option<Stream>,
    ) -> PyResult<Py<PyAny>> {
        let how = How::new("scatter_v", async_op, timeout, stream);
        let root = self.check_rank(py, how.operation, "root", root)?;
        let input = self.root_array(py, (&how, root), array)?;
        let (out, elements) = match &input {
            Some(input) => {
                let row = input.row_shape()?;
                let counts = self.rooted_counts(py, (&how, root), counts, 0)?;
                let shape = stacked(counts.0[root], row);
                (self.target(&how, out, input, &shape)?, counts.elements(row))
            }
            None => {
                let out = Self::expected_out(py, &how, out)?;
                let counts = self.rooted_counts(py, (&how, root), counts, out.count())?;
                (out, counts.0)
            }
        };
        self.scatter_from(py, root, (input, out), Sizes::PerRank(elements), &how)
    }
}

impl Communicator {
    fn gather_to<'py>(
        &self,
        py: Python<'py>,
        (how, root): (&How, usize),
        input: Array<'py>,
        out: Option<&Bound<'py, PyAny>>,
        (shape, sizes): (Vec<usize>, Sizes),
    ) -> PyResult<Py<PyAny>> {
        // SAFETY: `finish` keeps the arrays until the operation has ended; so everywhere in this file.
        let source = unsafe { input.memory() };
        if root != self.core().rank() {
            self.refuse_out(py, how.operation, out)?;
            let request = Request::gather(input.dtype(), root, source, None, sizes);
            return self.finish(py, request, vec![input], &none(py), how);
        }
        let out = self.target(how, out, &input, &shape)?;
        // SAFETY: as above.
        let target = Some(unsafe { out.memory() });
        let request = Request::gather(input.dtype(), root, source, target, sizes);
        let value = out.given().clone();
        self.finish(py, request, vec![input, out], &value, how)
    }

    fn scatter_from<'py>(
        &self,
        py: Python<'py>,
        root: usize,
        (input, out): (Option<Array<'py>>, Array<'py>),
        sizes: Sizes,
        how: &How,
    ) -> PyResult<Py<PyAny>> {
        // SAFETY: as above.
        let source = input.as_ref().map(|input| unsafe { input.memory() });
        // SAFETY: as above.
        let request = Request::scatter(out.dtype(), root, source, unsafe { out.memory() }, sizes);
        let value = out.given().clone();
        self.finish(
            py,
            request,
            input.into_iter().chain([out]).collect(),
            &value,
            how,
        )
    }

    /// The array that the root alone brings.
    fn root_array<'py>(
        &self,
        py: Python<'py>,
        (how, root): (&How, usize),
        array: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Array<'py>>> {
        let (rank, name) = (self.core().rank(), how.operation);
        match array {
            Some(array) if rank == root => Array::input(how, "array", array).map(Some),
            None if rank != root => Ok(None),
            None => Err(invalid(
                py,
                format!("{name}: array is missing on rank {root}, the root"),
            )),
            Some(_) => Err(invalid(
                py,
                format!(
                    "{name}: array is given on rank {rank}, but only rank {root}, the root, has one"
                ),
            )),
        }
    }

    fn expected_out<'py>(
        py: Python<'py>,
        how: &How,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Array<'py>> {
        let name = how.operation;
        match out {
            Some(out) => Array::output(how, "out", out),
            None => Err(invalid(
                py,
                format!(
                    "{name}: out is missing; every rank but the root must say where its part goes"
                ),
            )),
        }
    }

    /// The counts of an operation whose root alone must know them all: elsewhere `own` for this rank, zeros for others.
    fn rooted_counts(
        &self,
        py: Python<'_>,
        (how, root): (&How, usize),
        counts: Option<Counts>,
        own: usize,
    ) -> PyResult<Counts> {
        let (rank, world) = (self.core().rank(), self.core().world_size());
        let name = how.operation;
        match counts {
            Some(counts) if rank == root => {
                counts.check(py, name, "counts", world)?;
                Ok(counts)
            }
            None if rank == root => Err(invalid(
                py,
                format!("{name}: counts are missing on rank {root}, the root"),
            )),
            _ => Ok(Counts::only(rank, own, world)),
        }
    }
}
