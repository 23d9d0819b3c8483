//! Signals that come while the program's main thread waits.
//!
//! A language such as Python runs its handlers of signals itself: in its main thread, when it is asked to. So a door gives
//! a function that asks ([`check_with`]), and every long wait of the main thread calls it now and then, without a lock.
//! When a handler raises, the wait is over; what becomes of the operation is the wait's business. Without such a
//! function, and in other threads, waits are never interrupted.
//!
//! A wait checks only once it has lasted: a short one reads no clock for it. A thread that sleeps in the kernel is woken by
//! a signal and checks at once. It checks now and then all the same, since a signal may come just before it sleeps, or to
//! another thread; and more and more seldom, so that hundreds of ranks that wait do not keep a core busy with it.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Runs the handlers of the signals that have come. An error is the reason why a wait is to end.
pub type Check = fn() -> Result<(), String>;

/// How long a wait that no signal ends may keep a handler from running.
pub const SLICE: Duration = Duration::from_millis(50);

static CHECK: OnceLock<Check> = OnceLock::new();

/// From now on waits of the main thread call `check` now and then. The first one stays.
pub fn check_with(check: Check) {
    let _ = CHECK.set(check);
}

/// Runs what it is given, a sleep, without a lock of the language that the caller may hold.
pub type Aside = fn(&mut (dyn FnMut() + Send));

static ASIDE: OnceLock<Aside> = OnceLock::new();

/// From now on sleeps that a door may be called into with a lock of its language held go through `aside`. The first one stays.
pub fn sleep_with(aside: Aside) {
    let _ = ASIDE.set(aside);
}

/// Sleeps as `body` does.
pub(crate) fn sleep(mut body: impl FnMut() + Send) {
    match ASIDE.get() {
        Some(aside) => aside(&mut body),
        None => body(),
    }
}

/// Runs the handlers of signals, if this is the main thread and a door has said how.
///
/// # Errors
/// What a handler raised.
pub fn check() -> Result<(), String> {
    of_this_thread().map_or(Ok(()), |check| check())
}

fn of_this_thread() -> Option<Check> {
    let check = *CHECK.get()?;
    let is_main = rustix::thread::gettid() == rustix::process::getpid();
    is_main.then_some(check)
}

/// When one wait checks for signals.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    /// The next time, or never in this thread. Not known before the wait has lasted.
    next: Option<Option<Instant>>,
    /// How many have been in vain.
    done: u32,
}

/// The longest time between two checks of a thread that a signal wakes is `SLICE << RARER`.
const RARER: u32 = 3;

impl Checks {
    /// The next time, for a wait that lasts and that no signal ends.
    pub(crate) fn next(&mut self) -> Option<Instant> {
        self.done = 0;
        self.next_but_for_signals()
    }

    /// As [`Checks::next`], where a signal ends the sleep: then [`Checks::hurry`].
    pub(crate) fn next_but_for_signals(&mut self) -> Option<Instant> {
        let pause = SLICE * (1 << self.done.min(RARER));
        let later = || of_this_thread().and_then(|_| Instant::now().checked_add(pause));
        *self.next.get_or_insert_with(later)
    }

    /// A signal has come: it is time.
    pub(crate) fn hurry(&mut self) {
        self.next = Some(of_this_thread().map(|_| Instant::now()));
    }

    /// Whether that has come.
    pub(crate) fn are_due(&self) -> bool {
        let next = self.next.flatten();
        next.is_some_and(|next| Instant::now() >= next)
    }

    /// Runs the handlers of signals, which takes as long as they take: no lock must be held.
    ///
    /// # Errors
    /// What a handler raised.
    pub(crate) fn run(&mut self) -> Result<(), String> {
        let checked = check();
        self.next = None;
        self.done += 1;
        checked
    }
}
