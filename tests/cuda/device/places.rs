//! Buffers that peers read and write where they lie.

use unisono::transport::cuda::driver::Stream;
use unisono::types::{DataType, DeviceStream, ReduceOp};
use unisono::{Communicator, Request, Sizes};

use crate::calls::reported;
use crate::cases::all;
use crate::gpu::{Array, bytes_of, floats, stream_of};
use crate::graph::capture;
use crate::harness::{Ranks, Test};
use crate::{SMALL, all_reduce};

/// Elements of a buffer that takes several halves.
const LONG: usize = 200_003;

/// One for each rank.
const DEVICES: (&str, &str) = ("DEVICES", "3");

fn own_stream(comm: &Communicator) -> (Stream, DeviceStream) {
    let stream = stream_of(comm.rank() as u32);
    let named = stream.handle();
    (stream, named)
}

fn values(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| (at % 1000 + rank) as f32).collect()
}

/// Repeats an all_reduce until ranks have mapped each other's memory. They do so in calls before which nothing is under way
/// in the process.
fn warm_up(comm: &Communicator, stream: &Stream) {
    let array = Array::in_heap(stream, &bytes_of(&vec![1.0_f32; LONG]), 0);
    for _ in 0..4 {
        for rank in 0..comm.world_size() {
            comm.barrier().expect("barrier");
            // Alone at its beginning, of ranks that share a process.
            std::thread::sleep(std::time::Duration::from_millis(if rank == comm.rank() {
                0
            } else {
                20
            }));
            let work = all_reduce(comm, &array, stream.handle()).expect("an all_reduce");
            work.wait(None).expect("an all_reduce");
        }
    }
    comm.barrier().expect("barrier");
}

/// How many kernels an all_reduce of this array launches in this process.
fn launches(comm: &Communicator, array: &Array, stream: &Stream) -> u64 {
    let before = reported("cuLaunchKernel");
    let work = all_reduce(comm, array, stream.handle()).expect("an all_reduce");
    work.wait(None).expect("an all_reduce");
    reported("cuLaunchKernel") - before
}

fn in_place(ranks: Ranks, world: usize, body: impl Fn(Communicator) + Send + Sync) {
    let test = Test {
        config: SMALL,
        driver: &[DEVICES, ("RANDOM_DELAY", "20")],
        ..Test::new(ranks, world)
    };
    test.run(body);
}

#[test]
fn every_collective_in_place() {
    for (ranks, world) in [
        (Ranks::Processes, 3),
        (Ranks::Processes, 2),
        (Ranks::Local, 3),
    ] {
        in_place(ranks, world, |comm| {
            let (stream, _) = own_stream(&comm);
            warm_up(&comm, &stream);
            for (count, offset) in [(LONG, 0), (70_001, 256), (1000, 0), (LONG, 4)] {
                for case in all(comm.world_size(), count, DataType::Float32, ReduceOp::Sum) {
                    case.compare_with(&comm, &stream, |bytes| match bytes.len() {
                        0 => Array::of(&stream, bytes),
                        _ => Array::in_heap(&stream, bytes, offset),
                    });
                }
            }
        });
    }
}

/// Where the buffers of some ranks alone can be read in place, the others go through their windows.
#[test]
fn ranks_need_not_agree() {
    in_place(Ranks::Processes, 3, |comm| {
        let (stream, _) = own_stream(&comm);
        warm_up(&comm, &stream);
        for among in 0..8_usize {
            let is_in_heap = among >> comm.rank() & 1 == 1;
            for case in all(3, LONG, DataType::Float32, ReduceOp::Sum) {
                case.compare_with(&comm, &stream, |bytes| {
                    match is_in_heap && !bytes.is_empty() {
                        true => Array::in_heap(&stream, bytes, 0),
                        false => Array::of(&stream, bytes),
                    }
                });
            }
        }
    });
}

#[test]
fn nothing_is_copied() {
    in_place(Ranks::Processes, 3, |comm| {
        let (stream, _) = own_stream(&comm);
        warm_up(&comm, &stream);
        let content = bytes_of(&values(comm.rank(), LONG));
        let elsewhere = Array::of(&stream, &content);
        let here = Array::in_heap(&stream, &content, 0);
        let through_windows = launches(&comm, &elsewhere, &stream);
        let in_place = launches(&comm, &here, &stream);
        // Nothing is put, and nothing got but for a look whether the group has failed.
        assert!(
            in_place < through_windows,
            "{in_place} of {through_windows}"
        );
        let expected: Vec<f32> = (0..LONG).map(|at| (3 * (at % 1000) + 3) as f32).collect();
        assert!(floats(&here.read(&stream)) == expected);
        assert!(floats(&elsewhere.read(&stream)) == expected);
    });
}

