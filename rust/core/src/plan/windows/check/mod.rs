//! Proves plans over windows, by running those of all ranks on symbols, one operation after the other.
//!
//! A rank waits for nothing but semaphores with one setter and one taker, so the result does not depend on which ranks
//! are fast: one run stands for all, as long as no two accesses to one element of a half are without an order. Vector
//! clocks show that: a clock travels with every semaphore, and each access must come after those it conflicts with in
//! every order of events that the semaphores allow.
//!
//! What is proved, for operations in a row with the halves in turn:
//! - every output element is right; every reduction is in rank order, the same on all ranks, and finished once;
//! - no rank writes an element of a half that another may be reading or has not read yet, or reads one that was not
//!   written in this operation;
//! - spans lie inside their buffers, the input is never written, a partial result is never rounded;
//! - no rank waits for ever, no semaphore is set twice, and the end leaves all as at the beginning.

mod clock;

use self::clock::{Clock, Moment, has_passed, is_after, join};
use crate::plan::check::contract::{Want, expected, initial};
use crate::plan::check::expression::{Expressions, Id, Kind, UNINITIALISED};
use crate::plan::check::rank_set::RankSet;
use crate::plan::windows::{HALVES, Peers, Semaphore};
use crate::plan::{Buffer, Plan, Shape, Span, Step};
use crate::types::{Collective, Rank};

/// One operation: the plans and shapes of all ranks.
#[derive(Clone, Debug)]
pub struct Operation<'a> {
    /// By rank.
    pub plans: Vec<Plan>,
    /// By rank.
    pub shapes: Vec<Shape<'a>>,
    /// The half that its chunks begin with.
    pub first: usize,
}

/// Runs `operations` one after the other in windows of `half` elements per half.
///
/// # Errors
/// The first thing that is wrong, in words.
pub fn verify(operations: &[Operation], half: usize) -> Result<(), String> {
    let Some(world) = operations.first().map(|first| first.plans.len()) else {
        return Ok(());
    };
    for operation in operations {
        if operation.plans.len() != world || operation.shapes.len() != world {
            return Err("plans and shapes are not one per rank".into());
        }
    }
    Run::new(operations, world, half).complete()
}

/// One element of a half.
#[derive(Clone, Default)]
struct Cell {
    /// The operation it was written in, and what it holds.
    value: Option<(usize, Id)>,
    written: Option<Moment>,
    reads: Vec<Moment>,
}

/// A semaphore of an owner, a reader and a half.
#[derive(Clone)]
struct State {
    set: bool,
    /// The setter's clock then.
    since: Clock,
    /// The taker's clock when it was last taken.
    taken: Clock,
}

/// One rank's progress.
struct RankState {
    operation: usize,
    step: usize,
    clock: Clock,
    input: Vec<Id>,
    output: Vec<Id>,
}

struct Run<'a> {
    operations: &'a [Operation<'a>],
    world: usize,
    half: usize,
    /// By operation.
    expressions: Vec<Expressions<1>>,
    ranks: Vec<RankState>,
    /// By rank and half.
    windows: Vec<[Vec<Cell>; HALVES]>,
    /// By owner, reader, half and signal.
    semaphores: Vec<State>,
}

