//! Operations on device memory over the emulated driver (see `tests/cuda/emulator`): every collective and message against
//! the same on the host, in the order of streams, in graphs; and what happens when something goes wrong.

mod calls;
mod cases;
mod depots;
mod gpu;
mod graph;
mod harness;
mod lanes;
mod messages;
mod one_sided;
mod places;
mod replay;
#[path = "../../../rust/core/src/skips.rs"]
mod skips;
mod trouble;
mod windows;

use std::time::Duration;

use unisono::buffer::Memory;
use unisono::error::{Code, Error};
use unisono::transport::cuda::driver::{DeviceMemory, Stream};
use unisono::types::{Collective, DataType, DeviceStream, ReduceOp};
use unisono::{Communicator, Request, Sizes, Work};

use cases::{Case, all};
use gpu::{Array, bytes_of, floats, stream, stream_of};
use harness::{Ranks, Test};
use messages::message;
use skips::skipped;

/// Windows so small that most operations take several chunks, and two shots are taken.
const SMALL: &[(&str, &str)] = &[("window_bytes", "64K"), ("algorithm", "direct")];
/// Windows that most operations fit.
const LARGE: &[(&str, &str)] = &[("window_bytes", "1M"), ("algorithm", "direct")];
/// As it comes: short operations go through host memory where processes share a device.
const AUTO: &[(&str, &str)] = &[("algorithm", "direct")];
/// A driver that waits for the device whenever it may.
const WAITING: &[(&str, &str)] = &[("SYNCHRONIZE", "always")];
/// Through host memory.
const STAGED: &[(&str, &str)] = &[("window_bytes", "0"), ("algorithm", "direct")];

/// Starts an all_reduce in place of float32 sums.
fn all_reduce(comm: &Communicator, array: &Array, named: DeviceStream) -> Result<Work, Error> {
    let request = Request::all_reduce(DataType::Float32, ReduceOp::Sum, None, array.memory());
    // SAFETY: every caller keeps the array until the stream has got past the operation.
    unsafe { comm.start(request.on(named), None) }
}

fn array_of(stream: &Stream, value: f32, count: usize) -> Array {
    Array::of(stream, &bytes_of(&vec![value; count]))
}

fn assert_all(array: &Array, stream: &Stream, value: f32) {
    let got = floats(&array.read(stream));
    assert!(
        got.iter().all(|got| *got == value),
        "{:?} instead of {value}",
        got.first()
    );
}

fn collectives(comm: &Communicator) {
    let (stream, _) = stream();
    for count in [0, 1, 7, 1000, 70_001] {
        for case in all(comm.world_size(), count, DataType::Float32, ReduceOp::Sum) {
            case.compare(comm, &stream);
        }
    }
}

#[test]
fn every_collective_is_what_it_is_on_the_host() {
    for world in [1, 2, 3, 5] {
        let test = Test {
            config: SMALL,
            ..Test::new(Ranks::Local, world)
        };
        test.run(|comm| collectives(&comm));
    }
}

#[test]
fn every_collective_between_processes() {
    let cases: [(_, &[_]); 4] = [
        (AUTO, &[("RANDOM_DELAY", "50")]),
        (SMALL, &[("RANDOM_DELAY", "50")]),
        (LARGE, &[("HOST_POINTERS", "separate"), ("FILL", "170")]),
        (SMALL, &[("CONNECTIONS", "1"), ("REUSE", "yes")]),
    ];
    for (config, driver) in cases {
        let test = Test {
            config,
            driver,
            ..Test::new(Ranks::Processes, 3)
        };
        test.run(|comm| collectives(&comm));
    }
}

#[test]
fn every_collective_through_host_memory() {
    for world in [1, 2, 3] {
        let test = Test {
            config: STAGED,
            ..Test::new(Ranks::Local, world)
        };
        test.run(|comm| collectives(&comm));
    }
    let test = Test {
        config: &[("host", "two"), ("algorithm", "direct")],
        ..Test::new(Ranks::Threads, 4)
    };
    test.run(|comm| collectives(&comm));
}

