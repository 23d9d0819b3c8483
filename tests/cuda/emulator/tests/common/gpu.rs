//! The driver's functions as cudarc has them, which is how the library calls them.

use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) use cudarc::driver::sys::{self, CUresult};

/// Calls a driver function.
macro_rules! cu {
    ($name:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: every test passes pointers to live variables of the types the function's signature has; whatever else is
        // wrong with the arguments is what the emulated driver has to find.
        unsafe { $crate::common::gpu::sys::$name($($argument),*) }
    };
}

/// Calls a driver function that has to succeed.
macro_rules! ok {
    ($name:ident($($argument:expr),* $(,)?)) => {
        assert_eq!(
            $crate::common::gpu::cu!($name($($argument),*)),
            $crate::common::gpu::CUresult::CUDA_SUCCESS,
            stringify!($name)
        )
    };
}

/// Calls a driver function that has to fail in a certain way.
macro_rules! fails {
    ($error:ident, $name:ident($($argument:expr),* $(,)?)) => {
        assert_eq!(
            $crate::common::gpu::cu!($name($($argument),*)),
            $crate::common::gpu::CUresult::$error,
            stringify!($name)
        )
    };
}

pub(crate) use cu;
pub(crate) use fails;
pub(crate) use ok;

pub(crate) type Stream = sys::CUstream;
pub(crate) type Event = sys::CUevent;
pub(crate) type Address = sys::CUdeviceptr;

pub(crate) const LEGACY: Stream = null_mut();

/// Initializes the driver and makes a device's primary context current.
pub(crate) fn start(device: i32) -> sys::CUcontext {
    ok!(cuInit(0));
    let mut context = null_mut();
    ok!(cuDevicePrimaryCtxRetain(&mut context, device));
    ok!(cuCtxSetCurrent(context));
    context
}

pub(crate) fn allocate(bytes: usize) -> Address {
    let mut address = 0;
    ok!(cuMemAlloc_v2(&mut address, bytes));
    address
}

/// Device memory that holds these numbers.
pub(crate) fn upload(values: &[u32]) -> Address {
    let address = allocate(size_of_val(values));
    ok!(cuMemcpyHtoD_v2(
        address,
        values.as_ptr().cast(),
        size_of_val(values)
    ));
    address
}

pub(crate) fn download(address: Address, count: usize) -> Vec<u32> {
    let mut values = vec![0_u32; count];
    ok!(cuMemcpyDtoH_v2(
        values.as_mut_ptr().cast(),
        address,
        count * 4
    ));
    values
}

/// A stream that has nothing to do with the legacy one.
pub(crate) fn stream() -> Stream {
    let mut stream = null_mut();
    ok!(cuStreamCreate(&mut stream, 1));
    stream
}

/// A stream that waits for the legacy one, and that for it.
pub(crate) fn blocking_stream() -> Stream {
    let mut stream = null_mut();
    ok!(cuStreamCreate(&mut stream, 0));
    stream
}

pub(crate) fn event() -> Event {
    let mut event = null_mut();
    ok!(cuEventCreate(&mut event, 2));
    event
}

/// Pinned host memory, as words.
pub(crate) fn pinned(words: usize) -> &'static [AtomicU32] {
    let mut start: *mut c_void = null_mut();
    ok!(cuMemAllocHost_v2(&mut start, words * 4));
    // SAFETY: the driver gave `4 * words` bytes, zeroed and aligned to a page; any thread or process may write atomic
    // words. Tests that free the memory do not look at it afterwards.
    unsafe { std::slice::from_raw_parts(start.cast(), words) }
}

/// Where streams see a word.
pub(crate) fn seen(word: &AtomicU32) -> Address {
    let mut address = 0;
    ok!(cuMemHostGetDevicePointer_v2(
        &mut address,
        word.as_ptr().cast(),
        0
    ));
    address
}

/// Makes a stream wait until the word is not zero.
pub(crate) fn hold(stream: Stream, word: &AtomicU32) {
    ok!(cuStreamWaitValue32_v2(stream, seen(word), u32::MAX, 2));
}

pub(crate) fn release(word: &AtomicU32) {
    word.store(1, Ordering::SeqCst);
}

/// A module of our kernels' names: the emulator knows kernels by the names in a PTX, so no more is in it.
pub(crate) fn module(dtype: &str, entries: &[&str]) -> sys::CUmodule {
    let mut text = format!("// {dtype}\n.version 8.0\n.target sm_70\n.address_size 64\n");
    for entry in entries {
        text += &format!(".visible .entry {entry}(\n)\n{{ ret; }}\n");
    }
    let text = CString::new(text).unwrap();
    let mut module = null_mut();
    ok!(cuModuleLoadData(&mut module, text.as_ptr().cast()));
    module
}

pub(crate) fn function(module: sys::CUmodule, name: &str) -> sys::CUfunction {
    let name = CString::new(name).unwrap();
    let mut function = null_mut();
    ok!(cuModuleGetFunction(&mut function, module, name.as_ptr()));
    function
}

/// Launches `unisono_reduce_sum` of the float32 or an integer module.
pub(crate) fn launch_sum(
    function: sys::CUfunction,
    stream: Stream,
    out: Address,
    sources: &[Address],
    count: u64,
) -> CUresult {
    let mut at = [0_u64; 64];
    at[..sources.len()].copy_from_slice(sources);
    let (mut out, mut number, mut count, mut divisor) = (out, sources.len() as u32, count, 1_u32);
    let (mut dead, mut bases, mut copies) = (0_u64, 0_u64, 0_u64);
    let mut parameters: [*mut c_void; 8] = [
        (&raw mut out).cast(),
        (&raw mut at).cast(),
        (&raw mut number).cast(),
        (&raw mut count).cast(),
        (&raw mut divisor).cast(),
        (&raw mut dead).cast(),
        (&raw mut bases).cast(),
        (&raw mut copies).cast(),
    ];
    cu!(cuLaunchKernel(
        function,
        4,
        1,
        1,
        128,
        1,
        1,
        0,
        stream,
        parameters.as_mut_ptr(),
        null_mut(),
    ))
}
