//! The drivers of a group: callers that wait, and the process's threads for what no caller waits for. Here are the threads and
//! the sleep; all else in the engine is moved by them, and asks its group's clock.
//!
//! - `blocking`, `messages`: calls that end in the calling thread, after a few looks. `lead`: a caller that waits for longer.
//! - `progress`: the thread that drives the rest. `driven`: a group as the thread sees it. `handover`: how it gets groups.
//!   `idle_groups`: the groups that it looks at now and then.
//! - `completions`: threads that call back. `threads`: when all of these are there.
//! - `backoff` and `contention`: when to spin, to yield and to sleep.
//!
//! The parts that crossbeam has for this were looked at, and do not fit:
//!
//! - Its `Parker` sleeps on a condition variable. A [`backoff::Parker`] sleeps in epoll, on the sockets, doorbells, pidfds
//!   and signs of life of peers, which wake it up as well as other threads do.
//! - Its `Backoff` spins up to a fixed number of times and then yields. How long spinning pays depends on whether a rank
//!   has a core to itself, and yielding beside a program that computes costs a time slice, so [`backoff::Backoff`] learns both.
//! - Its `CachePadded` pads by what this processor wants. Words that two processes share have one layout for all builds,
//!   which `transport/shm/segment.rs` fixes at 128 bytes.
//! - A channel for [`completions`] would not say whether one of them has been running for long while others wait behind
//!   it, so their queue lies under the lock that knows.

pub(crate) mod backoff;
pub(crate) mod blocking;
pub(crate) mod completions;
pub(crate) mod contention;
mod driven;
pub(crate) mod handover;
pub(crate) mod idle_groups;
pub(crate) mod lead;
pub(crate) mod messages;
pub(crate) mod progress;
pub(crate) mod threads;
