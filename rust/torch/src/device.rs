//! Memory of devices that the other ranks read in place, for torch's caching allocator.

use std::ffi::{c_int, c_void};
use std::ptr;

use pyo3::prelude::*;
use unisono::cuda;
use unisono::error::Error;
use unisono::fence::guard;

/// The addresses of [`allocate`] and [`free`], which have the signatures of torch's pluggable allocators.
#[pyfunction]
pub(crate) fn device_allocator() -> (usize, usize) {
    (allocate as *const () as usize, free as *const () as usize)
}

/// `bytes` bytes of a device's memory; null where there is none, upon which torch frees what it keeps and asks again.
extern "C" fn allocate(bytes: usize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    let allocated = guard(|| cuda::allocate(number(device)?, bytes));
    match allocated {
        Ok(address) => ptr::without_provenance_mut(address as usize),
        Err(error) => {
            tracing::debug!("{error}");
            ptr::null_mut()
        }
    }
}

/// Frees what [`allocate`] gave.
extern "C" fn free(address: *mut c_void, _bytes: usize, device: c_int, _stream: *mut c_void) {
    if let Err(error) = guard(|| cuda::free(number(device)?, address.addr() as u64)) {
        tracing::debug!("memory of device {device} stays taken until a later call: {error}");
    }
}

fn number(device: c_int) -> Result<u32, Error> {
    u32::try_from(device).map_err(|_| Error::invalid(format!("{device} is no device")))
}