/// Where the driver refuses to map another process's memory, nothing but the speed is lost. That is said once, though
/// there are several groups.
#[test]
fn every_collective_without_ipc() {
    for (refusal, warning) in [
        ("refuse-import", "): map 2097152 bytes of another process"),
        ("refuse-export", "): export 4194304 bytes of device 0"),
    ] {
        let driver = [("IPC", refusal)];
        let test = Test {
            config: LARGE,
            driver: &driver,
            warns: Some(warning),
            ..Test::new(Ranks::Processes, 2)
        };
        test.run(|comm| {
            let (stream, _) = stream();
            for case in all(2, 3001, DataType::Int32, ReduceOp::Max) {
                case.compare(&comm, &stream);
            }
            let held = comm.memory();
            let of = |name| {
                held.iter()
                    .find(|(known, _)| *known == name)
                    .map(|(_, n)| *n)
            };
            assert_eq!(of("device_bytes"), Some(0));
            assert!(of("pinned_bytes") > Some(0));
            let part = comm.split(Some(0), 1 - comm.rank() as i64).expect("a part");
            let part = part.expect("a part of this rank");
            let array = array_of(&stream, 1.0, 100);
            all_reduce(&part, &array, stream.handle()).expect("a call");
            assert_all(&array, &stream, 2.0);
        });
    }
}

/// A rank for each device, which reach each other or do not.
#[test]
fn every_collective_between_devices() {
    for (ranks, access) in [
        (Ranks::Local, "yes"),
        (Ranks::Local, "no"),
        (Ranks::Local, "upwards"),
        (Ranks::Processes, "yes"),
        (Ranks::Processes, "no"),
        (Ranks::Processes, "upwards"),
    ] {
        let driver = [("DEVICES", "2"), ("PEER_ACCESS", access)];
        let test = Test {
            config: SMALL,
            driver: &driver,
            ..Test::new(ranks, 2)
        };
        test.run(|comm| {
            let stream = stream_of(comm.rank() as u32);
            for case in all(2, 3001, DataType::Int32, ReduceOp::Max) {
                case.compare(&comm, &stream);
            }
            let held = comm.memory();
            let of_devices = held.iter().find(|(name, _)| *name == "device_bytes");
            let is_direct = of_devices.is_some_and(|(_, bytes)| *bytes > 0);
            assert_eq!(is_direct, access == "yes");
        });
    }
}

#[test]
fn every_type_and_operator() {
    for config in [SMALL, STAGED] {
        let driver: &[_] = match config == SMALL {
            true => &[],
            false => &[("SEED", "1")],
        };
        let test = Test {
            config,
            driver,
            ..Test::new(Ranks::Local, 3)
        };
        test.run(|comm| {
            let (stream, _) = stream();
            for dtype in DataType::ALL {
                for op in ReduceOp::ALL {
                    let op = match op {
                        ReduceOp::PremulSum(_) => ReduceOp::PremulSum(0.5),
                        op => op,
                    };
                    if op.check(dtype).is_err() {
                        continue;
                    }
                    let even = |collective| Case::even(collective, dtype, 333).reducing(op);
                    even(Collective::AllReduce).compare(&comm, &stream);
                    even(Collective::ReduceScatter).compare(&comm, &stream);
                    let long = Case::even(Collective::AllReduce, dtype, 300_000 / dtype.size());
                    long.reducing(op).in_place().compare(&comm, &stream);
                }
                for case in all(3, 77, dtype, ReduceOp::Sum) {
                    case.compare(&comm, &stream);
                }
            }
        });
    }
}

/// Buffers in pieces, as lists of tensors are.
#[test]
fn buffers_in_pieces() {
    for config in [SMALL, STAGED] {
        let driver: &[_] = match config == SMALL {
            true => &[],
            false => &[("SEED", "1")],
        };
        let test = Test {
            config,
            driver,
            ..Test::new(Ranks::Local, 3)
        };
        test.run(|comm| {
            let (stream, named) = stream();
            let lengths = [4, 400, 36, 100_000, 8, 4, 4, 52];
            let count: usize = lengths.iter().sum::<usize>() / 4;
            let values: Vec<f32> = (0..count).map(|i| (i % 89) as f32).collect();
            let scaled = |by: f32| values.iter().map(|value| value * by).collect::<Vec<_>>();
            let own = (comm.rank() + 1) as f32;
            for op in [ReduceOp::Sum, ReduceOp::PremulSum(2.0)] {
                let input = Array::of(&stream, &bytes_of(&scaled(own)));
                let output = array_of(&stream, -1.0, count);
                // To make them the driver may wait for the streams of the others.
                comm.barrier().expect("barrier");
                let mut backwards = lengths;
                backwards.reverse();
                let (from, to) = (input.pieces(&lengths), output.pieces(&backwards));
                let request = Request::all_reduce(DataType::Float32, op, Some(from), to);
                // SAFETY: the arrays outlive the stream's work, which `read` waits for.
                unsafe { comm.run(request.on(named)) }.expect("all_reduce");
                let factor = if op == ReduceOp::Sum { 6.0 } else { 12.0 };
                assert_eq!(floats(&output.read(&stream)), scaled(factor));
                let request = Request::broadcast(DataType::Float32, 1, input.pieces(&lengths));
                // SAFETY: as above.
                unsafe { comm.run(request.on(named)) }.expect("broadcast");
                assert_eq!(floats(&input.read(&stream)), scaled(2.0));
            }
        });
    }
}

