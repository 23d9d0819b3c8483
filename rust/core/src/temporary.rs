//! Files and folders of tests.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// A path in the temporary folder, where nothing is at first. The file or folder that comes to be there goes with this.
pub(crate) struct Temporary(pub(crate) PathBuf);

impl Temporary {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("unisono-test-{}-{number}", std::process::id());
        let temporary = Self(std::env::temp_dir().join(name));
        temporary.remove();
        temporary
    }

    fn remove(&self) {
        let _ = fs::remove_file(&self.0).or_else(|_| fs::remove_dir_all(&self.0));
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        self.remove();
    }
}
