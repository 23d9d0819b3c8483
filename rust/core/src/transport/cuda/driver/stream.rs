//! Streams: the caller's, and own ones.

use std::ffi::c_void;
use std::fmt;
use std::ptr;

use cudarc::driver::sys::{
    CUDA_MEMCPY2D, CUmemorytype, CUstream, CUstreamBatchMemOpParams,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st as WaitParams,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st__bindgen_ty_1 as WaitValue,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st as WriteParams,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st__bindgen_ty_1 as WriteValue,
    CUstreamBatchMemOpType,
};

use super::device::Relaxed;
use super::symbols::numbers;
use super::{Device, Driver, Event, Failure, Function};
use crate::error::{Error, Result};
use crate::types::DeviceStream;

/// The most memory operations in one call: the driver takes fewer than 256.
const MOST_OPERATIONS: usize = 255;
/// From this number of bytes on the driver has an engine for copies write data from the host (an H200, driver 580).
const BY_ENGINE: usize = 2048;
/// The handles of the default streams: of the context (also as 0), and of each thread.
const LEGACY: usize = 1;
pub(super) const PER_THREAD: usize = 2;

/// A queue of work of a device.
///
/// A call enqueues and returns. Handles 0 and 1 are the context's legacy default stream, which waits for all other
/// blocking streams and they for it; 2 is the default stream *of the calling thread*, so a `Stream` made of it means
/// another one on another thread, and what belongs to one operation is enqueued by one thread.
pub struct Stream {
    pub(super) device: &'static Device,
    pub(super) raw: CUstream,
    /// Made here, and destroyed on drop.
    own: bool,
}

// SAFETY: the handle may be used from any thread; the driver serialises.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// Which stream one is, for the life of the process. Handles do not tell: 0 and 1 are the same stream, 2 is another one in
/// each thread, and the handle of a stream that was destroyed may be given out again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamIdentity {
    /// The legacy default stream of a device.
    Legacy(u32),
    /// The stream of this number, which the driver gave it and never gives again.
    Numbered(u64),
}

/// A 32-bit word of registered host memory, or of device memory, written or awaited by a stream. Addresses are the
/// device's and multiples of 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryOperation {
    /// Stores `value`, visible after all that the stream wrote before, to devices and the host.
    Write {
        /// The word.
        address: u64,
        /// The value that is stored.
        value: u32,
    },
    /// Waits until the word has a bit of `mask`.
    WaitAny {
        /// The word.
        address: u64,
        /// The bits.
        mask: u32,
    },
    /// Waits until the word is `value` or later, in the cyclic order: their difference, as a signed number, is not
    /// negative.
    WaitAtLeast {
        /// The word.
        address: u64,
        /// The first number that will do.
        value: u32,
    },
}

impl Stream {
    /// The caller's stream. It must stay alive while this object is used; dropping this does not end it.
    ///
    /// # Errors
    /// Those of [`Driver::load`] and [`Driver::device`]; `InvalidArgument` when the stream belongs to another device
    /// or to another context than the device's primary one, or is none as far as the driver can tell. A stream that is being
    /// captured is not asked.
    pub fn of(stream: DeviceStream) -> Result<Self> {
        match stream.stream > PER_THREAD {
            true => Self::of_now(stream).map(|(found, _)| found),
            false => Self::named(stream),
        }
    }

    /// As [`Stream::of`], and whether the stream is being captured now: [`Stream::is_capturing`].
    ///
    /// # Errors
    /// As [`Stream::of`] and [`Stream::is_capturing`].
    pub(crate) fn of_now(stream: DeviceStream) -> Result<(Self, bool)> {
        let found = Self::named(stream)?;
        let is_captured = found.is_capturing()?;
        // The driver ends a capture when its stream is asked for the context; the capture belongs to the caller.
        if stream.stream > PER_THREAD && !is_captured {
            check_context(found.device, found.raw)?;
        }
        Ok((found, is_captured))
    }

    fn named(stream: DeviceStream) -> Result<Self> {
        Ok(Self {
            device: Driver::load()?.device(stream.device)?,
            raw: ptr::with_exposed_provenance_mut(stream.stream),
            own: false,
        })
    }

    /// Which stream it is; for the per-thread default stream, which one it is in the calling thread. `None`, which is
    /// like no other, where the driver cannot tell: while it is being captured (to be asked would end that), and of drivers
    /// that number no streams.
    pub fn identity(&self) -> Option<StreamIdentity> {
        match self.raw.addr() > LEGACY && self.is_capturing().ok()? {
            true => None,
            false => self.identity_outside_captures(),
        }
    }

