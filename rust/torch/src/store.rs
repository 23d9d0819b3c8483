//! torch's store, through which a group meets.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use unisono::error::Result;
use unisono::rendezvous::launcher;
use unisono::rendezvous::secret::Secret;
use unisono::rendezvous::store::Store;

use crate::ffi;
use crate::status::result;

/// torch's store as the core sees it.
pub(crate) struct TorchStore<'a> {
    pub(crate) store: &'a ffi::Store,
    /// How many ranks the group has that meets through it.
    pub(crate) world: usize,
}

// SAFETY: the adapter in attach.cpp holds a `c10d::Store` and nothing else; c10d's stores take a lock of their own
// in every operation, and torch itself shares one between threads.
unsafe impl Send for TorchStore<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for TorchStore<'_> {}

impl Store for TorchStore<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        result(self.store.set(key, value))
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        // A century, which C++ can still count in nanoseconds.
        let milliseconds = timeout.as_millis().min(100 * 365 * 86_400_000) as u64;
        let fetched = self.store.wait(key, milliseconds);
        result(fetched.status).map(|()| fetched.value)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let fetched = self.store.fetch(key);
        result(fetched.status).map(|()| fetched.found.then_some(fetched.value))
    }

    fn address(&self) -> Option<SocketAddr> {
        let at = self.store.place();
        if at.host.is_empty() {
            return None;
        }
        (at.host.as_str(), at.port).to_socket_addrs().ok()?.next()
    }

    fn ends_with_rank_0(&self) -> bool {
        self.store.place().ends_with_rank_0
    }

    fn relic(&self) -> Option<String> {
        let file = self.store.place().file;
        (!file.is_empty()).then(|| format!("torch's store file {file}"))
    }

    /// torch's store knows none, but `unisono launch` gave one to its ranks.
    fn secret(&self) -> Option<Secret> {
        launcher::secret(self.world)
    }
}
