//! Handles: numbers that look like pointers to C.
//!
//! A [`Table`] holds what the handles of one kind stand for. A handle is the number of a slot and of its generation, so
//! one that was given back, or never made, is recognised without touching memory that is not ours. Looking one up takes
//! no lock; what it stands for lives until the last call that uses it has left, also when it is given back meanwhile.
//!
//! ```text
//! handle:  generation (36)  index (24)  kind (4, never 0, so no handle is NULL or an address of malloc's)
//! state:   generation (36)  doomed (1)  calls inside (27)
//! ```
//!
//! The generation is odd while the slot is taken. Giving a handle back makes it even, so that later calls are refused,
//! and marks the slot as doomed; the last call to leave clears the mark and takes the value out.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use unisono::PerProcess;
use unisono::error::{Error, Result};
use unisono::locks::Mutex;

const KIND_BITS: u32 = 4;
const GENERATION_SHIFT: u32 = 28;
const GENERATION: u64 = 1 << GENERATION_SHIFT;
const DOOMED: u64 = 1 << 27;
const INSIDE: u64 = DOOMED - 1;
/// Slots of the first chunk; each further chunk is twice as long.
const FIRST_CHUNK: usize = if cfg!(loom) { 1 } else { 64 };
const CHUNKS: usize = 18;
const MOST_HANDLES: usize = FIRST_CHUNK * ((1 << CHUNKS) - 1);

/// The state of a slot. Tests model-check the same code with loom's word in its place.
pub(crate) trait Word: Default + Send + Sync + 'static {
    fn load(&self, order: Ordering) -> u64;
    fn fetch_add(&self, value: u64, order: Ordering) -> u64;
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64;
    fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> std::result::Result<u64, u64>;
}

macro_rules! word {
    ($atomic:ty) => {
        impl Word for $atomic {
            #[inline]
            fn load(&self, order: Ordering) -> u64 {
                self.load(order)
            }

            #[inline]
            fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
                self.fetch_add(value, order)
            }

            #[inline]
            fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
                self.fetch_sub(value, order)
            }

            #[inline]
            fn compare_exchange(
                &self,
                current: u64,
                new: u64,
                success: Ordering,
                failure: Ordering,
            ) -> std::result::Result<u64, u64> {
                self.compare_exchange(current, new, success, failure)
            }
        }
    };
}

word!(AtomicU64);

/// The values that the handles of one kind stand for.
pub(crate) struct Table<T: 'static, W: Word = AtomicU64> {
    kind: u64,
    /// The name of such a value in errors, with its article.
    name: &'static str,
    chunks: [AtomicPtr<Slot<T, W>>; CHUNKS],
    free: PerProcess<Mutex<Free>>,
}

/// Of this process. A forked child makes its handles in slots of its own, after its parent's.
#[derive(Default)]
struct Free {
    indices: Vec<usize>,
    made: usize,
}

struct Slot<T, W> {
    state: W,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: the value is shared between the calls inside, for which it must be `Sync`, and taken out by the last of them
// on any thread, for which it must be `Send`. Nothing but `Table` reaches it.
unsafe impl<T: Send + Sync, W: Word> Sync for Slot<T, W> {}

/// A value that a call uses. It lives at least as long as this.
pub(crate) struct Held<T: Send + Sync + 'static, W: Word = AtomicU64> {
    table: &'static Table<T, W>,
    slot: &'static Slot<T, W>,
    index: usize,
}

impl<T: Send + Sync, W: Word> Table<T, W> {
    pub(crate) const fn new(kind: u64, name: &'static str) -> Self {
        Self {
            kind,
            name,
            chunks: [const { AtomicPtr::new(ptr::null_mut()) }; CHUNKS],
            free: PerProcess::new(Mutex::default),
        }
    }

    /// A handle for `value`.
    pub(crate) fn insert<H>(&'static self, value: T) -> Result<*mut H> {
        let index = self.take_index()?;
        let slot = self.slot(index).ok_or_else(|| {
            Error::internal(format!("{} without a place for its handle", self.name))
        })?;
        // SAFETY: the index came from the free list, or is new: no call is inside with the right generation (it is
        // even), and the last value was taken out before the index was put there.
        unsafe { (*slot.value.get()).write(value) };
        // Release, for calls that find the odd generation. Calls with an old handle may come and go meanwhile.
        let before = slot.state.fetch_add(GENERATION, Ordering::Release);
        let generation = (before >> GENERATION_SHIFT) + 1;
        let handle = generation << GENERATION_SHIFT | (index as u64) << KIND_BITS | self.kind;
        Ok(ptr::without_provenance_mut(handle as usize))
    }

