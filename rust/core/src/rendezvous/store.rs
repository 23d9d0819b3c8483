//! The key-value store through which the ranks of a job find each other.
//!
//! Anything that can set, get and wait is enough: torch's stores, the built-in [TCP server](super::tcp_store), a
//! [shared file](super::file_store), or the memory of one [process](super::memory). A store is used only while a
//! group forms, so its speed hardly matters; its behaviour when a process is missing or dies does.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::secret::Secret;
use crate::error::{Error, Result};

/// The longest key that the built-in stores take, in bytes.
pub const MAX_KEY: usize = 4 << 10;
/// The longest value that the built-in stores take, in bytes.
pub const MAX_VALUE: usize = 1 << 20;

/// Whether a rank is still to wait for the store.
pub(crate) type Check<'a> = &'a dyn Fn() -> Result<()>;

/// A key-value store that all ranks of a job can reach. Keys are set once and never deleted.
pub trait Store: Send + Sync {
    /// Sets `key` to `value`.
    ///
    /// # Errors
    /// `System` when the store cannot be reached.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The value of `key`, waiting until it is set.
    ///
    /// # Errors
    /// `Timeout` when it is not set within `timeout`, `System` when the store cannot be reached.
    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// The value of `key` if it is set now.
    ///
    /// # Errors
    /// `System` when the store cannot be reached.
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>>;

    /// The store behind this one, where this is a view of another one: its place and its other properties are this one's too.
    fn underlying(&self) -> Option<&dyn Store> {
        None
    }

    /// Where the store is served, if that is over the network and known: the way there tells which of this host's addresses the
    /// other ranks can reach.
    fn address(&self) -> Option<SocketAddr> {
        self.underlying()?.address()
    }

    /// The secret that only the processes that could open this store know, if it was opened with one.
    fn secret(&self) -> Option<Secret> {
        self.underlying()?.secret()
    }

    /// Whether processes come to it that were launched apart from this one, unknown to this one's launcher.
    fn is_for_strangers(&self) -> bool {
        self.underlying().is_some_and(Store::is_for_strangers)
    }

    /// Whether the end of rank 0 may be the end of the store. Rank 0 then sees the others off before it has joined.
    fn ends_with_rank_0(&self) -> bool {
        self.underlying().is_none_or(Store::ends_with_rank_0)
    }

    /// The part of the store that outlives a killed job, in words, such as `store file /tmp/meeting`: the next job may find
    /// there the entries of the last one's ranks.
    fn relic(&self) -> Option<String> {
        self.underlying()?.relic()
    }
}

/// A pointer to a store is a store.
macro_rules! forward {
    ($($pointer:ty),*) => {
        $(impl<S: Store + ?Sized> Store for $pointer {
            fn set(&self, key: &str, value: &[u8]) -> Result<()> {
                (**self).set(key, value)
            }

            fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
                (**self).wait(key, timeout)
            }

            fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
                (**self).get(key)
            }

            fn address(&self) -> Option<SocketAddr> {
                (**self).address()
            }

            fn secret(&self) -> Option<Secret> {
                (**self).secret()
            }

            fn is_for_strangers(&self) -> bool {
                (**self).is_for_strangers()
            }

            fn ends_with_rank_0(&self) -> bool {
                (**self).ends_with_rank_0()
            }

            fn relic(&self) -> Option<String> {
                (**self).relic()
            }
        })*
    };
}

forward!(&S, Arc<S>);

/// A store that puts `prefix/` before every key, so that several groups can share one store.
#[derive(Clone, Debug)]
pub struct PrefixStore<S> {
    prefix: String,
    store: S,
}

impl<S: Store> PrefixStore<S> {
    /// `store` under `prefix`.
    pub fn new(prefix: impl Into<String>, store: S) -> Self {
        Self {
            prefix: prefix.into(),
            store,
        }
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }
}

impl<S: Store> Store for PrefixStore<S> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(&self.key(key), value)
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.store.wait(&self.key(key), timeout)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.store.get(&self.key(key))
    }

    fn underlying(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }
}

/// Refuses a key that the built-in stores do not take.
pub(super) fn check_key(key: &str) -> Result<()> {
    if key.len() > MAX_KEY {
        return Err(Error::invalid(format!(
            "a store key has {} bytes, but at most {MAX_KEY} are allowed",
            key.len()
        )));
    }
    Ok(())
}

