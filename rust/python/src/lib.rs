//! The Python module `unisono._core`.
//!
//! Built twice from one source: plain, for arrays; and with the feature `torch`, once per torch minor version,
//! with the c10d backend in `csrc/` inside. Python picks the one that fits the process (`_native.py`).

mod array_struct;
mod arrays;
mod collectives;
mod communicator;
mod counts;
mod cuda_array;
mod dlpack;
mod errors;
mod exchanges;
mod heap;
mod how;
mod launch;
mod log;
mod one_sided;
mod operator;
mod point_to_point;
mod reductions;
mod rooted;
mod running;
mod settings;
#[cfg(feature = "torch")]
mod torch;
mod work;

use std::time::Duration;

use pyo3::prelude::*;

/// How long the end of the interpreter may wait for our threads, which need far less, unless a callback does not return.
const THREADS_END: Duration = Duration::from_secs(1);

/// The native half of unisono.
#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    communicator::add_to(module)?;
    settings::add_to(module)?;
    heap::add_to(module)?;
    launch::add_to(module)?;
    one_sided::add_to(module)?;
    module.add_class::<operator::ReduceOp>()?;
    module.add_class::<work::Work>()?;
    #[cfg(feature = "torch")]
    torch::add_to(module)?;
    Ok(())
}
