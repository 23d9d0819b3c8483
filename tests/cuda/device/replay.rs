//! Ranks that die or leave while graphs are being replayed.

use std::time::Duration;

use unisono::Communicator;
use unisono::error::Code;
use unisono::transport::cuda::driver::Stream;
use unisono::types::DeviceStream;

use crate::gpu::{Array, stream, stream_of};
use crate::graph::{Graph, capture};
use crate::harness::{Ranks, Test};
use crate::{LARGE, SMALL, all_reduce, array_of, assert_all};

/// A graph of three sums, the ranks having met before.
fn captured(comm: &Communicator, array: &Array, (stream, named): (&Stream, DeviceStream)) -> Graph {
    all_reduce(comm, array, named)
        .expect("started")
        .wait(None)
        .expect("a sum");
    capture(stream, || {
        for _ in 0..3 {
            all_reduce(comm, array, named).expect("captured");
        }
    })
}

/// No thread waits on the host, and nothing outside of graphs is under way.
#[test]
fn a_dead_peer_ends_a_replay() {
    let test = Test {
        config: SMALL,
        driver: &[("RANDOM_DELAY", "100")],
        dies: Some(2),
        ..Test::new(Ranks::Processes, 3)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let array = array_of(&stream, 0.0, 40_000);
        let graph = captured(&comm, &array, (&stream, named));
        graph.launch(&stream);
        stream.synchronize().expect("a replay");
        comm.barrier().expect("barrier");
        graph.launch(&stream);
        if comm.rank() == 2 {
            // SAFETY: it ends the process, without anything that would tell the others.
            unsafe { libc::_exit(9) };
        }
        // More than the dead rank has taken part in.
        for _ in 0..3 {
            graph.launch(&stream);
        }
        stream.synchronize().expect("the stream goes on");
        let error = comm.error().expect("a failure");
        assert_eq!(error.code, Code::PeerLost, "{error}");
        assert_eq!(error.peer, Some(2), "{error}");
        let error = all_reduce(&comm, &array, named).unwrap_err();
        assert_eq!(error.peer, Some(2), "{error}");
        // Also what comes later.
        graph.launch(&stream);
        stream.synchronize().expect("the stream goes on");
    });
}

/// A rank that leaves in good order does no harm, unless a replay still waits for it.
#[test]
fn a_rank_that_has_left_ends_what_waits_for_it() {
    let test = Test {
        config: SMALL,
        // The rank that leaves does not wait for as long as the other one does.
        may_leak: true,
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let array = array_of(&stream, 1.0, 1000);
        let graph = captured(&comm, &array, (&stream, named));
        graph.launch(&stream);
        stream.synchronize().expect("a replay");
        assert_all(&array, &stream, 16.0);
        comm.barrier().expect("barrier");
        if comm.rank() == 1 {
            comm.close();
            return;
        }
        std::thread::sleep(Duration::from_millis(500));
        assert!(comm.error().is_none(), "nothing waits");
        graph.launch(&stream);
        stream.synchronize().expect("the stream goes on");
        let error = comm.error().expect("a failure");
        assert_eq!(error.peer, Some(1), "{error}");
    });
}

/// Memory that graphs read stays until they have read it.
#[test]
fn a_group_is_closed_while_graphs_are_replayed() {
    let test = Test {
        config: LARGE,
        driver: &[("DEVICES", "2"), ("DELAY", "kernel:20000")],
        ..Test::new(Ranks::Local, 2)
    };
    test.run(|comm| {
        let stream = stream_of(comm.rank() as u32);
        let named = stream.handle();
        let array = array_of(&stream, 1.0, 1000);
        let graph = captured(&comm, &array, (&stream, named));
        for _ in 0..5 {
            graph.launch(&stream);
        }
        comm.close();
        stream.synchronize().expect("the replays");
        assert_all(&array, &stream, 65536.0);
    });
}