/// The peers read the input until the operation has ended, and not later.
#[test]
fn an_input_may_change_after_the_operation() {
    in_place(Ranks::Processes, 3, |comm| {
        let (stream, named) = own_stream(&comm);
        warm_up(&comm, &stream);
        let world = comm.world_size();
        let input = Array::in_heap(&stream, &bytes_of(&values(0, LONG)), 0);
        let output = Array::of(&stream, &vec![0; 4 * world * LONG]);
        for round in 0..10 {
            input.write(&stream, &bytes_of(&values(comm.rank() + round, LONG)));
            let request = Request::all_gather(
                DataType::Float32,
                Some(input.memory()),
                output.memory(),
                Sizes::Even(LONG),
            );
            // SAFETY: the arrays outlive the stream's work.
            unsafe { comm.start(request.on(named), None) }.expect("started");
        }
        let got = floats(&output.read(&stream));
        for rank in 0..world {
            assert!(got[rank * LONG..][..LONG] == values(rank + 9, LONG));
        }
    });
}

#[test]
fn what_is_captured_happens_in_place() {
    in_place(Ranks::Processes, 3, |comm| {
        let (stream, named) = own_stream(&comm);
        warm_up(&comm, &stream);
        let array = Array::in_heap(&stream, &bytes_of(&values(comm.rank(), LONG)), 0);
        let graph = capture(&stream, || {
            all_reduce(&comm, &array, named).expect("captured");
        });
        comm.barrier().expect("barrier");
        for round in 0..3 {
            array.write(&stream, &bytes_of(&values(comm.rank() + round, LONG)));
            graph.launch(&stream);
            let got = floats(&array.read(&stream));
            let expected = (0..LONG).map(|at| (3 * (at % 1000 + round) + 3) as f32);
            assert!(got.into_iter().eq(expected), "round {round}");
        }
        comm.barrier().expect("barrier");
        drop(graph);
    });
}

/// A result that could not be made is NaN, also in a buffer where peers would have written it.
#[test]
fn a_peer_that_dies_leaves_no_number() {
    let test = Test {
        config: SMALL,
        driver: &[DEVICES],
        dies: Some(2),
        ..Test::new(Ranks::Processes, 3)
    };
    test.run(|comm| {
        let (stream, named) = own_stream(&comm);
        warm_up(&comm, &stream);
        let array = Array::in_heap(&stream, &bytes_of(&values(comm.rank(), LONG)), 0);
        comm.barrier().expect("barrier");
        if comm.rank() == 2 {
            // SAFETY: it ends the process, without anything that would tell the others.
            unsafe { libc::_exit(9) };
        }
        let work = all_reduce(&comm, &array, named).expect("started");
        work.wait(None).expect_err("a rank is gone");
        let got = floats(&array.read(&stream));
        assert!(
            got.iter().all(|got| got.is_nan()),
            "{:?}",
            got.iter().find(|got| !got.is_nan())
        );
    });
}

/// A rank that dies in the middle leaves sums and what is no number, and no contribution.
#[test]
fn nothing_is_taken_for_a_sum() {
    for (delay, random) in [(1, "300"), (3, "310"), (6, "320"), (10, "330")] {
        let test = Test {
            config: SMALL,
            driver: &[DEVICES, ("RANDOM_DELAY", random)],
            dies: Some(2),
            ..Test::new(Ranks::Processes, 3)
        };
        test.run(|comm| {
            let (stream, named) = own_stream(&comm);
            warm_up(&comm, &stream);
            let array = Array::in_heap(&stream, &bytes_of(&vec![1.0_f32; LONG]), 0);
            comm.barrier().expect("barrier");
            let work = all_reduce(&comm, &array, named).expect("started");
            if comm.rank() == 2 {
                std::thread::sleep(std::time::Duration::from_millis(delay));
                // SAFETY: it ends the process, without anything that would tell the others.
                unsafe { libc::_exit(9) };
            }
            let _ = work.wait(None);
            let got = floats(&array.read(&stream));
            let wrong = got.iter().position(|got| !got.is_nan() && *got != 3.0);
            assert!(wrong.is_none(), "{:?}", wrong.map(|at| (at, got[at])));
        });
    }
}