/// An operation happens after the work enqueued before it and before the work enqueued after it, however slow either is.
#[test]
fn operations_keep_the_order_of_streams() {
    for (ranks, delay) in [
        (Ranks::Processes, "kernel:3000"),
        (Ranks::Local, "copy:2000"),
    ] {
        let driver = [("DELAY", delay), ("RANDOM_DELAY", "300")];
        let test = Test {
            config: SMALL,
            driver: &driver,
            ..Test::new(ranks, 2)
        };
        test.run(|comm| {
            let (first, named) = stream();
            let (second, other) = stream();
            let a = array_of(&first, 1.0, 1000);
            let b = array_of(&second, 3.0, 9000);
            let mut expected = (1.0_f32, 3.0_f32);
            let mut works = Vec::new();
            for turn in 0..6 {
                // Both streams in turn, without a wait on the host.
                works.push(all_reduce(&comm, &a, named).expect("started"));
                works.push(all_reduce(&comm, &b, other).expect("started"));
                expected = (expected.0 * 2.0, expected.1 * 2.0);
                if turn % 2 == 0 {
                    works.push(all_reduce(&comm, &a, named).expect("started"));
                    expected.0 *= 2.0;
                }
            }
            for work in &works {
                work.wait(None).expect("the sum");
                assert!(work.is_done());
            }
            assert_all(&a, &first, expected.0);
            assert_all(&b, &second, expected.1);
        });
    }
}

/// A call returns before the peers have come, and the stream waits for them.
#[test]
fn the_host_does_not_wait() {
    let test = Test {
        config: LARGE,
        ..Test::new(Ranks::Local, 2)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let array = array_of(&stream, 1.0, 4);
        all_reduce(&comm, &array, named)
            .expect("started")
            .wait(None)
            .expect("the ranks have met");
        if comm.rank() == 0 {
            let works: Vec<Work> = (0..5)
                .map(|_| all_reduce(&comm, &array, named).expect("started"))
                .collect();
            assert!(works.iter().all(|work| !work.is_done()));
            let error = works[4].wait(Some(Duration::from_millis(50))).unwrap_err();
            assert_eq!(error.code, Code::Timeout);
            assert!(error.message.contains("has not called"), "{error}");
            comm.send_slice(&[1_u8], 1, 0).expect("a signal");
            works[4].wait(None).expect("the sum");
        } else {
            comm.receive_slice(&mut [0_u8], Some(0), 0)
                .expect("a signal");
            for _ in 0..5 {
                all_reduce(&comm, &array, named).expect("started");
            }
        }
        assert_all(&array, &stream, 64.0);
        // On the host it comes after all on the device.
        all_reduce(&comm, &array, named).expect("started");
        comm.barrier().expect("barrier");
        assert!(stream.is_idle().expect("a stream"));
    });
}

#[test]
fn completions_are_called() {
    let test = Test {
        config: LARGE,
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let array = array_of(&stream, 1.0, 4);
        let (tell, told) = std::sync::mpsc::channel();
        for turn in 0..20 {
            let tell = tell.clone();
            let request =
                Request::all_reduce(DataType::Float32, ReduceOp::Sum, None, array.memory());
            let completion = Box::new(move |result| drop(tell.send((turn, result))));
            // SAFETY: the array outlives the stream's work.
            let work = unsafe { comm.start(request.on(named), Some(completion)) };
            drop(work.expect("started"));
        }
        for turn in 0..20 {
            let (which, result) = told.recv_timeout(Duration::from_secs(30)).expect("an end");
            assert_eq!(which, turn);
            result.expect("the sum");
        }
        assert_all(&array, &stream, 1_048_576.0);
    });
}

