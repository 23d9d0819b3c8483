//! Bytes as a stream: every one arrives once, in order, however they are cut and whichever side sleeps.

use std::thread;
use std::time::Instant;

use super::tools::{Random, Sleeper, both, exchange, expect_bytes, patient, pattern, send_bytes};
use super::{Pair, READABLE, WRITABLE};
use crate::transport::MESSAGE_HEADER;

pub(in crate::transport) fn random_sizes_cross_both_ways_at_once(make: impl Fn(usize) -> Pair) {
    for (capacity, total) in [(64, 20_000), (4096, 1 << 20), (1 << 20, 16 << 20)] {
        both(make(capacity), move |link, seed| {
            exchange(link, seed, total, &mut |_, _| thread::yield_now());
        });
    }
}

pub(in crate::transport) fn sleepers_cross_both_ways_at_once(make: impl Fn(usize) -> Pair) {
    for (capacity, total) in [(64, 20_000), (4096, 1 << 20)] {
        both(make(capacity), move |link, seed| {
            let sleeper = Sleeper::new(link);
            exchange(link, seed, total, &mut |link, interest| {
                sleeper.sleep(link, interest)
            });
        });
    }
}

/// Messages of many lengths, whose headers are sent in parts too where the link has no room.
pub(in crate::transport) fn headers_and_payloads_go_together(make: impl Fn(usize) -> Pair) {
    for capacity in [64, 4096, 1 << 18] {
        let (mut a, mut b) = make(capacity);
        let lengths = [0, 1, 216, 217, 5_000, 40_000, 1, 300_000];
        let total: usize = lengths.iter().map(|length| MESSAGE_HEADER + length).sum();
        let reader = thread::spawn(move || {
            expect_bytes(b.as_mut(), 1, 0, total);
            b
        });
        let (mut before, start) = (0, Instant::now());
        for length in lengths {
            let message = pattern(1, before, MESSAGE_HEADER + length);
            let mut sent = 0;
            while sent < message.len() {
                let count = match message[..MESSAGE_HEADER].get(sent..) {
                    Some(header) if !header.is_empty() => {
                        a.try_send_message(header, &message[MESSAGE_HEADER..])
                    }
                    _ => a.try_send(&message[sent..]),
                };
                sent += count.unwrap();
                patient(start);
            }
            before += message.len();
        }
        drop(reader.join().unwrap());
    }
}

pub(in crate::transport) fn a_full_link_takes_nothing_and_resumes(make: impl Fn(usize) -> Pair) {
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

pub(in crate::transport) fn folds_lend_whole_elements_in_order(make: impl Fn(usize) -> Pair) {
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

pub(in crate::transport) fn a_part_of_an_element_waits(make: impl Fn(usize) -> Pair) {
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
        assert!(!b.arm(READABLE), "it would not sleep until the rest comes");
        b.disarm();
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

pub(in crate::transport) fn sleepers_are_woken_for_every_message(make: impl Fn(usize) -> Pair) {
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

pub(in crate::transport) fn a_hundred_megabytes_arrive(make: impl Fn(usize) -> Pair) {
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
    let mut moved = Instant::now();
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
        match at == before {
            true => patient(moved),
            false => moved = Instant::now(),
        }
    }
    drop(sender.join().unwrap());
}
