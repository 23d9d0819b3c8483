//! A meeting: the store at which the ranks of one group find each other, from opening it until all have joined.
//!
//! Where a rank serves the store itself, others may still be reading from it when that rank has joined or has failed to: it
//! waits for them only for a while (`roster/joining.rs`). So every rank says that it is done with the store, under
//! `left/N`, whose value is the number of ranks. The server ends when all have said so, or when the time to join is over
//! for those that have not. Then nothing is left that a stranger could connect to.
//!
//! Ranks may meet again at the same address, when they have closed their group: then a rank that comes early finds the server
//! of the meeting that it has left, as long as others need that; and one that is late, the server of the next one. So each
//! meeting there has a number, under `meeting`: a rank does not go to one again, and speaks to no other one than its own.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use super::file_store::FileStore;
use super::launcher::Launch;
use super::memory::MemoryStore;
use super::secret::Secret;
use super::store::{Check, Store};
use super::tcp::server::TcpStoreServer;
use super::tcp::store::{StoreKey, TcpStore, port_range, split_address};
use super::unique_id::UniqueId;
use super::{left_key, roster};
use crate::config::Config;
use crate::descriptors;
use crate::error::{Code, Error, Result};
use crate::fork::{Home, PerProcess};
use crate::locks::Mutex;
use crate::transport::keys::random_bytes;
use crate::types::Rank;

/// How long a rank that goes serves its store on, for ranks that came and have not said that they are done with it.
const FAREWELL: Duration = Duration::from_secs(3);

/// The store at which the ranks of one group meet, for one of them.
///
/// Dropping it says that this rank needs it no longer, its attempt to join having ended well or not. On the rank that
/// serves the store, waits up to 3 s until all ranks that came have said so, and ends it.
pub struct Meeting {
    opened: Opened,
    rank: Rank,
    world: usize,
    /// Of a meeting at an address where there may be others before and after it.
    number: Option<Number>,
    /// The process that opened it: a forked child shares its connections and must not speak over them.
    home: Home,
}

enum Opened {
    Tcp(Box<TcpStore>),
    Other(Box<dyn Store>),
}

/// Where the ranks of a job meet: at the start, and again when processes come that take the places of others.
#[derive(Clone, Debug)]
pub enum MeetingPlace {
    /// Where the launcher says.
    Launch(Launch),
    /// At a URL, as for [`open_url`].
    Url(String),
    /// Where the process that made the id serves, once.
    Id(UniqueId),
}

impl MeetingPlace {
    /// Opens the store there.
    ///
    /// # Errors
    /// As [`open_url`]; `InvalidArgument` where the launcher does not say where the ranks meet.
    pub fn open(&self, rank: Rank, world: usize, config: &Config) -> Result<Meeting> {
        self.open_while(rank, world, config, &|| Ok(()))
    }

    /// The same, as long as `check` finds no reason to give up.
    ///
    /// # Errors
    /// As [`open`](Self::open), and those of `check`.
    pub(crate) fn open_while(
        &self,
        rank: Rank,
        world: usize,
        config: &Config,
        check: Check<'_>,
    ) -> Result<Meeting> {
        match self {
            Self::Launch(launch) => open_launch(&launch.of(rank, world), config, check),
            Self::Url(url) => open_at(url, (rank, world), config, check),
            Self::Id(id) => id.open(rank, world, config.join_timeout.duration()),
        }
    }

    /// Whether ranks meet there once: others would find there the entries of those before, or nothing.
    pub(crate) fn is_for_once(&self) -> bool {
        match self {
            Self::Launch(_) => false,
            Self::Url(url) => url.starts_with("file:"),
            Self::Id(_) => true,
        }
    }
}

impl Meeting {
    fn new(opened: Opened, rank: Rank, world: usize) -> Self {
        Self {
            opened,
            rank,
            world,
            number: None,
            home: Home::here(),
        }
    }

    /// At `store`; where this process serves it, until all of `world` ranks have left, and no longer than `patience`
    /// after this rank has.
    pub(super) fn over_tcp(store: TcpStore, rank: Rank, world: usize, patience: Duration) -> Self {
        let store = match store.server() {
            Some(server) => {
                server.end_with_meeting(world, patience);
                store
            }
            None => store.until(Instant::now().checked_add(patience)),
        };
        Self::new(Opened::Tcp(Box::new(store)), rank, world)
    }

