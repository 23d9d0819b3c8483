//! Telling of completions, on threads of their own.
//!
//! A completion is foreign code: it may take locks (Python's among them), run for long, or wait for another
//! operation, and must not hold up the bytes of other groups meanwhile. One thread calls them, in the order in which
//! operations end. A completion may even wait for another completion, as a callback of one future that waits for a
//! second future does: so when the thread has been in the same one for a while and others wait behind it, a second
//! thread goes on with those, and so forth.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::locks::{Condvar, Mutex, MutexGuard};
use crate::threads;

use crate::engine::work::Completion;

/// How long completions wait behind one that does not return before another thread takes them: some times longer than
/// one waits for Python's lock while another thread computes.
const STUCK_AFTER: Duration = Duration::from_millis(50);

/// How long a thread beside the first one waits for more before it ends: a completion that nests once does it again.
const LINGER: Duration = Duration::from_secs(10);

/// Threads at most: more completions that wait for one another than this do wait for ever.
const MOST_WORKERS: usize = 32;

/// The threads that call completions, seen from outside.
#[derive(Default)]
pub(crate) struct CompletionThreads {
    state: Mutex<State>,
    /// There is something to call, or the end has come.
    ready: Condvar,
    /// There is something to call and no idle worker, or the end has come.
    unattended: Condvar,
    /// The end has come, or a worker has gone.
    leaving: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<(Completion, Result<()>)>,
    workers: usize,
    idle: usize,
    /// How many completions have been begun.
    begun: u64,
    /// The thread is there that sees to it that none waits behind one that does not return.
    is_relieved: bool,
    /// The threads end when there is nothing to call.
    is_stopping: bool,
}

impl State {
    fn is_over(&self) -> bool {
        self.is_stopping && self.queue.is_empty()
    }
}

impl CompletionThreads {
    /// Starts the threads.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<()> {
        let mut state = self.state.lock();
        self.hire(&mut state)?;
        let same = Arc::clone(self);
        threads::spawn("unisono-relieve", move || same.relieve())?;
        state.is_relieved = true;
        Ok(())
    }

    /// Has `completion` called with `result`, soon, on a thread for that.
    pub(crate) fn tell(self: &Arc<Self>, completion: Completion, result: Result<()>) {
        let mut state = self.state.lock();
        state.queue.push_back((completion, result));
        if state.idle > 0 {
            self.ready.notify_one();
        } else if state.is_relieved {
            self.unattended.notify_one();
        } else {
            // The threads have gone home: one comes back for it. If the system refuses it, this is never told.
            let _ = self.hire(&mut state);
        }
    }

    /// Every group has been closed: the threads end when what is in the queue has been called.
    pub(crate) fn stop(&self) {
        self.state.lock().is_stopping = true;
        self.ready.notify_all();
        self.unattended.notify_all();
        self.leaving.notify_all();
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
                MutexGuard::unlocked(&mut state, || {
                    // It is foreign code. Its panic has been reported by the hook; the next one is told all the same.
                    let _ = catch_unwind(AssertUnwindSafe(|| completion(result)));
                });
            }
            if state.is_stopping {
                break;
            }
            state.idle += 1;
            let waited_in_vain = if state.workers == 1 {
                self.ready.wait(&mut state);
                false
            } else {
                self.ready.wait_for(&mut state, LINGER).timed_out()
            };
            state.idle -= 1;
            if waited_in_vain && state.queue.is_empty() && state.workers > 1 {
                break;
            }
        }
        state.workers -= 1;
        self.unattended.notify_one();
        self.leaving.notify_one();
    }

    /// Sees to it that completions do not wait behind one that does not return.
    fn relieve(self: &Arc<Self>) {
        let mut state = self.state.lock();
        while !state.is_over() {
            if state.queue.is_empty() || state.idle > 0 {
                self.unattended.wait(&mut state);
                continue;
            }
            let begun = state.begun;
            let until = Instant::now() + STUCK_AFTER;
            while !state.is_over() && !self.leaving.wait_until(&mut state, until).timed_out() {}
            if state.begun == begun && !state.queue.is_empty() && state.idle == 0 {
                // If the system refuses a thread, the next look is the next attempt.
                let _ = self.hire(&mut state);
            }
        }
        state.is_relieved = false;
    }

    /// One more thread that calls completions, if there may be one more.
    fn hire(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        if state.workers < MOST_WORKERS {
            let same = Arc::clone(self);
            threads::spawn("unisono-tell", move || same.work())?;
            state.workers += 1;
        }
        Ok(())
    }
}
