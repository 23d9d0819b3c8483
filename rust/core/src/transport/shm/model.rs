//! The ring, and what lies beside it, under every interleaving and every weak ordering that loom can produce. The doorbell is
//! a condition variable: a lost wake-up leaves a thread asleep for good, which loom reports as a
//! deadlock.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::ring::{Consumer, Memory, Producer};
use crate::sync::Word;
use crate::sync::model::{AtomicU64, Bell, explore, fence};

mod messages;

loom::thread_local! {
    /// Whether the last thing that this thread wrote was a sequentially consistent exchange, and no load of that order has
    /// followed it.
    static HAS_EXCHANGED: Cell<bool> = Cell::new(false);
}

/// A word of the shared memory. loom takes sequentially consistent accesses for `AcqRel` ones, and knows of such fences alone.
/// The code relies on one property of theirs: an exchange is ordered before a load that follows it in its thread, if both are
/// sequentially consistent, and this order is one with that of the fences. So the load that follows such an exchange at once,
/// with no other exchange, store or such load between them, has a fence before it here. With a weaker order on either of them
/// in the code there is none.
///
/// The code has no fence there. This one also orders what the thread did before the exchange and what it does after the load,
/// which the two accesses do not. It proves nothing by that, for an order between a store and a load shows in another thread
/// only if that one has a fence of its own between a load of what was stored and an earlier store to what was loaded. The code
/// has two kinds of them:
///
/// - A side that goes to sleep: it stores its flag, and after the fence loads `tail`, `head`, a stamp, `taken`, `returned` or
///   `moved`. Each store to one of these words has an exchange of its own, or a fence, and after it a load of the flag; that
///   load is what answers this sleeper's fence. The fence here would let an earlier such store count for a later load of the
///   flag as well, which finds nothing that the store's own load had not to find.
/// - `Lender::revoke`: it stores `revoked`, and after the fence loads `writing`, and memory that is shared. `Writer::raise` is
///   the exchange of `writing` and the load of `revoked`, with nothing to order before. `Writer::lower` has released the
///   earlier writes to shared memory, and `revoke`'s caller acquires them by its load of `writing`.
///
/// The loads of a thread after the load of a flag or of `revoked` are of data that an acquiring load orders, or the subject of
/// another such pair.
struct Shared(AtomicU64);

impl Shared {
    fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }
}

impl Word for Shared {
    type Value = u64;

    fn load(&self, order: Ordering) -> u64 {
        if order == Ordering::SeqCst && HAS_EXCHANGED.with(Cell::take) {
            fence(Ordering::SeqCst);
        }
        self.0.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        HAS_EXCHANGED.with(|has_exchanged| has_exchanged.set(false));
        self.0.store(value, order);
    }

    fn swap(&self, value: u64, order: Ordering) -> u64 {
        HAS_EXCHANGED.with(|has_exchanged| has_exchanged.set(order == Ordering::SeqCst));
        if order != Ordering::SeqCst {
            return self.0.swap(value, order);
        }
        self.0.swap(value, Ordering::AcqRel)
    }

    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        unreachable!("the code exchanges by swaps alone: {value} {order:?}")
    }

    fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
        unreachable!("the code exchanges by swaps alone: {value} {order:?}")
    }

    fn compare_exchange(&self, _: u64, _: u64, success: Ordering, _: Ordering) -> Result<u64, u64> {
        unreachable!("the code exchanges by swaps alone: {success:?}")
    }
}

struct Cells {
    bytes: Vec<UnsafeCell<u8>>,
    tail: Shared,
    head: Shared,
    producer_asleep: Shared,
    consumer_asleep: Shared,
}

impl Cells {
    fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self {
            bytes: (0..capacity).map(|_| UnsafeCell::new(0)).collect(),
            tail: Shared::new(0),
            head: Shared::new(0),
            producer_asleep: Shared::new(0),
            consumer_asleep: Shared::new(0),
        })
    }
}

impl Memory for Arc<Cells> {
    type Word = Shared;

    fn capacity(&self) -> usize {
        self.bytes.len()
    }

    fn tail(&self) -> &Shared {
        &self.tail
    }

    fn head(&self) -> &Shared {
        &self.head
    }

    fn producer_asleep(&self) -> &Shared {
        &self.producer_asleep
    }

