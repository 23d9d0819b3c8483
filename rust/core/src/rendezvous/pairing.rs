//! Pairs of processes that form one after another at one store, which one of them serves as long as it likes: the host.
//! The others, its guests, have a [`UniqueId`] that says where the store is.
//!
//! A store has no operation that takes a number and counts on. So a guest draws a random name and looks for a turn of its
//! own: it writes the name under `guest/N`, where the host reads it, and the host writes under `taken/N` which name it
//! read. A guest that finds another name there was too late, and tries the turn after it. The pair then meets under the
//! guest's name, as rank 0 (the host) and rank 1.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::secret::Secret;
use super::store::{PrefixStore, Store};
use super::tcp::store::TcpStore;
use super::unique_id::UniqueId;
use crate::config::Config;
use crate::error::{Code, Error, Result};
use crate::transport::keys::{Hex, random_bytes};

/// How long one wait for the next guest takes; another one follows.
const WATCH: Duration = Duration::from_secs(60);

/// How much longer than a guest has time it waits for the host's reply: a busy host may take that long.
const GRACE: Duration = Duration::from_secs(5);

/// The turn that the next guest may take, so that it need not try all before it.
const NEXT: &str = "next";

/// What the host says of itself to all guests.
const HOST: &str = "host";

/// The process that serves the store.
pub(crate) struct Host {
    id: UniqueId,
    store: Arc<TcpStore>,
    is_closed: AtomicBool,
}

/// What one pair meets at.
pub(crate) struct Pair(PrefixStore<Arc<TcpStore>>);

impl Host {
    /// Serves a store, and says `card` to every guest.
    ///
    /// # Errors
    /// As [`UniqueId::create`].
    pub(crate) fn open(config: &Config, card: &[u8]) -> Result<Self> {
        // Those that come need not have been launched with this process.
        let (id, server) = UniqueId::serve(config, false)?;
        // No guest can end it, as ranks of a group do that have met.
        server.end_with_meeting(usize::MAX, Duration::MAX);
        let store = Arc::new(TcpStore::own(server)?);
        store.set(HOST, card)?;
        Ok(Self {
            id,
            store,
            is_closed: AtomicBool::new(false),
        })
    }

    /// What a guest needs. It holds a secret.
    pub(crate) fn id(&self) -> &UniqueId {
        &self.id
    }

    /// Waits for the guest of this turn; the first turn is 0. `None` when the host has closed.
    ///
    /// # Errors
    /// `System` when the own store cannot be reached.
    pub(crate) fn next(&self, turn: u64) -> Result<Option<Pair>> {
        let name = loop {
            let waited = self.store.wait(&guest(turn), WATCH);
            if self.is_closed() {
                return Ok(None);
            }
            match waited {
                Ok(name) => break name,
                Err(error) if error.code == Code::Timeout => {}
                Err(error) => return Err(error),
            }
        };
        self.store.set(NEXT, (turn + 1).to_string().as_bytes())?;
        self.store.set(&taken(turn), &name)?;
        Ok(Some(Pair::new(&name, &self.store)))
    }

    /// Whether [`Host::close`] has been called.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Ends the store, and so all that waits at it: [`Host::next`], and pairs that are about to meet.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        if let Some(server) = self.store.server() {
            server.stop();
        }
    }
}

impl Pair {
    /// Comes to the host of `id` as a guest. Returns what the host says of itself, too.
    ///
    /// # Errors
    /// `Timeout` when no host answers within `patience`, `System` when it goes meanwhile.
    pub(crate) fn visit(id: &UniqueId, patience: Duration) -> Result<(Self, Vec<u8>)> {
        let begun = Instant::now();
        Self::come_to(id, patience).map_err(|error| {
            let code = match begun.elapsed() < patience {
                true => error.code,
                false => Code::Timeout,
            };
            let address = id.address();
            Error::new(
                code,
                format!(
                    "no process answers at {address}, or it does not take this one in: has it closed or died, is that its \
                     address as seen from here, and does no firewall stand between? ({})",
                    error.message
                ),
            )
        })
    }

    fn come_to(id: &UniqueId, patience: Duration) -> Result<(Self, Vec<u8>)> {
        let begun = Instant::now();
        let left = || patience.saturating_sub(begun.elapsed());
        let store = Arc::new(id.visit(patience)?.with_grace(GRACE));
        let card = store.wait(HOST, left())?;
        let name = Hex(&random_bytes::<16>()?).to_string();
        let text = store.get(NEXT)?.unwrap_or_default();
        let first = std::str::from_utf8(&text).ok();
        let mut turn: u64 = first.and_then(|text| text.parse().ok()).unwrap_or(0);
        loop {
            store.set(&guest(turn), name.as_bytes())?;
            if store.wait(&taken(turn), left())? == name.as_bytes() {
                return Ok((Self::new(name.as_bytes(), &store), card));
            }
            turn += 1;
        }
    }

    fn new(name: &[u8], store: &Arc<TcpStore>) -> Self {
        let prefix = format!("pair/{}", String::from_utf8_lossy(name));
        Self(PrefixStore::new(prefix, Arc::clone(store)))
    }
}

impl Store for Pair {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.set(key, value)
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.0.wait(key, timeout)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.0.get(key)
    }

    fn address(&self) -> Option<SocketAddr> {
        self.0.address()
    }

    fn secret(&self) -> Option<Secret> {
        self.0.secret()
    }

    fn is_for_strangers(&self) -> bool {
        true
    }

    /// The host serves it for all guests, one after another.
    fn ends_with_rank_0(&self) -> bool {
        false
    }
}

fn guest(turn: u64) -> String {
    format!("guest/{turn}")
}

fn taken(turn: u64) -> String {
    format!("taken/{turn}")
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    /// Guests that come at once each get a pair of their own, and the host can close while it waits.
    #[test]
    fn every_guest_is_one_of_a_pair() {
        let host = Host::open(&Config::default(), b"card").expect("a store");
        let guests = 12;
        thread::scope(|scope| {
            for number in 0..guests {
                let id = *host.id();
                scope.spawn(move || {
                    let (pair, card) = Pair::visit(&id, SOON).expect("a pair");
                    assert_eq!(card, b"card");
                    assert!(pair.secret().is_some() && pair.is_for_strangers());
                    pair.set("mine", &[number]).expect("set");
                    assert_eq!(pair.wait("yours", SOON).expect("an answer"), [number]);
                });
            }
            let mut seen = Vec::new();
            for turn in 0..u64::from(guests) {
                let pair = host.next(turn).expect("a guest").expect("open");
                let number = pair.wait("mine", SOON).expect("its number");
                pair.set("yours", &number).expect("set");
                seen.extend(number);
            }
            seen.sort_unstable();
            assert_eq!(seen, (0..guests).collect::<Vec<_>>());
            let waits = scope.spawn(|| host.next(u64::from(guests)).expect("no failure").is_none());
            thread::sleep(Duration::from_millis(50));
            host.close();
            assert!(waits.join().expect("no panic"), "it has closed");
        });
    }

    #[test]
    fn a_host_that_has_gone_is_named() {
        let host = Host::open(&Config::default(), b"").expect("a store");
        let id = *host.id();
        // It serves, and takes no guest.
        let error = Pair::visit(&id, Duration::from_millis(200)).err().unwrap();
        assert_eq!(error.code, Code::Timeout);
        assert!(error.message.contains(&id.address().to_string()), "{error}");
        drop(host);
        let error = Pair::visit(&id, Duration::from_millis(200)).err().unwrap();
        assert_eq!(error.code, Code::Timeout);
    }
}
