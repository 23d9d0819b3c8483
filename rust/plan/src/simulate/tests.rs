//! The simulation agrees with arithmetic where arithmetic is easy, and with `select` everywhere.

use super::{CostModel, simulate};
use crate::cost::{Costs, predict};
use crate::select::select;
use crate::topology::Topology;
use crate::types::Collective;
use crate::windows::{self, Room, Shots};
use crate::{
    Algorithm, Buffer, Counts, DEFAULT_CHUNK, Plan, Shape, Span, Step, Wire, applicable_on,
    build_on, piece_length,
};

fn shapes(collective: Collective, world: usize, count: usize, widen: bool) -> Vec<Shape<'static>> {
    (0..world)
        .map(|rank| Shape {
            collective,
            rank,
            world,
            counts: Counts::Even(count),
            root: 0,
            in_place: matches!(collective, Collective::AllReduce | Collective::Reduce),
            widen,
        })
        .collect()
}

fn seconds(algorithm: Algorithm, shapes: &[Shape], cost: &CostModel) -> f64 {
    let topology = &cost.topology;
    let size = cost.element_size;
    let piece = piece_length(algorithm, &shapes[0], size, topology, &Costs::TYPICAL);
    let plan = |shape| build_on(algorithm, shape, piece, topology).expect("it applies");
    let plans: Vec<Plan> = shapes.iter().map(plan).collect();
    simulate(&plans, cost)
}

fn close_to(got: f64, want: f64, tolerance: f64) {
    assert!(
        (got / want - 1.0).abs() < tolerance,
        "{got:e} instead of {want:e} seconds"
    );
}

#[test]
fn one_message_costs_what_it_should() {
    let cost = CostModel::typical(Topology::even(2, 1, 1), 4, 4);
    let span = Span::new(Buffer::Input, 0, 300);
    let into = Span::new(Buffer::Output, 0, 300);
    let plans = [
        Plan {
            steps: vec![Step::Send { to: 1, src: span }],
            ..Plan::default()
        },
        Plan {
            steps: vec![Step::Recv {
                from: 0,
                dst: into,
                wire: Wire::Element,
            }],
            ..Plan::default()
        },
    ];
    let link = cost.across;
    let want = 2.0 * link.per_message + link.latency + 1200.0 * link.per_byte + 2.0 * cost.per_step;
    close_to(simulate(&plans, &cost), want, 1e-9);
}

#[test]
fn plans_that_wait_forever_take_forever() {
    let into = Span::new(Buffer::Output, 0, 1);
    let plan = |from| Plan {
        steps: vec![Step::Recv {
            from,
            dst: into,
            wire: Wire::Element,
        }],
        ..Plan::default()
    };
    let cost = CostModel::typical(Topology::one_host(2, 2), 4, 4);
    assert_eq!(simulate(&[plan(1), plan(0)], &cost), f64::INFINITY);
}

#[test]
fn a_long_ring_between_hosts_runs_at_the_speed_of_the_wire() {
    for world in [2, 5, 16] {
        let cost = CostModel::typical(Topology::even(world, 1, 4), 4, 4);
        let count = 16 << 20;
        let shapes = shapes(Collective::AllReduce, world, count, false);
        let bytes = 2.0 * (world - 1) as f64 / world as f64 * (4 * count) as f64;
        let got = seconds(Algorithm::Ring, &shapes, &cost);
        close_to(got, bytes * cost.across.per_byte, 0.1);
    }
}

