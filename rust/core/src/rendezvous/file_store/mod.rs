//! A store in a file that all ranks can open: `file:///path`, on a local disk or a shared one.
//!
//! The file is a log (`format.rs`): one record for each set follows a header, and the last record of a key is its value.
//! Its readers and writers hold a lock of the kernel (`log.rs`), so a process that dies in the middle leaves it whole. In a
//! shared directory another user may have put a file of that name there: such a file is refused (`ownership.rs`). One that
//! is left over from an earlier job, whose creator is known to be gone, is started anew (`creator.rs`).
//!
//! A process that is stopped in the middle keeps the lock, and so may any that can read the file. So a lock is waited for
//! until the time to join is over, and the error names the process that holds it.

pub(super) mod creator;
pub(super) mod format;
mod log;
mod ownership;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use self::creator::creator;
use self::log::Log;
use self::ownership::open_own;
use super::store::{Store, check_key, check_value, not_set};
use crate::config::Config;
use crate::error::Result;
use crate::locks::Mutex;

/// The pauses between two looks at the file while waiting.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// A lock is tried for so long also when the time to join is over.
const LAST_TRY: Duration = Duration::from_millis(100);

/// A store in a file. See the module for what it does about processes that die and files that are left over.
#[derive(Debug)]
pub struct FileStore {
    path: PathBuf,
    /// Until when a lock may be waited for; `None`: the clock cannot express it.
    until: Option<Instant>,
    log: Mutex<Log>,
}

impl FileStore {
    /// As [`FileStore::open_within`], with the default of the setting `join_timeout`.
    ///
    /// # Errors
    /// As [`FileStore::open_within`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_within(path, Config::default().join_timeout.duration())
    }

    /// Opens the store at `path`, making the file when it does not exist. An empty file is taken over. Everything that is
    /// done with the store may take as long as `patience`, from now on, beside the waits that are asked for.
    ///
    /// # Errors
    /// `System` when the file cannot be opened or locked, `Timeout` when another process keeps it locked, `Untrusted` when
    /// it is something else or is damaged, or when another user owns it or can write to it.
    pub fn open_within(path: impl AsRef<Path>, patience: Duration) -> Result<Self> {
        Self::open_as(path.as_ref(), &creator(), patience)
    }

    fn open_as(path: &Path, creator: &str, patience: Duration) -> Result<Self> {
        let until = Instant::now().checked_add(patience);
        let log = Log::begin(open_own(path)?, path, creator, until)?;
        Ok(Self {
            path: path.to_owned(),
            until,
            log: Mutex::new(log),
        })
    }

    /// Until when a call that begins now waits for the lock.
    fn lock_until(&self) -> Option<Instant> {
        self.until.map(|until| until.max(Instant::now() + LAST_TRY))
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_key(key)?;
        check_value(key, value)?;
        self.log.lock().append(key, value, self.lock_until())
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let begun = Instant::now();
        let mut pause = SHORTEST_PAUSE;
        loop {
            // The lock is released before the pause, so that another thread of this process can set.
            if let Some(value) = self.get(key)? {
                return Ok(value);
            }
            let left = timeout.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Err(not_set(key, timeout));
            }
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let mut log = self.log.lock();
        log.refresh(self.lock_until())?;
        Ok(log.value(key))
    }

    fn ends_with_rank_0(&self) -> bool {
        false
    }

    fn relic(&self) -> Option<String> {
        Some(format!("store file {}", self.path.display()))
    }
}
