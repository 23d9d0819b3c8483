//! A device: its primary context, and what it can do.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::{CUcontext, CUdevice, CUuuid};

use super::symbols::{Symbols, numbers};
use super::{Driver, Failure, is_forked};
use crate::error::{Error, Result};

/// A device of this process, with its primary context. There is one object per device, for the life of the process.
pub struct Device {
    pub(super) driver: &'static Driver,
    number: u32,
    raw: CUdevice,
    pub(super) context: CUcontext,
    name: String,
    uuid: [u8; 16],
    multiprocessors: u32,
    memory: usize,
    has_mps: bool,
    capability: (u32, u32),
    /// Whether streams can wait for and write words of host memory; found out when first asked.
    pub(super) memory_operations: OnceLock<Result<()>>,
}

// SAFETY: the raw pointers are handles of the driver, which may be used from any thread.
unsafe impl Send for Device {}
// SAFETY: as above; everything else changes only through `OnceLock`.
unsafe impl Sync for Device {}

impl Device {
    /// The device of this number, as CUDA counts them in this process. As [`Driver::load`] and [`Driver::device`].
    ///
    /// # Errors
    /// Those of [`Driver::load`] and [`Driver::device`].
    pub fn of(number: u32) -> Result<&'static Self> {
        Driver::load()?.device(number)
    }

    pub(super) fn open(driver: &'static Driver, number: u32) -> Result<Self> {
        let symbols = &driver.symbols;
        let failed = |failure: Failure| failure.while_doing(format_args!("open device {number}"));
        let (raw, uuid) = identify(symbols, number).map_err(failed)?;
        let mut name = [0; 128];
        // SAFETY: it stores at most `name.len()` bytes, and the last is zero.
        Failure::check(unsafe {
            (symbols.device_get_name)(name.as_mut_ptr(), name.len() as i32, raw)
        })
        .map_err(failed)?;
        let attribute = |attribute| attribute_of(symbols, raw, attribute).map_err(failed);
        if attribute(numbers::ATTRIBUTE_UNIFIED_ADDRESSING)? == 0 {
            return Err(Error::unsupported(format!(
                "device {number} has no unified addressing"
            )));
        }
        let capability = (
            attribute(numbers::ATTRIBUTE_CAPABILITY_MAJOR)?,
            attribute(numbers::ATTRIBUTE_CAPABILITY_MINOR)?,
        );
        let multiprocessors = attribute(numbers::ATTRIBUTE_MULTIPROCESSORS)?.max(1);
        // Older drivers do not know it.
        let has_mps =
            attribute(numbers::ATTRIBUTE_MPS_ENABLED).is_ok_and(|is_enabled| is_enabled != 0);
        let mut memory = 0;
        // SAFETY: it stores a number.
        Failure::check(unsafe { (symbols.device_total_mem)(&mut memory, raw) }).map_err(failed)?;
        let relaxed = Relaxed::begin(driver);
        let mut context = ptr::null_mut();
        // SAFETY: it stores a handle. It is never released: see the module's documentation.
        Failure::check(unsafe { (symbols.device_primary_ctx_retain)(&mut context, raw) })
            .map_err(failed)?;
        drop(relaxed);
        Ok(Self {
            driver,
            number,
            raw,
            context,
            // C's `char` has a sign or has none, as the processor goes.
            name: name
                .iter()
                .take_while(|&&letter| letter != 0)
                .map(|letter| char::from(letter.to_ne_bytes()[0]))
                .collect(),
            uuid,
            multiprocessors,
            memory,
            has_mps,
            capability,
            memory_operations: OnceLock::new(),
        })
    }

    /// The uuid of the device with this number, without a context on it.
    pub(super) fn uuid_of(driver: &'static Driver, number: u32) -> Result<[u8; 16]> {
        let identified = identify(&driver.symbols, number);
        let (_, uuid) = identified
            .map_err(|failure| failure.while_doing(format_args!("look at device {number}")))?;
        Ok(uuid)
    }

    /// Its number in this process.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The maker's name for it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The same for the same device (or the same part of a divided one) in every process of the host.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// How many multiprocessors it has.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Whether kernels of several processes run on it at the same time, by NVIDIA's Multi-Process Service (MPS), and not in
    /// turns.
    pub(crate) fn has_mps(&self) -> bool {
        self.has_mps
    }

    /// Bytes of memory that it has, free or not.
    pub fn memory(&self) -> usize {
        self.memory
    }

    /// Its compute capability, major and minor.
    pub fn capability(&self) -> (u32, u32) {
        self.capability
    }

    /// Makes the device's context the calling thread's current one until the guard goes. Inside another guard of the same
    /// device it calls nothing. While it lives, the thread runs none of the user's code, which may change what is current.
    ///
    /// # Errors
    /// `System` when the driver has shut down or the context is lost.
    pub(crate) fn enter(&self) -> Result<Entered> {
        self.try_enter()
            .map_err(|failure| failure.while_doing(format_args!("use device {}", self.number)))
    }

    pub(super) fn try_enter(&self) -> Result<Entered, Failure> {
        let before = ENTERED.get();
        let is_current = before == Some(self.number);
        if !is_current {
            // SAFETY: the context is retained for ever; pushing it changes only the thread's stack of contexts.
            Failure::check(unsafe { (self.driver.symbols.ctx_push_current)(self.context) })?;
            ENTERED.set(Some(self.number));
        }
        Ok(Entered {
            pushed: (!is_current).then_some(self.driver),
            before,
            _thread: PhantomData,
        })
    }

    /// As [`Device::enter`], for calls that make or free something: also while a graph is being captured.
    pub(super) fn set_up(&self) -> Result<(Relaxed, Entered)> {
        let relaxed = Relaxed::begin(self.driver);
        Ok((relaxed, self.enter()?))
    }

    /// Runs `release` in the context, in a destructor. Failures are logged, unless what is released went with the
    /// context or the driver. In a forked child it does nothing.
    pub(super) fn release(&self, doing: &str, release: impl FnOnce(&Symbols) -> u32) {
        if is_forked() {
            return;
        }
        let relaxed = Relaxed::begin(self.driver);
        let result = self.try_enter().and_then(|entered| {
            let result = Failure::check(release(&self.driver.symbols));
            drop(entered);
            result
        });
        drop(relaxed);
        match result {
            Err(failure) if !failure.is_after_the_end() && !failure.is_sticky() => {
                tracing::warn!("{}", failure.while_doing(doing).message);
            }
            _ => {}
        }
    }

    /// Whether kernels of this device may use memory of `peer` directly. True for the device itself.
    ///
    /// # Errors
    /// `System` when the driver cannot tell.
    pub fn reaches(&self, peer: &Self) -> Result<bool> {
        if self.number == peer.number {
            return Ok(true);
        }
        let mut can = 0;
        // SAFETY: it stores a number.
        Failure::check(unsafe {
            (self.driver.symbols.device_can_access_peer)(&mut can, self.raw, peer.raw)
        })
        .map_err(|failure| {
            failure.while_doing(format_args!(
                "ask whether device {} reaches device {}",
                self.number, peer.number
            ))
        })?;
        Ok(can != 0)
    }

    /// Lets kernels and copies of this device use the memory of `peer` in this process. It stays so for the life of
    /// the process: other users of the context may rely on it, too.
    ///
    /// # Errors
    /// `Unsupported` when the two devices cannot reach each other.
    pub fn enable_peer(&self, peer: &Self) -> Result<()> {
        if self.number == peer.number {
            return Ok(());
        }
        let doing = format_args!(
            "let device {} use the memory of device {}",
            self.number, peer.number
        );
        if !self.reaches(peer)? {
            return Err(Failure(numbers::PEER_ACCESS_UNSUPPORTED).while_doing(doing));
        }
        let _entered = self.set_up()?;
        // SAFETY: both contexts are retained for ever.
        match unsafe { (self.driver.symbols.ctx_enable_peer_access)(peer.context, 0) } {
            numbers::SUCCESS | numbers::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => Err(Failure(code).while_doing(doing)),
        }
    }

    /// Why nothing works on this device any more in this process, once a kernel or a copy has failed and the context is lost
    /// with it. It may wait for another thread that is in the middle of a call of the driver; it may be called while graphs are
    /// captured, since it asks a stream of its own.
    pub fn lost(&self) -> Option<Error> {
        let ask = || {
            let _relaxed = Relaxed::begin(self.driver);
            let _entered = self.try_enter()?;
            let mut raw = ptr::null_mut();
            let symbols = &self.driver.symbols;
            // SAFETY: it stores a handle.
            Failure::check(unsafe {
                (symbols.stream_create)(&mut raw, numbers::STREAM_NON_BLOCKING)
            })?;
            // SAFETY: the stream was just made.
            let asked = Failure::check(unsafe { (symbols.stream_query)(raw) });
            // SAFETY: it is not used again.
            let destroyed = Failure::check(unsafe { (symbols.stream_destroy)(raw) });
            asked.and(destroyed)
        };
        match ask() {
            Err(failure) if failure.is_sticky() || failure.is_after_the_end() => {
                Some(failure.while_doing(format_args!("look after device {}", self.number)))
            }
            _ => None,
        }
    }
}

