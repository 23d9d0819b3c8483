//! How something ended, as it crosses the bridge: a code, or 0, and a text.

use unisono::error::{Code, Error, Result};

use crate::ffi;

pub(crate) fn outcome(result: Result<()>) -> ffi::Status {
    result.map_or_else(|error| status(&error), |()| ok())
}

pub(crate) fn ok() -> ffi::Status {
    ffi::Status {
        code: 0,
        message: String::new(),
    }
}

pub(crate) fn status(error: &Error) -> ffi::Status {
    ffi::Status {
        code: error.code as u8,
        message: error.to_string(),
    }
}

pub(crate) fn result(status: ffi::Status) -> Result<()> {
    if status.code == ffi::Code::Interrupted.repr {
        return Err(Error::new(Code::Aborted, status.message));
    }
    match Code::from_number(status.code) {
        None => Ok(()),
        Some(code) => Err(Error::new(code, status.message)),
    }
}
