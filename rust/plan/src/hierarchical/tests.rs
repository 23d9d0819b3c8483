use proptest::prelude::*;

use super::*;
use crate::Step;
use crate::check::{Report, verify};
use crate::types::Rank;
use crate::{DEFAULT_CHUNK, MIN_WINDOW, build_chunked};

mod by_node;

/// All that has a plan here.
const COLLECTIVES: [Collective; 9] = [
    Collective::AllReduce,
    Collective::Reduce,
    Collective::Broadcast,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::AllToAll,
    Collective::Gather,
    Collective::Scatter,
    Collective::Barrier,
];

/// A request on some hosts.
#[derive(Clone, Debug)]
struct Case {
    collective: Collective,
    host_of: Vec<usize>,
    counts: Vec<usize>,
    root: Rank,
    in_place: bool,
    widen: bool,
    chunk: usize,
}

impl Case {
    fn new(collective: Collective, host_of: &[usize], count: usize) -> Self {
        Self {
            collective,
            host_of: host_of.to_vec(),
            counts: vec![count; host_of.len()],
            root: 0,
            in_place: false,
            widen: false,
            chunk: 4,
        }
    }

    fn topology(&self) -> Topology {
        Topology {
            // Messages of both kinds: at once, and from host to host.
            longest_at_once: 2,
            ..Topology::of_hosts(self.host_of.clone(), 2)
        }
    }

    fn shapes(&self) -> Vec<Shape<'_>> {
        let is_block = matches!(
            self.collective,
            Collective::AllGather | Collective::ReduceScatter
        );
        let (can_be_in_place, reduces) =
            (self.collective.may_be_in_place(), self.collective.reduces());
        let has_root = self.collective.has_root();
        let shape = |rank| Shape {
            collective: self.collective,
            rank,
            world: self.host_of.len(),
            counts: match self.collective {
                Collective::Barrier => Counts::Even(0),
                _ if is_block && self.counts.windows(2).any(|two| two[0] != two[1]) => {
                    Counts::PerRank(&self.counts)
                }
                _ => Counts::Even(self.counts[0]),
            },
            root: if has_root { self.root } else { 0 },
            in_place: self.in_place && can_be_in_place,
            widen: self.widen && reduces,
        };
        (0..self.host_of.len()).map(shape).collect()
    }

    fn plans(&self) -> Vec<Plan> {
        let topology = self.topology();
        let plan = |shape: &Shape| {
            assert!(serves(shape, &topology));
            build(shape, self.chunk, &topology, build_chunked).expect("a plan")
        };
        self.shapes().iter().map(plan).collect()
    }

    fn proved(&self) -> Report {
        let (plans, shapes) = (self.plans(), self.shapes());
        let mut report = None;
        for window in [MIN_WINDOW, 3, 64] {
            match verify(&plans, &shapes, window) {
                Ok(proved) => report = Some(proved),
                Err(problem) => panic!("{self:?}: {problem}"),
            }
        }
        report.expect("proved just now")
    }

    /// Elements that each host sends to the others, and those that it receives.
    fn crossing(&self) -> (Vec<usize>, Vec<usize>) {
        let hosts = self.host_of.iter().max().map_or(1, |last| last + 1);
        let (mut sent, mut received) = (vec![0; hosts], vec![0; hosts]);
        for (rank, plan) in self.plans().iter().enumerate() {
            for step in &plan.steps {
                if let Step::Send { to, src } = step
                    && self.host_of[*to] != self.host_of[rank]
                {
                    sent[self.host_of[rank]] += src.len;
                    received[self.host_of[*to]] += src.len;
                }
            }
        }
        (sent, received)
    }
}

