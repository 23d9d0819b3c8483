//! A peer's heap as this side sees it: its segments, mapped to read what the peer lends, and to write where it shares. One
//! that its owner has sealed against writing is mapped to be read alone.
//!
//! An announcement of a peer is checked against what the kernel says of the descriptor that came with it: that it is a memfd of
//! that length, sealed against changing it, and the very file that was meant. An announcement that a member would not make is
//! an error that ends the link; a segment that cannot be mapped here is not, and the peer's memory is then read by other means.
//!
//! Several links to one process share one mapping of a segment, and its page table.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Weak};

use rustix::fs::{self, SealFlags};
use rustix::mm::{self, MapFlags, ProtFlags};

use super::foreign::Foreign;
use super::limit;
use super::segment::{READ_ONLY, SEALS};
use crate::error::{Cause, Code, Error, Result};
use crate::fork::{Home, InChild, PerProcess, map_shared, unshare};
use crate::locks::Mutex;
use crate::rarely::Rarely;

/// More segments than any heap has: 64 of them hold 64 GiB.
const MOST_SEGMENTS: usize = 4096;

/// The most that is mapped of one peer, in multiples of the memory that this process can have: the peer may have more.
const MOST_OF_MEMORY: u64 = 4;

/// Bounds the lines about segments: peers can announce many.
static SAID: Mutex<Option<Rarely>> = Mutex::new(None);

/// The type of the kernel's file system for shared memory (`TMPFS_MAGIC`).
const SHARED_MEMORY: u64 = 0x0102_1994;

/// The identity of a segment for a peer, besides its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its number in the heap of its owner.
    pub segment: u32,
    /// Its length.
    pub bytes: u64,
    /// The file's number, which tells one memfd from another on this host.
    pub inode: u64,
}

impl Identity {
    /// Of segment `segment`, whose descriptor is `file`.
    ///
    /// # Errors
    /// `System` when the kernel says nothing about it.
    pub fn of(segment: u32, file: impl AsFd) -> Result<Self> {
        let stat = fs::fstat(file).map_err(|errno| Error::system("look at a segment", errno))?;
        Ok(Self {
            segment,
            bytes: u64::try_from(stat.st_size).unwrap_or(0),
            inode: stat.st_ino,
        })
    }
}

/// The segments that a peer has announced and not taken back.
#[derive(Debug, Default)]
pub struct PeerHeap {
    /// `None`: could not be mapped.
    segments: HashMap<u32, Option<Arc<Mapping>>>,
}

impl PeerHeap {
    /// Maps a segment that the peer announced. `file` is what came with the announcement, if anything did: descriptors
    /// do not arrive when this process has none left. Says whether the peer may refer to the segment.
    ///
    /// # Errors
    /// `Untrusted` when no member announces such a segment: the number is in use, the file is another one, or can
    /// still change its size.
    pub fn admit(&mut self, identity: Identity, file: Option<OwnedFd>) -> Result<bool> {
        if self.segments.len() >= MOST_SEGMENTS {
            return Err(untrusted("more segments than a heap has"));
        }
        if identity.segment == 0 || self.segments.contains_key(&identity.segment) {
            return Err(untrusted(format_args!(
                "segment {} again",
                identity.segment
            )));
        }
        let mapping = match file {
            Some(file) => {
                check(identity, &file)?;
                self.check_room(identity)
                    .and_then(|()| Mapping::open(identity, &file))
            }
            None => Err(Error::system("receive a descriptor", "none arrived")),
        };
        let mapping = mapping.inspect_err(|error| {
            if let Some(suppressed) = SAID.lock().get_or_insert_with(Rarely::strangers).line() {
                tracing::warn!(
                    suppressed,
                    "a peer's shared heap cannot be read in place: {error}"
                );
            }
        });
        let mapping = mapping.ok();
        let mapped = mapping.is_some();
        self.segments.insert(identity.segment, mapping);
        Ok(mapped)
    }

