//! The engine's promises beside right results: every wait ends, with an error that says why; nothing is left behind;
//! nothing that is under way is forgotten.
//!
//! Ranks are threads. Waits that hang fail by the group's own timeout, which no test here expects unless it says so.

mod ranks;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, channel};
use std::sync::{RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use unisono::buffer::Memory;
use unisono::error::{Code, Error};
use unisono::rendezvous::memory::MemoryStore;
use unisono::types::{DataType, ReduceOp};
use unisono::{Communicator, PointToPoint, Request, Work};

use ranks::Transport;

/// Held to write by the test that counts the process's descriptors and threads, to read by all others.
static ALONE: RwLock<()> = RwLock::new(());

fn beside_others() -> RwLockReadGuard<'static, ()> {
    ALONE
        .read()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

const TRANSPORTS: [Transport; 3] = [Transport::Local, Transport::Shm, Transport::Tcp];

/// Settings of most tests.
const SETTINGS: [(&str, &str); 2] = [("timeout", "20"), ("join_timeout", "20")];

fn run(transport: Transport, world: usize, body: impl Fn(Communicator) + Send + Sync) {
    ranks::run(transport, world, &SETTINGS, body);
}

/// With settings that others have not, or have otherwise.
fn run_with(
    transport: Transport,
    world: usize,
    settings: &[(&str, &str)],
    body: impl Fn(Communicator) + Send + Sync,
) {
    ranks::run(transport, world, &[&SETTINGS, settings].concat(), body);
}

fn pause(milliseconds: u64) {
    std::thread::sleep(Duration::from_millis(milliseconds));
}

/// Starts an all_reduce in place that no thread waits for, and says when it has ended.
fn start_all_reduce(
    comm: &Communicator,
    data: &mut [f64],
    op: ReduceOp,
) -> (Work, Receiver<Result<(), Error>>) {
    let (tell, told) = channel();
    // SAFETY: every caller keeps `data` until the receiver has the end.
    let work = unsafe {
        let memory = Memory::from_raw_parts(data.as_mut_ptr().cast(), size_of_val(data));
        let request = Request::all_reduce(DataType::Float64, op, None, memory);
        comm.start(
            request,
            Some(Box::new(move |result| drop(tell.send(result)))),
        )
    };
    (work.expect("started"), told)
}

/// Starts to receive one byte that no thread waits for, and says when it has come.
fn start_receive(
    comm: &Communicator,
    byte: &mut u8,
    from: Option<usize>,
    tag: u64,
) -> (Work, Receiver<Result<(), Error>>) {
    let (tell, told) = channel();
    let options = PointToPoint {
        timeout: None,
        completion: Some(Box::new(move |result| drop(tell.send(result)))),
        ..PointToPoint::default()
    };
    // SAFETY: every caller keeps `byte` until the receiver has the end.
    let work = unsafe {
        let memory = Memory::from_raw_parts(byte, 1);
        comm.receive(DataType::UInt8, memory, from, tag, options)
    };
    (work.expect("started"), told)
}

fn end(told: &Receiver<Result<(), Error>>) -> Result<(), Error> {
    told.recv_timeout(Duration::from_secs(15))
        .expect("an operation under way was forgotten")
}

/// A rank that lives is left out by the others.
#[test]
fn a_group_goes_on_without_a_rank() {
    let _beside = beside_others();
    for transport in TRANSPORTS {
        run(transport, 4, |comm| {
            let mut sum = [1.0_f32];
            comm.all_reduce(&mut sum, ReduceOp::Sum).expect("it lives");
            if comm.rank() == 2 {
                return;
            }
            let left = comm
                .shrink(&[2], Duration::from_secs(20))
                .expect("all come");
            assert_eq!(left.former_ranks(), Some(&[0, 1, 3][..]));
            assert_eq!(left.former_ended(), Some(1));
            let mut sum = [1.0_f32];
            left.all_reduce(&mut sum, ReduceOp::Sum).expect("it lives");
            assert_eq!(sum, [3.0]);
            let again = comm.shrink(&[2], Duration::ZERO).expect_err("once alone");
            assert_eq!(again.code, Code::InvalidArgument, "{again}");
        });
    }
}

#[test]
fn an_abort_before_the_first_operation_reaches_the_others() {
    let _beside = beside_others();
    for transport in TRANSPORTS {
        let held = std::sync::Mutex::new(Vec::new());
        run(transport, 3, |comm| {
            if comm.rank() == 0 {
                comm.abort("for a test");
                held.lock().expect("a lock").push(comm);
                return;
            }
            pause(50);
            let error = comm.barrier().unwrap_err();
            assert_eq!(error.code, Code::Aborted, "{transport:?}: {error}");
            assert!(
                error.message.contains("rank 0 aborted") && error.message.contains("for a test"),
                "{transport:?}: {error}"
            );
            // If a rank left at once, one that hears of the abort later could take that for the cause.
            held.lock().expect("a lock").push(comm);
        });
    }
}

#[test]
fn an_abort_from_another_thread_ends_every_wait() {
    let _beside = beside_others();
    for transport in TRANSPORTS {
        let held = std::sync::Mutex::new(Vec::new());
        run(transport, 3, |comm| {
            comm.barrier().expect("barrier");
            std::thread::scope(|scope| {
                if comm.rank() == 0 {
                    scope.spawn(|| {
                        pause(50);
                        comm.abort("enough");
                    });
                }
                // Rank 2 never comes; the waiters of one group lead and follow.
                if comm.rank() < 2 {
                    let follower = scope.spawn(|| comm.receive_slice(&mut [0_u8], Some(2), 3));
                    let error = comm.barrier().unwrap_err();
                    assert_eq!(error.code, Code::Aborted, "{error}");
                    assert!(error.message.contains("enough"), "{error}");
                    let error = follower.join().expect("no panic").unwrap_err();
                    assert_eq!(error.code, Code::Aborted, "{error}");
                }
            });
            // If a rank left at once, one that hears of the abort later could take that for the cause.
            held.lock().expect("a lock").push(comm);
        });
    }
}

#[test]
fn leaving_ends_the_waits_of_the_others() {
    let _beside = beside_others();
    for transport in TRANSPORTS {
        // `warm`: links are open when rank 1 leaves.
        for warm in [true, false] {
            let start = Instant::now();
            // A rank that came and left too, because rank 1 had, would be named as well as rank 1.
            let both_have_failed = std::sync::Barrier::new(2);
            run(transport, 3, |comm| {
                if warm {
                    comm.barrier().expect("barrier");
                }
                if comm.rank() == 1 {
                    pause(50);
                    return;
                }
                if comm.rank() == 2 {
                    pause(100);
                }
                let mut data = [1.0_f32; 10];
                let reduced = comm.all_reduce(&mut data, ReduceOp::Sum);
                both_have_failed.wait();
                let error = reduced.unwrap_err();
                assert_eq!(error.code, Code::PeerLost, "{transport:?}, {warm}: {error}");
                assert_eq!(error.peer, Some(1), "{transport:?}, {warm}: {error}");
                assert!(
                    error.message.contains("rank 1") && error.message.contains("left"),
                    "{transport:?}, {warm}: {error}"
                );
            });
            assert!(
                start.elapsed() < Duration::from_secs(15),
                "{transport:?}, {warm}"
            );
        }
    }
}

#[test]
fn a_rank_that_is_late_learns_that_the_other_has_left() {
    let _beside = beside_others();
    for transport in TRANSPORTS {
        let start = Instant::now();
        run(transport, 2, |comm| {
            if comm.rank() == 0 {
                return;
            }
            pause(100);
            let error = comm.barrier().unwrap_err();
            assert_eq!(error.code, Code::PeerLost, "{transport:?}: {error}");
            assert_eq!(error.peer, Some(0), "{transport:?}: {error}");
            assert!(error.message.contains("left"), "{transport:?}: {error}");
        });
        assert!(start.elapsed() < Duration::from_secs(10), "{transport:?}");
    }
}

#[test]
fn a_receive_from_any_ends_when_all_have_left() {
    let _beside = beside_others();
    for transport in TRANSPORTS {
        run(transport, 3, |comm| {
            if comm.rank() == 0 {
                let error = comm.receive_slice(&mut [0_u8], None, 1).unwrap_err();
                assert_eq!(error.code, Code::PeerLost, "{transport:?}: {error}");
            } else {
                pause(20 * comm.rank() as u64);
            }
        });
    }
}

/// Rank 2 leaves before the others have a link to it, and says so when rank 0 asks for one.
#[test]
fn a_receive_from_any_goes_on_without_those_that_have_left() {
    let _beside = beside_others();
    for transport in TRANSPORTS {
        run(transport, 3, |comm| match comm.rank() {
            0 => {
                pause(50);
                let mut byte = [0_u8];
                let received = comm.receive_slice(&mut byte, None, 1).expect("a byte");
                assert_eq!((received.source, byte), (1, [7]), "{transport:?}");
            }
            1 => {
                pause(150);
                comm.send_slice(&[7_u8], 0, 1).expect("sent");
            }
            _ => {}
        });
    }
}

#[test]
fn what_was_sent_before_leaving_can_be_received() {
    let _beside = beside_others();
    for transport in TRANSPORTS {
        run(transport, 2, |comm| {
            // More than a ring holds is still being received when the sender leaves.
            let mut data = vec![1.0_f64; 40_000];
            if comm.rank() == 0 {
                comm.broadcast(&mut data, 0).expect("broadcast");
                comm.send_slice(&[7_u8; 100], 1, 1).expect("send");
            } else {
                pause(50);
                comm.broadcast(&mut data, 0).expect("broadcast");
                pause(50);
                comm.receive_slice(&mut [0_u8; 100], Some(0), 1)
                    .expect("receive");
            }
        });
    }
}

#[test]
fn closing_ends_the_waits_of_this_rank() {
    let _beside = beside_others();
    run(Transport::Shm, 2, |comm| {
        // The links are open: a rank that connects later only learns that rank 0 has left.
        let other = 1 - comm.rank();
        comm.send_slice(&[0_u8], other, 1).expect("send");
        comm.receive_slice(&mut [0_u8], Some(other), 1)
            .expect("receive");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| comm.receive_slice(&mut [0_u8], Some(1 - comm.rank()), 3));
            pause(300);
            if comm.rank() == 0 {
                comm.close();
            }
            let error = waiter.join().expect("no panic").unwrap_err();
            assert_eq!(error.code, Code::Aborted, "{error}");
            assert!(error.message.contains("rank 0 closed"), "{error}");
        });
        assert!(comm.barrier().is_err());
    });
}