#[test]
fn groups_share_a_device_in_any_order() {
    let test = Test {
        config: SMALL,
        driver: &[("RANDOM_DELAY", "200")],
        ..Test::new(Ranks::Processes, 3)
    };
    test.run(|comm| {
        let members: Vec<usize> = (0..3).collect();
        let other = comm.subgroup(&members, b"other").expect("a group");
        let other = other.expect("a member");
        let (first, named) = stream();
        let (second, named_too) = stream();
        let a = array_of(&first, 1.0, 30_000);
        let b = array_of(&second, 1.0, 30_000);
        // The ranks meet for the first time in the same order.
        all_reduce(&comm, &a, named).expect("started");
        all_reduce(&other, &b, named_too).expect("started");
        for _ in 0..8 {
            if comm.rank() == 1 {
                all_reduce(&other, &b, named_too).expect("started");
                all_reduce(&comm, &a, named).expect("started");
            } else {
                all_reduce(&comm, &a, named).expect("started");
                all_reduce(&other, &b, named_too).expect("started");
            }
        }
        assert_all(&a, &first, 19_683.0);
        assert_all(&b, &second, 19_683.0);
    });
}

#[test]
fn graphs_are_captured_and_replayed() {
    for ranks in [Ranks::Local, Ranks::Processes] {
        let test = Test {
            config: SMALL,
            driver: &[("RANDOM_DELAY", "100")],
            ..Test::new(ranks, 3)
        };
        test.run(|comm| {
            let (stream, named) = stream();
            let sum = array_of(&stream, 1.0, 40_000);
            let own = array_of(&stream, comm.rank() as f32, 700);
            let gathered = array_of(&stream, -1.0, 2100);
            // The ranks meet before the capture, on another thread's account as it were; also in the middle of one they
            // could, with nothing of it in the graph.
            all_reduce(&comm, &sum, named).expect("started");
            let gather = || {
                let sizes = Sizes::Even(700);
                let (from, to) = (own.memory(), gathered.memory());
                Request::all_gather(DataType::Float32, Some(from), to, sizes).on(named)
            };
            let graph = graph::capture(&stream, || {
                let work = all_reduce(&comm, &sum, named).expect("captured");
                assert!(work.is_done());
                // SAFETY: the arrays outlive the graph.
                unsafe { comm.run(gather()) }.expect("captured");
                all_reduce(&comm, &sum, named).expect("captured");
            });
            // 3, then nine times as much with each replay, and three times with each call between.
            let mut expected = 3.0_f32;
            for turn in 0..4 {
                own.write(&stream, &bytes_of(&[(comm.rank() * 10 + turn) as f32; 700]));
                graph.launch(&stream);
                expected *= 9.0;
                if turn % 2 == 0 {
                    all_reduce(&comm, &sum, named).expect("started");
                    expected *= 3.0;
                }
                let got = floats(&gathered.read(&stream));
                for (rank, part) in got.chunks_exact(700).enumerate() {
                    let wanted = (rank * 10 + turn) as f32;
                    assert!(part.iter().all(|got| *got == wanted), "turn {turn}");
                }
            }
            assert_all(&sum, &stream, expected);
        });
    }
}

#[test]
fn what_cannot_be_captured_says_so() {
    let test = Test {
        config: STAGED,
        ..Test::new(Ranks::Local, 2)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let sum = array_of(&stream, 1.0, 10);
        all_reduce(&comm, &sum, named).expect("started");
        let graph = graph::capture(&stream, || {
            let error = all_reduce(&comm, &sum, named).unwrap_err();
            assert_eq!(error.code, Code::Unsupported);
            assert!(error.message.contains("window_bytes is 0"), "{error}");
        });
        drop(graph);
        all_reduce(&comm, &sum, named).expect("the group is alive");
        assert_all(&sum, &stream, 4.0);
    });
}

