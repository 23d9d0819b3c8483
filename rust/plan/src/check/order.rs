//! The order of events between ranks that share memory: vector clocks, and the semaphores that carry them.
//!
//! A rank waits for nothing but messages and semaphores with one setter and one taker, so the result does not depend on
//! which ranks are fast: one run stands for all, as long as no two accesses to one element are without an order. A clock
//! travels with every semaphore, and each access must come after those it conflicts with in every order of events that
//! the semaphores allow.

use super::rank_set::RankSet;
use crate::signals::{HALVES, Semaphore};
use crate::types::Rank;

/// For each rank, how many of its events have passed.
pub(super) type Clock = Vec<u64>;

/// When something happened: the rank, and its own time.
pub(super) type Moment = (Rank, u64);

pub(super) fn join(clock: &mut Clock, other: &Clock) {
    for (own, other) in clock.iter_mut().zip(other) {
        *own = (*own).max(*other);
    }
}

fn is_after(clock: &Clock, other: &Clock) -> bool {
    clock.iter().zip(other).all(|(own, other)| own >= other)
}

/// Whether `clock` knows of `moment`.
fn has_passed(clock: &Clock, (rank, time): Moment) -> bool {
    clock[rank] >= time
}

/// The accesses to one element of shared memory that the next may conflict with.
#[derive(Clone, Default)]
pub(super) struct Accesses {
    written: Option<Moment>,
    reads: Vec<Moment>,
}

impl Accesses {
    /// `rank`, whose clock this is, writes.
    ///
    /// # Errors
    /// The rank that may still be reading, or writing.
    pub(super) fn write(&mut self, rank: Rank, clock: &Clock) -> Result<(), Rank> {
        for moment in self.reads.drain(..).chain(self.written) {
            if !has_passed(clock, moment) {
                return Err(moment.0);
            }
        }
        self.written = Some((rank, clock[rank]));
        Ok(())
    }

    /// `rank`, whose clock this is, reads. Returns whether it comes after what was written.
    pub(super) fn read(&mut self, rank: Rank, clock: &Clock) -> bool {
        self.reads.push((rank, clock[rank]));
        self.written.is_none_or(|moment| has_passed(clock, moment))
    }
}

/// The ranks that a rank has heard from in an operation.
pub(super) type Heard<const WORDS: usize> = (usize, RankSet<WORDS>);

/// A semaphore of an owner, a reader and a half.
#[derive(Clone)]
struct State<const WORDS: usize> {
    set: bool,
    /// The setter's clock then, its operation, and whom it had heard from in that.
    since: Clock,
    heard: Heard<WORDS>,
    /// The taker's clock when it was last taken.
    taken: Clock,
}

/// The semaphores between all ranks.
pub(super) struct Semaphores<const WORDS: usize> {
    world: usize,
    /// By owner, reader, half and kind.
    states: Vec<State<WORDS>>,
}

/// The half, and the kind of semaphore.
pub(super) type Which = (usize, Semaphore);

impl<const WORDS: usize> Semaphores<WORDS> {
    /// For a world that meets in windows; of another there are none.
    pub(super) fn new(world: usize, is_shared: bool) -> Self {
        let pairs = if is_shared { world * world } else { 0 };
        let state = State {
            set: false,
            since: vec![0; world * usize::from(is_shared)],
            heard: (0, RankSet::EMPTY),
            taken: vec![0; world * usize::from(is_shared)],
        };
        let mut semaphores = Self {
            world,
            states: vec![state; pairs * HALVES * 3],
        };
        for pair in 0..pairs {
            for half in 0..HALVES {
                let (owner, reader) = (pair / world, pair % world);
                semaphores
                    .state(owner, reader, (half, Semaphore::Empty))
                    .set = true;
            }
        }
        semaphores
    }

    fn state(&mut self, owner: Rank, reader: Rank, (half, what): Which) -> &mut State<WORDS> {
        let pair = owner * self.world + reader;
        &mut self.states[(pair * HALVES + half) * 3 + what as usize]
    }

    /// That which `setter` sets for `taker`.
    fn between(&mut self, setter: Rank, taker: Rank, which: Which) -> &mut State<WORDS> {
        match which.1 {
            Semaphore::Empty => self.state(taker, setter, which),
            Semaphore::Contributions | Semaphore::Results => self.state(setter, taker, which),
        }
    }

    pub(super) fn is_set(&mut self, setter: Rank, taker: Rank, which: Which) -> bool {
        self.between(setter, taker, which).set
    }

    /// `taker`, whose clock this is, has waited for it. Returns what the setter had heard.
    pub(super) fn learn(
        &mut self,
        (setter, taker): (Rank, Rank),
        which: Which,
        clock: &mut Clock,
    ) -> Heard<WORDS> {
        let state = self.between(setter, taker, which);
        join(clock, &state.since);
        state.heard
    }

    /// `taker` takes it, when it has waited for all.
    pub(super) fn unset(&mut self, (setter, taker): (Rank, Rank), which: Which, clock: &Clock) {
        let state = self.between(setter, taker, which);
        state.set = false;
        state.taken.clone_from(clock);
    }

    /// # Errors
    /// In words, where it is set already or may be.
    pub(super) fn set(
        &mut self,
        (setter, taker): (Rank, Rank),
        which: Which,
        (clock, heard): (&Clock, Heard<WORDS>),
    ) -> Result<(), String> {
        let state = self.between(setter, taker, which);
        if state.set {
            return Err(format!("sets {:?} twice", which.1));
        }
        if !is_after(clock, &state.taken) {
            return Err(format!(
                "sets {:?}, which may not have been taken yet",
                which.1
            ));
        }
        state.set = true;
        state.since.clone_from(clock);
        state.heard = heard;
        Ok(())
    }

    /// # Errors
    /// The first that is not as at the beginning.
    pub(super) fn check_at_rest(&mut self) -> Result<(), String> {
        if self.states.is_empty() {
            return Ok(());
        }
        let world = self.world;
        for (owner, reader) in (0..world * world).map(|pair| (pair / world, pair % world)) {
            for half in (0..HALVES).filter(|_| owner != reader) {
                for (what, set) in [
                    (Semaphore::Empty, true),
                    (Semaphore::Contributions, false),
                    (Semaphore::Results, false),
                ] {
                    if self.state(owner, reader, (half, what)).set != set {
                        return Err(format!(
                            "at the end {what:?} of half {half} of rank {owner} for rank {reader} is {}",
                            !set
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}
