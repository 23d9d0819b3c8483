//! What every transport passes: functions over a constructor of two connected ends, and a macro
//! that makes tests of them. The constructor takes the capacity that the link should have in each
//! direction; a transport whose capacity is the kernel's business comes as near as it can.

use std::ptr;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};

use super::{Interest, Link, Notice, POSITION_BYTES, Page, PeerState};
use crate::error::Code;

mod messages;

pub(super) use messages::{
    messages_of_every_kind_arrive_in_order, sleepers_are_woken_by_messages_of_every_kind, talk,
};

/// Two connected ends.
pub(super) type Pair = (Box<dyn Link>, Box<dyn Link>);

/// After this a test has failed, not merely been slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// One test for every function of the suite, over `$make: fn(usize) -> Pair`.
macro_rules! conformance {
    ($make:path) => {
        $crate::transport::suite::conformance!($make:
            empty_calls_do_nothing
            random_sizes_cross_both_ways_at_once
            sleepers_cross_both_ways_at_once
            a_full_link_takes_nothing_and_resumes
            folds_lend_whole_elements_in_order
            a_part_of_an_element_waits
            sleepers_are_woken_for_every_message
            a_farewell_leaves_earlier_bytes
            a_loss_leaves_earlier_bytes
            an_abort_outranks_all_and_leaves_earlier_bytes
            the_end_of_the_peer_wakes_a_sleeper
            an_abort_wakes_a_sleeper
            a_position_wakes_a_sleeper_and_is_told_once
            a_hundred_megabytes_arrive
            messages_of_every_kind_arrive_in_order
            sleepers_are_woken_by_messages_of_every_kind
            a_page_is_shared_and_left_alone
        );
    };
    ($make:path: $($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                $crate::transport::suite::$name($make);
            }
        )*
    };
}
pub(super) use conformance;

const READABLE: Interest = Interest {
    readable: true,
    writable: false,
};
const WRITABLE: Interest = Interest {
    readable: false,
    writable: true,
};

pub(super) fn empty_calls_do_nothing(make: impl Fn(usize) -> Pair) {
    let (mut a, mut b) = make(4096);
    assert_eq!(a.try_send(&[]).unwrap(), 0);
    assert_eq!(b.try_recv(&mut []).unwrap(), 0);
    assert_eq!(b.try_recv(&mut [0; 10]).unwrap(), 0);
    let mut lent = |_: &[u8]| panic!("nothing was sent");
    assert_eq!(b.try_fold(0, 4, &mut lent).unwrap(), 0);
    assert_eq!(b.try_fold(64, 4, &mut lent).unwrap(), 0);
    for link in [&mut a, &mut b] {
        assert!(!link.arm(Interest::default()));
        link.disarm();
        assert!(!link.arm(READABLE));
        link.disarm();
        assert!(link.arm(WRITABLE));
        link.disarm();
        assert_eq!(link.peer_state(), PeerState::Present);
        assert!(!link.describe().is_empty());
    }
}

/// Of a transport that has one.
pub(super) fn a_page_is_shared_and_left_alone(make: impl Fn(usize) -> Pair) {
    let (mut a, mut b) = make(4096);
    let pages = (a.neighbour(), b.neighbour());
    let (Some(near), Some(far)) = pages else {
        assert!(
            pages.0.is_none() && pages.1.is_none(),
            "one side alone is on this host"
        );
        return;
    };
    let (mine, theirs) = (near.page(), far.page());
    assert!(ptr::eq(near.page().words(), mine.words()));
    for page in [&mine, &theirs] {
        assert!(page.words().as_ptr().addr().is_multiple_of(Page::BYTES));
        assert!(
            page.words()
                .iter()
                .all(|word| word.load(Ordering::Relaxed) == 0)
        );
    }
    let value = |at: usize| 0x5eed_0000 + at as u32;
    for (at, word) in mine.words().iter().enumerate() {
        word.store(value(at), Ordering::Relaxed);
    }
    // Traffic that fills every part of the link does not touch it, and it outlives the link.
    both((a, b), |link, seed| {
        exchange(link, seed, 100_000, &mut |_, _| thread::yield_now());
        talk(link, seed, 40, &mut |_, _| thread::yield_now());
    });
    drop(mine);
    for (at, word) in theirs.words().iter().enumerate() {
        assert_eq!(word.load(Ordering::Relaxed), value(at), "word {at}");
    }
}

