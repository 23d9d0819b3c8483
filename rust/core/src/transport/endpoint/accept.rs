//! Accepting: one thread over one epoll has the listening sockets and every connection that has proved nothing yet. So what
//! strangers do costs no thread, and no more descriptors than [`Limits::simultaneous`](super::shared::Limits), whatever
//! they send and however many come. A connection is a state machine until its proof ([`guest`](super::guest)). Only a
//! proven member gets a thread, one of a bounded number, on which the transport whose row in `transports` has the purpose
//! of its hello makes the link.
//!
//! Over the Unix socket only processes of this process's user are heard, since memory is shared there. The kernel says who
//! is at the other end, so another user's connection is closed before anything is spent on it.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

use super::conversation::Conversation;
use super::crowd::{Admission, Crowd};
use super::guest::{Guest, Progress, Proof};
use super::inquiry;
use super::listen::Listeners;
use super::shared::{Parked, Shared};
use super::status;
use super::transports::TRANSPORTS;
use super::visit::{Reason, Stream, Visit, VisitorSlot, peer_of};
use super::wire::{Cut, Patience, foreign_user, timespec};
use crate::error::{Error, Result};
use crate::fence::contained;
use crate::fork;
use crate::transport::handshake::{Answer, Purpose};

/// How often the accepting thread looks for parked streams that no group has asked for.
const SWEEP: Duration = Duration::from_secs(1);
/// How long nothing is accepted after the system refused a connection: most likely no descriptors are left.
const REFUSED_PAUSE: Duration = Duration::from_millis(50);
/// How many connections of one listener are accepted before the others have their turn.
const ACCEPTED_AT_ONCE: usize = 32;

const WAKE: u64 = 0;
const FIRST_LISTENER: u64 = 1;
/// Above the listeners of any host.
const FIRST_GUEST: u64 = 1 << 32;

/// A socket that connections come to.
struct Listener {
    socket: Socket,
    caller: Caller,
}

/// Which processes connect to a listener.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Caller {
    Rank,
    /// A rank of another host, and no other.
    RankElsewhere,
    /// A process that asks for this one's state.
    Asker,
}

enum Socket {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Socket {
    fn accept(&self) -> io::Result<Stream> {
        fork::make_private(|| match self {
            Self::Unix(unix) => unix.accept().map(|(stream, _)| Stream::Unix(stream)),
            Self::Tcp(tcp) => tcp.accept().map(|(stream, _)| Stream::Tcp(stream)),
        })
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(unix) => unix.as_fd(),
            Self::Tcp(tcp) => tcp.as_fd(),
        }
    }
}

/// The state of the accepting thread.
pub(super) struct Acceptor {
    shared: Arc<Shared>,
    epoll: OwnedFd,
    listeners: BTreeMap<u64, Listener>,
    /// In the order in which they came.
    guests: BTreeMap<u64, Guest>,
    next: u64,
    crowd: Crowd,
    /// Nothing is accepted before.
    accepts_from: Option<Instant>,
}

impl Acceptor {
    /// # Errors
    /// `System` when the epoll cannot be made.
    pub(super) fn new(shared: Arc<Shared>, listeners: Listeners) -> Result<Self> {
        let failed = |cause: rustix::io::Errno| Error::system("wait for connections", cause);
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(failed)?;
        epoll::add(
            &epoll,
            &shared.wake,
            EventData::new_u64(WAKE),
            EventFlags::IN,
        )
        .map_err(failed)?;
        let tcp = |caller| {
            move |tcp| Listener {
                socket: Socket::Tcp(tcp),
                caller,
            }
        };
        let unix = |caller| {
            move |unix| Listener {
                socket: Socket::Unix(unix),
                caller,
            }
        };
        let inside = listeners.inside.into_iter().map(tcp(Caller::Rank));
        let outside = listeners.outside.into_iter();
        let all = inside
            .chain(outside.map(tcp(Caller::RankElsewhere)))
            .chain(listeners.unix.map(unix(Caller::Rank)))
            .chain(listeners.status.map(unix(Caller::Asker)));
        let listeners: BTreeMap<u64, Listener> = (FIRST_LISTENER..).zip(all).collect();
        for (id, listener) in &listeners {
            let data = EventData::new_u64(*id);
            epoll::add(&epoll, &listener.socket, data, EventFlags::IN).map_err(failed)?;
        }
        Ok(Self {
            shared,
            epoll,
            listeners,
            guests: BTreeMap::new(),
            next: FIRST_GUEST,
            crowd: Crowd::new(),
            accepts_from: None,
        })
    }

