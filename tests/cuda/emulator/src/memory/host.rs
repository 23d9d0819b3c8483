//! Host memory that streams may use: the driver's own (pinned) and the caller's (registered).

use std::sync::Arc;

use parking_lot::Mutex;

use super::device::{IMPORTS, PAGE, map, share, unmap};
use super::{Kind, Region};
use crate::abi::DevicePointer;
use crate::context::Context;
use crate::settings::settings;
use crate::status::{Outcome, Status};

/// Allocates host memory that streams reach under the same address.
pub(crate) fn allocate_pinned(context: &Arc<Context>, bytes: usize) -> Outcome<usize> {
    if bytes == 0 {
        return Err(Status::INVALID_VALUE);
    }
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let start = map(0, bytes, protection, None, 0).ok_or(Status::OUT_OF_MEMORY)?;
    let region = Region::new(Kind::Pinned, context, start as u64, start, bytes);
    super::insert(&region);
    Ok(start)
}

/// Frees what [`allocate_pinned`] gave, once everything in the context is done.
///
/// # Errors
/// `INVALID_VALUE` for any other address.
pub(crate) fn free_pinned(address: usize) -> Outcome {
    region(address, Kind::Pinned)
        .ok_or(Status::INVALID_VALUE)?
        .context
        .synchronize()?;
    give_back(address as u64).ok_or(Status::INVALID_VALUE)
}

/// Lets streams use host memory of the caller.
///
/// # Errors
/// `INVALID_VALUE` when it is not all mapped, `HOST_MEMORY_ALREADY_REGISTERED` when one of its pages is registered.
pub(crate) fn register(context: &Arc<Context>, address: usize, bytes: usize) -> Outcome {
    if address == 0 || bytes == 0 {
        return Err(Status::INVALID_VALUE);
    }
    let first = address & !(PAGE - 1);
    let end = (address + bytes).next_multiple_of(PAGE);
    if !is_mapped(first, end - first) {
        return Err(Status::INVALID_VALUE);
    }
    // The driver pins pages, so two registrations in one page are refused, too.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock();
    if super::overlaps(first as u64, end as u64) {
        return Err(Status::HOST_MEMORY_ALREADY_REGISTERED);
    }
    let seen = if settings().separate_host_pointers {
        address_for(end - first) + (address - first) as u64
    } else {
        address as u64
    };
    let region = Region::new(Kind::Registered, context, seen, address, bytes);
    super::insert(&region);
    Ok(())
}

/// Ends a registration, once everything in the context is done.
///
/// # Errors
/// `HOST_MEMORY_NOT_REGISTERED` for anything but the first address of one.
pub(crate) fn unregister(address: usize) -> Outcome {
    region(address, Kind::Registered)
        .ok_or(Status::HOST_MEMORY_NOT_REGISTERED)?
        .context
        .synchronize()?;
    let_go(address as u64).ok_or(Status::HOST_MEMORY_NOT_REGISTERED)
}

/// Where streams see an address of pinned or registered memory.
///
/// # Errors
/// `INVALID_VALUE` for other memory.
pub(crate) fn device_pointer(address: usize) -> Outcome<DevicePointer> {
    let (region, _) = super::find(address as u64)
        .filter(|(region, _)| region.is_host())
        .ok_or(Status::INVALID_VALUE)?;
    let offset = address
        .checked_sub(region.host)
        .filter(|&offset| offset < region.bytes)
        .ok_or(Status::INVALID_VALUE)?;
    Ok(region.address + offset as u64)
}

fn region(address: usize, kind: Kind) -> Option<Arc<Region>> {
    let (region, _) = super::find(address as u64)?;
    (region.kind == kind && region.host == address).then_some(region)
}

pub(super) fn give_back(address: u64) -> Option<()> {
    let region = super::remove(address, Kind::Pinned)?;
    unmap(region.host, region.bytes);
    Some(())
}

pub(super) fn let_go(address: u64) -> Option<()> {
    super::remove(address, Kind::Registered).map(|_| ())
}

/// Device addresses for memory that lies elsewhere, never given twice, each with a page of nothing behind it.
pub(super) fn address_for(bytes: usize) -> DevicePointer {
    static NEXT: Mutex<u64> = Mutex::new(0);
    let range = share(IMPORTS);
    let mut next = NEXT.lock();
    let start = range.start + *next;
    *next += (bytes.next_multiple_of(PAGE) + PAGE) as u64;
    assert!(range.start + *next < range.end, "addresses are used up");
    start
}

fn is_mapped(first: usize, bytes: usize) -> bool {
    let mut resident = vec![0_u8; bytes.div_ceil(PAGE)];
    // SAFETY: there is a byte for every page that is asked about; the kernel reads no memory of the range.
    let answer = unsafe { libc::mincore(first as *mut libc::c_void, bytes, resident.as_mut_ptr()) };
    answer == 0
}
