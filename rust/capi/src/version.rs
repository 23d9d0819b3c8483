//! The version of the library.

use std::env::consts::{ARCH, OS};
use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use crate::fence::text;

#[unsafe(no_mangle)]
pub extern "C" fn unisono_version() -> i32 {
    env!("CARGO_PKG_VERSION")
        .split('.')
        .map(|part| part.parse::<i32>().unwrap_or(0))
        .fold(0, |number, part| 100 * number + part)
}

#[unsafe(no_mangle)]
pub extern "C" fn unisono_build_info() -> *const c_char {
    static TEXT: OnceLock<CString> = OnceLock::new();
    let make = || {
        let profile = match cfg!(debug_assertions) {
            true => "debug",
            false => "release",
        };
        let version = env!("CARGO_PKG_VERSION");
        text(format!(
            "unisono {version}, {ARCH}-{OS}, {profile}, shared memory, TCP and CUDA"
        ))
    };
    TEXT.get_or_init(make).as_ptr()
}
