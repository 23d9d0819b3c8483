//! A group from its beginning to its end: how it forms, takes operations, is driven, and fails.

pub(crate) mod blocking;
pub(crate) mod bootstrap;
pub(crate) mod deadlock;
pub(crate) mod drive;
mod driven;
pub(crate) mod end;
pub(crate) mod estimate;
pub(crate) mod for_devices;
#[cfg(test)]
mod hostile;
pub(crate) mod lead;
pub(crate) mod liveness;
pub(crate) mod local_groups;
pub(crate) mod opening;
pub(crate) mod panics;
pub(crate) mod strays;
pub(crate) mod submit;