    /// As [`Stream::identity`], of a stream that is known not to be captured.
    pub(crate) fn identity_outside_captures(&self) -> Option<StreamIdentity> {
        if self.raw.addr() <= LEGACY {
            return Some(StreamIdentity::Legacy(self.device.number()));
        }
        let ask = self.device.driver.symbols.stream_get_id?;
        let mut number = 0;
        // SAFETY: it stores a number; the stream is alive.
        self.call("ask which stream one is", |_| unsafe {
            ask(self.raw, &mut number)
        })
        .ok()?;
        Some(StreamIdentity::Numbered(number))
    }

    /// A new stream, which does not wait for the legacy default stream nor that for it. May be made during a capture.
    ///
    /// # Errors
    /// `System`.
    pub fn create(device: &'static Device) -> Result<Self> {
        Self::make(device, |symbols, raw| {
            // SAFETY: it stores a handle.
            unsafe { (symbols.stream_create)(raw, numbers::STREAM_NON_BLOCKING) }
        })
    }

    /// As [`Stream::create`], of the highest priority that the device has.
    ///
    /// # Errors
    /// `System`.
    pub(crate) fn create_urgent(device: &'static Device) -> Result<Self> {
        let (flags, priority) = (numbers::STREAM_NON_BLOCKING, numbers::STREAM_MOST_URGENT);
        Self::make(device, |symbols, raw| {
            // SAFETY: it stores a handle.
            unsafe { (symbols.stream_create_with_priority)(raw, flags, priority) }
        })
    }

    fn make(
        device: &'static Device,
        create: impl FnOnce(&super::Symbols, &mut CUstream) -> u32,
    ) -> Result<Self> {
        let _entered = device.set_up()?;
        let mut raw = ptr::null_mut();
        let code = create(&device.driver.symbols, &mut raw);
        Failure::check(code).map_err(|failure| {
            failure.while_doing(format_args!("make a stream on device {}", device.number()))
        })?;
        Ok(Self {
            device,
            raw,
            own: true,
        })
    }

    /// The device that it belongs to.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// As it is named in requests.
    pub fn handle(&self) -> DeviceStream {
        DeviceStream {
            device: self.device.number(),
            stream: self.raw.expose_provenance(),
        }
    }

    /// Whether what is enqueued becomes part of a graph now, instead of being carried out.
    ///
    /// # Errors
    /// `InvalidArgument` when the capture has failed already, or when this is the legacy default stream and another
    /// one is being captured; `System`.
    pub fn is_capturing(&self) -> Result<bool> {
        let mut status = 0;
        self.call("ask whether a stream is being captured", |symbols| {
            // SAFETY: it stores a number; the stream is alive.
            unsafe { (symbols.stream_is_capturing)(self.raw, &mut status) }
        })?;
        match status {
            numbers::CAPTURE_STATUS_NONE => Ok(false),
            numbers::CAPTURE_STATUS_INVALIDATED => Err(Error::invalid(
                "the capture of this stream has failed: end it and begin again",
            )),
            _ => Ok(true),
        }
    }

