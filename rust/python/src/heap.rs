//! The shared heap: arrays in it, and what it holds.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PySlice, PyTuple};
use unisono::config::Config;
use unisono::heap::{self, Statistics};

use crate::arrays::{self, Array};
use crate::errors::{exception, invalid};
use crate::how::How;

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Heap>()?;
    module.add_function(wrap_pyfunction!(empty, module)?)?;
    module.add_function(wrap_pyfunction!(statistics, module)?)
}

/// A block of the heap, which lives as long as the arrays over it: NumPy keeps what it got the memory from.
#[pyclass(frozen, module = "unisono", name = "_Block")]
struct Block(heap::Block);

#[pymethods]
impl Block {
    /// NumPy's description of the bytes, which `numpy.asarray` asks for.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let description = PyDict::new(py);
        description.set_item("version", 3)?;
        description.set_item("typestr", "|u1")?;
        description.set_item("shape", (self.0.bytes,))?;
        description.set_item("data", (self.0.address.as_ptr().addr(), false))?;
        Ok(description)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: arrays over the block hold this object, and operations under way hold their arrays.
        unsafe { heap::free(self.0.address) };
    }
}

/// A new array in the shared heap, with arbitrary contents, as ``numpy.empty`` makes one.
///
/// Peers on the same host read memory of the heap in place, so that operations on large arrays
/// save a copy. Nothing else is different: the array is NumPy's, and its memory is freed with the
/// last array that refers to it. When the heap is full (the setting ``heap_bytes``) the array lies
/// in private memory.
///
/// After a fork parent and child share the contents.
///
/// Parameters
/// ----------
/// shape : int or sequence of int
///     The shape.
/// dtype : dtype, default float
///     The type of the elements: any that NumPy knows, but not Python objects.
///
/// Raises
/// ------
/// InvalidArgumentError
///     The elements are objects, the shape is negative or too large, or a ``UNISONO_*`` variable
///     is wrong.
///
/// Examples
/// --------
/// >>> gradient = unisono.empty(1_000_000, "float32")
/// >>> comm.all_reduce(gradient)
#[pyfunction]
#[pyo3(signature = (shape, dtype = None))]
fn empty<'py>(
    py: Python<'py>,
    shape: &Bound<'py, PyAny>,
    dtype: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    read_settings(py)?;
    let numpy = arrays::numpy(py)?;
    let dtype = match dtype {
        Some(dtype) => numpy.call_method1("dtype", (dtype,))?,
        None => numpy.call_method1("dtype", ("float64",))?,
    };
    if dtype.getattr("hasobject")?.is_truthy()? {
        return Err(invalid(
            py,
            "empty: dtype is of Python objects, which are not numbers",
        ));
    }
    let shape = sizes(shape)?;
    let size: usize = dtype.getattr("itemsize")?.extract()?;
    let total = shape
        .iter()
        .try_fold(size, |total, &length| total.checked_mul(length))
        .filter(|&total| isize::try_from(total).is_ok());
    let Some(total) = total else {
        return Err(invalid(
            py,
            format!("empty: shape {shape:?} is larger than any memory"),
        ));
    };
    let shape = PyTuple::new(py, shape)?;
    let block = match total {
        0 => None,
        _ => py.detach(|| heap::allocate(total, 64)),
    };
    let Some(block) = block else {
        return numpy.call_method1("empty", (shape, dtype));
    };
    let bytes = numpy.call_method1("asarray", (Bound::new(py, Block(block))?,))?;
    let elements = bytes
        .get_item(PySlice::new(py, 0, isize::try_from(total)?, 1))?
        .call_method1("view", (dtype,))?;
    elements.call_method1("reshape", (shape,))
}

/// Refuses an environment with wrong settings, as joining a group does.
fn read_settings(py: Python<'_>) -> PyResult<()> {
    static READ: AtomicBool = AtomicBool::new(false);
    if !READ.load(Ordering::Relaxed) {
        Config::from_env().map_err(|error| exception(py, &error))?;
        READ.store(true, Ordering::Relaxed);
    }
    Ok(())
}

/// The lengths that a shape stands for.
fn sizes(shape: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let py = shape.py();
    let given = match shape.extract::<usize>() {
        Ok(length) => Ok(vec![length]),
        Err(cause) if cause.is_instance_of::<PyOverflowError>(py) => Err(cause),
        Err(_) => shape.extract::<Vec<usize>>(),
    };
    given.map_err(|cause| {
        let what = if cause.is_instance_of::<PyOverflowError>(py) {
            "has a negative or too large length"
        } else {
            "must be an int or a sequence of ints"
        };
        let error = invalid(py, format!("empty: shape {what}"));
        error.set_cause(py, Some(cause));
        error
    })
}

/// The usage of this process's shared heap now.
#[pyfunction]
#[pyo3(name = "heap")]
fn statistics(py: Python<'_>) -> Heap {
    Heap(py.detach(heap::statistics))
}

/// The usage of a process's shared heap when `heap` was called, in bytes where nothing else is said.
///
/// ``array in unisono.heap()`` tells whether the memory of an array lies in the heap.
#[pyclass(frozen, module = "unisono", name = "Heap")]
struct Heap(Statistics);

#[pymethods]
impl Heap {
    /// In arrays and tensors.
    #[getter]
    fn in_use(&self) -> usize {
        self.0.in_use
    }

    /// The most that was ever in use at one time.
    #[getter]
    fn peak(&self) -> usize {
        self.0.peak
    }

    /// Held for use; memory is taken as it is touched.
    #[getter]
    fn reserved(&self) -> usize {
        self.0.reserved
    }

    /// To which `reserved` may grow: the setting ``heap_bytes``. 0 when the heap is turned off.
    #[getter]
    fn limit(&self) -> usize {
        self.0.limit
    }

    /// The number of arrays and tensors.
    #[getter]
    fn blocks(&self) -> usize {
        self.0.blocks
    }

    /// The number of files of memory.
    #[getter]
    fn segments(&self) -> usize {
        self.0.segments
    }

    #[expect(
        clippy::unused_self,
        reason = "where memory lies does not change with time"
    )]
    fn __contains__(&self, array: &Bound<'_, PyAny>) -> PyResult<bool> {
        let how = How::new("heap", false, None, None);
        let start = Array::view(&how, how.argument("array"), array)?.start();
        Ok(heap::locate(start, 1).is_some())
    }

    fn __repr__(&self) -> String {
        let Statistics {
            in_use,
            peak,
            reserved,
            limit,
            blocks,
            segments,
        } = self.0;
        format!(
            "Heap(in_use={in_use}, peak={peak}, reserved={reserved}, limit={limit}, blocks={blocks}, \
             segments={segments})"
        )
    }
}
