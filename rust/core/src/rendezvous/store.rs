//! The key-value store through which the ranks of a job find each other.

use std::time::Duration;

use crate::error::Result;

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
}
