//! The frame of every call: whether the driver is there at all, the faults asked for, what a capture forbids, the count,
//! and a fence that no panic crosses.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::settings::settings;
use crate::status::{Outcome, Status};
use crate::{capture, context, faults, statistics};

/// Calls that need no `cuInit`.
const EARLY: [&str; 5] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
];

/// Calls that are forbidden while something is captured in global mode: those that wait for the device, or may, and
/// questions about events.
const UNSAFE_IN_CAPTURE: [&str; 22] = [
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemAllocHost_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle",
    "cuMemcpy",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyDtoD_v2",
    "cuMemsetD8_v2",
    "cuMemsetD32_v2",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
];

/// Calls that may wait for the device, beside those that always do.
const MAY_SYNCHRONIZE: [&str; 10] = [
    "cuMemAlloc_v2",
    "cuMemAllocHost_v2",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuModuleGetFunction",
    "cuCtxEnablePeerAccess",
];

/// Whether the process has come to its end: the driver is gone for later calls.
static ENDED: AtomicBool = AtomicBool::new(false);

/// The process that called `cuInit`; 0 before. The driver does not work in its forked children.
static INITIALIZED: AtomicU32 = AtomicU32::new(0);
static CALLS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Runs the body of the call `name`.
pub(crate) fn run(name: &'static str, body: impl FnOnce() -> Outcome) -> u32 {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        allow(name)?;
        body()
    }));
    let status = match outcome {
        Ok(Ok(())) => Status::SUCCESS,
        Ok(Err(status)) => status,
        Err(_) => Status::UNKNOWN,
    };
    if settings().trace {
        let text = status.describe().map_or(c"?", |(name, _)| name);
        let process = std::process::id();
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("?");
        eprintln!(
            "cuda emulator [{process} {thread}] {name}: {}",
            text.to_string_lossy()
        );
    }
    status.0
}

fn allow(name: &'static str) -> Outcome {
    if settings().stub {
        return Err(Status::STUB_LIBRARY);
    }
    let early = EARLY.contains(&name);
    let initialized = INITIALIZED.load(Ordering::Acquire);
    if !early && initialized != std::process::id() {
        return Err(Status::NOT_INITIALIZED);
    }
    if initialized != 0 && initialized != std::process::id() {
        // A forked child: locks may be held by threads it does not have.
        return if name == "cuInit" {
            Err(Status::NOT_INITIALIZED)
        } else {
            Ok(())
        };
    }
    if ENDED.load(Ordering::Acquire) {
        return Err(Status::DEINITIALIZED);
    }
    *CALLS.lock().entry(name).or_default() += 1;
    if !early && IN_HOST_FUNCTION.get() {
        return Err(Status::NOT_PERMITTED);
    }
    faults::delay(name);
    faults::occur(name)?;
    if UNSAFE_IN_CAPTURE.contains(&name) {
        capture::refuse_unsafe()?;
    }
    match context::top() {
        Some(context) if MAY_SYNCHRONIZE.contains(&name) => context.may_synchronize(),
        _ => Ok(()),
    }
}

/// Initializes the driver.
///
/// # Errors
/// `NO_DEVICE` when there are none.
pub(crate) fn initialize() -> Outcome {
    if context::visible_devices().is_empty() {
        return Err(Status::NO_DEVICE);
    }
    if INITIALIZED.swap(std::process::id(), Ordering::AcqRel) == 0 {
        // SAFETY: the function lives as long as this library, which the loader does not unload while it has threads; if
        // it is closed, the C library calls the function before.
        unsafe { libc::atexit(end) };
    }
    Ok(())
}

/// At the end of the process; a forked child is not where the driver was.
extern "C" fn end() {
    if INITIALIZED.load(Ordering::Acquire) == std::process::id() {
        ENDED.store(true, Ordering::Release);
        statistics::write_report();
    }
}

/// Runs a host function: calls it makes are refused.
pub(crate) fn as_host_function(function: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    function();
    IN_HOST_FUNCTION.set(false);
}

/// How often each function was called.
pub(crate) fn counts() -> BTreeMap<&'static str, u64> {
    CALLS.lock().clone()
}

/// Defines driver functions: the exported symbols, and a table of them.
macro_rules! driver_functions {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$attribute])*
            ///
            /// # Safety
            /// As the driver's: pointers lead to what its manual says they lead to.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
                crate::call::run(stringify!($name), || $body)
            }
        )*

        /// The names and addresses of the functions here.
        pub(crate) fn table() -> Vec<(&'static str, usize)> {
            vec![$((stringify!($name), $name as *const () as usize)),*]
        }
    };
}

pub(crate) use driver_functions;
