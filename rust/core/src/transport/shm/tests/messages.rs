//! Posts and loans between two ends in this process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::mm::{self, MapFlags, ProtFlags};

use super::*;
use crate::heap::Buffer;
use crate::skips::skipped;

const HEADER: [u8; MESSAGE_HEADER] = [1; MESSAGE_HEADER];
const READABLE: Interest = Interest {
    readable: true,
    writable: false,
};
const WRITABLE: Interest = Interest {
    readable: false,
    writable: true,
};

fn is_awake(link: &mut ShmLink, interest: Interest) -> bool {
    let ready = link.arm(interest);
    link.disarm();
    ready
}

#[test]
fn posts_beyond_the_slots_wait() {
    let (mut a, mut b) = ShmLink::pair(4096, NAME).unwrap();
    for round in 0..100_u8 {
        let mut posted = 0;
        while a.try_post(&HEADER, &[round, posted]).unwrap() {
            posted += 1;
        }
        assert_eq!(usize::from(posted), slots::SLOTS);
        assert_eq!(a.try_send(&[round]).unwrap(), 1, "the ring has room");
        assert!(!is_awake(&mut a, WRITABLE), "it needs a slot");
        for expected in 0..posted {
            assert!(is_awake(&mut b, READABLE));
            assert!(!b.is_streaming().unwrap(), "posts come first");
            let mut seen = Vec::new();
            assert!(b.try_take(&mut |message| seen = message.to_vec()).unwrap());
            assert_eq!(seen, [&HEADER[..], &[round, expected]].concat());
        }
        assert!(!b.try_take(&mut |_| panic!("one too many")).unwrap());
        assert!(b.is_streaming().unwrap());
        assert_eq!(b.try_recv(&mut [0; 2]).unwrap(), 1);
        assert!(!is_awake(&mut b, READABLE));
    }
}

#[test]
fn who_waits_for_a_slot_is_woken() {
    let (mut a, mut b) = ShmLink::pair(4096, NAME).unwrap();
    let count = 3000_u32;
    let poster = thread::spawn(move || {
        let sleeper = suite::Sleeper::new(&a);
        for number in 0..count {
            while !a.try_post(&HEADER, &number.to_le_bytes()).unwrap() {
                sleeper.sleep(&mut a, WRITABLE);
            }
        }
        a
    });
    let sleeper = suite::Sleeper::new(&b);
    for number in 0..count {
        let mut seen = Vec::new();
        while !b.try_take(&mut |message| seen = message.to_vec()).unwrap() {
            sleeper.sleep(&mut b, READABLE);
        }
        assert_eq!(seen[MESSAGE_HEADER..], number.to_le_bytes());
    }
    poster.join().unwrap();
}

#[test]
fn posts_and_a_farewell_outlive_their_sender() {
    let (mut a, mut b) = links(4096);
    assert!(a.try_post(&HEADER, b"last words").unwrap());
    a.send_farewell();
    drop(a);
    assert_eq!(b.peer_state(), PeerState::Left);
    let mut seen = Vec::new();
    assert!(b.try_take(&mut |message| seen = message.to_vec()).unwrap());
    assert_eq!(seen[MESSAGE_HEADER..], b"last words"[..]);
}

#[test]
fn payloads_that_cannot_be_read_come_through_the_ring() {
    let (mut a, mut b) = ShmLink::pair(1 << 16, NAME).unwrap();
    (a.borrower.peer, b.borrower.peer) = (None, None);
    let talk = |link: &mut ShmLink, seed| {
        let sleeper = suite::Sleeper::new(link);
        suite::talk(link, seed, 300, &mut |link, interest| {
            sleeper.sleep(link, interest);
        })
    };
    let (from_a, from_b) = thread::scope(|scope| {
        let a = scope.spawn(|| talk(&mut a, 0));
        let b = scope.spawn(|| talk(&mut b, 1));
        (a.join().unwrap(), b.join().unwrap())
    });
    for ways in [from_a, from_b] {
        assert_eq!(ways.refused, 1, "{ways:?}");
        assert!(ways.lent > 10, "the heap is lent still: {ways:?}");
    }
}

fn run_of(bytes: &[u8]) -> (usize, usize) {
    (bytes.as_ptr().expose_provenance(), bytes.len())
}

