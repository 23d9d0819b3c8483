//! Telling of completions, on threads of their own.
//!
//! A completion is foreign code: it may take locks (Python's among them), run for long, or wait for another
//! operation, and must not hold up the bytes of other groups meanwhile. One thread calls them, in the order in which
//! operations end. A completion may even wait for another completion, as a callback of one future that waits for a
//! second future does: so when the thread has been in the same one for a while and others wait behind it, a second
//! thread goes on with those, and so forth.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::error::Result;

use super::work::Completion;

/// How long completions wait behind one that does not return before another thread takes them: some times longer than
/// one waits for Python's lock while another thread computes.
const STUCK_AFTER: Duration = Duration::from_millis(50);

/// How long a thread beside the first one waits for more before it ends: who nests once does it again.
const LINGER: Duration = Duration::from_secs(10);

/// Threads at most: more completions that wait for one another than this do wait for ever.
const MOST_WORKERS: usize = 32;

struct Pool {
    state: Mutex<State>,
    /// There is something to call.
    ready: Condvar,
    /// There is something to call and nobody to do it.
    unattended: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<(Completion, Result<()>)>,
    workers: usize,
    idle: usize,
    /// How many completions have been begun.
    begun: u64,
}

static POOL: OnceLock<Option<Arc<Pool>>> = OnceLock::new();

/// Starts the threads if they do not run yet. False when the system refuses one.
pub(super) fn start() -> bool {
    let pool = POOL.get_or_init(|| {
        let pool = Arc::new(Pool {
            state: Mutex::new(State {
                workers: 1,
                ..State::default()
            }),
            ready: Condvar::new(),
            unattended: Condvar::new(),
        });
        let threads = [
            pool.spawn("unisono-tell", Pool::work),
            pool.spawn("unisono-relieve", Pool::relieve),
        ];
        threads.into_iter().all(|started| started).then_some(pool)
    });
    pool.is_some()
}

/// Has `completion` called with `result`, soon, on a thread for that.
pub(super) fn tell(completion: Completion, result: Result<()>) {
    let Some(Some(pool)) = POOL.get() else { return };
    let mut state = pool.state.lock();
    state.queue.push_back((completion, result));
    if state.idle > 0 {
        pool.ready.notify_one();
    } else {
        pool.unattended.notify_one();
    }
}

impl Pool {
    fn spawn(self: &Arc<Self>, name: &str, body: fn(&Arc<Self>)) -> bool {
        let same = Arc::clone(self);
        std::thread::Builder::new()
            .name(name.into())
            .spawn(move || body(&same))
            .is_ok()
    }

    /// Calls completions, one after the other.
    fn work(self: &Arc<Self>) {
        let mut state = self.state.lock();
        loop {
            while let Some((completion, result)) = state.queue.pop_front() {
                state.begun += 1;
                if !state.queue.is_empty() && state.idle == 0 {
                    self.unattended.notify_one();
                }
                parking_lot::MutexGuard::unlocked(&mut state, || {
                    // It is foreign code. Its panic has been reported by the hook; the next one is told all the same.
                    let _ = catch_unwind(AssertUnwindSafe(|| completion(result)));
                });
            }
            state.idle += 1;
            if state.workers == 1 {
                self.ready.wait(&mut state);
            } else if self.ready.wait_for(&mut state, LINGER).timed_out()
                && state.queue.is_empty()
                && state.workers > 1
            {
                state.idle -= 1;
                state.workers -= 1;
                return;
            }
            state.idle -= 1;
        }
    }

    /// Sees to it that completions do not wait behind one that does not return.
    fn relieve(self: &Arc<Self>) {
        let mut state = self.state.lock();
        loop {
            if state.queue.is_empty() || state.idle > 0 {
                self.unattended.wait(&mut state);
                continue;
            }
            let begun = state.begun;
            parking_lot::MutexGuard::unlocked(&mut state, || std::thread::sleep(STUCK_AFTER));
            let stuck = state.begun == begun && !state.queue.is_empty() && state.idle == 0;
            if stuck && state.workers < MOST_WORKERS && self.spawn("unisono-tell", Self::work) {
                state.workers += 1;
            }
        }
    }
}
