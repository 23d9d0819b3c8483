//! unisono: collective communication between processes.
//!
//! A [`Communicator`] is a group of ranks. Its collectives move and reduce buffers between them, through shared memory inside a
//! host and over TCP between hosts. These are the layers; each uses only those before it in this list (`tests/rust/layers.rs`
//! reads the list and compares):
//!
//! - [`unisono_plan`]: an algorithm is data. A pure function turns the shape of a request into the list of steps of one rank,
//!   which `plan::check` proves right without a socket. A crate of its own, which this one has as [`plan`].
//! - [`unisono_reduce`]: the arithmetic, operator by type, in SIMD and as a scalar reference. Likewise.
//! - [`types`], [`buffer`], [`error`], [`config`]: the vocabulary. `buffer` is the only place where a pointer becomes a
//!   slice; `config` is the one table of settings.
//! - `locks`, `sync`, [`fence`], `fork`, `users`, [`interrupts`], `threads`, `processors`, `descriptors`, `rarely`: locks, and
//!   the words that threads share, with loom's in tests; the error for a panic, the runtime of a forked child, the user of this
//!   process, signals in a long wait, the threads that the library has started, where they may run, how many descriptors there
//!   are, and how often a line is logged.
//! - [`heap`]: memory that peers on the same host work on in place.
//! - [`reduce`]: the arithmetic, and threads that share long passes of it.
//! - [`transport`]: a `Link` is one ordered reliable stream between two ranks; shared memory, TCP, in-process. Its
//!   `handshake` proves that a peer is a member. And what device memory needs: the CUDA driver, found at run time, behind
//!   safe objects.
//! - [`rendezvous`]: how the ranks of a job find each other (stores, launchers) and learn each other's keys.
//! - `trace`: the operations of this process in time, in a file that Perfetto opens.
//! - `engine`: runs plans over links. One progress thread per process; a blocking call drives its own operation.
//! - `device`: operations on device memory, enqueued on the caller's streams.
//! - [`cuda`]: on which device memory lies, for a caller that has an address alone.
//! - [`communicator`], `slices`, `pending`: the group and its collectives, which the doors (torch, Python, C) call.
//! - [`one_sided`]: reading and writing memory that a peer has registered, over groups of two.
//! - [`window`]: memory that each rank of a group exposes to the others.
//!
//! Where it is decided:
//!
//! * The algorithm for a call: `select.rs` of `unisono-plan`, by the costs in its `cost/`; the uses and the cost of each
//!   algorithm stand beside its plans, the table of all in its `lib.rs`.
//! * Whether a rank spins, yields or sleeps: `engine/drive/backoff.rs`, by the findings of `engine/drive/contention.rs`.
//! * Whether the ranks of a host go through shared memory: they agree on it in `engine/collective/shared/`.
//! * The thread that drives an operation: `engine/drive/blocking.rs` and `lead.rs` (callers), `engine/drive/progress.rs` (the
//!   progress thread).
//! * The rights of a peer on this host to my memory: `transport/neighbour.rs` (lend, share), `transport/shm/loans.rs`; why
//!   reading its memory is sound: `heap/foreign.rs`.
//! * The transport to a peer: the table in `transport/endpoint/transports/mod.rs`.
//! * The first messages on a connection: `transport/handshake/`, by `transport/endpoint/attempt.rs` and `guest.rs`, which
//!   `accept.rs` drives.
//! * How further groups of the same processes open their links: by one message each to a process that has proved itself, in
//!   `transport/endpoint/acquaintance.rs`.
//! * The header before the bytes of a message: `engine/collective/header.rs`, `engine/message/frame.rs`.
//! * The end of a group when a rank dies: noticed in `engine/group/step.rs` (`look_around`) and `liveness.rs`, ended in
//!   `engine/group/end.rs` (`fail_with`).
//! * Which ranks go on when others are gone: `engine/membership/agreement.rs`, carried by `communicator/shrink.rs`.
//! * How ranks that wait for each other find out: `engine/group/deadlock.rs`.
//! * The times of the operations in a trace: taken in `engine/timeline.rs`, written in `trace/`.
//! * The answer to `unisono status`: `transport/endpoint/status.rs`, of each group `engine/group/status.rs`.
//!
//! `UNISONO_LOG=debug` prints these choices as they are made.
//!
//! The paved path:
//!
//! ```no_run
//! use unisono::rendezvous::{MeetingPlace, launcher};
//! use unisono::{Communicator, config::Config};
//!
//! let config = Config::from_env()?;
//! let launch = launcher::detect()?;
//! let seat = (launch.rank, launch.world);
//! // Rank 0 serves the store until all have joined.
//! let comm = Communicator::meet(MeetingPlace::Launch(launch), seat, config)?;
//! let mut gradients = vec![1.0_f32; 1024];
//! comm.all_reduce(&mut gradients, unisono::types::ReduceOp::Sum)?;
//! # Ok::<(), unisono::error::Error>(())
//! ```
//!
//! With the feature `async` the collectives and messages are there as futures, too, which own their vectors meanwhile and go
//! with any executor:
//!
//! ```
//! # #[cfg(feature = "async")]
//! async fn step(comm: &unisono::Communicator, gradients: Vec<f32>) -> unisono::error::Result<Vec<f32>> {
//!     let sum = comm.all_reduce_async(gradients, unisono::types::ReduceOp::Sum);
//!     // The sum is under way meanwhile.
//!     comm.barrier_async().await?;
//!     sum.await
//! }
//! ```
//!
//! With the feature `simulate` jobs that are not run show their calls in time, and the effect of a fault (`simulate`).

// The example of the crate's page is compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod buffer;
pub mod communicator;
pub mod config;
pub mod cuda;
mod descriptors;
mod device;
mod engine;
pub mod error;
pub mod fence;
mod fork;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod heap;
pub mod interrupts;
#[doc(hidden)]
pub mod locks;
pub mod one_sided;
#[cfg(feature = "async")]
mod pending;
mod processors;
mod rarely;
pub mod reduce;
pub mod rendezvous;
#[cfg(test)]
mod skips;
mod slices;
mod sync;
#[cfg(test)]
mod temporary;
mod threads;
mod trace;
pub mod transport;
pub mod types;
mod users;
pub mod window;

pub use communicator::{Candidate, Communicator, Work};
pub use engine::pricing::costs_here;
#[cfg(any(test, feature = "simulate"))]
pub use engine::simulate;
pub use engine::{Completion, PointToPoint, Received, Request, Sizes, wait_for_threads};
pub use fork::PerProcess;
#[cfg(feature = "async")]
pub use pending::Pending;
#[doc(inline)]
pub use unisono_plan as plan;
