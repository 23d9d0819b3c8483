//! Modules and launches. A module is known by the text of its PTX, and its kernels run as they were compiled for
//! the processor from the same source.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

use unisono_cuda_kernels::Kernel;

use crate::abi::{
    Handle, In, LAUNCH_PARAM_BUFFER_POINTER, LAUNCH_PARAM_BUFFER_SIZE, LAUNCH_PARAM_END,
};
use crate::context::{self, Context};
use crate::handles::Handles;
use crate::memory::Reach;
use crate::operation::Operation;
use crate::settings::settings;
use crate::status::{Outcome, Status};
use crate::stream::Stream;

/// A loaded module.
pub(crate) struct Module {
    pub(crate) handle: Handle,
    context: Arc<Context>,
    dtype: String,
    entries: Vec<Entry>,
}

/// An entry point as the PTX describes it.
struct Entry {
    name: String,
    /// The most threads of a block.
    threads: u32,
}

/// An entry point of a module.
pub(crate) struct Function {
    handle: Handle,
    module: Arc<Module>,
    name: String,
    threads: u32,
    kernel: &'static Kernel,
    /// The driver loads lazily: an entry point with the first call that needs more of it than its handle.
    loaded: AtomicBool,
}

static MODULES: Handles<Module> = Handles::new();
static FUNCTIONS: Handles<Function> = Handles::new();

/// The compute capability of the emulated devices.
pub(crate) const CAPABILITY: (i32, i32) = (9, 0);

/// Loads a module into the current context.
///
/// # Errors
/// `INVALID_IMAGE` when it is no PTX of ours, `INVALID_PTX` when it is for newer devices, `UNSUPPORTED_PTX_VERSION` when it
/// is in a PTX newer than the driver.
pub(crate) fn load(text: &str) -> Outcome<Handle> {
    let context = context::current()?;
    let dtype = text
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("//"))
        .and_then(|line| line.split_whitespace().next())
        .ok_or(Status::INVALID_IMAGE)?;
    let version = directive(text, ".version").ok_or(Status::INVALID_IMAGE)?;
    let target = directive(text, ".target").ok_or(Status::INVALID_IMAGE)?;
    if !is_version_known(version) {
        return Err(Status::UNSUPPORTED_PTX_VERSION);
    }
    let newest = CAPABILITY.0 * 10 + CAPABILITY.1;
    let target = target.split([',', ' ']).next();
    let target = target.and_then(|target| target.strip_prefix("sm_")?.parse().ok());
    if target.is_none_or(|target: i32| target > newest) {
        return Err(Status::INVALID_PTX);
    }
    let module = MODULES.insert(|handle| Module {
        handle,
        context,
        dtype: dtype.to_string(),
        entries: entries(text),
    });
    Ok(module.handle)
}

/// The rest of the line after a directive.
fn directive<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let rest = |line: &'a str| line.trim_start().strip_prefix(name);
    text.lines().find_map(rest).map(str::trim)
}

/// The entry points of the PTX, one for each `.entry`.
fn entries(text: &str) -> Vec<Entry> {
    text.split(".entry")
        .skip(1)
        .map(|rest| {
            let name = rest.trim_start();
            let end = name.find(|c: char| !c.is_alphanumeric() && c != '_' && c != '$');
            let head = rest.split('{').next().unwrap_or_default();
            let sizes = directive(head, ".maxntid").map(|sizes| {
                let sizes = sizes
                    .split(',')
                    .map_while(|size| size.trim().parse::<u32>().ok());
                sizes.product()
            });
            Entry {
                name: name[..end.unwrap_or(name.len())].to_string(),
                threads: sizes.unwrap_or(1024),
            }
        })
        .collect()
}

/// Whether the driver's compiler knows this PTX: each release brought a version of it.
fn is_version_known(version: &str) -> bool {
    let newest = match settings().version {
        ..11000 => (6, 5),
        11000..12000 => (7, settings().version % 1000 / 10),
        version @ 12000..13000 => (
            8,
            [0, 1, 2, 3, 4, 5, 5, 6, 7, 8][version as usize % 100 / 10],
        ),
        version => (9, version % 1000 / 10),
    };
    let mut numbers = version.split('.').map(|part| part.parse::<i32>().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(major), Some(minor)) => (major, minor) <= newest,
        _ => false,
    }
}

