//! Two and more ranks inside this process, whose streams meet by flags.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread;
use std::time::Duration;

use unisono::transport::cuda::driver::{DeviceMemory, Pinned, Stream};
use unisono::transport::cuda::flags::{ANNOUNCEMENT, Announced, Flags, Receipt, Signal, Spot};
use unisono::transport::{Neighbour, Page, local};

use crate::driver_calls::{capture, device};
use crate::harness::{self, until};

harness::tests! {
    EmulatedAndClean {
        streams_meet_in_both_halves { RANDOM_DELAY: "300", HOST_POINTERS: "separate" }
        captured_meetings_are_replayed { RANDOM_DELAY: "100" }
        missing_ranks_are_named_and_all_waits_are_released
        a_wait_leaves_its_receipt
        announcements_are_read_in_time
        both_meetings_are_apart
        a_stranger_is_an_error
    }
}

/// The flags of `size` ranks.
fn ranks(size: usize) -> Vec<Flags> {
    let mut pages: Vec<Vec<Option<Page>>> = (0..size).map(|_| vec![None; size]).collect();
    for (a, b) in (0..size).flat_map(|b| (0..b).map(move |a| (a, b))) {
        let (mine, theirs) = local::pair(4096).unwrap();
        pages[a][b] = Some(mine.page());
        pages[b][a] = Some(theirs.page());
    }
    pages
        .into_iter()
        .enumerate()
        .map(|(rank, pages)| Flags::new(device(), rank, pages).unwrap())
        .collect()
}

fn others(rank: usize, size: usize) -> impl Iterator<Item = usize> {
    (0..size).filter(move |&peer| peer != rank)
}

fn spot(round: usize) -> Spot {
    Spot {
        half: round % 2,
        meeting: 0,
    }
}

/// One rank's part of a round: it puts its number where the others read it, and reads theirs.
fn round(
    flags: &Flags,
    stream: &Stream,
    (rank, size): (usize, usize),
    n: usize,
    windows: &[u64],
    own: &Words,
) {
    let half = 4 * (n % 2) as u64;
    flags
        .batch()
        .wait(Signal::Empty, spot(n), others(rank, size), Receipt::NONE)
        .submit(stream)
        .unwrap();
    stream
        .copy(windows[rank] + half, own.0.address() + 4 * n as u64, 4)
        .unwrap();
    flags
        .batch()
        .tell(Signal::Full, spot(n), others(rank, size))
        .wait(Signal::Full, spot(n), others(rank, size), Receipt::NONE)
        .submit(stream)
        .unwrap();
    for (peer, window) in windows.iter().enumerate() {
        let to = own.0.address() + 1024 + 4 * (n * size + peer) as u64;
        stream.copy(to, window + half, 4).unwrap();
    }
    flags
        .batch()
        .tell(Signal::Empty, spot(n), others(rank, size))
        .submit(stream)
        .unwrap();
}

/// The numbers that a rank puts, round by round, and from 1024 on the numbers that it read.
struct Words(Pinned);

impl Words {
    fn new(rank: usize) -> Self {
        let words = Pinned::private(device(), 8192).unwrap();
        for n in 0..256 {
            words.word(4 * n).store((1000 * rank + n) as u32, Release);
        }
        Self(words)
    }

    fn check(&self, rounds: usize, size: usize) {
        for n in 0..rounds {
            for peer in 0..size {
                let seen = self.0.word(1024 + 4 * (n * size + peer)).load(Acquire);
                assert_eq!(seen, (1000 * peer + n) as u32, "round {n}, from {peer}");
            }
        }
    }
}

fn streams_meet_in_both_halves() {
    const SIZE: usize = 4;
    const ROUNDS: usize = 40;
    let memory: Vec<_> = (0..SIZE)
        .map(|_| DeviceMemory::allocate(device(), 64).unwrap())
        .collect();
    let windows: Vec<u64> = memory.iter().map(DeviceMemory::address).collect();
    let flags = ranks(SIZE);
    thread::scope(|scope| {
        for (rank, flags) in flags.iter().enumerate() {
            let windows = &windows;
            scope.spawn(move || {
                let stream = Stream::create(device()).unwrap();
                let words = Words::new(rank);
                for n in 0..ROUNDS {
                    round(flags, &stream, (rank, SIZE), n, windows, &words);
                }
                stream.synchronize().unwrap();
                words.check(ROUNDS, SIZE);
            });
        }
    });
}

fn captured_meetings_are_replayed() {
    const SIZE: usize = 2;
    let memory: Vec<_> = (0..SIZE)
        .map(|_| DeviceMemory::allocate(device(), 64).unwrap())
        .collect();
    let windows: Vec<u64> = memory.iter().map(DeviceMemory::address).collect();
    let flags = ranks(SIZE);
    thread::scope(|scope| {
        for (rank, flags) in flags.iter().enumerate() {
            let windows = &windows;
            scope.spawn(move || {
                let stream = Stream::create(device()).unwrap();
                let words = Words::new(rank);
                let graph = capture(&stream, || {
                    for n in 0..4 {
                        round(flags, &stream, (rank, SIZE), n, windows, &words);
                    }
                });
                for replay in 0..5 {
                    graph.launch(&stream);
                    // A meeting outside the graph follows, and uses the same flags.
                    round(flags, &stream, (rank, SIZE), 4 + replay, windows, &words);
                    round(flags, &stream, (rank, SIZE), 5 + replay, windows, &words);
                }
                stream.synchronize().unwrap();
                words.check(10, SIZE);
            });
        }
    });
}

