//! The words by which the two ends of a link inside a host know of each other's memory, in a page that both have mapped: the
//! ends of a window, and the two sides of one-sided transfers.
//!
//! Each end has four words that it alone counts up, and tells by them how often it has signalled, how many of its threads are
//! writing to the other's memory, how many views of that it has given away, and that it has taken its own memory back. By a
//! fifth one, which the other end takes down, it says that it sleeps until the other signals.
//!
//! # Sleeping
//!
//! An end raises its flag, issues a sequentially consistent fence and looks at the count once more before it sleeps; the other
//! one counts, issues such a fence and looks at the flag. One of the fences comes first, so either the sleeper sees the count
//! or the other one sees the flag. Who takes the flag down owes the sleeper a message. Writing and closing are ordered alike:
//! either the writer sees that the memory was taken back, or the owner sees that it is being written to.
//!
//! They are generic over their words: the tests model-check the same code with loom.

use std::any::Any;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Page, WRITERS_PATIENCE};
use crate::fork::PerProcess;
use crate::heap::IsOver;
use crate::locks::Mutex;
use crate::sync::{Word, fence};

/// Words that are written together: a cache line.
const LINE: usize = 16;

const SIGNALS: usize = 0;
const ASLEEP: usize = LINE;
const WRITERS: usize = 2 * LINE;
const VIEWS: usize = 2 * LINE + 1;
const CLOSED: usize = 3 * LINE;

/// The words of one end.
const END: usize = 4 * LINE;

/// Words that both ends have mapped, zero at first.
pub(crate) trait Words {
    type Word: Word<Value = u32>;

    fn at(&self, index: usize) -> &Self::Word;
}

impl Words for Page {
    type Word = std::sync::atomic::AtomicU32;

    #[inline]
    fn at(&self, index: usize) -> &Self::Word {
        &self.words()[index]
    }
}

/// One of the two ends of a link.
#[derive(Clone, Debug)]
pub(crate) struct End<W = Page> {
    words: W,
    own: usize,
    other: usize,
}

impl<W: Words> End<W> {
    /// `is_lower`: of the two, the end of the lower rank.
    pub(crate) fn new(words: W, is_lower: bool) -> Self {
        let (own, other) = if is_lower { (0, END) } else { (END, 0) };
        Self { words, own, other }
    }

    fn own(&self, word: usize) -> &W::Word {
        self.words.at(self.own + word)
    }

    fn other(&self, word: usize) -> &W::Word {
        self.words.at(self.other + word)
    }

