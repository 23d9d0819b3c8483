//! Windows: memory of one rank of a group that the other ranks of its host read, apart from the blocks of the heap.
//!
//! A window is a segment by itself. It is passed to peers as the heap's segments are. The mappings of the peers stay
//! when its owner closes it: a rank may leave while others still read what it has left there.
//!
//! It begins with words, by which ranks tell each other where they are; the rest is data. The owner alone writes, which the
//! kernel sees to: once the owner has mapped it, it is sealed against all further writing.
//!
//! Data begins at a different place in the page for each rank, and not where buffers usually begin. Otherwise what is
//! read from all windows at the same time would fall into one set of the L1 cache, and in copies a load would wait for
//! a recent store whose address has the same low bits.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{self, FallocateFlags, SealFlags};
use rustix::mm::{self, MapFlags, ProtFlags};

use super::arena::{next_number, note_retired};
use super::foreign::Foreign;
use super::page::page;
use super::peer::Held;
use super::{HEAP, limit, segment};
use crate::fork::{Home, InChild, PerProcess, map_shared, unshare};
use crate::locks::Mutex;

type Open = Vec<(u32, Option<OwnedFd>)>;

/// The windows of this process: their numbers, and what peers get as long as there are some to come.
static OPEN: PerProcess<Mutex<Open>> = PerProcess::new(Mutex::default);

/// Bytes of a word.
const WORD: usize = size_of::<AtomicU64>();

/// How a window is divided: the same on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Words, with which it begins.
    pub words: usize,
    /// Where the data begins in a page: a multiple of a cache line.
    pub skew: usize,
    /// Bytes of data.
    pub data: usize,
}

impl Layout {
    /// Where the data begins, in a layout that has a [length](Layout::bytes).
    fn head(&self) -> usize {
        (self.words * WORD).next_multiple_of(page()) + self.skew
    }

    /// The length in bytes. `None`: there is no such length.
    fn bytes(&self) -> Option<usize> {
        let words = self.words.checked_mul(WORD)?;
        let head = words
            .checked_next_multiple_of(page())?
            .checked_add(self.skew)?;
        head.checked_add(self.data)
    }

    fn word(&self, start: NonNull<u8>, index: usize) -> NonNull<u8> {
        assert!(index < self.words, "word {index} of {}", self.words);
        // SAFETY: within the mapping that the caller has, of `bytes()` bytes.
        unsafe { start.add(index * WORD) }
    }

    fn data(&self, start: NonNull<u8>, at: usize, bytes: usize) -> NonNull<u8> {
        assert!(
            at <= self.data && bytes <= self.data - at,
            "{bytes} bytes from {at} of {}",
            self.data
        );
        // SAFETY: as above.
        unsafe { start.add(self.head() + at) }
    }
}

/// A window of this process's own.
#[derive(Debug)]
pub struct Window {
    number: u32,
    layout: Layout,
    bytes: usize,
    start: NonNull<u8>,
    home: Home,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is unmapped once, on drop.
unsafe impl Send for Window {}

impl Window {
    /// A window in which every byte is zero. `None` where there is no shared heap either, where the system refuses the
    /// memory, and for a layout of more bytes than there are addresses.
    pub fn create(layout: Layout) -> Option<Self> {
        match HEAP.limit() {
            0 => None,
            _ => Self::open(layout),
        }
    }

    /// A window for `bytes` bytes of data, also where there is no shared heap.
    pub(crate) fn holding(bytes: usize) -> Option<Self> {
        Self::open(Layout {
            words: 0,
            skew: 0,
            data: bytes,
        })
    }