    /// Accepts until the endpoint goes.
    pub(super) fn run(mut self) {
        let mut events: Vec<Event> = Vec::with_capacity(128);
        let mut has_parked = false;
        loop {
            let left = self.next_deadline().map(|deadline| {
                let left = deadline.saturating_duration_since(Instant::now());
                left.min(Duration::from_secs(60))
            });
            let sweep = has_parked.then_some(SWEEP);
            let timeout = left.into_iter().chain(sweep).min().map(timespec);
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(cause) => {
                    tracing::error!(%cause, "this process accepts no more connections");
                    return;
                }
            }
            if self.shared.stopping.load(Ordering::Acquire) {
                return;
            }
            for event in &events {
                match event.data.u64() {
                    WAKE => self.wake(),
                    id if id < FIRST_GUEST => self.accept(id),
                    id => self.service(id),
                }
            }
            self.expire();
            has_parked = sweep_parked(&self.shared);
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let limits = &self.shared.limits;
        let guests = self.guests.values().map(|guest| guest.deadline(limits));
        guests.chain(self.accepts_from).min()
    }

    /// Something has changed elsewhere: a group was registered, a visit has ended, or the endpoint is for this host alone.
    fn wake(&mut self) {
        let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        if self.shared.inside_only.load(Ordering::Acquire) {
            let before = self.listeners.len();
            self.listeners.retain(|_, listener| {
                let stays = listener.caller != Caller::RankElsewhere;
                if !stays {
                    let _ = epoll::delete(&self.epoll, &listener.socket);
                }
                stays
            });
            if self.listeners.len() < before {
                tracing::info!("all ranks are on this host: listening on loopback alone");
            }
        }
        let awaiting = self.guests.iter().filter(|(_, guest)| guest.awaits_group());
        let awaiting: Vec<u64> = awaiting.map(|(id, _)| *id).collect();
        awaiting.into_iter().for_each(|id| self.service(id));
        self.resume();
    }

    /// Takes connections in, as long as there is room.
    fn accept(&mut self, id: u64) {
        for _ in 0..ACCEPTED_AT_ONCE {
            let Some(listener) = self.listeners.get(&id) else {
                return;
            };
            let visiting = self.shared.visiting.load(Ordering::Acquire);
            let room = self.crowd.room(&self.guests, visiting, &self.shared.limits);
            if let Admission::After(pause) = room {
                return self.pause(pause);
            }
            let stream = match listener.socket.accept() {
                Ok(stream) => stream,
                Err(cause) => match cause.kind() {
                    io::ErrorKind::WouldBlock => return,
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                    _ => {
                        self.say(|suppressed| {
                            tracing::warn!(%cause, suppressed, "cannot accept a connection");
                        });
                        return self.pause(REFUSED_PAUSE);
                    }
                },
            };
            if let Stream::Unix(unix) = &stream
                && let Some(user) = foreign_user(unix)
            {
                let reason = Reason::new(format!("it belongs to {user}"));
                self.log(&stream.peer(), &reason);
                continue;
            }
            let stream = match stream {
                Stream::Unix(asker) if listener.caller == Caller::Asker => {
                    self.answer(asker);
                    continue;
                }
                stream => stream,
            };
            if let Admission::InPlaceOf(stranger) = room {
                self.show_out(stranger);
            }
            self.welcome(stream);
        }
    }

