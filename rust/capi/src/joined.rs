//! The communicators that C holds, and the end of the process: those that are left open are closed in good order, and the
//! threads end before it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use unisono::cuda;
use unisono::error::Result;
use unisono::locks::Mutex;
use unisono::types::Rank;
use unisono::window::{View, Window};

use crate::error::Status;
use crate::fence::{fence, status};
use crate::handles::Table;

/// `unisono_communicator`: never looked into, so it has nothing in it.
#[repr(C)]
pub struct Communicator {
    _opaque: [u8; 0],
}

pub(crate) static COMMUNICATORS: Table<Joined> = Table::new(1, "a communicator");

pub(crate) static WINDOWS: Table<Exposed> = Table::new(5, "a window");

/// A window, and the views that it has given to C, by rank: those last as long as the window does.
pub(crate) struct Exposed {
    pub(crate) window: Window,
    pub(crate) views: Mutex<BTreeMap<Rank, View>>,
}

/// A group.
pub(crate) struct Joined {
    pub(crate) comm: unisono::Communicator,
}

impl Joined {
    pub(crate) fn close(&self) {
        // In a forked child it is left alone, with all that belongs to it.
        if self.comm.check_process().is_ok() {
            self.comm.close();
        }
    }
}

/// The handle of `comm`, which is closed at the end of the process if it is still open then.
pub(crate) fn register(comm: unisono::Communicator) -> Result<*mut Communicator> {
    prepare();
    // It knows its rank now, by which programs choose their device.
    cuda::look_again();
    COMMUNICATORS.insert(Joined { comm })
}

/// Runs `body` with what `comm` stands for, under the communicator's own guard.
#[inline(always)]
pub(crate) fn on(comm: *const Communicator, body: impl FnOnce(&Joined) -> Result<()>) -> Status {
    match COMMUNICATORS.find(comm) {
        Ok(joined) => status(joined.comm.guard(|_| body(&joined)), |_| {
            joined.comm.error().is_some()
        }),
        Err(error) => status(Err(error), |_| false),
    }
}

/// How long the exit may wait for our threads, which need far less.
const THREADS_END: Duration = Duration::from_secs(1);

static PREPARED: AtomicBool = AtomicBool::new(false);

/// From now on `exit` closes what is open, in forked children too, which inherit the handler.
fn prepare() {
    if !PREPARED.swap(true, Ordering::Relaxed) {
        // SAFETY: a plain function of this library, which is never unloaded (it is linked with -z nodelete).
        unsafe { libc::atexit(close_all) };
    }
}

extern "C" fn close_all() {
    // The process ends: no caller is left to get an error.
    let _ = fence(|| {
        WINDOWS
            .all()
            .iter()
            .for_each(|exposed| drop(exposed.window.close()));
        for joined in COMMUNICATORS.all() {
            joined.close();
        }
        unisono::wait_for_threads(THREADS_END);
        Ok(())
    });
}
