//! Windows: memory that each rank of a group exposes to the others.
//!
//! All ranks of a communicator make a window together, each of its own memory ([`Communicator::window`]). Then each of them may
//! [put](Window::put) bytes into another's memory and [get](Window::get) bytes of it, and that one calls nothing. A rank
//! [signals](Window::signal) to another one when it has put what belongs together, and that one
//! [waits](Window::wait_signal) for it: everything that was put before is there then.
//!
//! # Ways
//!
//! Between ranks of one host, memory in the [heap](crate::heap) is mapped by the others. A put is one copy there, a
//! [view](Window::view) is the memory itself, and a signal is a word in a page that both have mapped. Memory
//! elsewhere, and that of ranks on other hosts, is reached through the [ports](crate::one_sided) of the ranks, which connect
//! when they first need to, and a signal is a message.
//!
//! A window has a group of its own, of the same ranks, over which its ranks meet, wake each other and send signals. A wait
//! ends when that group does, so no wait outlives its peer.
//!
//! Memory of a device is mapped by the processes of its host (CUDA IPC), and copies of a window that has some are the driver's
//! ([`held`]). Where it cannot be mapped it is reached through ports, too, by copies in the memory of the host.
//!
//! # The end
//!
//! A rank that closes its window tells the others of this host, and waits until none is in the middle of writing to its memory.
//! From a process that has stopped in the middle the heap takes the memory away, which it cannot for memory of a device: a
//! warning says so. One that has ended writes no more. Memory that another rank still views stays allocated until a window is
//! made or closed when that rank views it no more.

mod flag;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod held;
mod meeting;
mod peer;
mod state;
mod symmetric;
#[cfg(test)]
mod tests;
mod transfer;

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use self::held::OnDevice;
use self::meeting::Exposed;
use self::peer::{Near, Peer, SIGNALS, closed};
use self::state::{Shared, Way};
pub use self::symmetric::Symmetric;
pub use self::transfer::Transfer;
use crate::buffer::Memory;
use crate::communicator::{Communicator, Work};
use crate::engine::{PointToPoint, Request};
use crate::error::{Code, Error, Result};
use crate::fork::Own;
use crate::interrupts::SLICE;
use crate::locks::Mutex;
use crate::one_sided::{self, Owner};
use crate::transport::cuda::span;
use crate::transport::ends::let_go;
use crate::types::{DataType, Rank};

/// A longer time is as good as for ever.
const AGES: Duration = Duration::from_secs(1 << 30);

/// Memory that each rank of a group exposes to the others. Dropping it [closes](Window::close) it.
pub struct Window(Own<Arc<Shared>>);

/// A peer's memory, mapped here. It stays mapped and the peer's while this lives, whatever becomes of the window.
pub struct View {
    start: NonNull<u8>,
    peer: Own<Arc<Peer>>,
    /// Of memory of a device.
    mapping: Option<Arc<OnDevice>>,
}

// SAFETY: it is an address and a length of memory that belongs to the process; to use it is unsafe.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    /// Where the memory begins in this process.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Whether it is memory of a device, which only that can read.
    pub fn is_on_device(&self) -> bool {
        self.mapping.is_some()
    }

    /// Its length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a view is never empty")]
    pub fn len(&self) -> usize {
        self.peer.bytes
    }
}

impl Drop for View {
    fn drop(&mut self) {
        if let Some(near) = &self.peer.near
            && self.peer.is_here()
        {
            near.end.end_view();
        }
    }
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "View({} bytes)", self.len())
    }
}

impl Communicator {
    /// Exposes `bytes` bytes from `start` on to the other ranks, and gets the use of theirs. All ranks of this communicator
    /// call it, each with memory of any length, also none; after a call that some ranks made and others did not, no window of
    /// this communicator can be made. `dtype` and `note` are for those who use the memory: each rank has
    /// them of all. `owner` is kept as long as other ranks may use the memory.
    ///
    /// The memory may be a device's, on which no stream has work under way.
    ///
    /// # Errors
    /// As of a collective; `System` when the device's driver fails.
    ///
    /// # Safety
    /// The bytes are allocated and initialised as long as `owner` lives. Other ranks read and write them at any time until
    /// the window is closed, and code of this process uses them only as it agrees with those.
    pub unsafe fn window(
        &self,
        (start, bytes): (*mut u8, usize),
        (dtype, note): (DataType, &[u8]),
        owner: Owner,
    ) -> Result<Window> {
        let exposed = span::Exposed::find(start.expose_provenance(), bytes)?;
        let_go();
        let (comm, mask) = self.for_a_window()?;
        comm.set_timeout(self.timeout());
        let own = Exposed {
            start: start.expose_provenance(),
            bytes,
            dtype,
            note,
            exposed,
            owner: Arc::new(owner),
        };
        let renumber = |error| match &mask {
            Some(mask) => mask.renumber(error),
            None => error,
        };
        let (peers, port, copies) = own.meet(&comm).map_err(renumber)?;
        let shared = Arc::new(Shared {
            comm,
            mask,
            parent: self.shared_group(),
            peers,
            start: own.start,
            exposed: own.exposed,
            copies,
            owner: Mutex::new(Some(own.owner)),
            port,
            is_closed: AtomicBool::new(false),
            made: Instant::now(),
            looked: AtomicU64::new(0),
            waits: Mutex::new(Vec::new()),
            failure: OnceLock::new(),
        });
        let weak = Arc::downgrade(&shared);
        shared.comm.group().tell_of(weak);
        Ok(Window(Own::new(shared)))
    }
}

