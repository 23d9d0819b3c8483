//! Initialization, errors, devices, contexts.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::abi::{Device, Handle, In, Out, Uuid};
use crate::call::{driver_functions, initialize};
use crate::context::{self, index_of};
use crate::module::CAPABILITY;
use crate::settings::settings;
use crate::status::{Outcome, Status};
use crate::{capture, memory};

driver_functions! {
    /// Initializes the driver.
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        initialize()
    }

    /// The newest CUDA the driver knows, as 1000 major + 10 minor.
    fn cuDriverGetVersion(version: Out<c_int>) {
        version.set(settings().version)
    }

    /// The name of a result code.
    fn cuGetErrorName(error: u32, name: Out<*const c_char>) {
        describe(error, &name, |(name, _)| name)
    }

    /// The sentence of a result code.
    fn cuGetErrorString(error: u32, text: Out<*const c_char>) {
        describe(error, &text, |(_, text)| text)
    }

    /// The address of a driver function.
    fn cuGetProcAddress_v2(
        symbol: In<c_char>, address: Out<*mut c_void>, _version: c_int, _flags: u64, status: Out<c_uint>,
    ) {
        if symbol.pointer().is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: by the driver API's contract the symbol is a C string.
        let name = unsafe { CStr::from_ptr(symbol.pointer()) };
        match name.to_str().ok().and_then(crate::entry::find) {
            Some(found) => {
                status.set_if_wanted(0);
                address.set(found as *mut c_void)
            }
            None => {
                status.set_if_wanted(1);
                address.set(std::ptr::null_mut())?;
                Err(Status::NOT_FOUND)
            }
        }
    }

    /// How many devices there are.
    fn cuDeviceGetCount(count: Out<c_int>) {
        count.set(context::visible_devices().len() as c_int)
    }

    /// A device.
    fn cuDeviceGet(device: Out<Device>, ordinal: c_int) {
        device.set(index_of(ordinal)? as Device)
    }

    /// The name of a device.
    fn cuDeviceGetName(name: Out<c_char>, length: c_int, device: Device) {
        index_of(device)?;
        write_text(&name, length, "Emulated GPU")
    }

    /// Where a device is plugged in.
    fn cuDeviceGetPCIBusId(id: Out<c_char>, length: c_int, device: Device) {
        let physical = context::visible_devices()[index_of(device)?];
        write_text(&id, length, &format!("0000:{:02X}:00.0", physical + 1))
    }

    /// The identifier of a device, the same in every process.
    fn cuDeviceGetUuid_v2(uuid: Out<Uuid>, device: Device) {
        uuid.set(uuid_of(index_of(device)?))
    }

    /// The same, as CUDA 11 had it.
    fn cuDeviceGetUuid(uuid: Out<Uuid>, device: Device) {
        uuid.set(uuid_of(index_of(device)?))
    }

    /// Bytes of a device's memory.
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: Device) {
        index_of(device)?;
        bytes.set(settings().memory)
    }

    /// An attribute of a device.
    fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_uint, device: Device) {
        let device = index_of(device)?;
        value.set(attribute_of(attribute, device)?)
    }

    /// Whether one device can reach another's memory.
    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: Device, peer: Device) {
        let (device, peer) = (index_of(device)?, index_of(peer)?);
        can.set((device != peer && settings().peer_access.lets(device, peer)).into())
    }

    /// An attribute of two devices: access, native atomics.
    fn cuDeviceGetP2PAttribute(value: Out<c_int>, attribute: c_uint, device: Device, peer: Device) {
        let (device, peer) = (index_of(device)?, index_of(peer)?);
        if device == peer {
            return Err(Status::INVALID_DEVICE);
        }
        let is_let = settings().peer_access.lets(device, peer);
        match attribute {
            1..=4 => value.set((attribute != 1 && is_let).into()),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    /// Retains the primary context of a device.
    fn cuDevicePrimaryCtxRetain(handle: Out<Handle>, device: Device) {
        let device = index_of(device)?;
        if handle.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        handle.set(context::retain(device).handle)
    }

    /// Releases it.
    fn cuDevicePrimaryCtxRelease_v2(device: Device) {
        context::release(index_of(device)?)
    }

    /// Whether it exists.
    fn cuDevicePrimaryCtxGetState(device: Device, flags: Out<c_uint>, active: Out<c_int>) {
        let exists = context::is_active(index_of(device)?);
        flags.set(0)?;
        active.set(exists.into())
    }

    /// Makes a context beside the primary one, and makes it current above the one that is.
    fn cuCtxCreate_v2(handle: Out<Handle>, _flags: c_uint, device: Device) {
        let device = index_of(device)?;
        if handle.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let context = context::create(device);
        context::push(context.clone());
        handle.set(context.handle)
    }

    /// Destroys such a context; the one below it is current then, if it was.
    fn cuCtxDestroy_v2(handle: Handle) {
        context::destroy(handle)
    }

    /// Makes a context current above the one that is.
    fn cuCtxPushCurrent_v2(handle: Handle) {
        context::push(context::get(handle)?);
        Ok(())
    }

    /// Makes the one below current again.
    fn cuCtxPopCurrent_v2(handle: Out<Handle>) {
        let context = context::pop()?;
        handle.set_if_wanted(context.handle);
        Ok(())
    }

    /// Replaces the current context.
    fn cuCtxSetCurrent(handle: Handle) {
        let context = if handle == 0 { None } else { Some(context::get(handle)?) };
        context::set(context);
        Ok(())
    }

    /// The current context, 0 when there is none.
    fn cuCtxGetCurrent(handle: Out<Handle>) {
        handle.set(context::top().map_or(0, |context| context.handle))
    }

    /// The device of the current context.
    fn cuCtxGetDevice(device: Out<Device>) {
        device.set(context::current()?.device as Device)
    }

    /// The API version of a context.
    fn cuCtxGetApiVersion(handle: Handle, version: Out<c_uint>) {
        if handle != 0 {
            context::get(handle)?;
        }
        version.set(3020)
    }

    /// The flags of the current context.
    fn cuCtxGetFlags(flags: Out<c_uint>) {
        context::current()?;
        flags.set(0)
    }

    /// Priorities of streams: the least and the greatest, which is the smaller number.
    fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        context::current()?;
        least.set_if_wanted(0);
        greatest.set_if_wanted(-5);
        Ok(())
    }

    /// Waits until everything in the current context is done.
    fn cuCtxSynchronize() {
        let context = context::current()?;
        capture::refuse_any(&context)?;
        context.synchronize()
    }

    /// Lets the current context reach the memory of another's device.
    fn cuCtxEnablePeerAccess(peer: Handle, flags: c_uint) {
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        context::current()?.enable_peer(context::get(peer)?.device)
    }

    /// Ends that.
    fn cuCtxDisablePeerAccess(peer: Handle) {
        context::current()?.disable_peer(context::get(peer)?.device)
    }

    /// Free and all bytes of the current device.
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let context = context::current()?;
        free.set(settings().memory.saturating_sub(memory::in_use(context.device)))?;
        total.set(settings().memory)
    }
}

