//! Choices that are known to be right, and costs on their way between ranks.

use proptest::prelude::*;

use super::*;
use crate::applicable;
use crate::select::{Choice, choose, select};

fn shape(collective: Collective, world: usize, count: usize) -> Shape<'static> {
    Shape {
        collective,
        rank: 0,
        world,
        counts: Counts::Even(count),
        root: 0,
        in_place: false,
        widen: false,
    }
}

/// The choice for float32 at typical costs, `bytes` being those of the whole.
fn chosen(collective: Collective, topology: &Topology, bytes: usize) -> Algorithm {
    let world = topology.host_of.len();
    let count = (bytes / 4 / collective.blocks(world)).max(1);
    select(
        &shape(collective, world, count),
        4,
        topology,
        &Costs::TYPICAL,
    )
}

#[test]
fn a_few_bytes_go_directly_where_ranks_share_cores() {
    let crowded = Topology::one_host(8, 2);
    for collective in Collective::ALL {
        let expected = match collective {
            Collective::Barrier => Algorithm::Bruck,
            _ => Algorithm::Direct,
        };
        assert_eq!(chosen(collective, &crowded, 8), expected, "{collective}");
    }
}

#[test]
fn many_bytes_are_reduced_in_parts() {
    for (world, cores) in [(2, 2), (4, 2), (8, 2), (4, 4), (16, 16), (64, 64)] {
        let chosen = chosen(
            Collective::AllReduce,
            &Topology::one_host(world, cores),
            64 << 20,
        );
        // Of two ranks, halving does the same with a copy less.
        assert!(
            matches!(chosen, Algorithm::TwoShot | Algorithm::Ring)
                || (world == 2 && chosen == Algorithm::Halving),
            "{world} ranks, {cores} cores: {chosen}"
        );
    }
}

#[test]
fn two_ranks_sum_in_place_while_the_cache_holds_it() {
    let two = Topology::one_host(2, 2);
    for bytes in [16 << 10, 256 << 10, 4 << 20, 8 << 20] {
        let chosen = chosen(Collective::AllReduce, &two, bytes);
        assert_eq!(chosen, Algorithm::TwoShot, "{bytes} bytes");
    }
    assert_eq!(
        chosen(Collective::AllReduce, &two, 16 << 20),
        Algorithm::Halving
    );
}

#[test]
fn large_worlds_on_many_hosts_do_not_talk_to_everyone() {
    for topology in [
        Topology::even(64, 8, 8),
        Topology::even(512, 1, 8),
        Topology::even(1024, 4, 2),
    ] {
        for collective in [
            Collective::AllReduce,
            Collective::Broadcast,
            Collective::AllGather,
            Collective::ReduceScatter,
            Collective::Barrier,
        ] {
            for bytes in [8, 64 << 10, 64 << 20] {
                let chosen = chosen(collective, &topology, bytes);
                assert_ne!(
                    chosen,
                    Algorithm::Direct,
                    "{collective} of {bytes} bytes, {} ranks",
                    topology.host_of.len()
                );
            }
        }
    }
}

#[test]
fn more_bytes_take_no_less_and_a_faster_machine_no_more() {
    let topologies = [
        Topology::one_host(8, 2),
        Topology::one_host(6, 8),
        Topology::even(4, 3, 2),
    ];
    let faster = Costs {
        turn: Costs::TYPICAL.turn / 2.0,
        fold: Costs::TYPICAL.fold / 2.0,
        ..Costs::TYPICAL
    };
    for topology in &topologies {
        for collective in Collective::ALL {
            for algorithm in Algorithm::ALL {
                let world = topology.host_of.len();
                let mut least = 0.0;
                // As long as messages neither begin to be lent nor to go in other pieces.
                for count in [0, 1, 100, 1000, 4000] {
                    let shape = shape(collective, world, count);
                    if !applicable(algorithm, &shape) {
                        continue;
                    }
                    let seconds = predict(algorithm, &shape, 4, topology, &Costs::TYPICAL);
                    assert!(seconds.is_finite() && seconds >= least, "{algorithm}");
                    assert!(predict(algorithm, &shape, 4, topology, &faster) <= seconds);
                    least = seconds;
                }
            }
        }
    }
}

