//! The attendant: one thread of the process that looks after operations on device memory, which no caller drives.
//!
//! It reads the words that streams write, so that it needs no call of the driver (most calls are forbidden while a
//! graph is being captured anywhere in the process). It starts what the staged way and messages need of the host, ends
//! operations that streams have got past, and finds out about deadlines, deaths and mismatches. It sleeps while nothing is
//! under way, naps while something is, and ends with the last group. Graphs are replayed without a word to the host: where
//! operations are in one, it never sleeps for longer than [`GRAPH_NAP`].
//!
//! It must never block, since a stream may wait for it. So it takes no lock under which others enqueue, and frees
//! nothing that the driver knows of, since that may wait for the device ([`super::disposal`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::locks::{Condvar, Mutex};
use crate::threads;

use super::level::{Level, Sleeper};
use super::state::DeviceGroup;

/// The state in which a group was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Found {
    /// It has been taken down.
    Gone,
    /// Nothing is under way.
    Nothing,
    /// Nothing but what graphs may do, now or later.
    Graphs,
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
    /// Whether it must be woken to look in time.
    sleeper: Sleeper,
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
    sleeper: Sleeper::new(),
};

/// How long it looks again and again, since something last moved, while it has a part in what is under way.
const EAGER_TIME: Duration = Duration::from_millis(1);
/// How long it does so when it has had a part in something and has none: where one short collective of a program follows the
/// other, each would otherwise wait for it to wake.
const LINGER: Duration = Duration::from_micros(200);
/// The shortest and the longest nap. Between them a nap takes an eighth of the time since something last moved, so naps
/// make a wait longer by an eighth at most.
const SHORTEST_NAP: Duration = Duration::from_micros(50);
const LONG_NAP: Duration = Duration::from_millis(1);
/// The same while only graphs may be replayed, for which the attendant has nothing to do.
const GRAPH_NAP: Duration = Duration::from_millis(20);
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

/// The groups that there are.
pub(super) fn groups() -> Vec<Arc<DeviceGroup>> {
    ATTENDANT.state.lock().groups.clone()
}

/// There is something new to look at, soon enough when it next looks.
pub(super) fn wake() {
    rouse(Level::Asleep);
}

/// There is something new in which it has a part: ends a nap, too.
pub(super) fn hurry() {
    rouse(Level::Napping);
}

/// Costs the caller a fence and a load, unless it has to be woken.
fn rouse(from: Level) {
    if ATTENDANT.sleeper.sleeps(from) {
        ATTENDANT.state.lock().rung = true;
        ATTENDANT.woken.notify_one();
    }
}

fn run() {
    let mut groups: Vec<Arc<DeviceGroup>> = Vec::new();
    let mut idle = 0;
    let mut moved = Instant::now();
    // When it last had a part in something.
    let mut served = None;
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
        if all >= Found::Duty {
            served = Some(Instant::now());
        }
        let lingers = served.is_some_and(|served: Instant| served.elapsed() < LINGER);
        let elapsed = moved.elapsed();
        let nap = |longest| (elapsed / 8).clamp(SHORTEST_NAP, longest);
        let rung = match all {
            Found::Nothing | Found::Graphs | Found::Streams if lingers => {
                std::thread::yield_now();
                false
            }
            Found::Gone | Found::Nothing => {
                groups.clear();
                idle += 1;
                match idle > IDLE_NAPS {
                    true => rest(None, DeviceGroup::is_busy),
                    false => rest(Some(LONG_NAP), |_| false),
                }
            }
            Found::Graphs => rest(Some(nap(GRAPH_NAP)), |_| false),
            Found::Moved => true,
            Found::Duty if elapsed < EAGER_TIME => {
                idle = 0;
                std::thread::yield_now();
                false
            }
            Found::Duty | Found::Streams => {
                idle = 0;
                rest(Some(nap(LONG_NAP)), |_| false)
            }
        };
        if rung {
            (idle, moved) = (0, Instant::now());
        }
    }
}

/// Sleeps, for at most `longest` if there is such a time, until another thread wakes it. Not at all when one has done
/// so since the last look, or a group has something to be done. Returns whether there is something new.
///
/// Work that comes between the last look and a nap is seen after the nap.
fn rest(longest: Option<Duration>, is_busy: impl Fn(&DeviceGroup) -> bool) -> bool {
    if longest.is_some_and(|longest| longest <= SHORTEST_NAP) {
        // Not worth waking it.
        std::thread::sleep(SHORTEST_NAP);
        return false;
    }
    ATTENDANT.sleeper.lie_down(match longest {
        Some(_) => Level::Napping,
        None => Level::Asleep,
    });
    let until = longest.map(|longest| Instant::now() + longest);
    let mut state = ATTENDANT.state.lock();
    let mut over = state.groups.iter().any(|group| is_busy(group));
    while !over && !state.rung && !state.groups.is_empty() {
        over = match until {
            Some(until) => ATTENDANT.woken.wait_until(&mut state, until).timed_out(),
            None => {
                ATTENDANT.woken.wait(&mut state);
                false
            }
        };
    }
    let rung = state.rung || longest.is_none();
    drop(state);
    ATTENDANT.sleeper.get_up();
    rung
}
