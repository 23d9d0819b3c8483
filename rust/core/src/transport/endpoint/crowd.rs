//! The connections in the handshake: so many at a time. When it gets crowded, those that have proved nothing are closed
//! first, so they cannot keep members waiting for long; a member among them comes again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::shared::Shared;

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

/// The connections in the handshake.
#[derive(Default)]
pub(super) struct Crowd {
    guests: Mutex<Vec<Arc<Guest>>>,
    left: Condvar,
}

impl Crowd {
    /// Waits for a free place, showing out the stranger that has had one for longest; one that has a recording of a right hello
    /// after the others.
    pub(super) fn wait_for_room(&self, shared: &Shared) {
        let mut guests = self.guests.lock();
        while guests.len() >= shared.limits.simultaneous && !shared.stopping.load(Ordering::Acquire)
        {
            // Sorted by arrival.
            let grace = shared.limits.grace;
            let find = |greeted, grace| {
                let mut all = guests.iter();
                all.find(|guest| guest.is_in_the_way(greeted, grace))
            };
            if let Some(stranger) = find(false, grace).or_else(|| find(true, grace * GREETED)) {
                stranger.shown_out.store(true, Ordering::Release);
            }
            self.left.wait_for(&mut guests, Duration::from_millis(20));
        }
    }

    pub(super) fn enter(self: &Arc<Self>) -> Place {
        let guest = Arc::new(Guest {
            since: Instant::now(),
            greeted: AtomicBool::new(false),
            proven: AtomicBool::new(false),
            shown_out: AtomicBool::new(false),
        });
        self.guests.lock().push(Arc::clone(&guest));
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
        let mut guests = self.crowd.guests.lock();
        guests.retain(|guest| !Arc::ptr_eq(guest, &self.guest));
        self.crowd.left.notify_all();
    }
}