/// A rank that dies ends the waits of the others, on their streams too.
#[test]
fn a_dead_peer_ends_every_wait() {
    for config in [LARGE, STAGED] {
        let driver: &[_] = match config == LARGE {
            true => &[],
            false => &[("SEED", "1")],
        };
        let test = Test {
            config,
            driver,
            dies: Some(2),
            ..Test::new(Ranks::Processes, 3)
        };
        test.run(|comm| {
            let (stream, named) = stream();
            let array = array_of(&stream, 1.0, 5000);
            all_reduce(&comm, &array, named)
                .expect("started")
                .wait(None)
                .expect("a sum");
            // Rank 2 goes on once every rank has its sum. The others may see it die before
            // their own barrier has ended.
            let barrier = comm.barrier();
            if comm.rank() == 2 {
                barrier.expect("barrier");
                // SAFETY: it ends the process, without anything that would tell the others.
                unsafe { libc::_exit(9) };
            }
            let works: Vec<Work> = (0..3)
                .map_while(|_| all_reduce(&comm, &array, named).ok())
                .collect();
            for work in &works {
                let error = work.wait(Some(Duration::from_secs(30))).unwrap_err();
                assert_eq!(error.code, Code::PeerLost, "{error}");
                assert_eq!(error.peer, Some(2), "{error}");
            }
            stream.synchronize().expect("the stream goes on");
            let error = all_reduce(&comm, &array, named).unwrap_err();
            assert_eq!(error.code, Code::PeerLost, "{error}");
            assert!(comm.error().is_some());
        });
    }
}

#[test]
fn a_mismatch_names_both_ranks_and_the_field() {
    let usual: &[_] = &[];
    for (ranks, driver) in [
        (Ranks::Local, usual),
        (Ranks::Processes, usual),
        (Ranks::Processes, WAITING),
    ] {
        let test = Test {
            config: LARGE,
            driver,
            ..Test::new(ranks, 2)
        };
        test.run(|comm| {
            let (stream, named) = stream();
            let array = array_of(&stream, 1.0, 64);
            all_reduce(&comm, &array, named).expect("started");
            let dtype = [DataType::Float32, DataType::Int32][comm.rank()];
            let request = Request::all_reduce(dtype, ReduceOp::Sum, None, array.memory());
            // SAFETY: the array outlives the stream's work.
            let work = unsafe { comm.start(request.on(named), None) };
            let error = match work {
                Ok(work) => work.wait(Some(Duration::from_secs(30))).unwrap_err(),
                Err(error) => error,
            };
            assert_eq!(error.code, Code::Mismatch, "{error}");
            for part in ["dtype", "rank 0", "rank 1", "float32", "int32"] {
                assert!(
                    error.message.contains(part),
                    "{part} is missing in: {error}"
                );
            }
            stream.synchronize().expect("the stream goes on");
        });
    }
}

#[test]
fn a_timeout_names_the_missing_rank() {
    let (usual, staged): (&[_], &[_]) = (&[], &[("SEED", "1")]);
    for (config, driver) in [(LARGE, usual), (STAGED, staged), (LARGE, WAITING)] {
        let test = Test {
            config,
            driver,
            ..Test::new(Ranks::Local, 3)
        };
        test.run(|comm| {
            let (stream, named) = stream();
            let array = array_of(&stream, 1.0, 64);
            all_reduce(&comm, &array, named)
                .expect("started")
                .wait(None)
                .expect("a sum");
            comm.barrier().expect("barrier");
            if comm.rank() != 1 {
                comm.set_timeout(Duration::from_millis(500));
                let work = all_reduce(&comm, &array, named).expect("started");
                let error = work.wait(Some(Duration::from_secs(30))).unwrap_err();
                assert_eq!(error.code, Code::Timeout, "{error}");
                assert_eq!(error.peer, Some(1), "{error}");
                assert!(error.message.contains("rank 1"), "{error}");
                stream.synchronize().expect("the stream goes on");
            } else {
                // Well beyond the limit, and the second more that operations of the host may have.
                std::thread::sleep(Duration::from_secs(5));
                // This rank gets the error at the next call that needs the others; what they sent before they gave up
                // may be all that one staged call needs.
                let mut late = || {
                    all_reduce(&comm, &array, named)
                        .and_then(|work| work.wait(None))
                        .err()
                };
                let first = match config == LARGE {
                    true => late(),
                    false => late().or_else(&mut late),
                };
                let error = first.expect("the others have given up");
                assert_eq!(error.code, Code::Timeout, "{error}");
            }
        });
    }
}

