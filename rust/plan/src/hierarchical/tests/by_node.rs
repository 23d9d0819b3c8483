//! Three levels: memory nodes, hosts, and all of them.

use proptest::prelude::*;

use super::super::nodes::is_by_node;
use super::*;
use crate::Algorithm;
use crate::cost::{Costs, predict};
use crate::select::select;

/// All whose ranks meet by memory node inside a host.
const BY_NODE: [Collective; 3] = [
    Collective::AllReduce,
    Collective::Reduce,
    Collective::Broadcast,
];

/// A rank's host, and its node there if it is bound to one.
type Place = (usize, Option<u16>);

/// Ranks that follow each other: of each host how many are on each of its nodes. On a host with one they are bound to none.
fn in_blocks(hosts: &[&[usize]]) -> Vec<Place> {
    let of_host = |(host, nodes): (usize, &&[usize])| {
        let is_bound = nodes.len() > 1;
        let numbers = (0_u16..).zip(*nodes);
        let places = numbers.flat_map(move |(node, ranks)| {
            std::iter::repeat_n((host, is_bound.then_some(node)), *ranks)
        });
        places.collect::<Vec<_>>()
    };
    hosts.iter().enumerate().flat_map(of_host).collect()
}

/// The same ranks in another order: as cards that are dealt to `hands` players.
fn dealt(places: &[Place], hands: usize) -> Vec<Place> {
    let hand = |first: usize| places.iter().skip(first).step_by(hands).copied();
    (0..hands).flat_map(hand).collect()
}

/// A request among ranks at some places.
#[derive(Clone, Debug)]
struct Placed {
    case: Case,
    topology: Topology,
}

impl Placed {
    fn new(collective: Collective, places: &[Place], count: usize) -> Self {
        let topology = Topology::from_places(places, places.len());
        Self {
            case: Case::new(collective, &topology.host_of, count),
            topology: Topology {
                longest_at_once: 2,
                ..topology
            },
        }
    }

    /// Plans by host alone, or by memory node whether that pays or not.
    fn plans(&self, is_by_node: bool) -> Vec<Plan> {
        let plan = |shape: &Shape| {
            assert!(serves(shape, &self.topology));
            let levels = Levels::of(shape, &self.topology);
            let levels = match is_by_node {
                true => levels.by_node(&self.topology),
                false => levels,
            };
            compose(shape, self.case.chunk, &levels, build_chunked).expect("a plan")
        };
        self.case.shapes().iter().map(plan).collect()
    }

    /// Plans that are made for it unasked.
    fn built(&self) -> Vec<Plan> {
        let shapes = self.case.shapes();
        let plan = |shape| build(shape, self.case.chunk, &self.topology, build_chunked);
        let plans: Option<Vec<Plan>> = shapes.iter().map(plan).collect();
        plans.expect("plans")
    }

    fn prove(&self, plans: &[Plan], windows: &[usize]) {
        for window in windows {
            if let Err(problem) = verify(plans, &self.case.shapes(), *window) {
                panic!("{self:?}: {problem}");
            }
        }
    }

    /// Elements that leave each memory node for others of its host, and those that leave each host.
    fn leaving(&self, plans: &[Plan]) -> (Vec<usize>, Vec<usize>) {
        let Topology {
            host_of, node_of, ..
        } = &self.topology;
        let (mut nodes, mut hosts) = (vec![0; node_of.len()], vec![0; host_of.len()]);
        for (rank, plan) in plans.iter().enumerate() {
            for step in &plan.steps {
                let Step::Send { to, src } = step else {
                    continue;
                };
                if host_of[*to] != host_of[rank] {
                    hosts[host_of[rank]] += src.len;
                } else if node_of[*to] != node_of[rank] {
                    nodes[node_of[rank]] += src.len;
                }
            }
        }
        (nodes, hosts)
    }
}

/// Nodes of equal and of unequal sizes, hosts without, with more and with fewer ranks than others; in blocks and dealt.
fn examples() -> Vec<Vec<Place>> {
    let hosts: [&[&[usize]]; 7] = [
        &[&[2, 2], &[2, 2]],
        &[&[3, 1], &[1, 2]],
        &[&[2, 2], &[4]],
        &[&[3], &[2, 3], &[1, 1]],
        &[&[2, 2], &[1]],
        &[&[1, 2, 2], &[2, 1], &[3, 2]],
        &[&[4, 4], &[4, 4]],
    ];
    let both = |hosts: &&[&[usize]]| {
        let places = in_blocks(hosts);
        [dealt(&places, 3), places]
    };
    hosts.iter().flat_map(both).collect()
}

#[test]
fn the_examples_are_right() {
    for places in examples() {
        for collective in BY_NODE {
            let roots = if collective.has_root() {
                places.len()
            } else {
                1
            };
            for count in [0, 1, 5, 90] {
                for (root, flags) in (0..roots).flat_map(|root| (0..4).map(move |i| (root, i))) {
                    let mut placed = Placed::new(collective, &places, count);
                    placed.case.root = root;
                    (placed.case.in_place, placed.case.widen) = (flags & 1 > 0, flags & 2 > 0);
                    let plans = placed.plans(true);
                    placed.prove(&plans, &[MIN_WINDOW, 64]);
                    assert!(count < 5 || plans != placed.plans(false), "{placed:?}");
                }
            }
        }
    }
}