/// Where an answer takes 40 ms, what is sent before it comes decides.
#[test]
fn pieces_are_long_enough_for_hosts_that_are_far_apart() {
    let measured = Costs {
        remote_latency: 20e-3,
        ..Costs::TYPICAL
    };
    let costs = measured.rounded(4).costs();
    for (algorithm, hosts, ranks) in [
        (Algorithm::Halving, 2, 1),
        (Algorithm::TwoShot, 3, 1),
        (Algorithm::Hierarchical, 2, 2),
        (Algorithm::Hierarchical, 3, 4),
    ] {
        let topology = Topology::even(hosts, ranks, 4);
        let shapes = shapes(Collective::AllReduce, hosts * ranks, 16 << 20, false);
        // The link is slower than what is taken for granted.
        let mut cost = CostModel::new(topology.clone(), &costs, 4, 4);
        cost.across.per_byte = 1.0 / 25e6;
        let seconds = |piece: usize| {
            let plan = |shape| build_on(algorithm, shape, piece, &topology).expect("it applies");
            let plans: Vec<Plan> = shapes.iter().map(plan).collect();
            simulate(&plans, &cost)
        };
        let far = piece_length(algorithm, &shapes[0], 4, &topology, &costs);
        let near = piece_length(algorithm, &shapes[0], 4, &topology, &Costs::TYPICAL);
        assert_eq!(near, DEFAULT_CHUNK, "{algorithm}");
        let bytes = 2.0 * (hosts - 1) as f64 / hosts as f64 * 64.0 * f64::from(1 << 20);
        let share = |seconds: f64| bytes * cost.across.per_byte / seconds;
        let (far, near) = (share(seconds(far)), share(seconds(near)));
        assert!(
            far > 0.85 && far > near,
            "{algorithm}, {hosts} hosts of {ranks}: {far:.2} of the wire, in short pieces {near:.2}"
        );
    }
}

/// However many ranks each host has, its link carries each element once each way, and little else takes time.
#[test]
fn ranks_of_a_host_share_its_wire_by_hierarchy() {
    for (hosts, ranks) in [(2, 2), (2, 4), (4, 2), (3, 8)] {
        let in_blocks = Topology::even(hosts, ranks, 8);
        let round_robin = Topology {
            host_of: (0..hosts * ranks).map(|rank| rank % hosts).collect(),
            ..in_blocks
        };
        for topology in [Topology::even(hosts, ranks, 8), round_robin] {
            for (collective, times) in [
                (
                    Collective::AllReduce,
                    2.0 * (hosts - 1) as f64 / hosts as f64,
                ),
                (Collective::Broadcast, 1.0),
                (Collective::Reduce, 1.0),
                (Collective::AllGather, ((hosts - 1) * ranks) as f64),
                (Collective::ReduceScatter, ((hosts - 1) * ranks) as f64),
            ] {
                let world = hosts * ranks;
                let count = match times <= 2.0 {
                    true => 16 << 20,
                    false => (16 << 20) / world,
                };
                let cost = CostModel::typical(topology.clone(), 4, 4);
                let shapes = shapes(collective, world, count, false);
                let bytes = times * (4 * count) as f64;
                let got = seconds(Algorithm::Hierarchical, &shapes, &cost);
                let share = bytes * cost.across.per_byte / got;
                assert!(
                    share > 0.8,
                    "{collective}, {hosts} hosts of {ranks}: {share:.2} of the wire"
                );
                let flat = seconds(Algorithm::Ring, &shapes, &cost);
                assert!(
                    got < 1.02 * flat,
                    "{collective}, {hosts} hosts of {ranks}: a ring takes {flat}, this {got}"
                );
            }
        }
    }
}

#[test]
fn a_thousand_ranks_meet_in_ten_rounds() {
    let cost = CostModel::typical(Topology::even(1024, 1, 4), 1, 1);
    let shapes = shapes(Collective::Barrier, 1024, 0, false);
    let round = cost.across.latency + 2.0 * (cost.across.per_message + cost.per_step);
    close_to(
        seconds(Algorithm::Bruck, &shapes, &cost),
        10.0 * round,
        0.01,
    );
}

/// Says so when what `select` chooses takes more than 2.5 times as long as the best algorithm there is. The simulation
/// does not know that a message inside a host is copied into a ring first, so it may find another best.
fn far_off(
    collective: Collective,
    topology: &Topology,
    count: usize,
    element_size: usize,
) -> Option<String> {
    let world = topology.host_of.len();
    let cost = CostModel::typical(topology.clone(), element_size, 4);
    let count = count.div_ceil(collective.blocks(world));
    let shapes = shapes(collective, world, count, element_size < 4);
    let (best, fastest) = Algorithm::ALL
        .into_iter()
        .filter(|&algorithm| applicable_on(algorithm, &shapes[0], topology))
        .map(|algorithm| (seconds(algorithm, &shapes, &cost), algorithm))
        .min_by(|a, b| a.0.total_cmp(&b.0))
        .expect("some algorithm applies");
    let chosen = select(&shapes[0], element_size, topology, &Costs::TYPICAL);
    let ratio = seconds(chosen, &shapes, &cost) / best;
    let hosts = topology.host_of.last().map_or(0, |last| last + 1);
    (ratio > 2.5).then(|| {
        format!(
            "{collective} of {count} x {element_size} B, {world} ranks on {hosts} hosts: {chosen} takes \
             {ratio:.1} times as long as {fastest} ({:.1} us)",
            best * 1e6
        )
    })
}