    /// Ends it on the rank that serves the store, without a wait for others: all that need it have joined.
    pub(crate) fn end(mut self) {
        self.opened = Opened::Other(Box::new(MemoryStore::default()));
    }

    /// The store.
    pub fn store(&self) -> &dyn Store {
        match &self.opened {
            Opened::Tcp(store) => &**store,
            Opened::Other(store) => &**store,
        }
    }

    /// This rank has joined and needs the store no longer. Keep the returned value as long as this process may serve others:
    /// while the communicator is open. The server ends by itself when all have joined.
    #[must_use]
    pub fn joined(self) -> Option<Self> {
        if let Some(number) = self.number {
            note_joined(number, self.rank);
        }
        match &self.opened {
            Opened::Tcp(store) if store.server().is_some() => {
                // Else it ends when it is dropped.
                let _ = store.set(&left_key(self.rank), self.world.to_string().as_bytes());
                Some(self)
            }
            _ => None,
        }
    }
}

impl std::fmt::Debug for Meeting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meeting")
            .field("address", &self.store().address())
            .field("rank", &self.rank)
            .field("world", &self.world)
            .finish()
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        // Only what is served over the network ends with a process.
        let Opened::Tcp(store) = &self.opened else {
            return;
        };
        let has_ended = store.server().is_some_and(TcpStoreServer::has_ended);
        if self.home.is_here() && !has_ended {
            leave(&**store, self.rank, self.world, FAREWELL);
        }
    }
}

/// Says that this rank needs the store no longer. On rank 0, whose end may be the end of the store, waits until all
/// ranks that came to it have said so, at most `patience`.
fn leave(store: &dyn Store, rank: Rank, world: usize, patience: Duration) {
    if rank != 0 {
        // If the store is gone, no rank waits.
        let _ = store.set(&left_key(rank), world.to_string().as_bytes());
        return;
    }
    let begun = Instant::now();
    for other in 1..world {
        let came = matches!(store.get(&roster::entry_key(other)), Ok(Some(_)));
        if came {
            let _ = store.wait(&left_key(other), patience.saturating_sub(begun.elapsed()));
        }
    }
}

/// Opens the store at `url`: `tcp://host:port`, served by rank 0 at that address, or `file:///path`, a file that all
/// ranks can reach. Of `config` its `join_timeout` and `secret_file` count.
///
/// # Errors
/// `InvalidArgument` for any other URL, and as [`Secret::read_file`]; `Timeout` when rank 0 does not serve in time,
/// `System` when it cannot.
pub fn open_url(url: &str, rank: Rank, world: usize, config: &Config) -> Result<Meeting> {
    open_at(url, (rank, world), config, &|| Ok(()))
}

fn open_at(
    url: &str,
    (rank, world): (Rank, usize),
    config: &Config,
    check: Check<'_>,
) -> Result<Meeting> {
    if rank >= world {
        return Err(Error::invalid(format!(
            "rank {rank} is not below the world size {world}"
        )));
    }
    let wrong = |why: &str| {
        Error::invalid(format!(
            "{why} in the URL {url:?}; accepted are tcp://host:port (the address of rank 0, IPv6 in brackets) and \
             file:///path (an absolute path that all ranks can reach)"
        ))
    };
    if let Some(address) = url.strip_prefix("tcp://") {
        let address = address.strip_suffix('/').unwrap_or(address);
        let (host, port) =
            split_address(address).map_err(|_| wrong("there is no host and port"))?;
        if port == 0 {
            return Err(wrong("the port is 0"));
        }
        let key = StoreKey::new("", users_secret(config)?);
        return open_tcp(host, &[port], &key, (rank, world), (config, check));
    }
    if let Some(path) = url.strip_prefix("file://") {
        if !path.starts_with('/') {
            return Err(wrong("the path is not absolute"));
        }
        let patience = config.join_timeout.duration();
        let store = Box::new(FileStore::open_within(path, patience)?);
        return Ok(Meeting::new(Opened::Other(store), rank, world));
    }
    Err(wrong("the scheme is unknown"))
}