fn lend(link: &mut ShmLink, runs: &[(usize, usize)]) -> Ticket {
    match link.try_lend(&HEADER, runs, Terms::Loan).unwrap() {
        Lending::Lent(ticket) => ticket,
        other => panic!("{other:?}"),
    }
}

/// Lets `link`'s peer map the segment that `memory` is in.
fn announce(a: &mut ShmLink, b: &mut ShmLink, memory: &[u8]) -> u32 {
    let place = heap::locate(memory.as_ptr(), memory.len()).expect("memory of the heap");
    assert!(!a.control.lends(place.segment));
    assert_eq!(b.peer_state(), PeerState::Present);
    assert!(a.control.lends(place.segment));
    place.segment
}

#[test]
fn a_revoked_loan_is_never_whole() {
    for shared in [false, true] {
        for read_before in [0, 1000, 600 << 10] {
            let (mut a, mut b) = ShmLink::pair(4096, NAME).unwrap();
            a.lend_private_from(1);
            let bytes = suite::pattern(4, 0, 1 << 20);
            let mut memory = Buffer::from_slice(&bytes);
            let mut private = bytes.clone();
            let segment = announce(&mut a, &mut b, &memory);
            let lent: &mut [u8] = if shared { &mut memory } else { &mut private };
            let ticket = lend(&mut a, &[run_of(lent)]);
            assert_eq!(ticket.proven, shared);
            assert!(b.try_take(&mut |_| {}).unwrap());
            let mut received = vec![0; bytes.len()];
            let mut done = 0;
            while done < read_before {
                done += b.try_recv(&mut received[done..read_before]).unwrap();
            }
            assert!(received[..done] == bytes[..done]);
            a.send_abort(&Notice {
                code: Code::Aborted,
                origin: 0,
                culprit: None,
                message: String::new(),
            });
            lent.fill(0);
            a.control.send(&Frame::SegmentGone(segment));
            assert!(matches!(b.peer_state(), PeerState::Aborted(_)));
            assert_eq!(b.try_recv(&mut received[done..]).unwrap(), 0);
            let mut fold = |_: &[u8]| panic!("folded what was revoked");
            assert_eq!(b.try_fold(1 << 19, 4, &mut fold).unwrap(), 0);
            assert!(!is_awake(&mut b, READABLE), "nothing more is to be had");
            assert_eq!(a.loan(ticket).unwrap(), Loan::Out);
        }
    }
}

/// Of two loans the first comes back between the looks at both.
#[test]
fn a_loan_that_comes_back_between_two_looks_keeps_its_sender_awake() {
    let (mut a, mut b) = ShmLink::pair(4096, NAME).unwrap();
    let memory = Buffer::from_slice(&[6_u8; 64]);
    announce(&mut a, &mut b, &memory);
    let first = lend(&mut a, &[run_of(&memory)]);
    let second = lend(&mut a, &[run_of(&memory)]);
    assert_eq!(a.loan(first).unwrap(), Loan::Out);
    assert!(b.try_take(&mut |_| {}).unwrap());
    assert_eq!(b.try_recv(&mut [0; 64]).unwrap(), 64);
    assert_eq!(a.loan(second).unwrap(), Loan::Out);
    assert!(is_awake(&mut a, WRITABLE));
    assert_eq!(a.loan(second).unwrap(), Loan::Out);
    assert!(!is_awake(&mut a, WRITABLE), "the ring's room does not help");
    assert_eq!(a.loan(first).unwrap(), Loan::Returned);
}

/// Only a payload that is private as a whole can be refused before anything of it was used.
#[test]
fn a_trial_lies_in_private_memory_as_a_whole() {
    let (mut a, mut b) = ShmLink::pair(4096, NAME).unwrap();
    a.lend_private_from(1);
    let shared = Buffer::from_slice(&[6_u8; 64]);
    let private = vec![7_u8; 64];
    announce(&mut a, &mut b, &shared);
    let mixed = [run_of(&shared), run_of(&private)];
    assert_eq!(
        a.try_lend(&HEADER, &mixed, Terms::Loan).unwrap(),
        Lending::Unfit
    );
    let trial = lend(&mut a, &[run_of(&private)]);
    assert!(!trial.proven);
    assert!(b.try_take(&mut |_| {}).unwrap());
    assert_eq!(b.try_recv(&mut [0; 64]).unwrap(), 64);
    assert_eq!(a.loan(trial).unwrap(), Loan::Returned);
    assert!(lend(&mut a, &mixed).proven);
    assert!(b.try_take(&mut |_| {}).unwrap());
    let mut both = [0; 128];
    assert_eq!(b.try_recv(&mut both).unwrap(), 128);
    assert_eq!(both[..], [[6; 64], [7; 64]].concat());
}