    /// Refuses a segment with which more would be mapped of this peer than a heap can fill. A mapping takes addresses here and
    /// costs the peer nothing: a memory file may be far longer than its content.
    fn check_room(&self, identity: Identity) -> Result<()> {
        let mapped = self.segments.values().flatten();
        let mapped: u64 = mapped.map(|mapping| mapping.length as u64).sum();
        let most = (limit::of_the_machine() as u64).saturating_mul(MOST_OF_MEMORY);
        match mapped.saturating_add(identity.bytes) > most {
            true => Err(Error::system(
                format!(
                    "map a segment of {} bytes beside {mapped} of this peer's",
                    identity.bytes
                ),
                format!(
                    "at most {most} bytes of one peer are mapped, {MOST_OF_MEMORY} times the memory"
                ),
            )),
            false => Ok(()),
        }
    }

    /// Lets go of a segment that the peer has given back. An unknown one does not matter.
    pub fn forget(&mut self, segment: u32) {
        self.segments.remove(&segment);
    }

    /// How many segments there are.
    pub fn len(&self) -> usize {
        self.segments.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Where `bytes` bytes from `offset` of a segment lie in this process. They can be read as long as `self` is
    /// neither dropped nor told to forget the segment. `None`: the segment could not be mapped here, which the peer was
    /// told in answer to its announcement.
    ///
    /// # Errors
    /// `Untrusted` when the segment was not announced, or is shorter than that.
    pub fn span(&self, segment: u32, offset: u64, bytes: usize) -> Result<Option<NonNull<u8>>> {
        let Some(mapping) = self.segments.get(&segment) else {
            return Err(untrusted(format_args!(
                "bytes of segment {segment}, which is not announced"
            )));
        };
        let Some(mapping) = mapping else {
            return Ok(None);
        };
        mapping.at(offset, bytes).map(Some).ok_or_else(|| {
            let length = mapping.length;
            untrusted(format_args!(
                "{bytes} bytes from {offset} of a segment of {length} bytes"
            ))
        })
    }

    /// As [`PeerHeap::span`], as a slice.
    ///
    /// # Errors
    /// As [`PeerHeap::span`].
    ///
    /// # Safety
    /// While the slice lives, a peer that keeps the link's protocol does not write these bytes: it lent them, and does
    /// not know yet that they were read. They are used as numbers only: see [`foreign`](super::foreign).
    pub unsafe fn slice(&self, segment: u32, offset: u64, bytes: usize) -> Result<Option<&[u8]>> {
        let start = self.span(segment, offset, bytes)?;
        // SAFETY: the span is mapped for as long as `self` is borrowed, since forgetting takes `&mut self`, and cannot
        // fault, since the file's size is sealed. The caller promises the rest.
        Ok(start.map(|start| unsafe { Foreign::new(start, bytes).numbers() }))
    }

    /// As [`PeerHeap::span`], and the bytes stay mapped although the peer gives the segment back.
    ///
    /// # Errors
    /// As [`PeerHeap::span`].
    pub fn hold(&self, segment: u32, offset: u64, bytes: usize) -> Result<Option<Held>> {
        let start = self.span(segment, offset, bytes)?;
        let mapping = self.segments.get(&segment).and_then(Option::as_ref);
        Ok(start.zip(mapping).map(|(start, mapping)| Held {
            mapping: Arc::clone(mapping),
            start,
            bytes,
        }))
    }
}

/// Whether `file` is what was announced. Its size, seals and number are the kernel's word.
fn check(identity: Identity, file: &OwnedFd) -> Result<()> {
    let seals = fs::fcntl_get_seals(file)
        .map_err(|errno| untrusted(format_args!("a segment that cannot be sealed ({errno})")))?;
    if !seals.contains(SEALS) {
        return Err(untrusted(format_args!(
            "a segment whose size can change (seals {seals:?})"
        )));
    }
    // Memory of huge pages has a type of its own, and can be missing when it is touched.
    let kind = fs::fstatfs(file).map_or(0, |system| system.f_type as u64);
    if kind != SHARED_MEMORY {
        return Err(untrusted(format_args!(
            "a segment that is no ordinary memory (file system {kind:#x})"
        )));
    }
    let seen = Identity::of(identity.segment, file)?;
    if seen != identity || seen.bytes == 0 {
        return Err(untrusted(format_args!("{identity:?}, but sent {seen:?}")));
    }
    Ok(())
}

fn untrusted(what: impl fmt::Display) -> Error {
    Error::new(
        Code::Untrusted,
        format!("the peer's heap is refused: it announced {what}"),
    )
}

/// Bytes of a peer's heap, which stay mapped while this lives.
#[derive(Debug)]
pub struct Held {
    mapping: Arc<Mapping>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it points into a mapping that belongs to the process and that the `Arc` keeps.
unsafe impl Send for Held {}
// SAFETY: as above; what reads or writes the bytes by a shared reference is unsafe, and its callers promise who else does.
unsafe impl Sync for Held {}

impl Held {
    /// How many there are.
    #[expect(clippy::len_without_is_empty, reason = "a lent span is never empty")]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether this side can write them at all.
    pub fn is_writable(&self) -> bool {
        self.mapping.is_writable
    }

