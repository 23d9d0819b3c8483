//! Arrays of other libraries, through DLPack: what `__dlpack__` hands out, in its versioned form (since 1.0) and in
//! the older one, in the memory of the host or on a CUDA device. The structs are those of `dlpack.h`.
//!
//! The capsule is looked into and kept, not consumed: its own destructor, which Python runs when the last reference
//! goes, then gives the memory back to its library.

use std::ffi::{CStr, c_void};

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use unisono::types::DataType;

use crate::cuda_array;
use crate::how::{How, Stream};
use crate::layout::{Argument, Layout};

const CPU: i32 = 1;
const CUDA: i32 = 2;
/// Memory of the CPU that CUDA has pinned.
const CUDA_HOST: i32 = 3;
/// The same for ROCm.
const ROCM_HOST: i32 = 11;
/// Memory of CUDA that moves between the host and its devices by itself.
const CUDA_MANAGED: i32 = 13;

const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct ElementType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    axes: i32,
    dtype: ElementType,
    shape: *const i64,
    /// In elements; null in row-major order.
    strides: *const i64,
    byte_offset: u64,
}

#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    tensor: Tensor,
}

/// An array of another library.
pub(crate) struct Shared<'py> {
    /// The object that keeps the memory.
    pub(crate) owner: Bound<'py, PyAny>,
    pub(crate) layout: Layout,
    pub(crate) on_device: bool,
}

/// Looks at `object`, which has `__dlpack_device__`.
pub(crate) fn view<'py>(
    how: &How,
    argument: Argument,
    object: &Bound<'py, PyAny>,
) -> PyResult<Shared<'py>> {
    let py = object.py();
    let device = device(argument, object)?;
    let stream = match device {
        None => {
            how.admit_host(py, argument)?;
            None
        }
        Some(_) => {
            let own = cuda_array::own_stream(argument, object)?;
            Some(how.admit_device(py, argument, (device, own))?)
        }
    };
    // The library has this stream wait for what it has under way on the array.
    let capsule = export(object, stream).map_err(|cause| {
        let error = argument.invalid(
            py,
            format!("cannot be shared by its library: {}", cause.value(py)),
        );
        error.set_cause(py, Some(cause));
        error
    })?;
    let capsule = capsule
        .cast_into::<PyCapsule>()
        .map_err(|_| argument.invalid(py, "has a __dlpack__ that returns no capsule"))?;
    let mut layout = capsule_layout(py, argument, &capsule)?;
    if is_immutable(object)? {
        layout.read_only = Some(match stream {
            None => {
                "is a JAX array, which cannot be written to; pass out=, a NumPy array (to operations without out=, the \
                 NumPy array itself)"
            }
            Some(_) => {
                "is a JAX array, which cannot be written to; pass out=, an array of another library on the same \
                 device such as CuPy or torch (to operations without out=, that array itself)"
            }
        });
    }
    Ok(Shared {
        owner: capsule.into_any(),
        layout,
        on_device: stream.is_some(),
    })
}

/// The layout of the array in `capsule`.
fn capsule_layout(
    py: Python<'_>,
    argument: Argument,
    capsule: &Bound<'_, PyCapsule>,
) -> PyResult<Layout> {
    if let Some(pointer) = pointer(capsule, c"dltensor_versioned") {
        // SAFETY: the standard says what a capsule of this name points to, for as long as it has this name; we
        // hold the only reference to it.
        let managed = unsafe { &*pointer.cast::<Versioned>() };
        if managed.major != 1 {
            return Err(argument.unsupported(
                py,
                format!(
                    "speaks DLPack {}, which is newer than version 1",
                    managed.major
                ),
            ));
        }
        // SAFETY: as above.
        let mut layout = unsafe { layout(py, argument, &managed.tensor)? };
        if managed.flags & READ_ONLY != 0 {
            layout.read_only =
                Some("is read-only, but is written to; pass a writable array, such as a copy");
        } else if managed.flags & IS_COPIED != 0 {
            layout.read_only = Some(
                "is written to, but its library shares only a copy of it; pass an array of NumPy or torch",
            );
        }
        Ok(layout)
    } else if let Some(pointer) = pointer(capsule, c"dltensor") {
        // SAFETY: as above; the managed tensor of this form begins with the tensor.
        unsafe { layout(py, argument, &*pointer.cast::<Tensor>()) }
    } else {
        Err(argument.invalid(py, "has a __dlpack__ that returns a capsule already used"))
    }
}

