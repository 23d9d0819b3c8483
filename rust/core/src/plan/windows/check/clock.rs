//! Vector clocks: what each rank knows to have happened, of itself and of the others.

use crate::types::Rank;

pub(super) type Clock = Vec<u64>;

/// When something happened: the rank, and its own time.
pub(super) type Moment = (Rank, u64);

pub(super) fn join(clock: &mut Clock, other: &Clock) {
    for (own, other) in clock.iter_mut().zip(other) {
        *own = (*own).max(*other);
    }
}

pub(super) fn is_after(clock: &Clock, other: &Clock) -> bool {
    clock.iter().zip(other).all(|(own, other)| own >= other)
}

/// Whether `clock` knows of `moment`.
pub(super) fn has_passed(clock: &Clock, (rank, time): Moment) -> bool {
    clock[rank] >= time
}
