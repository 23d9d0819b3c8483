//! The built-in TCP store: rank 0 serves, every rank connects. This is the client and the protocol; the
//! [server](super::tcp_server) is next door.
//!
//! A connection begins with a hello, both ways, that carries the identity of the job, so that a client which probes
//! several ports tells the right server from a stranger's. Then the client sends one request at a time and reads
//! one reply. A wait is held by the server until the key is set or its time is over. Numbers are little-endian.
//!
//! ```text
//! hello:    magic "unisono1" (8)  identity: SHA-256 of the job's name (32)
//! answer:   magic (8)  identity of the server's job (32)
//! request:  operation (1)  0 (1)  key length (2)  value length (4)  milliseconds (8)  key  value
//! reply:    status (1)  0 (3)  value length (4)  value
//! ```
//!
//! A handle keeps its idle connections. A call takes one, or opens another while all are held by long waits, so no
//! call blocks another. Membership is not proved here: a store entry is believed only as far as the roster checks
//! it, see [`roster`](super::roster).

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use socket2::{SockRef, TcpKeepalive};

use super::store::{MAX_VALUE, Store, check_key, check_value, not_set};
use super::tcp_server::TcpStoreServer;
use crate::error::{Code, Error, Result};

pub(super) const MAGIC: &[u8; 8] = b"unisono1";
pub(super) const HELLO: usize = 40;
pub(super) const REQUEST_HEAD: usize = 16;
pub(super) const REPLY_HEAD: usize = 8;

pub(super) const SET: u8 = 1;
pub(super) const GET: u8 = 2;
pub(super) const WAIT: u8 = 3;

/// The reply's value is the key's (empty for a set).
pub(super) const OK: u8 = 0;
/// The key is not set, or was not within the time.
pub(super) const ABSENT: u8 = 1;
/// The server holds as much as it is willing to.
pub(super) const FULL: u8 = 2;

/// How long one address may take, at most, to accept a connection, and then to answer the hello.
const PATIENCE: Duration = Duration::from_secs(3);
/// How much later than promised a reply may be before the server counts as gone.
const GRACE: Duration = Duration::from_secs(15);

/// The identity of the job called `name`.
pub(super) fn identity(name: &str) -> [u8; 32] {
    Sha256::digest(name).into()
}

/// The hello, or the answer to it, for a job.
pub(super) fn hello(identity: &[u8; 32]) -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..].copy_from_slice(identity);
    bytes
}

/// A client of a [`TcpStoreServer`]; on rank 0 also its owner.
#[derive(Debug)]
pub struct TcpStore {
    address: SocketAddr,
    identity: [u8; 32],
    idle: Mutex<Vec<TcpStream>>,
    /// Dropped last: the server ends when rank 0's handle does.
    _server: Option<TcpStoreServer>,
}

impl TcpStore {
    /// Connects to the store served at `address` (`host:port`, IPv6 in brackets), trying again until it is there.
    ///
    /// # Errors
    /// `Timeout` when no store answers within `timeout`, `InvalidArgument` for an address that is none.
    pub fn connect(address: &str, timeout: Duration) -> Result<Self> {
        let (host, port) = split_address(address)?;
        Self::connect_any(host, &[port], "", timeout)
    }

