//! What the thread of the [TCP store's server](super::tcp_server) does.
//!
//! One thread over one epoll, so that thousands of ranks cost no thread each. A mistake of one client never costs
//! another, and everything that a client can make this process keep has a bound:
//!
//! | what | bound |
//! |---|---|
//! | connections, of all stores of the process | half of the descriptors that the process may have, at most 16,384 |
//! | those of them that have proved nothing yet | a quarter of that, at most 256 |
//! | time to say hello, and to prove that the hello was one's own | 10 s each |
//! | time without a request, for a request and for taking a reply | 60 s each |
//! | bytes kept for parts of requests and of replies, and keys that are waited for | 40 KiB each, and 64 MiB together beyond that |
//! | keys and values, also replaced ones while a reply has them | 256 MiB |
//! | waits | one for each connection |
//! | lines in the log | 5, and then one in 10 s with the number of those left out |
//!
//! A reply costs no copy: it refers to the value, and is sealed by the frame as the client takes it; the client's next
//! request is not read before.
//!
//! **When there are too many connections**, the server closes the oldest of those that have proved nothing. So
//! strangers keep out no member, whatever they send: members say hello at once. Each connection has a moment for that;
//! until it is over, further ones wait in the kernel's queue, where they cost no descriptor. If all others are members,
//! the server closes the one that has been quiet for longest. A client whose connection is closed connects again when
//! it needs to, see [`tcp_store`](super::tcp_store), so more ranks than connections can meet, only slower.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io::{self, ErrorKind};
use std::mem::size_of;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use socket2::SockRef;

use super::LEFT;
use super::tcp_bounds::{Bounds, Budget};
use super::tcp_connection::{Close, Connection, Stage, Value};
use super::tcp_wire::{ABSENT, FRAME_CONTENT, FULL, OK, Request, StoreKey};
use crate::fork;
use crate::rarely::Rarely;
use crate::types::Rank;

/// Keys and values together may take this many bytes.
const MOST_STORED: usize = 256 << 20;
/// What connections may make the server keep, together.
const MOST_KEPT: usize = 64 << 20;
/// What a key costs beside its bytes and its value's.
const KEY_COST: usize = size_of::<(String, Arc<Value>, Value)>() + 64;
/// How long a server that ends goes on delivering replies.
const FAREWELL_TIME: Duration = Duration::from_secs(1);
/// How long the server accepts nothing after it could not.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// So many connections are accepted before the others are looked at again.
const ACCEPTED_AT_ONCE: usize = 64;

const WAKE: u64 = 0;
const LISTENER: u64 = 1;
const FIRST_CONNECTION: u64 = 2;

/// Those connections that may be closed to make room for others, in this order, once they have been in their stage for
/// so long: strangers that have not said hello, those that have not proved it, and members.
const CLASSES: [Duration; 3] = [
    Duration::from_millis(50),
    Duration::from_millis(250),
    Duration::from_secs(1),
];
const MEMBERS: usize = 2;

fn class(stage: &Stage) -> usize {
    match stage {
        Stage::Greeting => 0,
        Stage::Answered => 1,
        Stage::Ready | Stage::Waiting(_) | Stage::Replying => MEMBERS,
    }
}

/// What the thread and its owner share.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) stop: AtomicBool,
    pub(super) wake: OwnedFd,
    /// The group that meets here, if the server is to end with the meeting.
    pub(super) meeting: Mutex<Option<Expected>>,
}

/// The group that meets at a store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    pub(super) world: usize,
    /// How long the others may take after rank 0 has joined.
    pub(super) patience: Duration,
}

/// The state of the thread.
pub(super) struct Server {
    /// Until the server ends.
    listener: Option<TcpListener>,
    epoll: OwnedFd,
    control: Arc<Control>,
    key: StoreKey,
    bounds: Bounds,
    connections: HashMap<u64, Connection>,
    next: u64,
    values: HashMap<String, Arc<Value>>,
    stored: Budget,
    kept: Budget,
    /// The connections that wait for a key.
    waiters: HashMap<String, BTreeSet<u64>>,
    /// The connections of each class by the time when they entered their stage.
    classes: [BTreeSet<(Instant, u64)>; CLASSES.len()],
    /// The deadlines of all connections that have one.
    deadlines: BTreeSet<(Instant, u64)>,
    /// Nothing is accepted before.
    accepts_from: Option<Instant>,
    /// The ranks that need the store no longer.
    left: HashSet<Rank>,
    /// When the server ends at the latest, once rank 0 has left.
    ends: Option<Instant>,
    /// When a server that ends stops delivering replies.
    farewell: Option<Instant>,
    strangers: Rarely,
    failures: Rarely,
    scratch: Box<[u8]>,
}