    /// The value that `handle` stands for.
    ///
    /// # Errors
    /// `InvalidArgument` when it is none of this kind, or was given back.
    #[inline]
    pub(crate) fn find<H>(&'static self, handle: *const H) -> Result<Held<T, W>> {
        self.enter(handle.addr() as u64)
            .ok_or_else(|| self.refuse(handle.addr() as u64))
    }

    /// Gives `handle` back. Its value is dropped when the last call has left, at the earliest when the result is.
    ///
    /// # Errors
    /// As [`Table::find`]; so of two threads that give one back at the same time one fails.
    pub(crate) fn remove<H>(&'static self, handle: *const H) -> Result<Held<T, W>> {
        let held = self.find(handle)?;
        let generation = handle.addr() as u64 >> GENERATION_SHIFT;
        let state_of = &held.slot.state;
        let mut state = state_of.load(Ordering::Relaxed);
        while state >> GENERATION_SHIFT == generation {
            let doomed = (state + GENERATION) | DOOMED;
            match state_of.compare_exchange(state, doomed, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Ok(held),
                Err(now) => state = now,
            }
        }
        Err(self.refuse(handle.addr() as u64))
    }

    /// Everything that has a handle now.
    pub(crate) fn all(&'static self) -> Vec<Held<T, W>> {
        let made = self.free.lock().made;
        let handle_of = |index| {
            let generation = self.slot(index)?.state.load(Ordering::Relaxed) >> GENERATION_SHIFT;
            let is_taken = generation % 2 == 1;
            is_taken
                .then_some(generation << GENERATION_SHIFT | (index as u64) << KIND_BITS | self.kind)
        };
        (0..made)
            .filter_map(handle_of)
            .filter_map(|handle| self.enter(handle))
            .collect()
    }

    #[inline]
    fn enter(&'static self, handle: u64) -> Option<Held<T, W>> {
        if handle & ((1 << KIND_BITS) - 1) != self.kind {
            return None;
        }
        let generation = handle >> GENERATION_SHIFT;
        if generation.is_multiple_of(2) {
            return None;
        }
        let index = (handle & (GENERATION - 1)) as usize >> KIND_BITS;
        let slot = self.slot(index)?;
        // Acquire, for the value that was written before the generation became this one.
        let before = slot.state.fetch_add(1, Ordering::Acquire);
        let held = Held {
            table: self,
            slot,
            index,
        };
        (before >> GENERATION_SHIFT == generation).then_some(held)
    }

    #[inline]
    fn slot(&self, index: usize) -> Option<&'static Slot<T, W>> {
        let nth = index / FIRST_CHUNK + 1;
        let chunk = nth.ilog2() as usize;
        let start = self.chunks.get(chunk)?.load(Ordering::Acquire);
        if start.is_null() {
            return None;
        }
        let within = index - FIRST_CHUNK * ((1 << chunk) - 1);
        // SAFETY: chunk number `chunk` has `FIRST_CHUNK << chunk` slots, and the index of the first one is subtracted; the
        // chunk was leaked when it was made (`take_index`), so it lives for ever.
        Some(unsafe { &*start.add(within) })
    }

    fn take_index(&self) -> Result<usize> {
        let mut free = self.free.lock();
        if free.made == 0 {
            let inherited = self.chunks.iter();
            let inherited = inherited.take_while(|chunk| !chunk.load(Ordering::Relaxed).is_null());
            free.made = FIRST_CHUNK * ((1 << inherited.count()) - 1);
        }
        if let Some(index) = free.indices.pop() {
            return Ok(index);
        }
        let index = free.made;
        if index == MOST_HANDLES {
            return Err(Error::new(
                unisono::error::Code::System,
                format!(
                    "there are {MOST_HANDLES} handles of this kind already: are any destroyed?"
                ),
            ));
        }
        let chunk = (index / FIRST_CHUNK + 1).ilog2() as usize;
        if self.chunks[chunk].load(Ordering::Relaxed).is_null() {
            let slots: Box<[Slot<T, W>]> =
                (0..FIRST_CHUNK << chunk).map(|_| Slot::empty()).collect();
            self.chunks[chunk].store(Box::leak(slots).as_mut_ptr(), Ordering::Release);
        }
        free.made += 1;
        Ok(index)
    }

    #[cold]
    fn refuse(&self, handle: u64) -> Error {
        let name = self.name;
        if handle == 0 {
            return Error::invalid(format!("{name} is needed, but NULL was given"));
        }
        Error::invalid(format!(
            "{handle:#x} is not the handle of {name}: it was destroyed, or never made"
        ))
    }
}

