use std::sync::Barrier;

use half::bf16;

use super::*;
use crate::buffer::{Element, Memory};
use crate::communicator::{Communicator, Work};
use crate::config::Config;
use crate::engine::Request;
use crate::error::Code;
use crate::heap::Buffer;
use crate::plan::cost::Costs;
use crate::plan::shared::LINE;
use crate::plan::signals::Semaphore;
use crate::plan::{Counts, Shape, Step};
use crate::types::{Collective, ReduceOp};

/// Cores of the machine whose costs the ranks choose by, whatever this one is and does.
const CORES: usize = 2;

/// Runs `body` as every rank of a group inside this process. However slow the machine, they go through windows.
fn run(world: usize, algorithm: Option<&str>, body: impl Fn(&Communicator) + Sync) {
    run_with(world, algorithm, true, body);
}

fn run_with(
    world: usize,
    algorithm: Option<&str>,
    is_patient: bool,
    body: impl Fn(&Communicator) + Sync,
) {
    let mut config = Config::default();
    config.set("timeout", "60").unwrap();
    if let Some(algorithm) = algorithm {
        config.set("algorithm", algorithm).unwrap();
    }
    let costs = Costs::TYPICAL.rounded(CORES);
    let ranks = Communicator::local_at(world, &config, costs).unwrap();
    std::thread::scope(|scope| {
        for comm in ranks {
            let body = &body;
            if is_patient {
                comm.group().core.lock().shared.speed = WindowSpeed::unlimited();
            }
            scope.spawn(move || body(&comm));
        }
    });
}

/// How often operations were done that way.
fn went(comm: &Communicator, decision: Decision) -> usize {
    let decided = comm.group().core.lock().shared.decided;
    let count = match decision {
        Decision::InPlace => decided.in_place,
        Decision::Windows => decided.windows,
        Decision::Messages => decided.messages,
    };
    count as usize
}

fn agreed(comm: &Communicator) -> usize {
    went(comm, Decision::InPlace)
}

/// Whether a collective on `count` elements per buffer or block goes through windows if its memory is private.
fn worth<T: Element>(comm: &Communicator, collective: Collective, count: usize) -> bool {
    let reduces = !matches!(collective, Collective::Broadcast | Collective::AllGather);
    let shape = Shape {
        collective,
        rank: comm.rank(),
        world: comm.world_size(),
        counts: Counts::Even(count),
        root: 0,
        in_place: false,
        widen: reduces && ReduceOp::Sum.accumulator(T::DTYPE) != T::DTYPE,
    };
    let membership = &comm.group().membership;
    membership.choose(&shape, T::DTYPE, None).windows
}

/// Bytes of a slice from which on an all_reduce in place pays on any machine.
const LARGE_SLICE: usize = 128 << 10;

/// Elements of a buffer whose slices are worth an agreement, and a few more.
fn count<T>(world: usize, more: usize) -> usize {
    world * LARGE_SLICE / size_of::<T>() + more
}

/// The result of a rank by rank fold.
fn expected<T: Element + Send>(
    (world, count): (usize, usize),
    op: ReduceOp,
    value: fn(usize, usize) -> T,
) -> Vec<T> {
    let found = std::sync::Mutex::new(Vec::new());
    run(world, Some("direct"), |comm| {
        let mut data: Vec<T> = (0..count).map(|index| value(comm.rank(), index)).collect();
        comm.all_reduce(&mut data, op).unwrap();
        assert_eq!(agreed(comm), 0, "an algorithm that is asked for is used");
        if comm.rank() == 0 {
            *found.lock().unwrap() = data;
        }
    });
    found.into_inner().unwrap()
}

/// The ranks' results are those of a rank by rank fold of private memory, bit by bit: in the heap, through windows in place
/// and, where the input is apart, out of place.
fn check<T: Element + PartialEq + Send>(op: ReduceOp, value: fn(usize, usize) -> T) {
    for world in [2, 3, 8] {
        for more in [0, 1, 5, 200_003, 800_000 / size_of::<T>()] {
            let count = count::<T>(world, more);
            let expected = expected((world, count), op, value);
            run(world, None, |comm| {
                let input: Vec<T> = (0..count).map(|index| value(comm.rank(), index)).collect();
                for round in 1..3 {
                    let what = format!("{op:?}, {world} ranks, {count}, round {round}");
                    let mut shared = Buffer::from_slice(&input);
                    comm.all_reduce(&mut shared, op).unwrap();
                    assert!(shared[..] == expected[..], "in the heap: {what}");
                    assert_eq!(agreed(comm), round);
                    let mut private = input.clone();
                    comm.all_reduce(&mut private, op).unwrap();
                    let mut apart = vec![value(0, 1); count];
                    // SAFETY: both live until the operation has been waited for, and are not touched before.
                    let work = unsafe {
                        let (from, to) = (Memory::of(&input), Memory::of_mut(&mut apart));
                        let request = Request::all_reduce(T::DTYPE, op, Some(from), to);
                        comm.start(request, None).unwrap()
                    };
                    work.wait(None).unwrap();
                    if worth::<T>(comm, Collective::AllReduce, count) {
                        assert!(private == expected, "in place: {what}");
                        assert!(apart == expected, "out of place: {what}");
                        assert_eq!(went(comm, Decision::Windows), 2 * round);
                    } else {
                        assert!(private == apart, "by a plan: {what}");
                    }
                }
            });
        }
    }
}

