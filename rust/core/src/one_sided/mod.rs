//! One-sided transfers: a process reads and writes memory that another one has registered, and that one calls nothing.
//!
//! Each side opens a [`Port`] and [binds](Port::bind) it, which gives bytes by which a peer [connects](Port::connect). It
//! [registers](Port::register) memory, and gives the peer a [`RemoteRegion`] for it, by whatever means there are. The peer
//! then [reads](Port::read) and [writes](Port::write): in memory that both map where it lies in the shared [heap](crate::heap),
//! by one copy of the system elsewhere on the same host, over TCP between hosts.
//!
//! A connection is a group of two ranks of its own ([`Communicator`]), so all of its transports, its proofs of membership, its
//! encryption and its way to notice the end of a peer are those of every group. Rank 0 is the target and rank 1 the initiator.
//! A transfer is a few messages between them ([`request`]). At the target a thread takes part for the process ([`serve`]): one
//! for each peer that has connected, up to a bound. A pair in which both sides start transfers is two groups.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod regions;
mod remote;
mod request;
mod serve;
mod transfer;

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use self::regions::Regions;
pub use self::regions::{Owner, Region};
use self::remote::PortId;
pub use self::remote::RemoteRegion;
use self::request::{INITIATOR, Kind, TARGET};
use self::serve::{Rest, Service};
pub use self::transfer::Transfer;
use crate::communicator::Communicator;
use crate::config::Config;
use crate::engine::Completion;
use crate::error::{Code, Error, Result};
use crate::fork::Own;
use crate::heap::IsOver;
use crate::locks::Mutex;
use crate::rarely::Rarely;
use crate::rendezvous::pairing::{Host, Invitation, Pair};
use crate::threads;
use crate::transport::cuda::driver::Stream;
use crate::transport::ends::{End, await_unmapping, keep_while_viewed};
use crate::transport::keys::random_bytes;
use crate::types::Rank;

/// How long a peer that has begun to connect may take.
const GUESTS_PATIENCE: Duration = Duration::from_secs(20);

/// Peers that have a port as theirs, at most.
const MOST_GUESTS: usize = 256;

/// One end of one-sided transfers: it has at most one peer of its own, and any number of those that have it as theirs.
///
/// Dropping it closes it, without waiting for transfers.
pub struct Port(Own<Arc<Shared>>);

struct Shared {
    id: PortId,
    config: Config,
    regions: Regions,
    state: Mutex<State>,
}

struct State {
    is_closed: bool,
    host: Option<Arc<Host>>,
    peer: Option<Arc<Peer>>,
    /// Of the peers that have this port as theirs.
    served: Vec<Arc<Service>>,
    /// Peers that are about to have it as theirs.
    joining: usize,
    /// Bounds what is logged of peers that do not come in.
    refusals: Rarely,
}

/// The shortest transfer in which a target is asked to map memory of a device. Drivers take some tenths of a millisecond to map
/// it, as long as shorter ones take through memory of the host; not measured here.
const MAPPED_FROM: usize = 1 << 20;

/// How long a first transfer waits for the link over which a peer can be asked to map memory.
const OPENING: Duration = Duration::from_millis(100);

/// The target of this port's transfers.
struct Peer {
    comm: Communicator,
    port: PortId,
    started: AtomicU64,
    /// The own end of a page shared with it, and whether it is gone; of one on this host, once it was needed.
    end: OnceLock<(End, IsOver)>,
    /// It has not answered that it cannot map memory of devices.
    is_asked: AtomicBool,
}

