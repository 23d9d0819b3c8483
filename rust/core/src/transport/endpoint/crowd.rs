//! The connections in the handshake: so many at a time. When it gets crowded, those that have proved nothing are closed
//! first, so they cannot keep members waiting for long; a member among them comes again. A member says hello at once. So the
//! more connections are shown out, the less time each gets for that, and strangers that come by the hundred a second, up to a
//! thousand or so, do not fill the kernel's queue, in which members wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::shared::Shared;
use crate::locks::{Condvar, Mutex};

/// A connection in the handshake.
pub(super) struct Guest {
    pub(super) since: Instant,
    /// Its hello was made with the key of a member: it is one, or it has a recording.
    pub(super) greeted: AtomicBool,
    /// It has proved that it is a member.
    pub(super) proven: AtomicBool,
    pub(super) shown_out: AtomicBool,
}

impl Guest {
    /// Whether it loses its place, where others wait for one, if it has had it for longer than `grace`.
    fn is_in_the_way(&self, greeted: bool, grace: Duration) -> bool {
        !self.proven.load(Ordering::Acquire)
            && !self.shown_out.load(Ordering::Acquire)
            && self.greeted.load(Ordering::Acquire) == greeted
            && self.since.elapsed() >= grace
    }
}

/// How much longer a connection with a right hello keeps its place than one without: what is missing takes a round trip.
const GREETED: u32 = 4;

/// How often the grace is halved, at most: to 4 ms from the usual 250.
const LEAST_GRACE: u32 = 6;

/// How long strangers may keep their places, by how many were shown out of late.
struct Pressure {
    since: Instant,
    shown_out: usize,
    halved: u32,
}

impl Pressure {
    const WINDOW: Duration = Duration::from_millis(250);

    fn new() -> Self {
        Self {
            since: Instant::now(),
            shown_out: 0,
            halved: 0,
        }
    }

    /// The grace now, of a crowd of at most `most`.
    fn grace(&mut self, usual: Duration, most: usize) -> Duration {
        let windows = self.since.elapsed().as_nanos() / Self::WINDOW.as_nanos();
        let calm = u32::try_from(windows).unwrap_or(u32::MAX);
        let is_high = self.shown_out >= most / 2;
        if is_high {
            self.halved = LEAST_GRACE.min(self.halved + 1);
        }
        if is_high || calm > 0 {
            self.halved = self
                .halved
                .saturating_sub(calm - u32::from(is_high && calm > 0));
            (self.since, self.shown_out) = (Instant::now(), 0);
        }
        usual / (1 << self.halved)
    }
}

/// The connections in the handshake.
pub(super) struct Crowd {
    state: Mutex<State>,
    left: Condvar,
}

struct State {
    guests: Vec<Arc<Guest>>,
    pressure: Pressure,
}

impl Crowd {
    pub(super) fn new() -> Self {
        let (guests, pressure) = (Vec::new(), Pressure::new());
        Self {
            state: Mutex::new(State { guests, pressure }),
            left: Condvar::new(),
        }
    }

    /// Waits for a free place, showing out the stranger that has had one for longest; one that has a recording of a right hello
    /// after the others. Those that are on their way out have no place; there are no more of them than places.
    pub(super) fn wait_for_room(&self, shared: &Shared) {
        let most = shared.limits.simultaneous;
        let usual = shared.limits.grace;
        let mut state = self.state.lock();
        while !shared.stopping.load(Ordering::Acquire) {
            let is_leaving = |guest: &&Arc<Guest>| guest.shown_out.load(Ordering::Acquire);
            let leaving = state.guests.iter().filter(is_leaving).count();
            if state.guests.len() - leaving < most {
                return;
            }
            let grace = state.pressure.grace(usual, most);
            // Sorted by arrival.
            let find = |greeted, grace| {
                let mut all = state.guests.iter();
                all.find(|guest| guest.is_in_the_way(greeted, grace))
            };
            let stranger = find(false, grace).or_else(|| find(true, usual * GREETED));
            if let Some(stranger) = stranger.filter(|_| leaving < most) {
                stranger.shown_out.store(true, Ordering::Release);
                state.pressure.shown_out += 1;
                return;
            }
            let pause = grace.min(Duration::from_millis(20));
            self.left.wait_for(&mut state, pause);
        }
    }

    pub(super) fn enter(self: &Arc<Self>) -> Place {
        let guest = Arc::new(Guest {
            since: Instant::now(),
            greeted: AtomicBool::new(false),
            proven: AtomicBool::new(false),
            shown_out: AtomicBool::new(false),
        });
        self.state.lock().guests.push(Arc::clone(&guest));
        Place {
            crowd: Arc::clone(self),
            guest,
        }
    }
}

/// A guest's place, given back on drop.
pub(super) struct Place {
    crowd: Arc<Crowd>,
    pub(super) guest: Arc<Guest>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.crowd.state.lock();
        state
            .guests
            .retain(|guest| !Arc::ptr_eq(guest, &self.guest));
        self.crowd.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grace_shrinks_while_many_are_shown_out_and_grows_again() {
        let usual = Duration::from_millis(256);
        let mut pressure = Pressure::new();
        assert_eq!(pressure.grace(usual, 64), usual);
        for halved in 1..=LEAST_GRACE + 2 {
            pressure.shown_out = 32;
            let grace = usual / (1 << halved.min(LEAST_GRACE));
            assert_eq!(pressure.grace(usual, 64), grace);
        }
        pressure.shown_out = 3;
        let back = |windows| Instant::now().checked_sub(Pressure::WINDOW * windows);
        let (Some(short), Some(long)) = (back(2), back(20)) else {
            return crate::skips::skipped("this machine has just started");
        };
        pressure.since = short;
        assert_eq!(pressure.grace(usual, 64), usual / 16);
        // However many were shown out before a long calm.
        (pressure.since, pressure.shown_out) = (long, 64);
        assert_eq!(pressure.grace(usual, 64), usual);
    }
}
