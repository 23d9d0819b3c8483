//! The driver's functions, found by name.
//!
//! Their types are cudarc's. They are called through this table, and not by cudarc's functions of the same names, for
//! three reasons: those return a Rust enumeration, so that a code that a newer driver has and the enumeration has not
//! would be undefined behaviour; they panic where the library lacks a symbol, which here is an error that names it; and
//! they take the first `libcuda.so` they find, which may be a toolkit's stub, where the CUDA runtime takes `libcuda.so.1`.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;

use cudarc::driver::sys::{
    CUDA_MEMCPY2D, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUipcMemHandle, CUmodule,
    CUstream, CUstreamBatchMemOpParams, CUuuid,
};

/// A `CUresult`; 0 means success.
pub(super) type Code = u32;

macro_rules! symbols {
    (
        if there { $($newer:ident = $newer_name:literal ($($newer_argument:ty),* $(,)?);)+ }
        $($field:ident = $name:literal ($($argument:ty),* $(,)?);)+
    ) => {
        /// The functions of the library that was loaded.
        pub(in crate::transport::cuda) struct Symbols {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> Code,)+
            $(pub(super) $newer: Option<unsafe extern "C" fn($($newer_argument),*) -> Code>,)+
        }

        impl Symbols {
            /// Looks all of them up in the library. The error names the first that is missing of those that CUDA 12.0
            /// has.
            ///
            /// # Safety
            /// The library is the CUDA driver, whose functions have these signatures.
            pub(super) unsafe fn resolve(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($field: {
                        type Function = unsafe extern "C" fn($($argument),*) -> Code;
                        let symbol = library.symbol($name).ok_or($name)?;
                        // SAFETY: the caller vouches for the signature, and the library is never unloaded.
                        unsafe { std::mem::transmute::<NonNull<c_void>, Function>(symbol) }
                    },)+
                    $($newer: library.symbol($newer_name).map(|symbol| {
                        type Function = unsafe extern "C" fn($($newer_argument),*) -> Code;
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<NonNull<c_void>, Function>(symbol) }
                    }),)+
                })
            }
        }
    };
}

/// The driver's library. It stays loaded.
pub(super) struct Library(NonNull<c_void>);

impl Library {
    /// Loads it, or says why that is not possible.
    pub(super) fn load() -> Result<Self, String> {
        let open = |name: &CStr| {
            // SAFETY: loading a library runs its initialisers; the driver's are made for that, at any time.
            NonNull::new(unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) })
        };
        if let Some(library) = open(c"libcuda.so.1") {
            return Ok(Self(library));
        }
        // SAFETY: it gives a text that is valid until the next such call of this thread, or null.
        let why = unsafe {
            let text = libc::dlerror();
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        open(c"libcuda.so")
            .map(Self)
            .ok_or_else(|| why.unwrap_or_else(|| "libcuda.so.1 was not found".to_owned()))
    }

    fn symbol(&self, name: &str) -> Option<NonNull<c_void>> {
        let name = CString::new(name).ok()?;
        // SAFETY: the library is loaded; the text ends with a zero.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }
}