impl Peer {
    /// The number of the next transfer, from 1.
    fn count(&self) -> u64 {
        self.started.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Whether it is asked to map this process's memory of a device for a transfer of `length` bytes.
    fn maps(&self, length: usize) -> bool {
        length >= MAPPED_FROM && self.is_asked.load(Ordering::Relaxed) && self.meet()
    }

    fn map_no_more(&self) {
        self.is_asked.store(false, Ordering::Relaxed);
    }

    /// Whether there is a page shared with it. The first call opens the link that has one.
    fn meet(&self) -> bool {
        if self.end.get().is_some() {
            return true;
        }
        let group = self.comm.group();
        let hosts = group.host_of();
        if hosts[TARGET] != hosts[INITIATOR] || group.open_message_link(TARGET).is_err() {
            return false;
        }
        let until = Instant::now() + OPENING;
        while self.end.get().is_none() && Instant::now() < until {
            let is_open = group.has_message_link(TARGET);
            match end_beside(&self.comm, TARGET) {
                Some(end) => drop(self.end.set(end)),
                // A link without a page, over TCP.
                None if is_open => {
                    self.map_no_more();
                    return false;
                }
                None if group.error().is_some() => return false,
                None => std::thread::sleep(Duration::from_micros(50)),
            }
        }
        self.end.get().is_some()
    }

    /// After a transfer has failed: the peer maps no memory of this process any more. Waits a while until it has unmapped the
    /// memory of that transfer.
    fn take_back(&self) {
        if let Some((end, is_gone)) = self.end.get() {
            end.close();
            await_unmapping([(end, is_gone)].into_iter());
        }
    }

    /// Keeps memory of such a transfer until the peer has unmapped it.
    fn keep(&self, memory: impl Any + Send + Sync) {
        if let Some((end, is_gone)) = self.end.get() {
            keep_while_viewed(vec![(end.clone(), Arc::clone(is_gone))], Box::new(memory));
        }
    }
}

/// The own end of the page shared with a peer of this host, once the link between both is open, and whether that one is gone.
fn end_beside(comm: &Communicator, peer: Rank) -> Option<(End, IsOver)> {
    let (page, is_gone) = comm.group().page_and_end(peer)?;
    Some((End::new(page, comm.rank() < peer), is_gone))
}

impl Port {
    /// A port that is not bound yet. Its groups have the settings of `config`, in which both ends of a connection agree.
    ///
    /// # Errors
    /// `System` when the operating system gives no random bytes.
    pub fn new(config: Config) -> Result<Self> {
        let id = random_bytes()?;
        Ok(Self(Own::new(Arc::new(Shared {
            id,
            config,
            regions: Regions::new(id),
            state: Mutex::new(State {
                is_closed: false,
                host: None,
                peer: None,
                served: Vec::new(),
                joining: 0,
                refusals: Rarely::strangers(),
            }),
        }))))
    }

    /// Lets peers come, and returns what they need for that. It holds a secret: a process that has it can connect, and can
    /// neither pose as this port nor hear of other peers. The second call returns the same.
    ///
    /// # Errors
    /// `InvalidArgument` for an interface that is not there, `System` when no port can be had, `Aborted` when closed.
    pub fn bind(&self) -> Result<Vec<u8>> {
        self.0.check()?;
        let shared = &*self.0;
        if let Some(host) = &shared.open()?.host {
            return Ok(host.invitation().to_bytes());
        }
        // The endpoint keeps it for a while after the port has gone.
        let port = Arc::downgrade(&self.0);
        let made = Arc::new(Host::open(&shared.config, shared.id, move |pair| {
            if let Some(port) = port.upgrade() {
                port.receive(pair);
            }
        })?);
        let mut state = shared.open()?;
        // Another thread may have been faster.
        let host = state.host.get_or_insert(made);
        Ok(host.invitation().to_bytes())
    }

