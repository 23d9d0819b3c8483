//! The built-in TCP store: rank 0 serves, every rank connects. This is the client; the [server](super::server) and
//! the protocol (`wire`) are next door.
//!
//! A connection begins with a handshake in which both sides prove that they know the store's key: the job's name and,
//! where there is one, its secret. So a client that probes several ports tells the right server from a stranger's, and
//! reading or writing needs the secret. Then the client sends one request at a time and reads one reply, encrypted. A
//! wait is held by the server until the key is set or its time is over.
//!
//! A handle keeps its idle connections. A call takes one, or opens another while all are held by long waits, so no
//! call blocks another. The server may close any connection when it needs room or one has been idle, and the network may
//! break or forget it; the client then connects again and repeats the request, which does no harm: a key is set to the same
//! value once more.

#[cfg(test)]
mod tests;

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};

use super::server::TcpStoreServer;
pub use super::wire::StoreKey;
use super::wire::{
    self, Channel, FRAME_CONTENT, FRAME_HEAD, Forged, Greeting, HELLO, LONGEST_FRAME, MAGIC, OK,
    REFUSAL, Request,
};
use crate::error::{Code, Error, Result};
use crate::fork;
use crate::locks::Mutex;
use crate::rendezvous::secret::Secret;
use crate::rendezvous::store::{Check, Store, check_key, check_value, not_set};

/// How long one address may take, at most, to accept a connection; and twice as long until it has answered the hello, since a
/// server that strangers flood gets to it later.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How much later than promised a reply may be before the server counts as gone.
const LATEST_REPLY: Duration = Duration::from_secs(15);
/// How much later than the end of the meeting a reply may be.
const LAST_GRACE: Duration = Duration::from_millis(500);
/// A time that the clock can express, where one is asked for that it cannot.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);
/// The pauses between two attempts to connect.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// After this long without an answer the log says so.
const WORTH_TELLING: Duration = Duration::from_secs(10);
/// How long the server's host may leave packets unanswered until the connection is taken for broken.
const SILENCE: Duration = Duration::from_secs(5);

/// A connection after its handshake.
#[derive(Debug)]
struct Line {
    stream: TcpStream,
    channel: Channel,
}

/// A client of a [`TcpStoreServer`]; on rank 0 also its owner.
#[derive(Debug)]
pub struct TcpStore {
    address: SocketAddr,
    key: StoreKey,
    idle: Mutex<Vec<Line>>,
    /// The end of the meeting that the store is for: no reply is waited for much longer.
    until: Option<Instant>,
    /// A key of the server, and its value: at the same address another server may come.
    mark: Option<(&'static str, Vec<u8>)>,
    /// Dropped last: the server ends when rank 0's handle does, if not before.
    server: Option<TcpStoreServer>,
}

impl TcpStore {
    /// Connects to the store served at `address` (`host:port`, IPv6 in brackets), trying again until it is there.
    ///
    /// # Errors
    /// `Timeout` when no store answers within `timeout`, `InvalidArgument` for an address that is none.
    pub fn connect(address: &str, timeout: Duration) -> Result<Self> {
        let (host, port) = split_address(address)?;
        Self::connect_any(host, &[port], &StoreKey::new("", None), timeout)
    }

    /// Connects to the first of `ports` of `host` where a store with the same `key` answers.
    ///
    /// # Errors
    /// As [`TcpStore::connect`].
    pub fn connect_any(
        host: &str,
        ports: &[u16],
        key: &StoreKey,
        timeout: Duration,
    ) -> Result<Self> {
        Self::connect_while(host, ports, key, timeout, &|| Ok(()))
    }

