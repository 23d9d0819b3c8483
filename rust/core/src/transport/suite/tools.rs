//! Tools of the suite's functions: patterns of bytes, ends that run side by side, and a sleeper like the engine's.

use std::thread;
use std::time::Instant;

use rustix::event::{Timespec, epoll};

use super::{PATIENCE, Pair};
use crate::transport::{Interest, Link};

/// Runs `body` for both ends at once, in a thread each; the number tells them apart.
pub(super) fn both((mut a, mut b): Pair, body: impl Fn(&mut dyn Link, u64) + Send + Sync) {
    thread::scope(|scope| {
        scope.spawn(|| body(a.as_mut(), 0));
        scope.spawn(|| body(b.as_mut(), 1));
    });
}

/// Sends one pattern and receives the other's, in pieces of random sizes; `wait`s when neither
/// moves.
pub(super) fn exchange(
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
pub(super) fn send_bytes(
    link: &mut dyn Link,
    seed: u64,
    total: usize,
    mut size: impl FnMut() -> usize,
) {
    let mut sent = 0;
    let mut moved = Instant::now();
    while sent < total {
        let piece = pattern(seed, sent, size().min(total - sent));
        let mut done = 0;
        while done < piece.len() {
            let count = link.try_send(&piece[done..]).unwrap();
            done += count;
            match count {
                0 => patient(moved),
                _ => moved = Instant::now(),
            }
        }
        sent += done;
    }
}

/// Receives bytes `from..from + count` of a pattern.
pub(super) fn expect_bytes(link: &mut dyn Link, seed: u64, from: usize, count: usize) {
    let mut bytes = vec![0; count.min(1 << 20)];
    let mut received = 0;
    let mut moved = Instant::now();
    while received < count {
        let wanted = bytes.len().min(count - received);
        let taken = link.try_recv(&mut bytes[..wanted]).unwrap();
        assert!(pattern(seed, from + received, taken) == bytes[..taken]);
        received += taken;
        match taken {
            0 => patient(moved),
            _ => moved = Instant::now(),
        }
    }
}

/// Lets other threads run, where nothing has moved since then.
pub(super) fn patient(since: Instant) {
    assert!(since.elapsed() < PATIENCE, "nothing moved for {PATIENCE:?}");
    thread::yield_now();
}

/// Bytes `from..from + count` of the endless pattern called `seed`.
pub(in crate::transport) fn pattern(seed: u64, from: usize, count: usize) -> Vec<u8> {
    let word = |i: usize| (i as u64 ^ seed << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53;
    (from..from + count).map(|i| word(i) as u8).collect()
}

/// Small reproducible random numbers (splitmix64).
pub(in crate::transport) struct Random(pub(super) u64);

impl Random {
    pub(in crate::transport) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(in crate::transport) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % bound as u64) as usize
    }

    /// A size up to `max`, with every order of magnitude as likely.
    pub(in crate::transport) fn size(&mut self, max: usize) -> usize {
        let bits = self.below(max.ilog2() as usize + 1);
        1 + self.below(1 << bits)
    }
}

/// Sleeps as the engine does: edge-triggered, registered once.
pub(in crate::transport) struct Sleeper(std::os::fd::OwnedFd);

impl Sleeper {
    pub(in crate::transport) fn new(link: &dyn Link) -> Self {
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

    pub(in crate::transport) fn sleep(&self, link: &mut dyn Link, interest: Interest) {
        if !link.arm(interest) {
            let patience = Timespec::try_from(PATIENCE).unwrap();
            let mut events = Vec::with_capacity(8);
            let events_room = rustix::buffer::spare_capacity(&mut events);
            let count = epoll::wait(&self.0, events_room, Some(&patience)).unwrap();
            assert!(count > 0, "nothing woke the sleeper");
        }
        link.disarm();
    }
}

/// Has a forked child drop its copy of `value`.
pub(in crate::transport) fn drop_in_child<T>(value: T) -> T {
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
