//! Threads that take a share of large passes, and of long messages, on hosts with more cores than ranks.
//!
//! Work is cut into pieces, and each thread that is free takes the next: the calling thread from the
//! start, the others once they have woken. The caller waits only for pieces that a thread has begun,
//! so threads that wake late cost nothing, and the result does not depend on which thread did what.
//! Between passes the threads sleep.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use unisono_reduce::Pass;

use super::{Kernel, Source, Streaming, copy_hinted};
use crate::fork::Home;
use crate::locks::{Condvar, Mutex};
use crate::threads::without_signals;

/// Bytes of the destination that one thread takes at a time: several times what passes between a
/// call and another thread's first instruction, little enough to divide 1 MiB.
const PIECE: usize = 256 << 10;

/// A number of threads that work on one pass together. They end when this is dropped.
///
/// One pass runs at a time; a second one that another thread begins meanwhile, and every one in a
/// forked child, which has none of these threads, runs in its caller alone.
#[derive(Debug)]
pub struct Workers {
    shared: Arc<Shared>,
    threads: usize,
    /// One fewer than work together, since the caller is one; started when first needed.
    helpers: OnceLock<Vec<JoinHandle<()>>>,
    /// The process that has the helpers.
    home: Home,
    /// Held during a pass.
    turn: Mutex<()>,
}

impl Workers {
    /// As many as `threads`, the caller among them. If the system refuses some, there are fewer.
    pub fn new(threads: usize) -> Self {
        Self {
            shared: Arc::new(Shared::default()),
            threads,
            helpers: OnceLock::new(),
            home: Home::here(),
            turn: Mutex::new(()),
        }
    }

    fn start(&self) -> Vec<JoinHandle<()>> {
        let spawn = |_| {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("unisono-reduce".into());
            without_signals(|| thread.spawn(move || shared.help())).ok()
        };
        (1..self.threads).map_while(spawn).collect()
    }

    /// How many work together, the caller among them.
    pub fn threads(&self) -> usize {
        self.threads.max(1)
    }

    /// [`copy_hinted`].
    ///
    /// # Panics
    /// As there.
    pub fn copy(&self, dst: &mut [u8], src: &[u8], streaming: Streaming) {
        if dst.len() != src.len() || !self.is_worth(dst.len()) {
            return copy_hinted(dst, src, streaming);
        }
        let pieces = Mutex::new(dst.chunks_mut(PIECE).zip(src.chunks(PIECE)));
        self.together(&|| {
            while let Some((dst, src)) = next(&pieces) {
                copy_hinted(dst, src, streaming);
            }
        });
    }

    /// Calls `work` with each of `items`, in this thread and in those that are free.
    pub fn share<T: Send>(&self, items: Vec<T>, work: impl Fn(T) + Sync) {
        let is_alone = items.len() < 2 || self.threads < 2 || !self.is_at_home();
        let items = Mutex::new(items.into_iter());
        let one_by_one = || {
            while let Some(item) = next(&items) {
                work(item);
            }
        };
        match is_alone {
            true => one_by_one(),
            false => self.together(&one_by_one),
        }
    }

