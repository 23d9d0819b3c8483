//! Messages between ranks.

use unisono::error::Error;
use unisono::types::{DataType, DeviceStream};
use unisono::{Communicator, PointToPoint, Work};

use crate::calls::together;
use crate::gpu::{Array, bytes_of, floats, stream};
use crate::harness::{Ranks, Test};
use crate::{LARGE, array_of, assert_all};

/// One message, started on a stream.
pub(crate) fn message(
    comm: &Communicator,
    array: &Array,
    place: (Option<usize>, u64),
    named: DeviceStream,
    sends: bool,
) -> Work {
    attempt(comm, array, place, (named, sends)).expect("started")
}

/// As [`message`], which may be refused.
pub(crate) fn attempt(
    comm: &Communicator,
    array: &Array,
    (peer, tag): (Option<usize>, u64),
    (named, sends): (DeviceStream, bool),
) -> Result<Work, Error> {
    let options = PointToPoint {
        stream: Some(named),
        ..PointToPoint::default()
    };
    let (dtype, memory) = (DataType::Float32, array.memory());
    // SAFETY: every caller keeps the array until the stream has got past the operation.
    unsafe {
        match peer {
            Some(to) if sends => comm.send(dtype, memory, to, tag, options),
            from => comm.receive(dtype, memory, from, tag, options),
        }
    }
}

#[test]
fn messages_meet_by_rank_and_tag() {
    for ranks in [Ranks::Local, Ranks::Processes] {
        let test = Test {
            config: LARGE,
            driver: &[("RANDOM_DELAY", "200")],
            ..Test::new(ranks, 3)
        };
        test.run(|comm| {
            let ((stream, named), (back, named_back)) = (stream(), stream());
            let (rank, world) = (comm.rank(), comm.world_size());
            let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
            for count in [0, 1, 5000, 300_000] {
                let first = array_of(&stream, rank as f32, count);
                let second = array_of(&stream, rank as f32 + 10.0, 3);
                let got_first = array_of(&back, -1.0, count);
                let got_second = array_of(&back, -1.0, 3);
                // To make them the driver may wait for the streams of the others.
                comm.barrier().expect("barrier");
                // The second message overtakes by its tag, the first comes from any rank.
                message(&comm, &first, (Some(next), 1), named, true);
                message(&comm, &second, (Some(next), 2), named, true);
                let two = message(&comm, &got_second, (Some(previous), 2), named_back, false);
                let one = message(&comm, &got_first, (None, 1), named_back, false);
                one.wait(None).expect("a message");
                two.wait(None).expect("a message");
                assert_eq!(one.source(), Some(previous));
                assert_all(&got_first, &back, previous as f32);
                assert_all(&got_second, &back, previous as f32 + 10.0);
                comm.barrier().expect("barrier");
            }
        });
    }
}

/// Registered host memory that messages of a rank have.
pub(crate) fn pinned(comm: &Communicator) -> u64 {
    let held = comm.memory();
    let found = held.iter().find(|(name, _)| *name == "pinned_bytes");
    found.expect("it is listed").1
}

/// Values that tell a piece of a message from another one, and a rank's from another's.
pub(crate) fn values(rank: usize, count: usize) -> Vec<f32> {
    (0..count)
        .map(|at| ((at / 1024 * 7 + at) % 65_521 + rank) as f32)
        .collect()
}

