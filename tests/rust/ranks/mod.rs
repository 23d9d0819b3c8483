//! Ranks as threads of one process, for the tests of several files.

use unisono::Communicator;
use unisono::config::Config;
use unisono::rendezvous::memory::MemoryStore;

/// How the ranks of a test are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "not every file has them all")]
pub(crate) enum Transport {
    /// Inside the process, without meeting.
    Local,
    Shm,
    Tcp,
    /// Two hosts, rank by rank in turn: shared memory inside, TCP between.
    Mixed,
}

/// The settings of such ranks, with these beside, by names and values.
pub(crate) fn config(transport: Transport, settings: &[(&str, &str)]) -> Config {
    let mut config = Config::default();
    let asked_for = match transport {
        Transport::Shm => Some(("transport", "shm")),
        Transport::Tcp => Some(("transport", "tcp")),
        Transport::Local | Transport::Mixed => None,
    };
    for (name, value) in settings.iter().chain(&asked_for) {
        config.set(name, value).expect("a setting");
    }
    config
}

/// Runs `body` as every rank of a world, each on a thread of its own that owns its communicator. `settings`: names and values.
pub(crate) fn run(
    transport: Transport,
    world: usize,
    settings: &[(&str, &str)],
    body: impl Fn(Communicator) + Send + Sync,
) {
    let config = config(transport, settings);
    let mut local = match transport {
        Transport::Local => Communicator::local(world, &config).expect("communicators"),
        _ => Vec::new(),
    };
    let store = MemoryStore::default();
    std::thread::scope(|scope| {
        for rank in (0..world).rev() {
            let (body, store, mut config) = (&body, &store, config.clone());
            let comm = local.pop();
            scope.spawn(move || {
                if transport == Transport::Mixed {
                    let host = ["left", "right"][rank % 2];
                    config.set("host", host).expect("a setting");
                }
                let join = || Communicator::join(store, rank, world, config);
                body(comm.unwrap_or_else(|| join().expect("a communicator")));
            });
        }
    });
}