/// The device of this number, and its uuid.
fn identify(symbols: &Symbols, number: u32) -> Result<(CUdevice, [u8; 16]), Failure> {
    let mut raw: CUdevice = 0;
    // SAFETY: it stores a number; the number is one of a device that exists.
    Failure::check(unsafe { (symbols.device_get)(&mut raw, number as i32) })?;
    let mut uuid = CUuuid { bytes: [0; 16] };
    // SAFETY: it stores 16 bytes.
    Failure::check(unsafe { (symbols.device_get_uuid)(&mut uuid, raw) })?;
    Ok((raw, uuid.bytes.map(|byte| byte.to_ne_bytes()[0])))
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {})", self.number, self.name)
    }
}

fn attribute_of(symbols: &Symbols, raw: CUdevice, attribute: u32) -> Result<u32, Failure> {
    let mut value = 0;
    // SAFETY: it stores a number.
    Failure::check(unsafe { (symbols.device_get_attribute)(&mut value, attribute, raw) })?;
    Ok(u32::try_from(value).unwrap_or(0))
}

thread_local! {
    /// The device whose context a guard of this thread has made current.
    static ENTERED: Cell<Option<u32>> = const { Cell::new(None) };
}

/// The device's context is current for this thread; dropping it brings back the one before.
pub(crate) struct Entered {
    /// The driver that pushed it, unless it was current already.
    pushed: Option<&'static Driver>,
    /// As [`ENTERED`] was.
    before: Option<u32>,
    /// The stack of contexts belongs to the thread.
    _thread: PhantomData<*mut ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let Some(driver) = self.pushed else {
            return;
        };
        ENTERED.set(self.before);
        let mut context = ptr::null_mut();
        // SAFETY: it takes what `enter` pushed: guards of a thread go in the reverse order of their making, as they
        // are only ever held by a block. A failure (the driver has shut down) leaves nothing to mend.
        let _ = unsafe { (driver.symbols.ctx_pop_current)(&mut context) };
    }
}

/// While it lives, this thread may do what is forbidden while some graph is being captured: allocate and free.
pub(super) struct Relaxed {
    driver: &'static Driver,
    before: u32,
    /// The mode belongs to the thread.
    _thread: PhantomData<*mut ()>,
}

impl Relaxed {
    pub(super) fn begin(driver: &'static Driver) -> Self {
        let mut relaxed = Self {
            driver,
            before: numbers::CAPTURE_MODE_RELAXED,
            _thread: PhantomData,
        };
        relaxed.exchange();
        relaxed
    }

    fn exchange(&mut self) {
        // SAFETY: it swaps the mode of this thread with the one given. It fails only when the driver has shut
        // down, and then changes nothing.
        let _ =
            unsafe { (self.driver.symbols.thread_exchange_stream_capture_mode)(&mut self.before) };
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        self.exchange();
    }
}
