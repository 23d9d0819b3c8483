//! How a thread waits, and the threads that work for those that do not: progress, completions.

pub(crate) mod backoff;
pub(crate) mod completions;
pub(crate) mod contention;
pub(crate) mod handover;
pub(crate) mod idle_groups;
pub(crate) mod progress;