    /// Connects to the peer whose [`Port::bind`] returned `peer`. It need not do anything for that.
    ///
    /// # Errors
    /// `Timeout` when the peer does not answer within `timeout`; `InvalidArgument` for what is no address of a port, and
    /// where this port has a peer already; what the peers disagree on is a `Mismatch`; `Aborted` when closed.
    pub fn connect(&self, peer: &[u8], timeout: Duration) -> Result<()> {
        self.0.check()?;
        let invitation = Invitation::from_bytes(peer)?;
        let shared = &*self.0;
        if shared.open()?.peer.is_some() {
            return Err(connected());
        }
        let begun = Instant::now();
        let pair = Pair::visit(&invitation, &shared.config, timeout)?;
        let port = invitation.card();
        let left = timeout.saturating_sub(begun.elapsed());
        let comm = Communicator::join_within(&pair, (INITIATOR, 2), shared.config.clone(), left)?;
        prepare(&comm);
        let peer = Peer {
            comm,
            port,
            started: AtomicU64::new(0),
            end: OnceLock::new(),
            is_asked: AtomicBool::new(true),
        };
        let mut state = shared.open()?;
        if state.peer.is_some() {
            return Err(connected());
        }
        state.peer = Some(Arc::new(peer));
        Ok(())
    }

    /// Whether it is connected, and to a peer that lives as far as is known here.
    pub fn is_connected(&self) -> bool {
        if !self.0.is_here() {
            return false;
        }
        let state = self.0.state.lock();
        let peer = state.peer.as_ref().filter(|_| !state.is_closed);
        peer.is_some_and(|peer| peer.comm.error().is_none())
    }

    /// Registers `bytes` bytes from `start` on, for transfers of this process and, once it has their
    /// [`remote`](Self::remote) region, of a peer. `owner` is kept as long as they may be used. The same bytes again are
    /// the same region. They may lie on a device: then transfers copy them in no order with any stream of the program, to
    /// memory of the host or from there; or, of a megabyte and more between devices of one host, straight, where the driver
    /// exports the memory of the side that starts the transfer (CUDA IPC).
    ///
    /// # Errors
    /// `InvalidArgument` for no bytes, `Aborted` when closed, `System` when the driver fails.
    ///
    /// # Safety
    /// The bytes are allocated and initialised as long as `owner` lives. While a transfer moves some of them, no code
    /// writes to these, nor reads those that it writes; with whom has the region's [`RemoteRegion`] that is agreed by
    /// other means.
    pub unsafe fn register(&self, start: *mut u8, bytes: usize, owner: Owner) -> Result<Region> {
        self.0.check()?;
        // Not held: foreign code may be dropped.
        drop(self.0.open()?);
        self.0
            .regions
            .register(start.expose_provenance(), bytes, owner)
    }

    /// Ends a registration: transfers that begin later fail, on both sides. Waits for those under way. A region that is
    /// not registered any more is left as it is.
    ///
    /// # Errors
    /// `Timeout` when one is still under way after `timeout`; the registration has ended, and the memory is kept until
    /// that transfer has.
    pub fn unregister(&self, region: &Region, timeout: Duration) -> Result<()> {
        self.0.check()?;
        self.0.check_own(region)?;
        self.0.regions.unregister(region, timeout)
    }

    /// The region as peers know it.
    ///
    /// # Errors
    /// `InvalidArgument` when it is registered with another port, or not any more.
    pub fn remote(&self, region: &Region) -> Result<RemoteRegion> {
        self.0.check()?;
        self.0.check_own(region)?;
        if !region.is_registered() {
            return Err(unregistered());
        }
        Ok(RemoteRegion {
            port: self.0.id,
            region: region.id(),
            is_on_device: region.is_on_device(),
            offset: 0,
            length: region.len() as u64,
        })
    }

    /// Starts to write `range` of `local` to the beginning of `remote`, and returns at once. The first long transfer between
    /// devices of one host waits up to 100 ms for the link to the peer. When the transfer has ended
    /// well, the bytes are in the peer's memory. `completion` is called then, on a thread made for that, as those of
    /// [`Transfer::when_done`] are; for no bytes it is called before this returns.
    ///
    /// Transfers may overtake each other.
    ///
    /// # Errors
    /// `InvalidArgument` for ranges that do not fit and regions of other ports; the first cause of a connection that is
    /// dead; `Aborted` when closed. The completion is then not called.
    pub fn write(
        &self,
        local: &Region,
        range: Range<usize>,
        remote: &RemoteRegion,
        completion: Option<Completion>,
    ) -> Result<Transfer> {
        self.0.check()?;
        let peer = self.0.peer_of(local, remote)?;
        Transfer::start(Kind::Write, &peer, (local, range), remote, completion)
    }

