//! Device memory: the CUDA driver as safe objects, and what collectives on device memory are made of.
//!
//! - [`driver`] wraps the calls of the driver library, which is looked for when first needed: without one, everything
//!   else of unisono works, and [`driver::Driver::load`] says what to do.
//! - [`kernels`] launches the embedded kernels: n-way reductions, scaling, copies of many pieces.
//! - [`flags`] are the binary semaphores by which the streams of two ranks of a host meet: words in a page of host
//!   memory that both have mapped and registered, written and awaited by memory operations of the streams. No kernel
//!   ever waits.
//! - [`window`] is device memory that the other ranks of the host have mapped, and [`heap`] such memory for users' buffers.
//! - [`span`] is memory of users' own, wherever it was allocated, that processes of the host map.
//! - [`depot`] is such memory for messages, and [`lane`] a part of it for those in graphs.
//!
//! **Calls that may wait.** A stream here may wait for a peer, and a peer for what this host does next. Some calls of the
//! driver wait, or may wait, until the whole context is idle: to allocate, register and map memory and to load kernels (may),
//! to free, unregister and unmap it (do). (`tools/gpu/probe.py` asks; on an H200 with driver 580, to load kernels waits as
//! well, and to allocate and to register does not.) A host that makes such a call is held up until all that is in the context's
//! streams has been done. Whether that ends depends on which waits for which:
//!
//! - With one rank in a process, and groups that all ranks use in the same order, it ends: of all operations that have not
//!   ended, take the first in that order. A rank that has not enqueued it waits only for earlier ones, which have
//!   ended, and so goes on and enqueues it.
//! - Where ranks use groups in different orders, or share a process and so a context (one rank's call then waits for
//!   another rank's stream, which may wait for the first rank), it may not.
//!
//! So what can be had in advance is, when the first group of the process on a device forms, and what has been had is kept as
//! long as there is a group: registered memory ([`driver::Pinned`], [`driver::Registered`]), the memory of windows
//! ([`window`]), kernels ([`kernels`]). Three cases are left: forming a group may wait for all that is under way (ranks form
//! their groups in the same order); a type's kernels are loaded when first used, if they are not common; and when a group goes,
//! the peers' windows are unmapped at once, because their owners wait for that. No stream and no call waits for the thread that
//! does it; other threads could be held up only in a driver that keeps its locks while it waits. Room for messages is made
//! while no stream of the process waits for a peer, and calls wait until it is made; where it runs out beside streams that
//! wait, messages go in pieces, and only where those have no place memory is registered all the same.
//!
//! All calls that set something up are made in relaxed capture mode: they are no part of what some thread may be
//! capturing, and would otherwise be refused and spoil it.
//!
//! Everything here only enqueues, unless its documentation says otherwise. Addresses of device memory are numbers (`u64`) that
//! nothing here dereferences: the driver does, when the stream comes to it. The addresses of a caller's buffers come from a
//! [`Memory`](crate::buffer::Memory) and a stream from a [`DeviceStream`](crate::types::DeviceStream); the maker of the request
//! has vouched for both (the doors' unsafe calls say so). All other addresses come from objects of this module.

mod announcements;
pub(crate) mod depot;
pub mod driver;
pub mod flags;
pub mod heap;
pub mod kernels;
pub(crate) mod lane;
mod loaded;
pub(crate) mod mappings;
mod room;
pub mod span;
pub mod telling;
pub mod window;
