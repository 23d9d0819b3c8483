//! A code of the driver as an error that says what was tried, what the driver says, and what to do.

use std::ffi::{CStr, c_char};
use std::ptr;

use super::Driver;
use super::symbols::{Code, Symbols, numbers};
use crate::error::{self, Error, Result};

/// A code that is not success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::transport::cuda) struct Failure(pub(super) Code);

impl Failure {
    /// Success, or the code as a failure.
    #[inline]
    pub(super) fn check(code: Code) -> Result<(), Self> {
        match code {
            numbers::SUCCESS => Ok(()),
            code => Err(Self(code)),
        }
    }

    /// Whether it is no failure of what was to be released: the driver has shut down, or the context is gone, and
    /// everything in it too.
    pub(super) fn is_after_the_end(self) -> bool {
        [numbers::DEINITIALIZED, numbers::CONTEXT_IS_DESTROYED].contains(&self.0)
    }

    /// Whether the context is lost with it: every later call fails as this one.
    pub(super) fn is_sticky(self) -> bool {
        matches!(
            self.0,
            214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721
        )
    }

    /// As an error: `doing` says what was tried, with sizes (`allocate 33554432 bytes on device 0`), and names the
    /// driver's function where that helps.
    pub(super) fn while_doing(self, doing: impl std::fmt::Display) -> Error {
        self.in_words(doing, Driver::loaded().map(|driver| &driver.symbols))
    }

    /// As [`Failure::while_doing`], before the driver is in its place.
    pub(super) fn in_words(
        self,
        doing: impl std::fmt::Display,
        symbols: Option<&Symbols>,
    ) -> Error {
        let said = match symbols {
            Some(symbols) => symbols.words(self.0),
            None => format!("CUDA error {}", self.0),
        };
        let mut message = format!("{doing}: {said}");
        if let Some(hint) = self.hint() {
            message.push_str("; ");
            message.push_str(hint);
        }
        Error::new(self.kind(), message)
    }

    fn kind(self) -> error::Code {
        match self.0 {
            numbers::NO_DEVICE
            | numbers::STUB_LIBRARY
            | numbers::PEER_ACCESS_UNSUPPORTED
            | numbers::UNSUPPORTED_PTX_VERSION
            | numbers::JIT_COMPILER_NOT_FOUND
            | numbers::NO_BINARY_FOR_GPU
            | numbers::NOT_SUPPORTED => error::Code::Unsupported,
            numbers::INVALID_HANDLE
            | numbers::FIRST_CAPTURE_ERROR..=numbers::LAST_CAPTURE_ERROR => {
                error::Code::InvalidArgument
            }
            _ => error::Code::System,
        }
    }

    #[expect(clippy::too_many_lines, reason = "one arm for each failure")]
    fn hint(self) -> Option<&'static str> {
        Some(match self.0 {
            _ if self.is_sticky() => {
                "an earlier kernel or copy of this process failed and its CUDA context is lost: nothing on this device \
                 works any more in this process; look for the failed kernel (CUDA_LAUNCH_BLOCKING=1, \
                 compute-sanitizer) and start the process again"
            }
            numbers::OUT_OF_MEMORY => {
                "free device memory, or leave some to unisono (frameworks with a caching allocator have a limit to set)"
            }
            numbers::NOT_INITIALIZED => {
                "a process that was forked after its parent used CUDA cannot use it: start processes with spawn or \
                 forkserver"
            }
            numbers::DEINITIALIZED => "the process is ending and the driver has shut down",
            numbers::STUB_LIBRARY => {
                "the libcuda that was found is the toolkit's stub, made for linking: take the toolkit's stubs folder \
                 out of LD_LIBRARY_PATH, or install the driver"
            }
            numbers::NO_DEVICE => {
                "no GPU is visible to this process: look at nvidia-smi, at CUDA_VISIBLE_DEVICES, and whether the \
                 container was started with GPUs"
            }
            numbers::DEVICE_UNAVAILABLE => {
                "another process has the device for itself: set its compute mode to default (nvidia-smi -c 0), or start \
                 the MPS daemon"
            }
            numbers::FIRST_MPS_ERROR..=numbers::LAST_MPS_ERROR => {
                "the trouble is with the MPS daemon (nvidia-cuda-mps-control): if its clients are too many for the device's \
                 hardware queues, set CUDA_DEVICE_MAX_CONNECTIONS to fewer for each"
            }
            numbers::SYSTEM_NOT_READY => {
                "the GPUs are still being set up, or the fabric manager does not run: see nvidia-smi and \
                 nvidia-fabricmanager"
            }
            numbers::SYSTEM_DRIVER_MISMATCH => {
                "the kernel module and libcuda are of different versions: load the new module or restart the machine; \
                 in a container, use the host's libcuda"
            }
            numbers::COMPAT_NOT_SUPPORTED_ON_DEVICE => {
                "this device does not support CUDA's forward compatibility: remove the compat folder from \
                 LD_LIBRARY_PATH or update the driver"
            }
            numbers::INVALID_HANDLE => "the handle is none, or what it stood for was destroyed",
            numbers::UNSUPPORTED_PTX_VERSION => {
                "the driver is too old for the embedded kernels: update it"
            }
            numbers::INVALID_PTX | numbers::NO_BINARY_FOR_GPU => {
                "the embedded kernels need a device of compute capability 6.0 or newer"
            }
            numbers::JIT_COMPILER_NOT_FOUND => {
                "the driver's own compiler, libnvidia-ptxjitcompiler, is missing: install it with the driver; a \
                 container gets it with the capability compute"
            }
            numbers::TOO_MANY_PEERS => "a device can have only so many peers",
            numbers::HOST_MEMORY_ALREADY_REGISTERED => {
                "something else in this process has registered these pages with CUDA"
            }
            numbers::NOT_PERMITTED => "the operating system or a container forbids it",
            numbers::FIRST_CAPTURE_ERROR..=numbers::LAST_CAPTURE_ERROR => {
                "a CUDA graph is being captured, and this cannot be part of it or must not happen meanwhile"
            }
            numbers::UNKNOWN => {
                "the driver's kernel modules may not be loaded (nvidia-smi, nvidia-modprobe), or the GPU has failed \
                 (dmesg)"
            }
            _ => return None,
        })
    }
}

impl Symbols {
    /// The name and the text of a code, as the driver gives them: `CUDA_ERROR_INVALID_VALUE (1), invalid argument`.
    fn words(&self, code: Code) -> String {
        let name = text(|place| {
            // SAFETY: it stores the address of a text that lives as long as the library, or null.
            unsafe { (self.get_error_name)(code, place) }
        });
        let said = text(|place| {
            // SAFETY: as above.
            unsafe { (self.get_error_string)(code, place) }
        });
        match (name, said) {
            (Some(name), Some(said)) => format!("{name} ({code}), {said}"),
            _ => format!("CUDA error {code}"),
        }
    }
}

fn text(ask: impl FnOnce(*mut *const c_char) -> Code) -> Option<String> {
    let mut place = ptr::null();
    if ask(&mut place) != numbers::SUCCESS || place.is_null() {
        return None;
    }
    // SAFETY: the driver answered with a text of its own, which ends with a zero and is never freed.
    let text = unsafe { CStr::from_ptr(place) };
    Some(text.to_string_lossy().into_owned())
}
