//! Memory: what lies at which address.
//!
//! Addresses of device memory come from a range that is reserved and cannot be touched, so a host that follows one
//! crashes, as it would with a real driver. The bytes lie in a memfd for each device, mapped a second time
//! where only the emulator looks; [`reach`] leads from the one to the other.

mod device;
mod host;
mod ipc;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use crate::abi::DevicePointer;
use crate::context::Context;
use crate::status::{Outcome, Status};

pub(crate) use device::{allocate, free, in_use, peak};
pub(crate) use host::{allocate_pinned, device_pointer, free_pinned, register, unregister};
pub(crate) use ipc::{close, export, freed_while_imported, import};

/// The kind of memory at a range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Memory of a device, from its allocator.
    Device,
    /// Another process's device memory.
    Imported,
    /// Host memory from the driver.
    Pinned,
    /// The caller's own host memory, registered.
    Registered,
}

/// A range of addresses that streams may use.
pub(crate) struct Region {
    /// Never used twice in a process.
    pub(crate) id: u64,
    pub(crate) kind: Kind,
    pub(crate) context: Arc<Context>,
    /// The device where the memory lies; for host memory the one whose context it belongs to.
    pub(crate) device: usize,
    /// Where streams see it.
    pub(crate) address: DevicePointer,
    /// Where this process sees it; for device memory only the emulator may look there.
    pub(crate) host: usize,
    pub(crate) bytes: usize,
}

impl Region {
    pub(crate) fn new(
        kind: Kind,
        context: &Arc<Context>,
        address: DevicePointer,
        host: usize,
        bytes: usize,
    ) -> Arc<Self> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        Arc::new(Self {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            kind,
            context: context.clone(),
            device: context.device,
            address,
            host,
            bytes,
        })
    }

    pub(crate) fn is_host(&self) -> bool {
        matches!(self.kind, Kind::Pinned | Kind::Registered)
    }

    /// The same memory as a region of another device.
    fn on(mut self: Arc<Self>, device: usize) -> Arc<Self> {
        Arc::get_mut(&mut self).expect("a new region").device = device;
        self
    }
}

/// By first address. Host memory whose device address is another than its host address is found under both.
static REGIONS: RwLock<BTreeMap<u64, Arc<Region>>> = RwLock::new(BTreeMap::new());

/// Counted up when a region goes, so that threads drop what they remember of the table.
static CHANGES: AtomicU64 = AtomicU64::new(0);

fn insert(region: &Arc<Region>) {
    let mut regions = REGIONS.write();
    regions.insert(region.address, region.clone());
    if region.is_host() {
        regions.insert(region.host as u64, region.clone());
    }
}

/// Takes out the region that begins at `address`, if it is of this kind.
fn remove(address: u64, kind: Kind) -> Option<Arc<Region>> {
    let mut regions = REGIONS.write();
    let region = regions.get(&address).filter(|region| region.kind == kind)?;
    let region = region.clone();
    regions.remove(&region.address);
    if region.is_host() {
        regions.remove(&(region.host as u64));
    }
    CHANGES.fetch_add(1, Ordering::Release);
    Some(region)
}

/// The region in which `address` lies, and how far into it.
pub(crate) fn find(address: u64) -> Option<(Arc<Region>, usize)> {
    let regions = REGIONS.read();
    let (&start, region) = regions.range(..=address).next_back()?;
    let offset = usize::try_from(address - start).ok()?;
    (offset < region.bytes).then(|| (region.clone(), offset))
}

/// Whether any region lies within these host addresses.
fn overlaps(start: u64, end: u64) -> bool {
    let regions = REGIONS.read();
    let before = regions.range(..end).next_back();
    before.is_some_and(|(&at, region)| at + region.bytes as u64 > start)
}

/// Whether the address is in a range that only the driver hands out.
pub(crate) fn is_device_address(address: u64) -> bool {
    device::reserved().contains(&address)
}

/// Where `bytes` bytes of streams' memory lie for the emulator.
///
/// # Errors
/// `ILLEGAL_ADDRESS` when they are not within one region, or lie on a device `context` has no access to.
pub(crate) fn reach(context: &Context, address: u64, bytes: usize) -> Outcome<usize> {
    let (region, offset) = find(address).ok_or(Status::ILLEGAL_ADDRESS)?;
    let inside = bytes <= region.bytes - offset;
    let reachable = region.is_host() || context.reaches(region.device);
    if inside && reachable {
        Ok(region.host + offset)
    } else {
        Err(Status::ILLEGAL_ADDRESS)
    }
}

/// A short memory of where kernels last found their bytes, since they ask for every access.
pub(crate) struct Reach {
    context: Arc<Context>,
    changes: u64,
    last: Vec<Arc<Region>>,
    pub(crate) fault: Option<Status>,
}

impl Reach {
    pub(crate) fn new(context: Arc<Context>) -> Self {
        Self {
            context,
            changes: CHANGES.load(Ordering::Acquire),
            last: Vec::new(),
            fault: None,
        }
    }

    /// As [`reach`]; a fault is remembered.
    pub(crate) fn reach(&mut self, address: u64, bytes: usize) -> Option<usize> {
        if !address.is_multiple_of(bytes as u64) {
            self.fault.get_or_insert(Status::MISALIGNED_ADDRESS);
            return None;
        }
        let changes = CHANGES.load(Ordering::Acquire);
        if changes != self.changes {
            self.changes = changes;
            self.last.clear();
        }
        let known = self
            .last
            .iter()
            .find_map(|region| within(region, address, bytes));
        known.or_else(|| match reach(&self.context, address, bytes) {
            Ok(host) => {
                let (region, _) = find(address)?;
                if region.address == address - (host - region.host) as u64 {
                    self.last.push(region);
                }
                Some(host)
            }
            Err(fault) => {
                self.fault.get_or_insert(fault);
                None
            }
        })
    }
}

fn within(region: &Region, address: u64, bytes: usize) -> Option<usize> {
    let offset = usize::try_from(address.checked_sub(region.address)?).ok()?;
    (offset + bytes <= region.bytes).then(|| region.host + offset)
}

/// The regions of a kind.
pub(crate) fn count(kind: Kind) -> usize {
    let regions = REGIONS.read();
    let of_kind = regions
        .iter()
        .filter(|(start, region)| **start == region.address && region.kind == kind);
    of_kind.count()
}

/// Frees what a destroyed context has left.
pub(crate) fn forget(context: &Arc<Context>) {
    let left: Vec<Arc<Region>> = REGIONS
        .read()
        .values()
        .filter(|region| Arc::ptr_eq(&region.context, context))
        .cloned()
        .collect();
    for region in left {
        let _ = match region.kind {
            Kind::Device => device::take_back(region.address),
            Kind::Imported => ipc::unmap(region.address),
            Kind::Pinned => host::give_back(region.host as u64),
            Kind::Registered => host::let_go(region.host as u64),
        };
    }
}
