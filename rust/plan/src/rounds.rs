//! How the steps of all ranks follow each other: which of them could be done at the same time.

use std::collections::{HashMap, VecDeque};

use super::signals::Semaphore;
use super::{Plan, Step};
use crate::types::Rank;

/// The messages of one link that have been sent and not been received, or signals between two ranks: the round of each.
type OnTheWay<K> = HashMap<K, VecDeque<usize>>;

/// The round of each step of each rank, counted from 1. A message is sent in the round after the last one that its rank must
/// have waited for, and arrives in the same; work on memory belongs to the round before it. So the last round is the number of
/// messages that follow each other, if each takes as long as the others and no rank is busy. 0 stands for steps that come
/// before any message.
///
/// `None` where the plans do not complete.
pub fn rounds(plans: &[Plan]) -> Option<Vec<Vec<usize>>> {
    let mut walk = Walk {
        plans,
        rounds: plans.iter().map(|_| Vec::new()).collect(),
        sent: HashMap::new(),
        set: HashMap::new(),
    };
    loop {
        let mut has_moved = false;
        for rank in 0..plans.len() {
            while walk.step(rank) {
                has_moved = true;
            }
        }
        if !has_moved {
            break;
        }
    }
    let mut all = walk.rounds.iter().zip(plans);
    let is_complete = all.all(|(rounds, plan)| rounds.len() == plan.steps.len());
    is_complete.then_some(walk.rounds)
}

struct Walk<'a> {
    plans: &'a [Plan],
    rounds: Vec<Vec<usize>>,
    /// By sender and receiver.
    sent: OnTheWay<(Rank, Rank)>,
    /// By setter, taker, half and semaphore.
    set: OnTheWay<(Rank, Rank, usize, Semaphore)>,
}

impl Walk<'_> {
    /// Finds the round of this rank's next step, if all that it needs is known.
    fn step(&mut self, rank: Rank) -> bool {
        let steps = &self.plans[rank].steps;
        let done = &self.rounds[rank];
        let Some(step) = steps.get(done.len()) else {
            return false;
        };
        let is_in_order = matches!(self.plans[rank].order, super::Order::InOrder);
        let before = steps.iter().zip(done);
        let follows = before.filter(|(earlier, _)| is_in_order || step.must_follow(earlier));
        let ready = follows.map(|(_, round)| *round).max().unwrap_or(0);
        let round = match *step {
            Step::Send { to, .. } => {
                let sent = self.sent.entry((rank, to)).or_default();
                sent.push_back(ready + 1);
                ready + 1
            }
            Step::Recv { from, .. } | Step::Fold { from, .. } => {
                let sent = self.sent.get_mut(&(from, rank));
                let Some(arrives) = sent.and_then(VecDeque::pop_front) else {
                    return false;
                };
                ready.max(arrives)
            }
            Step::Signal { half, what, to } => {
                for to in to.iter() {
                    let set = self.set.entry((rank, to, half, what)).or_default();
                    set.push_back(ready + 1);
                }
                ready + 1
            }
            Step::Wait {
                half,
                what,
                from,
                take,
            } => {
                let key = |from| (from, rank, half, what);
                let first = |from| match self.set.get(&key(from)) {
                    // All halves are empty at first.
                    None => (what == Semaphore::Empty).then_some(0),
                    Some(set) => set.front().copied(),
                };
                let Some(set) = from.iter().map(first).collect::<Option<Vec<_>>>() else {
                    return false;
                };
                for taken in take.iter() {
                    self.set.entry(key(taken)).or_default().pop_front();
                }
                set.into_iter().fold(ready, usize::max)
            }
            Step::Copy { .. }
            | Step::Reduce { .. }
            | Step::Finish { .. }
            | Step::ReduceAll { .. } => ready,
        };
        self.rounds[rank].push(round);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algorithm, Collective, Counts, Shape, build};

    fn last_round(algorithm: Algorithm, collective: Collective, world: usize) -> usize {
        let plan = |rank| {
            let shape = Shape {
                collective,
                rank,
                world,
                counts: Counts::Even(64),
                root: 0,
                in_place: false,
                widen: false,
            };
            build(algorithm, &shape).expect("a plan")
        };
        let plans: Vec<_> = (0..world).map(plan).collect();
        let rounds = rounds(&plans).expect("they complete");
        rounds.into_iter().flatten().max().unwrap_or(0)
    }

    #[test]
    fn rounds_are_as_many_as_theory_has_them() {
        for world in [2_usize, 4, 8, 16] {
            let log = world.ilog2() as usize;
            let all_reduce = |algorithm| last_round(algorithm, Collective::AllReduce, world);
            assert_eq!(all_reduce(Algorithm::Ring), 2 * (world - 1));
            assert_eq!(all_reduce(Algorithm::RecursiveDoubling), log);
            assert_eq!(all_reduce(Algorithm::Halving), 2 * log);
            assert_eq!(all_reduce(Algorithm::Direct), 1);
            assert_eq!(all_reduce(Algorithm::TwoShot), 2);
            let barrier = last_round(Algorithm::Bruck, Collective::Barrier, world);
            assert_eq!(barrier, log);
        }
    }

    #[test]
    fn plans_that_wait_for_each_other_have_none() {
        let receive = |from| Plan {
            steps: vec![Step::Recv {
                from,
                dst: crate::Span::new(crate::Buffer::Output, 0, 1),
                wire: crate::Wire::Element,
            }],
            scratch: 0,
            order: crate::Order::Overlapping,
            lends: false,
        };
        assert_eq!(rounds(&[receive(1), receive(0)]), None);
    }
}
