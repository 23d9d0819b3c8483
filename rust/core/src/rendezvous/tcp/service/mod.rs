//! The work of the thread of the [TCP store's server](super::server).
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
//! | bytes kept for parts of requests and replies, and for awaited keys | 40 KiB each, and 64 MiB together beyond that |
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
//! it needs to, see [`store`](super::store), so more ranks than connections can meet, only slower.

mod admission;
mod requests;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::net::{Shutdown, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use socket2::SockRef;

use self::admission::CLASSES;
use super::bounds::{Bounds, Budget};
use super::connection::{Connection, Stage, Value};
use super::wire::{FRAME_CONTENT, StoreKey};
use crate::locks::Mutex;
use crate::rarely::Rarely;
use crate::types::Rank;

/// Keys and values together may take this many bytes.
const MOST_STORED: usize = 256 << 20;
/// The bytes that connections together may make the server keep.
const MOST_KEPT: usize = 64 << 20;

/// How long a server that ends goes on delivering replies.
const FAREWELL_TIME: Duration = Duration::from_secs(1);

const WAKE: u64 = 0;
const LISTENER: u64 = 1;
const FIRST_CONNECTION: u64 = 2;

/// The state that the thread and its owner share.
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
}