impl Window {
    /// This process's number, as in the communicator that the window was made of.
    pub fn rank(&self) -> Rank {
        self.0.number(self.0.comm.rank())
    }

    /// The number of ranks, as there.
    pub fn world_size(&self) -> usize {
        match &self.0.mask {
            Some(mask) => mask.world(),
            None => self.0.comm.world_size(),
        }
    }

    /// The length of a rank's memory in bytes, the type of its elements, and its note.
    ///
    /// # Errors
    /// `InvalidArgument` for a rank that is out of range or gone.
    pub fn described(&self, rank: Rank) -> Result<(usize, DataType, &[u8])> {
        let peer = &self.0.peers[self.0.place(rank)?];
        Ok((peer.bytes, peer.dtype, &peer.note))
    }

    /// Whether a rank's memory is mapped here, so that there is a [view](Window::view) of it. That of this rank is none.
    ///
    /// # Errors
    /// As [`Window::described`].
    pub fn is_mapped(&self, rank: Rank) -> Result<bool> {
        let peer = &self.0.peers[self.0.place(rank)?];
        Ok(peer.near.as_ref().is_some_and(|near| near.held.is_ok()))
    }

    /// Whether what is put, and where it is got, may be memory of a device: some rank exposes some, which this process sees.
    pub fn has_devices(&self) -> bool {
        self.0.copies.0.is_some()
    }

    /// How long a wait may take if it is not told otherwise. Zero: for ever.
    pub fn timeout(&self) -> Duration {
        self.0.comm.timeout()
    }

    /// The group of its own: what waits in it is interrupted by its [`abort`](Communicator::abort).
    pub fn communicator(&self) -> &Communicator {
        &self.0.comm
    }

    /// Writes `bytes` bytes from `source` on into the memory of rank `to`, `offset` bytes from its beginning. Where the memory
    /// is mapped here, the bytes are there when this returns, and it returns `None`; else they are there when the transfer that
    /// it returns has ended. `owner` is kept until then.
    ///
    /// # Errors
    /// `InvalidArgument` for bytes that do not lie in the memory of `to`; `PeerLost` and the like when a rank is gone.
    ///
    /// # Safety
    /// Until then `source` is readable as long as `owner` lives, and no code writes to it. No code uses the bytes of `to`
    /// meanwhile: the ranks agree on that.
    pub unsafe fn put(
        &self,
        to: Rank,
        offset: usize,
        (source, bytes): (*const u8, usize),
        owner: Owner,
    ) -> Result<Option<Transfer>> {
        let (place, way) = self.0.way("put to", to, offset, bytes)?;
        match way {
            Way::Own(target) => {
                // SAFETY: it has that many bytes; the caller promises the rest.
                unsafe { self.0.copy((place, "put to"), target, source, bytes) }.map(|()| None)
            }
            Way::Mapped(near, kept) => {
                if !near.end.begin_writing() {
                    return Err(self.0.closed(place, "put to", bytes));
                }
                let target = kept.start().as_ptr().wrapping_add(offset);
                // SAFETY: `way` has found the bytes in the memory, which stays mapped. The caller promises the rest of the
                // source, and that the ranks agree on the bytes of `to`.
                let put = unsafe { self.0.copy((place, "put to"), target, source, bytes) };
                near.end.end_writing();
                put.map(|()| None)
            }
            Way::Far => {
                Transfer::start(&self.0, place, ("put to", offset, bytes), |port, remote| {
                    let lent = (source.expose_provenance(), bytes);
                    // SAFETY: as the caller promises.
                    let local = unsafe { port.lend(lent, self.0.copies.stream_for(source), owner) };
                    port.write(&local, 0..bytes, remote, None)
                })
            }
        }
    }

