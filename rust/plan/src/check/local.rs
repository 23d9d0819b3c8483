//! The effect of steps on memory, and whether the result is right.

use super::Operation;
use super::contract::{Want, expected};
use super::expression::{Id, Kind};
use super::rank_set::RankSet;
use super::run::{RankState, Run};
use crate::signals::{Peers, Semaphore};
use crate::types::{Collective, Rank};
use crate::{Buffer, Order, Sources, Span, Step, Wire};

impl<const WORDS: usize> Run<'_, WORDS> {
    /// A step of `rank` that is no transfer.
    pub(super) fn local(&mut self, rank: Rank, step: &Step) -> Result<(), String> {
        match *step {
            Step::Copy { src, dst } => {
                let shape = self.shape(rank);
                if shape.world == 1
                    && shape.collective.reduces()
                    && self.plan(rank).order == Order::InOrder
                {
                    // A copy that premultiplies on the way, in its place too, is the whole reduction.
                    same_length(src.len, dst.len)?;
                    let values = self.read(rank, src)?;
                    let values = self.finished(rank, values)?;
                    return self.write(rank, dst, &values);
                }
                let values = self.moved(rank, src, dst)?;
                self.write(rank, dst, &values)
            }
            Step::Reduce { src, dst } => {
                let values = self.moved(rank, src, dst)?;
                self.accumulate(rank, dst, &values)
            }
            Step::Finish { src, dst } => {
                if self.shape(rank).widen && src.buffer != Buffer::Scratch {
                    return Err("finishes a sum that is not in the accumulation type".into());
                }
                let sums = match src == dst {
                    true => self.read(rank, src)?,
                    false => self.moved(rank, src, dst)?,
                };
                let values = self.finished(rank, sums)?;
                self.write(rank, dst, &values)
            }
            Step::ReduceAll { srcs, dst, copies } => self.reduce_all(rank, srcs, dst, copies),
            Step::Signal { half, what, to } => self.signal(rank, (half, what), to),
            Step::Wait {
                half,
                what,
                from,
                take,
            } => {
                self.waited(rank, (half, what), from, take);
                Ok(())
            }
            Step::Send { .. } | Step::Recv { .. } | Step::Fold { .. } => {
                unreachable!("transfers are not local")
            }
        }
    }

    /// `rank` sets a semaphore for each of these.
    fn signal(
        &mut self,
        rank: Rank,
        (half, what): (usize, Semaphore),
        to: Peers,
    ) -> Result<(), String> {
        let which = (self.half(rank, half), what);
        let state = &self.ranks[rank];
        for peer in to.iter() {
            let known = (&state.clock, (state.operation, state.heard_from));
            self.semaphores.set((rank, peer), which, known)?;
        }
        Ok(())
    }

    /// `rank` goes on from a wait, since all of `from` have set their semaphores.
    fn waited(&mut self, rank: Rank, (half, what): (usize, Semaphore), from: Peers, take: Peers) {
        let which = (self.half(rank, half), what);
        let RankState {
            clock,
            heard_from,
            operation,
            ..
        } = &mut self.ranks[rank];
        for peer in from.iter() {
            let heard = self.semaphores.learn((peer, rank), which, clock);
            if heard.0 == *operation {
                *heard_from |= heard.1;
            }
        }
        for peer in from.iter().filter(|peer| take.contains(*peer)) {
            self.semaphores.unset((peer, rank), which, clock);
        }
    }

    /// The values that a step moves from one span to another.
    fn moved(&mut self, rank: Rank, src: Span, dst: Span) -> Result<Vec<Id>, String> {
        same_length(src.len, dst.len)?;
        if src.overlaps(&dst) {
            return Err("works between overlapping spans".into());
        }
        self.read(rank, src)
    }

    fn reduce_all(
        &mut self,
        rank: Rank,
        srcs: Sources,
        dst: Span,
        copies: Peers,
    ) -> Result<(), String> {
        let mut sum: Vec<Id> = Vec::new();
        for source in 0..self.shape(rank).contributors() {
            let values = match srcs {
                Sources::Windows { own: Some(own), .. } if source == rank => {
                    same_length(own.len, dst.len)?;
                    self.read(rank, own)?
                }
                Sources::Windows { half, offset, .. } => {
                    let window = Buffer::window(source, half);
                    self.read(rank, Span::new(window, offset, dst.len))?
                }
                Sources::Outputs => self.read_of(source, rank, dst)?,
            };
            if source == 0 {
                sum = values;
                continue;
            }
            let expressions = &mut self.expressions[self.ranks[rank].operation];
            for (left, right) in sum.iter_mut().zip(values) {
                *left = expressions.sum(*left, right)?;
            }
        }
        let values = self.finished(rank, sum)?;
        for peer in copies.iter() {
            match srcs {
                Sources::Windows { half, offset, .. } => {
                    let place = (peer, self.half(rank, half));
                    match self.in_place(place, rank, (offset, values.len()))? {
                        Some(span) => self.write_of(peer, rank, span, &values)?,
                        None => self.write_window(rank, place, offset, &values)?,
                    }
                }
                Sources::Outputs => self.write_of(peer, rank, dst, &values)?,
            }
        }
        self.write(rank, dst, &values)
    }

    fn finished(&mut self, rank: Rank, sums: Vec<Id>) -> Result<Vec<Id>, String> {
        let all_ranks = RankSet::below(self.shape(rank).contributors());
        let expressions = &mut self.expressions[self.ranks[rank].operation];
        let finish = |id| expressions.finish(id, all_ranks);
        sums.into_iter().map(finish).collect()
    }

    /// The receiving step of a message from `src`.
    pub(super) fn deliver(
        &mut self,
        to: Rank,
        step: &Step,
        src: Span,
        values: &[Id],
    ) -> Result<(), String> {
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

    pub(super) fn read(&mut self, rank: Rank, span: Span) -> Result<Vec<Id>, String> {
        let Buffer::Window { rank: owner, half } = span.buffer else {
            return self.read_of(rank, rank, span);
        };
        let (owner, half) = (usize::from(owner), self.half(rank, half.into()));
        if let Some(span) = self.in_place((owner, half), rank, (span.offset, span.len))? {
            return self.read_of(owner, rank, span);
        }
        let state = &self.ranks[rank];
        let now = (state.operation, &state.clock);
        let place = (span.offset, span.len);
        self.windows.read(rank, (owner, half), place, now)
    }

    /// Reads from the buffers of `owner`, which lends its output to other ranks.
    fn read_of(&mut self, owner: Rank, rank: Rank, span: Span) -> Result<Vec<Id>, String> {
        let clock = std::mem::take(&mut self.ranks[rank].clock);
        let buffers = &mut self.ranks[owner].buffers;
        let read = match owner == rank || buffers.is_lent() {
            true => buffers.read(span).and_then(|values| {
                buffers.touch((owner, span), (rank, &clock), false)?;
                Ok(values)
            }),
            false => Err(format!(
                "reads the output of rank {owner}, which is not lent"
            )),
        };
        self.ranks[rank].clock = clock;
        read
    }

    fn write(&mut self, rank: Rank, dst: Span, values: &[Id]) -> Result<(), String> {
        match dst.buffer {
            Buffer::Input if dst.len > 0 => Err("writes the input".into()),
            Buffer::Window { rank: owner, half } => {
                if usize::from(owner) != rank {
                    return Err("writes to a window that is not its own".into());
                }
                let half = self.half(rank, half.into());
                self.write_window(rank, (rank, half), dst.offset, values)
            }
            _ => self.write_of(rank, rank, dst, values),
        }
    }

    /// Writes to a half of `owner`.
    fn write_window(
        &mut self,
        rank: Rank,
        (owner, half): (Rank, usize),
        at: usize,
        values: &[Id],
    ) -> Result<(), String> {
        let state = &self.ranks[rank];
        let now = (state.operation, &state.clock);
        self.windows.write(rank, (owner, half), at, values, now)
    }

    /// Writes to the buffers of `owner`, which lends its output to other ranks.
    fn write_of(
        &mut self,
        owner: Rank,
        rank: Rank,
        dst: Span,
        values: &[Id],
    ) -> Result<(), String> {
        if self.shape(rank).widen && dst.buffer == Buffer::Output {
            let expressions = &self.expressions[self.ranks[rank].operation];
            let partial = |&&id: &&Id| expressions.get(id).kind == Kind::Sum;
            if let Some(&id) = values.iter().find(partial) {
                let element = expressions.get(id).element;
                return Err(format!("rounds a partial sum of element {element}"));
            }
        }
        let clock = std::mem::take(&mut self.ranks[rank].clock);
        let buffers = &mut self.ranks[owner].buffers;
        let written = match owner == rank || buffers.is_lent() {
            true => buffers
                .touch((owner, dst), (rank, &clock), true)
                .and_then(|()| {
                    buffers.of(dst)?.copy_from_slice(values);
                    Ok(())
                }),
            false => Err(format!(
                "writes to the output of rank {owner}, which is not lent"
            )),
        };
        self.ranks[rank].clock = clock;
        written
    }

    fn accumulate(&mut self, rank: Rank, dst: Span, values: &[Id]) -> Result<(), String> {
        let before = self.read(rank, dst)?;
        let expressions = &mut self.expressions[self.ranks[rank].operation];
        let sums = before
            .into_iter()
            .zip(values)
            .map(|(left, &right)| expressions.sum(left, right))
            .collect::<Result<Vec<Id>, String>>()?;
        self.write(rank, dst, &sums)
    }

    /// Whether the operation that `rank` has ended left there what it promises.
    pub(super) fn check_results(&mut self, rank: Rank) -> Result<(), String> {
        let operation = self.ranks[rank].operation;
        let Operation { shapes, .. } = self.operations[operation];
        let shape = &shapes[rank];
        let unheard = RankSet::below(shape.world) & !self.ranks[rank].heard_from;
        if shape.collective == Collective::Barrier && unheard != RankSet::EMPTY {
            return Err(format!(
                "rank {rank} leaves the barrier without having heard from {:?}",
                unheard.ranks()
            ));
        }
        let expressions = &mut self.expressions[operation];
        let output = &self.ranks[rank].buffers.output;
        let first = self.first_results[operation].get_or_insert_with(|| output.clone());
        let wanted = expected(shapes, rank, expressions);
        for (at, want) in wanted.into_iter().enumerate() {
            let got = output[at];
            let problem = match want {
                Want::Exactly(want) if got == want => continue,
                Want::Exactly(_) => "is not the element that belongs there".to_string(),
                Want::SumOf(element) => {
                    let sum = expressions.get(got);
                    self.report.in_rank_order &= sum.in_rank_order;
                    let contributors = RankSet::below(shape.contributors());
                    if sum.kind != Kind::Finished {
                        "is not a finished sum".to_string()
                    } else if sum.element != element {
                        format!("is the sum of element {} instead of {element}", sum.element)
                    } else if sum.contributors != contributors {
                        format!("is the sum of ranks {:?}", sum.contributors.ranks())
                    } else if shape.collective.is_prefix() && !sum.in_rank_order {
                        "was not reduced in the order of the ranks".to_string()
                    } else if shape.collective == Collective::AllReduce && first[at] != got {
                        "was reduced in another order than on another rank".to_string()
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