/// Unloads a module, once everything in its context is done.
pub(crate) fn unload(handle: Handle) -> Outcome {
    let module = MODULES.get(handle)?;
    let outcome = module.context.synchronize();
    MODULES.remove(handle)?;
    FUNCTIONS.retain(|function| !Arc::ptr_eq(&function.module, &module));
    outcome
}

/// Finds an entry point.
///
/// # Errors
/// `NOT_FOUND` when the module has none of this name, or no kernel of ours has.
pub(crate) fn function(module: Handle, name: &str) -> Outcome<Handle> {
    let module = MODULES.get(module)?;
    module.context.check()?;
    let entry = module.entries.iter().find(|entry| entry.name == name);
    let threads = entry.ok_or(Status::NOT_FOUND)?.threads;
    let same =
        |function: &Arc<Function>| Arc::ptr_eq(&function.module, &module) && function.name == name;
    if let Some(known) = FUNCTIONS.all().into_iter().find(same) {
        return Ok(known.handle);
    }
    let kernel = unisono_cuda_kernels::find(&module.dtype, name).ok_or(Status::NOT_FOUND)?;
    let function = FUNCTIONS.insert(|handle| Function {
        handle,
        module,
        name: name.to_string(),
        threads,
        kernel,
        loaded: AtomicBool::new(false),
    });
    Ok(function.handle)
}

/// An attribute of an entry point, which is loaded for it: threads per block, and otherwise nothing to speak of.
pub(crate) fn function_attribute(handle: Handle, attribute: u32) -> Outcome<i32> {
    let function = FUNCTIONS.get(handle)?;
    function.load()?;
    match attribute {
        0 => Ok(function.threads.cast_signed()),
        1..=3 => Ok(0),
        4 => Ok(32),
        5 | 6 => Ok(CAPABILITY.0 * 10 + CAPABILITY.1),
        7..=16 => Ok(0),
        _ => Err(Status::INVALID_VALUE),
    }
}

impl Function {
    /// Loads it if it is not, for which the driver may wait until the context is idle.
    fn load(&self) -> Outcome {
        match self.loaded.swap(true, Ordering::AcqRel) {
            true => Ok(()),
            false => self.module.context.may_synchronize(),
        }
    }
}

/// A kernel with its parameters.
#[derive(Clone)]
pub(crate) struct Launch {
    kernel: &'static Kernel,
    parameters: Vec<Box<[u8]>>,
    grid: [u32; 3],
    block: [u32; 3],
}

/// Puts a launch into a stream.
///
/// # Errors
/// `INVALID_HANDLE` when stream and function are not both of the current context, `INVALID_VALUE` for a shape no device takes
/// and for parameters that are not the function's; as [`Stream::enqueue`].
pub(crate) fn launch(
    function: Handle,
    (grid, block, shared): ([u32; 3], [u32; 3], u32),
    stream: &Arc<Stream>,
    parameters: &In<*const u8>,
    extra: &In<usize>,
) -> Outcome {
    let function = FUNCTIONS.get(function)?;
    let current = context::current()?;
    let home = &function.module.context;
    if !Arc::ptr_eq(home, &stream.context) || !Arc::ptr_eq(home, &current) {
        return Err(Status::INVALID_HANDLE);
    }
    let threads: u64 = block.iter().map(|&size| u64::from(size)).product();
    let sized = (1..=u64::from(function.threads)).contains(&threads) && block[2] <= 64;
    let shaped = grid[0] < 1 << 31 && grid[1] <= 65535 && grid[2] <= 65535;
    if !sized || !shaped || grid.contains(&0) || shared > 48 << 10 {
        return Err(Status::INVALID_VALUE);
    }
    function.load()?;
    let sizes = function.kernel.parameter_bytes();
    let parameters = if parameters.pointer().is_null() {
        packed(sizes, extra)?
    } else {
        let each = sizes.iter().enumerate().map(|(index, &bytes)| {
            let value = parameters.at(index)?;
            if value.is_null() {
                return Err(Status::INVALID_VALUE);
            }
            // SAFETY: by the driver API's contract the array has a pointer for each parameter of the function, to a
            // value of its size.
            Ok(unsafe { std::slice::from_raw_parts(value, bytes) }.into())
        });
        each.collect::<Outcome<_>>()?
    };
    stream.enqueue(Operation::Kernel(Launch {
        kernel: function.kernel,
        parameters,
        grid,
        block,
    }))?;
    Ok(())
}

