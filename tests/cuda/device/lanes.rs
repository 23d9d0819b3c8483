//! Messages that are part of graphs.

use unisono::error::Code;

use crate::gpu::{bytes_of, floats, stream};
use crate::graph::capture;
use crate::harness::{Ranks, Test};
use crate::messages::{attempt, message, values};
use crate::{AUTO, SMALL, all_reduce, array_of, assert_all};

/// All ranks capture their receives before their sends, on streams of their own.
#[test]
fn captured_messages_are_exchanged_again_and_again() {
    for (ranks, world) in [
        (Ranks::Processes, 2),
        (Ranks::Processes, 3),
        (Ranks::Threads, 3),
        (Ranks::Local, 2),
    ] {
        let test = Test {
            config: AUTO,
            driver: &[("RANDOM_DELAY", "200")],
            ..Test::new(ranks, world)
        };
        test.run(|comm| {
            let ((stream, named), (back, named_back)) = (stream(), stream());
            let (rank, world) = (comm.rank(), comm.world_size());
            let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
            // One of no bytes, and some of several pieces.
            let counts = [1, 0, 7_000_003, 1000, 3_000_001];
            let own = counts.map(|count| array_of(&stream, -1.0, count));
            let got = counts.map(|count| array_of(&back, -1.0, count));
            let incoming = capture(&back, || {
                for (array, tag) in got.iter().zip(0..) {
                    message(&comm, array, (Some(previous), tag), named_back, false);
                }
            });
            let outgoing = capture(&stream, || {
                for (array, tag) in own.iter().zip(0..) {
                    message(&comm, array, (Some(next), tag), named, true);
                }
            });
            for turn in 0..3 {
                for (array, count) in own.iter().zip(counts) {
                    array.write(&stream, &bytes_of(&values(rank + 7 * turn, count)));
                }
                incoming.launch(&back);
                outgoing.launch(&stream);
                // Messages outside of the graphs have their own way.
                if turn == 1 {
                    let (more, less) = (array_of(&stream, rank as f32, 5), array_of(&back, 0.0, 5));
                    message(&comm, &more, (Some(next), 0), named, true);
                    message(&comm, &less, (Some(previous), 0), named_back, false);
                    assert_all(&less, &back, previous as f32);
                }
                for (array, count) in got.iter().zip(counts) {
                    let received = floats(&array.read(&back));
                    assert!(
                        received == values(previous + 7 * turn, count),
                        "{count} values"
                    );
                }
            }
            stream.synchronize().expect("the sends");
            comm.barrier().expect("barrier");
            assert!(comm.error().is_none());
        });
    }
}

/// In one graph, on one stream: collectives, and messages in both directions in an order in which they end.
#[test]
fn graphs_have_messages_and_collectives() {
    let test = Test {
        config: SMALL,
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let (stream, named) = stream();
        let (rank, peer) = (comm.rank(), Some(1 - comm.rank()));
        let (own, got) = (
            array_of(&stream, 1.0, 50_000),
            array_of(&stream, 0.0, 50_000),
        );
        let graph = capture(&stream, || {
            for _ in 0..2 {
                all_reduce(&comm, &own, named).expect("captured");
                message(&comm, &own, (peer, 1), named, true);
                message(&comm, &got, (peer, 1), named, false);
                all_reduce(&comm, &got, named).expect("captured");
            }
        });
        for turn in 0..3 {
            own.write(&stream, &bytes_of(&vec![rank as f32 + turn as f32; 50_000]));
            graph.launch(&stream);
            let sum = 2.0 * turn as f32 + 1.0;
            // Summed twice, and each time both ranks have what the other one has.
            assert_all(&own, &stream, 2.0 * sum);
            assert_all(&got, &stream, 4.0 * sum);
        }
    });
}

