//! The traffic of each link: as much as theory says, and nothing that is known everywhere.

use std::collections::BTreeSet;

use super::*;

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
fn links(plans: &[Plan]) -> BTreeSet<(Rank, Rank)> {
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
    for collective in planned().filter(known) {
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
    for collective in planned().filter(|one| one.is_between_pairs()) {
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

/// A slice that all ranks know to be empty is not sent: a few elements in slices for many ranks.
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
