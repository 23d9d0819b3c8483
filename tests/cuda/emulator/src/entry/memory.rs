//! Memory: allocation, registration, IPC, copies, and what a pointer is.

use std::ffi::{c_int, c_uint, c_void};

use crate::abi::{
    Copy2d, DevicePointer, HOST_REGISTER_FLAGS, Handle, IPC_LAZY_ENABLE_PEER_ACCESS, In,
    IpcMemHandle, MEMORY_TYPE_UNIFIED, Out,
};
use crate::call::driver_functions;
use crate::copy::{self, Side};
use crate::memory::{self, Kind};
use crate::status::{Outcome, Status};
use crate::{context, stream};

driver_functions! {
    /// Allocates memory of the current device.
    fn cuMemAlloc_v2(address: Out<DevicePointer>, bytes: usize) {
        if address.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        address.set(memory::allocate(&context::current()?, bytes)?)
    }

    /// Frees it, once everything in its context is done.
    fn cuMemFree_v2(address: DevicePointer) {
        context::current()?;
        if address == 0 { Ok(()) } else { memory::free(address) }
    }

    /// The allocation an address lies in.
    fn cuMemGetAddressRange_v2(base: Out<DevicePointer>, bytes: Out<usize>, address: DevicePointer) {
        context::current()?;
        let (region, _) = memory::find(address).ok_or(Status::NOT_FOUND)?;
        base.set_if_wanted(region.address);
        bytes.set_if_wanted(region.bytes);
        Ok(())
    }

    /// Allocates pinned host memory.
    fn cuMemAllocHost_v2(address: Out<usize>, bytes: usize) {
        if address.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        address.set(memory::allocate_pinned(&context::current()?, bytes)?)
    }

    /// Allocates pinned host memory, with flags.
    fn cuMemHostAlloc(address: Out<usize>, bytes: usize, flags: c_uint) {
        if address.is_null() || flags > 7 {
            return Err(Status::INVALID_VALUE);
        }
        address.set(memory::allocate_pinned(&context::current()?, bytes)?)
    }

    /// Frees pinned host memory, once everything in its context is done.
    fn cuMemFreeHost(address: usize) {
        context::current()?;
        memory::free_pinned(address)
    }

    /// Pins the caller's memory.
    fn cuMemHostRegister_v2(address: usize, bytes: usize, flags: c_uint) {
        if flags & !HOST_REGISTER_FLAGS != 0 {
            return Err(Status::INVALID_VALUE);
        }
        memory::register(&context::current()?, address, bytes)
    }

    /// Unpins it, once everything in its context is done.
    fn cuMemHostUnregister(address: usize) {
        context::current()?;
        memory::unregister(address)
    }

    /// Where streams see pinned memory.
    fn cuMemHostGetDevicePointer_v2(pointer: Out<DevicePointer>, address: usize, flags: c_uint) {
        context::current()?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        pointer.set(memory::device_pointer(address)?)
    }

    /// A handle by which another process maps an allocation.
    fn cuIpcGetMemHandle(handle: Out<IpcMemHandle>, address: DevicePointer) {
        context::current()?;
        handle.set(memory::export(address)?)
    }

    /// Maps another process's allocation.
    fn cuIpcOpenMemHandle_v2(address: Out<DevicePointer>, handle: IpcMemHandle, flags: c_uint) {
        let context = context::current()?;
        if flags != IPC_LAZY_ENABLE_PEER_ACCESS || address.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        address.set(memory::import(&context, &handle)?)
    }

    /// Ends that, the last time for good.
    fn cuIpcCloseMemHandle(address: DevicePointer) {
        context::current()?;
        memory::close(address)
    }

    /// Copies between any two addresses.
    fn cuMemcpyAsync(to: DevicePointer, from: DevicePointer, bytes: usize, stream: Handle) {
        copy::copy(&stream::get(stream)?, (to, Side::Any), (from, Side::Any), bytes)
    }

    /// Copies rows.
    fn cuMemcpy2DAsync_v2(rows: In<Copy2d>, stream: Handle) {
        let rows = rows.at(0)?;
        let places = [rows.from_x, rows.from_y, rows.to_x, rows.to_y];
        let is_unified = [rows.from_type, rows.to_type] == [MEMORY_TYPE_UNIFIED; 2];
        if !is_unified || places != [0; 4] || [rows.from_pitch, rows.to_pitch] != [rows.width; 2] {
            return Err(Status::NOT_SUPPORTED);
        }
        let bytes = rows.width.checked_mul(rows.height).ok_or(Status::INVALID_VALUE)?;
        copy::copy(&stream::get(stream)?, (rows.to, Side::Any), (rows.from, Side::Any), bytes)
    }

    /// Copies within device memory.
    fn cuMemcpyDtoDAsync_v2(to: DevicePointer, from: DevicePointer, bytes: usize, stream: Handle) {
        copy::copy(&stream::get(stream)?, (to, Side::Device), (from, Side::Device), bytes)
    }

    /// Copies to device memory.
    fn cuMemcpyHtoDAsync_v2(to: DevicePointer, from: u64, bytes: usize, stream: Handle) {
        copy::copy(&stream::get(stream)?, (to, Side::Device), (from, Side::Host), bytes)
    }

    /// Copies from device memory.
    fn cuMemcpyDtoHAsync_v2(to: u64, from: DevicePointer, bytes: usize, stream: Handle) {
        copy::copy(&stream::get(stream)?, (to, Side::Host), (from, Side::Device), bytes)
    }

    /// Copies between the memory of two contexts.
    fn cuMemcpyPeerAsync(
        to: DevicePointer, to_context: Handle, from: DevicePointer, from_context: Handle, bytes: usize, stream: Handle,
    ) {
        context::get(to_context)?;
        context::get(from_context)?;
        copy::copy(&stream::get(stream)?, (to, Side::Device), (from, Side::Device), bytes)
    }

    /// Copies and waits.
    fn cuMemcpy(to: DevicePointer, from: DevicePointer, bytes: usize) {
        copy::copy_and_wait(&stream::get(0)?, (to, Side::Any), (from, Side::Any), bytes)
    }

    /// Copies to device memory and waits.
    fn cuMemcpyHtoD_v2(to: DevicePointer, from: u64, bytes: usize) {
        copy::copy_and_wait(&stream::get(0)?, (to, Side::Device), (from, Side::Host), bytes)
    }

    /// Copies from device memory and waits.
    fn cuMemcpyDtoH_v2(to: u64, from: DevicePointer, bytes: usize) {
        copy::copy_and_wait(&stream::get(0)?, (to, Side::Host), (from, Side::Device), bytes)
    }

    /// Copies within device memory, in the legacy stream; it does not wait.
    fn cuMemcpyDtoD_v2(to: DevicePointer, from: DevicePointer, bytes: usize) {
        copy::copy(&stream::get(0)?, (to, Side::Device), (from, Side::Device), bytes)
    }

    /// Fills with a byte.
    fn cuMemsetD8Async(to: DevicePointer, value: u8, count: usize, stream: Handle) {
        copy::fill(&stream::get(stream)?, to, [value; 4], 1, count)
    }

    /// Fills with 2 bytes.
    fn cuMemsetD16Async(to: DevicePointer, value: u16, count: usize, stream: Handle) {
        let [low, high] = value.to_ne_bytes();
        copy::fill(&stream::get(stream)?, to, [low, high, low, high], 2, count)
    }

    /// Fills with 4 bytes.
    fn cuMemsetD32Async(to: DevicePointer, value: c_uint, count: usize, stream: Handle) {
        copy::fill(&stream::get(stream)?, to, value.to_ne_bytes(), 4, count)
    }

    /// Fills with a byte, in the legacy stream; it does not wait.
    fn cuMemsetD8_v2(to: DevicePointer, value: u8, count: usize) {
        copy::fill(&stream::get(0)?, to, [value; 4], 1, count)
    }

    /// Fills with 4 bytes, in the legacy stream; it does not wait.
    fn cuMemsetD32_v2(to: DevicePointer, value: c_uint, count: usize) {
        copy::fill(&stream::get(0)?, to, value.to_ne_bytes(), 4, count)
    }

    /// One thing about a pointer; one the driver does not know is an invalid value.
    fn cuPointerGetAttribute(data: Out<c_void>, attribute: c_uint, address: DevicePointer) {
        if memory::find(address).is_none() {
            return Err(Status::INVALID_VALUE);
        }
        pointer_attribute(data.pointer(), attribute, address)
    }

    /// Several things about a pointer; of one the driver does not know all are 0.
    fn cuPointerGetAttributes(
        count: c_uint, attributes: In<c_uint>, data: In<*mut c_void>, address: DevicePointer,
    ) {
        for index in 0..count as usize {
            pointer_attribute(data.at(index)?, attributes.at(index)?, address)?;
        }
        Ok(())
    }
}