/// Parameters in one buffer, each aligned as in C.
fn packed(sizes: &[usize], extra: &In<usize>) -> Outcome<Vec<Box<[u8]>>> {
    let (mut buffer, mut length) = (0, 0);
    let mut index = 0;
    loop {
        let value = || extra.at(index + 1);
        match extra.at(index)? {
            LAUNCH_PARAM_END => break,
            LAUNCH_PARAM_BUFFER_POINTER => buffer = value()?,
            LAUNCH_PARAM_BUFFER_SIZE => {
                // SAFETY: by the driver API's contract the value after this word is a pointer to the size.
                length = unsafe { (value()? as *const usize).read_unaligned() };
            }
            _ => return Err(Status::INVALID_VALUE),
        }
        index += 2;
    }
    let mut at = 0_usize;
    let mut parameters = Vec::new();
    for &bytes in sizes {
        let alignment = if bytes.is_multiple_of(8) { 8 } else { bytes };
        at = at.next_multiple_of(alignment);
        if buffer == 0 || at + bytes > length {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: by the driver API's contract the buffer has `length` bytes, and these are within.
        let value = unsafe { std::slice::from_raw_parts((buffer + at) as *const u8, bytes) };
        parameters.push(value.into());
        at += bytes;
    }
    Ok(parameters)
}

thread_local! {
    static REACH: RefCell<Option<Reach>> = const { RefCell::new(None) };
}

/// The function that the kernels call for every access.
extern "C" fn translate(address: *const c_void, bytes: usize, _writes: c_int) -> *mut c_void {
    REACH.with_borrow_mut(|reach| {
        let host = reach
            .as_mut()
            .and_then(|reach| reach.reach(address as u64, bytes));
        host.unwrap_or(0) as *mut c_void
    })
}

impl Launch {
    /// Runs the kernel in this thread.
    ///
    /// # Errors
    /// `ILLEGAL_ADDRESS` and `MISALIGNED_ADDRESS`, as the kernel accesses memory.
    pub(crate) fn execute(&self, context: &Arc<Context>) -> Outcome {
        static TRANSLATED: Once = Once::new();
        TRANSLATED.call_once(|| unisono_cuda_kernels::translate_with(translate));
        let parameters: Vec<&[u8]> = self.parameters.iter().map(|value| &**value).collect();
        let (grid, block) = self.shape();
        REACH.set(Some(Reach::new(context.clone())));
        // SAFETY: the values have the sizes the kernel's table says, and the function set above vouches for every address
        // before the kernel touches it.
        unsafe { self.kernel.launch(&parameters, grid, block) };
        match REACH.take().and_then(|reach| reach.fault) {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    /// The shape it runs in. The kernels are right in any; simulated threads cost far more than a device's, so large ones
    /// run in a few threads unless the setting says otherwise.
    fn shape(&self) -> ([u32; 3], [u32; 3]) {
        let threads = self.grid[0].saturating_mul(self.block.iter().product());
        if settings().full_grid || threads <= 512 {
            (self.grid, self.block)
        } else {
            let [columns, rows, layers] = self.grid;
            ([columns.min(2), rows, layers], [2, 1, 1])
        }
    }
}

/// Forgets the modules of a destroyed context.
pub(crate) fn forget(context: &Arc<Context>) {
    MODULES.retain(|module| !Arc::ptr_eq(&module.context, context));
    FUNCTIONS.retain(|function| !Arc::ptr_eq(&function.module.context, context));
}

/// Modules that were loaded and not unloaded.
pub(crate) fn count() -> usize {
    MODULES.count()
}
