//! The communicators that the program holds, and the end of the interpreter: those that are left open are closed, and the
//! threads end before it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use pyo3::prelude::*;
use unisono::fence::guard;
use unisono::locks::Mutex;
use unisono::window::Window;
use unisono::{Communicator as Core, PerProcess};

use crate::one_sided;

/// How long the end of the interpreter may wait for our threads, which need far less, unless a callback does not return.
pub const THREADS_END: Duration = Duration::from_secs(1);

/// How long the interpreter's end waits for what is under way on devices.
const FAREWELL: Duration = Duration::from_secs(3);

/// The communicators of this process that are not closed, to be closed when the interpreter ends.
static OPEN: PerProcess<Mutex<Vec<Weak<Shared>>>> = PerProcess::new(Mutex::default);

/// The windows of this process, to be closed before.
static WINDOWS: PerProcess<Mutex<Vec<Weak<Window>>>> = PerProcess::new(Mutex::default);

/// Has a window closed when the interpreter ends, if it is still open.
pub fn register_window(window: Window) -> Arc<Window> {
    let window = Arc::new(window);
    close_at_the_end(&window);
    window
}

/// As [`register_window`], of one that others hold, too.
pub fn close_at_the_end(window: &Arc<Window>) {
    let mut open = WINDOWS.lock();
    open.retain(|known| known.strong_count() > 0);
    open.push(Arc::downgrade(window));
}

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let close_all = wrap_pyfunction!(close_all, module)?;
    let at_exit = module.py().import("atexit")?;
    at_exit.call_method1("register", (close_all,))?;
    Ok(())
}

/// A group.
pub(crate) struct Shared {
    pub(crate) comm: Core,
}

impl Shared {
    pub(crate) fn register(comm: Core) -> Arc<Self> {
        let shared = Arc::new(Self { comm });
        let mut open = OPEN.lock();
        open.retain(|known| known.strong_count() > 0);
        open.push(Arc::downgrade(&shared));
        shared
    }

    pub(crate) fn close(&self) {
        // In a forked child it is left alone, with all that belongs to it.
        if self.comm.check_process().is_ok() {
            self.comm.close();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.comm.check_process().is_ok() {
            // Calls on devices have returned, and are taken for done. Not while the interpreter goes away.
            Python::try_attach(|py| {
                py.detach(|| {
                    let _ = guard(|| self.comm.finish(None));
                    // It may wait for others that agree on who is left.
                    self.close();
                });
            });
        }
    }
}

/// Closes what the program left open, and waits for the threads.
#[pyfunction]
fn close_all(py: Python<'_>) {
    let open = std::mem::take(&mut *OPEN.lock());
    py.detach(|| {
        for window in std::mem::take(&mut *WINDOWS.lock())
            .iter()
            .filter_map(Weak::upgrade)
        {
            let _ = guard(|| {
                let _ = window.close();
                Ok(())
            });
        }
        for shared in open.iter().filter_map(Weak::upgrade) {
            // The interpreter ends: no caller is left to get an error.
            let _ = guard(|| {
                let _ = shared.comm.finish(Some(FAREWELL));
                shared.close();
                Ok(())
            });
        }
        one_sided::close_all();
        unisono::wait_for_threads(THREADS_END);
    });
}
