//! Every collective on every transport, ranks as threads, against results computed here from the inputs.

mod ranks;

use std::time::Duration;

use half::f16;
use unisono::error::Result;
use unisono::types::ReduceOp;
use unisono::{Communicator, PointToPoint};

use ranks::Transport;

const TRANSPORTS: [Transport; 4] = [
    Transport::Local,
    Transport::Shm,
    Transport::Tcp,
    Transport::Mixed,
];

fn run(transport: Transport, world: usize, body: impl Fn(&Communicator) + Send + Sync) {
    run_by("auto", transport, world, body);
}

/// The same with collectives by this algorithm wherever it applies.
fn run_by(
    algorithm: &str,
    transport: Transport,
    world: usize,
    body: impl Fn(&Communicator) + Send + Sync,
) {
    let settings = [
        ("algorithm", algorithm),
        ("timeout", "60"),
        ("join_timeout", "30"),
    ];
    ranks::run(transport, world, &settings, |comm| body(&comm));
}

/// The element at `index` of the contribution of `rank`.
fn value(rank: usize, index: usize) -> i64 {
    ((rank + 1) * 1000 + index * 7 % 501) as i64
}

fn contribution(rank: usize, count: usize) -> Vec<i64> {
    (0..count).map(|index| value(rank, index)).collect()
}

const COUNTS: [usize; 8] = [0, 1, 2, 3, 7, 64, 1001, 70_001];

#[test]
fn all_reduce_and_reduce() {
    for transport in TRANSPORTS {
        for world in 1..=5 {
            run(transport, world, |comm| {
                for count in COUNTS {
                    let sum: Vec<i64> = (0..count)
                        .map(|i| (0..world).map(|rank| value(rank, i)).sum())
                        .collect();
                    let mut data = contribution(comm.rank(), count);
                    comm.all_reduce(&mut data, ReduceOp::Sum)
                        .expect("all_reduce");
                    assert!(data == sum, "{transport:?} world {world} count {count}");
                    let root = count % world;
                    let mut data = contribution(comm.rank(), count);
                    comm.reduce(&mut data, ReduceOp::Max, root).expect("reduce");
                    let expected = if comm.rank() == root {
                        contribution(world - 1, count)
                    } else {
                        contribution(comm.rank(), count)
                    };
                    assert!(
                        data == expected,
                        "{transport:?} world {world} count {count}"
                    );
                }
            });
        }
    }
}

#[test]
fn prefixes() {
    for algorithm in ["auto", "direct", "ring", "bruck", "windows"] {
        for transport in TRANSPORTS {
            run_by(algorithm, transport, 4, |comm| {
                let rank = comm.rank();
                for count in COUNTS {
                    let sum = |ranks: usize, i: usize| (0..ranks).map(|of| value(of, i)).sum();
                    let sums = |ranks| (0..count).map(|i| sum(ranks, i)).collect::<Vec<i64>>();
                    let mut data = contribution(rank, count);
                    comm.scan(&mut data, ReduceOp::Sum).expect("scan");
                    assert!(data == sums(rank + 1), "{algorithm} {transport:?} {count}");
                    let mut data = contribution(rank, count);
                    comm.exscan(&mut data, ReduceOp::Sum).expect("exscan");
                    // Rank 0 keeps its own.
                    let expected = sums(rank.max(1));
                    assert!(data == expected, "{algorithm} {transport:?} {count}");
                    let mut data = vec![(rank * rank) as f32; count];
                    comm.scan(&mut data, ReduceOp::Avg).expect("scan");
                    let mean = (0..=rank).map(|of| of * of).sum::<usize>() as f32;
                    assert_eq!(data, vec![mean / (rank + 1) as f32; count]);
                }
            });
        }
    }
}

/// The state kept of a short operation serves the next one that is like it, and no other.
#[test]
fn alike_and_unlike_operations_follow_each_other() {
    let shapes: [(usize, ReduceOp, usize); 7] = [
        (1, ReduceOp::Sum, 0),
        (1, ReduceOp::Max, 0),
        (5, ReduceOp::Sum, 0),
        (5, ReduceOp::Avg, 1),
        (5, ReduceOp::Sum, 1),
        (9, ReduceOp::PremulSum(2.0), 0),
        (700, ReduceOp::Min, 1),
    ];
    for transport in TRANSPORTS {
        run(transport, 3, |comm| {
            for turn in 0..200 {
                // Every shape after every other, and twice in a row.
                let (count, op, root) = shapes[(turn * turn / 2 + turn / 3) % shapes.len()];
                let input = |rank: usize| ((rank + 1) * (turn + 1)) as f32;
                let expected = match op {
                    ReduceOp::Max => input(2),
                    ReduceOp::Min => input(0),
                    ReduceOp::Avg => input(1),
                    ReduceOp::PremulSum(_) => 12.0 * (turn + 1) as f32,
                    _ => 6.0 * (turn + 1) as f32,
                };
                let mut data = vec![input(comm.rank()); count];
                comm.all_reduce(&mut data, op).expect("all_reduce");
                assert_eq!(data, vec![expected; count], "turn {turn}, {op:?}");
                let mut data = vec![input(comm.rank()); count];
                comm.broadcast(&mut data, root).expect("broadcast");
                assert_eq!(data, vec![input(root); count], "turn {turn}");
            }
        });
    }
}

