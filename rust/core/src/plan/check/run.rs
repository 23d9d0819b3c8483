//! One run of the plans of all ranks on symbols, in one order of events.

use std::collections::VecDeque;
use std::fmt::Write as _;

use rustc_hash::FxHashMap;

use super::contract::{Want, expected, initial};
use super::expression::{Expressions, Id, Kind, UNINITIALISED};
use super::rank_set::RankSet;
use super::{Order, Report};
use crate::plan::{Buffer, Plan, Shape, Span, Step, Wire};
use crate::types::{Collective, Rank};

/// One rank's buffers and progress.
struct RankState<const WORDS: usize> {
    input: Vec<Id>,
    output: Vec<Id>,
    scratch: Vec<Id>,
    /// The first unfinished step.
    head: usize,
    progress: Vec<Progress>,
    /// The ranks known to have come to a barrier.
    heard_from: RankSet<WORDS>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    Waiting,
    Active,
    Done,
}

/// Something that can happen.
#[derive(Clone, Copy)]
enum Event {
    Local { rank: Rank, step: usize },
    Transfer { from: Rank, to: Rank },
}

pub(super) struct Run<'a, const WORDS: usize> {
    plans: &'a [Plan],
    shapes: &'a [Shape<'a>],
    window: usize,
    order: Order,
    expressions: Expressions<WORDS>,
    ranks: Vec<RankState<WORDS>>,
    /// The steps that are active, by sender and receiver.
    sending: FxHashMap<(Rank, Rank), usize>,
    receiving: FxHashMap<(Rank, Rank), usize>,
    /// In a barrier, whom the sender had heard from when its step became active.
    telling: FxHashMap<(Rank, Rank), RankSet<WORDS>>,
    possible: VecDeque<Event>,
    report: Report,
}

