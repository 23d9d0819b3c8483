//! The device of memory or of a stream, for callers that know an address or a handle alone; and whether a process that has said
//! nothing of devices uses CUDA all the same.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::CUstream;

use super::pointer::{AddressInfo, Ask, Kind, ask};
use super::stream::PER_THREAD;
use super::symbols::{Symbols, numbers};
use super::{Device, Driver, Event, Failure, Stream};
use crate::error::{Error, Result};
use crate::types::DeviceStream;

/// The device whose memory lies at `address`, managed memory included; `None` for memory of the host.
///
/// # Errors
/// Those of [`Driver::load`]; `System` when the driver cannot answer.
pub fn device_of(address: usize) -> Result<Option<u32>> {
    let function = Driver::load()?.symbols.pointer_get_attributes;
    let place = match ask(function, address as u64) {
        // Addresses mean the same in all contexts, but some driver may want this thread to have one.
        Err(Failure(numbers::INVALID_CONTEXT)) => {
            let entered = Device::of(0)?.enter()?;
            let place = ask(function, address as u64);
            drop(entered);
            place
        }
        place => place,
    };
    place
        .map(on_device)
        .map_err(|failure| failure.while_doing(format_args!("ask what memory {address:#x} is")))
}

fn on_device(place: AddressInfo) -> Option<u32> {
    place
        .device
        .filter(|_| matches!(place.kind, Kind::Device | Kind::Managed))
}

/// The device of `stream`, a `CUstream`; of the default streams (0, 1, 2), and of one that is being captured, the device
/// that is current in this thread.
///
/// # Errors
/// Those of [`Driver::load`]; `InvalidArgument` for what is no stream, as far as the driver can tell, and for a default
/// stream in a thread without a device.
pub fn device_of_stream(stream: usize) -> Result<u32> {
    let driver = Driver::load()?;
    let symbols = &driver.symbols;
    let raw: CUstream = ptr::with_exposed_provenance_mut(stream);
    // To be asked for its context would end a capture. A thread that captures has the device current.
    let is_asked = stream > PER_THREAD && !is_captured(driver, raw);
    let mut number: c_int = -1;
    let code = match is_asked {
        true => device_by_context(symbols, raw, &mut number),
        // SAFETY: it stores a number.
        false => Failure::check(unsafe { (symbols.ctx_get_device)(&mut number) }),
    };
    match (code, u32::try_from(number)) {
        (Ok(()), Ok(number)) => Ok(number),
        (Err(Failure(numbers::INVALID_CONTEXT)), _) if !is_asked => Err(Error::invalid(
            "the default stream, or one that is being captured, was named in a thread that has no current CUDA device \
             (cudaSetDevice), and no buffer says on which device it is meant",
        )),
        (Err(failure), _) => Err(failure.while_doing(format_args!(
            "ask of which device the stream {stream:#x} is"
        ))),
        (Ok(()), Err(_)) => Err(Error::internal(format!(
            "the driver gave {number} as a device"
        ))),
    }
}

/// Whether a stream that is none of the default ones is being captured, as far as the driver says.
fn is_captured(driver: &'static Driver, raw: CUstream) -> bool {
    let mut status = numbers::CAPTURE_STATUS_NONE;
    // SAFETY: it stores a number. That `raw` is a stream is the caller's promise.
    let ask = |status: &mut u32| unsafe { (driver.symbols.stream_is_capturing)(raw, status) };
    if ask(&mut status) == numbers::INVALID_CONTEXT
        && let Some(Ok(entered)) = driver.any_open().map(Device::enter)
    {
        // The stream knows its context; but some is wanted of the thread.
        ask(&mut status);
        drop(entered);
    }
    status != numbers::CAPTURE_STATUS_NONE
}

fn device_by_context(symbols: &Symbols, raw: CUstream, number: &mut c_int) -> Result<(), Failure> {
    let mut context = ptr::null_mut();
    // SAFETY: it stores a handle. That `raw` is a stream is the caller's promise.
    Failure::check(unsafe { (symbols.stream_get_ctx)(raw, &mut context) })?;
    // SAFETY: the context is alive, since its stream is; it is taken off again.
    unsafe {
        Failure::check((symbols.ctx_push_current)(context))?;
        let code = (symbols.ctx_get_device)(number);
        (symbols.ctx_pop_current)(&mut context);
        Failure::check(code)
    }
}

