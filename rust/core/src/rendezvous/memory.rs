//! A store in the memory of one process, for ranks that are threads, and for a world of one.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::store::{Store, check_key, check_value, not_set};
use crate::error::Result;
use crate::locks::{Condvar, Mutex};

/// A store that the threads of one process share. Share it by `Arc`.
#[derive(Debug, Default)]
pub struct MemoryStore {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_key(key)?;
        check_value(key, value)?;
        self.values.lock().insert(key.to_owned(), value.to_vec());
        self.changed.notify_all();
        Ok(())
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        // A deadline that the clock cannot express is no deadline.
        let deadline = Instant::now().checked_add(timeout);
        let mut values = self.values.lock();
        loop {
            if let Some(value) = values.get(key) {
                return Ok(value.clone());
            }
            match deadline {
                Some(deadline) if Instant::now() >= deadline => return Err(not_set(key, timeout)),
                Some(deadline) => {
                    self.changed.wait_until(&mut values, deadline);
                }
                None => self.changed.wait(&mut values),
            }
        }
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.values.lock().get(key).cloned())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::rendezvous::store::suite;

    #[test]
    fn passes_the_suite() {
        let store = Arc::new(MemoryStore::default());
        suite::run(|| Arc::clone(&store));
    }
}
