//! Runs a plan over links.
//!
//! The rule of `plan`: a step may overlap earlier unfinished ones when they share no link direction and no bytes.
//! [`CompiledPlan`] works out once, for a whole plan, which of the [`WINDOW`] steps before each one it must wait for;
//! [`PlanRun`] then moves whatever may move, without ever blocking. Operations of one group share its links:
//! a later operation may use a link direction once every earlier one is done with it, so that messages arrive in
//! the order in which the receiver's own plans expect them.
//!
//! Where every message is short there is nothing to overlap: the steps are then done one after the other
//! ([`PlanRun::walk`]), and a run that has ended is used again by the next operation that is like it.

use std::sync::Arc;

use crate::buffer::Memory;
use crate::error::Result;
use crate::heap::Scratch;
use crate::plan::links::WINDOW;
use crate::plan::{Plan, Step};
use crate::reduce;
use crate::types::{Algorithm, Collective, DataType, Rank, ReduceOp};

use crate::engine::collective::shared::{RunState, SharedMemory, SharedRun};
use crate::engine::links::LinkTable;
pub(crate) use crate::engine::links::{Direction, Waiting};
use crate::engine::traffic::TrafficClass;

use crate::engine::collective::bounce::{RepeatedSends, StagedSpans};
use crate::engine::collective::header::{Fingerprint, HEADER};
use crate::engine::collective::operands::Operands;
use crate::engine::collective::plan_key::PlanKey;
use crate::engine::collective::request::{Request, Sizes};
use crate::engine::collective::transfer::{Progress, StepTerms};

/// Bytes of payload up to which a message is short: there is nothing to gain from having several under way.
const LONGEST_SHORT_MESSAGE: usize = 512;

/// A plan with what the executor needs to know of it, worked out once and cached.
#[derive(Debug)]
pub(crate) struct CompiledPlan {
    pub(crate) plan: Plan,
    /// For which of the steps before each one it waits.
    waits: Vec<Waits>,
    /// The last step on each link direction, sorted.
    last_use: Vec<((Rank, Direction), usize)>,
    pub(crate) repeated_sends: RepeatedSends,
    /// The steps that receive what no later one reads.
    last_receives: Vec<bool>,
    /// Every message is short.
    is_short: bool,
}

impl CompiledPlan {
    /// `plan` for elements of at most `size` bytes.
    pub(crate) fn new(plan: Plan, size: usize) -> Self {
        let is_short = plan.longest_message().saturating_mul(size) <= LONGEST_SHORT_MESSAGE;
        let plan = if is_short { plan.sends_first() } else { plan };
        let steps = &plan.steps;
        let waits = (0..steps.len())
            .map(|i| {
                let mut waits = Waits::default();
                for k in 0..WINDOW.min(i) {
                    let earlier = &steps[i - 1 - k];
                    if steps[i].depends_on(earlier) {
                        waits.end |= 1 << k;
                    } else if steps[i].shares_link(earlier) {
                        waits.link |= 1 << k;
                    }
                }
                waits
            })
            .collect();
        let mut last_use = std::collections::BTreeMap::new();
        for (i, step) in steps.iter().enumerate() {
            if let Some(direction) = link_direction(step) {
                last_use.insert(direction, i);
            }
        }
        Self {
            is_short,
            repeated_sends: RepeatedSends::of(&plan),
            last_receives: plan.last_receives(),
            plan,
            waits,
            last_use: last_use.into_iter().collect(),
        }
    }
}

/// A plan of messages, with the memory that one run of it needs.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) compiled: Arc<CompiledPlan>,
    pub(crate) scratch: Option<Scratch>,
    pub(crate) bounce: Option<StagedSpans>,
}

/// Bit k: the step waits for the one k + 1 before it.
#[derive(Clone, Copy, Debug, Default)]
struct Waits {
    /// To have ended.
    end: u64,
    /// To have ended, or to have been lent for good: it only used the same link direction before.
    link: u64,
}

/// The link direction a step uses.
fn link_direction(step: &Step) -> Option<(Rank, Direction)> {
    match *step {
        Step::Send { to, .. } => Some((to, Direction::Send)),
        Step::Recv { from, .. } | Step::Fold { from, .. } => Some((from, Direction::Receive)),
        _ => None,
    }
}

