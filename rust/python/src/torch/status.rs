//! How something ended, as it crosses the bridge: a code, or 0, and a text.

use unisono::error::{Code, Error, Result};

use super::ffi;

pub(super) fn outcome(result: Result<()>) -> ffi::Status {
    result.map_or_else(|error| status(&error), |()| ok())
}

pub(super) fn ok() -> ffi::Status {
    ffi::Status {
        code: 0,
        message: String::new(),
    }
}

pub(super) fn status(error: &Error) -> ffi::Status {
    ffi::Status {
        code: error.code as u8,
        message: error.to_string(),
    }
}

pub(super) fn result(status: ffi::Status) -> Result<()> {
    if status.code == ffi::Code::Interrupted.repr {
        return Err(Error::new(Code::Aborted, status.message));
    }
    match Code::from_number(status.code) {
        None => Ok(()),
        Some(code) => Err(Error::new(code, status.message)),
    }
}
