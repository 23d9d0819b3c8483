//! Runs operations: plans over links, messages to their receives, one group beside another.
//!
//! A [`Group`] holds everything of one communicator behind one lock. Whoever holds the lock may *step* the group:
//! move every byte that can be moved now. Three parties do: a caller that submits an operation, once; a caller
//! that waits, again and again until its operation has ended (it *leads* the group; later waiters follow it and
//! one of them takes over when it leaves); and the process's progress thread, for groups that have operations
//! under way and nobody leading. No step blocks, so groups never block each other.

mod calibrate;
mod collective;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod group;
mod links;
mod message;
mod reports;
mod state;
mod threads;
mod wait;
mod work;

pub(crate) use collective::header::Fingerprint;
pub(crate) use collective::plan_key::PlanKey;
pub use collective::request::{Request, Sizes};
pub(crate) use group::for_devices::Identity;
pub(crate) use message::blocking::{Inbound, Outbound};
pub(crate) use state::Group;
pub use threads::wait_for_threads;
pub(crate) use work::WorkState;
pub use work::{Completion, PointToPoint};
