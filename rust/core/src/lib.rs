//! unisono: collective communication between processes.

pub mod error;
pub mod plan;
pub mod rendezvous;
pub mod transport;
pub mod types;