    /// Connects to the first of `ports` of `host` where the store of the job called `job` answers.
    ///
    /// # Errors
    /// As [`TcpStore::connect`].
    pub fn connect_any(host: &str, ports: &[u16], job: &str, timeout: Duration) -> Result<Self> {
        let identity = identity(job);
        let begun = Instant::now();
        let mut pause = Duration::from_millis(10);
        loop {
            let mut seen = Vec::new();
            for &port in ports {
                let left = timeout.saturating_sub(begun.elapsed());
                let patience = left.clamp(Duration::from_millis(100), PATIENCE);
                match try_host(host, port, &identity, patience) {
                    Ok((stream, address)) => {
                        return Ok(Self {
                            address,
                            identity,
                            idle: Mutex::new(vec![stream]),
                            _server: None,
                        });
                    }
                    Err(cause) => seen.push(cause.to_string()),
                }
            }
            let left = timeout.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Err(unreachable(host, ports, timeout, &seen));
            }
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(Duration::from_millis(250));
        }
    }

    /// A client of `server` that owns it: the server ends when this handle is dropped.
    ///
    /// # Errors
    /// `System` when the connection to the own server fails.
    pub fn own(server: TcpStoreServer) -> Result<Self> {
        let (address, identity) = (server.own_address(), server.identity());
        let stream = try_address(address, &identity, PATIENCE).map_err(|cause| {
            Error::system(
                format!("connect to the own store server at {address}"),
                cause,
            )
        })?;
        Ok(Self {
            address,
            identity,
            idle: Mutex::new(vec![stream]),
            _server: Some(server),
        })
    }

    /// Where the server is.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sends a request and returns the reply's status and value.
    fn call(
        &self,
        operation: u8,
        key: &str,
        value: &[u8],
        wait: Duration,
    ) -> Result<(u8, Vec<u8>)> {
        check_key(key)?;
        check_value(key, value)?;
        let idle = self.idle.lock().pop();
        let result = match idle {
            Some(stream) => Ok(stream),
            None => try_address(self.address, &self.identity, PATIENCE),
        }
        .and_then(|mut stream| {
            let reply = exchange(&mut stream, operation, key, value, wait)?;
            Ok((stream, reply))
        });
        match result {
            Ok((stream, reply)) => {
                self.idle.lock().push(stream);
                Ok(reply)
            }
            Err(cause) => Err(self.lost(&cause)),
        }
    }

    fn lost(&self, cause: &io::Error) -> Error {
        let code = match cause.kind() {
            ErrorKind::InvalidData => Code::Untrusted,
            _ => Code::System,
        };
        let message = format!(
            "the store at {}, which rank 0 serves, failed: {cause}; see what rank 0 reported, it may have ended first",
            self.address
        );
        Error::new(code, message).with_peer(0)
    }
}

impl Store for TcpStore {
    fn address(&self) -> Option<SocketAddr> {
        Some(self.address)
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        match self.call(SET, key, value, Duration::ZERO)? {
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
        match self.call(WAIT, key, &[], timeout)? {
            (OK, value) => Ok(value),
            _ => Err(not_set(key, timeout)),
        }
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let (status, value) = self.call(GET, key, &[], Duration::ZERO)?;
        Ok((status == OK).then_some(value))
    }
}

/// Splits `host:port` or `[address]:port`.
pub(super) fn split_address(address: &str) -> Result<(&str, u16)> {
    let wrong = || {
        Error::invalid(format!(
            "{address:?} is no address: expected host:port, such as node0:29500, 10.0.0.7:29500 or [fd00::7]:29500"
        ))
    };
    let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']').ok_or_else(wrong)?,
        // More colons without brackets: where the address ends cannot be told.
        None if host.contains(':') => return Err(wrong()),
        None => host,
    };
    let port = port.parse().map_err(|_| wrong())?;
    if host.is_empty() || host.contains(['/', '@', ' ']) {
        return Err(wrong());
    }
    Ok((host, port))
}

/// Tries every address of `host` once.
fn try_host(
    host: &str,
    port: u16,
    identity: &[u8; 32],
    patience: Duration,
) -> io::Result<(TcpStream, SocketAddr)> {
    let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match try_address(address, identity, patience) {
            Ok(stream) => return Ok((stream, address)),
            Err(cause) => last = cause,
        }
    }
    Err(last)
}