    fn open(layout: Layout) -> Option<Self> {
        let bytes = layout.bytes()?;
        let file = segment::memory(bytes).ok()?;
        if limit::is_strict() {
            // The system would otherwise notice that there is no memory when it is touched, and end the process.
            fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, bytes as u64).ok()?;
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED;
        let mapped = map_shared(bytes, InChild::Zeros, || {
            // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
            unsafe { mm::mmap(ptr::null_mut(), bytes, access, flags, file.as_fd(), 0) }
        });
        let number = next_number();
        let start = NonNull::new(mapped.ok()?.cast())?;
        let window = Self {
            number,
            layout,
            bytes,
            start,
            home: Home::here(),
        };
        // After the mapping, which stays as it is. Where the kernel has no such seal (before Linux 5.1) peers could write.
        let sealed = segment::seal(&file, segment::READ_ONLY);
        sealed
            .or_else(|_| segment::seal(&file, SealFlags::empty()))
            .ok()?;
        OPEN.lock().push((number, Some(file)));
        Some(window)
    }

    /// All peers have mapped it: no descriptor is needed any more.
    pub fn settle(&self) {
        let mut open = OPEN.lock();
        for (_, file) in open.iter_mut().filter(|(of, _)| *of == self.number) {
            *file = None;
        }
    }

    /// Its number among the segments that peers know.
    pub fn segment(&self) -> u32 {
        self.number
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// One of the words.
    ///
    /// # Panics
    /// If there is no such word.
    #[inline]
    pub fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: aligned, mapped while `self` lives, and used as an atomic on all sides.
        unsafe { AtomicU64::from_ptr(self.layout.word(self.start, index).as_ptr().cast()) }
    }

    /// `bytes` bytes of data from `at` on.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn read(&self, at: usize, bytes: usize) -> &[u8] {
        let start = self.layout.data(self.start, at, bytes);
        // SAFETY: mapped while `self` lives. This process writes it through `write` alone, which takes an exclusive
        // borrow, and peers do not.
        unsafe { Foreign::new(start, bytes).numbers() }
    }

    /// As [`Window::read`], to write.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn write(&mut self, at: usize, bytes: usize) -> &mut [u8] {
        let start = self.layout.data(self.start, at, bytes);
        // SAFETY: as in `read`. Peers do not read what has not been published to them since they released it, which
        // `plan::check` proves of every plan.
        unsafe { Foreign::new(start, bytes).numbers_mut() }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if self.home.is_here() {
            OPEN.lock().retain(|(number, _)| *number != self.number);
            note_retired();
        }
        let start = self.start.as_ptr().cast();
        let result = unshare(start, self.bytes, || {
            // SAFETY: this is the mapping that `create` made, whole, or what a forked child has in its place, and nothing
            // borrows from it any more.
            unsafe { mm::munmap(start, self.bytes) }
        });
        debug_assert!(result.is_ok());
    }
}

/// A peer's window, mapped here.
#[derive(Debug)]
pub struct PeerWindow {
    held: Held,
    layout: Layout,
}

impl PeerWindow {
    /// `held` is all of it. `None` when it is not as long as a window of that layout.
    pub fn new(held: Held, layout: Layout) -> Option<Self> {
        (layout.bytes() == Some(held.len())).then_some(Self { held, layout })
    }

    /// One of the words, to be looked at: the mapping may be one that cannot be written.
    ///
    /// # Panics
    /// If there is no such word.
    #[inline]
    pub fn word(&self, index: usize) -> u64 {
        // SAFETY: aligned, since mappings begin with pages; mapped while `held` lives; and used as an atomic on all
        // sides.
        let word: &AtomicU64 = unsafe {
            AtomicU64::from_ptr(self.layout.word(self.held.start(), index).as_ptr().cast())
        };
        // Acquire: what the owner did before it wrote this is done.
        word.load(Ordering::Acquire)
    }

    /// `bytes` bytes of data from `at` on.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn read(&self, at: usize, bytes: usize) -> &[u8] {
        let start = self.layout.data(self.held.start(), at, bytes);
        // SAFETY: mapped while `held` lives, and never written in this process. The peer does not write what it has
        // published until this side has released it, which `plan::check` proves of every plan.
        unsafe { Foreign::new(start, bytes).numbers() }
    }
}

/// The descriptor of window `number` of this process.
pub(super) fn file(number: u32) -> Option<OwnedFd> {
    let open = OPEN.lock();
    let (_, file) = open.iter().find(|(of, _)| *of == number)?;
    file.as_ref()?.try_clone().ok()
}