    /// Starts to read the beginning of `remote` into `range` of `local`, as [`Port::write`] writes.
    ///
    /// # Errors
    /// As [`Port::write`].
    pub fn read(
        &self,
        local: &Region,
        range: Range<usize>,
        remote: &RemoteRegion,
        completion: Option<Completion>,
    ) -> Result<Transfer> {
        self.0.check()?;
        let peer = self.0.peer_of(local, remote)?;
        Transfer::start(Kind::Read, &peer, (local, range), remote, completion)
    }

    /// Memory of this process for one transfer, which no peer can name: `owner` is kept until the transfer has ended. With a
    /// stream it is memory of a device.
    ///
    /// # Safety
    /// As for [`Port::register`], until then; of memory that is only read, to read it is enough.
    pub(crate) unsafe fn lend(
        &self,
        memory: (usize, usize),
        stream: Option<Arc<Stream>>,
        owner: Owner,
    ) -> Region {
        self.0.regions.lend(memory, stream, owner)
    }

    /// Ends all: transfers under way fail, here and at the peers; registrations end. Idempotent. Those that are to end well
    /// are to be awaited first, those of peers by an agreement with these.
    ///
    /// # Errors
    /// `Timeout` when memory is still in use after `timeout`; it is then kept until it is not.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        self.0.check()?;
        self.0.close();
        self.0.regions.clear(timeout)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        if self.0.is_here() {
            self.0.close();
            // A region in use keeps its memory by itself.
            let _ = self.0.regions.clear(Duration::ZERO);
        }
    }
}