/// Both ranks of `bodies` fail with a mismatch of `field` that names both.
fn assert_mismatch(field: &str, bodies: [fn(&Communicator) -> unisono::error::Result<()>; 2]) {
    for transport in [Transport::Local, Transport::Shm] {
        run(transport, 2, |comm| {
            let error = bodies[comm.rank()](&comm).expect_err(field);
            assert_eq!(error.code, Code::Mismatch, "{field}: {error}");
            for part in [field, "rank 0", "rank 1"] {
                assert!(
                    error.message.contains(part),
                    "{part} is missing on rank {}: {error}",
                    comm.rank()
                );
            }
            // The first to leave must not turn the other's error into its own loss.
            pause(100);
        });
    }
}

#[test]
fn every_mismatch_is_an_error_on_both_sides() {
    let _beside = beside_others();
    assert_mismatch(
        "dtype differs",
        [
            |comm| comm.all_reduce(&mut [1_i32; 4], ReduceOp::Sum),
            |comm| comm.all_reduce(&mut [1_f32; 4], ReduceOp::Sum),
        ],
    );
    assert_mismatch(
        "operator differs",
        [
            |comm| comm.all_reduce(&mut [1_i32; 4], ReduceOp::Sum),
            |comm| comm.all_reduce(&mut [1_i32; 4], ReduceOp::Max),
        ],
    );
    assert_mismatch(
        "count differs",
        [
            |comm| comm.all_reduce(&mut [1_i32; 4], ReduceOp::Sum),
            |comm| comm.all_reduce(&mut [1_i32; 5], ReduceOp::Sum),
        ],
    );
    assert_mismatch(
        "count differs",
        [
            |comm| comm.all_reduce(&mut [1_i32; 4], ReduceOp::Sum),
            |comm| comm.all_reduce(&mut vec![1_i32; 500_000], ReduceOp::Sum),
        ],
    );
    assert_mismatch(
        "operation differs",
        [
            |comm| comm.all_reduce(&mut [1_i32; 4], ReduceOp::Sum),
            |comm| comm.all_gather(&[1_i32; 2], &mut [0; 4]),
        ],
    );
    assert_mismatch(
        // Either side names the first difference that it sees.
        " differs",
        [
            |comm| {
                comm.broadcast(&mut [1_i32], 0)?;
                comm.all_reduce(&mut [1_i32; 4], ReduceOp::Sum)
            },
            |comm| comm.all_reduce(&mut [1_i32; 4], ReduceOp::Sum),
        ],
    );
}

