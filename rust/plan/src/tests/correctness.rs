//! Every algorithm is right on every request that it applies to.

use proptest::prelude::*;

use super::super::cost::Costs;
use super::super::select::select;
use super::super::topology::Topology;
use super::*;

#[test]
fn sends_may_come_first() {
    for collective in planned() {
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
    for collective in planned() {
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
    scan_is_right: Scan,
    exscan_is_right: Exscan,
}

/// A counts vector of `world` entries, many of them zero.
fn some_counts(world: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![2 => Just(0usize), 3 => 1..6usize], world)
}

fn any_request() -> impl Strategy<Value = Request> {
    let collective = prop::sample::select(planned().collect::<Vec<_>>());
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
                // The result of a gather by n ranks is n times as long, so the blocks are kept short.
                _ if collective.blocks(2) == 1 => (0..=3 * world).prop_map(AllCounts::Even).boxed(),
                _ => (0..=3usize).prop_map(AllCounts::Even).boxed(),
            };
            let root = if collective.has_root() {
                root.index(world)
            } else {
                0
            };
            counts.prop_map(move |counts| Request {
                collective,
                world,
                counts,
                root,
                in_place: in_place && collective.may_be_in_place(),
                widen: widen && collective.reduces(),
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
        measured in any::<[f64; 4]>(),
        cores in 1..=16usize,
        levels in 0..3,
    ) {
        let [turn, copy, fold, remote_latency] = measured;
        let costs = Costs { turn, copy, fold, remote_latency, ..Costs::TYPICAL }.rounded(cores).costs();
        let hosts: Vec<usize> = (0..request.world).map(|rank| rank / ranks_per_host).collect();
        let of_pairs: Vec<_> = (0_u16..).zip(&hosts).map(|(rank, host)| (*host, Some(rank / 2))).collect();
        let topology = match levels {
            0 => Topology { node_of: hosts, ..Topology::one_host(request.world, cores) },
            1 => Topology::of_hosts(hosts, cores),
            _ => Topology::from_places(&of_pairs, cores),
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

#[test]
fn direct_algorithms_reduce_in_rank_order() {
    for collective in planned().filter(|collective| collective.reduces()) {
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
