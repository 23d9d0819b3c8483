//! The threads that the library starts, and waiting for their end.
//!
//! A thread ends by itself when nothing needs it any more. The thread that releases the last use of it does not wait
//! for that: it may hold locks, Python's among them, or be the thread itself. A caller that unloads what the thread
//! runs on calls [`wait_for_end`] first.
//!
//! The last thing a thread does is to join the one that ended before it. So when none is running and the last one has
//! been joined, the system has taken all of them back.

use std::io;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};

use crate::fork::PerProcess;
use crate::locks::{Condvar, Mutex};

#[derive(Default)]
struct Threads {
    running: Vec<JoinHandle<()>>,
    last_to_end: Option<JoinHandle<()>>,
}

static THREADS: PerProcess<Mutex<Threads>> = PerProcess::new(Mutex::default);

/// Signalled when a thread has left the list.
static ENDED: PerProcess<Condvar> = PerProcess::new(Condvar::new);

/// Signals that tell a thread of what it did itself, or that sample it.
const OF_A_THREAD: [Signal; 7] = [
    Signal::SIGSEGV,
    Signal::SIGBUS,
    Signal::SIGFPE,
    Signal::SIGILL,
    Signal::SIGTRAP,
    Signal::SIGSYS,
    Signal::SIGPROF,
];

/// Lets `start` start a thread to which the kernel delivers no signal that is sent to the process. Such signals are for
/// the program's own threads: we must not run its handlers, and a thread that has blocked a signal to wait for it must
/// get it.
pub(crate) fn without_signals<T>(start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let mut blocked = SigSet::all();
    OF_A_THREAD
        .into_iter()
        .for_each(|signal| blocked.remove(signal));
    // A new thread has the mask of the one that makes it.
    let before = blocked.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let started = start();
    before.thread_set_mask()?;
    started
}

/// Starts a thread.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // Held until the thread is on the list, where it looks for itself when it ends.
    let mut threads = THREADS.lock();
    let thread = thread::Builder::new().name(name.into());
    let handle = without_signals(|| {
        thread.spawn(move || {
            let _end = End;
            body();
        })
    })?;
    threads.running.push(handle);
    Ok(())
}

/// Waits until all of them have ended, at most `limit`. Returns whether they have.
pub(crate) fn wait_for_end(limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    let mut threads = THREADS.lock();
    while !threads.running.is_empty() {
        if ENDED.wait_until(&mut threads, deadline).timed_out() {
            return threads.running.is_empty();
        }
    }
    let last = threads.last_to_end.take();
    drop(threads);
    join(last);
    true
}

/// Ends a thread's stay on the list, also when its body panics.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        let me = thread::current().id();
        let mut threads = THREADS.lock();
        let mine = threads
            .running
            .iter()
            .position(|handle| handle.thread().id() == me)
            .map(|at| threads.running.swap_remove(at));
        let before = std::mem::replace(&mut threads.last_to_end, mine);
        ENDED.notify_all();
        drop(threads);
        join(before);
    }
}

fn join(thread: Option<JoinHandle<()>>) {
    if let Some(thread) = thread {
        // It can only have panicked, which the panic hook has reported.
        let _ = thread.join();
    }
}
