//! Device memory between processes.
//!
//! A handle names the exporting process and its memfd, which the importer opens through `/proc`, and a line of the ledger
//! at the end of that file. The ledger says whether the memory is still allocated and how often it is imported.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::device::{PAGE, map, pool, unmap as unmap_pages};
use super::host::address_for;
use super::{Kind, Region};
use crate::abi::{DevicePointer, IpcMemHandle};
use crate::context::{self, Context};
use crate::settings::{Ipc, settings};
use crate::status::{Outcome, Status};

const LINES: usize = 4096;
/// Bytes of the ledger in a device's file.
pub(super) const LEDGER_BYTES: usize = LINES * size_of::<Line>();
const MAGIC: u64 = 0x756e_6973_6f6e_6f01;

/// One exported allocation; all zero when the line is free.
#[repr(C)]
struct Line {
    generation: AtomicU64,
    imports: AtomicU32,
    reserved: AtomicU32,
}

/// The content of a handle.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
struct Ticket {
    magic: u64,
    generation: u64,
    offset: u64,
    bytes: u64,
    capacity: u64,
    process: u32,
    file: i32,
    line: u32,
    /// The physical device.
    device: u32,
}

const _: () = assert!(size_of::<Ticket>() <= size_of::<IpcMemHandle>());

/// An open import.
struct Import {
    ticket: Ticket,
    context: usize,
    address: DevicePointer,
    opened: usize,
    mapped: (usize, usize),
    ledger: usize,
}

static EXPORTS: Mutex<Option<HashMap<DevicePointer, Ticket>>> = Mutex::new(None);
static IMPORTS: Mutex<Vec<Import>> = Mutex::new(Vec::new());
static FREED_WHILE_IMPORTED: AtomicUsize = AtomicUsize::new(0);

fn line(ledger: usize, number: u32) -> &'static Line {
    // SAFETY: `ledger` is where a ledger is mapped, and it stays mapped for every use: a device's own for good, an
    // importer's until its import is closed, and no caller keeps the reference longer. All members are atomic, so other
    // processes may write them.
    unsafe { &*((ledger + number as usize % LINES * size_of::<Line>()) as *const Line) }
}

/// Makes a handle of the allocation that begins at `address`.
///
/// # Errors
/// `INVALID_VALUE` for any other address, `NOT_SUPPORTED` when exports are refused.
pub(crate) fn export(address: DevicePointer) -> Outcome<IpcMemHandle> {
    if settings().ipc == Ipc::RefuseExport {
        return Err(Status::NOT_SUPPORTED);
    }
    let (region, offset) = super::find(address).ok_or(Status::INVALID_VALUE)?;
    if region.kind != Kind::Device || offset != 0 {
        return Err(Status::INVALID_VALUE);
    }
    let pool = pool(region.device)?;
    let mut exports = EXPORTS.lock();
    let exports = exports.get_or_insert_default();
    let ticket = match exports.get(&address) {
        Some(ticket) => *ticket,
        None => {
            let ledger = pool.mapped + pool.capacity;
            let number = (0..LINES as u32)
                .find(|&number| {
                    let generation = &line(ledger, number).generation;
                    generation
                        .compare_exchange(0, region.id, Ordering::AcqRel, Ordering::Acquire)
                        .is_ok()
                })
                .ok_or(Status::OUT_OF_MEMORY)?;
            let ticket = Ticket {
                magic: MAGIC,
                generation: region.id,
                offset: pool.offset(address) as u64,
                bytes: region.bytes as u64,
                capacity: pool.capacity as u64,
                process: std::process::id(),
                file: pool.file.as_raw_fd(),
                line: number,
                device: context::visible_devices()[region.device] as u32,
            };
            exports.insert(address, ticket);
            ticket
        }
    };
    let mut handle = IpcMemHandle([0; 64]);
    // SAFETY: a handle is larger than a ticket (checked above) and a ticket has no padding: five words of 8 bytes, then
    // four of 4.
    unsafe {
        handle
            .0
            .as_mut_ptr()
            .cast::<Ticket>()
            .write_unaligned(ticket)
    };
    Ok(handle)
}

/// Frees the line of an allocation that is freed.
pub(super) fn forget_export(region: &Region) {
    let ticket = EXPORTS
        .lock()
        .as_mut()
        .and_then(|exports| exports.remove(&region.address));
    if let (Some(ticket), Ok(pool)) = (ticket, pool(region.device)) {
        let line = line(pool.mapped + pool.capacity, ticket.line);
        if line.imports.swap(0, Ordering::AcqRel) > 0 {
            FREED_WHILE_IMPORTED.fetch_add(1, Ordering::Relaxed);
        }
        line.generation.store(0, Ordering::Release);
    }
}