/// Between two ranks they meet in the order in which they were captured, and what differs is told.
#[test]
fn captured_messages_that_differ_are_told() {
    for (tag, count) in [(2, 10), (1, 11)] {
        let label = [("SEED", &*(tag + count).to_string())];
        let test = Test {
            config: AUTO,
            driver: &label,
            may_leak: true,
            ..Test::new(Ranks::Processes, 2)
        };
        test.run(|comm| {
            let (stream, named) = stream();
            let sends = comm.rank() == 0;
            let array = array_of(&stream, 1.0, if sends { 10 } else { count as usize });
            let peer = Some(1 - comm.rank());
            let its_tag = if sends { 1 } else { tag };
            let mut refusal = None;
            let graph = capture(&stream, || {
                let captured = attempt(&comm, &array, (peer, its_tag), (named, sends));
                refusal = captured.err();
            });
            let error = loop {
                if let Some(error) = refusal.take().or_else(|| comm.barrier().err()) {
                    break error;
                }
            };
            if sends {
                // It may hear of nothing but the other's end.
                return;
            }
            assert_eq!(error.code, Code::Mismatch, "{error}");
            let said = format!(
                "rank 1 captured a receive of {} bytes of float32 with tag {tag} from rank 0, which captured a send of 40 bytes of \
                 float32 with tag 1",
                4 * count
            );
            assert!(error.message.contains(&said), "{error}");
            drop(graph);
        });
    }
}

#[test]
fn what_no_graph_can_do_is_refused() {
    for (config, driver, reason) in [
        (AUTO, [("IPC", "refuse-import")], "does not map"),
        (
            &[("window_bytes", "0")],
            [("SEED", "1")],
            "window_bytes is 0",
        ),
    ] {
        let test = Test {
            config,
            driver: &driver,
            ..Test::new(Ranks::Processes, 2)
        };
        test.run(|comm| {
            let (stream, named) = stream();
            let array = array_of(&stream, 1.0, 10);
            let (rank, peer) = (comm.rank(), Some(1 - comm.rank()));
            let refused = |peer, sends, reason: &str| {
                let error = attempt(&comm, &array, (peer, 1), (named, sends)).unwrap_err();
                assert_eq!(error.code, Code::Unsupported, "{error}");
                assert!(error.message.contains(reason), "{error}");
            };
            drop(capture(&stream, || {
                refused(None, false, "names its rank");
                refused(Some(rank), true, "by the host");
                refused(peer, rank == 0, reason);
            }));
            // The group lives.
            let works = [
                message(&comm, &array, (peer, 1), named, true),
                message(&comm, &array, (peer, 1), named, false),
            ];
            for work in works {
                work.wait(None).expect("a message");
            }
        });
    }
}

#[test]
fn a_dead_peer_ends_a_captured_message() {
    let test = Test {
        config: AUTO,
        dies: Some(1),
        ..Test::new(Ranks::Processes, 2)
    };
    test.run(|comm| {
        let ((stream, named), (back, named_back)) = (stream(), stream());
        let peer = Some(1 - comm.rank());
        let own = array_of(&stream, 1.0, 10_000_000);
        let got = array_of(&back, 1.0, 10_000_000);
        let incoming = capture(&back, || {
            message(&comm, &got, (peer, 1), named_back, false);
        });
        let outgoing = capture(&stream, || {
            message(&comm, &own, (peer, 1), named, true);
        });
        incoming.launch(&back);
        outgoing.launch(&stream);
        assert_all(&got, &back, 1.0);
        stream.synchronize().expect("the send");
        comm.barrier().expect("barrier");
        if comm.rank() == 1 {
            // SAFETY: it ends the process, without anything that would tell the others.
            unsafe { libc::_exit(9) };
        }
        incoming.launch(&back);
        outgoing.launch(&stream);
        stream.synchronize().expect("the stream goes on");
        back.synchronize().expect("the stream goes on");
        let error = comm.error().expect("a failure");
        assert_eq!(error.peer, Some(1), "{error}");
        let values = floats(&got.read(&back));
        assert!(values.iter().all(|value| value.is_nan()));
    });
}