#[test]
fn counts_without_end_are_chosen_for() {
    for collective in Collective::ALL {
        for world in [1, 2, 7, 4096] {
            let shape = shape(collective, world, usize::MAX);
            let topology = Topology::one_host(world, 1);
            let chosen = select(&shape, 16, &topology, &Costs::TYPICAL);
            assert!(applicable(chosen, &shape) || chosen == Algorithm::Direct);
        }
    }
}

proptest! {
    #[test]
    fn costs_come_back_near_what_they_were(
        turn in 0.2e-6..12.8e-6_f64,
        rates in (0.5e9..64e9_f64, 0.5e9..64e9_f64),
        cache in 1e6..1e9_f64,
        remote_latency in 5e-6..0.3_f64,
        cores in 1..70_000_usize,
    ) {
        let (copy, fold) = (1.0 / rates.0, 1.0 / rates.1);
        let told = Costs { turn, copy, fold, cache, remote_latency, ..Costs::TYPICAL }.rounded(cores);
        prop_assert_eq!(Rounded::from_bytes(told.to_bytes()), Some(told));
        prop_assert_eq!(told.cores(), cores.min(65_535));
        let heard = told.costs();
        for (heard, measured) in [
            (heard.turn, turn),
            (heard.copy, copy),
            (heard.fold, fold),
            (heard.cache, cache),
            (heard.remote_latency, remote_latency),
        ] {
            prop_assert!((0.9..1.1).contains(&(heard / measured)), "{heard} for {measured}");
        }
        // Told on, they stay what they are.
        prop_assert_eq!(heard.rounded(told.cores()), told);
    }

    #[test]
    fn a_rate_comes_back_near_what_it_was(rate in 125e3..25e9_f64, absurd in any::<f64>()) {
        let told = Costs::TYPICAL.rounded(1);
        prop_assert_eq!(told.rate(), None);
        let told = told.with_rate(rate);
        prop_assert_eq!(Rounded::from_bytes(told.to_bytes()), Some(told));
        let heard = told.rate().expect("it is known");
        prop_assert!((0.9..1.1).contains(&(heard / rate)), "{heard} for {rate}");
        prop_assert_eq!(told.with_rate(heard), told);
        prop_assert_eq!(told.costs().remote_byte, 1.0 / heard);
        let heard = told.with_rate(absurd).costs().remote_byte;
        prop_assert!((1.0 / 26e9..1e-5).contains(&heard));
    }

    #[test]
    fn absurd_costs_are_brought_into_range(measured in any::<[f64; 5]>(), cores in any::<usize>()) {
        let [turn, copy, fold, cache, remote_latency] = measured;
        let heard = Costs { turn, copy, fold, cache, remote_latency, ..Costs::TYPICAL }.rounded(cores).costs();
        prop_assert!((0.19e-6..13e-6).contains(&heard.turn));
        prop_assert!((1.0 / 65e9..1.0 / 0.49e9).contains(&heard.copy));
        prop_assert!((1.0 / 65e9..1.0 / 0.49e9).contains(&heard.fold));
        prop_assert!((1e6..1.1e9).contains(&heard.cache));
        prop_assert!((4.9e-6..0.4).contains(&heard.remote_latency));
        prop_assert!((1.0 / 1.3e9..1e-6).contains(&heard.remote_byte));
    }

    #[test]
    fn bytes_are_costs_or_refused(bytes in any::<[u8; Rounded::LENGTH]>()) {
        if let Some(told) = Rounded::from_bytes(bytes) {
            prop_assert_eq!(told.to_bytes(), bytes);
            let costs = told.costs();
            prop_assert!(costs.turn > 0.0 && costs.copy > 0.0 && costs.fold > 0.0);
        }
    }
}