/// Connects to `address` and exchanges hellos; each may take as long as `patience`.
fn try_address(
    address: SocketAddr,
    identity: &[u8; 32],
    patience: Duration,
) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&address, patience)?;
    if stream.local_addr()? == stream.peer_addr()? {
        // On a port of the ephemeral range TCP may connect a socket to itself while nobody listens.
        return Err(ErrorKind::ConnectionRefused.into());
    }
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(15))
        .with_interval(Duration::from_secs(5))
        .with_retries(3);
    SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
    stream.set_write_timeout(Some(GRACE))?;
    stream.set_read_timeout(Some(patience))?;
    stream.write_all(&hello(identity))?;
    let mut answer = [0; HELLO];
    stream.read_exact(&mut answer)?;
    if answer[..8] != *MAGIC {
        return Err(io::Error::new(
            ErrorKind::InvalidData,
            "something else than a unisono store answered",
        ));
    }
    if answer[8..] != *identity {
        return Err(io::Error::new(
            ErrorKind::InvalidData,
            "the store of another job answered",
        ));
    }
    Ok(stream)
}

/// Sends one request and reads its reply.
fn exchange(
    stream: &mut TcpStream,
    operation: u8,
    key: &str,
    value: &[u8],
    wait: Duration,
) -> io::Result<(u8, Vec<u8>)> {
    let milliseconds = u64::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u64::MAX);
    let mut request = vec![operation, 0];
    request.extend((key.len() as u16).to_le_bytes());
    request.extend((value.len() as u32).to_le_bytes());
    request.extend(milliseconds.to_le_bytes());
    request.extend(key.as_bytes());
    request.extend(value);
    stream.set_read_timeout(Some(wait.saturating_add(GRACE)))?;
    stream.write_all(&request)?;
    let mut head = [0; REPLY_HEAD];
    stream.read_exact(&mut head)?;
    let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
    if head[0] > FULL || length > MAX_VALUE {
        return Err(io::Error::new(
            ErrorKind::InvalidData,
            "it sent a reply that is none",
        ));
    }
    let mut value = vec![0; length];
    stream.read_exact(&mut value)?;
    Ok((head[0], value))
}

