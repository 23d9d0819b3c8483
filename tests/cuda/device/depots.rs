//! Long messages, which lie in the sender's depot until the receiver has fetched them.

use std::time::Duration;

use unisono::error::Code;
use unisono::transport::cuda::driver::Stream;
use unisono::types::{DataType, DeviceStream};
use unisono::{Communicator, PointToPoint, Work};

use crate::gpu::{Array, bytes_of, floats, stream_of};
use crate::harness::{Ranks, Test};
use crate::messages::{message, pinned, values};
use crate::{AUTO, array_of};

/// Elements of a message that is long.
const LONG: usize = 600_001;

/// Three devices: one for each rank.
const DEVICES: (&str, &str) = ("DEVICES", "3");

/// Two streams of the rank's own device, and their names.
fn streams(comm: &Communicator) -> [(Stream, DeviceStream); 2] {
    [(); 2].map(|()| {
        let stream = stream_of(comm.rank() as u32);
        let named = stream.handle();
        (stream, named)
    })
}

/// Exchanges long messages until ranks have mapped each other's depots. They do so in calls before which nothing is under
/// way in the process.
fn warm_up(comm: &Communicator, named: DeviceStream, named_back: DeviceStream) {
    let stream = stream_of(named.device);
    let (from, to) = (array_of(&stream, 1.0, LONG), array_of(&stream, 1.0, LONG));
    let exchange = |peer| {
        let works = [
            message(comm, &to, (Some(peer), 99), named_back, false),
            message(comm, &from, (Some(peer), 99), named, true),
        ];
        for work in works {
            work.wait(None).expect("a message");
        }
    };
    for peer in (0..comm.world_size()).filter(|peer| *peer != comm.rank()) {
        exchange(peer);
    }
    for _ in 0..2 {
        for rank in 0..comm.world_size() {
            comm.barrier().expect("barrier");
            if rank == comm.rank() {
                exchange(rank);
            }
        }
    }
    comm.barrier().expect("barrier");
}

#[test]
fn long_messages_meet_by_rank_and_tag() {
    for ranks in [Ranks::Local, Ranks::Threads, Ranks::Processes] {
        for driver in [
            [DEVICES, ("RANDOM_DELAY", "200")],
            [DEVICES, ("SYNCHRONIZE", "refuse")],
            [DEVICES, ("IPC", "refuse-import")],
        ] {
            // Of ranks in one process one would allocate an array while another one's stream waits.
            if driver[1].0 == "SYNCHRONIZE" && ranks != Ranks::Processes {
                continue;
            }
            let is_mapped = driver[1].0 != "IPC" || ranks != Ranks::Processes;
            let test = Test {
                config: AUTO,
                driver: &driver,
                ..Test::new(ranks, 3)
            };
            test.run(|comm| meet_by_rank_and_tag(&comm, is_mapped));
        }
    }
}

fn meet_by_rank_and_tag(comm: &Communicator, is_mapped: bool) {
    let [(stream, named), (back, named_back)] = streams(comm);
    let (rank, world) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
    warm_up(comm, named, named_back);
    let counts = [LONG, 1 << 20, 1_200_003];
    let own = counts.map(|count| Array::of(&stream, &bytes_of(&values(rank, count))));
    let short = array_of(&stream, rank as f32, 3);
    let got = counts.map(|count| array_of(&back, -1.0, count));
    let got_short = array_of(&back, -1.0, 3);
    for _ in 0..3 {
        comm.barrier().expect("barrier");
        let mut works: Vec<Work> = own
            .iter()
            .zip([3, 1, 2])
            .map(|(array, tag)| message(comm, array, (Some(next), tag), named, true))
            .collect();
        works.push(message(comm, &short, (Some(next), 1), named, true));
        if is_mapped {
            // They wait for the receiver on the device.
            assert!(pinned(comm) < 64 << 10, "{} bytes", pinned(comm));
        }
        comm.barrier().expect("barrier");
        // By tag and in the order of sending, from any rank.
        let tags = [(&got[1], 1), (&got_short, 1), (&got[2], 2), (&got[0], 3)];
        for (array, tag) in tags {
            let from = (tag != 2).then_some(previous);
            let work = message(comm, array, (from, tag), named_back, false);
            work.wait(None).expect("a message");
            assert_eq!(work.source(), Some(previous));
        }
        for work in works {
            work.wait(None).expect("a message");
        }
        for (array, count) in got.iter().zip(counts) {
            assert!(floats(&array.read(&back)) == values(previous, count));
            array.write(&back, &bytes_of(&vec![-1.0_f32; count]));
        }
        assert_eq!(floats(&got_short.read(&back)), [previous as f32; 3]);
    }
}

