//! Runs operations: plans over links, messages to their receives, one group beside another.
//!
//! A [`Group`] holds everything of one communicator behind one lock. Whoever holds the lock may *step* the group:
//! move every byte that can be moved now. Three parties do: a caller that submits an operation, once; a caller
//! that waits, again and again until its operation has ended (it *leads* the group; later waiters follow it and
//! one of them takes over when it leaves); and the process's progress thread, for groups that have operations
//! under way and nobody leading. No step blocks, so groups never block each other.

mod at_once;
mod beneath;
mod calibrate;
mod company;
mod completions;
mod consent;
mod defects;
mod entrance;
mod estimate;
mod exchange;
mod executor;
mod forming;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod group;
mod links;
mod matching;
mod pairs;
mod positions;
mod progress;
mod questions;
mod request;
mod sleep;
mod staff;
mod stage;
mod step;
mod submit;
mod task;
mod traffic;
mod wait;
mod wards;
mod wire;
mod work;

pub(crate) use beneath::Identity;
pub(crate) use exchange::{Inbound, Outbound};
pub(crate) use group::Group;
pub use request::{Request, Sizes};
pub use staff::wait_for_threads;
pub(crate) use wire::Fingerprint;
pub use work::Completion;
pub(crate) use work::WorkState;