#[test]
fn moving_collectives() {
    for transport in TRANSPORTS {
        for world in [1, 2, 3, 4, 7, 8] {
            run(transport, world, |comm| {
                check_moves(comm).expect("collectives")
            });
        }
    }
}

fn check_moves(comm: &Communicator) -> Result<()> {
    let (rank, world) = (comm.rank(), comm.world_size());
    for count in COUNTS {
        let root = (count + 1) % world;
        let mut data = contribution(rank, count);
        comm.broadcast(&mut data, root)?;
        assert_eq!(data, contribution(root, count));

        let mine = contribution(rank, count);
        let contributions: Vec<i64> = (0..world)
            .flat_map(|rank| contribution(rank, count))
            .collect();
        let mut all = vec![0; world * count];
        comm.all_gather(&mine, &mut all)?;
        assert_eq!(all, contributions);

        let mut gathered = vec![0; if rank == root { world * count } else { 0 }];
        comm.gather(&mine, &mut gathered, root)?;
        assert_eq!(
            gathered,
            if rank == root {
                contributions.clone()
            } else {
                Vec::new()
            }
        );

        let source = if rank == root {
            contributions.clone()
        } else {
            Vec::new()
        };
        let mut block = vec![0; count];
        comm.scatter(&source, &mut block, root)?;
        assert_eq!(block, mine);

        let blocks = contribution(rank, world * count);
        comm.reduce_scatter(&blocks, &mut block, ReduceOp::Sum)?;
        let sum = |i: usize| {
            (0..world)
                .map(|other| value(other, rank * count + i))
                .sum::<i64>()
        };
        assert_eq!(block, (0..count).map(sum).collect::<Vec<_>>());

        let mut exchanged = vec![0; world * count];
        comm.all_to_all(&blocks, &mut exchanged)?;
        let from = |other: usize| {
            (0..count)
                .map(move |i| value(other, rank * count + i))
                .collect::<Vec<_>>()
        };
        assert_eq!(exchanged, (0..world).flat_map(from).collect::<Vec<_>>());
        comm.barrier()?;
    }
    Ok(())
}

#[test]
fn messages_meet_by_rank_and_tag() {
    for transport in TRANSPORTS {
        run(transport, 4, |comm| {
            let (rank, world) = (comm.rank(), comm.world_size());
            for count in [0, 1, 5000, 300_000] {
                // Around a ring, with the receive posted first and a second message overtaking by tag.
                let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
                let first = contribution(rank, count);
                let second = vec![rank as i64; 3];
                let mut got_first = vec![0_i64; count];
                let mut got_second = vec![0_i64; 3];
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        comm.send_slice(&first, next, 1).expect("send");
                    });
                    scope.spawn(|| {
                        comm.send_slice(&second, next, 2).expect("send");
                    });
                    let from = comm
                        .receive_slice(&mut got_second, Some(previous), 2)
                        .expect("receive");
                    assert_eq!(from.source, previous);
                    comm.receive_slice(&mut got_first, None, 1)
                        .expect("receive");
                });
                assert_eq!(got_first, contribution(previous, count));
                assert_eq!(got_second, vec![previous as i64; 3]);
                comm.barrier().expect("barrier");
            }
        });
    }
}

#[test]
fn split_groups_work_beside_their_parent() {
    for transport in [Transport::Shm, Transport::Tcp, Transport::Mixed] {
        run(transport, 5, |comm| {
            let color = (comm.rank() % 2) as i64;
            let part = comm
                .split(Some(color), -(comm.rank() as i64))
                .expect("split");
            let part = part.expect("every rank has a color");
            let members: Vec<usize> = (0..5).filter(|rank| rank % 2 == color as usize).collect();
            assert_eq!(part.world_size(), members.len());
            assert_eq!(part.rank(), members.len() - 1 - comm.rank() / 2);
            let mut data = [comm.rank() as i64 + 1; 40_000];
            part.all_reduce(&mut data, ReduceOp::Sum)
                .expect("all_reduce");
            assert_eq!(
                data[0],
                members.iter().map(|rank| *rank as i64 + 1).sum::<i64>()
            );
            comm.all_reduce(&mut data, ReduceOp::Max)
                .expect("all_reduce");
            assert_eq!(data[39_999], 9);
            let none = comm
                .split((comm.rank() == 0).then_some(7), 0)
                .expect("split");
            assert_eq!(none.is_some(), comm.rank() == 0);
        });
    }
}