    /// Where they begin in this process.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// `bytes` of them from `at` on.
    ///
    /// # Panics
    /// If there are fewer.
    ///
    /// # Safety
    /// As for [`PeerHeap::slice`], and nothing in this process writes them while the slice lives.
    pub unsafe fn read(&self, at: usize, bytes: usize) -> &[u8] {
        assert!(at <= self.bytes && bytes <= self.bytes - at);
        // SAFETY: within the span, which was checked when this was made and is mapped while `mapping` lives. The caller
        // promises the rest.
        unsafe { Foreign::new(self.start.add(at), bytes).numbers() }
    }

    /// As [`Held::read`], to write.
    ///
    /// # Panics
    /// If there are fewer, or they [cannot be written](Held::is_writable).
    ///
    /// # Safety
    /// The peer shares these bytes and leaves them alone while the slice lives.
    pub unsafe fn write(&mut self, at: usize, bytes: usize) -> &mut [u8] {
        assert!(at <= self.bytes && bytes <= self.bytes - at && self.mapping.is_writable);
        debug_assert!(self.start >= self.mapping.base);
        // SAFETY: as in `read`; the exclusive borrow keeps other slices of this process away.
        unsafe { Foreign::new(self.start.add(at), bytes).numbers_mut() }
    }
}

/// A segment of another process's heap, mapped to read, and to write unless it is sealed against that.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    length: usize,
    is_writable: bool,
    inode: u64,
    home: Home,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is unmapped once, on drop.
unsafe impl Send for Mapping {}
// SAFETY: as above; nothing in it changes, and its bytes are reached by unsafe code only.
unsafe impl Sync for Mapping {}

type Mappings = Vec<(u64, Weak<Mapping>)>;

/// The mapped segments, by inode. A mapping keeps its file, so that the number is not another's as long as the entry is alive.
static MAPPINGS: PerProcess<Mutex<Mappings>> = PerProcess::new(Mutex::default);

impl Mapping {
    fn open(identity: Identity, file: &OwnedFd) -> Result<Arc<Self>> {
        let mut mappings = MAPPINGS.lock();
        let known = mappings.iter().find(|(inode, _)| *inode == identity.inode);
        if let Some(mapping) = known.and_then(|(_, mapping)| mapping.upgrade()) {
            return Ok(mapping);
        }
        let refused = |cause: &dyn Cause| {
            Error::system(
                format_args!("map {} bytes of a peer's heap", identity.bytes),
                cause,
            )
        };
        let length =
            usize::try_from(identity.bytes).map_err(|cause| refused(&cause.to_string()))?;
        let seals = fs::fcntl_get_seals(file).map_err(|errno| refused(&errno))?;
        let is_writable = !seals.intersects(READ_ONLY | SealFlags::WRITE);
        let access = match is_writable {
            true => ProtFlags::READ | ProtFlags::WRITE,
            false => ProtFlags::READ,
        };
        let mapped = map_shared(length, InChild::Zeros, || {
            // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
            unsafe { mm::mmap(ptr::null_mut(), length, access, MapFlags::SHARED, file, 0) }
        });
        let base = mapped.map_err(|errno| refused(&errno))?;
        let base =
            NonNull::new(base.cast::<u8>()).ok_or_else(|| refused(&"mapped at address zero"))?;
        // SAFETY: a hint about the mapping just made; it changes no contents.
        let _ = unsafe { mm::madvise(base.as_ptr().cast(), length, mm::Advice::LinuxHugepage) };
        let mapping = Arc::new(Self {
            base,
            length,
            is_writable,
            inode: identity.inode,
            home: Home::here(),
        });
        mappings.push((identity.inode, Arc::downgrade(&mapping)));
        Ok(mapping)
    }