pub(super) fn random_sizes_cross_both_ways_at_once(make: impl Fn(usize) -> Pair) {
    for (capacity, total) in [(64, 20_000), (4096, 1 << 20), (1 << 20, 16 << 20)] {
        both(make(capacity), move |link, seed| {
            exchange(link, seed, total, &mut |_, _| thread::yield_now());
        });
    }
}

pub(super) fn sleepers_cross_both_ways_at_once(make: impl Fn(usize) -> Pair) {
    for (capacity, total) in [(64, 20_000), (4096, 1 << 20)] {
        both(make(capacity), move |link, seed| {
            let sleeper = Sleeper::new(link);
            exchange(link, seed, total, &mut |link, interest| {
                sleeper.sleep(link, interest)
            });
        });
    }
}

pub(super) fn a_full_link_takes_nothing_and_resumes(make: impl Fn(usize) -> Pair) {
    let (mut a, mut b) = make(4096);
    let mut sent = 0;
    loop {
        let count = a.try_send(&pattern(1, sent, 1000)).unwrap();
        sent += count;
        if count == 0 && !a.arm(WRITABLE) {
            a.disarm();
            break;
        }
        a.disarm();
        assert!(sent < 64 << 20, "the link never fills");
    }
    let total = sent + 30_000;
    let reader = thread::spawn(move || {
        expect_bytes(b.as_mut(), 1, 0, total);
        b
    });
    let sleeper = Sleeper::new(a.as_ref());
    while sent < total {
        let count = a
            .try_send(&pattern(1, sent, 100_000.min(total - sent)))
            .unwrap();
        sent += count;
        if count == 0 {
            sleeper.sleep(a.as_mut(), WRITABLE);
        }
    }
    drop(reader.join().unwrap());
}

pub(super) fn folds_lend_whole_elements_in_order(make: impl Fn(usize) -> Pair) {
    for align in [1, 2, 4, 8, 16] {
        for shift in [0, 1, 15] {
            let (mut a, mut b) = make(64);
            let total = shift + 3000 * align;
            let sender = thread::spawn(move || {
                let mut random = Random(align as u64);
                send_bytes(a.as_mut(), 5, total, || random.below(3 * align) + 1);
                a
            });
            expect_bytes(b.as_mut(), 5, 0, shift);
            let mut random = Random(shift as u64);
            let mut at = shift;
            let start = Instant::now();
            while at < total {
                let max = (random.below(40) + 1) * align;
                let max = max.min(total - at);
                let before = at;
                let folded = b.try_fold(max, align, &mut |run| {
                    assert!(!run.is_empty() && run.len().is_multiple_of(align));
                    assert_eq!(run, pattern(5, at, run.len()));
                    at += run.len();
                });
                assert_eq!(folded.unwrap(), at - before);
                assert!(at - before <= max);
                if at == before {
                    patient(start);
                }
            }
            drop(sender.join().unwrap());
        }
    }
}

pub(super) fn a_part_of_an_element_waits(make: impl Fn(usize) -> Pair) {
    let (mut a, mut b) = make(64);
    for round in 0..50 {
        let bytes = pattern(2, round * 16, 16);
        let cut = 1 + round % 15;
        assert_eq!(a.try_send(&bytes[..cut]).unwrap(), cut);
        let start = Instant::now();
        while !b.arm(READABLE) {
            b.disarm();
            patient(start);
        }
        b.disarm();
        let mut none = |_: &[u8]| panic!("part of an element was lent");
        assert_eq!(b.try_fold(16, 16, &mut none).unwrap(), 0);
        assert_eq!(a.try_send(&bytes[cut..]).unwrap(), 16 - cut);
        if round % 2 == 0 {
            expect_bytes(b.as_mut(), 2, round * 16, 16);
            continue;
        }
        let mut seen = Vec::new();
        while b
            .try_fold(32, 16, &mut |run| seen.extend_from_slice(run))
            .unwrap()
            == 0
        {
            patient(start);
        }
        assert_eq!(seen, bytes);
    }
}