symbols! {
    // Without which everything works, too.
    if there {
        func_load = "cuFuncLoad" (CUfunction);
        stream_get_id = "cuStreamGetId" (CUstream, *mut u64);
    }

    init = "cuInit" (c_uint);
    driver_get_version = "cuDriverGetVersion" (*mut c_int);
    get_error_name = "cuGetErrorName" (Code, *mut *const c_char);
    get_error_string = "cuGetErrorString" (Code, *mut *const c_char);

    device_get_count = "cuDeviceGetCount" (*mut c_int);
    device_get = "cuDeviceGet" (*mut CUdevice, c_int);
    device_get_name = "cuDeviceGetName" (*mut c_char, c_int, CUdevice);
    device_get_uuid = "cuDeviceGetUuid_v2" (*mut CUuuid, CUdevice);
    device_total_mem = "cuDeviceTotalMem_v2" (*mut usize, CUdevice);
    device_get_attribute = "cuDeviceGetAttribute" (*mut c_int, c_uint, CUdevice);
    device_can_access_peer = "cuDeviceCanAccessPeer" (*mut c_int, CUdevice, CUdevice);

    device_primary_ctx_retain = "cuDevicePrimaryCtxRetain" (*mut CUcontext, CUdevice);
    ctx_push_current = "cuCtxPushCurrent_v2" (CUcontext);
    ctx_pop_current = "cuCtxPopCurrent_v2" (*mut CUcontext);
    ctx_get_device = "cuCtxGetDevice" (*mut CUdevice);
    ctx_enable_peer_access = "cuCtxEnablePeerAccess" (CUcontext, c_uint);

    mem_alloc = "cuMemAlloc_v2" (*mut CUdeviceptr, usize);
    mem_free = "cuMemFree_v2" (CUdeviceptr);
    memcpy_to_device = "cuMemcpyHtoDAsync_v2" (CUdeviceptr, *const c_void, usize, CUstream);
    memcpy_to_host = "cuMemcpyDtoHAsync_v2" (*mut c_void, CUdeviceptr, usize, CUstream);
    memcpy_async = "cuMemcpyAsync" (CUdeviceptr, CUdeviceptr, usize, CUstream);
    memcpy_2d_async = "cuMemcpy2DAsync_v2" (*const CUDA_MEMCPY2D, CUstream);
    mem_host_register = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    mem_host_unregister = "cuMemHostUnregister" (*mut c_void);
    mem_host_get_device_pointer = "cuMemHostGetDevicePointer_v2" (*mut CUdeviceptr, *mut c_void, c_uint);
    ipc_get_mem_handle = "cuIpcGetMemHandle" (*mut CUipcMemHandle, CUdeviceptr);
    ipc_open_mem_handle = "cuIpcOpenMemHandle_v2" (*mut CUdeviceptr, CUipcMemHandle, c_uint);
    ipc_close_mem_handle = "cuIpcCloseMemHandle" (CUdeviceptr);
    mem_get_address_range = "cuMemGetAddressRange_v2" (*mut CUdeviceptr, *mut usize, CUdeviceptr);
    pointer_get_attributes = "cuPointerGetAttributes" (c_uint, *mut c_uint, *mut *mut c_void, CUdeviceptr);

    stream_create = "cuStreamCreate" (*mut CUstream, c_uint);
    stream_create_with_priority = "cuStreamCreateWithPriority" (*mut CUstream, c_uint, c_int);
    stream_destroy = "cuStreamDestroy_v2" (CUstream);
    stream_get_ctx = "cuStreamGetCtx" (CUstream, *mut CUcontext);
    stream_is_capturing = "cuStreamIsCapturing" (CUstream, *mut c_uint);
    stream_query = "cuStreamQuery" (CUstream);
    stream_synchronize = "cuStreamSynchronize" (CUstream);
    stream_wait_event = "cuStreamWaitEvent" (CUstream, CUevent, c_uint);
    stream_batch_mem_op = "cuStreamBatchMemOp_v2" (CUstream, c_uint, *mut CUstreamBatchMemOpParams, c_uint);
    thread_exchange_stream_capture_mode = "cuThreadExchangeStreamCaptureMode" (*mut c_uint);

    event_create = "cuEventCreate" (*mut CUevent, c_uint);
    event_destroy = "cuEventDestroy_v2" (CUevent);
    event_record = "cuEventRecord" (CUevent, CUstream);
    event_query = "cuEventQuery" (CUevent);
    event_synchronize = "cuEventSynchronize" (CUevent);

    module_load_data = "cuModuleLoadData" (*mut CUmodule, *const c_void);
    module_get_function = "cuModuleGetFunction" (*mut CUfunction, CUmodule, *const c_char);
    occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessor" (*mut c_int, CUfunction, c_int, usize);
    launch_kernel = "cuLaunchKernel" (
        CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
        *mut *mut c_void, *mut *mut c_void,
    );
}

/// Numbers of `cuda.h` that are used here.
pub(super) mod numbers {
    use super::Code;