/// Opens the store at which the launcher says that the ranks meet. A world of one needs no meeting.
fn open_launch(launch: &Launch, config: &Config, check: Check<'_>) -> Result<Meeting> {
    let &Launch { rank, world, .. } = launch;
    match &launch.master {
        _ if world == 1 => {
            let store = Box::new(MemoryStore::default());
            Ok(Meeting::new(Opened::Other(store), rank, world))
        }
        Some(master) => {
            let secrets = [users_secret(config)?, launch.secret.clone()];
            let secret = secrets
                .into_iter()
                .flatten()
                .reduce(|one, other| one.mix(&other));
            let key = StoreKey::new(&launch.job, secret);
            let ports = master.candidates();
            let open = |host| open_tcp(host, &ports, &key, (rank, world), (config, check));
            let is_loopback = |ip: IpAddr| ip.is_loopback();
            let is_here = master.host == "localhost" || master.host.parse().is_ok_and(is_loopback);
            if is_here || !launch.is_one_host(world) {
                return open(&master.host);
            }
            // The master has a name or an address by which other hosts could reach it.
            open("localhost").map_err(|error| {
                let message = format!(
                    "{}; {} says that all {world} ranks are on this host, so they meet here and not at {}",
                    error.message, launch.source, master.host
                );
                Error { message, ..error }
            })
        }
        None => Err(Error::invalid(format!(
            "{} does not say where its {world} ranks meet: set MASTER_ADDR and MASTER_PORT",
            launch.source
        ))),
    }
}

fn users_secret(config: &Config) -> Result<Option<Secret>> {
    config
        .secret_file
        .as_deref()
        .map(Secret::read_file)
        .transpose()
}

/// Serves on rank 0, connects on all ranks.
fn open_tcp(
    host: &str,
    ports: &[u16],
    key: &StoreKey,
    (rank, world): (Rank, usize),
    (config, check): (&Config, Check<'_>),
) -> Result<Meeting> {
    let patience = config.join_timeout.duration();
    let (store, number) = match rank {
        0 => {
            // The server keeps as many connections as it finds room for when it starts.
            descriptors::make_room(world);
            let store = TcpStore::own(TcpStoreServer::start_any(host, ports, key)?)?;
            let number = random_bytes()?;
            store.set(NUMBER, &number)?;
            (store, number)
        }
        _ => connect_to_next((host, ports, key), rank, (patience, check))?,
    };
    tracing::debug!(address = %store.address(), rank, "the ranks meet here");
    let mut meeting = Meeting::over_tcp(store, rank, world, patience);
    meeting.number = Some(number);
    Ok(meeting)
}

/// A random number of a meeting, and the key of it.
type Number = [u8; 16];
const NUMBER: &str = "meeting";

/// The meetings in which this process has joined a group, the latest last, and the rank that it has there: threads may be
/// several.
static JOINED: PerProcess<Mutex<VecDeque<(Number, Rank)>>> = PerProcess::new(Mutex::default);

fn note_joined(number: Number, rank: Rank) {
    // The servers of those before have ended long ago.
    const MOST_KEPT: usize = 64;
    let mut joined = JOINED.lock();
    joined.push_back((number, rank));
    let surplus = joined.len().saturating_sub(MOST_KEPT);
    joined.drain(..surplus);
}

/// Connects to the store of a meeting in which this process has not joined a group as this rank yet.
fn connect_to_next(
    (host, ports, key): (&str, &[u16], &StoreKey),
    rank: Rank,
    (patience, check): (Duration, Check<'_>),
) -> Result<(TcpStore, Number)> {
    const LOOK_INTERVAL: Duration = Duration::from_millis(10);
    let begun = Instant::now();
    loop {
        let left = patience.saturating_sub(begun.elapsed());
        let store = TcpStore::connect_while(host, ports, key, left, check)?;
        match store.wait(NUMBER, left.min(FAREWELL)) {
            Ok(number) => match Number::try_from(number) {
                Ok(number) if !JOINED.lock().contains(&(number, rank)) => {
                    return Ok((store.marked(NUMBER, &number), number));
                }
                Ok(_) => {}
                Err(_) => return Err(Error::invalid("the store has a meeting without a number")),
            },
            // It ends.
            Err(error) if matches!(error.code, Code::System | Code::Timeout) => {}
            Err(error) => return Err(error),
        }
        if left.is_zero() {
            return Err(Error::new(
                Code::Timeout,
                format!(
                    "rank 0 has not opened a new meeting at {host} port {} within {} s, and still serves the one in \
                     which this process has joined; has rank 0 closed its group, and does it make the next one?",
                    port_range(ports),
                    patience.as_secs_f64()
                ),
            ));
        }
        thread::sleep(LOOK_INTERVAL);
    }
}

#[cfg(test)]
mod tests;