pub(super) fn sleepers_are_woken_for_every_message(make: impl Fn(usize) -> Pair) {
    both(make(4096), |link, seed| {
        let sleeper = Sleeper::new(link);
        for round in 0..2000 {
            if seed == 0 {
                assert_eq!(link.try_send(&[round as u8; 56]).unwrap(), 56);
            }
            let mut message = [0; 56];
            let mut received = 0;
            while received < message.len() {
                let count = link.try_recv(&mut message[received..]).unwrap();
                received += count;
                if count == 0 {
                    sleeper.sleep(link, READABLE);
                }
            }
            assert_eq!(message, [round as u8; 56]);
            if seed == 1 {
                assert_eq!(link.try_send(&message).unwrap(), 56);
            }
        }
    });
}

pub(super) fn a_farewell_leaves_earlier_bytes(make: impl Fn(usize) -> Pair) {
    let (mut a, mut b) = make(4096);
    assert_eq!(a.try_send(&pattern(3, 0, 1000)).unwrap(), 1000);
    a.send_farewell();
    drop(a);
    assert_eq!(end_of(b.as_mut()), PeerState::Left);
    expect_bytes(b.as_mut(), 3, 0, 1000);
    assert_eq!(b.try_recv(&mut [0; 10]).unwrap(), 0);
    assert_eq!(b.peer_state(), PeerState::Left);
}

pub(super) fn a_loss_leaves_earlier_bytes(make: impl Fn(usize) -> Pair) {
    let (mut a, mut b) = make(4096);
    assert_eq!(a.try_send(&pattern(3, 0, 1000)).unwrap(), 1000);
    drop(a);
    let lost = PeerState::Lost("connection closed".to_owned());
    assert_eq!(end_of(b.as_mut()), lost);
    expect_bytes(b.as_mut(), 3, 0, 1000);
    assert_eq!(b.try_recv(&mut [0; 10]).unwrap(), 0);
    assert_eq!(b.peer_state(), lost);
    while b.try_send(&[0; 4096]).unwrap() > 0 {}
}

pub(super) fn an_abort_outranks_all_and_leaves_earlier_bytes(make: impl Fn(usize) -> Pair) {
    let (mut a, mut b) = make(4096);
    assert_eq!(a.try_send(&pattern(3, 0, 1000)).unwrap(), 1000);
    let notice = Notice {
        code: Code::Mismatch,
        origin: 4,
        culprit: None,
        message: "ranks 4 and 5 called different operations — so".to_owned(),
    };
    a.send_farewell();
    a.send_abort(&notice);
    b.send_abort(&notice);
    assert_eq!(end_of(a.as_mut()), PeerState::Aborted(notice.clone()));
    drop(a);
    let start = Instant::now();
    while b.peer_state() != PeerState::Aborted(notice.clone()) {
        patient(start);
    }
    expect_bytes(b.as_mut(), 3, 0, 1000);
}

pub(super) fn the_end_of_the_peer_wakes_a_sleeper(make: impl Fn(usize) -> Pair) {
    for farewell in [true, false] {
        let (mut a, mut b) = make(4096);
        let sleeper = Sleeper::new(b.as_ref());
        let ender = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            if farewell {
                a.send_farewell();
            }
        });
        let mut state = b.peer_state();
        while state == PeerState::Present {
            sleeper.sleep(b.as_mut(), READABLE);
            state = b.peer_state();
        }
        assert_eq!(state == PeerState::Left, farewell, "{state:?}");
        ender.join().unwrap();
    }
}