/// No rank receives in one of the two operations, so the next one tells of the difference.
#[test]
fn a_mismatch_may_be_found_in_the_next_operation() {
    let _beside = beside_others();
    // Rank 0 of a prefix hears of no rank, until the next operation.
    assert_mismatch(
        "operation differs",
        [
            |comm| {
                comm.scan(&mut [1_i32; 4], ReduceOp::Sum)?;
                comm.barrier()
            },
            |comm| comm.exscan(&mut [1_i32; 4], ReduceOp::Sum),
        ],
    );
    // Both are roots, so that no rank receives until the next operation.
    assert_mismatch(
        "root differs",
        [
            |comm| {
                comm.broadcast(&mut [1_i32], 0)?;
                comm.barrier()
            },
            |comm| {
                comm.broadcast(&mut [1_i32], 1)?;
                comm.barrier()
            },
        ],
    );
}

/// Each waits to receive from the other, so no message tells of the difference.
#[test]
fn ranks_that_all_wait_to_receive_learn_that_they_differ() {
    let _beside = beside_others();
    assert_mismatch(
        "root differs",
        [
            |comm| comm.reduce(&mut [1_i32; 4], ReduceOp::Sum, 0),
            |comm| comm.reduce(&mut [1_i32; 4], ReduceOp::Sum, 1),
        ],
    );
    assert_mismatch(
        "operation differs",
        [
            |comm| comm.reduce(&mut [1_i32; 4], ReduceOp::Sum, 0),
            |comm| comm.broadcast(&mut [1_i32; 4], 0),
        ],
    );
}

