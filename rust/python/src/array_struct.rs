//! NumPy's description of an array in C.

use std::ffi::c_void;

use pyo3::prelude::*;
use unisono::types::DataType;

use crate::layout::{Argument, Layout};

/// `PyArrayInterface` of NumPy's documentation ("C-struct access").
#[repr(C)]
pub(crate) struct ArrayInterface {
    two: i32,
    axes: i32,
    kind: std::ffi::c_char,
    item_size: i32,
    flags: i32,
    shape: *const isize,
    strides: *const isize,
    data: *mut c_void,
    description: *mut c_void,
}

impl ArrayInterface {
    const ROW_MAJOR: i32 = 0x1;
    const NATIVE_BYTE_ORDER: i32 = 0x200;
    const WRITABLE: i32 = 0x400;

    /// # Safety
    /// The struct is as NumPy filled it for `object`.
    pub(crate) unsafe fn layout(
        &self,
        argument: Argument,
        object: &Bound<'_, PyAny>,
    ) -> PyResult<Layout> {
        let axes = usize::try_from(self.axes).unwrap_or(0);
        let (shape, strides) = if axes == 0 {
            (Vec::new(), None)
        } else {
            // SAFETY: both have one entry per axis.
            let (shape, strides) = unsafe {
                (
                    std::slice::from_raw_parts(self.shape, axes),
                    std::slice::from_raw_parts(self.strides, axes),
                )
            };
            let gaps = self.flags & Self::ROW_MAJOR == 0;
            (
                shape.iter().map(|n| n.unsigned_abs()).collect(),
                gaps.then(|| strides.to_vec()),
            )
        };
        let writable = self.flags & Self::WRITABLE != 0;
        let (dtype, moved) = self.data_type(argument, object)?;
        Ok(Layout {
            start: self.data.cast(),
            dtype,
            moved,
            shape,
            strides,
            read_only: (!writable).then_some(
                "is read-only, but is written to; pass a writable array, such as a copy",
            ),
        })
    }

    fn data_type(
        &self,
        argument: Argument,
        object: &Bound<'_, PyAny>,
    ) -> PyResult<(DataType, Option<String>)> {
        let kind = u8::try_from(self.kind).unwrap_or(0);
        let known = match (kind, self.item_size) {
            (b'f', 2) => DataType::Float16,
            (b'f', 4) => DataType::Float32,
            (b'f', 8) => DataType::Float64,
            (b'i', 1) => DataType::Int8,
            (b'i', 2) => DataType::Int16,
            (b'i', 4) => DataType::Int32,
            (b'i', 8) => DataType::Int64,
            (b'u', 1) => DataType::UInt8,
            (b'u', 2) => DataType::UInt16,
            (b'u', 4) => DataType::UInt32,
            (b'u', 8) => DataType::UInt64,
            (b'b', 1) => DataType::Bool,
            (b'c', 8) => DataType::Complex64,
            (b'c', 16) => DataType::Complex128,
            _ => return type_by_name(argument, object, &explain),
        };
        // Only of numbers does the flag say something: NumPy sets none for an array with fields, whatever their order.
        if self.flags & Self::NATIVE_BYTE_ORDER == 0 && self.item_size > 1 {
            return Err(argument.unsupported(
                object.py(),
                "is not in this machine's byte order; pass array.astype(array.dtype.newbyteorder(\"=\"))",
            ));
        }
        Ok((known, None))
    }
}

/// The types that ml_dtypes adds to NumPy differ in their names alone. Those that the core has no arithmetic for come as one
/// of the size of their elements, and their name. Of any other type `explain` says what can be done.
pub(crate) fn type_by_name(
    argument: Argument,
    object: &Bound<'_, PyAny>,
    explain: &dyn Fn(&Bound<'_, PyAny>, &str) -> PyResult<String>,
) -> PyResult<(DataType, Option<String>)> {
    let dtype = object.getattr("dtype")?;
    let name: String = dtype.getattr("name")?.extract()?;
    let added = [
        DataType::BFloat16,
        DataType::Float8E4M3,
        DataType::Float8E5M2,
    ];
    if let Some(known) = added.into_iter().find(|dtype| dtype.name() == name) {
        return Ok((known, None));
    }
    if let Some(bits) = bits_of_ml_dtypes(&dtype)? {
        return Ok((bits, Some(name)));
    }
    Err(argument.unsupported(object.py(), explain(&dtype, &name)?))
}

/// A type of the size of the elements, if `dtype` is of ml_dtypes.
fn bits_of_ml_dtypes(dtype: &Bound<'_, PyAny>) -> PyResult<Option<DataType>> {
    let Some(scalar) = dtype.getattr_opt("type")? else {
        return Ok(None);
    };
    let module: String = scalar.getattr("__module__")?.extract()?;
    if module != "ml_dtypes" {
        return Ok(None);
    }
    let size: usize = dtype.getattr("itemsize")?.extract()?;
    Ok(match size {
        1 => Some(DataType::UInt8),
        2 => Some(DataType::UInt16),
        4 => Some(DataType::UInt32),
        _ => None,
    })
}

/// The reason why elements of NumPy's type `dtype` are refused, and what to pass instead.
fn explain(dtype: &Bound<'_, PyAny>, name: &str) -> PyResult<String> {
    const AS_BYTES: &str = "np.ascontiguousarray(array).view(np.uint8) moves it as bytes";
    // NumPy does not let such an array be seen as bytes.
    if dtype.getattr("hasobject")?.is_truthy()? {
        return Ok(format!(
            "is {name}, which holds Python objects, and their addresses mean nothing to another process; pickle them: \
             np.frombuffer(pickle.dumps(array), np.uint8)"
        ));
    }
    let known: Vec<_> = DataType::ALL.iter().map(|dtype| dtype.name()).collect();
    let known = known.join(", ");
    let fields = dtype.getattr("names")?;
    if fields.is_none() {
        return Ok(format!("is {name}, which is none of {known}; {AS_BYTES}"));
    }
    let fields: Vec<String> = fields.extract()?;
    let first = fields.first().map_or("", String::as_str);
    Ok(format!(
        "has elements with fields ({}), which are none of {known}; {AS_BYTES}, and a field may be passed by itself: \
         array[{first:?}]",
        fields.join(", ")
    ))
}
