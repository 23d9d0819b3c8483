//! The driver's types and constants, as `cuda.h` of CUDA 12 has them.
#![expect(
    missing_docs,
    reason = "the names are the driver's; its manual describes them"
)]

use std::ffi::c_void;

use crate::status::{Outcome, Status};

pub type DevicePointer = u64;
pub type Device = i32;
/// A handle the caller only carries about; 0 is the null handle.
pub type Handle = usize;

pub const STREAM_LEGACY: Handle = 1;
pub const STREAM_PER_THREAD: Handle = 2;
pub const STREAM_NON_BLOCKING: u32 = 1;

pub const EVENT_BLOCKING_SYNC: u32 = 1;
pub const EVENT_DISABLE_TIMING: u32 = 2;
pub const EVENT_INTERPROCESS: u32 = 4;

pub const WAIT_GEQ: u32 = 0;
pub const WAIT_EQ: u32 = 1;
pub const WAIT_AND: u32 = 2;
pub const WAIT_NOR: u32 = 3;
pub const WAIT_FLUSH: u32 = 1 << 30;

pub const MEMORY_OP_WAIT_32: u32 = 1;
pub const MEMORY_OP_WRITE_32: u32 = 2;
pub const MEMORY_OP_FLUSH: u32 = 3;
pub const MEMORY_OP_WAIT_64: u32 = 4;
pub const MEMORY_OP_WRITE_64: u32 = 5;
pub const MEMORY_OP_BARRIER: u32 = 6;

pub const CAPTURE_NONE: u32 = 0;
pub const CAPTURE_ACTIVE: u32 = 1;
pub const CAPTURE_INVALIDATED: u32 = 2;

pub const HOST_REGISTER_FLAGS: u32 = 0xf;
pub const IPC_LAZY_ENABLE_PEER_ACCESS: u32 = 1;

pub const LAUNCH_PARAM_END: usize = 0;
pub const LAUNCH_PARAM_BUFFER_POINTER: usize = 1;
pub const LAUNCH_PARAM_BUFFER_SIZE: usize = 2;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Uuid(pub [u8; 16]);

#[derive(Clone, Copy)]
#[repr(C)]
pub struct IpcMemHandle(pub [u8; 64]);

/// The members that the wait and write operations share; a barrier and a flush have their flags in `barrier_flags`,
/// where the padding of the others is.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BatchMemOp {
    pub operation: u32,
    pub barrier_flags: u32,
    pub address: DevicePointer,
    pub value: u64,
    pub flags: u32,
    pub alias: DevicePointer,
    pub pad: u64,
}

const _: () = assert!(size_of::<BatchMemOp>() == 48);

/// A copy of rows. The emulator carries out those between unified addresses whose rows lie end to end.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Copy2d {
    pub from_x: usize,
    pub from_y: usize,
    pub from_type: u32,
    pub from_host: usize,
    pub from: DevicePointer,
    pub from_array: usize,
    pub from_pitch: usize,
    pub to_x: usize,
    pub to_y: usize,
    pub to_type: u32,
    pub to_host: usize,
    pub to: DevicePointer,
    pub to_array: usize,
    pub to_pitch: usize,
    pub width: usize,
    pub height: usize,
}

const _: () = assert!(size_of::<Copy2d>() == 128);

pub const MEMORY_TYPE_UNIFIED: u32 = 4;

pub type HostFunction = extern "C" fn(*mut c_void);

/// Where a caller wants a result.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Stores the result; a null pointer is an invalid value.
    pub(crate) fn set(&self, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: by the driver API's contract a result's pointer, when not null, is to writable memory of the result's
        // type for the time of the call, and callers are what this library exists for.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Stores the result if it is wanted.
    pub(crate) fn set_if_wanted(&self, value: T) {
        let _ = self.set(value);
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn pointer(&self) -> *mut T {
        self.0
    }
}

/// A value or an array the caller hands over for the time of the call.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// The value number `index` of the array; a null pointer is an invalid value.
    pub(crate) fn at(&self, index: usize) -> Outcome<T> {
        if self.0.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: by the driver API's contract the pointer, when not null, is to as many values as the call says, and
        // `index` is below that number at every use.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    pub(crate) fn pointer(&self) -> *const T {
        self.0
    }
}