#[test]
fn messages_of_another_type_or_length_fail_on_both_sides() {
    let _beside = beside_others();
    assert_mismatch(
        "dtype differs",
        [
            |comm| {
                comm.send_slice(&[1_i32; 4], 1, 5)?;
                comm.barrier()
            },
            |comm| comm.receive_slice(&mut [1_f32; 4], Some(0), 5).map(drop),
        ],
    );
    assert_mismatch(
        "length differs",
        [
            |comm| comm.send_slice(&[1_i32; 200_000], 1, 5),
            |comm| {
                // The announcement is there before the receive.
                pause(50);
                comm.receive_slice(&mut [1_i32; 4], Some(0), 5).map(drop)
            },
        ],
    );
}

/// Waits until that number of ranks has ended, though not for ever: one may have panicked.
fn wait_for(ended: &AtomicUsize, ranks: usize) {
    let until = Instant::now() + Duration::from_secs(20);
    while ended.load(Ordering::Acquire) < ranks && Instant::now() < until {
        pause(10);
    }
}

#[test]
fn a_timeout_names_the_missing_rank() {
    let _beside = beside_others();
    for transport in [Transport::Local, Transport::Shm] {
        let ended = AtomicUsize::new(0);
        run(transport, 3, |comm| {
            comm.barrier().expect("barrier");
            comm.set_timeout(Duration::from_millis(300));
            if comm.rank() == 2 {
                return wait_for(&ended, 2);
            }
            let error = comm.barrier().unwrap_err();
            ended.fetch_add(1, Ordering::Release);
            assert_eq!(error.code, Code::Timeout, "{error}");
            assert!(error.message.contains("rank 2"), "{error}");
            assert!(error.operation.is_some(), "{error}");
        });
    }
}

#[test]
fn a_timeout_of_less_than_a_millisecond_is_one() {
    let _beside = beside_others();
    let ended = AtomicUsize::new(0);
    run(Transport::Local, 2, |comm| {
        comm.set_timeout(Duration::from_micros(300));
        if comm.rank() == 0 {
            assert_eq!(comm.barrier().unwrap_err().code, Code::Timeout);
            ended.fetch_add(1, Ordering::Release);
        } else {
            wait_for(&ended, 1);
        }
    });
}

#[test]
fn a_follower_has_a_timeout_of_its_own() {
    let _beside = beside_others();
    let ended = AtomicUsize::new(0);
    run(Transport::Local, 2, |comm| {
        if comm.rank() == 1 {
            wait_for(&ended, 1);
            comm.send_slice(&[1_u8], 0, 1).expect("send");
            comm.send_slice(&[2_u8], 0, 2).expect("send");
            return;
        }
        let (mut first, mut second) = (0, 0);
        let (leads, _told) = start_receive(&comm, &mut first, Some(1), 1);
        let (follows, _told) = start_receive(&comm, &mut second, Some(1), 2);
        std::thread::scope(|scope| {
            scope.spawn(|| leads.wait(None).expect("the first"));
            pause(50);
            let error = follows.wait(Some(Duration::from_millis(50))).unwrap_err();
            ended.fetch_add(1, Ordering::Release);
            assert_eq!(error.code, Code::Timeout);
        });
        follows.wait(None).expect("the second");
        assert_eq!((first, second), (1, 2));
    });
}

#[test]
fn monitored_barriers_name_all_missing_ranks() {
    let _beside = beside_others();
    let ended = AtomicUsize::new(0);
    run(Transport::Shm, 4, |comm| {
        let patience = Duration::from_secs(2);
        comm.monitored_barrier(Duration::from_secs(10), true)
            .expect("all ranks");
        if comm.rank() == 0 || comm.rank() == 3 {
            let error = comm.monitored_barrier(patience, true).unwrap_err();
            ended.fetch_add(1, Ordering::Release);
            assert_eq!(error.code, Code::Timeout, "{error}");
            for part in ["rank 1 ", "rank 2 "] {
                assert!(
                    error.message.contains(part),
                    "rank {}: {error}",
                    comm.rank()
                );
            }
            assert!(!error.message.contains("rank 3 "), "{error}");
        } else {
            wait_for(&ended, 2);
        }
    });
}