impl std::fmt::Debug for Port {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Port")
            .field("is_connected", &self.is_connected())
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// The state of a port that has not been closed.
    fn open(&self) -> Result<crate::locks::MutexGuard<'_, State>> {
        let state = self.state.lock();
        match state.is_closed {
            true => Err(Error::new(Code::Aborted, "the port has been closed")),
            false => Ok(state),
        }
    }

    fn check_own(&self, region: &Region) -> Result<()> {
        match region.port() == self.id {
            true => Ok(()),
            false => Err(Error::invalid("the memory is registered with another port")),
        }
    }

    /// The peer, of a transfer between these.
    fn peer_of(&self, local: &Region, remote: &RemoteRegion) -> Result<Arc<Peer>> {
        self.check_own(local)?;
        let peer = self.open()?.peer.clone();
        let peer = peer.ok_or_else(|| {
            Error::invalid(
                "the port is not connected: call `connect` with what the peer's `bind` returned",
            )
        })?;
        if remote.port != peer.port {
            return Err(Error::invalid(
                "the remote memory belongs to another port than the one that this port is connected to",
            ));
        }
        Ok(peer)
    }

    /// Gives a guest a thread, if there is room for one more.
    fn receive(self: &Arc<Self>, pair: Pair) {
        let Some(place) = self.make_room() else {
            return;
        };
        let begun = threads::spawn("unisono-target", move || place.0.serve(&pair));
        if let Err(cause) = begun {
            tracing::warn!(%cause, "no thread for a peer, which cannot connect now");
        }
    }

    /// A place for one more guest. Where all are taken, the guest that has rested for longest gives its own away, one that
    /// has never asked for anything before the others; `None` where none has rested for long enough.
    fn make_room(self: &Arc<Self>) -> Option<Joining> {
        let mut state = self.open().ok()?;
        let is_full = state.joining + state.served.len() >= MOST_GUESTS;
        let leaver = match is_full {
            true => {
                let rests: Vec<_> = state.served.iter().map(|service| service.rest()).collect();
                let Some(at) = who_leaves(&rests) else {
                    if let Some(suppressed) = state.refusals.line() {
                        let most = MOST_GUESTS;
                        tracing::warn!(
                            most,
                            suppressed,
                            "all places of a port are in use: no further peer can connect"
                        );
                    }
                    return None;
                };
                Some(state.served.swap_remove(at))
            }
            false => None,
        };
        state.joining += 1;
        drop(state);
        if let Some(leaver) = leaver {
            leaver.end();
        }
        Some(Joining(Arc::clone(self)))
    }

    /// Serves one guest until it goes.
    fn serve(self: &Arc<Self>, pair: &Pair) {
        let place = (TARGET, 2);
        let joined = Communicator::join_within(pair, place, self.config.clone(), GUESTS_PATIENCE);
        let service = match joined {
            Ok(comm) => {
                prepare(&comm);
                Arc::new(Service::new(comm))
            }
            Err(error) => {
                if let Ok(mut state) = self.open()
                    && let Some(suppressed) = state.refusals.line()
                {
                    tracing::warn!(%error, suppressed, "a peer began to connect and did not come");
                }
                return;
            }
        };
        match self.open() {
            Ok(mut state) => state.served.push(Arc::clone(&service)),
            // Closed meanwhile.
            Err(_) => service.end(),
        }
        service.run(&self.regions);
        let mut state = self.state.lock();
        state.served.retain(|served| !Arc::ptr_eq(served, &service));
    }

    fn close(&self) {
        // Groups end outside the lock: that waits for threads, which may want the state.
        let (host, peer, served) = {
            let mut state = self.state.lock();
            state.is_closed = true;
            let served = std::mem::take(&mut state.served);
            (state.host.take(), state.peer.take(), served)
        };
        if let Some(host) = host {
            host.close();
        }
        if let Some(peer) = peer {
            peer.comm.close();
        }
        served.iter().for_each(|service| service.end());
    }
}

/// Prepares the group of a pair for transfers.
fn prepare(comm: &Communicator) {
    // Each transfer takes as long as it takes; the waits for it are bounded.
    comm.set_timeout(Duration::ZERO);
    comm.group().read_by_two();
}

/// The place of a guest that has no group with this process yet.
struct Joining(Arc<Shared>);

impl Drop for Joining {
    fn drop(&mut self) {
        self.0.state.lock().joining -= 1;
    }
}

/// Which guest gives its place away, of those that rest for so long; it has asked for something before, or it has not.
fn who_leaves(rests: &[Option<Rest>]) -> Option<usize> {
    let mut longest: Option<(usize, Rest)> = None;
    for (at, rest) in rests.iter().enumerate() {
        let Some(rest) = rest.filter(Rest::is_long) else {
            continue;
        };
        if longest.is_none_or(|(_, other)| rest.leaves_before(&other)) {
            longest = Some((at, rest));
        }
    }
    longest.map(|(at, _)| at)
}

#[cold]
fn connected() -> Error {
    Error::invalid("the port is connected already; a port has one peer, so open another one")
}

#[cold]
fn unregistered() -> Error {
    Error::invalid("the memory has been unregistered")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_rested_for_longest_leaves_and_first_of_all_who_never_asked() {
        let rest = |seconds, has_asked| {
            Some(Rest {
                time: Duration::from_secs(seconds),
                has_asked,
            })
        };
        assert_eq!(who_leaves(&[None, rest(59, true), rest(9, false)]), None);
        let rests = [rest(100, true), None, rest(300, true), rest(5, false)];
        assert_eq!(who_leaves(&rests), Some(2));
        let rests = [rest(900, true), rest(11, false), rest(12, false)];
        assert_eq!(who_leaves(&rests), Some(2));
    }
}
