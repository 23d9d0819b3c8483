//! The plans of all ranks under way together: which steps can happen, and what happens next.

use std::collections::VecDeque;
use std::fmt::Write as _;

use rustc_hash::FxHashMap;

use super::contract::initial;
use super::expression::{Expressions, Id, UNINITIALISED};
use super::in_place::Placed;
use super::memory::{Buffers, Windows};
use super::order::{Accesses, Clock, Semaphores, join};
use super::rank_set::RankSet;
use super::{Operation, Report, Schedule};
use crate::signals::HALVES;
use crate::types::{Collective, Rank};
use crate::{Order, Plan, Shape, Span, Step};

/// One rank's buffers and progress.
pub(super) struct RankState<const WORDS: usize> {
    pub(super) operation: usize,
    pub(super) buffers: Buffers,
    /// The first unfinished step.
    head: usize,
    progress: Vec<Progress>,
    /// By step, the earlier one that it waits for: it need not wait for those before that one.
    blocked_by: Vec<usize>,
    /// The ranks known to have come to a barrier.
    pub(super) heard_from: RankSet<WORDS>,
    /// Where ranks share memory.
    pub(super) clock: Clock,
    /// It waits for all ranks: to begin an operation for which they lend memory, or to end it.
    meeting: Option<Meeting>,
    pub(super) placed: Placed,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Meeting {
    AtTheBeginning,
    AtTheEnd,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    Waiting,
    Active,
    /// Local, and it can happen.
    Possible,
    Done,
}

/// Something that can happen.
#[derive(Clone, Copy)]
enum Event {
    Local { rank: Rank, step: usize },
    Transfer { from: Rank, to: Rank },
}

pub(super) struct Run<'a, const WORDS: usize> {
    pub(super) operations: &'a [Operation<'a>],
    pub(super) world: usize,
    window: usize,
    schedule: Schedule,
    /// Whether ranks share memory, so that clocks are kept.
    shares: bool,
    /// By operation.
    pub(super) expressions: Vec<Expressions<WORDS>>,
    /// By operation, the output of the rank that ended first.
    pub(super) first_results: Vec<Option<Vec<Id>>>,
    pub(super) ranks: Vec<RankState<WORDS>>,
    pub(super) windows: Windows,
    pub(super) semaphores: Semaphores<WORDS>,
    /// The steps that are active, by sender and receiver.
    sending: FxHashMap<(Rank, Rank), usize>,
    receiving: FxHashMap<(Rank, Rank), usize>,
    /// In a barrier, whom the sender had heard from when its step became active.
    telling: FxHashMap<(Rank, Rank), RankSet<WORDS>>,
    possible: VecDeque<Event>,
    pub(super) report: Report,
}