/// Bytes of the longer buffer from which on `algorithm` is chosen at every size.
fn threshold(algorithm: Algorithm, collective: Collective, topology: &Topology) -> f64 {
    let world = topology.host_of.len();
    let is_chosen = |bytes: f64| {
        let count = match collective {
            Collective::AllGather | Collective::ReduceScatter => bytes / 4.0 / world as f64,
            _ => bytes / 4.0,
        };
        let shape = shape(collective, world, count as usize);
        let choice = choose(&shape, 4, topology, &Costs::TYPICAL, None);
        match algorithm {
            Algorithm::InPlace => choice.in_place,
            _ => choice.windows,
        }
    };
    // Quarters of doublings from 1 KiB to 256 MiB.
    let sizes = (40..112).map(|step| f64::from(step) / 4.0).map(f64::exp2);
    sizes
        .rev()
        .take_while(|bytes| is_chosen(*bytes))
        .last()
        .unwrap_or(f64::INFINITY)
}

/// The sizes from which on windows were found faster than messages, with private memory on two cores that share a cache.
#[test]
fn windows_are_chosen_where_they_were_measured_to_be_faster() {
    use Collective::{AllGather, AllReduce, Broadcast, Reduce, ReduceScatter};
    const KIB: f64 = 1024.0;
    let measured = [
        (AllReduce, 2, 256.0),
        (AllReduce, 4, 16.0),
        (AllReduce, 8, 8.0),
        (Reduce, 2, 256.0),
        (Reduce, 4, 64.0),
        (ReduceScatter, 2, 512.0),
        (ReduceScatter, 4, 16.0),
        (Broadcast, 2, 4096.0),
        (Broadcast, 4, 1024.0),
        (AllGather, 2, 16384.0),
        (AllGather, 4, 16384.0),
    ];
    for (collective, world, kib) in measured {
        let topology = Topology::one_host(world, 2);
        let predicted = threshold(Algorithm::Windows, collective, &topology) / KIB;
        let ratio = predicted / kib;
        println!("{collective} {world} ranks: from {predicted:.0} KiB on, measured {kib:.0}");
        assert!(
            (0.24..4.1).contains(&ratio),
            "{collective}, {world} ranks: from {predicted:.0} KiB on, measured {kib:.0}"
        );
    }
}

/// Where each slice has 16 KiB, memory decides and no longer the messages.
#[test]
fn in_place_is_chosen_for_slices_of_some_kilobytes() {
    for (world, cores) in [(2, 2), (4, 2), (8, 2), (4, 4), (16, 16)] {
        let topology = Topology::one_host(world, cores);
        let slice = threshold(Algorithm::InPlace, Collective::AllReduce, &topology) / world as f64;
        assert!(
            (4096.0..70_000.0).contains(&slice),
            "{world} ranks, {cores} cores: {slice}"
        );
    }
}

#[test]
fn an_algorithm_that_is_asked_for_is_chosen() {
    let host = Topology::one_host(4, 2);
    let request = shape(Collective::AllReduce, 4, 1 << 20);
    let ask = |topology: &Topology, shape: &Shape, wanted| {
        choose(shape, 4, topology, &Costs::TYPICAL, Some(wanted))
    };
    for algorithm in Algorithm::ALL {
        let choice = ask(&host, &request, algorithm);
        assert_eq!(choice.windows, algorithm == Algorithm::Windows);
        assert_eq!(choice.in_place, algorithm == Algorithm::InPlace);
        if applicable(algorithm, &request) {
            assert_eq!(choice, Choice::messages(algorithm));
        }
        // Between hosts there is no shared memory, and a gather has no plan through windows.
        let apart = ask(&Topology::even(2, 2, 2), &request, algorithm);
        assert!(!apart.needs_agreement());
        let gather = shape(Collective::Gather, 4, 1 << 20);
        assert!(!ask(&host, &gather, algorithm).needs_agreement());
    }
}

