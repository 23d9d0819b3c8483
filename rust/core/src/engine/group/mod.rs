//! A group from its beginning to its end: how it forms, takes operations, moves, and fails.

pub(crate) mod bootstrap;
pub(crate) mod deadlock;
pub(crate) mod end;
pub(crate) mod estimate;
pub(crate) mod for_devices;
mod for_windows;
#[cfg(test)]
mod hostile;
pub(crate) mod liveness;
pub(crate) mod local_groups;
pub(crate) mod mending;
mod monitored;
pub(crate) mod opening;
pub(crate) mod panics;
pub(crate) mod pricing;
pub(crate) mod status;
pub(crate) mod step;
pub(crate) mod strays;
pub(crate) mod submit;