#[test]
fn the_examples_are_right() {
    for host_of in [
        vec![0, 0, 1, 1],
        vec![0, 1, 0, 1],
        vec![0, 0, 0, 0, 1, 1, 1, 1],
        vec![0, 0, 0, 1],
        vec![0, 1, 1, 2, 2, 2],
        vec![0; 9].into_iter().chain(1..11).collect(),
        (0..16).chain(0..16).chain(3..7).collect(),
    ] {
        for collective in COLLECTIVES {
            for count in [0, 1, 7, 33] {
                for (in_place, widen) in
                    [(false, false), (true, false), (false, true), (true, true)]
                {
                    let is_rooted = collective.has_root();
                    for root in [0, host_of.len() - 2]
                        .into_iter()
                        .take(1 + usize::from(is_rooted))
                    {
                        let case = Case::new(collective, &host_of, count);
                        Case {
                            in_place,
                            widen,
                            root,
                            ..case
                        }
                        .proved();
                    }
                }
            }
        }
    }
}

/// Hosts with as many ranks each, numbered in blocks and round robin.
fn even_hosts() -> impl Iterator<Item = (usize, usize, Vec<usize>)> {
    [(2, 2), (2, 4), (4, 2), (3, 5), (10, 2), (16, 2)]
        .into_iter()
        .flat_map(|(hosts, ranks)| {
            let blocks = (0..hosts * ranks).map(|rank| rank / ranks).collect();
            let round_robin = (0..hosts * ranks).map(|rank| rank % hosts).collect();
            [(hosts, ranks, blocks), (hosts, ranks, round_robin)]
        })
}

/// A host sends to the others the elements that the table says, whatever its ranks and their numbers.
#[test]
fn each_element_crosses_once() {
    const COUNT: usize = 960;
    for (hosts, ranks, host_of) in even_hosts() {
        let crossing = |collective| {
            let case = Case::new(collective, &host_of, COUNT);
            Case {
                chunk: DEFAULT_CHUNK,
                ..case
            }
            .crossing()
        };
        let shards = vec![2 * (hosts - 1) * COUNT / hosts; hosts];
        assert_eq!(crossing(Collective::AllReduce), (shards.clone(), shards));
        for collective in [Collective::AllGather, Collective::ReduceScatter] {
            let blocks = vec![(hosts - 1) * ranks * COUNT; hosts];
            assert_eq!(crossing(collective), (blocks.clone(), blocks));
        }
        let (mut first, mut last) = (vec![COUNT; hosts], vec![COUNT; hosts]);
        first[0] = 0;
        last[hosts - 1] = 0;
        assert_eq!(
            crossing(Collective::Broadcast),
            (last.clone(), first.clone())
        );
        assert_eq!(crossing(Collective::Reduce), (first, last));
        let exchanged = vec![(hosts - 1) * ranks * ranks * COUNT; hosts];
        let all_to_all = crossing(Collective::AllToAll);
        assert_eq!(all_to_all, (exchanged.clone(), exchanged));
        let (mut root, mut others) = (vec![0; hosts], vec![ranks * COUNT; hosts]);
        (root[0], others[0]) = ((hosts - 1) * ranks * COUNT, 0);
        assert_eq!(
            crossing(Collective::Scatter),
            (root.clone(), others.clone())
        );
        assert_eq!(crossing(Collective::Gather), (others, root));
    }
}

/// All blocks that the ranks of a host have for one rank of another, or for one host, are one message.
#[test]
fn blocks_of_a_host_travel_together() {
    for (hosts, ranks, host_of) in even_hosts() {
        let messages = |collective| {
            let plans = Case::new(collective, &host_of, 5).plans();
            let of_rank = |(rank, plan): (usize, &Plan)| {
                let sent = plan.steps.iter().filter(
                    |step| matches!(step, Step::Send { to, .. } if host_of[*to] != host_of[rank]),
                );
                sent.count()
            };
            plans.iter().enumerate().map(of_rank).sum::<usize>()
        };
        let between_hosts = hosts * (hosts - 1) * ranks;
        assert_eq!(messages(Collective::AllToAll), between_hosts);
        assert_eq!(messages(Collective::Gather), hosts - 1);
        assert_eq!(messages(Collective::Scatter), hosts - 1);
    }
}

