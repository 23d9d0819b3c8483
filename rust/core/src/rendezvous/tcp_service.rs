//! What the thread of the [TCP store's server](super::tcp_server) does.
//!
//! One thread over one epoll, so that thousands of ranks cost no thread each. Everything that arrives is bounded
//! before it is kept: lengths, connections, stored bytes. Who breaks the protocol is disconnected, and so is who
//! does not finish its hello in time; a mistake of one client never costs another.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, ErrorKind, Read, Write};
use std::mem;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

use super::store::{MAX_KEY, MAX_VALUE};
use super::tcp_store::{ABSENT, FULL, GET, HELLO, MAGIC, OK, REQUEST_HEAD, SET, WAIT, hello};

/// More connections than this are turned away.
const MAX_CONNECTIONS: usize = 1 << 16;
/// Keys and values together may take this many bytes.
const MAX_STORED: usize = 1 << 30;
const MAX_REQUEST: usize = REQUEST_HEAD + MAX_KEY + MAX_VALUE;
/// A connection that has not said hello by then is closed.
const HELLO_TIME: Duration = Duration::from_secs(10);
/// How long a server that ends goes on delivering replies.
const FAREWELL_TIME: Duration = Duration::from_secs(1);

const WAKE: u64 = 0;
const LISTENER: u64 = 1;
const FIRST_CONNECTION: u64 = 2;

/// What a connection is in.
enum Stage {
    /// Its hello has not come yet.
    Greeting,
    /// The next request may come.
    Ready,
    /// It waits for this key; the next request may not come before the reply.
    Waiting(String),
}

struct Connection {
    stream: TcpStream,
    stage: Stage,
    input: Vec<u8>,
    output: Vec<u8>,
    /// When `Greeting` or `Waiting` ends.
    deadline: Option<Instant>,
}

/// A connection that is to be closed: it ended, failed, or broke the protocol.
struct Close;

/// A request, parsed and bounded.
enum Request {
    Set(String, Vec<u8>),
    Get(String),
    Wait(String, Duration),
}

impl Request {
    /// Parses the request that `input` begins with. `Ok(None)`: it is not complete yet.
    fn parse(input: &[u8]) -> Result<Option<(Self, usize)>, Close> {
        let Some(head) = input.get(..REQUEST_HEAD) else {
            return Ok(None);
        };
        let key = usize::from(u16::from_le_bytes([head[2], head[3]]));
        let value = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        let operation = head[0];
        let known = matches!(operation, SET | GET | WAIT);
        if !known || key > MAX_KEY || value > MAX_VALUE || (operation != SET && value != 0) {
            return Err(Close);
        }
        let length = REQUEST_HEAD + key + value;
        let Some(body) = input.get(REQUEST_HEAD..length) else {
            return Ok(None);
        };
        let name = std::str::from_utf8(&body[..key])
            .map_err(|_| Close)?
            .to_owned();
        let mut milliseconds = [0; 8];
        milliseconds.copy_from_slice(&head[8..16]);
        let request = match operation {
            SET => Self::Set(name, body[key..].to_vec()),
            GET => Self::Get(name),
            _ => Self::Wait(
                name,
                Duration::from_millis(u64::from_le_bytes(milliseconds)),
            ),
        };
        Ok(Some((request, length)))
    }
}

/// The state of the thread.
pub(super) struct Server {
    listener: TcpListener,
    epoll: OwnedFd,
    wake: Arc<OwnedFd>,
    stop: Arc<AtomicBool>,
    identity: [u8; 32],
    connections: HashMap<u64, Connection>,
    next: u64,
    values: HashMap<String, Vec<u8>>,
    stored: usize,
    /// Who waits for a key.
    waiters: HashMap<String, Vec<u64>>,
    /// The deadlines of all connections that have one.
    deadlines: BTreeSet<(Instant, u64)>,
}

