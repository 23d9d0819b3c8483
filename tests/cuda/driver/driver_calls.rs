//! A device, and calls of its driver that the library has no use for and its users have: captures.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;

use unisono::transport::cuda::driver::{Device, Stream};

/// The device that most tests use.
pub(crate) fn device() -> &'static Device {
    Device::of(0).unwrap()
}

fn symbol(name: &CStr) -> *mut c_void {
    unsafe extern "C" {
        fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
        fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    }
    // SAFETY: the library is loaded already; the texts end with zeros.
    let symbol = unsafe { dlsym(dlopen(c"libcuda.so.1".as_ptr(), 1), name.as_ptr()) };
    assert!(!symbol.is_null(), "the driver has no {name:?}");
    symbol
}

macro_rules! call {
    ($name:literal ($($argument:expr => $type:ty),* $(,)?)) => {{
        // SAFETY: the types are those of `cuda.h`.
        let code = unsafe {
            let call = std::mem::transmute::<
                *mut c_void,
                unsafe extern "C" fn($($type),*) -> c_uint,
            >(symbol($name));
            call($($argument),*)
        };
        assert_eq!(code, 0, "{:?}", $name);
    }};
}

/// How often the emulated driver's function of that name was called.
pub(crate) fn calls(name: &str) -> u64 {
    let mut text = vec![0_u8; 1 << 16];
    // SAFETY: the emulator's function takes a place for a text and how long it is.
    unsafe {
        let report = std::mem::transmute::<
            *mut c_void,
            unsafe extern "C" fn(*mut u8, usize) -> usize,
        >(symbol(c"cuEmulatorStatistics"));
        report(text.as_mut_ptr(), text.len());
    }
    let text = CStr::from_bytes_until_nul(&text).unwrap().to_str().unwrap();
    let Some((_, rest)) = text.split_once(&format!("\"{name}\": ")) else {
        return 0;
    };
    let end = rest.find([',', '}']).unwrap();
    rest[..end].parse().unwrap()
}

/// Makes a device current, as its user has it, while `work` runs; it must leave that as it was.
pub(crate) fn with_device<T>(device: &Device, work: impl FnOnce() -> T) -> T {
    let device = device.number() as c_int;
    let mut context: *mut c_void = ptr::null_mut();
    call!(c"cuDevicePrimaryCtxRetain"(&mut context => *mut *mut c_void, device => c_int));
    call!(c"cuCtxPushCurrent_v2"(context => *mut c_void));
    let result = work();
    let mut popped: *mut c_void = ptr::null_mut();
    call!(c"cuCtxPopCurrent_v2"(&mut popped => *mut *mut c_void));
    assert_eq!(
        popped, context,
        "the thread's context is not as it was left"
    );
    call!(c"cuDevicePrimaryCtxRelease_v2"(device => c_int));
    result
}

/// Gives `work` the handle of a stream of a context that is not the device's primary one.
/// The stream ends with the context.
pub(crate) fn with_stream_of_its_own_context(device: &Device, work: impl FnOnce(usize)) {
    let number = device.number() as c_int;
    let (mut context, mut stream): (*mut c_void, *mut c_void) = (ptr::null_mut(), ptr::null_mut());
    call!(c"cuCtxCreate_v2"(&mut context => *mut *mut c_void, 0 => c_uint, number => c_int));
    call!(c"cuStreamCreate"(&mut stream => *mut *mut c_void, 1 => c_uint));
    let mut popped = ptr::null_mut();
    call!(c"cuCtxPopCurrent_v2"(&mut popped => *mut *mut c_void));
    work(stream.expose_provenance());
    call!(c"cuCtxDestroy_v2"(context => *mut c_void));
}

/// A graph that can be launched.
pub(crate) struct Graph(*mut c_void);

/// Captures what `work` enqueues, in the strictest mode.
pub(crate) fn capture(stream: &Stream, work: impl FnOnce()) -> Graph {
    let handle: *mut c_void = ptr::with_exposed_provenance_mut(stream.handle().stream);
    with_device(stream.device(), || {
        call!(c"cuStreamBeginCapture_v2"(handle => *mut c_void, 0 => c_uint));
        work();
        let mut graph = ptr::null_mut();
        call!(c"cuStreamEndCapture"(handle => *mut c_void, &mut graph => *mut *mut c_void));
        let mut executable = ptr::null_mut();
        call!(c"cuGraphInstantiateWithFlags"(
            &mut executable => *mut *mut c_void, graph => *mut c_void, 0 => u64,
        ));
        call!(c"cuGraphDestroy"(graph => *mut c_void));
        Graph(executable)
    })
}

impl Graph {
    pub(crate) fn launch(&self, stream: &Stream) {
        let handle: *mut c_void = ptr::with_exposed_provenance_mut(stream.handle().stream);
        with_device(stream.device(), || {
            call!(c"cuGraphLaunch"(self.0 => *mut c_void, handle => *mut c_void));
        });
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        call!(c"cuGraphExecDestroy"(self.0 => *mut c_void));
    }
}