impl Server {
    pub(super) fn new(
        listener: TcpListener,
        key: StoreKey,
        control: Arc<Control>,
    ) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        for (data, source) in [
            (WAKE, rustix::fd::AsFd::as_fd(&control.wake)),
            (LISTENER, rustix::fd::AsFd::as_fd(&listener)),
        ] {
            epoll::add(&epoll, source, EventData::new_u64(data), EventFlags::IN)?;
        }
        Ok(Self {
            listener: Some(listener),
            epoll,
            control,
            key,
            bounds: Bounds::here(),
            connections: HashMap::new(),
            next: FIRST_CONNECTION,
            values: HashMap::new(),
            stored: Budget::new(MOST_STORED),
            kept: Budget::new(MOST_KEPT),
            waiters: HashMap::new(),
            classes: Default::default(),
            deadlines: BTreeSet::new(),
            accepts_from: None,
            left: HashSet::new(),
            ends: None,
            farewell: None,
            strangers: Rarely::strangers(),
            failures: Rarely::strangers(),
            scratch: vec![0; FRAME_CONTENT].into(),
        })
    }

    /// Serves until the server is closed, or until the meeting has ended and clients have taken the last replies.
    pub(super) fn serve(mut self) {
        let mut events: Vec<Event> = Vec::with_capacity(256);
        while !self.has_ended() {
            let timeout = self.next_deadline().map(|deadline| {
                // No longer than a minute, which every kernel's timeout can express.
                let left = deadline.saturating_duration_since(Instant::now());
                let left = left.min(Duration::from_secs(60));
                Timespec {
                    tv_sec: left.as_secs() as i64,
                    tv_nsec: left.subsec_nanos().into(),
                }
            });
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(cause) => {
                    tracing::error!(%cause, "the store server cannot wait and ends");
                    return;
                }
            }
            for event in &events {
                match event.data.u64() {
                    WAKE => {
                        let mut count = [0; 8];
                        let _ = rustix::io::read(&self.control.wake, &mut count[..]);
                    }
                    LISTENER => self.accept(),
                    id => self.service(id),
                }
            }
            self.expire();
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let first = self.deadlines.first().map(|(deadline, _)| *deadline);
        [first, self.accepts_from, self.ends, self.farewell]
            .into_iter()
            .flatten()
            .min()
    }

    /// Whether all is over. Begins the farewell when it is time for that.
    fn has_ended(&mut self) -> bool {
        if self.farewell.is_none() {
            let is_over = self.control.stop.load(Ordering::Acquire) || self.meeting_is_over();
            if !is_over {
                return false;
            }
            self.farewell = Some(Instant::now() + FAREWELL_TIME);
            if let Some(listener) = self.listener.take() {
                // A forked child may have a copy, which would go on listening.
                let _ = epoll::delete(&self.epoll, &listener);
                let _ = SockRef::from(&listener).shutdown(Shutdown::Both);
            }
            self.accepts_from = None;
            let ids: Vec<u64> = self.connections.keys().copied().collect();
            for id in ids {
                if self.connections[&id].stage != Stage::Replying {
                    self.close(id);
                }
            }
        }
        self.connections.is_empty() || self.farewell.is_some_and(|end| Instant::now() >= end)
    }

    /// Whether all ranks of the group have said that they need the store no longer, or had their time to say so.
    fn meeting_is_over(&self) -> bool {
        let expected = *self.control.meeting.lock();
        let all = expected.is_some_and(|group| self.left.len() >= group.world);
        all || self.ends.is_some_and(|end| Instant::now() >= end)
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTED_AT_ONCE {
            let now = Instant::now();
            let wait = self.make_room(now);
            if !wait.is_zero() {
                return self.pause_accepting(now + wait);
            }
            let Some(listener) = &self.listener else {
                return;
            };
            match listener.accept() {
                Ok((stream, from)) => {
                    fork::keep_private(&stream);
                    self.welcome(stream, from, now);
                }
                Err(cause) => match cause.kind() {
                    ErrorKind::WouldBlock => return,
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {}
                    // Out of descriptors or memory: the listener stays readable, so do not come back at once.
                    _ => {
                        if let Some(suppressed) = self.failures.line() {
                            tracing::warn!(%cause, suppressed, "the store server cannot accept a connection");
                        }
                        self.evict(now, CLASSES.len());
                        return self.pause_accepting(now + ACCEPT_PAUSE);
                    }
                },
            }
        }
    }

    /// How long it takes until there is room for another connection: nothing, if there is now.
    fn make_room(&mut self, now: Instant) -> Duration {
        let unproven = self.classes[..MEMBERS]
            .iter()
            .map(BTreeSet::len)
            .sum::<usize>();
        let classes = if unproven >= self.bounds.unproven {
            MEMBERS
        } else if self.bounds.are_reached(self.connections.len()) {
            CLASSES.len()
        } else {
            return Duration::ZERO;
        };
        self.evict(now, classes)
    }

    /// Closes the connection that has the least claim to stay among the first `classes`. Returns how long it takes
    /// until there is one, if there is none now.
    fn evict(&mut self, now: Instant, classes: usize) -> Duration {
        let mut wait = ACCEPT_PAUSE;
        for (class, age) in CLASSES.iter().enumerate().take(classes) {
            let Some(&(since, id)) = self.classes[class].first() else {
                continue;
            };
            let left = age.saturating_sub(now.saturating_duration_since(since));
            if left.is_zero() {
                if class < MEMBERS
                    && let Some(suppressed) = self.strangers.line()
                {
                    tracing::info!(
                        suppressed,
                        "the store closes connections that say nothing, to make room"
                    );
                }
                self.close(id);
                return Duration::ZERO;
            }
            wait = wait.min(left);
        }
        wait
    }

    fn pause_accepting(&mut self, until: Instant) {
        self.accepts_from = Some(until);
        self.listen_for(EventFlags::empty());
    }

    fn resume_accepting(&mut self) {
        if self.accepts_from.take().is_some() {
            self.listen_for(EventFlags::IN);
        }
    }

    fn listen_for(&self, interest: EventFlags) {
        if let Some(listener) = &self.listener {
            let data = EventData::new_u64(LISTENER);
            if let Err(cause) = epoll::modify(&self.epoll, listener, data, interest) {
                tracing::error!(%cause, "the store server accepts no more connections");
            }
        }
    }

    fn welcome(&mut self, stream: TcpStream, from: SocketAddr, now: Instant) {
        let id = self.next;
        self.next += 1;
        let ready = Connection::new(stream, &self.kept, now).and_then(|connection| {
            let data = EventData::new_u64(id);
            epoll::add(&self.epoll, connection.stream(), data, connection.interest)?;
            Ok(connection)
        });
        match ready {
            // Its hello has often arrived with it.
            Ok(connection) => self.proceed(id, connection),
            Err(cause) => tracing::debug!(%cause, %from, "the store cannot serve a connection"),
        }
    }

    /// Reads, answers and writes what connection `id` is ready for.
    fn service(&mut self, id: u64) {
        if let Some(connection) = self.take(id) {
            self.proceed(id, connection);
        }
    }

    /// Does with a connection what can be done now, and keeps it unless it is to be closed.
    fn proceed(&mut self, id: u64, mut connection: Connection) {
        match self.advance(id, &mut connection) {
            Ok(()) => self.put(id, connection),
            Err(Close::Ended) => self.forget(id, &connection),
            Err(Close::Stranger) => {
                if let Some(suppressed) = self.strangers.line() {
                    let from = connection.stream().peer_addr().ok();
                    tracing::info!(
                        ?from,
                        suppressed,
                        "the store refused a process of another job, or with another secret or version"
                    );
                }
                self.forget(id, &connection);
            }
        }
    }

    fn advance(&mut self, id: u64, connection: &mut Connection) -> Result<(), Close> {
        if connection.stage != Stage::Replying
            && connection.receive(&self.key, &mut self.scratch)?
        {
            let bytes = connection.take_request();
            // It was parsed before.
            let request = Request::read(&bytes).ok().flatten().ok_or(Close::Ended)?;
            self.answer(id, connection, &request)?;
        }
        if connection.stage == Stage::Replying && connection.flush()? && self.farewell.is_some() {
            return Err(Close::Ended);
        }
        Ok(())
    }

    fn answer(
        &mut self,
        id: u64,
        connection: &mut Connection,
        request: &Request<'_>,
    ) -> Result<(), Close> {
        match *request {
            Request::Set(key, value) => {
                let status = self.set(key, value);
                connection.reply(status, None);
            }
            Request::Get(key) => match self.values.get(key) {
                Some(value) => connection.reply(OK, Some(Arc::clone(value))),
                None => connection.reply(ABSENT, None),
            },
            Request::Wait(key, time) => match self.values.get(key) {
                Some(value) => connection.reply(OK, Some(Arc::clone(value))),
                None if time.is_zero() => connection.reply(ABSENT, None),
                None => {
                    connection.wait_for(key.to_owned(), time)?;
                    self.waiters.entry(key.to_owned()).or_default().insert(id);
                }
            },
        }
        Ok(())
    }

    /// Sets a value and answers the clients that wait for it. Returns the status for the reply.
    fn set(&mut self, key: &str, value: &[u8]) -> u8 {
        let mut share = self.stored.share();
        if share.resize(KEY_COST + key.len() + value.len()).is_err() {
            return FULL;
        }
        let value = Value::new(value, share);
        self.values.insert(key.to_owned(), Arc::clone(&value));
        for waiter in self.waiters.remove(key).unwrap_or_default() {
            self.end_wait(waiter, OK, Some(&value));
        }
        if let Some(rank) = key.strip_prefix(LEFT).and_then(|rank| rank.parse().ok()) {
            self.note_leaving(rank, &value.bytes);
        }
        OK
    }

    /// Rank `rank` of as many as `world` says needs the store no longer.
    fn note_leaving(&mut self, rank: Rank, world: &[u8]) {
        let mut meeting = self.control.meeting.lock();
        if meeting.is_none() {
            // The process that made a unique id need not be one of the group.
            let world = std::str::from_utf8(world)
                .ok()
                .and_then(|text| text.parse().ok());
            *meeting = world.map(|world| Expected {
                world,
                patience: Duration::MAX,
            });
        }
        let Some(group) = meeting.filter(|group| rank < group.world) else {
            return;
        };
        self.left.insert(rank);
        if rank == 0 {
            self.ends = Instant::now().checked_add(group.patience);
        }
    }

    /// Ends the wait of connection `id`, which is no longer among the waiters of its key.
    fn end_wait(&mut self, id: u64, status: u8, value: Option<&Arc<Value>>) {
        if let Some(mut connection) = self.take(id) {
            connection.reply(status, value.map(Arc::clone));
            self.proceed(id, connection);
        }
    }

    /// Ends what has run out of time.
    fn expire(&mut self) {
        let now = Instant::now();
        if self.accepts_from.is_some_and(|from| from <= now) {
            self.resume_accepting();
        }
        while let Some(&(deadline, id)) = self.deadlines.first() {
            if deadline > now {
                return;
            }
            let stage = self
                .connections
                .get(&id)
                .map(|connection| &connection.stage);
            match stage {
                Some(Stage::Waiting(key)) => {
                    let key = key.clone();
                    self.forget_waiter(&key, id);
                    self.end_wait(id, ABSENT, None);
                }
                _ => self.close(id),
            }
        }
    }

    fn forget_waiter(&mut self, key: &str, id: u64) {
        if let Some(waiters) = self.waiters.get_mut(key) {
            waiters.remove(&id);
            if waiters.is_empty() {
                self.waiters.remove(key);
            }
        }
    }

    /// Takes connection `id` out of all lists.
    fn take(&mut self, id: u64) -> Option<Connection> {
        let connection = self.connections.remove(&id)?;
        self.classes[class(&connection.stage)].remove(&(connection.since, id));
        if let Some(deadline) = connection.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        Some(connection)
    }

    /// Puts a connection into the lists of its stage, and waits for what it needs.
    fn put(&mut self, id: u64, mut connection: Connection) {
        let interest = match connection.stage {
            Stage::Replying => EventFlags::OUT,
            _ => EventFlags::IN,
        };
        if connection.interest != interest {
            connection.interest = interest;
            let data = EventData::new_u64(id);
            if epoll::modify(&self.epoll, connection.stream(), data, interest).is_err() {
                return self.forget(id, &connection);
            }
        }
        let class = class(&connection.stage);
        self.classes[class].insert((connection.since, id));
        if let Some(deadline) = connection.deadline {
            self.deadlines.insert((deadline, id));
        }
        self.connections.insert(id, connection);
        if class == MEMBERS {
            // One fewer that has proved nothing.
            self.resume_accepting();
        }
    }

    fn close(&mut self, id: u64) {
        if let Some(connection) = self.take(id) {
            self.forget(id, &connection);
        }
    }

    /// What is left to do for a connection that is in no list and goes.
    fn forget(&mut self, id: u64, connection: &Connection) {
        // Its end alone would leave it there while a forked child has a copy.
        let _ = epoll::delete(&self.epoll, connection.stream());
        if let Stage::Waiting(key) = &connection.stage {
            self.forget_waiter(key, id);
        }
        self.resume_accepting();
    }
}