/// The driver may wait for the device when it registers memory, and so for a stream that waits for the peer's message, which
/// may be behind a registration, too.
#[test]
fn nothing_is_registered_beside_a_stream_that_waits() {
    for (config, delay) in [(LARGE, "0"), (&[("heap_bytes", "0")], "100")] {
        let driver = [("SYNCHRONIZE", "refuse"), ("RANDOM_DELAY", delay)];
        let test = Test {
            config,
            driver: &driver,
            ..Test::new(Ranks::Processes, 2)
        };
        test.run(|comm| {
            let ((stream, named), (back, named_back)) = (stream(), stream());
            let (rank, peer) = (comm.rank(), Some(1 - comm.rank()));
            let counts = [5_000_000, 700_001, 3, 3_000_000, 0, 20_000, 5_000_000, 1];
            let arrays: Vec<(Array, Array)> = counts
                .iter()
                .map(|&count| {
                    let own = Array::of(&stream, &bytes_of(&values(rank, count)));
                    (own, array_of(&back, -1.0, count))
                })
                .collect();
            for turn in 0..2 {
                comm.barrier().expect("barrier");
                // All that comes, and only then what goes.
                let incoming = arrays.iter().zip(0..).map(|((_, to), tag)| {
                    let work = message(&comm, to, (peer, tag), named_back, false);
                    let held = pinned(&comm);
                    // While nothing waits there is no reason not to register.
                    let is_whole = held > to.memory().len() as u64;
                    assert!(tag > 0 || is_whole, "turn {turn}: {held} bytes");
                    work
                });
                let incoming: Vec<Work> = incoming.collect();
                let outgoing = arrays
                    .iter()
                    .zip(0..)
                    .map(|((from, _), tag)| message(&comm, from, (peer, tag), named, true));
                let outgoing: Vec<Work> = outgoing.collect();
                for work in incoming.iter().chain(&outgoing) {
                    work.wait(None).expect("a message");
                }
                assert_eq!(pinned(&comm), 0);
                for ((_, to), count) in arrays.iter().zip(counts) {
                    let got = floats(&to.read(&back));
                    assert!(got == values(1 - rank, count), "{count} values");
                    to.write(&back, &bytes_of(&vec![-1.0_f32; count]));
                }
            }
            together(&comm);
        });
    }
}

/// A send waits for the host, and not for the peer, also when it is too long for the registered memory that is left.
#[test]
fn a_long_send_does_not_wait_for_its_receiver() {
    let test = Test {
        config: LARGE,
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let count = 20 << 20;
        let array = Array::of(&stream, &bytes_of(&values(comm.rank(), count)));
        if comm.rank() == 0 {
            let works: Vec<Work> = (0..3)
                .map(|tag| message(&comm, &array, (Some(1), tag), named, true))
                .collect();
            // They go from here although the peer receives none of them yet; what the stream does next is not sent.
            stream.synchronize().expect("the stream goes on");
            array.write(&stream, &bytes_of(&vec![-1.0_f32; count]));
            comm.send_slice(&[0_u8], 1, 9).expect("a word");
            for work in works {
                work.wait(None).expect("a message");
            }
        } else {
            comm.receive_slice(&mut [0_u8], Some(0), 9).expect("a word");
            for tag in [2, 0, 1] {
                let work = message(&comm, &array, (Some(0), tag), named, false);
                work.wait(None).expect("a message");
                assert!(floats(&array.read(&stream)) == values(0, count));
            }
        }
        together(&comm);
    });
}

/// A message that is under way in pieces when its peer dies lets its stream pass, and leaves no number.
#[test]
fn a_long_message_ends_with_its_peer() {
    let test = Test {
        config: LARGE,
        dies: Some(1),
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let ((stream, named), (back, named_back)) = (stream(), stream());
        let count = 20 << 20;
        let own = array_of(&stream, 1.0, count);
        let incoming = array_of(&back, 1.0, count);
        if comm.rank() == 1 {
            comm.receive_slice(&mut [0_u8], Some(0), 9).expect("a word");
            // SAFETY: it ends the process, without anything that would tell the others.
            unsafe { libc::_exit(9) };
        }
        let works = [
            message(&comm, &incoming, (Some(1), 1), named_back, false),
            message(&comm, &own, (Some(1), 2), named, true),
        ];
        comm.send_slice(&[0_u8], 1, 9).expect("a word");
        for work in &works {
            let error = work.wait(None).unwrap_err();
            assert_eq!(error.peer, Some(1), "{error}");
        }
        stream.synchronize().expect("the stream goes on");
        back.synchronize().expect("the stream goes on");
        let values = floats(&incoming.read(&back));
        assert!(values.iter().all(|value| value.is_nan()));
    });
}
