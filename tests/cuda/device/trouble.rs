//! Calls that the driver refuses, calls at the same time, and a context that is lost.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use unisono::error::Code;
use unisono::transport::cuda::driver::{MemoryOperation, Pinned};
use unisono::types::{DataType, ReduceOp};
use unisono::{Communicator, PointToPoint, Request, Work};

use crate::gpu::{Array, floats, stream};
use crate::harness::{Ranks, Test};
use crate::{AUTO, LARGE, SMALL, STAGED, all_reduce, array_of};

fn under_way(comm: &Communicator) -> u64 {
    let held = comm.memory();
    let found = held.iter().find(|(name, _)| *name == "device_operations");
    found.expect("it is listed").1
}

/// Streams that come one after the other do so also when they are let pass, and all of them are.
#[test]
fn every_stream_goes_on_after_a_failure() {
    let test = Test {
        config: SMALL,
        driver: &[("DELAY", "copy:3000")],
        dies: Some(1),
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let (first, named) = stream();
        let (second, other) = stream();
        let long = array_of(&first, 1.0, 200_000);
        let short = array_of(&second, 1.0, 10);
        all_reduce(&comm, &short, other)
            .expect("started")
            .wait(None)
            .expect("a sum");
        // Rank 1 goes on once both have their sums. Rank 0 may see it die before its own
        // barrier has ended.
        let barrier = comm.barrier();
        if comm.rank() == 1 {
            barrier.expect("barrier");
            // SAFETY: it ends the process, without anything that would tell the others.
            unsafe { libc::_exit(9) };
        }
        let started: Vec<Work> = [(&long, named), (&short, other)]
            .into_iter()
            .filter_map(|(array, named)| all_reduce(&comm, array, named).ok())
            .collect();
        for work in &started {
            let error = work.wait(Some(Duration::from_secs(30))).unwrap_err();
            assert_eq!(error.peer, Some(1), "{error}");
        }
        first.synchronize().expect("the stream goes on");
        second.synchronize().expect("the stream goes on");
    });
}

/// A failed group's operations yield NaN, on every way: a program that goes on cannot take it for a result.
#[test]
fn what_a_dead_peer_should_have_made_is_no_number() {
    for config in [AUTO, SMALL, LARGE, STAGED] {
        let test = Test {
            config,
            dies: Some(1),
            ..Test::new(Ranks::Processes, 2)
        };
        test.run(|comm| {
            let (stream, named) = stream();
            let arrays: Vec<_> = (0..4).map(|_| array_of(&stream, 1.0, 50_000)).collect();
            all_reduce(&comm, &arrays[0], named)
                .expect("started")
                .wait(None)
                .expect("a sum");
            if comm.rank() == 1 {
                comm.receive_slice(&mut [0_u8], Some(0), 0).expect("a word");
                // SAFETY: it ends the process, without anything that would tell the others.
                unsafe { libc::_exit(9) };
            }
            // In each a part comes from rank 1, which never does its own.
            let options = || PointToPoint {
                stream: Some(named),
                ..PointToPoint::default()
            };
            let sum = all_reduce(&comm, &arrays[1], named).expect("started");
            let from_root = Request::broadcast(DataType::Float32, 1, arrays[2].memory());
            // SAFETY: the arrays outlive the stream's work.
            let (copied, received) = unsafe {
                let copied = comm.start(from_root.on(named), None).expect("started");
                let (dtype, memory) = (DataType::Float32, arrays[3].memory());
                (
                    copied,
                    comm.receive(dtype, memory, Some(1), 3, options())
                        .expect("posted"),
                )
            };
            comm.send_slice(&[1_u8], 1, 0).expect("sent");
            for work in [sum, copied, received] {
                let error = work.wait(Some(Duration::from_secs(30))).unwrap_err();
                assert_eq!(error.peer, Some(1), "{error}");
            }
            stream.synchronize().expect("the stream goes on");
            for (index, array) in arrays.iter().enumerate() {
                let values = floats(&array.read(&stream));
                let is_right = |value: &f32| match index {
                    0 => *value == 2.0,
                    _ => value.is_nan(),
                };
                assert!(
                    values.iter().all(is_right),
                    "{config:?}, array {index}: {:?}",
                    values.first()
                );
            }
        });
    }
}

