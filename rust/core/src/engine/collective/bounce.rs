//! A place in the shared heap for what is sent to several peers.
//!
//! Through rings a span that goes to n peers is copied n times. Where the peers can read this process's heap it is
//! copied there once instead, and lent to all of them.

use std::collections::HashMap;

use crate::buffer::Memory;
use crate::heap::{self, Scratch};
use crate::plan::{Plan, Span, Step};
use crate::reduce;

/// Spans below this are not worth it: they stay in the cache on their way.
const STAGED_FROM: usize = 16 << 10;

/// Bytes of one operation that are staged at most.
const MOST_STAGED: usize = 64 << 20;

/// Which steps of a plan send what others send too.
#[derive(Debug, Default)]
pub(crate) struct RepeatedSends {
    /// For each step, the number of its span among those that are sent more than once without being written between.
    span_of: Vec<Option<u32>>,
    /// Where each of these spans begins in the bounce, and where the last one ends, in elements.
    offsets: Vec<usize>,
}

impl RepeatedSends {
    pub(crate) fn of(plan: &Plan) -> Self {
        let mut sends: HashMap<Span, Vec<usize>> = HashMap::new();
        for (i, step) in plan.steps.iter().enumerate() {
            if let Step::Send { src, .. } = step
                && src.len > 0
            {
                sends.entry(*src).or_default().push(i);
            }
        }
        let mut repeated: Vec<(Span, Vec<usize>)> = sends
            .into_iter()
            .filter(|(_, steps)| steps.len() > 1)
            .filter(|(span, steps)| {
                let between = &plan.steps[steps[0]..=steps[steps.len() - 1]];
                !between
                    .iter()
                    .filter_map(Step::writes)
                    .any(|written| written.overlaps(span))
            })
            .collect();
        if repeated.is_empty() {
            return Self::default();
        }
        repeated.sort_by_key(|(_, steps)| steps[0]);
        let mut repeated_sends = Self {
            span_of: vec![None; plan.steps.len()],
            offsets: vec![0],
        };
        let mut end = 0;
        for (number, (span, steps)) in repeated.iter().enumerate() {
            for step in steps {
                repeated_sends.span_of[*step] = Some(number as u32);
            }
            end += span.len;
            repeated_sends.offsets.push(end);
        }
        repeated_sends
    }

    /// The number of the span that a step sends, if others send it too.
    pub(crate) fn span_of(&self, step: usize) -> Option<usize> {
        let number = self.span_of.get(step).copied().flatten();
        number.map(|number| number as usize)
    }

    /// Elements of all these spans.
    fn elements(&self) -> usize {
        self.offsets.last().copied().unwrap_or(0)
    }
}

/// The spans of one operation that are staged.
#[derive(Debug)]
pub(crate) struct StagedSpans {
    scratch: Scratch,
    /// Bytes of an element at most.
    size: usize,
    /// Which spans have been copied in.
    filled: Vec<bool>,
}

impl StagedSpans {
    /// For an operation with these repeated_sends, on elements of at most `size` bytes of `source`; in `spare` memory, if that
    /// is enough. `None`: not worth it, or there is no room.
    pub(crate) fn new(
        repeated_sends: &RepeatedSends,
        size: usize,
        source: &Memory,
        spare: &mut Option<Scratch>,
    ) -> Option<Self> {
        let bytes = repeated_sends.elements().checked_mul(size)?;
        if !(STAGED_FROM..=MOST_STAGED).contains(&bytes) {
            return None;
        }
        let (address, length) = source.place(0, source.len());
        let address = std::ptr::without_provenance(address);
        if heap::locate(address, length).is_some() {
            // It is lent from where it lies.
            return None;
        }
        let scratch = match spare.take().filter(|spare| spare.len() >= bytes) {
            Some(spare) => spare,
            None => Scratch::shared(bytes)?,
        };
        Some(Self {
            scratch,
            size,
            filled: vec![false; repeated_sends.offsets.len() - 1],
        })
    }

    /// The staged form of span `number`, which is `length` bytes from `offset` of `memory`: where it lies, and where it begins
    /// there. `None` when it is short.
    pub(crate) fn put(
        &mut self,
        repeated_sends: &RepeatedSends,
        number: usize,
        memory: &Memory,
        (offset, length): (usize, usize),
    ) -> Option<(&Memory, usize)> {
        if length < STAGED_FROM {
            return None;
        }
        let start = repeated_sends.offsets[number] * self.size;
        if !std::mem::replace(&mut self.filled[number], true) {
            memory.for_each_run(offset, length, |done, run| {
                reduce::copy(self.scratch.write(start + done, run.len()), run);
            });
        }
        Some((self.scratch.memory(), start))
    }

    /// The memory, for the next operation.
    pub(crate) fn into_scratch(self) -> Scratch {
        self.scratch
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Algorithm, Buffer, Counts, Shape, build};
    use crate::types::Collective;

    fn plan(collective: Collective, algorithm: Algorithm) -> Plan {
        let shape = Shape {
            collective,
            rank: 1,
            world: 4,
            counts: Counts::Even(1000),
            root: 1,
            in_place: true,
            widen: false,
        };
        build(algorithm, &shape).expect("a plan")
    }

    #[test]
    fn what_goes_to_all_peers_is_found_once() {
        let plan = plan(Collective::AllReduce, Algorithm::TwoShot);
        let repeated_sends = RepeatedSends::of(&plan);
        // The slice that this rank has reduced; what it sends in the first shot differs from peer to peer.
        assert_eq!(repeated_sends.elements(), 250);
        let sending = |number| {
            let steps = plan.steps.iter().enumerate();
            let of = steps.filter(|(i, _)| repeated_sends.span_of(*i) == Some(number));
            of.filter_map(|(_, step)| match step {
                Step::Send { to, src } => Some((*to, *src)),
                _ => None,
            })
            .collect::<Vec<_>>()
        };
        let sent = sending(0);
        assert_eq!(sent.len(), 3);
        let slice = Span::new(Buffer::Output, 250, 250);
        assert!(sent.iter().all(|(_, src)| *src == slice));
    }

    #[test]
    fn what_changes_between_two_sends_is_not_staged() {
        let span = Span::new(Buffer::Output, 0, 8);
        let send = |to| Step::Send { to, src: span };
        let write = Step::Copy {
            src: Span::new(Buffer::Input, 0, 4),
            dst: Span::new(Buffer::Output, 4, 4),
        };
        let mut plan = Plan {
            steps: vec![send(1), write, send(2)],
            ..Plan::default()
        };
        assert_eq!(RepeatedSends::of(&plan).elements(), 0);
        plan.steps.swap(0, 1);
        assert_eq!(RepeatedSends::of(&plan).elements(), 8);
    }
}