fn cases() -> impl Strategy<Value = Placed> {
    let places = prop::collection::vec((0..3_usize, 0..3_u16), 3..14);
    let collective = prop::sample::select(&BY_NODE[..]);
    let rest = (0..120_usize, any::<prop::sample::Index>(), 1..40_usize);
    (places, any::<[bool; 3]>(), collective, rest).prop_map(
        |(places, [in_place, widen, is_free], collective, (count, root, chunk))| {
            // On the last host ranks may be bound to no node.
            let bound = places
                .iter()
                .map(|(host, node)| (*host, (*host < 2 || !is_free).then_some(*node)));
            let mut placed = Placed::new(collective, &bound.collect::<Vec<_>>(), count);
            placed.case = Case {
                root: root.index(places.len()),
                in_place,
                widen,
                chunk,
                ..placed.case
            };
            placed
        },
    )
}

proptest! {
    #[test]
    fn any_places_will_do(placed in cases()) {
        prop_assume!(placed.topology.spans_hosts() && placed.topology.has_levels());
        let plans = placed.plans(true);
        placed.prove(&plans, &[MIN_WINDOW, 3, 64]);
        // As many steps as there may be sends before the first receive.
        let sends_first: Vec<Plan> = plans.into_iter().map(Plan::sends_first).collect();
        placed.prove(&sends_first, &[4096]);
    }
}

/// The checker's sets of ranks are of another kind from 129 ranks on.
#[test]
fn many_hosts_with_nodes() {
    let places = in_blocks(&[[4, 3].as_slice(); 21]);
    for places in [dealt(&places, 5), places] {
        for collective in BY_NODE {
            let placed = Placed::new(collective, &places, 90);
            let mut plans = placed.plans(true);
            placed.prove(&plans, &[MIN_WINDOW]);
            plans[100].steps.pop();
            let verdict = verify(&plans, &placed.case.shapes(), MIN_WINDOW);
            assert!(verdict.is_err(), "{collective}");
        }
    }
}

/// Each element leaves a node once for each other node of its host, and not once for each rank; a host as before.
#[test]
fn each_element_crosses_between_nodes_once() {
    const COUNT: usize = 960;
    for ranks in [2, 3, 4] {
        let nodes = [ranks, ranks];
        let places = in_blocks(&[&nodes, &nodes, &nodes]);
        for (collective, phases) in [(Collective::AllReduce, 2), (Collective::Reduce, 1)] {
            for places in [places.clone(), dealt(&places, 2)] {
                let mut placed = Placed::new(collective, &places, COUNT);
                placed.case.chunk = DEFAULT_CHUNK;
                let leaving = |is_by_node| placed.leaving(&placed.plans(is_by_node));
                let ((flat, between), (crossing, same)) = (leaving(false), leaving(true));
                assert_eq!(between, same, "{placed:?}");
                let half = COUNT / 2;
                // The ranks beside the root on the other node give it what they have.
                let gathered = usize::from(collective == Collective::Reduce) * half;
                let busiest = |nodes: &[usize]| nodes.iter().copied().max().unwrap_or(0);
                assert_eq!(busiest(&flat), phases * ranks * half + gathered);
                assert_eq!(busiest(&crossing), phases * half + gathered);
            }
        }
    }
}

#[test]
fn a_broadcast_crosses_between_nodes_less_often() {
    let places = in_blocks(&[&[4, 4], &[4, 4]]);
    for root in 0..places.len() {
        let mut placed = Placed::new(Collective::Broadcast, &places, 960);
        placed.case.root = root;
        let total = |is_by_node| -> usize {
            let (nodes, _) = placed.leaving(&placed.plans(is_by_node));
            nodes.iter().sum()
        };
        assert!(total(true) * 2 < total(false), "{placed:?}");
    }
}

/// Hosts without memory nodes have the plans that they had.
#[test]
fn hosts_without_nodes_have_two_levels() {
    for (_, _, host_of) in even_hosts() {
        for collective in BY_NODE {
            let places: Vec<_> = host_of.iter().map(|host| (*host, None)).collect();
            let placed = Placed::new(collective, &places, 1 << 20);
            let shapes = placed.case.shapes();
            assert!(
                !shapes
                    .iter()
                    .any(|shape| is_by_node(shape, &placed.topology))
            );
            let placed = Placed::new(collective, &places, 120);
            assert_eq!(placed.plans(true), placed.plans(false), "{placed:?}");
        }
    }
}