#[test]
fn bad_arguments_leave_the_group_alive() {
    run(Transport::Local, 2, |comm| {
        let mut data = [1_i64; 4];
        for error in [
            comm.broadcast(&mut data, 2).unwrap_err(),
            comm.all_gather(&[1_i64; 3], &mut data).unwrap_err(),
            comm.send_slice(&data, 9, 0).unwrap_err(),
        ] {
            assert!(!error.code.is_fatal(), "{error}");
        }
        let mut floats = [1.0_f32; 4];
        comm.all_reduce(&mut floats, ReduceOp::Band).unwrap_err();
        comm.all_reduce(&mut data, ReduceOp::Sum)
            .expect("still alive");
        assert_eq!(data, [2; 4]);
    });
}

#[test]
fn a_wait_may_end_before_its_operation() {
    run(Transport::Shm, 2, |comm| {
        let mut data = [0_i64; 2];
        if comm.rank() == 0 {
            let memory = data.as_mut_ptr().cast();
            // SAFETY: `data` lives until the second wait has ended.
            let work = unsafe {
                let memory = unisono::buffer::Memory::from_raw_parts(memory, 16);
                let options = PointToPoint::default();
                comm.receive(unisono::types::DataType::Int64, memory, Some(1), 5, options)
            }
            .expect("receive");
            let error = work.wait(Some(Duration::from_millis(50))).unwrap_err();
            assert_eq!(error.code, unisono::error::Code::Timeout);
            comm.send_slice(&[1_u8], 1, 1).expect("send");
            work.wait(None).expect("the message");
            assert_eq!(data, [3, 4]);
        } else {
            comm.receive_slice(&mut [0_u8], Some(0), 1)
                .expect("receive");
            comm.send_slice(&[3_i64, 4], 0, 5).expect("send");
        }
        comm.barrier().expect("barrier");
    });
}

#[test]
fn threads_share_a_reduction_and_change_nothing_of_it() {
    const COUNT: usize = (3 << 20) + 5;
    let value = |rank: usize, i: usize| (i % 97) as f32 * 0.1 + rank as f32;
    let sums = |threads: &str| {
        let config = ranks::config(Transport::Local, &[("threads", threads)]);
        let comms = Communicator::local(2, &config).expect("communicators");
        std::thread::scope(|scope| {
            let ranks: Vec<_> = comms
                .iter()
                .map(|comm| {
                    scope.spawn(move || {
                        let rank = comm.rank();
                        let mut data = unisono::heap::Buffer::<f32>::zeroed(COUNT);
                        for (i, element) in data.iter_mut().enumerate() {
                            *element = value(rank, i);
                        }
                        comm.all_reduce(&mut data, ReduceOp::Sum).expect("a sum");
                        data.iter().map(|sum| sum.to_bits()).collect::<Vec<_>>()
                    })
                })
                .collect();
            ranks
                .into_iter()
                .map(|rank| rank.join().expect("no panic"))
                .collect::<Vec<_>>()
        })
    };
    let expected: Vec<_> = (0..COUNT)
        .map(|i| (value(0, i) + value(1, i)).to_bits())
        .collect();
    for threads in ["1", "3"] {
        for got in sums(threads) {
            assert!(got == expected, "{threads} threads");
        }
    }
}

/// Two hosts of equal and of unequal numbers of ranks, numbered in turn: by composition of plans, which is proved
/// elsewhere, over the links there are.
#[test]
fn hosts_are_crossed_by_all_ranks_at_once() {
    for world in [3, 4, 5, 8] {
        run_by("hierarchical", Transport::Mixed, world, |comm| {
            for count in COUNTS {
                let sum: Vec<i64> = (0..count)
                    .map(|i| (0..world).map(|rank| value(rank, i)).sum())
                    .collect();
                let mut data = contribution(comm.rank(), count);
                comm.all_reduce(&mut data, ReduceOp::Sum)
                    .expect("all_reduce");
                assert!(data == sum, "world {world} count {count}");
            }
            // Halves are summed up in float32 on the way, and rounded once.
            let mut halves = vec![f16::from_f32(0.1 * (comm.rank() + 1) as f32); 100_000];
            comm.all_reduce(&mut halves, ReduceOp::Avg)
                .expect("all_reduce");
            let first = halves[0];
            assert!(halves.iter().all(|half| *half == first));
            let expected = 0.05 * (world + 1) as f32;
            assert!((first.to_f32() - expected).abs() < 1e-3, "{first}");
        });
    }
}
