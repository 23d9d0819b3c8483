//! An emulated CUDA driver: a `libcuda.so` for tests on machines without a GPU.
//!
//! The README says what is emulated and which settings there are. From the bottom up:
//!
//! - [`abi`] and [`Status`]: the driver's types and result codes.
//! - `settings`, `faults`: what the environment asks for.
//! - `handles`, `point`: numbers for objects, and places in streams one can wait for.
//! - `context`, `memory`: devices, and what lies at which address.
//! - `operation`, `copy`, `memory_operations`, `module`: what streams do.
//! - `stream`, `event`, `capture`, `graph`: in which order.
//! - `call`, `entry`, `statistics`: the exported functions, what happens around each, and what is left at the end.

pub mod abi;
mod call;
mod capture;
mod context;
mod copy;
pub mod entry;
mod event;
mod faults;
mod graph;
mod handles;
mod memory;
mod memory_operations;
mod module;
mod operation;
mod point;
mod settings;
mod statistics;
mod status;
mod stream;

pub use statistics::cuEmulatorStatistics;
pub use status::Status;