/// Memory does not grow with the number of pieces.
#[test]
fn pieces_share_their_scratch_memory() {
    let in_pieces = |collective: &Collective| {
        // Others hold the blocks that they carry, whole.
        !matches!(
            collective,
            Collective::AllToAll | Collective::Gather | Collective::Scatter
        )
    };
    for collective in COLLECTIVES.into_iter().filter(in_pieces) {
        let scratch = |count| {
            let case = Case {
                widen: true,
                chunk: 100,
                ..Case::new(collective, &[0, 0, 1, 1], count)
            };
            case.plans()[1].scratch
        };
        assert_eq!(scratch(4_000), scratch(400_000), "{collective}");
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let hosts = prop_oneof![
        prop::collection::vec(0..4_usize, 2..12),
        prop::collection::vec(0..12_usize, 11..15),
    ];
    let collective = prop::sample::select(&COLLECTIVES[..]);
    (hosts, collective, any::<(bool, bool, bool)>(), 1..40_usize).prop_flat_map(
        |(labels, collective, (in_place, widen, is_even), chunk)| {
            let world = labels.len();
            let counts = match is_even {
                true => (0..120_usize)
                    .prop_map(move |count| vec![count; world])
                    .boxed(),
                false => prop::collection::vec(0..40_usize, world).boxed(),
            };
            (counts, 0..world).prop_map(move |(counts, root)| Case {
                collective,
                host_of: Topology::from_hosts(&labels, 2).host_of,
                counts,
                root,
                in_place,
                widen,
                chunk,
            })
        },
    )
}

proptest! {
    #[test]
    fn any_hosts_will_do(case in cases()) {
        prop_assume!(case.topology().has_levels());
        case.proved();
    }
}

/// Sockets of one host are levels as hosts are.
#[test]
fn memory_nodes_of_one_host_have_the_same_plans() {
    for collective in COLLECTIVES {
        let case = Case::new(collective, &[0, 1, 0, 1, 1], 30);
        let nodes = Topology {
            node_of: case.host_of.clone(),
            ..Topology::one_host(5, 5)
        };
        for (shape, plan) in case.shapes().iter().zip(case.plans()) {
            assert!(serves(shape, &nodes));
            let on_nodes = build(shape, case.chunk, &nodes, build_chunked);
            assert_eq!(on_nodes.expect("a plan").steps, plan.steps, "{collective}");
        }
    }
}

/// More than any machine at hand has, by blocks and round robin, with a smaller host at the end.
#[test]
fn thousands_of_ranks() {
    let blocks: Vec<usize> = (0..2045).map(|rank| rank / 8).collect();
    let in_turn: Vec<usize> = (0..1021).map(|rank| rank % 128).collect();
    for host_of in [blocks, in_turn] {
        for collective in COLLECTIVES {
            let is_block = collective.blocks(2) > 1;
            // Their buffers grow with the world, and what the checker holds with its square.
            let world = host_of.len().min(if is_block { 512 } else { 4096 });
            let count = if is_block { 1 } else { 11 };
            let case = Case::new(collective, &host_of[..world], count);
            let (plans, shapes) = (case.plans(), case.shapes());
            verify(&plans, &shapes, MIN_WINDOW)
                .unwrap_or_else(|problem| panic!("{collective} of {world}: {problem}"));
        }
    }
}

/// The checker's sets of ranks are of another kind from 129 ranks on.
#[test]
fn a_rank_that_leaves_out_a_step_is_found_among_many() {
    let host_of: Vec<usize> = (0..260).map(|rank| rank / 4).collect();
    for collective in [Collective::AllReduce, Collective::Barrier] {
        let case = Case::new(collective, &host_of, 11);
        let mut plans = case.plans();
        plans[200].steps.pop();
        let verdict = verify(&plans, &case.shapes(), MIN_WINDOW);
        assert!(verdict.is_err(), "{collective}");
    }
}
