//! The Python module `unisono._core` as one extension module, which knows no torch: all of it is in `unisono-python`.
//!
//! The torch door (`unisono-torch`) is another one with the same name and the same contents. A library that both are made of
//! can hold no `#[pymodule]`, whose init function each of them exports.

use pyo3::prelude::*;

/// The native half of unisono.
#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    unisono_python::add_to(module)
}