/// Windows are found slow by what a chunk takes: an operation that has more chunks may take longer.
#[test]
fn chunks_are_counted_as_plans_make_them() {
    let lengths = [4, 4096, 65_536, 100_000, 262_144, 262_148, 3_000_000];
    for (world, bytes) in [2, 3, 4, 5, 8]
        .into_iter()
        .flat_map(|world| lengths.map(|it| (world, it)))
    {
        let cores = CORES;
        let host = Host { world, cores };
        let shape = Shape {
            collective: Collective::AllReduce,
            rank: 0,
            world,
            root: 0,
            counts: Counts::Even(bytes / 4),
            in_place: true,
            widen: false,
        };
        let plan = in_memory::build(
            Algorithm::Windows,
            &shape,
            4,
            host.chunk(Collective::AllReduce),
        )
        .unwrap();
        let publishes = |step: &&Step| {
            let what = Semaphore::Contributions;
            matches!(step, Step::Signal { what: it, .. } if *it == what)
        };
        let published = plan.steps.iter().filter(publishes).count();
        let counted = host.chunks(Collective::AllReduce, bytes);
        assert_eq!(counted, published, "{world} ranks, {bytes} bytes");
    }
}

#[test]
fn sums_have_the_bits_of_rank_order() {
    check::<f32>(ReduceOp::Sum, |rank, index| {
        (rank as f32 + 0.1) * (index % 997) as f32
    });
}

#[test]
fn halves_are_rounded_once() {
    let value = |rank, index| bf16::from_f32(1.0 + (rank * 31 + index % 89) as f32 / 64.0);
    check::<bf16>(ReduceOp::Sum, value);
}

#[test]
fn averages_are_divided_once() {
    check::<f64>(ReduceOp::Avg, |rank, index| {
        (rank * 3 + index % 7) as f64 / 3.0
    });
}

#[test]
fn other_operators_and_types() {
    check::<i64>(ReduceOp::Max, |rank, index| {
        (index * (rank + 7) % 1009) as i64
    });
    check::<u8>(ReduceOp::Bxor, |rank, index| (rank * 37 + index) as u8);
    check::<i32>(ReduceOp::Prod, |rank, index| (rank + index % 5) as i32);
}

#[test]
fn a_factor_is_applied_once() {
    let op = ReduceOp::PremulSum(0.25);
    run(3, None, |comm| {
        for count in [5, 20_000, 300_001] {
            let mut data: Vec<f32> = (0..count).map(|index| (index % 100) as f32).collect();
            comm.all_reduce(&mut data, op).unwrap();
            let mut sums = data.iter().enumerate();
            assert!(sums.all(|(index, &sum)| sum == 0.75 * (index % 100) as f32));
            let blocks = vec![4.0_f32; 3 * count];
            let mut block = vec![0.0; count];
            comm.reduce_scatter(&blocks, &mut block, op).unwrap();
            assert!(block.iter().all(|&sum| sum == 3.0));
        }
        assert!(went(comm, Decision::Windows) > 0);
    });
}

/// A buffer that may lie in the heap.
enum Place {
    Heap(Buffer<f32>),
    Private(Vec<f32>),
}

impl Place {
    fn new(shared: bool, values: Vec<f32>) -> Self {
        match shared {
            true => Self::Heap(Buffer::from_slice(&values)),
            false => Self::Private(values),
        }
    }

    fn data(&mut self) -> &mut [f32] {
        match self {
            Self::Heap(buffer) => buffer,
            Self::Private(vector) => vector,
        }
    }
}