#[test]
fn an_offer_may_be_declined() {
    let (mut a, mut b) = ShmLink::pair(4096, NAME).unwrap();
    a.lend_private_from(1);
    let (shared, private) = (Buffer::from_slice(&[6_u8; 64]), vec![7_u8; 64]);
    announce(&mut a, &mut b, &shared);
    let unproven = a
        .try_lend(&HEADER, &[run_of(&private)], Terms::Offer)
        .unwrap();
    assert_eq!(
        unproven,
        Lending::Unfit,
        "whether it can be read is not known"
    );
    for declined in [true, false, true] {
        let Lending::Lent(offer) = a
            .try_lend(&HEADER, &[run_of(&shared)], Terms::Offer)
            .unwrap()
        else {
            panic!("memory of the heap");
        };
        assert!(offer.proven);
        assert_eq!(a.loan(offer).unwrap(), Loan::Out);
        assert!(b.try_take(&mut |_| {}).unwrap());
        let answer = if declined {
            b.decline();
            Loan::Declined
        } else {
            assert_eq!(b.try_recv(&mut [0; 64]).unwrap(), 64);
            Loan::Returned
        };
        assert!(is_awake(&mut a, WRITABLE));
        assert_eq!(a.loan(offer).unwrap(), answer);
    }
    // A later loan is as ever.
    let ticket = lend(&mut a, &[run_of(&shared)]);
    assert!(b.try_take(&mut |_| {}).unwrap());
    assert_eq!(b.try_recv(&mut [0; 64]).unwrap(), 64);
    assert_eq!(a.loan(ticket).unwrap(), Loan::Returned);
}

/// Announces that `memory` is shared with `b`; what `b` has of it.
fn share(a: &mut ShmLink, b: &mut ShmLink, memory: &[u8]) -> (Ticket, SharedSpan) {
    let Lending::Lent(ticket) = a
        .try_share(&HEADER, Shareable::Span(run_of(memory)))
        .unwrap()
    else {
        panic!("memory of the heap");
    };
    assert!(ticket.proven);
    let mut seen = Vec::new();
    assert!(b.try_take(&mut |header| seen = header.to_vec()).unwrap());
    assert_eq!(seen, HEADER);
    (ticket, b.shared().unwrap().expect("what is shared"))
}

fn abort(link: &mut ShmLink) {
    link.send_abort(&Notice {
        code: Code::Aborted,
        origin: 0,
        culprit: None,
        message: String::new(),
    });
}

#[test]
fn what_is_shared_may_be_written_until_it_is_given_back() {
    let (mut a, mut b) = ShmLink::pair(4096, NAME).unwrap();
    let memory = Buffer::from_slice(&[6_u8; 100]);
    assert_eq!(
        a.can_share(Shareable::Span(run_of(&memory))),
        None,
        "not answered yet"
    );
    assert_eq!(b.peer_state(), PeerState::Present);
    assert_eq!(a.can_share(Shareable::Span(run_of(&memory))), Some(true));
    for round in 1..4 {
        let (ticket, mut shared) = share(&mut a, &mut b, &memory);
        assert_eq!(shared.bytes(), 100);
        assert_eq!(a.loan(ticket).unwrap(), Loan::Out);
        assert!(shared.begin());
        let byte = shared.read(round - 1, 2)[0];
        shared.write(round, 2).fill(byte + 1);
        shared.end();
        drop(shared);
        b.give_back();
        assert!(is_awake(&mut a, WRITABLE));
        assert_eq!(a.loan(ticket).unwrap(), Loan::Returned);
    }
    assert_eq!(memory[..6], [6, 7, 8, 9, 9, 6]);
    let (ticket, shared) = share(&mut a, &mut b, &memory);
    drop(shared);
    b.decline();
    assert_eq!(a.loan(ticket).unwrap(), Loan::Declined);
}