#[test]
fn two_groups_may_be_used_in_opposite_order() {
    let _beside = beside_others();
    const OPERATIONS: usize = 70;
    for transport in TRANSPORTS {
        let stores = [MemoryStore::default(), MemoryStore::default()];
        let config = ranks::config(transport, &SETTINGS);
        let mut local = match transport {
            Transport::Local => [0, 1]
                .map(|_| Communicator::local(3, &config).expect("communicators"))
                .to_vec_of_pairs(),
            _ => Vec::new(),
        };
        std::thread::scope(|scope| {
            for rank in (0..3).rev() {
                let (stores, config) = (&stores, &config);
                let pair = local.pop();
                scope.spawn(move || {
                    let pair = pair.unwrap_or_else(|| {
                        stores.each_ref().map(|store| {
                            Communicator::join(store, rank, 3, config.clone()).expect("joined")
                        })
                    });
                    let order = if rank == 1 { [1, 0] } else { [0, 1] };
                    let mut data = vec![vec![[1.0_f64; 600]; OPERATIONS]; 2];
                    let mut ends = Vec::new();
                    for group in order {
                        for buffer in &mut data[group] {
                            ends.push(start_all_reduce(&pair[group], buffer, ReduceOp::Sum));
                        }
                    }
                    for (work, _) in ends.iter().rev() {
                        work.wait(None).expect("all_reduce");
                    }
                    for (_, told) in &ends {
                        end(told).expect("all_reduce");
                    }
                    assert!(data.iter().flatten().flatten().all(|value| *value == 3.0));
                    // No rank leaves a group while others are in it.
                    for comm in &pair {
                        comm.barrier().expect("barrier");
                    }
                });
            }
        });
    }
}

trait Pairs {
    fn to_vec_of_pairs(self) -> Vec<[Communicator; 2]>;
}

impl Pairs for [Vec<Communicator>; 2] {
    fn to_vec_of_pairs(self) -> Vec<[Communicator; 2]> {
        let [first, second] = self;
        first.into_iter().zip(second).map(|(a, b)| [a, b]).collect()
    }
}

#[test]
fn operations_on_the_same_memory_run_one_after_the_other() {
    let _beside = beside_others();
    run(Transport::Local, 2, |comm| {
        let mut data = [1.0_f64; 50];
        if comm.rank() == 1 {
            pause(50);
        }
        let data_again = data.as_mut_ptr();
        let first = start_all_reduce(&comm, &mut data, ReduceOp::Sum);
        // SAFETY: the same array; the engine runs the operations one after the other.
        let again = unsafe { std::slice::from_raw_parts_mut(data_again, 50) };
        let second = start_all_reduce(&comm, again, ReduceOp::PremulSum(2.0));
        end(&first.1).expect("all_reduce");
        end(&second.1).expect("all_reduce");
        assert_eq!(data, [8.0; 50]);
        comm.barrier().expect("barrier");
    });
}

/// An operation that no thread waits for goes on when those that threads waited for have ended, in whichever order.
#[test]
fn an_operation_that_no_thread_waits_for_is_not_forgotten() {
    let _beside = beside_others();
    run(Transport::Shm, 2, |comm| {
        for _ in 0..30 {
            if comm.rank() == 0 {
                let (mut a, mut b, mut c) = (0, 0, 0);
                let forgotten = start_receive(&comm, &mut c, Some(1), 3);
                let first = start_receive(&comm, &mut a, Some(1), 1);
                let second = start_receive(&comm, &mut b, Some(1), 2);
                std::thread::scope(|scope| {
                    scope.spawn(|| first.0.wait(None).expect("the first"));
                    scope.spawn(|| second.0.wait(None).expect("the second"));
                });
                comm.send_slice(&[0_u8], 1, 0).expect("send");
                end(&forgotten.1).expect("the third");
                assert_eq!((a, b, c), (1, 2, 3));
            } else {
                pause(5);
                std::thread::scope(|scope| {
                    scope.spawn(|| comm.send_slice(&[1_u8], 0, 1).expect("send"));
                    scope.spawn(|| comm.send_slice(&[2_u8], 0, 2).expect("send"));
                });
                comm.receive_slice(&mut [0_u8], Some(0), 0)
                    .expect("receive");
                pause(2);
                comm.send_slice(&[3_u8], 0, 3).expect("send");
            }
        }
    });
}

/// The progress thread sleeps at most a second by itself; a wake-up that is lost in most rounds shows in the total.
#[test]
fn what_is_started_while_the_progress_thread_sleeps_wakes_it() {
    let _beside = beside_others();
    for transport in TRANSPORTS {
        let mut spent = Duration::ZERO;
        let total = std::sync::Mutex::new(&mut spent);
        run(transport, 2, |comm| {
            comm.barrier().expect("barrier");
            let mut byte = 0;
            let pending = start_receive(&comm, &mut byte, Some(1 - comm.rank()), 9);
            for _ in 0..6 {
                let mut data = [1.0_f64; 8];
                if comm.rank() == 0 {
                    pause(200);
                    let start = Instant::now();
                    let started = start_all_reduce(&comm, &mut data, ReduceOp::Sum);
                    end(&started.1).expect("all_reduce");
                    **total.lock().expect("a lock") += start.elapsed();
                } else {
                    pause(220);
                    comm.all_reduce(&mut data, ReduceOp::Sum)
                        .expect("all_reduce");
                }
            }
            comm.send_slice(&[1_u8], 1 - comm.rank(), 9).expect("send");
            end(&pending.1).expect("the byte");
            comm.barrier().expect("barrier");
        });
        assert!(
            spent < Duration::from_millis(2500),
            "{transport:?}: {spent:?} in 6 rounds"
        );
    }
}

