//! A ring of announcements in shared words, with one writer and one reader. A new one takes the place of the oldest,
//! whether it has been read or not.
//!
//! An entry is a sequence lock (H.-J. Boehm, "Can seqlocks get along with programming language memory models?", 2012): a
//! stamp, which is odd while the entry is written, the announcement's number in two words, and its body. The reader takes
//! an entry only if the stamp was even before it read and is the same after it.
//!
//! The orders: the writer's fence keeps the odd stamp before the words, and its last store keeps the words before the even
//! stamp. The reader's first load keeps the words after the stamp, and its fence keeps the words before the second load
//! of the stamp. So a reader that has seen any word of a later announcement also sees that the stamp has changed.

use std::sync::atomic::Ordering;

use crate::sync::{Word, fence};

/// Words of an entry before its body: the stamp and the number.
pub(super) const HEAD: usize = 3;

/// Whether an entry holds the announcement that is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stated {
    /// It has not been made yet, or is being written.
    NotYet,
    /// It has been read.
    Here,
    /// A later one has taken its place.
    Past,
}

/// Puts announcement `number` (from 0) into its entry. All words of an entry are 0 at first.
///
/// One thread writes an entry at a time, and the numbers of what it writes grow.
pub(super) fn write<W: Word<Value = u32>>(entry: &[W], number: u64, body: &[u32]) {
    let stamp = entry[0].load(Ordering::Relaxed);
    let odd = stamp.wrapping_add(1) | 1;
    entry[0].store(odd, Ordering::Relaxed);
    fence(Ordering::Release);
    // Counted from 1: 0 means that there is none.
    let number = number + 1;
    entry[1].store(number as u32, Ordering::Relaxed);
    entry[2].store((number >> 32) as u32, Ordering::Relaxed);
    for (word, value) in entry[HEAD..].iter().zip(body) {
        word.store(*value, Ordering::Relaxed);
    }
    entry[0].store(odd.wrapping_add(1), Ordering::Release);
}

/// Reads announcement `number` from its entry. `body` means something only if it is [`Stated::Here`].
pub(super) fn read<W: Word<Value = u32>>(entry: &[W], number: u64, body: &mut [u32]) -> Stated {
    let stamp = entry[0].load(Ordering::Acquire);
    let low = u64::from(entry[1].load(Ordering::Relaxed));
    let high = u64::from(entry[2].load(Ordering::Relaxed));
    for (word, value) in entry[HEAD..].iter().zip(body) {
        *value = word.load(Ordering::Relaxed);
    }
    fence(Ordering::Acquire);
    let is_whole = stamp.is_multiple_of(2) && entry[0].load(Ordering::Relaxed) == stamp;
    let stated = low | high << 32;
    match is_whole && stated > number {
        false => Stated::NotYet,
        true if stated == number + 1 => Stated::Here,
        true => Stated::Past,
    }
}

/// A writer and a reader of one entry, under every interleaving and order that loom can produce.
#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::{HEAD, Stated, read, write};
    use crate::sync::model::{AtomicU32, explore};

    const BODY: usize = 2;

    type Entry = [AtomicU32; HEAD + BODY];

    /// The words of an announcement, which are those of no other.
    fn body_of(number: u64) -> [u32; BODY] {
        [10 + number as u32 + (number >> 32) as u32; BODY]
    }

    fn announce(entry: &Entry, number: u64) {
        write(entry, number, &body_of(number));
    }

    fn look(entry: &Entry, number: u64) -> Stated {
        let mut body = [0; BODY];
        let stated = read(entry, number, &mut body);
        if stated == Stated::Here {
            assert_eq!(body, body_of(number), "torn");
        }
        stated
    }

    #[test]
    fn loom_an_announcement_is_read_whole_or_not_at_all() {
        explore(None, || {
            let entry: Arc<Entry> = Arc::new(std::array::from_fn(|_| AtomicU32::new(0)));
            let writer = {
                let entry = Arc::clone(&entry);
                thread::spawn(move || announce(&entry, 0))
            };
            assert_ne!(look(&entry, 0), Stated::Past);
            writer.join().unwrap();
            assert_eq!(look(&entry, 0), Stated::Here);
        });
    }

    /// A later announcement, of a number whose upper half differs too, takes the place of an earlier one.
    #[test]
    fn loom_an_announcement_is_never_taken_for_another() {
        const LATER: u64 = 1 << 32;
        explore(Some(3), || {
            let entry: Arc<Entry> = Arc::new(std::array::from_fn(|_| AtomicU32::new(0)));
            announce(&entry, 0);
            let writer = {
                let entry = Arc::clone(&entry);
                thread::spawn(move || announce(&entry, LATER))
            };
            for number in [0, LATER] {
                look(&entry, number);
            }
            writer.join().unwrap();
            assert_eq!(look(&entry, 0), Stated::Past);
            assert_eq!(look(&entry, LATER), Stated::Here);
        });
    }
}