    /// Reads `bytes` bytes of the memory of rank `from`, from `offset` on, into `target`, as [`Window::put`] writes.
    ///
    /// # Errors
    /// As [`Window::put`].
    ///
    /// # Safety
    /// Until the end `target` is writable as long as `owner` lives, and no other code uses it.
    pub unsafe fn get(
        &self,
        from: Rank,
        offset: usize,
        (target, bytes): (*mut u8, usize),
        owner: Owner,
    ) -> Result<Option<Transfer>> {
        let (place, way) = self.0.way("get from", from, offset, bytes)?;
        match way {
            Way::Own(source) => {
                // SAFETY: it has that many bytes; the caller promises the rest.
                unsafe { self.0.copy((place, "get from"), target, source, bytes) }.map(|()| None)
            }
            Way::Mapped(near, kept) => {
                if near.end.is_closed() {
                    return Err(self.0.closed(place, "get from", bytes));
                }
                let source = kept.start().as_ptr().wrapping_add(offset);
                // SAFETY: as in `put`; the caller promises it of the target.
                unsafe { self.0.copy((place, "get from"), target, source, bytes) }.map(|()| None)
            }
            Way::Far => Transfer::start(
                &self.0,
                place,
                ("get from", offset, bytes),
                |port, remote| {
                    let lent = (target.expose_provenance(), bytes);
                    // SAFETY: as the caller promises.
                    let local = unsafe { port.lend(lent, self.0.copies.stream_for(target), owner) };
                    port.read(&local, 0..bytes, remote, None)
                },
            ),
        }
    }

    /// Signals to rank `to`, which waits by [`wait_signal`](Window::wait_signal), once for each signal. All that this rank has
    /// put into its memory before is there then; transfers that are under way are waited for.
    ///
    /// # Errors
    /// The first failure of such a transfer; `PeerLost` and the like when a rank is gone.
    pub fn signal(&self, to: Rank) -> Result<()> {
        let it = &self.0;
        it.check_usable()?;
        let place = it.place(to)?;
        let peer = &it.peers[place];
        let blame = |error| it.blame(error, place, &format!("signal to rank {to}"));
        it.look_for_losses().map_err(blame)?;
        if let Some(far) = &peer.far {
            far.wait(it.limit()).map_err(blame)?;
        }
        let must_send = match &peer.near {
            Some(near) if near.end.is_closed() => return Err(blame(closed(&it.name(place)))),
            Some(near) => near.end.signal(),
            None => true,
        };
        if must_send {
            let options = PointToPoint::default();
            // SAFETY: it has no memory.
            let sent = unsafe {
                it.comm
                    .send(DataType::UInt8, Memory::empty(), place, SIGNALS, options)
            };
            sent.map_err(blame)?;
        }
        Ok(())
    }

    /// Waits for a signal of rank `from` and takes it.
    ///
    /// # Errors
    /// `Timeout` when none comes within `timeout`, after which the window goes on; `PeerLost` and the like when a rank is gone.
    pub fn wait_signal(&self, from: Rank, timeout: Option<Duration>) -> Result<()> {
        match self.try_wait_signal(from, timeout)? {
            true => Ok(()),
            false => Err(self.late(from, timeout.unwrap_or_default())),
        }
    }

    /// As [`Window::wait_signal`]; false when none has come within `patience`.
    ///
    /// # Errors
    /// As [`Window::wait_signal`], but for `Timeout`.
    pub fn try_wait_signal(&self, from: Rank, patience: Option<Duration>) -> Result<bool> {
        let it = &self.0;
        it.check_usable()?;
        let place = it.place(from)?;
        let blame = |error| it.blame(error, place, &format!("wait_signal of rank {from}"));
        let mut slice = patience.map_or(SLICE, |patience| patience.min(SLICE));
        let mut until = None;
        loop {
            let taken = it.peers[place].take_signal(&it.comm, place, slice);
            if taken.map_err(blame)? {
                return Ok(true);
            }
            it.check_parent().map_err(blame)?;
            let Some(patience) = patience else { continue };
            // A wait that is short reads no clock.
            let until = *until.get_or_insert_with(|| Instant::now() + (patience - slice).min(AGES));
            slice = SLICE.min(until.saturating_duration_since(Instant::now()));
            if slice.is_zero() {
                return Ok(false);
            }
        }
    }

    /// The error of a wait for a signal that took that long, in vain.
    #[cold]
    pub fn late(&self, from: Rank, waited: Duration) -> Error {
        let name = self.0.place(from).map(|place| self.0.name(place));
        Error::new(
            Code::Timeout,
            format!(
                "no signal of {} within {:.3} s; does it call signal({}) as often as this rank waits for it?",
                name.unwrap_or_default(),
                waited.as_secs_f64(),
                self.rank()
            ),
        )
        .with_peer(from)
        .with_operation(format!("wait_signal of rank {from}"))
    }

