//! Symmetric memory: memory of one size that each rank of a group exposes to the others of its host, with signals.
//!
//! It is two windows: one over the memory, and one over a pad of words on each rank, both mapped by all. A program uses the
//! memory of the others by its address.
//!
//! # Signals
//!
//! Word `channel * ranks + from` of a rank's pad is the signal of rank `from` to it on that channel: 1 is one that was not
//! taken. To signal is to wait until it is 0, and to make it 1; to take a signal is to wait until it is 1, and to make it 0. A
//! barrier is a signal to each other rank, and one of each taken. A program that uses the words by itself finds the same.
//!
//! A thread that waits looks at the word for a short while and then sleeps ([`flag`](super::flag)). It wakes now and then to
//! look for ranks that are gone, so that no wait outlives its peer.

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use rustix::thread::futex::{self, Flags, Timespec};

use super::flag::Flag;
use super::peer::closed;
use super::state::Shared;
use super::{AGES, View, Window};
use crate::communicator::Communicator;
use crate::engine::OfWindow;
use crate::error::{Code, Error, Result};
use crate::heap::{self, Buffer};
use crate::interrupts::{self, SLICE};
use crate::one_sided::Owner;
use crate::transport::cuda::span::device_of;
use crate::types::{DataType, Rank};

/// After the words of signals a cache line that begins with the count of the threads that sleep until one of them changes.
const SLEEPERS: usize = 64;

/// Memory of one size on each rank of a group, all of it mapped here. Dropping it closes its windows.
#[derive(Debug)]
pub struct Symmetric {
    memory: Part,
    pads: Part,
    /// The length of a pad in bytes, without the count of sleepers.
    pad: usize,
    /// The own pad, which a window that is closed lets go of.
    _words: Arc<Buffer<u8>>,
}

/// A window, and the memory of each rank of it. The views end before the window does.
#[derive(Debug)]
struct Part {
    views: Vec<Option<View>>,
    window: Arc<Window>,
}

impl Part {
    /// # Safety
    /// As of [`Communicator::window`].
    unsafe fn open(
        comm: &Communicator,
        (start, bytes): (*mut u8, usize),
        owner: Owner,
    ) -> Result<Self> {
        // SAFETY: the caller's promise is the one asked for here.
        let window = unsafe { comm.window((start, bytes), (DataType::UInt8, &[]), owner)? };
        Ok(Self {
            views: Vec::new(),
            window: Arc::new(window),
        })
    }

    /// Gets views of the memory of all ranks, if it has one size everywhere.
    fn view_all(&mut self, what: &str) -> Result<()> {
        let window = &*self.window;
        let living = living(window);
        let bytes = |rank| Ok::<_, Error>(window.described(rank)?.0);
        for rank in &living {
            let (first, this) = (bytes(living[0])?, bytes(*rank)?);
            if first != this {
                return Err(Error::invalid(format!(
                    "{what} has one size on all ranks, but rank {} has {first} bytes and rank {rank} has {this}",
                    living[0]
                ))
                .with_peer(*rank));
            }
        }
        let own = window.rank();
        // The others fail because of it.
        if living.len() > 1 && heap::locate(self.start(own)?, bytes(own)?).is_none() {
            return Err(Error::new(
                Code::System,
                format!(
                    "there is no room for {what} in the shared heap of rank {own}: see the setting heap_bytes"
                ),
            ));
        }
        let views =
            (0..window.world_size()).map(|rank| match rank != own && living.contains(&rank) {
                true => window.view(rank).map(Some),
                false => Ok(None),
            });
        self.views = views.collect::<Result<_>>()?;
        Ok(())
    }

    /// The beginning of a rank's memory; null for a rank that is gone.
    fn start(&self, rank: Rank) -> Result<*mut u8> {
        if rank == self.window.rank() {
            return Ok(std::ptr::with_exposed_provenance_mut(self.window.0.start));
        }
        match self.views.get(rank) {
            Some(view) => Ok(view
                .as_ref()
                .map_or(std::ptr::null_mut(), |view| view.start().as_ptr())),
            None => Err(Error::invalid(format!(
                "rank {rank} is out of range: the group has {} ranks",
                self.window.world_size()
            ))),
        }
    }
}