/// The bytes of the elements that cross the busiest host's interface, out of it or into it, in the plans of all ranks.
fn crossing(algorithm: Algorithm, shape: &Shape, topology: &Topology) -> f64 {
    let hosts = &topology.host_of;
    let mut ways = vec![[0_usize; 2]; hosts.len()];
    for rank in 0..shape.world {
        let shape = Shape { rank, ..*shape };
        let plan = crate::build_on(algorithm, &shape, crate::DEFAULT_CHUNK, topology);
        for step in plan.expect("a plan").steps {
            if let crate::Step::Send { to, src } = step
                && hosts[to] != hosts[rank]
            {
                ways[hosts[rank]][0] += 4 * src.len;
                ways[hosts[to]][1] += 4 * src.len;
            }
        }
    }
    ways.into_iter().flatten().max().unwrap_or(0) as f64
}

/// Where no rank waits for the first piece to come through others, which is priced as bytes, too.
#[test]
fn bytes_between_hosts_are_those_of_the_plans() {
    let waits = |collective, algorithm| {
        let along = matches!(collective, Collective::Broadcast | Collective::Reduce)
            && algorithm != Algorithm::Direct;
        let chain = matches!(collective, Collective::Scan | Collective::Exscan)
            && algorithm == Algorithm::Ring;
        along || chain || (collective, algorithm) == (Collective::AllReduce, Algorithm::Tree)
    };
    let mut wrong = Vec::new();
    for (hosts, ranks) in [(2, 1), (2, 3), (2, 4), (2, 5), (3, 2), (4, 3), (4, 4)] {
        let topology = Topology::even(hosts, ranks, 2);
        let world = hosts * ranks;
        for collective in Collective::ALL {
            let shape = shape(collective, world, 240 * world);
            for algorithm in Algorithm::ALL {
                let serves = crate::applicable_on(algorithm, &shape, &topology);
                if !serves || collective == Collective::Barrier || waits(collective, algorithm) {
                    continue;
                }
                let place = Placed::of(&topology, world);
                let bill = bill(algorithm, &shape, 4, place, &Costs::TYPICAL);
                let priced = bill.expect("counts that all ranks know").wire;
                let ratio = priced / crossing(algorithm, &shape, &topology);
                // Guests come and go, so that each way of an interface is idle for one of the two; and the runs of Bruck's
                // algorithm are at most half of the blocks.
                if !(0.8..1.9).contains(&ratio) {
                    wrong.push(format!(
                        "{collective} {algorithm} {hosts} x {ranks}: {ratio:.2}"
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Where ranks share hosts, what crosses between the hosts decides, and hierarchy sends least.
#[test]
fn ranks_that_share_hosts_reduce_by_hierarchy() {
    let round_robin = Topology::of_hosts(vec![0, 1, 0, 1, 0, 1, 0, 1], 2);
    let uneven = Topology::of_hosts(vec![0, 0, 0, 1], 2);
    let topologies = [
        Topology::even(2, 2, 2),
        Topology::even(2, 4, 2),
        Topology::even(4, 2, 2),
        Topology::even(8, 8, 8),
        round_robin,
        uneven,
    ];
    for topology in &topologies {
        for bytes in [1 << 20, 16 << 20, 256 << 20] {
            let chosen = chosen(Collective::AllReduce, topology, bytes);
            // With hosts and ranks in powers of two, numbered in blocks, halving crosses as little.
            let is_best = match chosen {
                Algorithm::Hierarchical => true,
                Algorithm::Halving => topology.host_of.is_sorted() && topology.host_of[1] == 0,
                _ => false,
            };
            assert!(is_best, "{topology:?}, {bytes}: {chosen}");
        }
    }
}

/// The bytes that a connection has under way bound its rate, which is low where a round trip takes 40 ms: few rounds are worth
/// more than few bytes up to larger messages, but not for ever.
#[test]
fn hosts_that_are_far_apart_save_rounds_first_and_bytes_later() {
    let far = Costs {
        remote_latency: 20e-3,
        ..Costs::TYPICAL
    };
    let far = far.rounded(2).costs();
    assert!((far.remote_latency / 20e-3 - 1.0).abs() < 0.1, "{far:?}");
    assert!(far.remote_byte > 5.0 * Costs::TYPICAL.remote_byte);
    let near = Costs::TYPICAL.rounded(2).costs();
    assert_eq!(near.remote_byte, Costs::TYPICAL.remote_byte);
    assert_eq!(near.remote_latency, Costs::TYPICAL.remote_latency);
    let topology = Topology::even(4, 1, 2);
    let chosen = |costs: &Costs, bytes: usize| {
        let shape = shape(Collective::AllReduce, 4, bytes / 4);
        select(&shape, 4, &topology, costs)
    };
    let cheap = [Algorithm::TwoShot, Algorithm::Halving, Algorithm::Ring];
    assert!(cheap.contains(&chosen(&near, 256 << 10)));
    assert!(!cheap.contains(&chosen(&far, 256 << 10)));
    assert!(cheap.contains(&chosen(&far, 256 << 20)));
    let pairs = Topology::even(2, 2, 2);
    let shape = shape(Collective::AllReduce, 4, 4 << 20);
    let chosen = select(&shape, 4, &pairs, &far);
    assert!(
        matches!(chosen, Algorithm::Hierarchical | Algorithm::Halving),
        "{chosen}"
    );
}

/// On one host with two sockets and a rank on each core, what crosses between them decides in the same way.
#[test]
fn ranks_on_two_sockets_cross_between_them_once() {
    let sockets = |ranks: usize| Topology {
        node_of: (0..2 * ranks).map(|rank| rank / ranks).collect(),
        ..Topology::one_host(2 * ranks, 2 * ranks)
    };
    let price = |topology: &Topology, algorithm| {
        let shape = shape(Collective::AllReduce, topology.host_of.len(), 64 << 20);
        predict(algorithm, &shape, 1, topology, &Costs::TYPICAL)
    };
    let (two, one) = (sockets(32), Topology::one_host(64, 64));
    for algorithm in [Algorithm::TwoShot, Algorithm::Windows] {
        let more = price(&two, algorithm) - price(&one, algorithm);
        assert!(more > 0.0, "{algorithm} crosses");
        let by_levels = price(&two, Algorithm::Hierarchical);
        assert!(by_levels < price(&two, algorithm), "{algorithm}");
    }
    let chosen = |topology: &Topology, bytes| chosen(Collective::AllReduce, topology, bytes);
    assert_eq!(chosen(&two, 64 << 20), Algorithm::Hierarchical);
    assert_ne!(chosen(&one, 64 << 20), Algorithm::Hierarchical);
    // A rank on each socket has none to share its way with.
    assert_ne!(chosen(&sockets(1), 64 << 20), Algorithm::Hierarchical);
}

#[test]
fn a_root_that_is_alone_on_its_host_sends_each_byte_once() {
    let (three_and_one, costs) = (
        Topology::of_hosts(vec![0, 0, 0, 1], 2),
        Costs {
            remote_byte: 8e-9,
            ..Costs::TYPICAL
        },
    );
    let shape = |root| Shape {
        root,
        ..shape(Collective::Broadcast, 4, 4 << 20)
    };
    let price = |algorithm, root| predict(algorithm, &shape(root), 4, &three_and_one, &costs);
    let line = (16 << 20) as f64 * costs.remote_byte;
    // Three others are elsewhere, or one is.
    for (root, sent) in [(3, 3.0), (0, 1.0)] {
        let lines = price(Algorithm::Direct, root) / line;
        assert!((sent..sent + 0.2).contains(&lines), "{root}: {lines}");
        let lines = price(Algorithm::Hierarchical, root) / line;
        assert!((1.0..1.2).contains(&lines), "{root}: {lines}");
    }
    let back = price(Algorithm::TwoShot, 0) / line;
    assert!(
        back > 1.4,
        "a slice goes to the other host and back: {back}"
    );
}
