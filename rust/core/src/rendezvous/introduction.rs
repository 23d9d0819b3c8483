//! The data by which a rank introduces itself when it joins a group, and where that data comes from.

use std::fmt;
use std::sync::Arc;

use super::records::{Entry, MAX_ADDRESS, MAX_TEXT, Row, Seal, Uuid};
use super::secret::Secret;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::locks::Mutex;
use crate::transport::endpoint::network_namespace;
use crate::transport::keys::{KeyPair, random_bytes};
use crate::types::Rank;
use crate::users;

/// The data by which a rank introduces itself to join a group.
#[derive(Clone)]
pub struct Introduction {
    /// This rank.
    pub rank: Rank,
    /// How many ranks the group has.
    pub world: usize,
    /// The label of its host: ranks with the same label try to share memory.
    pub host: String,
    /// The host's name, for messages.
    pub hostname: String,
    /// The process, for messages.
    pub pid: u32,
    /// The memory node of its host that it is bound to, where there are several.
    pub node: Option<u16>,
    /// It was not in the group that takes in others by this one.
    pub is_new: bool,
    /// Where the others reach this rank; opaque here, at most 4096 bytes.
    pub address: Vec<u8>,
    /// The settings that must be the same on every rank.
    pub settings: Vec<(String, String)>,
    /// The version of unisono.
    pub version: String,
    /// The key pair by which it proves itself to the other members.
    pub key: Arc<KeyPair>,
    /// The secret that only the ranks of the job know, if there is one.
    pub secret: Option<Secret>,
    /// Whether what goes over TCP is encrypted.
    pub encrypts: bool,
    /// Tells this process from all others, also where both say the same of themselves.
    pub(super) process: Uuid,
    /// Tells this attempt to join from all others.
    pub(super) attempt: Uuid,
}

impl Introduction {
    /// This process as rank `rank` of `world`, reachable at `address`, with the settings of `config`, on a machine with
    /// one memory node, new to the others. It has the key pair of this process, and no secret.
    ///
    /// # Errors
    /// `System` when the operating system gives no random bytes.
    pub fn new(rank: Rank, world: usize, address: Vec<u8>, config: &Config) -> Result<Self> {
        let settings = config.agreed().into_iter();
        Ok(Self {
            rank,
            world,
            host: config.host.clone().unwrap_or_else(host_label),
            hostname: hostname(),
            pid: std::process::id(),
            node: None,
            is_new: true,
            address,
            settings: settings
                .map(|(name, value)| (name.to_owned(), value))
                .collect(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            key: own_key()?,
            secret: None,
            encrypts: config.encrypt.0,
            process: this_process()?,
            attempt: random_bytes()?,
        })
    }

    pub(super) fn seal(&self) -> Seal<'_> {
        Seal {
            version: &self.version,
            key: self.secret.as_ref().map(|secret| secret.derive(b"records")),
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        let Self { rank, world, .. } = self;
        if rank >= world || u32::try_from(*world).is_err() {
            return Err(Error::invalid(format!(
                "rank {rank} is not below the world size {world}"
            )));
        }
        let texts = [&self.host, &self.hostname, &self.version];
        let settings = self.settings.iter().flat_map(|(name, value)| [name, value]);
        for text in texts.into_iter().chain(settings) {
            if text.len() > MAX_TEXT {
                return Err(Error::invalid(format!(
                    "{text:?} is longer than the {MAX_TEXT} bytes that a rank may say about itself at once"
                )));
            }
        }
        if self.address.len() > MAX_ADDRESS {
            return Err(Error::internal(format!(
                "the address of rank {rank} has {} bytes, more than {MAX_ADDRESS}",
                self.address.len()
            )));
        }
        Ok(())
    }

    pub(super) fn entry(&self) -> Entry {
        Entry {
            rank: self.rank as u32,
            world: self.world as u32,
            process: self.process,
            row: Row {
                key: self.key.public(),
                attempt: self.attempt,
                pid: self.pid,
                node: self.node,
                is_new: self.is_new,
                host: self.host.clone(),
                hostname: self.hostname.clone(),
                address: self.address.clone(),
            },
            settings: self.settings.clone(),
        }
    }
}

impl fmt::Debug for Introduction {
    /// Everything but what is secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Introduction")
            .field("rank", &self.rank)
            .field("world", &self.world)
            .field("host", &self.host)
            .field("hostname", &self.hostname)
            .field("pid", &self.pid)
            .field("node", &self.node)
            .field("settings", &self.settings)
            .field("version", &self.version)
            .field("has_secret", &self.secret.is_some())
            .finish_non_exhaustive()
    }
}

/// A number that this process has drawn.
fn this_process() -> Result<Uuid> {
    static DRAWN: PerProcess<Mutex<Option<Uuid>>> = PerProcess::new(Mutex::default);
    of_this_process(&DRAWN, random_bytes)
}

/// The key pair of this process: with the same in all groups, it proves itself to each other process once.
fn own_key() -> Result<Arc<KeyPair>> {
    static DRAWN: PerProcess<Mutex<Option<Arc<KeyPair>>>> = PerProcess::new(Mutex::default);
    of_this_process(&DRAWN, || Ok(Arc::new(KeyPair::random()?)))
}

/// The value that this process has drawn; a forked child draws its own.
fn of_this_process<T: Clone>(
    drawn: &Mutex<Option<T>>,
    draw: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let mut drawn = drawn.lock();
    match &*drawn {
        Some(value) => Ok(value.clone()),
        None => Ok(drawn.insert(draw()?).clone()),
    }
}

/// The label of the host that this process runs on: the running kernel, told by its boot id; the user, since users of one
/// host do not share memory; and the network namespace, since the sockets that hand memory over do not lead out of it.
pub fn host_label() -> String {
    let user = match users::own() {
        Some(user) => format!("user {user}"),
        // Another process with the same number may be another user's.
        None => {
            let process = this_process().map_or(0, u128::from_be_bytes);
            format!("no user, process {process:032x}")
        }
    };
    let network = network_namespace();
    match std::fs::read_to_string("/proc/sys/kernel/random/boot_id") {
        Ok(id) if !id.trim().is_empty() => format!("{} {user} network {network}", id.trim()),
        _ => format!("{} {user} network {network}", hostname()),
    }
}

/// The host's name.
pub fn hostname() -> String {
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    name.chars().take(64).collect()
}
