//! A rank's window: device memory that the other ranks of the host have mapped.
//!
//! A window is two halves, which take turns (see [`flags`](super::flags)). Its owner exports it and sends a [`Record`] of
//! it to the others, by whatever way; each of them opens a [`PeerWindow`] with it. Between processes the driver maps
//! the memory (CUDA IPC). Inside a process it refuses to, and need not: the record leads to the window itself, by way of
//! a table of the windows of this process, and where the two devices differ they are made peers.
//!
//! Whether a mapping is what it should be is tried at once: a window begins with random bytes, which the record repeats.
//! So a driver that takes a handle of another container's process and maps something else is found out.
//!
//! To free memory the driver waits until the device is idle, which it is not while a stream of any group waits for a peer;
//! and so it may do to allocate some. So when the owner and all its users inside the process have dropped a window, its
//! memory is kept for later ones (of the same size, if it is known that no rank reads it any more: [`Window::set_clean`]) until
//! the last window of the process goes. Users in other processes should have unmapped it then ([`Windows::close_peers`]); if
//! they have not, because a rank died, the driver keeps the memory until they have.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use super::driver::{Device, DeviceMemory, HANDLE, Handle, Imported, is_forked};
use super::kernels::MOST_SOURCES;
use crate::error::{Error, Result};
use crate::locks::Mutex;
use crate::types::Rank;

/// Bytes of a [`Record`] as it travels.
pub const RECORD: usize = 16 + 16 + 16 + 8 + 8 + 8 + HANDLE;

/// Bytes of a word.
const WORD: usize = 4;
/// Bytes behind the halves: a word, and from [`BASES`] on one of eight bytes for each rank.
const BEHIND: usize = BASES + 8 * MOST_SOURCES;
const BASES: usize = 64;

/// A random number: its 16 bytes name a process or a window beyond doubt.
pub(super) type Nonce = [u8; 16];

/// The windows of this process, by their nonces, for ranks of the same process.
static WINDOWS: Mutex<Option<HashMap<Nonce, Weak<Window>>>> = Mutex::new(None);

/// Memory of windows that are gone, and how many there are that are not.
static SPARE: Mutex<Spare> = Mutex::new(Spare {
    windows: 0,
    memory: Vec::new(),
});

struct Spare {
    windows: usize,
    memory: Vec<Allotment>,
}

/// Memory for a window.
#[derive(Debug)]
struct Allotment {
    memory: DeviceMemory,
    /// The handle, or why the driver gives none.
    export: Result<Handle>,
    /// No rank reads or writes it any more.
    is_clean: bool,
    /// It is freed, and not kept.
    is_unwanted: bool,
}

/// An allotment in use.
#[derive(Debug)]
struct Lease {
    /// `None` while it is being made, and when it has gone back.
    allotment: Option<Allotment>,
    /// Its memory comes from the spare and goes there.
    is_counted: bool,
}

/// A rank's own window.
#[derive(Debug)]
pub struct Window {
    lease: Lease,
    half: usize,
    nonce: Nonce,
    is_clean: AtomicBool,
    is_unwanted: AtomicBool,
}

/// The data that another rank needs to open a window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    process: Nonce,
    nonce: Nonce,
    /// The device that it lies on ([`Device::uuid`]).
    pub device: [u8; 16],
    /// Bytes of a half.
    pub half: u64,
    address: u64,
    /// 0 when the driver exports nothing.
    exported: u64,
    handle: Handle,
}

/// The window of a rank, as another rank (or itself) reads it.
#[derive(Debug)]
pub struct PeerWindow {
    address: u64,
    half: usize,
    /// Keeps the memory.
    _memory: Kept,
}

