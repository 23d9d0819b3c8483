//! Handles: numbers that look like pointers, are never used twice, and must not be followed.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::abi::Handle;
use crate::status::{Outcome, Status};

/// The live objects of one kind.
pub(crate) struct Handles<T> {
    live: Mutex<Option<HashMap<Handle, Arc<T>>>>,
}

impl<T> Handles<T> {
    pub(crate) const fn new() -> Self {
        Self {
            live: Mutex::new(None),
        }
    }

    /// Keeps the object that `make` makes of its handle.
    pub(crate) fn insert(&self, make: impl FnOnce(Handle) -> T) -> Arc<T> {
        let handle = next();
        let object = Arc::new(make(handle));
        let mut live = self.live.lock();
        live.get_or_insert_default().insert(handle, object.clone());
        object
    }

    /// # Errors
    /// `INVALID_HANDLE`, for one that was never given out, is of another kind or was destroyed.
    pub(crate) fn get(&self, handle: Handle) -> Outcome<Arc<T>> {
        let live = self.live.lock();
        let object = live.as_ref().and_then(|live| live.get(&handle));
        object.cloned().ok_or(Status::INVALID_HANDLE)
    }

    /// # Errors
    /// As [`Handles::get`].
    pub(crate) fn remove(&self, handle: Handle) -> Outcome<Arc<T>> {
        let mut live = self.live.lock();
        let object = live.as_mut().and_then(|live| live.remove(&handle));
        object.ok_or(Status::INVALID_HANDLE)
    }

    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        let live = self.live.lock();
        live.iter().flat_map(HashMap::values).cloned().collect()
    }

    /// Forgets what is not to be kept.
    pub(crate) fn retain(&self, mut keep: impl FnMut(&T) -> bool) {
        if let Some(live) = self.live.lock().as_mut() {
            live.retain(|_, object| keep(object));
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.live.lock().as_ref().map_or(0, HashMap::len)
    }
}

/// A number no object has had. Nothing is mapped there: these addresses are above what a process of x86-64 or arm64 gets
/// from the kernel without asking for them.
pub(crate) fn next() -> Handle {
    static NEXT: AtomicUsize = AtomicUsize::new(0x0100_0000_0000_0000);
    NEXT.fetch_add(64, Ordering::Relaxed)
}