    /// The same, as long as `check` finds no reason to give up.
    ///
    /// # Errors
    /// As [`connect_any`](Self::connect_any), and those of `check`.
    pub(in crate::rendezvous) fn connect_while(
        host: &str,
        ports: &[u16],
        key: &StoreKey,
        timeout: Duration,
        check: Check<'_>,
    ) -> Result<Self> {
        let begun = Instant::now();
        let mut pause = SHORTEST_PAUSE;
        // Those that answered, and what; they may be gone when the time is over.
        let mut strangers = Vec::new();
        let mut is_told = false;
        loop {
            check()?;
            let mut seen = Vec::new();
            for &port in ports {
                let left = timeout.saturating_sub(begun.elapsed());
                match try_host(host, port, key, left.max(Duration::from_millis(100))) {
                    Ok((line, address)) => {
                        return Ok(Self {
                            address,
                            key: key.clone(),
                            idle: Mutex::new(vec![line]),
                            until: None,
                            mark: None,
                            server: None,
                        });
                    }
                    Err(cause) if cause.kind() == ErrorKind::InvalidData => {
                        let what = cause.to_string();
                        if !strangers.contains(&what) {
                            strangers.push(what);
                        }
                    }
                    Err(cause) => seen.push(cause.to_string()),
                }
            }
            let left = timeout.saturating_sub(begun.elapsed());
            if left.is_zero() {
                seen.extend(strangers);
                let text = silence(host, ports, timeout, &seen);
                return Err(Error::new(Code::Timeout, text).with_peer(0));
            }
            if !is_told && begun.elapsed() >= WORTH_TELLING {
                is_told = true;
                let cause = silence(
                    host,
                    ports,
                    WORTH_TELLING,
                    &[seen, strangers.clone()].concat(),
                );
                tracing::warn!(waits_for = ?timeout, "{cause}");
            }
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// A client of `server` that owns it: the server ends when this handle is dropped, if not before.
    ///
    /// # Errors
    /// `System` when the connection to the own server fails.
    pub fn own(server: TcpStoreServer) -> Result<Self> {
        let (address, key) = (server.own_address(), server.key().clone());
        let store = Self {
            address,
            key,
            idle: Mutex::new(Vec::new()),
            until: None,
            mark: None,
            server: Some(server),
        };
        let line = store
            .open_line(Instant::now(), LATEST_REPLY)
            .map_err(|cause| {
                let doing = format!("connect to the own store server at {address}");
                Error::system(doing, cause)
            })?;
        store.idle.lock().push(line);
        Ok(store)
    }

    /// This client, for a meeting that is over then.
    #[must_use]
    pub(in crate::rendezvous) fn until(self, until: Option<Instant>) -> Self {
        Self { until, ..self }
    }

    /// This client, of no other server than the one that has this value of `key`.
    #[must_use]
    pub(in crate::rendezvous) fn marked(self, key: &'static str, value: &[u8]) -> Self {
        Self {
            mark: Some((key, value.to_vec())),
            ..self
        }
    }

    /// How long a reply may take, if the server may take `wait` for it.
    fn patience(&self, wait: Duration) -> Duration {
        let usual = wait.saturating_add(LATEST_REPLY);
        let Some(until) = self.until else {
            return usual;
        };
        let left = until.saturating_duration_since(Instant::now());
        usual.min(left + LAST_GRACE)
    }

    /// The server that ends with this handle.
    pub(in crate::rendezvous) fn server(&self) -> Option<&TcpStoreServer> {
        self.server.as_ref()
    }

    /// Where the server is.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sends a request, which the server may take `wait` to answer, and returns the reply's status and value.
    fn call(&self, request: &Request<'_>, wait: Duration) -> Result<(u8, Vec<u8>)> {
        let begun = Instant::now();
        let patience = self.patience(wait);
        loop {
            let idle = self.idle.lock().pop();
            let is_new = idle.is_none();
            let line = match idle {
                Some(line) => Ok(line),
                None => self.open_line(begun, patience),
            };
            let mut line = line.map_err(|cause| self.lost(&cause))?;
            let left = wait.saturating_sub(begun.elapsed());
            let result = match *request {
                Request::Wait(key, _) => {
                    line.exchange(&Request::Wait(key, left), self.patience(left))
                }
                _ => line.exchange(request, self.patience(left)),
            };
            match result {
                Ok(reply) => {
                    self.idle.lock().push(line);
                    return Ok(reply);
                }
                Err(cause) if may_pass(&cause) && begun.elapsed() < patience => {
                    if is_new {
                        thread::sleep(SHORTEST_PAUSE);
                    }
                }
                Err(cause) => return Err(self.lost(&cause)),
            }
        }
    }

    /// A new connection. One that the server closes, since it has no room, or that does not get there is tried again until
    /// `patience` after `begun`.
    fn open_line(&self, begun: Instant, patience: Duration) -> io::Result<Line> {
        let mut pause = SHORTEST_PAUSE;
        loop {
            let left = patience.saturating_sub(begun.elapsed()).max(LAST_GRACE);
            let line = try_address(self.address, &self.key, left);
            match line.and_then(|line| self.check_mark(line, left)) {
                Err(cause) if may_pass(&cause) && begun.elapsed() < patience => {
                    thread::sleep(pause);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                result => return result,
            }
        }
    }

    /// The line, if it leads to the same server as those before.
    fn check_mark(&self, mut line: Line, patience: Duration) -> io::Result<Line> {
        let Some((key, value)) = &self.mark else {
            return Ok(line);
        };
        match line.exchange(&Request::Get(key), patience)? {
            (OK, other) if other == *value => Ok(line),
            _ => {
                let what = "it has ended, and another one is at its address";
                Err(io::Error::new(ErrorKind::NotFound, what))
            }
        }
    }

    fn lost(&self, cause: &io::Error) -> Error {
        let code = match cause.kind() {
            ErrorKind::InvalidData => Code::Untrusted,
            _ => Code::System,
        };
        let hint = match cause.kind() {
            ErrorKind::TimedOut => "is its process stopped, or its host cut off?",
            _ => "see what rank 0 reported, it may have ended first",
        };
        let message = format!(
            "the store at {}, which rank 0 serves, failed: {cause}; {hint}",
            self.address
        );
        Error::new(code, message).with_peer(0)
    }
}

impl Store for TcpStore {
    fn address(&self) -> Option<SocketAddr> {
        match &self.server {
            Some(server) => server.address_for_others(),
            None => Some(self.address),
        }
    }

    fn secret(&self) -> Option<Secret> {
        self.key.secret().cloned()
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_key(key)?;
        check_value(key, value)?;
        match self.call(&Request::Set(key, value), Duration::ZERO)? {
            (OK, _) => Ok(()),
            _ => Err(Error::new(
                Code::System,
                format!(
                    "the store at {} is full and did not take key {key:?}",
                    self.address
                ),
            )),
        }
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        check_key(key)?;
        match self.call(&Request::Wait(key, timeout), timeout)? {
            (OK, value) => Ok(value),
            _ => Err(not_set(key, timeout)),
        }
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        check_key(key)?;
        let (status, value) = self.call(&Request::Get(key), Duration::ZERO)?;
        Ok((status == OK).then_some(value))
    }
}

/// Splits `host:port` or `[address]:port`.
pub(in crate::rendezvous) fn split_address(address: &str) -> Result<(&str, u16)> {
    let wrong = || {
        Error::invalid(format!(
            "{address:?} is no address: expected host:port, such as node0:29500, 10.0.0.7:29500 or [fd00::7]:29500"
        ))
    };
    let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']').ok_or_else(wrong)?,
        // More colons without brackets: the end of the address is ambiguous.
        None if host.contains(':') => return Err(wrong()),
        None => host,
    };
    let port = port.parse().map_err(|_| wrong())?;
    if host.is_empty() || host.contains(['/', '@', ' ']) {
        return Err(wrong());
    }
    Ok((host, port))
}

/// Tries every address of `host` once; each may take as long as `patience`.
fn try_host(
    host: &str,
    port: u16,
    key: &StoreKey,
    patience: Duration,
) -> io::Result<(Line, SocketAddr)> {
    let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match try_address(address, key, patience) {
            Ok(line) => return Ok((line, address)),
            Err(cause) => last = cause,
        }
    }
    Err(last)
}

/// Connects to `address` and does the handshake, which may take as long as `patience`.
fn try_address(address: SocketAddr, key: &StoreKey, patience: Duration) -> io::Result<Line> {
    let deadline = Instant::now() + patience.min(2 * CONNECT_TIMEOUT);
    let mut stream = TcpStream::connect_timeout(&address, patience.min(CONNECT_TIMEOUT))?;
    fork::keep_private(&stream);
    if stream.local_addr()? == stream.peer_addr()? {
        // On a port of the ephemeral range TCP may connect a socket to itself while nothing listens.
        return Err(ErrorKind::ConnectionRefused.into());
    }
    let (greeting, hello) = Greeting::new(key).map_err(io::Error::other)?;
    stream.set_nodelay(true)?;
    stream.write_all(&hello)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(3))
        .with_interval(Duration::from_secs(1))
        .with_retries(2);
    let socket = SockRef::from(&stream);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(SILENCE))?;
    stream.set_write_timeout(Some(LATEST_REPLY))?;
    let wrong = |what: &str| Err(io::Error::new(ErrorKind::InvalidData, what));
    let mut magic = [0; MAGIC.len()];
    read_by(&mut stream, deadline, &mut magic)?;
    if magic == *REFUSAL {
        return wrong("the store of another job answered, or one with another secret");
    }
    if magic != *MAGIC {
        return wrong("something else than a unisono store answered");
    }
    let mut message = [0; HELLO - MAGIC.len()];
    read_by(&mut stream, deadline, &mut message)?;
    let Some(mut channel) = greeting.finish(&message) else {
        return wrong("something that does not know the job's secret answered as a store");
    };
    let mut proof = Vec::new();
    channel.seal(&[], &mut proof);
    stream.write_all(&proof)?;
    Ok(Line { stream, channel })
}