    /// The address of `bytes` bytes from `offset`, if the segment has them.
    fn at(&self, offset: u64, bytes: usize) -> Option<NonNull<u8>> {
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(bytes)?;
        // SAFETY: the offset is within the mapping, or at its end.
        (end <= self.length).then(|| unsafe { self.base.add(offset) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if !self.home.is_here() {
            // The list may be locked by a thread that is not in this process. The mapping goes with the process.
            return;
        }
        let this: *const Self = self;
        MAPPINGS
            .lock()
            .retain(|(inode, mapping)| *inode != self.inode || !ptr::eq(mapping.as_ptr(), this));
        let base = self.base.as_ptr().cast();
        let result = unshare(base, self.length, || {
            // SAFETY: this is the mapping that `open` made, whole, and all readers hold an `Arc` around `self`.
            unsafe { mm::munmap(base, self.length) }
        });
        debug_assert!(result.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use rustix::fs::MemfdFlags;

    use super::*;

    fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = fs::memfd_create("unisono test", flags).unwrap();
        fs::ftruncate(&file, bytes).unwrap();
        fs::fcntl_add_seals(&file, seals).unwrap();
        file
    }

    fn refused(heap: &mut PeerHeap, identity: Identity, file: OwnedFd) -> String {
        let error = heap.admit(identity, Some(file)).unwrap_err();
        assert_eq!(error.code, Code::Untrusted);
        error.message
    }

    #[test]
    fn what_the_owner_writes_is_seen_until_the_segment_goes() {
        let file = memfd(8192, SEALS);
        let identity = Identity::of(3, &file).unwrap();
        let writer = File::from(file.try_clone().unwrap());
        let (mut one, mut two) = (PeerHeap::default(), PeerHeap::default());
        assert!(
            one.admit(identity, Some(file.try_clone().unwrap()))
                .unwrap()
        );
        assert!(
            two.admit(
                Identity {
                    segment: 9,
                    ..identity
                },
                Some(file)
            )
            .unwrap()
        );
        writer.write_all_at(b"unison", 4096).unwrap();
        // SAFETY: nothing writes any more.
        let seen = unsafe { one.slice(3, 4096, 6) }.unwrap().unwrap();
        assert_eq!(seen, b"unison");
        // One mapping serves both.
        assert_eq!(one.span(3, 0, 1).unwrap(), two.span(9, 0, 1).unwrap());
        one.forget(3);
        assert!(one.is_empty() && one.span(3, 0, 1).is_err());
        // SAFETY: as above.
        assert_eq!(unsafe { two.slice(9, 4100, 2) }.unwrap().unwrap(), b"on");
        let inode = identity.inode;
        assert!(MAPPINGS.lock().iter().any(|(known, _)| *known == inode));
        drop(two);
        assert!(!MAPPINGS.lock().iter().any(|(known, _)| *known == inode));
    }

    #[test]
    fn spans_outside_a_segment_are_refused() {
        let file = memfd(4096, SEALS);
        let mut heap = PeerHeap::default();
        heap.admit(Identity::of(1, &file).unwrap(), Some(file))
            .unwrap();
        assert!(heap.span(1, 0, 4096).unwrap().is_some());
        assert!(heap.span(1, 4096, 0).unwrap().is_some());
        for (segment, offset, bytes) in [
            (1, 0, 4097),
            (1, 4096, 1),
            (1, u64::MAX, 1),
            (1, 1, usize::MAX),
            (2, 0, 0),
        ] {
            let error = heap.span(segment, offset, bytes).unwrap_err();
            assert_eq!(error.code, Code::Untrusted, "{error}");
        }
    }

    #[test]
    fn a_segment_that_is_not_what_was_announced_is_refused() {
        let mut heap = PeerHeap::default();
        let file = memfd(4096, SEALS);
        let good = Identity::of(1, &file).unwrap();
        let again = || file.try_clone().unwrap();
        let longer = Identity {
            bytes: 8192,
            ..good
        };
        assert!(refused(&mut heap, longer, again()).contains("but sent"));
        let other = Identity {
            inode: good.inode + 1,
            ..good
        };
        assert!(refused(&mut heap, other, again()).contains("but sent"));
        let zero = Identity { segment: 0, ..good };
        assert!(refused(&mut heap, zero, again()).contains("segment 0 again"));
        for missing in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL] {
            let file = memfd(4096, SEALS - missing);
            let identity = Identity::of(1, &file).unwrap();
            assert!(refused(&mut heap, identity, file).contains("size can change"));
        }
        let empty = memfd(0, SEALS);
        let identity = Identity::of(1, &empty).unwrap();
        assert!(refused(&mut heap, identity, empty).contains("but sent"));
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        let identity = Identity::of(1, &socket).unwrap();
        assert!(refused(&mut heap, identity, socket.into()).contains("cannot be sealed"));
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        if let Ok(huge) = fs::memfd_create("unisono test", flags) {
            fs::ftruncate(&huge, 1 << 30).unwrap();
            fs::fcntl_add_seals(&huge, SEALS).unwrap();
            let identity = Identity::of(1, &huge).unwrap();
            assert!(refused(&mut heap, identity, huge).contains("no ordinary memory"));
        }
        assert!(heap.is_empty());
        assert!(heap.admit(good, Some(again())).unwrap());
        assert!(refused(&mut heap, good, again()).contains("segment 1 again"));
    }

    /// Files that are longer than memory cost their maker nothing, and would cost this process its addresses.
    #[test]
    fn what_no_heap_can_fill_is_not_mapped() {
        let most = limit::of_the_machine() as u64 * MOST_OF_MEMORY;
        let mut heap = PeerHeap::default();
        let mut admit = |segment, bytes| {
            let file = memfd(bytes, SEALS);
            let identity = Identity::of(segment, &file).unwrap();
            heap.admit(identity, Some(file)).unwrap()
        };
        assert!(!admit(1, most + 4096));
        assert!(admit(2, most / 2));
        assert!(!admit(3, most / 2 + 8192));
        assert!(admit(4, 4096));
        heap.forget(2);
        let file = memfd(most / 2 + 8192, SEALS);
        let identity = Identity::of(5, &file).unwrap();
        assert!(heap.admit(identity, Some(file)).unwrap());
    }

    #[test]
    fn a_segment_whose_descriptor_was_lost_is_not_mapped() {
        let file = memfd(4096, SEALS);
        let identity = Identity::of(5, &file).unwrap();
        let mut heap = PeerHeap::default();
        assert!(!heap.admit(identity, None).unwrap());
        assert_eq!(heap.span(5, 0, 1), Ok(None));
        assert_eq!(heap.len(), 1);
    }
}