#[test]
fn the_selected_algorithm_is_near_the_best() {
    let topologies = [
        Topology::one_host(2, 2),
        Topology::one_host(4, 4),
        Topology::one_host(8, 8),
        Topology::one_host(12, 12),
        Topology::one_host(16, 16),
        Topology::one_host(32, 32),
        Topology::even(2, 1, 8),
        Topology::even(4, 1, 8),
        Topology::even(2, 4, 8),
        Topology::even(4, 8, 8),
        Topology::even(16, 1, 8),
        Topology::even(24, 1, 8),
    ];
    let mut problems = Vec::new();
    for collective in Collective::ALL {
        if matches!(collective, Collective::Send | Collective::Recv) {
            continue;
        }
        for topology in &topologies {
            for count in [1, 64, 1 << 10, 1 << 14, 1 << 18, 1 << 22] {
                for element_size in [4, 2] {
                    problems.extend(far_off(collective, topology, count, element_size));
                }
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// The closed forms know less than the simulation does, and more of what shared memory costs; but where they were far
/// off, choices would be.
#[test]
fn predictions_are_near_the_simulation() {
    let mut problems = Vec::new();
    for topology in [
        Topology::one_host(2, 2),
        Topology::one_host(8, 8),
        Topology::one_host(16, 16),
        Topology::even(2, 1, 8),
        Topology::even(2, 4, 8),
        Topology::even(16, 1, 8),
        Topology::even(16, 2, 8),
        Topology::even(10, 2, 8),
    ] {
        let world = topology.host_of.len();
        let cost = CostModel::typical(topology.clone(), 4, 4);
        for collective in Collective::ALL {
            for count in [64, 1 << 14, 1 << 20] {
                let count = count / collective.blocks(world);
                let shapes = shapes(collective, world, count, false);
                for algorithm in Algorithm::ALL {
                    if !applicable_on(algorithm, &shapes[0], &topology) {
                        continue;
                    }
                    let simulated = seconds(algorithm, &shapes, &cost);
                    let predicted = predict(algorithm, &shapes[0], 4, &topology, &Costs::TYPICAL);
                    let ratio = predicted / simulated;
                    if !(0.4..4.0).contains(&ratio) {
                        let hosts = topology.host_of.last().map_or(0, |last| last + 1);
                        problems.push(format!(
                            "{collective} of {count}, {world} ranks on {hosts} hosts, {algorithm}: {predicted:e} \
                             predicted, {simulated:e} simulated: {ratio:.2}"
                        ));
                    }
                }
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Copy-in/copy-out ends on every world, and costs what goes through memory and the way of its signals.
#[test]
fn plans_over_windows_take_their_copies_and_signals() {
    let room = Room { half: 64, align: 4 };
    for world in [2, 3, 8] {
        let cost = CostModel::typical(Topology::one_host(world, world), 4, 4);
        let time = |count: usize| {
            let shapes = shapes(Collective::AllReduce, world, count, false);
            let plan = |shape| windows::build(shape, &room, Shots::One, false).expect("a plan");
            let plans: Vec<Plan> = shapes.iter().map(plan).collect();
            simulate(&plans, &cost)
        };
        // One chunk: in, a signal, and all of it from every rank.
        let (link, bytes) = (cost.inside, 4.0 * 60.0);
        let work = bytes * (cost.memory_per_byte + world as f64 * link.per_byte);
        // Before the end a rank waits for the half, copies, signals, waits, reduces and signals.
        let want = work + link.latency + 6.0 * cost.per_step;
        close_to(time(60), want, 1e-9);
        assert!(time(600) > 5.0 * work, "{world} ranks");
        assert!(time(600).is_finite());
    }
}