#[test]
fn only_what_lies_in_the_heap_is_shared() {
    let (mut a, mut b) = ShmLink::pair(4096, NAME).unwrap();
    a.lend_private_from(1);
    let private = vec![7_u8; 1 << 20];
    assert_eq!(a.can_share(Shareable::Span(run_of(&private))), Some(false));
    let shared = a.try_share(&HEADER, Shareable::Span(run_of(&private)));
    assert_eq!(shared.unwrap(), Lending::Unfit);
    // Memory that is lent is not shared.
    let memory = Buffer::from_slice(&[6_u8; 100]);
    announce(&mut a, &mut b, &memory);
    lend(&mut a, &[run_of(&memory)]);
    assert!(b.try_take(&mut |_| {}).unwrap());
    assert!(b.shared().unwrap().is_none());
}

#[test]
fn nobody_writes_to_what_was_taken_back() {
    let (mut a, mut b) = ShmLink::pair(4096, NAME).unwrap();
    let memory = Buffer::from_slice(&[6_u8; 100]);
    announce(&mut a, &mut b, &memory);
    let (_, mut shared) = share(&mut a, &mut b, &memory);
    abort(&mut a);
    a.await_writer(Instant::now() + WRITERS_PATIENCE);
    assert!(!shared.begin());
}

#[test]
fn who_takes_back_waits_for_who_writes() {
    let (mut a, mut b) = ShmLink::pair(4096, NAME).unwrap();
    let memory = Buffer::from_slice(&[6_u8; 100]);
    announce(&mut a, &mut b, &memory);
    let (_, mut shared) = share(&mut a, &mut b, &memory);
    assert!(shared.begin());
    let writer = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        shared.write(0, 100).fill(9);
        shared.end();
        assert!(!shared.begin());
    });
    abort(&mut a);
    a.await_writer(Instant::now() + Duration::from_secs(60));
    assert_eq!(memory[..], [9; 100]);
    writer.join().unwrap();
}

#[test]
fn what_a_stopped_peer_writes_when_it_goes_on_is_lost() {
    let (mut a, mut b) = ShmLink::pair(4096, NAME).unwrap();
    let memory = Buffer::from_slice(&[6_u8; 100_000]);
    announce(&mut a, &mut b, &memory);
    let (_, mut shared) = share(&mut a, &mut b, &memory[10_000..20_000]);
    assert!(shared.begin());
    let address = memory.as_ptr().addr();
    abort(&mut a);
    let since = Instant::now();
    a.await_writer(Instant::now() + WRITERS_PATIENCE);
    assert!(since.elapsed() >= WRITERS_PATIENCE);
    shared.write(0, 10_000).fill(9);
    assert!(memory[..] == [6; 100_000]);
    // Memory that is not shared any more is not lent either, and serves no other peer.
    assert_eq!(heap::locate(&memory[19_999], 1), None);
    assert!(heap::locate(&memory[30_000], 1).is_some());
    // Another peer has stopped as well, in what lies beside it on the same page.
    let (mut c, _d) = ShmLink::pair(4096, NAME).unwrap();
    let is_there = Arc::new(AtomicBool::new(true));
    let other = Arc::clone(&is_there);
    heap::detach(
        memory[20_000..30_000].as_ptr().addr(),
        10_000,
        Arc::new(move || !other.load(Ordering::Relaxed)),
    );
    assert_eq!(heap::locate(&memory[29_999], 1), None);
    assert_eq!(c.can_share(Shareable::Span(run_of(&memory))), Some(false));
    shared.write(0, 10_000).fill(8);
    assert!(memory[..] == [6; 100_000]);
    drop(memory);
    let is_there_again = || {
        drop(Buffer::from_slice(&[1_u8; 100_000]));
        heap::locate(std::ptr::without_provenance(address), 100_000).is_some()
    };
    assert!(!is_there_again());
    // One peer goes on, which ends its writing; the other ends.
    shared.end();
    assert!(!is_there_again());
    is_there.store(false, Ordering::Relaxed);
    assert!(is_there_again());
}