    /// [`Kernel::reduce`].
    ///
    /// # Panics
    /// As there.
    pub fn reduce(
        &self,
        kernel: &Kernel,
        dst: &mut [u8],
        sources: &[Source<'_>],
        world: usize,
        streaming: Streaming,
    ) {
        self.pass(&kernel.pass_to_result(world), dst, sources, streaming);
    }

    /// [`Kernel::fold_all`].
    ///
    /// # Panics
    /// As there.
    pub fn fold_all(
        &self,
        kernel: &Kernel,
        dst: &mut [u8],
        sources: &[Source<'_>],
        streaming: Streaming,
    ) {
        self.pass(&kernel.pass_to_partial(), dst, sources, streaming);
    }

    fn pass(&self, pass: &Pass<'_>, dst: &mut [u8], sources: &[Source<'_>], streaming: Streaming) {
        pass.check(dst, sources);
        if !self.is_worth(dst.len()) {
            return pass.run(dst, sources, 0, streaming);
        }
        let size = pass.result_size();
        let pieces = Mutex::new(dst.chunks_mut(PIECE).enumerate());
        self.together(&|| {
            while let Some((i, dst)) = next(&pieces) {
                pass.run(dst, sources, i * PIECE / size, streaming);
            }
        });
    }

    fn is_worth(&self, bytes: usize) -> bool {
        bytes > PIECE && self.threads > 1 && self.is_at_home()
    }

    /// Whether this process is the one that has the helpers, not a fork of it.
    fn is_at_home(&self) -> bool {
        self.home.is_here()
    }

    /// Calls `work` here and in every helper that wakes before this call of it returns. It returns
    /// when there is nothing left to begin.
    fn together(&self, work: &(dyn Fn() + Sync)) {
        let Some(_turn) = self.turn.try_lock() else {
            return work();
        };
        self.helpers.get_or_init(|| self.start());
        // SAFETY: only the lifetime is changed. Helpers call `work` between counting themselves in
        // and out under the lock, and count themselves in only while it is on offer. `Offer` is
        // dropped before this function returns or unwinds; it withdraws the offer and waits until
        // all are out. After that no helper has the reference.
        let work: &'static (dyn Fn() + Sync) = unsafe { std::mem::transmute(work) };
        let offer = Offer::of(&self.shared, work);
        work();
        drop(offer);
        if let Some(panic) = self.shared.state.lock().panic.take() {
            resume_unwind(panic);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let helpers = self.helpers.take().into_iter().flatten();
        if !self.is_at_home() {
            // There is no thread to join.
            return helpers.for_each(std::mem::forget);
        }
        self.shared.state.lock().closing = true;
        self.shared.offered.notify_all();
        for helper in helpers {
            // It catches what its work throws.
            let _ = helper.join();
        }
    }
}

fn next<T>(pieces: &Mutex<impl Iterator<Item = T>>) -> Option<T> {
    pieces.lock().next()
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    offered: Condvar,
    finished: Condvar,
}

#[derive(Default)]
struct State {
    work: Option<&'static (dyn Fn() + Sync)>,
    /// Counts offers, so that a helper takes each once.
    offers: u64,
    /// Helpers inside `work`.
    busy: usize,
    panic: Option<Box<dyn std::any::Any + Send>>,
    closing: bool,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { offers, busy, .. } = self;
        write!(f, "State({offers} offers, {busy} busy)")
    }
}

impl Shared {
    /// The loop of a helper: it takes each offer once, until the workers close.
    fn help(&self) {
        let mut taken = 0;
        let mut state = self.state.lock();
        while !state.closing {
            match state.work {
                Some(work) if state.offers != taken => {
                    taken = state.offers;
                    state.busy += 1;
                    drop(state);
                    let outcome = catch_unwind(AssertUnwindSafe(work));
                    state = self.state.lock();
                    state.busy -= 1;
                    state.panic = state.panic.take().or(outcome.err());
                    if state.busy == 0 {
                        self.finished.notify_all();
                    }
                }
                _ => self.offered.wait(&mut state),
            }
        }
    }
}

/// Work that helpers may begin, until it is dropped.
struct Offer<'a>(&'a Shared);

impl<'a> Offer<'a> {
    fn of(shared: &'a Shared, work: &'static (dyn Fn() + Sync)) -> Self {
        let mut state = shared.state.lock();
        state.work = Some(work);
        state.offers += 1;
        drop(state);
        shared.offered.notify_all();
        Self(shared)
    }
}

