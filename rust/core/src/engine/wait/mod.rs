//! How a thread waits, and the threads that work for those that do not: progress, completions.
//!
//! What crossbeam has for this was looked at, and does not fit:
//!
//! - Its `Parker` sleeps on a condition variable. A [`backoff::Parker`] sleeps in epoll, on the sockets, doorbells, pidfds and signs of life of
//!   peers, which wake it up as well as other threads do.
//! - Its `Backoff` spins up to a fixed number of times and then yields. How long spinning pays depends on whether a rank
//!   has a core to itself, and yielding beside a program that computes costs a time slice, so [`backoff::Backoff`] learns both.
//! - Its `CachePadded` pads by what this processor wants. Words that two processes share have one layout for all builds,
//!   which `transport/shm/segment.rs` fixes at 128 bytes.
//! - A channel for [`completions`] would not say whether one of them has been running for long while others wait behind
//!   it, so their queue lies under the lock that knows.

pub(crate) mod backoff;
pub(crate) mod completions;
pub(crate) mod contention;
pub(crate) mod handover;
pub(crate) mod idle_groups;
pub(crate) mod progress;