/// Operations of several types and kinds, which use the same memory of the host one after the other.
#[test]
fn what_could_not_be_made_is_no_number_whatever_came_before_it() {
    for config in [AUTO, STAGED] {
        let test = Test {
            config,
            dies: Some(1),
            ..Test::new(Ranks::Processes, 2)
        };
        test.run(|comm| {
            let (stream, named) = stream();
            let floats_of = |value: f32| array_of(&stream, value, 20_000);
            let first = floats_of(1.0);
            let sum = all_reduce(&comm, &first, named).expect("started");
            sum.wait(None).expect("a sum");
            if comm.rank() == 1 {
                comm.receive_slice(&mut [0_u8], Some(0), 0).expect("a word");
                // SAFETY: it ends the process, without anything that would tell the others.
                unsafe { libc::_exit(9) };
            }
            let arrays: Vec<Array> = (0..12).map(|_| floats_of(1.0)).collect();
            for (index, array) in arrays.iter().enumerate() {
                let (memory, dtype) = (array.memory(), DataType::Float32);
                let request = match index % 3 {
                    0 => Request::all_reduce(DataType::Int64, ReduceOp::Sum, None, memory),
                    1 => Request::all_reduce(dtype, ReduceOp::Sum, None, memory),
                    _ => Request::broadcast(dtype, 1, memory),
                };
                // SAFETY: the arrays outlive the stream's work.
                unsafe { comm.start(request.on(named), None) }.expect("started");
            }
            comm.send_slice(&[1_u8], 1, 0).expect("sent");
            stream.synchronize().expect("the stream goes on");
            for (index, array) in arrays.iter().enumerate() {
                let bytes = array.read(&stream);
                match index % 3 {
                    0 => assert!(bytes.iter().all(|byte| *byte == 0), "{config:?}, {index}"),
                    _ => {
                        let values = floats(&bytes);
                        let first = values.first();
                        let is_right = values.iter().all(|value| value.is_nan());
                        assert!(is_right, "{config:?}, array {index}: {first:?}");
                    }
                }
            }
        });
    }
}

/// The second launch of the second operation is refused, in its middle.
#[test]
fn an_operation_that_cannot_be_enqueued_fails_the_group() {
    let test = Test {
        config: LARGE,
        driver: &[("FAIL", "cuLaunchKernel:4=701")],
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let array = array_of(&stream, 1.0, 100);
        let sum = || all_reduce(&comm, &array, named);
        sum().expect("started").wait(None).expect("a sum");
        // Both have the first.
        comm.barrier().expect("barrier");
        let error = sum().unwrap_err();
        assert!(error.code.is_fatal(), "{error}");
        stream.synchronize().expect("the stream goes on");
        assert!(comm.error().is_some());
        assert_eq!(under_way(&comm), 0);
        sum().unwrap_err();
    });
}

