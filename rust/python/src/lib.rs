//! The Python module `unisono._core`, less the function that Python initialises it by.
//!
//! There are several builds of it, and Python picks the one that fits the process (`_native.py`): `unisono-module`, for arrays,
//! and `unisono-torch`, once per torch minor version, with the c10d backend in `csrc/` inside. This crate is compiled once for
//! all of them.

mod array_struct;
mod arrays;
mod candidate;
mod collectives;
mod communicator;
mod counts;
mod cuda_array;
mod dlpack;
mod errors;
mod exchanges;
mod explain;
mod heap;
mod how;
mod joined;
mod launch;
mod layout;
pub mod log;
mod message;
mod objects;
mod one_sided;
mod operator;
mod point_to_point;
mod reductions;
mod rooted;
mod running;
mod settings;
mod simulate;
mod window;
mod work;

use pyo3::prelude::*;

pub use joined::{THREADS_END, close_at_the_end, register_window};

/// Puts everything into the module that Python initialises.
///
/// # Errors
/// Those of Python.
pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    candidate::add_to(module)?;
    communicator::add_to(module)?;
    joined::add_to(module)?;
    settings::add_to(module)?;
    explain::add_to(module)?;
    simulate::add_to(module)?;
    heap::add_to(module)?;
    launch::add_to(module)?;
    one_sided::add_to(module)?;
    window::add_to(module)?;
    module.add_class::<message::Message>()?;
    module.add_class::<operator::ReduceOp>()?;
    module.add_class::<work::Work>()
}
