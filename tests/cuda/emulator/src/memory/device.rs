//! The memory of a device: one memfd for each device and process.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::{Kind, Region, ipc};
use crate::abi::DevicePointer;
use crate::context::Context;
use crate::settings::settings;
use crate::status::{Outcome, Status};

pub(super) const PAGE: usize = 4096;

/// Allocations up to this size are filled with this byte when nothing else is asked for: new memory holds anything.
const FILLED_ANYWAY: usize = 1 << 20;
const ANYTHING: u8 = 0xCD;

/// Addresses of devices and imports: each device has a share, the last one is for imports.
const SHARE: usize = 1 << 40;
const SHARES: usize = 17;

/// The memory of one device in this process.
pub(super) struct Pool {
    pub(super) file: OwnedFd,
    pub(super) capacity: usize,
    /// Where the whole file is mapped.
    pub(super) mapped: usize,
    base: DevicePointer,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Pages taken, by offset: those of each allocation and one behind it, so that overruns fall into a hole.
    taken: BTreeMap<usize, usize>,
    next: usize,
    used: usize,
    peak: usize,
    count: usize,
}

/// The addresses that only the driver hands out.
pub(crate) fn reserved() -> Range<u64> {
    static RESERVED: OnceLock<Range<u64>> = OnceLock::new();
    RESERVED
        .get_or_init(|| {
            let bytes = SHARE * SHARES;
            // Another place in every process, so that an address from a peer is never right by chance.
            let hint = 0x1000_0000_0000 + (std::process::id() as usize % 1024) * (64 << 20);
            let start = map(hint, bytes, libc::PROT_NONE, None, 0)
                .expect("the emulator reserves addresses for device memory");
            start as u64..(start + bytes) as u64
        })
        .clone()
}

/// The first address of the share number `share`.
pub(super) fn share(share: usize) -> Range<u64> {
    let start = reserved().start + (share * SHARE) as u64;
    start..start + SHARE as u64
}

/// The share where imports lie.
pub(super) const IMPORTS: usize = SHARES - 1;

/// The pool of a device.
pub(super) fn pool(device: usize) -> Outcome<&'static Pool> {
    static POOLS: [OnceLock<Option<Pool>>; SHARES - 1] = [const { OnceLock::new() }; SHARES - 1];
    let pool = POOLS.get(device).ok_or(Status::INVALID_DEVICE)?;
    let pool = pool.get_or_init(|| Pool::new(device));
    pool.as_ref().ok_or(Status::OUT_OF_MEMORY)
}