#[test]
fn a_completion_that_panics_does_not_silence_the_next() {
    let _beside = beside_others();
    run(Transport::Local, 1, |comm| {
        // SAFETY: a barrier has no memory.
        let work =
            unsafe { comm.start(Request::barrier(), Some(Box::new(|_| panic!("expected")))) };
        work.expect("started").wait(None).expect("barrier");
        let told = start_all_reduce(&comm, &mut [1.0], ReduceOp::Sum).1;
        end(&told).expect("all_reduce");
    });
}

#[test]
fn a_completion_may_wait_for_another() {
    let _beside = beside_others();
    run(Transport::Local, 1, |comm| {
        // Each waits for the next one, which can only end on another thread.
        const DEPTH: usize = 5;
        let (done, all) = mpsc::channel();
        let mut next: Option<mpsc::Receiver<()>> = None;
        let mut ends = Vec::new();
        for _ in 0..DEPTH {
            let (told, waits) = mpsc::channel();
            ends.push((told, next.replace(waits), done.clone()));
        }
        for (told, waits, done) in ends.into_iter().rev() {
            let completion = Box::new(move |_| {
                if let Some(waits) = waits {
                    waits.recv().expect("the next one ends");
                }
                let _ = told.send(());
                done.send(()).expect("the test waits");
            });
            // SAFETY: a barrier has no memory.
            unsafe { comm.start(Request::barrier(), Some(completion)) }.expect("started");
        }
        for _ in 0..DEPTH {
            all.recv_timeout(Duration::from_secs(10))
                .expect("a completion");
        }
    });
}

#[test]
fn unread_credit_does_not_spoil_a_farewell() {
    let _beside = beside_others();
    for transport in TRANSPORTS {
        run(transport, 3, |comm| {
            const MESSAGES: usize = 80;
            let mut data = vec![0_u8; 32 << 10];
            match comm.rank() {
                0 => {
                    for _ in 0..MESSAGES {
                        comm.send_slice(&data, 1, 1).expect("send");
                    }
                }
                1 => {
                    pause(100);
                    for at in 0..MESSAGES {
                        comm.receive_slice(&mut data, Some(0), 1)
                            .unwrap_or_else(|error| panic!("{transport:?}, message {at}: {error}"));
                    }
                    pause(50);
                }
                _ => {
                    let error = comm.receive_slice(&mut data, Some(1), 1).unwrap_err();
                    assert_eq!(error.code, Code::PeerLost, "{transport:?}: {error}");
                    assert!(error.message.contains("left"), "{transport:?}: {error}");
                }
            }
        });
    }
}

/// Descriptors and threads of this process.
fn possessions() -> (usize, usize) {
    let count = |path| std::fs::read_dir(path).map_or(0, Iterator::count);
    (count("/proc/self/fd"), count("/proc/self/task"))
}

#[test]
fn groups_that_are_closed_leave_nothing_behind() {
    let _alone = ALONE
        .write()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let once = |transport| {
        run(transport, 2, |comm| {
            comm.all_reduce(&mut [1_i32; 4], ReduceOp::Sum)
                .expect("all_reduce");
            if comm.rank() == 0 {
                comm.send_slice(&[1_u8], 1, 1).expect("send");
            } else {
                comm.receive_slice(&mut [0_u8], Some(0), 1)
                    .expect("receive");
            }
        });
    };
    // A group that lives on keeps the process's endpoint.
    let anchor = Communicator::join(
        &MemoryStore::default(),
        0,
        1,
        ranks::config(Transport::Shm, &SETTINGS),
    )
    .expect("a communicator");
    let settled = |least: (usize, usize)| {
        let start = Instant::now();
        loop {
            let now = possessions();
            if (now.0 <= least.0 && now.1 <= least.1) || start.elapsed() > Duration::from_secs(6) {
                return now;
            }
            pause(20);
        }
    };
    TRANSPORTS.into_iter().for_each(once);
    pause(1500);
    let before = possessions();
    for _ in 0..100 {
        TRANSPORTS.into_iter().for_each(once);
    }
    // A few threads of the test harness may come and go.
    let least = (before.0 + 4, before.1 + 4);
    let after = settled(least);
    assert!(
        after.0 <= least.0 && after.1 <= least.1,
        "descriptors and threads: {before:?} before, {after:?} after"
    );
    drop(anchor);
}

