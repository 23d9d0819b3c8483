use std::sync::Barrier;

use half::bf16;

use super::*;
use crate::buffer::{Element, Memory};
use crate::communicator::{Communicator, Work};
use crate::config::Config;
use crate::engine::Request;
use crate::error::Code;
use crate::heap::Buffer;
use crate::types::ReduceOp;

/// Runs `body` as every rank of a group inside this process.
fn run(world: usize, algorithm: Option<&str>, body: impl Fn(&Communicator) + Sync) {
    let mut config = Config::default();
    config.set("timeout", "60").unwrap();
    if let Some(algorithm) = algorithm {
        config.set("algorithm", algorithm).unwrap();
    }
    let ranks = Communicator::local(world, &config).unwrap();
    std::thread::scope(|scope| {
        for comm in ranks {
            let body = &body;
            scope.spawn(move || body(&comm));
        }
    });
}

fn agreed(comm: &Communicator) -> u64 {
    comm.group().core.lock().votes.agreed
}

/// Elements of a buffer whose slices are worth a vote, and a few more.
fn count<T>(world: usize, more: usize) -> usize {
    world * LEAST_SLICE / size_of::<T>() + more
}

/// What the ranks have afterwards is what a rank by rank fold of private memory gives, bit by bit.
fn check<T: Element + PartialEq + Send>(op: ReduceOp, value: fn(usize, usize) -> T) {
    for world in [2, 3, 8] {
        for more in [0, 1, 5, 200_003] {
            let count = count::<T>(world, more);
            let input = |rank| (0..count).map(move |index| value(rank, index));
            let expected = std::sync::Mutex::new(Vec::new());
            run(world, Some("direct"), |comm| {
                let mut data: Vec<T> = input(comm.rank()).collect();
                comm.all_reduce(&mut data, op).unwrap();
                assert_eq!(agreed(comm), 0, "an algorithm that is asked for is used");
                if comm.rank() == 0 {
                    *expected.lock().unwrap() = data;
                }
            });
            let expected = expected.into_inner().unwrap();
            run(world, None, |comm| {
                for round in 1..3 {
                    let data: Vec<T> = input(comm.rank()).collect();
                    let mut data = Buffer::from_slice(&data);
                    comm.all_reduce(&mut data, op).unwrap();
                    assert!(data[..] == expected[..], "{op:?}, {world} ranks, {count}");
                    assert_eq!(agreed(comm), round);
                }
            });
        }
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
            // Votes fail in calls 0, 2 and 6; what is left out between them would have failed too, and the next vote is in
            // call 14.
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
                assert_eq!(agreed(comm), if call < 14 { 0 } else { call as u64 - 13 });
            }
            // Other sizes are not concerned.
            let mut data = Buffer::from_slice(&vec![1.0_f32; count + 100]);
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(agreed(comm), 7);
        });
    }
}

/// Ranks take their steps in different orders, and all count the same votes.
#[test]
fn many_operations_at_once_agree() {
    const WORLD: usize = 3;
    run(WORLD, None, |comm| {
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
                let memory = Memory::of_mut(place.data());
                let request = Request::all_reduce(f32::DTYPE, ReduceOp::Sum, None, memory);
                // SAFETY: the buffers live until all have been waited for, and are not touched before.
                unsafe { comm.start(request, None) }.unwrap()
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
    for length in [1, 50, 1000, 100_000] {
        run(3, None, |comm| {
            let mut data = Buffer::from_slice(&vec![1.0_f32; count::<f32>(3, 0)]);
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            let error = match comm.rank() {
                2 => comm.broadcast(&mut vec![1.0_f32; length], 2),
                _ => comm.all_reduce(&mut data, ReduceOp::Sum),
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

#[test]
fn an_abort_ends_it_wherever_it_is() {
    let together = Barrier::new(3);
    for turn in 0..20 {
        run(3, None, |comm| {
            let mut data = Buffer::from_slice(&vec![1.0_f32; count::<f32>(3, 1 << 20)]);
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            together.wait();
            if comm.rank() == 1 {
                std::thread::sleep(std::time::Duration::from_micros(100 * turn));
                comm.abort("enough");
            }
            let error = loop {
                if let Err(error) = comm.all_reduce(&mut data, ReduceOp::Sum) {
                    break error;
                }
            };
            assert!(matches!(error.code, Code::Aborted), "{error}");
            // Nobody writes to it any more.
            data.fill(0.0);
            together.wait();
            assert!(data.iter().all(|&element| element == 0.0));
        });
    }
}

#[test]
fn failures_make_votes_rarer() {
    let mut votes = Votes::default();
    let mut asked = Vec::new();
    for operation in 0..300 {
        if votes.ask(1000) {
            asked.push(operation);
            votes.note(1000, false);
        }
    }
    assert_eq!(asked, [0, 2, 6, 14, 30, 62, 126, 190, 254]);
    let next = (300..400).find(|_| votes.ask(1000));
    assert_eq!(next, Some(318));
    votes.note(1000, true);
    assert!(votes.ask(1000) && votes.ask(1000) && votes.ask(1001));
}
