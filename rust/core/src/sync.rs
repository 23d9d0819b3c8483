//! The words that threads or processes share without a lock, and their replacements where a test explores every order.
//!
//! Under `--cfg loom` the tests named `loom_` run the same code, with loom's types, under every interleaving and every
//! order in which a weakly ordered machine may make its writes visible. Code over memory that is mapped, or in a static,
//! is generic over [`Word`] for that.

use std::sync::atomic::Ordering;

#[cfg(all(test, loom))]
pub(crate) use self::model::{AtomicBool, AtomicU64, AtomicUsize, Mutex, fence};
#[cfg(not(all(test, loom)))]
pub(crate) use {
    crate::locks::Mutex,
    std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, fence},
};

/// An atomic number.
pub(crate) trait Word {
    type Value: Copy;

    fn load(&self, order: Ordering) -> Self::Value;
    fn store(&self, value: Self::Value, order: Ordering);
    fn swap(&self, value: Self::Value, order: Ordering) -> Self::Value;
    fn fetch_add(&self, value: Self::Value, order: Ordering) -> Self::Value;
    fn fetch_sub(&self, value: Self::Value, order: Ordering) -> Self::Value;
    fn compare_exchange(
        &self,
        current: Self::Value,
        new: Self::Value,
        success: Ordering,
        failure: Ordering,
    ) -> Result<Self::Value, Self::Value>;
}

macro_rules! words {
    ($($atomic:ty: $value:ty),*) => {$(
        impl Word for $atomic {
            type Value = $value;

            #[inline]
            fn load(&self, order: Ordering) -> $value {
                self.load(order)
            }

            #[inline]
            fn store(&self, value: $value, order: Ordering) {
                self.store(value, order);
            }

            #[inline]
            fn swap(&self, value: $value, order: Ordering) -> $value {
                self.swap(value, order)
            }

            #[inline]
            fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                self.fetch_add(value, order)
            }

            #[inline]
            fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                self.fetch_sub(value, order)
            }

            #[inline]
            fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(current, new, success, failure)
            }
        }
    )*};
}

words!(std::sync::atomic::AtomicU32: u32, std::sync::atomic::AtomicU64: u64);

/// loom's types, and what several models need.
#[cfg(all(test, loom))]
pub(crate) mod model {
    use super::{Ordering, Word};

    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, fence};
    use loom::sync::{Arc, Condvar, MutexGuard};

    words!(AtomicU32: u32, AtomicU64: u64);

    /// loom's, with the interface of the one that is used elsewhere.
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }
    }

    /// A doorbell: rung before the sleep, it ends it as well. One that is not rung leaves the sleeper asleep for good, which
    /// loom reports as a deadlock.
    #[derive(Clone)]
    pub(crate) struct Bell(Arc<(loom::sync::Mutex<bool>, Condvar)>);

    impl Bell {
        pub(crate) fn new() -> Self {
            Self(Arc::new((loom::sync::Mutex::new(false), Condvar::new())))
        }

        pub(crate) fn ring(&self) {
            let (rung, changed) = &*self.0;
            *rung.lock().unwrap() = true;
            changed.notify_one();
        }

        pub(crate) fn sleep(&self) {
            let (rung, changed) = &*self.0;
            let mut rung = rung.lock().unwrap();
            while !*rung {
                rung = changed.wait(rung).unwrap();
            }
            *rung = false;
        }
    }

    /// Explores `test` under every interleaving, or those with at most `preemptions` preemptions.
    pub(crate) fn explore(preemptions: Option<usize>, test: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = preemptions;
        builder.check(test);
    }
}