fn describe(
    error: u32,
    out: &Out<*const c_char>,
    pick: impl Fn((&'static CStr, &'static CStr)) -> &'static CStr,
) -> Outcome {
    match Status(error).describe() {
        Some(texts) => out.set(pick(texts).as_ptr()),
        None => {
            out.set_if_wanted(std::ptr::null());
            Err(Status::INVALID_VALUE)
        }
    }
}

fn write_text(out: &Out<c_char>, length: c_int, text: &str) -> Outcome {
    let length = usize::try_from(length).map_err(|_| Status::INVALID_VALUE)?;
    if out.is_null() || length == 0 {
        return Err(Status::INVALID_VALUE);
    }
    let kept = text.len().min(length - 1);
    // SAFETY: by the driver API's contract there is room for `length` bytes; these and the zero byte are not more.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), out.pointer().cast(), kept);
        *out.pointer().add(kept) = 0;
    }
    Ok(())
}

fn uuid_of(device: usize) -> Uuid {
    let mut uuid = *b"cuda-emulator-\0\0";
    uuid[15] = context::visible_devices()[device] as u8;
    Uuid(uuid)
}

/// An attribute of a device, as a data-centre GPU of compute capability 9.0 on x86-64 Linux has it.
fn attribute_of(attribute: u32, device: usize) -> Outcome<c_int> {
    let memory_operations = c_int::from(settings().memory_operations);
    Ok(match attribute {
        1..=3 => 1024,
        39 => 2048,
        4 => 64,
        5 => c_int::MAX,
        6 | 7 => 65535,
        8 => 48 << 10,
        9 => 64 << 10,
        10 => 32,
        11 => c_int::MAX,
        12 => 65536,
        16 => 132,
        // Integrated, with a time limit.
        17 | 18 => 0,
        19 | 31 | 41 | 78 => 1,
        32 => 1,
        33 => context::visible_devices()[device] as c_int + 1,
        34 | 50 => 0,
        38 => 50 << 20,
        40 => 3,
        75 => CAPABILITY.0,
        76 => CAPABILITY.1,
        // Host memory under its own address.
        91 => (!settings().separate_host_pointers).into(),
        // The old versions of memory operations, which Linux drivers have switched off, and the flush of remote writes.
        92..=94 | 98 => 0,
        99 => 1,
        122 | 123 => memory_operations,
        125 => 0,
        133 => settings().mps.into(),
        attribute if (1..=148).contains(&attribute) => 0,
        _ => return Err(Status::INVALID_VALUE),
    })
}