#[test]
fn a_subgroup_forms_without_the_others() {
    let _beside = beside_others();
    for transport in [Transport::Shm, Transport::Tcp] {
        run(transport, 4, |comm| {
            // Rank 0 takes no part, not even by being told.
            if comm.rank() == 0 {
                return comm.barrier().expect("a barrier");
            }
            for label in [b"first".as_slice(), b"second"] {
                let part = comm.subgroup(&[3, 1], label).expect("a subgroup");
                assert_eq!(part.is_none(), comm.rank() == 2);
                let Some(part) = part else { continue };
                assert_eq!(part.rank(), usize::from(comm.rank() == 1));
                let mut data = [comm.rank() as i32];
                part.all_reduce(&mut data, ReduceOp::Sum).expect("a sum");
                assert_eq!(data, [4]);
            }
            for ranks in [[1, 1], [1, 4]] {
                let error = comm.subgroup(&ranks, b"bad").expect_err("bad ranks");
                assert_eq!(error.code, Code::InvalidArgument, "{error}");
            }
            comm.barrier().expect("a barrier");
        });
    }
}

#[test]
fn estimates_grow_with_sizes_and_move_nothing() {
    run(Transport::Local, 3, |comm| {
        let mut data = vec![1_f32; 1 << 20];
        let estimate = |elements: usize, data: &mut [f32]| {
            let bytes = size_of_val(&data[..elements]);
            // SAFETY: the vector outlives the estimate, which does not touch it.
            let memory = unsafe { Memory::from_raw_parts(data.as_mut_ptr().cast(), bytes) };
            let request = Request::all_reduce(DataType::Float32, ReduceOp::Sum, None, memory);
            comm.estimate(request).expect("an estimate")
        };
        let (small, large) = (estimate(8, &mut data), estimate(1 << 20, &mut data));
        assert!(Duration::ZERO < small && small < large);
        let far = comm.estimate_message(Some(1), 1 << 20);
        assert!(comm.estimate_message(Some(1), 1) < far);
        assert!(data.iter().all(|x| *x == 1.0));
    });
}

/// A message may be here before its receive, which then ends although no thread waits for it.
#[test]
fn a_receive_that_is_only_polled_ends() {
    let _others = beside_others();
    for transport in TRANSPORTS {
        run(transport, 2, |comm| {
            if comm.rank() == 0 {
                let mut byte = 0;
                // A message that comes after the one with tag 2 is taken first, so the one with tag 2 has to be kept.
                comm.receive_slice(&mut [0_u8], Some(1), 3)
                    .expect("a signal");
                let (_work, told) = start_receive(&comm, &mut byte, Some(1), 2);
                end(&told).expect("kept");
                assert_eq!(byte, 7);
                // This one comes when the receive has been posted.
                let (_work, told) = start_receive(&comm, &mut byte, Some(1), 4);
                comm.send_slice(&[1_u8], 1, 1).expect("a signal");
                end(&told).expect("come");
                assert_eq!(byte, 8);
            } else {
                comm.send_slice(&[7_u8], 0, 2).expect("sent");
                comm.send_slice(&[1_u8], 0, 3).expect("a signal");
                comm.receive_slice(&mut [0_u8], Some(0), 1)
                    .expect("a signal");
                comm.send_slice(&[8_u8], 0, 4).expect("sent");
            }
        });
    }
}

/// Every rank sends to the next and receives from the previous, short messages and long ones.
#[test]
fn exchanges_go_round() {
    let _others = beside_others();
    for transport in TRANSPORTS {
        for world in [1, 2, 5] {
            run(transport, world, |comm| {
                let (rank, world) = (comm.rank(), comm.world_size());
                let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
                for length in [0, 1, 1000, 300_000] {
                    for from in [Some(previous), None] {
                        let outgoing = vec![rank as u32; length];
                        let mut incoming = vec![u32::MAX; length];
                        let came = comm
                            .send_receive_slices((&outgoing, next), (&mut incoming, from), 3)
                            .expect("an exchange");
                        assert_eq!((came.source, came.bytes), (previous, 4 * length));
                        assert!(incoming.iter().all(|&value| value == previous as u32));
                        // From any rank, the next round's message may be here before this one's.
                        comm.barrier().expect("barrier");
                    }
                }
            });
        }
    }
}

/// Messages that are posted, streamed at once, streamed where the ring has no room for all of them, and offered.
#[test]
fn blocking_messages_of_every_length_arrive() {
    let _others = beside_others();
    for ring in ["4K", "256K"] {
        run_with(Transport::Shm, 2, &[("ring_bytes", ring)], |comm| {
            let (rank, other) = (comm.rank(), 1 - comm.rank());
            for length in [0, 1, 527, 4200, 4304, 4305, 8192, 60_000, 65_536, 65_537] {
                let message = |from: usize| -> Vec<u8> {
                    (0..length).map(|at| (at * 7 + from * 3) as u8).collect()
                };
                let mut incoming = vec![0; length];
                for first in [0, 1] {
                    if rank == first {
                        comm.send_slice(&message(rank), other, 1).expect("sent");
                    } else {
                        comm.receive_slice(&mut incoming, Some(other), 1)
                            .expect("received");
                        assert_eq!(incoming, message(other));
                    }
                }
                // Both at once, one as a blocking call.
                let came = comm
                    .send_receive_slices((&message(rank), other), (&mut incoming, Some(other)), 2)
                    .expect("an exchange");
                assert_eq!((came.source, &incoming), (other, &message(other)));
            }
        });
    }
}

