//! The attendant: one thread of the process that looks after operations on device memory, which nobody on the host drives.
//!
//! It reads the words that streams write, so that it needs no call of the driver (most of which are forbidden while a
//! graph is being captured anywhere in the process). It starts what the staged way and messages need of the host, ends
//! operations that streams have got past, and finds out about deadlines, deaths and mismatches. It sleeps while nothing is
//! under way, naps while something is, and ends with the last group.
//!
//! It waits for nobody: a stream may wait for it. So it takes no lock under which others enqueue, and frees nothing that
//! the driver knows of, since that may wait for the device ([`dispose`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};
use crate::threads;

use super::group::DeviceGroup;

/// What was found in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Found {
    /// It has been taken down.
    Gone,
    /// Nothing is under way.
    Nothing,
    /// A stream is awaited, which awaits nothing of the attendant.
    Streams,
    /// The attendant has a part in what is under way.
    Duty,
    /// Something moved just now.
    Moved,
}

/// The attendant, seen from outside.
struct Attendant {
    state: Mutex<State>,
    woken: Condvar,
    /// It sleeps until it is woken.
    asleep: AtomicBool,
}

#[derive(Default)]
struct State {
    groups: Vec<Arc<DeviceGroup>>,
    running: bool,
    rung: bool,
}

static ATTENDANT: Attendant = Attendant {
    state: Mutex::new(State {
        groups: Vec::new(),
        running: false,
        rung: false,
    }),
    woken: Condvar::new(),
    asleep: AtomicBool::new(false),
};

/// How long it looks again and again, since something last moved, while it has a part in what is under way.
const EAGER: Duration = Duration::from_millis(1);
/// The shortest and the longest nap.
const NAP: Duration = Duration::from_micros(50);
const LONG_NAP: Duration = Duration::from_millis(1);
/// Naps without anything under way before it sleeps.
const IDLE_NAPS: u32 = 8;

/// Has the attendant look after `group` from now on.
///
/// # Errors
/// `System` when the system refuses a thread.
pub(super) fn attend(group: Arc<DeviceGroup>) -> Result<()> {
    let mut state = ATTENDANT.state.lock();
    if !state.running {
        threads::spawn("unisono-attend", run)
            .map_err(|cause| Error::system("start the thread that attends to devices", cause))?;
        state.running = true;
    }
    state.groups.push(group);
    state.rung = true;
    ATTENDANT.woken.notify_one();
    Ok(())
}

/// There is something new to look at.
pub(super) fn wake() {
    // Of this fence and the one in `sleep` the later one sees what came before the other.
    fence(Ordering::SeqCst);
    if ATTENDANT.asleep.load(Ordering::Relaxed) {
        ATTENDANT.state.lock().rung = true;
        ATTENDANT.woken.notify_one();
    }
}

/// Gives back what the driver may take its time to take back, on a thread of its own.
pub(super) fn dispose(give_back: impl FnOnce() + Send + 'static) {
    let dropping = threads::spawn("unisono-dispose", give_back);
    if let Err(cause) = dropping {
        tracing::warn!("no thread to give device memory back: {cause}");
    }
}

fn run() {
    let mut groups: Vec<Arc<DeviceGroup>> = Vec::new();
    let mut idle = 0;
    let mut nap = NAP;
    let mut moved = Instant::now();
    loop {
        {
            let mut state = ATTENDANT.state.lock();
            groups.clone_from(&state.groups);
            state.rung = false;
            if groups.is_empty() {
                state.running = false;
                return;
            }
        }
        let mut all = Found::Nothing;
        for group in &groups {
            let found = group.attend();
            if found == Found::Gone {
                let mut state = ATTENDANT.state.lock();
                state.groups.retain(|other| !Arc::ptr_eq(other, group));
            }
            all = all.max(found);
        }
        match all {
            Found::Gone | Found::Nothing => {
                groups.clear();
                idle += 1;
                if idle > IDLE_NAPS {
                    sleep();
                    idle = 0;
                } else {
                    std::thread::sleep(LONG_NAP);
                }
            }
            Found::Moved => (idle, nap, moved) = (0, NAP, Instant::now()),
            Found::Duty if moved.elapsed() < EAGER => std::thread::yield_now(),
            Found::Duty | Found::Streams => {
                idle = 0;
                std::thread::sleep(nap);
                nap = (nap * 2).min(LONG_NAP);
            }
        }
    }
}

/// Sleeps until woken, unless there is something to do already.
fn sleep() {
    ATTENDANT.asleep.store(true, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    let mut state = ATTENDANT.state.lock();
    let is_busy = state.groups.iter().any(|group| group.is_busy());
    if !is_busy {
        while !state.rung && !state.groups.is_empty() {
            ATTENDANT.woken.wait(&mut state);
        }
    }
    drop(state);
    ATTENDANT.asleep.store(false, Ordering::Relaxed);
}
