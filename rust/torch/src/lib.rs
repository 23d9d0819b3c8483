//! The torch door: the Python module `unisono._core` with the c10d backend of `csrc/` inside, built once per torch minor
//! version. This is its Rust half: the bridge over which `csrc/` calls the core.
//!
//! One call goes down per operation (buffers as addresses, operator, timeout, a completion that owns the tensors)
//! and one call comes up when it ends. Codes and numbers cross instead of exceptions, because cxx keeps only the
//! text of an error; a panic becomes an `Internal` error in [`guard`](unisono::fence::guard), since it would otherwise end the
//! process.

use pyo3::prelude::*;

#[expect(unreachable_pub, reason = "cxx makes every item of a bridge public")]
mod bridge;
mod device;
mod group;
mod heap;
mod interrupts;
mod operation;
mod status;
mod store;
mod streams;
mod symmetric;
mod values;
mod window;

use bridge::ffi;

/// The native half of unisono, with the backend for torch.distributed.
#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    unisono_python::add_to(module)?;
    interrupts::hear();
    module.add("TORCH_VERSION", ffi::torch_version())?;
    module.add_function(wrap_pyfunction!(device::device_allocator, module)?)?;
    module.add_function(wrap_pyfunction!(close_torch_groups, module)?)
}

/// Closes every process group that is still alive, and waits for the threads; called before the interpreter goes.
#[pyfunction]
fn close_torch_groups(py: Python<'_>) {
    py.detach(|| {
        ffi::close_all();
        unisono::wait_for_threads(unisono_python::THREADS_END);
    });
}