impl Pool {
    fn new(device: usize) -> Option<Self> {
        let capacity = settings().memory.min(SHARE).next_multiple_of(PAGE);
        // SAFETY: the name is a C string; the call reads nothing else.
        let file = unsafe { libc::memfd_create(c"cuda-emulator".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return None;
        }
        // SAFETY: the descriptor is new and has no other owner.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        let whole = capacity + ipc::LEDGER_BYTES;
        // SAFETY: the call takes no pointers.
        if unsafe { libc::ftruncate(file.as_raw_fd(), whole as libc::off_t) } != 0 {
            return None;
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let mapped = map(0, whole, protection, Some(file.as_raw_fd()), 0)?;
        Some(Self {
            file,
            capacity,
            mapped,
            base: share(device).start,
            state: Mutex::new(State::default()),
        })
    }

    /// Where an address of this pool is in its file.
    pub(super) fn offset(&self, address: DevicePointer) -> usize {
        (address - self.base) as usize
    }

    fn take(&self, bytes: usize) -> Outcome<usize> {
        let mut state = self.state.lock();
        let pages = bytes.next_multiple_of(PAGE) + 2 * PAGE;
        if state.used + bytes > self.capacity {
            return Err(Status::OUT_OF_MEMORY);
        }
        let from = if settings().reuse { 0 } else { state.next };
        let start = state
            .gap(from, pages, self.capacity)
            .or_else(|| state.gap(0, pages, self.capacity))
            .ok_or(Status::OUT_OF_MEMORY)?;
        state.taken.insert(start, pages);
        state.next = start + pages;
        state.used += bytes;
        state.peak = state.peak.max(state.used);
        // Small allocations begin where the driver's do, at any multiple of 512.
        let inside = if bytes < 1 << 20 {
            state.count % 8 * 512
        } else {
            0
        };
        state.count += 1;
        Ok(start + inside)
    }

    fn give_back(&self, offset: usize, bytes: usize) {
        let start = offset & !(PAGE - 1);
        let mut state = self.state.lock();
        if let Some(pages) = state.taken.remove(&start) {
            state.used -= bytes;
            let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // SAFETY: the call takes no pointers; the pages belong to the allocation that ends here.
            unsafe {
                libc::fallocate(
                    self.file.as_raw_fd(),
                    hole,
                    start as libc::off_t,
                    pages as libc::off_t,
                );
            }
        }
    }
}

impl State {
    /// The first place at or after `from` where `bytes` bytes are free.
    fn gap(&self, from: usize, bytes: usize, capacity: usize) -> Option<usize> {
        let before = self.taken.range(..from).next_back();
        let mut start = before.map_or(from, |(&at, &pages)| from.max(at + pages));
        for (&at, &pages) in self.taken.range(from..) {
            if at >= start + bytes {
                break;
            }
            start = at + pages;
        }
        (start + bytes <= capacity).then_some(start)
    }
}

/// Allocates memory of the context's device.
pub(crate) fn allocate(context: &Arc<Context>, bytes: usize) -> Outcome<DevicePointer> {
    if bytes == 0 {
        return Err(Status::INVALID_VALUE);
    }
    let pool = pool(context.device)?;
    let offset = pool.take(bytes)?;
    let host = pool.mapped + offset;
    let fill = settings()
        .fill
        .or((bytes <= FILLED_ANYWAY).then_some(ANYTHING));
    if let Some(byte) = fill {
        // SAFETY: the pages were just taken for these bytes and no other code has the address yet.
        unsafe { std::ptr::write_bytes(host as *mut u8, byte, bytes) };
    }
    let address = pool.base + offset as u64;
    let region = Region::new(Kind::Device, context, address, host, bytes);
    super::insert(&region);
    Ok(address)
}

/// Frees memory once everything in the context is done, as the driver does.
///
/// # Errors
/// `INVALID_VALUE` for anything but the first address of an allocation.
pub(crate) fn free(address: DevicePointer) -> Outcome {
    let (region, offset) = super::find(address).ok_or(Status::INVALID_VALUE)?;
    if region.kind != Kind::Device || offset != 0 {
        return Err(Status::INVALID_VALUE);
    }
    region.context.synchronize()?;
    take_back(address).ok_or(Status::INVALID_VALUE)
}

pub(super) fn take_back(address: DevicePointer) -> Option<()> {
    let region = super::remove(address, Kind::Device)?;
    let pool = pool(region.device).ok()?;
    ipc::forget_export(&region);
    pool.give_back(pool.offset(address), region.bytes);
    Some(())
}

/// Bytes of a device that this process has allocated.
pub(crate) fn in_use(device: usize) -> usize {
    pool(device).map_or(0, |pool| pool.state.lock().used)
}

/// The most bytes this process has had allocated, all devices together.
pub(crate) fn peak() -> usize {
    let devices = 0..crate::context::visible_devices().len();
    devices
        .filter_map(|device| pool(device).ok())
        .map(|pool| pool.state.lock().peak)
        .sum()
}

/// Maps memory, near `hint` if that is free; without a file it is private.
pub(super) fn map(
    hint: usize,
    bytes: usize,
    protection: i32,
    file: Option<i32>,
    offset: usize,
) -> Option<usize> {
    let sharing = match file {
        Some(_) => libc::MAP_SHARED,
        None => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    };
    // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing is mapped at.
    let start = unsafe {
        libc::mmap(
            hint as *mut libc::c_void,
            bytes,
            protection,
            sharing | libc::MAP_NORESERVE,
            file.unwrap_or(-1),
            offset as libc::off_t,
        )
    };
    (start != libc::MAP_FAILED).then_some(start as usize)
}

/// Unmaps what [`map`] mapped.
pub(super) fn unmap(start: usize, bytes: usize) {
    // SAFETY: the callers unmap what they mapped themselves, once, after the regions there are gone from the table.
    unsafe { libc::munmap(start as *mut libc::c_void, bytes) };
}
