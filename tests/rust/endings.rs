//! How ranks leave each other: what was sent before still arrives, and who fails early tells those who come late.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use unisono::Communicator;
use unisono::config::Config;
use unisono::error::Code;
use unisono::rendezvous::memory::MemoryStore;
use unisono::types::ReduceOp;

const TRANSPORTS: [&str; 2] = ["shm", "tcp"];

/// Runs `body` as every rank of a world, each on a thread of its own.
fn run(transport: &str, world: usize, body: impl Fn(Communicator) + Send + Sync) {
    let mut config = Config::default();
    for (name, value) in [
        ("timeout", "20"),
        ("join_timeout", "20"),
        ("transport", transport),
    ] {
        config.set(name, value).expect("a setting");
    }
    let store = MemoryStore::default();
    std::thread::scope(|scope| {
        for rank in 0..world {
            let (body, store, config) = (&body, &store, config.clone());
            scope.spawn(move || {
                body(Communicator::join(store, rank, world, config).expect("a communicator"));
            });
        }
    });
}

#[test]
fn what_was_sent_before_closing_can_still_be_received() {
    const MESSAGES: usize = 60;
    for transport in TRANSPORTS {
        run(transport, 2, |comm| {
            let message = |number: usize| vec![number as u32; 15_000];
            if comm.rank() == 0 {
                for number in 0..MESSAGES {
                    comm.send_slice(&message(number), 1, 7).expect("send");
                }
                return;
            }
            // Slow enough for the sender to be gone, while the receiver still answers it.
            for number in 0..MESSAGES {
                let mut got = vec![0_u32; 15_000];
                comm.receive_slice(&mut got, Some(0), 7)
                    .unwrap_or_else(|error| panic!("{transport}, message {number}: {error}"));
                assert!(got == message(number), "{transport}, message {number}");
                std::thread::sleep(Duration::from_millis(10));
            }
        });
    }
}

#[test]
fn a_rank_that_failed_tells_those_who_reach_it_later() {
    for transport in TRANSPORTS {
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let wait = Mutex::new(wait);
        let done = Mutex::new(Some(done));
        run(transport, 2, |comm| {
            if comm.rank() == 0 {
                comm.abort("no more coffee");
                // Ends when the other rank drops its end, also by a panic.
                let _ = wait.lock().unwrap().recv();
                return;
            }
            let _done = done.lock().unwrap().take();
            std::thread::sleep(Duration::from_millis(100));
            let begun = Instant::now();
            let error = comm.all_reduce(&mut [1_u32], ReduceOp::Sum).unwrap_err();
            assert_eq!(error.code, Code::Aborted, "{error}");
            assert!(error.message.contains("no more coffee"), "{error}");
            assert!(begun.elapsed() < Duration::from_secs(5), "{error}");
        });
    }
}
