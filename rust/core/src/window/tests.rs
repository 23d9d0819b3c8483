//! Windows between threads that play ranks.

use std::thread;
use std::time::Duration;

use super::*;
use crate::config::Config;
use crate::heap::Buffer;

const SOON: Duration = Duration::from_secs(20);

/// A rank of a test, with a window over `LENGTH` numbers, each the number of the rank at first.
struct Player {
    window: Window,
    numbers: *mut u32,
    comm: Communicator,
    /// A test may look at the memory of a window that is closed.
    _memory: Arc<dyn Send + Sync>,
}

// SAFETY: the memory is the window's, which the player keeps.
unsafe impl Send for Player {}

const LENGTH: usize = 1000;
const BYTES: usize = LENGTH * 4;

impl Player {
    fn new(comm: Communicator, is_shared: bool) -> Self {
        let mut numbers = Buffer::<u32>::zeroed(LENGTH);
        numbers.fill(comm.rank() as u32);
        let (start, memory): (*mut u32, Arc<dyn Send + Sync>) = match is_shared {
            true => (numbers.as_mut_ptr(), Arc::new(numbers)),
            false => {
                let mut numbers = numbers.to_vec();
                (numbers.as_mut_ptr(), Arc::new(numbers))
            }
        };
        let owner = Box::new(Arc::clone(&memory));
        let note = [comm.rank() as u8];
        // SAFETY: the owner is the memory; tests agree on who uses it when.
        let window =
            unsafe { comm.window((start.cast(), BYTES), (DataType::UInt32, &note), owner) };
        Self {
            window: window.expect("a window"),
            numbers: start,
            comm,
            _memory: memory,
        }
    }

    fn number(&self, at: usize) -> u32 {
        // SAFETY: it lies in the memory; tests look when no rank writes to it.
        unsafe { self.numbers.add(at).read_volatile() }
    }

    fn put(&self, to: Rank, at: usize, numbers: &[u32]) -> Result<()> {
        let source = (numbers.as_ptr().cast(), size_of_val(numbers));
        // SAFETY: the slice is borrowed until the transfer has ended.
        let put = unsafe { self.window.put(to, 4 * at, source, Box::new(()))? };
        put.map_or(Ok(()), |transfer| transfer.wait(None))
    }

    fn get(&self, from: Rank, at: usize, numbers: &mut [u32]) -> Result<()> {
        let target = (numbers.as_mut_ptr().cast(), size_of_val(numbers));
        // SAFETY: as in `put`.
        let got = unsafe { self.window.get(from, 4 * at, target, Box::new(()))? };
        got.map_or(Ok(()), |transfer| transfer.wait(None))
    }
}

/// Runs `play` on each of `world` ranks. `is_shared`: whether the memory of a rank lies in the heap.
fn play(world: usize, is_shared: fn(Rank) -> bool, play: impl Fn(&Player) + Sync) {
    let ranks = Communicator::local(world, &Config::default()).expect("ranks");
    thread::scope(|scope| {
        for comm in ranks {
            let play = &play;
            scope.spawn(move || {
                let is_shared = is_shared(comm.rank());
                play(&Player::new(comm, is_shared));
            });
        }
    });
}

/// Each rank puts its number into the next one's memory, and reads the one before.
fn exchange(player: &Player) {
    let (rank, world) = (player.comm.rank(), player.comm.world_size());
    let (next, before) = ((rank + 1) % world, (rank + world - 1) % world);
    for round in 0..50_u32 {
        let sent = [round * 100 + rank as u32; 10];
        player.put(next, 20, &sent).unwrap();
        player.window.signal(next).unwrap();
        player.window.wait_signal(before, Some(SOON)).unwrap();
        assert_eq!(player.number(20), round * 100 + before as u32);
        assert_eq!(player.number(29), round * 100 + before as u32);
        assert_eq!(player.number(19), rank as u32);
        let mut got = [0; 3];
        player.get(before, 0, &mut got).unwrap();
        assert_eq!(got, [before as u32; 3]);
        // Not before that has been read.
        player.window.signal(before).unwrap();
        player.window.wait_signal(next, Some(SOON)).unwrap();
    }
    let (bytes, dtype, note) = player.window.described(before).unwrap();
    assert_eq!(
        (bytes, dtype, note),
        (BYTES, DataType::UInt32, &[before as u8][..])
    );
    player.window.fence().unwrap();
}

