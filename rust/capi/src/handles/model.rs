//! The slots under every interleaving and every weak ordering that loom can produce. The values watch over themselves:
//! loom reports one that is read while another thread makes it or takes it away.
//!
//! The list of free slots keeps its lock, which orders more than what is modelled: it is not what the slots rely on while
//! a handle is in use. loom does not see it, so that nothing here is proved with its help.

use std::sync::atomic::{AtomicUsize, Ordering as StdOrdering};

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU64 as LoomWord;
use loom::thread;

use super::*;

word!(LoomWord);

/// A value that loom watches.
struct Watched {
    number: UnsafeCell<usize>,
    /// Where its end is counted.
    ended: std::sync::Arc<AtomicUsize>,
}

// SAFETY: that threads share it rightly is what is tested; loom reports it if they do not.
unsafe impl Sync for Watched {}

impl Watched {
    fn new(number: usize, ended: &std::sync::Arc<AtomicUsize>) -> Self {
        Self {
            number: UnsafeCell::new(number),
            ended: std::sync::Arc::clone(ended),
        }
    }

    fn number(&self) -> usize {
        // SAFETY: loom refuses the access while another thread may be writing.
        self.number.with(|number| unsafe { *number })
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // SAFETY: as above, or reading. A panic of loom would be caught: so the end is counted only afterwards.
        self.number.with_mut(|number| unsafe { *number = 0 });
        self.ended.fetch_add(1, StdOrdering::Relaxed);
    }
}

type Watching = Table<Watched, LoomWord>;

fn model(test: impl Fn(&'static Watching, std::sync::Arc<AtomicUsize>) + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        // Tables live for ever.
        let table = Box::leak(Box::new(Watching::new(1, "a value")));
        test(table, std::sync::Arc::default());
    });
}

fn handle(table: &'static Watching, number: usize, ended: &std::sync::Arc<AtomicUsize>) -> usize {
    let handle: *mut u8 = table.insert(Watched::new(number, ended)).expect("room");
    handle.addr()
}

fn pointer(handle: usize) -> *const u8 {
    ptr::without_provenance(handle)
}

#[test]
fn loom_a_value_outlives_the_calls_inside() {
    model(|table, ended| {
        let one = handle(table, 1, &ended);
        let users = [0, 1].map(|_| {
            thread::spawn(move || {
                if let Ok(held) = table.find(pointer(one)) {
                    assert_eq!(held.number(), 1);
                }
            })
        });
        drop(table.remove(pointer(one)).expect("once"));
        for user in users {
            user.join().expect("no panic");
        }
        assert_eq!(ended.load(StdOrdering::Relaxed), 1);
        assert!(table.find(pointer(one)).is_err());
    });
}

#[test]
fn loom_of_two_threads_that_give_a_handle_back_one_fails() {
    model(|table, ended| {
        let one = handle(table, 1, &ended);
        let other = thread::spawn(move || table.remove(pointer(one)).is_ok());
        let own = table.remove(pointer(one)).is_ok();
        assert!(own ^ other.join().expect("no panic"));
        assert_eq!(ended.load(StdOrdering::Relaxed), 1);
    });
}

#[test]
fn loom_an_old_handle_never_leads_to_a_new_value() {
    model(|table, ended| {
        let one = handle(table, 1, &ended);
        let user = thread::spawn(move || {
            if let Ok(held) = table.find(pointer(one)) {
                assert_eq!(held.number(), 1);
            }
        });
        drop(table.remove(pointer(one)).expect("once"));
        let two = handle(table, 2, &ended);
        assert_eq!(table.find(pointer(two)).expect("there").number(), 2);
        user.join().expect("no panic");
        drop(table.remove(pointer(two)).expect("once"));
        assert_eq!(ended.load(StdOrdering::Relaxed), 2);
    });
}
