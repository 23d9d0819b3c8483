//! The connections that have a place in the handshake: a limited number at a time. When it gets crowded, those that have proved
//! nothing are closed first, so they cannot keep members waiting for long; a member among them comes again. A member says hello
//! at once. So the more connections are shown out, the less time each gets for that, and strangers that come by the thousand a
//! second do not fill the kernel's queue, in which members wait.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::guest::Guest;
use super::shared::Limits;

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
    const WINDOW_LENGTH: Duration = Duration::from_millis(250);

    fn new() -> Self {
        Self {
            since: Instant::now(),
            shown_out: 0,
            halved: 0,
        }
    }

    /// The grace now, of a crowd of at most `most`.
    fn grace(&mut self, usual: Duration, most: usize) -> Duration {
        let windows = self.since.elapsed().as_nanos() / Self::WINDOW_LENGTH.as_nanos();
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

/// The longest pause before it is looked again whether there is room.
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// Decides which connections stay.
pub(super) struct Crowd {
    pressure: Pressure,
}

/// Whether another connection may come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    Free,
    /// When this guest goes.
    InPlaceOf(u64),
    /// Perhaps after this time.
    After(Duration),
}

impl Crowd {
    pub(super) fn new() -> Self {
        Self {
            pressure: Pressure::new(),
        }
    }

    /// Whether there is room beside these guests, by the order in which they came, and `visiting` proven members. A guest
    /// whose place is needed is the stranger that has had one for longest; one that has a recording of a right hello goes
    /// after the others.
    pub(super) fn room(
        &mut self,
        guests: &BTreeMap<u64, Guest>,
        visiting: usize,
        limits: &Limits,
    ) -> Admission {
        if guests.len() + visiting < limits.simultaneous {
            return Admission::Free;
        }
        let grace = self.pressure.grace(limits.grace, limits.simultaneous);
        let find = |greeted, grace| {
            let mut all = guests.iter();
            all.find(|(_, guest)| guest.has_greeted() == greeted && guest.age() >= grace)
        };
        let stranger = find(false, grace).or_else(|| find(true, limits.grace * GREETED));
        match stranger {
            Some((id, _)) => {
                self.pressure.shown_out += 1;
                Admission::InPlaceOf(*id)
            }
            None => Admission::After(grace.min(LONGEST_PAUSE)),
        }
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
        let back = |windows| Instant::now().checked_sub(Pressure::WINDOW_LENGTH * windows);
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
