//! An id by which the ranks of one group find each other, made by one process and passed to the others by whatever
//! means there are.
//!
//! The id says where the process that made it serves a [TCP store](super::tcp_store), and has the random secret that a
//! client must know before the server listens to it. It is 128 bytes, so that it can be broadcast as
//! it is:
//!
//! ```text
//! magic "unisono" and version 1 (8)  family, 4 or 6 (1)  0 (1)  port (2)  address (16)  secret (32)  0 (60)
//! check: the first bytes of the SHA-256 of all before (8)
//! ```
//!
//! The check tells an id that was truncated, or never filled in, from one at whose address no process answers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::meeting::Meeting;
use super::secret::Secret;
use super::tcp::server::TcpStoreServer;
use super::tcp::store::{StoreKey, TcpStore};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::locks::Mutex;
use crate::transport::endpoint;
use crate::transport::keys::random_bytes;
use crate::types::Rank;

/// The length of an id in bytes.
pub const BYTES: usize = 128;

const MAGIC: &[u8; 8] = b"unisono\x01";
const CHECKED: usize = BYTES - 8;
const SECRET: std::ops::Range<usize> = 28..60;

/// The stores that this process serves for ids it has made, until rank 0 joins here; else until all ranks have joined, or
/// this process ends.
static SERVED: PerProcess<Mutex<Vec<(UniqueId, TcpStoreServer)>>> = PerProcess::new(Mutex::default);

/// Where, and as members of what, the ranks of one group meet. It holds a secret: a process that has it can join.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId {
    bytes: [u8; BYTES],
}

impl UniqueId {
    /// Makes an id, and serves the meeting in this process. Its setting `interface` says by which address the others
    /// reach it; else it is the one of the default route.
    ///
    /// # Errors
    /// `InvalidArgument` for an interface that is not there, `System` when no port can be had.
    pub fn create(config: &Config) -> Result<Self> {
        // How many ranks will come it does not know: all that were launched with this one.
        let (id, server) = Self::serve(config, super::launcher::is_one_host(0))?;
        let mut served = SERVED.lock();
        served.retain(|(_, server)| !server.has_ended());
        served.push((id, server));
        Ok(id)
    }

    /// An id and the server of its store, which ends when it is dropped: on loopback where all that may come are on this
    /// host.
    ///
    /// # Errors
    /// As [`UniqueId::create`].
    pub(super) fn serve(config: &Config, one_host: bool) -> Result<(Self, TcpStoreServer)> {
        let address = endpoint::own_address(config.interface.as_deref(), one_host)?;
        let secret = random_bytes()?;
        let server = TcpStoreServer::start_any(&address.to_string(), &[0], &key(&secret))?;
        let id = Self::new(
            SocketAddr::new(address, server.own_address().port()),
            &secret,
        );
        Ok((id, server))
    }

    fn new(address: SocketAddr, secret: &[u8; 32]) -> Self {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[10..12].copy_from_slice(&address.port().to_le_bytes());
        match address.ip() {
            IpAddr::V4(ip) => {
                bytes[8] = 4;
                bytes[12..16].copy_from_slice(&ip.octets());
            }
            IpAddr::V6(ip) => {
                bytes[8] = 6;
                bytes[12..28].copy_from_slice(&ip.octets());
            }
        }
        bytes[SECRET].copy_from_slice(secret);
        let check = Sha256::digest(&bytes[..CHECKED]);
        bytes[CHECKED..].copy_from_slice(&check[..8]);
        Self { bytes }
    }

    /// The id that was given away as `bytes`.
    ///
    /// # Errors
    /// `InvalidArgument` when they are no id.
    pub fn from_bytes(bytes: [u8; BYTES]) -> Result<Self> {
        let check = Sha256::digest(&bytes[..CHECKED]);
        if bytes[..8] != *MAGIC || bytes[CHECKED..] != check[..8] || !matches!(bytes[8], 4 | 6) {
            return Err(Error::invalid(
                "this is no unique id: it was not filled in, was made by another version, or was damaged on its way",
            ));
        }
        Ok(Self { bytes })
    }