#[test]
fn an_abort_ends_what_is_under_way() {
    let usual: &[_] = &[];
    for driver in [usual, WAITING] {
        let test = Test {
            config: LARGE,
            driver,
            ..Test::new(Ranks::Processes, 2)
        };
        test.run(|comm| {
            abort_meanwhile(comm);
        });
    }
}

fn abort_meanwhile(comm: Communicator) {
    let (stream, named) = stream();
    let incoming = array_of(&stream, 0.0, 64);
    let array = array_of(&stream, 1.0, 64);
    all_reduce(&comm, &array, named).expect("started");
    if comm.rank() == 0 {
        let work = all_reduce(&comm, &array, named).expect("started");
        let receive = message(&comm, &incoming, (Some(1), 5), named, false);
        comm.send_slice(&[0_u8], 1, 0).expect("a signal");
        for work in [work, receive] {
            let error = work.wait(Some(Duration::from_secs(30))).unwrap_err();
            assert_eq!(error.code, Code::Aborted, "{error}");
            assert!(error.message.contains("enough"), "{error}");
        }
        stream.synchronize().expect("the stream goes on");
    } else {
        stream.synchronize().expect("a sum");
        comm.receive_slice(&mut [0_u8], Some(0), 0)
            .expect("a signal");
        comm.abort("enough");
        all_reduce(&comm, &array, named).unwrap_err();
    }
}

#[test]
fn a_communicator_that_is_closed_early_fails_what_is_under_way() {
    let drivers: [&[_]; 3] = [
        &[],
        &[("HOST_POINTERS", "separate"), ("REUSE", "yes")],
        WAITING,
    ];
    for driver in drivers {
        let test = Test {
            config: LARGE,
            driver,
            ..Test::new(Ranks::Local, 2)
        };
        test.run(|comm| {
            close_early(comm);
        });
    }
}

fn close_early(comm: Communicator) {
    let (stream, named) = stream();
    let array = array_of(&stream, 1.0, 64);
    all_reduce(&comm, &array, named)
        .expect("started")
        .wait(None)
        .expect("a sum");
    comm.barrier().expect("barrier");
    let work = (comm.rank() == 0).then(|| all_reduce(&comm, &array, named).expect("started"));
    if let Some(work) = work {
        comm.close();
        let error = work.wait(Some(Duration::from_secs(30))).unwrap_err();
        assert_eq!(error.code, Code::Aborted, "{error}");
    } else {
        while comm.error().is_none() {
            std::thread::sleep(Duration::from_millis(20));
            if let Ok(work) = all_reduce(&comm, &array, named) {
                let error = work.wait(Some(Duration::from_secs(30)));
                assert!(error.is_err());
            }
        }
    }
    stream.synchronize().expect("the stream goes on");
}

fn refused(comm: &Communicator, request: Request, words: &str) {
    // SAFETY: it is refused.
    let error = unsafe { comm.run(request) }.unwrap_err();
    assert!(!error.code.is_fatal(), "{error}");
    assert!(
        error.message.contains(words),
        "{words:?} is missing in: {error}"
    );
}

#[test]
fn bad_input_is_refused() {
    let test = Test {
        config: LARGE,
        driver: &[("DEVICES", "2")],
        ..Test::new(Ranks::Local, 2)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let elsewhere = stream_of(1);
        let array = array_of(&stream, 1.0, 64);
        let far = array_of(&elsewhere, 1.0, 64);
        let sum =
            |memory: Memory| Request::all_reduce(DataType::Float32, ReduceOp::Sum, None, memory);
        let mut here = [1.0_f32; 64];
        // SAFETY: it is refused before it is used.
        let host = unsafe { Memory::from_raw_parts(here.as_mut_ptr().cast(), 256) };
        refused(&comm, sum(host).on(named), "CUDA does not know");
        refused(&comm, sum(array.memory()), "no stream was given");
        refused(&comm, sum(far.memory()).on(named), "memory of device 1");
        let wrong = DeviceStream {
            device: 0,
            ..elsewhere.handle()
        };
        refused(
            &comm,
            sum(array.memory()).on(wrong),
            "the stream belongs to device 1",
        );
        let none = DeviceStream {
            device: 7,
            stream: 0,
        };
        refused(&comm, sum(array.memory()).on(none), "there is no device 7");
        // No rank waits for another now.
        let freed = DeviceMemory::allocate(stream.device(), 256)
            .expect("memory")
            .address();
        // SAFETY: it is refused before it is used.
        let freed = unsafe {
            Memory::from_raw_parts(std::ptr::without_provenance_mut(freed as usize), 256)
        };
        refused(&comm, sum(freed).on(named), "it was freed");
        let beyond = array.part(0, 256);
        refused(
            &comm,
            Request::all_reduce(DataType::Complex64, ReduceOp::Min, None, beyond).on(named),
            "no meaning",
        );
        // The group has not noticed.
        all_reduce(&comm, &array, named).expect("started");
        assert_all(&array, &stream, 2.0);
    });
}