/// One plan under way.
#[derive(Debug)]
pub(crate) struct PlanRun {
    compiled: Arc<CompiledPlan>,
    operands: Operands,
    /// The factor by which the input is to be multiplied, before anything else.
    factor: Option<f64>,
    /// How it is done in shared memory, if the ranks agree. Until they have decided there is no plan of messages.
    shared: Option<SharedRun>,
    /// The key of its operation, where the next operation like it may use the run again; and the lengths of the input and
    /// output buffers.
    reuse_key: Option<ReuseKey>,
    lengths: (usize, usize),
    /// Where it counts.
    traffic: TrafficClass,
    /// The first unfinished step.
    base: usize,
    /// The steps from `base` on that have ended (bit k: step `base + k`), and those that have left their link.
    ended: u64,
    left: u64,
    window: [Progress; WINDOW],
}

/// The common properties of operations that differ in their memory alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ReuseKey {
    collective: Collective,
    dtype: DataType,
    op: Option<ReduceOp>,
    root: Rank,
    count: usize,
    in_place: bool,
    in_rank_order: bool,
}

impl ReuseKey {
    /// `None` for an operation that is too rare, or has too much of its own.
    pub(crate) fn of(request: &Request) -> Option<Self> {
        match (&request.sizes, request.op) {
            (_, Some(ReduceOp::PremulSum(_))) => None,
            (Sizes::Even(count), op) => Some(Self {
                collective: request.collective,
                dtype: request.dtype,
                op,
                root: request.root,
                count: *count,
                in_place: request.in_place(),
                in_rank_order: request.in_rank_order,
            }),
            _ => None,
        }
    }
}

/// How far a walk has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Walked {
    ToTheEnd,
    /// Some steps further.
    On,
    Nowhere,
}

impl PlanRun {
    /// A run on `operands`. The caller then chooses shared memory or messages: see [`Self::share`] and
    /// [`Self::go_by_messages`]. Until then its plan is `nothing`, without steps.
    pub(crate) fn new(
        nothing: Arc<CompiledPlan>,
        operands: Operands,
        factor: Option<f64>,
    ) -> Box<Self> {
        Box::new(Self {
            traffic: operands.traffic(),
            compiled: nothing,
            operands,
            factor,
            shared: None,
            reuse_key: None,
            lengths: (0, 0),
            base: 0,
            ended: 0,
            left: 0,
            window: [Progress::default(); WINDOW],
        })
    }

    /// The same with the memory of one that has ended.
    pub(crate) fn renew(
        &mut self,
        nothing: Arc<CompiledPlan>,
        operands: Operands,
        factor: Option<f64>,
    ) {
        self.traffic = operands.traffic();
        self.compiled = nothing;
        self.operands = operands;
        self.factor = factor;
        self.shared = None;
        self.reuse_key = None;
        self.restart();
    }

    /// Runs it in shared memory if all ranks agree.
    pub(crate) fn share(&mut self, shared: Option<SharedRun>) {
        self.shared = shared;
    }

    /// The key of its plan of messages, where the ranks have decided to go by one.
    pub(crate) fn declined(&self) -> Option<PlanKey> {
        let shared = self.shared.as_ref()?;
        (shared.state() == RunState::Declined).then_some(shared.key)
    }

    /// Runs it by messages.
    pub(crate) fn go_by_messages(&mut self, prepared: Prepared) {
        self.shared = None;
        self.compiled = prepared.compiled;
        self.operands.bounce = prepared.bounce;
        self.operands.buffers.scratch = prepared.scratch;
        self.restart();
    }

    /// Where it counts.
    #[inline]
    pub(crate) fn traffic(&self) -> TrafficClass {
        self.traffic
    }

    /// Its operands.
    pub(crate) fn operands(&self) -> &Operands {
        &self.operands
    }

    /// Lets the next operation like this one use the run again, once it has ended, if every message is short.
    pub(crate) fn set_reuse_key(&mut self, reuse_key: Option<ReuseKey>) {
        let buffers = &self.operands.buffers;
        self.lengths = (buffers.input().len(), buffers.output().len());
        self.reuse_key = reuse_key.filter(|_| self.compiled.is_short && self.shared.is_none());
    }

    /// Whether it can carry out an operation of this reuse_key when it has ended.
    #[inline]
    pub(crate) fn is_like(&self, reuse_key: &ReuseKey) -> bool {
        self.reuse_key.as_ref() == Some(reuse_key)
    }

    /// Whether every message is short.
    #[inline]
    pub(crate) fn is_short(&self) -> bool {
        self.reuse_key.is_some()
    }

    /// Whether `request`, which is like it, is in order: its buffers are as long as the ones before, which have been
    /// checked, and lie apart.
    #[inline]
    pub(crate) fn fits(&self, request: &Request) -> bool {
        let bytes = |memory: &Option<Memory>| memory.as_ref().map_or(0, Memory::len);
        (bytes(&request.input), bytes(&request.output)) == self.lengths
            && match (&request.input, &request.output) {
                (Some(input), Some(output)) => !input.overlaps(output),
                _ => true,
            }
    }

