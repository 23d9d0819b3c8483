//! What C passes, checked: numbers of enumerations, sized structs, texts, times, addresses with counts.

use std::ffi::{CStr, c_char, c_void};
use std::mem;
use std::ptr;
use std::slice;
use std::time::Duration;

use unisono::buffer::Memory;
use unisono::error::{Error, Result};
use unisono::types::{DataType, Rank, ReduceOp};

/// `unisono_dtype`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct DType(pub u32);

/// `unisono_op`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Op(pub u32);

/// `unisono_options`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Options {
    pub size: usize,
    pub stream: *mut c_void,
    pub timeout: f64,
    pub factor: f64,
}

impl DType {
    #[inline]
    pub(crate) fn check(self) -> Result<DataType> {
        u8::try_from(self.0)
            .ok()
            .and_then(DataType::from_number)
            .ok_or_else(|| Error::invalid(format!("{} is no unisono_dtype", self.0)))
    }
}

/// The options of a call, checked.
#[derive(Clone, Copy)]
pub(crate) struct Checked {
    pub(crate) timeout: Option<Duration>,
    factor: f64,
}

impl Checked {
    /// # Safety
    /// `options` is NULL, or leads to a struct of the size that it says.
    #[inline]
    pub(crate) unsafe fn new(options: *const Options) -> Result<Self> {
        if options.is_null() {
            return Ok(Self {
                timeout: None,
                factor: 1.0,
            });
        }
        // SAFETY: as the caller promises.
        Self::of(unsafe { sized_in("options", options)? })
    }

    fn of(options: Options) -> Result<Self> {
        if !options.stream.is_null() {
            return Err(Error::unsupported(
                "the options name a stream, but this version of unisono knows no devices: buffers must be memory of the \
                 host, and the stream NULL",
            ));
        }
        let timeout = match options.timeout {
            0.0 => None,
            // Zero is no limit to the core, and must not come of a very short one.
            given => Some(match seconds("the timeout of the options", given)? {
                Some(limit) => limit.max(Duration::from_nanos(1)),
                None => Duration::ZERO,
            }),
        };
        Ok(Self {
            timeout,
            factor: options.factor,
        })
    }

    #[inline]
    pub(crate) fn operator(&self, op: Op) -> Result<ReduceOp> {
        let known = usize::try_from(op.0).ok().and_then(|n| n.checked_sub(1));
        match known.and_then(|index| ReduceOp::ALL.get(index)) {
            Some(ReduceOp::PremulSum(_)) => Ok(ReduceOp::PremulSum(self.factor)),
            Some(known) => Ok(*known),
            None => Err(Error::invalid(format!("{} is no unisono_op", op.0))),
        }
    }
}

/// The time that stands for no limit.
pub const FOREVER: f64 = -1.0;

/// A time that C gives in seconds; `None` for `UNISONO_FOREVER`.
pub(crate) fn seconds(name: &str, value: f64) -> Result<Option<Duration>> {
    if value == FOREVER {
        return Ok(None);
    }
    // More than a century is for ever, too.
    if value > 3.2e9 {
        return Ok(None);
    }
    match Duration::try_from_secs_f64(value) {
        Ok(limit) => Ok(Some(limit)),
        Err(_) => Err(Error::invalid(format!(
            "{name} is {value} s, which is neither a time nor UNISONO_FOREVER"
        ))),
    }
}

/// `value`, if it is the number of a rank of `world`.
#[inline]
pub(crate) fn rank(name: &str, value: i32, world: usize) -> Result<Rank> {
    match usize::try_from(value) {
        Ok(rank) if rank < world => Ok(rank),
        _ => Err(Error::invalid(format!(
            "{name} is {value}, which is out of range: the group has {world} ranks"
        ))),
    }
}

/// A buffer that C gives, checked: small enough to be moved about in registers until the request is made.
#[derive(Clone, Copy)]
pub(crate) struct Buffer {
    start: *const c_void,
    bytes: usize,
}

impl Buffer {
    /// `count` elements from `start`, to be read or written.
    #[inline(always)]
    pub(crate) fn new(
        name: &str,
        start: *const c_void,
        count: usize,
        dtype: DataType,
    ) -> Result<Self> {
        let bytes = count.checked_mul(dtype.size());
        match bytes.filter(|bytes| *bytes <= isize::MAX as usize) {
            Some(bytes)
                if start.addr().checked_add(bytes).is_some()
                    && (bytes == 0 || !start.is_null()) =>
            {
                Ok(Self { start, bytes })
            }
            _ => Err(no_memory(name, start, count, dtype)),
        }
    }