impl<'a> Run<'a> {
    fn new(operations: &'a [Operation<'a>], world: usize, half: usize) -> Self {
        let mut run = Self {
            operations,
            world,
            half,
            expressions: operations.iter().map(|_| Expressions::<1>::new()).collect(),
            ranks: Vec::new(),
            windows: vec![[vec![Cell::default(); half], vec![Cell::default(); half]]; world],
            semaphores: vec![
                State {
                    set: false,
                    since: vec![0; world],
                    taken: vec![0; world],
                };
                world * world * HALVES * 3
            ],
        };
        for rank in 0..world {
            let (input, output) = initial(&operations[0].shapes[rank], &mut run.expressions[0]);
            let mut clock = vec![0; world];
            clock[rank] = 1;
            run.ranks.push(RankState {
                operation: 0,
                step: 0,
                clock,
                input,
                output,
            });
            for reader in 0..world {
                for half in 0..HALVES {
                    run.semaphore(rank, reader, half, Semaphore::Empty).set = true;
                }
            }
        }
        run
    }

    fn semaphore(
        &mut self,
        owner: Rank,
        reader: Rank,
        half: usize,
        signal: Semaphore,
    ) -> &mut State {
        let kind = signal as usize;
        &mut self.semaphores[((owner * self.world + reader) * HALVES + half) * 3 + kind]
    }

    fn complete(mut self) -> Result<(), String> {
        loop {
            let mut moved = false;
            for rank in 0..self.world {
                while self.advance(rank)? {
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        for (rank, state) in self.ranks.iter().enumerate() {
            if let Some(operation) = self.operations.get(state.operation) {
                return Err(format!(
                    "rank {rank} waits for ever in operation {} at step {}: {:?}",
                    state.operation, state.step, operation.plans[rank].steps[state.step]
                ));
            }
        }
        self.check_semaphores()
    }

    fn check_semaphores(&mut self) -> Result<(), String> {
        for owner in 0..self.world {
            for reader in (0..self.world).filter(|reader| *reader != owner) {
                for half in 0..HALVES {
                    for (signal, set) in [
                        (Semaphore::Empty, true),
                        (Semaphore::Contributions, false),
                        (Semaphore::Results, false),
                    ] {
                        if self.semaphore(owner, reader, half, signal).set != set {
                            return Err(format!(
                                "at the end {signal:?} of half {half} of rank {owner} for rank {reader} is {}",
                                !set
                            ));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// One step of `rank`. Returns whether there was one that it need not wait for.
    fn advance(&mut self, rank: Rank) -> Result<bool, String> {
        let (operation, step) = (self.ranks[rank].operation, self.ranks[rank].step);
        let Some(current) = self.operations.get(operation) else {
            return Ok(false);
        };
        let Some(&action) = current.plans[rank].steps.get(step) else {
            self.check_output(rank)?;
            self.begin(rank, operation + 1);
            return Ok(true);
        };
        let done = self
            .carry_out(rank, action, current.first)
            .map_err(|problem| {
                format!("rank {rank}, operation {operation}, step {step} ({action:?}): {problem}")
            })?;
        if done {
            self.ranks[rank].step += 1;
            self.ranks[rank].clock[rank] += 1;
        }
        Ok(done)
    }

    fn begin(&mut self, rank: Rank, operation: usize) {
        let state = &mut self.ranks[rank];
        (state.operation, state.step) = (operation, 0);
        if let Some(next) = self.operations.get(operation) {
            (state.input, state.output) =
                initial(&next.shapes[rank], &mut self.expressions[operation]);
        }
    }

    fn check_output(&mut self, rank: Rank) -> Result<(), String> {
        let operation = self.ranks[rank].operation;
        let expressions = &mut self.expressions[operation];
        let wanted = expected(&self.operations[operation].shapes, rank, expressions);
        let found = &self.ranks[rank].output;
        if found.len() != wanted.len() {
            return Err(format!("rank {rank} has {} results", found.len()));
        }
        for (element, (want, id)) in wanted.iter().zip(found).enumerate() {
            let right = match want {
                Want::Exactly(wanted) => id == wanted,
                Want::SumOf(of) => {
                    let sum = expressions.get(*id);
                    *id != UNINITIALISED
                        && sum.kind == Kind::Finished
                        && sum.element == *of
                        && sum.in_rank_order
                }
            };
            if !right {
                return Err(format!(
                    "rank {rank}, operation {operation}: element {element} of the output is wrong"
                ));
            }
        }
        Ok(())
    }

    /// Returns false when `rank` has to wait.
    fn carry_out(&mut self, rank: Rank, step: Step, first: usize) -> Result<bool, String> {
        let halved = |half: usize| (half + first) % HALVES;
        match step {
            Step::Wait {
                half,
                what,
                from,
                take,
            } => {
                let pair = |other| owner_first(what, other, rank);
                let pairs = from.iter().map(pair);
                return Ok(self.take(rank, pairs, (halved(half), what), take));
            }
            Step::Signal { half, what, to } => {
                let pairs = to.iter().map(|other| owner_first(what, rank, other));
                self.set(rank, pairs, (halved(half), what))?;
            }
            Step::Copy { src, dst } => {
                if src.len != dst.len {
                    return Err("it copies to another length".into());
                }
                let mut values = match src.buffer {
                    Buffer::Window { rank: from, half } => {
                        let half = halved(half.into());
                        self.read_window(rank, from.into(), half, src.offset..src.offset + src.len)?
                    }
                    _ => self.read_own(rank, src)?,
                };
                if step.half().is_none() && self.is_reduction(rank) {
                    // Of one rank: its contribution is all there is.
                    values = self.finished(rank, values)?;
                }
                self.write(rank, first, dst, &values)?;
            }
            Step::ReduceAll {
                half,
                offset,
                own,
                dst,
            } => {
                let range = offset..offset + dst.len;
                let values = self.reduced(rank, halved(half), range, own)?;
                self.write(rank, first, dst, &values)?;
            }
            Step::Send { .. }
            | Step::Recv { .. }
            | Step::Fold { .. }
            | Step::Reduce { .. }
            | Step::Finish { .. } => return Err("it is no step over windows".into()),
        }
        Ok(true)
    }

    /// Waits for all `pairs` and takes those whose other rank is in `taken`.
    fn take(
        &mut self,
        rank: Rank,
        pairs: impl Iterator<Item = (Rank, Rank)>,
        (half, signal): (usize, Semaphore),
        taken: Peers,
    ) -> bool {
        let pairs: Vec<(Rank, Rank)> = pairs.collect();
        let is_set =
            |run: &mut Self, pair: &(Rank, Rank)| run.semaphore(pair.0, pair.1, half, signal).set;
        if !pairs.iter().all(|pair| is_set(self, pair)) {
            return false;
        }
        for (owner, reader) in &pairs {
            let since = self.semaphore(*owner, *reader, half, signal).since.clone();
            join(&mut self.ranks[rank].clock, &since);
        }
        let clock = self.ranks[rank].clock.clone();
        for (owner, reader) in pairs {
            let other = if owner == rank { reader } else { owner };
            if taken.contains(other) {
                let semaphore = self.semaphore(owner, reader, half, signal);
                semaphore.set = false;
                semaphore.taken.clone_from(&clock);
            }
        }
        true
    }

    fn set(
        &mut self,
        rank: Rank,
        pairs: impl Iterator<Item = (Rank, Rank)>,
        (half, signal): (usize, Semaphore),
    ) -> Result<(), String> {
        let clock = self.ranks[rank].clock.clone();
        for (owner, reader) in pairs {
            let semaphore = self.semaphore(owner, reader, half, signal);
            if semaphore.set {
                return Err(format!("{signal:?} is set twice"));
            }
            if !is_after(&clock, &semaphore.taken) {
                return Err(format!("{signal:?} may not have been taken yet"));
            }
            semaphore.set = true;
            semaphore.since.clone_from(&clock);
        }
        Ok(())
    }

    fn read_own(&self, rank: Rank, span: Span) -> Result<Vec<Id>, String> {
        let state = &self.ranks[rank];
        let buffer = match span.buffer {
            Buffer::Input => &state.input,
            Buffer::Output => &state.output,
            Buffer::Scratch => return Err("there is no scratch".into()),
            Buffer::Window { .. } => return Err("a window is not the caller's memory".into()),
        };
        let values = buffer.get(span.offset..span.offset + span.len);
        let values = values.ok_or_else(|| format!("{span:?} lies outside its buffer"))?;
        if values.contains(&UNINITIALISED) {
            return Err(format!("{span:?} is read before it is written"));
        }
        Ok(values.to_vec())
    }

    fn write_output(&mut self, rank: Rank, at: usize, values: &[Id]) -> Result<(), String> {
        let output = &mut self.ranks[rank].output;
        let place = output.get_mut(at..at + values.len());
        place
            .ok_or("it writes outside the output")?
            .copy_from_slice(values);
        Ok(())
    }

    fn write(&mut self, rank: Rank, first: usize, to: Span, values: &[Id]) -> Result<(), String> {
        match to.buffer {
            Buffer::Output => self.write_output(rank, to.offset, values),
            Buffer::Window { rank: owner, half } if usize::from(owner) == rank => {
                let half = (usize::from(half) + first) % HALVES;
                self.write_window(rank, half, to.offset, values)
            }
            _ => Err("it writes what is not its own to write".into()),
        }
    }

    fn write_window(
        &mut self,
        rank: Rank,
        half: usize,
        at: usize,
        values: &[Id],
    ) -> Result<(), String> {
        if at + values.len() > self.half {
            return Err("it writes outside its half".into());
        }
        let (operation, clock) = (self.ranks[rank].operation, &self.ranks[rank].clock);
        let now = (rank, clock[rank]);
        for (offset, value) in values.iter().enumerate() {
            let cell = &mut self.windows[rank][half][at + offset];
            for moment in cell.reads.drain(..).chain(cell.written) {
                if !has_passed(clock, moment) {
                    return Err(format!(
                        "element {} of half {half} may still be in use by rank {}",
                        at + offset,
                        moment.0
                    ));
                }
            }
            cell.value = Some((operation, *value));
            cell.written = Some(now);
        }
        Ok(())
    }

    fn read_window(
        &mut self,
        rank: Rank,
        of: Rank,
        half: usize,
        range: std::ops::Range<usize>,
    ) -> Result<Vec<Id>, String> {
        if range.end > self.half {
            return Err("it reads outside a half".into());
        }
        let (operation, clock) = (self.ranks[rank].operation, &self.ranks[rank].clock);
        let now = (rank, clock[rank]);
        range
            .map(|index| {
                let cell = &mut self.windows[of][half][index];
                let written = cell.written.is_some_and(|at| has_passed(clock, at));
                cell.reads.push(now);
                match cell.value {
                    Some((when, value)) if when == operation && written => Ok(value),
                    _ => Err(format!(
                        "element {index} of half {half} of rank {of} may not have been written yet"
                    )),
                }
            })
            .collect()
    }

    fn reduced(
        &mut self,
        rank: Rank,
        half: usize,
        range: std::ops::Range<usize>,
        own: Option<Span>,
    ) -> Result<Vec<Id>, String> {
        let mut sum: Vec<Id> = Vec::new();
        let operation = self.ranks[rank].operation;
        for source in 0..self.world {
            let values = match own {
                Some(own) if source == rank && own.len == range.len() => {
                    self.read_own(rank, own)?
                }
                Some(_) if source == rank => return Err("the own part is not as long".into()),
                _ => self.read_window(rank, source, half, range.clone())?,
            };
            if source == 0 {
                sum = values;
                continue;
            }
            for (left, right) in sum.iter_mut().zip(values) {
                *left = self.expressions[operation].sum(*left, right)?;
            }
        }
        self.finished(rank, sum)
    }

    fn finished(&mut self, rank: Rank, sums: Vec<Id>) -> Result<Vec<Id>, String> {
        let all_ranks = RankSet::below(self.world);
        let expressions = &mut self.expressions[self.ranks[rank].operation];
        sums.into_iter()
            .map(|id| expressions.finish(id, all_ranks))
            .collect()
    }

    fn is_reduction(&self, rank: Rank) -> bool {
        let shape = &self.operations[self.ranks[rank].operation].shapes[rank];
        matches!(
            shape.collective,
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter
        )
    }
}

/// The pair (owner of the window, reader) for a semaphore that `setter` sets for `taker`.
fn owner_first(what: Semaphore, setter: Rank, taker: Rank) -> (Rank, Rank) {
    match what {
        Semaphore::Empty => (taker, setter),
        Semaphore::Contributions | Semaphore::Results => (setter, taker),
    }
}
