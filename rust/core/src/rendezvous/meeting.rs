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
use super::tcp::store::{StoreKey, TcpStore, split_address};
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
    const KEPT: usize = 64;
    let mut joined = JOINED.lock();
    joined.push_back((number, rank));
    let surplus = joined.len().saturating_sub(KEPT);
    joined.drain(..surplus);
}

/// Connects to the store of a meeting in which this process has not joined a group as this rank yet.
fn connect_to_next(
    (host, ports, key): (&str, &[u16], &StoreKey),
    rank: Rank,
    (patience, check): (Duration, Check<'_>),
) -> Result<(TcpStore, Number)> {
    const PAUSE: Duration = Duration::from_millis(10);
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
                    "rank 0 has not opened a new meeting at {host} port {ports:?} within {} s, and still serves the one in \
                     which this process has joined; has rank 0 closed its group, and does it make the next one?",
                    patience.as_secs_f64()
                ),
            ));
        }
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use super::*;
    use crate::rendezvous::launcher::Master;

    const SOON: Duration = Duration::from_secs(10);

    fn config(seconds: &str) -> Config {
        let mut config = Config::default();
        config.set("join_timeout", seconds).expect("seconds");
        config
    }

    fn free_port() -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        listener.local_addr().expect("address").port()
    }

    /// The store of `meeting` ends without further doing.
    fn assert_closes(meeting: &Meeting) {
        let Opened::Tcp(store) = &meeting.opened else {
            panic!("served over TCP");
        };
        let begun = Instant::now();
        while !store.server().expect("served here").has_ended() {
            assert!(begun.elapsed() < SOON, "the store is still open");
            thread::sleep(Duration::from_millis(2));
        }
        let refused = TcpStream::connect(store.address()).expect_err("closed");
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    }

    /// All ranks see what the others set, and the store closes when all are done.
    fn meet(open: impl Fn(Rank) -> Result<Meeting> + Sync) {
        thread::scope(|scope| {
            let open = &open;
            let ranks: Vec<_> = (0..3)
                .map(|rank| {
                    scope.spawn(move || {
                        let meeting = open(rank).expect("open");
                        let store = meeting.store();
                        store.set(&format!("{rank}"), b"here").expect("set");
                        for other in 0..3 {
                            store.wait(&format!("{other}"), SOON).expect("came");
                        }
                        let rest = meeting.joined();
                        if let Some(rest) = rest {
                            // Rank 0 serves, until the others are done.
                            assert_eq!(rank, 0);
                            assert_closes(&rest);
                        }
                    })
                })
                .collect();
            for rank in ranks {
                rank.join().expect("no panic");
            }
        });
    }

    #[test]
    fn ranks_meet_at_a_tcp_url() {
        let url = format!("tcp://127.0.0.1:{}", free_port());
        meet(|rank| open_url(&url, rank, 3, &config("10")));
        let url = format!("tcp://localhost:{}/", free_port());
        meet(|rank| open_url(&url, rank, 3, &config("10")));
    }

    #[test]
    fn ranks_meet_in_a_file() {
        let path = std::env::temp_dir().join(format!("unisono-url-{}", std::process::id()));
        let url = format!("file://{}", path.display());
        meet(|rank| open_url(&url, rank, 3, &config("10")));
        std::fs::remove_file(path).expect("remove");
    }

    #[test]
    fn ranks_meet_beside_the_launcher_s_own_server() {
        let agent = TcpListener::bind("127.0.0.1:0").expect("bind");
        let launch = |rank| Launch {
            rank,
            world: 3,
            local_rank: None,
            local_world: None,
            master: Some(Master {
                host: "127.0.0.1".to_owned(),
                port: agent.local_addr().expect("address").port(),
                is_taken: true,
            }),
            job: "torchrun some-id 1".to_owned(),
            secret: Some(Secret::from_bytes(b"of the launcher")),
            source: "torchrun",
        };
        meet(|rank| open_launch(&launch(rank), &config("10"), &|| Ok(())));
        let mut alone = launch(0);
        (alone.world, alone.master) = (1, None);
        open_launch(&alone, &config("10"), &|| Ok(())).expect("needs no meeting");
    }

    #[test]
    fn ranks_of_one_host_meet_on_loopback_whatever_the_master_is_called() {
        let port = free_port();
        let launch = |rank| Launch {
            rank,
            world: 3,
            local_rank: None,
            local_world: Some(3),
            master: Some(Master {
                // For documentation: no host has it.
                host: "192.0.2.1".to_owned(),
                port,
                is_taken: false,
            }),
            job: "the same".to_owned(),
            secret: None,
            source: "torchrun",
        };
        meet(|rank| {
            let meeting = open_launch(&launch(rank), &config("10"), &|| Ok(()))?;
            let address = meeting.store().address().expect("over TCP");
            assert!(address.ip().is_loopback(), "{address}");
            Ok(meeting)
        });
        let alone =
            open_launch(&launch(1), &config("0.1"), &|| Ok(())).expect_err("rank 0 does not come");
        let why = "torchrun says that all 3 ranks are on this host, so they meet here and not at 192.0.2.1";
        assert!(alone.message.ends_with(why), "{alone}");
    }

    #[test]
    fn rank_0_leaves_after_all_ranks_that_came() {
        let store = MemoryStore::default();
        // Rank 1 came and is slow to leave; rank 2 never came and is not waited for.
        store.set(&roster::entry_key(1), b"").expect("set");
        let begun = Instant::now();
        thread::scope(|scope| {
            let zero = scope.spawn(|| {
                leave(&store, 0, 3, SOON);
                begun.elapsed()
            });
            thread::sleep(Duration::from_millis(50));
            leave(&store, 1, 3, SOON);
            let took = zero.join().expect("no panic");
            assert!(took >= Duration::from_millis(40) && took < SOON, "{took:?}");
        });
        let begun = Instant::now();
        store.set(&roster::entry_key(2), b"").expect("set");
        leave(&store, 0, 3, Duration::from_millis(30));
        assert!(begun.elapsed() >= Duration::from_millis(30));
    }

    #[test]
    fn other_urls_are_refused_with_what_is_accepted() {
        for url in [
            "",
            "node0:29500",
            "http://a:1",
            "tcp://a",
            "tcp://a:0",
            "tcp://fd00::1:2",
            "file://x",
        ] {
            let Err(error) = open_url(url, 0, 2, &config("10")) else {
                panic!("{url} was opened");
            };
            assert_eq!(error.code, Code::InvalidArgument);
            assert!(
                error.message.contains("accepted are tcp://host:port"),
                "{error}"
            );
        }
        assert!(open_url("tcp://127.0.0.1:1", 2, 2, &config("10")).is_err());
    }

    #[test]
    fn a_taken_port_is_said() {
        let taken = TcpListener::bind("127.0.0.1:0").expect("bind");
        let url = format!("tcp://{}", taken.local_addr().expect("address"));
        let Err(error) = open_url(&url, 0, 2, &config("10")) else {
            panic!("the port was taken");
        };
        assert_eq!(error.code, Code::System);
        assert!(error.message.contains("choose another port"), "{error}");
    }

    #[test]
    fn a_store_closes_when_the_time_to_join_is_over() {
        let url = format!("tcp://127.0.0.1:{}", free_port());
        let meeting = open_url(&url, 0, 2, &config("0.1")).expect("open");
        let other = open_url(&url, 1, 2, &config("10")).expect("open");
        // Rank 1 neither joins nor leaves.
        let rest = meeting.joined().expect("served here");
        assert_closes(&rest);
        drop(other);
    }

    #[test]
    fn only_ranks_with_the_same_secrets_meet() {
        let launch = |rank, secret: &str, port| Launch {
            rank,
            world: 2,
            local_rank: None,
            local_world: None,
            master: Some(Master {
                host: "127.0.0.1".to_owned(),
                port,
                is_taken: false,
            }),
            job: "the same".to_owned(),
            secret: (!secret.is_empty()).then(|| Secret::from_bytes(secret.as_bytes())),
            source: "torchrun",
        };
        let port = free_port();
        let first = open_launch(&launch(0, "one", port), &config("10"), &|| Ok(())).expect("open");
        for secret in ["two", ""] {
            let error = open_launch(&launch(1, secret, port), &config("0.3"), &|| Ok(()))
                .expect_err("kept out");
            assert_eq!(error.code, Code::Timeout);
            assert!(error.message.contains("another secret"), "{error}");
        }
        // Two jobs that are launched at one port do not mix: the second takes the next.
        let second = open_launch(&launch(0, "two", port), &config("10"), &|| Ok(())).expect("open");
        for (secret, meeting) in [("one", &first), ("two", &second)] {
            let member =
                open_launch(&launch(1, secret, port), &config("10"), &|| Ok(())).expect("open");
            assert_eq!(member.store().address(), meeting.store().address());
            assert_eq!(
                member.store().secret(),
                Some(Secret::from_bytes(secret.as_bytes()))
            );
        }
    }
}
