//! The collectives: arrays in, a request for the core, and what it returns.
//!
//! Everything that Python's callers can get wrong is refused here or by the core's own check, before anything is sent.

#![expect(
    clippy::too_many_arguments,
    reason = "the parameters of a Python method are its keywords"
)]

use pyo3::prelude::*;
use unisono::{Request, Sizes};

use crate::arrays::{Array, stacked};
use crate::communicator::Communicator;
use crate::counts::Counts;
use crate::errors::invalid;
use crate::operator::Operator;
use crate::running::{Action, Call, Seconds};

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
    #[pyo3(signature = (array, op=Operator::DEFAULT, *, out=None, async_op=false, timeout=None), text_signature = "($self, array, op='sum', *, out=None, async_op=False, timeout=None)")]
    fn all_reduce(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: Operator,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
    ) -> PyResult<Py<PyAny>> {
        let name = "all_reduce";
        let (request, arrays, value) = match out {
            None => {
                let array = Array::output(name, "array", array)?;
                // SAFETY: `finish` keeps the arrays until the operation has ended; so everywhere in this file.
                let memory = unsafe { array.memory() };
                (
                    Request::all_reduce(array.dtype(), op.0, None, memory),
                    vec![array],
                    None,
                )
            }
            Some(given) => {
                let input = Array::input(name, "array", array)?;
                let out = Array::output(name, "out", given)?;
                out.check_output_for(&input, input.count())?;
                // SAFETY: as above.
                let (source, target) = unsafe { (input.memory(), out.memory()) };
                let source = (!input.is_same_as(&out)).then_some(source);
                let request = Request::all_reduce(out.dtype(), op.0, source, target);
                (request, vec![input, out], Some(given))
            }
        };
        let value = value.unwrap_or(array);
        self.finish(py, request, arrays, value, (async_op, timeout))
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
    #[pyo3(signature = (array, op=Operator::DEFAULT, root=0, *, out=None, async_op=false, timeout=None), text_signature = "($self, array, op='sum', root=0, *, out=None, async_op=False, timeout=None)")]
    fn reduce(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: Operator,
        root: i64,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
    ) -> PyResult<Py<PyAny>> {
        let name = "reduce";
        let root = self.check_rank(py, name, "root", root)?;
        if root != self.core().rank() {
            self.refuse_out(py, name, out)?;
            let array = Array::input(name, "array", array)?;
            // SAFETY: as in `all_reduce`.
            let memory = unsafe { array.memory() };
            let request = Request::reduce(array.dtype(), op.0, root, Some(memory), None);
            return self.finish(py, request, vec![array], &none(py), (async_op, timeout));
        }
        let Some(given) = out else {
            let own = Array::output(name, "array", array)?;
            // SAFETY: as in `all_reduce`.
            let memory = unsafe { own.memory() };
            let request = Request::reduce(own.dtype(), op.0, root, None, Some(memory));
            return self.finish(py, request, vec![own], array, (async_op, timeout));
        };
        let input = Array::input(name, "array", array)?;
        let out = Array::output(name, "out", given)?;
        out.check_output_for(&input, input.count())?;
        // SAFETY: as in `all_reduce`.
        let source = (!input.is_same_as(&out)).then(|| unsafe { input.memory() });
        // SAFETY: as in `all_reduce`.
        let target = unsafe { out.memory() };
        let request = Request::reduce(out.dtype(), op.0, root, source, Some(target));
        self.finish(py, request, vec![input, out], given, (async_op, timeout))
    }

    /// Give every rank the array of one rank, the root.
    ///
    /// Parameters
    /// ----------
    /// array : array
    ///     On the root, what to give; on the others, where it goes. Of the same type and number of elements
    ///     on all ranks.
    /// root : int, optional
    ///     The rank whose array it is.
    /// async_op : bool, optional
    ///     Return a `Work` at once instead of waiting.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds it may take. Without it, the communicator's timeout.
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
    #[pyo3(signature = (array, root=0, *, async_op=false, timeout=None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        root: i64,
        async_op: bool,
        timeout: Option<Seconds>,
    ) -> PyResult<Py<PyAny>> {
        let name = "broadcast";
        let root = self.check_rank(py, name, "root", root)?;
        // The root's is only read, so it may be read-only.
        let own = if root == self.core().rank() {
            Array::input(name, "array", array)?
        } else {
            Array::output(name, "array", array)?
        };
        // SAFETY: as in `all_reduce`.
        let request = Request::broadcast(own.dtype(), root, unsafe { own.memory() });
        self.finish(py, request, vec![own], array, (async_op, timeout))
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
    #[pyo3(signature = (array, *, out=None, async_op=false, timeout=None))]
    fn all_gather(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
    ) -> PyResult<Py<PyAny>> {
        let name = "all_gather";
        let (rank, world) = (self.core().rank(), self.core().world_size());
        let input = Array::input(name, "array", array)?;
        let out = Self::target(name, out, &input, &stacked(world, input.shape()))?;
        let source = (!input.is_block_of(&out, rank, world))
            // SAFETY: as in `all_reduce`.
            .then(|| unsafe { input.memory() });
        let sizes = Sizes::Even(input.count());
        // SAFETY: as in `all_reduce`.
        let request = Request::all_gather(input.dtype(), source, unsafe { out.memory() }, sizes);
        let value = out.given().clone();
        self.finish(py, request, vec![input, out], &value, (async_op, timeout))
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
    #[pyo3(signature = (array, counts, *, out=None, async_op=false, timeout=None))]
    fn all_gather_v(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        counts: Counts,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
    ) -> PyResult<Py<PyAny>> {
        let name = "all_gather_v";
        let input = Array::input(name, "array", array)?;
        counts.check(py, name, "counts", self.core().world_size())?;
        let row = input.row_shape()?;
        let out = Self::target(name, out, &input, &stacked(counts.rows(), row))?;
        let sizes = Sizes::PerRank(counts.elements(row));
        // SAFETY: as in `all_reduce`.
        let (source, target) = unsafe { (input.memory(), out.memory()) };
        let request = Request::all_gather(input.dtype(), Some(source), target, sizes);
        let value = out.given().clone();
        self.finish(py, request, vec![input, out], &value, (async_op, timeout))
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
    #[pyo3(signature = (array, op=Operator::DEFAULT, *, out=None, async_op=false, timeout=None), text_signature = "($self, array, op='sum', *, out=None, async_op=False, timeout=None)")]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: Operator,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
    ) -> PyResult<Py<PyAny>> {
        let name = "reduce_scatter";
        let input = Array::input(name, "array", array)?;
        let block = self.block_shape(&input, out.is_some())?;
        let out = Self::target(name, out, &input, &block)?;
        let sizes = Sizes::Even(out.count());
        // SAFETY: as in `all_reduce`.
        let (source, target) = unsafe { (input.memory(), out.memory()) };
        let request = Request::reduce_scatter(input.dtype(), op.0, source, target, sizes);
        let value = out.given().clone();
        self.finish(py, request, vec![input, out], &value, (async_op, timeout))
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
    #[pyo3(signature = (array, counts, op=Operator::DEFAULT, *, out=None, async_op=false, timeout=None), text_signature = "($self, array, counts, op='sum', *, out=None, async_op=False, timeout=None)")]
    fn reduce_scatter_v(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        counts: Counts,
        op: Operator,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
    ) -> PyResult<Py<PyAny>> {
        let name = "reduce_scatter_v";
        let input = Array::input(name, "array", array)?;
        counts.check(py, name, "counts", self.core().world_size())?;
        let row = input.row_shape()?;
        let own = counts.0[self.core().rank()];
        let out = Self::target(name, out, &input, &stacked(own, row))?;
        let sizes = Sizes::PerRank(counts.elements(row));
        // SAFETY: as in `all_reduce`.
        let (source, target) = unsafe { (input.memory(), out.memory()) };
        let request = Request::reduce_scatter(input.dtype(), op.0, source, target, sizes);
        let value = out.given().clone();
        self.finish(py, request, vec![input, out], &value, (async_op, timeout))
    }

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
    #[pyo3(signature = (array, root=0, *, out=None, async_op=false, timeout=None))]
    fn gather(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        root: i64,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
    ) -> PyResult<Py<PyAny>> {
        let name = "gather";
        let root = self.check_rank(py, name, "root", root)?;
        let input = Array::input(name, "array", array)?;
        let shape = stacked(self.core().world_size(), input.shape());
        let sizes = Sizes::Even(input.count());
        self.gather_to(
            py,
            (name, root),
            input,
            out,
            (shape, sizes),
            (async_op, timeout),
        )
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
    #[pyo3(signature = (array, counts=None, root=0, *, out=None, async_op=false, timeout=None))]
    fn gather_v(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        counts: Option<Counts>,
        root: i64,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
    ) -> PyResult<Py<PyAny>> {
        let name = "gather_v";
        let root = self.check_rank(py, name, "root", root)?;
        let input = Array::input(name, "array", array)?;
        let row = input.row_shape()?;
        let counts = self.rooted_counts(py, (name, root), counts, input.shape()[0])?;
        let shape = stacked(counts.rows(), row);
        let sizes = Sizes::PerRank(counts.elements(row));
        self.gather_to(
            py,
            (name, root),
            input,
            out,
            (shape, sizes),
            (async_op, timeout),
        )
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
    #[pyo3(signature = (array=None, root=0, *, out=None, async_op=false, timeout=None))]
    fn scatter(
        &self,
        py: Python<'_>,
        array: Option<&Bound<'_, PyAny>>,
        root: i64,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
    ) -> PyResult<Py<PyAny>> {
        let name = "scatter";
        let root = self.check_rank(py, name, "root", root)?;
        let input = self.root_array(py, (name, root), array)?;
        let out = match &input {
            Some(input) => {
                Self::target(name, out, input, &self.block_shape(input, out.is_some())?)?
            }
            None => Self::expected_out(py, name, out)?,
        };
        let sizes = Sizes::Even(out.count());
        self.scatter_from(py, root, (input, out), sizes, (async_op, timeout))
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
    #[pyo3(signature = (array=None, counts=None, root=0, *, out=None, async_op=false, timeout=None))]
    fn scatter_v(
        &self,
        py: Python<'_>,
        array: Option<&Bound<'_, PyAny>>,
        counts: Option<Counts>,
        root: i64,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
    ) -> PyResult<Py<PyAny>> {
        let name = "scatter_v";
        let root = self.check_rank(py, name, "root", root)?;
        let input = self.root_array(py, (name, root), array)?;
        let (out, elements) = match &input {
            Some(input) => {
                let row = input.row_shape()?;
                let counts = self.rooted_counts(py, (name, root), counts, 0)?;
                let shape = stacked(counts.0[root], row);
                (
                    Self::target(name, out, input, &shape)?,
                    counts.elements(row),
                )
            }
            None => {
                let out = Self::expected_out(py, name, out)?;
                let counts = self.rooted_counts(py, (name, root), counts, out.count())?;
                (out, counts.0)
            }
        };
        self.scatter_from(
            py,
            root,
            (input, out),
            Sizes::PerRank(elements),
            (async_op, timeout),
        )
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
    #[pyo3(signature = (array, *, out=None, async_op=false, timeout=None))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
    ) -> PyResult<Py<PyAny>> {
        let name = "all_to_all";
        let input = Array::input(name, "array", array)?;
        let block: usize = self.block_shape(&input, out.is_some())?.iter().product();
        let out = Self::target(name, out, &input, input.shape())?;
        // SAFETY: as in `all_reduce`.
        let (source, target) = unsafe { (input.memory(), out.memory()) };
        let request = Request::all_to_all(input.dtype(), source, target, Sizes::Even(block));
        let value = out.given().clone();
        self.finish(py, request, vec![input, out], &value, (async_op, timeout))
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
    #[pyo3(signature = (array, send_counts, recv_counts, *, out=None, async_op=false, timeout=None))]
    fn all_to_all_v(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        send_counts: Counts,
        recv_counts: Counts,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<Seconds>,
    ) -> PyResult<Py<PyAny>> {
        let name = "all_to_all_v";
        let input = Array::input(name, "array", array)?;
        let world = self.core().world_size();
        send_counts.check(py, name, "send_counts", world)?;
        recv_counts.check(py, name, "recv_counts", world)?;
        let row = input.row_shape()?;
        let out = Self::target(name, out, &input, &stacked(recv_counts.rows(), row))?;
        let (send, recv) = (send_counts.elements(row), recv_counts.elements(row));
        // SAFETY: as in `all_reduce`.
        let (source, target) = unsafe { (input.memory(), out.memory()) };
        let sizes = Sizes::PerPair { send, recv };
        let request = Request::all_to_all(input.dtype(), source, target, sizes);
        let value = out.given().clone();
        self.finish(py, request, vec![input, out], &value, (async_op, timeout))
    }

    /// Wait until every rank has come.
    ///
    /// Parameters
    /// ----------
    /// async_op : bool, optional
    ///     Return a `Work` at once instead of waiting.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds it may take. Without it, the communicator's timeout.
    ///
    /// Returns
    /// -------
    /// None or Work
    ///
    /// Raises
    /// ------
    /// Error
    ///     As every operation.
    #[pyo3(signature = (*, async_op=false, timeout=None))]
    fn barrier(
        &self,
        py: Python<'_>,
        async_op: bool,
        timeout: Option<Seconds>,
    ) -> PyResult<Py<PyAny>> {
        self.finish(
            py,
            Request::barrier(),
            Vec::new(),
            &none(py),
            (async_op, timeout),
        )
    }
}

impl Communicator {
    /// Carries out `request` on `arrays`, which it keeps until the end, and returns `value` or a `Work`.
    fn finish(
        &self,
        py: Python<'_>,
        mut request: Request,
        arrays: Vec<Array<'_>>,
        value: &Bound<'_, PyAny>,
        (asynchronously, timeout): (bool, Option<Seconds>),
    ) -> PyResult<Py<PyAny>> {
        request.timeout = timeout.map(|Seconds(limit)| limit);
        let keep = arrays.iter().map(Array::keep).collect();
        let value = value.clone().unbind();
        let call = Call {
            action: Action::Collective(request),
            keep,
            value,
        };
        self.carry_out(py, call, asynchronously)
    }

    /// The output for a result of `shape`: `out` if it was given, else a new array like `input`.
    fn target<'py>(
        name: &'static str,
        out: Option<&Bound<'py, PyAny>>,
        input: &Array<'py>,
        shape: &[usize],
    ) -> PyResult<Array<'py>> {
        let Some(out) = out else {
            return input.new_like(shape);
        };
        let out = Array::output(name, "out", out)?;
        out.check_output_for(input, shape.iter().product())?;
        Ok(out)
    }

    /// The shape of one of `world_size` blocks of `array`. If only the number of elements matters, it is flat.
    fn block_shape(&self, array: &Array<'_>, flat: bool) -> PyResult<Vec<usize>> {
        let world = self.core().world_size();
        if array.shape().first() == Some(&world) {
            return Ok(array.shape()[1..].to_vec());
        }
        if flat && array.count().is_multiple_of(world) {
            return Ok(vec![array.count() / world]);
        }
        let advice = if flat {
            format!(
                "{} elements, which cannot be divided among {world} ranks",
                array.count()
            )
        } else {
            format!(
                "shape {:?}, but its first extent must be the number of ranks, {world}",
                array.shape()
            )
        };
        Err(array
            .argument()
            .invalid(array.object().py(), format!("has {advice}")))
    }

    fn gather_to<'py>(
        &self,
        py: Python<'py>,
        (name, root): (&'static str, usize),
        input: Array<'py>,
        out: Option<&Bound<'py, PyAny>>,
        (shape, sizes): (Vec<usize>, Sizes),
        how: (bool, Option<Seconds>),
    ) -> PyResult<Py<PyAny>> {
        // SAFETY: as in `all_reduce`.
        let source = unsafe { input.memory() };
        if root != self.core().rank() {
            self.refuse_out(py, name, out)?;
            let request = Request::gather(input.dtype(), root, source, None, sizes);
            return self.finish(py, request, vec![input], &none(py), how);
        }
        let out = Self::target(name, out, &input, &shape)?;
        // SAFETY: as in `all_reduce`.
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
        how: (bool, Option<Seconds>),
    ) -> PyResult<Py<PyAny>> {
        // SAFETY: as in `all_reduce`.
        let source = input.as_ref().map(|input| unsafe { input.memory() });
        // SAFETY: as in `all_reduce`.
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

    /// The array that the root, and nobody else, brings.
    fn root_array<'py>(
        &self,
        py: Python<'py>,
        (name, root): (&'static str, usize),
        array: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Array<'py>>> {
        let rank = self.core().rank();
        match array {
            Some(array) if rank == root => Array::input(name, "array", array).map(Some),
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

    fn refuse_out(
        &self,
        py: Python<'_>,
        name: &str,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        match out {
            None => Ok(()),
            Some(_) => Err(invalid(
                py,
                format!(
                    "{name}: out is given on rank {}, but only the root gets a result",
                    self.core().rank()
                ),
            )),
        }
    }

    fn expected_out<'py>(
        py: Python<'py>,
        name: &'static str,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Array<'py>> {
        match out {
            Some(out) => Array::output(name, "out", out),
            None => Err(invalid(
                py,
                format!(
                    "{name}: out is missing; every rank but the root must say where its part goes"
                ),
            )),
        }
    }

    /// The counts of an operation of which only the root must know all: elsewhere `own` for this rank, zeros for others.
    fn rooted_counts(
        &self,
        py: Python<'_>,
        (name, root): (&str, usize),
        counts: Option<Counts>,
        own: usize,
    ) -> PyResult<Counts> {
        let (rank, world) = (self.core().rank(), self.core().world_size());
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

fn none(py: Python<'_>) -> Bound<'_, PyAny> {
    py.None().into_bound(py)
}
