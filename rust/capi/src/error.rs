//! Statuses, and the last error of a thread.

use std::ffi::{c_char, c_void};
use std::ptr;

use unisono::error::{Code, Error, Result};

use crate::fence::{LAST, fence};
use crate::sized::{Growing, sized_out};

/// `unisono_status`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u32);

impl Status {
    pub(crate) const OK: Self = Self(0);

    pub(crate) const fn of(code: Code) -> Self {
        Self(code as u32)
    }

    /// The code of a status that foreign code returned; `None` for success.
    pub(crate) fn code(self) -> Option<Code> {
        match self {
            Self::OK => None,
            Self(number) => {
                let known = u8::try_from(number).ok().and_then(Code::from_number);
                Some(known.unwrap_or(Code::System))
            }
        }
    }
}

/// `unisono_error`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ErrorInfo {
    pub size: usize,
    pub status: Status,
    pub fatal: i32,
    pub peer: i32,
    pub reserved: i32,
    pub message: *const c_char,
    pub operation: *const c_char,
}

// SAFETY: the size comes first.
unsafe impl Growing for ErrorInfo {
    const FIRST_SIZE: usize = 40;
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_last_error(error: *mut ErrorInfo) -> Status {
    let mut info = ErrorInfo {
        size: 0,
        status: Status::OK,
        fatal: 0,
        peer: -1,
        reserved: 0,
        message: c"".as_ptr(),
        operation: ptr::null(),
    };
    let _ = LAST.try_with(|last| {
        if let Some(last) = &*last.borrow() {
            info.status = last.status;
            info.fatal = i32::from(last.fatal);
            info.peer = last
                .peer
                .and_then(|peer| i32::try_from(peer).ok())
                .unwrap_or(-1);
            info.message = last.message.as_ptr();
            info.operation = last
                .operation
                .as_deref()
                .map_or(ptr::null(), |o| o.as_ptr());
        }
    });
    // SAFETY: the caller gives a struct of the size that it says.
    fence(|| unsafe { sized_out("error", error, info) })
}

#[unsafe(no_mangle)]
pub extern "C" fn unisono_last_error_message() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ref().map(|last| last.message.as_ptr()))
        .ok()
        .flatten()
        .unwrap_or(c"".as_ptr())
}

#[unsafe(no_mangle)]
pub extern "C" fn unisono_status_name(status: Status) -> *const c_char {
    let name = match status.0 {
        0 => c"UNISONO_OK",
        1 => c"UNISONO_INVALID_ARGUMENT",
        2 => c"UNISONO_UNSUPPORTED",
        3 => c"UNISONO_TIMEOUT",
        4 => c"UNISONO_PEER_LOST",
        5 => c"UNISONO_MISMATCH",
        6 => c"UNISONO_ABORTED",
        7 => c"UNISONO_SYSTEM",
        8 => c"UNISONO_UNTRUSTED",
        9 => c"UNISONO_INTERNAL",
        _ => c"unknown status",
    };
    name.as_ptr()
}

/// An output that must be there.
pub(crate) fn output<'a, T>(name: &str, place: *mut T) -> Result<&'a mut std::mem::MaybeUninit<T>> {
    let place: *mut c_void = place.cast();
    if place.is_null() {
        return Err(Error::invalid(format!(
            "{name} is needed, but NULL was given"
        )));
    }
    // SAFETY: the caller of the C function gives a place for one `T`, which need not hold one yet.
    Ok(unsafe { &mut *place.cast() })
}
