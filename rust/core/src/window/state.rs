//! The state of a window: its ranks, whether it can be used, and its end.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::held::{Copies, Held, Kept};
use super::peer::{Far, Near, Peer, closed};
use crate::communicator::Communicator;
use crate::engine::{Group, Mask, OfWindow, OnGroup};
use crate::error::{Code, Error, Result};
use crate::fork::Own;
use crate::heap::{self, IsOver};
use crate::locks::Mutex;
use crate::one_sided::{Owner, Port};
use crate::transport::WRITERS_PATIENCE;
use crate::transport::cuda::span::Exposed;
use crate::transport::ends::{End, await_unmapping, keep_while_viewed};
use crate::types::Rank;

/// The state of a window, which its handle and what is under way share.
pub(super) struct Shared {
    /// Of the same ranks, by their places.
    pub(super) comm: Communicator,
    pub(super) mask: Option<Arc<Mask>>,
    /// The group that it was made of.
    pub(super) parent: Own<Arc<Group>>,
    /// By place.
    pub(super) peers: Vec<Arc<Peer>>,
    /// Where the own memory begins.
    pub(super) start: usize,
    /// Of memory of a device.
    pub(super) exposed: Option<Arc<Exposed>>,
    pub(super) copies: Copies,
    pub(super) owner: Mutex<Option<Arc<Owner>>>,
    /// By which ranks that have not mapped the own memory reach it.
    pub(super) port: Option<Port>,
    pub(super) is_closed: AtomicBool,
    pub(super) made: Instant,
    /// When the links were last looked at, in milliseconds.
    pub(super) looked: AtomicU64,
    /// Of a window that signals lie in: the waits for these.
    pub(super) waits: Mutex<Vec<OfWindow>>,
    /// The loss of a rank, which the group may not know of yet.
    pub(super) failure: OnceLock<Error>,
}

/// A way to bytes of a rank.
pub(super) enum Way<'a> {
    /// They are this rank's own, from there on.
    Own(*mut u8),
    Mapped(&'a Near, Kept<'a>),
    /// Through a port.
    Far,
}

impl Peer {
    /// The rank's memory, where it is mapped.
    pub(super) fn mapped(&self) -> Option<(&Near, &Held)> {
        let near = self.near.as_ref()?;
        Some((near, near.held.as_ref().ok()?))
    }
}

impl Shared {
    pub(super) fn place(&self, rank: Rank) -> Result<usize> {
        match &self.mask {
            Some(mask) => mask.place(rank),
            None if rank < self.peers.len() => Ok(rank),
            None => Err(Error::invalid(format!(
                "rank {rank} is out of range: the window has {} ranks",
                self.peers.len()
            ))),
        }
    }

    pub(super) fn number(&self, place: usize) -> Rank {
        match &self.mask {
            Some(mask) => mask.number(place),
            None => place,
        }
    }

    pub(super) fn renumber(&self, error: Error) -> Error {
        match &self.mask {
            Some(mask) => mask.renumber(error),
            None => error,
        }
    }

    pub(super) fn name(&self, place: usize) -> String {
        self.comm.group().name_of(place)
    }

    /// An error of an operation with a peer.
    #[cold]
    pub(super) fn blame(&self, error: Error, place: usize, operation: &str) -> Error {
        let peer = error.peer.unwrap_or(place);
        let error = self
            .renumber(error.with_peer(peer))
            .with_operation(operation);
        if error.code == Code::PeerLost {
            let _ = self.failure.set(error.clone());
        }
        error
    }

    /// The place of a rank, and the way to `bytes` bytes of its memory from `offset` on.
    pub(super) fn way(
        &self,
        what: &str,
        rank: Rank,
        offset: usize,
        bytes: usize,
    ) -> Result<(usize, Way<'_>)> {
        self.check_usable()?;
        let place = self.place(rank)?;
        let peer = &self.peers[place];
        if offset.checked_add(bytes).is_none_or(|end| end > peer.bytes) {
            return Err(Error::invalid(format!(
                "{bytes} bytes at offset {offset} do not lie in the {} bytes that rank {rank} exposes",
                peer.bytes
            ))
            .with_operation(format!("{what} rank {rank}")));
        }
        if place == self.comm.rank() {
            let start = std::ptr::with_exposed_provenance_mut(self.start + offset);
            return Ok((place, Way::Own(start)));
        }
        self.look_for_losses()
            .map_err(|error| self.blame_for(error, place, what, bytes))?;
        let Some((near, held)) = peer.mapped() else {
            return Ok((place, Way::Far));
        };
        match held.keep() {
            Some(kept) => Ok((place, Way::Mapped(near, kept))),
            // Another thread is closing it.
            None => Err(Error::invalid("this window has been closed")),
        }
    }

    /// Copies bytes of the rank at `place`, or to them.
    ///
    /// # Errors
    /// `System` when the driver fails.
    ///
    /// # Safety
    /// As of [`Copies::copy`].
    #[inline]
    pub(super) unsafe fn copy(
        &self,
        (place, what): (usize, &str),
        to: *mut u8,
        from: *const u8,
        bytes: usize,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        let copied = unsafe { self.copies.copy(to, from, bytes) };
        copied.map_err(|error| self.blame_for(error, place, what, bytes))
    }

