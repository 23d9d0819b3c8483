//! Registered memory: what peers may read and write, and for how long.
//!
//! A region is in use while a transfer of this process or of a peer moves bytes of it. It is unregistered at once, which
//! means that no further use begins, and what owns its memory is dropped when the last use has ended.
//!
//! The engine moves memory of the host. Bytes on a device are copied beside, before they are sent or after they have come, by
//! each side for itself, where the target does not map those of the initiator ([`Use::copy`]).

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::request::{Answer, RegionId};
use crate::buffer::Memory;
use crate::error::{Code, Error, Result};
use crate::heap::Buffer;
use crate::locks::{Condvar, Mutex};
use crate::rarely::Rarely;
use crate::transport::cuda::driver::Stream;
use crate::transport::cuda::span::{Exposed, Mapped, Span};
use crate::transport::ends::let_go;
use crate::transport::keys::random_bytes;

/// The pause between two looks whether peers still have memory mapped.
const LOOK: Duration = Duration::from_millis(20);

/// The value that keeps a region's memory allocated.
pub type Owner = Box<dyn Any + Send + Sync>;

/// Memory that is registered with a [`Port`](super::Port). Copies are the same registration.
#[derive(Clone)]
pub struct Region(Arc<Registered>);

struct Registered {
    id: RegionId,
    /// The port's.
    port: [u8; 16],
    start: usize,
    bytes: usize,
    device: Option<OnDevice>,
    state: Mutex<State>,
    /// A use has ended.
    unused: Condvar,
}

/// Of memory of a device.
struct OnDevice {
    /// In which it is copied.
    stream: Arc<Stream>,
    /// As processes of this host map it; not for one transfer alone.
    exposed: Option<Arc<Exposed>>,
}

struct State {
    is_registered: bool,
    uses: usize,
    owner: Option<Owner>,
}

/// A region in use: its memory stays.
pub(super) struct Use(Region);

/// Bytes of a region that the engine moves: where they lie, or beside, in memory of the host, where the region is of a device.
pub(super) struct Moving {
    /// Where they lie.
    place: usize,
    length: usize,
    /// Where the engine has them.
    start: usize,
    _beside: Option<Buffer<u8>>,
}

impl Region {
    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.0.bytes
    }

    /// Whether there are no bytes. There are some in every region.
    pub fn is_empty(&self) -> bool {
        self.0.bytes == 0
    }

    /// Whether the driver has told that its bytes lie on a device.
    pub fn is_on_device(&self) -> bool {
        self.0.device.is_some()
    }

    /// Whether it has not been unregistered.
    pub fn is_registered(&self) -> bool {
        self.0.state.lock().is_registered
    }

    pub(super) fn id(&self) -> RegionId {
        self.0.id
    }

    pub(super) fn port(&self) -> [u8; 16] {
        self.0.port
    }

    /// Begins a use; `None` where it is no longer registered.
    pub(super) fn begin_use(&self) -> Option<Use> {
        let mut state = self.0.state.lock();
        state.is_registered.then(|| {
            state.uses += 1;
            Use(self.clone())
        })
    }

    /// Takes what owns the memory, if no use needs it any more.
    fn release(&self) -> Option<Owner> {
        let mut state = self.0.state.lock();
        match state.is_registered || state.uses > 0 {
            true => None,
            false => state.owner.take(),
        }
    }
}

impl PartialEq for Region {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Region {}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({} bytes)", self.0.bytes)
    }
}

impl Use {
    /// The address of byte `offset`.
    ///
    /// # Panics
    /// If the `length` bytes from there on do not lie in the region.
    fn place(&self, offset: usize, length: usize) -> usize {
        let region = &*self.0.0;
        let end = offset.checked_add(length);
        assert!(
            end.is_some_and(|end| end <= region.bytes),
            "{length} bytes at {offset} of a region of {}",
            region.bytes
        );
        region.start + offset
    }

    /// The region as processes of this host map it, if it lies on a device whose driver exports it.
    pub(super) fn span(&self) -> Option<&Span> {
        let exposed = self.0.0.device.as_ref()?.exposed.as_ref()?;
        Some(exposed.span()).filter(|span| span.reason().is_none())
    }

    /// Has a peer's memory on a device mapped for that on which the region lies; `None` where it lies on none.
    ///
    /// # Errors
    /// As [`Mapped::open`].
    pub(super) fn map(&self, span: &Span) -> Result<Option<Mapped>> {
        let device = self.0.0.device.as_ref();
        device
            .map(|of| Mapped::open(of.stream.device(), span))
            .transpose()
    }