/// Has what is put into `later` from now on wait for all that is in `earlier` by now. Does not block.
///
/// # Errors
/// Those of [`Stream::of`]; `InvalidArgument` when one of them is being captured and the other is not; `System`.
pub fn order(earlier: DeviceStream, later: DeviceStream) -> Result<()> {
    let earlier = Stream::of(earlier)?;
    let event = Event::new(earlier.device())?;
    earlier.record(&event)?;
    Stream::of(later)?.wait(&event)
}

/// How often it is looked whether the driver has come into the process.
const LOOKS: u32 = 32;
/// The looks that are left, or [`FOUND`].
static LOOKS_LEFT: AtomicU32 = AtomicU32::new(LOOKS);
const FOUND: u32 = u32::MAX;
static ASK: OnceLock<Ask> = OnceLock::new();

/// Whether [`device_if_in_use`] may have something to say. Costs next to nothing.
#[inline]
pub fn may_be_in_use() -> bool {
    LOOKS_LEFT.load(Ordering::Relaxed) != 0
}

/// Has the next calls of [`device_if_in_use`] look again: something happened, after which a program may begin to use a
/// device.
pub fn look_again() {
    if LOOKS_LEFT.load(Ordering::Relaxed) != FOUND {
        LOOKS_LEFT.store(LOOKS, Ordering::Relaxed);
    }
}

/// The device whose memory, not managed, lies at `address`, if this process uses CUDA already, whether through this
/// library or not. Never loads the driver and never initialises it, which takes long and would be the end of `fork`.
///
/// It is made to find a mistake, and may miss it: after some calls without the driver in the process it looks no more.
/// Once a device has been opened here, the core looks itself.
pub fn device_if_in_use(address: usize) -> Option<u32> {
    if Driver::loaded().is_some_and(|driver| driver.any_open().is_some()) {
        return None;
    }
    let ask_driver = match ASK.get() {
        Some(known) => *known,
        None => look()?,
    };
    let place = ask(ask_driver, address as u64).ok()?;
    place.device.filter(|_| place.kind == Kind::Device)
}

/// Looks for the driver among the libraries of the process.
fn look() -> Option<Ask> {
    let left = LOOKS_LEFT.load(Ordering::Relaxed);
    if left != FOUND {
        LOOKS_LEFT.store(left.checked_sub(1)?, Ordering::Relaxed);
    }
    let found = find()?;
    LOOKS_LEFT.store(FOUND, Ordering::Relaxed);
    Some(*ASK.get_or_init(|| found))
}

fn find() -> Option<Ask> {
    let mut path: Option<&CStr> = None;
    // SAFETY: it calls `is_driver` for each library with the place given, in this thread, before it returns.
    unsafe { libc::dl_iterate_phdr(Some(is_driver), (&raw mut path).cast()) };
    // SAFETY: the library is in the process already; with this flag it is not loaded, but held, so that the function
    // stays where it is. Its name lives as long as it does.
    let symbol = unsafe {
        let library = libc::dlopen(path?.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY);
        if library.is_null() {
            return None;
        }
        libc::dlsym(library, c"cuPointerGetAttributes".as_ptr())
    };
    if symbol.is_null() {
        return None;
    }
    // SAFETY: the driver's function of this name has this signature, which `cuda.h` says.
    Some(unsafe { std::mem::transmute::<*mut c_void, Ask>(symbol) })
}

/// Takes the library's name if it is the driver's, and ends the search.
unsafe extern "C" fn is_driver(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    found: *mut c_void,
) -> c_int {
    // SAFETY: the loader gives a struct that it has filled; its name is a text, or null.
    let name = unsafe { (*info).dlpi_name };
    if name.is_null() {
        return 0;
    }
    // SAFETY: as above; the text lives as long as its library, which is not unloaded while the loader is locked, and
    // the driver's never.
    let name = unsafe { CStr::from_ptr(name) };
    let bytes = name.to_bytes();
    let file = bytes.rsplit(|byte| *byte == b'/').next().unwrap_or(bytes);
    if !file.starts_with(b"libcuda.so") {
        return 0;
    }
    // SAFETY: `find` gives the address of such a place, and waits.
    unsafe { found.cast::<Option<&CStr>>().write(Some(name)) };
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_driver_memory_is_of_the_host() {
        let word = 0_u32;
        if find().is_none() {
            assert_eq!(device_if_in_use((&raw const word).addr()), None);
        }
    }
}