    /// Carries out the same operation once more, on other memory.
    #[inline(always)]
    pub(crate) fn repeat(&mut self, request: &mut Request, sequence: u64) {
        let (input, output) = (request.input.take(), request.output.take());
        self.operands.buffers.renew(input, output);
        self.operands.number(sequence);
        // A run that has ended has left the window as it was at first.
        (self.base, self.ended, self.left) = (0, 0, 0);
    }

    fn restart(&mut self) {
        (self.base, self.ended, self.left) = (0, 0, 0);
        let used = self.compiled.plan.steps.len().min(WINDOW);
        self.window[..used].fill(Progress::default());
    }

    /// Lets go of the caller's memory: it has ended.
    #[inline]
    pub(crate) fn release(&mut self) {
        self.operands.buffers.release();
    }

    /// The scratch memory, for the next operation.
    pub(crate) fn take_scratch(&mut self) -> Option<Scratch> {
        self.operands.buffers.scratch.take()
    }

    /// The bounce, for the next operation.
    pub(crate) fn take_bounce(&mut self) -> Option<StagedSpans> {
        self.operands.bounce.take()
    }

    /// The peers this operation exchanges messages with; one may be named twice.
    pub(crate) fn peers(&self) -> impl Iterator<Item = Rank> + '_ {
        let all = self.shared.as_ref().map_or(0, |_| self.operands.world);
        let others = (0..all).filter(|peer| *peer != self.operands.rank);
        let named = self.compiled.last_use.iter().map(|((peer, _), _)| *peer);
        others.chain(named)
    }

    /// The directions of links that its plan uses.
    pub(crate) fn directions(&self) -> impl Iterator<Item = (Rank, Direction)> + '_ {
        self.compiled
            .last_use
            .iter()
            .map(|(direction, _)| *direction)
    }

    /// Whether the operation writes bytes that `other` touches, or the other way round.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let (ours, theirs) = (&self.operands.buffers, &other.operands.buffers);
        ours.output().overlaps(theirs.output())
            || ours.output().overlaps(theirs.contribution())
            || ours.contribution().overlaps(theirs.output())
    }

    pub(crate) fn is_done(&self) -> bool {
        if let Some(shared) = &self.shared {
            return shared.state() == RunState::Done;
        }
        self.base == self.compiled.plan.steps.len()
    }

    /// Whether it has been decided to use shared memory or messages.
    pub(crate) fn is_decided(&self) -> bool {
        self.shared.as_ref().is_none_or(SharedRun::is_decided)
    }

    /// Whether this operation no longer needs the link direction.
    pub(crate) fn has_left(&self, direction: (Rank, Direction)) -> bool {
        if let Some(shared) = &self.shared {
            return shared.has_left_links(&self.operands);
        }
        let uses = &self.compiled.last_use;
        match uses.binary_search_by_key(&direction, |(key, _)| *key) {
            Ok(found) => self.is_before(self.left, uses[found].1),
            Err(_) => true,
        }
    }

    /// Bytes of the longer of its two buffers.
    pub(crate) fn bytes(&self) -> usize {
        self.operands.buffers.longer()
    }

    pub(crate) fn collective(&self) -> Collective {
        self.operands.collective
    }

    /// The algorithm that it goes by, as far as that has been decided.
    pub(crate) fn algorithm(&self) -> Option<Algorithm> {
        let shared = self.shared.as_ref().and_then(SharedRun::algorithm);
        let by_messages = usize::from(self.operands.fingerprint().algorithm);
        shared.or_else(|| Algorithm::ALL.get(by_messages).copied())
    }

    /// `all_reduce #17`, as errors name it.
    pub(crate) fn name(&self) -> String {
        self.operands.fingerprint().name()
    }

    /// The fingerprint of every message of the operation, but for the message's own length.
    pub(crate) fn fingerprint(&self) -> Fingerprint {
        *self.operands.fingerprint()
    }

    /// Whether `step` is behind the window, or in it and in the set.
    fn is_before(&self, set: u64, step: usize) -> bool {
        step < self.base || (step < self.base + WINDOW && set >> (step - self.base) & 1 != 0)
    }

    /// The end of the window.
    fn horizon(&self) -> usize {
        (self.base + WINDOW).min(self.compiled.plan.steps.len())
    }

    /// Moves every step that may move. Returns whether anything did. `free` says whether all operations before this
    /// one are done with a link direction. `memory`: the group's shared memory, and whether all operations before this
    /// one have decided to use it or not.
    pub(crate) fn advance(
        &mut self,
        links: &mut LinkTable,
        free: &dyn Fn((Rank, Direction)) -> bool,
        memory: (&mut SharedMemory, bool),
    ) -> Result<bool> {
        if let Some(factor) = self.factor.take() {
            let Operands {
                buffers, elements, ..
            } = &mut self.operands;
            buffers.multiply(|to, from| reduce::scale(elements.dtype, to, from, factor));
        }
        if let Some(shared) = &mut self.shared {
            return shared.advance(&mut self.operands, links, free, memory);
        }
        let mut moved = false;
        let mut index = self.base;
        while index < self.horizon() {
            let bit = 1 << (index - self.base);
            if self.ended & bit == 0 && self.may_start(index, free) {
                let progress = &mut self.window[index % WINDOW];
                let step = &self.compiled.plan.steps[index];
                let staged = self.compiled.repeated_sends.span_of(index);
                let way = StepTerms {
                    staged: staged.map(|number| (&self.compiled.repeated_sends, number)),
                    is_last: self.compiled.last_receives[index],
                };
                moved |= self.operands.advance(step, way, progress, links)?;
                if progress.leaves_link() {
                    self.left |= bit;
                }
                if progress.done {
                    self.ended |= bit;
                    self.slide();
                }
            }
            index = self.base.max(index + 1);
        }
        Ok(moved)
    }

    /// Does one step after the other, as far as possible now, without looking further ahead. For runs whose messages
    /// are short, and that are the only one of their group.
    #[inline(always)]
    pub(crate) fn walk(&mut self, links: &mut LinkTable) -> Result<Walked> {
        let steps = &self.compiled.plan.steps;
        let mut walked = Walked::Nowhere;
        while let Some(step) = steps.get(self.base) {
            let progress = &mut self.window[self.base % WINDOW];
            let moved = self.operands.advance_short(step, progress, links)?;
            if !progress.done {
                return Ok(if moved { Walked::On } else { walked });
            }
            *progress = Progress::default();
            self.base += 1;
            walked = Walked::On;
        }
        Ok(Walked::ToTheEnd)
    }

    /// Moves the window past the steps at its beginning that have ended.
    fn slide(&mut self) {
        while self.ended & 1 != 0 {
            self.window[self.base % WINDOW] = Progress::default();
            self.base += 1;
            self.ended >>= 1;
            self.left >>= 1;
        }
    }

    fn may_start(&self, index: usize, free: &dyn Fn((Rank, Direction)) -> bool) -> bool {
        let waits = &self.compiled.waits[index];
        let within = index - self.base;
        if within > 0 {
            // Bit k: the step k + 1 before this one, as in `waits`; those before the window have ended.
            let before = |set: u64| (!set << (WINDOW - within)).reverse_bits();
            if before(self.ended) & waits.end != 0 || before(self.left) & waits.link != 0 {
                return false;
            }
        }
        match link_direction(&self.compiled.plan.steps[index]) {
            Some(direction) => free(direction),
            None => true,
        }
    }

    /// Whether it is under way in shared memory.
    pub(crate) fn is_crossing(&self) -> bool {
        self.shared.as_ref().is_some_and(SharedRun::is_crossing)
    }

    /// Whether peers have come so far in shared memory that this rank can go on.
    pub(crate) fn may_cross(&self, memory: &SharedMemory) -> bool {
        self.shared
            .as_ref()
            .is_some_and(|shared| shared.may_cross(memory))
    }

    /// The peers that steps are waiting for now.
    pub(crate) fn waiting(
        &self,
        free: &dyn Fn((Rank, Direction)) -> bool,
        memory: &SharedMemory,
        mut visit: impl FnMut(Waiting),
    ) {
        if let Some(shared) = &self.shared {
            return shared.waiting(&self.operands, free, memory, visit);
        }
        for index in self.base..self.horizon() {
            if self.is_before(self.ended, index) || !self.may_start(index, free) {
                continue;
            }
            let step = &self.compiled.plan.steps[index];
            if let Some((peer, direction)) = link_direction(step) {
                let bytes = self.window[index % WINDOW].bytes;
                let of = self.operands.message_bytes(step);
                let bytes = match direction {
                    Direction::Send => bytes.saturating_sub(HEADER),
                    Direction::Receive | Direction::Meet => bytes,
                };
                visit(Waiting {
                    peer,
                    direction,
                    bytes,
                    of,
                });
            }
        }
    }
}
