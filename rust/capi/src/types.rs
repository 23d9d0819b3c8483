//! Arguments from C, checked: numbers of enumerations, sized structs, texts, times, addresses with counts.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::mem;
use std::ptr;
use std::slice;
use std::time::Duration;

use unisono::Received;
use unisono::buffer::Memory;
use unisono::cuda;
use unisono::error::{Error, Result};
use unisono::types::{DataType, DeviceStream, Rank, ReduceOp};

use crate::sized::{Given, Growing, sized_in};

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
    pub received: *mut usize,
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

// SAFETY: the size comes first.
unsafe impl Growing for Options {
    const FIRST_SIZE: usize = 40;
}

// SAFETY: numbers and addresses that are not dereferenced here: each value of them is valid.
unsafe impl Given for Options {
    const INITIAL: Self = Self {
        size: mem::size_of::<Self>(),
        stream: ptr::null_mut(),
        timeout: 0.0,
        factor: 1.0,
        received: ptr::null_mut(),
    };
}

/// The options of a call, checked, and what its buffers add to them.
pub(crate) struct Checked {
    pub(crate) timeout: Option<Duration>,
    /// Where the number of received elements goes, or NULL.
    pub(crate) received: *mut usize,
    factor: f64,
    stream: Option<usize>,
    /// The device that the buffers lie on, once one has been seen.
    device: Cell<Option<u32>>,
    /// Whether it has to be looked where buffers lie.
    looks: bool,
}

impl Checked {
    /// # Safety
    /// `options` is NULL, or leads to a struct of the size that it says.
    #[inline]
    pub(crate) unsafe fn new(options: *const Options) -> Result<Self> {
        if options.is_null() {
            return Ok(Self {
                timeout: None,
                received: ptr::null_mut(),
                factor: Options::INITIAL.factor,
                stream: None,
                device: Cell::new(None),
                looks: cuda::may_be_in_use(),
            });
        }
        // SAFETY: as the caller promises.
        Self::of(unsafe { sized_in("options", options)? })
    }

    fn of(options: Options) -> Result<Self> {
        let timeout = match options.timeout {
            0.0 => None,
            // Zero is no limit to the core, and must not come of a very short one.
            given => Some(match seconds("the timeout of the options", given)? {
                Some(limit) => limit.max(Duration::from_nanos(1)),
                None => Duration::ZERO,
            }),
        };
        let stream = match options.stream.expose_provenance() {
            0 => None,
            DEFAULT_STREAM => Some(0),
            handle => Some(handle),
        };
        Ok(Self {
            timeout,
            received: options.received,
            factor: options.factor,
            stream,
            device: Cell::new(None),
            looks: stream.is_some() || cuda::may_be_in_use(),
        })
    }

    /// Whether the call is one of memory of the host that has no time limit of its own.
    #[inline]
    pub(crate) fn are_plain(&self) -> bool {
        self.timeout.is_none() && self.stream.is_none()
    }

    /// Whether the buffers are memory of a device.
    #[inline]
    pub(crate) fn have_stream(&self) -> bool {
        self.stream.is_some()
    }

    /// The buffer of `count` elements from `start` on, to be read or written.
    #[inline(always)]
    pub(crate) fn buffer(
        &self,
        name: &'static str,
        start: *const c_void,
        count: usize,
        dtype: DataType,
    ) -> Result<Buffer> {
        let buffer = Buffer::new(name, start, count, dtype)?;
        if self.looks && buffer.bytes > 0 {
            self.look(name, start.addr())?;
        }
        Ok(buffer)
    }

    /// Refuses a buffer that does not lie where the options say.
    #[cold]
    fn look(&self, name: &'static str, start: usize) -> Result<()> {
        if self.stream.is_none() {
            return match cuda::device_if_in_use(start) {
                None => Ok(()),
                Some(device) => Err(Error::invalid(format!(
                    "{name} is memory of CUDA device {device}, but the options name no stream: name the one in whose \
                     order this is to happen, or UNISONO_DEFAULT_STREAM"
                ))),
            };
        }
        // The core looks at all of them, and knows then which device it must be.
        if self.device.get().is_none() {
            let device = cuda::device_of(start)?.ok_or_else(|| {
                Error::invalid(format!(
                    "{name} is memory of the host, but the options name a stream, with which all buffers are memory of \
                     a CUDA device"
                ))
            })?;
            self.device.set(Some(device));
        }
        Ok(())
    }

    /// The stream, with the device that the buffers lie on; `None` for memory of the host.
    pub(crate) fn device_stream(&self) -> Result<Option<DeviceStream>> {
        let Some(stream) = self.stream else {
            return Ok(None);
        };
        let device = match self.device.get() {
            Some(device) => device,
            None => cuda::device_of_stream(stream)?,
        };
        Ok(Some(DeviceStream { device, stream }))
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

/// `UNISONO_DEFAULT_STREAM`, which is also CUDA's own `CU_STREAM_LEGACY`.
pub const DEFAULT_STREAM: usize = 1;

/// The time that stands for no limit.
pub const FOREVER: f64 = -1.0;

/// Where a wait needs an end, for ever ends after a year.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);

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
    #[inline(always)]
    fn new(name: &str, start: *const c_void, count: usize, dtype: DataType) -> Result<Self> {
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
        // SAFETY: the caller of a function of the header promises that its buffers are what the header asks for, until
        // the operation that gets this has ended. Only such calls make a `Buffer`.
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
/// `start` is NULL, or leads to as many items, which do not change meanwhile.
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

/// Elements of a message.
pub(crate) fn elements(received: Received) -> usize {
    received.bytes / received.dtype.size()
}