/// The CUDA device that `object` is on; None for the host.
fn device(argument: Argument, object: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
    let py = object.py();
    let (kind, id): (Bound<'_, PyAny>, i64) = object
        .call_method0(intern!(py, "__dlpack_device__"))?
        .extract()?;
    // Some libraries return an IntEnum.
    let kind: i32 = kind.call_method0(intern!(py, "__int__"))?.extract()?;
    if matches!(kind, CPU | CUDA_HOST | ROCM_HOST) {
        return Ok(None);
    }
    if let (CUDA | CUDA_MANAGED, Ok(id)) = (kind, u32::try_from(id)) {
        return Ok(Some(id));
    }
    let name = match kind {
        8 => format!("Metal device {id}"),
        10 => format!("ROCm device {id}"),
        _ => format!("device {id} of DLPack's type {kind}"),
    };
    Err(argument.unsupported(
        py,
        format!(
            "is on {name}; only memory of the host and of CUDA devices can be used here, so copy it there first"
        ),
    ))
}

fn export<'py>(object: &Bound<'py, PyAny>, stream: Option<Stream>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let name = intern!(py, "__dlpack__");
    let options = PyDict::new(py);
    if let Some(stream) = stream {
        options.set_item(intern!(py, "stream"), stream.for_dlpack())?;
    }
    options.set_item(intern!(py, "max_version"), (1, 0))?;
    match object.call_method(name, (), Some(&options)) {
        // A library that is older than the argument.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            options.del_item(intern!(py, "max_version"))?;
            object.call_method(name, (), Some(&options))
        }
        result => result,
    }
}

fn pointer(capsule: &Bound<'_, PyCapsule>, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the capsule is one, and the name ends with a zero; for a capsule of another name the first call returns
    // 0.
    unsafe {
        if pyo3::ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) == 0 {
            return None;
        }
        Some(pyo3::ffi::PyCapsule_GetPointer(
            capsule.as_ptr(),
            name.as_ptr(),
        ))
    }
}

/// # Safety
/// `tensor` is as its library filled it.
unsafe fn layout(py: Python<'_>, argument: Argument, tensor: &Tensor) -> PyResult<Layout> {
    let axes = usize::try_from(tensor.axes).unwrap_or(0);
    let moved = moved_type(&tensor.dtype);
    let known = data_type(&tensor.dtype).or(moved.map(|_| DataType::UInt8));
    let dtype = known.ok_or_else(|| {
        let ElementType { code, bits, lanes } = tensor.dtype;
        argument.unsupported(
            py,
            format!("has elements of a type not supported: DLPack's code {code}, {bits} bits, {lanes} lanes"),
        )
    })?;
    // SAFETY: the shape has one entry per axis, and so have the strides where there are any.
    let list = |start: *const i64| unsafe { std::slice::from_raw_parts(start, axes) };
    let shape = if axes == 0 { &[] } else { list(tensor.shape) };
    let strides = (axes > 0 && !tensor.strides.is_null()).then(|| list(tensor.strides));
    Ok(Layout {
        start: tensor
            .data
            .cast::<u8>()
            .wrapping_add(tensor.byte_offset as usize),
        dtype,
        moved: moved.map(str::to_owned),
        shape: shape
            .iter()
            .map(|extent| extent.unsigned_abs() as usize)
            .collect(),
        strides: strides.map(|all| {
            all.iter()
                .map(|stride| *stride as isize * dtype.size() as isize)
                .collect()
        }),
        read_only: None,
    })
}

fn data_type(dtype: &ElementType) -> Option<DataType> {
    if dtype.lanes != 1 {
        return None;
    }
    Some(match (dtype.code, dtype.bits) {
        (0, 8) => DataType::Int8,
        (0, 16) => DataType::Int16,
        (0, 32) => DataType::Int32,
        (0, 64) => DataType::Int64,
        (1, 8) => DataType::UInt8,
        (1, 16) => DataType::UInt16,
        (1, 32) => DataType::UInt32,
        (1, 64) => DataType::UInt64,
        (2, 16) => DataType::Float16,
        (2, 32) => DataType::Float32,
        (2, 64) => DataType::Float64,
        (4, 16) => DataType::BFloat16,
        (5, 64) => DataType::Complex64,
        (5, 128) => DataType::Complex128,
        (6, 8) => DataType::Bool,
        (10, 8) => DataType::Float8E4M3,
        (12, 8) => DataType::Float8E5M2,
        _ => return None,
    })
}

/// The name of a type of one byte that the core has no arithmetic for.
fn moved_type(dtype: &ElementType) -> Option<&'static str> {
    Some(match (dtype.code, dtype.bits, dtype.lanes) {
        (7, 8, 1) => "float8_e3m4",
        (8, 8, 1) => "float8_e4m3",
        (9, 8, 1) => "float8_e4m3b11fnuz",
        (11, 8, 1) => "float8_e4m3fnuz",
        (13, 8, 1) => "float8_e5m2fnuz",
        (14, 8, 1) => "float8_e8m0fnu",
        (17, 4, 2) => "float4_e2m1fn_x2",
        _ => return None,
    })
}

/// JAX's arrays never change, but the form in which it shares them cannot say so.
fn is_immutable(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let module = object.get_type().module()?;
    Ok(module
        .to_str()
        .is_ok_and(|module| module.split('.').next() == Some("jaxlib")))
}