#[test]
fn long_messages_go_by_node_and_short_ones_do_not() {
    let places = in_blocks(&[&[4, 4], &[5], &[1, 2]]);
    for collective in BY_NODE {
        for (count, is_long) in [(1 << 13, false), (1 << 14, true)] {
            let mut placed = Placed::new(collective, &places, count);
            placed.case.chunk = DEFAULT_CHUNK;
            let plans = placed.built();
            assert_eq!(plans, placed.plans(is_long), "{collective} of {count}");
            assert_ne!(plans, placed.plans(!is_long), "{collective} of {count}");
            placed.prove(&plans, &[MIN_WINDOW]);
        }
    }
}

#[test]
fn nodes_are_a_level_where_that_pays() {
    use Collective::{AllReduce, Broadcast, Reduce};
    const LONG: usize = 1 << 20;
    let by_node = |collective, hosts: &[&[usize]], widen, cores| {
        let topology = Topology::from_places(&in_blocks(hosts), cores);
        let mut case = Case::new(collective, &topology.host_of, LONG);
        case.widen = widen;
        let shapes = case.shapes();
        let of_first = is_by_node(&shapes[0], &topology);
        assert!(
            shapes
                .iter()
                .all(|shape| is_by_node(shape, &topology) == of_first)
        );
        of_first
    };
    let eight: [&[usize]; 2] = [&[4, 4], &[4, 4]];
    for collective in BY_NODE {
        assert!(by_node(collective, &eight, false, 8), "{collective}");
        assert!(!by_node(collective, &eight, false, 7), "they share cores");
        // One host with nodes is enough.
        assert!(by_node(collective, &[&[8], &[4, 4]], false, 8));
        // A rank on each node has none to share its way with.
        assert!(!by_node(collective, &[&[1, 1], &[1, 1]], false, 8));
        assert!(!by_node(collective, &[&[8], &[8]], false, 8));
    }
    // Copies of two ranks' sums take as long as what does not cross; a broadcast copies nothing.
    let four: [&[usize]; 2] = [&[2, 2], &[2, 2]];
    assert!(!by_node(AllReduce, &four, false, 8) && !by_node(Reduce, &four, false, 8));
    assert!(by_node(Broadcast, &four, false, 8));
    // Wider sums cross for more.
    let six: [&[usize]; 2] = [&[3, 3], &[3, 3]];
    assert!(by_node(AllReduce, &six, false, 8) && !by_node(AllReduce, &six, true, 8));
    assert!(by_node(AllReduce, &eight, true, 8));
    assert!(!by_node(Collective::AllGather, &eight, false, 8));
}

/// By node the price is no higher than it would be flat, where all that the ranks have for each other crosses.
#[test]
fn the_cheaper_way_is_taken() {
    let costs = &Costs::TYPICAL;
    let mut ways = [0, 0];
    for (hosts, nodes, ranks) in [(2, 2, 2), (2, 2, 4), (2, 2, 16), (4, 2, 8), (2, 4, 4)] {
        let beside = nodes * ranks;
        let place = |rank: usize| (rank / beside, u16::try_from(rank % beside / ranks).ok());
        let places: Vec<Place> = (0..hosts * beside).map(place).collect();
        let bound = Topology::from_places(&places, beside);
        let free = Topology::of_hosts(bound.host_of.clone(), beside);
        for collective in BY_NODE {
            for exponent in 8..24 {
                for (widen, size) in [(false, 4), (true, 2)] {
                    let mut case = Case::new(collective, &bound.host_of, 1 << exponent);
                    case.widen = widen;
                    let shape = case.shapes()[0];
                    let price =
                        |topology| predict(Algorithm::Hierarchical, &shape, size, topology, costs);
                    let phases = 1 + usize::from(collective == Collective::AllReduce);
                    let crossing = phases * ranks * (beside - ranks) * (size << exponent) / beside;
                    let flat = price(&free) + crossing as f64 * costs.node_byte;
                    let paid = price(&bound);
                    let is_by_node = is_by_node(&shape, &bound);
                    ways[usize::from(is_by_node)] += 1;
                    let is_cheaper = paid < flat * (1.0 - 1e-9);
                    assert_eq!(is_cheaper, is_by_node, "{paid} {flat} {shape:?}");
                    assert!(is_by_node || paid < flat * (1.0 + 1e-9));
                }
            }
        }
    }
    assert!(ways.iter().all(|cases| *cases > 50), "{ways:?}");
}

/// Bytes that cross between nodes are on the bill of every algorithm.
#[test]
fn hosts_with_nodes_reduce_by_hierarchy() {
    let places = in_blocks(&[&[16, 16], &[16, 16]]);
    let bound = Topology::from_places(&places, 32);
    let free = Topology::of_hosts(bound.host_of.clone(), 32);
    let case = Case::new(Collective::AllReduce, &bound.host_of, 16 << 20);
    let shape = case.shapes()[0];
    let price = |algorithm, topology| predict(algorithm, &shape, 4, topology, &Costs::TYPICAL);
    for algorithm in [Algorithm::TwoShot, Algorithm::Ring, Algorithm::Hierarchical] {
        assert!(price(algorithm, &bound) > price(algorithm, &free));
    }
    let chosen = select(&shape, 4, &bound, &Costs::TYPICAL);
    assert_eq!(chosen, Algorithm::Hierarchical);
}