/// The ranks that take part.
fn living(window: &Window) -> Vec<Rank> {
    let all = 0..window.world_size();
    all.filter(|rank| window.0.place(*rank).is_ok()).collect()
}

impl Communicator {
    /// Exposes `bytes` bytes from `start` on to the other ranks, which are of this host and call it, too, with memory of as
    /// many bytes in the [heap]; and gives each rank a pad for signals of `pad` bytes, which are zero.
    ///
    /// # Errors
    /// On all ranks: `InvalidArgument` when sizes differ, `Unsupported` when a rank is not of this host or its memory does not
    /// lie in the heap; the others as of a collective.
    ///
    /// # Safety
    /// As of [`Communicator::window`].
    pub unsafe fn symmetric(
        &self,
        memory: (*mut u8, usize),
        pad: usize,
        owner: Owner,
    ) -> Result<Symmetric> {
        if device_of(memory.0.expose_provenance(), memory.1)?.is_some() {
            let what = "symmetric memory is of the host, where its signals are";
            return Err(Error::unsupported(what));
        }
        let bytes = pad.next_multiple_of(SLEEPERS) + SLEEPERS;
        let mut words = Buffer::<u8>::zeroed(bytes);
        let start = words.as_mut_ptr();
        let words = Arc::new(words);
        // SAFETY: the caller's promise is the one asked for here.
        let memory = unsafe { Part::open(self, memory, owner)? };
        // SAFETY: the buffer is its owner, and is used by atomic operations alone.
        let pads = unsafe { Part::open(self, (start, bytes), Box::new(Arc::clone(&words)))? };
        let mut made = Symmetric {
            memory,
            pads,
            pad,
            _words: words,
        };
        let memory = made.memory.view_all("symmetric memory");
        let viewed = memory.and_then(|()| made.pads.view_all("a signal pad"));
        // Before that no rank lets go of what another one is about to look at.
        made.pads.window.fence()?;
        viewed.map(|()| made)
    }
}

impl Symmetric {
    /// This process's number.
    pub fn rank(&self) -> Rank {
        self.pads.window.rank()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.pads.window.world_size()
    }

    /// Its windows, for the door that closes them at the end of the program.
    pub fn windows(&self) -> [&Arc<Window>; 2] {
        [&self.memory.window, &self.pads.window]
    }

    /// Where the memory of a rank begins in this process. `None` for a rank that is gone.
    ///
    /// # Errors
    /// `InvalidArgument` for a rank that is out of range.
    pub fn start(&self, rank: Rank) -> Result<Option<NonNull<u8>>> {
        Ok(NonNull::new(self.memory.start(rank)?))
    }

    /// As [`Symmetric::start`], of the pad for signals to that rank.
    ///
    /// # Errors
    /// As there.
    pub fn pad(&self, rank: Rank) -> Result<Option<NonNull<u8>>> {
        Ok(NonNull::new(self.pads.start(rank)?))
    }

    /// Signals to rank `to` on a channel, once it has taken the signal before. It finds all that this rank has written before.
    ///
    /// # Errors
    /// `Timeout` when it has not within `timeout`, or in the time of the group if that is `None`; `PeerLost` and the like
    /// when it is gone.
    pub fn put_signal(&self, to: Rank, channel: usize, timeout: Option<Duration>) -> Result<()> {
        let signal = self.signal(to, channel, self.rank())?;
        let what = || format!("put_signal to rank {to} on channel {channel}");
        let patience = &mut self.patience(timeout);
        self.change(&signal, to, patience, (0, 1), ("put_signal", what))
    }

    /// Waits for a signal of rank `from` on a channel, and takes it.
    ///
    /// # Errors
    /// As [`Symmetric::put_signal`].
    pub fn wait_signal(&self, from: Rank, channel: usize, timeout: Option<Duration>) -> Result<()> {
        let signal = self.signal(self.rank(), channel, from)?;
        let what = || format!("wait_signal of rank {from} on channel {channel}");
        let patience = &mut self.patience(timeout);
        self.change(&signal, from, patience, (1, 0), ("wait_signal", what))
    }