    /// Copies `bytes` bytes. Both addresses are of device memory (own, imported, of a peer with access) or of
    /// registered host memory ([`Registered`](super::Registered), [`Pinned`](super::Pinned)), as the device knows it, and
    /// one at least of a device: the driver copies from host to host while the caller waits. May be captured.
    ///
    /// # Errors
    /// `System`, with the addresses.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        if bytes == 0 || to == from {
            return Ok(());
        }
        self.call(
            format_args!("copy {bytes} bytes from {from:#x} to {to:#x}"),
            // SAFETY: the addresses are used by the device when the stream comes to it. That they are of memory
            // which lives until then is what the maker of the request, or the owner of the object they come from,
            // has promised (see `transport::cuda`).
            |symbols| unsafe { (symbols.memcpy_async)(to, from, bytes, self.raw) },
        )
    }

    /// As [`Stream::copy`], from registered host memory to the device's, by an engine for copies also where the bytes are few:
    /// without waiting until it is this process's turn on a device that others use. (The driver has fewer than 2048 bytes
    /// written by the engine of kernels, unless they are more than one row.)
    ///
    /// # Errors
    /// As [`Stream::copy`].
    pub(crate) fn copy_from_host(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        if !(2..BY_ENGINE).contains(&bytes) {
            return self.copy(to, from, bytes);
        }
        let half = bytes / 2;
        self.copy_rows(to, from, half)?;
        match bytes % 2 {
            0 => Ok(()),
            // The last two; one of them has been copied.
            _ => {
                let before = bytes as u64 - 2;
                self.copy_rows(to + before, from + before, 1)
            }
        }
    }

    /// Copies two rows of `width` bytes, one right after the other.
    fn copy_rows(&self, to: u64, from: u64, width: usize) -> Result<()> {
        let rows = CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
            srcHost: ptr::null(),
            srcDevice: from,
            srcArray: ptr::null_mut(),
            srcPitch: width,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
            dstHost: ptr::null_mut(),
            dstDevice: to,
            dstArray: ptr::null_mut(),
            dstPitch: width,
            WidthInBytes: width,
            Height: 2,
        };
        self.call(
            format_args!("copy twice {width} bytes from {from:#x} to {to:#x}"),
            // SAFETY: as in `copy`; the driver reads the rows' description before it returns.
            |symbols| unsafe { (symbols.memcpy_2d_async)(&raw const rows, self.raw) },
        )
    }

    /// Writes `bytes` to device memory, after what is in the stream, and waits until they are there. Not during its
    /// capture.
    ///
    /// # Errors
    /// `System`.
    pub fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        let _relaxed = Relaxed::begin(self.device.driver);
        self.call(
            format_args!("write {} bytes to {to:#x}", bytes.len()),
            // SAFETY: the bytes are borrowed until the stream has been waited for, below.
            |symbols| unsafe {
                (symbols.memcpy_to_device)(to, bytes.as_ptr().cast(), bytes.len(), self.raw)
            },
        )?;
        self.synchronize()
    }

    /// Reads device memory into `bytes`, after what is in the stream, and waits until they are there. Not during its
    /// capture.
    ///
    /// # Errors
    /// `System`.
    pub fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        let _relaxed = Relaxed::begin(self.device.driver);
        self.call(
            format_args!("read {} bytes from {from:#x}", bytes.len()),
            // SAFETY: as in `write`, and the borrow is exclusive.
            |symbols| unsafe {
                (symbols.memcpy_to_host)(bytes.as_mut_ptr().cast(), from, bytes.len(), self.raw)
            },
        )?;
        self.synchronize()
    }

    /// Writes and awaits words, one operation after the other. May be captured: a replayed graph then does the same
    /// with the same values. A wait that nothing satisfies stops the stream for good.
    ///
    /// # Errors
    /// `Unsupported` where the device has no memory operations ([`Device::memory_operations`]); `System`.
    pub fn operate(&self, operations: &[MemoryOperation]) -> Result<()> {
        for part in operations.chunks(MOST_OPERATIONS) {
            let mut params: Vec<_> = part.iter().map(|operation| operation.params()).collect();
            self.call(
                format_args!("enqueue {} memory operations", part.len()),
                // SAFETY: `part.len()` initialised elements; the driver reads (and may mark) them before it returns. The words
                // belong to registered memory that the callers (`flags`, `Device`) keep.
                |symbols| unsafe {
                    (symbols.stream_batch_mem_op)(
                        self.raw,
                        part.len() as u32,
                        params.as_mut_ptr(),
                        0,
                    )
                },
            )?;
        }
        Ok(())
    }

    /// Puts `event` at the end of what is in the stream now. During a capture the event becomes part of the capture:
    /// it cannot be queried, and only streams of the same capture can wait for it.
    ///
    /// # Errors
    /// `System`.
    pub fn record(&self, event: &Event) -> Result<()> {
        debug_assert_eq!(self.device.number(), event.device.number());
        // SAFETY: both handles are alive.
        self.call("record an event", |symbols| unsafe {
            (symbols.event_record)(event.raw, self.raw)
        })
    }

    /// Has all that is enqueued from now on wait for the place where `event` was last recorded; does nothing if it never was.
    /// The event may be of another device. An uncaptured event that a captured stream waits for is an error.
    ///
    /// # Errors
    /// `InvalidArgument` when captured and uncaptured work would meet; `System`.
    pub fn wait(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles are alive.
        self.call("wait for an event", |symbols| unsafe {
            (symbols.stream_wait_event)(self.raw, event.raw, 0)
        })
    }

    /// Whether it has done all that was enqueued. Not during its capture.
    ///
    /// # Errors
    /// `System` when work in it failed.
    pub fn is_idle(&self) -> Result<bool> {
        let _entered = self.device.set_up()?;
        // SAFETY: the handle is alive.
        match unsafe { (self.device.driver.symbols.stream_query)(self.raw) } {
            numbers::SUCCESS => Ok(true),
            numbers::NOT_READY => Ok(false),
            code => Err(Failure(code).while_doing("ask whether a stream is done")),
        }
    }

    /// Waits, on the calling thread, until it has done all that was enqueued. Not during its capture.
    ///
    /// # Errors
    /// `System` when work in it failed.
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.device.set_up()?;
        // SAFETY: the handle is alive.
        let code = unsafe { (self.device.driver.symbols.stream_synchronize)(self.raw) };
        Failure::check(code).map_err(|failure| failure.while_doing("wait for a stream"))
    }

    /// Launches a kernel over a grid of `blocks` (x, y) with `threads` threads each. May be captured: the parameters
    /// are copied.
    ///
    /// # Safety
    /// `parameters` point to values of the types that the kernel declares, in its order; what the kernel does with
    /// them stays within memory that lives until the stream has got past it.
    pub(in crate::transport::cuda) unsafe fn launch(
        &self,
        function: Function,
        (blocks, threads): ((u32, u32), u32),
        parameters: &mut [*mut c_void],
        doing: impl fmt::Display,
    ) -> Result<()> {
        let (x, y) = blocks;
        self.call(doing, |symbols| {
            // SAFETY: the caller vouches for the parameters; the function belongs to a module of this device, which
            // is never unloaded.
            unsafe {
                (symbols.launch_kernel)(
                    function.raw,
                    x,
                    y,
                    1,
                    threads,
                    1,
                    1,
                    0,
                    self.raw,
                    parameters.as_mut_ptr(),
                    ptr::null_mut(),
                )
            }
        })
    }

    /// Makes a call in the device's context.
    #[inline]
    pub(super) fn call(
        &self,
        doing: impl fmt::Display,
        call: impl FnOnce(&super::Symbols) -> u32,
    ) -> Result<()> {
        let entered = self.device.enter()?;
        let code = call(&self.device.driver.symbols);
        drop(entered);
        Failure::check(code).map_err(|failure| {
            failure.while_doing(format_args!("{doing} on device {}", self.device.number()))
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.own {
            // SAFETY: the handle is not used again. The driver lets work that is in the stream end.
            self.device.release("destroy a stream", |symbols| unsafe {
                (symbols.stream_destroy)(self.raw)
            });
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.raw.addr() {
            0 | LEGACY => write!(f, "Stream(device {}, legacy)", self.device.number()),
            PER_THREAD => write!(f, "Stream(device {}, per thread)", self.device.number()),
            handle => write!(f, "Stream(device {}, {handle:#x})", self.device.number()),
        }
    }
}

impl MemoryOperation {
    fn params(self) -> CUstreamBatchMemOpParams {
        let wait = |address, value, flags| CUstreamBatchMemOpParams {
            waitValue: WaitParams {
                operation: CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_32,
                address,
                __bindgen_anon_1: WaitValue { value },
                flags,
                alias: 0,
            },
        };
        match self {
            Self::Write { address, value } => CUstreamBatchMemOpParams {
                writeValue: WriteParams {
                    operation: CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32,
                    address,
                    __bindgen_anon_1: WriteValue { value },
                    flags: 0,
                    alias: 0,
                },
            },
            Self::WaitAny { address, mask } => wait(address, mask, numbers::WAIT_VALUE_AND),
            Self::WaitAtLeast { address, value } => wait(address, value, numbers::WAIT_VALUE_GEQ),
        }
    }
}

/// Refuses a stream that does not belong to the device's primary context.
fn check_context(device: &'static Device, raw: CUstream) -> Result<()> {
    let symbols = &device.driver.symbols;
    let entered = device.enter()?;
    let mut context = ptr::null_mut();
    // SAFETY: it stores a handle. That `raw` is a stream is what the request's maker promised.
    Failure::check(unsafe { (symbols.stream_get_ctx)(raw, &mut context) }).map_err(|failure| {
        failure.while_doing(format_args!(
            "look at the stream {:#x} that was given with device {}",
            raw.addr(),
            device.number()
        ))
    })?;
    drop(entered);
    if context == device.context {
        return Ok(());
    }
    let mut number = -1;
    // SAFETY: the context is alive, since its stream is; it is taken off again.
    unsafe {
        if (symbols.ctx_push_current)(context) == numbers::SUCCESS {
            (symbols.ctx_get_device)(&mut number);
            (symbols.ctx_pop_current)(&mut context);
        }
    }
    Err(Error::invalid(
        if number >= 0 && number.cast_unsigned() != device.number() {
            format!(
                "the stream belongs to device {number}, the buffers to device {}: give a stream of the buffers' device",
                device.number()
            )
        } else {
            format!(
                "the stream belongs to a context of its own: only streams of the primary context of device {} can be \
                 used, which is what the CUDA runtime and frameworks make",
                device.number()
            )
        },
    ))
}
