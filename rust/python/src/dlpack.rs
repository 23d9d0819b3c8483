//! Arrays of other libraries, through DLPack: what `__dlpack__` hands out, in its versioned form (since 1.0) and in
//! the older one. The structs are those of `dlpack.h`.
//!
//! The capsule is looked into and kept, not consumed: its own destructor, which Python runs when the last reference
//! goes, then gives the memory back to its library.

use std::ffi::{CStr, c_void};

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use unisono::types::DataType;

use crate::arrays::{Argument, Layout};

const CPU: i32 = 1;
/// Memory of the CPU that CUDA has pinned.
const CUDA_HOST: i32 = 3;
/// The same for ROCm.
const ROCM_HOST: i32 = 11;

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

/// Looks at `object`, which has `__dlpack_device__`. Returns what owns the memory, and its layout.
pub(crate) fn view<'py>(
    argument: Argument,
    object: &Bound<'py, PyAny>,
) -> PyResult<(Bound<'py, PyAny>, Layout)> {
    let py = object.py();
    check_device(argument, object)?;
    let capsule = export(object).map_err(|cause| {
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
    let mut layout = if let Some(pointer) = pointer(&capsule, c"dltensor_versioned") {
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
            layout.read_only = Some("is read-only, but is written to; pass out= instead");
        } else if managed.flags & IS_COPIED != 0 {
            layout.read_only =
                Some("is written to, but its library shares only a copy of it; pass out= instead");
        }
        layout
    } else if let Some(pointer) = pointer(&capsule, c"dltensor") {
        // SAFETY: as above; the managed tensor of this form begins with the tensor.
        unsafe { layout(py, argument, &*pointer.cast::<Tensor>())? }
    } else {
        return Err(argument.invalid(py, "has a __dlpack__ that returns a capsule already used"));
    };
    if is_immutable(object)? {
        layout.read_only =
            Some("is a JAX array, which cannot be written to; pass out=, a NumPy array");
    }
    Ok((capsule.into_any(), layout))
}

fn check_device(argument: Argument, object: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = object.py();
    let (kind, id): (Bound<'_, PyAny>, i64) = object
        .call_method0(intern!(py, "__dlpack_device__"))?
        .extract()?;
    // Some libraries return an IntEnum.
    let kind: i32 = kind.call_method0(intern!(py, "__int__"))?.extract()?;
    if matches!(kind, CPU | CUDA_HOST | ROCM_HOST) {
        return Ok(());
    }
    let name = match kind {
        2 => format!("CUDA device {id}"),
        8 => format!("Metal device {id}"),
        10 => format!("ROCm device {id}"),
        _ => format!("device {id} of DLPack's type {kind}"),
    };
    Err(argument.unsupported(
        py,
        format!("is on {name}; only memory of the CPU can be used here, so copy it there first"),
    ))
}

fn export<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let options = PyDict::new(py);
    options.set_item(intern!(py, "max_version"), (1, 0))?;
    match object.call_method(intern!(py, "__dlpack__"), (), Some(&options)) {
        // A library that is older than the argument.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            object.call_method0(intern!(py, "__dlpack__"))
        }
        result => result,
    }
}

fn pointer(capsule: &Bound<'_, PyCapsule>, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the capsule is one, and the name ends with a zero; a capsule of another name is told, not an error.
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
    let dtype = data_type(&tensor.dtype).ok_or_else(|| {
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

/// JAX's arrays never change, but the form in which it shares them cannot say so.
fn is_immutable(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let module = object.get_type().module()?;
    Ok(module
        .to_str()
        .is_ok_and(|module| module.split('.').next() == Some("jaxlib")))
}