    /// Waits until all that this rank has put into others' memory is there, and all that it gets is here.
    ///
    /// # Errors
    /// The first failure; `Timeout` when `timeout` runs out first, after which the transfers go on.
    pub fn flush(&self, timeout: Option<Duration>) -> Result<()> {
        self.0.check_usable()?;
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut result = Ok(());
        for (place, peer) in self.0.peers.iter().enumerate() {
            if let Some(far) = &peer.far {
                let operation = format!("flush of what goes to rank {}", self.0.number(place));
                let waited = far.wait(until);
                result = result.and(waited.map_err(|error| self.0.blame(error, place, &operation)));
            }
        }
        result
    }

    /// Whether nothing is under way that [`flush`](Window::flush) would wait for.
    pub fn is_flushed(&self) -> bool {
        let mut far = self.0.peers.iter().filter_map(|peer| peer.far.as_ref());
        far.all(|far| {
            let under_way = far.under_way.lock();
            let mut results = under_way.iter().map(one_sided::Transfer::result);
            results.all(|result| matches!(result, Some(Ok(()))))
        })
    }

    /// Begins a barrier of the window's ranks: when it has ended, and each rank has [flushed](Window::flush) before, all bytes
    /// that any rank has put are there.
    ///
    /// # Errors
    /// As of a collective.
    pub fn start_barrier(&self) -> Result<Work> {
        self.0.check_usable()?;
        // SAFETY: it has no memory.
        let begun = unsafe { self.0.comm.begin(Request::barrier()) };
        begun.map_err(|error| self.0.renumber(error))
    }

    /// [Flushes](Window::flush), and waits until all ranks of the window have called it: all that any rank has put before is
    /// there.
    ///
    /// # Errors
    /// As of both.
    pub fn fence(&self) -> Result<()> {
        self.flush(Some(self.timeout()).filter(|limit| !limit.is_zero()))?;
        let barrier = self.start_barrier()?;
        loop {
            if let Some(ended) = self.fenced(&barrier) {
                return ended;
            }
            // How it has ended is looked at.
            let _ = barrier.wait(Some(SLICE));
        }
    }

    /// How a [barrier](Window::start_barrier) has ended; `None` while it is under way.
    pub fn fenced(&self, barrier: &Work) -> Option<Result<()>> {
        let result = barrier
            .result()
            .or_else(|| self.0.check_parent().err().map(Err))?;
        Some(result.map_err(|error| self.0.renumber(error).with_operation("fence")))
    }

    /// The memory of rank `rank` itself, which lies on this host.
    ///
    /// # Errors
    /// `Unsupported` where it is not mapped here, and for this rank's own.
    pub fn view(&self, rank: Rank) -> Result<View> {
        let it = &self.0;
        it.check_usable()?;
        let place = it.place(rank)?;
        let operation = format!("map of rank {rank}");
        let peer = &it.peers[place];
        let Some((near, held)) = peer.mapped() else {
            let why = match &peer.near {
                _ if place == it.comm.rank() => "it is this rank's own",
                _ if peer.bytes == 0 => "there is none",
                Some(Near { held: Err(why), .. }) => &why.message,
                _ => "it is not on this host, or the ranks go over TCP",
            };
            let what = format!("the memory of {} cannot be mapped: {why}", it.name(place));
            return Err(Error::unsupported(what).with_operation(operation));
        };
        let Some(kept) = held.keep().filter(|_| near.end.begin_view()) else {
            return Err(it.blame(closed(&it.name(place)), place, &operation));
        };
        Ok(View {
            start: kept.start(),
            peer: Own::new(Arc::clone(peer)),
            mapping: kept.mapping(),
        })
    }

    /// Whether this process has closed it.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed.load(Ordering::Relaxed)
    }

    /// Ends the use of this rank's memory by others, and of theirs by this one: what is under way fails. Idempotent. To end it
    /// well, all ranks call [`fence`](Window::fence) before.
    ///
    /// # Errors
    /// `Timeout` when a transfer of another rank still uses the memory after half a second. Its owner is kept until that ends.
    pub fn close(&self) -> Result<()> {
        match self.0.is_here() {
            true => self.0.close(),
            false => Ok(()),
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let _ = self.close();
    }
}

impl std::fmt::Debug for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Window")
            .field("ranks", &self.0.peers.len())
            .finish_non_exhaustive()
    }
}