pub(super) fn an_abort_wakes_a_sleeper(make: impl Fn(usize) -> Pair) {
    let (mut a, mut b) = make(4096);
    while b.try_send(&[0; 4096]).unwrap() > 0 {}
    let sleeper = Sleeper::new(b.as_ref());
    let notice = Notice {
        code: Code::Timeout,
        origin: 0,
        culprit: Some(1),
        message: String::new(),
    };
    let expected = PeerState::Aborted(notice.clone());
    let aborter = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        a.send_abort(&notice);
        a
    });
    while b.peer_state() == PeerState::Present {
        sleeper.sleep(
            b.as_mut(),
            Interest {
                readable: true,
                writable: true,
            },
        );
    }
    assert_eq!(b.peer_state(), expected);
    drop(aborter.join().unwrap());
}

pub(super) fn a_position_wakes_a_sleeper_and_is_told_once(make: impl Fn(usize) -> Pair) {
    let (mut a, mut b) = make(4096);
    let sleeper = Sleeper::new(b.as_ref());
    assert_eq!(b.take_position(), None);
    let teller = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        a.send_position(&[7; POSITION_BYTES]);
        a
    });
    let mut position = None;
    while position.is_none() {
        sleeper.sleep(b.as_mut(), READABLE);
        assert_eq!(b.peer_state(), PeerState::Present);
        position = b.take_position();
    }
    assert_eq!(position, Some([7; POSITION_BYTES]));
    let a = teller.join().unwrap();
    assert_eq!(b.peer_state(), PeerState::Present);
    assert_eq!(b.take_position(), None);
    drop(a);
}

pub(super) fn a_hundred_megabytes_arrive(make: impl Fn(usize) -> Pair) {
    const TOTAL: usize = 100 << 20;
    let (mut a, mut b) = make(1 << 18);
    let sender = thread::spawn(move || {
        let mut random = Random(11);
        send_bytes(a.as_mut(), 9, TOTAL, || random.size(1 << 20));
        a
    });
    let mut random = Random(12);
    let mut at = 0;
    let mut scratch = vec![0; 1 << 20];
    let start = Instant::now();
    while at < TOTAL {
        let wanted = random.size(1 << 20).min(TOTAL - at);
        let before = at;
        if random.below(2) == 0 {
            let mut check = |run: &[u8]| {
                assert!(pattern(9, at, run.len()) == run, "bytes differ after {at}");
                at += run.len();
            };
            b.try_fold(wanted, 1, &mut check).unwrap();
        } else {
            let count = b.try_recv(&mut scratch[..wanted]).unwrap();
            assert!(
                pattern(9, at, count) == scratch[..count],
                "bytes differ after {at}"
            );
            at += count;
        }
        if at == before {
            patient(start);
        }
    }
    drop(sender.join().unwrap());
}

/// What `link` says once its peer is no longer present.
pub(super) fn end_of(link: &mut dyn Link) -> PeerState {
    let start = Instant::now();
    loop {
        match link.peer_state() {
            PeerState::Present => patient(start),
            state => return state,
        }
    }
}

/// Runs `body` for both ends at once, in a thread each; the number tells them apart.
fn both((mut a, mut b): Pair, body: impl Fn(&mut dyn Link, u64) + Send + Sync) {
    thread::scope(|scope| {
        scope.spawn(|| body(a.as_mut(), 0));
        scope.spawn(|| body(b.as_mut(), 1));
    });
}