    /// Waits until all ranks have called it for this channel: each finds all that any has written before.
    ///
    /// # Errors
    /// As [`Symmetric::put_signal`]. Then the memory is of no further use, on all ranks: some may have had signals that others
    /// still wait for.
    pub fn barrier(&self, channel: usize, timeout: Option<Duration>) -> Result<()> {
        let own = self.rank();
        let mut patience = self.patience(timeout);
        // It is refused before a signal is sent.
        self.signal(own, channel, own)?;
        let world = self.world_size();
        let others = || (1..world).map(|step| (own + step) % world);
        let others = || others().filter(|rank| self.pads.views[*rank].is_some());
        let mut all = || {
            let what = ("barrier", || format!("barrier on channel {channel}"));
            for rank in others() {
                let signal = self.signal(rank, channel, own)?;
                self.change(&signal, rank, &mut patience, (0, 1), what)?;
            }
            others().try_for_each(|rank| {
                let signal = self.signal(own, channel, rank)?;
                self.change(&signal, rank, &mut patience, (1, 0), what)
            })
        };
        all().inspect_err(|error| self.end(error))
    }

    fn patience(&self, timeout: Option<Duration>) -> Patience {
        let usual = self.pads.window.timeout();
        Patience {
            limit: timeout.or((!usual.is_zero()).then_some(usual)),
            until: None,
        }
    }