fn missing_ranks_are_named_and_all_waits_are_released() {
    const SIZE: usize = 4;
    let flags = ranks(SIZE);
    let streams: Vec<_> = (0..SIZE)
        .map(|_| Stream::create(device()).unwrap())
        .collect();
    // Rank 2 never comes.
    for rank in [0, 1, 3] {
        flags[rank]
            .batch()
            .tell(Signal::Full, spot(0), others(rank, SIZE))
            .wait(Signal::Full, spot(0), others(rank, SIZE), Receipt::NONE)
            .submit(&streams[rank])
            .unwrap();
        // A later operation waits, too.
        flags[rank]
            .batch()
            .wait(Signal::Full, spot(1), others(rank, SIZE), Receipt::NONE)
            .wait(Signal::Full, spot(0), others(rank, SIZE), Receipt::NONE)
            .submit(&streams[rank])
            .unwrap();
    }
    for rank in [0, 1, 3] {
        until("the others are there", || {
            flags[rank].missing(Signal::Full, spot(0), others(rank, SIZE)) == [2]
        });
    }
    thread::sleep(Duration::from_millis(5));
    for rank in [0, 1, 3] {
        assert!(!streams[rank].is_idle().unwrap());
        until("the stream has drained", || {
            flags[rank].release();
            streams[rank].is_idle().unwrap()
        });
    }
}

/// The receipt that a stream leaves in a word tells the waits apart, also where their numbers go round.
fn a_wait_leaves_its_receipt() {
    let flags = ranks(2);
    let stream = Stream::create(device()).unwrap();
    for first in [1, 7, (1 << 30) - 1, u32::MAX] {
        for (number, peer) in [(first, 1), (first.wrapping_add(2), 0)] {
            let rank = 1 - peer;
            let batch = flags[peer].batch();
            let told = batch.tell(Signal::Full, spot(0), [rank]);
            told.submit(&stream).unwrap();
            let batch = flags[rank].batch();
            let receipt = Receipt::new(number);
            let waited = batch.wait(Signal::Full, spot(0), [peer], receipt);
            waited.submit(&stream).unwrap();
            stream.synchronize().unwrap();
            for (from, until, is_there) in
                [(0, 1, true), (0, 5, true), (1, 5, false), (0, 0, false)]
            {
                let waits = number.wrapping_add(from)..number.wrapping_add(until);
                let has = flags[rank].has_waited(Signal::Full, spot(0), [peer], &waits);
                assert_eq!(has, is_there, "{number}: {waits:?}");
                let missing = flags[rank].missing_before(Signal::Full, spot(0), [peer], &waits);
                assert_eq!(missing.is_empty(), is_there);
            }
        }
    }
}

fn announcements_are_read_in_time() {
    let flags = ranks(3);
    let text = |number: u64| {
        let mut bytes = [3; ANNOUNCEMENT];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        bytes
    };
    assert_eq!(flags[0].announced(1, 0), Announced::NotYet);
    assert_eq!(flags[0].announced(0, 0), Announced::NotYet);
    for number in 0..40 {
        flags[1].announce(number, &text(number));
        for reader in [0, 2] {
            let seen = |number| flags[reader].announced(1, number);
            assert_eq!(seen(number), Announced::As(text(number)));
            assert_eq!(seen(number + 1), Announced::NotYet);
            if number >= 15 {
                assert_eq!(seen(number - 15), Announced::As(text(number - 15)));
            }
            if number >= 16 {
                assert_eq!(seen(number - 16), Announced::Past);
            }
        }
        assert_eq!(flags[1].announced(0, number), Announced::NotYet);
    }
    // Torn entries are never believed.
    thread::scope(|scope| {
        scope.spawn(|| (40..20_000).for_each(|number| flags[1].announce(number, &text(number))));
        let mut next = 40;
        while next < 20_000 {
            match flags[0].announced(1, next) {
                Announced::NotYet => thread::yield_now(),
                Announced::As(bytes) => {
                    assert_eq!(bytes, text(next));
                    next += 1;
                }
                Announced::Past => next += 1,
            }
        }
    });
}

fn both_meetings_are_apart() {
    let flags = ranks(2);
    let stream = Stream::create(device()).unwrap();
    let all = || {
        [Signal::Full, Signal::Empty]
            .into_iter()
            .flat_map(|signal| Spot::ALL.map(|spot| (signal, spot)))
            .flat_map(|(signal, spot)| [(0, 1), (1, 0)].map(|ranks| (signal, spot, ranks)))
    };
    let set = || {
        all()
            .filter(|&(signal, spot, (from, to))| {
                flags[to].missing(signal, spot, [from]).is_empty()
            })
            .collect::<Vec<_>>()
    };
    // Empty is set at first.
    assert!(
        set()
            == all()
                .filter(|flag| flag.0 == Signal::Empty)
                .collect::<Vec<_>>()
    );
    for (signal, spot, (from, to)) in set() {
        flags[to]
            .batch()
            .wait(signal, spot, [from], Receipt::NONE)
            .submit(&stream)
            .unwrap();
    }
    stream.synchronize().unwrap();
    assert!(set().is_empty());
    // Each is said and heard, and none stands for another.
    for (signal, spot, (from, to)) in all() {
        flags[from]
            .batch()
            .tell(signal, spot, [to])
            .submit(&stream)
            .unwrap();
        stream.synchronize().unwrap();
        assert!(set() == [(signal, spot, (from, to))]);
        flags[to]
            .batch()
            .wait(signal, spot, [from], Receipt::NONE)
            .submit(&stream)
            .unwrap();
        stream.synchronize().unwrap();
        assert!(set().is_empty());
    }
}

fn a_stranger_is_an_error() {
    let flags = ranks(2);
    let stream = Stream::create(device()).unwrap();
    let error = flags[0]
        .batch()
        .tell(Signal::Full, spot(0), [5])
        .submit(&stream)
        .unwrap_err();
    assert!(error.message.contains("no page with rank 5"), "{error}");
}