#[derive(Debug)]
enum Kept {
    Here(#[expect(dead_code, reason = "keeps the window")] Arc<Window>),
    Mapped(#[expect(dead_code, reason = "keeps the mapping")] Imported),
}

impl Window {
    /// Allocates a window of two halves of at least `half` bytes each, and exports it. That the driver does not export
    /// it is no error here: then only ranks of this process can open it.
    ///
    /// # Errors
    /// `System` when there is no memory left.
    pub fn create(device: &'static Device, half: usize) -> Result<Arc<Self>> {
        Self::make(device, half, Lease::take)
    }

    /// As [`Window::create`], of memory for other uses: on drop it is freed, for which the driver waits, and kept for no other
    /// window. Ranks that have opened it have let go of it then, or read nothing of it any more.
    ///
    /// # Errors
    /// As [`Window::create`].
    pub(crate) fn create_apart(device: &'static Device, half: usize) -> Result<Arc<Self>> {
        Self::make(device, half, Lease::of_its_own)
    }

    fn make(
        device: &'static Device,
        half: usize,
        take: fn(&'static Device, usize) -> Result<Lease>,
    ) -> Result<Arc<Self>> {
        let half = half.max(1).next_multiple_of(256);
        let lease = take(device, 2 * half + BEHIND)?;
        let nonce = nonce()?;
        lease.memory().write(0, &nonce)?;
        lease.memory().write(2 * half, &[0; WORD])?;
        let window = Arc::new(Self {
            lease,
            half,
            nonce,
            is_clean: AtomicBool::new(false),
            is_unwanted: AtomicBool::new(false),
        });
        let mut windows = WINDOWS.lock();
        let windows = windows.get_or_insert_default();
        windows.retain(|_, window| window.strong_count() > 0);
        windows.insert(nonce, Arc::downgrade(&window));
        Ok(window)
    }

    /// All ranks that had mapped it have unmapped it, and no stream will touch it: its memory may serve another window.
    pub fn set_clean(&self) {
        self.is_clean.store(true, Ordering::Relaxed);
    }

    /// Its memory is freed when it is dropped, as that of [`Window::create_apart`].
    pub(crate) fn set_unwanted(&self) {
        self.is_unwanted.store(true, Ordering::Relaxed);
    }

    /// Bytes of a half.
    pub fn half_bytes(&self) -> usize {
        self.half
    }

    /// The first byte of half 0 or 1, as this process knows it.
    pub fn half(&self, half: usize) -> u64 {
        assert!(half < 2);
        self.memory().address() + (half * self.half) as u64
    }

    /// A word behind the halves for the owner's kernels, 0 at first ([`Guard::seen`](super::kernels::Guard::seen)).
    pub fn word(&self) -> u64 {
        self.half(0) + 2 * self.half as u64
    }

    /// Words of eight bytes behind the halves, one for each rank, for the owner's kernels
    /// ([`find_places`](super::kernels::find_places)).
    pub fn bases(&self) -> u64 {
        self.word() + BASES as u64
    }

    /// Why the driver does not export it, if so.
    pub fn refusal(&self) -> Option<&Error> {
        self.lease.allotment().export.as_ref().err()
    }

    fn memory(&self) -> &DeviceMemory {
        self.lease.memory()
    }

    /// The record for the other ranks.
    ///
    /// # Errors
    /// `System` when the system has no random numbers.
    pub fn record(&self) -> Result<Record> {
        let export = &self.lease.allotment().export;
        Ok(Record {
            process: process()?,
            nonce: self.nonce,
            device: self.memory().device().uuid(),
            half: self.half as u64,
            address: self.memory().address(),
            exported: u64::from(export.is_ok()),
            handle: *export.as_ref().unwrap_or(&[0; HANDLE]),
        })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Some(allotment) = &mut self.lease.allotment {
            allotment.is_clean = *self.is_clean.get_mut();
            allotment.is_unwanted = *self.is_unwanted.get_mut();
        }
    }
}

impl Allotment {
    fn new(device: &'static Device, bytes: usize) -> Result<Self> {
        let memory = DeviceMemory::allocate(device, bytes)?;
        let export = memory.export();
        Ok(Self {
            memory,
            export,
            is_clean: false,
            is_unwanted: false,
        })
    }
}

impl Lease {
    fn take(device: &'static Device, bytes: usize) -> Result<Self> {
        let fits = |spare: &Allotment| {
            let memory = &spare.memory;
            let is_as_long = memory.bytes() == DeviceMemory::length(bytes);
            spare.is_clean && is_as_long && memory.device().number() == device.number()
        };
        let found = {
            let mut spare = SPARE.lock();
            spare.windows += 1;
            let at = spare.memory.iter().position(fits);
            at.map(|at| spare.memory.swap_remove(at))
        };
        // From here on dropping it takes back what was counted.
        let mut lease = Self {
            allotment: found,
            is_counted: true,
        };
        match &mut lease.allotment {
            Some(allotment) => allotment.is_clean = false,
            None => lease.allotment = Some(Allotment::new(device, bytes)?),
        }
        Ok(lease)
    }

    fn of_its_own(device: &'static Device, bytes: usize) -> Result<Self> {
        Ok(Self {
            allotment: Some(Allotment::new(device, bytes)?),
            is_counted: false,
        })
    }

    fn allotment(&self) -> &Allotment {
        let allotment = self.allotment.as_ref();
        allotment.expect("it has some until it is dropped")
    }

    fn memory(&self) -> &DeviceMemory {
        &self.allotment().memory
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if is_forked() {
            // The lock may be held by a thread that is not here.
            std::mem::forget(self.allotment.take());
            return;
        }
        if !self.is_counted {
            return drop(self.allotment.take());
        }
        let unused = {
            let mut spare = SPARE.lock();
            let own = self.allotment.take();
            let mut unused: Vec<Allotment> = Vec::new();
            match own {
                Some(own) if own.is_unwanted => unused.push(own),
                own => spare.memory.extend(own),
            }
            spare.windows -= 1;
            if spare.windows == 0 {
                unused.append(&mut spare.memory);
            }
            unused
        };
        // Without the lock: the driver waits.
        drop(unused);
    }
}

impl Record {
    /// Whether its owner and the other's are two processes on one device.
    pub(crate) fn shares_device_with(&self, other: &Self) -> bool {
        self.device == other.device && self.process != other.process
    }

    /// As bytes.
    pub fn encode(&self) -> [u8; RECORD] {
        let mut out = [0; RECORD];
        out[..16].copy_from_slice(&self.process);
        out[16..32].copy_from_slice(&self.nonce);
        out[32..48].copy_from_slice(&self.device);
        out[48..56].copy_from_slice(&self.half.to_le_bytes());
        out[56..64].copy_from_slice(&self.address.to_le_bytes());
        out[64..72].copy_from_slice(&self.exported.to_le_bytes());
        out[72..].copy_from_slice(&self.handle);
        out
    }

    /// The record that [`Record::encode`] wrote. Any bytes are a record; one that is none is found out when it is opened.
    pub fn decode(bytes: &[u8; RECORD]) -> Self {
        fn part<const N: usize>(bytes: &[u8; RECORD], at: usize) -> [u8; N] {
            bytes[at..at + N].try_into().expect("so many bytes")
        }
        Self {
            process: part(bytes, 0),
            nonce: part(bytes, 16),
            device: part(bytes, 32),
            half: u64::from_le_bytes(part(bytes, 48)),
            address: u64::from_le_bytes(part(bytes, 56)),
            exported: u64::from_le_bytes(part(bytes, 64)),
            handle: part(bytes, 72),
        }
    }
}

impl PeerWindow {
    /// Opens the window that `record` describes, for `device`.
    ///
    /// # Errors
    /// `Unsupported` when the owner's driver does not export it or the devices do not reach each other; `System` when
    /// the driver refuses, or maps something else.
    pub fn open(device: &'static Device, record: &Record) -> Result<Self> {
        let half = usize::try_from(record.half)
            .ok()
            .filter(|half| half.checked_mul(2).is_some())
            .ok_or_else(|| Error::internal("a window larger than there can be"))?;
        if record.process == process()? {
            return Self::here(device, record, half);
        }
        if record.exported == 0 {
            return Err(Error::unsupported(
                "the other process's driver does not share device memory",
            ));
        }
        let imported = Imported::open(device, &record.handle, 2 * half)?;
        let mut seen = Nonce::default();
        imported.read(0, &mut seen)?;
        if seen != record.nonce {
            return Err(Error::unsupported(
                "the driver mapped other memory than the other process had exported",
            ));
        }
        Ok(Self {
            address: imported.address(),
            half,
            _memory: Kept::Mapped(imported),
        })
    }

    fn here(device: &'static Device, record: &Record, half: usize) -> Result<Self> {
        let window = WINDOWS
            .lock()
            .as_ref()
            .and_then(|windows| windows.get(&record.nonce)?.upgrade())
            .ok_or_else(|| Error::internal("a window of this process is gone"))?;
        device.enable_peer(window.memory().device())?;
        Ok(Self {
            address: window.memory().address(),
            half,
            _memory: Kept::Here(window),
        })
    }

    /// The first byte of half 0 or 1, as this process knows it.
    pub fn half(&self, half: usize) -> u64 {
        assert!(half < 2);
        self.address + (half * self.half) as u64
    }

    /// Bytes of both halves.
    pub fn bytes(&self) -> usize {
        2 * self.half
    }

    /// Whether it lies in another process.
    pub fn is_mapped(&self) -> bool {
        matches!(self._memory, Kept::Mapped(_))
    }
}

/// The windows of all ranks of a group, one's own included.
#[derive(Debug)]
pub struct Windows {
    rank: Rank,
    // Before `own`: what is mapped goes first.
    peers: Vec<PeerWindow>,
    own: Arc<Window>,
}

impl Windows {
    /// Opens the windows of the others. `records` has one for every rank, in rank order.
    ///
    /// # Errors
    /// As [`PeerWindow::open`], with the rank whose window it was; [`Window::refusal`] when another process is to open
    /// one's own; `Mismatch` when its halves are not as long as one's own.
    pub fn open(own: Arc<Window>, rank: Rank, records: &[Record]) -> Result<Self> {
        let device = own.memory().device();
        let here = process()?;
        if let Some(refusal) = own.refusal()
            && records.iter().any(|record| record.process != here)
        {
            // Known in this process alone: the others find that there is nothing to open.
            return Err(refusal.clone());
        }
        let peers = records.iter().enumerate().map(|(peer, record)| {
            if peer == rank {
                return Ok(PeerWindow {
                    address: own.memory().address(),
                    half: own.half,
                    _memory: Kept::Here(Arc::clone(&own)),
                });
            }
            if record.half != own.half as u64 {
                return Err(Error::new(
                    crate::error::Code::Mismatch,
                    format!(
                        "the halves of rank {rank}'s window are {} bytes, those of rank {peer}'s {}",
                        own.half, record.half
                    ),
                )
                .with_peer(peer));
            }
            PeerWindow::open(device, record).map_err(|error| error.with_peer(peer))
        });
        Ok(Self {
            rank,
            peers: peers.collect::<Result<_>>()?,
            own,
        })
    }

    /// One's own.
    pub fn own(&self) -> &Window {
        &self.own
    }

    /// The first byte of a half of `rank`'s window.
    pub fn half(&self, rank: Rank, half: usize) -> u64 {
        self.peers[rank].half(half)
    }

    /// The same half of every window, in rank order, each from byte `offset` on: the sources of a reduction.
    pub fn halves(&self, half: usize, offset: u64) -> impl Iterator<Item = u64> {
        self.peers
            .iter()
            .map(move |window| window.half(half) + offset)
    }

    /// This rank's number.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.peers.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }

    /// Unmaps the windows of the others, and leaves one's own, which is to be dropped when the others have done the
    /// same. The streams that read them have drained.
    pub fn close_peers(self) -> Arc<Window> {
        let Self { own, peers, .. } = self;
        drop(peers);
        own
    }
}

/// The name of this process: its number would not do, since two namespaces may use the same one.
pub(super) fn process() -> Result<Nonce> {
    static PROCESS: OnceLock<Nonce> = OnceLock::new();
    if let Some(process) = PROCESS.get() {
        return Ok(*process);
    }
    let made = nonce()?;
    Ok(*PROCESS.get_or_init(|| made))
}

pub(super) fn nonce() -> Result<Nonce> {
    let mut bytes = Nonce::default();
    getrandom::fill(&mut bytes).map_err(|cause| Error::system("get random numbers", cause))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_travels() {
        let record = Record {
            process: [1; 16],
            nonce: [2; 16],
            device: [3; 16],
            half: 4,
            address: 5,
            exported: 1,
            handle: std::array::from_fn(|at| at as u8),
        };
        assert_eq!(Record::decode(&record.encode()), record);
    }
}