    /// The id, to be given away.
    pub const fn to_bytes(self) -> [u8; BYTES] {
        self.bytes
    }

    pub(super) fn address(&self) -> SocketAddr {
        let port = u16::from_le_bytes([self.bytes[10], self.bytes[11]]);
        let mut octets = [0; 16];
        octets.copy_from_slice(&self.bytes[12..28]);
        let ip = match self.bytes[8] {
            4 => Ipv4Addr::new(octets[0], octets[1], octets[2], octets[3]).into(),
            _ => Ipv6Addr::from(octets).into(),
        };
        SocketAddr::new(ip, port)
    }

    /// Opens the store at which the `world` ranks meet; `patience` is the time that each has to join. The process that
    /// made the id serves the store until all have joined.
    ///
    /// # Errors
    /// `Timeout` when the process that made the id does not answer within `patience`.
    pub fn open(&self, rank: Rank, world: usize, patience: Duration) -> Result<Meeting> {
        let own = (rank == 0).then(|| self.take_server()).flatten();
        let store = match own {
            Some(server) => TcpStore::own(server)?,
            None => self.visit(patience)?,
        };
        Ok(Meeting::over_tcp(store, rank, world, patience))
    }

    /// The store of an id that another process, or another part of this one, serves.
    ///
    /// # Errors
    /// As [`UniqueId::open`].
    pub(super) fn visit(&self, patience: Duration) -> Result<TcpStore> {
        let address = self.address();
        let host = address.ip().to_string();
        let key = key(&self.bytes[SECRET]);
        TcpStore::connect_any(&host, &[address.port()], &key, patience)
    }

    fn take_server(&self) -> Option<TcpStoreServer> {
        let mut served = SERVED.lock();
        let at = served.iter().position(|(id, _)| id == self)?;
        Some(served.swap_remove(at).1)
    }
}

impl std::fmt::Debug for UniqueId {
    /// Without the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "UniqueId({})", self.address())
    }
}

/// The key to the store of an id with this secret.
fn key(secret: &[u8]) -> StoreKey {
    StoreKey::new("unique id", Some(Secret::from_bytes(secret)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    const SOON: Duration = Duration::from_secs(10);

    #[test]
    fn ranks_meet_at_an_id_and_strangers_do_not() {
        let id = UniqueId::create(&Config::default()).expect("an id");
        let copy = UniqueId::from_bytes(id.to_bytes()).expect("the same");
        let other = std::thread::spawn(move || {
            let meeting = copy.open(1, 2, SOON).expect("rank 1");
            let value = meeting.store().wait("key", SOON).expect("a value");
            (value, meeting.store().secret())
        });
        let meeting = id.open(0, 2, SOON).expect("rank 0");
        meeting.store().set("key", b"value").expect("set");
        let (value, secret) = other.join().expect("no panic");
        assert_eq!(value, b"value");
        assert!(secret.is_some() && secret == meeting.store().secret());

        let stranger = UniqueId::new(id.address(), &[7; 32]);
        let refused = stranger.open(1, 2, Duration::from_millis(100)).err();
        assert_eq!(refused.expect("another secret").code, Code::Timeout);
    }

    #[test]
    fn what_is_no_id_is_refused() {
        let address = "[fd00::7]:1234".parse().expect("an address");
        let good = UniqueId::new(address, &[3; 32]).to_bytes();
        assert_eq!(UniqueId::from_bytes(good).expect("good").address(), address);
        assert!(UniqueId::from_bytes([0; BYTES]).is_err());
        for at in 0..BYTES {
            let mut damaged = good;
            damaged[at] ^= 1;
            assert!(UniqueId::from_bytes(damaged).is_err(), "byte {at}");
        }
    }
}
