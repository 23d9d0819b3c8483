//! Device memory: the CUDA driver as safe objects, and what collectives on device memory are made of.
//!
//! - [`driver`] wraps the calls of the driver library, which is looked for when first needed: without one, everything
//!   else of unisono works, and [`driver::Driver::load`] says what to do.
//! - [`kernels`] launches the embedded kernels: n-way reductions, scaling, copies of many pieces.
//! - [`flags`] are the binary semaphores by which the streams of two ranks of a host meet: words in a page of host
//!   memory that both have mapped and registered, written and awaited by memory operations of the streams. No kernel
//!   ever waits.
//! - [`window`] is device memory that the other ranks of the host have mapped.
//!
//! Everything here only enqueues, unless its documentation says otherwise. Addresses of device memory are numbers
//! (`u64`) that nothing here dereferences: the driver does, when the stream comes to it. Those that belong to a caller's
//! buffers come from a [`Memory`](crate::buffer::Memory) and a stream from a
//! [`DeviceStream`](crate::types::DeviceStream), for both of which whoever made the request has vouched (the doors'
//! unsafe calls say so); all other addresses come from objects of this module.

pub mod driver;
pub mod flags;
pub mod kernels;
pub mod window;
