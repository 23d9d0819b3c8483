//! Slots and the accounts of loans, as the ring is checked.

use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::{Cells, Shared};
use crate::sync::Word;
use crate::sync::model::{Bell, explore, fence};
use crate::transport::Loan;
use crate::transport::shm::loans::{Account, Ledger, Lender, Writer};
use crate::transport::shm::ring::{Consumer, Producer};
use crate::transport::shm::slots::{Board, Poster, SLOTS, Taker};

/// A ring, its slots and its account of loans.
struct Desk {
    ring: Arc<Cells>,
    slots: [Slot; SLOTS],
    taken: Shared,
    returned: Shared,
    declined: Shared,
    moved: Shared,
    moved_to: Shared,
    revoked: Shared,
    writing: Shared,
    /// Nothing is timed here.
    pace: Shared,
}

struct Slot {
    stamp: Shared,
    after: Shared,
    bytes: [UnsafeCell<u8>; 2],
}

impl Desk {
    fn new() -> Arc<Self> {
        let slot = || Slot {
            stamp: Shared::new(0),
            after: Shared::new(0),
            bytes: [UnsafeCell::new(0), UnsafeCell::new(0)],
        };
        Arc::new(Self {
            ring: Cells::new(4),
            slots: std::array::from_fn(|_| slot()),
            taken: Shared::new(0),
            returned: Shared::new(0),
            declined: Shared::new(0),
            moved: Shared::new(0),
            moved_to: Shared::new(0),
            revoked: Shared::new(0),
            writing: Shared::new(0),
            pace: Shared::new(0),
        })
    }
}

impl Board for Arc<Desk> {
    type Word = Shared;

    fn stamp(&self, slot: usize) -> &Shared {
        &self.slots[slot].stamp
    }

    fn after(&self, slot: usize) -> &Shared {
        &self.slots[slot].after
    }

    fn taken(&self) -> &Shared {
        &self.taken
    }

    fn producer_asleep(&self) -> &Shared {
        &self.ring.producer_asleep
    }

    fn consumer_asleep(&self) -> &Shared {
        &self.ring.consumer_asleep
    }

    unsafe fn write(&self, slot: usize, at: usize, bytes: &[u8]) {
        for (cell, &byte) in self.slots[slot].bytes[at..].iter().zip(bytes) {
            // SAFETY: loom checks that no other thread looks at the cell meanwhile.
            cell.with_mut(|cell| unsafe { *cell = byte });
        }
    }

    unsafe fn lend(&self, slot: usize, length: usize, take: &mut dyn FnMut(&[u8])) {
        let cells = self.slots[slot].bytes[..length].iter();
        // SAFETY: loom checks that no thread writes the cell meanwhile.
        let bytes: Vec<u8> = cells
            .map(|cell| cell.with(|cell| unsafe { *cell }))
            .collect();
        take(&bytes);
    }
}

impl Ledger for Arc<Desk> {
    type Word = Shared;

    fn returned(&self) -> &Shared {
        &self.returned
    }

    fn declined(&self) -> &Shared {
        &self.declined
    }

    fn moved(&self) -> &Shared {
        &self.moved
    }

    fn moved_to(&self) -> &Shared {
        &self.moved_to
    }

    fn revoked(&self) -> &Shared {
        &self.revoked
    }

    fn writing(&self) -> &Shared {
        &self.writing
    }

    fn filling(&self) -> &Shared {
        &self.pace
    }

    fn paces(&self, _class: usize) -> &Shared {
        &self.pace
    }

    fn producer_asleep(&self) -> &Shared {
        &self.ring.producer_asleep
    }

    fn consumer_asleep(&self) -> &Shared {
        &self.ring.consumer_asleep
    }

    fn fence(&self, order: Ordering) {
        fence(order);
    }
}

/// Posts messages of one byte, sleeping whenever no slot is free.
fn post_all(desk: &Arc<Desk>, messages: &[u8], ours: &Bell, theirs: &Bell) {
    let mut producer = Producer::new(desk.ring.clone());
    let mut poster = Poster::new(desk.clone());
    for &message in messages {
        while !poster
            .post((0, false), (&[message], &[]), || theirs.ring())
            .unwrap()
        {
            // The room that the ring has does not count.
            producer.arm();
            if !poster.has_room().unwrap() {
                ours.sleep();
            }
            producer.disarm();
        }
    }
}

/// Takes messages, sleeping whenever there is none.
fn take_all(desk: &Arc<Desk>, count: usize, ours: &Bell, theirs: &Bell) -> Vec<u8> {
    let mut consumer = Consumer::new(desk.ring.clone());
    let mut taker = Taker::new(desk.clone());
    let mut seen = Vec::new();
    while seen.len() < count {
        match taker.peek().unwrap() {
            Some(post) => {
                let mut take = |message: &[u8]| seen.extend_from_slice(message);
                taker.take(post, &mut take, || theirs.ring());
            }
            None => {
                let ready = consumer.arm() || taker.peek().unwrap().is_some();
                if !ready {
                    ours.sleep();
                }
                consumer.disarm();
            }
        }
    }
    seen
}

