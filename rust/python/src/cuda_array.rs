//! Arrays on CUDA devices: what `__cuda_array_interface__` says (CuPy, Numba, PyCUDA, ...), and which stream an array's
//! owner works on.
//!
//! The interface does not say on which device the memory lies, which CUDA's driver knows; nor can it describe bfloat16 and
//! the 8-bit floats. So an array that offers DLPack, too, is read through that (`dlpack.rs`).

use pyo3::exceptions::PyAttributeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use unisono::cuda;
use unisono::types::{DataType, DeviceStream};

use crate::array_struct::type_by_name;
use crate::errors::exception;
use crate::how::{How, Stream};
use crate::layout::{Argument, Layout};

/// The layout of `object`, if it has `__cuda_array_interface__`.
pub(crate) fn view(
    how: &How,
    argument: Argument,
    object: &Bound<'_, PyAny>,
) -> PyResult<Option<Layout>> {
    let py = object.py();
    let Some(interface) = interface(object)? else {
        return Ok(None);
    };
    let wrong = |what: &str| {
        argument.invalid(
            py,
            format!("has a __cuda_array_interface__ without a valid {what}"),
        )
    };
    let item = |key: &str| -> PyResult<Option<Bound<'_, PyAny>>> {
        let item = interface.get_item(key)?;
        Ok(item.filter(|item| !item.is_none()))
    };
    if item("mask")?.is_some() {
        return Err(argument.unsupported(py, "has a mask, which cannot be used here"));
    }
    let (start, read_only): (usize, bool) = item("data")?
        .and_then(|data| data.extract().ok())
        .ok_or_else(|| wrong("data"))?;
    let shape: Vec<usize> = item("shape")?
        .and_then(|shape| shape.extract().ok())
        .ok_or_else(|| wrong("shape"))?;
    let strides: Option<Vec<isize>> = match item("strides")? {
        Some(strides) => Some(strides.extract().map_err(|_| wrong("strides"))?),
        None => None,
    };
    if strides
        .as_ref()
        .is_some_and(|strides| strides.len() != shape.len())
    {
        return Err(wrong("strides"));
    }
    let typestr: String = item("typestr")?
        .and_then(|text| text.extract().ok())
        .ok_or_else(|| wrong("typestr"))?;
    let (dtype, moved) = data_type(argument, object, &typestr)?;
    let device = device(argument, py, start, shape.contains(&0))?;
    let own = exported_stream(argument, &interface)?;
    let stream = how.admit_device(py, argument, (device, own))?;
    // The array's owner works on it in the order of its own stream.
    if let (Some(device), Some(own)) = (device, own)
        && own != stream
    {
        let on = |stream: Stream| DeviceStream {
            device,
            stream: stream.0,
        };
        cuda::order(on(own), on(stream)).map_err(|error| exception(py, &error))?;
    }
    Ok(Some(Layout {
        start: std::ptr::with_exposed_provenance_mut(start),
        dtype,
        moved,
        shape,
        strides,
        read_only: read_only
            .then_some("is read-only, but is written to; pass a writable array, such as a copy"),
    }))
}

/// On which device `start` lies.
fn device(
    argument: Argument,
    py: Python<'_>,
    start: usize,
    is_empty: bool,
) -> PyResult<Option<u32>> {
    if start == 0 && is_empty {
        return Ok(None);
    }
    match cuda::device_of(start) {
        Ok(None) if is_empty => Ok(None),
        Ok(None) => Err(argument.invalid(
            py,
            format!("has a __cuda_array_interface__, but {start:#x} is no memory of a CUDA device: was it freed?"),
        )),
        Ok(device) => Ok(device),
        Err(error) => Err(exception(py, &error)),
    }
}