    fn consumer_asleep(&self) -> &Shared {
        &self.consumer_asleep
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    unsafe fn write(&self, at: usize, bytes: &[u8]) {
        for (cell, &byte) in self.bytes[at..].iter().zip(bytes) {
            // SAFETY: loom checks that no other thread looks at the cell meanwhile.
            cell.with_mut(|cell| unsafe { *cell = byte });
        }
    }

    unsafe fn read(&self, at: usize, bytes: &mut [u8]) {
        for (cell, byte) in self.bytes[at..].iter().zip(bytes) {
            // SAFETY: loom checks that no thread writes the cell meanwhile.
            *byte = cell.with(|cell| unsafe { *cell });
        }
    }

    unsafe fn lend(&self, at: usize, length: usize, fold: &mut dyn FnMut(&[u8])) {
        let mut bytes = vec![0; length];
        // SAFETY: as the caller says.
        unsafe { self.read(at, &mut bytes) };
        fold(&bytes);
    }
}

/// Sends `bytes`, sleeping whenever there is no room.
fn send_all(memory: Arc<Cells>, bytes: &[u8], ours: &Bell, theirs: &Bell) {
    let mut producer = Producer::new(memory);
    let mut sent = 0;
    while sent < bytes.len() {
        let count = producer.send(&bytes[sent..], || theirs.ring()).unwrap();
        sent += count;
        if count == 0 {
            if !producer.arm() {
                ours.sleep();
            }
            producer.disarm();
        }
    }
}

/// Receives `count` bytes by `step`, sleeping whenever none have arrived.
fn receive_all(
    memory: Arc<Cells>,
    count: usize,
    ours: &Bell,
    mut step: impl FnMut(&mut Consumer<Arc<Cells>>, &mut Vec<u8>, usize) -> usize,
) -> Vec<u8> {
    let mut consumer = Consumer::new(memory);
    let mut received = Vec::new();
    while received.len() < count {
        let wanted = count - received.len();
        if step(&mut consumer, &mut received, wanted) == 0 {
            if consumer.arm() {
                // Part of an element may be all there is.
                thread::yield_now();
            } else {
                ours.sleep();
            }
            consumer.disarm();
        }
    }
    received
}

fn check(capacity: usize, bytes: &'static [u8], fold: bool, preemptions: Option<usize>) {
    explore(preemptions, move || {
        let memory = Cells::new(capacity);
        let (room, data) = (Bell::new(), Bell::new());
        let producer = thread::spawn({
            let (memory, room, data) = (memory.clone(), room.clone(), data.clone());
            move || send_all(memory, bytes, &room, &data)
        });
        let received = receive_all(memory, bytes.len(), &data, |consumer, received, wanted| {
            if fold {
                let mut take = |run: &[u8]| received.extend_from_slice(run);
                return consumer
                    .fold(wanted / 2 * 2, 2, &mut take, || room.ring())
                    .unwrap();
            }
            let mut piece = vec![0; wanted];
            let count = consumer.recv(&mut piece, || room.ring()).unwrap();
            received.extend_from_slice(&piece[..count]);
            count
        });
        producer.join().unwrap();
        assert_eq!(received, bytes);
    });
}

#[test]
fn loom_a_sleeping_consumer_is_woken() {
    check(4, &[1], false, None);
}

#[test]
fn loom_a_sleeping_producer_is_woken() {
    check(1, &[1, 2], false, Some(3));
}

#[test]
fn loom_bytes_arrive_once_and_in_order_across_the_wrap() {
    check(2, &[1, 2, 3, 4, 5], false, Some(2));
}

#[test]
fn loom_folds_lend_each_element_once() {
    check(4, &[1, 2, 3, 4, 5, 6], true, Some(2));
}

#[test]
fn loom_polling_sees_published_bytes_whole() {
    loom::model(|| {
        let memory = Cells::new(4);
        let sender = thread::spawn({
            let memory = memory.clone();
            move || Producer::new(memory).send(&[1, 2, 3], || {}).unwrap()
        });
        let mut consumer = Consumer::new(memory);
        let mut bytes = [0; 3];
        let count = consumer.recv(&mut bytes, || {}).unwrap();
        assert_eq!(bytes[..count], [1, 2, 3][..count]);
        assert_eq!(sender.join().unwrap(), 3);
    });
}

#[test]
fn loom_a_whole_message_comes_from_its_beginning_or_not_at_all() {
    loom::model(|| {
        let memory = Cells::new(4);
        let sender = thread::spawn({
            let memory = memory.clone();
            move || {
                let mut producer = Producer::new(memory);
                assert!(producer.send_whole(&[1], &[2, 3], || {}).unwrap());
                producer.send_whole(&[4], &[5], || {}).unwrap()
            }
        });
        let mut consumer = Consumer::new(memory);
        let (mut bytes, mut count) = ([0; 5], 0);
        for _ in 0..2 {
            count += consumer.recv(&mut bytes[count..], || {}).unwrap();
        }
        let all = match sender.join().unwrap() {
            true => 5,
            false => 3,
        };
        while count < all {
            count += consumer.recv(&mut bytes[count..all], || {}).unwrap();
        }
        assert_eq!(bytes[..count], [1, 2, 3, 4, 5][..all]);
        assert!(!consumer.has_bytes().unwrap());
    });
}