impl Drop for Offer<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.work = None;
        while state.busy > 0 {
            self.0.finished.wait(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread::ThreadId;

    use super::*;
    use crate::fork::tests::in_child;
    use crate::types::{DataType, ReduceOp};

    fn bytes(count: usize, seed: usize) -> Vec<u8> {
        (0..count).map(|i| (i * 31 + seed * 7) as u8 % 63).collect()
    }

    #[test]
    fn results_are_those_of_one_thread() {
        let workers = Workers::new(3);
        for count in [0, 16, PIECE, PIECE + 16, 5 * PIECE + 48] {
            for dtype in [DataType::Float32, DataType::BFloat16, DataType::Complex128] {
                let kernel = Kernel::new(ReduceOp::Sum, dtype).unwrap();
                let ranks = [1, 2, 3].map(|seed| bytes(count, seed));
                let sources = [
                    Source::Element(&ranks[0]),
                    Source::Destination,
                    Source::Element(&ranks[2]),
                ];
                let (mut alone, mut shared) = (ranks[1].clone(), ranks[1].clone());
                kernel.reduce(&mut alone, &sources, 3, Streaming::No);
                workers.reduce(&kernel, &mut shared, &sources, 3, Streaming::Yes);
                assert!(shared == alone, "{count} bytes of {dtype}");

                let sources = [Source::Element(&ranks[0]), Source::Element(&ranks[1])];
                let wide = count / dtype.size() * kernel.accumulator().size();
                let (mut alone, mut shared) = (vec![0; wide], vec![1; wide]);
                kernel.fold_all(&mut alone, &sources, Streaming::No);
                workers.fold_all(&kernel, &mut shared, &sources, Streaming::No);
                assert!(shared == alone, "{count} bytes of {dtype}, folded");
            }
            let src = bytes(count, 4);
            for streaming in [Streaming::No, Streaming::Yes] {
                let mut dst = vec![0; count];
                workers.copy(&mut dst, &src, streaming);
                assert!(dst == src, "{count} bytes copied");
            }
        }
    }

    /// The threads that ran a piece of work which does not end before `threads` have begun it.
    fn participants(workers: &Workers, threads: usize) -> Vec<ThreadId> {
        let all_here = Barrier::new(threads);
        let seen = Mutex::new(Vec::new());
        workers.together(&|| {
            let mut ids = seen.lock();
            if ids.len() < threads {
                ids.push(std::thread::current().id());
                drop(ids);
                all_here.wait();
            }
        });
        seen.into_inner()
    }

    #[test]
    fn all_take_part_and_again() {
        let workers = Workers::new(4);
        assert_eq!(workers.threads(), 4);
        for _ in 0..20 {
            let mut ids = participants(&workers, 4);
            assert_eq!(ids.len(), 4);
            assert!(ids.contains(&std::thread::current().id()));
            ids.sort_by_key(|id| format!("{id:?}"));
            ids.dedup();
            assert_eq!(ids.len(), 4);
        }
    }

    #[test]
    fn two_callers_do_not_wait_for_each_other() {
        let workers = Workers::new(2);
        let both = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let calls = AtomicUsize::new(0);
                workers.together(&|| {
                    if calls.fetch_add(1, Ordering::Relaxed) == 0 {
                        both.wait();
                    }
                });
            });
            let calls = AtomicUsize::new(0);
            workers.together(&|| {
                if calls.fetch_add(1, Ordering::Relaxed) == 0 {
                    both.wait();
                }
            });
        });
    }

    #[test]
    fn a_panic_anywhere_reaches_the_caller_and_leaves_the_rest_usable() {
        let workers = Workers::new(2);
        let caller = std::thread::current().id();
        for in_caller in [true, false] {
            let both = Barrier::new(2);
            let panic = catch_unwind(AssertUnwindSafe(|| {
                workers.together(&|| {
                    both.wait();
                    assert!((std::thread::current().id() == caller) != in_caller, "here");
                });
            }));
            let panic = panic.unwrap_err();
            assert_eq!(panic.downcast_ref(), Some(&"here"));
            assert_eq!(participants(&workers, 2).len(), 2);
        }
    }

    #[test]
    fn threads_end_with_their_owner() {
        let workers = Workers::new(3);
        let shared = Arc::downgrade(&workers.shared);
        drop(workers);
        assert!(shared.upgrade().is_none());
    }

    #[test]
    fn a_forked_child_works_alone() {
        let workers = Workers::new(3);
        let src = bytes(4 * PIECE, 1);
        let mut dst = vec![0; src.len()];
        workers.copy(&mut dst, &src, Streaming::No);
        assert!(in_child(|| {
            let mut dst = vec![0; src.len()];
            workers.copy(&mut dst, &src, Streaming::No);
            dst == src && !workers.is_worth(4 * PIECE)
        }));
        assert!(dst == src && workers.is_worth(4 * PIECE));
    }

    #[test]
    #[should_panic(expected = "different lengths")]
    fn lengths_that_differ_are_a_mistake() {
        Workers::new(2).copy(&mut [0; 3], &[0; 2], Streaming::No);
    }
}