    /// Copies `length` bytes at `offset`, which lie on a device: to the address `peer`, or from there where the region
    /// `is_written`.
    ///
    /// # Errors
    /// `System` when the driver fails.
    ///
    /// # Safety
    /// The device reads and writes as many bytes at `peer`, and no other code uses those that are written.
    pub(super) unsafe fn copy(
        &self,
        (offset, length): (usize, usize),
        peer: u64,
        is_written: bool,
    ) -> Result<()> {
        let own = std::ptr::with_exposed_provenance_mut(self.place(offset, length));
        let peer = std::ptr::with_exposed_provenance_mut(peer as usize);
        let OnDevice { stream, .. } = self.0.0.device.as_ref().expect("it was mapped for it");
        let (to, from) = if is_written { (own, peer) } else { (peer, own) };
        // SAFETY: the caller's promise of the peer's; the region is in use, and its owner promised the same of its bytes.
        unsafe { stream.transfer(to, from, length) }
    }

    /// Has `length` bytes from `offset` on ready for the engine, which is to read them if the transfer sends them.
    ///
    /// # Errors
    /// `System` when the driver fails.
    ///
    /// # Panics
    /// If they do not lie in the region.
    pub(super) fn moving(&self, offset: usize, length: usize, is_sent: bool) -> Result<Moving> {
        let place = self.place(offset, length);
        let Some(OnDevice { stream, .. }) = &self.0.0.device else {
            return Ok(Moving {
                place,
                length,
                start: place,
                _beside: None,
            });
        };
        let mut beside = Buffer::<u8>::zeroed(length);
        let start = beside.as_mut_ptr();
        if is_sent {
            let place = std::ptr::with_exposed_provenance(place);
            // SAFETY: the bytes lie in the region, which is in use, and those beside are new.
            unsafe { stream.transfer(start, place, length)? };
        }
        Ok(Moving {
            place,
            length,
            start: start.expose_provenance(),
            _beside: Some(beside),
        })
    }

    /// Has in the region what the engine has received.
    ///
    /// # Errors
    /// `System` when the driver fails.
    pub(super) fn put_back(&self, moving: &Moving) -> Result<()> {
        let Some(OnDevice { stream, .. }) = &self.0.0.device else {
            return Ok(());
        };
        let place = std::ptr::with_exposed_provenance_mut(moving.place);
        let start = std::ptr::with_exposed_provenance(moving.start);
        // SAFETY: as in `moving`, of the same region; the engine writes to them no more.
        unsafe { stream.transfer(place, start, moving.length) }
    }
}

impl Moving {
    /// The bytes from `offset` on.
    ///
    /// # Panics
    /// If they are none of these.
    pub(super) fn memory(&self, offset: usize, length: usize) -> Memory {
        assert!(length <= self.length && offset <= self.length - length);
        let start = std::ptr::with_exposed_provenance_mut(self.start + offset);
        // SAFETY: the bytes lie in the region or beside. Its owner keeps them allocated while its use lasts, and this keeps
        // those beside; both end after the operation that the view is given to. Whoever registered the region promised that
        // no code touches what a transfer moves (`Port::register`).
        unsafe { Memory::from_raw_parts(start, length) }
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.0.0.state.lock().uses -= 1;
        self.0.0.unused.notify_all();
        // Dropped without the lock: it is foreign code.
        drop(self.0.release());
    }
}

/// The regions of one port.
pub(super) struct Regions {
    port: [u8; 16],
    table: Mutex<HashMap<RegionId, Region>>,
    /// Held while a write is thrown away.
    pub(super) refusing: Mutex<()>,
    /// Bounds what is logged of peers whose memory is not mapped.
    pub(super) refusals: Mutex<Rarely>,
}

impl Regions {
    pub(super) fn new(port: [u8; 16]) -> Self {
        Self {
            port,
            table: Mutex::new(HashMap::new()),
            refusing: Mutex::new(()),
            refusals: Mutex::new(Rarely::strangers()),
        }
    }

    /// Registers `bytes` bytes from the address `start`; the same bytes again are the same region.
    pub(super) fn register(&self, start: usize, bytes: usize, owner: Owner) -> Result<Region> {
        if bytes == 0 {
            return Err(Error::invalid(
                "memory without any bytes cannot be registered",
            ));
        }
        let_go();
        let id = random_bytes()?;
        let device = match Exposed::find(start, bytes)? {
            Some(exposed) => {
                if let Some(reason) = exposed.span().reason() {
                    tracing::info!(
                        reason,
                        "memory of a device is registered that moves through that of the host"
                    );
                }
                Some(OnDevice {
                    stream: Arc::new(Stream::create(exposed.span().device()?)?),
                    exposed: Some(exposed),
                })
            }
            None => None,
        };
        let mut table = self.table.lock();
        let same = table.values().find(|region| {
            (region.0.start, region.0.bytes) == (start, bytes) && region.is_registered()
        });
        if let Some(region) = same {
            return Ok(region.clone());
        }
        let region = self.region(id, (start, bytes), device, owner);
        table.insert(id, region.clone());
        Ok(region)
    }

