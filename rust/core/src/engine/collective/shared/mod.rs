//! Collectives in memory that the ranks of one host share: all of them must take part, and all in the same way.
//!
//! - [`Algorithm::InPlace`](crate::plan::Algorithm::InPlace) ([`in_place_run`]): the buffers of all ranks lie in the shared
//!   heap, and each rank works on its slice of them where they lie.
//! - [`Algorithm::Windows`](crate::plan::Algorithm::Windows) ([`window_run`]): they do not, and go chunk by chunk through
//!   the [`windows`] of the group.
//!
//! [`plan::select`](crate::plan::select) says which of the two are cheaper than messages, for an operation that has not
//! begun: no plan of messages has been made then, and no memory taken for one.
//!
//! # Agreement
//!
//! Each rank knows only of itself whether its buffer lies in the heap, but all ranks must do the same. So an operation
//! begins with one round of [proposals](agreement): a rank offers every other its slice of the buffer, or nothing. It
//! makes all of them the same proposal, so all ranks decide alike. If all offer, each works on its slice and gives back
//! what the others offered it; a rank that has everything back has the result. If one does not, all decline.
//!
//! An operation other than `all_reduce` goes through windows or by messages. Messages read a peer's memory where it lies, if
//! it lies in the heap. They are faster where all the memory that is read lies there, and a rank whose memory does proposes
//! them.
//!
//! The first operation that could go through windows opens them, in a round before its own. Where a rank has none, or one
//! cannot reach another's, there are none for the life of the group. A round costs little, but it costs an operation that
//! goes by messages afterwards; so after rounds that end so some operations of that size make none ([`backoff`]).

mod agreement;
mod backoff;
mod in_place_run;
mod run;
mod semaphores;
mod stores;
#[cfg(test)]
mod tests;
mod window_run;
mod windows;

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::error::{Error, Result};
use crate::plan::shared::chunk;
use crate::plan::{Algorithm, Plan, in_memory};
use crate::types::{Collective, Rank};

use self::backoff::{Agreements, WindowSpeed};
pub(crate) use self::run::{RunState, SharedRun};
use self::windows::Windows;
use crate::engine::clock::Clock;
use crate::engine::collective::plan_key::PlanKey;

/// Steps of plans that are kept for operations to come.
const KEPT_STEPS: usize = 1 << 18;

/// The one host of a group: its number of ranks and the cores that they share; the same on all of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host {
    /// The number of ranks.
    pub(crate) world: usize,
    /// Cores that they share.
    pub(crate) cores: usize,
}

impl Host {
    /// Bytes of a chunk: the part of a buffer that goes through windows at once.
    fn chunk(&self, collective: Collective) -> usize {
        chunk(collective, self.world, self.cores)
    }

    /// The number of chunks of a buffer of `bytes` bytes, at least one.
    fn chunks(&self, collective: Collective, bytes: usize) -> usize {
        bytes.div_ceil(self.chunk(collective)).max(1)
    }
}

/// The common state of a group's operations in the memory that its ranks share.
#[derive(Debug, Default)]
pub(crate) struct SharedMemory {
    clock: Clock,
    agreements: Agreements,
    speed: WindowSpeed,
    windows: WindowState,
    plans: FxHashMap<(Algorithm, PlanKey), Arc<Plan>>,
    kept_steps: usize,
    decided: Decided,
}

/// The windows of a group.
#[derive(Debug, Default)]
enum WindowState {
    /// No operation has needed them yet.
    #[default]
    Unknown,
    /// There are none.
    Closed,
    Open(Box<Windows>),
}

/// The way in which all ranks do an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    InPlace,
    Windows,
    Messages,
}

/// How many rounds of agreement have ended with each decision.
#[derive(Clone, Copy, Debug, Default)]
struct Decided {
    in_place: u64,
    windows: u64,
    messages: u64,
}

impl Decided {
    /// Counts a decision. Returns which of its kind it is.
    fn count(&mut self, decision: Decision) -> u64 {
        let count = match decision {
            Decision::InPlace => &mut self.in_place,
            Decision::Windows => &mut self.windows,
            Decision::Messages => &mut self.messages,
        };
        *count += 1;
        *count
    }
}

impl SharedMemory {
    pub(crate) fn new(clock: Clock) -> Self {
        Self {
            clock,
            ..Self::default()
        }
    }

    /// The decisions of the ranks so far, in words.
    #[cfg(any(test, feature = "simulate"))]
    pub(crate) fn reached(&self) -> impl Iterator<Item = &'static str> {
        let Decided {
            in_place,
            windows,
            messages,
        } = self.decided;
        let all = [
            (in_place, "all ranks went in place"),
            (windows, "all ranks went through windows"),
            (messages, "all ranks went by messages"),
        ];
        all.into_iter()
            .filter(|(count, _)| *count > 0)
            .map(|(_, what)| what)
    }

    fn windows(&mut self) -> Option<&mut Windows> {
        match &mut self.windows {
            WindowState::Open(windows) => Some(windows),
            WindowState::Unknown | WindowState::Closed => None,
        }
    }

    fn are_open(&self) -> bool {
        matches!(self.windows, WindowState::Open(_))
    }

    /// Announces that this rank is about to sleep until peers have come further in the windows.
    pub(crate) fn arm(&self) {
        if let WindowState::Open(windows) = &self.windows {
            windows.arm();
        }
    }

    /// Withdraws it.
    pub(crate) fn disarm(&self) {
        if let WindowState::Open(windows) = &self.windows {
            windows.disarm();
        }
    }

    /// The plan through windows of an operation, in chunks of `chunk` bytes.
    fn window_plan(
        &mut self,
        key: PlanKey,
        place: (Rank, usize),
        chunk: usize,
    ) -> Result<Arc<Plan>> {
        self.plan((Algorithm::Windows, key), place, chunk)
    }

    /// The plan of an operation in the ranks' own buffers.
    fn in_place_plan(&mut self, key: PlanKey, place: (Rank, usize)) -> Result<Arc<Plan>> {
        self.plan((Algorithm::InPlace, key), place, 0)
    }

    fn plan(
        &mut self,
        (algorithm, key): (Algorithm, PlanKey),
        (rank, world): (Rank, usize),
        chunk: usize,
    ) -> Result<Arc<Plan>> {
        if let Some(plan) = self.plans.get(&(algorithm, key)) {
            return Ok(Arc::clone(plan));
        }
        let shape = key.shape(rank, world);
        let plan = in_memory::build(algorithm, &shape, key.element_size, chunk)
            .map(Arc::new)
            .ok_or_else(|| Error::internal(format!("no plan by {algorithm} for {shape:?}")))?;
        if plan.steps.len() > KEPT_STEPS / 4 {
            return Ok(plan);
        }
        if self.kept_steps + plan.steps.len() > KEPT_STEPS {
            self.plans.clear();
            self.kept_steps = 0;
        }
        self.kept_steps += plan.steps.len();
        self.plans.insert((algorithm, key), Arc::clone(&plan));
        Ok(plan)
    }
}
