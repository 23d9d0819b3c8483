//! The Python module `unisono._core`.
//!
//! Built twice from one source: plain, for arrays; and with the feature `torch`, once per torch minor version,
//! with the c10d backend in `csrc/` inside. Python picks the one that fits the process (`_native.py`).

#[cfg(feature = "torch")]
mod torch;

use pyo3::prelude::*;

/// The native half of unisono.
#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    #[cfg(feature = "torch")]
    torch::add_to(module)?;
    Ok(())
}
