//! The CUDA kernels, compiled for the processor.
//!
//! The emulated driver launches them, and the tests here hold them against the core's reductions.
//! `rust/core/src/transport/cuda/kernels/host.hpp` is the C++ side and says how memory is reached.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::slice;

use flate2::read::GzDecoder;

/// Where `bytes` bytes at a device address lie in this process, and whether they are going to be written. Null is a
/// fault: the address is not mapped, the bytes are not inside one allocation, or the address is not a multiple
/// of `bytes`.
pub type Translate =
    extern "C" fn(address: *const c_void, bytes: usize, writes: c_int) -> *mut c_void;

/// An entry point of a module.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Kernel {
    dtype: *const c_char,
    name: *const c_char,
    parameters: c_uint,
    sizes: *const usize,
    launch: unsafe extern "C" fn(*mut *mut c_void, *const c_uint, *const c_uint),
}

unsafe extern "C" {
    fn unisono_kernels(count: *mut usize) -> *const Kernel;
    fn unisono_kernels_translate(translate: Translate);
}

/// All entry points of all modules.
pub fn kernels() -> &'static [Kernel] {
    let mut count = 0;
    // SAFETY: the table is an array of `count` entries of this layout, made before the first call
    // returns and never changed; `count` outlives the call.
    unsafe { slice::from_raw_parts(unisono_kernels(&raw mut count), count) }
}

/// The entry point `name` (`unisono_reduce_sum`) of the module of `dtype` (`float32`).
pub fn find(dtype: &str, name: &str) -> Option<&'static Kernel> {
    kernels()
        .iter()
        .find(|kernel| kernel.dtype() == dtype && kernel.name() == name)
}

/// The folder of the kernels' sources.
fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../rust/core/src/transport/cuda/kernels")
}

/// The committed module of `dtype` (`float32`), as PTX.
pub fn ptx(dtype: &str) -> String {
    let path = folder().join("ptx").join(format!("{dtype}.ptx.gz"));
    let mut text = String::new();
    File::open(&path)
        .and_then(|file| GzDecoder::new(file).read_to_string(&mut text))
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text
}

/// Makes all later launches of this process reach memory through `translate`.
pub fn translate_with(translate: Translate) {
    // SAFETY: the function is stored atomically and may be called from any thread, as its type
    // allows.
    unsafe { unisono_kernels_translate(translate) }
}

// SAFETY: the pointers are to constants.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// The element type of its module, as `DataType::name` has it.
    pub fn dtype(&self) -> &'static str {
        text(self.dtype)
    }

    /// The name of the entry point.
    pub fn name(&self) -> &'static str {
        text(self.name)
    }

    /// Bytes of each parameter.
    pub fn parameter_bytes(&self) -> &'static [usize] {
        // SAFETY: the table's entry points to a constant array of this many sizes.
        unsafe { slice::from_raw_parts(self.sizes, self.parameters as usize) }
    }

    /// Runs all simulated threads, one after the other, in this thread. `parameters` holds the
    /// values, each of the size that [`Kernel::parameter_bytes`] says.
    ///
    /// # Panics
    /// If the number of parameters or a size differs.
    ///
    /// # Safety
    /// The values are valid for their parameters, and where they are device addresses the function
    /// given to [`translate_with`] knows which bytes may be reached; without one they are
    /// addresses of this process, of as many elements as the parameters say.
    pub unsafe fn launch(&self, parameters: &[&[u8]], grid: [u32; 3], block: [u32; 3]) {
        let sizes: Vec<_> = parameters.iter().map(|value| value.len()).collect();
        assert_eq!(
            sizes,
            self.parameter_bytes(),
            "parameters of {}",
            self.name()
        );
        let mut pointers: Vec<_> = parameters
            .iter()
            .map(|value| value.as_ptr().cast_mut().cast::<c_void>())
            .collect();
        // SAFETY: there are as many values, of the right sizes, as the kernel reads, by copies of their bytes, so
        // that they need no alignment; it does not write them. The rest is the caller's promise.
        unsafe { (self.launch)(pointers.as_mut_ptr(), grid.as_ptr(), block.as_ptr()) }
    }
}

fn text(text: *const c_char) -> &'static str {
    // SAFETY: the table's texts are constants that end with a zero byte.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().expect("names are ASCII")
}

#[cfg(test)]
mod ptx;
#[cfg(test)]
mod tests;