#[test]
fn a_loan_that_comes_back_leaves_what_is_shared_beside_it() {
    let (mut a, mut b) = ShmLink::pair(4096, NAME).unwrap();
    let memory = Buffer::from_slice(&[6_u8; 20_000]);
    announce(&mut a, &mut b, &memory);
    let earlier = lend(&mut a, &[run_of(&memory[..100])]);
    assert!(b.try_take(&mut |_| {}).unwrap());
    assert_eq!(b.try_recv(&mut [0; 100]).unwrap(), 100);
    let (_, mut shared) = share(&mut a, &mut b, &memory[10_000..20_000]);
    assert!(shared.begin());
    // Looked at when another operation's memory is shared already.
    assert_eq!(a.loan(earlier).unwrap(), Loan::Returned);
    abort(&mut a);
    a.await_writer(Instant::now());
    shared.write(0, 10_000).fill(9);
    assert!(memory[..] == [6; 20_000], "written after the end");
}

/// Memory that this process reads, and the system call does not: on most processors what may be written may be read.
fn out_of_reach(bytes: usize) -> Option<&'static mut [u8]> {
    let (access, flags) = (ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
    let start = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), bytes, access, flags) }.unwrap();
    let address = start.expose_provenance() as u64;
    let (socket, _other) = UnixStream::pair().unwrap();
    let segment = Segment::anonymous(4096).unwrap();
    segment.board(0).tell_mark(Mark::own().unwrap());
    let this = Peer::new(Process::behind(&socket).unwrap(), segment.board(0));
    if this.read(address, &mut [0; 8]).is_ok() {
        skipped("this system's process_vm_readv reads memory that may only be written");
        return None;
    }
    // SAFETY: mapped above, all zero, and never unmapped.
    Some(unsafe { std::slice::from_raw_parts_mut(start.cast(), bytes) })
}

/// Receives `bytes` of a message whose header has been taken, as far as they can be had.
fn receive(b: &mut ShmLink, bytes: &mut [u8], folds: bool) -> usize {
    let mut done = 0;
    loop {
        let count = match folds {
            false => b.try_recv(&mut bytes[done..]).unwrap(),
            true => {
                let (most, mut at) = (bytes.len() - done, done);
                b.try_fold(most, 1, &mut |run| {
                    bytes[at..at + run.len()].copy_from_slice(run);
                    at += run.len();
                })
                .unwrap()
            }
        };
        done += count;
        if count == 0 {
            return done;
        }
    }
}

#[test]
fn private_memory_out_of_reach_is_copied_and_what_was_sent_after_it_comes_after_it() {
    const READ: usize = 200_000;
    const TOTAL: usize = 700_000;
    for folds in [false, true] {
        let (mut a, mut b) = ShmLink::pair(1 << 16, NAME).unwrap();
        a.lend_private_from(1);
        let Some(memory) = out_of_reach(500_000) else {
            return;
        };
        let payload = suite::pattern(5, 0, TOTAL);
        memory.copy_from_slice(&payload[READ..]);
        // The trial is read; then reading goes well for a while.
        let trial = lend(&mut a, &[run_of(&payload)]);
        assert!(b.try_take(&mut |_| {}).unwrap());
        assert_eq!(receive(&mut b, &mut vec![0; TOTAL], folds), TOTAL);
        assert_eq!(a.loan(trial).unwrap(), Loan::Returned);
        let runs = [run_of(&payload[..READ]), run_of(memory)];
        let tickets = [lend(&mut a, &runs), lend(&mut a, &runs)];
        assert!(tickets.iter().all(|ticket| ticket.proven));
        assert!(a.try_post(&HEADER, b"after it").unwrap());
        for ticket in tickets {
            assert!(b.try_take(&mut |_| {}).unwrap());
            let mut bytes = vec![0; TOTAL];
            let read = receive(&mut b, &mut bytes, folds);
            assert_eq!(read, READ);
            assert!(!is_awake(&mut b, READABLE));
            // It is told where the payload is when it has mapped that.
            assert_eq!(a.loan(ticket).unwrap(), Loan::Out);
            assert_eq!(receive(&mut b, &mut bytes[read..], folds), 0);
            assert_eq!(b.peer_state(), PeerState::Present);
            assert_eq!(a.loan(ticket).unwrap(), Loan::Out);
            assert!(is_awake(&mut b, READABLE));
            assert_eq!(receive(&mut b, &mut bytes[read..], folds), TOTAL - read);
            assert!(bytes == payload);
            assert_eq!(a.loan(ticket).unwrap(), Loan::Returned);
        }
        let mut taken = Vec::new();
        let mut take = |message: &[u8]| taken = message[MESSAGE_HEADER..].to_vec();
        assert!(b.try_take(&mut take).unwrap());
        assert_eq!(taken, b"after it");
        // From here on such memory goes through the ring.
        assert_eq!(
            a.try_lend(&HEADER, &runs, Terms::Loan).unwrap(),
            Lending::Unfit
        );
    }
}

