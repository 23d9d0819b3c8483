//! Windows: memory that each rank exposes to the others.

use std::ffi::c_void;

use unisono::error::{Error, Result};
use unisono::locks::Mutex;
use unisono::types::{DataType, Rank};
use unisono::window::{Transfer, Window as Core};

use crate::error::{Status, output};
use crate::fence::{fence, status};
use crate::joined::{Communicator, Exposed, WINDOWS, on};
use crate::types::{self, seconds};

/// `unisono_window`.
#[repr(C)]
pub struct Window {
    _opaque: [u8; 0],
}

/// Runs `body` with what `window` stands for.
fn within(window: *const Window, body: impl FnOnce(&Exposed) -> Result<()>) -> Status {
    match WINDOWS.find(window) {
        Ok(exposed) => {
            let comm = exposed.window.communicator();
            status(comm.guard(|_| body(&exposed)), |_| comm.error().is_some())
        }
        Err(error) => status(Err(error), |_| false),
    }
}

fn rank(name: &str, value: i32, window: &Core) -> Result<Rank> {
    types::rank(name, value, window.world_size())
}

/// An address of `bytes` bytes that C gives.
fn address(name: &str, start: *const c_void, bytes: usize) -> Result<*const u8> {
    if start.is_null() && bytes > 0 {
        return Err(Error::invalid(format!(
            "{name} is needed, but NULL was given"
        )));
    }
    match isize::try_from(bytes) {
        Ok(_) => Ok(start.cast()),
        Err(_) => Err(Error::invalid(format!(
            "{name}: {bytes} bytes are more than any memory has"
        ))),
    }
}

fn ended(transfer: Option<Transfer>) -> Result<()> {
    transfer.map_or(Ok(()), |transfer| transfer.wait(None))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_window_create(
    comm: *mut Communicator,
    memory: *mut c_void,
    bytes: usize,
    window: *mut *mut Window,
) -> Status {
    on(comm, |joined| {
        let place = output("window", window)?;
        let start = address("memory", memory, bytes)?.cast_mut();
        let what = (DataType::UInt8, &[][..]);
        // SAFETY: the header asks that the memory stays until the window is destroyed, and that ranks agree on its use.
        let window = unsafe { joined.comm.window((start, bytes), what, Box::new(()))? };
        place.write(WINDOWS.insert(Exposed {
            window,
            views: Mutex::default(),
        })?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_window_bytes(
    window: *const Window,
    rank: i32,
    bytes: *mut usize,
) -> Status {
    within(window, |exposed| {
        let place = output("bytes", bytes)?;
        let rank = self::rank("window_bytes: rank", rank, &exposed.window)?;
        place.write(exposed.window.described(rank)?.0);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_window_put(
    window: *mut Window,
    source: *const c_void,
    bytes: usize,
    to: i32,
    offset: usize,
) -> Status {
    within(window, |exposed| {
        let to = rank("window_put: to", to, &exposed.window)?;
        let source = (address("source", source, bytes)?, bytes);
        // SAFETY: the header asks for `bytes` bytes; the call returns when they are no longer needed.
        ended(unsafe { exposed.window.put(to, offset, source, Box::new(()))? })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_window_get(
    window: *mut Window,
    target: *mut c_void,
    bytes: usize,
    from: i32,
    offset: usize,
) -> Status {
    within(window, |exposed| {
        let from = rank("window_get: from", from, &exposed.window)?;
        let target = (address("target", target, bytes)?.cast_mut(), bytes);
        // SAFETY: as in `unisono_window_put`.
        ended(unsafe { exposed.window.get(from, offset, target, Box::new(()))? })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_window_signal(window: *mut Window, to: i32) -> Status {
    within(window, |exposed| {
        let to = rank("window_signal: to", to, &exposed.window)?;
        exposed.window.signal(to)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_window_wait_signal(
    window: *mut Window,
    from: i32,
    seconds: f64,
) -> Status {
    within(window, |exposed| {
        let from = rank("window_wait_signal: from", from, &exposed.window)?;
        let limit = self::seconds("the time to wait", seconds)?;
        exposed.window.wait_signal(from, limit)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_window_map(
    window: *mut Window,
    rank: i32,
    memory: *mut *mut c_void,
) -> Status {
    within(window, |exposed| {
        let place = output("memory", memory)?;
        let rank = self::rank("window_map: rank", rank, &exposed.window)?;
        let mut views = exposed.views.lock();
        if let Some(view) = views.get(&rank) {
            place.write(view.start().as_ptr().cast());
            return Ok(());
        }
        let view = exposed.window.view(rank)?;
        place.write(view.start().as_ptr().cast());
        views.insert(rank, view);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_window_fence(window: *mut Window) -> Status {
    within(window, |exposed| exposed.window.fence())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_window_destroy(window: *mut Window) -> Status {
    fence(|| {
        if window.is_null() {
            return Ok(());
        }
        let exposed = WINDOWS.remove(window)?;
        drop(std::mem::take(&mut *exposed.views.lock()));
        exposed.window.close()
    })
}