/// Sends one pattern and receives the other's, in pieces of random sizes; `wait`s when neither
/// moves.
fn exchange(
    link: &mut dyn Link,
    seed: u64,
    total: usize,
    wait: &mut dyn FnMut(&mut dyn Link, Interest),
) {
    let mut random = Random(seed + 20);
    let (mut sent, mut received) = (0, 0);
    let mut scratch = vec![0; 1 << 16];
    let start = Instant::now();
    while sent < total || received < total {
        let piece = random.size(scratch.len()).min(total - sent);
        let out = link.try_send(&pattern(seed, sent, piece)).unwrap();
        sent += out;
        let piece = random.size(scratch.len()).min(total - received);
        let count = link.try_recv(&mut scratch[..piece]).unwrap();
        assert!(pattern(1 - seed, received, count) == scratch[..count]);
        received += count;
        if out == 0 && count == 0 {
            let readable = received < total;
            let writable = sent < total;
            wait(link, Interest { readable, writable });
            assert!(
                start.elapsed() < PATIENCE,
                "sent {sent}, received {received} of {total}"
            );
        }
    }
}

/// Sends the first `total` bytes of a pattern in pieces of the sizes that `size` gives.
fn send_bytes(link: &mut dyn Link, seed: u64, total: usize, mut size: impl FnMut() -> usize) {
    let mut sent = 0;
    let start = Instant::now();
    while sent < total {
        let piece = pattern(seed, sent, size().min(total - sent));
        let mut done = 0;
        while done < piece.len() {
            let count = link.try_send(&piece[done..]).unwrap();
            done += count;
            if count == 0 {
                patient(start);
            }
        }
        sent += done;
    }
}

/// Receives bytes `from..from + count` of a pattern.
pub(super) fn expect_bytes(link: &mut dyn Link, seed: u64, from: usize, count: usize) {
    let mut bytes = vec![0; count.min(1 << 20)];
    let mut received = 0;
    let start = Instant::now();
    while received < count {
        let wanted = bytes.len().min(count - received);
        let taken = link.try_recv(&mut bytes[..wanted]).unwrap();
        assert!(pattern(seed, from + received, taken) == bytes[..taken]);
        received += taken;
        if taken == 0 {
            patient(start);
        }
    }
}

fn patient(start: Instant) {
    assert!(start.elapsed() < PATIENCE, "nothing moved for {PATIENCE:?}");
    thread::yield_now();
}

/// Bytes `from..from + count` of the endless pattern called `seed`.
pub(super) fn pattern(seed: u64, from: usize, count: usize) -> Vec<u8> {
    let word = |i: usize| (i as u64 ^ seed << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53;
    (from..from + count).map(|i| word(i) as u8).collect()
}

/// Small reproducible random numbers (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % bound as u64) as usize
    }

    /// A size up to `max`, with every order of magnitude as likely.
    fn size(&mut self, max: usize) -> usize {
        let bits = self.below(max.ilog2() as usize + 1);
        1 + self.below(1 << bits)
    }
}

/// Sleeps as the engine does: edge-triggered, registered once.
pub(super) struct Sleeper(std::os::fd::OwnedFd);

impl Sleeper {
    pub(super) fn new(link: &dyn Link) -> Self {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let edges = epoll::EventFlags::ET
            | epoll::EventFlags::IN
            | epoll::EventFlags::OUT
            | epoll::EventFlags::RDHUP;
        for fd in link.fds() {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(0), edges).unwrap();
        }
        Self(epoll)
    }

    pub(super) fn sleep(&self, link: &mut dyn Link, interest: Interest) {
        if !link.arm(interest) {
            let patience = Timespec::try_from(PATIENCE).unwrap();
            let mut events = Vec::with_capacity(8);
            let events_room = rustix::buffer::spare_capacity(&mut events);
            let count = epoll::wait(&self.0, events_room, Some(&patience)).unwrap();
            assert!(count > 0, "nobody woke the sleeper");
        }
        link.disarm();
    }
}

/// Has a forked child drop its copy of `value`.
pub(super) fn drop_in_child<T>(value: T) -> T {
    // SAFETY: the child has this thread alone. It needs the allocator, whose locks a fork leaves free, and ends without
    // running anything else.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(value);
        // SAFETY: as above.
        unsafe { libc::_exit(0) };
    }
    let mut status = -1;
    // SAFETY: the child is this process's own and is waited for once.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!((waited, status), (child, 0));
    value
}