/// Refuses a value that the built-in stores do not take.
pub(super) fn check_value(key: &str, value: &[u8]) -> Result<()> {
    if value.len() > MAX_VALUE {
        return Err(Error::invalid(format!(
            "the value of store key {key:?} has {} bytes, but at most {MAX_VALUE} are allowed",
            value.len()
        )));
    }
    Ok(())
}

/// The error of a wait that ran out of time.
pub(super) fn not_set(key: &str, timeout: Duration) -> Error {
    Error::new(
        crate::error::Code::Timeout,
        format!(
            "store key {key:?} was not set within {} s",
            timeout.as_secs_f64()
        ),
    )
}

/// The rules for every store, as tests; the tests of each store call them.
#[cfg(test)]
pub(super) mod suite {
    use std::thread;
    use std::time::Instant;

    use super::*;
    use crate::error::Code;

    /// Runs the whole suite over handles to one store, made by `open`.
    pub(in crate::rendezvous) fn run<S: Store + 'static>(open: impl Fn() -> S) {
        values_are_seen_by_others(&open);
        waits_end(&open);
        a_long_wait_does_not_block_a_set(&open);
        limits_are_kept(&open);
    }

    fn values_are_seen_by_others<S: Store>(open: &impl Fn() -> S) {
        let (left, right) = (open(), open());
        assert_eq!(left.get("a").expect("get"), None);
        left.set("a", b"one").expect("set");
        left.set("empty", b"").expect("set");
        left.set("", b"no name").expect("set");
        assert_eq!(right.get("a").expect("get").as_deref(), Some(&b"one"[..]));
        assert_eq!(right.get("empty").expect("get"), Some(Vec::new()));
        assert_eq!(
            right.get("").expect("get").as_deref(),
            Some(&b"no name"[..])
        );
        right.set("a", b"two").expect("set again");
        assert_eq!(left.wait("a", Duration::ZERO).expect("wait"), b"two");
        let large: Vec<u8> = (0..MAX_VALUE).map(|i| i as u8).collect();
        let long = "k".repeat(MAX_KEY);
        left.set(&long, &large).expect("the largest");
        assert!(right.get(&long).expect("get") == Some(large));
    }

    fn waits_end<S: Store + 'static>(open: &impl Fn() -> S) {
        let store = open();
        let begun = Instant::now();
        let error = store
            .wait("never", Duration::from_millis(60))
            .expect_err("not set");
        assert_eq!(error.code, Code::Timeout);
        assert!(begun.elapsed() >= Duration::from_millis(60));
        let waiters: Vec<_> = (0..6)
            .map(|_| {
                let store = open();
                thread::spawn(move || store.wait("later", Duration::from_secs(20)))
            })
            .collect();
        thread::sleep(Duration::from_millis(30));
        store.set("later", b"now").expect("set");
        for waiter in waiters {
            assert_eq!(
                waiter.join().expect("no panic").expect("set in time"),
                b"now"
            );
        }
    }

    fn a_long_wait_does_not_block_a_set<S: Store + 'static>(open: &impl Fn() -> S) {
        let store = Arc::new(open());
        let waiter = {
            let store = Arc::clone(&store);
            thread::spawn(move || store.wait("own", Duration::from_secs(20)))
        };
        thread::sleep(Duration::from_millis(30));
        store.set("own", b"set by the same handle").expect("set");
        waiter.join().expect("no panic").expect("set in time");
    }

    fn limits_are_kept<S: Store>(open: &impl Fn() -> S) {
        let store = open();
        let error = store
            .set(&"k".repeat(MAX_KEY + 1), b"")
            .expect_err("long key");
        assert_eq!(error.code, Code::InvalidArgument);
        let error = store
            .set("k", &vec![0; MAX_VALUE + 1])
            .expect_err("long value");
        assert_eq!(error.code, Code::InvalidArgument);
        assert_eq!(store.get("k").expect("still there"), None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::memory::MemoryStore;

    #[test]
    fn a_prefix_separates() {
        let base = Arc::new(MemoryStore::default());
        let left = PrefixStore::new("left", Arc::clone(&base));
        let right = PrefixStore::new("right", Arc::clone(&base));
        left.set("key", b"l").expect("set");
        assert_eq!(right.get("key").expect("get"), None);
        assert_eq!(
            base.get("left/key").expect("get").as_deref(),
            Some(&b"l"[..])
        );
        assert_eq!(left.wait("key", Duration::ZERO).expect("wait"), b"l");
    }
}