/// Fills `bytes`, by then. Bytes that are there are taken also later: on a busy host this thread may be late itself.
fn read_by(stream: &mut TcpStream, deadline: Instant, mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        // A time that rounds to zero would be none.
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match stream.read(bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => bytes = &mut bytes[count..],
            Err(cause) if cause.kind() == ErrorKind::WouldBlock && left.is_zero() => {
                let what = "it did not answer in time";
                return Err(io::Error::new(ErrorKind::TimedOut, what));
            }
            Err(cause)
                if matches!(cause.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(cause) => return Err(cause),
        }
    }
    Ok(())
}

/// Whether another connection may get through: the server closed this one, which it may do at any time, or its host does not
/// answer.
fn may_pass(cause: &io::Error) -> bool {
    matches!(
        cause.kind(),
        ErrorKind::UnexpectedEof
            | ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::BrokenPipe
            | ErrorKind::TimedOut
            | ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
    )
}

impl Line {
    /// Sends one request and reads its reply, which may take as long as `patience`.
    fn exchange(&mut self, request: &Request<'_>, patience: Duration) -> io::Result<(u8, Vec<u8>)> {
        let mut frames = Vec::new();
        for content in request.write().chunks(FRAME_CONTENT) {
            self.channel.seal(content, &mut frames);
        }
        let now = Instant::now();
        let deadline = now.checked_add(patience).unwrap_or(now + FOR_EVER);
        self.stream.write_all(&frames)?;
        let wrong =
            |_: Forged| io::Error::new(ErrorKind::InvalidData, "it sent a reply that is none");
        let mut reply = Vec::new();
        let mut sealed = [0; LONGEST_FRAME];
        loop {
            let mut head = [0; FRAME_HEAD];
            read_by(&mut self.stream, deadline, &mut head)?;
            let length = wire::frame_length(head).ok_or(Forged).map_err(wrong)?;
            let message = &mut sealed[..length];
            read_by(&mut self.stream, deadline, message)?;
            self.channel.open(message, &mut reply).map_err(wrong)?;
            if let Some((status, value)) = wire::read_reply(&reply).map_err(wrong)? {
                return Ok((status, value.to_vec()));
            }
        }
    }
}

/// The ports, which follow each other, as messages name them.
pub(in crate::rendezvous) fn port_range(ports: &[u16]) -> String {
    match (ports.first(), ports.last()) {
        (Some(first), Some(last)) if first != last => format!("{first} to {last}"),
        (Some(only), _) => only.to_string(),
        _ => String::new(),
    }
}

/// The text that says for how long no store has answered; `seen` holds what each of `ports` answered last.
fn silence(host: &str, ports: &[u16], waited: Duration, seen: &[String]) -> String {
    let mut seen = seen.to_vec();
    seen.sort();
    seen.dedup();
    format!(
        "rank 0 has not come: no store of this job answered at {host} port {} within {} s ({}); \
         is rank 0 running, is {host} its address as seen from here, and does no firewall stand between?",
        port_range(ports),
        waited.as_secs_f64(),
        seen.join("; ")
    )
}