#[test]
fn ranks_write_to_memory_that_is_mapped() {
    play(
        3,
        |_| true,
        |player| {
            assert_eq!(player.window.is_mapped(player.comm.rank()), Ok(false));
            let next = (player.comm.rank() + 1) % 3;
            assert_eq!(player.window.is_mapped(next), Ok(true));
            exchange(player);
        },
    );
}

#[test]
fn ranks_write_to_memory_outside_the_heap() {
    play(3, |rank| rank == 1, exchange);
}

#[test]
fn a_rank_alone_has_a_window() {
    play(
        1,
        |_| true,
        |player| {
            player.put(0, 5, &[77]).unwrap();
            player.window.signal(0).unwrap();
            player.window.wait_signal(0, Some(SOON)).unwrap();
            assert_eq!(player.number(5), 77);
            player.window.fence().unwrap();
        },
    );
}

#[test]
fn a_view_is_the_memory_itself() {
    play(
        2,
        |_| true,
        |player| {
            let other = 1 - player.comm.rank();
            let view = player.window.view(other).unwrap();
            let numbers = view.start().as_ptr().cast::<u32>();
            // SAFETY: it lies in the view, and its owner leaves it alone until the signal.
            unsafe { numbers.add(7).write_volatile(40 + other as u32) };
            player.window.signal(other).unwrap();
            player.window.wait_signal(other, Some(SOON)).unwrap();
            assert_eq!(player.number(7), 40 + player.comm.rank() as u32);
            player.window.fence().unwrap();
            let own = player.window.view(player.comm.rank()).unwrap_err();
            assert_eq!(own.code, Code::Unsupported);
        },
    );
}

#[test]
fn a_wait_sleeps_until_the_signal_and_takes_each_once() {
    play(
        2,
        |_| true,
        |player| {
            let window = &player.window;
            if player.comm.rank() == 0 {
                window.wait_signal(1, Some(SOON)).unwrap();
                // The other one sleeps by then.
                thread::sleep(Duration::from_millis(100));
                (0..3).for_each(|_| window.signal(1).unwrap());
                window.wait_signal(1, Some(SOON)).unwrap();
                return;
            }
            let patience = Some(Duration::from_millis(50));
            assert_eq!(window.try_wait_signal(0, patience), Ok(false));
            let late = window.wait_signal(0, patience).unwrap_err();
            assert_eq!((late.code, late.peer), (Code::Timeout, Some(0)));
            // The window goes on after a timeout.
            window.signal(0).unwrap();
            (0..3).for_each(|_| window.wait_signal(0, Some(SOON)).unwrap());
            assert_eq!(window.try_wait_signal(0, Some(Duration::ZERO)), Ok(false));
            window.signal(0).unwrap();
        },
    );
}

#[test]
fn several_threads_take_the_signals_of_one_rank() {
    play(
        2,
        |_| true,
        |player| {
            const EACH: usize = 200;
            let window = &player.window;
            if player.comm.rank() == 0 {
                for number in 0..4 * EACH {
                    window.signal(1).unwrap();
                    if number % 50 == 0 {
                        thread::sleep(Duration::from_millis(2));
                    }
                }
            } else {
                thread::scope(|scope| {
                    for _ in 0..4 {
                        scope.spawn(|| {
                            (0..EACH).for_each(|_| window.wait_signal(0, Some(SOON)).unwrap());
                        });
                    }
                });
                assert_eq!(window.try_wait_signal(0, Some(Duration::ZERO)), Ok(false));
            }
            window.fence().unwrap();
        },
    );
}

