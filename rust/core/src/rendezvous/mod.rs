//! How the ranks of a job find and trust each other.
//!
//! A [`launcher`] says who this process is and where rank 0 is. Through a [`store`] there (the built-in
//! [TCP store](tcp_store), a [shared file](file_store), the [memory] of one process, or torch's) the ranks
//! [introduce](roster) themselves to each other and get the group's secret, with which every later connection
//! proves that it belongs to the group.

pub mod file_store;
pub mod handshake;
pub mod introduction;
pub mod launcher;
pub mod memory;
mod records;
pub mod roster;
pub mod store;
pub mod tcp_server;
mod tcp_service;
pub mod tcp_store;
pub mod unique_id;

use std::sync::Arc;
use std::time::{Duration, Instant};

use self::file_store::FileStore;
use self::launcher::Launch;
use self::memory::MemoryStore;
use self::store::Store;
use self::tcp_server::TcpStoreServer;
use self::tcp_store::TcpStore;
use crate::error::{Error, Result};
use crate::types::Rank;

/// Opens the store at `url`: `tcp://host:port`, served by rank 0 at that address, or `file:///path`, a file that all
/// ranks can reach. The store of rank 0 must live until every rank has joined.
///
/// # Errors
/// `InvalidArgument` for any other URL, `Timeout` when rank 0 does not serve within `timeout`, `System` when it
/// cannot.
pub fn open_url(url: &str, rank: Rank, world: usize, timeout: Duration) -> Result<Arc<dyn Store>> {
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
            tcp_store::split_address(address).map_err(|_| wrong("there is no host and port"))?;
        if port == 0 {
            return Err(wrong("the port is 0"));
        }
        return open_tcp(host, &[port], "", rank, timeout);
    }
    if let Some(path) = url.strip_prefix("file://") {
        if !path.starts_with('/') {
            return Err(wrong("the path is not absolute"));
        }
        return Ok(Arc::new(FileStore::open(path)?));
    }
    Err(wrong("the scheme is unknown"))
}

/// Opens the store at which the launcher says that the ranks meet. A world of one needs no meeting.
///
/// # Errors
/// As [`open_url`].
pub fn open_launch(launch: &Launch, timeout: Duration) -> Result<Arc<dyn Store>> {
    match &launch.master {
        _ if launch.world == 1 => Ok(Arc::new(MemoryStore::default())),
        Some(master) => open_tcp(
            &master.host,
            &master.candidates(),
            &launch.job,
            launch.rank,
            timeout,
        ),
        None => Err(Error::invalid(format!(
            "{} does not say where its {} ranks meet: set MASTER_ADDR and MASTER_PORT",
            launch.source, launch.world
        ))),
    }
}

/// Says that this rank needs the store no longer, its attempt to join having ended well or not. On rank 0, whose end
/// may be the end of the store, waits until all ranks that came to it have said so, at most `patience`.
pub fn leave(store: &dyn Store, rank: Rank, world: usize, patience: Duration) {
    let done = |rank: Rank| format!("left/{rank}");
    if rank != 0 {
        // If the store is gone, there is nobody who waits.
        let _ = store.set(&done(rank), b"");
        return;
    }
    let begun = Instant::now();
    for other in 1..world {
        let came = matches!(store.get(&roster::entry_key(other)), Ok(Some(_)));
        if came {
            let _ = store.wait(&done(other), patience.saturating_sub(begun.elapsed()));
        }
    }
}

/// Serves on rank 0, connects on all ranks.
fn open_tcp(
    host: &str,
    ports: &[u16],
    job: &str,
    rank: Rank,
    timeout: Duration,
) -> Result<Arc<dyn Store>> {
    let store = match rank {
        0 => TcpStore::own(TcpStoreServer::start_any(host, ports, job)?)?,
        _ => TcpStore::connect_any(host, ports, job, timeout)?,
    };
    tracing::debug!(address = %store.address(), rank, "the ranks meet here");
    Ok(Arc::new(store))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::launcher::Master;
    use super::*;
    use crate::error::Code;

    const SOON: Duration = Duration::from_secs(10);

    fn free_port() -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        listener.local_addr().expect("address").port()
    }

    /// All ranks see what rank 0 sets.
    fn meet(open: impl Fn(Rank) -> Result<Arc<dyn Store>> + Sync) {
        thread::scope(|scope| {
            let open = &open;
            let ranks: Vec<_> = (0..3)
                .map(|rank| {
                    scope.spawn(move || {
                        let store = open(rank).expect("open");
                        store.set(&format!("{rank}"), b"here").expect("set");
                        for other in 0..3 {
                            store.wait(&format!("{other}"), SOON).expect("came");
                        }
                        // Rank 0 serves, so it leaves last.
                        store.set(&format!("{rank} is done"), b"").expect("set");
                        for other in (0..3).filter(|_| rank == 0) {
                            store.wait(&format!("{other} is done"), SOON).expect("done");
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
        meet(|rank| open_url(&url, rank, 3, SOON));
        let url = format!("tcp://localhost:{}/", free_port());
        meet(|rank| open_url(&url, rank, 3, SOON));
    }

    #[test]
    fn ranks_meet_in_a_file() {
        let path = std::env::temp_dir().join(format!("unisono-url-{}", std::process::id()));
        let url = format!("file://{}", path.display());
        meet(|rank| open_url(&url, rank, 3, SOON));
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
            source: "torchrun",
        };
        meet(|rank| open_launch(&launch(rank), SOON));
        let mut alone = launch(0);
        (alone.world, alone.master) = (1, None);
        open_launch(&alone, SOON).expect("needs no meeting");
    }

    #[test]
    fn rank_0_leaves_after_all_who_came() {
        let store = MemoryStore::default();
        // Rank 1 came and is slow to leave; rank 2 never came and is not waited for.
        store.set(&roster::entry_key(1), b"").expect("set");
        thread::scope(|scope| {
            let zero = scope.spawn(|| {
                let begun = Instant::now();
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
            let Err(error) = open_url(url, 0, 2, SOON) else {
                panic!("{url} was opened");
            };
            assert_eq!(error.code, Code::InvalidArgument);
            assert!(
                error.message.contains("accepted are tcp://host:port"),
                "{error}"
            );
        }
        assert!(open_url("tcp://127.0.0.1:1", 2, 2, SOON).is_err());
    }

    #[test]
    fn a_taken_port_is_said() {
        let taken = TcpListener::bind("127.0.0.1:0").expect("bind");
        let url = format!("tcp://{}", taken.local_addr().expect("address"));
        let Err(error) = open_url(&url, 0, 2, SOON) else {
            panic!("the port was taken");
        };
        assert_eq!(error.code, Code::System);
        assert!(error.message.contains("choose another port"), "{error}");
    }
}
