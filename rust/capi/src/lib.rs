//! libunisono: the C ABI of the runtime.
//!
//! `include/unisono.h` is the contract and is written by hand; this is what stands behind it. `tests/c/abi.rs` compares
//! the two, both ways. From a call to the core:
//!
//! - [`fence`]: every function is a body behind a fence, which turns its failure into a status and the thread's last
//!   error, and a panic into `Internal`;
//! - [`handles`]: what C holds are numbers that look like pointers, which are looked up and never dereferenced, so that
//!   a handle that was given back is recognised;
//! - [`joined`]: the communicators among them, and closing those that are left at the end of the process;
//! - [`types`]: what C passes, checked: numbers of enumerations, options, addresses with counts; [`sized`]: structs that
//!   begin with their size;
//! - [`run`]: an operation, blocking in the calling thread, or started;
//! - and a module for each part of the header.
//!
//! The header says once what a caller promises: its pointers are valid for what the function does with them. NULL, and
//! pointers that can be seen to be wrong otherwise, are refused.
#![expect(
    missing_docs,
    reason = "include/unisono.h documents what is public here"
)]
#![expect(
    clippy::missing_safety_doc,
    reason = "include/unisono.h says what callers promise"
)]

pub mod candidate;
pub mod collectives;
pub mod communicator;
pub mod config;
pub mod error;
mod fence;
pub mod group;
mod handles;
mod joined;
pub mod log;
pub mod memory;
pub mod messages;
pub mod rooted;
mod run;
pub mod sized;
pub mod store;
pub mod types;
pub mod version;
pub mod window;
pub mod work;