/// Writes an attribute at `data`, in the attribute's type.
fn pointer_attribute(data: *mut c_void, attribute: u32, address: u64) -> Outcome {
    if data.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    let found = memory::find(address);
    let region = found.as_ref().map(|(region, _)| region);
    let offset = found.as_ref().map_or(0, |(_, offset)| *offset);
    let host = region.is_some_and(|region| region.is_host());
    // Pointers, of 8 bytes like the longer numbers.
    let long = |value: u64| {
        // SAFETY: by the driver API's contract the result's place has the attribute's type.
        unsafe { data.cast::<u64>().write_unaligned(value) }
    };
    let short = |value: u32| {
        // SAFETY: as above; a boolean attribute is read as an int or one byte of it, so see below.
        unsafe { data.cast::<u32>().write_unaligned(value) }
    };
    let boolean = |value: bool| {
        // SAFETY: as above; one byte is within whatever type the caller took for a truth value.
        unsafe { data.cast::<u8>().write(value.into()) }
    };
    match attribute {
        1 => long(region.map_or(0, |region| region.context.handle as u64)),
        2 => short(region.map_or(0, |_| if host { 1 } else { 2 })),
        3 => long(region.map_or(0, |region| region.address + offset as u64)),
        4 if host => long(region.map_or(0, |region| (region.host + offset) as u64)),
        // Device memory has no host address.
        4 if region.is_some() => return Err(Status::INVALID_VALUE),
        4 => long(0),
        6 | 8 => boolean(false),
        7 => long(region.map_or(0, |region| region.id)),
        9 => short(
            region
                .map_or(-2, |region| region.device as c_int)
                .cast_unsigned(),
        ),
        10 => boolean(region.is_some_and(|region| region.kind == Kind::Device)),
        11 => long(region.map_or(0, |region| region.address)),
        12 => long(region.map_or(0, |region| region.bytes as u64)),
        13 => boolean(region.is_some()),
        _ => return Err(Status::INVALID_VALUE),
    }
    Ok(())
}