impl<T, W: Word> Slot<T, W> {
    fn empty() -> Self {
        Self {
            state: W::default(),
            value: UnsafeCell::new(MaybeUninit::uninit()),
        }
    }
}

impl<T: Send + Sync, W: Word> Deref for Held<T, W> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: given to callers only when the generation was right at entering (`enter`), so the value had been
        // written; it is taken out only when no call is inside any more (`drop`), and this is inside.
        unsafe { (*self.slot.value.get()).assume_init_ref() }
    }
}

impl<T: Send + Sync, W: Word> Drop for Held<T, W> {
    #[inline]
    fn drop(&mut self) {
        // Release, so that what this call did with the value comes before its end.
        let before = self.slot.state.fetch_sub(1, Ordering::Release);
        if before & (DOOMED | INSIDE) == DOOMED | 1 {
            self.bury(before - 1);
        }
    }
}

impl<T: Send + Sync, W: Word> Held<T, W> {
    /// Takes the value out, if no call came in since `state` was seen: otherwise that call does it when it leaves.
    #[cold]
    fn bury(&self, state: u64) {
        let state_of = &self.slot.state;
        let unmarked = state & !DOOMED;
        if state_of
            .compare_exchange(state, unmarked, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            return;
        }
        // SAFETY: the slot was taken when it was marked, so there is a value; only one call clears the mark; and the
        // generation is even since it was marked, so calls that come in from now on do not look at the value.
        let value = unsafe { (*self.slot.value.get()).assume_init_read() };
        // Outside every fence: a panic has nowhere to go.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(value)));
        self.table.free.lock().indices.push(self.index);
    }
}

#[cfg(all(test, loom))]
mod model;

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn a_handle_is_good_until_it_is_given_back() {
        static TABLE: Table<String> = Table::new(3, "a string");
        let handle: *mut u8 = TABLE.insert("one".to_owned()).expect("room");
        assert_eq!(*TABLE.find(handle).expect("there"), "one");
        drop(TABLE.remove(handle).expect("there"));
        assert!(TABLE.find(handle).is_err() && TABLE.remove(handle).is_err());
        // The slot serves again, and the old handle does not lead to the new value.
        let next: *mut u8 = TABLE.insert("two".to_owned()).expect("room");
        assert_ne!(handle, next);
        assert!(TABLE.find(handle).is_err());
        assert_eq!(*TABLE.find(next).expect("there"), "two");
    }

    #[test]
    fn what_is_no_handle_is_refused() {
        static TABLE: Table<u8> = Table::new(2, "a number");
        let handle: *mut u8 = TABLE.insert(1).expect("room");
        for other in [
            0,
            1,
            2,
            16,
            usize::MAX,
            handle.addr() ^ 1,
            handle.addr() ^ 16,
        ] {
            let other: *mut u8 = ptr::without_provenance_mut(other);
            assert!(TABLE.find(other).is_err(), "{other:?}");
        }
        assert_eq!(TABLE.all().len(), 1);
    }

    #[test]
    fn a_value_outlives_the_calls_that_use_it() {
        struct Counted(Arc<AtomicUsize>);
        impl Drop for Counted {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        static TABLE: Table<Counted> = Table::new(1, "a count");
        let dropped = Arc::new(AtomicUsize::new(0));
        let made = 2000;
        for _ in 0..made {
            let handle: *mut u8 = TABLE.insert(Counted(dropped.clone())).expect("room");
            let handle = handle.addr();
            std::thread::scope(|scope| {
                for user in 0..3 {
                    scope.spawn(move || {
                        let handle: *mut u8 = ptr::without_provenance_mut(handle);
                        if user == 0 {
                            drop(TABLE.remove(handle).expect("once"));
                        } else if let Ok(held) = TABLE.find(handle) {
                            assert!(Arc::strong_count(&held.0) >= 2);
                        }
                    });
                }
            });
        }
        assert_eq!(dropped.load(Ordering::Relaxed), made);
        assert_eq!(TABLE.free.lock().made, 1, "slots serve again");
    }

    #[test]
    fn many_have_a_slot_each() {
        static TABLE: Table<usize> = Table::new(1, "a number");
        let handles: Vec<*mut u8> = (0..1000).map(|n| TABLE.insert(n).expect("room")).collect();
        for (n, handle) in handles.iter().enumerate() {
            assert_eq!(*TABLE.find(*handle).expect("there"), n);
        }
    }
}