#[test]
fn what_cannot_be_described_is_streamed() {
    let (mut a, _b) = ShmLink::pair(4096, NAME).unwrap();
    a.lend_private_from(1);
    let memory = [0_u8; 4096];
    let (at, _) = run_of(&memory);
    let most = a.most_lent_runs();
    for runs in [vec![], vec![(at, 0)], vec![(at, 16); most + 1]] {
        assert_eq!(
            a.try_lend(&HEADER, &runs, Terms::Loan).unwrap(),
            Lending::Unfit
        );
    }
    lend(&mut a, &vec![(at, 16); most]);
}

/// How a message from `a` to `b` went: lent, or else through the ring.
fn goes_lent(a: &mut ShmLink, b: &mut ShmLink, private: &[u8]) -> bool {
    let mut received = vec![0; private.len()];
    let lending = a
        .try_lend(&HEADER, &[run_of(private)], Terms::Loan)
        .unwrap();
    let (mut sent, mut done) = (0, 0);
    if let Lending::Lent(ticket) = lending {
        assert!(b.try_take(&mut |_| {}).unwrap());
        while done < private.len() {
            done += b.try_recv(&mut received[done..]).unwrap();
        }
        assert_eq!(a.loan(ticket).unwrap(), Loan::Returned);
    } else {
        assert_eq!(lending, Lending::Unfit);
        let copy = |to: &mut [u8], from: &[u8]| to.copy_from_slice(from);
        while done < private.len() {
            sent += a.try_send(&private[sent..]).unwrap();
            done += b.try_recv_by(&copy, &mut received[done..]).unwrap();
        }
    }
    assert!(received == private);
    matches!(lending, Lending::Lent(_))
}

#[test]
fn private_memory_goes_the_way_that_takes_less() {
    const SLOW: Duration = Duration::from_millis(100);
    const FAST: Duration = Duration::ZERO;
    let (mut a, mut b) = ShmLink::pair(1 << 20, NAME).unwrap();
    let private = suite::pattern(7, 0, 256 << 10);
    assert!(!goes_lent(&mut a, &mut b, &private), "first the ring");
    // On a busy machine the ring is looked at several times before.
    let lent = (0..200).any(|_| goes_lent(&mut a, &mut b, &private));
    assert!(lent, "then a loan");
    for ring_is_slow in [true, false, true] {
        let (ring, reading) = match ring_is_slow {
            true => (SLOW, FAST),
            false => (FAST, SLOW),
        };
        // Both ways are looked at now and then, ever more rarely; the better one is the rule.
        let mut twenty = || {
            let lent = (0..20).filter(|_| {
                for _ in 0..100 {
                    let (bytes, since) = (private.len(), |took| Instant::now().checked_sub(took));
                    b.borrower.note_streamed(bytes, bytes, since(ring).unwrap());
                    b.borrower.note_lent(bytes, since(reading).unwrap());
                }
                goes_lent(&mut a, &mut b, &private)
            });
            lent.count()
        };
        // On a busy machine twenty messages take so long that most of them are looks.
        let lent: Vec<_> = (0..5).map(|_| twenty()).collect();
        let is_so = |lent: &&usize| (**lent > 10) == ring_is_slow;
        let rule = lent.iter().filter(is_so).count();
        assert!(rule >= 3, "{lent:?} of 20 were lent");
    }
}