/// To itself a rank sends what it has begun to receive, in a depot or past it.
#[test]
fn long_messages_go_to_oneself() {
    let test = Test {
        config: AUTO,
        driver: &[DEVICES],
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let [(stream, named), (back, named_back)] = streams(&comm);
        let rank = comm.rank();
        for count in [LONG, 20 << 20] {
            let own = Array::of(&stream, &bytes_of(&values(rank, count)));
            let got = array_of(&back, -1.0, count);
            for peer in [Some(rank), None] {
                got.write(&back, &bytes_of(&vec![-1.0_f32; count]));
                let works = [
                    message(&comm, &got, (peer, 5), named_back, false),
                    message(&comm, &own, (Some(rank), 5), named, true),
                ];
                for work in works {
                    work.wait(None).expect("a message");
                }
                assert!(floats(&got.read(&back)) == values(rank, count));
            }
        }
        // A receive from any rank ends when all others have left.
        comm.barrier().expect("barrier");
    });
}

/// A message that a depot has no room for follows its note through host memory, and no send waits for its receiver.
#[test]
fn a_depot_may_be_full() {
    let test = Test {
        config: AUTO,
        driver: &[DEVICES],
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let [(stream, named), (back, named_back)] = streams(&comm);
        warm_up(&comm, named, named_back);
        // Of 8 MiB each.
        let (count, number) = (2 << 20, 9);
        let own = Array::of(&stream, &bytes_of(&values(comm.rank(), count)));
        for _ in 0..2 {
            comm.barrier().expect("barrier");
            let works: Vec<Work> = (0..number)
                .map(|tag| message(&comm, &own, (Some(1 - comm.rank()), tag), named, true))
                .collect();
            stream.synchronize().expect("the stream goes on");
            for tag in (0..number).rev() {
                let got = array_of(&back, -1.0, count);
                let work = message(&comm, &got, (None, tag), named_back, false);
                work.wait(None).expect("a message");
                assert!(floats(&got.read(&back)) == values(1 - comm.rank(), count));
            }
            for work in works {
                work.wait(None).expect("a message");
            }
        }
    });
}

/// Both sides of a message learn what differs, as the caller knows it.
#[test]
fn lengths_that_differ_are_named() {
    for (sent, received) in [(LONG, LONG + 1), (3, LONG), (LONG, 3)] {
        let label = [DEVICES, ("SEED", &*(sent + 2 * received).to_string())];
        let test = Test {
            config: AUTO,
            driver: &label,
            may_leak: true,
            ..Test::new(Ranks::Processes, 2)
        };
        test.run(|comm| {
            let [(stream, named), _] = streams(&comm);
            let array = array_of(&stream, 1.0, LONG + 1);
            let sends = comm.rank() == 0;
            let count = if sends { sent } else { received };
            let options = PointToPoint {
                stream: Some(named),
                ..PointToPoint::default()
            };
            let part = array.part(0, 4 * count);
            // SAFETY: the array outlives the operation.
            let work = unsafe {
                match sends {
                    true => comm.send(DataType::Float32, part, 1, 7, options),
                    false => comm.receive(DataType::Float32, part, Some(0), 7, options),
                }
            };
            let ended = work.and_then(|work| work.wait(None));
            if !sends {
                let error = ended.expect_err("a mismatch");
                assert_eq!(error.code, Code::Mismatch, "{error}");
                for said in [
                    format!(" receives {} bytes of float32 but rank 0 (", 4 * received),
                    format!(" sends {} bytes of float32", 4 * sent),
                ] {
                    assert!(error.message.contains(&said), "{error}");
                }
            }
        });
    }
}