fn check_posts(messages: &'static [u8], preemptions: Option<usize>) {
    explore(preemptions, move || {
        let desk = Desk::new();
        let (slot, post) = (Bell::new(), Bell::new());
        let poster = thread::spawn({
            let (desk, slot, post) = (desk.clone(), slot.clone(), post.clone());
            move || post_all(&desk, messages, &slot, &post)
        });
        let seen = take_all(&desk, messages.len(), &post, &slot);
        poster.join().unwrap();
        assert_eq!(seen, messages);
    });
}

#[test]
fn loom_who_sleeps_is_woken_by_a_post() {
    check_posts(&[1], None);
}

#[test]
fn loom_who_sleeps_for_a_slot_is_woken_and_slots_are_used_again() {
    check_posts(&[1, 2, 3, 4, 5], Some(2));
}

/// A byte of the ring, a post, and a byte after it.
#[test]
fn loom_posts_and_bytes_keep_their_order() {
    explore(Some(3), || {
        let desk = Desk::new();
        let sender = thread::spawn({
            let desk = desk.clone();
            move || {
                let mut producer = Producer::new(desk.ring.clone());
                let mut poster = Poster::new(desk);
                assert_eq!(producer.send(&[1], || {}).unwrap(), 1);
                let place = (producer.published(), false);
                assert!(poster.post(place, (&[2], &[]), || {}).unwrap());
                assert_eq!(producer.send(&[3], || {}).unwrap(), 1);
            }
        });
        let mut consumer = Consumer::new(desk.ring.clone());
        let mut taker = Taker::new(desk);
        let mut seen = Vec::new();
        for _ in 0..3 {
            // As the link decides what comes next.
            let here = |taker: &Taker<_>, consumed| {
                let post = taker.peek().unwrap();
                post.filter(|post| post.after <= consumed)
            };
            if let Some(post) = here(&taker, consumer.consumed()) {
                taker.take(post, &mut |message| seen.extend_from_slice(message), || {});
            } else if consumer.has_bytes().unwrap() && here(&taker, consumer.consumed()).is_none() {
                let mut byte = [0];
                assert_eq!(consumer.recv(&mut byte, || {}).unwrap(), 1);
                seen.push(byte[0]);
            }
        }
        assert_eq!(seen[..], [1, 2, 3][..seen.len()]);
        sender.join().unwrap();
    });
}

#[test]
fn loom_who_sleeps_for_a_loan_is_woken_and_may_write() {
    explore(Some(2), || {
        let desk = Desk::new();
        let (back, post) = (Bell::new(), Bell::new());
        let memory = Arc::new(UnsafeCell::new(1_u8));
        let reader = thread::spawn({
            let (desk, memory) = (desk.clone(), memory.clone());
            let (back, post) = (back.clone(), post.clone());
            move || {
                assert_eq!(take_all(&desk, 1, &post, &back), [9]);
                let mut account = Account::new(desk);
                account.borrow();
                // SAFETY: loom checks that no thread writes it meanwhile.
                assert_eq!(memory.with(|memory| unsafe { *memory }), 1);
                assert!(!account.is_revoked());
                if account.give_back(false).wake {
                    back.ring();
                }
            }
        });
        let mut producer = Producer::new(desk.ring.clone());
        let mut poster = Poster::new(desk.clone());
        let mut lender = Lender::new(desk);
        assert!(poster.post((0, true), (&[9], &[]), || post.ring()).unwrap());
        let ticket = lender.lend(true);
        loop {
            let before = lender.returned();
            if lender.look(ticket).unwrap() == Loan::Returned {
                break;
            }
            producer.arm();
            if lender.returned() == before {
                back.sleep();
            }
            producer.disarm();
        }
        // SAFETY: loom checks that no other thread looks at it meanwhile.
        memory.with_mut(|memory| unsafe { *memory = 2 });
        reader.join().unwrap();
    });
}

#[test]
fn loom_what_is_written_after_a_revocation_does_not_count() {
    explore(None, || {
        let desk = Desk::new();
        // The numbers themselves are read and written without order.
        let memory = Arc::new(Shared::new(1));
        let reader = thread::spawn({
            let (desk, memory) = (desk.clone(), memory.clone());
            move || {
                let mut account = Account::new(desk);
                account.borrow();
                let seen = memory.load(Ordering::Relaxed);
                if !account.is_revoked() {
                    assert_eq!(seen, 1);
                }
            }
        });
        Lender::new(desk).revoke();
        memory.store(2, Ordering::Relaxed);
        reader.join().unwrap();
    });
}

#[test]
fn loom_nothing_is_written_once_a_revocation_has_waited() {
    explore(None, || {
        let desk = Desk::new();
        let memory = Arc::new(UnsafeCell::new(1_u8));
        let writer = thread::spawn({
            let (desk, memory) = (desk.clone(), memory.clone());
            move || {
                let mut writer = Writer::new(desk);
                if writer.raise() {
                    // SAFETY: loom checks that no other thread looks at it meanwhile.
                    memory.with_mut(|memory| unsafe { *memory = 2 });
                    writer.lower();
                }
            }
        });
        let mut lender = Lender::new(desk);
        lender.revoke();
        let flag = lender.flag_of_writer();
        while flag.is_raised() {
            thread::yield_now();
        }
        // SAFETY: as above.
        memory.with_mut(|memory| unsafe { *memory = 3 });
        writer.join().unwrap();
        // SAFETY: as above.
        memory.with(|memory| assert_eq!(unsafe { *memory }, 3));
    });
}
