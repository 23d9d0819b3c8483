//! Every algorithm, proved by [`verify`] over worlds, counts, roots and flags.

use proptest::prelude::*;

use super::check::{Report, verify};
use super::cost::Costs;
use super::select::select;
use super::topology::Topology;
use super::*;
use crate::types::Rank;

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

const PLANNED: [Collective; 9] = [
    Collective::AllReduce,
    Collective::Reduce,
    Collective::Broadcast,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Gather,
    Collective::Scatter,
    Collective::AllToAll,
    Collective::Barrier,
];

fn reduces(collective: Collective) -> bool {
    matches!(
        collective,
        Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter
    )
}

fn may_be_in_place(collective: Collective) -> bool {
    matches!(
        collective,
        Collective::AllReduce | Collective::Reduce | Collective::AllGather
    )
}

fn has_root(collective: Collective) -> bool {
    matches!(
        collective,
        Collective::Reduce | Collective::Broadcast | Collective::Gather | Collective::Scatter
    )
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
    let roots = if has_root(collective) { world } else { 1 };
    let mut requests = Vec::new();
    for root in 0..roots {
        for in_place in [false, true] {
            for widen in [false, true] {
                if (in_place && !may_be_in_place(collective)) || (widen && !reduces(collective)) {
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

#[test]
fn sends_may_come_first() {
    for collective in PLANNED {
        for world in 2..=9 {
            for count in [1, world + 1] {
                for request in variants(collective, world, &AllCounts::Even(count)) {
                    for algorithm in Algorithm::ALL {
                        let Some(plans) = request.plans(algorithm, 3) else {
                            continue;
                        };
                        let plans: Vec<Plan> = plans.into_iter().map(Plan::sends_first).collect();
                        request.with_shapes(|shapes| {
                            verify(&plans, shapes, 64).unwrap_or_else(|problem| {
                                panic!("{algorithm}: {problem}\n{request:?}")
                            });
                        });
                    }
                }
            }
        }
    }
    let request = Request::even(Collective::AllReduce, 4, 1);
    let plans = request.plans(Algorithm::Direct, 8).expect("plans");
    let first = &plans[3].clone().sends_first().steps[..3];
    assert!(first.iter().all(|step| matches!(step, Step::Send { .. })));
}

#[test]
fn the_last_receives_are_those_no_step_reads_again() {
    for collective in PLANNED {
        for algorithm in Algorithm::ALL {
            let request = Request::even(collective, 5, 11);
            for plan in request.plans(algorithm, 2).into_iter().flatten() {
                let last = plan.last_receives();
                for (i, step) in plan.steps.iter().enumerate() {
                    let reads_it = |later: &Step| {
                        let mut read = later.reads().into_iter().flatten();
                        step.writes()
                            .is_some_and(|written| read.any(|span| span.overlaps(&written)))
                    };
                    let is_receive = matches!(step, Step::Recv { .. });
                    let expected = is_receive && !plan.steps[i + 1..].iter().any(reads_it);
                    assert_eq!(
                        last[i], expected,
                        "{collective} {algorithm}, step {i}: {step:?}"
                    );
                }
            }
        }
    }
}

/// One test per collective, so that they run side by side.
macro_rules! right_in_worlds_up_to_16 {
    ($($name:ident: $collective:ident),* $(,)?) => {$(
        #[test]
        fn $name() {
            for world in 1..=16 {
                let proved = prove_world(Collective::$collective, world);
                assert!(proved > 0, "nothing proved in a world of {world}");
            }
        }
    )*};
}

right_in_worlds_up_to_16! {
    all_reduce_is_right: AllReduce,
    reduce_is_right: Reduce,
    broadcast_is_right: Broadcast,
    all_gather_is_right: AllGather,
    reduce_scatter_is_right: ReduceScatter,
    gather_is_right: Gather,
    scatter_is_right: Scatter,
    all_to_all_is_right: AllToAll,
    barrier_is_right: Barrier,
}

/// A counts vector of `world` entries, many of them zero.
fn some_counts(world: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![2 => Just(0usize), 3 => 1..6usize], world)
}

fn any_request() -> impl Strategy<Value = Request> {
    let collective = prop::sample::select(PLANNED.to_vec());
    (
        collective,
        1..=64usize,
        any::<[bool; 3]>(),
        any::<prop::sample::Index>(),
    )
        .prop_flat_map(|(collective, world, [in_place, widen, even], root)| {
            let counts = match collective {
                Collective::AllToAll if !even => prop::collection::vec(some_counts(world), world)
                    .prop_map(AllCounts::PerPair)
                    .boxed(),
                _ if !even && uneven(collective, world, 0).is_some() => {
                    some_counts(world).prop_map(AllCounts::PerRank).boxed()
                }
                // What n ranks gather is n times as long, so the blocks are kept short.
                Collective::AllReduce | Collective::Reduce | Collective::Broadcast => {
                    (0..=3 * world).prop_map(AllCounts::Even).boxed()
                }
                _ => (0..=3usize).prop_map(AllCounts::Even).boxed(),
            };
            let root = if has_root(collective) {
                root.index(world)
            } else {
                0
            };
            counts.prop_map(move |counts| Request {
                collective,
                world,
                counts,
                root,
                in_place: in_place && may_be_in_place(collective),
                widen: widen && reduces(collective),
            })
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_algorithm_is_right_in_worlds_up_to_64(
        request in any_request(),
        chunk in 1..40usize,
        window in prop::sample::select(vec![2usize, 3, 8]),
    ) {
        let proved = Algorithm::ALL
            .into_iter()
            .filter(|&algorithm| request.prove(algorithm, chunk, window).is_some())
            .count();
        prop_assert!(proved > 0);
    }

    #[test]
    fn the_selected_algorithm_applies_and_is_the_same_on_all_ranks(
        request in any_request(),
        element_size in 1..=16usize,
        ranks_per_host in 1..=8usize,
        scale in prop::sample::select(vec![1usize, 1000, 1_000_000]),
        measured in any::<[f64; 3]>(),
        cores in 1..=16usize,
    ) {
        let [turn, copy, fold] = measured;
        let costs = Costs { turn, copy, fold, ..Costs::TYPICAL }.rounded(cores).costs();
        let topology = Topology {
            host_of: (0..request.world).map(|rank| rank / ranks_per_host).collect(),
            cores_per_host: cores,
        };
        let mut request = request;
        if let AllCounts::Even(count) = &mut request.counts {
            *count *= scale;
        }
        request.with_shapes(|shapes| {
            let first = select(&shapes[0], element_size, &topology, &costs);
            for shape in shapes {
                prop_assert!(applicable_on(first, shape, &topology));
                prop_assert_eq!(select(shape, element_size, &topology, &costs), first);
            }
            Ok(())
        })?;
    }
}

#[test]
fn larger_worlds_complete_too() {
    for world in [65, 96, 128] {
        for collective in [
            Collective::AllReduce,
            Collective::Broadcast,
            Collective::Barrier,
        ] {
            let request = Request::even(collective, world, 5);
            for algorithm in Algorithm::ALL {
                request.prove(algorithm, 2, MIN_WINDOW);
            }
        }
    }
}

/// The elements that each rank sends and receives.
fn volume(collective: Collective, algorithm: Algorithm, world: usize, count: usize) -> Report {
    Request::even(collective, world, count)
        .prove(algorithm, 16, MIN_WINDOW)
        .expect("the algorithm applies")
}

#[test]
fn volumes_equal_theory() {
    for world in 2..=16 {
        let (block, count) = (6, 6 * world);
        let most = |values: &[usize]| values.iter().copied().max().unwrap_or(0);

        for algorithm in [Algorithm::Ring, Algorithm::TwoShot] {
            let report = volume(Collective::AllReduce, algorithm, world, count);
            assert_eq!(
                report.sent,
                vec![2 * (world - 1) * block; world],
                "{algorithm}"
            );
            assert_eq!(report.received, report.sent, "{algorithm}");
        }
        let direct = volume(Collective::AllReduce, Algorithm::Direct, world, count);
        assert_eq!(direct.sent, vec![(world - 1) * count; world]);
        for algorithm in [Algorithm::Ring, Algorithm::Direct] {
            for collective in [Collective::ReduceScatter, Collective::AllGather] {
                let report = volume(collective, algorithm, world, block);
                assert_eq!(report.sent, vec![(world - 1) * block; world], "{algorithm}");
            }
        }
        let tree = volume(Collective::AllReduce, Algorithm::Tree, world, count);
        assert!(
            most(&tree.sent) <= 2 * count,
            "no rank forwards more than its share"
        );
        assert!(most(&tree.received) <= 2 * count);
        let chain = volume(Collective::Broadcast, Algorithm::Ring, world, count);
        assert!(most(&chain.sent) <= count && most(&chain.received) <= count);
        let bruck = volume(Collective::AllGather, Algorithm::Bruck, world, block);
        assert_eq!(bruck.received, vec![(world - 1) * block; world]);

        let rounds = world.next_power_of_two().ilog2() as usize;
        assert_eq!(
            volume(Collective::Barrier, Algorithm::Bruck, world, 0).messages,
            vec![rounds; world]
        );
        let bruck = volume(Collective::AllToAll, Algorithm::Bruck, world, block);
        assert_eq!(bruck.messages, vec![rounds; world]);
        if world.is_power_of_two() {
            let halving = volume(Collective::AllReduce, Algorithm::Halving, world, 16 * world);
            assert_eq!(halving.sent, vec![2 * (world - 1) * 16; world]);
            assert_eq!(halving.messages, vec![2 * rounds; world]);
            let doubling = volume(
                Collective::AllReduce,
                Algorithm::RecursiveDoubling,
                world,
                count,
            );
            assert_eq!(doubling.sent, vec![rounds * count; world]);
        }
    }
}

/// The directed links over which messages go: from, to.
fn links(plans: &[Plan]) -> std::collections::BTreeSet<(Rank, Rank)> {
    let sends = |(from, plan): (Rank, &Plan)| {
        let to = plan.steps.iter().filter_map(|step| match step {
            Step::Send { to, .. } => Some(*to),
            _ => None,
        });
        to.map(|to| (from, to)).collect::<Vec<_>>()
    };
    plans.iter().enumerate().flat_map(sends).collect()
}

/// A rank whose counts are all zero hears of it from the same peers as any other, where all ranks should know them.
#[test]
fn counts_of_zero_use_the_same_links_as_others() {
    let world = 6;
    let known = |collective: &Collective| !collective.is_between_pairs();
    for collective in PLANNED.into_iter().filter(known) {
        let mut pairs = vec![(AllCounts::Even(0), AllCounts::Even(world))];
        let per_rank = |counts: &[usize]| AllCounts::PerRank(counts.to_vec());
        let sparse = [&[0; 6], &[0, 0, 0, 9, 0, 0], &[5, 0, 1, 0, 0, 2]];
        if uneven(collective, world, 0).is_some() {
            pairs.extend(sparse.map(|counts| (per_rank(counts), per_rank(&[1; 6]))));
        }
        for (counts, others) in pairs {
            for request in variants(collective, world, &counts) {
                let full = Request {
                    counts: others.clone(),
                    ..request.clone()
                };
                for algorithm in Algorithm::ALL {
                    let (plans, full) = (request.plans(algorithm, 2), full.plans(algorithm, 2));
                    let (Some(plans), Some(full)) = (plans, full) else {
                        continue;
                    };
                    assert_eq!(links(&plans), links(&full), "{algorithm}: {request:?}");
                }
            }
        }
    }
}

/// Two ranks that have nothing for each other have no link, where only they know it.
#[test]
fn ranks_without_anything_for_each_other_use_no_link() {
    let world = 6;
    for collective in PLANNED.into_iter().filter(|one| one.is_between_pairs()) {
        for algorithm in Algorithm::ALL {
            for plan in Request::even(collective, world, 0)
                .plans(algorithm, 2)
                .into_iter()
                .flatten()
            {
                assert_eq!(plan, Plan::default(), "{collective} by {algorithm}");
            }
        }
    }
    // From each rank to the next one, and from rank 4 to rank 1.
    let mut counts = vec![vec![0; world]; world];
    (0..world).for_each(|rank| counts[rank][(rank + 1) % world] = 3);
    counts[4][1] = 1;
    let request = &variants(Collective::AllToAll, world, &AllCounts::PerPair(counts))[0];
    let plans = request.plans(Algorithm::Direct, 2).expect("a plan");
    let pairs = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 1), (4, 5), (5, 0)];
    assert_eq!(links(&plans), pairs.into());
    // The second rank and the fourth have something.
    let counts = AllCounts::PerRank(vec![0, 2, 0, 1, 0, 0]);
    for (collective, root, pairs) in [
        (Collective::Gather, 0, vec![(1, 0), (3, 0)]),
        (Collective::Scatter, 0, vec![(0, 1), (0, 3)]),
        (Collective::Gather, 3, vec![(1, 3)]),
        (Collective::Scatter, 3, vec![(3, 1)]),
    ] {
        let requests = variants(collective, world, &counts);
        let request = requests.iter().find(|request| request.root == root);
        let request = request.expect("a request with that root");
        let plans = request.plans(Algorithm::Direct, 2).expect("a plan");
        let expected = pairs.into_iter().collect();
        assert_eq!(links(&plans), expected, "{collective} at {root}");
    }
}

/// What is known everywhere is not sent: a few elements in slices for many ranks.
#[test]
fn empty_slices_of_a_buffer_are_left_out() {
    for algorithm in [Algorithm::Ring, Algorithm::TwoShot, Algorithm::Halving] {
        for plan in Request::even(Collective::AllReduce, 7, 3)
            .plans(algorithm, 1)
            .into_iter()
            .flatten()
        {
            let is_empty = |step: &Step| match step {
                Step::Send { src, .. } => src.len == 0,
                Step::Recv { dst, .. } | Step::Fold { dst, .. } => dst.len == 0,
                _ => false,
            };
            assert!(!plan.steps.iter().any(is_empty), "{algorithm}: {plan:?}");
        }
    }
}

#[test]
fn direct_algorithms_reduce_in_rank_order() {
    for collective in PLANNED
        .into_iter()
        .filter(|&collective| reduces(collective))
    {
        for request in variants(collective, 7, &AllCounts::Even(9)) {
            for algorithm in [Algorithm::Direct, Algorithm::TwoShot] {
                if let Some(report) = request.prove(algorithm, 1, MIN_WINDOW) {
                    assert!(report.in_rank_order, "{algorithm}: {request:?}");
                }
            }
        }
    }
    let ring = Request::even(Collective::AllReduce, 7, 9).prove(Algorithm::Ring, 1, 2);
    assert!(
        !ring.expect("applies").in_rank_order,
        "a ring begins elsewhere"
    );
}

#[test]
fn malformed_shapes_have_no_plan() {
    let shape = Shape {
        collective: Collective::AllGather,
        rank: 0,
        world: 3,
        counts: Counts::PerRank(&[1, 2]),
        root: 0,
        in_place: false,
        widen: false,
    };
    let malformed = [
        shape,
        Shape {
            counts: Counts::Even(1),
            rank: 3,
            ..shape
        },
        Shape {
            counts: Counts::Even(1),
            root: 3,
            ..shape
        },
        Shape {
            collective: Collective::AllReduce,
            counts: Counts::PerRank(&[1, 2, 3]),
            ..shape
        },
        Shape {
            collective: Collective::Send,
            counts: Counts::Even(1),
            ..shape
        },
    ];
    for shape in malformed {
        for algorithm in Algorithm::ALL {
            assert_eq!(build(algorithm, &shape), None, "{algorithm}: {shape:?}");
        }
    }
}
