//! Arrays of Python, as memory for the core, without copying them.
//!
//! NumPy arrays are read through `__array_struct__`, NumPy's C interface: one attribute, and it also describes the
//! types that DLPack does not let NumPy export (bfloat16 and the 8-bit floats of ml_dtypes). Everything else is
//! asked for DLPack (`dlpack.rs`). Bytes-like objects that offer neither (bytes, memoryview, array.array) go
//! through `numpy.asarray`, which shares memory too. Arrays on a CUDA device come with DLPack, or with
//! `__cuda_array_interface__` alone (`cuda_array.rs`).
//!
//! An [`Array`] holds a reference to whatever keeps the memory alive, so it is valid for as long as it is kept. The
//! caller must see to it that no other code writes to an array that an operation reads, or uses one that it writes, as
//! with every such library; the documentation of each operation says so.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyType};
use unisono::buffer::Memory;
use unisono::types::DataType;

use crate::array_struct::ArrayInterface;
use crate::how::How;
use crate::layout::{Argument, Layout};
use crate::{cuda_array, dlpack};

/// `blocks` of shape `block` along a new first axis.
pub(crate) fn stacked(blocks: usize, block: &[usize]) -> Vec<usize> {
    [&[blocks], block].concat()
}

/// An array in row-major order without gaps.
pub(crate) struct Array<'py> {
    /// The object that the caller gave.
    given: Bound<'py, PyAny>,
    /// The array it was understood as: the same, or a copy, or a view of it.
    object: Bound<'py, PyAny>,
    /// The object that keeps the memory where it is.
    owner: Bound<'py, PyAny>,
    argument: Argument,
    layout: Layout,
    kind: Kind,
}

/// The numbers of an array, which it keeps.
pub(crate) struct Floats {
    start: *mut f32,
    count: usize,
    _keep: Py<PyAny>,
}

// SAFETY: it owns a share of what owns the memory, which belongs to no thread.
unsafe impl Send for Floats {}

impl Floats {
    /// # Safety
    /// No other code uses the array meanwhile.
    pub(crate) unsafe fn slice(&mut self) -> &mut [f32] {
        if self.count == 0 {
            return &mut [];
        }
        // SAFETY: `floats` has found `count` aligned numbers, which live as long as `self`; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.count) }
    }
}

/// Where an array comes from, which says how another one like it is made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    NumPy,
    /// Another library's, in the memory of the host.
    Host,
    /// Another library's, on a CUDA device.
    Device,
}

impl<'py> Array<'py> {
    /// An array to be read. One with gaps is copied.
    pub(crate) fn input(
        how: &How,
        name: &'static str,
        object: &Bound<'py, PyAny>,
    ) -> PyResult<Self> {
        let argument = how.argument(name);
        let array = Self::view(how, argument, object)?;
        if array.is_contiguous() {
            return Ok(array);
        }
        let copy = if array.kind == Kind::NumPy {
            numpy(object.py())?.call_method1("ascontiguousarray", (&array.object,))?
        } else if object.hasattr("contiguous")? {
            object.call_method0("contiguous")?
        } else {
            return Err(argument.invalid(
                object.py(),
                "is not contiguous in row-major order; pass a contiguous copy",
            ));
        };
        Self::view(how, argument, &copy)
    }

    /// An array to be written.
    pub(crate) fn output(
        how: &How,
        name: &'static str,
        object: &Bound<'py, PyAny>,
    ) -> PyResult<Self> {
        let argument = how.argument(name);
        let mut array = Self::view(how, argument, object)?;
        array.given = object.clone();
        if let Some(reason) = array.layout.read_only {
            return Err(argument.invalid(object.py(), reason));
        }
        if !array.is_contiguous() {
            return Err(argument.invalid(
                object.py(),
                "is written to, but is not contiguous in row-major order; pass a contiguous array \
                 (np.ascontiguousarray makes one) and copy the result back",
            ));
        }
        Ok(array)
    }

    /// An array as it is, gaps and all.
    pub(crate) fn view(
        how: &How,
        argument: Argument,
        object: &Bound<'py, PyAny>,
    ) -> PyResult<Self> {
        let py = object.py();
        if object.is_instance(numpy_class(py, &NDARRAY, "ndarray")?)? {
            return Self::of_numpy(how, argument, object);
        }
        if object.is_instance(numpy_class(py, &GENERIC, "generic")?)? {
            let shared = numpy(py)?.call_method1("asarray", (object,))?;
            let mut array = Self::of_numpy(how, argument, &shared)?;
            array.layout.read_only = Some(
                "is a NumPy scalar, which cannot be written to; pass an array, np.array(value)",
            );
            return Ok(array);
        }
        if object.hasattr(intern!(py, "__dlpack_device__"))? {
            let shared = dlpack::view(how, argument, object)?;
            let kind = match shared.on_device {
                true => Kind::Device,
                false => Kind::Host,
            };
            return Ok(Self::of_library(
                argument,
                object,
                shared.owner,
                (shared.layout, kind),
            ));
        }
        if let Some(layout) = cuda_array::view(how, argument, object)? {
            let parts = (layout, Kind::Device);
            return Ok(Self::of_library(argument, object, object.clone(), parts));
        }
        Self::of_bytes_like(how, argument, object)
    }