impl Server {
    pub(super) fn new(
        listener: TcpListener,
        identity: [u8; 32],
        wake: Arc<OwnedFd>,
        stop: Arc<AtomicBool>,
    ) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &*wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        epoll::add(
            &epoll,
            &listener,
            EventData::new_u64(LISTENER),
            EventFlags::IN,
        )?;
        Ok(Self {
            listener,
            epoll,
            wake,
            stop,
            identity,
            connections: HashMap::new(),
            next: FIRST_CONNECTION,
            values: HashMap::new(),
            stored: 0,
            waiters: HashMap::new(),
            deadlines: BTreeSet::new(),
        })
    }

    /// Serves until `stop` is set and `wake` written.
    pub(super) fn serve(mut self) {
        let mut events: Vec<Event> = Vec::with_capacity(256);
        while !self.stop.load(Ordering::Acquire) {
            let timeout = self.deadlines.first().map(|(deadline, _)| {
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
                    WAKE => {}
                    LISTENER => self.accept(),
                    id => self.service(id),
                }
            }
            self.expire();
        }
        self.say_farewell();
        drop(self.wake);
    }

    fn accept(&mut self) {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(cause) => {
                    match cause.kind() {
                        ErrorKind::WouldBlock => return,
                        ErrorKind::Interrupted | ErrorKind::ConnectionAborted => continue,
                        _ => {}
                    }
                    // Out of descriptors or memory: the listener stays readable, so do not come back at once.
                    tracing::warn!(%cause, "the store server cannot accept a connection");
                    thread::sleep(Duration::from_millis(50));
                    return;
                }
            };
            if self.connections.len() >= MAX_CONNECTIONS {
                continue;
            }
            let id = self.next;
            let ready = stream
                .set_nonblocking(true)
                .and_then(|()| stream.set_nodelay(true))
                .and_then(|()| {
                    let data = EventData::new_u64(id);
                    Ok(epoll::add(&self.epoll, &stream, data, EventFlags::IN)?)
                });
            if ready.is_err() {
                continue;
            }
            self.next += 1;
            let deadline = Instant::now() + HELLO_TIME;
            self.deadlines.insert((deadline, id));
            self.connections.insert(
                id,
                Connection {
                    stream,
                    stage: Stage::Greeting,
                    input: Vec::new(),
                    output: Vec::new(),
                    deadline: Some(deadline),
                },
            );
        }
    }

    /// Reads, answers and writes what connection `id` is ready for.
    fn service(&mut self, id: u64) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let result = receive(connection)
            .and_then(|()| self.advance(id))
            .and_then(|()| self.flush(id));
        if result.is_err() {
            self.close(id);
        }
    }

    /// Answers what has arrived completely on connection `id`.
    fn advance(&mut self, id: u64) -> Result<(), Close> {
        let connection = self.connections.get_mut(&id).ok_or(Close)?;
        match connection.stage {
            Stage::Waiting(_) if connection.input.is_empty() => return Ok(()),
            Stage::Waiting(_) => return Err(Close),
            Stage::Greeting => {
                let Some(greeting) = connection.input.get(..HELLO) else {
                    let known = connection.input.len().min(MAGIC.len());
                    let fits = MAGIC.starts_with(&connection.input[..known]);
                    return if fits { Ok(()) } else { Err(Close) };
                };
                if greeting[..8] != *MAGIC {
                    return Err(Close);
                }
                let answer = hello(&self.identity);
                if greeting != answer {
                    // A client of another job: it learns so, and goes on probing elsewhere.
                    let _ = connection.stream.write(&answer);
                    let _ = connection.stream.shutdown(Shutdown::Write);
                    return Err(Close);
                }
                connection.input.drain(..HELLO);
                connection.output.extend(answer);
                connection.stage = Stage::Ready;
                if let Some(deadline) = connection.deadline.take() {
                    self.deadlines.remove(&(deadline, id));
                }
            }
            Stage::Ready => {}
        }
        let Some((request, length)) = Request::parse(&connection.input)? else {
            return Ok(());
        };
        // One request at a time: nothing may follow it before the reply.
        if mem::take(&mut connection.input).len() != length {
            return Err(Close);
        }
        self.answer(id, request);
        Ok(())
    }

    fn answer(&mut self, id: u64, request: Request) {
        match request {
            Request::Set(key, value) => {
                let replaced = self.values.get(&key).map_or(0, |old| old.len() + key.len());
                let stored = self.stored - replaced + key.len() + value.len();
                if stored > MAX_STORED {
                    return self.reply(id, FULL, &[]);
                }
                self.stored = stored;
                for waiter in self.waiters.remove(&key).unwrap_or_default() {
                    self.end_wait(waiter, OK, &value);
                }
                self.values.insert(key, value);
                self.reply(id, OK, &[]);
            }
            Request::Get(key) => match self.values.get(&key).cloned() {
                Some(value) => self.reply(id, OK, &value),
                None => self.reply(id, ABSENT, &[]),
            },
            Request::Wait(key, timeout) => {
                if let Some(value) = self.values.get(&key).cloned() {
                    return self.reply(id, OK, &value);
                }
                if timeout.is_zero() {
                    return self.reply(id, ABSENT, &[]);
                }
                let Some(connection) = self.connections.get_mut(&id) else {
                    return;
                };
                // A deadline that the clock cannot express is no deadline.
                connection.deadline = Instant::now().checked_add(timeout);
                if let Some(deadline) = connection.deadline {
                    self.deadlines.insert((deadline, id));
                }
                connection.stage = Stage::Waiting(key.clone());
                self.waiters.entry(key).or_default().push(id);
            }
        }
    }

    /// Queues a reply on connection `id`.
    fn reply(&mut self, id: u64, status: u8, value: &[u8]) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.output.extend([status, 0, 0, 0]);
            connection.output.extend((value.len() as u32).to_le_bytes());
            connection.output.extend(value);
        }
    }

    /// Ends the wait of connection `id`, which is no longer among the waiters of its key.
    fn end_wait(&mut self, id: u64, status: u8, value: &[u8]) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.stage = Stage::Ready;
        if let Some(deadline) = connection.deadline.take() {
            self.deadlines.remove(&(deadline, id));
        }
        self.reply(id, status, value);
        if self.flush(id).is_err() {
            self.close(id);
        }
    }

    /// Writes what connection `id` takes now, and asks to be told when it takes more.
    fn flush(&mut self, id: u64) -> Result<(), Close> {
        let connection = self.connections.get_mut(&id).ok_or(Close)?;
        let mut sent = 0;
        while sent < connection.output.len() {
            match connection.stream.write(&connection.output[sent..]) {
                Ok(0) => return Err(Close),
                Ok(n) => sent += n,
                Err(cause) if cause.kind() == ErrorKind::Interrupted => {}
                Err(cause) if cause.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return Err(Close),
            }
        }
        let blocked = sent < connection.output.len();
        if blocked {
            connection.output.drain(..sent);
        } else {
            connection.output = Vec::new();
        }
        let interest = if blocked {
            EventFlags::IN | EventFlags::OUT
        } else {
            EventFlags::IN
        };
        let data = EventData::new_u64(id);
        epoll::modify(&self.epoll, &connection.stream, data, interest).map_err(|_| Close)
    }

    /// Ends what has run out of time.
    fn expire(&mut self) {
        let now = Instant::now();
        while let Some(&(deadline, id)) = self.deadlines.first() {
            if deadline > now {
                return;
            }
            self.deadlines.remove(&(deadline, id));
            let key = match self
                .connections
                .get_mut(&id)
                .map(|c| (&c.stage, &mut c.deadline))
            {
                Some((Stage::Waiting(key), deadline)) => {
                    *deadline = None;
                    key.clone()
                }
                _ => {
                    self.close(id);
                    continue;
                }
            };
            self.forget_waiter(&key, id);
            self.end_wait(id, ABSENT, &[]);
        }
    }

    fn forget_waiter(&mut self, key: &str, id: u64) {
        if let Some(waiters) = self.waiters.get_mut(key) {
            waiters.retain(|&waiter| waiter != id);
            if waiters.is_empty() {
                self.waiters.remove(key);
            }
        }
    }

    fn close(&mut self, id: u64) {
        let Some(connection) = self.connections.remove(&id) else {
            return;
        };
        if let Some(deadline) = connection.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        if let Stage::Waiting(key) = &connection.stage {
            self.forget_waiter(key, id);
        }
        // Closing the stream takes it out of the epoll as well.
    }

    /// Delivers the replies that are still queued, within a short time.
    fn say_farewell(&mut self) {
        let deadline = Instant::now() + FAREWELL_TIME;
        for connection in self.connections.values_mut() {
            let left = deadline.saturating_duration_since(Instant::now());
            if connection.output.is_empty() || left.is_zero() {
                continue;
            }
            let stream = &mut connection.stream;
            let _ = stream
                .set_nonblocking(false)
                .and_then(|()| stream.set_write_timeout(Some(left)))
                .and_then(|()| stream.write_all(&connection.output));
        }
    }
}

/// Reads what has arrived, up to one request. An end of the stream closes the connection.
fn receive(connection: &mut Connection) -> Result<(), Close> {
    let mut chunk = [0; 16 << 10];
    while connection.input.len() <= MAX_REQUEST {
        match connection.stream.read(&mut chunk) {
            Ok(0) => return Err(Close),
            Ok(n) => connection.input.extend_from_slice(&chunk[..n]),
            Err(cause) if cause.kind() == ErrorKind::Interrupted => {}
            Err(cause) if cause.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(_) => return Err(Close),
        }
    }
    // More than any request, without a pause: not one request at a time.
    Err(Close)
}