#[test]
fn one_private_buffer_is_enough_to_go_another_way() {
    for world in [2, 4] {
        let count = count::<f32>(world, 11);
        run(world, None, |comm| {
            let rank = comm.rank();
            let crosses = worth::<f32>(comm, Collective::AllReduce, count);
            // Without windows agreements fail in calls 0, 2 and 6; what is left out between them would have failed too, and the
            // next attempt is in call 14.
            for call in 0..20 {
                let shared = call > 8 || rank != 1;
                let values = (0..count).map(|index| (index % 13 + rank + call) as f32);
                let mut data = Place::new(shared, values.collect());
                comm.all_reduce(data.data(), ReduceOp::Sum).unwrap();
                let ranks = (0..world).sum::<usize>() + world * call;
                let sum = |index: usize| (world * (index % 13) + ranks) as f32;
                assert!(
                    data.data()
                        .iter()
                        .enumerate()
                        .all(|(i, &found)| found == sum(i))
                );
                let from = if crosses { 8 } else { 13 };
                assert_eq!(agreed(comm), call.saturating_sub(from));
            }
            let by_windows = if crosses { 9 } else { 0 };
            assert_eq!(went(comm, Decision::Windows), by_windows);
            // Other sizes are not concerned.
            let mut data = Buffer::from_slice(&vec![1.0_f32; count + 100]);
            let before = agreed(comm);
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(agreed(comm), before + 1);
        });
    }
}

/// Private memory goes through windows; where all the memory that peers would read lies in the heap, they read it there.
#[test]
fn other_collectives_go_through_windows_where_memory_is_private() {
    for world in [2, 3, 5] {
        for count in [1 << 10, 50_001, 700_003, 2_500_000] {
            run(world, None, |comm| {
                let crossing = [
                    Collective::Broadcast,
                    Collective::Reduce,
                    Collective::AllGather,
                    Collective::ReduceScatter,
                ]
                .into_iter()
                .filter(|collective| worth::<f32>(comm, *collective, count))
                .count();
                for (round, shared) in [false, true, false].into_iter().enumerate() {
                    check_others(comm, count, shared, round);
                    // For what lies in the heap the ranks decide differently.
                    if round == 0 {
                        assert_eq!(went(comm, Decision::Windows), crossing, "{world}, {count}");
                    }
                }
            });
        }
    }
}

fn check_others(comm: &Communicator, count: usize, shared: bool, round: usize) {
    let (rank, world) = (comm.rank(), comm.world_size());
    let root = (count + round) % world;
    let value = |rank: usize, index: usize| (index % 1013 + 3 * rank + round) as f32;
    let own = |rank: usize, count: usize| -> Vec<f32> {
        (0..count).map(|index| value(rank, index)).collect()
    };
    let sum = |index| (0..world).map(|rank| value(rank, index)).sum::<f32>();
    let sums = |found: &[f32], first: usize| {
        let mut found = found.iter().enumerate();
        found.all(|(index, &found)| found == sum(first + index))
    };
    let what = format!("rank {rank} of {world}, {count}, in the heap: {shared}");

    let mut data = Place::new(shared, own(rank, count));
    comm.broadcast(data.data(), root).unwrap();
    assert!(data.data() == own(root, count), "broadcast: {what}");

    let mut data = Place::new(shared, own(rank, count));
    comm.reduce(data.data(), ReduceOp::Sum, root).unwrap();
    match rank == root {
        true => assert!(sums(data.data(), 0), "reduce: {what}"),
        false => assert!(data.data() == own(rank, count), "reduce: {what}"),
    }

    let mut mine = Place::new(shared, own(rank, count));
    let mut all = Place::new(shared, vec![0.0; world * count]);
    comm.all_gather(mine.data(), all.data()).unwrap();
    let blocks = all.data().chunks(count).enumerate();
    for (from, block) in blocks {
        assert!(block == own(from, count), "all_gather: {what}");
    }

    let mut blocks = Place::new(shared, own(rank, world * count));
    let mut block = Place::new(shared, vec![0.0; count]);
    let (from, to) = (blocks.data(), block.data());
    comm.reduce_scatter(from, to, ReduceOp::Sum).unwrap();
    assert!(sums(block.data(), rank * count), "reduce_scatter: {what}");
}

/// A list of arrays is as good as one.
#[test]
fn what_lies_in_pieces_goes_through_windows() {
    const WORLD: usize = 3;
    let lengths = [1, 70_000, 3, 0, 250_000, 17];
    run(WORLD, None, |comm| {
        let rank = comm.rank();
        for _ in 0..3 {
            let piece = |length: usize| -> Vec<i32> {
                (0..length)
                    .map(|index| (index * (rank + 1)) as i32)
                    .collect()
            };
            let mut pieces: Vec<Vec<i32>> = lengths.map(piece).into();
            let parts = pieces
                .iter_mut()
                .map(|piece| (piece.as_mut_ptr().cast::<u8>(), 4 * piece.len()));
            // SAFETY: the pieces live until the operation has been waited for, and are not touched before.
            let memory = unsafe { Memory::from_pieces(parts) };
            let request = Request::all_reduce(i32::DTYPE, ReduceOp::Sum, None, memory);
            // SAFETY: as above.
            let work = unsafe { comm.start(request, None) }.unwrap();
            work.wait(None).unwrap();
            for piece in &pieces {
                let sums = piece.iter().enumerate();
                assert!(
                    sums.into_iter()
                        .all(|(index, &sum)| sum == 6 * index as i32)
                );
            }
        }
        assert_eq!(went(comm, Decision::Windows), 3);
    });
}