    /// As the core takes it.
    #[inline(always)]
    pub(crate) fn memory(self) -> Memory {
        // SAFETY: whoever calls a function of the header promises that its buffers are what the header asks for, until
        // the operation that gets this has ended. Nobody else makes a `Buffer`.
        unsafe { Memory::from_raw_parts(self.start.cast_mut().cast(), self.bytes) }
    }
}

/// Why there cannot be such memory.
#[cold]
fn no_memory(name: &str, start: *const c_void, count: usize, dtype: DataType) -> Error {
    let fits = count
        .checked_mul(dtype.size())
        .is_some_and(|bytes| bytes <= isize::MAX as usize);
    Error::invalid(match fits {
        false => format!("{name}: {count} elements of {dtype} are more than memory can hold"),
        true if start.is_null() => {
            format!("{name} is NULL, but the counts call for {count} elements of {dtype}")
        }
        true => format!(
            "{name}: {count} elements of {dtype} from {start:?} on reach beyond the end of memory"
        ),
    })
}

/// A list of `length` items that C gives.
///
/// # Safety
/// `start` is NULL, or leads to as many items, which nobody changes meanwhile.
pub(crate) unsafe fn list<'a, T>(name: &str, start: *const T, length: usize) -> Result<&'a [T]> {
    if length == 0 {
        return Ok(&[]);
    }
    if start.is_null() {
        return Err(Error::invalid(format!(
            "{name} are needed, but NULL was given"
        )));
    }
    // SAFETY: as the caller promises.
    Ok(unsafe { slice::from_raw_parts(start, length) })
}

/// A text that C gives.
///
/// # Safety
/// `text` is NULL, or ends with a 0.
pub(crate) unsafe fn string<'a>(name: &str, text: *const c_char) -> Result<&'a str> {
    if text.is_null() {
        return Err(Error::invalid(format!(
            "{name} is needed, but NULL was given"
        )));
    }
    // SAFETY: as the caller promises.
    unsafe { CStr::from_ptr(text) }
        .to_str()
        .map_err(|_| Error::invalid(format!("{name} is not valid UTF-8")))
}

/// The struct at `place`, which begins with its size. A newer caller may have a longer one, as long as it asks for
/// nothing that this version does not know.
///
/// # Safety
/// `place` is NULL, or leads to a struct of the size that it says.
pub(crate) unsafe fn sized_in<T: Copy>(name: &str, place: *const T) -> Result<T> {
    // SAFETY: as the caller promises.
    let size = unsafe { checked_size(name, place)? };
    let known = mem::size_of::<T>();
    // SAFETY: there are `size` bytes, as the caller promises, and `known` of them are ours.
    let rest = unsafe { slice::from_raw_parts(place.cast::<u8>().add(known), size - known) };
    if rest.iter().any(|byte| *byte != 0) {
        return Err(Error::unsupported(format!(
            "{name}: the program was compiled for a newer unisono and asks for something that this one does not have"
        )));
    }
    // SAFETY: it holds at least a `T`.
    Ok(unsafe { place.read() })
}

/// Writes `value` to the struct at `place`, which begins with its size and keeps it. What a newer caller has beyond
/// stays as it is.
///
/// # Safety
/// As [`sized_in`].
pub(crate) unsafe fn sized_out<T: Copy>(name: &str, place: *mut T, value: T) -> Result<()> {
    // SAFETY: as the caller promises.
    let size = unsafe { checked_size(name, place)? };
    // SAFETY: it holds at least a `T`, which begins with the size.
    unsafe {
        ptr::write(place, value);
        place.cast::<usize>().write(size);
    }
    Ok(())
}

/// # Safety
/// As [`sized_in`].
unsafe fn checked_size<T>(name: &str, place: *const T) -> Result<usize> {
    if place.is_null() {
        return Err(Error::invalid(format!(
            "{name} is needed, but NULL was given"
        )));
    }
    // SAFETY: it begins with its size.
    let size = unsafe { place.cast::<usize>().read() };
    // What is much too long was not filled in.
    if (mem::size_of::<T>()..=4096).contains(&size) {
        return Ok(size);
    }
    Err(Error::invalid(format!(
        "{name}: its size is {size}, but must be that of the struct; begin with the _INIT macro of its type"
    )))
}