    /// Tells a process of this user the state of this one.
    fn answer(&self, asker: UnixStream) {
        let shared = Arc::clone(&self.shared);
        let place = VisitorSlot::new(&self.shared);
        let begun = self.shared.visits.begin(true, move |_| {
            if let Err(cause) = status::answer(&shared, &asker) {
                tracing::debug!(%cause, "a process that asked for the state of this one did not read it");
            }
            drop(place);
        });
        if let Err(cause) = begun {
            tracing::debug!(%cause, "no thread to tell the state of this process");
        }
    }

    fn welcome(&mut self, stream: Stream) {
        let id = self.next;
        self.next += 1;
        let guest = Guest::new(stream);
        let data = EventData::new_u64(id);
        if let Err(cause) = epoll::add(&self.epoll, guest.stream(), data, guest.interest()) {
            tracing::debug!(%cause, "cannot wait for a connection, which is closed");
            return;
        }
        self.guests.insert(id, guest);
        // Its hello has often arrived with it.
        self.service(id);
    }

    /// Does with a guest what can be done now.
    fn service(&mut self, id: u64) {
        let may_measure = !self.guests.values().any(Guest::is_measuring);
        let Some(guest) = self.guests.remove(&id) else {
            return;
        };
        let before = guest.interest();
        let may_measure = may_measure || guest.is_measuring();
        let peer = guest.peer();
        let progress = contained(|| guest.advance(&self.shared, may_measure));
        match progress {
            Ok(Progress::Waits(guest)) => self.keep(id, guest, before),
            Ok(Progress::Proven(proof, stream)) => {
                let _ = epoll::delete(&self.epoll, &stream);
                self.hand_over(proof, stream);
            }
            Ok(Progress::Over(stream, result)) => {
                // Its end alone would leave it there while a forked child has a copy.
                let _ = epoll::delete(&self.epoll, &stream);
                if let Err(reason) = result {
                    self.log(&peer, &reason);
                }
                self.resume();
            }
            // It was reported, and the connection is gone.
            Err(_) => self.resume(),
        }
    }

    fn keep(&mut self, id: u64, guest: Guest, before: EventFlags) {
        let interest = guest.interest();
        let data = EventData::new_u64(id);
        if interest != before
            && let Err(cause) = epoll::modify(&self.epoll, guest.stream(), data, interest)
        {
            tracing::debug!(%cause, "cannot wait for a connection, which is closed");
            return;
        }
        self.guests.insert(id, guest);
    }

    /// Gives a proven member to a thread on which its link is made.
    fn hand_over(&mut self, proof: Proof, stream: Stream) {
        let shared = Arc::clone(&self.shared);
        let place = VisitorSlot::new(&self.shared);
        let begun = self.shared.visits.begin(true, move |_| {
            let peer = stream.peer();
            let visit = Visit {
                shared: &shared,
                membership: proof.membership,
                hello: proof.hello,
                answers: proof.answers,
                patience: Patience {
                    deadline: proof.since + shared.limits.handshake,
                    called_off: [&shared.stopping; 2],
                    turn: None,
                },
            };
            if let Err(reason) = serve(visit, stream) {
                log(&shared, &peer, &reason);
            }
            drop(place);
        });
        if let Err(cause) = begun {
            self.say(|suppressed| {
                tracing::warn!(%cause, suppressed, "cannot start a thread for a rank's connection, which is closed");
            });
        }
    }

    /// Closes a connection whose place another one gets.
    fn show_out(&mut self, id: u64) {
        self.end(id, Cut::CalledOff.into());
    }

    fn end(&mut self, id: u64, reason: Reason) {
        if let Some(guest) = self.guests.remove(&id) {
            let _ = epoll::delete(&self.epoll, guest.stream());
            self.log(&guest.peer(), &reason);
            guest.dismiss(&reason);
        }
    }