#[test]
fn ranks_of_one_process_need_a_stream_each() {
    let test = Test {
        config: LARGE,
        // The shared stream.
        may_leak: true,
        ..Test::new(Ranks::Local, 2)
    };
    test.run(|comm| {
        static SHARED: std::sync::OnceLock<Stream> = std::sync::OnceLock::new();
        let (own, named) = stream();
        let array = array_of(&own, 1.0, 64);
        all_reduce(&comm, &array, named)
            .expect("started")
            .wait(None)
            .expect("the ranks have met");
        let shared = SHARED.get_or_init(|| stream_of(0)).handle();
        if comm.rank() == 0 {
            let work = all_reduce(&comm, &array, shared).expect("started");
            comm.send_slice(&[0_u8], 1, 0).expect("a signal");
            work.wait(None).expect("a sum");
        } else {
            comm.receive_slice(&mut [0_u8], Some(0), 0)
                .expect("a signal");
            let error = all_reduce(&comm, &array, shared).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument);
            assert!(error.message.contains("a stream of its own"), "{error}");
            all_reduce(&comm, &array, named).expect("started");
        }
        assert_all(&array, &own, 4.0);
    });
}

#[test]
fn a_driver_that_will_not_do_says_what_to_do() {
    let cases = [
        ([("VERSION", "11080")], "too old"),
        ([("MEMORY_OPERATIONS", "no")], "cannot wait for words"),
    ];
    for (driver, words) in cases {
        let test = Test {
            driver: &driver,
            may_leak: true,
            ..Test::new(Ranks::Local, 1)
        };
        test.run(|comm| {
            let named = DeviceStream {
                device: 0,
                stream: 0,
            };
            let request = Request::barrier().on(named);
            // SAFETY: it has no memory.
            let error = unsafe { comm.run(request) }.unwrap_err();
            assert_eq!(error.code, Code::Unsupported, "{error}");
            assert!(error.message.contains(words), "{error}");
            // All else works.
            let mut data = [1.0_f32];
            comm.all_reduce(&mut data, ReduceOp::Sum).expect("a sum");
        });
    }
}

#[test]
fn without_a_driver_the_error_says_so() {
    if std::env::var("UNISONO_TEST_CUDA_ROLE").is_ok() {
        return;
    }
    if std::path::Path::new("/dev/nvidiactl").exists() {
        skipped("there is a driver on this machine");
        return;
    }
    let comms = Communicator::local(1, &unisono::config::Config::default()).expect("a group");
    let named = DeviceStream {
        device: 0,
        stream: 0,
    };
    // SAFETY: it has no memory.
    let error = unsafe { comms[0].run(Request::barrier().on(named)) }.unwrap_err();
    assert_eq!(error.code, Code::Unsupported);
    assert!(error.message.contains("no CUDA driver here"), "{error}");
}

/// A forked child has its parent's communicator, and neither its threads nor its driver.
#[test]
fn a_forked_child_gets_an_error() {
    let test = Test {
        config: LARGE,
        ..Test::new(Ranks::Local, 1)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let array = array_of(&stream, 1.0, 64);
        all_reduce(&comm, &array, named).expect("started");
        // SAFETY: the child calls what is refused at once, and ends without running anything else.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = all_reduce(&comm, &array, named)
                .err()
                .is_some_and(|error| error.message.contains("forked"));
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(!refused)) };
        }
        let mut status = -1;
        // SAFETY: it stores a number.
        unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!(status, 0, "the child was not refused");
        assert_all(&array, &stream, 1.0);
    });
}