    fn of_library(
        argument: Argument,
        object: &Bound<'py, PyAny>,
        owner: Bound<'py, PyAny>,
        (layout, kind): (Layout, Kind),
    ) -> Self {
        Self {
            given: object.clone(),
            object: object.clone(),
            owner,
            argument,
            layout,
            kind,
        }
    }

    fn of_bytes_like(how: &How, argument: Argument, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let memory = py.import("builtins")?.getattr("memoryview")?;
        let shared = if object.hasattr(intern!(py, "__array_interface__"))? {
            numpy(py)?.call_method1("asarray", (object,))
        } else {
            memory
                .call1((object,))
                .and_then(|view| numpy(py)?.call_method1("asarray", (view,)))
        };
        match shared {
            Ok(shared) => Self::of_numpy(how, argument, &shared),
            Err(cause) => {
                let error = argument.invalid(
                    py,
                    format!(
                        "is a {}, but must be a NumPy array, an array with DLPack (torch, JAX, CuPy) or bytes-like; \
                         np.asarray makes an array of numbers and lists",
                        object.get_type().name()?
                    ),
                );
                error.set_cause(py, Some(cause));
                Err(error)
            }
        }
    }

    fn of_numpy(how: &How, argument: Argument, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        how.admit_host(py, argument)?;
        let capsule = object.getattr(intern!(py, "__array_struct__"))?;
        let capsule = capsule.cast_into::<PyCapsule>()?;
        // SAFETY: NumPy documents that the capsule of an ndarray, which `object` is, points to this struct.
        let array: &ArrayInterface = unsafe { capsule.pointer_checked(None)?.cast().as_ref() };
        // SAFETY: NumPy filled the struct and keeps it as long as the capsule, and we hold that.
        let layout = unsafe { array.layout(argument, object)? };
        // The capsule refers to the array and the array owns the memory; a reference to the array also keeps
        // `resize` from moving it.
        let object = object.clone();
        Ok(Self {
            given: object.clone(),
            owner: object.clone(),
            object,
            argument,
            layout,
            kind: Kind::NumPy,
        })
    }

    pub(crate) fn dtype(&self) -> DataType {
        self.layout.dtype
    }

    /// The name that the array's library has for its type.
    pub(crate) fn type_name(&self) -> &str {
        let moved = self.layout.moved.as_deref();
        moved.unwrap_or_else(|| self.dtype().name())
    }

    /// Refuses to reduce what is moved as bits.
    pub(crate) fn check_reduced(&self) -> PyResult<()> {
        let Some(name) = &self.layout.moved else {
            return Ok(());
        };
        let what = format!(
            "is {name}, which is moved but not reduced; convert it to a type that is, such as float32"
        );
        Err(self.argument.unsupported(self.object.py(), what))
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.layout.shape
    }

    /// The address of the first element.
    pub(crate) fn start(&self) -> *const u8 {
        self.layout.start
    }

    /// The number of elements.
    pub(crate) fn count(&self) -> usize {
        self.layout.shape.iter().product()
    }