    /// Ends what has run out of time.
    fn expire(&mut self) {
        let now = Instant::now();
        if self.accepts_from.is_some_and(|from| from <= now) {
            self.resume();
        }
        let limits = self.shared.limits;
        let late = self.guests.iter();
        let late = late.filter(|(_, guest)| guest.deadline(&limits) <= now);
        let late: Vec<u64> = late.map(|(id, _)| *id).collect();
        for id in late {
            // Those that wait for a group may find it now, and say which one it was if not.
            self.service(id);
            let is_late = |guest: &Guest| guest.deadline(&limits) <= now;
            if self.guests.get(&id).is_some_and(is_late) {
                self.end(id, Cut::TimedOut.into());
                self.resume();
            }
        }
    }

    fn pause(&mut self, pause: Duration) {
        self.accepts_from = Some(Instant::now() + pause);
        self.listen_for(EventFlags::empty());
    }

    fn resume(&mut self) {
        if self.accepts_from.take().is_some() {
            self.listen_for(EventFlags::IN);
        }
    }

    fn listen_for(&self, interest: EventFlags) {
        for (id, listener) in &self.listeners {
            let data = EventData::new_u64(*id);
            if let Err(cause) = epoll::modify(&self.epoll, &listener.socket, data, interest) {
                tracing::error!(%cause, "this process accepts no more connections");
            }
        }
    }

    fn log(&self, peer: &str, reason: &Reason) {
        log(&self.shared, peer, reason);
    }

    /// Writes a line that strangers can cause, unless there have been many.
    fn say(&self, write: impl FnOnce(u64)) {
        if let Some(suppressed) = self.shared.strangers.lock().line() {
            write(suppressed);
        }
    }
}

fn log(shared: &Shared, peer: &str, reason: &Reason) {
    if reason.is_usual {
        tracing::debug!(%peer, %reason, "a connection came to nothing");
    } else if let Some(suppressed) = shared.strangers.lock().line() {
        tracing::warn!(%peer, %reason, suppressed, "turned a connection away");
    }
}

/// Drops parked streams whose time is over. True when some remain.
fn sweep_parked(shared: &Shared) -> bool {
    let now = Instant::now();
    let mut parked = shared.parked.lock();
    let expired: Vec<Parked> = parked
        .extract_if(.., |parked| parked.expires <= now)
        .collect();
    let remain = !parked.is_empty();
    drop(parked);
    for parked in expired {
        let peer = peer_of(&parked.data);
        tracing::warn!(%peer, "the control connection of a link did not come");
    }
    remain
}

/// Does what a proven member asks for.
fn serve(mut visit: Visit<'_>, stream: Stream) -> std::result::Result<(), Reason> {
    let from = visit.hello.from;
    if !visit.membership.has_peer(from) {
        visit.answer(&stream, Answer::Failed)?;
        return Err(Reason::new(format!(
            "it says that it is rank {from}, as this is"
        )));
    }
    let purpose = visit.hello.purpose;
    match purpose {
        Purpose::Conversation => return converse(visit, stream),
        Purpose::Status => return inquiry::tell(visit, stream),
        _ => {}
    }
    let serves = TRANSPORTS
        .iter()
        .find(|row| row.purposes.contains(&purpose));
    match serves {
        Some(transport) => (transport.accept)(visit, stream),
        None => visit.turn_away(&stream),
    }
}

/// Gives a conversation that a peer has begun to the group.
fn converse(mut visit: Visit<'_>, stream: Stream) -> Result<(), Reason> {
    let stream = match stream {
        Stream::Tcp(stream) => stream,
        other => return visit.turn_away(&other),
    };
    if visit.membership.is_closed() {
        return visit.answer(&stream, Answer::Left);
    }
    visit.answer(&stream, Answer::Accept)?;
    let conversation = Conversation::new(stream, visit.answers.into_cipher());
    visit.membership.converse(visit.hello.from, conversation);
    Ok(())
}
