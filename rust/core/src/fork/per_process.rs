//! What a process has once, and a forked child of it once again.

use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::Home;

/// A value for a static: made when it is first used in a process, and anew in a forked child. There the parent's stays as
/// it was at the fork, and is not looked at: a thread that is not in the child may have held its locks.
///
/// No thread waits for another one that makes it. Of two values that are made at once, one is dropped.
pub struct PerProcess<T: 'static> {
    newest: AtomicPtr<Entry<T>>,
    make: fn() -> T,
}

struct Entry<T> {
    home: Home,
    /// That of the process that this one was forked from, if it had one.
    before: *const Self,
    value: T,
}

// SAFETY: a `PerProcess` makes values in whatever thread uses it first, and hands out shared references to them.
unsafe impl<T: Send + Sync> Sync for PerProcess<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Send for PerProcess<T> {}

impl<T> PerProcess<T> {
    /// One whose values `make` makes.
    pub const fn new(make: fn() -> T) -> Self {
        Self {
            newest: AtomicPtr::new(ptr::null_mut()),
            make,
        }
    }

    #[inline]
    fn newest(&self) -> Option<&'static Entry<T>> {
        // SAFETY: null, or an entry that `begin` has leaked. Acquire: it was written before.
        unsafe { self.newest.load(Ordering::Acquire).as_ref() }
    }

    #[cold]
    fn begin(&self) -> &'static T {
        let value = (self.make)();
        let mut entry = Box::new(Entry {
            home: Home::here(),
            before: ptr::null(),
            value,
        });
        loop {
            let newest = self.newest();
            if let Some(other) = newest.filter(|entry| entry.home.is_here()) {
                return &other.value;
            }
            let before = newest.map_or(ptr::null_mut(), |newest| ptr::from_ref(newest).cast_mut());
            entry.before = before;
            let place = Box::into_raw(entry);
            let put =
                self.newest
                    .compare_exchange(before, place, Ordering::AcqRel, Ordering::Relaxed);
            match put {
                // SAFETY: it is leaked from here on.
                Ok(_) => return unsafe { &(*place).value },
                // SAFETY: it came from a box, and no other thread has seen it.
                Err(_) => entry = unsafe { Box::from_raw(place) },
            }
        }
    }

    /// The values of the processes that this one was forked from, as they were at the forks. A lock in them may be
    /// taken for ever: it can be tried.
    pub fn inherited(&self) -> impl Iterator<Item = &'static T> {
        let mut next = self.newest();
        std::iter::from_fn(move || {
            let entry = next?;
            // SAFETY: null, or an entry that is leaked.
            next = unsafe { entry.before.as_ref() };
            Some(entry)
        })
        .filter(|entry| !entry.home.is_here())
        .map(|entry| &entry.value)
    }
}

impl<T> Deref for PerProcess<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        match self.newest() {
            Some(entry) if entry.home.is_here() => &entry.value,
            _ => self.begin(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::super::tests::in_child;
    use super::*;
    use crate::locks::Mutex;

    #[test]
    fn a_child_has_its_own_and_does_not_wait_for_its_parent_s_locks() {
        static VALUE: PerProcess<Mutex<u32>> = PerProcess::new(|| Mutex::new(1));
        *VALUE.lock() = 2;
        let held = VALUE.lock();
        let child = in_child(|| {
            let fresh = *VALUE.lock() == 1;
            *VALUE.lock() = 3;
            fresh && *VALUE.lock() == 3 && VALUE.inherited().count() == 1
        });
        drop(held);
        assert!(child);
        assert_eq!(*VALUE.lock(), 2);
        assert_eq!(VALUE.inherited().count(), 0);
    }

    #[test]
    fn all_threads_have_one() {
        static MADE: AtomicU32 = AtomicU32::new(0);
        static VALUE: PerProcess<AtomicU32> =
            PerProcess::new(|| AtomicU32::new(MADE.fetch_add(1, Ordering::Relaxed)));
        let places: Vec<usize> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| ptr::from_ref::<AtomicU32>(&VALUE).addr()))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert!(places.iter().all(|place| *place == places[0]));
    }
}