    /// Signals to the other end. True: that one sleeps, and is owed a message.
    #[inline]
    pub(crate) fn signal(&self) -> bool {
        // Release: the other end finds what was written before.
        self.own(SIGNALS).fetch_add(1, Ordering::Release);
        fence(Ordering::SeqCst);
        let flag = self.other(ASLEEP);
        flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::Relaxed) != 0
    }

    /// Whether the other end has signalled more often than this.
    #[inline]
    pub(crate) fn is_signalled(&self, taken: u32) -> bool {
        self.other(SIGNALS).load(Ordering::Acquire) != taken
    }

    /// Announces that this end is about to sleep. The caller must look once more, after this, whether it is signalled.
    pub(crate) fn arm(&self) {
        self.own(ASLEEP).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Withdraws the announcement. False: it is too late, and the other end sends its message.
    pub(crate) fn disarm(&self) -> bool {
        self.own(ASLEEP).swap(0, Ordering::Relaxed) != 0
    }

    /// Begins to write to the other's memory. False: it was taken back, and must be left alone.
    #[inline]
    pub(crate) fn begin_writing(&self) -> bool {
        self.enter(WRITERS)
    }

    /// Ends it.
    #[inline]
    pub(crate) fn end_writing(&self) {
        self.leave(WRITERS);
    }

    /// As [`End::begin_writing`], of a view that the program may keep for long.
    pub(crate) fn begin_view(&self) -> bool {
        self.enter(VIEWS)
    }

    pub(crate) fn end_view(&self) {
        self.leave(VIEWS);
    }

    #[inline]
    fn enter(&self, count: usize) -> bool {
        self.own(count).fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // Acquire, for nothing but the error that follows.
        let is_open = self.other(CLOSED).load(Ordering::Acquire) == 0;
        if !is_open {
            self.leave(count);
        }
        is_open
    }

    #[inline]
    fn leave(&self, count: usize) {
        // Release: what was written is there.
        self.own(count).fetch_sub(1, Ordering::Release);
    }

    /// Whether the other end has taken its memory back.
    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        self.other(CLOSED).load(Ordering::Acquire) != 0
    }

    /// Takes this end's memory back: the other one begins neither to write nor a view from now on.
    pub(crate) fn close(&self) {
        self.own(CLOSED).store(1, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Whether the other end is writing to this one's memory.
    pub(crate) fn is_written(&self) -> bool {
        self.other(WRITERS).load(Ordering::Acquire) != 0
    }

    /// Whether the other end has views of this one's memory.
    pub(crate) fn is_viewed(&self) -> bool {
        self.other(VIEWS).load(Ordering::Acquire) != 0
    }
}

/// Memory that others may still have views of, with its ends on this side.
type Viewed = (Vec<(End, IsOver)>, Box<dyn Any + Send + Sync>);

static VIEWED: PerProcess<Mutex<Vec<Viewed>>> = PerProcess::new(Mutex::default);

/// Keeps memory that is closed to the other ends, each with whether its program is gone, as long as one of them has a view of
/// it: until the first call of this or of [`let_go`] after that.
pub(crate) fn keep_while_viewed(ends: Vec<(End, IsOver)>, memory: Box<dyn Any + Send + Sync>) {
    VIEWED.lock().push((ends, memory));
    let_go();
}

/// Lets go of the memory that no other end has a view of any more.
pub(crate) fn let_go() {
    let mut viewed = VIEWED.lock();
    let free: Vec<_> = viewed
        .extract_if(.., |(ends, _)| {
            !ends
                .iter()
                .any(|(end, is_gone)| end.is_viewed() && !is_gone())
        })
        .collect();
    drop(viewed);
    // Without the lock: it is foreign code.
    drop(free);
}

/// Waits until none of the other ends has this one's memory mapped, for a while. It is kept for one that has it for longer.
pub(crate) fn await_unmapping<'a>(ends: impl Iterator<Item = (&'a End, &'a IsOver)>) {
    let until = Instant::now() + WRITERS_PATIENCE;
    for (end, is_gone) in ends {
        while end.is_viewed() && !is_gone() && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// Two ends, under every interleaving and every weak ordering that loom can produce.
#[cfg(all(test, loom))]
mod model {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::sync::model::{AtomicU32, Bell, explore};

    /// The words that are used, and the memory of the higher end.
    struct Host {
        words: [AtomicU32; 10],
        memory: UnsafeCell<u32>,
    }

    // SAFETY: that the memory is shared rightly is what is tested; loom reports it if it is not.
    unsafe impl Sync for Host {}

    impl Words for Arc<Host> {
        type Word = AtomicU32;

        fn at(&self, index: usize) -> &AtomicU32 {
            let word = match index % END {
                SIGNALS => 0,
                ASLEEP => 1,
                WRITERS => 2,
                VIEWS => 3,
                _ => 4,
            };
            &self.words[index / END * 5 + word]
        }
    }

    fn ends() -> (End<Arc<Host>>, End<Arc<Host>>, Arc<Host>) {
        let host = Arc::new(Host {
            words: std::array::from_fn(|_| AtomicU32::new(0)),
            memory: UnsafeCell::new(0),
        });
        let end = |is_lower| End::new(Arc::clone(&host), is_lower);
        (end(true), end(false), Arc::clone(&host))
    }

    #[test]
    fn loom_a_sleeper_is_woken_and_finds_the_memory_written() {
        explore(None, || {
            let (writer, sleeper, host) = ends();
            let bell = Bell::new();
            let (memory, rung) = (Arc::clone(&host), bell.clone());
            let thread = thread::spawn(move || {
                assert!(writer.begin_writing());
                // SAFETY: see `Host`.
                memory.memory.with_mut(|memory| unsafe { *memory = 7 });
                writer.end_writing();
                if writer.signal() {
                    rung.ring();
                }
            });
            if !sleeper.is_signalled(0) {
                sleeper.arm();
                if !sleeper.is_signalled(0) || !sleeper.disarm() {
                    bell.sleep();
                }
            }
            assert!(sleeper.is_signalled(0) && !sleeper.is_signalled(1));
            // SAFETY: as above.
            assert_eq!(host.memory.with(|memory| unsafe { *memory }), 7);
            thread.join().unwrap();
        });
    }

    #[test]
    fn loom_no_end_writes_to_memory_whose_owner_has_taken_it_back() {
        explore(None, || {
            let (writer, owner, host) = ends();
            let memory = Arc::clone(&host);
            let thread = thread::spawn(move || {
                if writer.begin_writing() {
                    // SAFETY: see `Host`.
                    memory.memory.with_mut(|memory| unsafe { *memory = 7 });
                    writer.end_writing();
                }
            });
            owner.close();
            while owner.is_written() {
                thread::yield_now();
            }
            // SAFETY: as above.
            host.memory.with_mut(|memory| unsafe { *memory = 1 });
            thread.join().unwrap();
        });
    }
}
