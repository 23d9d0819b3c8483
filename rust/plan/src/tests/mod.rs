//! Every algorithm, proved by [`verify`] over worlds, counts, roots and flags.

mod correctness;
mod traffic;

use super::check::{Report, verify};
use super::*;
use crate::types::{Collective, Rank};

/// Counts of a request for all ranks, from which each rank's shape borrows.
#[derive(Clone, Debug)]
enum AllCounts {
    Even(usize),
    PerRank(Vec<usize>),
    /// `[from][to]`.
    PerPair(Vec<Vec<usize>>),
}

/// A request, on all ranks.
#[derive(Clone, Debug)]
struct Request {
    collective: Collective,
    world: usize,
    counts: AllCounts,
    root: Rank,
    in_place: bool,
    widen: bool,
}

impl Request {
    fn even(collective: Collective, world: usize, count: usize) -> Self {
        Self {
            collective,
            world,
            counts: AllCounts::Even(count),
            root: 0,
            in_place: false,
            widen: false,
        }
    }

    /// Calls `f` with the shapes of all ranks.
    fn with_shapes<T>(&self, f: impl FnOnce(&[Shape]) -> T) -> T {
        let received: Vec<Vec<usize>> = match &self.counts {
            AllCounts::PerPair(sent) => (0..self.world)
                .map(|to| sent.iter().map(|row| row[to]).collect())
                .collect(),
            _ => Vec::new(),
        };
        let shapes: Vec<Shape> = (0..self.world)
            .map(|rank| Shape {
                collective: self.collective,
                rank,
                world: self.world,
                counts: match &self.counts {
                    AllCounts::Even(count) => Counts::Even(*count),
                    AllCounts::PerRank(counts) => Counts::PerRank(counts),
                    AllCounts::PerPair(sent) => Counts::PerPair {
                        send: &sent[rank],
                        recv: &received[rank],
                    },
                },
                root: self.root,
                in_place: self.in_place,
                widen: self.widen,
            })
            .collect();
        f(&shapes)
    }

    fn plans(&self, algorithm: Algorithm, chunk: usize) -> Option<Vec<Plan>> {
        self.with_shapes(|shapes| {
            let plans: Vec<Option<Plan>> = shapes
                .iter()
                .map(|shape| build_chunked(algorithm, shape, chunk))
                .collect();
            let built = plans.iter().flatten().count();
            assert!(
                built == 0 || built == self.world,
                "ranks disagree: {self:?}"
            );
            plans.into_iter().collect()
        })
    }

    /// Proves one algorithm for this request; false when it does not apply.
    fn prove(&self, algorithm: Algorithm, chunk: usize, window: usize) -> Option<Report> {
        let plans = self.plans(algorithm, chunk)?;
        Some(self.with_shapes(|shapes| {
            verify(&plans, shapes, window)
                .unwrap_or_else(|problem| panic!("{algorithm}: {problem}\n{self:?}"))
        }))
    }
}

/// All but messages, which have no plan.
fn planned() -> impl Iterator<Item = Collective> {
    let is_message = |it: &Collective| matches!(it, Collective::Send | Collective::Recv);
    Collective::ALL
        .into_iter()
        .filter(move |it| !is_message(it))
}

/// Uneven counts, zeros among them.
fn uneven(collective: Collective, world: usize, seed: usize) -> Option<AllCounts> {
    let row = |salt: usize| -> Vec<usize> {
        (0..world)
            .map(|i| (i * 7 + salt * 5 + seed * 3) % 11 % 4)
            .collect()
    };
    match collective {
        Collective::AllGather
        | Collective::ReduceScatter
        | Collective::Gather
        | Collective::Scatter => Some(AllCounts::PerRank(row(0))),
        Collective::AllToAll => Some(AllCounts::PerPair((0..world).map(row).collect())),
        _ => None,
    }
}

/// Every combination of flags and roots for `counts`.
fn variants(collective: Collective, world: usize, counts: &AllCounts) -> Vec<Request> {
    let roots = if collective.has_root() { world } else { 1 };
    let mut requests = Vec::new();
    for root in 0..roots {
        for in_place in [false, true] {
            for widen in [false, true] {
                if (in_place && !collective.may_be_in_place()) || (widen && !collective.reduces()) {
                    continue;
                }
                requests.push(Request {
                    collective,
                    world,
                    counts: counts.clone(),
                    root,
                    in_place,
                    widen,
                });
            }
        }
    }
    requests
}

fn prove_world(collective: Collective, world: usize) -> usize {
    let mut counts: Vec<usize> = vec![0, 1, 2, 3, 5, 7, world - 1, world, world + 1, 17];
    counts.sort_unstable();
    counts.dedup();
    let evens = counts.into_iter().map(AllCounts::Even);
    let mut proved = 0;
    for counts in evens.chain((0..3).filter_map(|seed| uneven(collective, world, seed))) {
        for request in variants(collective, world, &counts) {
            for algorithm in Algorithm::ALL {
                let chunk = 1 + proved % 3;
                proved += usize::from(request.prove(algorithm, chunk, MIN_WINDOW).is_some());
            }
        }
    }
    proved
}