    pub(in crate::transport::cuda::driver) const SUCCESS: Code = 0;
    pub(in crate::transport::cuda::driver) const OUT_OF_MEMORY: Code = 2;
    pub(in crate::transport::cuda::driver) const NOT_INITIALIZED: Code = 3;
    pub(in crate::transport::cuda::driver) const DEINITIALIZED: Code = 4;
    pub(in crate::transport::cuda::driver) const STUB_LIBRARY: Code = 34;
    pub(in crate::transport::cuda::driver) const DEVICE_UNAVAILABLE: Code = 46;
    pub(in crate::transport::cuda::driver) const NO_DEVICE: Code = 100;
    pub(in crate::transport::cuda::driver) const INVALID_CONTEXT: Code = 201;
    pub(in crate::transport::cuda::driver) const NO_BINARY_FOR_GPU: Code = 209;
    pub(in crate::transport::cuda::driver) const PEER_ACCESS_UNSUPPORTED: Code = 217;
    pub(in crate::transport::cuda::driver) const INVALID_PTX: Code = 218;
    pub(in crate::transport::cuda::driver) const JIT_COMPILER_NOT_FOUND: Code = 221;
    pub(in crate::transport::cuda::driver) const UNSUPPORTED_PTX_VERSION: Code = 222;
    pub(in crate::transport::cuda::driver) const INVALID_HANDLE: Code = 400;
    pub(in crate::transport::cuda::driver) const NOT_READY: Code = 600;
    pub(in crate::transport::cuda::driver) const PEER_ACCESS_ALREADY_ENABLED: Code = 704;
    pub(in crate::transport::cuda::driver) const CONTEXT_IS_DESTROYED: Code = 709;
    pub(in crate::transport::cuda::driver) const TOO_MANY_PEERS: Code = 711;
    pub(in crate::transport::cuda::driver) const HOST_MEMORY_ALREADY_REGISTERED: Code = 712;
    pub(in crate::transport::cuda::driver) const NOT_PERMITTED: Code = 800;
    pub(in crate::transport::cuda::driver) const NOT_SUPPORTED: Code = 801;
    pub(in crate::transport::cuda::driver) const SYSTEM_NOT_READY: Code = 802;
    pub(in crate::transport::cuda::driver) const SYSTEM_DRIVER_MISMATCH: Code = 803;
    pub(in crate::transport::cuda::driver) const COMPAT_NOT_SUPPORTED_ON_DEVICE: Code = 804;
    pub(in crate::transport::cuda::driver) const FIRST_MPS_ERROR: Code = 805;
    pub(in crate::transport::cuda::driver) const LAST_MPS_ERROR: Code = 810;
    pub(in crate::transport::cuda::driver) const FIRST_CAPTURE_ERROR: Code = 900;
    pub(in crate::transport::cuda::driver) const LAST_CAPTURE_ERROR: Code = 908;
    pub(in crate::transport::cuda::driver) const UNKNOWN: Code = 999;

    pub(in crate::transport::cuda::driver) const ATTRIBUTE_MULTIPROCESSORS: u32 = 16;
    pub(in crate::transport::cuda::driver) const ATTRIBUTE_UNIFIED_ADDRESSING: u32 = 41;
    pub(in crate::transport::cuda::driver) const ATTRIBUTE_CAPABILITY_MAJOR: u32 = 75;
    pub(in crate::transport::cuda::driver) const ATTRIBUTE_CAPABILITY_MINOR: u32 = 76;
    pub(in crate::transport::cuda::driver) const ATTRIBUTE_MPS_ENABLED: u32 = 133;

    pub(in crate::transport::cuda::driver) const CAPTURE_MODE_RELAXED: u32 = 2;
    pub(in crate::transport::cuda::driver) const CAPTURE_STATUS_NONE: u32 = 0;
    pub(in crate::transport::cuda::driver) const CAPTURE_STATUS_INVALIDATED: u32 = 2;
    pub(in crate::transport::cuda::driver) const STREAM_NON_BLOCKING: u32 = 1;
    /// Smaller is more urgent, and the driver takes the most urgent that the device has for what is beyond.
    pub(in crate::transport::cuda::driver) const STREAM_MOST_URGENT: i32 = -128;
    pub(in crate::transport::cuda::driver) const EVENT_DISABLE_TIMING: u32 = 2;
    pub(in crate::transport::cuda::driver) const HOST_REGISTER_PORTABLE: u32 = 1;
    pub(in crate::transport::cuda::driver) const HOST_REGISTER_DEVICEMAP: u32 = 2;
    pub(in crate::transport::cuda::driver) const IPC_LAZY_ENABLE_PEER_ACCESS: u32 = 1;
    pub(in crate::transport::cuda::driver) const WAIT_VALUE_GEQ: u32 = 0;
    pub(in crate::transport::cuda::driver) const WAIT_VALUE_AND: u32 = 2;

    pub(in crate::transport::cuda::driver) const POINTER_MEMORY_TYPE: u32 = 2;
    pub(in crate::transport::cuda::driver) const POINTER_IS_MANAGED: u32 = 8;
    pub(in crate::transport::cuda::driver) const POINTER_DEVICE_ORDINAL: u32 = 9;
    pub(in crate::transport::cuda::driver) const MEMORY_TYPE_HOST: u32 = 1;
    pub(in crate::transport::cuda::driver) const MEMORY_TYPE_DEVICE: u32 = 2;
}