    /// The signal of rank `from` to rank `to`.
    fn signal(&self, to: Rank, channel: usize, from: Rank) -> Result<Flag<'_, AtomicU32>> {
        let world = self.world_size();
        let channels = self.pad / size_of::<u32>() / world;
        if channel >= channels {
            return Err(Error::invalid(format!(
                "channel {channel} is out of range: a signal pad of {} bytes has {channels} for {world} ranks",
                self.pad
            )));
        }
        // Refuses a rank that is gone.
        self.pads
            .window
            .0
            .place(from)
            .and(self.pads.window.0.place(to))?;
        let start = self.pads.start(to)?;
        let at = |bytes: usize| {
            // SAFETY: within the pad of `to`, which was compared with the own one, and is aligned as the heap aligns. It stays
            // while `self` lives, which keeps the own one and views of the others. All ranks use the word
            // by atomic operations; whatever a peer writes there is a number.
            unsafe { AtomicU32::from_ptr(start.add(bytes).cast()) }
        };
        Ok(Flag {
            word: at((channel * world + from) * size_of::<u32>()),
            sleepers: at(self.pad.next_multiple_of(SLEEPERS)),
        })
    }

    /// Changes a signal to or from rank `peer` as `(from, to)` says, once it is `from`.
    #[inline]
    fn change(
        &self,
        signal: &Flag<'_, AtomicU32>,
        peer: Rank,
        patience: &mut Patience,
        (from, to): (u32, u32),
        (name, what): (&'static str, impl Fn() -> String),
    ) -> Result<()> {
        self.pads.window.0.check_usable()?;
        let must_wake = match signal.change(from, to) {
            Ok(must_wake) => must_wake,
            Err(_) => {
                let place = self.pads.window.0.place(peer)?;
                let changed = self.wait(signal, (name, place), patience, (from, to));
                changed.map_err(|error| self.pads.window.0.blame(error, place, &what()))?
            }
        };
        if must_wake {
            // It fails for no word that can be read.
            let _ = futex::wake(signal.word, Flags::empty(), i32::MAX as u32);
        }
        Ok(())
    }

    /// As [`Symmetric::change`], of one that has another value. Returns whether there are sleepers to be woken.
    #[cold]
    fn wait(
        &self,
        signal: &Flag<'_, AtomicU32>,
        (name, place): (&'static str, usize),
        patience: &mut Patience,
        (from, to): (u32, u32),
    ) -> Result<bool> {
        let group = self.pads.window.0.comm.group();
        let tried = Cell::new(Err(to));
        let look = || {
            tried.set(signal.change(from, to));
            tried.get().is_ok()
        };
        if group.look_until(look)? {
            return Ok(tried.get().unwrap_or(true));
        }
        let _told = Waiting::begin(&self.pads.window.0, name, place);
        let mut has_slept = false;
        while tried.get().is_err() {
            // An exception of a handler ends the wait, whatever comes meanwhile.
            interrupts::check()
                .map_err(|reason| Error::new(Code::Aborted, format!("interrupted: {reason}")))?;
            let may_come = self.check(place);
            let slice = patience.slice();
            signal.arm();
            // One that came just before the end of its rank counts.
            look();
            if let (Err(seen), Ok(()), Some(slice)) = (tried.get(), &may_come, &slice) {
                // It looks again, whatever ended the sleep.
                interrupts::sleep(|| {
                    let _ = futex::wait(signal.word, Flags::empty(), seen, Some(slice));
                });
                has_slept = true;
                look();
            }
            signal.disarm();
            if tried.get().is_err() {
                may_come?;
                slice.ok_or_else(|| self.late(place, from, patience))?;
            }
        }
        if has_slept {
            // The next wait looks for a while again.
            group.look_until(|| true)?;
        }
        Ok(tried.get().unwrap_or(true))
    }

    /// Whether a signal to or from this rank may still come.
    fn check(&self, place: usize) -> Result<()> {
        let it = &self.pads.window.0;
        it.check_usable()?;
        it.check_parent()?;
        let group = it.comm.group();
        if let Some(error) = group.lost(|peer| peer == place) {
            if error.code != Code::Aborted {
                group.fail_of(error.clone());
            }
            return Err(error);
        }
        let near = it.peers[place].near.as_ref();
        match near.is_some_and(|near| near.end.is_closed()) {
            true => Err(closed(&it.name(place))),
            false => Ok(()),
        }
    }

    fn late(&self, place: usize, from: u32, patience: &Patience) -> Error {
        let name = self.pads.window.0.name(place);
        let waited = patience.limit.unwrap_or_default().as_secs_f64();
        match from {
            0 => Error::new(
                Code::Timeout,
                format!(
                    "the signal before was not taken by {name} within {waited:.3} s; does it wait for each one?"
                ),
            ),
            _ => Error::new(
                Code::Timeout,
                format!(
                    "no signal came from {name} within {waited:.3} s; does it send one for each wait here?"
                ),
            ),
        }
    }

    /// The signals are in disorder: no rank is to wait for them, or to be misled by them.
    #[cold]
    fn end(&self, error: &Error) {
        let it = &self.pads.window.0;
        let _ = it.failure.set(error.clone());
        let near = it.peers.iter().filter_map(|peer| peer.near.as_ref());
        near.for_each(|near| near.end.close());
    }
}

/// A wait for a signal that the status of the rank tells of.
struct Waiting<'a> {
    window: &'a Shared,
    wait: OfWindow,
}

impl<'a> Waiting<'a> {
    fn begin(window: &'a Shared, name: &'static str, peer: usize) -> Self {
        let since = Instant::now();
        let wait = OfWindow { name, peer, since };
        window.waits.lock().push(wait);
        Self { window, wait }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut waits = self.window.waits.lock();
        let at = waits.iter().position(|wait| *wait == self.wait);
        at.map(|at| waits.swap_remove(at));
    }
}

/// How long a call may wait. A call that does not wait for long reads no clock.
struct Patience {
    /// `None`: for ever.
    limit: Option<Duration>,
    until: Option<Instant>,
}

impl Patience {
    /// The length of the next sleep; `None` when the time is over.
    fn slice(&mut self) -> Option<Timespec> {
        let left = match self.limit {
            Some(limit) => {
                let now = Instant::now();
                let until = *self.until.get_or_insert_with(|| now + limit.min(AGES));
                until.saturating_duration_since(now)
            }
            None => SLICE,
        };
        let slice = Timespec::try_from(left.min(SLICE)).ok();
        slice.filter(|_| !left.is_zero())
    }
}