#[test]
fn what_does_not_fit_is_refused_and_the_window_goes_on() {
    play(
        2,
        |_| true,
        |player| {
            let outside = player.put(1, LENGTH - 1, &[1, 2]).unwrap_err();
            assert_eq!(outside.code, Code::InvalidArgument);
            assert_eq!(
                player.put(2, 0, &[1]).unwrap_err().code,
                Code::InvalidArgument
            );
            assert!(player.window.signal(2).is_err());
            player.put(1, LENGTH, &[]).unwrap();
            player.window.fence().unwrap();
        },
    );
}

#[test]
fn the_memory_of_a_closed_window_is_left_alone() {
    play(
        2,
        |_| true,
        |player| {
            let window = &player.window;
            window.fence().unwrap();
            if player.comm.rank() == 0 {
                window.close().unwrap();
                window.close().unwrap();
                assert_eq!(window.signal(1).unwrap_err().code, Code::InvalidArgument);
                // The other rank has tried.
                player.comm.receive_slice(&mut [0_u8], Some(1), 0).unwrap();
                assert_eq!(player.number(0), 0);
                return;
            }
            while player.put(0, 1, &[7]).is_ok() {
                thread::yield_now();
            }
            let error = player.put(0, 0, &[7]).unwrap_err();
            assert_eq!(error.peer, Some(0), "{error}");
            assert!(window.view(0).is_err());
            assert!(window.wait_signal(0, Some(SOON)).is_err());
            player.comm.send_slice(&[1_u8], 0, 0).unwrap();
        },
    );
}

/// Says when it is dropped.
struct Told(
    Arc<AtomicBool>,
    #[expect(dead_code, reason = "it is kept")] Buffer<u8>,
);

impl Drop for Told {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Release);
    }
}