/// Maps another process's memory; a second time in the same context it is the same address.
///
/// # Errors
/// `INVALID_CONTEXT` in the exporting process itself, `INVALID_HANDLE` when the handle is none, the process or the memory is
/// gone, or imports are refused, `PEER_ACCESS_UNSUPPORTED` when the memory's device cannot be reached.
#[expect(clippy::too_many_lines, reason = "one check after the other")]
pub(crate) fn import(context: &Arc<Context>, handle: &IpcMemHandle) -> Outcome<DevicePointer> {
    // SAFETY: a ticket is smaller than a handle and any bytes are one; what it says is checked below.
    let ticket = unsafe { handle.0.as_ptr().cast::<Ticket>().read_unaligned() };
    if ticket.magic != MAGIC || settings().ipc == Ipc::RefuseImport {
        return Err(Status::INVALID_HANDLE);
    }
    if ticket.process == std::process::id() {
        return Err(Status::INVALID_CONTEXT);
    }
    let device = reachable(context, ticket.device as usize)?;
    let mut imports = IMPORTS.lock();
    let known = imports.iter_mut().find(|import| {
        import.ticket == ticket && import.context == context.handle && import.opened > 0
    });
    if let Some(import) = known {
        import.opened += 1;
        return Ok(import.address);
    }
    let path = format!("/proc/{}/fd/{}", ticket.process, ticket.file);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|_| Status::INVALID_HANDLE)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let whole = ticket.capacity.checked_add(LEDGER_BYTES as u64);
    if file.metadata().map(|metadata| metadata.len()).ok() != whole {
        return Err(Status::INVALID_HANDLE);
    }
    let descriptor = Some(file.as_raw_fd());
    let ledger = map(
        0,
        LEDGER_BYTES,
        protection,
        descriptor,
        ticket.capacity as usize,
    )
    .ok_or(Status::MAP_FAILED)?;
    let first = ticket.offset as usize & !(PAGE - 1);
    let into = ticket.offset as usize - first;
    let bytes = into + ticket.bytes as usize;
    let alive = line(ledger, ticket.line).generation.load(Ordering::Acquire) == ticket.generation;
    let mapped = alive
        .then(|| map(0, bytes, protection, descriptor, first))
        .flatten();
    let Some(mapped) = mapped else {
        unmap_pages(ledger, LEDGER_BYTES);
        return Err(Status::INVALID_HANDLE);
    };
    line(ledger, ticket.line)
        .imports
        .fetch_add(1, Ordering::AcqRel);
    let address = address_for(bytes) + into as u64;
    let region = Region::new(
        Kind::Imported,
        context,
        address,
        mapped + into,
        ticket.bytes as usize,
    );
    super::insert(&region.on(device));
    imports.push(Import {
        ticket,
        context: context.handle,
        address,
        opened: 1,
        mapped: (mapped, bytes),
        ledger,
    });
    Ok(address)
}

/// The number in this process of a physical device, if the context may touch its memory. Peer access is
/// enabled on the way, which is what the flag of the call asks for.
fn reachable(context: &Arc<Context>, physical: usize) -> Outcome<usize> {
    let visible = context::visible_devices();
    let device = visible
        .iter()
        .position(|&device| device == physical)
        .ok_or(Status::INVALID_DEVICE)?;
    if !context.reaches(device) {
        context.enable_peer(device)?;
    }
    Ok(device)
}

/// Closes an import once; the last time it is unmapped, when everything in the context is done.
///
/// # Errors
/// `INVALID_VALUE` for an address that [`import`] did not give.
pub(crate) fn close(address: DevicePointer) -> Outcome {
    let (region, offset) = super::find(address).ok_or(Status::INVALID_VALUE)?;
    if region.kind != Kind::Imported || offset != 0 {
        return Err(Status::INVALID_VALUE);
    }
    let last = {
        let mut imports = IMPORTS.lock();
        let import = imports.iter_mut().find(|import| import.address == address);
        let import = import.ok_or(Status::INVALID_VALUE)?;
        import.opened -= 1;
        import.opened == 0
    };
    if last {
        let outcome = region.context.synchronize();
        unmap(address).ok_or(Status::INVALID_VALUE)?;
        outcome?;
    }
    Ok(())
}

pub(super) fn unmap(address: DevicePointer) -> Option<()> {
    super::remove(address, Kind::Imported)?;
    let mut imports = IMPORTS.lock();
    let index = imports
        .iter()
        .position(|import| import.address == address)?;
    let import = imports.swap_remove(index);
    let line = line(import.ledger, import.ticket.line);
    if line.generation.load(Ordering::Acquire) == import.ticket.generation {
        line.imports.fetch_sub(1, Ordering::AcqRel);
    }
    unmap_pages(import.ledger, LEDGER_BYTES);
    unmap_pages(import.mapped.0, import.mapped.1);
    Some(())
}

/// Allocations that were freed while another process had them imported, which CUDA leaves undefined.
pub(crate) fn freed_while_imported() -> usize {
    FREED_WHILE_IMPORTED.load(Ordering::Relaxed)
}