/// The error of a connect that ran out of time; `seen` holds what each of `ports` answered last.
fn unreachable(host: &str, ports: &[u16], timeout: Duration, seen: &[String]) -> Error {
    let port = match (ports.first(), ports.last()) {
        (Some(first), Some(last)) if first != last => format!("{first} to {last}"),
        (Some(only), _) => only.to_string(),
        _ => String::new(),
    };
    let mut seen = seen.to_vec();
    seen.sort();
    seen.dedup();
    Error::new(
        Code::Timeout,
        format!(
            "rank 0 has not come: no store of this job answered at {host} port {port} within {} s ({}); \
             is rank 0 running, is {host} its address as seen from here, and does no firewall stand between?",
            timeout.as_secs_f64(),
            seen.join("; ")
        ),
    )
    .with_peer(0)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use proptest::prelude::*;

    use super::*;
    use crate::rendezvous::store::suite;

    const SOON: Duration = Duration::from_secs(10);

    fn serve() -> TcpStoreServer {
        TcpStoreServer::start("127.0.0.1:0").expect("a free port")
    }

    #[test]
    fn passes_the_suite() {
        let server = serve();
        let address = server.own_address().to_string();
        suite::run(|| TcpStore::connect(&address, SOON).expect("connect"));
    }

    #[test]
    fn a_client_waits_for_its_server() {
        let port = serve().own_address().port();
        let address = format!("127.0.0.1:{port}");
        thread::scope(|scope| {
            let client = scope.spawn(|| TcpStore::connect(&address, SOON).expect("comes up"));
            thread::sleep(Duration::from_millis(80));
            let own = TcpStore::own(TcpStoreServer::start(&address).expect("bind")).expect("own");
            own.set("key", b"value").expect("set");
            let client = client.join().expect("no panic");
            assert_eq!(client.wait("key", SOON).expect("wait"), b"value");
            drop(own);
            let error = client.get("key").expect_err("the server is gone");
            assert_eq!((error.code, error.peer), (Code::System, Some(0)));
        });
    }

    #[test]
    fn nobody_there_is_a_timeout_that_says_so() {
        let port = serve().own_address().port();
        let error = TcpStore::connect(&format!("127.0.0.1:{port}"), Duration::from_millis(50))
            .expect_err("nobody listens");
        assert_eq!(error.code, Code::Timeout);
        assert!(error.message.contains("rank 0 has not come"), "{error}");
    }

    #[test]
    fn the_server_of_another_job_is_passed_over() {
        let other = TcpStoreServer::start_any("127.0.0.1", &[0], "other").expect("bind");
        let own = TcpStoreServer::start_any("127.0.0.1", &[0], "own").expect("bind");
        let ports = [other.own_address().port(), own.own_address().port()];
        let store = TcpStore::connect_any("127.0.0.1", &ports, "own", SOON).expect("the second");
        assert_eq!(store.address().port(), ports[1]);
        let error =
            TcpStore::connect_any("127.0.0.1", &ports[..1], "own", Duration::from_millis(50))
                .expect_err("another job");
        assert!(error.message.contains("another job"), "{error}");
        // A taken port is passed over by the server, too.
        let taken = TcpListener::bind("127.0.0.1:0").expect("bind");
        let ports = [taken.local_addr().expect("address").port(), 0];
        let third = TcpStoreServer::start_any("127.0.0.1", &ports, "own").expect("the second");
        assert_ne!(third.own_address().port(), ports[0]);
    }

    #[test]
    fn addresses_are_split() {
        assert_eq!(
            split_address("node0:29500").expect("valid"),
            ("node0", 29500)
        );
        assert_eq!(split_address("[fd00::7]:1").expect("valid"), ("fd00::7", 1));
        for wrong in [
            "",
            "node0",
            "node0:",
            ":1",
            "node0:70000",
            "fd00::7:1",
            "[fd00::7:1",
            "a/b:1",
        ] {
            assert!(split_address(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn hostile_bytes_cost_only_their_connection() {
        let server = serve();
        let address = server.own_address();
        let store = TcpStore::connect(&address.to_string(), SOON).expect("connect");
        let greeting = hello(&identity("")).to_vec();
        let request = |operation: u8, key: u16, value: u32| {
            let mut bytes = greeting.clone();
            bytes.extend([operation, 0]);
            bytes.extend(key.to_le_bytes());
            bytes.extend(value.to_le_bytes());
            bytes.extend(u64::MAX.to_le_bytes());
            bytes
        };
        let mut twice = request(WAIT, 1, 0);
        twice.extend(b"kkkkkk");
        let mut latin = request(SET, 2, 0);
        latin.extend([0xff, 0xfe]);
        for hostile in [
            b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n".to_vec(),
            request(9, 0, 0),
            request(SET, u16::MAX, 0),
            request(SET, 1, u32::MAX),
            request(GET, 1, 1),
            twice,
            latin,
        ] {
            let mut stream = TcpStream::connect(address).expect("connect");
            stream.set_read_timeout(Some(SOON)).expect("timeout");
            let _ = stream.write_all(&hostile);
            // The server closes it; a reset counts, too.
            let mut rest = Vec::new();
            match stream.read_to_end(&mut rest) {
                Ok(_) => {}
                Err(cause) => assert_eq!(cause.kind(), ErrorKind::ConnectionReset),
            }
        }
        store.set("key", b"still there").expect("set");
        assert_eq!(store.wait("key", SOON).expect("wait"), b"still there");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        #[test]
        fn any_bytes_leave_the_server_alive(
            bytes in prop::collection::vec(any::<u8>(), 0..400),
            greet in any::<bool>(),
        ) {
            let server = serve();
            let mut stream = TcpStream::connect(server.own_address()).expect("connect");
            if greet {
                stream.write_all(&hello(&identity(""))).expect("send");
            }
            let _ = stream.write_all(&bytes);
            drop(stream);
            let store = TcpStore::own(server).expect("alive");
            store.set("key", b"value").expect("set");
            prop_assert_eq!(store.get("key").expect("get"), Some(b"value".to_vec()));
        }
    }
}