    /// A region for one transfer of this process alone: no peer can name it.
    pub(super) fn lend(
        &self,
        memory: (usize, usize),
        stream: Option<Arc<Stream>>,
        owner: Owner,
    ) -> Region {
        let device = stream.map(|stream| OnDevice {
            stream,
            exposed: None,
        });
        self.region([0; 16], memory, device, owner)
    }

    fn region(
        &self,
        id: [u8; 16],
        (start, bytes): (usize, usize),
        device: Option<OnDevice>,
        owner: Owner,
    ) -> Region {
        Region(Arc::new(Registered {
            id,
            port: self.port,
            start,
            bytes,
            device,
            state: Mutex::new(State {
                is_registered: true,
                uses: 0,
                owner: Some(owner),
            }),
            unused: Condvar::new(),
        }))
    }

    /// Ends a registration, and waits until no transfer uses it.
    ///
    /// # Errors
    /// `Timeout` when one still does after `timeout`; the registration has ended all the same.
    pub(super) fn unregister(&self, region: &Region, timeout: Duration) -> Result<()> {
        let begun = Instant::now();
        region.0.state.lock().is_registered = false;
        loop {
            // A peer may have memory of a transfer that has failed mapped no more.
            let_go();
            let mut state = region.0.state.lock();
            let left = timeout.saturating_sub(begun.elapsed());
            match state.uses {
                0 => break,
                uses if left.is_zero() => return Err(in_use(uses, region.0.bytes, timeout)),
                _ => region.0.unused.wait_for(&mut state, left.min(LOOK)),
            };
        }
        // Not before: what is in use is waited for again by the next call, and by that of `clear`.
        self.table.lock().remove(&region.id());
        drop(region.release());
        Ok(())
    }

    /// Ends all registrations, and waits as [`Regions::unregister`] for each.
    pub(super) fn clear(&self, timeout: Duration) -> Result<()> {
        let begun = Instant::now();
        let regions: Vec<_> = self.table.lock().values().cloned().collect();
        let mut result = Ok(());
        for region in regions {
            result = result.and(self.unregister(&region, timeout.saturating_sub(begun.elapsed())));
        }
        result
    }

    /// Begins a use of `length` bytes at `offset` that a peer asks for.
    pub(super) fn begin_use(
        &self,
        id: &RegionId,
        offset: u64,
        length: u64,
    ) -> std::result::Result<Use, Answer> {
        let region = self.table.lock().get(id).cloned().ok_or(Answer::NoRegion)?;
        let end = offset.checked_add(length);
        if end.is_none_or(|end| end > region.0.bytes as u64) {
            return Err(Answer::OutOfRange);
        }
        region.begin_use().ok_or(Answer::NoRegion)
    }
}

fn in_use(uses: usize, bytes: usize, timeout: Duration) -> Error {
    Error::new(
        Code::Timeout,
        format!(
            "{uses} transfers still move bytes of a region of {bytes} bytes after {:.3} s; it takes no further ones, \
             and its memory is kept until they have ended",
            timeout.as_secs_f64()
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Says when it is dropped.
    struct Told(Arc<Mutex<bool>>);

    impl Drop for Told {
        fn drop(&mut self) {
            *self.0.lock() = true;
        }
    }

    #[test]
    fn memory_stays_until_its_last_use_has_ended() {
        let regions = Regions::new([0; 16]);
        let bytes = [0_u8; 64];
        let is_gone = Arc::new(Mutex::new(false));
        let owner = Box::new(Told(Arc::clone(&is_gone)));
        let region = regions.register(bytes.as_ptr().expose_provenance(), 64, owner);
        let region = region.expect("registered");
        let same = regions.register(bytes.as_ptr().expose_provenance(), 64, Box::new(()));
        assert_eq!(same.expect("the same").id(), region.id());
        let id = region.id();
        let used = regions.begin_use(&id, 60, 4).expect("inside");
        let refused = regions.begin_use(&id, 60, 5).err();
        assert_eq!(refused, Some(Answer::OutOfRange));
        assert_eq!(regions.begin_use(&id, u64::MAX, 2).err(), refused);
        let late = regions.unregister(&region, Duration::from_millis(10));
        assert_eq!(late.expect_err("in use").code, Code::Timeout);
        assert!(!*is_gone.lock() && !region.is_registered());
        assert_eq!(regions.begin_use(&id, 0, 1).err(), Some(Answer::NoRegion));
        assert!(region.begin_use().is_none());
        drop(used);
        assert!(*is_gone.lock());
        regions.unregister(&region, Duration::ZERO).expect("again");
        assert!(regions.register(0, 0, Box::new(())).is_err());
    }
}