impl<'a, const WORDS: usize> Run<'a, WORDS> {
    pub(super) fn new(
        plans: &'a [Plan],
        shapes: &'a [Shape<'a>],
        window: usize,
        order: Order,
    ) -> Self {
        let world = plans.len();
        let mut expressions = Expressions::new();
        let ranks = plans
            .iter()
            .zip(shapes)
            .map(|(plan, shape)| {
                let (input, output) = initial(shape, &mut expressions);
                RankState {
                    input,
                    output,
                    scratch: vec![UNINITIALISED; plan.scratch],
                    head: 0,
                    progress: vec![Progress::Waiting; plan.steps.len()],
                    heard_from: RankSet::of(shape.rank),
                }
            })
            .collect();
        Self {
            plans,
            shapes,
            window,
            order,
            expressions,
            ranks,
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
        for rank in 0..self.plans.len() {
            self.activate(rank)?;
        }
        let mut random = match self.order {
            Order::Random(seed) => seed,
            _ => 0,
        };
        loop {
            let next = match self.order {
                Order::Oldest => self.possible.pop_front(),
                Order::Newest => self.possible.pop_back(),
                Order::Random(_) if self.possible.is_empty() => None,
                Order::Random(_) => {
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
        self.check_results()?;
        Ok(self.report)
    }

    /// Activates the steps of `rank` that may run now.
    fn activate(&mut self, rank: Rank) -> Result<(), String> {
        let steps = &self.plans[rank].steps;
        let state = &mut self.ranks[rank];
        while state.progress.get(state.head) == Some(&Progress::Done) {
            state.head += 1;
        }
        let head = state.head;
        let end = steps.len().min(head + self.window);
        for index in head..end {
            let state = &self.ranks[rank];
            let free = state.progress[index] == Progress::Waiting
                && (head..index).all(|earlier| {
                    state.progress[earlier] == Progress::Done
                        || !steps[index].must_follow(&steps[earlier])
                });
            if !free {
                continue;
            }
            self.ranks[rank].progress[index] = Progress::Active;
            match steps[index] {
                Step::Send { to, .. } => {
                    let link = self.link(rank, rank, to, index)?;
                    self.sending.insert(link, index);
                    if self.shapes[rank].collective == Collective::Barrier {
                        self.telling.insert(link, self.ranks[rank].heard_from);
                    }
                    if self.receiving.contains_key(&link) {
                        self.possible.push_back(Event::Transfer { from: rank, to });
                    }
                }
                Step::Recv { from, .. } | Step::Fold { from, .. } => {
                    let link = self.link(rank, from, rank, index)?;
                    self.receiving.insert(link, index);
                    if self.sending.contains_key(&link) {
                        self.possible.push_back(Event::Transfer { from, to: rank });
                    }
                }
                _ => self.possible.push_back(Event::Local { rank, step: index }),
            }
        }
        Ok(())
    }

    fn link(&self, rank: Rank, from: Rank, to: Rank, step: usize) -> Result<(Rank, Rank), String> {
        let world = self.plans.len();
        if from >= world || to >= world || from == to {
            return Err(self.blame(rank, step, "has no such peer"));
        }
        Ok((from, to))
    }

    fn run_local(&mut self, rank: Rank, index: usize) -> Result<(), String> {
        let step = self.plans[rank].steps[index];
        self.local(rank, &step)
            .map_err(|problem| self.blame(rank, index, &problem))?;
        self.ranks[rank].progress[index] = Progress::Done;
        self.activate(rank)
    }

    fn local(&mut self, rank: Rank, step: &Step) -> Result<(), String> {
        let widen = self.shapes[rank].widen;
        match *step {
            Step::Copy { src, dst } => {
                same_length(src.len, dst.len)?;
                if src.overlaps(&dst) {
                    return Err("copies between overlapping spans".into());
                }
                let values = self.read(rank, src)?;
                self.write(rank, dst, &values)
            }
            Step::Reduce { src, dst } => {
                same_length(src.len, dst.len)?;
                if src.overlaps(&dst) {
                    return Err("reduces between overlapping spans".into());
                }
                let values = self.read(rank, src)?;
                self.accumulate(rank, dst, &values)
            }
            Step::Finish { src, dst } => {
                same_length(src.len, dst.len)?;
                if src != dst && src.overlaps(&dst) {
                    return Err("finishes between overlapping spans".into());
                }
                if widen && src.buffer != Buffer::Scratch {
                    return Err("finishes a sum that is not in the accumulation type".into());
                }
                let all_ranks = RankSet::below(self.plans.len());
                let values = self
                    .read(rank, src)?
                    .into_iter()
                    .map(|sum| self.expressions.finish(sum, all_ranks))
                    .collect::<Result<Vec<Id>, String>>()?;
                self.write(rank, dst, &values)
            }
            Step::ReduceAll { .. } | Step::Signal { .. } | Step::Wait { .. } => {
                Err("uses windows".into())
            }
            Step::Send { .. } | Step::Recv { .. } | Step::Fold { .. } => {
                unreachable!("transfers are not local")
            }
        }
    }

    fn transfer(&mut self, from: Rank, to: Rank) -> Result<(), String> {
        let link = (from, to);
        let (Some(sender), Some(receiver)) =
            (self.sending.remove(&link), self.receiving.remove(&link))
        else {
            unreachable!("a transfer is possible when both sides are active");
        };
        let Step::Send { src, .. } = self.plans[from].steps[sender] else {
            unreachable!("only sends are sending");
        };
        let values = self
            .read(from, src)
            .map_err(|problem| self.blame(from, sender, &problem))?;
        let step = self.plans[to].steps[receiver];
        self.deliver(to, &step, src, &values).map_err(|problem| {
            let problem = format!("{problem}; the message is step {sender} of rank {from}");
            self.blame(to, receiver, &problem)
        })?;
        self.report.messages[from] += 1;
        self.report.sent[from] += src.len;
        self.report.received[to] += src.len;
        if let Some(heard_from) = self.telling.remove(&link) {
            self.ranks[to].heard_from |= heard_from;
        }
        self.ranks[from].progress[sender] = Progress::Done;
        self.ranks[to].progress[receiver] = Progress::Done;
        self.activate(from)?;
        self.activate(to)
    }

    fn deliver(&mut self, to: Rank, step: &Step, src: Span, values: &[Id]) -> Result<(), String> {
        let (Step::Recv { dst, wire, .. } | Step::Fold { dst, wire, .. }) = *step else {
            unreachable!("only receives are receiving");
        };
        same_length(src.len, dst.len)?;
        let carried = match src.buffer {
            Buffer::Scratch => Wire::Partial,
            Buffer::Input | Buffer::Output | Buffer::Window { .. } => Wire::Element,
        };
        if wire != carried {
            return Err(format!("expects {wire:?} where {carried:?} is sent"));
        }
        match step {
            Step::Recv { .. } => self.write(to, dst, values),
            _ => self.accumulate(to, dst, values),
        }
    }

    fn buffer(&mut self, rank: Rank, span: Span) -> Result<&mut [Id], String> {
        let state = &mut self.ranks[rank];
        let buffer = match span.buffer {
            Buffer::Input => &mut state.input,
            Buffer::Output => &mut state.output,
            Buffer::Scratch => &mut state.scratch,
            Buffer::Window { .. } => return Err("uses a window".into()),
        };
        let len = buffer.len();
        span.offset
            .checked_add(span.len)
            .and_then(|end| buffer.get_mut(span.offset..end))
            .ok_or_else(|| {
                format!(
                    "needs {} elements from {} of the {len} in {:?}",
                    span.len, span.offset, span.buffer
                )
            })
    }

    fn read(&mut self, rank: Rank, span: Span) -> Result<Vec<Id>, String> {
        let values = self.buffer(rank, span)?;
        match values.iter().position(|&id| id == UNINITIALISED) {
            Some(at) => Err(format!(
                "reads element {} of {:?}, which nothing was written to",
                span.offset + at,
                span.buffer
            )),
            None => Ok(values.to_vec()),
        }
    }

    fn write(&mut self, rank: Rank, dst: Span, values: &[Id]) -> Result<(), String> {
        if dst.buffer == Buffer::Input && dst.len > 0 {
            return Err("writes the input".into());
        }
        if self.shapes[rank].widen && dst.buffer == Buffer::Output {
            let partial = |&&id: &&Id| self.expressions.get(id).kind == Kind::Sum;
            if let Some(&id) = values.iter().find(partial) {
                return Err(format!(
                    "rounds a partial sum of element {}",
                    self.expressions.get(id).element
                ));
            }
        }
        self.buffer(rank, dst)?.copy_from_slice(values);
        Ok(())
    }

    fn accumulate(&mut self, rank: Rank, dst: Span, values: &[Id]) -> Result<(), String> {
        let sums = self
            .read(rank, dst)?
            .into_iter()
            .zip(values)
            .map(|(left, &right)| self.expressions.sum(left, right))
            .collect::<Result<Vec<Id>, String>>()?;
        self.write(rank, dst, &sums)
    }

    fn blame(&self, rank: Rank, step: usize, problem: &str) -> String {
        format!(
            "{} of {}: step {step} of rank {rank}, {:?}, {problem}",
            self.shapes[rank].collective,
            self.plans.len(),
            self.plans[rank].steps[step]
        )
    }

    /// Either everything has run, or the ranks wait for each other.
    fn check_all_ran(&self) -> Result<(), String> {
        let mut stuck = String::new();
        for (rank, state) in self.ranks.iter().enumerate() {
            if let Some(step) = self.plans[rank].steps.get(state.head) {
                let _ = write!(stuck, "; rank {rank} in step {}, {step:?}", state.head);
            }
        }
        if stuck.is_empty() {
            Ok(())
        } else {
            Err(format!("{} never ends{stuck}", self.shapes[0].collective))
        }
    }

    fn check_results(&mut self) -> Result<(), String> {
        for (rank, shape) in self.shapes.iter().enumerate() {
            if shape.collective == Collective::Barrier
                && self.ranks[rank].heard_from != RankSet::below(shape.world)
            {
                return Err(format!(
                    "rank {rank} leaves the barrier without having heard from {:?}",
                    (RankSet::below(shape.world) & !self.ranks[rank].heard_from).ranks()
                ));
            }
            let expected = expected(self.shapes, rank, &mut self.expressions);
            for (at, want) in expected.into_iter().enumerate() {
                let got = self.ranks[rank].output[at];
                let problem = match want {
                    Want::Exactly(want) if got == want => continue,
                    Want::Exactly(_) => "is not the element that belongs there".to_string(),
                    Want::SumOf(element) => {
                        let sum = self.expressions.get(got);
                        self.report.in_rank_order &= sum.in_rank_order;
                        if sum.kind != Kind::Finished {
                            "is not a finished sum".to_string()
                        } else if sum.element != element {
                            format!("is the sum of element {} instead of {element}", sum.element)
                        } else if shape.collective == Collective::AllReduce
                            && self.ranks[0].output[at] != got
                        {
                            "was reduced in another order than on rank 0".to_string()
                        } else {
                            continue;
                        }
                    }
                };
                return Err(format!(
                    "{} of {}: output element {at} of rank {rank} {problem}",
                    shape.collective, shape.world
                ));
            }
        }
        Ok(())
    }
}

fn same_length(src: usize, dst: usize) -> Result<(), String> {
    if src == dst {
        Ok(())
    } else {
        Err(format!("puts {src} elements where {dst} are expected"))
    }
}