/// The stream in whose order the owner of `object`, an array on a device, works on it, if it tells.
pub(crate) fn own_stream(
    argument: Argument,
    object: &Bound<'_, PyAny>,
) -> PyResult<Option<Stream>> {
    let py = object.py();
    if let Some(torch) = tensor_library(object)? {
        let device = object.getattr(intern!(py, "device"))?;
        let current = torch
            .getattr(intern!(py, "cuda"))?
            .call_method1(intern!(py, "current_stream"), (device,))?;
        return current.extract().map(Some);
    }
    match interface(object)? {
        Some(interface) => exported_stream(argument, &interface),
        None => Ok(None),
    }
}

/// torch, if `object` is one of its tensors: they work in the order of a current stream, but do not say so themselves.
fn tensor_library<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = object.py();
    let modules = py.import("sys")?.getattr(intern!(py, "modules"))?;
    let Ok(torch) = modules.get_item(intern!(py, "torch")) else {
        return Ok(None);
    };
    // It may be half imported, by another thread.
    let Some(tensor) = torch.getattr_opt(intern!(py, "Tensor"))? else {
        return Ok(None);
    };
    Ok(object.is_instance(&tensor)?.then_some(torch))
}

/// The stream that the interface tells of, since version 3.
fn exported_stream(argument: Argument, interface: &Bound<'_, PyDict>) -> PyResult<Option<Stream>> {
    let Some(stream) = interface.get_item("stream")?.filter(|it| !it.is_none()) else {
        return Ok(None);
    };
    match stream.extract::<usize>() {
        // 0 is forbidden, since it may mean two things.
        Ok(handle) if handle > 0 => Ok(Some(Stream::of(handle))),
        _ => Err(argument.invalid(
            interface.py(),
            "has a __cuda_array_interface__ without a valid stream",
        )),
    }
}

fn interface<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyDict>>> {
    let py = object.py();
    match object.getattr(intern!(py, "__cuda_array_interface__")) {
        Ok(interface) => Ok(Some(interface.cast_into::<PyDict>()?)),
        Err(error) if error.is_instance_of::<PyAttributeError>(py) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The type that `typestr` means, in NumPy's notation.
fn data_type(
    argument: Argument,
    object: &Bound<'_, PyAny>,
    typestr: &str,
) -> PyResult<(DataType, Option<String>)> {
    let py = object.py();
    if typestr.starts_with('>') {
        return Err(argument.unsupported(py, "is not in this machine's byte order"));
    }
    let known = match typestr.trim_start_matches(['<', '|', '=']) {
        "f2" => DataType::Float16,
        "f4" => DataType::Float32,
        "f8" => DataType::Float64,
        "i1" => DataType::Int8,
        "i2" => DataType::Int16,
        "i4" => DataType::Int32,
        "i8" => DataType::Int64,
        "u1" => DataType::UInt8,
        "u2" => DataType::UInt16,
        "u4" => DataType::UInt32,
        "u8" => DataType::UInt64,
        "b1" => DataType::Bool,
        "c8" => DataType::Complex64,
        "c16" => DataType::Complex128,
        _ if object.hasattr(intern!(py, "dtype"))? => {
            return type_by_name(argument, object, &|_, name| {
                Ok(format!(
                    "is {name}, which is not supported; array.view(np.uint8) moves it as bytes"
                ))
            });
        }
        _ => {
            let what = format!("has elements of type {typestr:?}, which is not supported");
            return Err(argument.unsupported(py, what));
        }
    };
    Ok((known, None))
}

/// A new array of `shape`, like `object` and on its device, if its library is one that can be asked for it.
pub(crate) fn new_like<'py>(
    object: &Bound<'py, PyAny>,
    shape: &Bound<'py, PyTuple>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = object.py();
    let class = object.get_type();
    let module = class.module()?;
    if module.to_str()?.split('.').next() != Some("cupy") {
        return Ok(None);
    }
    let cupy = py.import("cupy")?;
    let dtype = object.getattr(intern!(py, "dtype"))?;
    let device = object.getattr(intern!(py, "device"))?;
    device.call_method0(intern!(py, "__enter__"))?;
    let made = cupy.call_method1(intern!(py, "empty"), (shape, dtype));
    let none = py.None();
    device.call_method1(intern!(py, "__exit__"), (&none, &none, &none))?;
    made.map(Some)
}
