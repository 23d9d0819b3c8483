//! Runs operations: plans over links, messages to their receives, one group beside another.
//!
//! A [`Group`] holds everything of one communicator behind one lock. The thread that holds the lock may *step* the group:
//! move every byte that can be moved now. Three kinds of threads do: a caller that submits an operation, once; a caller
//! that waits, again and again until its operation has ended (it *leads* the group; later waiters follow it and one of
//! them takes over when it leaves); and the process's progress thread, for groups that have operations under way and no
//! leader. No step blocks, so groups never block each other.
//!
//! A collective goes this way, and the files are in its order:
//!
//! ```text
//! request ── submit ──> plan (crate::plan) ── run ──> transfer ──> link (crate::transport)
//!               └─ or, on one host, if all ranks agree: shared ──> memory of the host
//! ```
//!
//! - `state`: what a group holds, how it fails and how it closes.
//! - `group/`: `bootstrap` (forming a group, splitting it) and `pricing`, `submit` (from a request to a run), `step` (a
//!   step, and the slower looks around), `deadlock`, `liveness` and `strays` (waits that cannot end), `end`, `estimate`,
//!   `local_groups`, and `for_devices` and `for_windows`, which `crate::device` and `crate::window` use.
//! - `collective/`: `request`, `header` (the fingerprint that comparing finds mismatches by), `plan_key` and `plan_cache`,
//!   `run` (one plan under way), `transfer` (the bytes of one step), `bounce` (a copy in the heap of what several peers
//!   read), `pair_counts` (exchanges between two ranks alone), and `shared/` (windows, the reduction in place, and the
//!   agreement on them).
//! - `message/`: `frame`, `matching` (sends and receives, posted and unexpected).
//! - `membership/`: the agreement of the ranks that are left of a group.
//! - `drive/`: who moves a group: callers that wait, the progress thread, completions; and how they wait.
//! - `members`: the ranks of a group, as errors name them. `links`: the links of a group, opened when first used. `calibrate`:
//!   the costs of this machine. `work`: an operation as its caller sees it. `reports`: the last operations, for errors.
//!   `waits`: for whom this rank has waited. `timeline`: the operations as the trace of the process has them. `mask`: groups
//!   whose ranks keep their numbers where some are gone.
//! - `clock`: the time, which the engine asks its group for. `world`: all ranks of a group in one thread, on a clock of their
//!   own, from a seed.

mod calibrate;
mod clock;
mod collective;
mod drive;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod group;
mod links;
mod mailbox;
mod mask;
mod members;
pub(crate) mod membership;
mod message;
mod reports;
mod state;
mod timeline;
mod traffic;
mod waits;
mod work;
#[cfg(any(test, feature = "simulate"))]
mod world;

pub(crate) use collective::header::Fingerprint;
pub(crate) use collective::plan_key::PlanKey;
pub use collective::request::{Request, Sizes};
pub(crate) use drive::lead::interrupted;
pub(crate) use drive::messages::{Inbound, Outbound};
pub(crate) use drive::progress::Driven;
pub use drive::threads::wait_for_threads;
pub(crate) use group::for_devices::GroupId;
pub(crate) use group::{bootstrap, pricing};
pub(crate) use mask::Mask;
pub(crate) use message::frame::NOTE;
pub(crate) use state::Group;
pub(crate) use waits::{OfWindow, OnGroup};
pub(crate) use work::WorkState;
pub use work::{Completion, PointToPoint, Received};
#[cfg(any(test, feature = "simulate"))]
pub use world::simulate;