#[test]
fn memory_stays_as_long_as_another_rank_has_a_view_of_it() {
    for keeps in [false, true] {
        let ranks = Communicator::local(2, &Config::default()).expect("ranks");
        let gone: Vec<_> = ranks
            .iter()
            .map(|_| Arc::new(AtomicBool::new(false)))
            .collect();
        let windows: Vec<_> = thread::scope(|scope| {
            let make = |(comm, gone): (&'_ Communicator, &Arc<AtomicBool>)| {
                let mut memory = Buffer::<u8>::zeroed(100);
                let start = memory.as_mut_ptr();
                let owner = Box::new(Told(Arc::clone(gone), memory));
                // SAFETY: the owner is the memory, which the test leaves alone.
                unsafe { comm.window((start, 100), (DataType::UInt8, &[]), owner) }.unwrap()
            };
            let made = ranks.iter().zip(&gone);
            let made: Vec<_> = made.map(|it| scope.spawn(move || make(it))).collect();
            made.into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        let view = keeps.then(|| windows[0].view(1).unwrap());
        windows.iter().for_each(|window| window.close().unwrap());
        let is_gone = |rank: usize| gone[rank].load(std::sync::atomic::Ordering::Acquire);
        // Another test that lets go of memory may have it for a moment.
        let goes = |rank: usize| {
            (0..1000).any(|_| {
                crate::transport::ends::let_go();
                thread::sleep(Duration::from_millis(1));
                is_gone(rank)
            })
        };
        assert!(goes(0));
        assert!(if keeps { !is_gone(1) } else { goes(1) });
        drop(view);
        assert!(goes(1));
    }
}

#[test]
fn an_abort_ends_the_wait_for_a_signal() {
    // Of the window's group, which all ranks hear of; and of the one that it was made of, here alone.
    for of_the_window in [true, false] {
        play(
            2,
            |_| true,
            |player| {
                let (window, comm) = (&player.window, &player.comm);
                let aborts = comm.rank() == usize::from(!of_the_window);
                thread::scope(|scope| {
                    if aborts {
                        scope.spawn(|| {
                            thread::sleep(Duration::from_millis(100));
                            match of_the_window {
                                true => window.communicator().abort("enough"),
                                false => comm.abort("enough"),
                            }
                        });
                    }
                    // Rank 0 stays until it hears of the end.
                    let error = window.wait_signal(1 - comm.rank(), Some(SOON)).unwrap_err();
                    if comm.rank() == 1 {
                        assert_eq!(error.code, Code::Aborted, "{error}");
                        assert!(error.message.contains("enough"), "{error}");
                        let after = window.signal(0).unwrap_err();
                        assert!(after.message.contains("make a new window"), "{after}");
                    }
                });
            },
        );
    }
}

/// Symmetric memory of one number on each of `world` ranks, which is the number of the rank at first.
fn meet(world: usize, play: impl Fn(&Symmetric, &Communicator) + Sync) {
    let ranks = Communicator::local(world, &Config::default()).expect("ranks");
    thread::scope(|scope| {
        for comm in ranks {
            let play = &play;
            scope.spawn(move || {
                let mut number = Buffer::<u32>::from_slice(&[comm.rank() as u32]);
                let memory = (number.as_mut_ptr().cast(), 4);
                // SAFETY: the owner is the memory; tests agree on who uses it when.
                let met = unsafe { comm.symmetric(memory, 256, Box::new(number)) };
                play(&met.expect("symmetric memory"), &comm);
            });
        }
    });
}

#[test]
fn ranks_meet_in_each_others_memory() {
    meet(3, |met, comm| {
        let rank = comm.rank();
        let next = (rank + 1) % 3;
        let of = |rank| met.start(rank).unwrap().expect("it is there").cast::<u32>();
        for round in 0..100_u32 {
            // SAFETY: the memory has a number, which no other rank uses between these barriers.
            unsafe { of(next).write_volatile(round * 10 + rank as u32) };
            met.barrier(0, Some(SOON)).unwrap();
            // SAFETY: as above; no rank writes it here.
            let number = unsafe { of(rank).read_volatile() };
            assert_eq!(number, round * 10 + (rank as u32 + 2) % 3);
            met.barrier(1, Some(SOON)).unwrap();
        }
        let refused = met.barrier(21, None).unwrap_err();
        assert_eq!(refused.code, Code::InvalidArgument);
        assert!(refused.message.contains("has 21 for 3 ranks"), "{refused}");
        met.barrier(20, Some(SOON)).unwrap();
    });
}

#[test]
fn a_wait_for_a_signal_has_the_time_of_its_group_unless_it_is_told_another() {
    meet(2, |met, comm| {
        let other = 1 - comm.rank();
        let late = |limit| met.wait_signal(other, 0, limit).unwrap_err();
        let error = late(Some(Duration::from_millis(20)));
        assert_eq!((error.code, error.peer), (Code::Timeout, Some(other)));
        assert!(error.message.contains("0.020 s"), "{error}");
        met.windows()[1]
            .communicator()
            .set_timeout(Duration::from_millis(30));
        assert!(late(None).message.contains("0.030 s"));
        met.windows()[1].communicator().set_timeout(Duration::ZERO);
        met.barrier(1, Some(SOON)).unwrap();
        met.put_signal(other, 0, None).unwrap();
        met.wait_signal(other, 0, None).unwrap();
    });
}

#[test]
fn a_rank_that_lets_go_ends_the_waits_for_it() {
    let ranks = Communicator::local(2, &Config::default()).expect("ranks");
    thread::scope(|scope| {
        for comm in ranks {
            scope.spawn(move || {
                let mut number = Buffer::<u32>::zeroed(1);
                let memory = (number.as_mut_ptr().cast(), 4);
                // SAFETY: as above.
                let met = unsafe { comm.symmetric(memory, 256, Box::new(number)) }.unwrap();
                met.barrier(0, Some(SOON)).unwrap();
                if comm.rank() == 1 {
                    // The one that it has sent is taken.
                    met.put_signal(0, 0, Some(SOON)).unwrap();
                    drop(met);
                    return;
                }
                met.wait_signal(1, 0, Some(SOON)).unwrap();
                let error = met.wait_signal(1, 0, Some(SOON)).unwrap_err();
                assert_eq!(error.peer, Some(1), "{error}");
                assert!(
                    matches!(error.code, Code::Aborted | Code::PeerLost),
                    "{error}"
                );
            });
        }
    });
}

#[test]
fn a_barrier_that_fails_is_the_end_for_all() {
    meet(2, |met, comm| {
        if comm.rank() == 0 {
            let error = met.barrier(0, Some(Duration::from_millis(20))).unwrap_err();
            assert_eq!(error.code, Code::Timeout);
            let after = met.put_signal(1, 0, None).unwrap_err();
            assert!(after.message.contains("no further use"), "{after}");
        } else {
            let error = met.wait_signal(0, 3, Some(SOON)).unwrap_err();
            assert_eq!(error.peer, Some(0), "{error}");
            // The other rank leaves its group soon after.
            assert!(
                matches!(error.code, Code::Aborted | Code::PeerLost),
                "{error}"
            );
        }
    });
}

#[test]
fn sizes_that_differ_are_refused_on_all_ranks() {
    let ranks = Communicator::local(3, &Config::default()).expect("ranks");
    thread::scope(|scope| {
        for comm in ranks {
            scope.spawn(move || {
                let mut numbers = Buffer::<u32>::zeroed(1 + comm.rank() / 2);
                let memory = (numbers.as_mut_ptr().cast(), 4 * numbers.len());
                // SAFETY: as above.
                let met = unsafe { comm.symmetric(memory, 256, Box::new(numbers)) };
                let error = met.unwrap_err();
                assert_eq!(error.code, Code::InvalidArgument);
                assert!(
                    error
                        .message
                        .contains("rank 0 has 4 bytes and rank 2 has 8"),
                    "{error}"
                );
            });
        }
    });
}

/// The operations of this rank in a window's group, once they are as `is_so` says.
fn operations(window: &Window, is_so: impl Fn(&[serde_json::Value]) -> bool) {
    let until = Instant::now() + SOON;
    loop {
        let status = window.communicator().group().status();
        let operations = status["operations"].as_array().expect("a list");
        if is_so(operations) {
            return;
        }
        assert!(Instant::now() < until, "{status}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_status_of_a_rank_tells_for_whose_signal_and_fence_it_waits() {
    play(
        2,
        |_| true,
        |player| {
            let (window, other) = (&player.window, 1 - player.comm.rank());
            if other == 0 {
                thread::scope(|scope| {
                    // In parts, as the doors wait.
                    let wait = || while !window.try_wait_signal(0, Some(SLICE)).unwrap() {};
                    scope.spawn(wait);
                    operations(window, |all| {
                        let longer = |it: &serde_json::Value| {
                            it["seconds"].as_f64() > Some(3.0 * SLICE.as_secs_f64())
                        };
                        all.len() == 1
                            && all[0]["name"] == "wait_signal"
                            && all[0]["waits_for"] == serde_json::json!([0])
                            && longer(&all[0])
                    });
                    window.signal(0).unwrap();
                });
                operations(window, <[_]>::is_empty);
                thread::scope(|scope| {
                    scope.spawn(|| window.fence().unwrap());
                    operations(window, |all| {
                        let name = all.first().and_then(|it| it["name"].as_str());
                        name.is_some_and(|name| name.starts_with("fence #"))
                    });
                    window.signal(0).unwrap();
                });
            } else {
                window.wait_signal(1, Some(SOON)).unwrap();
                window.signal(1).unwrap();
                window.wait_signal(1, Some(SOON)).unwrap();
                window.fence().unwrap();
            }
        },
    );
}

#[test]
fn the_status_of_a_rank_tells_for_whose_barrier_it_waits() {
    meet(2, |met, comm| {
        if comm.rank() == 1 {
            met.wait_signal(0, 1, Some(SOON)).unwrap();
            met.barrier(0, Some(SOON)).unwrap();
            return;
        }
        let pads = met.windows()[1];
        thread::scope(|scope| {
            scope.spawn(|| met.barrier(0, Some(SOON)).unwrap());
            operations(pads, |all| {
                all.len() == 1
                    && all[0]["name"] == "barrier"
                    && all[0]["waits_for"] == serde_json::json!([1])
            });
            met.put_signal(1, 1, Some(SOON)).unwrap();
        });
        operations(pads, <[_]>::is_empty);
    });
}