/// When a rank dies, the send of a message to it that lies in a depot fails and names it; the buffer of a receive from it
/// is filled with NaN.
#[test]
fn a_long_message_ends_with_its_peer() {
    let test = Test {
        config: AUTO,
        dies: Some(1),
        driver: &[DEVICES],
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let [(stream, named), (back, named_back)] = streams(&comm);
        warm_up(&comm, named, named_back);
        let own = array_of(&stream, 1.0, LONG);
        let incoming = array_of(&back, 1.0, LONG);
        if comm.rank() == 1 {
            comm.receive_slice(&mut [0_u8], Some(0), 9).expect("a word");
            // SAFETY: it ends the process, without anything that would tell the others.
            unsafe { libc::_exit(9) };
        }
        let works = [
            message(&comm, &incoming, (Some(1), 1), named_back, false),
            message(&comm, &own, (Some(1), 2), named, true),
        ];
        stream.synchronize().expect("the stream goes on");
        comm.send_slice(&[0_u8], 1, 9).expect("a word");
        for (work, name) in works.iter().zip(["recv", "send"]) {
            let error = work.wait(None).unwrap_err();
            assert_eq!(error.peer, Some(1), "{error}");
            let operation = error.operation.as_deref().unwrap_or_default();
            assert!(operation.starts_with(name), "{error}");
        }
        back.synchronize().expect("the stream goes on");
        let values = floats(&incoming.read(&back));
        assert!(values.iter().all(|value| value.is_nan()));
    });
}

/// A send that no receive takes times out as a send, and says who has not taken it.
#[test]
fn a_send_that_is_not_fetched_times_out() {
    let test = Test {
        config: AUTO,
        may_leak: true,
        driver: &[DEVICES],
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let [(stream, named), (_back, named_back)] = streams(&comm);
        warm_up(&comm, named, named_back);
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_secs(8));
            return;
        }
        comm.set_timeout(Duration::from_secs(3));
        let own = array_of(&stream, 1.0, LONG);
        let work = message(&comm, &own, (Some(1), 2), named, true);
        let error = work.wait(None).unwrap_err();
        assert_eq!(error.code, Code::Timeout, "{error}");
        assert_eq!(error.peer, Some(1), "{error}");
        assert!(
            error
                .operation
                .as_deref()
                .unwrap_or_default()
                .starts_with("send"),
            "{error}"
        );
    });
}

/// Also between processes that share a device.
#[test]
fn processes_that_share_a_device_leave_messages_there() {
    let test = Test {
        config: AUTO,
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let [(stream, named), (back, named_back)] = [(); 2].map(|()| {
            let stream = stream_of(0);
            let named = stream.handle();
            (stream, named)
        });
        warm_up(&comm, named, named_back);
        let own = Array::of(&stream, &bytes_of(&values(comm.rank(), LONG)));
        let work = message(&comm, &own, (Some(1 - comm.rank()), 1), named, true);
        let held = pinned(&comm);
        assert!(held < 64 << 10, "{held} bytes");
        let got = array_of(&back, -1.0, LONG);
        let received = message(&comm, &got, (Some(1 - comm.rank()), 1), named_back, false);
        received.wait(None).expect("a message");
        work.wait(None).expect("a message");
        assert!(floats(&got.read(&back)) == values(1 - comm.rank(), LONG));
    });
}

/// Depots come into use where no host waits for a message, and each call begins as soon as the streams are past the last one.
#[test]
fn depots_come_into_use() {
    let test = Test {
        config: AUTO,
        driver: &[DEVICES],
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let [(stream, named), (back, named_back)] = streams(&comm);
        let peer = Some(1 - comm.rank());
        let own = Array::of(&stream, &bytes_of(&values(comm.rank(), LONG)));
        let got = array_of(&back, -1.0, LONG);
        // Whether what is sent lies in the depot.
        let exchange = || {
            message(&comm, &own, (peer, 1), named, true);
            let held = pinned(&comm);
            message(&comm, &got, (peer, 1), named_back, false);
            for stream in [&stream, &back] {
                stream.synchronize().expect("the stream goes on");
            }
            held < 64 << 10
        };
        // On a busy machine it takes more of them; the test's own limit ends what never comes.
        loop {
            for _ in 0..200 {
                exchange();
            }
            comm.barrier().expect("barrier");
            // Where the last receive has ended on the host, too.
            while pinned(&comm) > 0 {
                std::thread::yield_now();
            }
            let ways = [u8::from(exchange())];
            let mut of_all = [0; 2];
            comm.all_gather(&ways, &mut of_all).expect("words");
            if of_all == [1; 2] {
                break;
            }
        }
        assert!(floats(&got.read(&back)) == values(1 - comm.rank(), LONG));
    });
}