/// Ranks take their steps in different orders, and all decide alike.
#[test]
fn many_operations_at_once_agree() {
    const WORLD: usize = 3;
    run_with(WORLD, None, false, |comm| {
        let rank = comm.rank();
        for round in 0..10 {
            let mut places: Vec<Place> = (0..12)
                .map(|number| {
                    let shared = number % 3 > 0 || (rank + round) % 2 == 0;
                    let count = count::<f32>(WORLD, number % 4 * 1000);
                    Place::new(shared, vec![(rank + number) as f32; count])
                })
                .collect();
            let start = |place: &mut Place| -> Work {
                // SAFETY: the buffers live until all have been waited for, and are not touched before.
                unsafe {
                    let memory = Memory::of_mut(place.data());
                    let request = Request::all_reduce(f32::DTYPE, ReduceOp::Sum, None, memory);
                    comm.start(request, None).unwrap()
                }
            };
            let works: Vec<Work> = places.iter_mut().map(start).collect();
            for work in &works {
                work.wait(None).unwrap();
            }
            for (number, place) in places.iter_mut().enumerate() {
                let sum = (0..WORLD).map(|rank| (rank + number) as f32).sum::<f32>();
                assert!(place.data().iter().all(|&found| found == sum));
            }
        }
        assert!(agreed(comm) > 10);
    });
}

#[test]
fn who_calls_something_else_is_told_of() {
    for shared in [true, false] {
        for length in [1, 50, 1000, 100_000] {
            run(3, None, |comm| {
                let mut data = Place::new(shared, vec![1.0; count::<f32>(3, 200_000)]);
                comm.all_reduce(data.data(), ReduceOp::Sum).unwrap();
                let error = match comm.rank() {
                    2 => comm.broadcast(&mut vec![1.0_f32; length], 2),
                    _ => comm.all_reduce(data.data(), ReduceOp::Sum),
                };
                // The root may have sent all it had.
                let Err(error) = error else {
                    return assert_eq!(comm.rank(), 2);
                };
                assert_eq!(error.code, Code::Mismatch, "{error}");
                assert!(error.to_string().contains("broadcast"), "{error}");
            });
        }
    }
}

#[test]
fn an_abort_ends_it_wherever_it_is() {
    for shared in [true, false] {
        let together = Barrier::new(3);
        for turn in 0..20 {
            run(3, None, |comm| {
                let mut data = Place::new(shared, vec![1.0; count::<f32>(3, 1 << 20)]);
                comm.all_reduce(data.data(), ReduceOp::Sum).unwrap();
                together.wait();
                if comm.rank() == 1 {
                    std::thread::sleep(std::time::Duration::from_micros(100 * turn));
                    comm.abort("enough");
                }
                let error = loop {
                    if let Err(error) = comm.all_reduce(data.data(), ReduceOp::Sum) {
                        break error;
                    }
                };
                assert!(matches!(error.code, Code::Aborted), "{error}");
                // No peer writes to it any more.
                data.data().fill(0.0);
                together.wait();
                assert!(data.data().iter().all(|&element| element == 0.0));
            });
        }
    }
}

#[test]
fn what_is_asked_for_by_name_is_done_wherever_it_applies() {
    let sum = |world: usize, index: usize| {
        let ranks = (0..world).map(|rank| (rank + index % 7) as f32);
        ranks.sum::<f32>()
    };
    for world in [2, 5] {
        for count in [1, 100, 50_000] {
            for (algorithm, decision) in [
                ("windows", Decision::Windows),
                ("in_place", Decision::InPlace),
            ] {
                run(world, Some(algorithm), |comm| {
                    let own = |index: usize| (comm.rank() + index % 7) as f32;
                    let mut data = Buffer::from_slice(&(0..count).map(own).collect::<Vec<_>>());
                    comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    let mut sums = data.iter().enumerate();
                    assert!(sums.all(|(index, &found)| found == sum(world, index)));
                    // In place, every rank needs a slice of its own.
                    let applies = algorithm == "windows" || 4 * count > LINE * world * world;
                    let what = format!("{algorithm}, {world} ranks, {count} elements");
                    assert_eq!(went(comm, decision), usize::from(applies), "{what}");
                    // No plan of messages was made for it, and no memory taken.
                    let plans = comm.group().core.lock().plans.sizes().0;
                    assert_eq!(plans, usize::from(!applies), "{what}");
                    check_others(comm, count, true, 0);
                });
            }
        }
    }
}