impl<'a, const WORDS: usize> Run<'a, WORDS> {
    pub(super) fn new(
        operations: &'a [Operation<'a>],
        window: usize,
        half: usize,
        schedule: Schedule,
    ) -> Self {
        let world = operations.first().map_or(0, |first| first.plans.len());
        let lends = |operation: &Operation| operation.plans.iter().any(|plan| plan.lends);
        let shares = half > 0 || operations.iter().any(lends);
        let rank_state = |rank: Rank| {
            let mut clock = vec![0; if shares { world } else { 0 }];
            if let Some(own) = clock.get_mut(rank) {
                *own = 1;
            }
            RankState {
                operation: 0,
                buffers: Buffers::default(),
                head: 0,
                progress: Vec::new(),
                blocked_by: Vec::new(),
                heard_from: RankSet::of(rank),
                clock,
                meeting: None,
                placed: Placed::default(),
            }
        };
        Self {
            operations,
            world,
            window,
            schedule,
            shares,
            expressions: operations.iter().map(|_| Expressions::new()).collect(),
            first_results: vec![None; operations.len()],
            ranks: (0..world).map(rank_state).collect(),
            windows: Windows::new(world, half),
            semaphores: Semaphores::new(world, half > 0),
            sending: FxHashMap::default(),
            receiving: FxHashMap::default(),
            telling: FxHashMap::default(),
            possible: VecDeque::new(),
            report: Report {
                messages: vec![0; world],
                sent: vec![0; world],
                received: vec![0; world],
                in_rank_order: true,
            },
        }
    }

    pub(super) fn complete(mut self) -> Result<Report, String> {
        for rank in 0..self.world {
            self.begin(rank, 0)?;
        }
        let mut random = match self.schedule {
            Schedule::Random(seed) => seed,
            _ => 0,
        };
        loop {
            let next = match self.schedule {
                Schedule::Oldest => self.possible.pop_front(),
                Schedule::Newest => self.possible.pop_back(),
                Schedule::Random(_) if self.possible.is_empty() => None,
                Schedule::Random(_) => {
                    random = random
                        .wrapping_mul(6364136223846793005)
                        .wrapping_add(1442695040888963407);
                    let len = self.possible.len();
                    self.possible
                        .swap_remove_back((random >> 33) as usize % len)
                }
            };
            match next {
                Some(Event::Local { rank, step }) => self.run_local(rank, step)?,
                Some(Event::Transfer { from, to }) => self.transfer(from, to)?,
                None => break,
            }
        }
        self.check_all_ran()?;
        self.semaphores.check_at_rest()?;
        Ok(self.report)
    }

    /// The operation that `rank` is in.
    fn operation(&self, rank: Rank) -> &'a Operation<'a> {
        &self.operations[self.ranks[rank].operation]
    }

    pub(super) fn plan(&self, rank: Rank) -> &'a Plan {
        &self.operation(rank).plans[rank]
    }

    pub(super) fn shape(&self, rank: Rank) -> &'a Shape<'a> {
        &self.operation(rank).shapes[rank]
    }

    /// The half of the windows that a plan of `rank` means.
    pub(super) fn half(&self, rank: Rank, half: usize) -> usize {
        (half + self.operation(rank).first) % HALVES
    }

    /// `rank` comes to that operation.
    fn begin(&mut self, rank: Rank, operation: usize) -> Result<(), String> {
        self.ranks[rank].operation = operation;
        let Some(next) = self.operations.get(operation) else {
            return Ok(());
        };
        let plan = &next.plans[rank];
        let (input, output) = initial(&next.shapes[rank], &mut self.expressions[operation]);
        let has_placed = !next.in_place.is_empty();
        let lent = if plan.lends || has_placed {
            output.len()
        } else {
            0
        };
        let lent_input = if has_placed { input.len() } else { 0 };
        let state = &mut self.ranks[rank];
        state.placed = Placed::new(plan, &next.shapes[rank], next.in_place.contains(rank));
        state.buffers = Buffers {
            input,
            output,
            scratch: vec![UNINITIALISED; plan.scratch],
            lent: vec![Accesses::default(); lent],
            lent_input: vec![Accesses::default(); lent_input],
        };
        state.head = 0;
        state.progress = vec![Progress::Waiting; plan.steps.len()];
        state.blocked_by = vec![0; plan.steps.len()];
        state.heard_from = RankSet::of(rank);
        match plan.lends {
            true => self.meet(rank, Meeting::AtTheBeginning),
            false => self.activate(rank),
        }
    }

    /// `rank` waits until all ranks are where it is: at the beginning or at the end of its operation. Whether the
    /// operations before it are over then is the executor's business; windows are other memory.
    fn meet(&mut self, rank: Rank, meeting: Meeting) -> Result<(), String> {
        self.ranks[rank].meeting = Some(meeting);
        let operation = self.ranks[rank].operation;
        let is_here = |state: &RankState<WORDS>| {
            (state.meeting, state.operation) == (Some(meeting), operation)
        };
        if !self.ranks.iter().all(is_here) {
            return Ok(());
        }
        let mut all = self.ranks[0].clock.clone();
        for state in &self.ranks {
            join(&mut all, &state.clock);
        }
        for (other, state) in self.ranks.iter_mut().enumerate() {
            state.meeting = None;
            state.clock.clone_from(&all);
            state.clock[other] += 1;
        }
        for other in 0..self.world {
            match meeting {
                Meeting::AtTheBeginning => self.activate(other)?,
                Meeting::AtTheEnd => self.end(other)?,
            }
        }
        Ok(())
    }

    /// `rank` has done all of its operation.
    fn end(&mut self, rank: Rank) -> Result<(), String> {
        self.check_results(rank)?;
        if !self.operation(rank).in_place.is_empty() {
            self.check_buffers(rank)?;
        }
        self.begin(rank, self.ranks[rank].operation + 1)
    }

    /// Activates the steps of `rank` that may run now.
    fn activate(&mut self, rank: Rank) -> Result<(), String> {
        let plan = self.plan(rank);
        let steps = &plan.steps;
        let state = &mut self.ranks[rank];
        while state.progress.get(state.head) == Some(&Progress::Done) {
            state.head += 1;
        }
        let head = state.head;
        if head == steps.len() {
            return match plan.lends {
                true => self.meet(rank, Meeting::AtTheEnd),
                false => self.end(rank),
            };
        }
        let window = match plan.order {
            Order::InOrder => 1,
            Order::Overlapping => self.window,
        };
        for index in head..steps.len().min(head + window) {
            let state = &mut self.ranks[rank];
            if state.progress[index] != Progress::Waiting {
                continue;
            }
            let blocks = |earlier: &usize| {
                state.progress[*earlier] != Progress::Done
                    && steps[index].must_follow(&steps[*earlier])
            };
            match (head.max(state.blocked_by[index])..index).find(blocks) {
                Some(earlier) => state.blocked_by[index] = earlier,
                None => {
                    state.progress[index] = Progress::Active;
                    self.offer(rank, index)?;
                }
            }
        }
        Ok(())
    }

    /// Step `index` of `rank` is active: notes what can happen by it.
    fn offer(&mut self, rank: Rank, index: usize) -> Result<(), String> {
        match self.plan(rank).steps[index] {
            Step::Send { to, .. } => {
                let link = self.link(rank, (rank, to), index)?;
                self.sending.insert(link, index);
                if self.shape(rank).collective == Collective::Barrier {
                    self.telling.insert(link, self.ranks[rank].heard_from);
                }
                if self.receiving.contains_key(&link) {
                    self.possible.push_back(Event::Transfer { from: rank, to });
                }
            }
            Step::Recv { from, .. } | Step::Fold { from, .. } => {
                let link = self.link(rank, (from, rank), index)?;
                self.receiving.insert(link, index);
                if self.sending.contains_key(&link) {
                    self.possible.push_back(Event::Transfer { from, to: rank });
                }
            }
            Step::Wait {
                half, what, from, ..
            } => {
                let which = (self.half(rank, half), what);
                let mut peers = from.iter();
                if peers.all(|peer| self.semaphores.is_set(peer, rank, which)) {
                    self.local_can_happen(rank, index);
                }
            }
            _ => self.local_can_happen(rank, index),
        }
        Ok(())
    }

    fn local_can_happen(&mut self, rank: Rank, step: usize) {
        self.ranks[rank].progress[step] = Progress::Possible;
        self.possible.push_back(Event::Local { rank, step });
    }

    fn link(
        &self,
        rank: Rank,
        (from, to): (Rank, Rank),
        step: usize,
    ) -> Result<(Rank, Rank), String> {
        if from >= self.world || to >= self.world || from == to {
            return Err(self.blame(rank, step, "has no such peer"));
        }
        Ok((from, to))
    }

    fn run_local(&mut self, rank: Rank, index: usize) -> Result<(), String> {
        let step = self.plan(rank).steps[index];
        if !self.ranks[rank].placed.skips(index) {
            self.local(rank, &step)
                .map_err(|problem| self.blame(rank, index, &problem))?;
        }
        if let Some(half) = step.half() {
            let half = self.half(rank, half);
            self.ranks[rank].placed.note(index, &step, half);
        }
        self.step_done(rank, index);
        if let Step::Signal { to, .. } = step {
            for peer in to.iter() {
                self.look_again(peer)?;
            }
        }
        self.activate(rank)
    }

    /// Something was signalled to `rank`, which may be what it waits for.
    fn look_again(&mut self, rank: Rank) -> Result<(), String> {
        let state = &self.ranks[rank];
        let head = state.head;
        let is_active = state.progress.get(head) == Some(&Progress::Active);
        if is_active && matches!(self.plan(rank).steps[head], Step::Wait { .. }) {
            self.offer(rank, head)?;
        }
        Ok(())
    }

    fn step_done(&mut self, rank: Rank, index: usize) {
        let state = &mut self.ranks[rank];
        state.progress[index] = Progress::Done;
        if let Some(own) = state.clock.get_mut(rank) {
            *own += 1;
        }
    }

    fn transfer(&mut self, from: Rank, to: Rank) -> Result<(), String> {
        let link = (from, to);
        let (Some(sender), Some(receiver)) =
            (self.sending.remove(&link), self.receiving.remove(&link))
        else {
            unreachable!("a transfer is possible when both sides are active");
        };
        let Step::Send { src, .. } = self.plan(from).steps[sender] else {
            unreachable!("only sends are sending");
        };
        if self.ranks[from].operation != self.ranks[to].operation {
            let problem = format!("sends to rank {to}, which is in another operation");
            return Err(self.blame(from, sender, &problem));
        }
        self.carry(link, (sender, receiver), src)?;
        if let Some(heard_from) = self.telling.remove(&link) {
            self.ranks[to].heard_from |= heard_from;
        }
        if self.shares {
            let sent = self.ranks[from].clock.clone();
            join(&mut self.ranks[to].clock, &sent);
        }
        self.step_done(from, sender);
        self.step_done(to, receiver);
        self.activate(from)?;
        self.activate(to)
    }

    /// The bytes of a transfer.
    fn carry(
        &mut self,
        (from, to): (Rank, Rank),
        (sender, receiver): (usize, usize),
        src: Span,
    ) -> Result<(), String> {
        let values = self
            .read(from, src)
            .map_err(|problem| self.blame(from, sender, &problem))?;
        let step = self.plan(to).steps[receiver];
        self.deliver(to, &step, src, &values).map_err(|problem| {
            let problem = format!("{problem}; the message is step {sender} of rank {from}");
            self.blame(to, receiver, &problem)
        })?;
        self.report.messages[from] += 1;
        self.report.sent[from] += src.len;
        self.report.received[to] += src.len;
        Ok(())
    }

    fn blame(&self, rank: Rank, step: usize, problem: &str) -> String {
        let operation = match self.operations.len() {
            1 => String::new(),
            _ => format!(" in operation {}", self.ranks[rank].operation),
        };
        format!(
            "{} of {}{operation}: step {step} of rank {rank}, {:?}, {problem}",
            self.shape(rank).collective,
            self.world,
            self.plan(rank).steps[step]
        )
    }

    /// Either everything has run, or the ranks wait for each other.
    fn check_all_ran(&self) -> Result<(), String> {
        let mut stuck = String::new();
        for (rank, state) in self.ranks.iter().enumerate() {
            let Some(operation) = self.operations.get(state.operation) else {
                continue;
            };
            // Writing to a string does not fail.
            let _ = match operation.plans[rank].steps.get(state.head) {
                Some(step) => write!(stuck, "; rank {rank} in step {}, {step:?}", state.head),
                None => write!(stuck, "; rank {rank} at the end"),
            };
        }
        if stuck.is_empty() {
            return Ok(());
        }
        let collective = self.operations[0].shapes[0].collective;
        Err(format!("{collective} never ends{stuck}"))
    }
}