/// Rank 1 waits for rank 2, which waits for rank 0, which sends more than the ring holds behind a message that rank 1 does
/// not want yet.
#[test]
fn an_offer_that_waits_does_not_stop_what_comes_after_it() {
    let _others = beside_others();
    let settings = [("ring_bytes", "64K"), ("lend_bytes", "64K")];
    run_with(Transport::Shm, 3, &settings, |comm| {
        let long: Vec<u8> = (0..400_000).map(|at| (at % 251) as u8).collect();
        let short = vec![5_u8; 50_000];
        // A rank that has read one message is offered the next.
        let mut incoming = vec![0; long.len()];
        if comm.rank() > 0 {
            comm.receive_slice(&mut incoming, Some(comm.rank() - 1), 0)
                .expect("received");
        }
        if comm.rank() < 2 {
            comm.send_slice(&long, comm.rank() + 1, 0).expect("sent");
        }
        comm.barrier().expect("all have come so far");
        incoming.fill(0);
        match comm.rank() {
            0 => {
                let options = PointToPoint::default();
                // SAFETY: the message lives until the wait below has ended.
                let work = unsafe {
                    let memory = Memory::from_raw_parts(long.as_ptr().cast_mut(), long.len());
                    comm.send(DataType::UInt8, memory, 1, 0, options)
                };
                let work = work.expect("a send");
                for _ in 0..20 {
                    comm.send_slice(&short, 1, 1).expect("sent");
                }
                comm.send_slice(&short, 2, 1).expect("sent");
                work.wait(None).expect("the long message");
            }
            1 => {
                comm.send_slice(&long, 2, 2).expect("sent");
                let mut one = vec![0; short.len()];
                for _ in 0..20 {
                    comm.receive_slice(&mut one, Some(0), 1).expect("received");
                    assert_eq!(one, short);
                }
                comm.receive_slice(&mut incoming, Some(0), 0)
                    .expect("received");
                assert_eq!(incoming, long);
            }
            _ => {
                let mut one = vec![0; short.len()];
                comm.receive_slice(&mut one, Some(0), 1).expect("received");
                comm.receive_slice(&mut incoming, Some(1), 2)
                    .expect("received");
                assert_eq!((incoming, one), (long, short));
            }
        }
    });
}

#[test]
fn what_repeats_a_call_is_refused_where_its_buffers_differ() {
    let _others = beside_others();
    run(Transport::Shm, 2, |comm| {
        let mine = [comm.rank() as u8; 2];
        let mut all = [9; 6];
        for _ in 0..2 {
            comm.all_gather(&mine, &mut all[..4]).expect("a gathering");
            assert_eq!(all, [0, 0, 1, 1, 9, 9]);
            // Alike but for the length of the output.
            let error = comm.all_gather(&mine, &mut all).expect_err("six bytes");
            assert_eq!(error.code, Code::InvalidArgument, "{error}");
        }
    });
}

#[test]
fn an_exchange_that_cannot_be_sent_takes_its_receive_back() {
    let _others = beside_others();
    run(Transport::Shm, 2, |comm| {
        let (outgoing, mut incoming) = ([1_u8; 4], [0_u8; 2]);
        let rank = comm.rank();
        let error = comm
            .send_receive_slices((&outgoing, rank), (&mut incoming, Some(rank)), 3)
            .expect_err("four bytes for two");
        assert_eq!(error.code, Code::InvalidArgument, "{error}");
        let error = comm
            .send_receive_slices((&outgoing, 7), (&mut incoming, Some(rank)), 3)
            .expect_err("no such rank");
        assert_eq!(error.code, Code::InvalidArgument, "{error}");
        // The group is as good as before, and no receive is left that would take this.
        let mut incoming = [0_u8; 4];
        let came = comm
            .send_receive_slices((&outgoing, rank), (&mut incoming, Some(rank)), 3)
            .expect("an exchange with oneself");
        assert_eq!((came.source, incoming), (rank, outgoing));
    });
}

#[test]
fn an_exchange_fails_with_its_peer() {
    let _others = beside_others();
    for length in [4, 300_000] {
        run(Transport::Shm, 2, |comm| {
            if comm.rank() == 0 {
                let (outgoing, mut incoming) = (vec![1_u8; length], vec![0_u8; length]);
                let error = comm
                    .send_receive_slices((&outgoing, 1), (&mut incoming, Some(1)), 3)
                    .expect_err("the other has left");
                assert_eq!(error.code, Code::PeerLost, "{error}");
            } else {
                pause(50);
            }
        });
    }
}