    /// The number of bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.count() * self.dtype().size()
    }

    pub(crate) fn object(&self) -> &Bound<'py, PyAny> {
        &self.object
    }

    /// The object that the caller gave; for a new array, the array.
    pub(crate) fn given(&self) -> &Bound<'py, PyAny> {
        &self.given
    }

    pub(crate) fn argument(&self) -> Argument {
        self.argument
    }

    /// The whole memory, for a request.
    ///
    /// # Safety
    /// The operation ends before what [`Array::keep`] returns is dropped, and no other than the operation uses the
    /// memory meanwhile but as [`Memory::from_raw_parts`] allows.
    pub(crate) unsafe fn memory(&self) -> Memory {
        // SAFETY: the caller's promise; the layout is the owner's description of memory that it owns.
        unsafe { Memory::from_raw_parts(self.layout.start, self.bytes()) }
    }

    /// The array as numbers of float32, for a thread that may outlive the call.
    ///
    /// # Errors
    /// `UnsupportedError` for another type, a CUDA device, or memory that is not aligned.
    pub(crate) fn floats(&self) -> PyResult<Floats> {
        let start: *mut f32 = self.layout.start.cast();
        let reason = if self.kind == Kind::Device {
            "is on a CUDA device, and must be in the memory of the host"
        } else if self.dtype() != DataType::Float32 {
            "must be of float32"
        } else if self.count() > 0 && !start.is_aligned() {
            "does not begin at a multiple of 4 bytes; pass a copy"
        } else {
            return Ok(Floats {
                start,
                count: self.count(),
                _keep: self.keep(),
            });
        };
        Err(self.argument.unsupported(self.object.py(), reason))
    }

    /// The object that must live for as long as the memory is used.
    pub(crate) fn keep(&self) -> Py<PyAny> {
        self.owner.clone().unbind()
    }

    /// Whether both are the same memory.
    pub(crate) fn is_same_as(&self, other: &Self) -> bool {
        self.layout.start == other.layout.start && self.bytes() == other.bytes()
    }

    /// Whether this is block `index` of `blocks` equal ones of `whole`.
    pub(crate) fn is_block_of(&self, whole: &Self, index: usize, blocks: usize) -> bool {
        self.bytes() * blocks == whole.bytes()
            && self.layout.start == whole.layout.start.wrapping_add(index * self.bytes())
    }

    /// A new array of the same kind and type: NumPy for NumPy, a tensor for a tensor, CuPy for CuPy. For other libraries,
    /// whose arrays cannot be made in a common way or not be written to, NumPy's, and on a device none.
    pub(crate) fn new_like(&self, how: &How, shape: &[usize]) -> PyResult<Self> {
        let py = self.object.py();
        let shape = pyo3::types::PyTuple::new(py, shape)?;
        let empty = intern!(py, "empty");
        let made = if self.kind == Kind::NumPy {
            let dtype = self.object.getattr(intern!(py, "dtype"))?;
            numpy(py)?.call_method1(empty, (shape, dtype))?
        } else if self.object.hasattr(intern!(py, "new_empty"))? {
            self.object
                .call_method1(intern!(py, "new_empty"), (shape,))?
        } else if self.kind == Kind::Host {
            numpy(py)?.call_method1(empty, (shape, self.numpy_dtype()?))?
        } else if let Some(made) = cuda_array::new_like(&self.object, &shape)? {
            made
        } else {
            let library = self.object.get_type().fully_qualified_name()?;
            return Err(self.argument.invalid(
                py,
                format!(
                    "is a {library}, of which this library cannot make another on a CUDA device for the result; pass \
                     out=, an array on the same device"
                ),
            ));
        };
        Self::output(how, "the result", &made)
    }

    /// Makes all elements zero, by its library's own means; not on a device, whose streams have an order.
    pub(crate) fn clear(&self) -> PyResult<()> {
        let py = self.object.py();
        if self.kind == Kind::Device {
            return Ok(());
        }
        if self.object.hasattr(intern!(py, "zero_"))? {
            self.object.call_method0(intern!(py, "zero_"))?;
        } else {
            self.object.call_method1(intern!(py, "fill"), (0,))?;
        }
        Ok(())
    }

    fn numpy_dtype(&self) -> PyResult<Bound<'py, PyAny>> {
        let py = self.object.py();
        let name = self.type_name();
        let added = [
            DataType::BFloat16,
            DataType::Float8E4M3,
            DataType::Float8E5M2,
        ];
        if self.layout.moved.is_none() && !added.contains(&self.dtype()) {
            return numpy(py)?.call_method1("dtype", (name,));
        }
        match py.import("ml_dtypes") {
            Ok(module) => module.getattr(name),
            Err(_) => Err(self.argument.unsupported(
                py,
                format!(
                    "is {name}, which NumPy alone does not know: pass out=, or install ml_dtypes"
                ),
            )),
        }
    }

    /// Refuses `self` as the output for elements like those of `input`.
    pub(crate) fn check_output_for(&self, input: &Self, count: usize) -> PyResult<()> {
        let py = self.object.py();
        if self.type_name() != input.type_name() {
            return Err(self.argument.invalid(
                py,
                format!(
                    "is {}, but {} is {}",
                    self.type_name(),
                    input.argument.name,
                    input.type_name()
                ),
            ));
        }
        if self.count() != count {
            return Err(self.argument.invalid(
                py,
                format!(
                    "has {} elements (shape {:?}), but the result has {count}",
                    self.count(),
                    self.shape()
                ),
            ));
        }
        Ok(())
    }

    /// The shape without its first axis, for operations on rows.
    pub(crate) fn row_shape(&self) -> PyResult<&[usize]> {
        match self.layout.shape.as_slice() {
            [_, row @ ..] => Ok(row),
            [] => Err(self.argument.invalid(
                self.object.py(),
                "has no axes, but counts are of rows along the first axis; reshape it to (1,)",
            )),
        }
    }

    fn is_contiguous(&self) -> bool {
        let Some(strides) = &self.layout.strides else {
            return true;
        };
        if self.count() == 0 {
            return true;
        }
        let mut expected = self.dtype().size() as isize;
        for (extent, stride) in self.layout.shape.iter().zip(strides).rev() {
            if *extent != 1 && *stride != expected {
                return false;
            }
            expected *= *extent as isize;
        }
        true
    }
}

static NUMPY: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
static NDARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static GENERIC: PyOnceLock<Py<PyType>> = PyOnceLock::new();

pub(crate) fn numpy(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    Ok(NUMPY
        .get_or_try_init(py, || py.import("numpy").map(Bound::unbind))?
        .bind(py))
}

fn numpy_class<'py>(
    py: Python<'py>,
    cell: &'static PyOnceLock<Py<PyType>>,
    name: &str,
) -> PyResult<&'py Bound<'py, PyType>> {
    let class = cell.get_or_try_init(py, || {
        let class = numpy(py)?.getattr(name)?.cast_into::<PyType>()?;
        Ok::<_, PyErr>(class.unbind())
    })?;
    Ok(class.bind(py))
}