/// The host knows of the receive already, and would give it a message.
#[test]
fn a_receive_that_cannot_be_enqueued_fails_the_group() {
    let test = Test {
        config: LARGE,
        driver: &[("FAIL", "cuMemcpy2DAsync_v2:1=CUDA_ERROR_INVALID_HANDLE")],
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let array = array_of(&stream, 1.0, 100);
        if comm.rank() == 0 {
            comm.receive_slice(&mut [0_u8], Some(1), 0).unwrap_err();
            return;
        }
        let options = PointToPoint {
            stream: Some(named),
            ..PointToPoint::default()
        };
        // SAFETY: the array outlives the stream's work.
        let refused =
            unsafe { comm.receive(DataType::Float32, array.memory(), Some(0), 1, options) };
        refused.unwrap_err();
        assert!(comm.error().is_some(), "a message would go astray");
        stream.synchronize().expect("the stream goes on");
        let since = Instant::now();
        while under_way(&comm) > 0 {
            assert!(since.elapsed() < Duration::from_secs(30), "it never ends");
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

/// Whatever was started before a group was closed ends, also when that was at the same time.
#[test]
fn calls_race_with_the_end() {
    let test = Test {
        config: LARGE,
        ..Test::new(Ranks::Local, 1)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let array = array_of(&stream, 1.0, 100);
        for turn in 0..60_u64 {
            let part = comm.subgroup(&[0], &turn.to_le_bytes()).expect("a group");
            let part = part.expect("a member");
            if turn % 2 == 0 {
                all_reduce(&part, &array, named).expect("started");
            }
            std::thread::scope(|scope| {
                let caller = scope.spawn(|| {
                    let works = std::iter::from_fn(|| all_reduce(&part, &array, named).ok());
                    works.take(10_000).collect::<Vec<Work>>()
                });
                std::thread::sleep(Duration::from_micros(turn * 20));
                part.close();
                for work in caller.join().expect("no panic") {
                    if let Err(error) = work.wait(Some(Duration::from_secs(30))) {
                        assert_ne!(error.code, Code::Timeout, "{error}");
                    }
                }
            });
        }
        stream.synchronize().expect("the stream");
    });
}

/// Long before the deadline, and the other rank learns of it.
#[test]
fn a_context_that_is_lost_is_noticed() {
    let test = Test {
        config: LARGE,
        driver: &[("FAIL", "copy:40=CUDA_ERROR_ILLEGAL_ADDRESS")],
        may_leak: true,
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let array = array_of(&stream, 1.0, 100);
        let sum = || all_reduce(&comm, &array, named);
        sum().expect("started").wait(None).expect("a sum");
        if comm.rank() == 0 {
            let error = comm.receive_slice(&mut [0_u8], Some(1), 0).unwrap_err();
            assert!(error.message.contains("ILLEGAL_ADDRESS"), "{error}");
            return;
        }
        let (other, _) = crate::gpu::stream();
        let scratch = array_of(&other, 0.0, 1);
        let work = sum().expect("started");
        // A kernel of the user's, as it were.
        for _ in 0..40 {
            if other.write(scratch.address(), &[0; 4]).is_err() {
                break;
            }
        }
        let error = work.wait(Some(Duration::from_secs(30))).unwrap_err();
        assert_eq!(error.code, Code::System, "{error}");
        assert!(error.message.contains("ILLEGAL_ADDRESS"), "{error}");
    });
}

/// A rank whose stream is held up by its own work blames no other rank, and the others blame it.
#[test]
fn a_stream_that_is_held_up_by_its_own_work_is_told_from_one_that_waits() {
    let test = Test {
        config: SMALL,
        ..Test::new(Ranks::Processes, 3)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let gate = Pinned::private(stream.device(), 4096).expect("a word");
        let brief = || Some(Duration::from_millis(200));
        // In one shot, and in two, where the others have contributed and wait for results.
        for count in [10, 100_000] {
            let array = array_of(&stream, 1.0, count);
            all_reduce(&comm, &array, named)
                .expect("started")
                .wait(None)
                .expect("the ranks have met");
            comm.barrier().expect("barrier");
            gate.word(0).store(0, Ordering::Release);
            if comm.rank() == 0 {
                let held = MemoryOperation::WaitAny {
                    address: gate.address(),
                    mask: 1,
                };
                stream.operate(&[held]).expect("held");
            }
            let work = all_reduce(&comm, &array, named).expect("started");
            let words = match comm.rank() {
                0 => "this rank's stream has not come to it yet",
                _ => "waits for rank 0",
            };
            // Once the streams have come to where they wait, which takes a while on a busy machine.
            let since = Instant::now();
            loop {
                let error = work.wait(brief()).unwrap_err();
                if error.message.replace(&work.name(), "it").contains(words) {
                    break;
                }
                assert!(
                    since.elapsed() < Duration::from_secs(30),
                    "{count}: {error}"
                );
            }
            match comm.rank() {
                // A barrier would wait for the device.
                0 => (1..3).for_each(|peer| {
                    let told = comm.receive_slice(&mut [0_u8], Some(peer), 0);
                    told.expect("a word");
                }),
                _ => comm.send_slice(&[0_u8], 0, 0).expect("a word"),
            }
            gate.word(0).store(1, Ordering::Release);
            work.wait(None).expect("a sum");
        }
    });
}