    /// The error of an operation with bytes of a rank that has closed its window.
    #[cold]
    pub(super) fn closed(&self, place: usize, what: &str, bytes: usize) -> Error {
        self.blame_for(closed(&self.name(place)), place, what, bytes)
    }

    #[cold]
    fn blame_for(&self, error: Error, place: usize, what: &str, bytes: usize) -> Error {
        let operation = format!("{what} rank {}, {bytes} bytes", self.number(place));
        self.blame(error, place, &operation)
    }

    /// Refuses to go on when the window is closed, or the group has failed.
    #[inline]
    pub(super) fn check_usable(&self) -> Result<()> {
        let is_alive = self.comm.group().check_alive().is_ok()
            && self.parent.error().is_none()
            && self.failure.get().is_none();
        match is_alive && !self.is_closed.load(Ordering::Relaxed) {
            true => Ok(()),
            false => self.refuse(),
        }
    }

    #[cold]
    pub(super) fn refuse(&self) -> Result<()> {
        self.comm.check_process()?;
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(Error::invalid("this window has been closed"));
        }
        let of_a_group = || self.comm.error().or_else(|| self.parent.error());
        let of_a_group = || of_a_group().map(|error| self.renumber(error));
        let Some(mut first) = self.failure.get().cloned().or_else(of_a_group) else {
            return Err(Error::invalid("this window has been closed"));
        };
        first.operation = None;
        first.message = format!(
            "this window is of no further use since an earlier failure: {}; shrink the communicator to go on with the ranks \
             that are left, and make a new window of that",
            first.message
        );
        Err(first)
    }

    /// Looks now and then whether a rank is gone: what goes through memory does not notice. One that has closed its window is
    /// none of these.
    pub(super) fn look_for_losses(&self) -> Result<()> {
        let now = self.made.elapsed().as_millis() as u64 + 1;
        if self.looked.load(Ordering::Relaxed) == now {
            return Ok(());
        }
        self.looked.store(now, Ordering::Relaxed);
        let group = self.comm.group();
        match group.lost(|_| false) {
            Some(error) => {
                if error.peer.is_some() && error.code != Code::Aborted {
                    group.fail_of(error.clone());
                }
                Err(error)
            }
            None => Ok(()),
        }
    }

    /// The end of what waits in the group of the window, which does not learn of the end of the one that it was made of.
    pub(super) fn check_parent(&self) -> Result<()> {
        match self.parent.error() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    pub(super) fn limit(&self) -> Option<Instant> {
        let limit = self.comm.timeout();
        match limit.is_zero() {
            true => None,
            false => Instant::now().checked_add(limit),
        }
    }

    pub(super) fn close(&self) -> Result<()> {
        if self.is_closed.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let near: Vec<_> = self
            .peers
            .iter()
            .filter_map(|peer| peer.near.as_ref())
            .collect();
        let bytes = self.peers[self.comm.rank()].bytes;
        take_back(
            near.iter().map(|near| (&near.end, &near.is_gone)),
            (self.start, bytes),
        );
        // The others wait for it.
        let held = near.iter().filter_map(|near| near.held.as_ref().ok());
        held.for_each(Held::let_go);
        if self.exposed.is_some() {
            await_unmapping(near.iter().map(|near| (&near.end, &near.is_gone)));
        }
        let port = self.port.as_ref();
        let unused = port.map_or(Ok(()), |port| port.close(WRITERS_PATIENCE));
        let viewers = near
            .iter()
            .map(|near| (near.end.clone(), Arc::clone(&near.is_gone)));
        if let Some(owner) = self.owner.lock().take() {
            keep_while_viewed(viewers.collect(), Box::new(owner));
        }
        // A thread that connects gives up then, and lets go of its lock.
        self.comm.close();
        for far in self.peers.iter().filter_map(|peer| peer.far.as_ref()) {
            drop(far.port.lock().take());
        }
        unused
    }
}

impl OnGroup for Shared {
    fn under_way(&self) -> Vec<OfWindow> {
        let mut all = self.waits.lock().clone();
        for (place, peer) in self.peers.iter().enumerate() {
            let of = |name, since| OfWindow {
                name,
                peer: place,
                since,
            };
            all.extend(peer.awaited_since().map(|since| of("wait_signal", since)));
            let transfers = peer.far.as_ref().map(Far::under_way).unwrap_or_default();
            all.extend(transfers.into_iter().map(|(since, writes)| match writes {
                true => of("put", since),
                false => of("get", since),
            }));
        }
        all.sort_by_key(|it| it.since);
        all
    }
}

/// Takes memory back from the ranks of this host: they begin to use it no more. Waits until none is in the middle of writing to
/// it. From one that has stopped there the heap takes it away.
pub(super) fn take_back<'a>(
    near: impl Iterator<Item = (&'a End, &'a IsOver)> + Clone,
    (start, bytes): (usize, usize),
) {
    near.clone().for_each(|(end, _)| end.close());
    let until = Instant::now() + WRITERS_PATIENCE;
    for (end, is_gone) in near {
        while end.is_written() && !is_gone() {
            if Instant::now() > until {
                let (end, is_gone) = (end.clone(), Arc::clone(is_gone));
                let is_over = Arc::new(move || !end.is_written() || is_gone());
                heap::detach(start, bytes, is_over);
                break;
            }
            std::thread::yield_now();
        }
    }
}