/// Whether window `number` of this process has not been closed.
pub(super) fn is_open(number: u32) -> bool {
    OPEN.lock().iter().any(|(of, _)| *of == number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::{Identity, PeerHeap};

    const LAYOUT: Layout = Layout {
        words: 3,
        skew: 192,
        data: 10_000,
    };

    fn open(window: &Window) -> PeerWindow {
        let file = file(window.segment()).unwrap();
        let mut heap = PeerHeap::default();
        let identity = Identity::of(window.segment(), &file).unwrap();
        assert!(heap.admit(identity, Some(file)).unwrap());
        let held = heap.hold(window.segment(), 0, window.bytes()).unwrap();
        PeerWindow::new(held.unwrap(), LAYOUT).unwrap()
    }

    #[test]
    fn a_window_stays_in_processes_that_have_mapped_it() {
        let mut window = Window::create(LAYOUT).unwrap();
        let (number, seen) = (window.segment(), open(&window));
        window.write(9_000, 1_000).fill(7);
        window.word(2).store(5, Ordering::Release);
        assert_eq!(seen.word(2), 5);
        assert!(is_open(number) && crate::heap::is_live(number));
        window.settle();
        assert!(is_open(number) && file(number).is_none());
        let retired = crate::heap::retired();
        drop(window);
        assert!(!is_open(number));
        assert!(crate::heap::retired() > retired);
        assert!(seen.read(9_000, 1_000).iter().all(|&byte| byte == 7));
        assert!(seen.read(0, 9_000).iter().all(|&byte| byte == 0));
    }

    #[test]
    fn the_kernel_keeps_peers_from_writing_to_a_window() {
        let window = Window::create(LAYOUT).unwrap();
        let file = file(window.segment()).unwrap();
        let seals = fs::fcntl_get_seals(&file).unwrap();
        assert!(seals.contains(segment::SEALS | segment::READ_ONLY));
        assert!(rustix::io::write(&file, &[1]).is_err());
        // A member that breaks the protocol: it shares what cannot be written.
        let mut heap = PeerHeap::default();
        let identity = Identity::of(window.segment(), &file).unwrap();
        heap.admit(identity, Some(file)).unwrap();
        let held = heap.hold(window.segment(), 0, window.bytes()).unwrap();
        assert!(!held.unwrap().is_writable());
    }

    #[test]
    fn a_window_of_another_length_is_none() {
        let window = Window::create(LAYOUT).unwrap();
        let file = file(window.segment()).unwrap();
        let mut heap = PeerHeap::default();
        let identity = Identity::of(1, &file).unwrap();
        heap.admit(identity, Some(file)).unwrap();
        let held = heap.hold(1, 0, window.bytes() - 1).unwrap().unwrap();
        assert!(PeerWindow::new(held, LAYOUT).is_none());
    }

    #[test]
    fn a_layout_longer_than_memory_has_no_window() {
        let window = Window::create(LAYOUT).unwrap();
        let file = file(window.segment()).unwrap();
        let mut heap = PeerHeap::default();
        let identity = Identity::of(1, &file).unwrap();
        heap.admit(identity, Some(file)).unwrap();
        for layout in [
            // Each wraps round to the window's own length.
            Layout {
                words: LAYOUT.words + (1 << 61),
                ..LAYOUT
            },
            Layout {
                words: usize::MAX / WORD,
                skew: page() + WORD - 1 + page() + LAYOUT.skew,
                ..LAYOUT
            },
            Layout {
                skew: usize::MAX,
                data: LAYOUT.data + LAYOUT.skew + 1,
                ..LAYOUT
            },
        ] {
            assert!(Window::create(layout).is_none());
            let held = heap.hold(1, 0, window.bytes()).unwrap().unwrap();
            assert!(PeerWindow::new(held, layout).is_none());
        }
    }

    #[test]
    #[should_panic(expected = "2 bytes from 9999 of 10000")]
    fn nothing_is_read_past_the_end() {
        Window::create(LAYOUT).unwrap().read(9_999, 2);
    }
}
