//! The memory that an address belongs to, as far as the driver can tell.

use std::ffi::{c_uint, c_void};

use cudarc::driver::sys::CUdeviceptr;

use super::symbols::{Code, numbers};
use super::{Device, Failure};
use crate::error::{Error, Result};

/// The kind of memory that an address belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Of a device.
    Device,
    /// Of the host, registered with or allocated by the driver.
    Host,
    /// Managed: on the host or on a device, as it is used.
    Managed,
    /// None that the driver knows: ordinary memory of the host, or freed.
    Unknown,
}

/// The driver's answer about an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressInfo {
    /// The kind of memory.
    pub kind: Kind,
    /// The device that it belongs to, or was allocated for; `None` for unknown memory.
    pub device: Option<u32>,
}

/// Asks the driver about an address. Some 100 ns; also during a capture. Nothing is remembered: memory comes and goes.
///
/// # Errors
/// `System` when the driver cannot answer at all.
pub fn place(device: &'static Device, address: u64) -> Result<AddressInfo> {
    let entered = device.enter()?;
    let place = ask(device.driver.symbols.pointer_get_attributes, address);
    drop(entered);
    place.map_err(|failure| failure.while_doing(format_args!("ask what memory {address:#x} is")))
}

/// The allocation in which `address` lies: where it begins, and its length.
///
/// # Errors
/// `System` when it lies in none.
pub fn allocation(device: &'static Device, address: u64) -> Result<(u64, usize)> {
    let entered = device.enter()?;
    let (mut base, mut bytes): (CUdeviceptr, usize) = (0, 0);
    // SAFETY: it stores an address and a length.
    let code =
        unsafe { (device.driver.symbols.mem_get_address_range)(&mut base, &mut bytes, address) };
    drop(entered);
    Failure::check(code).map_err(|failure| {
        failure.while_doing(format_args!("ask in which allocation {address:#x} lies"))
    })?;
    Ok((base, bytes))
}

/// The function of the driver that knows addresses.
pub(super) type Ask =
    unsafe extern "C" fn(c_uint, *mut c_uint, *mut *mut c_void, CUdeviceptr) -> Code;

/// The answer of the driver's function, `ask`, about an address.
pub(super) fn ask(ask: Ask, address: u64) -> Result<AddressInfo, Failure> {
    let mut asked = [
        numbers::POINTER_MEMORY_TYPE,
        numbers::POINTER_IS_MANAGED,
        numbers::POINTER_DEVICE_ORDINAL,
    ];
    let (mut memory_type, mut managed, mut ordinal) = (0_u32, 0_u32, -1_i32);
    let mut answers: [*mut c_void; 3] = [
        (&raw mut memory_type).cast(),
        (&raw mut managed).cast(),
        (&raw mut ordinal).cast(),
    ];
    // SAFETY: it stores one 32-bit word for each of the three (for the second, at least its low byte, which is why it
    // begins as zero). An address that the driver does not know gets zeros.
    let code = unsafe {
        ask(
            asked.len() as u32,
            asked.as_mut_ptr(),
            answers.as_mut_ptr(),
            address,
        )
    };
    Failure::check(code)?;
    let kind = match memory_type {
        _ if managed != 0 => Kind::Managed,
        numbers::MEMORY_TYPE_DEVICE => Kind::Device,
        numbers::MEMORY_TYPE_HOST => Kind::Host,
        _ => Kind::Unknown,
    };
    let device = u32::try_from(ordinal)
        .ok()
        .filter(|_| kind != Kind::Unknown);
    Ok(AddressInfo { kind, device })
}

/// The device on which `address` is memory that the host cannot read, as far as that is known: `None`, without asking,
/// while the driver has not been loaded. For memory that was given as the host's.
pub fn only_on_device(address: u64) -> Option<u32> {
    let device = super::Driver::loaded()?.any_open()?;
    match place(device, address).ok()? {
        AddressInfo {
            kind: Kind::Device,
            device,
        } => device.or(Some(0)),
        _ => None,
    }
}

/// Refuses a buffer that is not, at its first and its last byte, memory of `device` (or managed memory). `what` names the
/// buffer (`input`). An empty buffer is always right.
///
/// # Errors
/// `InvalidArgument`, which says what the memory is instead; `System` when the driver cannot answer.
pub fn check_buffer(device: &'static Device, address: u64, bytes: usize, what: &str) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let last = address
        .checked_add(bytes as u64 - 1)
        .ok_or_else(|| Error::invalid(format!("the {what} ends beyond the address space")))?;
    judge(device.number(), place(device, address)?, what, "begins in")?;
    // The range of its allocation would not do: one buffer may span several mappings of the driver's virtual memory.
    judge(device.number(), place(device, last)?, what, "ends in")
}

fn judge(device: u32, place: AddressInfo, what: &str, part: &str) -> Result<()> {
    match (place.kind, place.device) {
        (Kind::Managed, _) => Ok(()),
        (Kind::Device, Some(on)) if on == device => Ok(()),
        (Kind::Device, on) => Err(Error::invalid(format!(
            "the {what} {part} memory of device {}, the stream is of device {device}: all buffers of an operation lie \
             on its stream's device",
            on.map_or_else(|| "unknown".to_owned(), |on| on.to_string())
        ))),
        (Kind::Host, _) => Err(Error::invalid(format!(
            "the {what} {part} memory of the host, but a stream of device {device} was given: pass memory of the \
             device, or no stream"
        ))),
        (Kind::Unknown, _) => Err(Error::invalid(format!(
            "the {what} {part} memory that CUDA does not know: it was freed, it is too short, or it is ordinary memory \
             of the host (then give no stream)"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_memory_of_the_device_will_do() {
        let on = |kind, device| judge(1, AddressInfo { kind, device }, "input", "begins in");
        on(Kind::Device, Some(1)).unwrap();
        on(Kind::Managed, Some(0)).unwrap();
        for (kind, device, words) in [
            (
                Kind::Device,
                Some(0),
                "memory of device 0, the stream is of device 1",
            ),
            (Kind::Host, Some(1), "memory of the host"),
            (Kind::Unknown, None, "it was freed"),
        ] {
            let message = on(kind, device).unwrap_err().message;
            assert!(message.contains(words), "{message}");
        }
    }
}
